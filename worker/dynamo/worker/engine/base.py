"""What the serving loop requires of an engine. Every other module in this folder is a part of one engine.

An engine knows nothing of NATS, etcd or frontends. It is started once, serves many requests at once on one event loop, and
must keep that loop free: blocking work runs in threads or processes of the engine's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Protocol, runtime_checkable

import msgspec

from dynamo.common.errors import EngineError
from dynamo.common.generation import Delta, GenerateRequest, Summary
from dynamo.common.kv.events import NO_STEPS, KvState, StepTotals
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import ModelCard
from dynamo.common.process.lazy_event import LazyEvent
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.common.tensors.request import TensorRequest
from dynamo.protos.inference_pb2 import ModelInferResponse
from dynamo.worker.traces.trace import Trace

Buffer = bytes | bytearray | memoryview


class RequestTimings(msgspec.Struct):
    """How long the phases of one request took, in nanoseconds. An engine fills in what it measures; zero means not measured.

    The serving loop counts the remaining time as inference.
    """

    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    rows: int = 1
    """Inferences in the request: its first dimension if the model batches."""
    execution_rows: int = 0
    """Rows of the execution that this request is accounted for; 0 if another request of the same batch is, or none ran.

    An engine that never sets it executes each request alone: see `batched`.
    """
    batched: bool = False
    """Whether the engine sets `execution_rows` itself."""
    cache_hit_ns: int = 0
    """Finding the response in a cache; above 0 only if it was there, and then nothing was computed."""
    cache_miss_ns: int = 0
    """Not finding it there, and adding it; above 0 only if it was not there."""


def count_execution(batch: Sequence[tuple[RequestTimings, bool]], rows: int) -> None:
    """Have one request of a batch count as its execution of so many rows. Each comes with whether its caller still waits.

    It is one whose caller does, since the others are counted already.
    """
    leader = next((timings for timings, waits in batch if waits), batch[0][0])
    leader.execution_rows = rows
    for timings, _ in batch:
        timings.batched = True


@dataclass(frozen=True, slots=True)
class Caller:
    """A model that calls another model of the same worker."""

    model: str
    process: object = None
    """The process of it that does nothing else until the call has ended; None: there is none."""


class Context(msgspec.Struct):
    """One request as an engine sees it."""

    request_id: str
    deadline: float | None = None
    """Absolute time on the event loop's clock; None: no deadline."""
    headers: dict[str, str] = {}
    """W3C trace context and other headers from the frontend."""
    cancelled: LazyEvent = msgspec.field(default_factory=LazyEvent)
    """Set when the client left or the deadline passed. The iterator is closed as well; blocking code polls `is_cancelled`."""
    version: str = ""
    """The model version that serves the request: the requested one, or the newest. Tensor models only."""
    timings: RequestTimings = msgspec.field(default_factory=RequestTimings)
    trace: Trace | None = None
    """Trace of this request; until the request begins, trace of the request that it is a part of."""
    callers: tuple[Caller, ...] = ()
    """The models that wait for it, the outermost first; none of a request that came from a frontend."""

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()


@dataclass(slots=True)
class TensorResponse:
    """One response of a tensor model. Tensor data is kept beside the message so that it is not copied into it."""

    head: ModelInferResponse
    """Outputs (name, datatype, shape) and parameters. Typed `contents` are allowed when `raw_outputs` is empty."""
    raw_outputs: Sequence[Buffer] = ()
    """One buffer per output, in the order of `head.outputs`: little-endian, row-major, BYTES with length prefixes."""
    encoded: bytes = b""
    """`head`, serialized, of an engine that knows that `raw_outputs` agree with it. Such a head is not changed."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is at one moment."""

    waiting: int = 0
    running: int = 0
    active_blocks: int = 0
    total_blocks: int = 0
    queued_prefill_tokens: int = 0
    step_ms: float = 0.0
    totals: StepTotals = NO_STEPS
    """Sums over all steps so far, from engines that measure their steps."""


@runtime_checkable
class Engine(Protocol):
    """Generates tokens."""

    async def start(self) -> ModelCard:
        """Load the model and return when requests can be served. Called once."""
        ...

    def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        """Yield deltas as the model makes them and, last, one Summary. Closing the iterator aborts within one step.

        Raises InvalidRequest for a request that the model cannot take, EngineError when the engine fails.
        """
        ...

    def load(self) -> EngineLoad: ...

    async def close(self) -> None:
        """Free all resources. Called once, after the last request ended."""
        ...


