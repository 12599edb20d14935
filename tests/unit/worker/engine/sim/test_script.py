"""What the simulated engine says when its tokens are not invented."""

import json
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Sampling, Stop, pack_tokens
from dynamo.frontend.preprocess.templates.template import ChatTemplate
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.echo import byte_tokenizer
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.engine.sim.examples import example_of
from dynamo.worker.engine.sim.script import CALLS_TEMPLATE
from dynamo.worker.process.engine_factory import sim_config
from tests.support.shapes import doubling, nested

BYTES = Tokenizer.from_str(byte_tokenizer().decode())
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 6}, "friend": {"$ref": "#/$defs/friend"}, "note": {"type": "string"}},
    "required": ["name", "friend"],
    "$defs": {"friend": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {}, "required": []}]}},
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "minimum": 2}},
            "required": ["a", "b"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        PERSON,
        {"enum": ["red", "blue"]},
        {"const": 7},
        {"type": ["null", "integer"], "exclusiveMinimum": 3},
        {"type": "integer", "maximum": -5},
        {"type": "number", "exclusiveMaximum": -5},
        {"type": "number", "minimum": 1.2, "multipleOf": 0.5},
        {"type": "array", "minItems": 2, "items": {"type": "boolean"}},
        {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "null"}, "minItems": 2},
        {"type": "string", "maxLength": 2},
        {"type": "string", "format": "date-time"},
        {"type": "null"},
        {"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}}, {"required": ["a"]}]},
        {"oneOf": [{"type": "string", "default": "x"}]},
    ],
)
def test_the_example_of_a_schema_matches_it(schema: Any) -> None:
    jsonschema.validate(example_of(schema), schema)


@pytest.mark.parametrize(
    "schema",
    [
        3,
        {"type": "odd"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.org"},
        {"$ref": "#"},
        {"type": "string", "pattern": "a+"},
    ],
)
def test_a_schema_without_an_example_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest):
        example_of(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10**9},
        {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "minItems": 1000, "items": {"type": "string", "minLength": 1000}},
        nested(5, minItems=1000),
        doubling(30, "properties"),
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_an_example_takes_no_more_memory_than_the_largest_that_is_made(schema: Any) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="at most 10000 values and 65536 characters"):
            example_of(schema)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("schema", [{"type": "integer", "multipleOf": 0, "minimum": 1}, {"type": "string", "minLength": "x"}])
def test_a_keyword_with_a_value_that_it_cannot_have_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="the JSON schema cannot be used"):
        example_of(schema)


async def generated(prompt: str, *, settings: str = "speedup=0", max_tokens: int = 500, **sampling: Any) -> tuple[str, Delta]:
    """Return the output, and the last delta."""
    engine = SimEngine(sim_config(settings, "", None, None))
    await engine.start()
    try:
        request = GenerateRequest(
            model="sim",
            prompt=pack_tokens(BYTES.encode(prompt).ids),
            sampling=Sampling(**sampling),
            stop=Stop(max_tokens=max_tokens),
        )
        deltas = [delta async for delta in engine.generate(request, Context("r")) if isinstance(delta, Delta)]
        return BYTES.decode([token for delta in deltas for token in delta.tokens]), deltas[-1]
    finally:
        await engine.close()


async def test_structured_output_matches_its_schema_and_stops() -> None:
    text, last = await generated("hi", guided={"json_schema": PERSON})
    jsonschema.validate(json.loads(text), PERSON)
    assert last.finish_reason is FinishReason.STOP
    cut, last = await generated("hi", guided={"json_schema": json.dumps(PERSON)}, max_tokens=7)
    assert (cut, last.finish_reason) == (text[:7], FinishReason.LENGTH)
    assert (await generated("hi", guided={"choice": ["yes", "no"]}))[0] == "yes"
    assert (await generated("hi", guided={"json_object": True}))[0] == "{}"


@pytest.mark.parametrize("guided", [{"regex": "a+"}, {"grammar": "root ::= 'a'"}, {"json_schema": "{"}])
async def test_a_constraint_that_cannot_be_kept_is_refused(guided: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await generated("hi", guided=guided)


def prompt_of(*messages: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = (ADD, NOW)) -> str:
    return ChatTemplate(CALLS_TEMPLATE).render(messages, tools=tools)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


RESULT = {"role": "tool", "tool_call_id": "c", "content": "3"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (prompt_of(user("Hello\nthere")), called("add", a=0, b=2)),
        (prompt_of(user("What is the time now?")), called("now")),
        (
            prompt_of(user('Try add({"a": 1, "b": 2}) and now({}).')),
            called("add", a=1, b=2) + "\n" + called("now"),
        ),
        (prompt_of(user("Hello"), {"role": "assistant", "content": ""}, RESULT, RESULT), "The tools returned: 3; 3"),
        (prompt_of(user("Hello"), tools=()), "You said: Hello"),
    ],
)
async def test_with_calls_the_response_follows_from_the_conversation(prompt: str, expected: str) -> None:
    text, last = await generated(prompt, settings="speedup=0,calls=1")
    assert (text, last.finish_reason) == (expected, FinishReason.STOP)
    begun, rest = expected[:9], expected[9:]
    assert (await generated(prompt + begun, settings="speedup=0,calls=1"))[0] == rest  # on another instance


async def test_a_required_call_is_the_one_that_the_message_spells() -> None:
    prompt = prompt_of(user('Try add({"a": 1, "b": 2}).'))
    one, _ = await generated(prompt, settings="speedup=0,calls=1", guided={"json_schema": ADD["function"]["parameters"]})
    several, _ = await generated(prompt, settings="speedup=0,calls=1", guided={"json_schema": {"type": "array"}})
    assert json.loads(one) == {"a": 1, "b": 2}
    assert json.loads(several) == [{"name": "add", "parameters": {"a": 1, "b": 2}}]


async def test_a_call_that_is_spelled_wrongly_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the call of add"):
        await generated(prompt_of(user("add({a: 1})")), settings="speedup=0,calls=1")


async def test_any_other_prompt_is_continued_as_without_calls() -> None:
    assert await generated("hi", settings="speedup=0,calls=1", max_tokens=8) == await generated("hi", max_tokens=8)
