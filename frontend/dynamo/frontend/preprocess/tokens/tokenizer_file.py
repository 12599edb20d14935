"""What a `tokenizer.json` may ask of a frontend: it comes from a worker, which may run models of users.

The library does whatever the file says, for as long and in as much memory as that takes. So a file is read here first: how much
longer a text may become in it, how large it is, and whether its patterns take time in proportion to the text.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator
from functools import cached_property
from math import ceil, prod
from typing import Any

import msgspec

from dynamo.common.errors import EngineError

_MAX_BYTES = 64 << 20
_MAX_MEMBERS = 640_000
"""Members of objects, such as tokens: the interpreter's lock is held 2 µs and more for each. Vocabularies have up to 300,000."""
_MAX_LISTS = 1_500_000
"""Some files have a list for each token, or for each merge."""
_MAX_STEPS = 256
_MAX_GROWTH = 64
"""How many times longer a text may become before it is cut into tokens, or a token that is made text."""
_MAX_ADDED_CHARS = 1024
"""Characters or tokens that are put around a text, or in a token."""
_MAX_ADDED_TOKENS_CHARS = 1 << 20
_MAX_WORD_CHARS = 1000
"""WordPiece takes time in proportion to the square of a word."""

_UNIT = r"(?:\\[pP]\{\w+\}|\\[sSdDwWnrtNR]|\[(?:\\.|\[:\^?\w+:\]|(?!&&)[^\[\]\\])+\]|[^\\\[\](){}|.*+?^$])"
"""Matches one character, in a pattern."""
_BRANCH = (
    rf"(?:(?:{_UNIT}\??){{0,7}}{_UNIT}(?:[+*]|\{{\d{{1,2}}(?:,\d{{0,2}})?\}})?(?:{_UNIT}\*)?"
    r"|\(\?i:[\w'|]+\)|\\s\*\[(?:\\r\\n|\r\n)\]\+|\\s\+\(\?!\\S\))"
)
"""Nothing that must match follows what may match any number of characters; two that have such are safe before a branch `\\s+`."""
_LINEAR = re.compile(rf"{_BRANCH}(?:\|{_BRANCH})*")
_SOMETHING = re.compile(rf"{_UNIT}(?:\+|\{{[1-9]\d?(?:,\d{{0,2}})?\}})?")
"""One character or more of a kind."""
_SPACES = re.compile(r"\\s\*\[|\\s\+\(")
_MAX_PATTERN_CHARS = 1000
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(end: str, digits: str, more: str = "", first: str = "") -> str:
    """Return the pattern of o200k and those made after it: words of letters of both cases."""
    start = first + r"[^\r\n\p{L}\p{N}]?"
    upper, lower = _UPPER + more, _LOWER + more
    words = rf"{start}[{upper}]*[{lower}]+{end}|{start.removeprefix(first)}[{upper}]+[{lower}]*{end}"
    slash = "" if more else "/"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_FAMILIAR = frozenset(
    (
        _cased(_CONTRACTIONS, r"\p{N}{1,3}"),  # o200k
        _cased("", r"\p{N}"),  # tekken
        _cased(_CONTRACTIONS, r"\p{N}{1,3}", r"&&[^\p{Han}]", r"[\p{Han}]+|"),  # kimi
        r"\A | \z",  # of SentencePiece models, as workers write them
        " ?[^(\\s|[.,!?…。，、।۔،])]+",  # bloom
    )
)
"""Patterns of other kinds that are known to take time in proportion to the text."""


class _StepPattern(msgspec.Struct, rename={"text": "String", "regex": "Regex"}):
    text: str | None = None
    regex: str | None = None

    @property
    def least_chars(self) -> int:
        """How many characters it matches at least, as far as that is easily known."""
        if self.regex is None:
            return len(self.text or "")
        return int(_SOMETHING.fullmatch(self.regex) is not None)

    @property
    def is_linear(self) -> bool:
        """Whether any text is searched in proportion to its length."""
        regex = self.regex
        if regex is None or regex in _FAMILIAR:
            return True
        is_linear = len(regex) <= _MAX_PATTERN_CHARS and _LINEAR.fullmatch(regex) is not None
        return is_linear and (_SPACES.search(regex) is None or regex.endswith(r"|\s+"))


class _Special(msgspec.Struct):
    ids: tuple[int, ...] = ()


class TokenizerStep(msgspec.Struct):
    """One step of a tokenizer, or several. The library takes steps whose type it does not know by the fields that they have."""

    type: str
    pattern: _StepPattern | None = None
    content: str | None = None
    prepend: str = ""
    precompiled_charsmap: str | None = None
    trim_offsets: bool | None = None
    start: int = 0
    stop: int = 0
    single: tuple[dict[str, Any], ...] = ()
    special_tokens: dict[str, _Special] = {}
    normalizers: tuple[TokenizerStep, ...] = ()
    pretokenizers: tuple[TokenizerStep, ...] = ()
    processors: tuple[TokenizerStep, ...] = ()
    decoders: tuple[TokenizerStep, ...] = ()

    def flat(self) -> Iterator[TokenizerStep]:
        """Yield the steps that this one is made of, or itself."""
        inner = (*self.normalizers, *self.pretokenizers, *self.processors, *self.decoders)
        if self.type != "Sequence":
            yield self
        for step in inner:
            yield from step.flat()

    @property
    def growth(self) -> int:
        """How many times more characters a text may have."""
        growth = 1
        if self.pattern is not None and self.content is not None:
            replaced, size = self.pattern.least_chars, len(self.content)
            growth = max(1, ceil(size / replaced)) if replaced else 1 + size
        if self.precompiled_charsmap:
            growth *= _longest_replacement(self.precompiled_charsmap)
        if self.type == "ByteLevel" or self.trim_offsets is not None:
            growth *= 4  # a character stands for each byte
        return growth

    @property
    def copies(self) -> int:
        """How many times the text is in what is put around it."""
        return max(1, sum("Sequence" in piece for piece in self.single))

    @property
    def added(self) -> int:
        """How many characters or tokens are put around a text."""
        return len(self.prepend) + len(self.single) + sum(len(special.ids) for special in self.special_tokens.values())


