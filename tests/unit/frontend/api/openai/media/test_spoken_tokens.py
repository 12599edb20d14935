"""How many tokens conversations have taken, by what their servers say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.common.errors import EngineError
from dynamo.frontend.api.openai.media.spoken_tokens import SpokenTokens

USAGE = {"input_tokens": 30, "output_tokens": 12}
DONE = json.dumps({"type": "response.done", "response": {"id": "r", "usage": USAGE}})


def delta(text: Any, kind: str = "response.output_text.delta", **ids: str) -> str:
    return json.dumps({"type": kind, "delta": text, **ids})


def counted(*messages: str) -> tuple[int, int]:
    """Return the tokens of input and output."""
    tokens = SpokenTokens()
    for message in messages:
        tokens.read(message)
    return tokens.input, tokens.output


@pytest.mark.parametrize(
    "more",
    ['"x":NaN', '"x":[Infinity,-Infinity]', '"x":' + "9" * 5000, '"response":"r"', '"delta":{"a":1}', '"item_id":null', '"x":1'],
)
def test_the_usage_of_an_event_counts_whatever_else_it_has(more: str) -> None:
    assert counted(f'{{"type":"x",{more},"usage":{json.dumps(USAGE)}}}') == (30, 12)


@pytest.mark.parametrize(
    "usage", ["[1]", '"some"', '{"input_tokens":"1"}', "null", '{"input_tokens":-1,"output_tokens":null}', "{}"]
)
def test_a_usage_of_another_form_is_only_for_the_client_to_know(usage: str) -> None:
    assert counted(f'{{"type":"x","usage":{usage}}}') == (0, 0)


def test_an_event_of_vllm_says_it_in_other_words() -> None:
    done = {"type": "transcription.done", "text": "Hello", "usage": {"prompt_tokens": 30, "completion_tokens": 12}}
    said = delta("Hel", "transcription.delta"), delta("lo", "transcription.delta")
    assert counted(*said) == (0, 2)
    assert counted(*said, json.dumps(done)) == (30, 12)


@pytest.mark.parametrize(
    "message",
    [
        '{"type":"response.done","response":{"usage":{"input_tokens":30},"x":' + "[" * 5000 + "]" * 5000 + "}}",
        '{"usage":{"input_tokens":30},"x":NaN,"text":"' + "a" * (256 << 10) + '"}',
        '{"usage":{"input_tokens":30}',
        '["usage"]',
    ],
)
def test_an_event_with_a_usage_that_cannot_be_read_is_an_error(message: str) -> None:
    with pytest.raises(EngineError, match="an event of the server cannot be read, so its tokens cannot be counted"):
        counted(message)


@pytest.mark.parametrize("message", ["", "no JSON", '{"type":"x.delta"', delta(1), delta("a" * 7), '["x.delta"]'])
def test_other_events_that_cannot_be_read_are_only_for_the_client_to_know(message: str) -> None:
    assert counted(message) in ((0, 0), (0, 1))


def test_what_comes_of_a_response_is_estimated_until_its_usage_comes() -> None:
    said = [delta("a" * 80, response_id="r"), delta("b", response_id="r"), delta("c" * 40, response_id="other")]
    assert counted(*said) == (0, 20 + 1 + 10)
    assert counted(*said, DONE) == (30, 10 + 12)
    assert counted(delta("A" * 64_000, "response.output_audio.delta", response_id="r")) == (0, 20), "50 ms each"
    assert counted(delta("a" * 80), DONE) == (30, 12), "of some response"


def test_a_server_that_begins_responses_without_end_has_no_estimates_kept_of_the_oldest() -> None:
    begun = [delta("a" * 80, response_id=name) for name in ("r", *map(str, range(1000)))]
    assert counted(*begun) == (0, 20 * 1001)
    assert counted(*begun, DONE) == (30, 20 * 1001 + 12)
