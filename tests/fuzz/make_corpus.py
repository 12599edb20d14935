"""Writes the inputs that fuzzing begins with: `python -m tests.fuzz.make_corpus`. What fuzzing has found stays beside them."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import hpack
import msgspec

from dynamo.common.discovery import Instance, encode_registration
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Summary,
    delta_encoder,
    pack_tokens,
    request_encoder,
    summary_encoder,
)
from dynamo.common.kv.events import KvMessage, KvSnapshot, KvUpdate, LoadMessage, LoadReport
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.messaging.request_plane import frames
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.repository import ControlMode, RepositoryInstance
from dynamo.frontend.api.rpc.http2 import frames as http2_frames
from dynamo.frontend.router.loads.shared_bookings import LAST_ID, InstanceBookings, SharedBookings, SharedPrompt
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from tests.fuzz.targets import CARD
from tests.support import http2

CORPUS = Path(__file__).with_name("corpus")


def main() -> None:
    for name, inputs in corpus().items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(inputs):
            (folder / f"made-{number}").write_bytes(data)


def corpus() -> dict[str, list[bytes]]:
    pack = msgspec.msgpack.encode
    return {
        "tensor_request": [_raw_request(), _typed_request()],
        "tensor_response": [_response()],
        "http2": [http2.call(1, b"content"), _http2()],
        "plane_message": [_message()],
        "kv_events": [pack(KvMessage(model="m", update=_update()))],
        "kv_snapshot": [pack(KvSnapshot(number=3, blocks=pack_hashes([1, 2])))],
        "load_report": [pack(LoadMessage(model="m", report=LoadReport(running=2, waiting=1, total_blocks=10)))],
        "bookings": _bookings(),
        "generation": [_request(), b"d" + _delta(), b"s" + summary_encoder.encode(Summary(prompt_tokens=3))],
        "registration": [_registration()],
        "repository": [_repository()],
        "vllm_events": _vllm(),
        "json_request": _json(),
        "rest_request": _rest(),
        "gguf": [_gguf()],
        "sentencepiece": [_sentencepiece()],
        "model_config": _configs(),
    }


def _raw_request() -> bytes:
    message = ModelInferRequest(model_name="m", id="1", raw_input_contents=[struct.pack("<4f", 1, 2, 3, 4)])
    message.inputs.add(name="x", datatype="FP32", shape=[2, 2])
    message.outputs.add(name="y").parameters["classification"].int64_param = 2
    message.parameters["priority"].int64_param = 1
    return message.SerializeToString()


def _typed_request() -> bytes:
    message = ModelInferRequest(model_name="m", model_version="1")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    message.inputs.add(name="s", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"text")
    return message.SerializeToString()


def _http2() -> bytes:
    """Settings, a header block in two frames that is put into the table, padding, a compressed and a split message."""
    padded = b"\2" + http2.message(gzip.compress(b"a", mtime=0), flag=1) + b"\0\0"
    block = hpack.Encoder().encode([*http2.fields(), ("grpc-timeout", "1S"), ("x-bin", "AAE")])
    return b"".join(
        (
            http2_frames.encode_settings({http2_frames.INITIAL_WINDOW_SIZE: 70_000}),
            http2_frames.encode_frame(http2_frames.HEADERS, http2_frames.END_HEADERS, 1, block),
            http2_frames.encode_frame(http2_frames.DATA, http2_frames.PADDED, 1, padded),
            http2.data(1, http2.message(b"split")[:7], ends=False),
            http2.data(1, http2.message(b"split")[7:]),
            http2_frames.encode_window_update(0, 1),
        )
    )


def _response() -> bytes:
    message = ModelInferResponse(model_name="m", raw_output_contents=[struct.pack("<2f", 1, 2)])
    message.outputs.add(name="y", datatype="FP32", shape=[1, 2])
    return message.SerializeToString()


def _message() -> bytes:
    sent = [
        frames.encode(frames.Open(1, "infer", {"request-id": "a"}, 100, 3, 3, 1024, memoryview(b"abc"))),
        frames.encode(frames.Cancel(2)),
        frames.encode(frames.Probe([1, 2])),
    ]
    return frames.message_head(len(sent)) + b"".join(sent)


def _update() -> KvUpdate:
    return KvUpdate(number=1, stored=pack_hashes([1, 2, 3]), removed=pack_hashes([4]))


def _bookings() -> list[bytes]:
    pack = msgspec.msgpack.encode
    return [
        pack(SharedBookings("other", [InstanceBookings(1, 2, 64, 3, 1, 32, 2)], first=0, last=LAST_ID)),
        pack(SharedBookings("other", prompts=[SharedPrompt(1, pack_hashes([1, 2]), 1)])),
    ]


def _request() -> bytes:
    return b"r" + request_encoder.encode(GenerateRequest(model="m", prompt=pack_tokens([1, 2, 3])))


def _delta() -> bytes:
    return delta_encoder.encode(Delta((1, 2), 0, FinishReason.STOP))


def _registration() -> bytes:
    endpoint, id_ = Endpoint(), InstanceId(7)
    card = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=100, tokenizer="t"))
    instance = Instance(id=id_, endpoint=endpoint, subject=endpoint.rpc_subject(id_), card=card, started_at=1.0)
    return instance.key.encode() + b"\n" + encode_registration(instance)


def _repository() -> bytes:
    endpoint, id_ = Endpoint(), InstanceId(7)
    held = RepositoryInstance(id=id_, endpoint=endpoint, subject=endpoint.rpc_subject(id_), mode=ControlMode.EXPLICIT)
    return held.key.encode() + b"\n" + held.encode()


def _vllm() -> list[bytes]:
    pack = msgspec.msgpack.encode
    stored = ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU"]
    removed = ["BlockRemoved", [1], "GPU"]
    named = {"type": "BlockStored", "block_hashes": [b"12345678"], "token_ids": [1, 2], "block_size": 2}
    return [pack([1.0, [stored, removed, ["AllBlocksCleared"]], 0]), pack({"ts": 1.0, "events": [named]})]


def _json() -> list[bytes]:
    chat = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 3}
    completion = {"model": "m", "prompt": [1, 2], "stop": ["a"], "logit_bias": {"1": 2.0}}
    response = {"model": "m", "input": [{"role": "user", "content": "hi"}], "text": {"format": {"type": "text"}}}
    message = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}], "system": "s"}
    bodies = ((b"c", chat), (b"p", completion), (b"r", response), (b"m", message))
    return [kind + json.dumps(body).encode() for kind, body in bodies]


def _rest() -> list[bytes]:
    listed = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [[1.5, 2]]}]}
    sized = {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}
    binary = json.dumps({"inputs": [sized], "outputs": [{"name": "y"}], "parameters": {"a": True}}).encode()
    return [b"\0\0" + json.dumps(listed).encode(), len(binary).to_bytes(2, "big") + binary + struct.pack("<2f", 1, 2)]


def _gguf() -> bytes:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    pairs = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"llama.context_length") + struct.pack("<II", 4, 2048),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"b"),
    ]
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)


def _sentencepiece() -> bytes:
    def field(number: int, data: bytes) -> bytes:
        return bytes(((number << 3) | 2, len(data))) + data

    def piece(text: bytes, score: float, kind: int = 1) -> bytes:
        return field(1, field(1, text) + b"\x15" + struct.pack("<f", score) + bytes((0x18, kind)))

    return piece(b"<unk>", 0.0, 2) + piece(b"\xe2\x96\x81a", -1.0) + piece(b"b", -2.0) + field(2, b"\x18\x01")


def _configs() -> list[bytes]:
    text = b"""name: "m" backend: "python" max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ] output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ] dynamic_batching { max_queue_delay_microseconds: 100 }"""
    return [text, b'{"name": "m", "backend": "onnxruntime", "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}]}']


if __name__ == "__main__":
    assert CARD.name == "m"
    main()
