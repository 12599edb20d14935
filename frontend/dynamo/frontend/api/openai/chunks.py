"""Write streamed responses as server-sent events.

The JSON around the text is encoded once per stream; a token costs encoding its text and joining three pieces of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from dynamo.common.generation import FinishReason
from dynamo.frontend.api.openai.custom_tools import CustomCalls
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


class Head(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The fields that all chunks of a response share."""

    id: str
    kind: str
    created: int
    model: str
    usage: bool
    """Whether the stream ends with usage, and has `"usage": null` in every chunk before."""

    @cached_property
    def start(self) -> bytes:
        """The chunk up to its choices."""
        fields = encode(
            {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "system_fingerprint": None}
        )
        return b"data: " + fields[:-1] + b',"choices":'

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What chunks and whole responses have besides text."""

    texts: TokenTexts | None = None
    """For log probabilities; None: there are none."""
    alternatives: int = 0
    """How many tokens are listed beside each."""
    prompt_ids: Sequence[Sequence[int]] | None = None
    """The tokens of each prompt. None: chunks have no token ids."""
    running_usage: Sequence[int] | None = None
    """The number of tokens of each prompt. None: only the last chunk has usage."""
    reasoning: bool = True
    echo: Sequence[str] = ()
    """Text in front of each choice."""
    has_functions: bool = False
    """Calls have the older form, `function_call`."""
    partial_calls: bool = False
    """Whole responses keep a call that was cut off."""
    custom_tools: frozenset[str] = frozenset()
    """Names of tools whose calls have a text, `input`, in place of arguments."""

    @property
    def is_plain(self) -> bool:
        return self.texts is None and self.prompt_ids is None and self.running_usage is None


NO_DETAILS = Details()


class _ChunkEnds:
    """Writes chunks after their choices: with the usage so far, if it is requested."""

    def __init__(self, head: Head, choices: int, prompt_tokens: Sequence[int] | None) -> None:
        self._end = head.end
        self._prompt_tokens = prompt_tokens
        self._per_prompt = choices // len(prompt_tokens) if prompt_tokens else 1
        self._output_tokens = [0] * choices

    def after(self, delta: TextDelta) -> bytes:
        """Count the tokens of `delta`, and return the end of its chunks."""
        if self._prompt_tokens is None:
            return self._end
        self._output_tokens[delta.index] += len(delta.tokens)
        return self.before(delta.index)

    def before(self, index: int) -> bytes:
        """Return the end of a chunk without tokens."""
        if self._prompt_tokens is None:
            return self._end
        prompt, output = self._prompt_tokens[index // self._per_prompt], self._output_tokens[index]
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return b',"usage":' + encode(usage) + _END


class ChatChunks:
    """Turns deltas of a chat completion into events."""

    def __init__(self, head: Head, choices: int, parsers: Sequence[OutputParser] = (), details: Details = NO_DETAILS) -> None:
        self._ends = _ChunkEnds(head, choices, details.running_usage)
        self._delta = [head.start + b'[{"index":%d,"delta":' % index for index in range(choices)]
        self._content = [delta + b'{"content":' for delta in self._delta]
        self._content_end = b'},"logprobs":null,"finish_reason":null}]' + head.end
        self._unstarted = set(range(choices))
        self._parsers = parsers
        self._details = details
        self._prompt_ids = None if details.prompt_ids is None else details.prompt_ids[0]
        """For the first chunk."""
        self._called: set[int] = set()
        self._custom = [CustomCalls(details.custom_tools) for _ in range(choices)] if details.custom_tools else []
        self._reasoning = [ReasoningTokenCounter() for _ in parsers]
        self._is_plain = details.is_plain
        self.parses = bool(parsers)
        """To add deltas takes as long as to parse them."""

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens; None if reasoning is not parsed."""
        return sum(reasoning.count for reasoning in self._reasoning) if self._reasoning else None

    def awaits_prompt(self) -> bool:
        """Return whether a choice has not begun."""
        return bool(self._unstarted)

    def add(self, deltas: Sequence[TextDelta], events: list[bytes]) -> None:
        for delta in deltas:
            index = delta.index
            if index in self._unstarted:
                self._unstarted.discard(index)
                self._begin(index, self._ends.before(index), events)
            text = delta.text
            if not self._is_plain or delta.finish_reason is not None:
                self._add_parsed(delta, self._ends.after(delta), events)
            elif text and self.parses:
                parts = self._parsers[index].feed(text)
                if parts and not parts[1:] and parts[0].__class__ is Content:  # no call for each delta
                    self._reasoning[index].add_content()
                    events += (self._content[index], encode(parts[0].text), self._content_end)
                else:
                    self._add_parts(delta, parts, self._ends.after(delta), events)
            elif text:
                events += (self._content[index], encode(text), self._content_end)

    def _begin(self, index: int, end: bytes, events: list[bytes]) -> None:
        rest = b',"logprobs":null,"finish_reason":null}]'
        prompt = b""
        if self._prompt_ids is not None:
            prompt = b',"prompt_token_ids":' + encode(list(self._prompt_ids))
            self._prompt_ids = None
        events.append(self._delta[index] + b'{"role":"assistant","content":""}' + rest + prompt + end)
        if self._details.echo:
            events.append(self._content[index] + encode(self._details.echo[0]) + b"}" + rest + end)

    def _add_parsed(self, delta: TextDelta, end: bytes, events: list[bytes]) -> None:
        parts: Sequence[Part] = [Content(delta.text)] if delta.text else []
        if self._parsers:
            parts = parse_delta(self._parsers[delta.index], delta)
        self._add_parts(delta, parts, end, events)

    def _add_parts(self, delta: TextDelta, parts: Sequence[Part], end: bytes, events: list[bytes]) -> None:
        index, details = delta.index, self._details
        if self._reasoning:
            self._reasoning[index].add(parts, len(delta.tokens))
        if not details.reasoning:
            parts = [part for part in parts if not isinstance(part, Reasoning)]
        logprobs, ids = b"null", b""
        if details.texts is not None and delta.logprobs:
            shown = chat_logprobs(delta.logprobs, details.texts, details.alternatives)
            logprobs = b'{"content":' + encode(shown) + b',"refusal":null}'
        if details.prompt_ids is not None and (tokens := token_ids(delta)):
            ids = b',"token_ids":' + encode(tokens)
        ends = delta.finish_reason is not None
        bodies = self._with_custom(index, parts, ends) if self._custom else [self._part(index, part) for part in parts]
        if not bodies and (ids or logprobs != b"null") and not ends:
            bodies = [b'{"content":""}']
        if ends and not (parts and isinstance(parts[-1], Content)):
            bodies.append(b"{}")
        for number, body in enumerate(bodies, 1):
            reason = self._ending(delta) if ends and number == len(bodies) else b"null"
            events.append(
                self._delta[index] + body + b',"logprobs":' + logprobs + b',"finish_reason":' + reason + ids + b"}]" + end
            )
            logprobs, ids = b"null", b""

    def _ending(self, delta: TextDelta) -> bytes:
        assert delta.finish_reason is not None
        called = delta.index in self._called
        reason = finish_reason(delta.finish_reason, called=called, has_functions=self._details.has_functions)
        return b'"' + reason.encode() + b'"' + stop_reason(delta)

    def _with_custom(self, index: int, parts: Sequence[Part], ends: bool) -> list[bytes]:
        """Return the bodies of parts where calls may be those of custom tools, whose text is known once it is complete."""
        bodies: list[bytes] = []
        calls = self._custom[index]
        for part in parts:
            if not isinstance(part, ToolCall) or not part.name:
                if not isinstance(part, ToolCall) or not calls.holds(part.index, part.arguments):
                    bodies.append(self._part(index, part))
                continue
            bodies += [encode({"tool_calls": [piece]}) for piece in calls.end()]
            if calls.starts(part.index, part.name, part.arguments):
                self._called.add(index)
                head = {"index": part.index, "id": new_tool_call_id(), "type": "custom"}
                bodies.append(encode({"tool_calls": [head | {"custom": {"name": part.name, "input": ""}}]}))
            else:
                bodies.append(self._part(index, part))
        if ends and (pieces := calls.end()):
            bodies.append(encode({"tool_calls": pieces}))
        return bodies

    def _part(self, index: int, part: Part) -> bytes:
        if isinstance(part, Content):
            return b'{"content":' + encode(part.text) + b"}"
        if isinstance(part, Reasoning):
            text = encode(part.text)
            return b'{"reasoning_content":' + text + b',"reasoning":' + text + b"}"
        self._called.add(index)
        if self._details.has_functions:
            return encode({"function_call": ({"name": part.name} if part.name else {}) | {"arguments": part.arguments}})
        return encode({"tool_calls": [tool_call_piece(part)]})


