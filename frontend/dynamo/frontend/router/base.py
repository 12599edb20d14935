"""The interface of routers: their input, their decision, and the protocol. Routers are plain computation: no asyncio, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError, Overloaded
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.hashing import PromptHashes
from dynamo.frontend.router.explanation import Explanation
from dynamo.frontend.router.fetch import TierCount, TierFetch


class RouteRequest(msgspec.Struct, gc=False):
    """A request as routing looks at it; `serving.call.Work` is the whole."""

    model: str
    """The name in the card, no alias."""
    booking_id: str = ""
    """Names this attempt to send it to an instance."""
    prompt: bytes = b""
    """Token ids (little-endian u32) of an LLM request; empty for tensors."""
    adapter: str = ""
    cache_salt: str = ""
    expected_output_tokens: int = 0
    """The limit of each of its outputs; 0: none."""
    sequences: int = 1
    """How many outputs are generated side by side."""
    learned_output: float = 0.0
    """The mean output of such requests, of its session or API key where these had some; 0: not known."""
    is_prefilled: bool = False
    """A prefill instance has computed the prompt: neither cached blocks nor the prompt's length matter."""
    was_admitted: bool = False
    """It was sent to an instance before, which failed: no goal refuses it now."""
    priority: int = 0
    """Higher is more important."""
    pinned: InstanceId | None = None
    """The only instance that the request may go to: a client, a session or a sequence demands it."""
    needs_room: bool = False
    """The pinned instance is refused while it is busy, as all are to other requests: what clients name takes no other turn."""
    preferred: InstanceId | None = None
    """Chosen if it is a candidate and not busy."""
    session: str = ""
    """Requests of one session should go to one instance."""
    session_owner: str = ""
    """The API key whose session it is; empty without one."""
    sequence: str = ""
    """Requests of one sequence, unlike those of other keys, have to go to one instance."""
    overrides: Mapping[str, float] = {}
    """Per-request router settings, see `overrides.py`."""
    hashes: PromptHashes | None = None
    """The hashes of `prompt`, if they were computed before. Must not be modified."""
    block_hashes: Sequence[int] = ()
    """The hashes of `prompt` that the router has used; empty if it uses none. Must not be modified."""
    is_counted: bool = False
    """It is part of the demand already: it, or what it continues, was sent to an instance or refused one before."""
    waited_s: float = 0.0
    """How long it has waited for an instance: that counts for the time to first token."""
    open_circuits: int = 0
    """Instances of the model whose circuits are open or half-open: the request may not be sent to them."""
    request_id: str = ""
    """The id under which the client knows the request; `booking_id` names its booking."""
    explanation: Explanation | None = None
    """Collects the decision, if the client requested an explanation."""


class TooLate(Overloaded):
    """No instance is predicted to reach the goals, and waiting would not help: it takes as much of the time left as it gains."""


class RoutingDecision(msgspec.Struct, frozen=True, gc=False):
    """The instance that a request goes to, and why."""

    instance: Instance
    reason: str
    overlap_blocks: int = 0
    """Leading blocks of the prompt in the memory of its GPU."""
    cost: float = 0.0
    ttft_s: float | None = None
    """The predicted time to first token; None: the router predicts none."""
    candidates: Sequence[Mapping[str, float | int | str]] = ()
    """Only with `explain`: instance, overlap, load, cost and predictions of the cheapest candidates and of the chosen one."""
    fetch: TierFetch | None = None
    """What it has of the prompt on slower tiers; None: the model's instances have none, or the router knows none."""


class Router(Protocol):
    """Chooses an instance and books the request on it in one synchronous step.

    A caller that received a RoutingDecision must call `finished` exactly once, on every path, and `first_token` before it if the
    request streams.
    """

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        """Choose one of `candidates`, which is not empty. Raises Overloaded if all are busy, NoInstances if a pin is absent."""
        ...

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> PromptHashes | None:
        """Return the hashes that `pick` needs, not computed yet, so that a long prompt can be hashed in steps.

        None if the router uses no hashes.
        """
        ...

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance], *, with_room: bool = False) -> int | None:
        """Return the fewest tokens of the prompt that a candidate has not cached. None if the router knows no caches.

        0 if all full blocks of the prompt are cached: a partial last block never is. `with_room`: only candidates that are
        not busy count; None if all are, or if no threshold says which.
        """
        ...

    def first_token(self, booking_id: str) -> None:
        """Record that the prefill of a booked request is done."""
        ...

    def found_cached(self, request: RouteRequest, decision: RoutingDecision, tokens: int) -> Sequence[TierCount]:
        """Record how many tokens of its prompt the engine found cached, if the decision has a `fetch`. May never be called.

        Return by tier what was counted on, and what was found; nothing if that is not known.
        """
        ...

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        """Release the booking of a request, however the request ended."""
        ...

    def removed(self, instance: InstanceId) -> None:
        """Drop everything kept about an instance that will not come back."""
        ...


_DELEGATED = ("prompt_hashes", "missing_tokens", "first_token", "found_cached", "finished", "removed")


class RouterWrapper:
    """Base of routers that wrap another one: delegates everything but `pick`, which each wrapper defines.

    What a wrapper does not define is the inner router's own method: a request does not pass through each of several wrappers.
    """

    def __init__(self, inner: Router) -> None:
        self.inner = inner
        for name in _DELEGATED:
            if getattr(type(self), name) is getattr(RouterWrapper, name):
                setattr(self, name, getattr(inner, name))

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> PromptHashes | None:
        return self.inner.prompt_hashes(request, candidates)

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance], *, with_room: bool = False) -> int | None:
        return self.inner.missing_tokens(request, candidates, with_room=with_room)

    def first_token(self, booking_id: str) -> None:
        self.inner.first_token(booking_id)

    def found_cached(self, request: RouteRequest, decision: RoutingDecision, tokens: int) -> Sequence[TierCount]:
        return self.inner.found_cached(request, decision, tokens)

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        self.inner.finished(booking_id, error)

    def removed(self, instance: InstanceId) -> None:
        self.inner.removed(instance)
