"""What the OpenAI endpoints share: the data plane, limits, streaming, and NVIDIA's extension `nvext`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

import msgspec

from dynamo.common.errors import InvalidRequest, Unsupported
from dynamo.common.generation import Summary
from dynamo.common.process.background import awaited
from dynamo.common.process.steps import Steps
from dynamo.common.process.work import Work
from dynamo.frontend.api.http.event_stream import EventStream
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.openai.chunks import Head
from dynamo.frontend.api.openai.requests import ChatRequest, CompletionRequest, NvExt, TextGenerationRequest
from dynamo.frontend.api.openai.response_objects import Usage
from dynamo.frontend.api.openai.store.background import BackgroundResponses
from dynamo.frontend.api.openai.store.stored import StoredResponses
from dynamo.frontend.api.openai.to_text import RequestTemplate
from dynamo.frontend.api.text.generations import TextSource
from dynamo.frontend.api.text.model_names import name_or_only_model
from dynamo.frontend.api.text.rules import one_by_one
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.parsers import OutputParsers
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane, Generation
from dynamo.frontend.serving.text.text_models import TextModel

R = TypeVar("R", bound=ChatRequest | CompletionRequest)

_NO_EXTENSION = NvExt()
_ELEMENTS_PER_STEP = 16_384
"""Characters or token ids of a prompt that are encoded before other requests have their turn."""
_BRIEF_S = 0.0005
"""Deltas that come together are parsed for so long before other requests have their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The dependencies of an endpoint."""

    plane: DataPlane
    limits: TextLimits = field(default_factory=TextLimits)
    template: RequestTemplate = field(default_factory=RequestTemplate)
    parsers: OutputParsers = field(default_factory=lambda: OutputParsers({}, {}))
    offload: Offload = field(default_factory=Offload)
    """For large requests."""
    background: BackgroundResponses | None = None
    """None: responses are not stored."""
    trusts_templates: bool = False
    """Whether requests may bring a chat template."""
    trusts_kv_transfers: bool = False
    """Whether requests may say what the engine's connector for KV caches does."""
    tokens_as_ids: bool = False
    """Log probabilities show the ids of tokens, unless a request says otherwise."""
    clock: Callable[[], float] = time.time
    """Unix time, seconds."""

    @property
    def stored(self) -> StoredResponses | None:
        return None if self.background is None else self.background.stored

    def required_store(self, of: str = "responses") -> StoredResponses:
        """Return what is stored. Raises Unsupported if nothing is; `of`: what the request is about, for its words."""
        if self.background is None:
            raise Unsupported(f"this server does not store {of}")
        return self.background.stored

    def completed(self, request: R, account: Account) -> R:
        """Return `request` with its model named, and with the defaults of the operator. Raises InvalidRequest."""
        template = self.template
        changes: dict[str, Any] = {}
        if not request.model:
            changes["model"] = name_or_only_model(self.plane, account, template.model)
        if request.temperature is None and template.temperature is not None:
            changes["temperature"] = template.temperature
        has_max_tokens = request.max_tokens is not None or (
            isinstance(request, ChatRequest) and request.max_completion_tokens is not None
        )
        if self.tokens_as_ids and request.return_tokens_as_token_ids is None:
            changes["return_tokens_as_token_ids"] = True
        if not has_max_tokens and template.max_completion_tokens is not None:
            changes["max_tokens"] = template.max_completion_tokens
        return msgspec.structs.replace(request, **changes) if changes else request

    def check_template(self, template: str | None) -> None:
        """Raises InvalidRequest for a request with a chat template if the operator does not allow it."""
        if template is not None and not self.trusts_templates:
            raise InvalidRequest(
                "requests may not bring a chat template: the server runs without --trust-request-chat-template",
                param="chat_template",
            )


class Chunks(Protocol):
    """Turns deltas into server-sent events."""

    def add(self, deltas: Sequence[TextDelta], events: list[bytes]) -> None: ...


async def write_stream(stream: EventStream, source: TextSource, chunks: Chunks, steps: Steps | None = None) -> None:
    """Write each delta as its own event, and all that are ready in one write.

    In a task of its own: a token wakes that one, and not each of the coroutines that wait for the end of the stream. `steps`
    is for many deltas, whose parsing may take long; None: they are not parsed.
    """
    await awaited(_write_deltas(stream, source, chunks, steps))


async def _write_deltas(stream: EventStream, source: TextSource, chunks: Chunks, steps: Steps | None) -> None:
    add = chunks.add
    while deltas := await source.read():
        events: list[bytes] = []
        if steps is None or not deltas[1:]:  # no call for each token
            add(deltas, events)
        elif rest := _add_briefly(chunks, deltas, events):
            await asyncio.sleep(0)
            await steps.run(one_by_one(partial(_add_one, chunks, events), rest))
        if events:
            await stream.write(b"".join(events))


def _add_briefly(chunks: Chunks, deltas: Sequence[TextDelta], events: list[bytes]) -> Sequence[TextDelta]:
    """Add deltas while that takes no longer than for most streams, and return those that are left."""
    until = perf_counter() + _BRIEF_S
    for count, delta in enumerate(deltas, 1):
        chunks.add((delta,), events)
        if perf_counter() > until:
            return deltas[count:]
    return ()


def _add_one(chunks: Chunks, events: list[bytes], delta: TextDelta) -> None:
    chunks.add([delta], events)


