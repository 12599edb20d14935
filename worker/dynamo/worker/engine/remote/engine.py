"""A model on an engine server that runs elsewhere: `vllm serve`, or another whose `/v1/completions` takes and returns token ids.

The server schedules, batches and caches; its owners change nothing. Closing the connection aborts a request there. A server that
cannot be reached fails its requests as a lost instance does, so they continue elsewhere, and serves again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo.common.errors import EngineError, InvalidRequest, Overloaded, Unavailable
from dynamo.common.generation import Delta, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.worker.engine.base import Context, EngineLoad
from dynamo.worker.engine.open_requests import OpenRequests, empty_response
from dynamo.worker.engine.remote.completions import StreamReader, check_request, read_failure, request_body
from dynamo.worker.engine.remote.http import HttpClient
from dynamo.worker.tokenizers.folder import TextFiles, read_folder

log = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_PAUSE_S = 5.0
_HEALTH_S = 5.0
_PATH = "/v1/completions"
_DONE = b"[DONE]"
_TRACE_HEADERS = ("traceparent", "tracestate")


class ServedModel(msgspec.Struct):
    """A model in the server's list."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str = ""


class ModelList(msgspec.Struct):
    data: list[ServedModel]


class RemoteEngine:
    """Serves the model of one server."""

    def __init__(
        self,
        client: HttpClient,
        *,
        name: str = "",
        files: TextFiles | None = None,
        context_length: int | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        """`name` also chooses among several models of the server, which otherwise serves its first one here.

        `files`: default, those of the folder that the server names. `max_num_seqs`: sequences that the server runs at once.
        """
        self._client = client
        self._name = name
        self._text = files
        self._context_length = context_length
        self._max_num_seqs = max_num_seqs
        self._model = ""
        """The server's name of the model."""
        self._limit = 0
        self._eos: frozenset[int] = frozenset()
        self._is_closed = False
        self._requests = OpenRequests()

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._name or self._model} at {self._client}, open={self._requests.choices}>"

    async def start(self) -> ModelCard:
        """Wait for the server, and have it generate one token. Raises InvalidRequest for a server that cannot be used."""
        models = await self._when_ready(self._fetch_models)
        served = next((model for model in models if model.id == self._name), models[0])
        self._model = served.id
        self._name = self._name or served.id
        limits = [limit for limit in (served.max_model_len, self._context_length) if limit]
        if not limits:
            raise InvalidRequest(f"the server at {self._client} does not say its context length: give --context-length")
        self._limit = min(limits)
        text = self._text = self._text or self._find_files(served)
        self._eos = frozenset(text.eos_token_ids)
        await self._when_ready(self._check_token_ids)
        return ModelCard(
            name=self._name,
            kind=ModelKind.LLM,
            backend=served.owned_by or "remote",
            llm=LlmInfo(
                context_length=self._limit,
                tokenizer=sha256(text.tokenizer).hexdigest(),
                chat_template=sha256(text.chat_template).hexdigest() if text.chat_template else "",
                bos_token=text.bos_token,
                eos_token=text.eos_token,
                eos_token_ids=text.eos_token_ids,
                max_num_seqs=self._max_num_seqs or 0,
                adapters=tuple(model.id for model in models if model.parent == served.id and model.root != served.root),
            ),
        ).check()

    def files(self) -> Sequence[bytes]:
        return [file for file in (self._text.tokenizer, self._text.chat_template) if file] if self._text else []

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        if self._is_closed:
            raise Unavailable("the engine is closed")
        check_request(request, self._limit)
        if request.stop.max_tokens == 0:
            for part in empty_response(request):
                yield part
            return
        body = request_body(request, self._model, self._limit)
        reader = StreamReader(request, self._eos)
        with self._requests.opened(request) as opened:
            try:
                async with aclosing(self._events(body, context)) as events:
                    async for event in events:
                        opened.prefilled()
                        for delta in reader.read(event):
                            opened.generated(delta)
                            yield delta
                if not reader.has_finished:
                    raise Unavailable(f"the server at {self._client} ended its response early")
                yield reader.summary()
            except EngineError as error:
                if await self._is_healthy():
                    raise
                raise Unavailable(f"the server at {self._client} is unhealthy: {error}") from error

    def load(self) -> EngineLoad:
        """Return the load by this worker's requests: the server may have others."""
        choices = self._requests.choices
        running = min(choices, self._max_num_seqs or choices)
        return EngineLoad(waiting=choices - running, running=running, queued_prefill_tokens=self._requests.prefilling_tokens)

    async def close(self) -> None:
        self._is_closed = True

    async def _events(self, body: bytes, context: Context) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream up to its end. Raises the server's error if it refuses the request."""
        headers = {name: context.headers[name] for name in _TRACE_HEADERS if name in context.headers}
        async with self._client.send("POST", _PATH, body, {**headers, "x-request-id": context.request_id}) as response:
            if response.status != 200:
                raise read_failure(response.status, await response.read(), response.headers.get("retry-after", ""))
            async with aclosing(response.events()) as events:
                async for event in events:
                    if event == _DONE:
                        return
                    yield event

    async def _is_healthy(self) -> bool:
        """Return what `/health` says; servers without it are healthy. vLLM fails each request once its engine process died."""
        try:
            async with asyncio.timeout(_HEALTH_S):
                status, _ = await self._client.fetch("GET", "/health")
        except (TimeoutError, Unavailable, EngineError):
            return False
        return status < 500

    async def _when_ready(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `call`, repeated while the server cannot be reached or takes no requests, as when it starts."""
        pause_s = 0.5
        while True:
            try:
                return await call()
            except (Unavailable, Overloaded) as error:
                log.warning("waiting for the engine server: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _fetch_models(self) -> list[ServedModel]:
        """Return the server's models, at least one. Raises InvalidRequest for a server that has none."""
        status, body = await self._client.fetch("GET", "/v1/models")
        if status in (401, 403):
            raise InvalidRequest(f"the server at {self._client} refuses the key: set DYN_REMOTE_API_KEY")
        if status in (429, 502, 503, 504):
            raise read_failure(status, body)
        try:
            models = msgspec.json.decode(body, type=ModelList).data if status == 200 else []
        except msgspec.MsgspecError:
            models = []
        if not models:
            raise InvalidRequest(f"the server at {self._client} lists no model: GET /v1/models has status {status}")
        return models

    def _find_files(self, served: ServedModel) -> TextFiles:
        folder = Path(served.root or "")
        if not (served.root and folder.is_absolute() and folder.is_dir()):
            raise InvalidRequest(
                f"the server at {self._client} names no folder of this machine for {served.id}: give its tokenizer by --tokenizer"
            )
        return read_folder(folder)

    async def _check_token_ids(self) -> None:
        """Raises InvalidRequest if the server does not take or return token ids."""
        request = GenerateRequest(
            model=self._model,
            prompt=pack_tokens((1,)),
            sampling=Sampling(temperature=0.0),
            stop=Stop(max_tokens=1, ignore_eos=True),
        )
        try:
            async for _ in self.generate(request, Context("probe")):
                pass
        except (InvalidRequest, EngineError) as error:
            raise InvalidRequest(f"the server at {self._client} cannot be used with token ids: {error}") from error
