import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.parsers import Content, OutputParser, ToolCall
from dynamo.frontend.preprocess.tools.reader import MAX_HELD_CHARS
from tests.support.cuts import ParsedPart, call, content, read, read_however_cut, reasoning


def tool(name: str, **parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": parameters}}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("send", text={"type": "string"}, to={"type": "array"}, urgent={"type": "boolean"}, at={"type": ["number", "null"]}),
    tool("now"),
]


def parser(name: str) -> OutputParser:
    return PARSER_REGISTRY.tools[name].make(TOOLS)


PARIS = '{"city": "Paris"}'
TOKYO = '{"city": "東京 🗼 \\"x\\" \\\\", "days": 2}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n%s\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
XML = "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>"
XML_CITY = "<parameter=city>\n%s\n</parameter>\n"
BOTH = [call("get_weather", PARIS), call("get_weather", TOKYO)]

OUTPUTS: list[tuple[str, str, list[ParsedPart]]] = [
    # hermes
    ("hermes", "Hi, 5 < 6 <b>!", [content("Hi, 5 < 6 <b>!")]),
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', BOTH[:1]),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"arguments": {json.dumps({"city": "é"})}, "name": "get_weather"}}\n</tool_call>\n',
        [content("Let me see.\n"), call("get_weather", PARIS), call("get_weather", '{"city":"é"}')],
    ),
    ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {TOKYO}}}</tool_call> Done.', [BOTH[1], content(" Done.")]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [call("now", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [call("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', [call("f", '{"a": "</tool_call>"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>.', [call("f", '{"a": 1}'), content(".")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "7"}</tool_call>', [call("f", '{"a": 1}')]),
    ("hermes", "a<tool_call>oh no</tool_call>b", [content("aoh nob")]),
    ("hermes", '<tool_call>{"nome": "f"}</tool_call>b', [content('{"nome": "f"}b')]),
    ("hermes", "<tool_call>{'name': 1}</tool_call>b", [content("{'name': 1}b")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": \'x\'}}</tool_call>', [call("f", '{"a": '), content("'x'}}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [call("f", '{"a": "b')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>', [call("f", '{"a": "b}}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b}</tool_call> c', [call("f", '{"a": "b}'), content(" c")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\n</tool_c', [call("f", '{"a": "b\n</tool_c')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, 2}}</tool_call>c', [call("f", '{"a": [1, 2}'), content("c")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"c": 1}}</tool_call>',
        [call("f", '{"a": "b}}'), call("g", '{"c": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "get_w', [content('{"name": "get_w')]),
    ("hermes", "see <tool_", [content("see <tool_")]),
    ("hermes", " \n", [content(" \n")]),
    # llama3_json
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', BOTH[:1]),
    ("llama3_json", f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}<|eom_id|>', BOTH[:1]),
    (
        "llama3_json",
        f'\n{{"name": "get_weather", "parameters": {PARIS}}}; {{"name": "get_weather", "parameters": {TOKYO}}};',
        BOTH,
    ),
    ("llama3_json", f'Sure.<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}', [content("Sure."), BOTH[0]]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}; and more', [BOTH[0], content("; and more")]),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', [content('{"name": "Bob", "parameters": {}}')]),
    ("llama3_json", ' {"answer": 42} ', [content(' {"answer": 42} ')]),
    ("llama3_json", '{"name": "get_weather", "param', [content('{"name": "get_weather", "param')]),
    ("llama3_json", '<|python_tag|>print("a")', [content('print("a")')]),
    ("llama3_json", 'Say {"name": "now", "parameters": {}}', [content('Say {"name": "now", "parameters": {}}')]),
    # mistral
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "get_weather", "arguments": {TOKYO}}}]</s>',
        BOTH,
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_weather[ARGS]{TOKYO}</s>", BOTH),
    ("mistral", f"Hm.[TOOL_CALLS]get_weather[CALL_ID]a1B[ARGS]{PARIS}", [content("Hm."), BOTH[0]]),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS}", BOTH[:1]),
    ("mistral", f'[TOOL_CALLS]{{"name": "get_weather", "arguments": {PARIS}}}', BOTH[:1]),
    ("mistral", "[TOOL_CALLS]what is this? [1]", [content("what is this? [1]")]),
    ("mistral", "[TOOL_CALLS] [1, 2]", [content("[1, 2]")]),
    ("mistral", "[TOOL_CALLS][TOOL_CALLS]now[ARGS]{}", [call("now", "{}")]),
    ("mistral", "see [1] and [TOOL", [content("see [1] and [TOOL")]),
    ("mistral", "[TOOL_CALLS]get_wea", [content("get_wea")]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{"a": [', [call("now", '{"a": [')]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1, 2}[TOOL_CALLS]g[ARGS]{}</s>', [call("f", '{"a": [1, 2}'), call("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": [1, 2[TOOL_CALLS]g[ARGS]{}</s>', [call("f", '{"a": [1, 2'), call("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "b}[TOOL_CALLS]g[ARGS]{}</s>', [call("f", '{"a": "b}'), call("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "[ARGS]", "b": [["x"]]}</s>', [call("f", '{"a": "[ARGS]", "b": [["x"]]}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1, {"b": 2}}]</s>', [call("f", '{"a": [1, {"b": 2}}')]),
    # pythonic
    ("pythonic", '[get_weather(city="Paris")]', [call("get_weather", '{"city":"Paris"}')]),
    (
        "pythonic",
        "<|python_start|>[get_weather(city='東京]', days=-2), send(to=['a', (1.5,)], urgent=True, at=null), now()]<|python_end|>",
        [
            call("get_weather", '{"city":"東京]","days":-2}'),
            call("send", '{"to":["a",[1.5]],"urgent":true,"at":null}'),
            call("now", "{}"),
        ],
    ),
    ("pythonic", " \n[now()]\n", [call("now", "{}")]),
    ("pythonic", "[now()] Done", [call("now", "{}"), content(" Done")]),
    ("pythonic", "[1] is a footnote", [content("[1] is a footnote")]),
    ("pythonic", "[other()]", [content("[other()]")]),
    ("pythonic", "[now(), other()]", [content("[now(), other()]")]),
    ("pythonic", "[now(1)]", [content("[now(1)]")]),
    ("pythonic", "[now(a=exit())]", [content("[now(a=exit())]")]),
    ("pythonic", "[now(a=1, a=2)]", [content("[now(a=1, a=2)]")]),
    ("pythonic", "[now(a=']", [content("[now(a=']")]),
    ("pythonic", '[now(a="it\'s \\" \\d")]', [call("now", '{"a":"it\'s \\" \\\\d"}')]),
    ("pythonic", "[now(a=" + "[" * 40 + "]" * 40 + ")]", [content("[now(a=" + "[" * 40 + "]" * 40 + ")]")]),
    ("pythonic", "<|python_start|>print(1)<|python_end|>", [content("print(1)")]),
    # qwen3_coder
    ("qwen3_coder", XML % ("get_weather", XML_CITY % "Paris"), [call("get_weather", '{"city":"Paris"}')]),
    (
        "qwen3_coder",
        "Now:\n"
        + XML % ("now", "")
        + "\n"
        + XML
        % (
            "send",
            '<parameter=text>\na <b>\n"c"\n\n</parameter>\n<parameter=to>\n[1, {}]\n'
            "</parameter>\n<parameter=urgent>\nTrue\n</parameter>\n<parameter=at>\nnull\n</parameter>\n",
        ),
        [
            content("Now:\n"),
            call("now", "{}"),
            call("send", '{"text":"a <b>\\n\\"c\\"\\n","to":[1, {}],"urgent":true,"at":null}'),
        ],
    ),
    (
        "qwen3_coder",
        "<function=get_weather>" + XML_CITY % "東京 🗼" + "<parameter=days>two</parameter></function>",
        [call("get_weather", '{"city":"東京 🗼","days":"two"}')],
    ),
    ("qwen3_coder", "<function=x><parameter=y>1</parameter></function>", [call("x", '{"y":"1"}')]),
    ("qwen3_coder", "<function=now><parameter=a>b<parameter=c>d</function>", [call("now", '{"a":"b","c":"d"}')]),
    ("qwen3_coder", "<function=now>lost<parameter=a>b</parameter></function>", [call("now", '{"a":"b"}'), content("lost")]),
    ("qwen3_coder", "<tool_call>\noh no\n</tool_call>", [content("\noh no\n")]),
    ("qwen3_coder", "<function=a <b>", [content("a <b>")]),
    ("qwen3_coder", "<function=now><parameter=a>\nb c", [call("now", '{"a":"b c')]),
    ("qwen3_coder", "<function=get_weather><parameter=days>\n12", [call("get_weather", '{"days":12')]),
    ("qwen3_coder", "<function=no", [content("no")]),
    ("qwen3_coder", "<function=now></tool_call>x", [call("now", "{}"), content("x")]),
    # deepseek
    ("deepseek_v3", BEGIN + V3 % PARIS + "\n" + V3 % TOKYO + END + "<｜end▁of▁sentence｜>", BOTH),
    ("deepseek_v3", "Wait. " + BEGIN + V3 % PARIS + END, [content("Wait. "), BOTH[0]]),
    ("deepseek_v3_1", BEGIN + V31 % PARIS + V31 % TOKYO + END, BOTH),
    ("deepseek_v3_1", BEGIN + (V31 % PARIS).replace("get_weather", "function"), [call("function", PARIS)]),
    ("deepseek_v3_1", BEGIN + V31 % "" + END, [call("get_weather", "{}")]),
    ("deepseek_v3", BEGIN + "<｜tool▁call▁begin｜>oh no<｜tool▁call▁end｜>" + END, [content("oh no")]),
    (
        "deepseek_v3",
        BEGIN + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>oh no<｜tool▁call▁end｜>f\n```json\n",
        [content("oh nof\n```json\n")],
    ),
    ("deepseek_v3_1", BEGIN + '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a', [call("now", '{"a')]),
    ("deepseek_v3", BEGIN + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>no", [content("no")]),
    # harmony
    ("harmony", "Hello", [content("Hello")]),
    (
        "harmony",
        "<|channel|>analysis<|message|>Think 🤔<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        [reasoning("Think 🤔"), content("Yes.")],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{PARIS}<|call|><|start|>assistant to=functions.get_weather<|channel|>commentary json"
        f"<|message|>{TOKYO}<|call|>",
        [content("I look."), *BOTH],
    ),
    ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", [call("now", "{}")]),
    ("harmony", '<|channel|>commentary to=functions.now<|message|>{"a', [call("now", '{"a')]),
    ("harmony", '<|channel|>analysis to=browser.search<|message|>{"q": 1}<|call|>', [reasoning('{"q": 1}')]),
    ("harmony", "Hi<|return|>", [content("Hi")]),
    ("harmony", "<|channel|>ana", []),
    ("harmony", "<|channel|>oh, no such thing<|end|>", [content("oh, no such thing")]),
    ("harmony", "<|channel|>final<|message|>a<|channel|>analysis<|message|>b", [content("a"), reasoning("b")]),
]


@pytest.mark.parametrize(("name", "text", "expected"), OUTPUTS)
def test_output_parses_the_same_wherever_it_is_cut(name: str, text: str, expected: list[ParsedPart]) -> None:
    assert read_however_cut(lambda: parser(name), text) == expected


PIECES = st.sampled_from(
    sorted({piece for _, text, _ in OUTPUTS for piece in [text, text[: len(text) // 2], text[len(text) // 2 :]]})
)


@pytest.mark.parametrize("name", PARSER_REGISTRY.tools)
@settings(max_examples=60)
@given(data=st.data())
def test_random_cuts_of_any_output_change_nothing(name: str, data: st.DataObject) -> None:
    own = [text for kind, text, _ in OUTPUTS if PARSER_REGISTRY.tools[kind] == PARSER_REGISTRY.tools[name]]
    whole = st.sampled_from(own)
    half = whole.flatmap(lambda text: st.integers(0, len(text)).map(lambda index: text[index:]))
    begun = whole.flatmap(lambda text: st.integers(0, len(text)).map(lambda index: text[:index]))
    pieces = st.one_of(whole, half, begun, PIECES, st.text("<>[](){}=,;:\"'\\| \n\tab1｜é🤔", max_size=12))
    text = "".join(data.draw(st.lists(pieces, min_size=1, max_size=4)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole_text = read(parser(name), [text])
    assert read(parser(name), cut) == whole_text
    assert read(parser(name), text) == whole_text


@pytest.mark.parametrize("name", PARSER_REGISTRY.tools)
@settings(max_examples=100)
@given(text=st.text('abc d{}:",;()=.é🤔\n<>|', max_size=60).map(lambda text: "x" + text))
def test_text_without_a_marker_is_content_as_it_is(name: str, text: str) -> None:
    assert read(parser(name), text) == [content(text)]


@pytest.mark.parametrize(
    ("name", "before", "rest"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "b', " c"),
        ("llama3_json", '{"name": "now", "parameters": {"a": "b', " c"),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"a": "b', " c"),
        ("qwen3_coder", "<function=now><parameter=a>b", " c"),
        ("deepseek_v3_1", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": "b', " c"),
        ("harmony", '<|channel|>commentary to=functions.now<|message|>{"a": "b', " c"),
    ],
)
def test_arguments_are_streamed(name: str, before: str, rest: str) -> None:
    reader = parser(name)
    assert any(isinstance(part, ToolCall) and part.name == "now" for part in reader.feed(before))
    assert reader.feed(rest) == [ToolCall(0, arguments=rest)]


def test_text_that_cannot_be_a_marker_is_returned_at_once() -> None:
    reader = parser("hermes")
    assert reader.feed("a <tool_c") == [Content("a ")]
    assert reader.feed("at") == [Content("<tool_cat")]


@pytest.mark.parametrize(
    ("name", "opening", "shown"),
    [
        ("hermes", "<tool_call>", '{"x": "'),
        ("llama3_json", "", '{"x": "'),
        ("mistral", "[TOOL_CALLS][", '{"x": "'),
        ("mistral", "[TOOL_CALLS]", "x"),
        ("pythonic", "", '[now(a="'),
        ("qwen3_coder", "<function=", "x"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>", "x"),
        ("harmony", "<|channel|>", "x"),
    ],
)
def test_held_back_text_is_bounded_and_not_lost(name: str, opening: str, shown: str) -> None:
    reader = parser(name)
    piece = "y" * 4096
    given = [part for text in [opening + shown, *[piece] * (MAX_HELD_CHARS // 4096 + 2)] for part in reader.feed(text)]
    assert given, "held back without bound"
    content_text = "".join(part.text for part in [*given, *reader.finish()] if isinstance(part, Content))
    assert content_text == shown + piece * (MAX_HELD_CHARS // 4096 + 2)


def test_without_tools_harmony_returns_no_calls() -> None:
    text = "<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    assert read(PARSER_REGISTRY.tools["harmony"].make([]), [text]) == [content("{}")]
