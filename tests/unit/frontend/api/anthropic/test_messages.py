"""POST /v1/messages, on a real port."""

from __future__ import annotations

import json
import typing
from typing import Any

import msgspec
import pytest
from anthropic import AsyncAnthropic, NotFoundError
from anthropic.types import Message as AnthropicMessage
from anthropic.types import message_count_tokens_params, message_create_params

from dynamo.common.errors import EngineError
from dynamo.common.generation import FinishReason
from dynamo.frontend.api.anthropic.requests import CountRequest, MessagesRequest
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from tests.support.fakes import FakeStream
from tests.support.http_edge import HttpEdge, Speaker, chat_card, end, events_of, open_http_edge, send_delta
from tests.support.parsers import brackets

PATH = "/v1/messages"
HELLO: dict[str, Any] = {"model": "talker", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
PARSERS = OutputParsers(tools={"brackets": ParserKind(brackets)}, reasoning={"thoughts": ParserKind(brackets)})
CARD = chat_card(tool_parser="brackets", reasoning_parser="thoughts")
PIECES = ("(hmm)", "Let me", " see.", '[weather {"city":"Rome"}]')


def anthropic(edge: HttpEdge) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=edge.url, api_key="none", max_retries=0)


async def test_the_id_of_a_request_is_in_the_header_that_anthropics_client_reads() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        settings: dict[str, Any] = {"max_tokens": 5, "messages": HELLO["messages"]}
        response = await anthropic(edge).messages.with_raw_response.create(model="talker", **settings)
        with pytest.raises(NotFoundError) as failure:
            await anthropic(edge).messages.create(model="missing", **settings)
    assert response.request_id
    assert failure.value.request_id


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MessagesRequest, message_create_params.MessageCreateParamsBase),
        (CountRequest, message_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_field_of_anthropic_is_declared(ours: type[msgspec.Struct], theirs: type) -> None:
    declared = {field.encode_name for field in msgspec.structs.fields(ours)}
    headers = {"betas", "user_profile_id", "workspace_id"}
    assert set(typing.get_type_hints(theirs)) - declared - headers == set()


async def test_a_response_has_the_shape_that_anthropic_clients_read() -> None:
    speaker = Speaker(cached_tokens=4)
    async with open_http_edge(respond=speaker) as edge:
        body = (await edge.post(PATH, HELLO | {"system": "Be kind.", "top_k": 5, "stop_sequences": ["x"]})).json()
    AnthropicMessage.model_validate(body)
    assert body.pop("id").startswith("msg_")
    prompt = "<system>Be kind.\n<user>Hi\n<assistant>"
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "talker",
        "content": [{"type": "text", "text": "Hello you"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(prompt) - 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 9,
        },
    }
    assert speaker.prompt == prompt
    assert (speaker.last.stop.max_tokens, speaker.last.sampling.top_k) == (50, 5)


async def test_a_stream_has_its_events_in_order() -> None:
    async with open_http_edge(respond=Speaker(("Hel", "lo"))) as edge:
        response = await edge.post(PATH, HELLO | {"stream": True})
    events = [(kind, json.loads(data)) for kind, data in events_of(response.text)]
    assert [kind for kind, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(event["type"] == kind for kind, event in events)
    assert events[0][1]["message"]["usage"]["input_tokens"] == len("<user>Hi\n<assistant>")
    assert events[3][1] == {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}}
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 5


async def test_reasoning_text_and_calls_are_separate_blocks() -> None:
    async with open_http_edge(CARD, respond=Speaker(PIECES), parsers=PARSERS) as edge, anthropic(edge) as client:
        prepared: Any = {**HELLO, "tools": [WEATHER]}
        response = await client.messages.create(**prepared)
        async with client.messages.stream(**prepared) as stream:
            streamed = await stream.get_final_message()
    for message in (response, streamed):
        thoughts, text, call = message.content
        assert (thoughts.type, text.type, call.type) == ("thinking", "text", "tool_use")
        assert thoughts.thinking == "hmm"  # type: ignore[union-attr]
        assert text.text == "Let me see."  # type: ignore[union-attr]
        assert (call.name, call.input) == ("weather", {"city": "Rome"})  # type: ignore[union-attr]
        assert message.stop_reason == "tool_use"


async def test_a_conversation_with_calls_becomes_messages() -> None:
    speaker = Speaker()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hmm", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]}],
        },
    ]
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(PATH, HELLO | {"messages": messages})
        count = await edge.post(f"{PATH}/count_tokens", {"model": "talker", "messages": messages})
    assert response.status_code == 200, response.text
    expected = '<user>Weather?\n<assistant>Let me see.[weather {"city": "Rome"}]\n<tool>sunny\n<assistant>'
    assert speaker.prompt == expected
    assert count.json() == {"input_tokens": len(expected)}


