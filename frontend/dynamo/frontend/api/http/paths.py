"""Which resource of a server a request's path names.

    /v2/models/{model:path}/versions/{version}/infer

A template consists of fixed words and parameters. `{name}` stands for one word; `{name:path}`, of which a template may have one,
stands for one or more. A path is split at `/` while it is still percent-encoded, so `%2F` belongs to a word and separates none.

Templates whose last word is fixed match before those that end in a parameter; otherwise the template that was added first does.
There is no normalization: a doubled or trailing slash, a dot segment or another case makes another path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar
from urllib.parse import unquote_to_bytes

from dynamo.common.errors import InvalidRequest

T = TypeVar("T")

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})


class Template:
    """One pattern of paths."""

    def __init__(self, text: str) -> None:
        words = text.split("/")[1:]
        several = next((index for index, word in enumerate(words) if word.endswith(":path}")), None)
        self._several = None if several is None else words[several][1 : -len(":path}")]
        self._head = tuple(words if several is None else words[:several])
        self._tail = tuple(() if several is None else words[several + 1 :])

    @property
    def first_word(self) -> str:
        """The first word, which is fixed."""
        return self._head[0]

    @property
    def last_word(self) -> str | None:
        """The last word if it is fixed."""
        if self._several is not None and not self._tail:
            return None
        last = (self._head + self._tail)[-1]
        return None if last.startswith("{") else last

    @property
    def is_fixed(self) -> bool:
        return self._several is None and not any(word.startswith("{") for word in self._head)

    @property
    def fixed_words(self) -> tuple[str, ...]:
        """The words before the first parameter."""
        count = next((index for index, word in enumerate(self._head) if word.startswith("{")), len(self._head))
        return self._head[:count]

    def match(self, words: Sequence[str]) -> dict[str, str] | None:
        """Return the parameters of a path that consists of `words`, or None if it does not match."""
        head, tail = self._head, self._tail
        tail_start = len(words) - len(tail)
        if tail_start < len(head) + (self._several is not None) or (self._several is None and tail_start > len(head)):
            return None
        parameters = {}
        for patterns, start in ((head, 0), (tail, tail_start)):
            for index, pattern in enumerate(patterns, start):
                if pattern.startswith("{"):
                    parameters[pattern[1:-1]] = words[index]
                elif pattern != words[index]:
                    return None
        if self._several is not None:
            parameters[self._several] = "/".join(words[len(head) : tail_start])
        return parameters


class PathTable(Generic[T]):
    """Values by path template."""

    def __init__(self) -> None:
        self._fixed: dict[bytes, T] = {}
        self._by_ends: dict[tuple[str, str | None], list[tuple[Template, T]]] = {}

    def add(self, path: str, value: T) -> None:
        template = Template(path)
        self._by_ends.setdefault((template.first_word, template.last_word), []).append((template, value))
        if template.is_fixed:
            self._fixed[path.encode()] = value

    def find(self, raw_path: bytes) -> tuple[T, Mapping[str, str]] | None:
        """Return what `raw_path`, which is still percent-encoded, names, with the values of the template's parameters.

        Raises InvalidRequest for a path that no resource can have.
        """
        value = self._fixed.get(raw_path)
        if value is not None:
            return value, _NO_PARAMETERS
        words = split_path(raw_path)
        if not words or "" in words:
            return None
        for last in (words[-1], None):
            for template, value in self._by_ends.get((words[0], last), ()):
                parameters = template.match(words)
                if parameters is not None:
                    return value, parameters
        return None


def split_path(raw_path: bytes) -> list[str]:
    """Return the decoded words of a path. Raises InvalidRequest if it is not UTF-8 or contains control characters."""
    try:
        words = [unquote_to_bytes(word).decode() for word in raw_path.split(b"/")[1:]]
    except UnicodeDecodeError:
        raise InvalidRequest("the path must be UTF-8") from None
    if any(map(_CONTROL.search, words)):
        raise InvalidRequest("the path must not contain control characters")
    return words
