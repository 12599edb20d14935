"""Calls written as a name and JSON arguments between markers, most of which are special tokens."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS, Reader


@dataclass(frozen=True, slots=True)
class MarkedFormat:
    """The markers of one format."""

    call: str
    """Before the name."""
    separator: str
    """Between name and arguments."""
    markers: Markers
    """All of them."""


class MarkedCalls(Reader):
    """Parses calls whose arguments go on until the next marker."""

    def __init__(self, form: MarkedFormat) -> None:
        super().__init__(self._content)
        self._form = form
        self._held = ""

    def _hold(self, text: str) -> None:
        self._held += text

    def _content(self) -> bool:
        marker = self._until(self._form.markers, self._parts.content)
        if marker == self._form.call:
            self._held = ""
            self._step = self._head
        return bool(marker)

    def _head(self) -> bool:
        """Read up to the separator."""
        marker = self._until(self._form.markers, self._hold)
        if not marker and not self._ended and len(self._held) <= MAX_NAME_CHARS:
            return False
        head = self._held.strip()
        if marker == self._form.separator and head and len(self._held) <= MAX_NAME_CHARS:
            self._begin_call(head)
        else:
            self._parts.content(self._held)
            self._text = marker + self._text
            self._step = self._content
        return True

    def _begin_call(self, head: str) -> None:
        """Start the call that `head`, the text before the separator, names."""
        self._parts.call(head)
        self._step = self._arguments

    def _arguments(self) -> bool:
        return self._arguments_until(self._form.markers)

    def _arguments_until(self, markers: Markers) -> bool:
        marker = self._until(markers, self._parts.arguments)
        if marker:
            self._parts.call_complete()
            self._text = marker.lstrip("\n`") + self._text
            self._step = self._content
        return bool(marker)
