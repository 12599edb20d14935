"""What both gRPC servers do: that of this project, and grpcio's, which is the reference. All other tests use the default."""

from __future__ import annotations

import asyncio
import secrets
import socket
import weakref
import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
import trustme
from grpc_health.v1 import health_pb2

from benchmarks.grpc_client import connect, message, request_headers
from dynamo.common.config import ConfigError
from dynamo.common.errors import InvalidRequest, Overloaded
from dynamo.common.security.files import Watched
from dynamo.frontend.api.guard import Accounts, Guard
from dynamo.frontend.api.kserve.service import SERVICE
from dynamo.frontend.api.rpc.guard import guarded
from dynamo.frontend.api.rpc.handlers import PendingMessage, read_message
from dynamo.frontend.api.rpc.health import HEALTH_SERVICE
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation
from dynamo.frontend.api.rpc.server import serve_grpc
from dynamo.frontend.config import CapacityOptions, GrpcCompression, GrpcOptions, GrpcServerChoice, OverloadStatus, PortTlsOptions
from dynamo.frontend.security.keys import entry_for, make_key, read_keys
from dynamo.frontend.security.surfaces import Surface
from dynamo.protos import inference_pb2 as pb
from tests.support.certificates import issue, write_ca
from tests.support.edge import Edge, Stream, open_edge, over
from tests.support.fakes import FakeStream, echo_tensor, instance, tensor_card
from tests.support.grpc_operations import ECHO, bidirectional, unary
from tests.support.waiting import WAIT_S, expiring, until_free

Code = grpc.StatusCode
INFER = f"/{SERVICE}/ModelInfer"
STREAM = f"/{SERVICE}/ModelStreamInfer"
TESTS = Path(__file__).parents[4]
PAYLOAD = b"the same again, " * 4096


@pytest.fixture(params=[GrpcServerChoice.HTTP2, GrpcServerChoice.GRPCIO])
def options(request: pytest.FixtureRequest) -> GrpcOptions:
    return GrpcOptions(port=0, server=request.param)


@pytest.fixture
async def edge(options: GrpcOptions) -> AsyncIterator[Edge]:
    async with open_edge(tensor_card(), options=options) as edge:
        edge.client.respond = echo_tensor
        yield edge


def infer_request(id_: str = "7", count: int = 2, model: str = "adder") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=id_)
    request.inputs.add(name="x", datatype="INT32", shape=[count])
    request.raw_input_contents.append(b"\1\0\0\0" * count)
    return request


async def failure(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


async def status(channel: grpc.aio.Channel, path: str, data: bytes = b"x", **options: float) -> grpc.StatusCode:
    try:
        await channel.unary_unary(path)(data, **options)  # type: ignore[arg-type]
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


def held(edge: Edge) -> None:
    """Let instances take requests and not respond."""
    edge.client.respond = lambda stream: None


@asynccontextmanager
async def served(
    options: GrpcOptions, operations: Iterable[GrpcOperation], *, guarded: bool = False
) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        serve_grpc(options, operations, guarded=guarded) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}", [("grpc.use_local_subchannel_pool", 1)]) as channel,
    ):
        yield channel


# Calls


async def test_a_request_and_its_response_are_forwarded_unchanged(edge: Edge) -> None:
    request = infer_request()
    response = await edge.infer(request)
    assert (response.id, response.raw_output_contents[0]) == ("7", request.raw_input_contents[0])
    assert edge.client.streams[0].body == request.SerializeToString()


@pytest.mark.parametrize("size", [0, 10_000])
async def test_metadata_of_any_size_that_fits_is_harmless(edge: Edge, size: int) -> None:
    metadata = (("x-request-id", "r" * size), ("x-other", "o" * size), ("blob-bin", secrets.token_bytes(size)))
    assert (await edge.infer(infer_request(), metadata=metadata)).id == "7"


async def test_methods_that_do_not_exist_are_unimplemented(options: GrpcOptions) -> None:
    async with served(options, ECHO) as channel:
        paths = ("/test.Echo/Nothing", "/no.Service/At", "/x", "/test.Echo/Say")
        codes = await asyncio.gather(*(status(channel, path, timeout=WAIT_S) for path in paths))
    assert codes == [Code.UNIMPLEMENTED] * 3 + [Code.OK]


