"""Requests that a model gets as HTTP has them, and responses that clients get as the model made them.

A model of audio or images has bodies that only it can read. As a *relay* it takes them whole, in tensors:

    inputs    http_path BYTES [1]     http_content_type BYTES [1]     http_body UINT8 [-1]
    outputs   http_status INT32 [1]   http_content_type BYTES [1]     http_body UINT8 [-1]

It is decoupled: its first response has all outputs, and those after it the next parts of the body.

A conversation over a WebSocket is such a request to `REALTIME_PATH`, whose body opens it. The first response has the status 101,
and each body after it, as each body of further requests of the same session, a `RealtimeFrame`. These go to the instance that
responds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.request import TensorRequest, parse_response
from dynamo.common.tensors.tensors import Buffer, encode_bytes, to_numpy, typed_to_raw
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse

_PATH, _TYPE, _BODY, _STATUS = "http_path", "http_content_type", "http_body", "http_status"
RELAY_INPUTS: Final = (
    TensorSpec(name=_PATH, datatype="BYTES", shape=(1,)),
    TensorSpec(name=_TYPE, datatype="BYTES", shape=(1,)),
    TensorSpec(name=_BODY, datatype="UINT8", shape=(-1,)),
)
RELAY_OUTPUTS: Final = (
    TensorSpec(name=_STATUS, datatype="INT32", shape=(1,)),
    TensorSpec(name=_TYPE, datatype="BYTES", shape=(1,)),
    TensorSpec(name=_BODY, datatype="UINT8", shape=(-1,)),
)
SERVER_MODEL: Final = "server_model"
"""The label of a card that says by which name the body has to call the model, if it is not the card's."""
CHAT_PATH: Final = "/v1/chat/completions"
FORM_PATHS: Final = (
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/edits",
    "/v1/images/variations",
    "/v1/videos/sync",
)
"""Requests to them are forms with files."""
JSON_PATHS: Final = ("/v1/audio/speech", "/v1/images/generations", "/v1/videos")
RELAYED_PATHS: Final = frozenset((*FORM_PATHS, *JSON_PATHS, CHAT_PATH))
"""All paths of requests to a relay; a server may have others, which are not for clients."""


REALTIME_PATH: Final = "/v1/realtime"
"""A WebSocket to it is relayed."""
MAX_MESSAGE_BYTES: Final = 16 << 20
"""Bytes of one message of a WebSocket, at most."""
SWITCHING: Final = 101


class RealtimeFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one side of a conversation says. The first one opens it, with nothing but `session` and `query`."""

    session: str = ""
    """Which conversation, known to no other caller; empty in responses."""
    query: str = ""
    """The query of the URL, with the model's name as the server knows it."""
    number: int = 0
    """Counts the requests of a session, of which each may arrive twice; 0 opens it."""
    messages: tuple[str, ...] = ()
    close: tuple[int, str] | None = None
    """Code and reason of a side that says no more."""

    def encode(self) -> bytes:
        return _frames.encode(self)

    @classmethod
    def decode(cls, body: Buffer) -> RealtimeFrame:
        """Raises InvalidRequest for a body that is none."""
        try:
            return _frame_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"the body is no frame of a conversation: {error}") from None


_frames = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(RealtimeFrame)


class RelayedRequest(msgspec.Struct, frozen=True):
    path: str
    content_type: str
    body: Buffer


class RelayedPart(msgspec.Struct, frozen=True):
    """The beginning of a response, or the next part of its body."""

    body: Buffer
    status: int = 0
    """0 in all parts but the first one."""
    content_type: str = ""


def relay_card(name: str, backend: str, labels: Mapping[str, str] | None = None) -> ModelCard:
    """Return the card of a relay. Raises InvalidRequest for a name that no model may have."""
    card = ModelCard(
        name=name,
        kind=ModelKind.TENSOR,
        backend=backend,
        inputs=RELAY_INPUTS,
        outputs=RELAY_OUTPUTS,
        decoupled=True,
        labels=dict(labels or {}),
    )
    return card.check()


def relays_http(card: ModelCard) -> bool:
    """Return whether a model is a relay."""
    return card.kind is ModelKind.TENSOR and card.decoupled and card.inputs == RELAY_INPUTS and card.outputs == RELAY_OUTPUTS


def to_tensors(request: RelayedRequest, model: str) -> TensorRequest:
    """Return the request to a relay of this name. The body is copied once."""
    head = ModelInferRequest(model_name=model)
    for spec, size in zip(RELAY_INPUTS, (1, 1, len(request.body)), strict=True):
        head.inputs.add(name=spec.name, datatype=spec.datatype, shape=[size])
    return TensorRequest.build(head, [encode_bytes([request.path]), encode_bytes([request.content_type]), request.body])


def from_tensors(request: TensorRequest) -> RelayedRequest:
    """Return the request that a relay got. Raises InvalidRequest."""
    found: dict[str, Buffer] = {}
    for index, tensor in enumerate(request.head.inputs):
        if request.raw_inputs:
            found[tensor.name] = request.raw_inputs[index]
        else:
            found[tensor.name] = typed_to_raw(tensor.contents, tensor.datatype, tensor.shape[0])
    return RelayedRequest(_text(found[_PATH]), _text(found[_TYPE]), found[_BODY])


def part_to_outputs(part: RelayedPart) -> tuple[ModelInferResponse, Sequence[Buffer]]:
    """Return the head of a response of a relay, and its tensors."""
    head = ModelInferResponse()
    raws: list[Buffer] = []
    if part.status:
        head.outputs.add(name=_STATUS, datatype="INT32", shape=[1])
        head.outputs.add(name=_TYPE, datatype="BYTES", shape=[1])
        raws += part.status.to_bytes(4, "little"), encode_bytes([part.content_type])
    head.outputs.add(name=_BODY, datatype="UINT8", shape=[len(part.body)])
    return head, [*raws, part.body]


def part_from_outputs(encoded: Buffer) -> RelayedPart:
    """Return what a serialized response of a relay has. Raises EngineError."""
    head, raws = parse_response(encoded)
    found = {output.name: raw for output, raw in zip(head.outputs, raws, strict=False)}
    try:
        status = int(to_numpy(found[_STATUS], "INT32", (1,))[0]) if _STATUS in found else 0
        return RelayedPart(found.get(_BODY, b""), status, _text(found[_TYPE]) if _TYPE in found else "")
    except InvalidRequest as error:
        raise EngineError(f"the model's response is not that of a relay: {error}") from None


def _text(raw: Buffer) -> str:
    """Return the element of a BYTES tensor that has one. Raises InvalidRequest."""
    try:
        return bytes(raw[4:]).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("a text is not in UTF-8") from None
