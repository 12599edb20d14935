"""What requests over HTTP may occupy: one alone, and all of them together."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dynamo.common.generation import FinishReason
from dynamo.common.http.connection import HttpLimits
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.declaration import shown
from dynamo.frontend.api.guard import Accounts, Guard, watch_keys
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.errors import PLAIN_ERRORS
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.guard import HttpGuard
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.http.server import limits_of, serve_http
from dynamo.frontend.api.openai.logprobs import PackedLogprobs
from dynamo.frontend.config import CapacityOptions, HttpOptions
from dynamo.frontend.security.keys import entry_for, make_key
from dynamo.frontend.security.surfaces import Surface
from dynamo.protos import inference_pb2 as pb
from tests.support.fakes import FakeStream, echo_tensor, tensor_card
from tests.support.http_edge import Speaker, chat_card, end, events_of, open_http_edge, send_delta
from tests.support.memory import kept_objects
from tests.support.waiting import expiring, until, until_free

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
PROMPT = {"model": "talker", "prompt": "x"}
MIB = 2**20


async def test_requests_beyond_the_capacity_are_503_until_others_end() -> None:
    async with open_http_edge(capacity=CapacityOptions(max_concurrent_requests=2)) as edge:
        running = [asyncio.create_task(edge.post(COMPLETIONS, PROMPT)) for _ in range(2)]
        await edge.client.opened_streams(2)
        refused = await edge.post(COMPLETIONS, PROMPT)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == "the server is processing 2 requests, which is its limit"
        for stream in edge.client.streams:
            send_delta(stream, "a", reason=FinishReason.STOP)
            end(stream, 1)
        assert [(await response).status_code for response in running] == [200, 200]
        await until_free(edge.capacity)
        edge.client.respond = Speaker()
        assert (await edge.post(COMPLETIONS, PROMPT)).status_code == 200
        await until_free(edge.capacity)


def test_what_goes_on_in_the_background_has_the_bytes_of_its_request_until_it_ends() -> None:
    capacity = Capacity()
    occupied = capacity.enter()
    occupied.hold(5)
    rest = occupied.handed_over()
    occupied.leave()
    occupied.hold(7)
    assert (capacity.requests, capacity.buffered_bytes) == (1, 5)
    rest.leave()
    assert (capacity.requests, capacity.buffered_bytes) == (0, 0)


async def test_bodies_beyond_the_capacity_are_503_and_every_end_of_a_request_gives_its_bytes_back() -> None:
    async with open_http_edge(
        tensor_card(), capacity=CapacityOptions(max_buffered_bytes=5 * MIB), http=HttpOptions(max_body_bytes=8 * MIB)
    ) as edge:
        edge.client.respond = echo_tensor
        small = json.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": [0], "data": []}]}).encode()
        for size, status in ((len(small), 200), (MIB, 200), (3 * MIB, 503), (9 * MIB, 413), (MIB, 200)):
            response = await edge.http.post("/v2/models/adder/infer", content=small.ljust(size))
            assert response.status_code == status, response.text
            assert (response.headers.get("retry-after") is not None) == (status == 503)
            await until_free(edge.capacity)
        packed = gzip.compress(small.ljust(MIB))
        response = await edge.http.post("/v2/models/adder/infer", content=packed, headers={"content-encoding": "gzip"})
        assert response.status_code == 200
        for broken in (b"{", b"", b"\xff" * 100):
            assert (await edge.http.post("/v2/models/adder/infer", content=broken)).status_code == 400
        await until_free(edge.capacity)


async def test_a_client_that_leaves_while_it_sends_gives_its_bytes_back() -> None:
    async with open_http_edge(tensor_card()) as edge:
        _, writer = await asyncio.open_connection("127.0.0.1", edge.port)
        writer.write(
            b"POST /v2/models/adder/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n" + bytes(100_000)
        )
        await until(lambda: edge.capacity.buffered_bytes >= 100_000, 120)
        writer.close()
        await until_free(edge.capacity)


async def test_health_and_unknown_paths_do_not_count() -> None:
    async with open_http_edge(capacity=CapacityOptions(max_concurrent_requests=1)) as edge:
        running = asyncio.create_task(edge.post(COMPLETIONS, PROMPT))
        stream = await edge.client.next_stream()
        assert (await edge.http.get("/v2/health/ready")).status_code == 200
        assert (await edge.http.get("/nothing")).status_code == 404
        assert (await edge.http.get("/v1/models")).status_code == 503
        end(stream)
        await running


# One request


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 65536):
        yield body[start : start + 65536]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"])
async def test_json_without_tensors_has_a_bound_of_its_own(path: str) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        body = b'{"model": "' + b"a" * (4 * MIB) + b'"}'
        for content in (body, pieces(body)):
            response = await edge.http.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code == 413
            assert f"larger than {4 * MIB} bytes" in response.text


async def test_the_bound_of_json_can_be_raised_and_is_not_that_of_tensors() -> None:
    async with open_http_edge(chat_card(), tensor_card(), http=HttpOptions(max_json_bytes=8 * MIB)) as edge:
        body = b'{"model": "' + b"a" * (5 * MIB) + b'"}'
        response = await edge.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        edge.client.respond = echo_tensor
        tensor = {"name": "x", "datatype": "INT32", "shape": [MIB], "data": [1_000_000_000] * MIB}
        tensors = json.dumps({"inputs": [tensor]}).encode()
        assert len(tensors) > 10 * MIB
        assert (await edge.http.post("/v2/models/adder/infer", content=tensors)).status_code == 200


async def test_json_of_tensors_has_a_bound_which_tensors_in_binary_do_not_have() -> None:
    async with open_http_edge(tensor_card(), http=HttpOptions(max_tensor_json_bytes=MIB)) as edge:
        edge.client.respond = echo_tensor
        size = {"binary_data_size": 4 * MIB}
        head = json.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": [MIB], "parameters": size}]}).encode()
        length = {"inference-header-content-length": str(len(head))}
        binary = await edge.http.post("/v2/models/adder/infer", content=head + bytes(4 * MIB), headers=length)
        assert binary.status_code == 200
        long = head.ljust(MIB + 1)
        for content, headers in (
            (long, {}),
            (pieces(long), {}),
            (gzip.compress(os.urandom(2 * MIB)), {"content-encoding": "gzip"}),
            (long + bytes(4 * MIB), {"inference-header-content-length": str(len(long))}),
        ):
            refused = await edge.http.post("/v2/models/adder/infer", content=content, headers=headers)
            assert refused.status_code == 413
            assert f"than {MIB} bytes" in refused.json()["error"]
            assert "send large tensors in binary" in refused.json()["error"]
        await until_free(edge.capacity)


async def test_what_json_becomes_counts_as_well_as_the_json() -> None:
    numbers = json.dumps(
        {"inputs": [{"name": "x", "datatype": "INT32", "shape": [MIB], "data": [1] * MIB}]}, separators=(",", ":")
    )
    assert 2 * MIB <= len(numbers) <= 2 * MIB + 100
    for bound, status in ((5 * MIB, 503), (12 * MIB, 503), (20 * MIB, 200)):  # body and tensor, the response, and its text
        async with open_http_edge(tensor_card(), capacity=CapacityOptions(max_buffered_bytes=bound)) as edge:
            edge.client.respond = echo_tensor
            response = await edge.http.post("/v2/models/adder/infer", content=numbers)
            assert (response.status_code, "retry-after" in response.headers) == (status, status == 503)
            assert bool(edge.client.streams) == (bound > 5 * MIB)
            await until_free(edge.capacity)


async def test_a_client_that_leaves_ends_the_reading_of_its_json() -> None:
    numbers = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[9000000],"data":[' + b"1," * 9_000_000 + b"1]}]}"
    async with open_http_edge(tensor_card()) as edge:
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
        writer.write(
            b"POST /v2/models/adder/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(numbers) + numbers
        )
        await until(lambda: edge.capacity.buffered_bytes >= len(numbers) + 36_000_000, 120)  # it is being read
        writer.close()
        await until_free(edge.capacity)
        assert not edge.client.streams
        assert reader.at_eof() or not await reader.read()


async def test_a_declared_length_is_refused_before_the_body_comes() -> None:
    async with open_http_edge() as edge:
        for path, length in ((COMPLETIONS, 5 * MIB), ("/v2/models/talker/generate", 65 * MIB)):
            reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
            head = (
                f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
            )
            writer.write(head.encode())
            async with asyncio.timeout(120):
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
            writer.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_grows_too_much_when_decompressed_is_refused(encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    async with open_http_edge(tensor_card()) as edge:
        edge.client.respond = echo_tensor
        bomb = pack(b'{"inputs": []}'.ljust(20 * MIB))
        assert len(bomb) < 25_000
        response = await edge.http.post("/v2/models/adder/infer", content=bomb, headers={"content-encoding": encoding})
        assert response.status_code == 413
        assert "more than 100 times" in response.json()["error"]
        harmless = pack(b'{"inputs": [{"name": "x", "datatype": "INT32", "shape": [0], "data": []}]}'.ljust(MIB - 1))
        response = await edge.http.post("/v2/models/adder/infer", content=harmless, headers={"content-encoding": encoding})
        assert response.status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_conversations_and_prompts_may_be_compressed_within_the_same_bounds(encoding: str) -> None:
    pack = gzip.compress if encoding == "gzip" else zlib.compress
    kind = {"content-type": "application/json", "content-encoding": encoding}
    prompt = json.dumps({"model": "talker", "prompt": "Once"}).encode()
    async with open_http_edge(respond=Speaker()) as edge:

        async def complete(content: bytes) -> int:
            return (await edge.http.post(COMPLETIONS, content=content, headers=kind)).status_code

        assert await complete(pack(prompt)) == 200
        assert await complete(pack(prompt.ljust(5 * MIB))) == 413  # as large as no other body may be
        assert await complete(pack(prompt.ljust(3 * MIB))) == 413  # grows to more than 100 times its size
        assert await complete(pack(prompt)[:-4]) == 400
        other = await edge.http.post(COMPLETIONS, content=prompt, headers=kind | {"content-encoding": "br"})
    assert (other.status_code, other.headers["accept-encoding"]) == (415, "gzip, deflate")


class Refusing(ThreadPoolExecutor):
    """Stands for asyncio's pool of threads, in which all else that waits for files would wait for large bodies."""

    def submit(self, *work: object, **named: object) -> NoReturn:  # type: ignore[override]
        raise AssertionError(f"{work} does not belong here")