async def write_prompts(stream: EventStream, source: TextSource, chunks: Chunks, awaits_prompt: Callable[[], bool]) -> None:
    """Write deltas one by one until each choice has begun, with a prompt that may be long."""
    while awaits_prompt() and (deltas := await source.read()):
        for delta in deltas:
            events: list[bytes] = []
            _add_one(chunks, events, delta)
            await stream.write(b"".join(events))
            await asyncio.sleep(0)  # a client that reads fast lets no write wait


def wants_usage(request: TextGenerationRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def wants_running_usage(request: TextGenerationRequest) -> bool:
    return wants_usage(request) and request.stream_options is not None and bool(request.stream_options.continuous_usage_stats)


def last_chunk(head: Head, summary: Summary, nvext: dict[str, Any] | None, reasoning_tokens: int | None = None) -> bytes:
    return head.last(Usage.of(summary, reasoning_tokens) if head.usage else None, nvext)


# NVIDIA's extension


class Extras:
    """The annotations and extra fields that a request's `nvext` selects."""

    def __init__(self, request: TextGenerationRequest, started: float, clock: Callable[[], float]) -> None:
        nvext = request.nvext or _NO_EXTENSION
        self.annotations = list(dict.fromkeys(nvext.annotations or ()))
        """Each once: the prompt may be long."""
        self._fields = nvext.extra_fields or []
        self._started = started
        self._clock = clock
        self.tokens: list[int] | None = [] if "completion_token_ids" in self._fields else None

    def __bool__(self) -> bool:
        return bool(self.annotations or self._fields)

    def collecting(self, chunks: Chunks) -> Chunks:
        """Return `chunks`, or a wrapper that collects the completion's token ids, if they are requested."""
        return chunks if self.tokens is None else _TokenCollector(chunks, self.tokens)

    async def prompt_annotations(
        self, exchange: Exchange, generation: Generation, text: TextModel, request: TextRequest
    ) -> list[bytes]:
        """Return the annotations about the prompt, as pieces of events, whose bytes `exchange` holds. Raises Overloaded."""
        pieces: list[bytes] = []
        for name in self.annotations:
            if name == "token_ids":
                pieces += await exchange.in_steps(_long_annotation(name, generation.prompt_ids))
            elif name == "formatted_prompt":
                pieces += await exchange.in_steps(_long_annotation(name, await formatted_prompt(text, request)))
            elif name == "request_id":
                pieces.append(annotation(name, exchange.request_id))
        return pieces

    def final_annotations(self, source: TextSource) -> list[bytes]:
        """Return the annotations about the whole response, as events."""
        events: list[bytes] = []
        if "worker_id" in self.annotations and source.decision is not None:
            events.append(annotation("worker_id", f"{source.decision.instance.id:x}"))
        if "llm_metrics" in self.annotations:
            summary = source.summary
            events.append(
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
        return events

    def fields(self, source: TextSource) -> dict[str, Any] | None:
        """Return the response's `nvext`; None if no field is selected."""
        fields: dict[str, Any] = {}
        if "worker_id" in self._fields and source.decision is not None and source.prefill_instance is not None:
            decode, prefill = source.decision.instance.id, source.prefill_instance
            fields["worker_id"] = {"prefill_worker_id": f"{prefill:x}", "decode_worker_id": f"{decode:x}"}
        if "timing" in self._fields:
            fields["timing"] = {
                "queue_ms": source.summary.queue_ms,
                "prefill_ms": source.summary.prefill_ms,
                "total_ms": round((self._clock() - self._started) * 1000, 3),
            }
        if self.tokens is not None:
            fields["completion_token_ids"] = self.tokens
        return fields or None


def annotation(name: str, value: object) -> bytes:
    """Return an event without data, which clients that do not know it ignore; its value is a comment."""
    return b"event: " + name.encode() + b"\n: " + msgspec.json.encode(value) + b"\n\n"


def _long_annotation(name: str, value: str | Sequence[int]) -> Work[list[bytes]]:
    """Return the pieces of an annotation with text or token ids of a prompt."""
    is_text = isinstance(value, str)
    pieces = [b"event: " + name.encode() + b"\n: " + (b'"' if is_text else b"[")]
    for start in range(0, len(value), _ELEMENTS_PER_STEP):
        part = value[start : start + _ELEMENTS_PER_STEP]
        encoded = msgspec.json.encode(part if isinstance(part, str) else list(part))[1:-1]
        yield len(encoded)
        pieces.append(encoded if is_text or not start else b"," + encoded)
    pieces.append(b'"\n\n' if is_text else b"]\n\n")
    return pieces


async def formatted_prompt(text: TextModel, request: TextRequest) -> str:
    """Return the prompt as text, with the chat template applied."""
    if request.messages is not None:
        return await text.render(request)
    prompt = request.prompt
    return prompt if isinstance(prompt, str) else await text.tokenizer.decode_prompt(prompt or (), skip_special_tokens=False)


class _TokenCollector:
    def __init__(self, chunks: Chunks, tokens: list[int]) -> None:
        self._chunks = chunks
        self._tokens = tokens

    def add(self, deltas: Sequence[TextDelta], events: list[bytes]) -> None:
        for delta in deltas:
            self._tokens += delta.tokens
        self._chunks.add(deltas, events)
