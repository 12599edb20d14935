"""A model on an engine server that runs elsewhere: with token ids on vLLM, SGLang or TensorRT-LLM, with text on any other.

The server schedules, batches and caches; its owners change nothing. Closing the connection aborts a request there. A server that
cannot be reached fails its requests as a lost instance does, so they continue elsewhere, and serves again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, NotFound, Unavailable, Unsupported
from dynamo.common.generation import Delta, GenerateRequest, Sampling, Stop, Summary, TextPrompt, pack_text, pack_tokens
from dynamo.common.http.client import HttpClient
from dynamo.common.kv.events import KvState
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import RANK_HEADER, TAKES_TEXT, AdapterReport, LlmInfo, ModelCard, ModelKind
from dynamo.common.process.background import running
from dynamo.worker.engine.base import Context, EngineLoad, TierTotals
from dynamo.worker.engine.open_requests import OpenRequests, empty_response
from dynamo.worker.engine.remote.adapters import ServerAdapters, SglangAdapters, VllmAdapters
from dynamo.worker.engine.remote.completions import TensorRtDialect, VllmDialect
from dynamo.worker.engine.remote.dialect import Dialect, RemoteKind
from dynamo.worker.engine.remote.errors import NotServed, read_failure
from dynamo.worker.engine.remote.gateway import GatewayAddress
from dynamo.worker.engine.remote.load import LoadFollower, Rank, ServerLoad
from dynamo.worker.engine.remote.models import ListedModel, fetch_models, when_ready
from dynamo.worker.engine.remote.sglang import SglangDialect
from dynamo.worker.engine.remote.text import REASONING_PARSER, TOOL_PARSER, TextDialect
from dynamo.worker.kv.vllm_subscriber import KvSource, following
from dynamo.worker.tokenizers.folder import TextFiles, read_folder

log = logging.getLogger(__name__)

T = TypeVar("T")

_HEALTH_S = 5.0
_KIND_BY_OWNER = {"vllm": RemoteKind.VLLM, "sglang": RemoteKind.SGLANG, "tensorrt_llm": RemoteKind.TENSORRT_LLM}
"""By `owned_by` of the models that a server lists."""
_DONE = b"[DONE]"
_GREETING = TextPrompt(messages=[{"role": "user", "content": "Hi"}])
_TRACE_HEADERS = ("traceparent", "tracestate")


class SglangModel(msgspec.Struct):
    """What SGLang says at /get_model_info."""

    tokenizer_path: str | None = None
    has_image_understanding: bool = False


class RemoteEngine:
    """Serves the model of one server."""

    def __init__(
        self,
        client: HttpClient,
        *,
        kind: RemoteKind | None = None,
        name: str = "",
        files: TextFiles | None = None,
        context_length: int | None = None,
        max_num_seqs: int | None = None,
        events: KvSource | None = None,
        rank: Rank | None = None,
        gateway: GatewayAddress | None = None,
    ) -> None:
        """`kind`: default, what the server says. `name` also chooses among several models of the server, by default its first.

        `files`: default, those of the folder that the server names. `max_num_seqs`: sequences that the server runs at once.
        `events`: where it publishes what its KV cache holds. `rank`: the data-parallel rank of a vLLM server that serves.
        `gateway`: where gateways reach the server; None: they do not.
        """
        self._rank = rank
        self._gateway = gateway
        self._client = client
        self._kind = kind
        self._name = name
        self._text = files
        self._context_length = context_length
        self._max_num_seqs = max_num_seqs
        self._model = ""
        """The server's name of the model."""
        self._dialect: Dialect
        self._is_closed = False
        self._events_source = events
        self._requests = OpenRequests()
        self._load = LoadFollower(client, self._requests, max_num_seqs, rank)
        self._adapters: dict[str, str] = {}
        """Paths of the LoRA adapters that were loaded at run time, by name."""
        self._callbacks: list[Callable[[], None]] = []
        self._stack = AsyncExitStack()
        self.kv = KvState()

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._name or self._model} at {self._client}, open={self._requests.choices}>"

    async def start(self) -> ModelCard:
        """Wait for the server, and have it generate one token. Raises InvalidRequest for a server that cannot be used."""
        models = await when_ready(partial(fetch_models, self._client))
        served = next((model for model in models if model.id == self._name), models[0])
        self._model = served.id
        self._name = self._name or served.name
        limits = [limit for limit in (served.context_length, self._context_length) if limit]
        kind = self._kind or self._detect_kind(served)
        if self._rank is not None and kind is not RemoteKind.VLLM:
            raise InvalidRequest(f"--remote-data-parallel-size is for servers of vLLM, and the one at {self._client} is none")
        if kind is RemoteKind.TEXT and self._events_source is not None:
            raise InvalidRequest("--remote-kv-events needs a server that takes token ids: its blocks are of tokens")
        if kind is RemoteKind.TEXT:
            info = self._text_info(served, min(limits, default=0))
            log.info("the server at %s gets text: %s", self._client, "--remote-kind" if self._kind else "it is of no other kind")
        else:
            if not limits:
                raise InvalidRequest(f"the server at {self._client} does not say its context length: give --context-length")
            info = await self._token_info(kind, served, min(limits))
        await when_ready(self._check)
        blocks = await self._follow()
        adapters = _adapters(models, served.id)
        headers = {} if self._rank is None else {RANK_HEADER: str(self._rank.number)}
        return ModelCard(
            name=self._name,
            kind=ModelKind.LLM,
            http=None if self._gateway is None else await self._gateway.endpoint(self._model, headers),
            backend=served.backend,
            llm=msgspec.structs.replace(
                info,
                max_num_seqs=self._max_num_seqs or 0,
                adapters=tuple(adapters),
                adapter_reports=tuple(AdapterReport(name=name, path=path) for name, path in adapters.items()),
                block_size=blocks.block_size if self._events_source is not None else 0,
                total_blocks=blocks.total_blocks,
            ),
        ).check()

    def _detect_kind(self, served: ListedModel) -> RemoteKind:
        """Return what the server speaks. One of no known kind gets token ids if their tokenizer is at hand, else text."""
        named = _KIND_BY_OWNER.get(served.owned_by)
        return named or (RemoteKind.VLLM if self._text is not None or _folder(served.root) is not None else RemoteKind.TEXT)

    def _text_info(self, served: ListedModel, context_length: int) -> LlmInfo:
        self._dialect = TextDialect(self._model)
        return LlmInfo(
            context_length=context_length,
            tokenizer=TAKES_TEXT,
            tool_parser=TOOL_PARSER,
            reasoning_parser=REASONING_PARSER,
            modalities=served.modalities,
        )

    async def _token_info(self, kind: RemoteKind, served: ListedModel, context_length: int) -> LlmInfo:
        said = await self._fetch_sglang_model() if kind is RemoteKind.SGLANG else SglangModel()
        text = self._text = self._text or self._read_files(said.tokenizer_path or served.root, served)
        eos = frozenset(text.eos_token_ids)
        takes_images = said.has_image_understanding
        renders_media = False
        match kind:
            case RemoteKind.SGLANG:
                self._dialect = SglangDialect(context_length, eos)
            case RemoteKind.TENSORRT_LLM:
                self._dialect = TensorRtDialect(self._model, context_length, eos)
            case _:
                self._dialect = VllmDialect(self._model, context_length, eos)
                takes_images = renders_media = text.image_token is not None
        return LlmInfo(
            context_length=context_length,
            tokenizer=sha256(text.tokenizer).hexdigest(),
            chat_template=sha256(text.chat_template).hexdigest() if text.chat_template else "",
            bos_token=text.bos_token,
            eos_token=text.eos_token,
            eos_token_ids=text.eos_token_ids,
            takes_cache_salt=kind is RemoteKind.VLLM,
            modalities=("image",) if takes_images else (),
            image_token=text.image_token if takes_images else None,
            renders_media=renders_media,
        )

    def files(self) -> Sequence[bytes]:
        return [file for file in (self._text.tokenizer, self._text.chat_template) if file] if self._text else []

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        if self._is_closed:
            raise Unavailable("the engine is closed")
        path, body = self._dialect.call(request)
        if request.stop.max_tokens == 0:
            for part in empty_response(request):
                yield part
            return
        reader = self._dialect.reader(request)
        with self._requests.opened(request) as opened:
            try:
                async with aclosing(self._events(path, body, context)) as arrivals:
                    async for events in arrivals:
                        opened.prefilled()
                        for event in events:
                            for delta in reader.read(event):
                                if delta.finish_reason is not None:
                                    opened.generated(delta)
                                yield delta
                if not reader.has_finished:
                    raise Unavailable(f"the server at {self._client} ended its response early")
                yield reader.summary()
            except (NotServed, InvalidRequest) as error:
                if request.adapter not in self._adapters or not self._adapter_calls().is_lost(error):
                    raise
                await self._restore(request.adapter)
                raise NotServed(str(error)) from error
            except EngineError as error:
                if await self._is_healthy():
                    raise
                raise Unavailable(f"the server at {self._client} is unhealthy: {error}") from error
            finally:
                self._changed()

    @property
    def max_adapters(self) -> int | None:
        return None

    @property
    def reads_adapters_here(self) -> bool:
        return False

    def check_adapters(self) -> None:
        self._adapter_calls()

    async def load_adapter(self, name: str, path: str) -> None:
        """Have the server load it. One that the server has already, from another worker or an earlier one, is taken over."""
        present = _adapters(await fetch_models(self._client), self._model)
        if present.get(name) != path or name in self._adapters:
            await self._adapter_calls().load(name, path, present.get(name))
        self._adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)
        try:
            await self._adapter_calls().unload(name)
        except NotFound:
            log.info("the server at %s had unloaded the LoRA adapter '%s' already", self._client, name)

    async def _restore(self, adapter: str) -> None:
        """Load an adapter once more that the server does not know any more, as after a restart: for the next requests."""
        try:
            await self._adapter_calls().load(adapter, self._adapters[adapter], None)
            log.info("the server at %s had lost the LoRA adapter '%s', and has it again", self._client, adapter)
        except DynamoError as error:
            log.error("the server at %s has lost the LoRA adapter '%s': %s", self._client, adapter, error)

    def _adapter_calls(self) -> ServerAdapters:
        """Return how the server changes adapters. Raises Unsupported if it does not."""
        match self._dialect:
            case VllmDialect():
                return VllmAdapters(self._client)
            case SglangDialect():
                return SglangAdapters(self._client)
            case _:
                raise Unsupported(f"the server at {self._client} loads no LoRA adapters: only those of vLLM and SGLang do")

    def load(self) -> EngineLoad:
        return self._load.load()

    def tiers(self) -> Mapping[Tier, TierTotals]:
        """Return what each tier of a vLLM server's cache did, as its metrics said at the last look; nothing of others."""
        return self._load.tiers.totals()

    def on_step(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def close(self) -> None:
        self._is_closed = True
        await self._stack.aclose()
        self._client.close()

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()

    async def _follow(self) -> ServerLoad:
        """Follow the server's load and KV events from now on; return what it says about its cache.

        Raises InvalidRequest for events of a server that does not say the size of its blocks.
        """
        load = await when_ready(self._load.fetch)
        source = self._events_source
        if source is not None and (load is None or not load.block_size):
            raise InvalidRequest(f"the server at {self._client} does not say the size of its KV blocks in its /metrics")
        async with AsyncExitStack() as stack:
            if load is None:
                log.info("the server at %s has no metrics that are known: only requests from here count as load", self._client)
            else:
                await stack.enter_async_context(running(self._load.follow(self._changed), "load of the engine server"))
            if source is not None:
                await stack.enter_async_context(following(source, self.kv, self._changed))
            self._stack = stack.pop_all()
        return load or ServerLoad()

    async def _events(self, path: str, body: bytes, context: Context) -> AsyncGenerator[Sequence[bytes], None]:
        """Yield the events of a stream as they arrive, up to its end. Raises the server's error if it refuses the request."""
        headers = {name: context.headers[name] for name in _TRACE_HEADERS if name in context.headers}
        if self._rank is not None:
            headers[RANK_HEADER] = str(self._rank.number)
        async with self._client.send("POST", path, body, {**headers, "x-request-id": context.request_id}) as response:
            if response.status != 200:
                raise read_failure(response.status, await response.read(), response.headers.get("retry-after", ""))
            while events := await response.events():
                if _DONE in events:
                    yield events[: events.index(_DONE)]
                    await response.finish()
                    return
                yield events

    async def _is_healthy(self) -> bool:
        """Return what `/health` says; servers without it are healthy. vLLM fails each request once its engine process died."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                status, _ = await self._client.fetch("GET", "/health")
        except (TimeoutError, Unavailable, EngineError):
            return False
        return status < 500

    def _read_files(self, root: str | None, served: ListedModel) -> TextFiles:
        """Return tokenizer and template of the model's folder. Raises InvalidRequest if it is not on this machine."""
        folder = _folder(root)
        if folder is None:
            raise InvalidRequest(
                f"the server at {self._client} names no folder of this machine for {served.id}: give its tokenizer by "
                "--tokenizer, or have it sent text by --remote-kind text"
            )
        return read_folder(folder)

    async def _fetch_sglang_model(self) -> SglangModel:
        status, body = await self._client.fetch("GET", "/get_model_info")
        try:
            return msgspec.json.decode(body, type=SglangModel) if status == 200 else SglangModel()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return SglangModel()

    async def _check(self) -> None:
        """Raises InvalidRequest if the server does not take or return what the requests to it have."""
        takes_text = isinstance(self._dialect, TextDialect)
        request = GenerateRequest(
            model=self._model,
            prompt=pack_text(_GREETING) if takes_text else pack_tokens((1,)),
            sampling=Sampling(temperature=0.0),
            stop=Stop(max_tokens=1, ignore_eos=not takes_text),
        )
        try:
            async for _ in self.generate(request, Context("probe")):
                pass
        except (InvalidRequest, EngineError, NotServed) as error:
            what = "text" if takes_text else "token ids"
            raise InvalidRequest(f"the server at {self._client} cannot be used with {what}: {error}") from error


def _adapters(models: Sequence[ListedModel], served: str) -> dict[str, str]:
    """Return the paths of the LoRA adapters in a server's list, by name."""
    root = next((model.root for model in models if model.id == served), None)
    return {model.id: model.root or "" for model in models if model.parent == served and model.root != root}


def _folder(root: str | None) -> Path | None:
    """Return the folder of this machine that a server names, if it is one."""
    folder = Path(root or "")
    return folder if root and folder.is_absolute() and folder.is_dir() else None
