"""What a router decides, and from what. Routers are plain computation: no asyncio, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.names import InstanceId
from dynamo.frontend.router.explanation import Explanation
from dynamo.frontend.router.hashing import PromptHashes


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """The part of a request that routing looks at."""

    model: str
    booking_id: str = ""
    prompt: bytes = b""
    """Token ids (little-endian u32) of an LLM request; empty for tensors."""
    adapter: str = ""
    cache_salt: str = ""
    expected_output_tokens: int = 0
    is_prefilled: bool = False
    """Another instance has computed the prompt: neither what is cached nor the prompt's length matters."""
    priority: int = 0
    """Higher is more important."""
    pinned: InstanceId | None = None
    """The client named the instance itself."""
    preferred: InstanceId | None = None
    """Taken if it is a candidate and not busy."""
    session: str = ""
    """Requests of one session like to land on one instance."""
    overrides: Mapping[str, float] = {}
    """Per-request router settings, see `overrides.py`."""
    hashes: PromptHashes | None = None
    """Those of `prompt`, if they were computed before; they must stay as they are."""
    request_id: str = ""
    """The id under which the client knows the request; `booking_id` names its booking."""
    explanation: Explanation | None = None
    """Where the client wants to be told why."""


class RoutingDecision(msgspec.Struct, frozen=True, gc=False):
    """Where a request goes, and why."""

    instance: Instance
    reason: str
    overlap_blocks: int = 0
    cost: float = 0.0
    candidates: Sequence[Mapping[str, float | int | str]] = ()
    """Filled when an explanation was asked for: instance, overlap, load and cost of the cheapest ones and of the chosen one."""


class Router(Protocol):
    """Chooses an instance and books the request on it in one synchronous step.

    Whoever got a Choice must call `finished` exactly once, on every path; `first_token` in between where the request streams.
    """

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        """One of `candidates`, which is not empty. Raises Overloaded if none may take more, NoInstances if a pin is absent."""
        ...

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> PromptHashes | None:
        """What `pick` would hash first, not hashed yet: a long prompt is hashed in steps. None: it looks at no hashes."""
        ...

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance]) -> int | None:
        """The fewest tokens of the prompt that a candidate has not cached. None: the router looks at no caches.

        0 if all whole blocks of it are cached: what is left over never is.
        """
        ...

    def first_token(self, booking_id: str) -> None:
        """The prefill of a booked request is done."""
        ...

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        """The booking of a request is released, however it ended."""
        ...

    def removed(self, instance: InstanceId) -> None:
        """An instance is gone for good."""
        ...


class RouterAround:
    """The part of a router around another one that leaves everything to that one. The rest is a `pick` of its own."""

    def __init__(self, inner: Router) -> None:
        self.inner = inner

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> PromptHashes | None:
        return self.inner.prompt_hashes(request, candidates)

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance]) -> int | None:
        return self.inner.missing_tokens(request, candidates)

    def first_token(self, booking_id: str) -> None:
        self.inner.first_token(booking_id)

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        self.inner.finished(booking_id, error)

    def removed(self, instance: InstanceId) -> None:
        self.inner.removed(instance)
