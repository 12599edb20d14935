"""Requests and responses as HTTP has them, in tensors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.tensors.relay import (
    RelayedPart,
    RelayedRequest,
    from_tensors,
    part_from_outputs,
    part_to_outputs,
    relays_http,
    to_tensors,
)
from dynamo.common.tensors.request import TensorRequest, build_response
from dynamo.protos.inference_pb2 import InferTensorContents, ModelInferRequest, ModelInferResponse
from tests.support.fakes import relay_card, tensor_card


@pytest.mark.parametrize("body", [b"", b"{}", bytes(200_000)])
def test_a_request_arrives_as_it_was(body: bytes) -> None:
    sent = RelayedRequest("/v1/audio/speech", "application/json", body)
    received = from_tensors(TensorRequest.parse(to_tensors(sent, "m").raw))
    assert (received.path, received.content_type, bytes(received.body)) == (sent.path, sent.content_type, body)


def test_a_request_may_have_typed_contents() -> None:
    head = ModelInferRequest(model_name="m")
    tensors: list[tuple[str, str, dict[str, Any], int]] = [
        ("http_path", "BYTES", {"bytes_contents": [b"/v1/audio/speech"]}, 1),
        ("http_content_type", "BYTES", {"bytes_contents": [b"text/plain"]}, 1),
        ("http_body", "UINT8", {"uint_contents": [104, 105]}, 2),
    ]
    for name, datatype, contents, size in tensors:
        head.inputs.add(name=name, datatype=datatype, shape=[size]).contents.MergeFrom(InferTensorContents(**contents))
    request = from_tensors(TensorRequest.parse(head.SerializeToString()))
    assert (request.path, request.content_type, bytes(request.body)) == ("/v1/audio/speech", "text/plain", b"hi")


@pytest.mark.parametrize(
    "part", [RelayedPart(b"", 204, "text/plain"), RelayedPart(b"more"), RelayedPart(bytes(99_999), 200, "é")]
)
def test_a_part_of_a_response_arrives_as_it_was(part: RelayedPart) -> None:
    received = part_from_outputs(b"".join(build_response(*part_to_outputs(part))))
    assert (bytes(received.body), received.status, received.content_type) == (part.body, part.status, part.content_type)


def test_what_is_no_text_is_said() -> None:
    request = to_tensors(RelayedRequest("/v1", "", b""), "m")
    broken = TensorRequest.build(request.head, [b"\2\0\0\0\xff\xff", *request.raw_inputs[1:]])
    with pytest.raises(InvalidRequest, match="not in UTF-8"):
        from_tensors(broken)
    response = ModelInferResponse()
    response.outputs.add(name="http_status", datatype="INT32", shape=[1])
    response.raw_output_contents.append(b"\1")
    with pytest.raises(EngineError, match="not that of a relay"):
        part_from_outputs(response.SerializeToString())


def test_a_relay_has_these_tensors_and_is_decoupled() -> None:
    card = relay_card()
    assert relays_http(card) and relays_http(msgspec.json.decode(msgspec.json.encode(card), type=type(card)))
    assert not relays_http(tensor_card(decoupled=True))
    assert not relays_http(msgspec.structs.replace(card, decoupled=False))
