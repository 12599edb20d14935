"""KServe's REST paths over a real port, with instances in memory behind them."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import orjson
import pytest

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Overloaded
from dynamo.common.generation import FinishReason, request_decoder
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.tensors import DATATYPES, encode_bytes
from dynamo.frontend.api.http.json_pieces import Spliced
from dynamo.frontend.api.kserve.rest.generate import GeneratedChoice
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.config import HttpOptions, OverloadStatus
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.protos import inference_pb2 as pb
from dynamo.protos.model_config_pb2 import ModelConfig, ModelInput
from tests.support.edge import WatchedThread
from tests.support.fakes import FakeStream, tensor_card
from tests.support.http_edge import HttpEdge, Speaker, chat_card, end, events_of, open_http_edge, raw_connection, send_delta

EVERY = tuple(TensorSpec(name=name, datatype=name, shape=(-1,), optional=True) for name in DATATYPES)
TYPES = ModelCard(name="org/types", kind=ModelKind.TENSOR, versions=("1", "3"), inputs=EVERY, outputs=EVERY)
INFER = "/v2/models/org/types/infer"
LIMIT = 4096


def echo(stream: FakeStream) -> None:
    """Responds with the request's own tensors and parameters, those of `adder` and `repeater` as `y`."""
    request = pb.ModelInferRequest.FromString(stream.body)
    response = pb.ModelInferResponse(
        model_name=request.model_name, model_version=request.model_version or "3", id=request.id, parameters=request.parameters
    )
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        name = "y" if tensor.name == "x" else tensor.name
        response.outputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(raw)
    for _ in range(request.parameters["times"].int64_param if request.model_name == "repeater" else 0):
        stream.data(response.SerializeToString())
    stream.end(b"" if request.model_name == "repeater" else response.SerializeToString())


@pytest.fixture
async def edge() -> AsyncIterator[HttpEdge]:
    cards = (TYPES, tensor_card(), tensor_card("repeater", decoupled=True), chat_card())
    http = HttpOptions(max_body_bytes=LIMIT)
    async with open_http_edge(*cards, http=http, declared=(tensor_card("later"),)) as edge:
        edge.client.respond = echo
        yield edge


def tensor(datatype: str, data: Sequence[object], **more: object) -> dict[str, object]:
    return {"name": datatype, "datatype": datatype, "shape": [len(data)], "data": data, **more}


def request_of(*tensors: object, **more: object) -> dict[str, object]:
    return {"inputs": tensors, **more}


def failing(error: DynamoError) -> Any:
    return lambda stream: stream.fail(error)


async def status(edge: HttpEdge, path: str, method: str = "GET", **options: Any) -> int:
    return (await edge.http.request(method, path, **options)).status_code


# Health


async def test_health_is_200_while_something_can_serve_and_400_otherwise(edge: HttpEdge) -> None:
    ready = await edge.http.get("/v2/health/ready")
    assert (ready.status_code, ready.content) == (200, b"")
    edge.directory.remove(1, 2, 3, 4)
    await asyncio.sleep(0)
    ready = await edge.http.get("/v2/health/ready")
    assert (ready.status_code, ready.content) == (400, b"")
    live = await edge.http.get("/v2/health/live")
    assert (live.status_code, live.content) == (200, b"")


async def test_a_draining_server_lives_but_is_not_ready(edge: HttpEdge) -> None:
    edge.readiness.start_draining()
    assert await status(edge, "/v2/health/live") == 200
    assert await status(edge, "/v2/health/ready") == 400
    assert await status(edge, "/v2/models/adder/ready") == 400


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("org/types", 200),
        ("org%2Ftypes", 200),
        ("org/types/versions/1", 200),
        ("org/types/versions/2", 400),
        ("later", 400),
        ("missing", 400),
        ("talker", 200),
    ],
)
async def test_a_model_is_ready_if_an_instance_serves_it(edge: HttpEdge, path: str, code: int) -> None:
    response = await edge.http.get(f"/v2/models/{path}/ready")
    assert response.status_code == code
    assert response.content == (b"" if code == 200 else b'{"error":"Model version not ready"}')


