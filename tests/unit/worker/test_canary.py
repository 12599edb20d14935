"""How a worker finds out whether its engine works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import Delta, GenerateRequest, Summary
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.worker.canary import Canary
from dynamo.worker.engine.base import Context, EngineLoad
from tests.support.waiting import expiring

IDLE_S = 1000.0
NOW = 0.0
"""As `idle_s`: earlier progress does not count."""


class Engine:
    """Does with each request what a test wants."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.error: Exception | None = None
        self.works = asyncio.Event()
        self.works.set()
        self.on_request: Callable[[], None] = lambda: None

    async def start(self) -> ModelCard:
        return ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=10, tokenizer=""))

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        self.requests.append(request)
        self.on_request()
        await self.works.wait()
        if self.error is not None:
            raise self.error
        yield Delta(tokens=(1,))
        yield Summary()

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        return


async def test_a_probe_of_an_idle_engine_generates_one_token() -> None:
    engine = Engine()
    await Canary("m", engine).probe(NOW)
    [request] = engine.requests
    assert (request.model, request.prompt_tokens, request.stop.max_tokens) == ("m", 1, 1)


async def test_an_engine_that_made_progress_lately_is_not_probed() -> None:
    engine = Engine()
    canary = Canary("m", engine)
    await canary.probe(IDLE_S)
    canary.progress += 1
    await canary.probe(NOW + 1e-3)
    assert engine.requests == []


async def test_many_probes_at_once_cost_one_token() -> None:
    engine = Engine()
    engine.works.clear()
    canary = Canary("m", engine)
    probes = [asyncio.create_task(canary.probe(NOW)) for _ in range(5)]
    while not engine.requests:
        await asyncio.sleep(0)
    engine.works.set()
    await asyncio.gather(*probes)
    assert len(engine.requests) == 1


async def test_a_full_engine_that_works_on_passes_though_the_token_waits_in_line() -> None:
    engine = Engine()
    engine.works.clear()
    canary = Canary("m", engine)

    def others_go_on() -> None:
        canary.progress += 1

    engine.on_request = others_go_on
    async with asyncio.timeout(120):
        await canary.probe(0.05)
    assert not engine.works.is_set()
    await canary.close()


async def test_each_probe_raises_the_error_of_the_engine() -> None:
    engine = Engine()
    engine.error = EngineError("out of memory")
    canary = Canary("m", engine)
    for _ in range(2):
        with pytest.raises(EngineError, match="out of memory"):
            await canary.probe(NOW)
    engine.error = None
    await canary.probe(NOW)


async def test_an_engine_that_breaks_unforeseen_fails_its_canary() -> None:
    engine = Engine()
    engine.error = ZeroDivisionError()
    with pytest.raises(EngineError, match="the engine failed"):
        await Canary("m", engine).probe(NOW)


async def test_an_engine_that_refuses_the_token_lives() -> None:
    engine = Engine()
    engine.error = InvalidRequest("no such token")
    await Canary("m", engine).probe(NOW)


async def test_a_hung_engine_keeps_probes_waiting_and_can_be_closed() -> None:
    engine = Engine()
    engine.works.clear()
    canary = Canary("m", engine)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(expiring(0.05)):
            await canary.probe(NOW)
    await canary.close()