@pytest.mark.parametrize(
    ("overload", "code"),
    [(OverloadStatus.UNAVAILABLE, Code.UNAVAILABLE), (OverloadStatus.TOO_MANY_REQUESTS, Code.RESOURCE_EXHAUSTED)],
)
async def test_overload_says_when_to_retry(options: GrpcOptions, overload: OverloadStatus, code: grpc.StatusCode) -> None:
    async with open_edge(tensor_card(), options=options, overload=overload) as edge:
        edge.client.respond = lambda stream: stream.fail(Overloaded("too much to do", retry_after_s=2.5))
        error = await failure(edge.infer(infer_request()))
    assert error.code() is code
    trailing = dict(error.trailing_metadata())
    assert (trailing["retry-after"], trailing["x-request-id"]) == ("2.5", "7")


async def test_calls_beyond_the_capacity_are_unavailable_until_others_end(options: GrpcOptions) -> None:
    async with open_edge(tensor_card(), options=options, capacity=CapacityOptions(max_concurrent_requests=2)) as edge:
        running = [asyncio.create_task(edge.infer(infer_request())) for _ in range(2)]
        streams = await edge.client.opened_streams(2)
        for method in ("ModelInfer", "ModelMetadata", "ServerMetadata"):
            error = await failure(edge.call(method, infer_request() if method == "ModelInfer" else b""))
            assert error.code() is Code.UNAVAILABLE
            assert error.details() == "the server is processing 2 requests, which is its limit"
            assert dict(error.trailing_metadata() or ())["retry-after"] == "1"
        assert pb.ServerLiveResponse.FromString(await edge.call("ServerLive", b"")).live
        for stream in streams:
            echo_tensor(stream)
        await asyncio.gather(*running)
        await until_free(edge.capacity)
        edge.client.respond = echo_tensor
        await edge.infer(infer_request())
        await until_free(edge.capacity)


async def test_calls_are_counted_with_their_status(edge: Edge) -> None:
    method = {"grpc_type": "unary", "grpc_service": SERVICE, "grpc_method": "ModelInfer"}
    await edge.infer(infer_request())
    for name in ("started", "msg_received", "msg_sent"):
        await counts(edge, f"grpc_server_{name}_total", 1, **method)
    await counts(edge, "grpc_server_handled_total", 1, **method, grpc_code="OK")
    await counts(edge, "grpc_server_handling_seconds_count", 1, **method)
    await failure(edge.call("ModelInfer", b"\xff\xff"))
    await counts(edge, "grpc_server_handled_total", 1, **method, grpc_code="InvalidArgument")
    await counts(edge, "grpc_server_msg_sent_total", 1, **method)
    held(edge)
    call = edge.channel.unary_unary(INFER)(infer_request().SerializeToString())
    await edge.client.opened_streams(2)
    call.cancel()
    await counts(edge, "grpc_server_handled_total", 1, **method, grpc_code="Canceled")


async def counts(edge: Edge, name: str, value: float, **labels: str) -> None:
    """Return once a sample has this value: a call is counted just after its client has heard of its end."""
    async with asyncio.timeout(WAIT_S):
        while edge.registry.get_sample_value(name, labels) != value:
            await asyncio.sleep(0.005)


async def test_a_call_that_failed_keeps_nothing_alive(options: GrpcOptions, no_collector: None) -> None:
    watched: list[weakref.ref[asyncio.Event]] = []

    async def refuse(request: bytes | PendingMessage, context: Context) -> bytes:
        data = await read_message(request)
        local = asyncio.Event()
        watched.append(weakref.ref(local))
        try:
            raise InvalidRequest(f"a message of {len(data)} bytes held by {local!r}")
        except InvalidRequest as error:
            await context.abort(Code.INVALID_ARGUMENT, str(error))

    async with served(options, [unary("/test.Refuse/Say", refuse)]) as channel:
        for _ in range(20):
            assert await status(channel, "/test.Refuse/Say") is Code.INVALID_ARGUMENT
        assert len(watched) == 20
        assert [ref for ref in watched[:-1] if ref() is not None] == []


# Streams


@pytest.fixture
def stream(edge: Edge) -> Stream:
    return edge.stream()


def ids(responses: list[pb.ModelStreamInferResponse]) -> list[str]:
    return [response.infer_response.id for response in responses]


async def test_a_failure_goes_in_band_and_the_stream_lives_on(edge: Edge, stream: Stream) -> None:
    await stream.send(infer_request("bad", model="missing"), b"\x0a\xff\xff\xff\xff\x7f", infer_request("good"))
    responses = await stream.rest()
    assert ids(responses) == ["bad", "", "good"]
    assert responses[0].error_message == "Request for unknown model: 'missing' is not found"
    assert "not a ModelInferRequest" in responses[1].error_message
    assert not responses[2].error_message
    assert await stream.call.code() is Code.OK
    method = {"grpc_type": "bidi_stream", "grpc_service": SERVICE, "grpc_method": "ModelStreamInfer"}
    await counts(edge, "grpc_server_handled_total", 1, **method, grpc_code="OK")
    await counts(edge, "grpc_server_msg_received_total", 3, **method)
    await counts(edge, "grpc_server_msg_sent_total", 3, **method)


