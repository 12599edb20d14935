"""Processes of the last released commit (`released.txt`) beside those of this checkout; no request fails, as in an upgrade."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.compare import checked_out, source_roots
from dynamo.common.messaging.jetstream.store import BUCKET
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import NatsOptions
from tests.support.fleet import Client, Fleet, FleetFrontend, FleetWorker, Text, echo_request, text_request
from tests.support.servers import EtcdServer, NatsServer, start_nats

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
SIM = "sim:blocks=4000,block_size=4,speedup=1,seed=3"
MODELS = ("--model", "echo", "--model", SIM)
KV = ("--router-mode", "kv", "--router-speculative-ttl-s", "0")
"""What is cached where is known by events only."""
NEW: Sequence[Path] = ()


@pytest.fixture(scope="module")
def released() -> Iterator[Sequence[Path]]:
    """The folders of the released code. A clone without the commit fetches it; where that is impossible, the tests fail."""
    commit = (HERE / "released.txt").read_text().strip()
    git = ("git", "-C", str(HERE))
    if subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False).returncode:
        subprocess.run([*git, "fetch", "--depth", "1", "origin", commit], check=True)
    with checked_out(commit) as folder:
        roots = source_roots(folder)
        for module in ("dynamo.common", "dynamo.frontend", "dynamo.worker", "dynamo.protos.inference_pb2"):
            assert imported_from(module, roots).is_relative_to(folder)
        yield roots


def imported_from(module: str, roots: Sequence[Path]) -> Path:
    """Return the file of a module in a process with this code."""
    code = f"import {module} as module; print(module.__file__)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def names_in(page: str) -> set[tuple[str, str]]:
    """Return each flag, variable, file key and `flag value` of docs/configuration.md, with its program."""
    names = set[tuple[str, str]]()
    for section in page.split("\n## ")[1:]:
        program = section.partition("\n")[0]
        for row in re.findall(r"^\| `--.*", section, re.MULTILINE):
            *cells, _, text = row.split(" | ", 4)
            flag, *_ = given = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
            values = re.findall(r"`([^`]+)`", text.rpartition("One of: ")[2]) if "One of: " in text else []
            names |= {(program, name) for name in (*given, *(f"{flag} {value}" for value in values))}
    return names


def gone(before: str, now: str, upgrades: str) -> set[tuple[str, str]]:
    """Return what the configuration of before had and now has not, without a successor in docs/operations.md."""
    replaced = set(re.findall(r"^\| (\S+) \| `([^`]+)` \| `[^`]+` \|", upgrades, re.MULTILINE))
    return names_in(before) - names_in(now) - replaced


def test_no_flag_or_value_of_the_released_version_has_gone_without_a_successor(released: Sequence[Path]) -> None:
    docs = HERE.parents[1] / "docs"
    before, now = (folder / "configuration.md" for folder in (released[0].parent / "docs", docs))
    assert len(names_in(before.read_text())) > 500
    assert gone(before.read_text(), now.read_text(), (docs / "operations.md").read_text()) == set()


def test_a_flag_and_a_value_that_are_gone_are_found() -> None:
    row = "| `--server` | `DYN_SERVER` | `server` | `auto` | Which one runs. One of: {} |"
    before, now = (f"\n## dynamo\n{row.format(values)}" for values in ("`auto`, `native`.", "`auto`, `http2`."))
    assert gone(before, now, "") == {("dynamo", "--server native")}
    assert gone(before, now, "| dynamo | `--server native` | `--server http2` |") == set()
    assert gone(before, "", "") == names_in(before)
    assert ("dynamo", "DYN_SERVER") in names_in(before)


@pytest.fixture
async def former_nats(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A nats-server with the bucket of models' files as the released version has made it: messages may replace others there."""
    async with start_nats(tmp_path / "nats") as server:
        async with connect_nats(NatsOptions(servers=(server.url,)), "test") as nats:
            await nats.client.jetstream().create_object_store(BUCKET)
        yield server


@pytest.fixture
def sides(request: pytest.FixtureRequest, released: Sequence[Path]) -> tuple[Sequence[Path], Sequence[Path]]:
    """The code of the frontend, and of the workers."""
    return (NEW, released) if request.param == "old workers" else (released, NEW)


@pytest.mark.parametrize("sides", ["old workers", "old frontend"], indirect=True)
async def test_frontends_and_workers_of_two_versions_serve_tensors_texts_and_route_by_kv_events(
    etcd_server: EtcdServer, former_nats: NatsServer, namespace: str, sides: tuple[Sequence[Path], Sequence[Path]]
) -> None:
    frontend_code, worker_code = sides
    async with Fleet(etcd_server, former_nats, namespace, MODELS) as fleet:
        workers = [await fleet.add_worker(sources=worker_code) for _ in range(2)]
        front = await fleet.add_frontend(*KV, sources=frontend_code)
        await asyncio.gather(*(worker.serving() for worker in workers))
        await front.sees(*workers)
        await front.process.serves("echo", "sim")
        async with front.client() as client:
            await finds_cached_blocks(front, client)
            text, large = Text(), bytes(range(256)) * 4096
            async with client.load(4) as load, asyncio.TaskGroup() as tasks:
                tasks.create_task(client.text(text_request("a long story", 100), text))
                response = await client.infer(echo_request(large))
                await text.at_least(3)
                await load.completed(100)
            assert list(response.raw_output_contents) == [large]
            assert load.failures == []
            assert text.reason == "length"


async def finds_cached_blocks(front: FleetFrontend, client: Client) -> None:
    """Return when the frontend has routed a prompt by the blocks that a worker has published."""
    prefix = "the same words in each of them, many times over, to fill some blocks; " * 4
    async with asyncio.timeout(120):
        for number in itertools.count():
            await client.text(text_request(f"{prefix}{number}", 2))
            if await front.metric("dynamo_frontend_router_overlap_blocks_sum"):
                return


@pytest.mark.parametrize("sides", ["old workers", "old frontend"], indirect=True)
async def test_workers_are_replaced_under_load_by_those_of_the_other_version_without_a_failed_request(
    etcd_server: EtcdServer,
    former_nats: NatsServer,
    namespace: str,
    sides: tuple[Sequence[Path], Sequence[Path]],
    released: Sequence[Path],
) -> None:
    """A text moves on from the worker of one version, which is killed, to that of the other."""
    frontend_code, worker_code = sides
    other_code = NEW if worker_code is released else released
    async with Fleet(etcd_server, former_nats, namespace, MODELS) as fleet:
        before = [await fleet.add_worker(sources=worker_code) for _ in range(2)]
        front = await fleet.add_frontend(sources=frontend_code)
        await asyncio.gather(*(worker.serving() for worker in before))
        await front.sees(*before)
        await front.process.serves("echo", "sim")
        async with front.client() as client:
            story = text_request("a long story", 150)
            expected = (await client.text(story)).text
            text = Text()
            async with client.load(4) as load, asyncio.TaskGroup() as tasks:
                after = [await fleet.add_worker(sources=other_code) for _ in range(2)]
                await asyncio.gather(*(worker.serving() for worker in after))
                await front.sees(*before, *after)
                await ended(before[0])
                tasks.create_task(client.text(story, text))
                await text.at_least(3)
                await before[1].killed()
                await front.sees(*after)
                await load.completed(100)
            assert load.failures == []
            assert text.text == expected


async def ended(worker: FleetWorker) -> None:
    worker.process.terminate()
    assert await worker.process.ended() == 0
