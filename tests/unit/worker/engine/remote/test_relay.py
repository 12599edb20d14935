"""A server of audio and images, as a relay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo.common.errors import EngineError, InvalidRequest, Overloaded, Unavailable
from dynamo.common.http.client import HttpClient
from dynamo.common.tensors.relay import RelayedPart, RelayedRequest, part_from_outputs, to_tensors
from dynamo.common.tensors.request import build_response
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.remote.dialect import RemoteKind
from dynamo.worker.engine.remote.options import RemoteOptions
from dynamo.worker.engine.remote.relay import RelayEngine
from tests.support.media_server import SPOKEN, MediaServer
from tests.support.waiting import WAIT_S


@asynccontextmanager
async def relaying(server: MediaServer, name: str = "") -> AsyncIterator[RelayEngine]:
    async with server.serving():
        engine = RelayEngine(HttpClient(server.url, timeout_s=WAIT_S), name=name)
        await engine.start()
        yield engine
        await engine.close()


async def parts_of(engine: RelayEngine, path: str = "/v1/audio/speech", body: bytes = b"{}") -> list[RelayedPart]:
    request = to_tensors(RelayedRequest(path, "application/json", body), "m")
    responses = [response async for response in engine.infer(request, Context("r", headers={"traceparent": "t"}))]
    return [part_from_outputs(b"".join(build_response(each.head, each.raw_outputs))) for each in responses]


async def test_a_response_comes_in_the_parts_that_the_server_sends() -> None:
    server = MediaServer()
    async with relaying(server) as engine:
        parts = await parts_of(engine)
    assert b"".join(bytes(part.body) for part in parts) == SPOKEN and len(parts) > 1
    assert [(part.status, part.content_type) for part in parts[:2]] == [(200, "audio/mpeg"), (0, "")]
    assert (server.requests[0].headers["traceparent"], server.requests[0].headers["x-request-id"]) == ("t", "r")


@pytest.mark.parametrize("cut", range(1, 12))
async def test_events_are_whole_wherever_a_server_cuts_them(cut: int) -> None:
    stream = b"data: a\r\n\r\ndata: b\r\n\r\n"
    server = MediaServer(events=[stream[:cut], stream[cut:], b"data: c"])
    async with relaying(server) as engine:
        parts = await parts_of(engine)
    assert all(part.body[-2:] == b"\n\n" for part in parts)
    assert b"".join(bytes(part.body) for part in parts) == b"data: a\n\ndata: b\n\ndata: c\n\n"


@pytest.mark.parametrize(("status", "error"), [(401, EngineError), (429, Overloaded), (502, Unavailable), (503, Overloaded)])
async def test_what_a_server_says_of_itself_is_an_error_that_another_instance_may_make_good(
    status: int, error: type[Exception]
) -> None:
    async with relaying(MediaServer(refusals=[(status, b"no")])) as engine:
        with pytest.raises(error):
            await parts_of(engine)


@pytest.mark.parametrize(("status", "body"), [(400, b'{"error":{}}'), (404, b"x"), (500, b"")])
async def test_what_a_server_says_of_a_request_passes_through(status: int, body: bytes) -> None:
    async with relaying(MediaServer(refusals=[(status, body)])) as engine:
        [part] = await parts_of(engine)
    assert (part.status, part.content_type, bytes(part.body)) == (status, "application/json", body)


@pytest.mark.parametrize("path", ["/admin", "/v1/audio/speech/../models", "http://other/v1/audio/speech", ""])
async def test_only_paths_of_requests_to_models_reach_the_server(path: str) -> None:
    server = MediaServer()
    async with relaying(server) as engine:
        with pytest.raises(InvalidRequest, match="is no path for requests to a model"):
            await parts_of(engine, path)
    assert server.requests == []


async def test_a_header_cannot_be_added_by_a_content_type() -> None:
    server = MediaServer()
    async with relaying(server) as engine:
        request = to_tensors(RelayedRequest("/v1/audio/speech", "a\r\nx-key: b", b"{}"), "m")
        with pytest.raises(InvalidRequest, match="line break"):
            [_ async for _ in engine.infer(request, Context("r"))]
    assert server.requests == []


@pytest.mark.parametrize(
    ("server_name", "given", "name", "labels"),
    [
        ("/models/whisper.gguf", "", "whisper", {"server_model": "/models/whisper.gguf"}),
        ("whisper-1", "", "whisper-1", {}),
        ("whisper-1", "speech", "speech", {"server_model": "whisper-1"}),
    ],
)
async def test_the_card_says_which_name_the_server_knows(server_name: str, given: str, name: str, labels: dict[str, str]) -> None:
    async with MediaServer(model=server_name).serving() as server:
        engine = RelayEngine(HttpClient(server.url, timeout_s=WAIT_S), name=given)
        [card] = await engine.start()
        await engine.close()
    assert (card.name, card.labels) == (name, labels)


async def test_a_list_of_models_that_cannot_be_used_is_refused_and_long_names_are_cut() -> None:
    for listed, problem in (
        (b'{"data": [], "x": ' + b"[" * 100_000, "lists no model"),
        (b'{"data": [' + b'{"id": "m"},' * 4096 + b'{"id": "m"}]}', "lists 4097 models; at most 4096"),
    ):
        async with MediaServer(listed=listed).serving() as server:
            with pytest.raises(InvalidRequest, match=problem):
                await RelayEngine(HttpClient(server.url, timeout_s=WAIT_S)).start()
    async with MediaServer(listed=b'{"data": [{"id": "m", "owned_by": "%s"}]}' % (b"o" * 1_000_000)).serving() as server:
        [card] = await RelayEngine(HttpClient(server.url, timeout_s=WAIT_S)).start()
    assert card.backend == "o" * 64


def test_options_of_text_are_refused_for_a_relay() -> None:
    with pytest.raises(ValueError, match="--remote-kind relay takes no tokenizer"):
        RemoteOptions(urls=("http://a",), kind=RemoteKind.RELAY, tokenizer=Path("/t"))
