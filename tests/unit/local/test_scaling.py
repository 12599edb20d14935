"""As many workers as the targets want, and which of them end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dynamo.common.discovery import Instance, encode_registration
from dynamo.common.errors import Unavailable
from dynamo.common.etcd import KeyValue, Listing
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.background import running
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import PoolTarget, Targets, encode_targets, targets_key
from dynamo.local.scaling import TargetFollower, workers_to_end
from tests.support.fake_etcd import FakeEtcd

CHAT, EMBED = Pool("chat"), Pool("embed")
ENDPOINT = Endpoint("ns")


def registration(number: int, process: str, model: str = "chat", instances: int = 1) -> Instance:
    card = ModelCard(name=model, kind=ModelKind.TENSOR)
    id = InstanceId(number)
    return Instance(
        id=id,
        endpoint=ENDPOINT,
        subject=ENDPOINT.rpc_subject(id),
        card=card,
        started_at=0.0,
        process=process,
        process_instances=instances,
    )


def target(instances: int, *leave: int, pool: Pool = CHAT) -> PoolTarget:
    return PoolTarget(pool=pool, instances=instances, leave=tuple(map(InstanceId, leave)), reason="2.0 requests/s")


class ListedWorkers:
    """Workers as names; each registers as soon as it has started, if it is to."""

    def __init__(self, etcd: RegisteringEtcd, models: Sequence[str] = ("chat",), instances: int = 1) -> None:
        self.names: list[str] = []
        self.registers = True
        self.most = 64
        self.changed = asyncio.Event()
        self._etcd = etcd
        self._models = models
        self._instances = instances
        self._started = 0

    def serving(self, registrations: Iterable[Instance]) -> dict[str, list[Instance]]:
        found: dict[str, list[Instance]] = {}
        for entry in registrations:
            if entry.process in self.names:
                found.setdefault(entry.process, []).append(entry)
        return found

    def add(self) -> str | None:
        if len(self.names) >= self.most:
            return None
        self._started += 1
        name = f"worker {self._started}"
        self.names.append(name)
        if self.registers:
            for model in self._models:
                entry = registration(self._started, name, model, self._instances)
                self._etcd.kvs[entry.key] = self._etcd.key_value(entry.key, encode_registration(entry))
        self.changed.set()
        return name

    def end(self, name: str) -> Coroutine[Any, Any, None]:
        self.names.remove(name)
        self.changed.set()
        return asyncio.sleep(0)

    async def become(self, *names: str) -> None:
        async with asyncio.timeout(120):
            while self.names != list(names):
                self.changed.clear()
                await self.changed.wait()


class RegisteringEtcd(FakeEtcd):
    def key_value(self, key: str, value: bytes) -> KeyValue:
        self.revision += 1
        return KeyValue(key, value, self.revision)

    async def want(self, *targets: PoolTarget) -> None:
        await self.put(targets_key("ns"), encode_targets(Targets(targets=targets)))


@asynccontextmanager
async def following(etcd: RegisteringEtcd, workers: ListedWorkers, reported: list[str]) -> AsyncIterator[None]:
    anything: Any = workers
    storage: Any = etcd
    async with running(TargetFollower(storage, "ns", anything, reported.append).run(), "targets"):
        yield


async def test_workers_join_and_end_as_the_target_says() -> None:
    etcd = RegisteringEtcd()
    workers, reported = ListedWorkers(etcd), list[str]()
    workers.add()
    async with following(etcd, workers, reported):
        await etcd.want(target(3))
        await workers.become("worker 1", "worker 2", "worker 3")
        await etcd.want(target(2, 1, 3))
        await workers.become("worker 2", "worker 3")
    assert reported == [
        "worker 2 starts: chat is to have 3 instance(s), 2.0 requests/s",
        "worker 3 starts: chat is to have 3 instance(s), 2.0 requests/s",
        "worker 1 leaves: chat is to have 2 instance(s), 2.0 requests/s",
    ]


async def test_all_end_and_a_first_one_starts_again() -> None:
    etcd = RegisteringEtcd()
    workers = ListedWorkers(etcd)
    workers.add()
    async with following(etcd, workers, []):
        await etcd.want(target(0))
        await workers.become()
        etcd.kvs = {key: kv for key, kv in etcd.kvs.items() if key == targets_key("ns")}
        await etcd.want(target(1))
        await workers.become("worker 2")


async def test_the_model_that_wants_most_counts_and_those_of_others_do_not() -> None:
    etcd = RegisteringEtcd()
    workers = ListedWorkers(etcd, models=("chat", "embed"))
    workers.add()
    async with following(etcd, workers, []):
        await etcd.want(target(1), target(2, pool=EMBED), target(9, pool=Pool("elsewhere")))
        await workers.become("worker 1", "worker 2")
        await etcd.want(target(3), target(2, pool=EMBED))
        await workers.become("worker 1", "worker 2", "worker 3")


async def test_a_worker_with_several_instances_counts_as_these() -> None:
    etcd = RegisteringEtcd()
    workers = ListedWorkers(etcd, instances=4)
    workers.add()
    async with following(etcd, workers, []):
        await etcd.want(target(9))
        await workers.become("worker 1", "worker 2", "worker 3")


async def test_a_target_that_is_gone_changes_nothing() -> None:
    etcd = RegisteringEtcd()
    workers = ListedWorkers(etcd)
    workers.add()
    async with following(etcd, workers, []):
        await etcd.want(target(2))
        await workers.become("worker 1", "worker 2")
        await etcd.delete(targets_key("ns"))
        await etcd.put(targets_key("ns"), b"no targets")
        await etcd.want(target(3))
        await workers.become("worker 1", "worker 2", "worker 3")


async def test_no_more_workers_start_than_there_may_be() -> None:
    etcd = RegisteringEtcd()
    workers = ListedWorkers(etcd)
    workers.most = 3
    workers.add()
    async with following(etcd, workers, []):
        await etcd.want(target(100_000))
        await workers.become("worker 1", "worker 2", "worker 3")


async def test_a_target_is_carried_out_when_etcd_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(RegisteringEtcd):
        failures = 2

        async def range(self, key: str, *, prefix: bool = False) -> Listing:
            if self.failures:
                self.failures -= 1
                raise Unavailable("etcd is away")
            return await super().range(key, prefix=prefix)

    monkeypatch.setattr(TargetFollower, "RETRY_S", 0.001)
    etcd = Away()
    workers = ListedWorkers(etcd)
    workers.add()
    async with following(etcd, workers, []):
        await etcd.want(target(2))
        await workers.become("worker 1", "worker 2")
    assert etcd.failures == 0


def serving(*names: str) -> Mapping[str, Sequence[Instance]]:
    return {name: [registration(int(name), name)] for name in names}


def test_those_end_that_the_target_names_in_its_order() -> None:
    assert workers_to_end(2, ["1", "2", "3"], serving("1", "2", "3"), [target(1, 3, 1, 2)]) == ["3", "1"]
    assert workers_to_end(0, ["1"], serving("1"), [target(1, 1)]) == []
    assert workers_to_end(-1, ["1"], serving("1"), [target(2, 1)]) == []


def test_those_that_do_not_serve_yet_end_first_and_without_names_the_youngest() -> None:
    assert workers_to_end(2, ["1", "2", "3", "4"], serving("1", "2", "4"), [target(2, 1)]) == ["3", "1"]
    assert workers_to_end(3, ["1", "2", "3"], serving("1", "2", "3"), [target(0, 99)]) == ["3", "2", "1"]


def test_one_that_several_models_can_spare_ends_before_others() -> None:
    targets = [target(1, 1, 2), target(1, 2, pool=EMBED)]
    assert workers_to_end(1, ["1", "2", "3"], serving("1", "2", "3"), targets) == ["2"]
