"""Feed texts to output parsers in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from dynamo.frontend.preprocess.parsers import Content, OutputParser, Part, Reasoning, ToolCall

ParsedPart = tuple[str, str] | tuple[str, str, str]


def content(text: str) -> ParsedPart:
    return ("content", text)


def reasoning(text: str) -> ParsedPart:
    return ("reasoning", text)


def call(name: str, arguments: str) -> ParsedPart:
    return ("call", name, arguments)


def read(parser: OutputParser, pieces: Iterable[str]) -> list[ParsedPart]:
    """Return all parts, adjacent ones joined. Asserts that calls come one after the other."""
    parts: list[ParsedPart] = []
    calls = 0
    for part in _parts(parser, pieces):
        last = parts[-1] if parts else ("", "")
        match part:
            case ToolCall(index, "", arguments):
                assert index == calls - 1 and len(last) == 3, "a piece of a call that is over"
                parts[-1] = call(last[1], last[2] + arguments)
            case ToolCall(index, name, arguments):
                assert index == calls
                calls += 1
                parts.append(call(name, arguments))
            case Content(text) | Reasoning(text):
                assert text
                kind = "content" if isinstance(part, Content) else "reasoning"
                if last[0] == kind:
                    parts[-1] = (kind, last[1] + text)
                else:
                    parts.append((kind, text))
    return parts


def _parts(parser: OutputParser, pieces: Iterable[str]) -> Iterator[Part]:
    for piece in pieces:
        yield from parser.feed(piece)
    yield from parser.finish()


def read_however_cut(make: Callable[[], OutputParser], text: str) -> list[ParsedPart]:
    """Return the parts of `text`; assert that they are the same cut at each position and character by character."""
    whole = read(make(), [text])
    assert read(make(), text) == whole
    for position in range(1, len(text)):
        assert read(make(), [text[:position], text[position:]]) == whole, (text[:position], text[position:])
    return whole
