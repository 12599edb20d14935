import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.text.tool_choice import require_any_call, require_named_call
from dynamo.frontend.preprocess.parsers import OutputParser
from tests.support.cuts import ParsedPart, call, content, read_however_cut

CITY: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
PARIS = '{"city": "Paris"}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f'[{{"name": "weather", "parameters": {PARIS}}}]', [call("weather", PARIS)]),
        (
            f'[{{"name":"weather","parameters":{PARIS}}},{{"name":"now","parameters":{{}}}}]',
            [call("weather", PARIS), call("now", "{}")],
        ),
        (
            f'[{{"name": "weather", "parameters": {PARIS}}}, {{"name": "now", "par',
            [call("weather", PARIS)],
        ),
        ('[{"name": "weather", "parameters": {"city": "Par', [call("weather", '{"city": "Par')]),
        ('[{"name": "wea', []),
        ("", []),
        ("I cannot.", [content("I cannot.")]),
    ],
)
def test_required_calls_that_are_cut_off_keep_what_there_is(text: str, expected: list[ParsedPart]) -> None:
    _, kind = require_any_call(TOOLS, parallel=True)
    assert read_however_cut(lambda: kind.make(TOOLS), text) == expected


def test_the_output_of_a_named_tool_is_its_arguments() -> None:
    guided, kind = require_named_call("weather", TOOLS)

    def make() -> OutputParser:
        return kind.make(TOOLS)

    assert guided == {"json_schema": CITY | {"additionalProperties": False}}
    assert read_however_cut(make, PARIS) == [call("weather", PARIS)]
    assert read_however_cut(make, PARIS[:7]) == [call("weather", PARIS[:7])]


def test_a_tool_without_parameters_takes_none() -> None:
    guided, _ = require_named_call("now", TOOLS)
    assert guided == {"json_schema": {"type": "object", "properties": {}, "additionalProperties": False}}


def named(parameters: object) -> object:
    guided, _ = require_named_call("f", [{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    return guided["json_schema"]


def test_arguments_have_the_properties_that_the_schema_names_at_every_depth() -> None:
    listed = {"type": "array", "items": {"anyOf": [CITY, {"type": "null"}]}}
    closed = CITY | {"additionalProperties": False}
    assert named({"type": "object", "properties": {"of": listed, "more": {"type": "object"}}}) == {
        "type": "object",
        "properties": {"of": {"type": "array", "items": {"anyOf": [closed, {"type": "null"}]}}, "more": {"type": "object"}},
        "additionalProperties": False,
    }


@pytest.mark.parametrize("schema", [CITY | {"additionalProperties": True}, {"allOf": [CITY, {"properties": {"day": True}}]}])
def test_a_schema_that_means_to_be_open_stays_open(schema: object) -> None:
    assert named(schema) == schema


@pytest.mark.parametrize("where", ["$defs", "definitions"])
def test_definitions_of_all_tools_move_to_the_root_of_the_schema(where: str) -> None:
    def tool(name: str, definition: object) -> dict[str, object]:
        parameters = {"type": "object", "properties": {"a": {"$ref": f"#/{where}/a"}}, where: {"a": definition}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    guided, _ = require_any_call([tool("f", {"type": "null"}), tool("g", {"type": "null"})], parallel=False)
    schema = guided["json_schema"]
    assert schema[where] == {"a": {"type": "null"}}
    assert all(where not in choice["properties"]["parameters"] for choice in schema["items"]["anyOf"])
    with pytest.raises(InvalidRequest, match="differently"):
        require_any_call([tool("f", {"type": "null"}), tool("g", {"type": "string"})], parallel=False)


def test_a_name_without_a_tool_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'tool_choice' names 'no_tool'"):
        require_named_call("no_tool", TOOLS)
