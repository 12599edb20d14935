"""Grammars are compiled in a process that may be killed, so that none of them takes the worker's time or memory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo.common.errors import EngineError, InvalidRequest, Overloaded
from dynamo.worker.engine.llama.grammars import compiler as compiler_module
from dynamo.worker.engine.llama.grammars.compiler import MAX_WAITING, GrammarCompiler

pytest.importorskip("llguidance")

WORD = {"regex": "[a-z]+"}
ENDLESS = {"json_schema": {"type": "integer", "multipleOf": 1_000_003, "minimum": 0}}
"""Takes 5 s of CPU time; frontends and workers refuse it by its text."""


@pytest.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler()
    yield compiler
    await compiler.close()


def children() -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(OSError):  # the thread, such as one that waited for a child, has ended
            found += map(int, (task / "children").read_text().split())
    return found


async def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_compiled(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="json_schema takes more than 1 s of CPU time, or more than 256 MiB, to compile"):
        await compiler.compile(ENDLESS)
    assert "[a-z]+" in await compiler.compile(WORD)


async def test_grammars_that_follow_one_another_have_their_time_each(compiler: GrammarCompiler) -> None:
    for _ in range(4):  # half a second of CPU time each
        await compiler.compile({"json_schema": {"type": "integer", "multipleOf": 100_003}})


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= s\ns ::= s s | "a"',
        pytest.param('root ::= s\ns ::= s s s | "a" | ""', marks=pytest.mark.slow),
        pytest.param('root ::= [b-y]* | s\ns ::= s s | "z"', marks=pytest.mark.slow),
        pytest.param('root ::= "x"{500} s\ns ::= s s | "z"', marks=pytest.mark.slow),
        pytest.param('%llguidance {}\nstart: s\ns[capture]: s s | "a"\n', marks=pytest.mark.slow),
    ],
)
async def test_a_grammar_whose_masks_would_hold_up_all_slots_is_refused(compiler: GrammarCompiler, grammar: str) -> None:
    """Each compiles in a millisecond, and takes llama.cpp a second for each token after some hundred."""
    with pytest.raises(InvalidRequest, match="grammar takes more than 1 s of CPU time"):
        await compiler.compile({"grammar": grammar})


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [0-9]+ | "-" e',
        'root ::= (expr "=" ws term "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= [a-z]+ ws | "(" ws expr ")" ws\nws ::= [ ]*',
        'root ::= value\nvalue ::= "[" (value ("," value)*)? "]" | "\\"" [^"]* "\\"" | [0-9]+',
        "root ::= "
        + " ".join(f"r{number}" for number in range(60))
        + "\n"
        + "\n".join(f'r{n} ::= "a{n}" r{n} | "b"' for n in range(60)),
        '%llguidance {}\nstart: "start" (WORD ",")* WORD\nWORD: /[a-z]+/\n',
    ],
)
async def test_grammars_as_people_write_them_are_taken(compiler: GrammarCompiler, grammar: str) -> None:
    assert await compiler.compile({"grammar": grammar})


async def test_what_is_no_grammar_is_refused_in_the_words_of_the_process(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequest, match="regex cannot be used") as refused:
        await compiler.compile({"regex": "a("})
    assert refused.value.param == "regex"


async def test_a_process_that_was_killed_is_started_again(compiler: GrammarCompiler) -> None:
    before = children()
    await compiler.compile(WORD)
    [process] = set(children()) - set(before)
    os.kill(process, signal.SIGKILL)
    assert await compiler.compile(WORD)


async def test_a_caller_that_leaves_takes_its_response_along(compiler: GrammarCompiler) -> None:
    await compiler.compile(WORD)
    leaving = asyncio.ensure_future(compiler.compile({"choice": ["other"]}))
    await asyncio.sleep(0)  # it has written its line
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert "[a-z]+" in await compiler.compile(WORD)


async def test_only_so_many_wait(compiler: GrammarCompiler) -> None:
    waiting = [asyncio.ensure_future(compiler.compile(WORD)) for _ in range(MAX_WAITING + 1)]  # one of them is compiled
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="64 grammars are waiting"):
        await compiler.compile(WORD)
    assert all("[a-z]+" in grammar for grammar in await asyncio.gather(*waiting))


async def test_what_was_compiled_or_refused_is_remembered(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = await compiler.compile(WORD)
    with pytest.raises(InvalidRequest, match="more than 1 s of CPU time") as endless:
        await compiler.compile(ENDLESS)
    with pytest.raises(InvalidRequest, match="regex cannot be used") as broken:
        await compiler.compile({"regex": "a("})
    await compiler.close()
    monkeypatch.setattr(compiler_module, "COMMAND", ("sh", "-c", "exit 7"))
    assert await compiler.compile(WORD) == grammar
    for guided, refused in ((ENDLESS, endless), ({"regex": "a("}, broken)):
        with pytest.raises(InvalidRequest) as again:
            await compiler.compile(guided)
        assert (str(again.value), again.value.param) == (str(refused.value), refused.value.param)
    with pytest.raises(EngineError, match="ended with status 7"):
        await compiler.compile({"regex": "[a-y]+"})


async def test_a_key_with_slow_grammars_delays_those_of_another_key_by_one(
    compiler: GrammarCompiler,
) -> None:
    ended: list[str] = []

    async def compile(regex: str, key: str) -> None:
        assert await compiler.compile({"regex": regex}, key)
        ended.append(regex)

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(compile(f"slow{number}", "a"))
        tasks.create_task(compile("quick", "b"))
    assert ended[:2] == ["slow0", "quick"]


async def test_no_process_is_left_behind(compiler: GrammarCompiler) -> None:
    before = children()
    await compiler.compile(WORD)
    await compiler.close()
    assert children() == before


async def test_a_process_that_ends_again_and_again_is_the_servers_fault(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "COMMAND", ("false",))
    with pytest.raises(InvalidRequest, match="256 MiB"):  # status 1, as of a Python without memory
        await compiler.compile(WORD)
    monkeypatch.setattr(compiler_module, "COMMAND", ("sh", "-c", "exit 7"))
    with pytest.raises(EngineError, match="ended with status 7"):
        await compiler.compile(WORD)
