"""Deltas that come at once are parsed one by one: other requests have their turn between those that take long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo.frontend.preprocess.parsers import Content, OutputParser, OutputParsers, ParserKind, Part, Tools
from tests.support.http_edge import Speaker, chat_card, open_http_edge

LONG_S = 0.006
"""More than a step of long work takes."""
HELLO = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT = {"model": "talker", "messages": HELLO, "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSE = {"model": "talker", "input": "Hi", "store": False, "tools": [{"type": "function", **FUNCTION}]}
MESSAGES = {"model": "talker", "max_tokens": 9, "messages": HELLO, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}


class Turns:
    """Counts turns of the event loop, and makes parsers that note in which they worked."""

    def __init__(self) -> None:
        self.count = 0
        self.of_parsers: list[int] = []

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._count())
        try:
            yield
        finally:
            task.cancel()

    async def _count(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    def parser(self, tools: Tools) -> OutputParser:
        return SlowParser(self)


class SlowParser:
    """Takes as long as a step of long work for each piece of text."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def feed(self, text: str) -> Sequence[Part]:
        self._turns.of_parsers.append(self._turns.count)
        until = time.perf_counter() + LONG_S
        while time.perf_counter() < until:
            pass
        return [Content(text)]

    def finish(self) -> Sequence[Part]:
        return []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 8, "temperature": 1}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", RESPONSE),
        ("/v1/messages", MESSAGES),
    ],
    ids=["choices", "chat", "response", "messages"],
)
async def test_the_loop_runs_between_deltas_that_take_long_to_parse(path: str, body: dict[str, Any], *, stream: bool) -> None:
    turns = Turns()
    parsers = OutputParsers(tools={"slow": ParserKind(turns.parser)}, reasoning={})
    async with (
        open_http_edge(chat_card(tool_parser="slow"), respond=Speaker(("a", "b", "c")), parsers=parsers) as edge,
        turns.counted(),
    ):
        response = await edge.post(path, body | {"stream": stream})
    assert response.status_code == 200
    assert len(turns.of_parsers) == 3 * body.get("n", 1)
    assert len(set(turns.of_parsers)) == len(turns.of_parsers)
