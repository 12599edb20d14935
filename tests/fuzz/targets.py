"""The decoders of untrusted input, and which errors they may raise."""

from __future__ import annotations

import struct
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo.common.discovery import decode_registration
from dynamo.common.errors import DynamoError
from dynamo.common.generation import delta_decoder, request_decoder, summary_decoder, unpack_tokens
from dynamo.common.kv.events import load_message_decoder, read_message, snapshot_decoder
from dynamo.common.messaging.request_plane import frames
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.process.work import finish
from dynamo.common.repository import decode_repository
from dynamo.common.tensors.check import RequestChecker
from dynamo.common.tensors.request import TensorRequest, parse_response
from dynamo.common.tensors.response import ResponseForm
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.anthropic.requests import MessagesRequest
from dynamo.frontend.api.http import json_body
from dynamo.frontend.api.http.json_scan import check_json
from dynamo.frontend.api.kserve.rest.bodies import split
from dynamo.frontend.api.kserve.rest.requests import read_request
from dynamo.frontend.api.openai.requests import ChatRequest, CompletionRequest
from dynamo.frontend.api.openai.responses.requests import ResponsesRequest
from dynamo.frontend.api.rpc.http2 import frames as http2_frames
from dynamo.frontend.api.rpc.http2.headers import HeaderDecoder, MalformedRequest
from dynamo.frontend.api.rpc.http2.messages import CorruptMessage, MessageOwner, MessageReader, PlainMemory, inflate_steps
from dynamo.frontend.config import HttpOptions
from dynamo.frontend.router.cache.predicted import PredictedIndex
from dynamo.frontend.router.cache.thinning import SPARSE
from dynamo.frontend.router.loads.shared_bookings import SharedBookings
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.worker.kv.vllm_events import Translator, decode_batch
from dynamo.worker.repository.declared.model_config import check_supported, config_from_json, instances_of, read_config
from dynamo.worker.tokenizers.gguf import GgufModel, parse_metadata
from dynamo.worker.tokenizers.sentencepiece import SentencePieceModel

MAX_DEPTH = 64
MAX_VALUES = 1000
BOUNDS = HttpOptions(max_json_depth=MAX_DEPTH)
CARD = ModelCard(
    name="m",
    kind=ModelKind.TENSOR,
    inputs=(
        TensorSpec(name="x", datatype="FP32", shape=(-1, 2)),
        TensorSpec(name="s", datatype="BYTES", shape=(-1,), optional=True),
    ),
    outputs=(TensorSpec(name="y", datatype="FP32", shape=(-1, 2)),),
)


@dataclass(frozen=True)
class Target:
    """One decoder."""

    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = (DynamoError,)
    """What it may raise; anything else is a defect."""

    def __call__(self, data: bytes) -> bool:
        """Return whether `data` was accepted."""
        try:
            self.run(data)
        except self.errors:
            return False
        return True


def tensor_request(data: bytes) -> None:
    """A ModelInferRequest from a gRPC client: parsed, checked, the form of its response derived."""
    request = TensorRequest.parse(data)
    RequestChecker(CARD).check(request)
    ResponseForm.of(request, CARD)


def tensor_response(data: bytes) -> None:
    """A ModelInferResponse from a worker."""
    parse_response(data)


class _Http2(MessageOwner):
    """An HTTP/2 connection without calls: frames, header blocks, and messages of up to 4 KiB."""

    def __init__(self) -> None:
        self._reader = http2_frames.FrameReader(self, memoryview(bytearray(2**16)), 2**14)
        self._decoder = HeaderDecoder(2**14)
        self._messages = MessageReader(self)

    def receive(self, data: bytes) -> None:
        rest = memoryview(data)
        while len(rest):
            space = self._reader.get_buffer()
            count = min(len(space), len(rest))
            space[:count] = rest[:count]
            self._reader.buffer_updated(count)
            while self._reader.is_behind:
                self._reader.go_on()
            rest = rest[count:]

    def skipped(self) -> None:
        pass

    def frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == http2_frames.HEADERS:
            self._decoder.decode(http2_frames.strip_headers(stream, flags, payload))
        elif kind == http2_frames.SETTINGS:
            http2_frames.decode_settings(payload)

    def data_begun(self, stream: int, size: int, content: int, *, ends: bool) -> http2_frames.DataSink:
        return self._messages

    def data_ended(self, stream: int) -> None:
        self._messages = MessageReader(self)

    def admit_message(self, size: int, *, is_complete: bool) -> bool:
        return size <= 4096

    def admit_part(self, received: int, size: int) -> int:
        return size

    def message_memory(self, size: int) -> PlainMemory:
        return PlainMemory(size)

    def message_received(self, message: Buffer, *, is_compressed: bool) -> None:
        if is_compressed:
            deque(inflate_steps(message, "gzip"), maxlen=0)

    def refuse_flag(self, flag: int) -> None:
        pass


