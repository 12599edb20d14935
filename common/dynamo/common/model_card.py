"""The description of a model that a worker serves. Sent as JSON inside the registration."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import TokenId
from dynamo.common.names import check_name

TAKES_TEXT = "text"
"""Stands for the tokenizer of a model whose engine has its own, and exchanges text."""

# What readers accept, so that no instance can make others compute with blocks of less than nothing, or sizes that no array has.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_BlockTokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Datatype: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(BOOL|BYTES|BF16|FP(16|32|64)|U?INT(8|16|32|64))\Z")]
# What gateways are told as it is, of requests of clients: nothing that makes another request of them.
_Address: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^([0-9.]{7,15}|\[[0-9A-Za-z:.%_-]{2,80}\]):[0-9]{1,5}\Z")]
RANK_HEADER = "x-data-parallel-rank"
_HeaderName: TypeAlias = Annotated[str, msgspec.Meta(pattern=rf"^{RANK_HEADER}\Z")]
_HeaderValue: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}\Z")]
_Dimension: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]


class ModelKind(StrEnum):
    """The kind of requests a model takes."""

    TENSOR = "tensor"
    LLM = "llm"
    EMBEDDING = "embedding"


class Role(StrEnum):
    """The phase of generation that an instance runs."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A declared input or output. `shape` includes the batch dimension when the model batches; -1 is any size."""

    name: str
    datatype: _Datatype
    """A KServe datatype: BOOL, UINT8…UINT64, INT8…INT64, FP16, BF16, FP32, FP64 or BYTES."""
    shape: tuple[_Dimension, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()
    """Class names of an output, for the classification extension."""


class AdapterReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance says about a LoRA adapter that it has, or should have."""

    name: str
    path: str = ""
    load_id: str = ""
    """`load_id` of the `DesiredAdapter` that the instance last acted on; empty: it has had the adapter from its start."""
    error: str = ""
    """Why the adapter of this `load_id` is not loaded. One that had its name before still serves."""
    code: str = ""
    """Code of the error."""


class LlmInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What frontends need to turn text into tokens and back, and routers to choose an instance."""

    context_length: _Count
    """0 if it is not known, which only a model that takes text may leave open."""
    tokenizer: str
    """Object-store key of the tokenizer file (`tokenizer.json`), its sha256; or TAKES_TEXT."""
    chat_template: str = ""
    """Object-store key of the Jinja chat template; empty if the model has none."""
    bos_token: str = ""
    eos_token: str = ""
    eos_token_ids: tuple[TokenId, ...] = ()
    add_bos: bool = False
    block_size: _BlockTokens = 0
    """Tokens in a KV block; 0 if the engine publishes no KV events."""
    total_blocks: _Count = 0
    max_num_seqs: _Count = 0
    max_batched_tokens: _Count = 0
    data_parallel_size: _Count = 1
    tool_parser: str = ""
    reasoning_parser: str = ""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that requests may name as models of their own."""
    adapter_reports: tuple[AdapterReport, ...] = ()
    loads_adapters: bool = False
    """Whether the instance loads and unloads LoRA adapters while it serves."""
    modalities: tuple[str, ...] = ()
    """Content parts besides text that the engine takes: `image`, `audio`."""
    image_token: TokenId | None = None
    """The token that stands for an image in a prompt; None: no single one."""
    takes_cache_salt: bool = False
    """Whether requests with different salts (`GenerateRequest.cache_salt`) share no cached prompts there."""
    renders_media: bool = False
    """Whether the engine, of a model that takes tokens, renders conversations with images: see `GenerateRequest.conversation`."""

    @property
    def takes_text(self) -> bool:
        """Whether the engine takes prompts and conversations as text, and generates text; see `TextPrompt`."""
        return self.tokenizer == TAKES_TEXT


class HttpEndpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the engine server of an instance serves HTTP by itself, so that a gateway may send it requests."""

    address: _Address
    """`IP:port`, as gateways reach it."""
    model: str
    """The server's own name of the model."""
    headers: dict[_HeaderName, _HeaderValue] = {}
    """Headers without which a request would reach another instance at the same address."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model as one instance serves it."""

    name: str
    kind: ModelKind
    role: Role = Role.AGGREGATED
    versions: tuple[str, ...] = ("1",)
    """Served versions, oldest first; a request without a version gets the last."""
    platform: str = "dynamo"
    backend: str = "dynamo"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    max_batch_size: Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)] = 0
    """0: the model does not batch and its shapes have no batch dimension."""
    has_sequences: bool = False
    """All requests of one sequence have to go to one instance."""
    decoupled: bool = False
    """True: a request may get none, one or several responses, over ModelStreamInfer only."""
    model_config: bytes = b""
    """A serialized `inference.ModelConfig`, which ModelConfig responses return unchanged."""
    llm: LlmInfo | None = None
    aliases: tuple[str, ...] = ()
    """Other names under which requests may name this model."""
    labels: dict[str, str] = {}
    """Free key-value pairs, shown in metadata as `properties`."""
    http: HttpEndpoint | None = None
    """None: requests reach the instance by NATS alone."""

    def adapter_report(self, name: str) -> AdapterReport | None:
        """Return what the instance says about a LoRA adapter; None: nothing."""
        return None if self.llm is None else next((report for report in self.llm.adapter_reports if report.name == name), None)

    def check(self) -> ModelCard:
        """Return the card itself. Raises InvalidRequest if it contradicts itself."""
        for name in (self.name, *self.aliases):
            check_name(name)
        for specs in (self.inputs, self.outputs):
            names = [spec.name for spec in specs]
            if len(set(names)) != len(names):
                raise InvalidRequest(f"model '{self.name}' declares two tensors of the same name")
        if not self.versions or len(set(self.versions)) != len(self.versions):
            raise InvalidRequest(f"model '{self.name}' declares no version, or the same one twice")
        if self.kind is ModelKind.LLM and self.llm is None:
            raise InvalidRequest(f"model '{self.name}' is a language model without `llm` details")
        return self
