"""The engine that drives SGLang from the worker's process; what all engines do is in `test_engine_contract`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dynamo.common.errors import EngineError, InvalidRequest, Unavailable
from dynamo.common.generation import GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.common.lifecycle import stop_on_signal
from dynamo.worker.config import EngineKind
from dynamo.worker.engine.base import Context
from dynamo.worker.process.engine_factory import make_engine
from tests.support.tiny_llama import make_tiny_llama
from tests.support.waiting import until

PACKAGES = Path(__file__).parents[3] / "support" / "packages"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(PACKAGES)
    return make_tiny_llama(tmp_path / "tiny")


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[Any]:
    engine: Any = make_engine(str(folder), EngineKind.SGLANG, engine_args="--page-size 32", max_num_seqs=4)
    await engine.start()
    yield engine
    await engine.close()


def request(tokens: int = 4, **settings: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "stop": Stop(max_tokens=tokens, ignore_eos=True), **settings}
    return GenerateRequest(model="tiny", prompt=pack_tokens([1, 2, 3]), **fields)


def sent(engine: Any) -> list[dict[str, Any]]:
    """The requests that SGLang got."""
    requests: list[dict[str, Any]] = engine.engine.requests
    return requests


async def test_the_card_is_made_of_what_sglang_says(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine: Any = make_engine(str(folder), EngineKind.SGLANG, engine_args="--page-size 32", max_num_seqs=4, context_length=256)
    assert "the sglang engine is experimental" in caplog.text
    card = await engine.start()
    await engine.close()
    llm = card.llm
    assert (card.name, card.backend, llm.context_length, llm.block_size, llm.total_blocks, llm.max_num_seqs) == (
        "tiny",
        "sglang",
        256,
        32,
        512,
        4,
    )
    assert (llm.bos_token, llm.eos_token, llm.eos_token_ids) == ("<s>", "</s>", (257,))
    assert len(engine.files()) == 2


async def test_each_choice_is_a_request_of_its_own_with_its_seed(engine: Any) -> None:
    choices = request(n=3, sampling=Sampling(temperature=1.0, seed=7), cache_salt="tenant")
    items = [item async for item in engine.generate(choices, Context("r"))]
    assert sorted({item.index for item in items if not isinstance(item, Summary)}) == [0, 1, 2]
    requests = sent(engine)
    assert [each["sampling_params"]["sampling_seed"] for each in requests] == [7, 8, 9]
    assert len({each["rid"] for each in requests}) == 3 and {each["cache_salt"] for each in requests} == {"tenant"}


async def test_a_request_that_is_left_is_aborted_with_all_its_choices(engine: Any) -> None:
    async with aclosing(engine.generate(request(400, n=2), Context("left"))) as items:
        await anext(items)
        assert engine.load().running == 2
    manager = engine.engine.tokenizer_manager
    assert sorted(manager.aborted) == sorted(each["rid"] for each in sent(engine))
    assert engine.load().running == 0


async def test_what_sglang_refuses_is_an_invalid_request(engine: Any) -> None:
    engine.engine.tokenizer_manager.model_config.context_len = 1
    with pytest.raises(InvalidRequest, match="longer than the model's context"):
        await anext(engine.generate(request(), Context("long")))


async def test_the_death_of_its_processes_ends_the_engine_and_not_the_worker(engine: Any) -> None:
    failing = asyncio.create_task(engine.failure())
    os.kill(os.getpid(), signal.SIGQUIT)
    assert isinstance(await failing, EngineError)
    with pytest.raises(Unavailable):
        await anext(engine.generate(request(), Context("late")))


async def test_signals_still_stop_the_worker(folder: Path) -> None:
    """SGLang takes them over when it starts."""
    stop = stop_on_signal()
    engine: Any = make_engine(str(folder), EngineKind.SGLANG)
    await engine.start()
    os.kill(os.getpid(), signal.SIGTERM)
    await until(stop.is_set)
    await engine.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--no-such-option", "--engine-args: unrecognized arguments: --no-such-option"),
        ("--page-size 'x", "--engine-args: No closing quotation"),
        ("--dp-size 2", "one data-parallel rank"),
    ],
)
async def test_wrong_arguments_are_refused_in_a_sentence(folder: Path, arguments: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make_engine(str(folder), EngineKind.SGLANG, engine_args=arguments)


async def test_a_model_that_is_not_there_fails_the_start(folder: Path) -> None:
    engine: Any = make_engine(str(folder / "nothing"), EngineKind.SGLANG)
    with pytest.raises(EngineError, match="SGLang failed to start"):
        await engine.start()


def test_without_the_package_the_engine_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dynamo.worker.engine.sglang", None)
    with pytest.raises(InvalidRequest, match="needs the sglang engine"):
        make_engine(str(tmp_path), EngineKind.SGLANG)
