"""What code that an `execute` runs needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from dynamo.worker.repository.stub.pb_utils import InferenceResponseSender


@dataclass(frozen=True, slots=True)
class Executed:
    """What code that an `execute` runs needs to know of it; no more, since tasks of the model keep it."""

    senders: Sequence[InferenceResponseSender]
    """The senders of its requests."""
    occupies_process: bool = True
    """No other one begins before it has returned."""


EXECUTED: ContextVar[Executed | None] = ContextVar("executed", default=None)
"""None in a thread that the model started. It cannot be passed: the code in between is the model's."""
