"""Calls written as JSON objects, alone or in a list, between markers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.json_call import JsonCallReader, ReadStatus
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.names import tool_names
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS, Reader


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The markers of one format."""

    markers: Markers
    """All of them. Those that do not open calls are dropped from the text."""
    opens: frozenset[str]
    """Markers that open calls. One that ends with a bracket has opened a list too."""
    in_text: frozenset[str] = frozenset()
    """Markers that are also ordinary text: unless a call of an existing tool follows, they stay."""

    @classmethod
    def of(cls, *opens: str, closes: tuple[str, ...] = (), in_text: tuple[str, ...] = ()) -> JsonFormat:
        return cls(Markers(*opens, *closes, *in_text), frozenset((*opens, *in_text)), frozenset(in_text))


def json_calls(*opens: str, closes: tuple[str, ...], in_text: tuple[str, ...] = ()) -> Callable[[Tools], JsonCalls]:
    """Return a function that makes parsers for a format."""
    form = JsonFormat.of(*opens, closes=closes, in_text=in_text)
    return lambda tools: JsonCalls(form, tool_names(tools).__contains__ if in_text else bool)


class JsonCalls(Reader):
    """Parses calls after an opening marker: an object, several objects, or a list of objects."""

    def __init__(self, form: JsonFormat, accepts: Callable[[str], bool] = bool) -> None:
        """`accepts` returns whether a tool has that name; it is asked only where a marker may be ordinary text."""
        super().__init__(self._content)
        self._form = form
        self._accepts = accepts
        self._call = self._reader(accepts)
        self._marker = ""
        """The marker before the calls, if it may be ordinary text."""
        self._before = ""
        """Text since the marker: white space and a bracket."""
        self._is_certain = True
        self._in_list = False

    def _reader(self, accepts: Callable[[str], bool]) -> JsonCallReader:
        return JsonCallReader(self._parts, self._form.markers, accepts)

    def _content(self) -> bool:
        marker = self._until(self._form.markers, self._parts.content)
        if marker in self._form.opens:
            self._open(marker)
        return bool(marker)

    def _open(self, marker: str) -> None:
        self._is_certain = marker not in self._form.in_text
        self._marker, self._before = "" if self._is_certain else marker, ""
        self._in_list = marker.endswith("[")
        self._step = self._first

    def _skip_space(self) -> bool:
        """Move white space to the text before the call; return whether anything follows, or the text ended."""
        stripped = self._text.lstrip()
        self._before += self._text[: len(self._text) - len(stripped)]
        self._text = stripped
        return bool(stripped) or (self._ended and bool(self._marker + self._before)) or len(self._before) > MAX_NAME_CHARS

    def _first(self) -> bool:
        """Decide whether calls follow the marker."""
        if not self._skip_space():
            return False
        if self._text.startswith("["):
            return self._open_list()
        if self._text.startswith("{"):
            self._call = self._reader(bool if self._is_certain else self._accepts)
            self._step = self._object
        elif self._in_list and self._text.startswith("]"):
            self._text = self._text[1:]
            self._marker = self._before = ""
            self._step = self._content
        else:
            self._no_call()
        return True

    def _open_list(self) -> bool:
        if self._in_list:
            self._no_call()
        else:
            self._in_list = True
            self._before += "["
            self._text = self._text[1:]
        return True

    def _no_call(self) -> None:
        self._parts.content(self._marker)
        self._text = self._before + self._text
        self._marker = self._before = ""
        self._step = self._content

    def _object(self) -> bool:
        text, self._text = self._text, ""
        status, self._text = self._call.read(text, ended=self._ended)
        if status is ReadStatus.MORE:
            return False
        if status is ReadStatus.CALL:
            self._marker = self._before = ""
            self._step = self._next
        else:
            self._no_call()
        return True

    def _next(self) -> bool:
        """Read between calls, and at their end."""
        if not self._strip():
            return False
        if self._text[0] == "{":
            self._call = self._reader(bool if self._is_certain else self._accepts)
            self._step = self._object
        elif self._text[0] == "," and self._in_list:
            self._text = self._text[1:]
        else:
            if self._in_list:
                self._text = self._text.removeprefix("]")
            self._step = self._content
        return True
