"""Tool loops of agents, each with the client of its own project: question, call, result, response."""

from __future__ import annotations

import json
from typing import Any

import pytest

QUESTION = 'Please compute add({"a": 19, "b": 23}).'
TWICE = 'Please compute add({"a": 1, "b": 2}) and add({"a": 3, "b": 4}).'
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def added(arguments: str) -> str:
    return str(add(**json.loads(arguments)))


@pytest.fixture
def openai(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize(("question", "answer"), [(QUESTION, "42"), (TWICE, "3; 7")])
def test_openai_chat(openai: Any, question: str, answer: str) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        choice = openai.chat.completions.create(model="sim", messages=messages, tools=tools).choices[0]
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": added(call.function.arguments)}
            for call in choice.message.tool_calls
        ]
    assert choice.message.content == f"The tools returned: {answer}"


def test_openai_chat_streamed_and_parsed(openai: Any) -> None:
    from openai import pydantic_function_tool
    from pydantic import BaseModel

    class Sum(BaseModel):
        a: int
        b: int

    messages: list[Any] = [{"role": "user", "content": 'Sum({"a": 19, "b": 23})'}]
    tools = [pydantic_function_tool(Sum)]
    with openai.chat.completions.stream(model="sim", messages=messages, tools=tools) as stream:
        message = stream.get_final_completion().choices[0].message
    [call] = message.tool_calls
    assert call.function.parsed_arguments == Sum(a=19, b=23)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    with openai.chat.completions.stream(model="sim", messages=messages, tools=tools) as stream:
        assert stream.get_final_completion().choices[0].message.content == "The tools returned: 42"


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses(openai: Any, stream: bool) -> None:
    tools = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]

    def create() -> Any:
        if not stream:
            return openai.responses.create(model="sim", input=items, tools=tools, store=False)
        with openai.responses.stream(model="sim", input=items, tools=tools, store=False) as events:
            return events.get_final_response()

    response = create()
    [call] = [item for item in response.output if item.type == "function_call"]
    items += response.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": added(call.arguments)})
    assert create().output_text == "The tools returned: 42"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_openai_required_call(openai: Any, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages = [{"role": "user", "content": "Hi"}]
    response = openai.chat.completions.create(model="sim", messages=messages, tools=tools, tool_choice=choice)
    [call] = response.choices[0].message.tool_calls
    assert (call.function.name, added(call.function.arguments)) == ("add", "0")


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_runner(url: str, stream: bool) -> None:
    from anthropic import Anthropic, beta_tool

    tool = beta_tool(lambda a, b: str(a + b), name="add", description="Add two numbers.", input_schema=PARAMETERS)
    runner = Anthropic(base_url=url, api_key="none", max_retries=0).beta.messages.tool_runner(
        model="sim", max_tokens=500, tools=[tool], messages=[{"role": "user", "content": QUESTION}], stream=stream
    )
    *_, last = [turn.get_final_message() if stream else turn for turn in runner]
    assert (last.content[0].text, last.stop_reason) == ("The tools returned: 42", "end_turn")


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_create_agent(url: str, responses: bool) -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="sim", base_url=f"{url}/v1", api_key="none", use_responses_api=responses, max_retries=0)
    result = create_agent(model, tools=[add]).invoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert result["messages"][-1].text == "The tools returned: 42"


def test_langchain_create_agent_with_structured_response(url: str) -> None:
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ToolStrategy
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Sum(BaseModel):
        total: int

    model = ChatOpenAI(model="sim", base_url=f"{url}/v1", api_key="none", max_retries=0)
    agent = create_agent(model, tools=[add], response_format=ToolStrategy(Sum))
    result = agent.invoke({"messages": [{"role": "user", "content": 'Sum({"total": 42})'}]})
    assert result["structured_response"] == Sum(total=42)


def test_langchain_create_agent_over_anthropic(url: str) -> None:
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model="sim", base_url=url, api_key="none", max_tokens=500, max_retries=0)
    result = create_agent(model, tools=[add]).invoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert result["messages"][-1].text == "The tools returned: 42"


async def test_llama_index_function_agent(url: str) -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model="sim", api_base=f"{url}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True, max_retries=0
    )
    response = await FunctionAgent(tools=[add], llm=model).run(QUESTION)
    assert str(response) == "The tools returned: 42"


@pytest.mark.parametrize("stream", [False, True])
async def test_pydantic_ai_agent(url: str, stream: bool) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("sim", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")), tools=[add])
    if stream:
        async with agent.run_stream(QUESTION) as result:
            assert await result.get_output() == "The tools returned: 42"
    else:
        assert (await agent.run(QUESTION)).output == "The tools returned: 42"


async def test_pydantic_ai_agent_with_structured_output(url: str) -> None:
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Sum(BaseModel):
        total: int

    model = OpenAIChatModel("sim", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    result = await Agent(model, output_type=Sum).run('final_result({"total": 42})')
    assert result.output == Sum(total=42)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(url: str, stream: bool) -> None:
    import litellm

    tools = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    def complete() -> Any:
        response = litellm.completion(
            model="openai/sim", api_base=f"{url}/v1", api_key="none", messages=messages, tools=tools, stream=stream
        )
        if stream:
            response = litellm.stream_chunk_builder(list(response), messages=messages)
        return response.choices[0].message

    message = complete()
    [call] = message.tool_calls
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": added(call.function.arguments)}]
    assert complete().content == "The tools returned: 42"


def test_instructor(openai: Any) -> None:
    import instructor
    from pydantic import BaseModel

    class Sum(BaseModel):
        total: int

    client = instructor.from_openai(openai)
    made = client.create(model="sim", response_model=Sum, messages=[{"role": "user", "content": 'Sum({"total": 42})'}])
    assert made.total == 42
