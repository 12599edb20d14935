"""A request of a sequence, and where its outcome comes."""

from __future__ import annotations

import asyncio

from dynamo.common.errors import DynamoError
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult
from dynamo.worker.repository.scheduling.decoupled import DecoupledRequest


class SequenceRequest:
    """A request that waits for its turn, or runs."""

    __slots__ = ("due", "ends", "enqueued_ns", "has_left", "is_held", "is_running", "outcomes", "request", "starts", "turns")

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self.starts = bool(request.parameters.get("sequence_start", False))
        self.ends = bool(request.parameters.get("sequence_end", False))
        self.has_left = False
        """Its caller wants no response any more."""
        self.is_running = False
        """A decoupled model has it."""
        self.is_held = False
        """A decoupled model wants it again, and its caller has too many responses to read."""
        self.outcomes: asyncio.Queue[ModelResult | DynamoError | DecoupledRequest] = asyncio.Queue()
        """The response or the error; of a decoupled model, whenever it has begun, where the responses come."""
        self.turns: list[DecoupledRequest] = []
        """Calls of a decoupled model that have begun and are not read to their end."""
        self.enqueued_ns = 0
        self.due = 0.0

    def give(self, outcome: ModelResult | DynamoError | DecoupledRequest) -> None:
        if not self.has_left:
            self.outcomes.put_nowait(outcome)
