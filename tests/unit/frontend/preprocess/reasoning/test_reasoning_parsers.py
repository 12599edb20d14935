import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.model_card import LlmInfo
from dynamo.common.output_formats import REASONING_FORMATS
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.parsers import OutputParser, Reasoning, make_parser
from tests.support.cuts import ParsedPart, call, content, read, read_however_cut, reasoning

TOOLS = [{"type": "function", "function": {"name": "now"}}]


def parser(name: str) -> OutputParser:
    return PARSER_REGISTRY.reasoning[name].make(())


OUTPUTS: list[tuple[str, str, list[ParsedPart]]] = [
    ("deepseek_r1", "<think>\nHm, 1 < 2 🤔\n</think>\n\nYes.\n", [reasoning("Hm, 1 < 2 🤔"), content("Yes.\n")]),
    ("deepseek_r1", "Hm.\n\n\n</think>Yes </think>", [reasoning("Hm.\n"), content("Yes </think>")]),
    ("deepseek_r1", "Hm, </thi", [reasoning("Hm, </thi")]),
    ("deepseek_r1", "Hm.\n", [reasoning("Hm.\n")]),
    ("deepseek_r1", "</think>Yes", [content("Yes")]),
    ("qwen3", "<think>\n\n</think>\n\nYes.", [content("Yes.")]),
    ("qwen3", "\n<think>a</think>b", [reasoning("a"), content("b")]),
    ("qwen3", "Yes, <think> is a tag", [content("Yes, <think> is a tag")]),
    ("qwen3", "Yes</think>no", [content("Yesno")]),
    ("qwen3", "<thi", [content("<thi")]),
    ("qwen3_thinking", "a</think>b", [reasoning("a"), content("b")]),
    ("glm45", "\n<think>Short.</think>\nFine.", [reasoning("Short."), content("Fine.")]),
    ("glm45", "<think></think>\nFine.", [content("Fine.")]),
    (
        "granite",
        "Here is my thought process: Add them.\n\nHere is my response: Four.",
        [reasoning("Add them."), content("Four.")],
    ),
    ("granite", "Here's my thought process:\nAdd.\nHere's my response:\nFour.", [reasoning("Add."), content("Four.")]),
    ("granite", "Here is my answer", [content("Here is my answer")]),
    ("granite", "Here is my th", [content("Here is my th")]),
    ("kimi", "◁think▷Hm.◁/think▷Yes.", [reasoning("Hm."), content("Yes.")]),
    ("kimi_k2", "<think>Hm.</think>Yes.", [reasoning("Hm."), content("Yes.")]),
    (
        "kimi_k2",
        "<think>I look. <|tool_calls_section_begin|>x",
        [reasoning("I look. "), content("<|tool_calls_section_begin|>x")],
    ),
    ("kimi_k2", "Yes <|tool_calls_section_begin|>x", [content("Yes <|tool_calls_section_begin|>x")]),
    ("minimax_m2", "Hm.\n</think>\n\nYes.", [reasoning("Hm."), content("Yes.")]),
    ("minimax_m2_append_think", "Hm.\n</think>\n\nYes.", [content("<think>Hm.\n</think>\n\nYes.")]),
    ("mistral", "[THINK]Hm, [1] or [/2]?[/THINK]Yes.", [reasoning("Hm, [1] or [/2]?"), content("Yes.")]),
    ("nemotron", "<think>\nHm.\n</think>\n\nYes.", [reasoning("Hm."), content("Yes.")]),
    ("seed_oss", "<seed:think>Hm.</seed:think>Yes.", [reasoning("Hm."), content("Yes.")]),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        [reasoning("a"), content("b")],
    ),
]


TAGS = ["<think>", "</think>", "[THINK]", "◁/think▷", "Here is my thought process:", "Here is my response: "]
PIECES = [*TAGS, "\n", "a", "<", "</thi", "é", " ", " " * 70]


@pytest.mark.parametrize(("name", "text", "expected"), OUTPUTS)
def test_reasoning_parses_the_same_wherever_it_is_cut(name: str, text: str, expected: list[ParsedPart]) -> None:
    assert read_however_cut(lambda: parser(name), text) == expected


@pytest.mark.parametrize("name", sorted(form.name for form in REASONING_FORMATS))
@given(
    pieces=st.lists(
        st.sampled_from(
            [
                "<think>",
                "</think>",
                "[THINK]",
                "◁/think▷",
                "Here is my thought process:",
                "Here is my response: ",
                "\n",
                "a",
                "<",
                "</thi",
                "é",
                " ",
                " " * 70,
            ]
        ),
        max_size=12,
    ),
    data=st.data(),
)
def test_random_cuts_change_nothing(name: str, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(parser(name), cut) == read(parser(name), [text]) == read(parser(name), text)


@pytest.mark.parametrize(
    ("name", "before", "text", "expected"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", "a\n</think>\n\nb", [reasoning("a"), content("b")]),
        ("qwen3", "<|im_start|>assistant\n", "b", [content("b")]),
        ("deepseek_r1", "<｜Assistant｜><think>\n", "a</think>b", [reasoning("a"), content("b")]),
        ("deepseek_r1", "<｜Assistant｜>", "a</think>b", [reasoning("a"), content("b")]),
        ("qwen3_thinking", "<think>\n\n</think>\n\n", "b", [content("b")]),
        ("gpt_oss", "<think>", "b", [content("b")]),
        ("minimax_m2", "]~b]ai\n<think>\n", "a</think>b", [reasoning("a"), content("b")]),
        ("seed_oss", "<seed:think>", "a</seed:think>b", [reasoning("a"), content("b")]),
        ("nemotron", "<SPECIAL_11>Assistant\n<think></think>", "b", [content("b")]),
    ],
)
def test_reasoning_continues_after_the_prompt(name: str, before: str, text: str, expected: list[ParsedPart]) -> None:
    def make() -> OutputParser:
        made = make_parser((PARSER_REGISTRY.reasoning[name],), (), before)
        assert made is not None
        return made

    assert read_however_cut(make, text) == expected


def test_reasoning_is_streamed() -> None:
    reader = parser("deepseek_r1")
    assert reader.feed("first </th") == [Reasoning("first ")]
    assert reader.feed("en") == [Reasoning("</then")]


@pytest.mark.parametrize(
    ("reasons", "calls", "text", "expected"),
    [
        (
            "deepseek_r1",
            "hermes",
            'Is it late?\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
            [reasoning("Is it late?"), call("now", "{}")],
        ),
        (
            "qwen3",
            "qwen3_coder",
            "<think>\na <tool_call>\n</think>\n\nSee:\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            [reasoning("a <tool_call>"), content("See:\n"), call("now", "{}")],
        ),
        (
            "kimi_k2",
            "kimi_k2",
            "<think>Late?<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            [reasoning("Late?"), call("now", "{}")],
        ),
        (
            "glm45",
            "glm45",
            "\n<think>Late?</think>\n<tool_call>now\n</tool_call>",
            [reasoning("Late?"), call("now", "{}")],
        ),
        (
            "gpt_oss",
            "harmony",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
            [reasoning("a"), call("now", "{}")],
        ),
    ],
)
def test_calls_after_reasoning_are_parsed(reasons: str, calls: str, text: str, expected: list[ParsedPart]) -> None:
    kinds = PARSER_REGISTRY.choose(
        LlmInfo(context_length=4096, tokenizer="", reasoning_parser=reasons, tool_parser=calls), with_tools=True
    )

    def make() -> OutputParser:
        chained = make_parser(kinds, TOOLS)
        assert chained is not None
        return chained

    assert read_however_cut(make, text) == expected