# What there is


async def test_what_a_worker_says_of_a_model_at_length_is_written_beside_the_event_loop() -> None:
    own = ModelConfig(name="wide", input=[ModelInput(name=f"i{number}", dims=[1]) for number in range(300)])
    wide = ModelCard(name="wide", kind=ModelKind.TENSOR, model_config=own.SerializeToString())
    many = ModelCard(
        name="many", kind=ModelKind.TENSOR, inputs=tuple(msgspec.structs.replace(EVERY[0], name=f"i{n}") for n in range(300))
    )
    async with open_http_edge(wide, many, tensor_card()) as edge:
        edge.plane.descriptions = thread = WatchedThread()
        for model in ("wide", "many", "adder"):
            for path in ("", "/config"):
                described = (await edge.http.get(f"/v2/models/{model}{path}")).json()
                assert len(described["input" if path else "inputs"]) == (1 if model == "adder" else 300)
        assert len(thread.has_run) == 4
        statistics = pb.ModelStatisticsResponse(model_stats=[pb.ModelStatistics(name=f"m{number}") for number in range(500)])
        edge.client.respond = lambda stream: stream.end(statistics.SerializeToString())
        assert len((await edge.http.get("/v2/models/adder/stats")).json()["model_stats"]) == 500
        assert thread.has_run[4:] == ["_json"]


async def test_the_server_and_its_models_are_described(edge: HttpEdge) -> None:
    server = (await edge.http.get("/v2")).json()
    assert server["name"] == "dynamo"
    assert "binary_tensor_data" in server["extensions"]
    model = (await edge.http.get("/v2/models/adder")).json()
    assert model["inputs"] == [{"name": "x", "datatype": "INT32", "shape": [-1]}]
    assert (await edge.http.get("/v2/models/org/types/versions/3")).json()["versions"] == ["3"]
    config = (await edge.http.get("/v2/models/repeater/config")).json()
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["input"][0]["data_type"] == "TYPE_INT32"
    assert (await edge.http.get("/v2/models/later/config")).json()["name"] == "later"


async def test_the_index_lists_models_and_versions_ready_or_not(edge: HttpEdge) -> None:
    everything = (await edge.http.post("/v2/repository/index")).json()
    states = {(entry["name"], entry["version"]): entry["state"] for entry in everything}
    assert states[("org/types", "1")] == states[("org/types", "3")] == states[("talker", "1")] == "READY"
    assert states[("later", "1")] == "UNAVAILABLE"
    ready = (await edge.post("/v2/repository/index", {"ready": True})).json()
    assert {entry["name"] for entry in ready} == {"org/types", "adder", "repeater", "talker"}
    assert (await edge.error("/v2/repository/index", {"ready": "yes"})) == "'ready' must be true or false"
    assert (await edge.post("/v2/repository/mine/index", {})).json() == everything  # there is one, whatever its name


@pytest.mark.parametrize(
    ("path", "method", "code"),
    [
        ("/v2/models/missing", "GET", 404),
        ("/v2/models/missing/config", "GET", 404),
        ("/v2/models/missing/infer", "POST", 404),
        ("/v2/models/missing/generate", "POST", 404),
        ("/v2/models/missing/generate_stream", "POST", 404),
        ("/v2/models/adder/versions/2", "GET", 404),
        ("/v2/models/adder/versions/2/infer", "POST", 404),
        ("/v2/nothing", "GET", 404),
        ("/v2/models//infer", "POST", 404),
        ("/v2/repository/models/adder/load", "POST", 501),
        ("/v2/systemsharedmemory/status", "GET", 501),
    ],
)
async def test_what_is_not_there_is_404_and_what_is_not_done_501(edge: HttpEdge, path: str, method: str, code: int) -> None:
    response = await edge.http.request(method, path, json={"inputs": []} if method == "POST" else None)
    assert response.status_code == code
    assert response.headers["content-type"] == "application/json"
    assert isinstance(response.json().pop("error"), str), "the form of the other protocols, whose clients look for an object"


