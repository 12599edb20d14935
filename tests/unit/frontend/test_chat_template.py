"""Chat templates: what templates written for Hugging Face's libraries expect, and what none of them may do."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.frontend.preprocess.template import ChatTemplate

HELLO = [{"role": "user", "content": "héllo <b>"}]
CHATML = (
    "{% for message in messages %}\n"
    "    {{ '<|im_start|>' + message.role + '\\n' + message['content'] + '<|im_end|>' }}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def render(source: str, **arguments: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(arguments.pop("messages", HELLO), **arguments)


def test_indentation_and_the_line_break_of_a_block_are_not_part_of_the_prompt() -> None:
    assert render(CHATML) == "    <|im_start|>user\nhéllo <b><|im_end|>\n<|im_start|>assistant\n"


def test_the_generation_prompt_can_be_left_out() -> None:
    assert "assistant" not in render(CHATML, add_generation_prompt=False)


def test_bos_and_eos_are_known_to_the_template() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>héllo <b></s>"


def test_json_is_neither_escaped_nor_sorted() -> None:
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "héllo <b>"}]'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": [\n  2\n ]\n}'


def test_tools_are_absent_unless_given() -> None:
    source = "{% if tools is not none %}{{ tools[0].function.name }}{% else %}none{% endif %}"
    assert render(source) == "none"
    assert render(source, tools=[{"type": "function", "function": {"name": "look_up"}}]) == "look_up"


def test_a_templates_own_switches_can_be_set() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}quick{% else %}think{% endif %}"
    assert render(source) == "think"
    assert render(source, variables={"enable_thinking": False}) == "quick"


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_switches_cannot_replace_the_conversation(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        render("", variables={name: "mine"})


def test_loops_can_be_left_and_know_where_they_are() -> None:
    skip_and_leave = "{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% if loop.index == 3 %}{% break %}{% endif %}"
    source = "{% for x in [1, 2, 3, 4] %}" + skip_and_leave + "{% endfor %}"
    assert render(source) == "13"
    assert (
        render("{% for x in 'abc' %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }} {% endfor %}") == "0False3 1False3 2True3 "
    )
    assert render("{% for key, value in {'a': 1}.items() %}{{ key }}{{ value }}{% endfor %}") == "a1"
    assert render("{% for x in [] %}{% else %}nothing{% endfor %}") == "nothing"


def test_generation_blocks_are_what_they_enclose() -> None:
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c") == "abuserc"


def test_the_time_is_formatted_as_the_template_asks() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        render("{{ raise_exception('roles must alternate') }}")
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages | nosuchattribute if false }}{{ 1 // 0 }}",
        "{{ missing() }}",
    ],
)
def test_messages_that_a_template_cannot_take_are_the_callers_mistake(source: str) -> None:
    try:
        template = ChatTemplate(source)
    except EngineError:
        return  # found when it was compiled
    with pytest.raises(InvalidRequest, match="does not take these messages"):
        template.render(HELLO)


def test_a_broken_template_is_the_models_mistake() -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        ChatTemplate("{% for x in %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_a_template_gets_out_of_the_sandbox_by_no_known_way(source: str) -> None:
    before = [dict(message) for message in HELLO]
    try:
        result = render(source)
    except InvalidRequest:
        result = ""
    assert "class" not in result
    assert before == HELLO


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set s = namespace(x='ab') %}{% for a in range(99) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{% for a in range(99999) %}{{ 'abcdefghij' }}{% endfor %}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ '{:9999999999}'.format('a') }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_runs_away_is_stopped_soon(source: str) -> None:
    template = ChatTemplate(source, max_chars=100_000, max_loop_turns=10_000)
    with pytest.raises(InvalidRequest, match=r"stopped|RecursionError"):
        template.render(HELLO)


def test_the_bound_on_loops_is_for_one_rendering() -> None:
    template = ChatTemplate("{% for x in range(600) %}{% endfor %}ok", max_loop_turns=1000)
    assert [template.render(HELLO) for _ in range(3)] == ["ok"] * 3
