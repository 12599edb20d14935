"""What the worker uses of the package `sglang`, on a simulated engine; for tests that put its folder on the path.

As in the sources of SGLang 0.5.23: `srt/entrypoints/engine.py` (`Engine`), `srt/managers/tokenizer_manager.py` (requests by id,
signals) and `srt/server_args.py`. Outputs have the form of those over HTTP, see `tests.support.sglang_server`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import zmq
from tokenizers import Tokenizer

from dynamo.common.generation import Delta, Summary
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import make_engine
from tests.support.sglang_server import SglangServer

BLOCKS = 512
_END = (-1).to_bytes(8, "big", signed=True)


class TokenizerManager:
    def __init__(self, arguments: Any) -> None:
        folder = Path(arguments.model_path)
        if not (folder / "tokenizer.json").is_file():
            raise OSError(f"{folder} is no local folder and no model on the hub")
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer = SimpleNamespace(
            backend_tokenizer=backend, bos_token="<s>", eos_token="</s>", chat_template="{{ messages }}"
        )
        self.model_config = SimpleNamespace(context_len=arguments.context_length or 512, hf_eos_token_id={257})
        self.running: dict[str, asyncio.Event] = {}
        """Events of the requests that are generated, by id; set when the request is aborted."""
        self.aborted: list[str] = []

    def auto_create_handle_loop(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)
        if rid in self.running:
            self.running[rid].set()


class Replays(threading.Thread):
    """Responds to requests for earlier KV events, of which there are none: this engine publishes nothing."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(endpoint)

    def run(self) -> None:
        try:
            while True:
                client, *_ = self._socket.recv_multipart()
                self._socket.send_multipart([client, b"", b"", _END, b""])
        except zmq.ContextTerminated:
            self._socket.close()

    def end(self) -> None:
        self._context.term()
        self.join()


class Engine:
    def __init__(self, *, server_args: Any) -> None:
        self.tokenizer_manager = TokenizerManager(server_args)
        self._scheduler_init_result = SimpleNamespace(scheduler_infos=[{"max_total_num_tokens": BLOCKS * server_args.page_size}])
        settings = {"max_num_seqs": server_args.max_running_requests, "context_length": server_args.context_length}
        sim = make_engine(f"sim:speedup=5,blocks={BLOCKS}", **settings)
        assert isinstance(sim, SimEngine)
        self._server = SglangServer(sim, Path(server_args.model_path), is_incremental=server_args.incremental_streaming_output)
        self._has_started = False
        self.requests: list[dict[str, Any]] = []
        self.is_shut_down = False
        self._replays = Replays(json.loads(server_args.kv_events_config)["replay_endpoint"])
        self._replays.start()

    async def async_generate(self, *, rid: str, cache_salt: str | None, **fields: Any) -> AsyncIterator[dict[str, Any]]:
        if not self._has_started:
            self._has_started = True
            await self._server.engine.start()
        fields["cache_salt"] = cache_salt
        self.requests.append({"rid": rid, **fields})
        return self._outputs(rid, fields)

    async def _outputs(self, rid: str, fields: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        if len(fields["input_ids"]) > self.tokenizer_manager.model_config.context_len:
            raise ValueError("The input is longer than the model's context length.")
        aborted = self.tokenizer_manager.running[rid] = asyncio.Event()
        try:
            async with aclosing(self._items(fields, aborted)) as items:
                async for output in self._server.events(items, fields):
                    yield output
        finally:
            del self.tokenizer_manager.running[rid]

    async def _items(self, fields: dict[str, Any], aborted: asyncio.Event) -> AsyncGenerator[Delta | Summary, None]:
        """Yield what the simulated engine generates, until the request is aborted."""
        request = msgspec.structs.replace(self._server.to_request(fields), cache_salt=fields["cache_salt"] or "")
        generated = self._server.engine.generate(request, Context("sglang"))
        async with aclosing(generated) as items:  # type: ignore[type-var]
            async for item in items:
                if aborted.is_set():
                    return
                yield item

    def shutdown(self) -> None:
        self.is_shut_down = True
        self._replays.end()
