"""Planner processes over a real etcd and nats-server, with simulated workers; the test plays the frontends."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.options import NatsOptions
from dynamo.common.process.background import running
from dynamo.common.scaling.demand import ArrivalTotals, DemandReport, PoolDemand, demand_subject
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import decode_targets, targets_key
from tests.support.processes import planner
from tests.support.servers import EtcdServer, NatsServer, etcdctl, start_nats
from tests.support.sim_fleet import SimFleet
from tests.support.waiting import WAIT_S

SIM = Pool("sim")
FAST = ("--interval", "0.2", "--lease-ttl-s", "1", "--startup-time", "1", "--cool-up", "0")
"""Rounds and leases as short as a test likes."""


@dataclass
class FakeFrontend:
    """A frontend of which only the demand is heard. Requests that wait have instances added by load."""

    bus: Connection
    namespace: str
    waiting: int = 0
    placed: int = 0

    async def report(self) -> None:
        """Report five times a second, until cancelled."""
        while True:
            demand = PoolDemand(SIM, ArrivalTotals(placed=self.placed), self.waiting)
            self.bus.publish_nowait(demand_subject(self.namespace), msgspec.msgpack.encode(DemandReport("f1", (demand,))))
            await asyncio.sleep(0.2)


@asynccontextmanager
async def fake_frontend(nats: NatsServer, namespace: str) -> AsyncIterator[FakeFrontend]:
    async with connect_nats(NatsOptions(servers=(nats.url,)), "test") as bus:
        frontend = FakeFrontend(bus, namespace)
        async with running(frontend.report(), "reports"):
            yield frontend


def written(etcd: EtcdServer, namespace: str) -> int | None:
    """The target in etcd, read with etcd's own client."""
    text = etcdctl(etcd.endpoint, "get", "--print-value-only", targets_key(namespace)).strip()
    targets = decode_targets(text.encode()).targets if text else ()
    return next((target.instances for target in targets if target.pool == SIM), None)


async def until_written(etcd: EtcdServer, namespace: str, instances: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while await asyncio.to_thread(written, etcd, namespace) != instances:
            await asyncio.sleep(0.05)


def decides(shown: dict[str, object]) -> bool:
    return bool(shown["is_leader"] and shown["pools"] and not shown["holding"])


async def test_a_load_that_rises_raises_the_target_in_etcd(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    fleet = SimFleet(etcd_server, nats_server, namespace)
    async with (
        fleet.worker(),
        fake_frontend(nats_server, namespace) as frontend,
        planner(etcd_server.endpoint, nats_server.url, namespace, *FAST) as process,
    ):
        await process.shows(decides)
        await until_written(etcd_server, namespace, 1)
        frontend.waiting = 10_000
        await until_written(etcd_server, namespace, 8)
        shown = await process.explain()
        assert [(pool["model"], pool["target"], pool["instances"], pool["by"]) for pool in shown["pools"]] == [
            ("sim", 8, 1, "bounds")
        ]
        assert (shown["decisions"][0]["before"], shown["decisions"][0]["instances"]) == (1, 8)


async def test_when_the_leader_is_killed_another_planner_goes_on_from_the_same_numbers(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    fleet = SimFleet(etcd_server, nats_server, namespace)
    where = (etcd_server.endpoint, nats_server.url, namespace)
    async with fleet.worker(), fake_frontend(nats_server, namespace) as frontend, planner(*where, *FAST) as first:
        await first.shows(decides)
        async with planner(*where, *FAST) as second:
            await second.shows(lambda shown: shown["pools"])
            assert not (await second.explain())["is_leader"]
            frontend.waiting = 10_000
            await until_written(etcd_server, namespace, 8)
            frontend.waiting = 0
            first.process.kill()
            shown = await second.shows(decides)
            assert [pool["target"] for pool in shown["pools"]] == [8]
            assert written(etcd_server, namespace) == 8


async def test_a_planner_that_ends_in_order_hands_over_at_once(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    fleet = SimFleet(etcd_server, nats_server, namespace)
    where = (etcd_server.endpoint, nats_server.url, namespace)
    lasting = ("--interval", "0.2", "--lease-ttl-s", "600")
    async with fleet.worker(), fake_frontend(nats_server, namespace), planner(*where, *lasting) as first:
        await first.shows(decides)
        async with planner(*where, *lasting) as second:
            await second.shows(lambda shown: shown["pools"])
            first.process.terminate()
            await second.shows(decides)  # long before the lease of the first would end
            await first.ended()
            assert first.process.returncode == 0


async def test_without_nats_targets_hold_and_are_decided_again_when_it_is_back(
    etcd_server: EtcdServer, namespace: str, tmp_path: Path
) -> None:
    async with start_nats(tmp_path / "nats") as nats:
        fleet = SimFleet(etcd_server, nats, namespace)
        async with (
            fleet.worker(),
            fake_frontend(nats, namespace) as frontend,
            planner(etcd_server.endpoint, nats.url, namespace, *FAST, "--cool-down", "0") as process,
        ):
            frontend.waiting = 10_000
            await until_written(etcd_server, namespace, 8)
            frontend.waiting = 0
            nats.kill()
            shown = await process.shows(lambda shown: "NATS" in shown["holding"])
            assert [pool["target"] for pool in shown["pools"]] == [8]
            held = len(shown["decisions"])
            await nats.restart()
            await until_written(etcd_server, namespace, 1)
            assert "NATS" not in (await process.explain())["decisions"][0]["reason"]
            assert len((await process.explain())["decisions"]) > held


async def explained(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynamo.planner", "explain", *arguments), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_explain_shows_the_same_by_the_status_port_and_what_is_left_in_etcd(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    fleet = SimFleet(etcd_server, nats_server, namespace)
    in_etcd = ("--namespace", namespace, "--etcd-endpoints", etcd_server.endpoint)
    assert await explained(*in_etcd) == (0, "no targets: no planner has decided anything\n")
    async with (
        fleet.worker(),
        fake_frontend(nats_server, namespace),
        planner(etcd_server.endpoint, nats_server.url, namespace, *FAST) as process,
    ):
        await process.shows(decides)
        status, text = await explained("--url", process.url)
        assert (status, "the leader, every 0.2 s" in text, "sim: 1 wanted, 1 there" in text) == (0, True, True)
        status, text = await explained("--url", process.url, "--json")
        assert (status, json.loads(text)["namespace"]) == (0, namespace)
        await until_written(etcd_server, namespace, 1)
    status, text = await explained(*in_etcd)
    assert (status, "sim: 1, decided" in text) == (0, True)


async def test_a_dry_run_writes_nothing(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    fleet = SimFleet(etcd_server, nats_server, namespace)
    async with (
        fleet.worker(),
        fake_frontend(nats_server, namespace) as frontend,
        planner(etcd_server.endpoint, nats_server.url, namespace, *FAST, "--dry-run") as process,
    ):
        frontend.waiting = 10_000
        await process.logged("sim would be scaled from 1 to 8")
        assert written(etcd_server, namespace) is None


async def test_bounds_that_contradict_each_other_end_the_start_with_status_2(namespace: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynamo.planner", "--min-instances", "9", "--namespace", namespace),
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate()
    assert (process.returncode, b"--min-instances 9 is more than --max-instances 8" in error) == (2, True)
