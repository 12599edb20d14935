"""Speech into vLLM, with a Whisper of one layer: `make test-vllm`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import Role
from dynamo.common.tensors.relay import RelayedPart, RelayedRequest, part_from_outputs, relays_http, to_tensors
from dynamo.common.tensors.request import TensorRequest, build_response
from dynamo.worker.engine.base import Context
from dynamo.worker.process.engine_factory import make_engine
from tests.support.tiny_whisper import make_tiny_whisper, tone

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

CPU = "--enforce-eager --dtype float32 --kv-cache-memory-bytes 64M"
BOUNDARY = "of-the-form"
TRANSCRIPTIONS = "/v1/audio/transcriptions"


def request(path: str = TRANSCRIPTIONS, audio: bytes = b"", **fields: str) -> TensorRequest:
    parts = [
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in {"model": "ear", "temperature": "0", **fields}.items()
    ]
    head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'.encode()
    body = b"".join([*parts, head, audio, f"\r\n--{BOUNDARY}--\r\n".encode()])
    return to_tensors(RelayedRequest(path, f"multipart/form-data; boundary={BOUNDARY}", body), "ear")


async def parts_of(engine: Any, sent: TensorRequest) -> list[RelayedPart]:
    responses = [each async for each in engine.infer(sent, Context("test"))]
    return [part_from_outputs(b"".join(build_response(each.head, each.raw_outputs))) for each in responses]


async def whole(engine: Any, sent: TensorRequest) -> tuple[int, Any]:
    [part] = await parts_of(engine, sent)
    return part.status, json.loads(bytes(part.body))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ear(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    model = make_tiny_whisper(tmp_path_factory.mktemp("vllm") / "ear")
    with pytest.raises(InvalidRequest, match="is a speech model: it takes no --role decode"):
        make_engine(str(model), role=Role.DECODE, engine_args=CPU)
    engine: Any = make_engine(str(model), engine_args=CPU, max_num_seqs=4)
    [card] = await engine.start()
    assert card.name == "ear" and relays_http(card)
    yield engine
    await engine.close()


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, "/v1/audio/translations"])
async def test_vllm_writes_speech_down(ear: Any, path: str) -> None:
    status, response = await whole(ear, request(path, tone(2.0), response_format="verbose_json", language="en"))
    assert (status, response["language"]) == (200, "en"), response
    assert float(response["duration"]) == 2.0 and isinstance(response["text"], str)


async def test_vllm_streams_what_it_hears_as_events(ear: Any) -> None:
    parts = await parts_of(ear, request(audio=tone(), stream="true"))
    assert (parts[0].status, parts[0].content_type.partition(";")[0]) == (200, "text/event-stream")
    events = b"".join(bytes(part.body) for part in parts).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and json.loads(events[0].removeprefix("data: "))["model"] == "ear"


async def test_vllm_refuses_what_is_no_audio_and_goes_on(ear: Any) -> None:
    status, response = await whole(ear, request(audio=b"no audio"))
    assert status == 400 and response["error"]["message"], response
    assert (await whole(ear, request(audio=tone())))[0] == 200


async def test_a_caller_who_leaves_ends_the_request_in_vllm(ear: Any) -> None:
    async with aclosing(ear.infer(request(audio=tone(), stream="true"), Context("test"))) as responses:
        await anext(responses)
    assert (await whole(ear, request(audio=tone())))[0] == 200
    assert ear.vllm.llm.output_processor.get_num_unfinished_requests() == 0


async def test_a_speech_model_of_vllm_has_no_other_paths(ear: Any) -> None:
    with pytest.raises(InvalidRequest, match="ear writes down speech: it serves /v1/audio/transcriptions and"):
        await parts_of(ear, request("/v1/audio/speech", tone()))
