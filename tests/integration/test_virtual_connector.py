"""The keys of NVIDIA Dynamo's virtual connector in a real etcd, with a program that was written for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo.common.etcd import Etcd, Reset, connect_etcd
from dynamo.common.model_card import Role
from dynamo.common.options import EtcdOptions
from dynamo.common.scaling.pool import Pool
from dynamo.planner.executors.base import Executor, ExecutorFailed
from dynamo.planner.executors.choice import open_executor
from dynamo.planner.executors.options import ExecutorKind, ExecutorOptions
from dynamo.planner.executors.virtual import VirtualExecutor
from dynamo.planner.pools import Decision
from tests.support.servers import EtcdServer, etcdctl, start_etcd
from tests.support.waiting import expiring

PREFILL, DECODE = Pool("chat", Role.PREFILL), Pool("chat", Role.DECODE)


@pytest.fixture
async def etcd(etcd_server: EtcdServer) -> AsyncIterator[Etcd]:
    async with connect_etcd(EtcdOptions(endpoints=(etcd_server.endpoint,))) as client:
        yield client


@asynccontextmanager
async def executing(etcd: Etcd, namespace: str) -> AsyncIterator[Executor]:
    async with open_executor(ExecutorOptions(kind=ExecutorKind.VIRTUAL), namespace, etcd, list) as executor:
        assert executor is not None
        yield executor


@dataclass(frozen=True, slots=True)
class PlannerDecision:
    """As programs for the virtual connector see it; -1: not written."""

    num_prefill_workers: int = -1
    num_decode_workers: int = -1
    decision_id: int = -1


class VirtualConnectorClient:
    """What a program does that carries out decisions: it waits for a change, reads, and acknowledges."""

    def __init__(self, etcd: Etcd, namespace: str) -> None:
        self._etcd = etcd
        self._prefix = f"v1/{namespace}/planner/"

    async def wait(self, listening: asyncio.Event) -> PlannerDecision:
        """Return what is there as soon as anything changes. Sets `listening` when no change can be missed any more."""
        async with aclosing(self._etcd.watch(self._prefix, on_connected=lambda connected: listening.set())) as changes:
            async for change in changes:
                if not isinstance(change, Reset):
                    return await self.get()
        raise AssertionError("the watch has ended")

    async def get(self) -> PlannerDecision:
        names = {"num_prefill_workers", "num_decode_workers", "decision_id"}
        kvs = (await self._etcd.range(self._prefix, prefix=True)).kvs
        found = {kv.key.rpartition("/")[2]: int(kv.value) for kv in kvs}
        return PlannerDecision(**{name: number for name, number in found.items() if name in names})

    async def complete(self, decision: PlannerDecision) -> None:
        await self._etcd.put(f"{self._prefix}scaled_decision_id", str(decision.decision_id).encode())


def numbers(prefill: int, decode: int) -> list[Decision]:
    return [Decision(pool=PREFILL, instances=prefill), Decision(pool=DECODE, instances=decode)]


async def test_a_program_for_the_virtual_connector_gets_whole_decisions_and_acknowledges_them(etcd: Etcd, namespace: str) -> None:
    client = VirtualConnectorClient(etcd, namespace)
    assert await client.get() == PlannerDecision()
    async with executing(etcd, namespace) as executor:
        for decision_id, (prefill, decode) in enumerate([(1, 2), (5, 8)]):
            listening = asyncio.Event()
            async with asyncio.timeout(120):
                waiting = asyncio.create_task(client.wait(listening))
                await listening.wait()
                await executor.carry_out(numbers(prefill, decode))
                decision = await waiting
            assert decision == PlannerDecision(prefill, decode, decision_id), "never a part of it"
            await executor.carry_out(numbers(7, 7))
            assert await client.get() == decision, "the next one waits"
            await client.complete(decision)
    async with executing(etcd, namespace) as executor:  # of a new leader
        assert await executor.current([PREFILL, DECODE]) == {PREFILL: 5, DECODE: 8}
        await executor.carry_out(numbers(5, 9))
    assert await client.get() == PlannerDecision(5, 9, 2)


async def test_the_keys_are_those_that_programs_read(etcd: Etcd, etcd_server: EtcdServer, namespace: str) -> None:
    async with executing(etcd, namespace) as executor:
        await executor.carry_out(numbers(2, 4))
    lines = etcdctl(etcd_server.endpoint, "get", "--prefix", f"v1/{namespace}/").splitlines()
    prefix = f"v1/{namespace}/planner/"
    expected = {f"{prefix}decision_id": "0", f"{prefix}num_decode_workers": "4", f"{prefix}num_prefill_workers": "2"}
    assert dict(zip(lines[::2], lines[1::2], strict=True)) == expected


async def test_of_two_planners_at_once_one_makes_each_decision(etcd: Etcd, namespace: str) -> None:
    planners = [VirtualExecutor(etcd, namespace, model=None, wait_s=0.0) for _ in range(4)]
    client = VirtualConnectorClient(etcd, namespace)
    results = await asyncio.gather(
        *(planner.carry_out(numbers(1, 2 + number)) for number, planner in enumerate(planners)), return_exceptions=True
    )
    written = (await client.get()).decision_id + 1
    refused = [result for result in results if result is not None]
    assert all(isinstance(result, ExecutorFailed) for result in refused)
    assert written == len(planners) - len(refused) >= 1


async def test_without_etcd_decisions_fail_and_the_next_one_is_carried_out_when_it_is_back(
    tmp_path: Path, namespace: str
) -> None:
    async with (
        start_etcd(tmp_path / "etcd", fsync=True) as server,
        connect_etcd(EtcdOptions(endpoints=(server.endpoint,))) as client,
        connect_etcd(EtcdOptions(endpoints=(server.endpoint,), timeout_s=expiring(0.5))) as impatient,
        executing(client, namespace) as executor,
        executing(impatient, namespace) as failing,
    ):
        await executor.carry_out(numbers(1, 1))
        await server.stop()
        with pytest.raises(ExecutorFailed, match="the keys of the virtual connector cannot be written"):
            await failing.carry_out(numbers(1, 2))
        await server.start()
        await VirtualConnectorClient(client, namespace).complete(PlannerDecision(1, 1, 0))
        await executor.carry_out(numbers(1, 3))
        assert await VirtualConnectorClient(client, namespace).get() == PlannerDecision(1, 3, 1)
        assert await executor.current([DECODE]) == {DECODE: 3}
