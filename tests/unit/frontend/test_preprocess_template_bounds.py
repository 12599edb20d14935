"""Chat templates, further: loops, padding and formats that would run away, switches of the template's own."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.common.errors import InvalidRequest
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


def test_a_templates_own_options_can_be_set() -> None:
    source = "{% if enable_thinking is defined and not enable_thinking %}quick{% else %}think{% endif %}"
    assert render(source) == "think"
    assert render(source, variables={"enable_thinking": False}) == "quick"


def test_loop_variables_and_controls_work() -> None:
    skip_and_leave = "{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% if loop.index == 3 %}{% break %}{% endif %}"
    source = "{% for x in [1, 2, 3, 4] %}" + skip_and_leave + "{% endfor %}"
    assert render(source) == "13"
    assert (
        render("{% for x in 'abc' %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }} {% endfor %}") == "0False3 1False3 2True3 "
    )
    assert render("{% for key, value in {'a': 1}.items() %}{{ key }}{{ value }}{% endfor %}") == "a1"
    assert render("{% for x in [] %}{% else %}nothing{% endfor %}") == "nothing"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_known_sandbox_escapes_fail(source: str) -> None:
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
        "{% for a in range(99999) %}{{ 'abcdefghij' }}{% endfor %}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ '{:9999999999}'.format('a') }}",
    ],
)
def test_a_template_that_runs_away_is_stopped_soon(source: str) -> None:
    template = ChatTemplate(source, max_chars=100_000, max_loop_turns=10_000)
    with pytest.raises(InvalidRequest, match="stopped"):
        template.render(HELLO)


def test_the_bound_on_loops_is_for_one_rendering() -> None:
    template = ChatTemplate("{% for x in range(600) %}{% endfor %}ok", max_loop_turns=1000)
    assert [template.render(HELLO) for _ in range(3)] == ["ok"] * 3
