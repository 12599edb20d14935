"""What the remote engine requires of the protocol of a kind of engine server."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol, TypeVar

import msgspec

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import Delta, GenerateRequest, Summary, TokenCount

T = TypeVar("T")


class RemoteKind(StrEnum):
    """The protocol of an engine server."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TENSORRT_LLM = "tensorrt-llm"
    TEXT = "text"
    RELAY = "relay"
    """No protocol of text: a model of audio or images, whose requests pass through."""


class EventReader(Protocol):
    """Turns the events of one stream into deltas and a summary."""

    @property
    def has_finished(self) -> bool:
        """Whether each choice has ended."""
        ...

    def read(self, event: bytes) -> list[Delta]:
        """Return the deltas of an event. Raises the error that it holds, EngineError for an event that cannot be read."""
        ...

    def summary(self) -> Summary: ...


class Dialect(Protocol):
    """The requests and responses of one kind of server, for one of its models."""

    def call(self, request: GenerateRequest) -> tuple[str, bytes]:
        """Return path and body of a POST request. Raises InvalidRequest for what the server would misunderstand or not bound."""
        ...

    def reader(self, request: GenerateRequest) -> EventReader: ...


class PromptDetails(msgspec.Struct):
    """The part of the usage that a server reports of a prompt."""

    cached_tokens: TokenCount | None = None


class Choices:
    """What readers of all kinds keep of the choices of one response."""

    def __init__(self, request: GenerateRequest) -> None:
        self._count = request.n
        self._unfinished = set(range(request.n))
        self._started_at = time.monotonic()
        self.prefill_ms = 0.0
        """Time up to the first event of a choice."""

    @property
    def has_finished(self) -> bool:
        return not self._unfinished

    @property
    def unfinished(self) -> list[int]:
        return sorted(self._unfinished)

    def check(self, index: int) -> None:
        """Note an event of a choice. Raises EngineError for a choice that has ended, or was not requested."""
        if index not in self._unfinished:
            raise EngineError(f"the server sent choice {index}, which has ended or was not requested")
        self.prefill_ms = self.prefill_ms or (time.monotonic() - self._started_at) * 1e3

    def goes_on(self, index: int) -> bool:
        """Do as `check` does, but return False for a choice that has ended."""
        if index not in self._unfinished and 0 <= index < self._count:
            return False
        self.check(index)
        return True

    def finish(self, index: int) -> None:
        self._unfinished.remove(index)


def decode_event(decoder: msgspec.json.Decoder[T], event: bytes) -> T:
    """Raises EngineError for an event that cannot be read."""
    try:
        return decoder.decode(event)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"the server sent an event that cannot be read: {error}") from error


def without_none(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that a request sets."""
    return {name: value for name, value in fields.items() if value is not None}


def token_limit(request: GenerateRequest, context_length: int) -> int:
    """Return how many tokens may be generated: servers would take less than a missing limit means here."""
    room = context_length - request.prompt_tokens
    return room if request.stop.max_tokens is None else min(request.stop.max_tokens, room)


def fills_context(request: GenerateRequest, context_length: int) -> bool:
    """Whether an image's tokens, which only the server knows, leave less room than may be generated: as much as fits is meant."""
    return bool(request.media) and token_limit(request, context_length) == context_length - request.prompt_tokens


def data_url(image: bytes) -> str:
    """Return an image as servers take it, which see its format in its bytes."""
    return f"data:image/*;base64,{b64encode(image).decode()}"


def check_rank(request: GenerateRequest) -> None:
    """Raises InvalidRequest for a request to one of several data-parallel ranks, which a server keeps to itself."""
    if request.data_parallel_rank:
        raise InvalidRequest(f"data_parallel_rank must be 0, got {request.data_parallel_rank}", param="data_parallel_rank")
