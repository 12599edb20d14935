"""Language models written as Python classes that take text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Sampling,
    Stop,
    Summary,
    TextPrompt,
    pack_text,
    pack_tokens,
)
from dynamo.worker.canary import Canary
from dynamo.worker.config import TextOptions
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.python_text import PythonTextEngine, TextGeneration
from dynamo.worker.process.cards import CardFinisher
from dynamo.worker.process.engine_factory import make_engine

HI = TextPrompt(messages=[{"role": "user", "content": "hi"}])


class Speaker:
    """Yields `items`, and keeps the requests."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.requests: list[TextGeneration] = []
        self.is_closed = False

    async def generate(self, request: TextGeneration) -> AsyncIterator[Any]:
        self.requests.append(request)
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


def make_request(prompt: TextPrompt = HI, **fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", prompt=pack_text(prompt), **fields)


async def run(model: Speaker, request: GenerateRequest | None = None) -> list[Delta | Summary]:
    engine = PythonTextEngine(lambda: model)
    await engine.start()
    return [item async for item in engine.generate(request or make_request(), Context("r1"))]


async def test_texts_that_a_class_yields_are_the_response() -> None:
    assert await run(Speaker("Hel", "lo")) == [
        Delta(text="Hel"),
        Delta(text="lo"),
        Delta(finish_reason=FinishReason.STOP),
        Summary(),
    ]


async def test_a_class_may_say_why_it_ended_and_how_many_tokens_there_were() -> None:
    summary = Summary(prompt_tokens=3, output_tokens=1)
    assert await run(Speaker("a", FinishReason.LENGTH, summary)) == [
        Delta(text="a"),
        Delta(finish_reason=FinishReason.LENGTH),
        summary,
    ]


async def test_a_class_gets_the_conversation_with_its_media_in_their_places() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "this?"}, {"type": "media", "index": 0, "sha256": "x"}]
    prompt = TextPrompt(messages=[{"role": "user", "content": parts}], template_variables={"a": 1})
    model = Speaker("a cat")
    await run(model, make_request(prompt, media=(image,), stop=Stop(max_tokens=5), sampling=Sampling(seed=3)))
    [request] = model.requests
    assert request.messages == [{"role": "user", "content": [parts[0], image]}]
    assert (request.last_message, request.request_id, request.max_tokens, request.sampling.seed) == ("this?", "r1", 5, 3)
    assert request.template_variables == {"a": 1}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (GenerateRequest(model="m", prompt=pack_tokens((1, 2))), "prompt"),
        (make_request(TextPrompt()), "prompt"),
        (make_request(n=2), "n"),
        (make_request(sampling=Sampling(guided={"json_object": True})), "structured output"),
        (
            make_request(TextPrompt(messages=[{"role": "user", "content": [{"type": "media", "index": 4}]}]), media=({},)),
            "messages",
        ),
    ],
)
async def test_a_request_that_a_class_cannot_serve_is_refused(request_: GenerateRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await run(Speaker("a"), request_)
    assert refused.value.param == param


async def test_an_error_of_a_class_is_the_failure_of_its_request() -> None:
    with pytest.raises(EngineError, match="model 'speaker' failed: ValueError: no idea"):
        await run(Speaker("a", ValueError("no idea")))
    with pytest.raises(InvalidRequest, match="too rude"):
        await run(Speaker(InvalidRequest("too rude")))
    with pytest.raises(EngineError, match="yielded a int instead of text"):
        await run(Speaker(1))


async def test_leaving_a_request_closes_the_generator_of_the_class() -> None:
    model = Speaker("a", "b")
    engine = PythonTextEngine(lambda: model)
    await engine.start()
    async with aclosing(engine.generate(make_request(), Context("r1"))) as items:  # type: ignore[type-var]
        await anext(items)
        assert engine.load().running == 1
    assert model.is_closed
    assert engine.load().running == 0


async def test_a_class_that_does_not_yield_is_refused_at_the_start() -> None:
    class Returns:
        async def generate(self, request: TextGeneration) -> str:
            return "a"

    with pytest.raises(InvalidRequest, match="'generate' of model 'returns' must be an async generator"):
        await PythonTextEngine(Returns).start()


async def test_a_file_with_a_class_that_generates_is_a_model_that_takes_text(tmp_path: Path) -> None:
    (tmp_path / "talker.py").write_text(
        "class Talker:\n    context_length = 99\n    async def generate(self, request):\n        yield 'a'\n"
    )
    engine = make_engine(f"{tmp_path}/talker.py:Talker", name="ours")
    assert isinstance(engine, PythonTextEngine)
    card = await engine.start()
    assert card.llm is not None
    assert (card.name, card.llm.takes_text, card.llm.context_length) == ("ours", True, 99)
    finished = CardFinisher(TextOptions()).finish(card, ()).card.llm
    assert finished is not None and finished.tool_parser == "generic", "tools are described in the system message"


async def test_a_canary_of_a_model_that_takes_text_is_a_message() -> None:
    model = Speaker("a")
    engine = PythonTextEngine(lambda: model)
    await engine.start()
    await Canary("m", engine, takes_text=True).probe(0.0)
    assert [request.last_message for request in model.requests] == ["Hi"]
