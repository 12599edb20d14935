"""Feeds texts to parsers in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dynamo.frontend.preprocess.parsers import Content, OutputParser, Part, Reasoning, ToolCall

Said = tuple[str, str] | tuple[str, str, str]


def content(text: str) -> Said:
    return ("content", text)


def reasoning(text: str) -> Said:
    return ("reasoning", text)


def call(name: str, arguments: str) -> Said:
    return ("call", name, arguments)


def read(parser: OutputParser, pieces: Iterable[str]) -> list[Said]:
    """All parts, with those that belong together joined. Asserts that calls come one after the other."""
    said: list[Said] = []
    calls = 0
    for part in _parts(parser, pieces):
        last = said[-1] if said else ("", "")
        match part:
            case ToolCall(index, "", arguments):
                assert index == calls - 1 and len(last) == 3, "a piece of a call that is over"
                said[-1] = call(last[1], last[2] + arguments)
            case ToolCall(index, name, arguments):
                assert index == calls
                calls += 1
                said.append(call(name, arguments))
            case Content(text) | Reasoning(text):
                assert text
                kind = "content" if isinstance(part, Content) else "reasoning"
                if last[0] == kind:
                    said[-1] = (kind, last[1] + text)
                else:
                    said.append((kind, text))
    return said


def _parts(parser: OutputParser, pieces: Iterable[str]) -> Iterator[Part]:
    for piece in pieces:
        yield from parser.feed(piece)
    yield from parser.finish()


def read_however_cut(make: Callable[[], OutputParser], text: str) -> list[Said]:
    """What `text` says; asserts that it says the same cut at each position and character by character."""
    whole = read(make(), [text])
    assert read(make(), text) == whole
    for at in range(1, len(text)):
        assert read(make(), [text[:at], text[at:]]) == whole, (text[:at], text[at:])
    return whole
