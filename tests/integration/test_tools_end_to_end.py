"""Tool calls end to end, by the SDKs of OpenAI and Anthropic. `tests/clients` has those of other projects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from openai import AsyncOpenAI

from tests.support.processes import FrontendProcess

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}
QUESTION = 'Compute add({"a": 19, "b": 23}).'


def openai(front: FrontendProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{front.http_port}/v1", api_key="none", max_retries=0)


async def test_a_tool_loop_over_chat_completions_ends_with_the_results(deployment: FrontendProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai(deployment) as client:
        called = (await client.chat.completions.create(model="gpt", messages=messages, tools=[ADD])).choices[0]
        assert (called.finish_reason, called.message.content) == ("tool_calls", None)
        [call] = called.message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"a": 19, "b": 23}
        messages += [called.message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
        async with client.chat.completions.stream(model="gpt", messages=messages, tools=[ADD]) as stream:
            last = (await stream.get_final_completion()).choices[0]
        assert (last.finish_reason, last.message.content) == ("stop", "The tools returned: 42")


async def test_parallel_calls_can_be_refused(deployment: FrontendProcess) -> None:
    messages: list[Any] = [{"role": "user", "content": 'add({"a": 1, "b": 2}) and add({"a": 3, "b": 4})'}]
    async with openai(deployment) as client:
        for parallel, calls in ((True, 2), (False, 1)):
            response = await client.chat.completions.create(
                model="sim", messages=messages, tools=[ADD], parallel_tool_calls=parallel
            )
            assert len(response.choices[0].message.tool_calls or []) == calls


async def test_a_tool_loop_over_responses_ends_with_the_results(deployment: FrontendProcess) -> None:
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai(deployment) as client:
        response = await client.responses.create(model="sim", input=items, tools=tools)
        [call] = [item for item in response.output if item.type == "function_call"]
        items += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "42"}]
        assert (await client.responses.create(model="sim", input=items, tools=tools)).output_text == "The tools returned: 42"


async def test_the_tool_runner_of_anthropic_ends_with_the_results(deployment: FrontendProcess) -> None:
    async def run(a: int, b: int) -> str:
        return str(a + b)

    tool = beta_async_tool(run, name="add", description="Add two numbers.", input_schema=PARAMETERS)
    async with AsyncAnthropic(base_url=f"http://127.0.0.1:{deployment.http_port}", api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="sim", max_tokens=500, tools=[tool], messages=[{"role": "user", "content": QUESTION}]
        )
        message = await runner.until_done()
    assert (message.content[0].text, message.stop_reason) == ("The tools returned: 42", "end_turn")  # type: ignore[union-attr]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_length_cuts_is_kept_as_far_as_it_was_spelled_where_its_name_is_known(
    deployment: FrontendProcess, choice: Any, *, stream: bool
) -> None:
    spelled = '{"a": 19' if choice != "required" else '[{"name": "add", "parameters": {"a": 19'
    request: dict[str, Any] = {
        "model": "sim",
        "messages": [{"role": "user", "content": QUESTION}],
        "tools": [ADD],
        "tool_choice": choice,
        "max_tokens": len(spelled),
    }
    async with openai(deployment) as client:
        if stream:
            chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**request, stream=True)]
            functions = [call.function for chunk in chunks for call in chunk.delta.tool_calls or ()]
            arguments = "".join(function.arguments for function in functions)
            reason = chunks[-1].finish_reason
        else:
            whole = (await client.chat.completions.create(**request)).choices[0]
            arguments = "".join(call.function.arguments for call in whole.message.tool_calls or ())
            reason = whole.finish_reason
    is_kept = stream or choice != "required"
    assert (arguments, reason) == ('{"a": 19' if is_kept else "", "length")


@pytest.mark.real_model
async def test_a_model_without_tools_in_its_template_takes_them_and_calls_what_is_required(
    small_model: FrontendProcess,
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Add 1 and 2."}]
    async with openai(small_model) as client:
        free = await client.chat.completions.create(model="smollm2", messages=messages, tools=[ADD], max_tokens=4)
        assert free.usage is not None
        assert free.usage.prompt_tokens > 100  # the tools are described
        required = await client.chat.completions.create(
            model="smollm2", messages=messages, tools=[ADD], tool_choice="required", parallel_tool_calls=False, max_tokens=60
        )
        [call] = required.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "add"
