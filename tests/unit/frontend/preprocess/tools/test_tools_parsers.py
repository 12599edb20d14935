import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.common.output_formats import REASONING_FORMATS, TOOL_FORMATS
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.parsers import Content, OutputParser, ToolCall, first_call_only
from dynamo.frontend.preprocess.tools.reader import MAX_HELD_CHARS
from tests.support.cuts import ParsedPart, call, content, read, read_however_cut, reasoning


def tool(name: str, **parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": parameters}}}


OPENAI = Path(__file__).parents[5] / "docs" / "openai.md"
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
D = "｜DSML｜"
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
    ("mistral", "[TOOL_CALLS] [1, 2]", [content(" [1, 2]")]),
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
    ("pythonic", "<|tool_call_start|>[now()]<|tool_call_end|>Wait.", [call("now", "{}"), content("Wait.")]),
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
    # deepseek_v32
    (
        "deepseek_v32",
        f"I look it up.\n\n<{D}function_calls>\n"
        f'<{D}invoke name="get_weather">\n<{D}parameter name="city" string="true">Paris</{D}parameter>\n'
        f'<{D}parameter name="days" string="false">2</{D}parameter>\n</{D}invoke>\n'
        f'<{D}invoke name="now">\n</{D}invoke>\n</{D}function_calls>',
        [content("I look it up.\n\n"), call("get_weather", '{"city":"Paris","days":2}'), call("now", "{}")],
    ),
    (
        "deepseek_v32",
        f'<{D}invoke name="f"><{D}parameter name="a" string="false">{{"b": [1, null]}}</{D}parameter>'
        f'<{D}parameter name="c" string="true">12</{D}parameter></{D}invoke>',
        [call("f", '{"a":{"b": [1, null]},"c":"12"}')],
    ),
    # kimi_k2
    (
        "kimi_k2",
        "One moment.<|tool_calls_section_begin|>"
        f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>{TOKYO}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>",
        [content("One moment."), *BOTH],
    ),
    (
        "kimi_k2",
        f"<|tool_call_begin|>get_weather<|tool_call_argument_begin|> {PARIS} <|tool_call_end|>",
        [call("get_weather", PARIS + " ")],
    ),
    ("kimi_k2", "<|tool_call_begin|>functions.now:3<|tool_call_argument_begin|><|tool_call_end|>", [call("now", "{}")]),
    ("kimi_k2", "<|tool_call_begin|>functions.now:3", [content("functions.now:3")]),
    ("kimi_k2", '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"a": "b', [call("now", '{"a": "b')]),
    # glm45
    (
        "glm45",
        "\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [call("get_weather", '{"city":"Paris","days":2}'), call("now", "{}")],
    ),
    (
        "glm45",
        "I send it.<tool_call>send<arg_key>text</arg_key><arg_value>a\n<b></arg_value><arg_key>to</arg_key>"
        '<arg_value>["x"]</arg_value></tool_call><tool_call>now</tool_call>',
        [content("I send it."), call("send", '{"text":"a\\n<b>","to":["x"]}'), call("now", "{}")],
    ),
    ("glm45", "<tool_call>\nnow\n</tool_call>", [call("now", "{}")]),
    ("glm45", "<tool_call>oh no\n</tool_call>", [content("oh no")]),
    ("glm45", '<tool_call>{"name": "now"}</tool_call>', [content('{"name": "now"}')]),
    ("glm45", "<tool_call>no", [content("no")]),
    ("glm45", "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>b</arg", [call("now", '{"a":"b</arg')]),
    # minimax_m2
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="send">\n<parameter name="text">Hi</parameter>\n'
        '<parameter name="to">["a", "b"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [call("send", '{"text":"Hi","to":["a", "b"]}'), call("now", "{}")],
    ),
    (
        "minimax_m2",
        "Well.\n<minimax:tool_call><invoke name='now'></invoke></minimax:tool_call>",
        [content("Well.\n"), call("now", "{}")],
    ),
    ("minimax_m2", '<invoke name="send"><parameter name="text">\nH\n', [call("send", '{"text":"\\nH\\n')]),
    # seed_oss
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
        [call("get_weather", '{"city":"Paris","days":2}')],
    ),
    # granite
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}]', BOTH[:1]),
    (
        "granite",
        f'Let me look. <tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}, '
        f'{{"name": "get_weather", "arguments": {TOKYO}}}]</tool_call>',
        [content("Let me look. "), *BOTH],
    ),
    ("granite", "<tool_call> []", []),
    ("granite", "<tool_call>[ see", [content("[ see")]),
    # phi4_mini_json
    ("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {PARIS}}}]', BOTH[:1]),
    (
        "phi4_mini_json",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now", "parameters": {{}}}}]<|/tool_call|>',
        [BOTH[0], call("now", "{}")],
    ),
    ("phi4_mini_json", "functools[0] is no function", [content("functools[0] is no function")]),
    (
        "phi4_mini_json",
        'functools[{"name": "unheard_of", "arguments": {}}]',
        [content('functools[{"name": "unheard_of", "arguments": {}}]')],
    ),
    ("phi4_mini_json", "import functools", [content("import functools")]),
    ("phi4_mini_json", "functools[", [content("functools[")]),
    # jamba
    (
        "jamba",
        f' <tool_calls>[\n    {{"name": "get_weather", "arguments": {PARIS}}},\n    {{"name": "now", "arguments": {{}}}}\n]'
        "</tool_calls>",
        [BOTH[0], call("now", "{}")],
    ),
    (
        "jamba",
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {PARIS}}}\n{{"name": "now", "arguments": {{}}}}\n</tool_calls>',
        [BOTH[0], call("now", "{}")],
    ),
    # nemotron
    ("nemotron", f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}]</TOOLCALL>\n', BOTH[:1]),
    ("nemotron", f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"na', [BOTH[0], content('{"na')]),
    # longcat
    ("longcat", f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</longcat_tool_call>', BOTH[:1]),
    # generic
    ("generic", f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>', BOTH[:1]),
    (
        "generic",
        f'<tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]</tool_call>',
        [BOTH[0], call("now", "{}")],
    ),
    ("generic", f'I check.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}', [content("I check.\n"), BOTH[0]]),
    (
        "generic",
        f'{{"name": "get_weather", "arguments": {PARIS}}}\n{{"name": "now", "parameters": {{}}}}',
        [BOTH[0], call("now", "{}")],
    ),
    ("generic", f' [{{"name": "get_weather", "arguments": {PARIS}}}] ', BOTH[:1]),
    ("generic", f'Sure:\n```json\n{{"name": "get_weather", "arguments": {PARIS}}}\n```\n', [content("Sure:\n"), BOTH[0]]),
    ("generic", '```json\n{"name": "Bob"}\n```', [content('```json\n{"name": "Bob"}\n```')]),
    ("generic", '```json\n[{"name": "now"}]``', [call("now", "{}"), content("``")]),
    ("generic", ' {"name": "Bob", "arguments": {}}', [content(' {"name": "Bob", "arguments": {}}')]),
    ("generic", "[1] says so", [content("[1] says so")]),
    ("generic", "[[now]]", [content("[[now]]")]),
    ("generic", "{{now}}", [content("{{now}}")]),
    ("generic", "Use ```json\n or <tool_call", [content("Use ```json\n or <tool_call")]),
    ("generic", '<tool_call>{"name": "get_weather", "argum', [content('{"name": "get_weather", "argum')]),
    ("generic", '<tool_call>{"name": "get_weather", "arguments": {"city', [call("get_weather", '{"city')]),
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


def test_every_name_that_a_worker_takes_has_a_parser() -> None:
    assert PARSER_REGISTRY.tools.keys() == {name for form in TOOL_FORMATS for name in form.names}
    assert PARSER_REGISTRY.reasoning.keys() == {name for form in REASONING_FORMATS for name in form.names}


def test_every_parser_is_documented() -> None:
    names = set(re.findall(r"`(\w+)`", OPENAI.read_text()))
    assert names >= PARSER_REGISTRY.tools.keys() | PARSER_REGISTRY.reasoning.keys()


PIECES = st.sampled_from(
    sorted({piece for _, text, _ in OUTPUTS for piece in [text, text[: len(text) // 2], text[len(text) // 2 :]]})
)


@pytest.mark.parametrize("name", sorted(form.name for form in TOOL_FORMATS))
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


@pytest.mark.parametrize("name", sorted(form.name for form in TOOL_FORMATS))
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
        ("generic", '{"name": "now", "arguments": {"a": "b', " c"),
        ("granite", '<tool_call>[{"name": "now", "arguments": {"a": "b', " c"),
        ("kimi_k2", '<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{"a": "b', " c"),
        ("glm45", "<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>b", " c"),
        ("minimax_m2", '<invoke name="now"><parameter name="a">b', " c"),
        ("deepseek_v32", '<｜DSML｜invoke name="now"><｜DSML｜parameter name="a" string="true">b', " c"),
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
        ("mistral", "[TOOL_CALLS]", '[{"x": "'),
        ("generic", "", '[{"x": "'),
        ("kimi_k2", "<|tool_call_begin|>", "x"),
        ("glm45", "<tool_call>", "x"),
        ("minimax_m2", "<invoke name=", "x"),
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


def test_without_parallel_calls_only_the_first_is_returned() -> None:
    text = f'A <tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>'
    kind = first_call_only(PARSER_REGISTRY.tools["hermes"])
    assert read_however_cut(lambda: kind.make(TOOLS), text + text) == [content("A "), BOTH[0], content("A ")]


def test_spaces_in_a_head_of_harmony_are_read_once() -> None:
    """Were they spread over the places for spaces in all ways, this would take hours."""
    spaces = " " * 1000
    head = f"<|channel|>{spaces}X<|call|>"
    assert read(PARSER_REGISTRY.tools["harmony"].make(TOOLS), [head]) == [content(spaces + "X")]