@pytest.mark.parametrize("value", ["true", "True"])
async def test_with_triton_grpc_error_the_first_failure_ends_the_stream_with_its_status(edge: Edge, value: str) -> None:
    held(edge)
    stream = edge.stream(metadata=(("triton_grpc_error", value),))
    await stream.send(infer_request("held"), infer_request("unknown", model="missing"))
    error = await failure(stream.rest())
    assert (error.code(), error.details()) == (Code.NOT_FOUND, "Request for unknown model: 'missing' is not found")
    assert all(each.is_over for each in edge.client.streams)


async def test_many_streams_with_many_requests_all_get_their_responses(edge: Edge) -> None:
    async def one(number: int) -> None:
        stream = edge.stream()
        await stream.send(*(infer_request(f"{number}-{position}") for position in range(20)))
        assert ids(await stream.rest()) == [f"{number}-{position}" for position in range(20)]

    await asyncio.gather(*(one(number) for number in range(20)))


async def test_health_watch_reports_each_change_and_ends_when_draining(edge: Edge) -> None:
    watch = edge.channel.unary_stream(f"/{HEALTH_SERVICE}/Watch")(
        health_pb2.HealthCheckRequest(service="adder").SerializeToString()
    )
    seen = [health_pb2.HealthCheckResponse.FromString(await watch.read()).status]
    for change in (
        lambda: edge.directory.remove(1),
        lambda: edge.directory.add(instance(9, tensor_card())),
        edge.readiness.start_draining,
    ):
        change()
        seen.append(health_pb2.HealthCheckResponse.FromString(await watch.read()).status)
    assert await watch.read() is grpc.aio.EOF
    assert seen == [1, 2, 1, 2]


# Deadlines and cancelled calls


async def test_a_deadline_travels_and_ends_the_call(edge: Edge) -> None:
    held(edge)
    call = asyncio.create_task(failure(edge.infer(infer_request(), timeout=expiring(0.3))))
    request = await edge.client.next_stream()
    assert (await call).code() is Code.DEADLINE_EXCEEDED
    await over(request)
    assert request.deadline is not None


async def test_a_client_that_cancels_cancels_the_instance(edge: Edge) -> None:
    held(edge)
    call = edge.channel.unary_unary(INFER)(infer_request().SerializeToString())
    request = await edge.client.next_stream()
    call.cancel()
    await over(request)
    assert request.cancelled


async def test_a_client_that_cancels_a_stream_cancels_all_its_requests(edge: Edge, stream: Stream) -> None:
    held(edge)
    await stream.send(infer_request("a"), infer_request("b"), infer_request("c"))
    await edge.client.opened_streams(3)
    stream.call.cancel()
    await over(*edge.client.streams)
    assert all(each.cancelled for each in edge.client.streams)


async def test_a_client_that_disconnects_cancels_all_its_requests(edge: Edge, stream: Stream) -> None:
    held(edge)
    await stream.send(infer_request("a"), infer_request("b"))
    requests = await edge.client.opened_streams(2)
    await edge.channel.close()
    await over(*requests)
    assert all(each.cancelled for each in requests)


# Messages


async def test_messages_above_the_limit_are_refused_in_both_directions(options: GrpcOptions) -> None:
    async with open_edge(tensor_card(), options=replace(options, max_message_bytes=10_000)) as edge:
        assert (await failure(edge.infer(infer_request(count=3000)))).code() is Code.RESOURCE_EXHAUSTED
        edge.client.respond = lambda stream: stream.end(bytes(20_000))
        error = await failure(edge.infer(infer_request()))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert error.details() == "the response has 20000 bytes; messages are limited to 10000"


async def test_a_compressed_request_is_taken(edge: Edge) -> None:
    request = infer_request(count=50_000)
    response = await edge.infer(request, compression=grpc.Compression.Gzip)
    assert response.raw_output_contents[0] == request.raw_input_contents[0]