@runtime_checkable
class TracksKv(Protocol):
    """An engine that knows which blocks its KV cache holds, so that routers can know too."""

    @property
    def kv(self) -> KvState:
        """The engine's own full copy, after `start()`. Only the publisher takes updates from it."""
        ...

    def on_step(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the event loop after each step, or batch of steps, that may have changed cache or load."""
        ...

    def load(self) -> EngineLoad: ...


@dataclass(slots=True)
class TierTotals:
    """What one tier of an engine's KV cache did since the start. Blocks are those of the engine's card."""

    hits: int = 0
    """Blocks of prompts that it had, and no faster tier."""
    misses: int = 0
    """Blocks of prompts that neither it had nor a faster tier."""
    read_bytes: int = 0
    """KV that was read from it for the GPU."""
    written_bytes: int = 0
    failed_reads: int = 0
    failed_writes: int = 0

    def __add__(self, other: TierTotals) -> TierTotals:
        return TierTotals(*map(add, astuple(self), astuple(other)))


@runtime_checkable
class HasTiers(Protocol):
    """An engine that keeps KV blocks beyond the memory in which it computes, and counts them."""

    def tiers(self) -> Mapping[Tier, TierTotals]:
        """Return what each tier did, the fastest first; after `start()`, always the same tiers."""
        ...


@runtime_checkable
class HasRanks(Protocol):
    """An engine with data-parallel ranks, each of which has a cache of its own and is served as an instance of its own."""

    def ranks(self) -> Sequence[Engine]:
        """Return an engine for each rank, itself for the first; none of them is started. Called once."""
        ...


@runtime_checkable
class MayFail(Protocol):
    """An engine that can end by itself, such as one with a process of its own."""

    async def failure(self) -> EngineError:
        """Return when the engine can serve nothing more, with the reason. The worker then drains and ends with this error."""
        ...


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can free its memory while it serves nothing. It gets no request between `sleep` and `wake`."""

    def check_sleep(self) -> None:
        """Raises Unsupported if the engine was started in a way that does not allow it."""
        ...

    async def sleep(self) -> None:
        """Return when the memory is free. Weights are kept elsewhere; the cache is dropped, which `kv` and `on_step` report.

        Iterators that were just closed may still be ending. Raises EngineError on failure; `wake` restores the engine then.
        """
        ...

    async def wake(self) -> None:
        """Return when requests can be served again. Does nothing if the engine is awake. Raises EngineError."""
        ...


@runtime_checkable
class LoadsAdapters(Protocol):
    """An engine of one model that loads and unloads LoRA adapters while it serves."""

    @property
    def max_adapters(self) -> int | None:
        """Adapters that the engine holds at once; None: it does not say."""
        ...

    def check_adapters(self) -> None:
        """Raises Unsupported if the engine was started in a way that does not allow it."""
        ...

    @property
    def reads_adapters_here(self) -> bool:
        """Whether it reads adapters from files of this machine, rather than a server from its own."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Return when requests can use the adapter, which replaces the one of its name. Nothing changes on failure.

        Raises NotFound if there is no adapter at `path`, EngineError if it cannot be loaded.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Free what the adapter takes. No new request uses it. Raises EngineError."""
        ...


@runtime_checkable
class HasFiles(Protocol):
    """An engine whose card names files of the object store, such as a tokenizer and a chat template."""

    def files(self) -> Sequence[bytes]:
        """Return the contents of those files, after `start()`; the card names each by its sha256 in hexadecimal.

        The worker puts them into the object store before it registers the model.
        """
        ...


@runtime_checkable
class TensorEngine(Protocol):
    """Maps tensors to tensors. One engine may serve several models."""

    async def start(self) -> Sequence[ModelCard]:
        """Load the models and return when requests can be served. Called once."""
        ...

    def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        """Yield one response, or any number of them if the model is decoupled.

        The frontend has checked the request against the card. The response needs outputs only: the serving loop fills in id,
        model name and version, filters requested outputs and converts contents to the form of the request. Raises InvalidRequest
        for a request that the model cannot take, EngineError when it fails.
        """
        ...

    async def close(self) -> None: ...


@runtime_checkable
class UsesSharedMemory(Protocol):
    """An engine that passes tensors in shared memory on to its own child processes."""

    def use_shared_memory(self, memory: SharedMemory) -> None:
        """Use the shared memory of the worker. Called before `start`, and only if the worker has shared memory."""
        ...


@runtime_checkable
class RespondsOnce(Protocol):
    """A tensor engine with a shorter way than `infer` to the response of a model that is not decoupled."""

    async def respond(self, request: TensorRequest, context: Context) -> TensorResponse:
        """Return the only response; otherwise as `infer`. A request that is left early is cancelled."""
        ...
