"""Requests rendered as tokens, and tokens derendered as responses, on a real port."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.common.generation import FinishReason
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from tests.support.http_edge import Speaker, chat_card, open_http_edge, text_of, tokens_of

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
GENERATE = "/inference/v1/generate"
HELLO: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CARD = chat_card(tool_parser="hermes", reasoning_parser="qwen3")
SAID = '<think>Hm.</think>I look.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def generated(text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "token_ids": list(tokens_of(text)), "finish_reason": "stop"} | fields]}


async def test_a_request_rendered_generated_and_derendered_is_the_response_to_the_request() -> None:
    request = HELLO | {"tools": [WEATHER], "max_tokens": 99, "temperature": 0.5, "stop": "END", "seed": 3, "cache_salt": "s"}
    speaker = Speaker((SAID,))
    async with open_http_edge(CARD, respond=speaker, parsers=PARSER_REGISTRY) as edge:
        whole = (await edge.post(CHAT, request)).json()
        direct = speaker.last
        rendered = (await edge.post(f"{CHAT}/render", request)).json()
        response = (await edge.post(GENERATE, rendered)).json()
        via_tokens = speaker.last
        body = {"generate_response": response, "prompt_tokens": len(rendered["token_ids"]), "chat_request": request}
        derendered = (await edge.post(f"{CHAT}/derender", body)).json()
        with_prompt = (await edge.post(f"{CHAT}/derender", body | {"prompt_token_ids": rendered["token_ids"]})).json()
    assert via_tokens == direct
    assert rendered["sampling_params"] == {"max_tokens": 99, "temperature": 0.5, "stop": ["END"], "seed": 3}
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == "Hm." and message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    for body in (derendered, with_prompt):
        for answer in (whole, body):
            for call in answer["choices"][0]["message"]["tool_calls"]:
                call["id"] = "c"
        assert body["choices"] == whole["choices"]
        assert body["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


async def test_without_its_request_a_chat_is_only_text_without_special_tokens() -> None:
    async with open_http_edge(CARD, parsers=PARSER_REGISTRY) as edge:
        body = (await edge.post(f"{CHAT}/derender", {"model": "talker", "generate_response": generated(SAID)})).json()
    assert body["choices"][0]["message"]["content"] == SAID
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(tokens_of(SAID))


async def test_prompts_of_a_completion_are_rendered_each_and_derendered_together() -> None:
    request = {"model": "talker", "prompt": ["One", "Two"], "max_tokens": 5, "guided_regex": "a+"}
    async with open_http_edge() as edge:
        rendered = (await edge.post(f"{COMPLETION}/render", request)).json()
        responses = [generated("a"), generated("b", finish_reason="length")]
        body = {"generate_responses": responses, "prompt_tokens": [3, 3], "completion_request": request}
        derendered = (await edge.post(f"{COMPLETION}/derender", body)).json()
    assert [text_of(each["token_ids"]) for each in rendered] == ["One", "Two"]
    assert rendered[0]["sampling_params"] == {"max_tokens": 5, "structured_outputs": {"regex": "a+"}}
    assert rendered[0]["request_id"] != rendered[1]["request_id"]
    assert [choice["text"] for choice in derendered["choices"]] == ["a", "b"]
    assert [choice["index"] for choice in derendered["choices"]] == [0, 1]
    assert derendered["choices"][1]["finish_reason"] == FinishReason.LENGTH
    assert derendered["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("named", [{"token_id": 97}, {"token": "token_id:97"}])
async def test_log_probabilities_of_tokens_get_their_texts(named: dict[str, Any]) -> None:
    logprobs = {"content": [named | {"logprob": -1.0, "top_logprobs": [{"token_id": 98, "logprob": -2.0}]}]}
    response = {"choices": [{"index": 0, "token_ids": [97], "finish_reason": "stop", "logprobs": logprobs}]}
    async with open_http_edge() as edge:
        chat = (await edge.post(f"{CHAT}/derender", {"model": "talker", "generate_response": response})).json()
        plain = (await edge.post(f"{COMPLETION}/derender", {"model": "talker", "generate_responses": [response]})).json()
        [text] = [text_of([97])]
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == text
    assert plain["choices"][0]["logprobs"]["tokens"] == [text]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (f"{CHAT}/derender", {"generate_response": {"choices": [{"index": 0, "token_ids": [10**6]}]}}, "token_ids"),
        (f"{CHAT}/derender", {"generate_response": {"choices": []}}, "generate_response.choices"),
        (f"{CHAT}/derender", {"generate_response": generated("a"), "stream": True}, "stream"),
        (f"{COMPLETION}/derender", {"generate_responses": [generated("a")], "prompt_tokens": [1, 2]}, "prompt_tokens"),
        (f"{CHAT}/render", {"messages": []}, "messages"),
        (f"{COMPLETION}/render", {"prompt": "x", "suffix": "y"}, "suffix"),
    ],
)
async def test_what_cannot_be_rendered_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    async with open_http_edge() as edge:
        assert (await edge.error(path, {"model": "talker"} | body))["param"] == param


async def test_the_choices_of_all_responses_together_are_bounded() -> None:
    async with open_http_edge() as edge:
        body = {"model": "talker", "generate_responses": [generated("a")] * 129}
        assert (await edge.error(f"{COMPLETION}/derender", body))["message"] == "got 129 choices; at most 128 are allowed"