def call_headers(accepted: str) -> bytes:
    """Return the headers of a call to `echo` by a client that takes responses in these encodings."""
    name = b"grpc-accept-encoding"
    return (
        request_headers("/test.Echo/Say", "localhost")
        + b"\x00" + bytes((len(name),)) + name + bytes((len(accepted),)) + accepted.encode()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("compression", "accepted", "wbits"),
    [
        (GrpcCompression.GZIP, "identity,deflate,gzip", 31),
        (GrpcCompression.DEFLATE, "identity,deflate,gzip", 15),
        (GrpcCompression.GZIP, "deflate", 15),
        (GrpcCompression.GZIP, "identity", None),
        (GrpcCompression.NONE, "identity,deflate,gzip", None),
    ],
)
async def test_a_response_is_compressed_as_both_sides_want(
    options: GrpcOptions, compression: GrpcCompression, accepted: str, wbits: int | None
) -> None:
    """`wbits` as in `zlib`: 31 demands gzip's header, 15 that of deflate; None: the response is not compressed."""
    async with serve_grpc(replace(options, compression=compression), ECHO) as server:
        connection = await connect("127.0.0.1", server.port)
        async with asyncio.timeout(WAIT_S):
            reply = connection.call(call_headers(accepted), message(PAYLOAD), keep=True)
            await reply.done
        connection.close()
    assert (reply.status, reply.messages) == (0, 1), reply.detail
    assert reply.body is not None
    flag, body = reply.body[0], bytes(reply.body[5:])
    assert flag == (0 if wbits is None else 1)
    assert (body if wbits is None else zlib.decompress(body, wbits)) == PAYLOAD


async def test_a_compressed_response_is_decompressed_by_grpcs_own_client(options: GrpcOptions) -> None:
    async with served(replace(options, compression=GrpcCompression.GZIP), ECHO) as channel:
        assert await channel.unary_unary("/test.Echo/Say")(PAYLOAD, timeout=WAIT_S) == PAYLOAD


# Ports and TLS


async def test_a_port_that_is_taken_is_a_configuration_error(options: GrpcOptions) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot be opened|cannot listen on"):
            async with serve_grpc(replace(options, port=taken.getsockname()[1]), ECHO):
                pass


async def test_two_servers_share_a_port_if_configured(options: GrpcOptions) -> None:
    async with (
        serve_grpc(options, ECHO, share_port=True) as first,
        serve_grpc(replace(options, port=first.port), ECHO, share_port=True) as second,
    ):
        assert second.port == first.port


async def test_a_certificate_that_is_missing_is_a_configuration_error(options: GrpcOptions, tmp_path: Path) -> None:
    missing = str(tmp_path / "no")
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        async with serve_grpc(replace(options, port_tls=PortTlsOptions(tls_cert_file=missing, tls_key_file=missing)), ECHO):
            pass


