"""Fast tokenization with the library fastokens (extra `fast`), checked against `tokenizers`.

`tokenizers` is the reference. fastokens supports BPE with most pre-tokenizers and caches words. It is used for a model only if
it gives the same ids for a set of difficult texts; a text that it cannot encode, for example because the vocabulary lacks a
byte, is encoded by the reference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from dynamo.common.generation import pack_tokens
from dynamo.frontend.preprocess.tokens.tokenizer_file import failure_of

try:
    import fastokens
except ImportError:  # an extra
    fastokens = None

_log = logging.getLogger(__name__)


class Encoding(Protocol):
    """A text in tokens, as the libraries return it. Only `ids` makes a list of them."""

    @property
    def ids(self) -> list[int]: ...

    def __len__(self) -> int: ...


Encode: TypeAlias = Callable[[str, bool], Encoding]
"""Encodes a text, with or without the tokens that begin and end every text. Raises an exception of the library's kind."""

Pack: TypeAlias = Callable[[str, bool], bytes | None]
"""Encodes a text into packed token ids; None if the library cannot, and `Encode` says why."""

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
"""Texts on which tokenizers tend to differ: spaces, digits, contractions, letter cases, marks, scripts, long runs."""


class FastEncoders(NamedTuple):
    """Two ways to encode a text with fastokens."""

    encode: Encode
    pack: Pack
    """Makes no Python object for each token, of which those of a long text take as long to make and free as all the rest."""


def fast_encoders(data: bytes, reference: Encode, added_tokens: Sequence[str]) -> FastEncoders | None:
    """Return faster equivalents of `reference`; None if fastokens is not installed or gives other ids.

    `data` is the contents of a `tokenizer.json`.
    """
    if fastokens is None:
        return None
    try:
        tokenizer: Any = fastokens.Tokenizer.from_json_str(data.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except BaseException as error:  # plain exceptions, for every kind of tokenizer that it does not support
        _log.info("using tokenizers, since fastokens does not support this model's tokenizer: %s", failure_of(error))
        return None

    def encode(text: str, special_tokens: bool) -> Encoding:
        try:
            encoding: Encoding = tokenizer.encode(text, add_special_tokens=special_tokens)
        except BaseException as error:  # the reference encodes the text, or says what is wrong with it
            failure_of(error)
            return reference(text, special_tokens)
        return encoding

    def pack(text: str, special_tokens: bool) -> bytes | None:
        try:
            packed: bytes = tokenizer.encode_batch_flat([text], add_special_tokens=special_tokens)[0]
        except BaseException as error:
            _log.debug("a text that fastokens cannot encode is left to the reference: %s", type(failure_of(error)).__name__)
            return None
        return packed

    for sample in _samples(added_tokens):
        for special_tokens in (False, True):
            ids = reference(sample, special_tokens).ids
            if encode(sample, special_tokens).ids != ids or pack(sample, special_tokens) not in (None, pack_tokens(ids)):
                _log.warning("using tokenizers, since fastokens gives other token ids for %r", sample[:80])
                return None
    return FastEncoders(encode, pack)


def _samples(added_tokens: Sequence[str]) -> Iterator[str]:
    yield from _SAMPLES
    for token in added_tokens[:64]:
        yield f"a {token} b{token}{token}c {token[:-1]} {token.upper()}\n{token}"
