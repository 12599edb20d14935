import json
from typing import Any

import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.frontend.preprocess.templates.template import ChatTemplate

CHATML = """{%- if tools %}
{{- tools | tojson }}
{%- endif %}
{% for message in messages %}
{% if message.role == 'forbidden' %}{{ raise_exception('only users and assistants') }}{% endif %}
<|start|>{{ message.role }}
{{ message['content'] | trim }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}
<|start|>assistant
{% endif %}"""
HELLO = [{"role": "user", "content": " hi "}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **settings: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages or HELLO, **settings)


def test_a_conversation_becomes_the_text_that_the_template_writes() -> None:
    talk = [*HELLO, {"role": "assistant", "content": "yes?"}]
    assert render(CHATML, talk) == "<|start|>user\nhi<|end|>\n<|start|>assistant\nyes?<|end|>\n<|start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|start|>user\nhi<|end|>\n"


def test_lines_with_nothing_but_a_tag_render_nothing() -> None:
    assert render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"


def test_json_is_written_as_models_were_trained_on_it() -> None:
    tool = {"type": "function", "function": {"name": "wétter", "z": "<'&>", "a": 1}}
    assert render("{{ tools | tojson }}", tools=[tool]) == json.dumps([tool], ensure_ascii=False)
    assert render("{{ tools | tojson(indent=2) }}", tools=[tool]) == json.dumps([tool], ensure_ascii=False, indent=2)


def test_the_variables_that_templates_expect_are_defined() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ strftime_now('%Y') | length }}"
    assert render(source) == "<s></s>True4"
    assert (
        render("{{ enable_thinking }} {{ documents[0] }}", variables={"enable_thinking": False, "documents": ["d"]}) == "False d"
    )


def test_loop_controls_work_and_training_marks_are_ignored() -> None:
    source = "{% for m in messages %}{% generation %}{{ loop.index }}/{{ loop.length }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, HELLO * 3) == "1/3"


def test_a_template_can_reject_a_conversation() -> None:
    with pytest.raises(InvalidRequest, match="only users and assistants"):
        render(CHATML, [{"role": "forbidden", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content.text }}",
        "{{ messages | tojson + 1 }}",
        "{{ 1 / 0 }}",
        "{{ undefined_thing.attribute }}",
        "{{ messages | tojson(indent=messages) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_on_a_conversation_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert "template" in str(caught.value) and caught.value.param == "messages"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ unclosed", "{% unknown %}", "{{ x | no_such_filter }}", "{% if x %}" * 99 + "{% endif %}" * 99]
)
def test_an_invalid_template_is_rejected(source: str) -> None:
    with pytest.raises(EngineError, match="chat template cannot be read"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ messages[0].update(role='system') }}",
    ],
)
def test_a_template_cannot_reach_out_of_the_sandbox_or_change_the_request(source: str) -> None:
    messages = [dict(HELLO[0])]
    with pytest.raises(InvalidRequest):
        render(source, messages)
    assert messages == HELLO


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    ],
)
def test_a_template_that_runs_away_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequest, match="template"):
        render(source)


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "add_generation_prompt"])
def test_reserved_variables_cannot_be_overridden(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        render(CHATML, variables={name: "x"})
