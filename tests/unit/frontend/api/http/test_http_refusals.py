"""What refused HTTP requests leave behind: nothing. Reference counts alone free it, since the collector runs rarely here."""

from __future__ import annotations

import asyncio
import json
import logging
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx2
import pytest

from dynamo.common.errors import EngineError, InvalidRequest, Overloaded
from dynamo.frontend.api.declaration import TEXT
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.errors import OPENAI_ERRORS
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.config import HttpOptions
from tests.support.fakes import FakeStream, tensor_card
from tests.support.http_edge import chat_card, open_http_edge
from tests.support.memory import resident_bytes

KIB = 1024


class Message:
    """Something that a handler holds, and that can be watched."""


class Handler:
    """Fails each request, deep inside, in one of several ways."""

    def __init__(self) -> None:
        self.watched: list[weakref.ref[Message]] = []

    async def __call__(self, exchange: Exchange) -> None:
        body = await exchange.any_body()
        held = Message()
        self.watched.append(weakref.ref(held))
        match body:
            case b"group":
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._fail(held, InvalidRequest("in a group")))
            case b"stream":
                async with exchange.attended(), exchange.events() as stream:
                    await stream.write(b"data: 1\n\n")
                    await self._fail(held, EngineError("in a stream"))
            case b"attended":
                async with exchange.attended():
                    await self._fail(held, Overloaded("attended"))
            case b"unforeseen":
                await self._fail(held, ZeroDivisionError())
            case _:
                await self._fail(held, InvalidRequest("refused"))

    async def _fail(self, held: Message, error: Exception) -> None:
        try:
            raise error
        except Exception as first:
            raise first from KeyError(held)


@pytest.fixture(autouse=True)
def no_logs(no_collector: None) -> Iterator[None]:
    """Nothing is logged: pytest keeps log records, tracebacks included."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[httpx2.AsyncClient]:
    operation = Operation(path="/fail", declared=TEXT, errors=OPENAI_ERRORS, handle=handler.__call__)
    async with (
        serve_http(HttpOptions(port=0), HttpApp([operation])) as server,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client,
    ):
        yield client


@pytest.mark.parametrize("way", ["refused", "unforeseen", "group", "attended", "stream"])
async def test_a_failed_request_keeps_nothing_alive(way: str) -> None:
    handler = Handler()
    async with served(handler) as client:
        for _ in range(20):
            await client.post("/fail", content=way.encode())
        assert len(handler.watched) == 20
        assert [ref for ref in handler.watched if ref() is not None] == []


async def test_a_request_whose_client_leaves_keeps_nothing_alive() -> None:
    entered = asyncio.Event()

    class Waiting(Handler):
        async def __call__(self, exchange: Exchange) -> None:
            await exchange.any_body()
            held = Message()
            self.watched.append(weakref.ref(held))
            async with exchange.attended():
                entered.set()
                await asyncio.Event().wait()

    handler = Waiting()
    async with served(handler) as client:
        for _ in range(20):
            entered.clear()
            request = asyncio.create_task(client.post("/fail", content=b"x"))
            await entered.wait()
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        async with asyncio.timeout(120):
            while any(ref() is not None for ref in handler.watched):
                await asyncio.sleep(0.005)


def refuse(stream: FakeStream) -> None:
    stream.fail(InvalidRequest("the model does not want it"))


LONG = "a" * 64 * KIB
TENSOR = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
REFUSED = {
    "tensors": ("/v2/models/adder/infer", {"inputs": [TENSOR], "parameters": {"a": LONG}}),
    "a prompt": ("/v1/completions", {"model": "talker", "prompt": LONG, "temperature": 9}),
    "a prompt beyond the context": ("/v1/completions", {"model": "talker", "prompt": LONG}),
    "a chat": ("/v1/chat/completions", {"model": "talker", "messages": [{"role": "user", "content": LONG}], "stream": True}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_memory_stays_over_hundreds_of_refused_requests(name: str) -> None:
    path, fields = REFUSED[name]
    body = json.dumps(fields).encode()
    async with open_http_edge(chat_card(), tensor_card(), respond=refuse) as edge:
        headers = {"content-type": "application/json"}

        async def send(count: int) -> None:
            for _ in range(count):
                response = await edge.http.post(path, content=body, headers=headers)
                assert response.status_code == 400, response.text

        await send(50)
        edge.client.streams.clear()
        before = resident_bytes()
        for _ in range(3):
            await send(100)
            edge.client.streams.clear()  # the fake keeps what it was sent
        assert resident_bytes() - before < 10 * KIB * KIB  # the bodies have 19 MiB, and what is made of them more
