"""Which of the planners of a namespace decides: the one that holds a lease in etcd. The others wait for it to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo.common.errors import DynamoError
from dynamo.common.etcd import Etcd
from dynamo.common.etcd.leases import Leases, open_leases
from dynamo.common.names import leases_prefix
from dynamo.common.process.background import running

log = logging.getLogger(__name__)

WORK = "planner"
"""The kind of work in `leases_prefix`, and the name of the one piece of it."""
RETRY_S = 1.0
"""Between two attempts to become the leader."""


class Leadership:
    """Whether this process is the leader."""

    def __init__(self, leases: Leases) -> None:
        self.term = 0
        """How often this process has become the leader. What was begun in an earlier term must not be carried out."""
        self.is_leader = False
        self._leases = leases
        self._lost = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Leadership term={self.term} is_leader={self.is_leader}>"

    def lost(self) -> None:
        """Decide nothing from now on: another planner may be the leader."""
        if self.is_leader:
            log.warning("this planner is not the leader any more: it decides nothing until it is again")
        self.resign()

    def resign(self) -> None:
        """Decide nothing from now on, since this process ends."""
        self.is_leader = False
        self._lost.set()

    async def keep(self) -> None:
        """Become the leader whenever there is none, until cancelled."""
        while True:
            self._lost.clear()
            if await self._take():
                self.term += 1
                self.is_leader = not self._lost.is_set()
                if self.is_leader:
                    log.info("this planner is the leader")
                    await self._lost.wait()
            await asyncio.sleep(RETRY_S)

    async def _take(self) -> bool:
        try:
            return await self._leases.take(WORK)
        except DynamoError as error:
            log.debug("the lease of the leader cannot be taken: %s", error)
            return False


@asynccontextmanager
async def open_leadership(etcd: Etcd, namespace: str, ttl_s: float) -> AsyncIterator[Leadership]:
    """Try to be the leader while the body runs; at its end another planner may be at once. Does not wait for etcd."""
    async with open_leases(etcd, leases_prefix(namespace, WORK), ttl_s) as leases:
        leadership = Leadership(leases)
        leases.on_lost(leadership.lost)
        async with running(leadership.keep(), "the leader's lease"):
            try:
                yield leadership
            finally:
                leadership.resign()
