"""What the text endpoints share: who they ask, and how an answer gets out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Summary
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import EventStream
from dynamo.frontend.api.openai.chunks import Head
from dynamo.frontend.api.openai.requests import ChatRequest, CompletionRequest, NvExt, Sampled
from dynamo.frontend.api.openai.response_objects import Usage
from dynamo.frontend.api.openai.to_text import RequestTemplate
from dynamo.frontend.api.text.generations import Source
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.parsers import OutputParsers
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.frontend.serving.data_plane import DataPlane, Generation
from dynamo.frontend.serving.text_models import TextModel

R = TypeVar("R", ChatRequest, CompletionRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What endpoints work with."""

    readiness: Readiness
    limits: TextLimits = field(default_factory=TextLimits)
    template: RequestTemplate = field(default_factory=RequestTemplate)
    parsers: OutputParsers = field(default_factory=lambda: OutputParsers({}, {}))
    clock: Callable[[], float] = time.time
    """Unix time, seconds."""

    @property
    def plane(self) -> DataPlane:
        """Raises Unavailable while the process starts."""
        return self.readiness.plane

    def completed(self, request: R) -> R:
        """`request` with what the request template says. Raises InvalidRequest if there is no model in either."""
        template = self.template
        changes: dict[str, Any] = {}
        if not request.model:
            if not template.model:
                raise InvalidRequest("the field 'model' is missing", param="model")
            changes["model"] = template.model
        if request.temperature is None and template.temperature is not None:
            changes["temperature"] = template.temperature
        said = request.max_tokens is not None or (isinstance(request, ChatRequest) and request.max_completion_tokens is not None)
        if not said and template.max_completion_tokens is not None:
            changes["max_tokens"] = template.max_completion_tokens
        return msgspec.structs.replace(request, **changes) if changes else request


class Chunks(Protocol):
    """Turns deltas into events."""

    def add(self, delta: TextDelta, events: list[bytes]) -> None: ...


async def write_stream(stream: EventStream, source: Source, chunks: Chunks) -> None:
    """Every delta as an event of its own, everything that is there in one write."""
    add = chunks.add
    while deltas := await source.read():
        events: list[bytes] = []
        for delta in deltas:
            add(delta, events)
        if events:
            await stream.write(b"".join(events))


def wants_usage(request: Sampled) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def last_chunk(head: Head, summary: Summary, nvext: dict[str, Any] | None, reasoning_tokens: int | None = None) -> bytes:
    return head.last(Usage.of(summary, reasoning_tokens) if head.usage else None, nvext)


# NVIDIA's extension


class Extras:
    """What `nvext` asks to be told besides the answer."""

    def __init__(self, request: Sampled, started: float, clock: Callable[[], float]) -> None:
        nvext = request.nvext or NvExt()
        self.annotations = nvext.annotations or []
        self._fields = nvext.extra_fields or []
        self._started = started
        self._clock = clock
        self.tokens: list[int] | None = [] if "completion_token_ids" in self._fields else None

    def __bool__(self) -> bool:
        return bool(self.annotations or self._fields)

    def watched(self, chunks: Chunks) -> Chunks:
        return chunks if self.tokens is None else _CountingTokens(chunks, self.tokens)

    async def before(self, generation: Generation, text: TextModel, request: TextRequest, request_id: str) -> list[bytes]:
        """The annotations that are known once the prompt is."""
        found: list[bytes] = []
        for name in self.annotations:
            if name == "token_ids":
                found.append(annotation(name, list(generation.prompt_ids)))
            elif name == "formatted_prompt":
                found.append(annotation(name, formatted_prompt(text, request)))
            elif name == "request_id":
                found.append(annotation(name, request_id))
        return found

    def after(self, source: Source) -> list[bytes]:
        """Those that are known at the end."""
        found: list[bytes] = []
        if "worker_id" in self.annotations and source.decision is not None:
            found.append(annotation("worker_id", f"{source.decision.instance.id:x}"))
        if "llm_metrics" in self.annotations:
            summary = source.summary
            found.append(
                annotation(
                    "llm_metrics",
                    {
                        "input_tokens": summary.prompt_tokens,
                        "output_tokens": summary.output_tokens,
                        "cached_tokens": summary.cached_tokens,
                        "queue_ms": summary.queue_ms,
                        "prefill_ms": summary.prefill_ms,
                    },
                )
            )
        return found

    def fields(self, source: Source) -> dict[str, Any] | None:
        """`nvext` of the answer; None if nothing was asked for."""
        found: dict[str, Any] = {}
        if "worker_id" in self._fields and source.decision is not None:
            found["worker_id"] = {"decode_worker_id": f"{source.decision.instance.id:x}"}
        if "timing" in self._fields:
            found["timing"] = {
                "queue_ms": source.summary.queue_ms,
                "prefill_ms": source.summary.prefill_ms,
                "total_ms": round((self._clock() - self._started) * 1000, 3),
            }
        if self.tokens is not None:
            found["completion_token_ids"] = self.tokens
        return found or None


def annotation(name: str, value: object) -> bytes:
    """An event without data, which clients that do not know it leave alone; what it says is a comment."""
    return b"event: " + name.encode() + b"\n: " + msgspec.json.encode(value) + b"\n\n"


def formatted_prompt(text: TextModel, request: TextRequest) -> str:
    if request.messages is not None:
        return text.render(request)
    prompt = request.prompt
    return prompt if isinstance(prompt, str) else text.tokenizer.decode(list(prompt or []), skip_special_tokens=False)


class _CountingTokens:
    def __init__(self, chunks: Chunks, tokens: list[int]) -> None:
        self._chunks = chunks
        self._tokens = tokens

    def add(self, delta: TextDelta, events: list[bytes]) -> None:
        self._tokens += delta.tokens
        self._chunks.add(delta, events)
