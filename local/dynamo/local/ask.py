"""Sends a model one request over KServe v2 gRPC and prints the response as it arrives.

    python -m dynamo.local.ask 127.0.0.1:8001 smollm2 "Why is the sea salty?"
    python -m dynamo.local.ask 127.0.0.1:8001 classifier @examples/classifier.json

A language model takes a text. Any other takes a file with a KServe request in JSON (`inputs` with `name`, `datatype`, `shape`,
`data`; `outputs` if only some are wanted); without one it is sent ones of the shapes that its metadata name.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import grpc
import msgspec
import numpy as np

from dynamo.common.errors import InvalidRequest
from dynamo.common.lifecycle import EXIT_FAILURE
from dynamo.common.tensors.tensors import Array, datatype_named, encode_bytes, from_numpy, to_numpy
from dynamo.local.config import EXIT_UNAUTHENTICATED
from dynamo.protos import inference_pb2 as pb
from dynamo.protos.inference_pb2_grpc import GRPCInferenceServiceStub

MAX_TOKENS = 48
READY_S, RESPONSE_S = 60.0, 120.0
_POLL_S = 0.1
_SHOWN_ELEMENTS = 10


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[object]


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, int] = {}


class RequestFile(msgspec.Struct):
    """A KServe REST request; data may be nested or flat."""

    inputs: list[_Input]
    outputs: list[_Output] = []


def main() -> None:
    parser = argparse.ArgumentParser("dynamo.local.ask", description="Send a model one request over KServe v2 gRPC.")
    parser.add_argument("address", help="host:port of the gRPC side")
    parser.add_argument("model")
    parser.add_argument("text", nargs="?", default="", help="a prompt, or @FILE with a KServe request in JSON")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    arguments = parser.parse_args()
    with grpc.insecure_channel(arguments.address) as channel:
        stub = GRPCInferenceServiceStub(channel)
        try:
            _wait_until_ready(stub, arguments.model)
            metadata = stub.ModelMetadata(pb.ModelMetadataRequest(name=arguments.model), timeout=RESPONSE_S)
            if {"text_input", "streaming"} <= {tensor.name for tensor in metadata.inputs}:
                _stream_text(stub, arguments.model, arguments.text or "Hello", arguments.max_tokens)
            else:
                _infer(stub, metadata, arguments.text.removeprefix("@"))
        except grpc.RpcError as error:
            status = EXIT_UNAUTHENTICATED if error.code() is grpc.StatusCode.UNAUTHENTICATED else EXIT_FAILURE
            _fail(f"{error.code().name}: {error.details()}", status)
        except (InvalidRequest, OSError, msgspec.DecodeError) as error:
            _fail(str(error))


def _fail(text: str, status: int = EXIT_FAILURE) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(status)


def _wait_until_ready(stub: GRPCInferenceServiceStub, model: str) -> None:
    until = time.monotonic() + READY_S
    request = pb.ModelReadyRequest(name=model)
    while not _is_ready(stub, request):
        if time.monotonic() > until:
            _fail(f"model '{model}' was not ready after {READY_S:g} s")
        time.sleep(_POLL_S)


def _is_ready(stub: GRPCInferenceServiceStub, request: pb.ModelReadyRequest) -> bool:
    try:
        return stub.ModelReady(request, timeout=5, wait_for_ready=True).ready
    except grpc.RpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED):
            return False  # the frontend starts beside the workers and may learn of the model a moment later
        raise


# --- language models -------------------------------------------------------------------------------------------------


def _stream_text(stub: GRPCInferenceServiceStub, model: str, prompt: str, max_tokens: int) -> None:
    started = time.monotonic()
    first = 0.0
    pieces = 0
    for text in _text_pieces(stub, text_request(model, prompt, max_tokens)):
        first = first or time.monotonic()
        pieces += 1
        print(text, end="", flush=True)
    took = time.monotonic() - started
    print(f"\n[{pieces} parts streamed in {took:.2f} s, the first after {(first or started) - started:.2f} s]")


def text_request(model: str, prompt: str, max_tokens: int) -> pb.ModelInferRequest:
    """Return a request for a streamed, greedy response of a chat model to one prompt."""
    request = pb.ModelInferRequest(model_name=model, id="ask")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.inputs.add(name="streaming", datatype="BOOL", shape=[1])
    request.raw_input_contents.extend([encode_bytes([prompt]), b"\1"])
    request.parameters["max_tokens"].int64_param = max_tokens
    request.parameters["temperature"].double_param = 0.0
    request.parameters["chat"].bool_param = True
    return request


def _text_pieces(stub: GRPCInferenceServiceStub, request: pb.ModelInferRequest) -> Iterator[str]:
    for response in _responses(stub, request, streamed=True):
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            if output.name == "text_output":
                parts = to_numpy(raw, "BYTES", output.shape).reshape(-1).tolist()
                yield "".join(part.decode("utf-8", "replace") for part in parts)


# --- tensor models ---------------------------------------------------------------------------------------------------


def _infer(stub: GRPCInferenceServiceStub, metadata: pb.ModelMetadataResponse, file: str) -> None:
    request = from_file(metadata.name, Path(file)) if file else from_metadata(metadata)
    config = stub.ModelConfig(pb.ModelConfigRequest(name=metadata.name), timeout=RESPONSE_S).config
    started = time.monotonic()
    responses = 0
    for response in _responses(stub, request, streamed=config.model_transaction_policy.decoupled):
        responses += 1
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            array = to_numpy(raw, output.datatype, output.shape)
            print(f"{output.name} {output.datatype} {list(output.shape)}: {shown(array)}", flush=True)
    print(f"[{responses} response{'s' if responses != 1 else ''} in {(time.monotonic() - started) * 1000:.1f} ms]")


def _responses(
    stub: GRPCInferenceServiceStub, request: pb.ModelInferRequest, *, streamed: bool
) -> Iterator[pb.ModelInferResponse]:
    """Yield the one response, or the responses of a decoupled model, which only a stream can carry."""
    if not streamed:
        yield stub.ModelInfer(request, timeout=RESPONSE_S)
        return
    for response in stub.ModelStreamInfer(iter([request]), timeout=RESPONSE_S):
        if response.error_message:
            _fail(response.error_message)
        yield response.infer_response


def from_file(model: str, file: Path) -> pb.ModelInferRequest:
    """Read a KServe REST request and return it as a gRPC one. Raises OSError, DecodeError or InvalidRequest."""
    content = msgspec.json.decode(file.read_bytes(), type=RequestFile)
    request = pb.ModelInferRequest(model_name=model, id="ask")
    for tensor in content.inputs:
        dtype = object if tensor.datatype == "BYTES" else datatype_named(tensor.datatype).dtype
        array: Array = np.array(tensor.data, dtype).reshape(tensor.shape)
        _add_input(request, tensor.name, tensor.datatype, array)
    for wanted in content.outputs:
        output = request.outputs.add(name=wanted.name)
        for name, value in wanted.parameters.items():
            output.parameters[name].int64_param = value
    return request


def from_metadata(metadata: pb.ModelMetadataResponse) -> pb.ModelInferRequest:
    """Return a request with ones, or the text `hello`, in the declared shapes; a variable dimension is 1."""
    request = pb.ModelInferRequest(model_name=metadata.name, id="ask")
    for tensor in metadata.inputs:
        shape = [max(size, 1) for size in tensor.shape]
        if tensor.datatype == "BYTES":
            array: Array = np.full(shape, "hello", object)
        else:
            array = np.ones(shape, datatype_named(tensor.datatype).dtype)
        _add_input(request, tensor.name, tensor.datatype, array)
    return request


def _add_input(request: pb.ModelInferRequest, name: str, datatype: str, array: Array) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=array.shape)
    request.raw_input_contents.append(bytes(from_numpy(array, datatype)[1]))


def shown(array: Array) -> str:
    """Return the first elements of a tensor as text."""
    elements: Sequence[object] = array.reshape(-1)[:_SHOWN_ELEMENTS].tolist()
    texts = [
        element.decode("utf-8", "replace")
        if isinstance(element, bytes)
        else f"{element:.4g}"
        if isinstance(element, float)
        else str(element)
        for element in elements
    ]
    return ", ".join(texts) + (", …" if array.size > len(texts) else "")


if __name__ == "__main__":
    main()
