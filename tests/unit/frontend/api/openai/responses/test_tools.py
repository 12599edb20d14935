"""Tools of the Responses API that are no functions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from dynamo.frontend.config import HttpOptions
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from tests.support.http_edge import Speaker, chat_card, events_of, open_http_edge
from tests.support.parsers import brackets

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": "talker", "input": "Hi"}
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
}
NAMESPACE = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers",
    "tools": [FUNCTION, {"type": "custom", "name": "note"}],
}
OTHERS = [
    {"type": "web_search", "search_context_size": "low"},
    {"type": "local_shell"},
    {"type": "mcp", "server_label": "x", "server_url": "https://example.org"},
    {"type": "image_generation"},
]
PARSERS = OutputParsers(tools={"brackets": ParserKind(brackets)}, reasoning={})
CARD = chat_card(tool_parser="brackets")


async def test_tools_that_only_other_servers_have_are_left_out_counted_and_not_in_the_response() -> None:
    speaker = Speaker()
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        response = await edge.post(PATH, HELLO | {"tools": [FUNCTION, *OTHERS]})
        labels = {"endpoint": "responses", "field": "tools.web_search"}
        assert edge.registry.get_sample_value("dynamo_frontend_unknown_fields_total", labels) == 1
    assert response.status_code == 200, response.text
    assert [tool["name"] for tool in response.json()["tools"]] == ["weather"]
    assert "weather" in speaker.prompt and "search" not in speaker.prompt


async def test_tools_that_only_other_servers_have_are_refused_where_unknown_fields_are() -> None:
    async with open_http_edge(CARD, http=HttpOptions(strict_fields=True), parsers=PARSERS) as edge:
        error = await edge.error(PATH, HELLO | {"tools": OTHERS[:1]})
    assert error["param"] == "tools.web_search"


async def test_items_of_tools_that_only_other_servers_have_are_left_out_of_the_history() -> None:
    speaker = Speaker()
    items = [
        {"role": "user", "content": "Go."},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c1", "output": "files"},
        {"type": "mcp_list_tools", "server_label": "x", "tools": []},
        {"type": "compaction", "encrypted_content": "…"},
        {"role": "user", "content": "On."},
    ]
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        response = await edge.post(PATH, HELLO | {"input": items})
        error = await edge.error(PATH, HELLO | {"input": [{"type": "mesage", "content": "x"}]})
    assert response.status_code == 200, response.text
    assert speaker.prompt == "<user>Go.\n<user>On.\n<assistant>"
    assert (error["param"], error["message"]) == ("input[0].type", "there are no items of type 'mesage'")


async def test_a_custom_tool_is_called_with_a_text() -> None:
    speaker = Speaker(('[apply_patch {"input":"*** Begin\\n\\"x\\""}]',))
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        body = (await edge.post(PATH, HELLO | {"tools": [PATCH]})).json()
        async with AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none") as client:
            stream = await client.responses.create(model="talker", input="Hi", tools=[PATCH], stream=True)  # type: ignore[call-overload]
            events = [event async for event in stream]
    Response.model_validate(body)
    [item] = body["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", '*** Begin\n"x"')
    assert item["id"].startswith("ctc_") and "arguments" not in item
    assert "Edit files." in speaker.prompt and "start: LINE" in speaker.prompt
    inputs = [event for event in events if event.type.startswith("response.custom_tool_call_input")]
    assert [event.type.rpartition(".")[2] for event in inputs] == ["delta", "done"]
    assert inputs[0].delta == inputs[1].input == '*** Begin\n"x"'
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert not any("function_call" in event.type for event in events)


async def test_a_call_of_a_custom_tool_that_is_no_call_keeps_what_the_model_wrote() -> None:
    async with open_http_edge(CARD, respond=Speaker(('[apply_patch {"text": 1}]',)), parsers=PARSERS) as edge:
        body = (await edge.post(PATH, HELLO | {"tools": [PATCH]})).json()
    assert body["output"][0]["input"] == '{"text": 1}'


async def test_calls_of_custom_tools_in_the_history_are_those_of_functions_to_the_model() -> None:
    speaker = Speaker()
    items = [
        {"role": "user", "content": "Go."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "a\nb"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        response = await edge.post(PATH, HELLO | {"input": items, "tools": [PATCH]})
    assert response.status_code == 200, response.text
    assert '[apply_patch {"input": "a\\nb"}]\n<tool>done\n' in speaker.prompt


@pytest.mark.parametrize("choice", [{"type": "custom", "name": "apply_patch"}, "required"])
async def test_a_custom_tool_can_be_required(choice: Any) -> None:
    text = '{"input": "x"}' if isinstance(choice, dict) else '[{"name": "apply_patch", "parameters": {"input": "x"}}]'
    async with open_http_edge(CARD, respond=Speaker((text,)), parsers=PARSERS) as edge:
        body = (await edge.post(PATH, HELLO | {"tools": [PATCH], "tool_choice": choice})).json()
    assert (body["output"][0]["type"], body["output"][0]["input"]) == ("custom_tool_call", "x")


async def test_tools_of_a_namespace_are_called_by_its_name_and_theirs() -> None:
    speaker = Speaker(('[crm__weather {"city": 1}]',))
    past = {"type": "function_call", "call_id": "1", "name": "weather", "namespace": "crm", "arguments": "{}"}
    items = [{"role": "user", "content": "Go."}, past, {"type": "function_call_output", "call_id": "1", "output": "?"}]
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        body = (await edge.post(PATH, HELLO | {"input": items, "tools": [NAMESPACE]})).json()
    [item] = body["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "weather", "crm")
    assert "crm__weather" in speaker.prompt and "crm__note" in speaker.prompt
    assert "[crm__weather " in speaker.prompt.split("tools:")[0]
    Response.model_validate(body)


async def test_allowed_tools_of_kinds_that_are_left_out_are_passed_over() -> None:
    speaker = Speaker()
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "web_search"}, {"type": "function", "name": "weather"}],
    }
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        tools = [FUNCTION, PATCH, *OTHERS]
        response = await edge.post(PATH, HELLO | {"tools": tools, "tool_choice": allowed})
        error = await edge.error(PATH, HELLO | {"tools": tools, "tool_choice": allowed | {"tools": [{"type": "mcp"}]}})
    assert response.status_code == 200, response.text
    assert "weather" in speaker.prompt and "apply_patch" not in speaker.prompt
    assert error["param"] == "tool_choice"


async def test_the_path_that_other_servers_compact_conversations_at_is_not_found() -> None:
    async with open_http_edge() as edge:
        error = await edge.error(f"{PATH}/compact", HELLO, 404)
    assert (error["type"], error["message"]) == ("not_found_error", "path '/v1/responses/compact' is not found")


async def test_events_of_a_custom_tool_come_in_the_order_of_those_of_a_function() -> None:
    async with open_http_edge(CARD, respond=Speaker(('[apply_patch {"input": "x"}]',)), parsers=PARSERS) as edge:
        streamed = await edge.post(PATH, HELLO | {"tools": [PATCH], "stream": True})
    kinds = [kind for kind, _ in events_of(streamed.text)]
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert json.loads(events_of(streamed.text)[2][1])["item"]["input"] == ""


async def test_the_tools_of_all_namespaces_together_are_bounded() -> None:
    tools = [NAMESPACE | {"name": f"n{number}", "tools": [FUNCTION] * 600} for number in range(2)]
    async with open_http_edge(CARD, parsers=PARSERS) as edge:
        error = await edge.error(PATH, HELLO | {"tools": tools})
    assert (error["param"], error["message"]) == ("tools", "got 1200 tools; at most 1024 are allowed")


async def test_each_kind_that_is_left_out_counts_once_in_a_request() -> None:
    items = [{"role": "user", "content": "Go."}, *[{"type": "web_search_call", "id": f"ws_{number}"} for number in range(5)]]
    async with open_http_edge(CARD, respond=Speaker(), parsers=PARSERS) as edge:
        assert (await edge.post(PATH, HELLO | {"input": items})).status_code == 200
        labels = {"endpoint": "responses", "field": "input.web_search_call"}
        assert edge.registry.get_sample_value("dynamo_frontend_unknown_fields_total", labels) == 1
