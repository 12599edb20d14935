"""A parser of model output that tests can write by hand."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.frontend.preprocess.parsers import Content, Part, Reasoning, ToolCall, Tools


class Brackets:
    """(thoughts) are reasoning, [name arguments] are calls. Each piece of text comes whole."""

    def __init__(self) -> None:
        self._calls = 0
        self._finished = False

    def feed(self, text: str) -> Sequence[Part]:
        assert not self._finished
        if text.startswith("("):
            return [Reasoning(text[1:-1])]
        if text.startswith("["):
            name, _, arguments = text[1:-1].partition(" ")
            self._calls += 1
            half = len(arguments) // 2
            return [ToolCall(self._calls - 1, name, arguments[:half]), ToolCall(self._calls - 1, arguments=arguments[half:])]
        return [Content(text)]

    def finish(self) -> Sequence[Part]:
        self._finished = True
        return []


def brackets(tools: Tools) -> Brackets:
    return Brackets()
