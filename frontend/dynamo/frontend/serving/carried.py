"""Requests that a gateway carries: placed and booked as all others, while their bytes pass by this process.

The data plane serves such a request as it does any other, up to the step at which it would be sent. In that place stands a
`CarriedStream`, which tells where the request goes, and whose response is empty: it begins and ends when the gateway says so. So
limits, names, queues, bookings, metrics and traces are those of other requests, and what follows the response is none of theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.generation import Delta, FinishReason, delta_encoder
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.frontend.router.base import RouteRequest, RoutingDecision

OnPlaced = Callable[[RouteRequest, RoutingDecision, Sequence[Instance]], None]

_BEGINNING: Final = delta_encoder.encode(Delta())


class _Choices(msgspec.Struct):
    """The part of `GenerateRequest` that says how many choices have to end."""

    n: int = 1


_choices_decoder = msgspec.msgpack.Decoder(_Choices)


class CarriedRequest:
    """One request of a gateway, from its placement to the end of its response."""

    def __init__(self, endpoints: Collection[str] | None, on_placed: OnPlaced) -> None:
        """`endpoints`: the addresses, with or without ports, that the gateway allows; None: all that are registered.

        `on_placed` is called, synchronously, when the request is booked, with the instances that it could have gone to.
        """
        self._endpoints = endpoints
        self._on_placed: OnPlaced | None = on_placed
        """None once it was called: what it belongs to may keep the request that was placed, which keeps this object, and `Work`
        takes no part in garbage collection."""
        self._decision: RoutingDecision | None = None
        self._changed: list[asyncio.Future[None]] = []
        self.has_begun = False
        """The first part of the response has come."""
        self.has_ended = False
        self.failure: DynamoError | None = None
        """What the gateway says of a response that failed."""

    def reached_of(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Return the instances that the gateway can reach, and may; the same tuple if it is all of them.

        All prompts of one request go where its first one went.
        """
        if self._decision is not None:
            return tuple(instance for instance in instances if instance.id == self._decision.instance.id)
        reached = tuple(instance for instance in instances if self.reaches(instance))
        return instances if len(reached) == len(instances) else reached

    def reaches(self, instance: Instance) -> bool:
        """Return whether the gateway can, and may, send requests to an instance."""
        http, endpoints = instance.card.http, self._endpoints
        if http is None or endpoints is None:
            return http is not None
        return http.address in endpoints or http.address.rpartition(":")[0] in endpoints

    def place(
        self, request: RouteRequest, decision: RoutingDecision, candidates: Sequence[Instance], verb: str, body: Body
    ) -> CarriedStream:
        """The request, or one of its prompts, is booked: return what stands for its stream."""
        choices = _choices_decoder.decode(body).n if verb == "generate" and isinstance(body, bytes) else 0
        on_placed, self._on_placed = self._on_placed, None
        if on_placed is not None:
            self._decision = decision
            on_placed(request, decision, candidates)
        return CarriedStream(self, choices)

    def begin(self) -> None:
        """The first token of the response has come."""
        if not self.has_begun:
            self.has_begun = True
            self._wake()

    def end(self, failure: DynamoError | None = None) -> None:
        """The response has ended. Calls after the first have no effect."""
        if not self.has_ended:
            self.has_ended, self.failure = True, failure
            self._wake()

    async def change(self) -> None:
        """Return after the next call of `begin` or `end`."""
        change = asyncio.get_running_loop().create_future()
        self._changed.append(change)
        await change

    def _wake(self) -> None:
        changed, self._changed = self._changed, []
        for change in changed:
            if not change.done():
                change.set_result(None)


class CarriedStream:
    """The stream of a request, or of one of its prompts, that a gateway carries."""

    __slots__ = ("_choices", "_request", "_was_read", "started")

    trailer: Buffer = b""

    def __init__(self, request: CarriedRequest, choices: int) -> None:
        self._request = request
        self._choices = choices
        self._was_read = False
        self.started = False

    async def read(self) -> list[Buffer]:
        request = self._request
        while not request.has_ended:
            if request.has_begun and not self.started:
                self.started = True
                return [_BEGINNING]
            await request.change()
        if request.failure is not None:
            self.started = True  # wherever it failed, the gateway has responded
            raise request.failure
        if self._was_read or not self._choices:
            return []
        self._was_read = True
        return [delta_encoder.encode(Delta((), choice, FinishReason.STOP)) for choice in range(self._choices)]

    async def result(self) -> Buffer:
        while await self.read():
            pass
        return b""

    def cancel(self) -> None:
        """The gateway ends the request by itself."""
