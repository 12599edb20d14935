"""Requests that limit their reasoning, and what engines and callers get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Summary,
    delta_encoder,
    request_decoder,
    summary_encoder,
)
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.parsers import ReasoningTags
from dynamo.frontend.preprocess.reasoning.budget import ReasoningBudget
from dynamo.frontend.preprocess.text import ReasoningLimit
from tests.support.fakes import FakeStream
from tests.support.http_edge import chat_card, events_of, open_http_edge, text_of, tokens_of

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
THINK = ReasoningTags(("<think>",), ("</think>",))


class Thinker:
    """Reasons for a while, and responds at once when its reasoning has been ended."""

    def __init__(self, reasoning: str, tokens_at_once: int = 1) -> None:
        self._reasoning = reasoning
        self._tokens_at_once = tokens_at_once
        self.requests: list[GenerateRequest] = []

    def __call__(self, stream: FakeStream) -> None:
        request = request_decoder.decode(stream.body)
        self.requests.append(request)
        has_thought = text_of(request.tokens).endswith("</think>\n\n")
        text = "Hello." if has_thought else f"{self._reasoning}</think>\n\nHello."
        tokens = tokens_of(text)[: request.stop.max_tokens]
        for start in range(0, len(tokens), self._tokens_at_once):
            part = tuple(tokens[start : start + self._tokens_at_once])
            is_last = start + self._tokens_at_once >= len(tokens)
            logprobs = None if request.logprobs is None else [[(token, -0.5)] for token in part]
            stream.data(delta_encoder.encode(Delta(part, 0, FinishReason.STOP if is_last else None, logprobs)))
        stream.end(summary_encoder.encode(Summary(prompt_tokens=request.prompt_tokens, output_tokens=len(tokens))))


async def chat(thinker: Thinker, parser: str = "qwen3", **fields: Any) -> dict[str, Any]:
    card = chat_card(reasoning_parser=parser)
    async with open_http_edge(card, respond=thinker, parsers=PARSER_REGISTRY) as edge:
        response = await edge.post(CHAT, HELLO | fields)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body


@pytest.mark.parametrize("tokens_at_once", [1, 3, 100])
@pytest.mark.parametrize("field", [{"nvext": {"max_thinking_tokens": 12}}, {"thinking_token_budget": 12}])
async def test_reasoning_ends_when_its_budget_is_spent_and_the_response_follows(
    tokens_at_once: int, field: dict[str, Any]
) -> None:
    thinker = Thinker("<think>" + "x" * 50, tokens_at_once)
    body = await chat(thinker, **field)
    [choice] = body["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("x" * 5, "Hello.")
    assert choice["finish_reason"] == "stop"
    first, second = thinker.requests
    assert text_of(second.tokens) == text_of(first.tokens) + "<think>xxxxx</think>\n\n"
    end = len(tokens_of("</think>\n\n"))
    assert body["usage"]["completion_tokens"] == 12 + end + len(tokens_of("Hello."))
    assert body["usage"]["prompt_tokens"] == first.prompt_tokens


@pytest.mark.parametrize("tokens_at_once", [1, 4, 100])
@pytest.mark.parametrize("budget", [20, 1000])
async def test_reasoning_within_its_budget_is_left_alone(budget: int, tokens_at_once: int) -> None:
    thinker = Thinker("<think>xxx", tokens_at_once)
    message = (await chat(thinker, thinking_token_budget=budget))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("xxx", "Hello.")
    assert len(thinker.requests) == 1


async def test_a_response_without_reasoning_has_no_budget() -> None:
    thinker = Thinker("No reasoning here. ")
    message = (await chat(thinker, thinking_token_budget=2))["choices"][0]["message"]
    assert len(thinker.requests) == 1 and message["content"].startswith("No reasoning here.")


async def test_a_model_that_always_reasons_may_be_kept_from_it() -> None:
    thinker = Thinker("xxx")
    body = await chat(thinker, parser="deepseek_r1", nvext={"max_thinking_tokens": 0})
    assert body["choices"][0]["message"]["content"] == "Hello."
    assert "reasoning_content" not in body["choices"][0]["message"]
    [request] = thinker.requests
    assert text_of(request.tokens).endswith("</think>\n\n"), "the engine was not asked to reason at all"


async def test_the_end_of_the_reasoning_counts_against_max_tokens() -> None:
    thinker = Thinker("<think>" + "x" * 50)
    [choice] = (await chat(thinker, thinking_token_budget=12, max_tokens=14))["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert len(thinker.requests) == 1
    [choice] = (await chat(thinker, thinking_token_budget=12, max_tokens=25))["choices"]
    assert thinker.requests[-1].stop.max_tokens == 25 - 12 - len(tokens_of("</think>\n\n"))


async def test_tokens_that_were_not_generated_are_certain() -> None:
    fields = {"thinking_token_budget": 12, "logprobs": True}
    listed = (await chat(Thinker("<think>" + "x" * 50, 5), **fields))["choices"][0]["logprobs"]["content"]
    end = len(tokens_of("</think>\n\n"))
    assert [entry["logprob"] for entry in listed] == [-0.5] * 12 + [0.0] * end + [-0.5] * len(tokens_of("Hello."))


async def test_a_stream_has_the_same_text() -> None:
    card = chat_card(reasoning_parser="qwen3")
    async with open_http_edge(card, respond=Thinker("<think>" + "x" * 50, 5), parsers=PARSER_REGISTRY) as edge:
        response = await edge.post(CHAT, HELLO | {"thinking_token_budget": 12, "stream": True})
    chunks = [json.loads(data) for _, data in events_of(response.text) if data != "[DONE]"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "x" * 5
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello."


@pytest.mark.parametrize(
    ("parser", "fields", "words"),
    [
        ("", {}, "has no reasoning parser with tags"),
        ("openai_gptoss", {}, "has no reasoning parser with tags"),
        ("qwen3", {"n": 2}, "needs one choice, and 'n' is 2"),
        ("qwen3", {"guided_regex": "a"}, "cannot be combined with structured output"),
        ("qwen3", {"nvext": {"max_thinking_tokens": 4}}, "contradict each other"),
    ],
)
async def test_a_limit_that_cannot_be_kept_is_refused(parser: str, fields: dict[str, Any], words: str) -> None:
    async with open_http_edge(chat_card(reasoning_parser=parser), respond=Thinker(""), parsers=PARSER_REGISTRY) as edge:
        error = await edge.error(CHAT, HELLO | {"thinking_token_budget": 5} | fields)
    assert words in error["message"] and error["param"] == "thinking_token_budget"


def test_a_tag_that_arrives_in_pieces_is_found() -> None:
    budget = ReasoningBudget(ReasoningLimit(max_tokens=9, tags=THINK), "", lambda tokens: "".join(map(chr, tokens)))
    received = ""
    for piece in ("<th", "ink>", "a</th"):
        assert budget.admit(list(map(ord, received)), list(map(ord, piece))) == min(len(piece), 9 - len(received))
        received += piece[: 9 - len(received)]
    assert received == "<think>a<" and budget.is_spent(len(received))


def test_nothing_is_taken_of_reasoning_that_begins_without_a_budget() -> None:
    budget = ReasoningBudget(ReasoningLimit(max_tokens=0, tags=THINK), "", lambda tokens: "".join(map(chr, tokens)))
    assert budget.admit([], list(map(ord, "<think>aaaa"))) == 0
    assert budget.is_spent(0)


def test_all_of_a_piece_that_ends_the_reasoning_in_time_is_taken() -> None:
    budget = ReasoningBudget(ReasoningLimit(max_tokens=20, tags=THINK), "", lambda tokens: "".join(map(chr, tokens)))
    piece = list(map(ord, "<think>a</think>The response"))
    assert budget.admit([], piece) == len(piece)
    assert not budget.is_spent(len(piece))