async def test_a_response_continues_a_last_message_of_the_assistant() -> None:
    speaker = Speaker(("42",))
    messages = [*HELLO["messages"], {"role": "assistant", "content": "It is "}]
    async with open_http_edge(respond=speaker) as edge:
        response = (await edge.post(PATH, HELLO | {"messages": messages})).json()
        called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]}
        prompt = speaker.prompt
        await edge.post(PATH, HELLO | {"messages": [*HELLO["messages"], called]})
    assert prompt.endswith("\n<assistant>It is")
    assert response["content"] == [{"type": "text", "text": "42"}]
    assert speaker.prompt.endswith("\n<assistant>[weather {}]\n<assistant>")


@pytest.mark.parametrize("place", ["output_format", "output_config"])
async def test_the_format_of_the_output_has_two_places(place: str) -> None:
    speaker, form = Speaker(("{}",)), {"type": "json_schema", "schema": {"type": "object"}}
    async with open_http_edge(respond=speaker) as edge:
        await edge.post(PATH, HELLO | {place: form if place == "output_format" else {"format": form}})
    assert speaker.last.sampling.guided == {"json_schema": {"type": "object"}}


async def test_a_required_tool_is_required_of_the_engine() -> None:
    speaker = Speaker(('{"city":', '"Rome"}'))
    async with open_http_edge(respond=speaker) as edge:
        body = HELLO | {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}
        response = (await edge.post(PATH, body)).json()
    assert speaker.last.sampling.guided == {"json_schema": {"type": "object"}}
    assert response["content"][0]["input"] == {"city": "Rome"}


@pytest.mark.parametrize(
    ("pieces", "reason", "stop", "stop_reason"),
    [
        (("a", "b"), FinishReason.LENGTH, None, "max_tokens"),
        (("a", "END"), FinishReason.STOP, "END", "stop_sequence"),
    ],
)
async def test_the_stop_reason_is_reported(pieces: Any, reason: FinishReason, stop: str | None, stop_reason: str) -> None:
    async with open_http_edge(respond=Speaker(pieces, reason)) as edge:
        body = (await edge.post(PATH, HELLO | {"stop_sequences": ["END"]})).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (stop_reason, stop)


async def test_an_empty_response_has_no_text() -> None:
    def silent(stream: FakeStream) -> None:
        send_delta(stream, "", reason=FinishReason.STOP)
        end(stream)

    async with open_http_edge(respond=silent) as edge:
        body = (await edge.post(PATH, HELLO)).json()
        streamed = await edge.post(PATH, HELLO | {"stream": True})
    assert (body["content"], body["stop_reason"]) == ([], "end_turn")
    assert events_of(streamed.text)[-1][0] == "message_stop"


async def test_errors_have_the_form_of_anthropic() -> None:
    def fail(stream: FakeStream) -> None:
        send_delta(stream, "Hel")
        stream.fail(EngineError("out of memory"))

    async with open_http_edge(respond=fail) as edge:
        wrong = await edge.post(PATH, {"model": "talker", "messages": HELLO["messages"]})
        broken = await edge.post(PATH, HELLO | {"stream": True})
        async with anthropic(edge) as client:
            with pytest.raises(NotFoundError):
                await client.messages.create(**{**HELLO, "model": "missing"})
    assert wrong.status_code == 400
    assert wrong.json() == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "the field 'max_tokens' is missing"},
    }
    kind, data = events_of(broken.text)[-1]
    assert (kind, json.loads(data)["error"]) == ("error", {"type": "api_error", "message": "out of memory"})
