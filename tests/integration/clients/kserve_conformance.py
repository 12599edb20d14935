"""What Triton's own client sees of a KServe gRPC server. Run as `kserve_conformance HOST:PORT`; prints one JSON line per case.

A program of its own: tritonclient's messages and this project's cannot be loaded into one process.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import ml_dtypes
import numpy as np
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

SERVICE = "/inference.GRPCInferenceService/"
FIXED = "org/fixed.v1"
NUMPY = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}


@dataclass(frozen=True)
class Server:
    target: str
    client: triton.InferenceServerClient
    channel: grpc.aio.Channel

    async def call(self, method: str, data: bytes, **options: Any) -> bytes:
        return await self.channel.unary_unary(SERVICE + method)(data, timeout=120, **options)

    async def infer(self, request: pb.ModelInferRequest, **options: Any) -> pb.ModelInferResponse:
        return pb.ModelInferResponse.FromString(await self.call("ModelInfer", request.SerializeToString(), **options))


Case = Callable[[Server], Awaitable[None]]
good: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(run: Case) -> Case:
        assert name not in good
        good[name] = run
        return run

    return add


def tensor(name: str, values: np.ndarray, datatype: str) -> triton.InferInput:
    made = triton.InferInput(name, list(values.shape), datatype)
    made.set_data_from_numpy(values)
    return made


async def fails(call: Awaitable[Any], status: str, *words: str) -> None:
    try:
        response = await call
    except InferenceServerException as error:
        assert error.status() == f"StatusCode.{status}", (error.status(), error.message())
        for word in words:
            assert word in error.message(), error.message()
    except grpc.aio.AioRpcError as error:
        assert error.code().name == status, (error.code(), error.details())
        for word in words:
            assert word in (error.details() or ""), error.details()
    else:
        raise AssertionError(f"the request was served: {response}")


def raw_request(model: str, *inputs: tuple[str, str, Sequence[int], bytes], **fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, **fields)
    for name, datatype, shape, data in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)
    return request


def int32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def element(data: bytes) -> bytes:
    """One BYTES element."""
    return len(data).to_bytes(4, "little") + data


def fixed(**fields: Any) -> pb.ModelInferRequest:
    """A request that the model takes."""
    x, s = ("X", "INT32", [2, 3], int32(*range(6))), ("S", "FP32", [], np.float32(1.5).tobytes())
    return raw_request(FIXED, x, s, **fields)


# Health and metadata


@case("server_live")
async def _(server: Server) -> None:
    assert await server.client.is_server_live()


@case("server_ready")
async def _(server: Server) -> None:
    assert await server.client.is_server_ready()


@case("server_metadata")
async def _(server: Server) -> None:
    metadata = await server.client.get_server_metadata()
    assert metadata.name == "dynamo"
    assert metadata.version
    assert "model_configuration" in metadata.extensions


@case("model_ready")
async def _(server: Server) -> None:
    assert await server.client.is_model_ready("types")
    assert await server.client.is_model_ready(FIXED, "3")


@case("model_ready of what is not there is false")
async def _(server: Server) -> None:
    for name, version in [
        ("missing", ""),
        (FIXED, "2"),
        ("", ""),
        ("a.b/c", ""),
        (">", ""),
        ("*", ""),
        ("x" * 10_000, ""),
        ("größe", ""),
    ]:
        assert not await server.client.is_model_ready(name, version)


@case("settings and shared memory can be read")
async def _(server: Server) -> None:
    assert (await server.client.get_trace_settings()).settings["trace_level"].value == ["OFF"]
    assert (await server.client.get_log_settings()).settings["log_info"].bool_param
    assert not (await server.client.get_system_shared_memory_status()).regions
    assert not (await server.client.get_cuda_shared_memory_status()).regions


@case("a region that is not there cannot be registered")
async def _(server: Server) -> None:
    try:
        await server.client.register_system_shared_memory("x", "/x", 10)
    except InferenceServerException as error:
        assert "Unable to open shared memory region" in error.message()
    else:
        raise AssertionError("it was registered")


@case("model_metadata of a model that batches")
async def _(server: Server) -> None:
    metadata = await server.client.get_model_metadata("batchy")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [("A", "FP32", [-1, 2]), ("B", "INT64", [-1, 1])]


@case("model_metadata lists versions")
async def _(server: Server) -> None:
    assert list((await server.client.get_model_metadata(FIXED)).versions) == ["1", "3"]


@case("model_config of a model that batches has shapes without the batch")
async def _(server: Server) -> None:
    config = (await server.client.get_model_config("batchy")).config
    assert config.max_batch_size == 4
    assert [list(t.dims) for t in config.input] == [[2], [1]]


@case("model_config tells decoupled models")
async def _(server: Server) -> None:
    assert (await server.client.get_model_config("repeater")).config.model_transaction_policy.decoupled


@case("repository_index")
async def _(server: Server) -> None:
    index = await server.client.get_model_repository_index()
    assert {(m.name, m.version) for m in index.models} >= {("types", "1"), (FIXED, "1"), (FIXED, "3")}
    assert all(m.state == "READY" for m in index.models)


@case("statistics count what was served")
async def _(server: Server) -> None:
    async def served() -> int:
        statistics = await server.client.get_inference_statistics(FIXED)
        return sum(m.inference_stats.success.count for m in statistics.model_stats)

    before = await served()
    await server.infer(fixed())
    assert await served() == before + 1


@case("statistics of all models")
async def _(server: Server) -> None:
    statistics = await server.client.get_inference_statistics()
    assert {m.name for m in statistics.model_stats} >= {"types", FIXED, "batchy"}


# Tensors


def _round_trip(datatype: str, typed: bool) -> Case:
    async def run(server: Server) -> None:
        if datatype == "BYTES":
            values = np.array([b"", b"a", "größe".encode(), bytes(range(256))], object)
        elif datatype == "BOOL":
            values = np.array([True, False, True])
        elif datatype in NUMPY and np.issubdtype(NUMPY[datatype], np.integer):
            limits = np.iinfo(NUMPY[datatype])
            values = np.array([limits.min, 0, 1, limits.max], NUMPY[datatype])
        else:
            values = np.array([0.0, -1.5, 2.25, 3.0], NUMPY[datatype])
        if not typed:
            result = await server.client.infer("types", [tensor(datatype, values, datatype)])
            assert len(result.get_response().raw_output_contents) == 1
            assert list(result.as_numpy(datatype)) == list(values)
            return
        field = {"BOOL": "bool", "FP32": "fp32", "FP64": "fp64", "INT64": "int64", "UINT64": "uint64", "BYTES": "bytes"}.get(
            datatype, "uint" if datatype.startswith("U") else "int"
        )
        request = pb.ModelInferRequest(model_name="types")
        contents = request.inputs.add(name=datatype, datatype=datatype, shape=[len(values)]).contents
        getattr(contents, f"{field}_contents").extend(values.tolist())
        response = await server.infer(request)
        assert list(blocking.InferResult(response).as_numpy(datatype)) == list(values)

    return run


for _datatype in (*NUMPY, "BYTES"):
    good[f"{_datatype} raw"] = _round_trip(_datatype, typed=False)
    if _datatype != "FP16":
        good[f"{_datatype} typed"] = _round_trip(_datatype, typed=True)


@case("BF16 raw")
async def _(server: Server) -> None:
    data = np.array([1.0, -2.5, 3.0], np.float32).view(np.uint16)[1::2].tobytes()  # the upper halves
    assert (await server.infer(raw_request("types", ("BF16", "BF16", [3], data)))).raw_output_contents[0] == data


@case("BF16 from and to numpy, as clients since 2.70 want it")
async def _(server: Server) -> None:
    values = np.array([1.0, -2.5, 3.0], ml_dtypes.bfloat16)
    result = await server.client.infer("types", [tensor("BF16", values, "BF16")])
    back = result.as_numpy("BF16")
    assert back.dtype == ml_dtypes.bfloat16 and back.tolist() == values.tolist()


@case("a model that no name resolves to is not ready, and no error")
async def _(server: Server) -> None:
    assert await server.client.is_model_ready("nowhere") is False
    assert await server.client.is_model_ready("types", "99") is False


@case("several inputs at once")
async def _(server: Server) -> None:
    a, b = np.arange(3, dtype=np.float32), np.arange(5, dtype=np.int64)
    result = await server.client.infer("types", [tensor("FP32", a, "FP32"), tensor("INT64", b, "INT64")])
    assert (result.as_numpy("FP32") == a).all()
    assert (result.as_numpy("INT64") == b).all()


@case("NaN payload bits survive")
async def _(server: Server) -> None:
    bits = np.array([0x7FA00001, 0xFFC12345, 0x7F800000], np.uint32).tobytes()
    assert (await server.infer(raw_request("types", ("FP32", "FP32", [3], bits)))).raw_output_contents[0] == bits


@case("an empty tensor")
async def _(server: Server) -> None:
    response = await server.infer(raw_request("types", ("FP32", "FP32", [0], b"")))
    assert (list(response.outputs[0].shape), response.raw_output_contents[0]) == ([0], b"")


@case("a scalar")
async def _(server: Server) -> None:
    response = await server.infer(fixed())
    scalar = next(i for i, output in enumerate(response.outputs) if output.name == "S")
    assert (list(response.outputs[scalar].shape), response.raw_output_contents[scalar]) == ([], np.float32(1.5).tobytes())


@case("no inputs where all are optional")
async def _(server: Server) -> None:
    assert not (await server.infer(pb.ModelInferRequest(model_name="types"))).outputs


@case("a tensor of 24 MiB")
async def _(server: Server) -> None:
    data = np.random.default_rng(1).bytes(24 * 2**20)
    response = await server.infer(raw_request("types", ("UINT8", "UINT8", [len(data)], data)))
    assert response.raw_output_contents[0] == data


@case("a batch")
async def _(server: Server) -> None:
    a, b = np.ones((3, 2), np.float32), np.ones((3, 1), np.int64)
    result = await server.client.infer("batchy", [tensor("A", a, "FP32"), tensor("B", b, "INT64")])
    assert result.as_numpy("A").shape == (3, 2)


@case("requested outputs are filtered and come in the order of the model")
async def _(server: Server) -> None:
    request = fixed()
    request.outputs.add(name="S")
    assert [output.name for output in (await server.infer(request)).outputs] == ["S"]
    request.outputs.add(name="X")
    assert [output.name for output in (await server.infer(request)).outputs] == ["X", "S"]


@case("id, model and version come back")
async def _(server: Server) -> None:
    response = await server.infer(fixed(id="größe ☃", model_version="1"))
    assert (response.id, response.model_name, response.model_version) == ("größe ☃", FIXED, "1")


@case("without a version the newest answers")
async def _(server: Server) -> None:
    assert (await server.infer(fixed())).model_version == "3"


@case("parameters of all kinds that Triton takes")
async def _(server: Server) -> None:
    request = fixed()
    request.parameters["b"].bool_param = True
    request.parameters["i"].int64_param = -(2**63)
    request.parameters["s"].string_param = "größe"
    request.parameters["d"].double_param = 0.1
    response = await server.infer(request)
    for key, value in request.parameters.items():
        assert response.parameters[key] == value


@case("priority, timeout and sequence parameters")
async def _(server: Server) -> None:
    a = np.arange(2, dtype=np.int32)
    options = {"priority": 1, "timeout": 10_000_000, "sequence_id": 5, "sequence_start": True, "sequence_end": True}
    result = await server.client.infer("types", [tensor("INT32", a, "INT32")], **options)
    assert (result.as_numpy("INT32") == a).all()


@case("gzip requests")
async def _(server: Server) -> None:
    a = np.zeros(100_000, np.float32)
    result = await server.client.infer("types", [tensor("FP32", a, "FP32")], compression_algorithm="gzip")
    assert result.as_numpy("FP32").shape == (100_000,)


@case("deflate requests are taken")
async def _(server: Server) -> None:
    a = np.zeros(100_000, np.float32)
    result = await server.client.infer("types", [tensor("FP32", a, "FP32")], compression_algorithm="deflate")
    assert result.as_numpy("FP32").shape == (100_000,)


@case("metadata of the client")
async def _(server: Server) -> None:
    a = np.arange(2, dtype=np.int32)
    headers = {
        "x-request-id": "my-id",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-any": "y" * 9000,
    }
    await server.client.infer("types", [tensor("INT32", a, "INT32")], headers=headers)


@case("64 requests at once")
async def _(server: Server) -> None:
    async def one(number: int) -> None:
        values = np.full(10, number, np.int32)
        result = await server.client.infer("types", [tensor("INT32", values, "INT32")])
        assert (result.as_numpy("INT32") == values).all()

    await asyncio.gather(*(one(number) for number in range(64)))


@case("the classifier names its classes")
async def _(server: Server) -> None:
    image = np.zeros((1, 8, 8), np.float32)
    image[0, :, 3:5] = 1.0
    outputs = [triton.InferRequestedOutput("probability", class_count=3)]
    result = await server.client.infer("classifier", [tensor("image", image, "FP32")], outputs=outputs)
    best = result.as_numpy("probability").reshape(-1)[0].decode()
    assert best.split(":")[1:] == ["1", "one"], best


@case("the blocking client works as well")
async def _(server: Server) -> None:
    def run() -> None:
        with blocking.InferenceServerClient(server.target) as client:
            made = blocking.InferInput("INT32", [2], "INT32")
            made.set_data_from_numpy(np.array([4, 5], np.int32))
            assert client.infer("types", [made]).as_numpy("INT32").tolist() == [4, 5]
            done: queue.Queue[Any] = queue.Queue()
            client.async_infer("types", [made], lambda result, error: done.put((result, error)))
            result, error = done.get(timeout=120)
            assert error is None
            assert result.as_numpy("INT32").tolist() == [4, 5]

    await asyncio.to_thread(run)


# Language models. `echo-llm` says the prompt again, one byte per token


def text_request(
    *prompts: str, model: str = "echo-llm", parameters: dict[str, Any] | None = None, **inputs: tuple[str, Any]
) -> pb.ModelInferRequest:
    """A text request; `inputs` are (datatype, value) by name, typed parameters go by their Python type.

    As many tokens are asked for as the first prompt has bytes, unless told otherwise.
    """
    parameters = dict(parameters or {})
    if prompts and "max_tokens" not in inputs:
        parameters.setdefault("max_tokens", max(1, len(prompts[0].encode())))
    request = pb.ModelInferRequest(model_name=model, id="t")
    if prompts:
        request.inputs.add(name="text_input", datatype="BYTES", shape=[len(prompts)])
        request.raw_input_contents.append(b"".join(element(prompt.encode()) for prompt in prompts))
    for name, (datatype, value) in inputs.items():
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        data = element(value.encode()) if datatype == "BYTES" else np.array([value], NUMPY[datatype]).tobytes()
        request.raw_input_contents.append(data)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def elements(data: bytes) -> list[str]:
    texts = []
    while data:
        size = int.from_bytes(data[:4], "little")
        texts.append(data[4 : 4 + size].decode())
        data = data[4 + size :]
    return texts


def texts_of(response: pb.ModelInferResponse, output: str = "text_output") -> list[str]:
    names = [tensor.name for tensor in response.outputs]
    return elements(response.raw_output_contents[names.index(output)])


async def text_stream(server: Server, request: pb.ModelInferRequest) -> list[pb.ModelStreamInferResponse]:
    call = server.channel.stream_stream(SERVICE + "ModelStreamInfer")(timeout=120)
    await call.write(request.SerializeToString())
    await call.done_writing()
    responses = []
    while isinstance(data := await call.read(), bytes):
        responses.append(pb.ModelStreamInferResponse.FromString(data))
    return responses


@case("text: metadata and config of a language model")
async def _(server: Server) -> None:
    metadata = await server.client.get_model_metadata("echo-llm")
    assert [(t.name, t.datatype) for t in metadata.inputs][:2] == [("text_input", "BYTES"), ("streaming", "BOOL")]
    assert [t.name for t in metadata.outputs] == ["text_output", "finish_reason"]
    config = (await server.client.get_model_config("echo-llm")).config
    assert config.input[1].optional


@case("text: one answer")
async def _(server: Server) -> None:
    response = await server.infer(text_request("größe ☃"))
    assert texts_of(response) == ["größe ☃"]
    assert texts_of(response, "finish_reason") == ["length"]


@case("text: Triton's client, typed and raw alike")
async def _(server: Server) -> None:
    for shape in ([1], [1, 1]):
        prompt = np.array([b"hello"], object).reshape(shape)
        result = await server.client.infer("echo-llm", [tensor("text_input", prompt, "BYTES")], parameters={"max_tokens": 4})
        assert result.as_numpy("text_output").reshape(-1).tolist() == [b"hell"]
    request = pb.ModelInferRequest(model_name="echo-llm")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    request.parameters["max_tokens"].int64_param = 5
    assert (await server.infer(request)).raw_output_contents[0] == b"\5\0\0\0hello"


@case("text: a batch of prompts")
async def _(server: Server) -> None:
    assert texts_of(await server.infer(text_request("one", "two", "six"))) == ["one", "two", "six"]


@case("text: max_tokens as a parameter or as an input")
async def _(server: Server) -> None:
    assert texts_of(await server.infer(text_request("abcdef", parameters={"max_tokens": 2}))) == ["ab"]
    assert texts_of(await server.infer(text_request("abcdef", max_tokens=("INT32", 3)))) == ["abc"]


@case("text: several choices")
async def _(server: Server) -> None:
    assert texts_of(await server.infer(text_request("ab", parameters={"n": 3}))) == ["ab"] * 3


@case("text: a stop string")
async def _(server: Server) -> None:
    response = await server.infer(text_request("hello world", parameters={"stop": " wor"}))
    assert (texts_of(response), texts_of(response, "finish_reason")) == (["hello"], ["stop"])


@case("text: every sampling setting is taken")
async def _(server: Server) -> None:
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "frequency_penalty": 0.1}
    settings |= {"presence_penalty": 0.1, "ignore_eos": True, "max_tokens": 2}
    assert texts_of(await server.infer(text_request("ab", parameters=settings))) == ["ab"]


@case("text: log probabilities")
async def _(server: Server) -> None:
    response = await server.infer(text_request("ab", parameters={"logprobs": 0}))
    assert len(json.loads(texts_of(response, "logprobs")[0])) == 2


@case("text: a conversation, by parameter or input")
async def _(server: Server) -> None:
    (by_parameter,) = texts_of(await server.infer(text_request("hi", parameters={"chat": True, "max_tokens": 20})))
    messages = json.dumps([{"role": "user", "content": "hi"}])
    (by_input,) = texts_of(await server.infer(text_request(messages=("BYTES", messages), parameters={"max_tokens": 20})))
    assert by_parameter == by_input == "user: hi\nassistant: "


@case("text: streamed")
async def _(server: Server) -> None:
    responses = await text_stream(server, text_request("hello", streaming=("BOOL", True)))
    assert "".join(texts_of(r.infer_response)[0] for r in responses) == "hello"
    assert [r.infer_response.parameters["triton_final_response"].bool_param for r in responses] == [False] * (
        len(responses) - 1
    ) + [True]
    assert texts_of(responses[-1].infer_response, "finish_reason") == ["length"]


@case("text: streams of several prompts and choices")
async def _(server: Server) -> None:
    responses = await text_stream(server, text_request("ab", "cd", streaming=("BOOL", True), parameters={"n": 2}))
    columns = zip(*(texts_of(r.infer_response) for r in responses), strict=True)
    assert ["".join(column) for column in columns] == ["ab", "ab", "cd", "cd"]


@case("text: not streamed on a stream")
async def _(server: Server) -> None:
    (only,) = await text_stream(server, text_request("hello"))
    assert texts_of(only.infer_response) == ["hello"]


@case("text: 32 streams at once")
async def _(server: Server) -> None:
    async def one(number: int) -> None:
        prompt = f"{number} " * 50
        responses = await text_stream(server, text_request(prompt, streaming=("BOOL", True)))
        assert "".join(texts_of(r.infer_response)[0] for r in responses) == prompt

    await asyncio.gather(*(one(number) for number in range(32)))


# Streams


async def stream(server: Server, *requests: dict[str, Any], **options: Any) -> list[tuple[Any, Any]]:
    async def all_of_them() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield request

    return [pair async for pair in server.client.stream_infer(all_of_them(), stream_timeout=120.0, **options)]


def streamed(model: str, name: str, values: np.ndarray, datatype: str, **fields: Any) -> dict[str, Any]:
    return {"model_name": model, "inputs": [tensor(name, values, datatype)], **fields}


@case("stream: answers keep the order of requests")
async def _(server: Server) -> None:
    requests = [streamed("types", "INT32", np.array([n], np.int32), "INT32", request_id=str(n)) for n in range(50)]
    responses = await stream(server, *requests)
    assert [error for _, error in responses] == [None] * 50
    assert [result.get_response().id for result, _ in responses] == [str(n) for n in range(50)]


@case("stream: a decoupled model ends with an empty final answer")
async def _(server: Server) -> None:
    def run() -> list[Any]:
        with blocking.InferenceServerClient(server.target) as client:  # the asyncio client does not know the option
            done: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error: done.put((result, error)))
            text = blocking.InferInput("text", [1], "BYTES")
            text.set_data_from_numpy(np.array([b"one two three"], object))
            client.async_stream_infer("words", [text], enable_empty_final_response=True)
            results = [done.get(timeout=120)[0] for _ in range(4)]
            client.stop_stream()
            return results

    results = await asyncio.to_thread(run)
    words = [r.as_numpy("word")[0].decode() for r in results if r.get_response().outputs]
    assert words == ["one", "two", "three"]
    final = [r.get_response().parameters["triton_final_response"].bool_param for r in results]
    assert final == [False] * 3 + [True], final


@case("stream: a decoupled model without that wish sends its answers only")
async def _(server: Server) -> None:
    results = await stream(server, streamed("words", "text", np.array([b"a b"], object), "BYTES"))
    assert len(results) == 2


@case("stream: decoupled requests do not wait for each other")
async def _(server: Server) -> None:
    slow = streamed(
        "repeater", "X", np.array([1], np.int32), "INT32", request_id="slow", parameters={"repeat": 2, "delay_ms": 300}
    )
    quick = streamed("repeater", "X", np.array([2], np.int32), "INT32", request_id="quick", parameters={"repeat": 2})
    results = await stream(server, slow, quick)
    assert [r.get_response().id for r, _ in results] == ["quick", "quick", "slow", "slow"]


@case("stream: errors have the id of their request, and the stream lives on")
async def _(server: Server) -> None:
    channel = server.channel.stream_stream(SERVICE + "ModelStreamInfer")(timeout=120)
    bad = fixed(id="bad")
    bad.inputs[0].shape[:] = [9, 9]
    for request in (bad, raw_request("missing", id="none"), fixed(id="good")):
        await channel.write(request.SerializeToString())
    await channel.done_writing()
    responses = []
    while isinstance(data := await channel.read(), bytes):
        responses.append(pb.ModelStreamInferResponse.FromString(data))
    assert [(r.infer_response.id, bool(r.error_message)) for r in responses] == [("bad", True), ("none", True), ("good", False)]
    assert (await channel.code()).name == "OK"


@case("stream: real statuses where asked for")
async def _(server: Server) -> None:
    request = streamed("missing", "INT32", np.array([1], np.int32), "INT32")
    await fails(stream(server, request, headers={"triton_grpc_error": "true"}), "NOT_FOUND", "missing")


@case("stream: the blocking client")
async def _(server: Server) -> None:
    def run() -> None:
        with blocking.InferenceServerClient(server.target) as client:
            done: queue.Queue[Any] = queue.Queue()
            client.start_stream(lambda result, error: done.put((result, error)))
            made = blocking.InferInput("INT32", [1], "INT32")
            for number in range(5):
                made.set_data_from_numpy(np.array([number], np.int32))
                client.async_stream_infer("types", [made])
            for number in range(5):
                result, error = done.get(timeout=120)
                assert error is None
                assert result.as_numpy("INT32").tolist() == [number]
            client.stop_stream()

    await asyncio.to_thread(run)


# Requests that are refused: (request, status, words of the sentence). Each is sent by ModelInfer and by ModelStreamInfer


@dataclass(frozen=True)
class Bad:
    data: bytes
    status: str
    words: tuple[str, ...]


bad: dict[str, Bad] = {}


def refused(name: str, request: pb.ModelInferRequest | bytes, status: str = "INVALID_ARGUMENT", *words: str) -> None:
    assert name not in bad
    bad[name] = Bad(request if isinstance(request, bytes) else request.SerializeToString(), status, words)


def changed(
    change: Callable[[pb.ModelInferRequest], object], request: pb.ModelInferRequest | None = None
) -> pb.ModelInferRequest:
    made = fixed() if request is None else request
    change(made)
    return made


def set_input(index: int = 0, **fields: Any) -> Callable[[pb.ModelInferRequest], None]:
    def change(request: pb.ModelInferRequest) -> None:
        for name, value in fields.items():
            if name == "shape":
                request.inputs[index].shape[:] = value
            elif name == "raw":
                request.raw_input_contents[index] = value
            else:
                setattr(request.inputs[index], name, value)

    return change


def typed(datatype: str, shape: Sequence[int], **contents: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="types")
    request.inputs.add(name=datatype, datatype=datatype, shape=shape, contents=pb.InferTensorContents(**contents))
    return request


def batch(a: int, b: int) -> pb.ModelInferRequest:
    first = ("A", "FP32", [a, 2], bytes(8 * max(a, 0)))
    return raw_request("batchy", first, ("B", "INT64", [b, 1], bytes(8 * max(b, 0))))


def with_parameter(key: str, **value: Any) -> pb.ModelInferRequest:
    return changed(lambda r: r.parameters[key].CopyFrom(pb.InferParameter(**value)))


def utf8_less_id() -> bytes:
    return b"\x0a\x05types\x1a\x02\xff\xfe"


INVALID, MISSING = "INVALID_ARGUMENT", "NOT_FOUND"
refused("unknown model", raw_request("missing"), MISSING, "'missing'")
refused("empty model name", raw_request(""), MISSING)
refused("model name >", raw_request(">"), MISSING)
refused("model name *", raw_request("*"), MISSING)
refused("model name of 10 kB", raw_request("x" * 10_000), MISSING)
refused("model name that is not ASCII", raw_request("größe"), MISSING)
refused("model name a.b/c", raw_request("a.b/c"), MISSING, "'a.b/c'")
refused("unknown version", fixed(model_version="2"), MISSING, "version 2 ")
refused("version that is no number", fixed(model_version="latest"), INVALID, "'latest'")
refused("version of 10 kB", fixed(model_version="1" * 10_000), INVALID)
refused("no inputs", raw_request(FIXED), INVALID, "'X'")
refused("one input missing", raw_request(FIXED, ("X", "INT32", [2, 3], bytes(24))), INVALID, "'S'")
refused("unknown input", changed(set_input(name="Y")), INVALID, "'Y'")
refused("input without name", changed(set_input(name="")), INVALID)
refused("input name of 10 kB", changed(set_input(name="n" * 10_000)), INVALID)
refused("input twice", changed(set_input(1, name="X", datatype="INT32", shape=[2, 3], raw=bytes(24))), INVALID, "'X'")
refused("one input too many", raw_request(FIXED, *[(n, "INT32", [2, 3], bytes(24)) for n in "XSZ"]), INVALID, "'Z'")
refused("wrong datatype", changed(set_input(datatype="FP32")), INVALID, "'X'", "FP32")
refused("unknown datatype", changed(set_input(datatype="INT33")), INVALID, "<invalid>")
refused("empty datatype", changed(set_input(datatype="")), INVALID, "'X'")
refused("datatype TYPE_INT32", changed(set_input(datatype="TYPE_INT32")), INVALID, "<invalid>")
refused("datatype in small letters", changed(set_input(datatype="int32")), INVALID, "<invalid>")
refused("wrong shape", changed(set_input(shape=[3, 2])), INVALID, "'X'", "[3,2]")
refused("wrong rank", changed(set_input(shape=[6])), INVALID, "'X'")
refused("no shape", changed(set_input(shape=[])), INVALID, "'X'")
refused("a scalar with a shape", changed(set_input(1, shape=[1])), INVALID, "'S'")
refused("shape of 1000 dimensions", changed(set_input(shape=[1] * 1000)), INVALID, "'X'")
refused("negative dimension", raw_request("types", ("FP32", "FP32", [-1], bytes(4))), INVALID, "'FP32'", "-1")
refused("negative dimensions whose product fits", changed(set_input(shape=[-2, -3])), INVALID, "'X'")
refused("shape product overflows", raw_request("types", ("UINT8", "UINT8", [2**62], b"")), INVALID, "'UINT8'")
refused("shape product overflows in bytes", raw_request("types", ("FP64", "FP64", [2**61], b"")), INVALID, "'FP64'")
refused("shape product overflows to zero", changed(set_input(shape=[2**32, 2**32])), INVALID, "'X'")
refused("raw data too short", changed(set_input(raw=bytes(20))), INVALID, "'X'", "20")
refused("raw data too long", changed(set_input(raw=bytes(28))), INVALID, "'X'", "28")
refused("raw data cut in an element", changed(set_input(raw=bytes(23))), INVALID, "'X'")
refused("raw data empty", changed(set_input(raw=b"")), INVALID, "'X'")
refused("raw data for a scalar missing", changed(lambda r: r.raw_input_contents.pop()), INVALID, "unable to find data")
refused("raw data for one input too many", changed(lambda r: r.raw_input_contents.append(b"x")), INVALID, "raw_input_contents")
refused("no data at all", changed(lambda r: r.ClearField("raw_input_contents")), INVALID, "'X'")
refused(
    "raw and typed", changed(lambda r: r.inputs[0].contents.int_contents.extend(range(6))), INVALID, "'X'", "raw_input_contents"
)
refused("BYTES cut in the length", raw_request("types", ("BYTES", "BYTES", [1], b"\1\0")), INVALID, "'BYTES'")
refused("BYTES shorter than their length", raw_request("types", ("BYTES", "BYTES", [1], b"\5\0\0\0abc")), INVALID, "'BYTES'")
refused(
    "BYTES of 4 GiB by their length", raw_request("types", ("BYTES", "BYTES", [1], b"\xff\xff\xff\xffabc")), INVALID, "'BYTES'"
)
refused("BYTES with too few elements", raw_request("types", ("BYTES", "BYTES", [2], b"\1\0\0\0a")), INVALID, "'BYTES'")
refused("BYTES with too many elements", raw_request("types", ("BYTES", "BYTES", [1], b"\1\0\0\0a" * 2)), INVALID, "'BYTES'")
refused("a billion BYTES", raw_request("types", ("BYTES", "BYTES", [10**9], b"")), INVALID, "1000000000", "BYTES")
refused("typed UINT8 of 300", typed("UINT8", [1], uint_contents=[300]), INVALID, "'UINT8'", "300")
refused("typed INT8 of -129", typed("INT8", [1], int_contents=[-129]), INVALID, "'INT8'", "-129")
refused("typed INT16 of 40000", typed("INT16", [1], int_contents=[40000]), INVALID, "'INT16'", "40000")
refused("typed UINT16 of 65536", typed("UINT16", [1], uint_contents=[65536]), INVALID, "'UINT16'", "65536")
refused("typed FP16", typed("FP16", [1], fp32_contents=[1.0]), INVALID, "'FP16'")
refused("typed BF16", typed("BF16", [1], fp32_contents=[1.0]), INVALID, "'BF16'")
refused("typed in the wrong field", typed("INT32", [1], fp32_contents=[1.0]), INVALID, "'INT32'")
refused("typed in two fields", typed("INT32", [1], int_contents=[1], int64_contents=[1]), INVALID, "'INT32'")
refused("typed with too few elements", typed("FP32", [3], fp32_contents=[1.0]), INVALID, "'FP32'")
refused("typed with too many elements", typed("FP32", [1], fp32_contents=[1.0, 2.0]), INVALID, "'FP32'")
refused("typed with no elements", typed("FP32", [1]), INVALID, "'FP32'")
refused("batch of 0", batch(0, 0), INVALID, "'A'")
refused("batch above the model's", batch(5, 5), INVALID, "batch-size must be <= 4")
refused("batches that differ", batch(2, 3), INVALID, "'B'")
refused("unknown requested output", changed(lambda r: r.outputs.add(name="Z")), INVALID, "'Z'")
refused("requested output twice", changed(lambda r: (r.outputs.add(name="X"), r.outputs.add(name="X"))), INVALID, "'X'")
refused("requested output without name", changed(lambda r: r.outputs.add()), INVALID)
refused("parameter without value", with_parameter("p"), INVALID, "'p'")
refused("reserved parameter", with_parameter("triton_secret", bool_param=True), INVALID, "'triton_'")
refused("priority as text", with_parameter("priority", string_param="high"), INVALID, "'priority'")
refused("timeout as text", with_parameter("timeout", string_param="1s"), INVALID, "'timeout'")
refused("empty final response as a number", with_parameter("triton_enable_empty_final_response", int64_param=1), INVALID)
refused(
    "classification of 0",
    changed(lambda r: r.outputs.add(name="X").parameters["classification"].CopyFrom(pb.InferParameter(int64_param=0))),
    INVALID,
    "classification",
)
refused(
    "shared memory",
    changed(lambda r: r.inputs[0].parameters["shared_memory_region"].CopyFrom(pb.InferParameter(string_param="r"))),
    INVALID,
    "'shared_memory_byte_size' must be specified",
)
refused("bytes that are no message", b"\xff" * 20, INVALID, "not a ModelInferRequest")
refused("a message cut off", fixed().SerializeToString()[:-3], INVALID)
refused("an id that is no UTF-8", utf8_less_id(), INVALID)
refused("a field of a wrong kind", b"\x08\x01\x2a\x03abc", INVALID)
refused(
    "a model that raises",
    raw_request("faulty", ("how", "BYTES", [1], element(b"raise"))),
    "INTERNAL",
    "the model broke",
)
refused(
    "a model that refuses",
    raw_request("faulty", ("how", "BYTES", [1], element(b"refuse"))),
    INVALID,
    "does not like this",
)
refused(
    "a model with a wrong output",
    raw_request("faulty", ("how", "BYTES", [1], element(b"name"))),
    "INTERNAL",
)
refused(
    "a model with a wrong type",
    raw_request("faulty", ("how", "BYTES", [1], element(b"type"))),
    "INTERNAL",
)


def faulty_echo(fault: str) -> pb.ModelInferRequest:
    request = fixed()
    request.parameters[fault].bool_param = True
    return request


refused("an echo that raises", faulty_echo("raise_exception"), "INTERNAL", "intentional exception")
refused("an echo without a datatype", faulty_echo("malformed_response"), "INTERNAL", "datatype")
refused("an echo without data", faulty_echo("data_mismatch"), "INTERNAL", "has 0 bytes where INT32 of shape [2, 3] needs 24")

LLM = "echo-llm"
refused("text: no input", text_request(), INVALID, "text_input")
refused("text: no text but a setting", text_request(max_tokens=("INT32", 3)), INVALID, "text_input")
refused("text: unknown input", text_request("a", text_inputs=("BYTES", "b")), INVALID, "text_inputs")
refused("text: unknown parameter", text_request("a", parameters={"max_tokns": 3}), INVALID, "max_tokns")
refused("text: unknown output", changed(lambda r: r.outputs.add(name="text"), text_request("a")), INVALID, "'text'")
refused("text: wrong datatype", raw_request(LLM, ("text_input", "INT32", [1], int32(1))), INVALID, "text_input", "BYTES")
refused("text: three dimensions", raw_request(LLM, ("text_input", "BYTES", [1, 2, 2], element(b"a") * 4)), INVALID, "text_input")
refused("text: no elements", raw_request(LLM, ("text_input", "BYTES", [0], b"")), INVALID, "text_input")
refused("text: no UTF-8", raw_request(LLM, ("text_input", "BYTES", [1], element(b"\xff"))), INVALID, "UTF-8")
refused("text: an element cut off", raw_request(LLM, ("text_input", "BYTES", [1], b"\x09\0\0\0abc")), INVALID, "text_input")
refused("text: an empty prompt", text_request(""), INVALID)
refused("text: max_tokens of 0", text_request("a", parameters={"max_tokens": 0}), INVALID, "max_tokens")
refused("text: max_tokens as text", text_request("a", parameters={"max_tokens": "many"}), INVALID, "max_tokens")
refused("text: max_tokens twice", text_request("a", parameters={"max_tokens": 1}, max_tokens=("INT32", 1)), INVALID, "max_tokens")
refused("text: a temperature of 9", text_request("a", parameters={"temperature": 9.0}), INVALID, "temperature")
refused("text: top_p of 0", text_request("a", parameters={"top_p": 0.0}), INVALID, "top_p")
refused("text: n of 100000", text_request("a", parameters={"n": 100_000}), INVALID, "'n'")
refused("text: streaming as a number", text_request("a", streaming=("INT32", 1)), INVALID, "streaming", "BOOL")
refused("text: streaming and stream", text_request("a", streaming=("BOOL", False), stream=("BOOL", False)), INVALID, "stream")
refused("text: messages that are no JSON", text_request(messages=("BYTES", "hello")), INVALID, "messages")
refused("text: a prompt above the context", text_request("a" * 200_000), INVALID)
refused("text: unknown version", changed(lambda r: setattr(r, "model_version", "9"), text_request("a")), MISSING, "version 9")

ONLY_UNARY: dict[str, Bad] = {
    "text: streaming on the unary call": Bad(
        text_request("a", streaming=("BOOL", True)).SerializeToString(), INVALID, ("ModelStreamInfer",)
    ),
    "a decoupled model asked for one answer": Bad(
        raw_request("repeater", ("X", "INT32", [1], int32(1))).SerializeToString(), "UNIMPLEMENTED", ("decoupled",)
    ),
}
METADATA: dict[str, tuple[tuple[str, str], str]] = {
    "an instance that is not there": (("x-dynamo-instance", "123"), "UNAVAILABLE"),
    "an instance that is none": (("x-dynamo-instance", "hello"), "INVALID_ARGUMENT"),
    "a priority that is none": (("x-dynamo-request-priority", "high"), "INVALID_ARGUMENT"),
}


async def refused_unary(server: Server, request: Bad) -> None:
    await fails(server.call("ModelInfer", request.data), request.status, *request.words)


async def refused_on_streams(server: Server) -> dict[str, str]:
    """All bad requests on one stream, with a good one after each: what is wrong, by case."""
    call = server.channel.stream_stream(SERVICE + "ModelStreamInfer")(timeout=120)
    problems: dict[str, str] = {}
    for name, request in bad.items():
        await call.write(request.data)
        response = pb.ModelStreamInferResponse.FromString(await call.read())
        if not response.error_message:
            problems[name] = "it was answered"
        elif any(word not in response.error_message for word in request.words):
            problems[name] = response.error_message
        await call.write(fixed(id=name).SerializeToString())
        response = pb.ModelStreamInferResponse.FromString(await call.read())
        if response.error_message or response.infer_response.id != name:
            problems[name] = f"the good request after it: {response.error_message or response.infer_response.id}"
    await call.done_writing()
    assert (await call.code()).name == "OK"
    return problems


UNIMPLEMENTED = {
    "load_model": lambda c: c.load_model("x"),
    "unload_model": lambda c: c.unload_model("x"),
    "register_cuda_shared_memory": lambda c: c.register_cuda_shared_memory("x", b"eA==", 0, 10),
}


async def main(target: str) -> None:
    unbounded = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with triton.InferenceServerClient(target) as client, grpc.aio.insecure_channel(target, options=unbounded) as channel:
        server = Server(target, client, channel)

        async def report(kind: str, name: str, run: Awaitable[Any]) -> None:
            problem = ""
            try:
                async with asyncio.timeout(120):
                    await run
            except Exception:
                problem = traceback.format_exc(limit=-4)
            print(json.dumps({"kind": kind, "case": name, "problem": problem}), flush=True)

        for name, run in good.items():
            await report("good", name, run(server))
        for name, request in {**bad, **ONLY_UNARY}.items():
            await report("bad", name, refused_unary(server, request))
        for name, (pair, status) in METADATA.items():
            await report("bad", name, fails(server.infer(fixed(), metadata=(pair,)), status))
        for name, call in UNIMPLEMENTED.items():
            await report("bad", name, fails(call(client), "UNIMPLEMENTED"))
        for name, problem in (await refused_on_streams(server)).items():
            print(json.dumps({"kind": "stream", "case": name, "problem": problem}), flush=True)
        await report("good", "after all that the server lives", good["server_live"](server))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