async def test_tls_serves_the_clients_of_a_ca_and_follows_its_files(options: GrpcOptions, tmp_path: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    roots, trusted = write_ca(ca, tmp_path / "ca.pem"), write_ca(ca, tmp_path / "clients.pem")
    server, client, stranger = issue(ca, tmp_path, "server"), issue(ca, tmp_path, "client"), issue(other, tmp_path, "stranger")
    files = PortTlsOptions(tls_cert_file=str(server.cert), tls_key_file=str(server.key), tls_client_ca_file=str(trusted))
    secured = replace(options, port_tls=files)
    async with serve_grpc(secured, ECHO) as running:

        async def serves(*pair: bytes) -> bool:
            credentials = grpc.ssl_channel_credentials(roots.read_bytes(), *pair)
            own_connection = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.secure_channel(f"127.0.0.1:{running.port}", credentials, own_connection) as channel:
                return await status(channel, "/test.Echo/Say", timeout=WAIT_S) is Code.OK

        known, unknown = (
            (client.key.read_bytes(), client.cert.read_bytes()),
            (stranger.key.read_bytes(), stranger.cert.read_bytes()),
        )
        assert await serves(*known)
        assert not await serves()
        assert not await serves(*unknown)
        write_ca(other, trusted)
        async with asyncio.timeout(WAIT_S):
            while not await serves(*unknown):
                await asyncio.sleep(0.1)
        assert not await serves(*known)


# Keys


def guard_of(tmp_path: Path) -> tuple[Guard, str]:
    path, key = tmp_path / "keys", make_key()
    path.write_text(entry_for(key, "team"))
    return Guard(Accounts(Watched("keys", (path,), lambda: read_keys(path)))), key


SURFACES = {"Infer": Surface.INFERENCE, "Load": Surface.MODEL_REPOSITORY, "Trace": Surface.TRACE, "Index": Surface.STATISTICS}


async def test_a_call_without_a_key_is_refused_before_its_message_and_its_handler(options: GrpcOptions, tmp_path: Path) -> None:
    read = 0

    async def count(request: bytes | PendingMessage, context: Context) -> bytes:
        nonlocal read
        read += 1
        return await read_message(request)

    guard, key = guard_of(tmp_path)
    operations = [unary(f"/test.Keys/{name}", count, surface) for name, surface in SURFACES.items()]
    operations += [unary("/test.Keys/Act", count, is_action=True), unary("/test.Keys/Health", count, Surface.HEALTH)]
    async with served(options, guarded(operations, guard), guarded=True) as channel:
        for name in (*SURFACES, "Act"):
            assert await status(channel, f"/test.Keys/{name}") is Code.UNAUTHENTICATED
            call = channel.stream_unary(f"/test.Keys/{name}")()  # sends headers, and no message
            async with asyncio.timeout(WAIT_S):
                assert await call.code() is Code.UNAUTHENTICATED
        assert read == 0
        assert await status(channel, "/test.Keys/Health") is Code.OK
        with_key = (("x-api-key", key),)
        for name in ("Infer", "Index", "Act"):
            assert await channel.unary_unary(f"/test.Keys/{name}")(b"x", metadata=with_key) == b"x"
        assert (await failure(channel.unary_unary("/test.Keys/Load")(b"x", metadata=with_key))).code() is Code.PERMISSION_DENIED
    assert read == 4


async def test_a_guarded_call_without_a_message_is_refused(options: GrpcOptions) -> None:
    async with served(options, ECHO, guarded=True) as channel:
        call = channel.stream_unary("/test.Echo/Say")()
        await call.done_writing()
        assert await call.code() is Code.UNIMPLEMENTED


# Draining


async def test_stopping_lets_running_requests_finish(edge: Edge) -> None:
    held(edge)
    call = asyncio.create_task(edge.infer(infer_request()))
    request = await edge.client.next_stream()
    stop = asyncio.create_task(edge.server.stop(30.0))
    await asyncio.sleep(0)
    echo_tensor(request)
    assert (await call).id == "7"
    await stop


async def test_stopping_cuts_what_does_not_finish(edge: Edge) -> None:
    held(edge)
    call = asyncio.create_task(failure(edge.infer(infer_request())))
    request = await edge.client.next_stream()
    await edge.server.stop(0.05)
    assert (await call).code() in (Code.UNAVAILABLE, Code.CANCELLED)
    assert request.is_over


async def test_a_draining_process_serves_accepted_requests_and_ends_the_stream(edge: Edge, stream: Stream) -> None:
    held(edge)
    await stream.send(infer_request("a"))
    request: FakeStream
    [request] = await edge.client.opened_streams(1)
    edge.drain.start()
    echo_tensor(request)
    assert (await stream.read()).infer_response.id == "a"
    assert (await failure(stream.read())).code() is Code.UNAVAILABLE


async def test_idle_streams_do_not_hold_up_a_shutdown(edge: Edge, stream: Stream) -> None:
    await stream.send(infer_request("a"))
    await stream.read()
    edge.drain.start()
    await edge.server.stop(60.0)
    assert await stream.call.code() is Code.UNAVAILABLE


async def test_streams_that_come_while_a_shutdown_waits_for_others_are_unavailable(options: GrpcOptions) -> None:
    finish = asyncio.Event()
    entered = asyncio.Event()

    async def hold(unused: object, context: Context) -> None:
        while isinstance(await context.read(), bytes):
            entered.set()
            await finish.wait()
            await context.write(b"done")

    async with (
        serve_grpc(options, [bidirectional(STREAM, hold)]) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        method = channel.stream_stream(STREAM)
        accepted = method()
        await accepted.write(b"one")
        await entered.wait()
        stopping = asyncio.create_task(running.stop(5))
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)  # the client knows that it has begun
        for _ in range(20):
            assert await method().code() is Code.UNAVAILABLE
        finish.set()
        assert await accepted.read() == b"done"
        await accepted.done_writing()
        assert await accepted.code() is Code.OK
        await stopping
        assert await method().code() is Code.UNAVAILABLE


def test_no_other_test_opens_the_reference() -> None:
    """`test_server.py` looks at its name in the log."""
    opening = {
        file.relative_to(TESTS).as_posix()
        for file in TESTS.rglob("*.py")
        if "GRPCIO" in (source := file.read_text()) or ("integration" in file.parts and '"grpcio"' in source)
    }
    assert opening == {
        "integration/test_grpc_contract.py",
        "unit/frontend/api/rpc/test_grpc_contract.py",
        "unit/frontend/api/rpc/test_server.py",
    }
