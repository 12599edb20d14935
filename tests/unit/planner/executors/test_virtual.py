"""The keys of NVIDIA Dynamo's virtual connector: what is written, and when a decision waits for its acknowledgement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dynamo.common.model_card import Role
from dynamo.common.scaling.pool import Pool
from dynamo.planner.executors.base import ExecutorFailed
from dynamo.planner.executors.virtual import VirtualExecutor
from dynamo.planner.pools import Decision
from tests.support.fake_etcd import FakeEtcd

CHAT, PREFILL, DECODE = Pool("chat"), Pool("chat", Role.PREFILL), Pool("chat", Role.DECODE)
PREFIX = "v1/ns/planner/"


class OneAtATime(FakeEtcd):
    """Has the transaction that the executor needs."""

    async def replace_together(self, values: Mapping[str, bytes], *, key: str, mod_revision: int) -> bool:
        if (self.kvs[key].mod_revision if key in self.kvs else 0) != mod_revision:
            return False
        for name, value in values.items():
            await self.put(name, value)
        return True

    def texts(self) -> dict[str, str]:
        return {name.removeprefix(PREFIX): kv.value.decode() for name, kv in self.kvs.items()}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def executor(etcd: Any, model: str | None = None, clock: Clock | None = None) -> VirtualExecutor:
    return VirtualExecutor(etcd, "ns", model=model, wait_s=1800.0, clock=clock or Clock())


def numbers(prefill: int, decode: int) -> list[Decision]:
    return [Decision(pool=PREFILL, instances=prefill), Decision(pool=DECODE, instances=decode)]


async def acknowledge(etcd: FakeEtcd, decision: int) -> None:
    await etcd.put(PREFIX + "scaled_decision_id", str(decision).encode())


async def test_decisions_are_counted_from_0_and_written_as_decimal_text() -> None:
    etcd = OneAtATime()
    own = executor(etcd)
    await own.carry_out(numbers(2, 4))
    assert etcd.texts() == {"num_prefill_workers": "2", "num_decode_workers": "4", "decision_id": "0"}
    await acknowledge(etcd, 0)
    await own.carry_out(numbers(2, 5))
    assert etcd.texts()["num_decode_workers"] == "5" and etcd.texts()["decision_id"] == "1"


async def test_the_same_numbers_are_no_new_decision() -> None:
    etcd = OneAtATime()
    await executor(etcd).carry_out(numbers(2, 4))
    revision = etcd.revision
    await executor(etcd).carry_out(numbers(2, 4))
    assert etcd.revision == revision


async def test_an_aggregated_model_has_decode_workers_only_as_there() -> None:
    etcd = OneAtATime()
    await executor(etcd).carry_out([Decision(pool=CHAT, instances=3)])
    assert etcd.texts() == {"num_decode_workers": "3", "decision_id": "0"}


async def test_a_decision_waits_until_the_one_before_is_acknowledged() -> None:
    etcd = OneAtATime()
    own = executor(etcd)
    await own.carry_out(numbers(1, 1))
    await own.carry_out(numbers(1, 2))
    assert etcd.texts()["num_decode_workers"] == "1"
    await acknowledge(etcd, 0)
    await own.carry_out(numbers(1, 3))
    assert (etcd.texts()["num_decode_workers"], etcd.texts()["decision_id"]) == ("3", "1")


async def test_without_an_acknowledgement_it_goes_on_after_half_an_hour() -> None:
    etcd, clock = OneAtATime(), Clock()
    own = executor(etcd, clock=clock)
    await own.carry_out(numbers(1, 1))
    clock.now += 10_000.0
    await own.carry_out(numbers(1, 2))  # from now on it waits
    clock.now += 1799.0
    await own.carry_out(numbers(1, 2))
    assert etcd.texts()["decision_id"] == "0"
    clock.now += 1.0
    await own.carry_out(numbers(1, 2))
    assert (etcd.texts()["num_decode_workers"], etcd.texts()["decision_id"]) == ("2", "1")
    await own.carry_out(numbers(1, 3))
    assert etcd.texts()["decision_id"] == "1", "the next one waits anew"


async def test_a_new_leader_goes_on_counting_and_starts_from_the_numbers() -> None:
    etcd = OneAtATime()
    await executor(etcd).carry_out(numbers(2, 4))
    await acknowledge(etcd, 0)
    other = executor(etcd)
    assert await other.current([PREFILL, DECODE]) == {PREFILL: 2, DECODE: 4}
    assert await other.current([PREFILL, Pool("other")]) == {}, "whose numbers these are is not known"
    await other.carry_out(numbers(3, 4))
    assert etcd.texts()["decision_id"] == "1"


async def test_numbers_that_are_none_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    etcd = OneAtATime()
    for name, value in (("decision_id", b"-1"), ("num_prefill_workers", b"many"), ("scaled_decision_id", "٣".encode())):
        await etcd.put(PREFIX + name, value)
    await executor(etcd).carry_out(numbers(2, 4))
    assert etcd.texts() | {"scaled_decision_id": ""} == {
        "num_prefill_workers": "2",
        "num_decode_workers": "4",
        "decision_id": "0",
        "scaled_decision_id": "",
    }
    assert "num_prefill_workers holds no number, but b'many'" in caplog.text


async def test_two_planners_at_once_make_one_decision() -> None:
    class Busy(OneAtATime):
        async def replace_together(self, values: Mapping[str, bytes], *, key: str, mod_revision: int) -> bool:
            await self.put(PREFIX + "decision_id", b"5")
            return await super().replace_together(values, key=key, mod_revision=mod_revision)

    etcd = Busy()
    with pytest.raises(ExecutorFailed, match="another planner has made a decision"):
        await executor(etcd).carry_out(numbers(2, 4))
    assert etcd.texts() == {"decision_id": "5"}


async def test_one_model_of_several_has_to_be_named() -> None:
    etcd = OneAtATime()
    decisions = [Decision(pool=Pool("a"), instances=1), Decision(pool=Pool("b"), instances=2)]
    with pytest.raises(ExecutorFailed, match="--virtual-model has to name one of a, b"):
        await executor(etcd).carry_out(decisions)
    await executor(etcd, model="b").carry_out(decisions)
    assert etcd.texts()["num_decode_workers"] == "2"
    assert await executor(etcd, model="b").current([Pool("a"), Pool("b")]) == {Pool("b"): 2}


async def test_aggregated_and_decode_instances_of_one_model_have_no_keys() -> None:
    etcd = OneAtATime()
    with pytest.raises(ExecutorFailed, match="for which there is one key"):
        await executor(etcd).carry_out([Decision(pool=CHAT, instances=1), Decision(pool=DECODE, instances=2)])
    assert etcd.texts() == {}
    await executor(etcd).close()