def stop_reason(delta: TextDelta) -> bytes:
    return b"" if delta.stop_reason is None else b',"stop_reason":' + encode(delta.stop_reason)


def token_ids(delta: TextDelta) -> list[int]:
    """Return the tokens of a delta, with the one that ended its choice."""
    return [*delta.tokens] if delta.stop_token is None else [*delta.tokens, delta.stop_token]


def tool_call_piece(part: ToolCall) -> dict[str, Any]:
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {
        "index": part.index,
        "id": new_tool_call_id(),
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }


def finish_reason(reason: FinishReason, *, called: bool, has_functions: bool = False) -> str:
    if not called or reason is not FinishReason.STOP:
        return reason.value
    return "function_call" if has_functions else "tool_calls"


class _PromptIds:
    """The tokens of a prompt, which are encoded once for all its choices."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    @cached_property
    def encoded(self) -> bytes:
        return encode(list(self._ids))


class CompletionChunks:
    """Turns deltas of a plain completion into events."""

    def __init__(self, head: Head, choices: int, details: Details = NO_DETAILS) -> None:
        self._text = [head.start + b'[{"index":%d,"text":' % index for index in range(choices)]
        self._ends = _ChunkEnds(head, choices, details.running_usage)
        self._text_end = b',"logprobs":null,"finish_reason":null}]' + head.end
        texts, alternatives = details.texts, details.alternatives
        self._writers = [] if texts is None else [CompletionLogprobWriter(texts, alternatives) for _ in range(choices)]
        self._echo = dict(enumerate(details.echo))
        self._prompt_ids: dict[int, _PromptIds] = {}
        """For the first chunk of each choice."""
        if details.prompt_ids is not None:
            per_prompt = choices // len(details.prompt_ids)
            prompts = [_PromptIds(ids) for ids in details.prompt_ids]
            self._prompt_ids = {index: prompts[index // per_prompt] for index in range(choices)}
        self._has_ids = details.prompt_ids is not None
        self._is_plain = details.is_plain

    def awaits_prompt(self) -> bool:
        """Return whether a choice has not begun, of those that begin with their prompt, as text or as tokens."""
        return bool(self._echo or self._prompt_ids)

    def add(self, deltas: Sequence[TextDelta], events: list[bytes]) -> None:
        for delta in deltas:
            if self._is_plain and delta.finish_reason is None and not self._echo:
                events += (self._text[delta.index], encode(delta.text), self._text_end)
            else:
                self._add_detailed(delta, events)

    def _add_detailed(self, delta: TextDelta, events: list[bytes]) -> None:
        index, end = delta.index, self._ends.after(delta)
        if self._echo and (prompt := self._echo.pop(index, None)) is not None:
            events += (self._text[index], encode(prompt), b',"logprobs":null,"finish_reason":null')
            events += (self._ids(index, []), b"}]", end)
        events += (
            self._text[index],
            encode(delta.text),
            b',"logprobs":',
            encode(self._writers[index].add(delta.logprobs or [])) if self._writers else b"null",
            b',"finish_reason":',
            encode(delta.finish_reason),
            stop_reason(delta),
            self._ids(index, token_ids(delta)),
            b"}]",
            end,
        )

    def _ids(self, index: int, tokens: Sequence[int]) -> bytes:
        if not self._has_ids:
            return b""
        prompt = self._prompt_ids.pop(index, None)
        first = b"" if prompt is None else b',"prompt_token_ids":' + prompt.encoded
        return first + b',"token_ids":' + encode(tokens)