@pytest.mark.parametrize(
    ("path", "method", "allowed"),
    [
        (INFER, "GET", "POST"),
        ("/v2/models/talker/generate", "PUT", "POST"),
        ("/v2/models/talker/generate_stream", "DELETE", "POST"),
        ("/v2/health/ready", "POST", "GET, HEAD"),
        ("/v2", "PATCH", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_405_with_the_allowed_ones(edge: HttpEdge, path: str, method: str, allowed: str) -> None:
    response = await edge.http.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    assert method in response.json()["error"]


async def test_a_model_without_instances_is_503(edge: HttpEdge) -> None:
    requested = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]}
    for path, body in (("infer", requested), ("generate", {"x": 1}), ("generate_stream", {"x": 1})):
        response = await edge.post(f"/v2/models/later/{path}", body)
        assert response.status_code == 503
        assert "'later'" in response.json()["error"]


async def test_an_overloaded_model_is_the_configured_status_with_a_time_to_come_back() -> None:
    async with open_http_edge(tensor_card(), overload=OverloadStatus.TOO_MANY_REQUESTS) as edge:
        edge.client.respond = failing(Overloaded("busy", retry_after_s=7))
        response = await edge.post("/v2/models/adder/infer", {"inputs": [tensor("INT32", [1], name="x")]})
        assert (response.status_code, response.headers["retry-after"]) == (429, "7")


async def test_an_internal_failure_reveals_no_details(edge: HttpEdge) -> None:
    def broken(stream: FakeStream) -> None:
        raise RuntimeError("the secret")

    edge.client.respond = broken
    response = await edge.post(INFER, request_of(tensor("INT8", [1])))
    assert (response.status_code, response.json()) == (500, {"error": "internal error"})
    edge.client.respond = lambda stream: stream.end(b"\xff\xff")
    assert await edge.error(INFER, request_of(tensor("INT8", [1])), 500) == "the model's response is not a ModelInferResponse"
    edge.client.respond = failing(EngineError("the model broke"))
    assert await edge.error(INFER, request_of(tensor("INT8", [1])), 500) == "the model broke"


# Bodies


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"NaN", "the body must be an object"),
        (b"[]", "the body must be an object"),
        (b"null", "the body must be an object"),
        (b"{}", "'inputs' is missing"),
        (b'{"inputs": {}}', "'inputs' must be an array"),
        (b'{"inputs": [1]}', "'inputs[0]' must be an object"),
        (b'{"inputs": [{}]}', "'inputs[0].name' is missing"),
        (b'{"inputs": [{"name": 1}]}', "must be a string"),
        (b'{"inputs": [{"name": "INT8", "shape": [1.5], "datatype": "INT8"}]}', "must be an integer"),
        (b'{"inputs": [{"name": "INT8", "shape": [1], "datatype": "INT8", "data": [1}]}', "not JSON"),
        (b'{"inputs": [{"name": "INT8", "shape": [1], "datatype": "INT8", "data": [NaN]}]}', "input 'INT8'"),
        (b'{"inputs": [], "id": 7}', "'id' must be a string"),
        (b'{"inputs": [], "parameters": []}', "'parameters' must be an object"),
        (b'{"inputs": [], "outputs": [{}]}', "'outputs[0].name' is missing"),
        (b'{"inputs": []' + b" " * 10 + b"}x", "not JSON"),
        (b'{"inputs": [], "x": ' + b"[" * 101 + b"]" * 101 + b"}", "deeper than 100 levels"),
    ],
)  # fmt: skip
async def test_mistakes_of_the_client_are_400_with_a_sentence(edge: HttpEdge, body: bytes, words: str) -> None:
    response = await edge.http.post(INFER, content=body)
    assert response.status_code == 400
    assert words in response.json()["error"]


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
async def test_a_request_has_at_most_4096_inputs_and_outputs(kind: str) -> None:
    one = tensor("INT8", [1])
    body = {"inputs": [one] * 4097} if kind == "inputs" else {"inputs": [one], "outputs": [{"name": "INT8"}] * 4097}
    async with open_http_edge(TYPES) as edge:
        sentence = await edge.error(INFER, body, 400)
    assert sentence == f"the request has 4097 {kind}; at most 4096 are allowed"


