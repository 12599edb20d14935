"""Finds markers in a text that comes in pieces."""

from __future__ import annotations

import re


class Markers:
    """Some markers, none of which is the beginning of another, unless a longer one is meant wherever it fits."""

    def __init__(self, *markers: str) -> None:
        self._markers = sorted(markers, key=len, reverse=True)
        self.pattern = "|".join(map(re.escape, self._markers))
        """A regular expression that matches them."""
        self._pattern = re.compile(self.pattern)
        self._beginnings = frozenset(marker[:length] for marker in markers for length in range(1, len(marker)))
        self._longest = len(self._markers[0]) - 1

    def search(self, text: str) -> re.Match[str] | None:
        """The first marker."""
        return self._pattern.search(text)

    def certain(self, text: str) -> int:
        """How many characters of a text without a marker will not become part of one, whatever follows."""
        for at in range(max(0, len(text) - self._longest), len(text)):
            if text[at:] in self._beginnings:
                return at
        return len(text)

    def remove(self, text: str) -> str:
        """`text` without markers."""
        return self._pattern.sub("", text)
