"""Which of the planners of a namespace decides."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dynamo.common.etcd import EtcdUnavailable
from dynamo.common.process.background import running
from dynamo.planner.process.leader import RETRY_S, Leadership
from tests.support.virtual_time import in_virtual_time


@dataclass
class FakeLeases:
    """Leases of which another process has the one of the leader, or of which etcd knows nothing at the moment."""

    is_taken: bool = False
    is_away: bool = False

    async def take(self, name: str) -> bool:
        if self.is_away:
            raise EtcdUnavailable("no endpoint responds")
        return not self.is_taken


@in_virtual_time
async def test_a_planner_becomes_the_leader_once_the_lease_is_free() -> None:
    leases = FakeLeases(is_taken=True)
    leadership = Leadership(leases)
    async with running(leadership.keep(), "leader"):
        await asyncio.sleep(10 * RETRY_S)
        assert not leadership.is_leader
        leases.is_taken = False
        await asyncio.sleep(2 * RETRY_S)
        assert (leadership.is_leader, leadership.term) == (True, 1)


@in_virtual_time
async def test_one_that_loses_the_lease_is_not_the_leader_from_that_moment_on() -> None:
    leases = FakeLeases()
    leadership = Leadership(leases)
    async with running(leadership.keep(), "leader"):
        await asyncio.sleep(RETRY_S)
        leases.is_taken = True
        leadership.lost()
        assert not leadership.is_leader
        await asyncio.sleep(10 * RETRY_S)
        assert not leadership.is_leader
        leases.is_taken = False
        await asyncio.sleep(2 * RETRY_S)
        assert (leadership.is_leader, leadership.term) == (True, 2)


@in_virtual_time
async def test_without_etcd_no_planner_becomes_the_leader_until_it_is_back() -> None:
    leases = FakeLeases(is_away=True)
    leadership = Leadership(leases)
    async with running(leadership.keep(), "leader"):
        await asyncio.sleep(10 * RETRY_S)
        assert not leadership.is_leader
        leases.is_away = False
        await asyncio.sleep(2 * RETRY_S)
        assert leadership.is_leader


@in_virtual_time
async def test_a_lease_that_is_lost_while_it_is_taken_makes_no_leader() -> None:
    taken = asyncio.Event()

    class LosesAtOnce:
        async def take(self, name: str) -> bool:
            if taken.is_set():
                return False
            taken.set()
            leadership.lost()
            return True

    leadership = Leadership(LosesAtOnce())
    async with running(leadership.keep(), "leader"):
        await asyncio.sleep(10 * RETRY_S)
        assert taken.is_set()
        assert not leadership.is_leader