@pytest.mark.parametrize("path", [INFER, "/v2/models/talker/generate", "/v2/models/talker/generate_stream"])
async def test_a_body_may_be_as_large_as_the_bound_but_not_larger(edge: HttpEdge, path: str) -> None:
    edge.client.respond = echo if path == INFER else Speaker()
    text = json.dumps({"inputs": [], "text_input": "a"} if path == INFER else {"text_input": "a"}).encode()
    for encoding, pack in (("", bytes), ("gzip", gzip.compress), ("deflate", zlib.compress)):
        headers = {"content-encoding": encoding} if encoding else {}
        for size, code in ((LIMIT, 200), (LIMIT + 1, 413)):
            response = await edge.http.post(path, content=pack(text.ljust(size)), headers=headers)
            assert response.status_code == code, response.text
    assert f"larger than {LIMIT} bytes" in response.json()["error"]


async def test_a_chunked_body_is_bounded_as_well(edge: HttpEdge) -> None:
    async def pieces(count: int) -> AsyncIterator[bytes]:
        yield b'{"inputs": []'
        for _ in range(count):
            yield b" " * 1000
        yield b"}"

    assert (await edge.http.post(INFER, content=pieces(3))).json()["outputs"] == []
    assert (await edge.http.post(INFER, content=pieces(5))).status_code == 413


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP", gzip.compress)])
async def test_requests_may_be_compressed_with_json_and_binary_inside(edge: HttpEdge, encoding: str, pack: Any) -> None:
    requested = tensor("FP32", [0, 0], parameters={"binary_data_size": 8})
    del requested["data"]
    head = json.dumps(request_of(requested)).encode()
    headers = {"content-encoding": encoding, "inference-header-content-length": str(len(head))}
    response = await edge.http.post(INFER, content=pack(head + np.array([1, 2], np.float32).tobytes()), headers=headers)
    assert response.json()["outputs"][0]["data"] == [1.0, 2.0]


async def test_an_unknown_compression_is_415_with_the_supported_ones(edge: HttpEdge) -> None:
    response = await edge.http.post(INFER, content=b"x", headers={"content-encoding": "zstd"})
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, deflate")
    assert "unsupported content encoding 'zstd'" in response.json()["error"]


@pytest.mark.parametrize(("accepted", "chosen"), [("gzip", "gzip"), ("deflate", "deflate"), ("br", None), ("identity", None)])
@pytest.mark.parametrize("binary", [False, True])
async def test_responses_are_compressed_if_the_client_accepts_it(
    edge: HttpEdge, accepted: str, chosen: str | None, binary: bool
) -> None:
    values = list(range(500))
    requested = request_of(tensor("INT16", values), parameters={"binary_data_output": binary})
    response = await edge.post(INFER, requested, headers={"accept-encoding": accepted})
    assert response.headers.get("content-encoding") == chosen
    if binary:
        size = int(response.headers["inference-header-content-length"])
        assert json.loads(response.content[:size])["outputs"][0]["parameters"] == {"binary_data_size": 1000}
        assert response.content[size:] == np.array(values, np.int16).tobytes()
    else:
        assert response.json()["outputs"][0]["data"] == values


