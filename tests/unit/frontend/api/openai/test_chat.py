"""POST /v1/chat/completions, on a real port."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from dynamo.common.errors import EngineError, Overloaded
from dynamo.common.generation import FinishReason, image_part, request_decoder
from dynamo.common.model_card import LlmInfo
from dynamo.common.names import InstanceId
from dynamo.frontend.api.openai.requests import ChatMessage
from dynamo.frontend.api.openai.to_text import messages_to_text
from dynamo.frontend.config import HttpOptions, OverloadStatus, TextLimits
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from tests.support.edge import over
from tests.support.fakes import FakeStream
from tests.support.http_edge import Speaker, chat_card, end, events_of, open_http_edge, send_delta, text_of, tokens_of
from tests.support.parsers import brackets

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


async def test_a_response_has_the_shape_that_openai_clients_read() -> None:
    speaker = Speaker(cached_tokens=3)
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(CHAT, HELLO, headers={"x-request-id": "mine"})
    body = response.json()
    assert response.headers["x-request-id"] == "mine"
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "chat.completion",
        "model": "talker",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello you", "refusal": None, "reasoning": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": len("<user>Hi\n<assistant>"),
            "completion_tokens": 9,
            "total_tokens": len("<user>Hi\n<assistant>") + 9,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "system_fingerprint": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
    assert speaker.prompt == "<user>Hi\n<assistant>"


async def test_a_stream_is_one_event_per_delta_then_the_reason_the_usage_and_done() -> None:
    async with open_http_edge(respond=Speaker(('"Hé', "\n", "lo"), FinishReason.LENGTH)) as edge:
        response = await edge.post(CHAT, HELLO | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    events = events_of(response.text)
    assert events[-1] == ("", "[DONE]")
    chunks = [json.loads(data) for _, data in events[:-1]]
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": '"Hé'},
        {"content": "\n"},
        {"content": "lo"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_the_bytes_of_a_chunk_are_these() -> None:
    async with open_http_edge(respond=Speaker(("Hi", " you"))) as edge:
        response = await edge.post(CHAT, HELLO | {"stream": True})
    block = response.text.split("\n\n")[1]
    head, _, rest = block.partition(',"created":')
    assert head.startswith('data: {"id":"chatcmpl-')
    assert head.endswith('","object":"chat.completion.chunk"')
    assert rest.partition(",")[2] == (
        '"model":"talker","system_fingerprint":null,"choices":[{"index":0,"delta":{"content":"Hi"},'
        '"logprobs":null,"finish_reason":null}]}'
    )


async def test_chunks_of_a_stream_name_their_choice() -> None:
    async with open_http_edge(respond=Speaker(("a", "b"))) as edge:
        response = await edge.post(CHAT, HELLO | {"stream": True, "n": 2})
    texts = {0: "", 1: ""}
    for _, data in events_of(response.text)[:-1]:
        for choice in json.loads(data)["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: "ab", 1: "ab"}


def begin(stream: FakeStream) -> None:
    send_delta(stream, "first")


async def test_the_first_token_is_sent_before_the_second_exists() -> None:
    async with (
        open_http_edge(respond=begin) as edge,
        edge.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as response,
    ):
        received = ""
        async for piece in response.aiter_text():
            received += piece
            if "first" in received:
                break
        assert not edge.client.streams[0].is_over


async def test_queued_deltas_share_one_write() -> None:
    async with (
        open_http_edge(respond=Speaker(tuple("abcdefgh"))) as edge,
        edge.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as response,
    ):
        pieces = [piece async for piece in response.aiter_raw()]
    assert len(pieces) < 8


async def test_a_client_that_disconnects_cancels_the_request_at_the_instance() -> None:
    async with open_http_edge(respond=begin) as edge:
        async with edge.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as response:
            async for _ in response.aiter_raw():
                break
        [stream] = edge.client.streams
        await over(stream)
        assert stream.cancelled


async def test_a_client_that_disconnects_before_the_first_token_cancels_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "dynamo.frontend.api.http.exchange")
    async with open_http_edge() as edge:
        request = asyncio.create_task(edge.post(CHAT, HELLO))
        stream = await edge.client.next_stream()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await over(stream)
        assert stream.cancelled
        async with asyncio.timeout(120):
            while not caplog.messages:
                await asyncio.sleep(0.001)
    assert "(499)" in caplog.text and CHAT in caplog.text


async def test_a_failure_before_the_first_token_has_its_own_status() -> None:
    def fail(stream: FakeStream) -> None:
        stream.fail(EngineError("out of memory"))

    async with open_http_edge(respond=fail) as edge:
        error = await edge.error(CHAT, HELLO | {"stream": True}, 500)
    assert error == {"message": "out of memory", "type": "internal_error", "param": None, "code": "internal_error"}


async def test_a_failure_in_a_stream_is_its_last_event() -> None:
    def fail(stream: FakeStream) -> None:
        send_delta(stream, "Hel")
        stream.fail(EngineError("out of memory"))

    async with open_http_edge(respond=fail) as edge:
        response = await edge.post(CHAT, HELLO | {"stream": True})
    assert response.status_code == 200
    events = events_of(response.text)
    assert events[-1][0] == "error"
    assert json.loads(events[-1][1])["error"]["message"] == "out of memory"
    assert ("", "[DONE]") not in events


@pytest.mark.parametrize("status", list(OverloadStatus))
async def test_overload_is_reported_with_retry_after(status: OverloadStatus) -> None:
    def refuse(stream: FakeStream) -> None:
        stream.fail(Overloaded("all instances are busy", retry_after_s=7))

    async with open_http_edge(respond=refuse, overload=status) as edge:
        response = await edge.post(CHAT, HELLO)
    assert response.status_code == int(status)
    assert response.headers["retry-after"] == "7"
    assert response.json()["error"]["code"] == "overloaded"


async def test_a_model_without_instances_is_unavailable() -> None:
    async with open_http_edge() as edge:
        edge.directory.remove(1)
        response = await edge.post(CHAT, HELLO)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["type"] == "service_unavailable"


async def test_an_unknown_model_is_not_found() -> None:
    async with open_http_edge() as edge:
        error = await edge.error(CHAT, HELLO | {"model": "missing"}, 404)
    assert error == {
        "message": "model 'missing' is not found",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_every_setting_reaches_the_engine() -> None:
    speaker = Speaker()
    settings = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.2,
        "repetition_penalty": 1.1,
        "seed": 42,
        "logit_bias": {"5": -100, "6": 1.5},
        "max_completion_tokens": 50,
        "min_tokens": 3,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "n": 2,
        "cache_salt": "pepper",
        "priority": 4,
        "allowed_token_ids": [1, 2],
        "bad_words_token_ids": [[3, 4]],
    }
    async with open_http_edge(respond=speaker) as edge:
        assert (await edge.post(CHAT, HELLO | settings)).status_code == 200
    sent = speaker.last
    assert (sent.sampling.temperature, sent.sampling.top_p, sent.sampling.top_k, sent.sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sent.sampling.frequency_penalty, sent.sampling.presence_penalty) == (0.2, -0.2)
    assert (sent.sampling.repetition_penalty, sent.sampling.seed) == (1.1, 42)
    assert sent.sampling.logit_bias == {5: -100, 6: 1.5}
    assert (sent.stop.max_tokens, sent.stop.min_tokens, sent.stop.token_ids, sent.stop.ignore_eos) == (50, 3, (9,), True)
    assert (sent.n, sent.cache_salt, sent.priority) == (2, "pepper", 4)
    assert (sent.sampling.allowed_token_ids, sent.sampling.bad_words_token_ids) == ((1, 2), ((3, 4),))


async def test_a_stop_string_ends_the_response_and_cancels_the_engine() -> None:
    def speak(stream: FakeStream) -> None:
        send_delta(stream, "one, two, thr")
        send_delta(stream, "ee")

    async with open_http_edge(respond=speak) as edge:
        response = await edge.post(CHAT, HELLO | {"stop": [" three"]})
        [stream] = edge.client.streams
        assert stream.cancelled
    choice = response.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one, two,", "stop")
    assert response.json()["usage"]["completion_tokens"] == len("one, two, three")


async def test_log_probabilities_name_tokens_and_alternatives() -> None:
    async with open_http_edge(respond=Speaker(("é", "b"), logprobs=lambda index: -0.25)) as edge:
        response = await edge.post(CHAT, HELLO | {"logprobs": True, "top_logprobs": 1})
        streamed = await edge.post(CHAT, HELLO | {"logprobs": True, "top_logprobs": 1, "stream": True})
    content = response.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3  # two tokens are half a character each
    assert (content[0]["token"], content[0]["bytes"], content[0]["logprob"]) == ("�", ["é".encode()[0]], -0.25)
    assert content[2] == {
        "token": "b",
        "logprob": -0.25,
        "bytes": [98],
        "top_logprobs": [{"token": "b", "logprob": -0.25, "bytes": [98]}],
    }
    chunks = [json.loads(data) for _, data in events_of(streamed.text)[:-1]]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for one in logprobs if one for token in one["content"]] == content


async def test_log_probabilities_of_a_long_prompt_are_those_of_a_short_one() -> None:
    async with open_http_edge(respond=Speaker(("x",))) as edge:
        short = (await edge.post(CHAT, HELLO | {"prompt_logprobs": 1})).json()["prompt_logprobs"]
        message = {"role": "user", "content": "ab" * 1000}
        long = (await edge.post(CHAT, HELLO | {"messages": [message], "prompt_logprobs": 1})).json()["prompt_logprobs"]
    b = str(tokens_of("b")[0])
    assert (short[0], long[0]) == (None, None)
    assert len(long) > 2000
    entries = [position[b] for position in long[1:] if b in position]
    assert entries[0] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert short[-1] == long[-1]


@pytest.mark.parametrize(
    ("wanted", "guided"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array"}}}},
            {"json_schema": {"type": "array"}},
        ),
        ({"guided_json": '{"type": "array"}'}, {"json_schema": {"type": "array"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
    ],
)
async def test_structured_output_is_requested_from_the_engine(wanted: dict[str, Any], guided: dict[str, Any] | None) -> None:
    speaker = Speaker()
    async with open_http_edge(respond=speaker) as edge:
        assert (await edge.post(CHAT, HELLO | wanted)).status_code == 200
    assert speaker.last.sampling.guided == guided


async def test_an_adapter_is_selected_by_its_name() -> None:
    speaker = Speaker()
    async with open_http_edge(chat_card(adapters=("poet",)), respond=speaker) as edge:
        response = await edge.post(CHAT, HELLO | {"model": "poet"})
        listed = (await edge.http.get("/v1/models")).json()["data"]
    assert response.json()["model"] == "poet"
    assert (speaker.last.model, speaker.last.adapter) == ("talker", "poet")
    assert [(model["id"], model.get("parent")) for model in listed] == [("talker", None), ("poet", "talker")]


async def test_conversations_reach_the_template_completely() -> None:
    speaker = Speaker()
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}]},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(CHAT, HELLO | {"messages": messages})
    assert response.status_code == 200, response.text
    assert speaker.prompt.startswith("<system>Be\nkind\n<user>Weather?\n<assistant>")
    assert '[weather {"city": "Rome"}]' in speaker.prompt
    assert "<tool>sunny\n<assistant>" in speaker.prompt


async def test_a_response_can_continue_the_last_message() -> None:
    speaker = Speaker()
    body = HELLO | {"messages": [*HELLO["messages"], {"role": "assistant", "content": "It is"}], "continue_final_message": True}
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(CHAT, body)
        error = await edge.error(CHAT, body | {"add_generation_prompt": True})
    assert response.status_code == 200, response.text
    assert speaker.prompt.endswith("<assistant>It is")
    assert error["param"] == "continue_final_message"


async def test_images_are_accepted_only_by_models_that_support_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"type": "text", "text": "What is it?"}, {**image, "prompt_cache_breakpoint": {"mode": "explicit"}}]
    body = HELLO | {"messages": [{"role": "user", "content": parts}]}
    speaker = Speaker()
    async with open_http_edge(chat_card(), chat_card("seer", modalities=("image",)), respond=speaker) as edge:
        error = await edge.error(CHAT, body)
        assert (await edge.post(CHAT, body | {"model": "seer"})).status_code == 200
    assert error["param"] == "messages[0].content[1]"
    assert "does not support content of type image" in error["message"]
    assert speaker.last.media == (image_part(bytes(3)),)


# Tools and reasoning


PARSERS = OutputParsers(
    tools={"brackets": ParserKind(brackets, needs_special_tokens=True)}, reasoning={"thoughts": ParserKind(brackets)}
)


async def test_calls_and_reasoning_are_separated_from_content() -> None:
    card = chat_card(tool_parser="brackets", reasoning_parser="thoughts")
    pieces = ("(hmm)", "Let me see.", '[weather {"city":"Rome"}]', '[weather {"city":"Oslo"}]')
    speaker = Speaker(pieces)
    async with open_http_edge(card, respond=speaker, parsers=PARSERS) as edge:
        response = await edge.post(CHAT, HELLO | {"tools": [WEATHER]})
        streamed = await edge.post(CHAT, HELLO | {"tools": [WEATHER], "stream": True})
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "Let me see.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city":"Rome"}'},
        {"name": "weather", "arguments": '{"city":"Oslo"}'},
    ]
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in message["tool_calls"])
    assert 'tools: [{"type": "function", "function": {"name": "weather"' in speaker.prompt
    deltas = [json.loads(data)["choices"][0] for _, data in events_of(streamed.text)[:-1]]
    calls: dict[int, str] = {}
    for delta in deltas:
        for call in delta["delta"].get("tool_calls", ()):
            calls[call["index"]] = calls.get(call["index"], call.get("id", "?")[:5] + " ") + call["function"]["arguments"]
    assert calls == {0: 'call_ {"city":"Rome"}', 1: 'call_ {"city":"Oslo"}'}
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert [delta["delta"]["reasoning_content"] for delta in deltas if "reasoning_content" in delta["delta"]] == ["hmm"]


async def test_reasoning_that_the_prompt_opened_continues_and_is_counted() -> None:
    card = chat_card(reasoning_parser="qwen3")
    prepared = HELLO | {"nvext": {"use_raw_prompt": True}, "stream_options": {"include_usage": True}}
    speaker = Speaker(("one", " two", "</think>", "three"))
    async with open_http_edge(card, respond=speaker, parsers=PARSER_REGISTRY) as edge:
        for prompt, reasoning, content in (("Hi <think>\n", "one two", "three"), ("Hi", None, "one twothree")):
            messages = [{"role": "user", "content": prompt}]
            response = (await edge.post(CHAT, prepared | {"messages": messages, "stream_options": None})).json()
            message = response["choices"][0]["message"]
            assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
            thought = len("one two</think>") if reasoning else 0
            assert response["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
            streamed = await edge.post(CHAT, prepared | {"messages": messages, "stream": True})
            chunks = [json.loads(data) for _, data in events_of(streamed.text)[:-1]]
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
            assert chunks[-1]["usage"] == response["usage"]


async def test_a_prompt_beyond_the_context_has_the_error_code_of_openai() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        for stream in (False, True):
            messages = [{"role": "user", "content": "x" * 4096}]
            error = await edge.error(CHAT, HELLO | {"messages": messages, "stream": stream})
            assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")


async def test_a_named_tool_is_required_of_the_engine() -> None:
    speaker = Speaker(('{"city":', '"Rome"}'))
    choice = {"type": "function", "function": {"name": "weather"}}
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(CHAT, HELLO | {"tools": [WEATHER], "tool_choice": choice})
    parameters = WEATHER["function"]["parameters"]  # type: ignore[index]
    assert speaker.last.sampling.guided == {"json_schema": parameters | {"additionalProperties": False}}
    [made] = response.json()["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}


async def test_any_tool_is_required_of_the_engine() -> None:
    speaker = Speaker(('[{"name":"weather",', '"parameters":{"city": "Rome"}}]'))
    async with open_http_edge(respond=speaker) as edge:
        body = HELLO | {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
        response = await edge.post(CHAT, body)
    guided = speaker.last.sampling.guided
    assert guided is not None
    assert (guided["json_schema"]["type"], guided["json_schema"]["maxItems"]) == ("array", 1)
    [made] = response.json()["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


async def test_only_allowed_tools_are_offered_and_required_of_the_engine() -> None:
    speaker = Speaker(('[{"name":"weather",', '"parameters":{"city": "Rome"}}]'))
    now = {"type": "function", "function": {"name": "now"}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    async with open_http_edge(respond=speaker) as edge:
        body = HELLO | {"tools": [WEATHER, now], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
        response = await edge.post(CHAT, body)
        unknown = await edge.error(CHAT, body | {"tools": [now]})
    guided = speaker.last.sampling.guided
    assert guided is not None
    [choice] = guided["json_schema"]["items"]["anyOf"]
    assert choice["properties"]["name"] == {"type": "string", "enum": ["weather"]}
    [made] = response.json()["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "weather"
    assert unknown["message"] == "'tool_choice' names 'weather', which is not in 'tools'"


async def test_tools_need_a_model_with_a_tool_parser() -> None:
    async with open_http_edge(chat_card(), chat_card("odd", tool_parser="unheard of"), respond=Speaker()) as edge:
        error = await edge.error(CHAT, HELLO | {"tools": [WEATHER]})
        unknown = await edge.error(CHAT, HELLO | {"model": "odd", "tools": [WEATHER]}, 501)
        ignored = await edge.post(CHAT, HELLO | {"tools": [WEATHER], "tool_choice": "none"})
    assert error["param"] == "tools"
    assert "unheard of" in unknown["message"]
    assert ignored.status_code == 200


# nvext


async def test_nvext_changes_how_a_request_runs_and_what_is_reported() -> None:
    speaker = Speaker(("Hi",))
    nvext = {
        "greed_sampling": True,
        "use_raw_prompt": True,
        "agent_hints": {"priority": 3},
        "annotations": ["formatted_prompt", "token_ids", "worker_id", "request_id", "llm_metrics"],
        "extra_fields": ["worker_id", "timing", "completion_token_ids"],
        "backend_instance_id": "1",
    }
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(CHAT, HELLO | {"nvext": nvext, "stream": True}, headers={"x-request-id": "mine"})
    assert speaker.prompt == "Hi"
    assert (speaker.last.sampling.temperature, speaker.last.priority) == (0.0, 3)
    assert 'event: formatted_prompt\n: "Hi"\n\n' in response.text
    assert f"event: token_ids\n: {json.dumps(list(speaker.last.tokens), separators=(',', ':'))}\n\n" in response.text
    assert 'event: worker_id\n: "1"\n\n' in response.text
    assert 'event: request_id\n: "mine"\n\n' in response.text
    assert "event: llm_metrics\n" in response.text
    last = json.loads(events_of(response.text)[-2][1])
    assert last["nvext"]["worker_id"] == {"prefill_worker_id": "1", "decode_worker_id": "1"}
    assert text_of(last["nvext"]["completion_token_ids"]) == "Hi"
    assert last["nvext"]["timing"]["total_ms"] >= 0


async def test_token_data_replaces_the_prompt() -> None:
    speaker = Speaker()
    async with open_http_edge(respond=speaker) as edge:
        assert (await edge.post(CHAT, HELLO | {"nvext": {"token_data": [1, 2, 3]}})).status_code == 200
    assert list(speaker.last.tokens) == [1, 2, 3]


async def test_an_instance_in_a_header_takes_precedence_over_one_in_the_body() -> None:
    async with open_http_edge(chat_card(), chat_card("talker"), respond=Speaker()) as edge:
        body = HELLO | {"nvext": {"backend_instance_id": "1"}}
        await edge.post(CHAT, body, headers={"x-dynamo-instance": "2"})
        assert edge.client.streams[-1].instance == InstanceId(2)
        assert request_decoder.decode(edge.client.streams[-1].body).model == "talker"
        await edge.post(CHAT, HELLO | {"nvext": {"backend_instance_id": "2", "decode_worker_id": "1"}})
        assert edge.client.streams[-1].instance == InstanceId(1)
        for named in ({"headers": {"x-prefill-instance-id": "1"}}, {"json": HELLO | {"nvext": {"prefill_worker_id": "1"}}}):
            response = await edge.http.post(CHAT, **{"json": HELLO, **named})
            assert response.status_code == 503
            assert "instance 1 computes no prompts" in response.text


async def test_comments_keep_a_silent_stream_alive() -> None:
    async with (
        open_http_edge(http=HttpOptions(keepalive_s=0.1)) as edge,
        edge.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as response,
    ):
        pieces = response.aiter_text()
        assert await anext(pieces) == ": keepalive\n\n"  # and with it the head went out
        stream = await edge.client.next_stream()
        send_delta(stream, "Hi", reason=FinishReason.STOP)
        end(stream)
        rest = "".join([piece async for piece in pieces])
    assert rest.endswith("data: [DONE]\n\n")


async def test_a_message_without_content_is_an_empty_one() -> None:
    speaker = Speaker()
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(CHAT, {"model": "talker", "messages": messages})
    assert response.status_code == 200
    assert speaker.prompt == "<user>\n<assistant>[f {}]\n<tool>\n<assistant>"


async def test_messages_are_taken_as_other_apis_and_servers_write_them() -> None:
    speaker = Speaker()
    thought = {"type": "thinking", "thinking": "hmm"}
    called = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    messages = [
        {"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [thought, {"type": "output_text", "text": "c"}], "tool_calls": called},
        {"role": "tool", "tool_call_id": "1", "content": "d"},
    ]
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(CHAT, {"model": "talker", "messages": messages})
        refused = await edge.post(CHAT, {"model": "talker", "messages": [{"role": "user", "content": [{"type": "input_text"}]}]})
    assert response.status_code == 200
    assert speaker.prompt == '<user>a\nb\n<assistant>c[f {"a": 1}]\n<tool>d\n<assistant>'
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[0].text")


def test_thoughts_among_the_parts_of_a_message_are_its_reasoning() -> None:
    message = msgspec.convert({"role": "assistant", "content": [{"type": "thinking", "thinking": "hmm"}, "yes"]}, ChatMessage)
    [plain], _ = messages_to_text([message], LlmInfo(context_length=9, tokenizer="t"), TextLimits())
    assert (plain["reasoning_content"], plain["content"]) == ("hmm", [{"type": "text", "text": "yes"}])
