"""Rollouts of workers as Kubernetes does them: each is stopped as soon as others are ready, and requests go on all the time.

The new workers have a chat template that takes a frontend seconds to compile, as a large tokenizer takes to load.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import msgspec
import pytest

from dynamo.common.admission import AdmissionQuery, AdmissionReport
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.names import admitted_reply
from dynamo.common.options import NatsOptions
from dynamo.common.process.ports import free_ports
from tests.support.processes import FrontendProcess, Process, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S, expiring

REPLICAS = 2
SHORT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
BRANCHES = "".join(f"{{% if {n} == {n + 1} %}}{n}{{% endif %}}" for n in range(400))
LARGE = "{% if not messages %}" + BRANCHES + "{% endif %}" + SHORT


@dataclass
class Pod:
    process: Process
    port: int
    is_ready: bool = False

    async def ready(self) -> None:
        """Return when its readiness probe succeeds."""
        async with asyncio.timeout(WAIT_S), httpx2.AsyncClient(base_url=f"http://127.0.0.1:{self.port}") as http:
            while not self.is_ready:
                assert self.process.process.returncode is None, self.process.log()
                try:
                    self.is_ready = (await http.get("/health")).status_code == 200
                except httpx2.TransportError:
                    await asyncio.sleep(0.02)
                else:
                    await asyncio.sleep(0.01)


class Deployment:
    """Two pods of a worker, replaced as a Deployment's controller replaces them."""

    def __init__(self, etcd: EtcdServer, nats: NatsServer, namespace: str, stack: AsyncExitStack) -> None:
        self.old: list[Pod] = []
        self._where = (etcd, nats, namespace)
        self._stack = stack

    async def start(self, template: Path, *flags: str) -> Pod:
        [port] = free_ports(1)
        model = ("--model", "sim", "--engine", "sim", "--chat-template", str(template), "--status-port", str(port))
        return Pod(await self._stack.enter_async_context(worker(*self._where, *model, *flags)), port)

    async def begin(self, template: Path) -> None:
        self.old = [await self.start(template) for _ in range(REPLICAS)]
        for pod in self.old:
            await pod.ready()

    async def roll_out(self, template: Path, max_surge: int, max_unavailable: int) -> None:
        """Replace all pods; return when the old ones have ended and the new ones are ready."""
        stopping: list[Pod] = []
        new: list[Pod] = []
        while self.old or not all(pod.is_ready for pod in new):
            while self.old and sum(pod.is_ready for pod in self.old + new) > REPLICAS - max_unavailable:
                stopping.append(self.old.pop(0))
                stopping[-1].process.terminate()
            while len(new) < REPLICAS and len(self.old) + len(new) < REPLICAS + max_surge:
                new.append(await self.start(template))
            waiting = [asyncio.create_task(pod.ready()) for pod in new if not pod.is_ready]
            if waiting:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                if task.done():
                    task.result()
                task.cancel()
        for pod in stopping:
            assert await pod.process.ended() == 0
        self.old = new


class Load:
    """Conversations and readiness probes at all frontends without a pause."""

    def __init__(self, fronts: list[FrontendProcess]) -> None:
        self.urls = [f"http://127.0.0.1:{front.http_port}" for front in fronts]
        self.served = 0
        self.failures: list[str] = []
        self._stop = asyncio.Event()

    async def converse(self, number: int) -> None:
        body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        async with httpx2.AsyncClient(timeout=WAIT_S) as http:
            for url in itertools.cycle(self.urls[number % 2 :] + self.urls[: number % 2]):
                if self._stop.is_set():
                    return
                response = await http.post(f"{url}/v1/chat/completions", json=body)
                if response.status_code == 200:
                    self.served += 1
                else:
                    self.failures.append(f"{response.status_code}: {response.text}")

    async def probe(self, url: str) -> None:
        async with httpx2.AsyncClient(timeout=WAIT_S) as http:
            while not self._stop.is_set():
                response = await http.get(f"{url}/health")
                if response.status_code != 200:
                    self.failures.append(f"a frontend is not ready: {response.text}")
                await asyncio.sleep(0.02)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(self.converse(number))
            for url in self.urls:
                tasks.create_task(self.probe(url))
            try:
                yield
            finally:
                self._stop.set()


@pytest.mark.parametrize(
    ("max_surge", "max_unavailable"), [(0, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 0), (1, 1)))]
)
async def test_no_request_fails_and_no_frontend_is_unready_while_workers_are_replaced(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path, max_surge: int, max_unavailable: int
) -> None:
    old, new = tmp_path / "old.jinja", tmp_path / "new.jinja"
    old.write_text(SHORT)
    new.write_text(LARGE)
    async with AsyncExitStack() as stack:
        where = etcd_server.endpoint, nats_server.url, namespace
        fronts = [await stack.enter_async_context(frontend(*where, "--router-mode", "kv")) for _ in range(2)]
        deployment = Deployment(etcd_server, nats_server, namespace, stack)
        await deployment.begin(old)
        for front in fronts:
            await front.serves("sim")
        load = Load(fronts)
        async with load.running():
            await deployment.roll_out(new, max_surge, max_unavailable)
            served = load.served
            async with asyncio.timeout(WAIT_S):
                while load.served < served + 20:
                    await asyncio.sleep(0.01)
        assert load.failures == []


async def test_without_a_frontend_a_worker_is_ready_once_it_has_registered(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(SHORT)
    async with AsyncExitStack() as stack:
        pod = await Deployment(etcd_server, nats_server, namespace, stack).start(template, "--ready-timeout", str(10 * WAIT_S))
        await pod.ready()


async def test_a_frontend_that_never_admits_a_worker_delays_it_no_longer_than_the_bound(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(SHORT)
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(connect_nats(NatsOptions(servers=(nats_server.url,)), "a broken frontend"))

        def refuse(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
            query = msgspec.msgpack.decode(payload, type=AdmissionQuery)
            report = AdmissionReport("broken", query.number, is_admitted=False)
            nats.publish_nowait(admitted_reply(subject), msgspec.msgpack.encode(report))

        await stack.enter_async_context(nats.subscribed(f"dynamo.{namespace}.*.admission.*", refuse))
        bound = str(expiring(3.0))
        pod = await Deployment(etcd_server, nats_server, namespace, stack).start(template, "--ready-timeout", bound)
        await pod.ready()
        await pod.process.logged("1 processes of frontends have not admitted this instance after 3 s")
