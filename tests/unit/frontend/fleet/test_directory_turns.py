"""Many large registrations that come at once: a worker may write as many as it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

from dynamo.common.discovery import Instance, encode_registration
from dynamo.common.etcd import Etcd, Events, KeyValue, Put, Reset
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.background import running
from dynamo.frontend.fleet.directory import Directory
from tests.support.waiting import WAIT_S

COUNT = 8


def registration(number: int) -> Instance:
    endpoint, id_ = Endpoint(), InstanceId(number)
    card = ModelCard(name="m", kind=ModelKind.TENSOR, aliases=tuple(f"{at:05d}" + "a" * 250 for at in range(800)))
    return Instance(id=id_, endpoint=endpoint, subject=endpoint.rpc_subject(id_), card=card, started_at=1.0)


class AllAtOnce:
    """etcd, of which a watch delivers all registrations in one response."""

    def __init__(self) -> None:
        self.all_seen = asyncio.Event()

    async def watch(
        self, prefix: str, on_connected: Callable[[bool], None] = lambda connected: None
    ) -> AsyncGenerator[Events | Reset, None]:
        yield Reset((), 1)
        instances = map(registration, range(1, COUNT + 1))
        puts = [Put(KeyValue(each.key, encode_registration(each), at)) for at, each in enumerate(instances, 2)]
        yield Events(tuple(puts), COUNT + 1)
        await asyncio.Event().wait()


async def test_large_registrations_that_come_at_once_are_taken_in_several_turns() -> None:
    etcd, turns = AllAtOnce(), list[int]()
    directory = Directory(cast(Etcd, etcd), None)

    def changed(added: Sequence[Instance], removed: Sequence[Instance]) -> None:
        turns.append(len(added))
        if sum(turns) == COUNT:
            etcd.all_seen.set()

    directory.on_registrations(changed)
    async with running(directory.follow(), "directory"), asyncio.timeout(WAIT_S):
        await etcd.all_seen.wait()
    await directory.close()
    assert max(turns) <= 2  # of 200 KB each
    assert len(directory.instances("m")) == COUNT
