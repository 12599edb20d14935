"""Each case over gRPC and over REST, compared. Run as `kserve_protocols GRPC_TARGET HTTP_PORT`; prints one JSON line per case.

A program of its own: tritonclient's messages and this project's cannot be loaded into one process.
"""

from __future__ import annotations

import http.client
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any
from urllib.parse import quote

import grpc
import numpy as np
import tritonclient.grpc as by_grpc
import tritonclient.http as by_http
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from tests.integration.clients.kserve_conformance import (
    FIXED,
    METADATA,
    NUMPY,
    ONLY_UNARY,
    SERVICE,
    bad,
    element,
    fixed,
    raw_request,
    text_request,
    typed,
)

pb: Any = service_pb2
STATUSES = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "INTERNAL": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}


@dataclass(frozen=True)
class KServeClients:
    """Clients of one frontend, over gRPC and over REST."""

    grpc: Any
    http: Any
    channel: grpc.Channel
    port: int

    def send_grpc(self, request: Any, headers: Mapping[str, str]) -> tuple[str, Any]:
        """The status and, if it is OK, the answer, else the words."""
        call = self.channel.unary_unary(SERVICE + "ModelInfer")
        try:
            response = call(request.SerializeToString(), timeout=120, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            return error.code().name, error.details()  # type: ignore[attr-defined]
        return "OK", pb.ModelInferResponse.FromString(response)

    def send_rest(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request("POST", path, body, dict(headers))
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()


# One request in both forms


def parameters_in_json(parameters: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {key: parameter.WhichOneof("parameter_choice") for key, parameter in parameters.items()}
    return {key: getattr(parameters[key], kind) if kind else None for key, kind in kinds.items()}


class Form(StrEnum):
    """How tensors travel over REST."""

    BINARY = "binary"
    FLAT = "flat"
    NESTED = "nested"


def in_rest(request: Any, form: Form) -> tuple[str, dict[str, str], bytes]:
    """Path, headers and body of what a ModelInferRequest says. Its typed tensors become JSON in any case."""
    path = f"/v2/models/{quote(request.model_name, safe='')}"
    if request.model_version:
        path += f"/versions/{quote(request.model_version, safe='')}"
    tail = b""
    inputs: list[dict[str, Any]] = []
    for position, tensor in enumerate(request.inputs):
        made: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        made["parameters"] = parameters_in_json(tensor.parameters)
        if tensor.HasField("contents"):
            filled = [list(value) for _, value in tensor.contents.ListFields()] or [[]]
            made["data"] = [value.decode() if isinstance(value, bytes) else value for value in filled[0]]
        elif position < len(request.raw_input_contents):
            raw = request.raw_input_contents[position]
            if form is Form.BINARY:
                made["parameters"]["binary_data_size"] = len(raw)
                tail += raw
            else:
                made["data"] = elements_in_json(raw, tensor.datatype)
                if form is Form.NESTED:
                    made["data"] = np.array(made["data"], object).reshape(tuple(tensor.shape)).tolist()
        inputs.append(made)
    outputs = [{"name": output.name, "parameters": parameters_in_json(output.parameters)} for output in request.outputs]
    message: dict[str, Any] = {"id": request.id, "parameters": parameters_in_json(request.parameters), "inputs": inputs}
    if outputs:
        message["outputs"] = outputs
    if form is Form.BINARY:
        message["parameters"]["binary_data_output"] = True
    head = json.dumps(message).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))} if tail else {}
    return path + "/infer", headers, head + tail


def elements_in_json(raw: bytes, datatype: str) -> list[Any]:
    if datatype == "BYTES":
        texts = []
        while raw:
            end = 4 + int.from_bytes(raw[:4], "little")
            texts.append(raw[4:end].decode())
            raw = raw[end:]
        return texts
    if datatype == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).tolist()
    return np.frombuffer(raw, NUMPY[datatype]).tolist()


