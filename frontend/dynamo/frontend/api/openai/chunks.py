"""Write streamed responses as server-sent events.

The JSON around the text is encoded once per stream; a token costs encoding its text and joining three pieces of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo.common.generation import FinishReason
from dynamo.frontend.api.openai.logprobs import CompletionLogprobWriter, chat_logprobs
from dynamo.frontend.api.openai.response_objects import Usage
from dynamo.frontend.api.text.reasoning_tokens import ReasoningTokenCounter
from dynamo.frontend.api.text.rules import new_tool_call_id, parse_delta
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.preprocess.parsers import Content, OutputParser, Part, Reasoning, ToolCall
from dynamo.frontend.preprocess.text import TextDelta

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_END = b"}\n\n"
_END_WITH_USAGE = b',"usage":null}\n\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields that all chunks of a response share."""

    id: str
    kind: str
    created: int
    model: str
    usage: bool
    """Whether the stream ends with usage, and has `"usage": null` in every chunk before."""
    _start: bytes = field(init=False)

    def __post_init__(self) -> None:
        fields = encode(
            {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "system_fingerprint": None}
        )
        object.__setattr__(self, "_start", b"data: " + fields[:-1] + b',"choices":')

    @property
    def start(self) -> bytes:
        """The chunk up to its choices."""
        return self._start

    @property
    def end(self) -> bytes:
        """The chunk after its choices."""
        return _END_WITH_USAGE if self.usage else _END

    def last(self, usage: Usage | None, nvext: dict[str, Any] | None) -> bytes:
        """Return what follows the last choice: usage and `nvext`, if requested, and the end of the stream."""
        if usage is None and nvext is None:
            return DONE
        extra = b"" if nvext is None else b',"nvext":' + encode(nvext)
        return self.start + b'[],"usage":' + encode(usage) + extra + _END + DONE


class ChatChunks:
    """Turns deltas of a chat completion into events."""

    def __init__(
        self,
        head: Head,
        choices: int,
        parsers: Sequence[OutputParser] = (),
        logprobs: TokenTexts | None = None,
        top_logprobs: int = 0,
    ) -> None:
        self._end = head.end
        self._delta = [head.start + b'[{"index":%d,"delta":' % index for index in range(choices)]
        self._content = [delta + b'{"content":' for delta in self._delta]
        self._content_end = b'},"logprobs":null,"finish_reason":null}]' + head.end
        self._unstarted = set(range(choices))
        self._parsers = parsers
        self._texts = logprobs
        self._top = top_logprobs
        self._called: set[int] = set()
        self._reasoning = [ReasoningTokenCounter() for _ in parsers]
        self._is_plain = not parsers and logprobs is None

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens; None if reasoning is not parsed."""
        return sum(reasoning.count for reasoning in self._reasoning) if self._reasoning else None

    def add(self, delta: TextDelta, events: list[bytes]) -> None:
        index = delta.index
        if index in self._unstarted:
            self._unstarted.discard(index)
            events.append(
                self._delta[index] + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' + self._end
            )
        if not self._is_plain:
            self._add_parsed(delta, events)
        elif delta.text:
            events += (self._content[index], encode(delta.text), self._content_end)
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, called=index in self._called)
            events.append(self._delta[index] + b'{},"logprobs":null,"finish_reason":"' + reason.encode() + b'"}]' + self._end)

    def _add_parsed(self, delta: TextDelta, events: list[bytes]) -> None:
        index = delta.index
        parts = parse_delta(self._parsers[index], delta) if self._parsers else [Content(delta.text)] if delta.text else []
        if self._reasoning:
            self._reasoning[index].add(parts, len(delta.tokens))
        logprobs = b"null"
        if self._texts is not None and delta.logprobs:
            logprobs = b'{"content":' + encode(chat_logprobs(delta.logprobs, self._texts, self._top)) + b',"refusal":null}'
        if not parts and logprobs != b"null":
            parts = [Content("")]
        for part in parts:
            body = self._part(index, part)
            events.append(self._delta[index] + body + b',"logprobs":' + logprobs + b',"finish_reason":null}]' + self._end)
            logprobs = b"null"

    def _part(self, index: int, part: Part) -> bytes:
        if isinstance(part, Content):
            return b'{"content":' + encode(part.text) + b"}"
        if isinstance(part, Reasoning):
            return b'{"reasoning_content":' + encode(part.text) + b"}"
        self._called.add(index)
        return encode({"tool_calls": [tool_call_piece(part)]})


def tool_call_piece(part: ToolCall) -> dict[str, Any]:
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {
        "index": part.index,
        "id": new_tool_call_id(),
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }


def finish_reason(reason: FinishReason, *, called: bool) -> str:
    return "tool_calls" if called and reason is FinishReason.STOP else reason.value


class CompletionChunks:
    """Turns deltas of a plain completion into events."""

    def __init__(
        self, head: Head, choices: int, logprobs: TokenTexts | None = None, top_logprobs: int = 0, echo: Sequence[str] = ()
    ) -> None:
        """`echo` is the text in front of each choice: its prompt."""
        self._text = [head.start + b'[{"index":%d,"text":' % index for index in range(choices)]
        self._end = head.end
        self._text_end = b',"logprobs":null,"finish_reason":null}]' + head.end
        self._writers = [] if logprobs is None else [CompletionLogprobWriter(logprobs, top_logprobs) for _ in range(choices)]
        self._echo = dict(enumerate(echo))

    def add(self, delta: TextDelta, events: list[bytes]) -> None:
        index = delta.index
        if self._echo and (prompt := self._echo.pop(index, None)) is not None:
            events += (self._text[index], encode(prompt), self._text_end)
        if delta.finish_reason is None and not self._writers:
            events += (self._text[index], encode(delta.text), self._text_end)
            return
        logprobs = encode(self._writers[index].add(delta.logprobs)) if self._writers and delta.logprobs else b"null"
        reason = encode(delta.finish_reason)
        events += (
            self._text[index],
            encode(delta.text),
            b',"logprobs":',
            logprobs,
            b',"finish_reason":',
            reason,
            b"}]",
            self._end,
        )
