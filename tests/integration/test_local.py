"""`dynamo-local` as a user runs it: real etcd, nats-server, workers and frontend, started and stopped by one command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from dynamo.common.errors import Unauthenticated
from dynamo.common.etcd import connect_etcd
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import EtcdOptions, NatsOptions
from dynamo.local.logins import LoginsNotSet, make_login, protect_etcd
from tests.support.servers import EtcdServer, NatsServer, etcdctl, start_etcd
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
CLASSIFIER = "examples/classifier.py:Classifier"
RUNNING = "Ctrl-C stops everything."


class Launcher:
    """A running `dynamo-local` and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(120):
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line.rstrip())
                if text in line:
                    return
        raise AssertionError(f"ended without {text!r}:\n" + "\n".join(self.lines))

    async def end(self) -> int:
        """Reads what is left; returns the exit status."""
        assert self.process.stdout is not None
        async with asyncio.timeout(120):
            while line := (await self.process.stdout.readline()).decode():
                self.lines.append(line.rstrip())
            return await self.process.wait()

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def command(folder: Path, *flags: str) -> list[str]:
    ports = ["--http-port", "0", "--grpc-port", "0", "--folder", str(folder)]
    return [sys.executable, "-m", "dynamo.local", *ports, *flags]


@asynccontextmanager
async def launched(arguments: Sequence[str]) -> AsyncIterator[Launcher]:
    process = await asyncio.create_subprocess_exec(
        *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        yield Launcher(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def gone(pids: Sequence[int]) -> None:
    """Returns when none of the processes is there any more."""
    async with asyncio.timeout(120):
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            await asyncio.sleep(0.05)


async def test_one_command_answers_a_first_request_with_two_workers_and_cleans_up(tmp_path: Path) -> None:
    question = "classifier=@examples/classifier.json"
    flags = ["--workers", "2", "--model", CLASSIFIER, "--model", "echo", "--question", question, "--once"]
    async with launched(command(tmp_path, *flags)) as local:
        assert await local.end() == 0, local.text
    assert "classifier: tensor model, 2 instance(s)" in local.text
    assert "name BYTES [1]: seven" in local.text
    stops = [line.strip() for line in local.lines if line.strip().startswith("stopping")]
    assert stops == ["stopping frontend", "stopping worker 1, worker 2", "stopping nats-server", "stopping etcd"]


async def test_flags_of_the_frontend_and_the_workers_reach_them_and_ctrl_c_drains_everything(tmp_path: Path) -> None:
    flags = ["--model", "echo", "--router-mode", "kv", "--grpc-server", "native", "--max-open-requests", "8"]
    async with launched(command(tmp_path, *flags)) as local:
        await local.read_until(RUNNING)
        children = local.children()
        assert len(children) == 4
        running = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in children]
        local.process.send_signal(signal.SIGINT)
        assert await local.end() == 0, local.text
        await gone(children)
    assert "deregistering" in (tmp_path / "logs" / "worker-1.log").read_text()
    (front,) = [words for words in running if "dynamo.frontend" in words]
    (worker,) = [words for words in running if "dynamo.worker" in words]
    assert "--router-mode=kv" in front and "--max-open-requests=8" in worker
    assert local.lines[0] == "--grpc-server native is deprecated: use http2, since the next version refuses it"
    assert "by the http2 server" in (tmp_path / "logs" / "frontend.log").read_text()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--router-mode", "best"], "--router-mode: 'best' is not one of "),
        (["--max-open-requests", "none"], "--max-open-requests: 'none' is not an integer"),
        (["--drain-timeout", "5"], "--drain-timeout is a flag of several programs; use --frontend-flag=--drain-timeout=… or "),
    ],
)
async def test_a_wrong_flag_ends_the_start_with_a_sentence_and_status_2(tmp_path: Path, flags: list[str], sentence: str) -> None:
    async with launched(command(tmp_path / "deployment", *flags)) as local:
        assert await local.end() == 2
    (line,) = local.lines
    assert line.startswith(f"dynamo-local: {sentence}")
    assert not (tmp_path / "deployment").exists(), "nothing has been started"


async def enters(options: NatsOptions) -> None:
    async with connect_nats(options, "stranger"):
        pass