def outputs_of_grpc(response: Any) -> dict[str, tuple[str, list[int], bytes]]:
    assert len(response.raw_output_contents) == len(response.outputs)
    return {
        output.name: (output.datatype, list(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def outputs_of_rest(headers: Mapping[str, str], body: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, list[int], bytes]]]:
    size = int(headers.get("inference-header-content-length", len(body)))
    message = json.loads(body[:size])
    tail = body[size:]
    outputs = {}
    for output in message["outputs"]:
        if "data" in output:
            raw = raw_of_json(output["data"], output["datatype"])
        else:
            of = output["parameters"].pop("binary_data_size")
            raw, tail = tail[:of], tail[of:]
            assert len(raw) == of
        outputs[output["name"]] = (output["datatype"], output["shape"], raw)
    assert not tail
    return message, outputs


def raw_of_json(data: Sequence[Any], datatype: str) -> bytes:
    if datatype == "BYTES":
        return b"".join(element(text.encode()) for text in data)
    if datatype == "BF16":
        return (np.array(data, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return np.array(data, NUMPY[datatype]).tobytes()


def check_same_response(
    clients: KServeClients, request: Any, form: Form = Form.BINARY, headers: Mapping[str, str] | None = None
) -> None:
    """Both protocols answer alike: the same tensors, or the status that belongs to the other's and the same words."""
    status, response = clients.send_grpc(request, headers or {})
    path, own, body = in_rest(request, form)
    code, response_headers, text = clients.send_rest(path, body, own | dict(headers or {}))
    assert code == STATUSES[status], (status, response, code, text)
    if status != "OK":
        assert response_headers["content-type"] == "application/json"
        assert json.loads(text) == {"error": response}, (text[:300], response)
        return
    message, outputs = outputs_of_rest(response_headers, text)
    assert list(outputs.items()) == list(outputs_of_grpc(response).items())
    assert message["model_name"] == response.model_name
    assert message["model_version"] == response.model_version
    assert message.get("id", "") == response.id
    assert message.get("parameters", {}) == parameters_in_json(response.parameters)


# Cases by message: what is refused, and what is answered


ONLY_GRPC = {
    "empty model name": "its path names no model",
    "an id that is no UTF-8": "bytes",
    "bytes that are no message": "bytes",
    "a message cut off": "bytes",
    "a field of a wrong kind": "bytes",
    "raw data for a scalar missing": "binary tensors are counted by their sizes",
    "raw data for one input too many": "binary tensors are counted by their sizes",
    "raw and typed": "one of two keys, with words of its own",
    "parameter without value": "null, with words of its own",
    "version that is no number": "a path with it names nothing",
    "version of 10 kB": "the path is too long",
    "classification of 0": "over HTTP it means none",
    "reserved parameter": "words of its own, as in Triton",
    "priority as text": "words of its own, as in Triton",
    "timeout as text": "words of its own, as in Triton",
    "empty final response as a number": "words of its own, as in Triton",
    **dict.fromkeys(
        ("no data at all", "typed with no elements", "typed with too few elements", "typed with too many elements"),
        "JSON is read before, with sentences that name the element",
    ),
    "typed FP16": "JSON has numbers for it",
    "typed BF16": "JSON has numbers for it",
    "typed in the wrong field": "JSON has one field",
    "typed in two fields": "JSON has one field",
}


def values_of(datatype: str) -> Any:
    match datatype:
        case "BYTES":
            return np.array([b"", b"a", "größe ☃".encode(), b'"\\\n\0'], object)
        case "BOOL":
            return np.array([True, False, True, True])
        case "BF16":
            return np.array([0.0, -1.5, 3.0, -(2.0**127)], np.float32)
        case "FP16" | "FP32" | "FP64":
            limits = np.finfo(NUMPY[datatype])
            return np.array([limits.max, -0.0, limits.tiny, limits.min], NUMPY[datatype])
        case _:
            limits = np.iinfo(NUMPY[datatype])
            return np.array([limits.min, 0, 1, limits.max], NUMPY[datatype])


def raw_of(values: Any, datatype: str) -> bytes:
    if datatype == "BYTES":
        return b"".join(map(element, values.reshape(-1)))
    if datatype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.tobytes()


DATATYPES = (*NUMPY, "BF16", "BYTES")


def requested(request: Any, *names: str) -> Any:
    for name in names:
        request.outputs.add(name=name)
    return request


def typed_request(datatype: str) -> Any:
    fields = {"BOOL": "bool", "FP32": "fp32", "FP64": "fp64", "INT64": "int64", "UINT64": "uint64", "BYTES": "bytes"}
    field = fields.get(datatype, "uint" if datatype.startswith("U") else "int")
    return typed(datatype, [4], **{f"{field}_contents": values_of(datatype).tolist()})


def messages() -> Iterator[tuple[str, Any]]:
    for datatype in DATATYPES:
        raw = raw_of(values_of(datatype), datatype)
        yield f"{datatype}", raw_request("types", (datatype, datatype, [4], raw))
        if datatype not in ("FP16", "BF16"):
            yield f"{datatype}, typed", typed_request(datatype)
        yield f"{datatype}, no elements", raw_request("types", (datatype, datatype, [0], b""))
    several = [(datatype, datatype, [4], raw_of(values_of(datatype), datatype)) for datatype in DATATYPES]
    yield "all datatypes at once", raw_request("types", *several)
    yield "no inputs", raw_request("types")
    odd = np.array([np.nan, np.inf, -np.inf, 1.0])
    for datatype in ("FP16", "FP32", "FP64"):
        yield (
            f"{datatype} that are no numbers",
            raw_request("types", (datatype, datatype, [4], odd.astype(NUMPY[datatype]).tobytes())),
        )
    yield "BF16 that are no numbers", raw_request("types", ("BF16", "BF16", [4], raw_of(odd.astype(np.float32), "BF16")))
    yield "two dimensions and a scalar", fixed()
    yield "an id", fixed(id="größe ☃")
    yield "a version", fixed(model_version="1")
    yield "one requested output", requested(fixed(), "S")
    yield "requested outputs in their order", requested(fixed(), "S", "X")
    request = fixed()
    request.parameters["b"].bool_param = True
    request.parameters["i"].int64_param = -(2**63)
    request.parameters["s"].string_param = "größe"
    request.parameters["d"].double_param = 0.1
    yield "parameters of all kinds", request
    request = fixed()
    request.parameters["priority"].int64_param = 2
    request.parameters["timeout"].int64_param = 10_000_000
    request.inputs[0].parameters["mine"].string_param = "x"
    yield "priority, timeout and a parameter of a tensor", request
    yield "a batch", raw_request("batchy", ("A", "FP32", [3, 2], bytes(24)), ("B", "INT64", [3, 1], bytes(24)))
    image = ("image", "FP32", [1, 8, 8], np.linspace(0, 1, 64, dtype=np.float32).tobytes())
    request = raw_request("classifier", image)
    request.outputs.add(name="probability").parameters["classification"].int64_param = 3
    yield "a classification", request
    yield "the classifier", raw_request("classifier", image)
    yield "text", text_request("größe ☃")
    yield "several texts and choices", text_request("one", "two", "six", parameters={"n": 2})
    yield (
        "text with settings",
        text_request("hello world", parameters={"stop": " wor", "temperature": 0.5, "seed": 7, "ignore_eos": True}),
    )
    yield "text with log probabilities", requested(text_request("ab", parameters={"logprobs": 0}), "logprobs", "text_output")
    yield "a conversation", text_request("hi", parameters={"chat": True, "max_tokens": 20})


# Cases by Triton's clients


Case = Callable[[KServeClients], None]
cases: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def add(run: Case) -> Case:
        assert name not in cases
        cases[name] = run
        return run

    return add


def inputs_of(library: Any, *tensors: tuple[str, Any, str], **how: bool) -> list[Any]:
    made = [library.InferInput(name, list(values.shape), datatype) for name, values, datatype in tensors]
    for tensor, (_, values, _) in zip(made, tensors, strict=True):
        tensor.set_data_from_numpy(values, **how)
    return made


def as_bytes(values: Any) -> list[Any]:
    return [value.encode() if isinstance(value, str) else value for value in values.reshape(-1).tolist()]


def same_result(
    clients: KServeClients, model: str, *tensors: tuple[str, Any, str], json_too: bool = True, **options: Any
) -> None:
    """The clients read the same of both protocols, however the tensors travel."""
    want = clients.grpc.infer(model, inputs_of(by_grpc, *tensors), **options)
    described = want.get_response()
    names = [output.name for output in described.outputs]
    for binary_in, binary_out, encoding in (
        (True, True, None),
        (True, False, "gzip"),
        (False, True, "deflate"),
        (False, False, None),
    ):
        if not (binary_in and binary_out) and not json_too:
            continue
        result = clients.http.infer(
            model,
            inputs_of(by_http, *tensors, binary_data=binary_in),
            outputs=[by_http.InferRequestedOutput(name, binary_data=binary_out) for name in names],
            request_compression_algorithm=encoding,
            response_compression_algorithm=encoding,
            **options,
        )
        response = result.get_response()
        assert (response["model_name"], response["model_version"]) == (described.model_name, described.model_version)
        assert response.get("id", "") == described.id
        for name in names:
            ours, theirs = result.as_numpy(name), want.as_numpy(name)
            assert ours.shape == theirs.shape
            assert as_bytes(ours) == as_bytes(theirs), (binary_in, binary_out, ours, theirs)


def _by_client(datatype: str) -> Case:
    def run(clients: KServeClients) -> None:
        json_too = datatype != "FP16"  # tritonclient has no JSON for it
        same_result(clients, "types", (datatype, values_of(datatype), datatype), json_too=json_too)

    return run


for _datatype in (*NUMPY, "BYTES"):  # for BF16 it needs a library of its own
    cases[f"Triton's clients, {_datatype}"] = _by_client(_datatype)


@case("Triton's clients, a large tensor, an id and a version")
def _(clients: KServeClients) -> None:
    values = np.random.default_rng(1).random((1_000_000,), np.float32)
    same_result(clients, "types", ("FP32", values, "FP32"), request_id="größe", model_version="1", priority=1, timeout=9_000_000)


@case("Triton's clients, a batch")
def _(clients: KServeClients) -> None:
    same_result(clients, "batchy", ("A", np.ones((3, 2), np.float32), "FP32"), ("B", np.ones((3, 1), np.int64), "INT64"))


@case("Triton's clients, parameters")
def _(clients: KServeClients) -> None:
    parameters = {"text": "größe", "whole": 3, "flag": True}
    same_result(clients, "types", ("INT32", np.arange(3, dtype=np.int32), "INT32"), parameters=parameters)


@case("Triton's clients, everything in binary unless outputs are named")
def _(clients: KServeClients) -> None:
    values = np.arange(3, dtype=np.int32)
    result = clients.http.infer("types", inputs_of(by_http, ("INT32", values, "INT32")))
    assert result.get_output("INT32")["parameters"] == {"binary_data_size": 12}
    assert (result.as_numpy("INT32") == values).all()


@case("Triton's clients, classes")
def _(clients: KServeClients) -> None:
    image = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 8, 8)
    ours = clients.http.infer(
        "classifier",
        inputs_of(by_http, ("image", image, "FP32")),
        outputs=[by_http.InferRequestedOutput("probability", class_count=3)],
    )
    theirs = clients.grpc.infer(
        "classifier",
        inputs_of(by_grpc, ("image", image, "FP32")),
        outputs=[by_grpc.InferRequestedOutput("probability", class_count=3)],
    )
    assert as_bytes(ours.as_numpy("probability")) == as_bytes(theirs.as_numpy("probability"))


@case("Triton's clients, many at once")
def _(clients: KServeClients) -> None:
    values = [np.full(10, number, np.int32) for number in range(32)]
    calls = [clients.http.async_infer("types", inputs_of(by_http, ("INT32", one, "INT32"))) for one in values]
    for one, call in zip(values, calls, strict=True):
        assert (call.get_result().as_numpy("INT32") == one).all()


@case("health and readiness")
def _(clients: KServeClients) -> None:
    for client in (clients.grpc, clients.http):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("types")
        assert client.is_model_ready(FIXED, "3")
        assert not client.is_model_ready("types", "2")
        assert not client.is_model_ready("missing")


@case("server metadata")
def _(clients: KServeClients) -> None:
    ours = json_format.ParseDict(clients.http.get_server_metadata(), pb.ServerMetadataResponse())
    assert ours == clients.grpc.get_server_metadata()
    assert "binary_tensor_data" in ours.extensions


@case("metadata and configuration of every model and version")
def _(clients: KServeClients) -> None:
    for model in ("types", "batchy", "repeater", "echo-llm", "faulty", "classifier", "words"):
        for version in ("", "1"):
            metadata = clients.http.get_model_metadata(model, version)
            ours = json_format.ParseDict(metadata, pb.ModelMetadataResponse(), ignore_unknown_fields=True)
            theirs = clients.grpc.get_model_metadata(model, version)
            theirs.DiscardUnknownFields()
            assert ours == theirs
            config = json_format.ParseDict(clients.http.get_model_config(model, version), model_config_pb2.ModelConfig())
            assert config == clients.grpc.get_model_config(model, version).config


@case("the repository index")
def _(clients: KServeClients) -> None:
    ours = json_format.ParseDict({"models": clients.http.get_model_repository_index()}, pb.RepositoryIndexResponse())
    assert ours == clients.grpc.get_model_repository_index()


@case("statistics, which both protocols add to")
def _(clients: KServeClients) -> None:
    def both(*of: str) -> Any:
        ours = json_format.ParseDict(clients.http.get_inference_statistics(*of), pb.ModelStatisticsResponse())
        assert ours == clients.grpc.get_inference_statistics(*of)
        return ours

    before = both("batchy").model_stats[0].inference_stats.success.count
    cases["Triton's clients, a batch"](clients)
    assert both("batchy").model_stats[0].inference_stats.success.count == before + 5
    both("batchy", "1")
    both()


REFUSALS: dict[str, Callable[[Any], Any]] = {
    "load_model": lambda c: c.load_model("x"),
    "unload_model": lambda c: c.unload_model("x"),
    "register_system_shared_memory": lambda c: c.register_system_shared_memory("x", "/x", 10),
    "metadata of an unknown model": lambda c: c.get_model_metadata("missing"),
    "metadata of an unknown version": lambda c: c.get_model_metadata("types", "2"),
    "config of an unknown model": lambda c: c.get_model_config("missing"),
    "statistics of an unknown model": lambda c: c.get_inference_statistics("missing"),
    "statistics of an unknown version": lambda c: c.get_inference_statistics("types", "2"),
}


def same_refusal(clients: KServeClients, call: Callable[[Any], Any]) -> None:
    words = []
    for client in (clients.grpc, clients.http):
        try:
            response = call(client)
        except InferenceServerException as error:
            status = str(error.status())
            code = STATUSES[status.removeprefix("StatusCode.")] if client is clients.grpc else int(status)
            words.append((code, error.message()))
        else:
            raise AssertionError(f"the request was served: {response}")
    assert words[0] == words[1]


@contextmanager
def open_clients(target: str, port: int) -> Iterator[KServeClients]:
    unbounded = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with (
        by_grpc.InferenceServerClient(target) as grpc_client,
        by_http.InferenceServerClient(f"127.0.0.1:{port}", concurrency=4) as http_client,
        grpc.insecure_channel(target, options=unbounded) as channel,
    ):
        yield KServeClients(grpc_client, http_client, channel, port)


def main(target: str, port: int) -> None:
    with open_clients(target, port) as clients:

        def report(name: str, run: Callable[[], None]) -> None:
            problem = ""
            try:
                run()
            except Exception:
                problem = traceback.format_exc(limit=-4)
            print(json.dumps({"case": name, "problem": problem}), flush=True)

        for name, request in messages():
            for form in Form:
                report(f"{name}, {form}", partial(check_same_response, clients, request, form))
        for name, refused in {**bad, **ONLY_UNARY}.items():
            if name not in ONLY_GRPC:
                request = pb.ModelInferRequest.FromString(refused.data)
                report(f"refused: {name}", partial(check_same_response, clients, request))
        for name, (pair, _) in METADATA.items():
            report(f"refused: {name}", partial(check_same_response, clients, fixed(), headers=dict([pair])))
        for name, call in REFUSALS.items():
            report(f"refused: {name}", partial(same_refusal, clients, call))
        for name, run in cases.items():
            report(name, partial(run, clients))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
