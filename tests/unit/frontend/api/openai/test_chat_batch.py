"""POST /v1/chat/completions/batch, on a real port."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.common.errors import EngineError
from dynamo.frontend.config import TextLimits, TextOptions
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from tests.support.fakes import FakeStream
from tests.support.http_edge import Speaker, chat_card, open_http_edge, send_delta

PATH = "/v1/chat/completions/batch"
HELLO: dict[str, Any] = {
    "model": "talker",
    "messages": [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Ho"}, {"role": "assistant", "content": "A"}]],
}


async def test_each_conversation_has_a_choice_in_the_order_of_the_request() -> None:
    speaker = Speaker(("<think>Hm.</think>", "Yes"), logprobs=lambda position: -1.0)
    async with open_http_edge(chat_card(reasoning_parser="qwen3"), respond=speaker, parsers=PARSER_REGISTRY) as edge:
        response = await edge.post(PATH, HELLO | {"max_tokens": 9, "echo": True, "logprobs": True})
    assert response.status_code == 200, response.text
    body = response.json()
    messages = [choice["message"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [message["content"] for message in messages] == ["Yes", "AYes"]
    assert [message["reasoning"] for message in messages] == ["Hm.", "Hm."]
    assert all(choice["logprobs"]["content"] for choice in body["choices"])
    assert body["usage"]["prompt_tokens"] == sum(request.prompt_tokens for request in speaker.requests)
    assert [request.stop.max_tokens for request in speaker.requests] == [9, 9]


async def test_a_batch_fails_with_one_of_its_conversations() -> None:
    def fail_second(stream: FakeStream) -> None:
        send_delta(stream, "a")
        stream.fail(EngineError("out of memory"))

    async with open_http_edge(respond=fail_second) as edge:
        assert (await edge.post(PATH, HELLO)).status_code == 500


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages[0]"),
        ({"messages": [[{"role": "user", "content": "a"}]] * 4}, "messages"),
    ],
)
async def test_what_a_batch_cannot_have_is_refused(wrong: dict[str, Any], param: str) -> None:
    async with open_http_edge(text=TextOptions(limits=TextLimits(max_choices=3))) as edge:
        assert (await edge.error(PATH, HELLO | wrong))["param"] == param
