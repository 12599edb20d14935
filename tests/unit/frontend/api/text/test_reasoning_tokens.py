"""Counting the tokens of a model's reasoning."""

from __future__ import annotations

import pytest

from dynamo.frontend.api.text.reasoning_tokens import ReasoningTokenCounter
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        (["<think>", "\n", "a", " b", "\n", "</think>", "\n\n", "yes", " no"], 7),
        (["<think>", "a", "b"], 3),
        (["<think>", "a", "\n"], 3),
        (["yes", " no", "<"], 0),
        (["<think>", "abc</think>d", "e"], 2),
        ([], 0),
    ],
)
def test_tokens_of_reasoning_and_its_tags_are_counted(pieces: list[str], count: int) -> None:
    parser = PARSER_REGISTRY.reasoning["qwen3"].make(())
    counted = ReasoningTokenCounter()
    for number, piece in enumerate(pieces):
        parts = [*parser.feed(piece), *(parser.finish() if number == len(pieces) - 1 else ())]
        counted.add(parts, 1)
    assert counted.count == count