async def test_other_users_of_the_machine_have_no_login_at_etcd_and_nats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with launched(command(tmp_path, "--model", "echo")) as local:
        await local.read_until(RUNNING)
        addresses = {line.split()[0]: line.split()[1].rstrip(",") for line in local.lines if ", password in " in line}
        etcd, nats = EtcdOptions(endpoints=(addresses["etcd"],)), NatsOptions(servers=(addresses["nats-server"],))
        async with connect_etcd(etcd) as client:
            for call in (client.range("/", prefix=True), client.put("/k", b"1"), client.delete("/", prefix=True)):
                with pytest.raises(Unauthenticated):
                    await call
        wrong = replace(etcd, user="root", password="swordfish")
        async with connect_etcd(wrong) as client:
            with pytest.raises(Unauthenticated):
                await client.range("/", prefix=True)
        for options in (nats, replace(nats, user="dynamo", password="swordfish")):
            caplog.clear()
            entering = asyncio.create_task(enters(options))
            await until(lambda: "Authorization Violation" in caplog.text)
            assert not entering.done()
            entering.cancel()
        passwords = [(tmp_path / "logins" / name).read_text() for name in ("etcd", "nats")]
        own = replace(etcd, user="root", password=passwords[0])
        async with connect_etcd(own) as client:
            assert (await client.range("/dynamo/v1/", prefix=True)).kvs
        shown = [Path(f"/proc/{pid}/cmdline").read_text() for pid in local.children()]
        shown += [local.text, *(file.read_text(errors="replace") for file in tmp_path.rglob("*.log"))]
        assert not any(password in text for password in passwords for text in shown)
        local.process.send_signal(signal.SIGINT)
        assert await local.end() == 0, local.text
    readable_by_others = {
        file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_mode & 0o077 and secret_in(file, passwords)
    }
    assert readable_by_others == set()


async def test_an_etcd_that_others_used_while_it_started_is_refused(tmp_path: Path) -> None:
    async with start_etcd(tmp_path / "etcd") as server:
        await asyncio.to_thread(etcdctl, server.endpoint, "put", "/planted", "1")
        with pytest.raises(LoginsNotSet, match="was used by another program while it started"):
            await protect_etcd(server.endpoint, make_login("root", tmp_path / "login"))


async def test_an_etcd_with_a_login_keeps_it_over_a_restart(tmp_path: Path) -> None:
    login = make_login("root", tmp_path / "login")
    server = EtcdServer(tmp_path / "etcd", fsync=False, login=login)
    await server.start()
    try:
        await server.restart()
        async with connect_etcd(EtcdOptions(endpoints=(server.endpoint,))) as stranger:
            with pytest.raises(Unauthenticated):
                await stranger.put("/k", b"1")
        async with connect_etcd(EtcdOptions(endpoints=(server.endpoint,), user="root", password=login.password)) as client:
            await client.put("/k", b"1")
    finally:
        await server.stop()


def secret_in(file: Path, secrets: Sequence[str]) -> bool:
    content = file.read_bytes()
    return any(secret.encode() in content for secret in secrets)