async def test_a_small_response_is_not_compressed(edge: HttpEdge) -> None:
    response = await edge.post(INFER, request_of(tensor("INT8", [1])), headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in response.headers


async def test_words_for_what_is_no_number_go_both_ways(edge: HttpEdge) -> None:
    body = b'{"inputs": [{"name": "FP64", "datatype": "FP64", "shape": [4], "data": [NaN, -Infinity, 0.5, Infinity]}]}'
    response = await edge.http.post(INFER, content=body)
    assert b'"data":[NaN,-Infinity,0.5,Infinity]' in response.content
    nested = body.replace(b"NaN, -Infinity", b"[NaN, -Infinity]")
    assert "input 'FP64'" in (await edge.http.post(INFER, content=nested)).json()["error"]


async def test_a_binary_response_has_its_json_length_and_content_type(edge: HttpEdge) -> None:
    requested = request_of(tensor("BYTES", ["größe"]), tensor("INT8", [5]), outputs=[
        {"name": "BYTES", "parameters": {"binary_data": True}}, {"name": "INT8"}])  # fmt: skip
    response = await edge.post(INFER, requested)
    assert response.headers["content-type"] == "application/octet-stream"
    size = int(response.headers["inference-header-content-length"])
    outputs = json.loads(response.content[:size])["outputs"]
    assert outputs[1]["data"] == [5]
    assert response.content[size:] == encode_bytes(["größe"])


async def test_a_raw_request_gets_a_binary_response(edge: HttpEdge) -> None:
    raw = np.array([1, 2, 3], np.int32).tobytes()
    response = await edge.http.post("/v2/models/adder/infer", content=raw, headers={"inference-header-content-length": "0"})
    size = int(response.headers["inference-header-content-length"])
    head = json.loads(response.content[:size])
    assert head["outputs"] == [{"name": "y", "datatype": "INT32", "shape": [3], "parameters": {"binary_data_size": 12}}]
    assert response.content[size:] == raw


@pytest.mark.parametrize("length", ["5000", "-1", "abc", "99999999999999999999999"])
async def test_a_wrong_header_length_is_400(edge: HttpEdge, length: str) -> None:
    response = await edge.http.post(INFER, content=b'{"inputs": []}', headers={"inference-header-content-length": length})
    assert response.status_code == 400
    assert "nference" in response.json()["error"] and "eader" in response.json()["error"]


async def test_a_header_length_that_cuts_the_json_is_400(edge: HttpEdge) -> None:
    response = await edge.http.post(INFER, content=b'{"inputs": []}', headers={"inference-header-content-length": "5"})
    assert "not JSON" in response.json()["error"]


async def test_curl_works(edge: HttpEdge) -> None:
    body = json.dumps(request_of(tensor("FP32", [1.5, 2]), id="7"))
    curl = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--fail-with-body", "--compressed", "-d", body, edge.url + INFER, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await curl.communicate()  # its content type is that of a form
    response = json.loads(output)
    assert (curl.returncode, response["id"], response["outputs"][0]["data"]) == (0, "7", [1.5, 2.0])


async def test_ids_and_headers_come_back(edge: HttpEdge) -> None:
    response = await edge.post(INFER, request_of(id="mine", parameters={"p": 1}), headers={"x-request-id": "theirs"})
    assert response.headers["x-request-id"] == "theirs"
    assert response.json() == {
        "id": "mine",
        "model_name": "org/types",
        "model_version": "3",
        "parameters": {"p": 1},
        "outputs": [],
    }
    response = await edge.post(INFER, request_of(id="mine"))
    assert response.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("path", ["/v2/models/adder/infer", "/v2/models/repeater/generate_stream", "/v2/models/talker/generate"])
async def test_a_client_that_leaves_takes_its_request_along(edge: HttpEdge, path: str) -> None:
    edge.client.respond = lambda stream: None
    fields = {"inputs": [tensor("INT32", [1], name="x")]} if path.endswith("infer") else {"x": 1, "text_input": "a"}
    if "talker" in path:
        del fields["x"]
    body = json.dumps(fields).encode()
    with raw_connection(edge.port) as connection:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body)
        stream = await edge.client.next_stream()
        assert not stream.is_over
    async with asyncio.timeout(120):
        while not stream.is_over:
            await asyncio.sleep(0.001)
    assert stream.cancelled


