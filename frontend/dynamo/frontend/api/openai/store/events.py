"""Write responses of the Responses API: output items that open, grow and close, as numbered events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from dynamo.common.generation import FinishReason, Summary
from dynamo.frontend.api.openai.custom_tools import custom_input
from dynamo.frontend.api.openai.response_objects import TokenLogprob
from dynamo.frontend.api.openai.store.items import ItemIds
from dynamo.frontend.api.text.reasoning_tokens import ReasoningTokenCounter
from dynamo.frontend.api.text.rules import new_tool_call_id
from dynamo.frontend.preprocess.parsers import Content, Part, Reasoning, ToolCall

encode = msgspec.json.Encoder().encode

_MARK = b"\0"
"""Stands in no JSON: around the number of a list of log probabilities, in an event that has it."""
_NONE = Raw(b"[]")
_FEW_BYTES = 256 * 1024
"""Bytes of events that are joined to one piece, at most."""
_BLOCK_BYTES = 64 * 1024
"""Bytes of log probabilities that are joined as they come, so that none are left to join at the end."""


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool that is no plain function, but is one to the model."""

    name: str
    namespace: str | None
    is_custom: bool
    """Whether its calls have a text, `input`, and no arguments."""

    def item(self) -> dict[str, Any]:
        """Return the fields of its calls that say which tool is called, and with what."""
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": self.name, **namespace, **({"input": ""} if self.is_custom else {"arguments": ""})}


NO_TOOLS: Mapping[str, CalledTool] = MappingProxyType({})


