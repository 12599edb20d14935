"""A speech model in vLLM, driven from this process, as a relay: vLLM's own endpoints read the forms and make the responses.

They are an ASGI application. No server stands before it: it is called with what the request plane brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard
from dynamo.common.process.background import awaited
from dynamo.common.tensors.relay import RelayedPart, from_tensors, part_to_outputs, relay_card
from dynamo.common.tensors.request import TensorRequest
from dynamo.worker.engine.base import Context, TensorResponse
from dynamo.worker.engine.vllm.engine import SharedVllm, died

SPEECH_PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
_Application = Callable[[Mapping[str, Any], Any, Any], Any]


class VllmSpeech:
    """Serves one model that writes down what it hears."""

    def __init__(self, vllm: SharedVllm) -> None:
        """Raises InvalidRequest for settings that are for models of text."""
        if vllm.ranks > 1:
            raise InvalidRequest("a speech model is served by one rank of vLLM: start a worker for each")
        vllm.served.add(0)
        self.vllm = vllm
        self._application: _Application
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<VllmSpeech {self.vllm.name}>"

    async def start(self) -> Sequence[ModelCard]:
        """Start vLLM. Raises InvalidRequest for a model or settings that it cannot serve, EngineError if it fails to start."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.vllm.opening.opened())
            llm, name = self.vllm.llm, self.vllm.name
            arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--served-model-name", name])
            arguments.model = llm.vllm_config.model_config.model
            tasks = await llm.get_supported_tasks()
            application = build_app(arguments, tasks)
            await init_app_state(llm, application.state, arguments, tasks)
            self._application = application
            self._stack = stack.pop_all()
        return [relay_card(name, "vllm")]

    async def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        relayed = from_tensors(request)
        if relayed.path not in SPEECH_PATHS:
            raise InvalidRequest(f"{self.vllm.name} writes down speech: it serves {' and '.join(SPEECH_PATHS)}")
        headers = {"content-type": relayed.content_type, "content-length": str(len(relayed.body))}
        scope = _scope(relayed.path, {**headers, "x-request-id": context.request_id})
        status, kind = 0, ""
        async with aclosing(_responded(self._application, scope, bytes(relayed.body))) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    status, kind = message["status"], dict(message["headers"]).get(b"content-type", b"").decode("latin-1")
                elif status or message.get("body"):
                    yield TensorResponse(*part_to_outputs(RelayedPart(message.get("body", b""), status, kind)))
                    status = 0

    async def failure(self) -> EngineError:
        """Return when vLLM's engine process has died, which it does not recover from."""
        return await died(self.vllm)

    async def close(self) -> None:
        await self._stack.aclose()


def _scope(path: str, headers: Mapping[str, str]) -> Mapping[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()],
        "client": None,
        "server": None,
    }


async def _responded(application: _Application, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the messages of the application's response. To close it early tells the application that the client has left.

    Raises EngineError if the application fails.
    """
    messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    requests: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if requests:
            return requests.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await application(scope, receive, messages.put)
        except Exception as error:
            raise EngineError(f"vLLM failed on the request: {error!r}") from error
        finally:
            messages.put_nowait(None)

    task = awaited(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await task
    finally:
        left.set()
        task.cancel()
        await asyncio.wait([task])