@pytest.mark.slow  # it kills
async def test_a_second_signal_ends_all_at_once(tmp_path: Path) -> None:
    async with launched(command(tmp_path, "--model", "echo", "--stop-timeout", "600")) as local:
        await local.read_until(RUNNING)
        children = local.children()
        frontend = next(pid for pid in children if b"dynamo.frontend" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(frontend, signal.SIGSTOP)  # it will not stop in order
        local.process.send_signal(signal.SIGTERM)
        await local.read_until("stopping frontend")
        local.process.send_signal(signal.SIGTERM)
        assert await local.end() == 128 + signal.SIGTERM
        await gone(children)


@pytest.mark.slow  # it kills
async def test_what_is_said_to_be_served_is_and_nothing_is_left_behind_when_the_launcher_is_killed(tmp_path: Path) -> None:
    async with launched(command(tmp_path, "--model", "echo", "--no-ask")) as local:
        await local.read_until("workers      1")
        frontend = local.children()[-1]  # started last
        os.kill(frontend, signal.SIGSTOP)  # it is up later than the worker
        await local.read_until("1 of 1 ready")
        os.kill(frontend, signal.SIGCONT)
        await local.read_until("Serving")
        http = next(line.split()[-1] for line in local.lines if "HTTP at" in line)
        async with httpx2.AsyncClient(base_url=http) as client:
            assert (await client.get("/v2/models/echo/ready")).status_code == 200
        await local.read_until(RUNNING)
        children = local.children()
        local.process.kill()
        await local.process.wait()
        await gone(children)


@pytest.mark.slow
async def test_whatever_dies_is_restarted_and_the_deployment_serves_on(tmp_path: Path) -> None:
    async with launched(command(tmp_path, "--model", "echo", "--workers", "2")) as local:
        await local.read_until(RUNNING)
        target = next(line.split()[-1] for line in local.lines if "KServe v2 gRPC" in line)
        names = {"dynamo.worker": "worker", "dynamo.frontend": "frontend", "/etcd\0": "etcd", "nats-server\0": "nats-server"}
        for part, name in names.items():
            os.kill(
                next(pid for pid in local.children() if part.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()),
                signal.SIGKILL,
            )
            await local.read_until("was restarted")
            assert name in local.lines[-1] and "was ended by signal 9; it is restarted in" in local.lines[-2]
        arguments = [sys.executable, "-m", "dynamo.local.ask", target, "echo"]
        process = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert (process.returncode, b"INPUT0 FP32 [1]: 1" in output) == (0, True)
        local.process.send_signal(signal.SIGINT)
        assert await local.end() == 0, local.text


@pytest.mark.slow  # it kills
async def test_a_worker_that_dies_before_it_serves_ends_the_deployment_and_is_named(tmp_path: Path) -> None:
    async with launched(command(tmp_path, "--model", "echo", "--no-ask")) as local:
        await local.read_until("workers      1")
        worker = next(pid for pid in local.children() if b"dynamo.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(worker, signal.SIGKILL)
        assert await local.end() == 1
    assert "dynamo-local: worker 1 was ended by signal 9; its log" in local.text
    assert "stopping etcd" in local.text


async def test_a_frontend_with_api_keys_gets_no_first_request_and_serves(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps([{"name": "a", "hash": f"sha256:{'0' * 32}:{'a' * 64}"}]))
    keys.chmod(0o600)
    flags = ("--model", "echo", f"--frontend-flag=--api-keys-file={keys}")
    async with launched(command(tmp_path / "local", *flags)) as local:
        await local.read_until(RUNNING)
        assert "No first requests are sent: the frontend requires an API key" in local.text
        local.process.send_signal(signal.SIGINT)
        assert await local.end() == 0, local.text


async def test_a_model_that_cannot_be_served_is_a_sentence_on_the_screen(tmp_path: Path) -> None:
    async with launched(command(tmp_path, "--model", "examples/none.py:None_")) as local:
        assert await local.end() == 1
    assert "there is no file" in local.text and "Traceback" not in local.text


async def test_an_etcd_and_a_nats_that_already_run_are_used_and_left_running(
    tmp_path: Path, etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    elsewhere = ["--etcd-endpoints", etcd_server.endpoint, "--nats-servers", nats_server.url, "--namespace", namespace]
    async with launched(command(tmp_path, "--model", "echo", *elsewhere)) as local:
        await local.read_until(RUNNING)
        assert f"/dynamo/v1/{namespace}/" in etcdctl(etcd_server.endpoint, "get", "--prefix", "--keys-only", "/dynamo/")
        assert len(local.children()) == 2
        local.process.send_signal(signal.SIGTERM)
        assert await local.end() == 0, local.text
    assert etcd_server.is_running and nats_server.is_running
    assert f"/dynamo/v1/{namespace}/" not in etcdctl(etcd_server.endpoint, "get", "--prefix", "--keys-only", "/dynamo/")


async def test_nats_server_can_run_as_a_batch_process(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, jetstream=False, batch=True)
    await server.start()
    try:
        assert os.sched_getscheduler(server.pid) == os.SCHED_BATCH
    finally:
        await server.stop()


async def test_two_deployments_cannot_share_a_folder(tmp_path: Path) -> None:
    async with launched(command(tmp_path, "--model", "echo", "--no-ask")) as first:
        await first.read_until("data and logs in")
        async with launched(command(tmp_path, "--model", "echo", "--once")) as second:  # ends if it is let in, too
            assert await second.end() == 2, f"the first: {first.process.returncode}, {second.text}"
        first.process.send_signal(signal.SIGTERM)  # in the middle of the start
        assert await first.end() == 0, first.text
    assert "is in use by another dynamo-local" in second.text


@pytest.mark.slow  # two workers that each load and run a language model
@pytest.mark.real_model
async def test_a_real_language_model_streams_through_the_grpc_port(tmp_path: Path) -> None:
    flags = ["--workers", "2", "--model", "smollm2", "--question", "smollm2=Name a colour.", "--once"]
    async with launched(command(tmp_path, *flags)) as local:
        assert await local.end() == 0, local.text
    assert "smollm2: language model, 2 instance(s)" in local.text
    command_line = next(index for index, line in enumerate(local.lines) if "-m dynamo.local.ask" in line)
    assert local.lines[command_line + 1].strip()
    parts = next(line for line in local.lines if "parts streamed" in line)
    assert int(parts.lstrip("[").split()[0]) > 1
