"""The channels of gpt-oss: `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`.

analysis is reasoning, final is content, and commentary is content before a call or, with `to=functions.f` in its head, the
arguments of a call. Calls of the model's own tools, such as its browser, are reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS, Reader

_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_MARKERS = Markers(*_ENDS, _MESSAGE, "<|constrain|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
# A model chooses this text. What is repeated in it is never given back: in turns that would be the fourth power of its length.
_HEAD_WORDS = re.compile(r"(?:assistant)?\s*+(?:to=\S*+)?\s*+[a-z]{0,10}\s*+(?:to=\S*+)?\s*+(?:json)?")


class Harmony(Reader):
    """Text without channels is content. Calls are parsed only if the request has tools."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(self._between)
        self._has_tools = bool(tools)
        self._head = ""
        self._give: Callable[[str], None] = self._parts.content
        self._is_call = False

    def _between(self) -> bool:
        """Read text outside of messages."""
        marker = self._until(_MARKERS, self._parts.content)
        if marker in (_START, _CHANNEL):
            self._begin_head(marker)
        return bool(marker)

    def _begin_head(self, marker: str) -> None:
        self._head = marker
        self._step = self._in_head

    def _hold(self, text: str) -> None:
        self._head += text

    def _in_head(self) -> bool:
        """Read up to the message: role, recipient, channel and content type."""
        marker = self._until(_MARKERS, self._hold)
        if marker in (_CHANNEL, "<|constrain|>") and len(self._head) <= MAX_NAME_CHARS:
            self._head += marker
        elif marker == _MESSAGE and len(self._head) <= MAX_NAME_CHARS:
            self._begin_message()
        elif marker or len(self._head) > MAX_NAME_CHARS:
            self._no_head(marker)
        elif self._ended:
            self._no_head("")
            return False
        return bool(marker) or self._step != self._in_head

    def _no_head(self, marker: str) -> None:
        """End a head without a message: words that do not belong to a head are content."""
        words = _MARKERS.remove(self._head)
        if not _HEAD_WORDS.fullmatch(words):
            self._parts.content(words)
        self._text = marker + self._text
        self._step = self._between

    def _begin_message(self) -> None:
        recipient = _RECIPIENT.search(self._head)
        channel = _CHANNEL_NAME.search(self._head)
        to = recipient.group(1) if recipient else ""
        name = to.removeprefix("functions.")
        self._is_call = bool(name) and self._has_tools and to != name
        if self._is_call:
            self._parts.call(name)
            self._give = self._parts.arguments
        elif (channel and channel.group(1) == "analysis") or (to and to == name and to not in ("assistant", "user", "all")):
            self._give = self._parts.reasoning
        else:
            self._give = self._parts.content
        self._step = self._in_message

    def _in_message(self) -> bool:
        marker = self._until(_MARKERS, self._give)
        if marker in _ENDS:
            if self._is_call:
                self._parts.call_complete()
            self._text = marker + self._text if marker in (_START, _CHANNEL) else self._text
            self._step = self._between
        return bool(marker)