def http2(data: bytes) -> None:
    """What a gRPC client sends before any credentials are checked."""
    _Http2().receive(http2_frames.PREFACE + data)


def plane_message(data: bytes) -> None:
    """A message of the request plane."""
    frames.decode(data)


def kv_events(data: bytes) -> None:
    """KV updates of an instance, as routers read them."""
    read_message(data)


def kv_snapshot(data: bytes) -> None:
    snapshot_decoder.decode(data)


def load_report(data: bytes) -> None:
    load_message_decoder.decode(data)


_bookings = msgspec.msgpack.Decoder(SharedBookings)


def bookings(data: bytes) -> None:
    """Bookings of another frontend, applied."""
    table, predicted = LoadTable("own"), PredictedIndex(10.0, thinning=SPARSE)
    table.on_peer_prompt(predicted.add_kept)
    table.apply(_bookings.decode(data), 1.0, lambda instance: True)
    predicted.expire(100.0)
    table.expire_peers(100.0)


def generation(data: bytes) -> None:
    """A text request as a worker reads it, and deltas and summaries as a frontend reads them."""
    kind, rest = data[:1], data[1:]
    if kind == b"r":
        unpack_tokens(request_decoder.decode(rest).prompt)
    else:
        (delta_decoder if kind == b"d" else summary_decoder).decode(rest)


def registration(data: bytes) -> None:
    """What is found in etcd: a key, a line break, a value."""
    key, _, value = data.partition(b"\n")
    decode_registration(key.decode(errors="surrogateescape"), value)


def repository(data: bytes) -> None:
    key, _, value = data.partition(b"\n")
    decode_repository(key.decode(errors="surrogateescape"), value)


def vllm_events(data: bytes) -> None:
    """A batch of KV events from vLLM, translated."""
    batch = decode_batch(data)
    translator = Translator()
    for event in batch.events:
        translator.translate(event)


_json: Mapping[bytes, msgspec.json.Decoder[Any]] = {
    b"c": msgspec.json.Decoder(ChatRequest),
    b"p": msgspec.json.Decoder(CompletionRequest),
    b"r": msgspec.json.Decoder(ResponsesRequest),
    b"m": msgspec.json.Decoder(MessagesRequest),
}


def json_request(data: bytes) -> None:
    """A body of OpenAI's or Anthropic's API; the first byte says which."""
    check_json(data[1:], max_depth=MAX_DEPTH, max_values=MAX_VALUES)
    json_body.decode(_json.get(data[:1], _json[b"c"]), data[1:], MAX_DEPTH)


def rest_request(data: bytes) -> None:
    """A KServe request over REST: the length of its JSON in two bytes, JSON, binary tensors."""
    length = int.from_bytes(data[:2], "big")
    body = data[2:]
    parts = split(body, str(length) if length else None, BOUNDS.max_tensor_json_bytes)
    request, _ = finish(read_request(parts, CARD, "m", "", BOUNDS))
    RequestChecker(CARD).check(request)


def gguf(data: bytes) -> None:
    """The header of a GGUF file, and what is read out of it."""
    model = GgufModel(parse_metadata(data))
    _ = (model.name, model.context_length, model.kv_values_per_token)


def sentencepiece(data: bytes) -> None:
    SentencePieceModel.read(data)


def model_config(data: bytes) -> None:
    """A `config.pbtxt`, or after a brace a configuration in JSON."""
    if data[:1] == b"{":
        config = config_from_json(data.decode(errors="replace"))
    else:
        with tempfile.NamedTemporaryFile(suffix=".pbtxt") as file:
            file.write(data)
            file.flush()
            config = read_config(Path(file.name))
    check_supported(config)
    list(instances_of(config))


_ON_THE_BUS = (DynamoError, ValueError, RecursionError)
"""What readers of messages from other processes catch: msgspec's errors and UnicodeDecodeError are ValueErrors."""

_IN_A_FILE = (DynamoError, ValueError, struct.error)
"""What `read_metadata` turns into a sentence."""

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "tensor_request": Target(tensor_request),
        "tensor_response": Target(tensor_response),
        "http2": Target(http2, (http2_frames.ConnectionFailure, MalformedRequest, CorruptMessage)),
        "plane_message": Target(plane_message),
        "kv_events": Target(kv_events, _ON_THE_BUS),
        "kv_snapshot": Target(kv_snapshot, _ON_THE_BUS),
        "load_report": Target(load_report, _ON_THE_BUS),
        "bookings": Target(bookings, _ON_THE_BUS),
        "generation": Target(generation, _ON_THE_BUS),
        "registration": Target(registration),
        "repository": Target(repository),
        "vllm_events": Target(vllm_events),
        "json_request": Target(json_request),
        "rest_request": Target(rest_request),
        "gguf": Target(gguf, _IN_A_FILE),
        "sentencepiece": Target(sentencepiece),
        "model_config": Target(model_config),
    }
)
