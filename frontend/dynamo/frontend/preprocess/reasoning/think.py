"""`<think>…</think>` and other tags around reasoning: DeepSeek R1, Qwen 3 and many others."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.frontend.preprocess.parsers import ParserKind, ReasoningTags, Tools
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import Reader, Step

_MAX_NEWLINES = 2
"""White space next to a tag that belongs to it, as chat templates write it."""
_MAX_LAYOUT_CHARS = 64
"""Most white space before the opening tag."""


@dataclass(frozen=True, slots=True)
class Tags:
    """What is around reasoning."""

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    ends: tuple[str, ...] = ()
    """What ends reasoning that was not closed; these stay in the text."""
    layout: str = "\n"
    """White space that belongs to a tag."""


class _TagMarkers:
    """The tags of a format, ready to be searched for."""

    def __init__(self, tags: Tags) -> None:
        self.tags = tags
        self.closing = Markers(*tags.closes, *tags.ends)


def reasoning_in(tags: Tags, *, is_open: bool = False, needs_special_tokens: bool = False) -> ParserKind:
    """Return the kind of parsers for a format; `is_open`: the model always reasons, even if there is no opening tag."""
    markers = _TagMarkers(tags)

    def make(tools: Tools, prompt_end: str = "") -> Think:
        before = prompt_end.rstrip()
        return Think(markers, is_open=before.endswith(tags.opens) or (is_open and not before.endswith(tags.closes)))

    marks = ReasoningTags(tags.opens, (*tags.closes, *tags.ends), is_open)
    return ParserKind(make, needs_special_tokens, make_after_prompt=make, tags=marks)


class Think(Reader):
    """The text up to the closing tag, or all of it without one, is reasoning. Later tags are content."""

    def __init__(self, markers: _TagMarkers, *, is_open: bool) -> None:
        """`is_open`: the prompt contains the opening tag, or the model always reasons; an opening tag in the text is dropped."""
        super().__init__(self._beginning)
        self._markers = markers
        self._tags = markers.tags
        self._is_open = is_open
        self._newlines = 0

    def _beginning(self) -> bool:
        start = self._text.lstrip()
        is_near = len(self._text) - len(start) <= _MAX_LAYOUT_CHARS
        if is_near and not self._ended and any(len(start) < len(tag) and tag.startswith(start) for tag in self._tags.opens):
            return False
        opening = next((tag for tag in self._tags.opens if start.startswith(tag)), "") if is_near else ""
        if opening:
            self._text = start[len(opening) :]
            self._is_open = True
        if self._is_open:
            self._begin(self._reasoning)
        else:
            self._step = self._unopened
        return True

    def _begin(self, step: Step) -> None:
        self._newlines = _MAX_NEWLINES
        self._step = step

    def _skip_newlines(self) -> None:
        while self._newlines and self._text:
            if self._text[0] not in self._tags.layout:
                self._newlines = 0
                return
            self._text = self._text[1:]
            self._newlines -= 1

    def _reasoning(self) -> bool:
        self._skip_newlines()
        markers, layout = self._markers.closing, self._tags.layout
        closing = markers.search(self._text)
        certain = closing.start() if closing else len(self._text) if self._ended else markers.certain(self._text)
        end = certain
        while (closing or not self._ended) and end and certain - end < _MAX_NEWLINES and self._text[end - 1] in layout:
            end -= 1
        self._parts.reasoning(self._text[:end])
        if closing is None:
            self._text = self._text[end:]
            return False
        self._text = self._text[closing.start() if closing.group() in self._tags.ends else closing.end() :]
        self._begin(self._after_reasoning)
        return True

    def _after_reasoning(self) -> bool:
        self._skip_newlines()
        text, self._text = self._text, ""
        self._parts.content(text)
        return False

    def _unopened(self) -> bool:
        """Content without reasoning; a closing tag alone is dropped."""
        marker = self._until(self._markers.closing, self._parts.content)
        if marker in self._tags.ends:
            self._parts.content(marker)
        elif marker:
            self._begin(self._after_reasoning)
        return bool(marker)


class PrependedThink(Reader):
    """Reasoning is content with its tags. The opening one is in the prompt, so it is put in front of the text."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(self._beginning)

    def _beginning(self) -> bool:
        if self._text or self._ended:
            self._parts.content("<think>")
            self._step = self._rest
        return self._step == self._rest

    def _rest(self) -> bool:
        text, self._text = self._text, ""
        self._parts.content(text)
        return False
