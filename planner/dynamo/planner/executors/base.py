"""What carries out decisions, and how it fails."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from dynamo.common.errors import DynamoError, Unavailable
from dynamo.common.scaling.pool import Pool
from dynamo.planner.pools import Decision


class ExecutorFailed(Unavailable):
    """A platform did not take what was decided. The next decisions are given to it as ever: their numbers are absolute."""


class Executor(Protocol):
    """A platform that starts and ends instances."""

    async def carry_out(self, decisions: Sequence[Decision]) -> None:
        """Tell the platform how many instances it is to have.

        May be called again with the same decisions, which changes nothing. Does not wait for instances to come or go. Raises
        ExecutorFailed within seconds; what can be carried out of the decisions has been then.
        """
        ...

    async def current(self, pools: Collection[Pool]) -> Mapping[Pool, int] | None:
        """Return how many instances the platform is told to have at present, for those of `pools` of which it was told.

        None: it cannot say. Raises ExecutorFailed.
        """
        ...

    async def close(self) -> None: ...


@contextmanager
def platform_failures(what: str) -> Iterator[None]:
    """Raise the failures of the body as ExecutorFailed; `what` could not be done."""
    try:
        yield
    except ExecutorFailed:
        raise
    except DynamoError as error:
        raise ExecutorFailed(f"{what}: {error}") from error
