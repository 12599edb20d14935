"""Agents of OpenAI's Agents SDK, over chat completions and over responses, in an environment of their own: see `conftest.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

QUESTION = 'Please compute add({"a": 19, "b": 23}).'


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@asynccontextmanager
async def model_of(url: str, responses: bool) -> AsyncIterator[Any]:
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel
    from openai import AsyncOpenAI

    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as openai:
        yield kind(model="sim", openai_client=openai)


@pytest.mark.parametrize("responses", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_tool(url: str, stream: bool, responses: bool) -> None:
    from agents import Agent, RunConfig, Runner, function_tool

    async with model_of(url, responses) as model:
        agent = Agent(name="adder", instructions="Use the tool.", model=model, tools=[function_tool(add)])
        config = RunConfig(tracing_disabled=True)
        if stream:
            result: Any = Runner.run_streamed(agent, QUESTION, run_config=config)
            kinds = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
            assert kinds == ["tool_called", "tool_output", "message_output_created"]
        else:
            result = await Runner.run(agent, QUESTION, run_config=config)
        assert result.final_output == "The tools returned: 42"


@pytest.mark.parametrize("responses", [False, True])
async def test_a_handoff_and_structured_output(url: str, responses: bool) -> None:
    from agents import Agent, RunConfig, Runner
    from pydantic import BaseModel

    class Sum(BaseModel):
        total: int

    async with model_of(url, responses) as model:
        adder = Agent(name="adder", handoff_description="Adds.", model=model, output_type=Sum)
        first = Agent(name="first", instructions="Hand over.", model=model, handoffs=[adder])
        result = await Runner.run(first, "transfer_to_adder({})", run_config=RunConfig(tracing_disabled=True))
    assert result.last_agent is adder and isinstance(result.final_output, Sum)