class ResponseObject(Struct, frozen=True, kw_only=True):
    """The response object at any time. It repeats fields of the request, as the protocol requires."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    model: str
    output: Sequence[dict[str, Any]] = ()
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    conversation: dict[str, str] | None = None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: Sequence[dict[str, Any]] = ()
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, str] = {}


def usage_of(summary: Summary, reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": {"cached_tokens": summary.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": summary.output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": summary.prompt_tokens + summary.output_tokens,
    }


class ResponseWriter:
    """Turns parts into output items and, for streams, into events, which `take` returns."""

    def __init__(
        self,
        response: ResponseObject,
        tools: Mapping[str, CalledTool] = NO_TOOLS,
        *,
        stream: bool,
        is_created: bool = False,
    ) -> None:
        """`tools` has those that are no plain functions, by the names that the model calls.

        `is_created`: the stream has its first event, `response.created`, already.
        """
        self._tools = tools
        self.reasoning = ReasoningTokenCounter()
        self._response = response
        self._ids = ItemIds(response.id, output=True)
        self._stream = stream
        self._sequence = 0
        self._events: list[bytes] = []
        self._output: list[dict[str, Any]] = []
        self._shown: list[dict[str, Any]] = []
        """The output as events have it: marks in the place of log probabilities."""
        self._lists: list[list[bytes]] = []
        """Log probabilities of messages that are closed, in pieces. Four events have each of them, which are no copies of it."""
        self._item: dict[str, Any] | None = None
        """The item that is open."""
        self._pieces: list[str] = []
        self._logprobs: list[bytes] = []
        """Log probabilities of the open message, encoded, without brackets, which are in no block yet."""
        self._logprobs_bytes = 0
        self._blocks: list[bytes] = []
        """Log probabilities that came before these. Each block begins with a bracket or a comma."""
        self._delta = b""
        """The beginning of a delta event, up to its text."""
        self._call = -1
        if is_created:
            self._sequence = 1
        else:
            self._emit("response.created", response=response)
        self._emit("response.in_progress", response=response)

    def take(self) -> list[bytes]:
        """Return the events since the last call: in one piece, or in several if they are long."""
        events, self._events = self._events, []
        return events if sum(map(len, events)) > _FEW_BYTES else [b"".join(events)]

    def add(self, part: Part, logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Write a part; `logprobs` are those of the tokens in a part of the message."""
        if isinstance(part, ToolCall):
            if part.index != self._call:
                self._call = part.index
                self._open_call(part.name)
            piece = part.arguments
        else:
            kind = "message" if isinstance(part, Content) else "reasoning"
            if self._item is None or self._item["type"] != kind:
                self._open_text(kind, part)
            piece = part.text
        if piece:
            self._pieces.append(piece)
            encoded = b"[]"
            if logprobs:
                encoded = encode(logprobs)
                self._logprobs.append(encoded[1:-1])
                self._logprobs_bytes += len(encoded)
                if self._logprobs_bytes >= _BLOCK_BYTES:
                    self._join_logprobs()
            if self._stream and self._delta:
                shown = b',"logprobs":' + encoded if isinstance(part, Content) else b""
                self._events.append(self._delta + encode(piece) + shown + b',"sequence_number":%d}\n\n' % self._sequence)
                self._sequence += 1

    def finish(self, reason: FinishReason, summary: Summary, now: float) -> ResponseObject:
        """Close the open item and return the whole response."""
        if self._item is None and not self._output:
            self._open_text("message", Content(""))
        is_cut = reason in (FinishReason.LENGTH, FinishReason.CONTENT_FILTER)
        self._close("incomplete" if is_cut else "completed")
        why = "max_output_tokens" if reason is FinishReason.LENGTH else "content_filter"
        response = msgspec.structs.replace(
            self._response,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(now),
            incomplete_details={"reason": why} if is_cut else None,
            output=self._output,
            usage=usage_of(summary, self.reasoning.count),
        )
        return response

    def encoded(self, response: ResponseObject) -> list[bytes]:
        """Return a whole response, which `finish` returned, in pieces: long lists are not copied."""
        return self._filled(encode(msgspec.structs.replace(response, output=self._shown)))

    def end(self, response: ResponseObject) -> None:
        """End with a whole response, which `finish` returned."""
        self._emit(f"response.{response.status}", response=msgspec.structs.replace(response, output=self._shown))

    def fail(self, code: str, message: str) -> None:
        """End the response with an error."""
        output = [*self._shown, {**self._item, "status": "incomplete"}] if self._item is not None else self._shown
        response = msgspec.structs.replace(
            self._response, status="failed", error={"code": code, "message": message}, output=output
        )
        self._emit("response.failed", response=response)

    def _open_text(self, kind: str, part: Content | Reasoning) -> None:
        self._close("completed")
        is_message = isinstance(part, Content)
        item: dict[str, Any] = {"id": self._ids.new(kind), "type": kind, "status": "in_progress"}
        item |= {"role": "assistant", "content": []} if is_message else {"summary": [], "content": []}
        self._begin(item, "response.output_text.delta" if is_message else "response.reasoning_text.delta", content_index=0)
        self._emit(
            "response.content_part.added",
            item_id=item["id"],
            output_index=len(self._output),
            content_index=0,
            part=_part(kind, "", _NONE),
        )

    def _open_call(self, name: str) -> None:
        self._close("completed")
        tool = self._tools.get(name) or CalledTool(name, None, False)
        kind = "custom_tool_call" if tool.is_custom else "function_call"
        head = {"id": self._ids.new(kind), "type": kind, "status": "in_progress", "call_id": new_tool_call_id()}
        self._begin(head | tool.item(), "response.function_call_arguments.delta")
        if tool.is_custom:
            self._delta = b""  # its text is known once the arguments are complete

    def _begin(self, item: dict[str, Any], delta: str, **place: int) -> None:
        self._item = item
        self._pieces = []
        self._logprobs, self._logprobs_bytes, self._blocks = [], 0, []
        self._emit("response.output_item.added", output_index=len(self._output), item=item)
        fields = {"type": delta, "item_id": item["id"], "output_index": len(self._output), **place}
        self._delta = b"event: " + delta.encode() + b"\ndata: " + encode(fields)[:-1] + b',"delta":'

    def _close(self, status: str) -> None:
        item = self._item
        if item is None:
            return
        text = "".join(self._pieces)
        place = {"item_id": item["id"], "output_index": len(self._output)}
        done = {**item, "status": status}
        shown = done
        if item["type"] == "function_call":
            self._emit("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
            done["arguments"] = text
        elif item["type"] == "custom_tool_call":
            done["input"] = text = custom_input(text)
            self._emit("response.custom_tool_call_input.delta", **place, delta=text)
            self._emit("response.custom_tool_call_input.done", **place, input=text)
        else:
            logprobs, mark = self._closed_logprobs()
            part = _part(item["type"], text, mark)
            if item["type"] == "message":
                self._emit("response.output_text.done", **place, content_index=0, text=text, logprobs=mark)
            else:
                self._emit("response.reasoning_text.done", **place, content_index=0, text=text)
            self._emit("response.content_part.done", **place, content_index=0, part=part)
            shown = {**done, "content": [part]}
            done["content"] = [_part(item["type"], text, logprobs)]
        self._emit("response.output_item.done", output_index=len(self._output), item=shown)
        self._output.append(done)
        self._shown.append(shown)
        self._item = None

    def _join_logprobs(self) -> None:
        if self._logprobs:
            self._blocks.append((b"," if self._blocks else b"[") + b",".join(self._logprobs))
            self._logprobs, self._logprobs_bytes = [], 0

    def _closed_logprobs(self) -> tuple[list[Raw], Raw]:
        """Return the log probabilities of the open message, several in each item, and what stands for them in events."""
        self._join_logprobs()
        if not self._blocks:
            return [], _NONE
        self._lists.append(self._blocks)
        return [Raw(memoryview(block)[1:]) for block in self._blocks], Raw(_MARK + b"%d" % (len(self._lists) - 1) + _MARK)

    def _emit(self, kind: str, **fields: object) -> None:
        if not self._stream:
            return
        encoded = event(kind, self._sequence, **fields)
        self._sequence += 1
        self._events += self._filled(encoded)

    def _filled(self, encoded: bytes) -> list[bytes]:
        """Return the pieces of what has marks in the place of log probabilities."""
        if not self._lists:
            return [encoded]
        before, *others = encoded.split(_MARK)
        pieces = [before]
        for number, after in zip(others[::2], others[1::2], strict=True):
            pieces += self._lists[int(number)]
            pieces.append(b"]" + after)
        return pieces


def event(kind: str, number: int, **fields: object) -> bytes:
    """Return one event, whose number in its stream is `number`."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, "sequence_number": number, **fields}) + b"\n\n"


def _part(kind: str, text: str, logprobs: Raw | list[Raw]) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "reasoning_text", "text": text}
