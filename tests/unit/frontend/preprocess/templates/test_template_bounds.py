"""Chat templates, further: loops, padding and formats that would run away, switches of the template's own."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.frontend.preprocess.templates.template import MAX_SOURCE_CHARS, ChatTemplate

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
    template = ChatTemplate(source, max_chars=100_000, max_steps=10_000)
    with pytest.raises(InvalidRequest, match="stopped"):
        template.render(HELLO)


def test_the_bound_on_loops_is_for_one_rendering() -> None:
    template = ChatTemplate("{% for x in range(600) %}{% endfor %}ok", max_steps=1000)
    assert [template.render(HELLO) for _ in range(3)] == ["ok"] * 3


GROWING = "{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(99) %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ (('a'*50000)|replace('a','b'*2000))|length }}",
        "{{ ('a'*50000).replace('a','b'*2000)|length }}",
        "{{ ('a'*50000).replace('','b'*2000)|length }}",
        "{{ ([1]|tojson(indent=200000000))|length }}",
        "{{ (['x'*10000]*3000)|join|length }}",
        "{{ ('x'*10000).join('y'*10000)|length }}",
        "{{ ('x'*1000).join(['y']*9000)|length }}",
        GROWING + "{% set n.s = n.s ~ n.s %}{% endfor %}",
        GROWING + "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        GROWING + "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        GROWING + "{% set n.s = (n.s, n.s) %}{% endfor %}{{ {n.s: 1} }}",
        GROWING + "{% set n.s = {'a': n.s, 'b': n.s} %}{% endfor %}{{ n.s|tojson|length }}",
        GROWING + "{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}{{ n.s == n.s }}",
        GROWING + "{% set n.s = n.s|replace('a','aa') %}{% endfor %}",
        GROWING + "{% set n.s = '%s%s' % (n.s, n.s) %}{% endfor %}",
        GROWING + "{% set n.s = '%s%s'|format(n.s, n.s) %}{% endfor %}",
        GROWING + "{% set n.s = '{0}{0}'.format(n.s) %}{% endfor %}",
        GROWING + "{% set n.s = '{a}{a}'.format_map({'a': n.s}) %}{% endfor %}",
        GROWING + "{% set n.s = [n.s]|batch(3, n.s)|list %}{% endfor %}{{ n.s }}",
        GROWING + "{% set n.s = [n.s]*2 %}{% endfor %}{{ n.s }}",
        GROWING + "{% set n.s = [n.s, n.s]|join %}{% endfor %}",
        GROWING + "{% set n.s = n.s|list + n.s|list %}{% endfor %}",
        "{% set n = namespace(s=1000) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{{ 5|round(-10000000) }}",
        "{{ 5|round(10000000, 'ceil') }}",
        "{{ [[1]]|batch(1000000000, 1)|list|length }}",
        "{{ [1]|slice(1000000000)|list|length }}",
        "{{ ('a\n'*1000)|indent('x'*100000)|length }}",
        "{{ ('a\n'*10000)|indent(1000)|length }}",
        "{{ ('\t'*10000).expandtabs(10000)|length }}",
        "{{ ('a'*10000).translate({97: 'b'*10000})|length }}",
        "{{ ('%999d'*1000)|format(*range(1000))|length }}",
        "{{ ('%*d'*100) % (([99999, 1]*100)|batch(200)|first) }}",
        "{{ ('%(a)s'*1000) % {'a': 'x'*9999} }}",
        "{{ ('{0:{1}}'*9).format('a', 99999) }}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% for x in [0] recursive %}{{ loop(range(99999)) if x == 0 and loop.depth < 3 }}{% endfor %}",
        "{% for x in range(99999) if false %}{% endfor %}" * 50,
        "{% for x in messages*20000 %}{% for y in messages*9999 if y == x %}{% endfor %}{% endfor %}",
        "{{ range(99999)|map('string')|map('length')|sum }}" * 50,
        "{{ ([[1]]*5000)|sum(start=[])|length }}",
        "{% set l = ['x'*90000] %}{% for i in range(99999) %}{{ l[0][1:]|length }}{% endfor %}",
        "{% set a = 'x'*90000 %}{% set b = 'x'*90000 %}{% for i in range(99999) %}{% if a == b %}{% endif %}{% endfor %}",
        "{% set a = 'x'*90000 %}{% for i in range(99999) %}{% if 'yy' in a %}{% endif %}{% endfor %}",
        "{% set n = namespace() %}{% set n.a = n %}{% set n.b = [n, n] %}{{ n }}{{ n.b }}"
        "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
        "{{ messages[0].items()|list * 9999 }}",
        "{{ ('a b '*20000).split()|length }}" * 40,
        "{% for x in 'x'*90000 %}{% for x in 'x'*90000 %}a{% endfor %}{% endfor %}",
        "{{ ('a b '*5000)|wordcount }}",
        "{{ ('a b '*5000)|title|length }}",
        "{{ strftime_now('%c'*5000)|length }}",
        "{{ strftime_now('%c'*33) }}",
        "{{ range(1000)|groupby('real')|length }}",
        "{{ range(3000)|sort|length }}" * 7,
        "{{ range(3000)|unique|list|length }}" * 7,
        "{{ range(3000)|max }}" * 7,
        "{{ range(3000)|sum }}" * 7,
        "{% set d = dict(messages[0]) %}{% for i in range(9999) %}{{ d|dictsort|length }}{% endfor %}" * 2,
        "{% set x %}{% for a in range(99999) %}{% raw %}" + "y" * 5000 + "{% endraw %}{% endfor %}{% endset %}",
    ],
)
def test_no_operation_of_a_template_escapes_its_bounds(source: str) -> None:
    template = ChatTemplate(source, max_chars=100_000, max_steps=20_000)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="stopped"):
            template.render(HELLO)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10_000_000


@pytest.mark.parametrize("source", ["{{ lipsum(n=9) }}", "{{ 'a' | wordwrap(1, wrapstring='b') }}", "{{ 'a' | xmlattr }}"])
def test_helpers_for_web_pages_are_not_available(source: str) -> None:
    with pytest.raises((InvalidRequest, EngineError), match="template"):
        ChatTemplate(source).render(HELLO)


def test_a_long_conversation_stays_inside_the_bounds() -> None:
    messages = [{"role": "user", "content": "hello " * 30}] * 16_384
    prompt = render(CHATML, messages=messages, add_generation_prompt=False)
    assert prompt.count("<|im_start|>") == 16_384


def test_constant_expressions_are_not_evaluated_when_a_template_is_compiled() -> None:
    tracemalloc.start()
    try:
        ChatTemplate("{{ ('a' * 9999999) | length }}{{ 'ab' | replace('b', 'c') | center(99999999) }}")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5_000_000


def test_a_source_that_is_too_long_is_rejected() -> None:
    with pytest.raises(EngineError, match="at most"):
        ChatTemplate("x" * (MAX_SOURCE_CHARS + 1))


def test_a_template_that_would_be_compiled_for_seconds_is_refused() -> None:
    with pytest.raises(EngineError, match="at most 131072 are allowed"):
        ChatTemplate("{{a}}" * 40_000)


@pytest.mark.parametrize(
    "source",
    [
        (
            "{% macro f(a, b=[1,2]) %}{{ a }}{{ b|join(',') }}{{ varargs }}{{ kwargs|dictsort }}"
            "{{ caller() if caller }}{% endmacro %}{{ f(1) }}{{ f(1,'xy',3,z=4) }}{% call f('q') %}"
            "body{% endcall %}"
        ),
        ("{% set x %}a{{ messages|length }}b{% endset %}{{ x|upper }}{% filter upper %}abc{{ x }}{% endfilter %}"),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for k in messages[0] %}{{ k }}{% endfor %}"),
        (
            "{% for g in messages|groupby('role') %}{{ g.grouper }}:{{ g.list|length }}{% for m in g[1] %}"
            "{{ m.content }}{% endfor %}{% endfor %}"
        ),
        ("{% for row in range(7)|batch(3,'-') %}{{ row }}{% endfor %}{% for c in range(7)|slice(3) %}{{ c }}{% endfor %}"),
        (
            "{{ messages|selectattr('role','equalto','user')|map(attribute='content')|join('|') }}"
            "{{ messages|rejectattr('role','in',['user'])|list|length }}"
        ),
        (
            "{{ [1,[2,{'a':(1,2)}]] }}{{ (1,) }}{{ {} }}{{ {'a':1}.get('b','d') }}{{ {'a':1}|length }}"
            "{{ 'abc'[1:] ~ 'abc'[::-1] ~ 1 ~ none ~ [1] }}"
        ),
        (
            "{% for x in [1,[2,[3]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}"
            "@{{ loop.depth }}{% endif %}{% endfor %}"
        ),
        (
            "{% set j = joiner('|') %}{% for x in 'abc' %}{{ j() }}{{ x }}{{ loop.cycle('o','e') }}"
            "{{ loop.changed(x) }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}{% set c = cycler(1,2) %}"
            "{{ c.next() }}{{ c.next() }}{{ c.current }}"
        ),
        (
            "{{ 'a' in 'abc' }}{{ 1 < 2 < 3 }}{{ 'x' not in ['x'] }}{{ 'role' in messages[0] }}"
            "{{ messages[0].content is string }}{{ 3 is divisibleby(3) }}{{ x is undefined }}"
            "{{ messages[0] is mapping }}"
        ),
        (
            "{{ 'a,b'.split(',')|map('upper')|list }}{{ ' x '.strip()|trim }}{{ '%s-%05d'|format('a',7) }}"
            "{{ '%s' % 'q' }}{{ '{}{a}'.format(1,a=2) }}{{ 'abc'.replace('b','X') }}"
            "{{ 'aXa'|replace('a','b',1) }}"
        ),
        (
            "{{ [3,1,2]|sort }}{{ [3,1]|max }}{{ [1,2]|sum }}{{ messages|sum(attribute='n') if false }}"
            "{{ [1,1,2]|unique|list }}{{ 'b a'|title }}{{ 'x'|center(5) }}|{{ 'a\nb'|indent(2, true) }}"
            "{{ 2.567|round(1) }}{{ 7|round(-1) }}{{ 'abc'|reverse }}{{ [1,2]|last }}"
            "{{ ''|default('d', true) }}{{ 'abcdef'|truncate(3, true, '.', 0) }}"
        ),
        (
            "{% set ns = namespace(a=[], b='') %}{% for m in messages %}{% set ns.a = ns.a + [m.role] %}"
            "{% set ns.b = ns.b ~ m.content %}{% endfor %}{{ ns.a }}{{ ns.b }}"
        ),
        (
            "{{ '-' * 40 }}{{ [1] * 3 }}{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ -3 }}{{ 1 if messages else 2 }}"
            "{{ 'a' 'b' }}{{ messages[-1]['content'] }}{{ messages[0:1] }}"
        ),
        (
            "{%- for message in messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
            "{{- 'x' }}{%- endif %}{%- endfor %}{{ dict(a=1, **{'b':2}) }}{{ 'x'|e }}{{ '<'|escape }}"
            "{{ '<b>'|safe }}{{ messages|first|attr('keys') is callable }}{{ 'a b c'|wordcount }}"
            "{{ 'abc'|list }}{{ {'b':1,'a':2}|items|list }}{{ 10|filesizeformat }}{{ '5'|int + 1 }}"
            "{{ 'é'|urlencode }}"
        ),
    ],
)
def test_the_bounds_do_not_change_what_a_template_renders(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    messages = [{"role": role, "content": f"{role} <&> é"} for role in ("system", "user", "assistant", "user")]
    assert render(source, messages=messages) == plain.render(messages=messages)


_EQUAL_HASHES = [(2**61 - 1) * (number + 2) for number in range(300)]
_OF_TUPLES = "{% for n in numbers %}{% set all.of = all.of + [[(n, n), 0]] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ dict(pairs) | length }}",
        "{{ dict(pairs | list, a=1) | length }}",
        "{{ namespace(pairs) }}",
        "{{ numbers | unique | list | length }}",
        "{{ pairs | unique(attribute=0) | list | length }}",
        "{% set all = namespace(of=[]) %}" + _OF_TUPLES + "{{ dict(all.of) | length }}",
        "{{ {" + ", ".join(f"numbers[{index}]: 0" for index in range(100)) + "} | length }}",
        "{{ {" + ", ".join(f"{number}: 0" for number in _EQUAL_HASHES[:100]) + "} | length }}",
        "{{ {}.fromkeys(numbers) | length }}",
        "{% set d = dict([(0, 0)]) %}{{ d.keys() - numbers }}",
        "{% set d = dict([(0, 0)]) %}{{ d.items() - pairs }}",
        "{% set d = dict([(0, 0)]) %}{{ d.keys().isdisjoint(numbers) }}",
    ],
)
def test_values_with_equal_hashes_become_no_keys(source: str) -> None:
    pairs = [(number, 0) for number in _EQUAL_HASHES]
    with pytest.raises(InvalidRequest, match=r"keys that are not text|subtracts keys|it calls"):
        render(source, variables={"numbers": _EQUAL_HASHES, "pairs": pairs})


def test_a_few_of_the_keys_may_have_equal_hashes_and_all_may_be_text() -> None:
    assert render("{{ dict(a) | length }}", variables={"a": [[number, 0] for number in _EQUAL_HASHES[:8]]}) == "8"
    assert render("{{ dict(a) | length }}", variables={"a": [[str(number), 0] for number in range(2000)]}) == "2000"
    assert render("{{ a | unique | list | length }}", variables={"a": [0, 1, 2] * 1000}) == "3"
    assert render("{{ dict([('a', 1), 'b2'], c=3) }}{{ namespace({'a': 4}).a }}") == "{'a': 1, 'b': '2', 'c': 3}4"


def test_a_dict_of_many_numbers_is_rejected_when_its_template_is_read() -> None:
    with pytest.raises(EngineError, match="a dict has more than 256 keys that are not text"):
        ChatTemplate("{{ {" + ", ".join(f"{number}: 0" for number in range(257)) + "} }}")
    ChatTemplate("{{ {" + ", ".join(f"'{number}': 0" for number in range(257)) + "} }}")


@pytest.mark.parametrize("operation", ["d.get(x)", "d[x]", "range(100000).count('a')", "(5).to_bytes(100000, 'big')"])
def test_no_operation_counts_as_one_step_that_takes_long(operation: str) -> None:
    nested = "{% set x0 = (1, 2) %}" + "".join(f"{{% set x{n + 1} = (x{n}, x{n}) %}}" for n in range(12))
    source = nested + "{% set d = {} %}{% set x = x12 %}{% for i in range(900) %}{% set y = " + operation + " %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="stopped"):
        ChatTemplate(source, max_steps=20_000).render(HELLO)
