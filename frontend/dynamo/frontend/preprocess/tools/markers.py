"""Find markers in text that is streamed in pieces."""

from __future__ import annotations

import re


class Markers:
    """A set of markers. If one is a prefix of another, the longer one wins where both match."""

    def __init__(self, *markers: str) -> None:
        self._markers = sorted(markers, key=len, reverse=True)
        self.pattern = "|".join(map(re.escape, self._markers)) or "(?!)"
        """A regular expression that matches any of them."""
        self._pattern = re.compile(self.pattern)
        beginnings = {marker[:length] for marker in markers for length in range(1, len(marker))}
        self._beginning = re.compile(f"(?:{'|'.join(map(re.escape, beginnings)) or '(?!)'})\\Z")
        self._longest = max(map(len, markers), default=1) - 1

    def search(self, text: str) -> re.Match[str] | None:
        """Return the match of the first marker."""
        return self._pattern.search(text)

    def certain(self, text: str) -> int:
        """Return how many characters of a text without markers cannot become part of one, whatever follows."""
        beginning = self._beginning.search(text, max(0, len(text) - self._longest))
        return len(text) if beginning is None else beginning.start()

    def remove(self, text: str) -> str:
        """Return `text` without markers."""
        return self._pattern.sub("", text)
