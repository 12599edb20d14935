"""Starts what the manifests name: their commands, environment, files, probes and stop, on addresses of the loopback interface.

Every pod gets an address of its own out of 127.0.0.0/8, so that all ports stay as the manifests have them. Host names become
these addresses and mounted folders become folders of the test; nothing else is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import httpx2
import nats
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.options import NatsOptions
from dynamo.frontend.security.keys import entry_for, make_key
from dynamo.local.servers import etcd_binary, nats_binary
from tests.support.manifests import (
    DEPLOY,
    Files,
    Manifest,
    Placed,
    of_kind,
    pod_containers,
    pod_names,
    render,
    workloads,
)
from tests.support.repositories import python_model
from tests.support.waiting import WAIT_S

PASSWORDS = {"frontend-password": "p4frontends", "worker-password": "p4workers"}
OVERLAYS = DEPLOY / "k8s" / "overlays"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only 127.0.0.1 is on the loopback interface"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: the sockets that some programs put into /tmp may not have a long one."""
    with tempfile.TemporaryDirectory(prefix="pods-") as name:
        yield Path(name)


@dataclass
class Pod:
    """A container that runs as a process."""

    placed: Placed
    address: str
    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)

    @property
    def scheme(self) -> str:
        """The scheme of the port that probes ask."""
        return str(self.placed.container.spec["livenessProbe"]["httpGet"].get("scheme", "HTTP")).lower()

    def client(self, port: str, key: str = "") -> httpx2.AsyncClient:
        """For one of its HTTP ports, with an API key if there is one."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{self.scheme}://{self.address}:{self.placed.container.port(port)}"
        return httpx2.AsyncClient(base_url=url, headers=headers, verify=False)

    def log(self) -> str:
        return "\n".join(self.lines[-60:])

    async def read_log(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip())

    async def probe(self, kind: str) -> int:
        """Status that a probe of the manifest sees; 0 if nothing responds."""
        get = self.placed.container.spec[kind]["httpGet"]
        url = f"{self.scheme}://{self.address}:{self.placed.container.port(get['port'])}{get['path']}"
        async with httpx2.AsyncClient(verify=False) as client:  # as the kubelet, which checks no certificates
            try:
                return (await client.get(url, timeout=120)).status_code
            except httpx2.TransportError:
                return 0

    async def succeeds(self, kind: str, within_s: float = WAIT_S) -> None:
        """Returns when a probe succeeds. Without such a probe the pod counts as soon as it runs."""
        if kind not in self.placed.container.spec:
            return
        await self.until(lambda: self.probe(kind), lambda status: 200 <= status < 400, within_s)

    async def until(self, look: Callable[[], Awaitable[int]], is_right: Callable[[int], bool], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not is_right(await look()):
                    assert self.process.returncode is None, f"it ended with status {self.process.returncode}:\n{self.log()}"
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{self.placed.container.name} did not get there:\n{self.log()}") from None


@dataclass
class Fleet:
    pods: Mapping[str, Pod]
    hosts: Mapping[str, str]

    def named(self, container: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.placed.container.name == container]


def place(manifests: tuple[Manifest, ...], given: Mapping[str, Files], folder: Path, net: str) -> dict[str, tuple[Placed, str]]:
    """All containers with their addresses, by pod."""
    services = of_kind(manifests, "Service")
    hosts: dict[str, str] = {}
    addresses: dict[str, str] = {}
    for workload in workloads(manifests):
        for name in pod_names(workload):
            addresses[name] = f"{net}.{len(addresses) + 1}"
            hosts[f"{name}.{workload['spec'].get('serviceName')}"] = addresses[name]
            if workload["metadata"]["name"] in services:
                hosts.setdefault(workload["metadata"]["name"], addresses[name])
                hosts.setdefault(f"{workload['metadata']['name']}.{workload['metadata']['namespace']}", addresses[name])
    found: dict[str, tuple[Placed, str]] = {}
    for workload in workloads(manifests):
        for name in pod_names(workload):
            [container] = pod_containers(workload["spec"]["template"], name, manifests, given)
            local = hosts | {"0.0.0.0": addresses[name]}
            found[name] = (Placed(container, folder / name, local), addresses[name])
    return found


@asynccontextmanager
async def running(placed: Placed, address: str) -> AsyncIterator[Pod]:
    placed.write_files()
    binaries = {
        "/usr/local/bin/etcd": str(etcd_binary()),
        "nats-server": str(nats_binary()),
        **{program: str(Path(sys.executable).with_name(program)) for program in ("dynamo-frontend", "dynamo-worker")},
    }
    program, flags = placed.container.command[0], placed.command[1:]
    # As in the image: no home, and nothing of the environment of this test.
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "TMPDIR": placed.localise("/tmp"), **placed.environment}
    process = await asyncio.create_subprocess_exec(
        binaries[program],
        *flags,
        env=environment,
        cwd=placed.folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    pod = Pod(placed, address, process)
    reading = asyncio.create_task(pod.read_log())
    try:
        yield pod
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        await reading


@asynccontextmanager
async def fleet(
    overlay: str,
    folder: Path,
    *,
    tls: bool = False,
    secrets_given: Mapping[str, Files] = MappingProxyType({}),
    models: Path | None = None,
) -> AsyncIterator[Fleet]:
    """All pods of an overlay, one of each Deployment, started at the same time and ready by their own probes.

    `models` is what lies on the volume that is mounted at /models.
    """
    manifests = render(OVERLAYS / overlay)
    net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
    given: dict[str, Files] = {} if of_kind(manifests, "Secret") else {"dynamo-nats-auth": PASSWORDS}
    given |= secrets_given
    if tls:
        given |= certificates(net)
    placed = place(tuple(one_of_each(manifest) for manifest in manifests), given, folder, net)
    if models is not None:
        for pod, _ in placed.values():
            if "/models" in pod.container.mounts:
                shutil.copytree(models, pod.localise("/models"))
    async with AsyncExitStack() as stack:
        pods = {name: await stack.enter_async_context(running(*found)) for name, found in placed.items()}
        try:
            async with asyncio.TaskGroup() as waits:
                for pod in pods.values():
                    waits.create_task(ready(pod))
            yield Fleet(pods, next(iter(placed.values()))[0].hosts)
        except BaseException as error:
            for name, pod in pods.items():
                error.add_note(f"--- log of {name} ---\n{pod.log()}")
            raise


def one_of_each(manifest: Manifest) -> Manifest:
    if manifest["kind"] != "Deployment":
        return manifest
    return {**manifest, "spec": {**manifest["spec"], "replicas": 1}}


async def ready(pod: Pod) -> None:
    """As the kubelet goes about it."""
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        await pod.succeeds(kind)


def certificates(net: str) -> dict[str, Files]:
    """What cert-manager would put into the Secrets, for these addresses."""
    authority = trustme.CA()
    names = ["127.0.0.1", *(f"{net}.{index}" for index in range(1, 20))]  # the first: where connections come from
    made = {}
    for secret in ("dynamo-frontend-tls", "dynamo-client-tls", "dynamo-etcd-tls", "dynamo-nats-tls"):
        issued = authority.issue_cert(*names, common_name=secret)
        made[secret] = {
            "tls.crt": "".join(pem.bytes().decode() for pem in issued.cert_chain_pems),
            "tls.key": issued.private_key_pem.bytes().decode(),
            "ca.crt": authority.cert_pem.bytes().decode(),
        }
    return made


async def ask(pod: Pod, question: str = "Say one word.") -> str:
    """One chat completion."""
    async with pod.client("http") as client:
        [model] = (await client.get("/v1/models")).json()["data"]
        body = {"model": model["id"], "messages": [{"role": "user", "content": question}], "max_tokens": 4}
        response = await client.post("/v1/chat/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        content = response.json()["choices"][0]["message"]["content"]
        assert isinstance(content, str)
        return content


def shown_metrics(*dashboards: str) -> set[str]:
    """Families of ours that dashboards request, as a scrape names them."""
    text = "".join((DEPLOY / "grafana" / f"{name}.json").read_text() for name in dashboards)
    return {
        re.sub(r"_(bucket|sum|count|total)$", "", name)
        for name in re.findall(r"(?:dynamo_(?:frontend|runtime|component)|grpc_server)_\w+", text)
    }


async def count(pod: Pod, port: str, name: str) -> int:
    """Sum of a metric over its labels."""
    async with pod.client(port) as client:
        text = (await client.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return int(sum(sample.value for family in families for sample in family.samples if sample.name == name))


async def scraped(pod: Pod, port: str) -> set[str]:
    """Families of metrics that a Prometheus would see."""
    async with pod.client(port) as client:
        text = (await client.get("/metrics")).text
    return {family.name for family in text_string_to_metric_families(text)}


def assert_no_login_was_refused(found: Fleet) -> None:
    """Fail if a login was refused anything, but for what a worker tries that is there before the first frontend."""
    for name, pod in found.pods.items():
        lines = [line for line in pod.lines if "ermissions" in line or "uthorization" in line]
        lines = [line for line in lines if "$js.api.stream.create.obj_dynamo-models" not in line.lower()]
        assert not lines, f"{name}: {lines}"


@pytest.mark.real_model
async def test_the_dev_overlay_serves_and_stops_in_order(folder: Path) -> None:
    async with fleet("dev", folder) as found:
        [frontend] = found.named("frontend")
        [worker] = found.named("worker")
        assert await ask(frontend)
        assert_no_login_was_refused(found)
        assert not shown_metrics("fleet", "model", "router") - await scraped(frontend, "http")
        assert not shown_metrics("worker") - await scraped(worker, "status")

        frontend.process.send_signal(signal.SIGTERM)
        await frontend.until(lambda: frontend.probe("readinessProbe"), lambda status: status == 503, 5)
        assert await frontend.probe("livenessProbe") == 200
        assert await ask(frontend), "while it settles it still takes requests"
        for pod in (frontend, worker):
            if pod is worker:
                pod.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(120):
                assert await pod.process.wait() == 0, pod.log()


async def is_refused_without_certificate(etcd: str) -> bool:
    async with httpx2.AsyncClient(verify=False) as client:
        try:
            await client.get(f"https://{etcd}:2379/version", timeout=120)
        except httpx2.TransportError:
            return True
    return False


@pytest.mark.slow  # ten processes
@pytest.mark.real_model
async def test_the_tls_overlay_serves_over_three_etcd_and_three_nats(folder: Path) -> None:
    async with fleet("tls", folder, tls=True) as found:
        assert len(found.named("etcd")) == len(found.named("nats")) == 3
        [frontend] = found.named("frontend")
        assert await ask(frontend)
        assert_no_login_was_refused(found)
        address = (frontend.address, frontend.placed.container.port("grpc"))
        certificate = await asyncio.to_thread(ssl.get_server_certificate, address)
        assert certificate.strip() in frontend.placed.container.mounts["/etc/dynamo/tls"]["tls.crt"].strip()
        assert await is_refused_without_certificate(found.hosts["dynamo-etcd"])


@pytest.mark.slow  # eight processes
@pytest.mark.real_model
async def test_the_worker_of_one_namespace_serves_the_frontend_of_the_other(folder: Path) -> None:
    async with fleet("namespaces", folder) as found:
        [frontend] = found.named("frontend")
        assert await ask(frontend)
        assert_no_login_was_refused(found)


@pytest.mark.slow  # six processes
async def test_the_disaggregated_overlay_computes_prompts_in_one_pool_and_responds_in_the_other(folder: Path) -> None:
    async with fleet("disaggregated", folder) as found:
        [frontend] = found.named("frontend")
        pools = {pod.placed.container.command[-1]: pod for pod in found.named("worker")}
        assert pools.keys() == {"--role=prefill", "--role=decode"}
        await frontend.until(lambda: count(frontend, "http", "dynamo_frontend_model_instances"), lambda seen: seen == 2, 20)
        assert await ask(frontend)
        assert_no_login_was_refused(found)
        assert await count(pools["--role=prefill"], "status", "dynamo_component_requests_total") == 1
        assert await count(pools["--role=decode"], "status", "dynamo_component_requests_total") == 1


@pytest.mark.slow  # six processes
async def test_the_repository_overlay_serves_what_lies_on_the_volume_to_those_with_a_key(folder: Path, tmp_path: Path) -> None:
    key = make_key()
    given = {"dynamo-api-keys": {"keys.yaml": entry_for(key, "caller")}}
    python_model(tmp_path / "models", "double")
    async with fleet("repository", folder, secrets_given=given, models=tmp_path / "models") as found:
        [frontend] = found.named("frontend")
        async with frontend.client("http") as client:
            assert (await client.get("/v2/models/double")).status_code == 401
        async with frontend.client("http", key) as client:
            body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
            response = await client.post("/v2/models/double/infer", json=body)
            assert response.status_code == 200, response.text
            assert response.json()["outputs"][0]["data"] == [2, 4]
        assert_no_login_was_refused(found)


async def test_a_nats_of_the_manifests_stops_as_its_pod_is_told_to(folder: Path) -> None:
    async with nats_alone(folder) as pod:
        stop = pod.placed.container.spec["lifecycle"]["preStop"]["exec"]["command"]
        stop = await asyncio.create_subprocess_exec(
            str(nats_binary()), *(pod.placed.localise(word) for word in stop[1:]), stderr=asyncio.subprocess.PIPE
        )
        assert await stop.wait() == 0
        await pod.until(lambda: lame(pod), bool, 10)


async def lame(pod: Pod) -> int:
    return sum("lame duck" in line.lower() for line in pod.lines)


@pytest.mark.parametrize(
    ("user", "key", "allowed", "refused"),
    [
        ("worker", "worker-password", "dynamo.dynamo.responses.c1.1.1", "dynamo.dynamo.backend.1f.rpc"),
        ("worker", "worker-password", "dynamo.dynamo.backend.kv.1f", "$JS.API.STREAM.DELETE.OBJ_dynamo-models"),
        ("worker", "worker-password", "dynamo.dynamo.backend.load.1f", "dynamo.dynamo.backend.bookings"),
        ("worker", "worker-password", "$JS.API.STREAM.INFO.dynamo-kv", "$O.dynamo-kv-snapshots.M.x"),
        ("frontend", "frontend-password", "$JS.API.STREAM.PURGE.dynamo-kv", "$JS.API.STREAM.DELETE.dynamo-kv"),
        ("frontend", "frontend-password", "dynamo.dynamo.backend.1f.rpc", "dynamo.dynamo.responses.c1.1.1"),
        ("frontend", "frontend-password", "dynamo.dynamo.backend.bookings", "dynamo.dynamo.backend.kv.1f"),
        ("frontend", "frontend-password", "dynamo.dynamo.backend.bookings", "$O.dynamo-models.M.x"),
    ],
)
async def test_each_role_may_publish_what_it_needs_and_no_more(
    folder: Path, user: str, key: str, allowed: str, refused: str
) -> None:
    async with nats_alone(folder) as pod:
        violations: asyncio.Queue[str] = asyncio.Queue()

        async def failed(error: Exception) -> None:
            violations.put_nowait(str(error))

        url = f"nats://{pod.address}:4222"
        client = await nats.connect(url, user=user, password=PASSWORDS[key], error_cb=failed)
        await client.publish(allowed, b"")
        await client.flush()
        await client.publish(refused, b"")
        async with asyncio.timeout(120):
            violation = await violations.get()
        assert refused.lower() in violation.lower()
        assert violations.empty()
        await client.close()


async def test_durable_kv_events_need_no_more_than_each_role_may(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        pod = await stack.enter_async_context(nats_alone(folder))
        streams: dict[str, KvStream] = {}
        connections: dict[str, Connection] = {}
        for role in ("worker", "frontend"):
            config = NatsOptions(servers=(f"nats://{pod.address}:4222",), user=role, password=PASSWORDS[f"{role}-password"])
            connections[role] = await stack.enter_async_context(connect_nats(config, role, role=role))
            streams[role] = KvStream(connections[role])
        worker, frontend = streams["worker"], streams["frontend"]
        recorded: asyncio.Queue[str] = asyncio.Queue()
        async with asyncio.timeout(120), worker.receipts(recorded.put_nowait) as receipts:
            assert await frontend.ensure() == await worker.ensure()
            for number in range(3):
                connections["worker"].publish_nowait("dynamo.dynamo.backend.kv.1f", b"x", f"{receipts}.{number}")
                assert await recorded.get() == str(number)
            assert await frontend.count("dynamo.dynamo.backend.kv.*") == 3
            assert [len(batch) async for batch in frontend.since("dynamo.dynamo.backend.kv.*", 1)] == [2]
            async with frontend.lock("dynamo.dynamo.backend.kv") as ours, frontend.lock("dynamo.dynamo.backend.kv") as again:
                assert (ours, again) == (True, False)
            async with frontend.lock("dynamo.dynamo.backend.kv") as ours:
                assert ours
            for snapshot in (b"a", b"b" * 300_000):
                await frontend.save("dynamo.dynamo.backend.kv", snapshot)
                assert await frontend.load("dynamo.dynamo.backend.kv") == snapshot
            await frontend.forget("dynamo.dynamo.backend.kv")
            assert await frontend.load("dynamo.dynamo.backend.kv") is None
            await frontend.purge("dynamo.dynamo.backend.kv.*", 2)
            assert await frontend.count("dynamo.dynamo.backend.kv.*") == 1
        assert "violation" not in caplog.text.lower()


@asynccontextmanager
async def nats_alone(folder: Path) -> AsyncIterator[Pod]:
    """The single NATS of the dev overlay, with other passwords."""
    manifests = tuple(manifest for manifest in render(OVERLAYS / "dev") if manifest["kind"] not in ("Deployment", "Secret"))
    net = f"127.{secrets.randbelow(200) + 20}.{secrets.randbelow(250) + 1}"
    placed, address = place(manifests, {"dynamo-nats-auth": PASSWORDS}, folder, net)["dynamo-nats-0"]
    async with running(placed, address) as pod:
        await ready(pod)
        yield pod
