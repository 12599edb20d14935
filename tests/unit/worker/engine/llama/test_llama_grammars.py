"""Grammars in requests to llama.cpp: what they become, and that none of them can stop or end the worker."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo.common.errors import InvalidRequest

llguidance = pytest.importorskip("llguidance")
pytest.importorskip("xllamacpp")

from dynamo.worker.engine.llama.request import to_grammar  # noqa: E402


def accepts(grammar: str, text: str) -> bool:
    """Whether `text` as a whole fits `grammar`, by a vocabulary of single bytes."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
        tokens: list[bytes]

        def __call__(self, text: str | bytes) -> list[int]:
            return list(text.encode() if isinstance(text, str) else text)

    Bytes.tokens = tokens
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("guided", "good", "bad"),
    [
        (
            {"choice": ["yes", "no", 'say "no"', "a\nb\\c", "ü🦙"]},
            ["yes", "no", 'say "no"', "a\nb\\c", "ü🦙"],
            ["maybe", "", "yesno"],
        ),
        ({"grammar": 'root ::= "ab" [0-9]+ | other\nother ::= "x"?'}, ["ab12", "x", ""], ["ab", "xx"]),
        ({"regex": "[0-9]{2}/[a-z]+"}, ["12/ab"], ["1/ab", "12-ab"]),
        ({"json_object": True}, ['{"a":1}', "{}"], ["[1]", "1"]),
        ({"json_schema": {"type": "array", "items": {"type": "integer"}}}, ["[1,2]", "[]"], ['["a"]', "{}"]),
        ({"json_schema": '{"type": "boolean"}'}, ["true"], ["1"]),
    ],
)
def test_a_grammar_accepts_exactly_what_it_describes(guided: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = to_grammar(guided)
    assert grammar.startswith("%llguidance")  # llama.cpp's own reader and matcher must not see it
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def chain(rule: str, last: str, length: int) -> str:
    return (
        "\n".join(rule.format(this=f"r{index}", next=f"r{index + 1}") for index in range(length))
        + "\n"
        + last.format(this=f"r{length}")
    )


def schema_chain(length: int) -> dict[str, Any]:
    links = {f"d{index}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{index + 1}"}}} for index in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "integer"}}}


@pytest.mark.parametrize(
    "guided",
    [
        # llguidance ends the process for these four
        pytest.param({"grammar": "root ::= r0\n" + chain("{this} ::= {next}", '{this} ::= "a"', 5000)}, marks=pytest.mark.slow),
        {"grammar": "%llguidance {}\nstart: r0\n" + chain("{this}: {next}", '{this}: "a"', 5000)},
        {"json_schema": schema_chain(2000)},
        {"grammar": '%llguidance {}\nstart: %json {"$\\u0072ef": "#"}'},
        {"grammar": ""},
        {"grammar": "root ::= ((("},
        {"grammar": "root ::= " + "(" * 50_000},  # llama.cpp ends the process for this one
        {"grammar": "root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000},
        {"grammar": 'other ::= "a"'},
        {"grammar": "root ::= missing"},
        {"grammar": "x" * (1 << 20)},
        {"choice": []},
        {"choice": [""]},
        {"choice": ["a", 1]},
        {"regex": "a("},
        {"regex": "(?=a)b"},
        {"json_schema": {"type": "nosuch"}},
        {"json_schema": "{"},
        {"json_schema": "[" * 100_000},
        {"json_object": "yes"},
        {"regex": "a", "choice": ["b"]},
        {},
    ],
    ids=lambda guided: str(guided)[:40],
)
def test_grammars_that_mean_nothing_are_refused(guided: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        to_grammar(guided)


def test_an_ambiguous_grammar_takes_no_exponential_time() -> None:
    grammar = to_grammar({"grammar": "root ::= " + '"a"? ' * 500})  # llama.cpp's matcher takes longer than any caller waits
    assert accepts(grammar, "a" * 300)
    assert not accepts(grammar, "a" * 501)