class _AddedToken(msgspec.Struct):
    content: str


class _Model(msgspec.Struct):
    max_input_chars_per_word: int = 100


class TokenizerFile(msgspec.Struct, dict=True):
    """The parts of a `tokenizer.json` beside its vocabulary. Use `read_tokenizer_file`."""

    normalizer: TokenizerStep | None = None
    pre_tokenizer: TokenizerStep | None = None
    post_processor: TokenizerStep | None = None
    decoder: TokenizerStep | None = None
    added_tokens: tuple[_AddedToken, ...] = ()
    model: _Model | None = None

    @cached_property
    def decoders(self) -> tuple[TokenizerStep, ...]:
        """The steps by which tokens become text."""
        return _flat(self.decoder)

    @cached_property
    def is_linear(self) -> bool:
        """Whether the patterns by which it changes and cuts texts take time in proportion to these."""
        steps = (*_flat(self.normalizer), *_flat(self.pre_tokenizer))
        return all(step.pattern is None or step.pattern.is_linear for step in steps)

    def check(self) -> None:
        """Raise EngineError for what would take a frontend's time or memory."""
        before, around = (*_flat(self.normalizer), *_flat(self.pre_tokenizer)), _flat(self.post_processor)
        if len(before) + len(around) + len(self.decoders) > _MAX_STEPS:
            raise _refused(f"has more than {_MAX_STEPS} steps")
        growth = prod(step.growth for step in before) * prod(step.copies for step in around)
        if max(growth, prod(step.growth for step in self.decoders)) > _MAX_GROWTH:
            raise _refused(f"may make a text more than {_MAX_GROWTH} times longer")
        if sum(step.added for step in (*before, *around)) > _MAX_ADDED_CHARS:
            raise _refused(f"puts more than {_MAX_ADDED_CHARS} characters or tokens around a text")
        if sum(len(token.content) for token in self.added_tokens) > _MAX_ADDED_TOKENS_CHARS:
            raise _refused(f"has more than {_MAX_ADDED_TOKENS_CHARS} characters in added tokens")
        if self.model is not None and self.model.max_input_chars_per_word > _MAX_WORD_CHARS:
            raise _refused(f"has words of more than {_MAX_WORD_CHARS} characters")
        if not all(step.pattern is None or step.pattern.is_linear for step in self.decoders):
            raise _refused("has a pattern in its decoder that may take long")


_DECODER = msgspec.json.Decoder(TokenizerFile)


def read_tokenizer_file(data: bytes) -> TokenizerFile:
    """Return what a file says. Raises EngineError for one that the library must not read, ValueError for one that is none."""
    if len(data) > _MAX_BYTES:
        raise _refused(f"has {len(data)} bytes; at most {_MAX_BYTES} are read")
    if data.count(b":") > _MAX_MEMBERS or data.count(b"[") > _MAX_LISTS:
        raise _refused(f"has more than {_MAX_MEMBERS} tokens and settings, or {_MAX_LISTS} lists")
    file = _DECODER.decode(data)
    file.check()
    return file


def check_longest_token(chars: int) -> None:
    """Raise EngineError for a vocabulary whose longest token has so many characters, if a text of such would be too long."""
    if chars > _MAX_ADDED_CHARS:
        raise _refused(f"has a token of {chars} characters; at most {_MAX_ADDED_CHARS} are taken")


def failure_of(error: BaseException) -> Exception:
    """Return what a library written in Rust raised: EngineError for a panic, as at a text that a tokenizer is not made for.

    A panic is no Exception, so that it would pass all handlers of these. Raises `error` if it is none of the library's.
    """
    if isinstance(error, Exception):
        return error
    if type(error).__module__ != "pyo3_runtime":
        raise error
    return EngineError(f"the model's tokenizer failed: {error}")


def _flat(step: TokenizerStep | None) -> tuple[TokenizerStep, ...]:
    return () if step is None else tuple(step.flat())


def _longest_replacement(charsmap: str) -> int:
    """Return the characters of the longest text in a map of SentencePiece: the size of a trie, it, and texts that end with 0."""
    try:
        data = b64decode(charsmap)
    except Base64Error as error:
        raise _refused(f"has a `precompiled_charsmap` that cannot be read: {error}") from None
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *(len(text.decode(errors="replace")) for text in texts.split(b"\0")))


def _refused(why: str) -> EngineError:
    return EngineError(f"the model's tokenizer is not read: it {why}")