async def test_a_client_that_leaves_within_its_body_sends_no_request(edge: HttpEdge) -> None:
    with raw_connection(edge.port) as connection:
        connection.sendall(f'POST {INFER} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{{"inputs"'.encode())
    assert await status(edge, "/v2/health/live") == 200
    assert not edge.client.streams


# Generate, with tensors


async def test_generate_makes_tensors_of_what_names_inputs_and_parameters_of_the_rest(edge: HttpEdge) -> None:
    response = await edge.post(
        "/v2/models/org/types/generate",
        {"id": "7", "BYTES": ["a", "b"], "FP32": 1.5, "parameters": {"INT8": [1, 2, 3], "mine": "x"}, "own": 3},
    )
    assert response.json() == {
        "id": "7",
        "model_name": "org/types",
        "model_version": "3",
        "mine": "x",
        "own": 3,
        "BYTES": ["a", "b"],
        "FP32": 1.5,
        "INT8": [1, 2, 3],
    }  # fmt: skip
    sent = pb.ModelInferRequest.FromString(edge.client.streams[-1].body)
    assert {tensor.name: list(tensor.shape) for tensor in sent.inputs} == {"BYTES": [2], "FP32": [1], "INT8": [3]}


async def test_priority_and_timeout_of_generate_are_the_models(edge: HttpEdge) -> None:
    await edge.post("/v2/models/org/types/generate", {"FP32": 1.5, "priority": "high", "parameters": {"timeout": 5}})
    sent = pb.ModelInferRequest.FromString(edge.client.streams[-1].body)
    assert sent.parameters["triton_models_priority"].string_param == "high"
    assert sent.parameters["triton_models_timeout"].int64_param == 5 and len(sent.parameters) == 2


@pytest.mark.parametrize(("number", "passed_on"), [(2**63 - 1, 2**63 - 1), (2**63, 2.0**63), (-(2**63) - 1, -(2.0**63))])
async def test_a_parameter_that_is_too_large_an_integer_is_a_float_for_infer_and_generate(
    edge: HttpEdge, number: int, passed_on: float
) -> None:
    one = {"name": "INT8", "datatype": "INT8", "shape": [1], "data": [1]}
    for path, body in (("generate", {"INT8": 1, "own": number}), ("infer", {"inputs": [one], "parameters": {"own": number}})):
        response = await edge.http.post(f"/v2/models/org/types/{path}", json=body)
        assert response.status_code == 200, response.text
        sent = pb.ModelInferRequest.FromString(edge.client.streams[-1].body).parameters["own"]
        assert getattr(sent, sent.WhichOneof("parameter_choice")) == passed_on


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "must be a JSON object"),
        ({"INT8": "x"}, "input 'INT8' has data that is not INT8"),
        ({"INT8": {"a": 1}}, "input 'INT8'"),
        ({"parameters": 1}, "'parameters' must be an object"),
        ({"id": 1}, "'id' must be a string"),
        ({"mine": None}, "parameter 'mine' has invalid type"),
        ({"triton_x": 1}, "reserved"),
    ],
)
@pytest.mark.parametrize("path", ["generate", "generate_stream"])
async def test_generate_refuses_with_a_sentence(edge: HttpEdge, path: str, body: object, words: str) -> None:
    assert words in await edge.error(f"/v2/models/org/types/{path}", body)


async def test_generate_takes_exactly_one_response_of_a_decoupled_model(edge: HttpEdge) -> None:
    response = await edge.post("/v2/models/repeater/generate", {"x": [1, 2], "times": 1})
    assert response.json()["y"] == [1, 2]
    assert "exactly 1 response, but it produced more" in await edge.error("/v2/models/repeater/generate", {"x": [1], "times": 2})
    assert "but it produced none" in await edge.error("/v2/models/repeater/generate", {"x": [1], "times": 0})


