"""POST /inference/v1/generate, on a real port."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from dynamo.common.generation import Delta, FinishReason, Summary, delta_encoder, request_decoder, summary_encoder
from dynamo.common.model_card import LlmInfo
from dynamo.frontend.config import TextOptions
from dynamo.frontend.names.rules import Rule, Target
from tests.support.fakes import FakeStream
from tests.support.http_edge import Speaker, chat_card, events_of, open_http_edge, tokens_of

PATH = "/inference/v1/generate"
PROMPT = list(tokens_of("Hi"))
HELLO: dict[str, Any] = {"model": "talker", "token_ids": PROMPT, "sampling_params": {}}


async def test_tokens_come_back_for_tokens() -> None:
    speaker = Speaker(cached_tokens=1)
    sampling = {"max_tokens": 9, "temperature": 0.5, "top_k": 3, "seed": 4, "stop_token_ids": [7], "ignore_eos": True, "n": 1}
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(PATH, HELLO | {"sampling_params": sampling, "cache_salt": "s", "request_id": "mine"})
        for priority in (-3, 3):
            await edge.post(PATH, HELLO | {"priority": priority})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body.pop("created") > 0
    assert body.pop("usage")["completion_tokens"] == 9
    assert body == {
        "request_id": "mine",
        "model": "talker",
        "output_mode": "tokens",
        "choices": [
            {
                "index": 0,
                "token_ids": list(tokens_of("Hello you")),
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": None,
    }
    sent = speaker.requests[0]
    assert list(sent.tokens) == PROMPT
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.seed) == (0.5, 3, 4)
    assert (sent.stop.max_tokens, sent.stop.ignore_eos, 7 in sent.stop.token_ids) == (9, True, True)
    assert sent.cache_salt == "s"
    assert speaker.requests[1].priority == -3


async def test_without_max_tokens_the_response_may_fill_the_context() -> None:
    speaker = Speaker()
    async with open_http_edge(respond=speaker) as edge:
        await edge.post(PATH, HELLO | {"sampling_params": {"max_tokens": None}})
    assert speaker.last.stop.max_tokens == 4096 - len(PROMPT)


async def test_a_stream_has_the_tokens_of_each_step_the_usage_and_done() -> None:
    async with open_http_edge(respond=Speaker(reason=FinishReason.LENGTH)) as edge:
        options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, "request_id": "r"}
        response = await edge.post(PATH, HELLO | options)
    events = events_of(response.text)
    assert events[-1] == ("", "[DONE]")
    chunks = [json.loads(data) for _, data in events[:-1]]
    assert {chunk["request_id"] for chunk in chunks} == {"r"}
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [token for choice in choices for token in choice["token_ids"]] == list(tokens_of("Hello you"))
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [PROMPT, None, None, None]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_those_of_token_ids(stream: bool) -> None:
    async with open_http_edge(respond=Speaker(("Hé",), logprobs=lambda position: -float(position))) as edge:
        response = await edge.post(PATH, HELLO | {"sampling_params": {"logprobs": 1}, "stream": stream})
    body = json.loads(events_of(response.text)[0][1]) if stream else response.json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == body["choices"][0]["token_ids"] == list(tokens_of("Hé"))
    assert [entry["logprob"] for entry in content] == [0, -1, -2]
    assert content[0]["token"] == f"token_id:{content[0]['token_id']}"
    assert [top["token_id"] for top in content[0]["top_logprobs"]] == [content[0]["token_id"]]


async def test_text_comes_beside_the_tokens_if_it_is_requested() -> None:
    async with open_http_edge(respond=Speaker(logprobs=lambda position: -1.0)) as edge:
        body = (await edge.post(PATH, HELLO | {"output_mode": "text", "sampling_params": {"logprobs": 0}})).json()
        streamed = await edge.post(PATH, HELLO | {"output_mode": "text", "stream": True})
    [choice] = body["choices"]
    assert (body["output_mode"], choice["text"], choice["token_ids"]) == ("text", "Hello you", list(tokens_of("Hello you")))
    assert (choice["logprobs"]["content"][0]["token"], choice["logprobs"]["content"][0]["bytes"]) == ("H", [72])
    chunks = [json.loads(data) for _, data in events_of(streamed.text)[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello you"


async def test_the_log_probabilities_of_the_prompt_and_several_choices() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        body = (await edge.post(PATH, HELLO | {"sampling_params": {"n": 2, "prompt_logprobs": 0}})).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    first, second = body["prompt_logprobs"]
    assert first is None and second[str(PROMPT[1])]["decoded_token"] == f"token_id:{PROMPT[1]}"


async def test_the_stop_token_is_among_the_tokens() -> None:
    def stop(stream: FakeStream) -> None:
        prompt = request_decoder.decode(stream.body).prompt_tokens
        stream.data(delta_encoder.encode(Delta(tokens_of("a"), 0, FinishReason.STOP, stop_token=7)))
        stream.end(summary_encoder.encode(Summary(prompt_tokens=prompt, output_tokens=1)))

    async with open_http_edge(respond=stop) as edge:
        body = (await edge.post(PATH, HELLO | {"sampling_params": {"stop_token_ids": [7]}})).json()
    assert body["choices"][0]["token_ids"] == [*tokens_of("a"), 7]
    assert body["choices"][0]["stop_reason"] == 7


async def test_transfers_of_kv_caches_are_passed_on_where_the_operator_allows_it() -> None:
    wanted, offered = {"do_remote_decode": True}, {"remote_engine_id": "e", "remote_block_ids": [1]}
    sent = []

    def respond(stream: FakeStream) -> None:
        request = request_decoder.decode(stream.body)
        sent.append(request.kv_transfer)
        stream.data(delta_encoder.encode(Delta(tokens_of("a"), 0, FinishReason.LENGTH)))
        summary = Summary(prompt_tokens=request.prompt_tokens, output_tokens=1, kv_transfer=offered)
        stream.end(summary_encoder.encode(summary))

    async with open_http_edge(respond=respond, text=TextOptions(trust_kv_transfer_params=True)) as edge:
        body = (await edge.post(PATH, HELLO | {"kv_transfer_params": wanted})).json()
        other = (await edge.post(PATH, HELLO)).json()
    assert sent == [wanted, None]
    assert (body["kv_transfer_params"], other["kv_transfer_params"]) == (offered, None)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"token_ids": [65] * 5000}, "token_ids"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"n": 129}}, "sampling_params.n"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_what_is_wrong_is_named(wrong: dict[str, Any], param: str) -> None:
    async with open_http_edge() as edge:
        error = await edge.error(PATH, HELLO | wrong)
    assert error["param"] == param, error


async def test_a_model_that_takes_text_takes_no_tokens_and_names_stand_for_models() -> None:
    card = chat_card()
    assert card.llm is not None
    texts = msgspec.structs.replace(card, name="texts", llm=LlmInfo(context_length=64, tokenizer="text"))
    rules = {"chat": Rule(targets=(Target(model="talker"),))}
    async with open_http_edge(card, texts, respond=Speaker(), rules=rules) as edge:
        assert (await edge.error(PATH, HELLO | {"model": "texts"}))["param"] == "model"
        assert (await edge.post(PATH, HELLO | {"model": "chat"})).json()["model"] == "talker"
