"""Planner processes whose decisions are carried out: by Kubernetes, by the virtual connector's keys, and by `dynamo-local`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import trustme

from dynamo.common.etcd import connect_etcd
from dynamo.common.options import EtcdOptions
from tests.integration.test_local import RUNNING, command, launched
from tests.integration.test_local_scaling import Fleet, workers_of
from tests.integration.test_planner import FAST, fake_frontend, until_written, written
from tests.integration.test_virtual_connector import PlannerDecision, VirtualConnectorClient
from tests.support.certificates import issue, write_ca
from tests.support.kubernetes_api import KubernetesApiServer, serving_kubernetes_api
from tests.support.processes import planner
from tests.support.servers import EtcdServer, NatsServer
from tests.support.sim_fleet import SimFleet
from tests.support.waiting import until

RULES = [{"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": ["workers"], "verbs": ["get", "patch"]}]


async def test_a_planner_scales_a_deployment_and_says_so_when_it_may_not(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    authority = trustme.CA()
    write_ca(authority, tmp_path / "ca.crt")
    (tmp_path / "token").write_text("first-token")
    (tmp_path / "namespace").write_text("dynamo")
    server = KubernetesApiServer([])
    workload = server.add_workload("deployments", "workers", 1)
    fleet = SimFleet(etcd_server, nats_server, namespace)
    with serving_kubernetes_api(server, issue(authority, tmp_path, "server")):
        own = ("--executor=kubernetes", "--kubernetes-deployment=sim=workers", f"--kubernetes-service-account={tmp_path}")
        where = ("--kubernetes-host=127.0.0.1", f"--kubernetes-port={server.port}")
        async with (
            fleet.worker(),
            fake_frontend(nats_server, namespace) as frontend,
            planner(etcd_server.endpoint, nats_server.url, namespace, *FAST, *own, *where) as process,
        ):
            frontend.waiting = 10_000
            shown = await process.shows(lambda shown: "is forbidden" in shown["executor_error"])
            assert shown["executor"] == "kubernetes" and workload.replicas == 1
            await until_written(etcd_server, namespace, 8)  # which shows what is wanted
            server.rules = RULES
            await process.shows(lambda shown: not shown["executor_error"])
            await until(lambda: workload.replicas == 8)


async def test_a_planner_gives_its_numbers_to_a_program_for_the_virtual_connector(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    fleet = SimFleet(etcd_server, nats_server, namespace)
    async with (
        connect_etcd(EtcdOptions(endpoints=(etcd_server.endpoint,))) as etcd,
        fleet.worker(),
        fake_frontend(nats_server, namespace) as frontend,
        planner(etcd_server.endpoint, nats_server.url, namespace, *FAST, "--executor=virtual"),
    ):
        client = VirtualConnectorClient(etcd, namespace)
        first = await decided(client, lambda decision: decision.decision_id == 0)
        assert first == PlannerDecision(num_decode_workers=1, decision_id=0)
        await client.complete(first)
        frontend.waiting = 10_000
        await decided(client, lambda decision: decision == PlannerDecision(num_decode_workers=8, decision_id=1))


async def decided(client: VirtualConnectorClient, is_so: Callable[[PlannerDecision], bool]) -> PlannerDecision:
    async with asyncio.timeout(120):
        while not is_so(decision := await client.get()):
            await asyncio.sleep(0.05)
    return decision


async def test_one_command_starts_a_planner_and_the_workers_that_it_wants_and_a_dead_one_changes_nothing(
    tmp_path: Path, etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    elsewhere = ("--etcd-endpoints", etcd_server.endpoint, "--nats-servers", nats_server.url, "--namespace", namespace)
    flags = ("--model", "sim:speedup=0", "--planner", "--min-instances", "2", "--interval", "0.2", "--no-ask", *elsewhere)
    async with (
        connect_etcd(EtcdOptions(endpoints=(etcd_server.endpoint,))) as etcd,
        launched(command(tmp_path, *flags)) as local,
    ):
        await local.read_until(RUNNING)
        await Fleet(etcd, namespace).become(2)
        before = workers_of(local)
        [planning] = [pid for pid in local.children() if b"dynamo.planner" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(planning, signal.SIGKILL)
        await local.read_until("planner was restarted")
        assert workers_of(local) == before and await asyncio.to_thread(written, etcd_server, namespace) == 2
        local.process.send_signal(signal.SIGTERM)
        assert await local.end() == 0, local.text
    stops = [line.strip() for line in local.lines if line.strip().startswith("stopping")]
    assert stops[:2] == ["stopping planner", "stopping frontend"]