async def test_generate_stream_sends_every_response_as_an_event(edge: HttpEdge) -> None:
    response = await edge.post("/v2/models/repeater/generate_stream", {"x": [1, 2], "times": 3})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(data) for _, data in events_of(response.text)]
    assert [event["y"] for event in events] == [[1, 2]] * 3
    response = await edge.post("/v2/models/adder/generate_stream", {"x": 5})
    assert [json.loads(data)["y"] for _, data in events_of(response.text)] == [5]


async def test_an_error_before_the_first_event_has_a_status_and_one_after_it_is_the_last_event(edge: HttpEdge) -> None:
    edge.client.respond = failing(InvalidRequest("not this"))
    assert await edge.error("/v2/models/repeater/generate_stream", {"x": 1}) == "not this"

    def half(stream: FakeStream) -> None:
        response = pb.ModelInferResponse(model_name="repeater", model_version="1")
        response.outputs.add(name="y", datatype="INT32", shape=[1])
        response.raw_output_contents.append(bytes(4))
        stream.data(response.SerializeToString())
        asyncio.get_running_loop().call_soon(stream.fail, EngineError("the model broke"))

    edge.client.respond = half
    response = await edge.post("/v2/models/repeater/generate_stream", {"x": 1})
    events = [json.loads(data) for _, data in events_of(response.text)]
    assert (response.status_code, events[0]["y"], events[1:]) == (200, 0, [{"error": "the model broke"}])


# Generate, with text


async def test_generate_returns_the_text_of_the_model(edge: HttpEdge) -> None:
    edge.client.respond = speaker = Speaker()
    response = await edge.post(
        "/v2/models/talker/generate",
        {"text_input": "Hi", "id": "7", "max_tokens": 20, "parameters": {"temperature": 0.5, "stop": ["x"], "seed": 3}},
    )
    assert response.json() == {"id": "7", "model_name": "talker", "model_version": "1", "text_output": "Hello you"}
    assert (speaker.prompt, speaker.last.stop.max_tokens, speaker.last.sampling.temperature) == ("Hi", 20, 0.5)


async def test_generate_returns_details_and_log_probabilities_if_requested(edge: HttpEdge) -> None:
    edge.client.respond = Speaker(pieces=("a", "b"), logprobs=lambda at: -0.5 - at)
    details = (await edge.post("/v2/models/talker/generate", {"text_input": "Hi", "details": True, "logprob": True})).json()[
        "details"
    ]
    assert details["finish_reason"] == "eos_token"
    assert [(token["text"], token["logprob"]) for token in details["logprobs"]] == [("a", -0.5), ("b", -1.5)]
    details = (await edge.post("/v2/models/talker/generate", {"text_input": "Hi", "parameters": {"details": True}})).json()[
        "details"
    ]
    assert details == {"finish_reason": "eos_token"}


def test_generate_keeps_no_log_probabilities_but_encodes_them_as_they_come() -> None:
    class Texts:
        def __getitem__(self, token: int) -> str:
            return f"<{token}>"

        def is_special(self, token: int) -> bool:
            return False

    choice, position = GeneratedChoice(cast(TokenTexts, Texts())), [(5, -0.5), (6, -1.5)]
    references = sys.getrefcount(position)
    for _ in range(3000):
        choice.add(TextDelta(0, "a", (5,), logprobs=[position]))
    choice.add(TextDelta(0, "", finish_reason=FinishReason.LENGTH))
    assert sys.getrefcount(position) == references
    long = Spliced()
    details = json.loads(b"".join(long.pieces(orjson.dumps(choice.details(long)))))
    shown = {"id": 5, "text": "<5>", "logprob": -0.5, "special": False}
    assert details == {"finish_reason": "length", "logprobs": [shown] * 3000}


