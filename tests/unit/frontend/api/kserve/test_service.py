"""Every unary call of the KServe service, over a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from dynamo.common.errors import Cancelled, EngineError, InvalidRequest, ShuttingDown
from dynamo.common.tensors.tensors import decode_bytes
from dynamo.frontend.api.kserve.service import SERVICE
from dynamo.frontend.api.rpc.health import HEALTH_SERVICE, REFLECTION_SERVICES
from dynamo.protos import inference_pb2 as pb
from dynamo.protos.model_config_pb2 import ModelConfig, ModelInput
from tests.support.edge import Edge, WatchedThread, open_edge
from tests.support.fakes import FakeStream, TokenEngine, echo_tensor, instance, llm_card, tensor_card

Code = grpc.StatusCode


def adder_request(count: int = 2, **fields: object) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="adder", id="7", **fields)  # type: ignore[arg-type]
    request.inputs.add(name="x", datatype="INT32", shape=[count])
    request.raw_input_contents.append(b"\1\0\0\0" * count)
    return request


def text_request(*prompts: str, max_tokens: int = 3, model: str = "talker") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id="t")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(prompts)])
    tensor.contents.bytes_contents.extend(prompt.encode() for prompt in prompts)
    request.parameters["max_tokens"].int64_param = max_tokens
    return request


async def failure(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    async with open_edge(tensor_card(), llm_card(), tensor_card("repeater", decoupled=True)) as edge:
        edge.client.respond = echo_tensor
        yield edge


async def test_the_server_lives_and_is_ready_while_an_instance_is_attached(edge: Edge) -> None:
    assert pb.ServerLiveResponse.FromString(await edge.call("ServerLive", b"")).live
    assert pb.ServerReadyResponse.FromString(await edge.call("ServerReady", b"")).ready
    edge.directory.remove(1, 2, 3)
    await asyncio.sleep(0)
    assert not pb.ServerReadyResponse.FromString(await edge.call("ServerReady", b"")).ready
    assert pb.ServerLiveResponse.FromString(await edge.call("ServerLive", b"")).live


@pytest.mark.parametrize(
    ("name", "version", "ready"),
    [
        ("adder", "", True),
        ("adder", "1", True),
        ("adder", "9", False),
        ("missing", "", False),
        ("", "", False),
        ("a>*", "", False),
    ],
)
async def test_model_ready_responds_for_any_name(edge: Edge, name: str, version: str, ready: bool) -> None:
    response = await edge.call("ModelReady", pb.ModelReadyRequest(name=name, version=version))
    assert pb.ModelReadyResponse.FromString(response).ready is ready


async def test_metadata_and_config_describe_server_and_models(edge: Edge) -> None:
    server = pb.ServerMetadataResponse.FromString(await edge.call("ServerMetadata", b""))
    assert server.name == "dynamo"
    assert "statistics" in server.extensions
    metadata = pb.ModelMetadataResponse.FromString(await edge.call("ModelMetadata", pb.ModelMetadataRequest(name="adder")))
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("x", "INT32", [-1])]
    config = pb.ModelConfigResponse.FromString(await edge.call("ModelConfig", pb.ModelConfigRequest(name="repeater")))
    assert config.config.model_transaction_policy.decoupled


async def test_what_a_worker_says_of_a_model_at_length_is_gathered_beside_the_event_loop() -> None:
    own = ModelConfig(name="wide", input=[ModelInput(name=f"i{number}") for number in range(300)])
    async with open_edge(msgspec.structs.replace(tensor_card("wide"), model_config=own.SerializeToString())) as edge:
        edge.plane.descriptions = thread = WatchedThread()
        metadata = pb.ModelMetadataResponse.FromString(await edge.call("ModelMetadata", pb.ModelMetadataRequest(name="wide")))
        config = pb.ModelConfigResponse.FromString(await edge.call("ModelConfig", pb.ModelConfigRequest(name="wide")))
        assert len(metadata.inputs) == len(config.config.input) == 300
        assert thread.has_run == ["model_metadata", "model_config"]


@pytest.mark.parametrize("method", ["ModelMetadata", "ModelConfig"])
async def test_an_unknown_model_or_version_is_not_found(edge: Edge, method: str) -> None:
    for name, version, sentence in [
        ("missing", "", "Request for unknown model: 'missing' is not found"),
        ("adder", "9", "Request for unknown model: 'adder' version 9 is not found"),
    ]:
        error = await failure(edge.call(method, pb.ModelMetadataRequest(name=name, version=version)))
        assert (error.code(), error.details()) == (Code.NOT_FOUND, sentence)


async def test_an_unknown_model_or_version_has_no_statistics(edge: Edge) -> None:
    for name, version, sentence in [
        ("missing", "", "requested model 'missing' is not available"),
        ("adder", "9", "requested model version is not available for model 'adder'"),
    ]:
        error = await failure(edge.call("ModelStatistics", pb.ModelStatisticsRequest(name=name, version=version)))
        assert (error.code(), error.details()) == (Code.INVALID_ARGUMENT, sentence)


@pytest.mark.parametrize("method", ["ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"])
@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("x", "failed to get model version from specified version string 'x' (details: stol), version should be an integral"),
        ("01", "failed to get model version from specified version string '01'"),
        ("9" * 20, "failed to get model version"),
        ("9" * 1000, "failed to get model version"),
        ("-1", "invalid model version specified '-1' , version should be an integral value > 0"),
    ],
)
async def test_a_version_is_a_number(edge: Edge, method: str, version: str, sentence: str) -> None:
    error = await failure(edge.call(method, pb.ModelMetadataRequest(name="adder", version=version)))
    assert error.code() is Code.INVALID_ARGUMENT
    assert (error.details() or "").startswith(sentence)


async def test_the_index_lists_models_and_can_be_limited_to_ready_ones() -> None:
    async with open_edge(tensor_card(), declared=(tensor_card("later"),)) as edge:
        everything = pb.RepositoryIndexResponse.FromString(await edge.call("RepositoryIndex", b""))
        assert [(m.name, m.state) for m in everything.models] == [("adder", "READY"), ("later", "UNAVAILABLE")]
        ready = await edge.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))
        assert [m.name for m in pb.RepositoryIndexResponse.FromString(ready).models] == ["adder"]
        error = await failure(edge.call("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="other")))
        assert (error.code(), error.details()) == (Code.UNIMPLEMENTED, "'repository_name' specification is not supported")


async def test_a_declared_model_has_metadata_and_is_unavailable() -> None:
    async with open_edge(declared=(tensor_card(),)) as edge:
        await edge.call("ModelMetadata", pb.ModelMetadataRequest(name="adder"))
        error = await failure(edge.infer(adder_request()))
        assert (error.code(), error.details()) == (Code.UNAVAILABLE, "no instance is serving model 'adder' now")


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("SystemSharedMemoryStatus", "shared memory of clients is switched off"),
        ("SystemSharedMemoryRegister", "shared memory of clients is switched off"),
        ("SystemSharedMemoryUnregister", "shared memory of clients is switched off"),
        ("CudaSharedMemoryRegister", "this server reads no memory of GPUs"),
    ],
)
async def test_memory_that_cannot_be_shared_is_unimplemented_with_a_sentence(edge: Edge, method: str, sentence: str) -> None:
    error = await failure(edge.call(method, b""))
    assert error.code() is Code.UNIMPLEMENTED
    assert (error.details() or "").startswith(sentence)


async def test_loading_needs_a_worker_with_a_repository_and_a_request_that_makes_sense(edge: Edge) -> None:
    for method, kind in (
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest),
    ):
        assert (await failure(edge.call(method, kind(model_name="adder")))).code() is Code.UNIMPLEMENTED
        elsewhere = await failure(edge.call(method, kind(model_name="adder", repository_name="other")))
        assert elsewhere.details() == "'repository_name' specification is not supported"
        for wrong in (kind(), kind(model_name="a b")):
            assert (await failure(edge.call(method, wrong))).code() is Code.INVALID_ARGUMENT
    for method, kind, key, sentence in (
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest, "odd", "unrecognized load parameter 'odd'."),
        ("RepositoryModelLoad", pb.RepositoryModelLoadRequest, "config", "load parameter 'config', expected string_param."),
        ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest, "unload_dependents", "parameter, expected bool_param."),
    ):
        odd = kind(model_name="adder")
        odd.parameters[key].int64_param = 1
        error = await failure(edge.call(method, odd))
        assert error.code() is Code.INVALID_ARGUMENT
        assert (error.details() or "").endswith(sentence)


@pytest.mark.parametrize(
    "method", ["ModelReady", "ModelMetadata", "ModelConfig", "ModelInfer", "RepositoryIndex", "ModelStatistics"]
)
async def test_bytes_that_are_no_message_are_an_invalid_argument(edge: Edge, method: str) -> None:
    error = await failure(edge.call(method, b"\x0a\xff\xff\xff\xff\x7f"))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "the message is not a " in (error.details() or "")


async def test_a_request_that_does_not_fit_the_model_reaches_no_instance(edge: Edge) -> None:
    request = adder_request()
    request.inputs[0].datatype = "FP32"
    error = await failure(edge.infer(request))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "'x'" in (error.details() or "")
    assert edge.client.streams == []


@pytest.mark.parametrize("model", ["adder", "talker"])
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
async def test_a_request_has_at_most_4096_inputs_and_outputs(edge: Edge, kind: str, model: str) -> None:
    request = adder_request() if model == "adder" else text_request("x")
    tensors = getattr(request, kind)
    for _ in range(4097 - len(tensors)):
        tensors.add()  # of two bytes each
    error = await failure(edge.call("ModelInfer", request))
    assert (error.code(), error.details()) == (
        Code.INVALID_ARGUMENT,
        f"the request has 4097 {kind}; at most 4096 are allowed",
    )
    del tensors[-1]
    error = await failure(edge.call("ModelInfer", request))
    assert error.code() == Code.INVALID_ARGUMENT and "are allowed" not in (error.details() or "")


async def test_an_unknown_version_is_not_found(edge: Edge) -> None:
    assert (await failure(edge.infer(adder_request(model_version="3")))).code() is Code.NOT_FOUND


async def test_a_decoupled_model_wants_the_stream(edge: Edge) -> None:
    request = adder_request()
    request.model_name = "repeater"
    error = await failure(edge.infer(request))
    assert error.code() is Code.UNIMPLEMENTED
    assert "decoupled" in (error.details() or "")


@pytest.mark.parametrize(
    ("raised", "code", "details"),
    [
        (InvalidRequest("x is odd"), Code.INVALID_ARGUMENT, "x is odd"),
        (EngineError("out of memory"), Code.INTERNAL, "out of memory"),
        (ShuttingDown(), Code.UNAVAILABLE, "the server is shutting down and takes no new requests"),
        (Cancelled(), Code.CANCELLED, "the request was cancelled by its caller"),
    ],
)
async def test_what_an_instance_raises_becomes_its_status(edge: Edge, raised: Exception, code: Code, details: str) -> None:
    edge.client.respond = lambda stream: stream.fail(raised)  # type: ignore[arg-type]
    error = await failure(edge.infer(adder_request()))
    assert (error.code(), error.details()) == (code, details)


async def test_an_unforeseen_exception_is_an_internal_error_without_details(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    def broken(stream: FakeStream) -> None:
        raise RuntimeError("secret /path")

    edge.client.respond = broken
    error = await failure(edge.infer(adder_request()))
    assert (error.code(), error.details()) == (Code.INTERNAL, "internal error")
    assert [record.getMessage() for record in caplog.records if record.exc_info] == ["ModelInfer failed unforeseen, request 7"]


async def test_metadata_of_the_call_reaches_the_instance(edge: Edge) -> None:
    edge.directory.add(instance(0xABC, tensor_card()))
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    metadata = (("x-dynamo-instance", "abc"), ("x-request-id", "r-1"), ("traceparent", trace))
    await edge.infer(adder_request(), metadata=metadata)
    stream = edge.client.streams[0]
    assert stream.instance == 0xABC
    assert stream.headers["traceparent"] == trace
    assert "r-1" in stream.headers.values()


@pytest.mark.parametrize(
    ("metadata", "word"), [(("x-dynamo-instance", "zz"), "'zz'"), (("x-dynamo-request-priority", "high"), "must be an integer")]
)
async def test_metadata_that_cannot_be_read_is_refused(edge: Edge, metadata: tuple[str, str], word: str) -> None:
    error = await failure(edge.infer(adder_request(), metadata=(metadata,)))
    assert error.code() is Code.INVALID_ARGUMENT
    assert word in (error.details() or "")


@pytest.mark.parametrize("id_", ["", "x" * 10_000, "größe\n", "a.b/c", ">", "*"])
async def test_any_id_comes_back(edge: Edge, id_: str) -> None:
    request = adder_request()
    request.id = id_
    assert (await edge.infer(request)).id == id_


async def test_the_timeout_of_a_request_is_for_queues_and_no_deadline(edge: Edge) -> None:
    request = adder_request()
    request.parameters["timeout"].int64_param = 1
    await edge.infer(request)
    (stream,) = edge.client.streams
    assert stream.deadline is None


async def test_a_language_model_returns_one_complete_response(edge: Edge) -> None:
    edge.client.respond = TokenEngine([], Exception)  # type: ignore[arg-type]
    response = await edge.infer(text_request("ab", "c"))
    texts = decode_bytes(response.raw_output_contents[0], 2)
    assert (response.outputs[0].name, len(texts)) == ("text_output", 2)
    assert [len(text.split()) for text in texts] == [3, 3]
    assert decode_bytes(response.raw_output_contents[1], 2) == [b"length", b"length"]
    assert not response.parameters


async def test_one_failed_prompt_fails_the_batch_and_cancels_the_others(edge: Edge) -> None:
    def respond(stream: FakeStream) -> None:
        if len(edge.client.streams) == 2:
            stream.fail(EngineError("no"))

    edge.client.respond = respond
    error = await failure(edge.infer(text_request("a", "b", "c")))
    assert (error.code(), error.details()) == (Code.INTERNAL, "no")
    assert all(stream.is_over for stream in edge.client.streams)


async def test_streaming_is_not_for_the_unary_call(edge: Edge) -> None:
    request = text_request("a")
    request.parameters["streaming"].bool_param = True
    error = await failure(edge.infer(request))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "ModelStreamInfer" in (error.details() or "")


# Health and reflection


async def check(edge: Edge, service: str) -> int:
    call = edge.channel.unary_unary(f"/{HEALTH_SERVICE}/Check")
    response = await call(health_pb2.HealthCheckRequest(service=service).SerializeToString())
    return int(health_pb2.HealthCheckResponse.FromString(response).status)


@pytest.mark.parametrize("service", ["", SERVICE, "adder"])
async def test_health_check_follows_readiness(edge: Edge, service: str) -> None:
    assert await check(edge, service) == 1
    edge.readiness.start_draining()
    assert await check(edge, service) == 2


async def test_health_check_of_an_unknown_service_is_not_found(edge: Edge) -> None:
    assert (await failure(check(edge, "missing"))).code() is Code.NOT_FOUND


@pytest.mark.parametrize("service", REFLECTION_SERVICES)
async def test_reflection_lists_and_describes_the_services(edge: Edge, service: str) -> None:
    call = edge.channel.stream_stream(f"/{service}/ServerReflectionInfo")()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString())
    listed = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
    assert {SERVICE, HEALTH_SERVICE} <= {s.name for s in listed.list_services_response.service}
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE).SerializeToString())
    described = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
    assert b"ModelStreamInfer" in described.file_descriptor_response.file_descriptor_proto[0]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_reflection_does_not_hold_up_a_shutdown(edge: Edge) -> None:
    call = edge.channel.stream_stream(f"/{REFLECTION_SERVICES[0]}/ServerReflectionInfo")()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString())
    await call.read()
    edge.drain.start()
    await edge.server.stop(30.0)
    assert await call.code() is Code.UNAVAILABLE
