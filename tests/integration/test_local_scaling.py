"""`dynamo-local` with targets in etcd: workers join, and those that leave finish what they have; no request fails."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx2
import pytest

from dynamo.common.discovery import Instance
from dynamo.common.etcd import Etcd, connect_etcd
from dynamo.common.names import InstanceId
from dynamo.common.options import EtcdOptions
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import PoolTarget, Targets, encode_targets, targets_key
from dynamo.local.view import read_instances
from tests.integration.test_local import RUNNING, Launcher, command, gone, launched
from tests.support.servers import EtcdServer, NatsServer

SIM = "sim:speedup=1"
TOKENS = 150


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await condition():
            await asyncio.sleep(0.05)


def workers_of(local: Launcher) -> dict[int, str]:
    """Its workers by process id, with the names that they register."""
    found = {}
    for pid in local.children():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "dynamo.worker" in words:
            found[pid] = words[words.index("--process-name") + 1]
    return found


async def stream(client: httpx2.AsyncClient, number: int) -> str:
    """Return what a request streams, up to its last event."""
    body = {"model": "sim", "prompt": [number] * 50, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        return "".join([text async for text in response.aiter_text()])


class Load:
    """Requests one after the other, several at a time, until it is stopped."""

    def __init__(self, url: str) -> None:
        self.results: list[str] = []
        self._client = httpx2.AsyncClient(base_url=url, timeout=120.0)
        self._stopping = False
        self._tasks = [asyncio.create_task(self._send(number)) for number in range(6)]

    async def __aenter__(self) -> Load:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for the requests that are open. Raises the failure of one."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _send(self, number: int) -> None:
        while not self._stopping:
            self.results.append(await stream(self._client, number))

    async def more(self, requests: int) -> None:
        """Return when so many more requests have ended."""
        until = len(self.results) + requests

        async def enough() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return len(self.results) >= until

        await until_true(enough)


class Fleet:
    """What is registered, and what decides."""

    def __init__(self, etcd: Etcd, namespace: str) -> None:
        self._etcd = etcd
        self._namespace = namespace

    async def decide(self, instances: int, leave: Sequence[InstanceId] = ()) -> None:
        """Write a target, as a planner does."""
        target = PoolTarget(pool=Pool("sim"), instances=instances, leave=tuple(leave))
        await self._etcd.put(targets_key(self._namespace), encode_targets(Targets(targets=(target,))))

    async def serving(self) -> list[Instance]:
        return [entry for entry in await read_instances(self._etcd, self._namespace) if entry.card.name == "sim"]

    async def become(self, instances: int) -> None:
        async def is_so() -> bool:
            return len(await self.serving()) == instances

        await until_true(is_so)


@pytest.mark.slow  # workers that start and end under load
async def test_workers_join_and_leave_under_load_and_no_request_fails(
    tmp_path: Path, etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    elsewhere = ("--etcd-endpoints", etcd_server.endpoint, "--nats-servers", nats_server.url, "--namespace", namespace)
    flags = ("--model", SIM, "--follow-targets", "--no-ask", *elsewhere)
    async with (
        connect_etcd(EtcdOptions(endpoints=(etcd_server.endpoint,))) as etcd,
        launched(command(tmp_path, *flags)) as local,
    ):
        await local.read_until(RUNNING)
        fleet = Fleet(etcd, namespace)
        [first] = await fleet.serving()
        async with Load(next(line.split()[-1] for line in local.lines if "HTTP at" in line)) as load:
            await load.more(1)
            await fleet.decide(3)
            await fleet.become(3)
            await load.more(6)

            workers = workers_of(local)
            leaving = next(pid for pid, name in workers.items() if name == first.process)
            await fleet.decide(2, [first.id])
            await gone([leaving])
            assert workers_of(local).keys() == workers.keys() - {leaving}, "the one that was named has left, and no other"
            await load.more(6)
        assert "deregistering instance" in (tmp_path / "logs" / f"{first.process.partition('.')[2]}.log").read_text()
        assert all(result.endswith("data: [DONE]\n\n") and '"error"' not in result for result in load.results)

        killed = next(iter(workers_of(local)))
        os.kill(killed, signal.SIGKILL)
        await local.read_until("was restarted")
        await fleet.become(2)

        await fleet.decide(0)
        await fleet.become(0)
        await fleet.decide(1)
        await fleet.become(1)

        local.process.send_signal(signal.SIGTERM)
        assert await local.end() == 0, local.text