async def test_generate_joins_many_log_probabilities_of_several_choices(edge: HttpEdge) -> None:
    edge.client.respond = Speaker(pieces=("ab" * 50,) * 20, logprobs=lambda at: -float(at))
    body = {"text_input": "Hi", "n": 2, "details": True, "logprob": True, "temperature": 1}
    response = (await edge.post("/v2/models/talker/generate", body)).json()
    for text, details in zip(response["text_output"], response["details"], strict=True):
        assert text == "ab" * 1000
        assert [token["logprob"] for token in details["logprobs"]] == [-float(at) for at in range(2000)]
        assert "".join(token["text"] for token in details["logprobs"]) == text


async def test_generate_handles_several_prompts_and_choices(edge: HttpEdge) -> None:
    edge.client.respond = Speaker(reason=FinishReason.LENGTH)
    body = {"text_input": ["a", "b"], "n": 2, "details": True, "temperature": 1}
    response = (await edge.post("/v2/models/talker/generate", body)).json()
    assert response["text_output"] == ["Hello you"] * 4
    assert response["details"] == [{"finish_reason": "length"}] * 4


async def test_generate_takes_a_conversation(edge: HttpEdge) -> None:
    edge.client.respond = speaker = Speaker()
    await edge.post("/v2/models/talker/generate", {"messages": [{"role": "user", "content": "Hi"}]})
    assert speaker.prompt == "<user>Hi\n<assistant>"


async def test_generate_stream_sends_each_piece_at_once(edge: HttpEdge) -> None:
    edge.client.respond = lambda stream: None
    request = edge.http.build_request("POST", "/v2/models/talker/generate_stream", json={"text_input": "Hi", "stream": True})
    asking = asyncio.create_task(edge.http.send(request, stream=True))
    stream = await edge.client.next_stream()
    send_delta(stream, "one")
    response = await asking
    lines = (line async for line in response.aiter_lines() if line)
    async with asyncio.timeout(120):
        assert json.loads((await anext(lines))[6:])["text_output"] == "one"
        send_delta(stream, " two")
        assert json.loads((await anext(lines))[6:])["text_output"] == " two"
        send_delta(stream, "!", reason=FinishReason.STOP)
        end(stream)
        assert json.loads((await anext(lines))[6:])["text_output"] == "!"
        assert await anext(lines, None) is None


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("generate", {}, "'text_input' is missing"),
        ("generate", {"text_input": 3}, "must be a string"),
        ("generate", {"text_input": "a", "stream": True}, "omit 'stream', or use generate_stream"),
        ("generate", {"text_input": "a", "stream": "yes"}, "'stream' must be true or false"),
        ("generate", {"text_input": "a", "details": 1}, "'details' must be true or false"),
        ("generate", {"text_input": "a", "max_tokens": 0}, "'max_tokens' is 0"),
        ("generate", {"text_input": "a", "temprature": 0}, "no parameter 'temprature'"),
        ("generate", {"text_input": "a", "messages": []}, "'messages'"),
        ("generate", {"messages": [{"content": "x"}]}, "'messages'"),
        ("generate_stream", {"text_input": ["a", "b"]}, "one choice of one prompt"),
        ("generate_stream", {"text_input": "a", "n": 2, "temperature": 1}, "one choice of one prompt"),
    ],
)
async def test_text_that_cannot_be_generated_is_refused(edge: HttpEdge, path: str, body: object, words: str) -> None:
    assert words in await edge.error(f"/v2/models/talker/{path}", body)


async def test_infer_works_with_a_language_model(edge: HttpEdge) -> None:
    edge.client.respond = Speaker()
    response = await edge.post(
        "/v2/models/talker/infer", request_of(tensor("BYTES", ["Hi"], name="text_input"), parameters={"max_tokens": 9})
    )
    assert {output["name"]: output["data"] for output in response.json()["outputs"]} == {
        "text_output": ["Hello you"],
        "finish_reason": ["stop"],
    }
    assert request_decoder.decode(edge.client.streams[-1].body).stop.max_tokens == 9
