"""Workers that join and end while the others serve, told apart by what they register."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dynamo.common.discovery import Instance
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.local.config import MAX_WORKERS
from dynamo.local.supervisor import open_supervisor
from dynamo.local.workers import Workers

WAITING = "import signal; signal.sigwait([signal.SIGTERM])"
BLOCKING = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); " + WAITING


@asynccontextmanager
async def workers(count: int, folder: Path, commands: list[str]) -> AsyncIterator[Workers]:
    """Workers that wait for SIGTERM; `commands` gets the names that they would register."""

    def command(process_name: str) -> list[str]:
        commands.append(process_name)
        return [sys.executable, "-c", BLOCKING]

    async with open_supervisor(lambda line: None, stop_timeout_s=120) as supervisor:
        yield Workers(supervisor, command, count, folder, {}, drain_s=120.0)


def registration(number: int, process: str, started_at: float) -> Instance:
    card = ModelCard(name="m", kind=ModelKind.TENSOR)
    return Instance(id=InstanceId(number), endpoint=Endpoint(), subject="s", card=card, started_at=started_at, process=process)


async def test_registrations_belong_to_the_worker_that_has_their_name_and_runs_now(tmp_path: Path) -> None:
    names: list[str] = []
    async with workers(2, tmp_path, names) as own:
        now = time.time()
        mine, former = registration(1, names[0], now), registration(2, names[1], now - 3600)
        foreign = registration(3, names[0].replace(names[0][:8], "0" * 8), now)
        assert own.serving([mine, former, foreign]) == {"worker 1": [mine]}


async def test_a_worker_that_ends_counts_no_more_and_its_number_is_free_when_it_has_ended(tmp_path: Path) -> None:
    names: list[str] = []
    async with workers(2, tmp_path, names) as own:
        ending = own.end("worker 1")
        assert own.names == ["worker 2"] and own.serving([registration(1, names[0], time.time())]) == {}
        assert own.add() == "worker 3", "the first still has its number, and its log"
        await ending
        assert own.add() == "worker 1"
        assert own.names == ["worker 2", "worker 3", "worker 1"]


async def test_there_are_no_more_than_there_may_be(tmp_path: Path) -> None:
    async with workers(MAX_WORKERS, tmp_path, []) as own:
        assert own.add() is None
        await own.end("worker 7")
        assert (own.add(), own.add()) == ("worker 7", None)
        await asyncio.gather(*(own.end(name) for name in own.names))