async def test_large_bodies_have_threads_of_their_own() -> None:
    async with open_http_edge(tensor_card()) as edge:
        edge.client.respond = echo_tensor
        assert (await edge.http.get("/v2")).status_code == 200  # connects, which needs that pool
        asyncio.get_running_loop().set_default_executor(Refusing(1))
        numbers = [*range(100_000)]
        large = json.dumps({"inputs": [{"name": "x", "datatype": "INT32", "shape": [len(numbers)], "data": numbers}]}).encode()
        for body, headers in ((large, {}), (gzip.compress(large), {"content-encoding": "gzip", "accept-encoding": "gzip"})):
            response = await edge.http.post("/v2/models/adder/infer", content=body, headers=headers)
            assert response.status_code == 200, response.text


def respond_with(size: int) -> Callable[[FakeStream], None]:
    def respond(stream: FakeStream) -> None:
        response = pb.ModelInferResponse(model_name="adder", model_version="1")
        response.outputs.add(name="y", datatype="INT32", shape=[size // 4])
        response.raw_output_contents.append(bytes(range(256)) * (size // 256))
        stream.end(response.SerializeToString())

    return respond


@pytest.mark.parametrize("reads", [True, False])
async def test_a_long_response_counts_until_its_client_has_read_it_or_is_gone(reads: bool) -> None:
    async with open_http_edge(tensor_card(), capacity=CapacityOptions(max_buffered_bytes=32 * MIB)) as edge:
        edge.client.respond = respond_with(20 * MIB)
        body = json.dumps(
            {"inputs": [{"name": "x", "datatype": "INT32", "shape": [0], "data": []}], "parameters": {"binary_data_output": True}}
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port, limit=4096)
        head = (
            f"POST /v2/models/adder/infer HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await reader.read(1)  # the response has begun
        assert edge.capacity.buffered_bytes >= 20 * MIB
        refused = await edge.http.post("/v2/models/adder/infer", content=body, headers={"accept-encoding": "identity"})
        assert (refused.status_code, refused.headers.get("retry-after")) == (503, "1")
        if reads:
            received = bytearray()
            while part := await reader.read(MIB):
                received += part
            assert received.endswith(bytes(range(256)) * (20 * MIB // 256))
        writer.close()
        await until_free(edge.capacity)


@pytest.mark.parametrize("form", ["whole", "read meanwhile"])
async def test_responses_that_a_key_does_not_read_leave_room_for_another_key(form: str, tmp_path: Path) -> None:
    async def pages() -> AsyncGenerator[bytes, None]:
        for _ in range(32):
            yield bytes(MIB)

    async def handle(exchange: Exchange) -> None:
        if form == "whole":
            await exchange.respond(bytes(20 * MIB))
        else:
            await exchange.respond_while_read(32 * MIB, pages(), ())

    file, keys = tmp_path / "keys.yaml", {name: make_key() for name in "ab"}
    file.write_text("".join(entry_for(key, name) for name, key in keys.items()))
    most = 80 * MIB if form == "whole" else 2 * MIB  # of a response that is read meanwhile, two pieces count
    capacity = Capacity(CapacityOptions(max_buffered_bytes=most))
    operations = [Operation(path="/long", method="GET", declared=shown(Surface.METADATA), errors=PLAIN_ERRORS, handle=handle)]
    app = HttpApp(operations, HttpSettings(capacity=capacity), HttpGuard(Guard(Accounts(watch_keys(file)))))

    async with serve_http(HttpOptions(port=0), app) as server, AsyncExitStack() as stack:

        async def status(name: str) -> bytes:
            """Begin a request of a key, whose response is not read any further until the end."""
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
            stack.callback(writer.close)
            writer.write(f"GET /long HTTP/1.1\r\nhost: localhost\r\nx-api-key: {keys[name]}\r\n\r\n".encode())
            return (await reader.readline()).split()[1]

        statuses = [await status("a")]
        while statuses[-1] == b"200":
            statuses.append(await status("a"))
        assert statuses[-1] == b"429" and len(statuses) > 2
        assert await status("b") == b"200"
    await until_free(capacity)


# Half-closed connections


async def test_a_client_that_closed_its_side_gets_the_rest_of_a_stream() -> None:
    def begin(stream: FakeStream) -> None:
        send_delta(stream, "Hel")

    async with open_http_edge(respond=begin) as edge:
        body = json.dumps(PROMPT | {"stream": True}).encode()
        with socket.create_connection(("127.0.0.1", edge.port), timeout=120) as connection:
            head = f"POST {COMPLETIONS} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            connection.shutdown(socket.SHUT_WR)
            received = await asyncio.to_thread(connection.recv, 65536)
            await asyncio.sleep(expiring(0.3))
            [stream] = edge.client.streams
            assert not stream.cancelled
            send_delta(stream, "lo", reason=FinishReason.STOP)
            end(stream, 2)
            while more := await asyncio.to_thread(connection.recv, 65536):
                received += more
        events = [data for _, data in events_of(received.decode().partition("\r\n\r\n")[2])]
        assert "".join(json.loads(data)["choices"][0]["text"] for data in events[:-1]) == "Hello"
        assert events[-1] == "[DONE]"


# Heads and bodies that take long


async def status_line(port: int, data: bytes) -> bytes:
    """Send bytes and return the first line of the response; empty if the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        async with asyncio.timeout(120):
            return (await reader.readline()).strip()
    finally:
        writer.close()


async def test_limits_of_heads_and_of_idle_connections_are_those_of_the_options() -> None:
    http = HttpOptions(max_head_bytes=2048, head_timeout_s=0.3, idle_timeout_s=0.2)
    async with open_http_edge(http=http) as edge:
        assert (
            await status_line(edge.port, b"GET /v2 HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"a" * 1000 + b"\r\n\r\n")
            == b"HTTP/1.1 200 OK"
        )
        large = await status_line(edge.port, b"GET /v2 HTTP/1.1\r\nhost: localhost\r\nx-a: " + b"a" * 3000 + b"\r\n\r\n")
        assert large.startswith(b"HTTP/1.1 431 ")
        assert (await status_line(edge.port, b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n")).startswith(b"HTTP/1.1 408 ")
        assert await status_line(edge.port, b"") == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.port)
        writer.write(b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        async with asyncio.timeout(120):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")  # until the server closes the connection
        writer.close()


def test_all_limits_of_connections_come_from_options() -> None:
    options = HttpOptions(
        max_connections=7,
        max_head_bytes=2048,
        head_timeout_s=3,
        idle_timeout_s=4,
        min_body_bytes_per_s=0,
        unread_timeout_s=6,
    )
    assert limits_of(options) == HttpLimits(
        max_connections=7,
        max_head_bytes=2048,
        head_timeout_s=3,
        idle_timeout_s=4,
        min_body_bytes_per_s=0,
        unread_timeout_s=6,
    )


MESSAGES_OF_USER: dict[str, Any] = {"model": "talker", "max_tokens": 4000, "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, MESSAGES_OF_USER),
        (CHAT, MESSAGES_OF_USER | {"logprobs": True}),
        (COMPLETIONS, PROMPT),
        (COMPLETIONS, PROMPT | {"logprobs": 1}),
        (MESSAGES, MESSAGES_OF_USER),
        ("/v1/responses", {"model": "talker", "input": "x"}),
        ("/v2/models/talker/generate", {"text_input": "x"}),
        ("/v2/models/talker/infer", {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}),
    ],
)
async def test_what_a_whole_response_is_gathered_from_counts_while_it_grows(path: str, body: dict[str, Any]) -> None:
    """The request is short, and so is the response as text; its tokens are many."""
    long = Speaker(("a" * 100,) * 200, logprobs=lambda position: -1.0)
    async with open_http_edge(respond=long, capacity=CapacityOptions(max_buffered_bytes=500_000)) as edge:
        refused = await edge.post(path, body)
        assert (refused.status_code, "near its limit" in refused.text) == (503, True)
        await until_free(edge.capacity)
        edge.client.respond = Speaker(logprobs=lambda position: -1.0)
        assert (await edge.post(path, body)).status_code == 200
        await until_free(edge.capacity)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_log_probabilities_of_a_prompt_count_before_they_are_shown(path: str) -> None:
    text = "x" * 2000
    body: dict[str, Any] = {"model": "talker", "max_tokens": 1}
    body |= {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    async with open_http_edge(respond=Speaker(), capacity=CapacityOptions(max_buffered_bytes=500_000)) as edge:
        refused = await edge.post(path, body | {"prompt_logprobs": 1})
        assert (refused.status_code, "near its limit" in refused.text) == (503, True)
        await until_free(edge.capacity)
        assert (await edge.post(path, body)).status_code == 200
        await until_free(edge.capacity)


def test_log_probabilities_of_a_whole_completion_are_kept_without_an_object_for_each() -> None:
    positions = [[(token, token / 7) for token in range(1000, 1020)] for _ in range(500)]
    packed = PackedLogprobs()
    for position in positions:
        packed.add([position])
    assert [*packed] == positions
    assert kept_objects(packed) < 10
