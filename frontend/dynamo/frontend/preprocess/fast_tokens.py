"""The same token ids as `tokenizers` gives, many times sooner, from the library fastokens (extra `fast`).

`tokenizers` stays the reference. fastokens knows BPE, with most of what can stand around it, and keeps words it has seen. It is
used for a model only if it gives the same ids for a collection of awkward texts, and a text that it cannot encode, for example
because the vocabulary lacks a byte, is the reference's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

try:
    import fastokens
except ImportError:  # an extra
    fastokens = None

_log = logging.getLogger(__name__)

Encode: TypeAlias = Callable[[str, bool], list[int]]
"""Token ids of a text, with or without the tokens that begin and end every text. Raises an exception of the library's kind."""

_SAMPLES = (
    "",
    " ",
    "The quick brown fox doesn't jump; he's LAZY, they'LL say, and I'd've known.",
    "def area(r):\n\treturn 3.14159 * r**2  # m²\n\n\n    if x != y: pass\r\n\r\n",
    '{"id": 1234567890, "path": "C:\\\\tmp", "url": "https://example.org/?q=a%20b&c=d#e"}',
    "  leading,   inner and trailing   ",
    " \t \n \u00a0\u2003\u3000\u200b\u0085\u2028 mixed\u00a0spaces",
    "1 12 123 1234 12345 3.50 1,000,000 ½ ² Ⅷ ٣ ४२",
    "naïve café e\u0301te\u0301 A\u030angstro\u0308m ﬁ ǅ İi ſs ẞ",
    "日本語のテキスト、中文文本。한국어 ไทย हिन्दी עברית العربية",
    "🦙 👩\u200d👩\u200d👧 🏳️\u200d🌈 🇫🇷 \U0001f9ff\U00010348",
    "x" * 300 + " " * 70 + "ab" * 150 + "\n" * 40 + "!?" * 60,
    "CamelCaseWords snake_case_words kebab-case-words SHOUTING_WORDS McDonald's",
    "\x00\x01\x07\x1b[0m\x7f\x80\ufeff\ufffd\ue000",
)
"""What tokenizers are known to disagree about: spaces, digits, contractions, letter cases, marks, scripts, long runs."""


def fast_encode(data: bytes, reference: Encode, added_tokens: Sequence[str]) -> Encode | None:
    """`reference`, sooner; None if fastokens is not installed or cannot stand in for it. `data` is a `tokenizer.json`."""
    if fastokens is None:
        return None
    try:
        tokenizer: Any = fastokens.Tokenizer.from_json_str(data.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except Exception as error:  # plain exceptions, for every kind of tokenizer that it does not know
        _log.info("tokens are made by tokenizers, since fastokens does not take this model's: %s", error)
        return None

    def encode(text: str, special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens).ids
        except Exception:  # whatever is wrong with the text, the reference says it, or can do it
            return reference(text, special_tokens)
        return ids

    for sample in _samples(added_tokens):
        for special_tokens in (False, True):
            if encode(sample, special_tokens) != reference(sample, special_tokens):
                _log.warning("tokens are made by tokenizers, since fastokens gives others for %r", sample[:80])
                return None
    return encode


def _samples(added_tokens: Sequence[str]) -> Iterator[str]:
    yield from _SAMPLES
    for token in added_tokens[:64]:
        yield f"a {token} b{token}{token}c {token[:-1]} {token.upper()}\n{token}"
