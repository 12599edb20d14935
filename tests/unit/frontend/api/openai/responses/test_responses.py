"""POST /v1/responses, on a real port."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from dynamo.common.errors import EngineError
from dynamo.common.generation import FinishReason
from dynamo.frontend.api.openai.responses.requests import ResponsesRequest
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from tests.support.fakes import FakeStream
from tests.support.http_edge import Speaker, chat_card, events_of, open_http_edge, send_delta
from tests.support.parsers import brackets

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": "talker", "input": "Hi"}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
PARSERS = OutputParsers(tools={"brackets": ParserKind(brackets)}, reasoning={"thoughts": ParserKind(brackets)})
CARD = chat_card(tool_parser="brackets", reasoning_parser="thoughts")
PIECES = ("(hmm)", "Let me", " see.", '[weather {"city":"Rome"}]')


async def test_a_response_parses_with_openais_own_types() -> None:
    speaker = Speaker(cached_tokens=2)
    async with open_http_edge(respond=speaker) as edge:
        http_response = await edge.post(PATH, HELLO | {"instructions": "Be kind.", "metadata": {"a": "b"}, "store": False})
    body = http_response.json()
    response = Response.model_validate(body)
    assert response.output_text == "Hello you"
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert body["usage"]["output_tokens"] == 9
    assert (body["metadata"], body["instructions"]) == ({"a": "b"}, "Be kind.")
    assert speaker.prompt == "<system>Be kind.\n<user>Hi\n<assistant>"


async def test_events_are_numbered_and_in_order() -> None:
    async with open_http_edge(respond=Speaker(("Hel", "lo"))) as edge:
        http_response = await edge.post(PATH, HELLO | {"stream": True})
    events = [(kind, json.loads(data)) for kind, data in events_of(http_response.text)]
    assert [kind for kind, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    assert all(event["type"] == kind for kind, event in events)
    ids = {event["item_id"] for _, event in events if "item_id" in event}
    assert len(ids) == 1
    assert [event["delta"] for kind, event in events if kind.endswith("text.delta")] == ["Hel", "lo"]
    assert events[-1][1]["response"]["output"] == [events[-2][1]["item"]]


async def test_reasoning_text_and_calls_are_separate_items() -> None:
    async with open_http_edge(CARD, respond=Speaker(PIECES), parsers=PARSERS) as edge:
        http_response = (await edge.post(PATH, HELLO | {"tools": [WEATHER]})).json()
        async with AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none") as client:
            stream = await client.responses.create(model="talker", input="Hi", tools=[WEATHER], stream=True)  # type: ignore[call-overload]
            events = [event async for event in stream]
    assert [item["type"] for item in http_response["output"]] == ["reasoning", "message", "function_call"]
    assert http_response["output"][0]["content"] == [{"type": "reasoning_text", "text": "hmm"}]
    assert http_response["output"][1]["content"][0]["text"] == "Let me see."
    call = http_response["output"][2]
    assert (call["name"], call["arguments"], call["status"]) == ("weather", '{"city":"Rome"}', "completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = events[-1]
    assert done.type == "response.completed"
    assert [item.type for item in done.response.output] == ["reasoning", "message", "function_call"]
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == '{"city":"Rome"}'
    places = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert places == [0, 1, 2]


async def test_a_response_that_is_cut_off_is_incomplete() -> None:
    async with open_http_edge(respond=Speaker(reason=FinishReason.LENGTH)) as edge:
        body = (await edge.post(PATH, HELLO | {"max_output_tokens": 9})).json()
        streamed = await edge.post(PATH, HELLO | {"stream": True})
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events_of(streamed.text)[-1][0] == "response.incomplete"


async def test_a_stream_that_fails_ends_with_the_output_so_far() -> None:
    def fail(stream: FakeStream) -> None:
        send_delta(stream, "Hel")
        stream.fail(EngineError("out of memory"))

    async with open_http_edge(respond=fail) as edge:
        http_response = await edge.post(PATH, HELLO | {"stream": True})
    kind, data = events_of(http_response.text)[-1]
    response = json.loads(data)["response"]
    assert kind == "response.failed"
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": "out of memory"})
    assert response["output"][0]["status"] == "incomplete"


async def test_a_conversation_with_calls_becomes_messages() -> None:
    speaker = Speaker()
    conversation = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": '{"city": "Rome"}',
            "id": "fc_1",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    async with open_http_edge(respond=speaker) as edge:
        http_response = await edge.post(PATH, HELLO | {"input": conversation, "include": ["reasoning.encrypted_content"]})
    assert http_response.status_code == 200, http_response.text
    assert speaker.prompt.startswith("<system>Be kind.\n<user>Weather?\n<assistant>")
    assert '[weather {"city": "Rome"}]\n<tool>sunny\n<assistant>' in speaker.prompt


def test_one_turn_of_the_assistant_is_one_message() -> None:
    called = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "Go."},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "I look."},
        called | {"call_id": "1"},
        called | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": "y"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]},
        called | {"call_id": "3"},
        {"type": "function_call_output", "call_id": "3", "output": "z"},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]
    messages = msgspec.convert({"input": items}, ResponsesRequest).to_chat().messages
    assert [
        (message.role, message.reasoning_content, message.content, [call.id for call in message.tool_calls or ()])
        for message in messages
    ] == [
        ("user", None, "Go.", []),
        ("assistant", "Hm.", "I look.", ["1", "2"]),
        ("tool", None, "x", []),
        ("tool", None, "y", []),
        ("assistant", "So.", None, ["3"]),
        ("tool", None, "z", []),
        ("assistant", None, "Done.", []),
        ("assistant", None, "Really.", []),
    ]


async def test_a_format_is_requested_from_the_engine() -> None:
    speaker = Speaker()
    text = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "array"}}}
    async with open_http_edge(respond=speaker) as edge:
        body = (await edge.post(PATH, HELLO | {"text": text})).json()
    assert speaker.last.sampling.guided == {"json_schema": {"type": "array"}}
    assert body["text"] == text


def test_allowed_tools_are_those_of_the_chat_request() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    chat = msgspec.convert(HELLO | {"tool_choice": allowed}, ResponsesRequest).to_chat()
    assert msgspec.to_builtins(chat.tool_choice) == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]},
    }


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_fields_that_are_wrong_or_not_supported_are_named(wrong: dict[str, Any], param: str) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        error = await edge.error(PATH, HELLO | wrong)
    assert error["param"] == param


async def test_the_tokens_of_an_input_are_counted_without_a_response() -> None:
    speaker = Speaker()
    async with open_http_edge(respond=speaker) as edge:
        body = HELLO | {"instructions": "Be kind."}
        counted = (await edge.post(f"{PATH}/input_tokens", body)).json()
        response = (await edge.post(PATH, body)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"]}


async def test_settings_of_vllm_reach_the_engine() -> None:
    speaker = Speaker()
    async with open_http_edge(respond=speaker) as edge:
        await edge.post(PATH, {"model": "talker", "input": "hi", "min_p": 0.1, "top_k": 5, "stop_token_ids": [9]})
    assert (speaker.last.sampling.min_p, speaker.last.sampling.top_k) == (0.1, 5)
    assert 9 in speaker.last.stop.token_ids
