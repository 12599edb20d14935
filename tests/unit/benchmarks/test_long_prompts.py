"""`benchmarks.long_prompts`: the texts, the requests made of them, and the record of turns."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.long_prompts.prompts import requests, texts
from benchmarks.long_prompts.turns import read_turns, record_turns
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer
from dynamo.worker.engine.echo import byte_tokenizer
from tests.support.waiting import until


@pytest.mark.parametrize("tokens", [100, 5_000, 700_000])
def test_a_text_has_about_as_many_tokens_as_it_should_and_no_two_are_alike(tokens: int) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    first, second = texts(tokenizer, tokens, 2)
    for text in (first, second):
        assert len(tokenizer.encode_now(text, special_tokens=False)) == pytest.approx(tokens, rel=0.1)
    assert first != second


def test_requests_go_round_the_prompts_and_share_no_prefix_with_one_another() -> None:
    prompts = ['one "quoted"\n', "two"]
    served = list(islice(requests(prompts, 8), 4))
    assert [position for position, _ in served] == [0, 1, 0, 1]
    sent = []
    for _, request in served:
        head, body = request.split(b"\r\n\r\n", 1)
        assert f"content-length: {len(body)}" in head.decode()
        sent.append(json.loads(body))
    assert [body["prompt"].split("\n\n", 1)[1] for body in sent] == [*prompts, *prompts]
    assert len({body["prompt"].split("\n\n", 1)[0] for body in sent}) == len(sent)
    assert {body["max_tokens"] for body in sent} == {8}


async def test_a_turn_of_the_loop_is_recorded_with_its_cpu_time_while_that_is_wanted(tmp_path: Path) -> None:
    record = tmp_path / "turns"
    recorder = asyncio.ensure_future(record_turns(record))
    await asyncio.sleep(0)
    work(0.2)  # it is not wanted yet
    os.kill(os.getpid(), signal.SIGUSR1)
    await until(lambda: not recorder.done() and recorded(record, 0.005))
    os.kill(os.getpid(), signal.SIGUSR1)
    recorder.cancel()
    await asyncio.wait([recorder])
    assert max(turn.ran_ms for turn in read_turns(record)) < 200
    assert all(turn.wall_ms >= 0 for turn in read_turns(record))


def recorded(record: Path, cpu_s: float) -> bool:
    """Work for a turn, and return whether a turn of so much work is on record."""
    work(cpu_s)
    return any(turn.ran_ms >= 1e3 * cpu_s for turn in read_turns(record))


def work(cpu_s: float) -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < cpu_s:
        pass
