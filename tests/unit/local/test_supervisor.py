"""Child processes that die, that stop in order, and that will not stop."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from dynamo.local.supervisor import ChildDied, open_supervisor

OBEDIENT = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
open(sys.argv[1], "a").write(sys.argv[2] + "\\n")
"""
STUBBORN = """
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", os.getpid(), flush=True)
while True:
    signal.pause()
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


async def up(log: Path) -> None:
    """Returns when the process has written its first line, from which on it handles signals as it means to."""
    async with asyncio.timeout(20):
        while not (log.exists() and "up" in log.read_text()):
            await asyncio.sleep(0.01)


async def test_stages_stop_in_the_reverse_order_of_their_start(tmp_path: Path) -> None:
    reported: list[str] = []
    stopped = tmp_path / "stopped"
    async with open_supervisor(reported.append, stop_timeout_s=20) as supervisor:
        supervisor.start({"first": python(OBEDIENT, str(stopped), "first")}, tmp_path)
        supervisor.start({"second": python(OBEDIENT, str(stopped), "second")}, tmp_path)
        await up(tmp_path / "first.log")
        await up(tmp_path / "second.log")
    assert stopped.read_text().split() == ["second", "first"]
    assert reported == ["stopping second", "stopping first"]


async def test_a_process_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    async with open_supervisor(lambda line: None, stop_timeout_s=20) as supervisor:
        supervisor.start({"worker 1": python("import sys; sys.exit('model not found')")}, tmp_path)
        with pytest.raises(
            ChildDied, match=r"^worker 1 ended with status 1; its log .*worker-1.log ends with:\nmodel not found$"
        ):
            await supervisor.unless_died(asyncio.Event().wait())


async def test_a_process_ended_by_a_signal_is_reported_with_its_number(tmp_path: Path) -> None:
    async with open_supervisor(lambda line: None, stop_timeout_s=20) as supervisor:
        supervisor.start({"worker": python("import os; os.kill(os.getpid(), 9)")}, tmp_path)
        with pytest.raises(ChildDied, match=r"^worker was ended by signal 9;"):
            await supervisor.unless_died(asyncio.Event().wait())


async def test_work_that_ends_before_any_process_gives_its_result(tmp_path: Path) -> None:
    async def work() -> int:
        return 7

    async with open_supervisor(lambda line: None, stop_timeout_s=20) as supervisor:
        supervisor.start({"worker": python(OBEDIENT, str(tmp_path / "stopped"), "worker")}, tmp_path)
        assert await supervisor.unless_died(work()) == 7


async def test_a_process_that_will_not_stop_is_killed_after_the_timeout(tmp_path: Path) -> None:
    async with open_supervisor(lambda line: None, stop_timeout_s=0.1) as supervisor:
        supervisor.start({"worker": python(STUBBORN)}, tmp_path)
        await up(tmp_path / "worker.log")
        pid = int((tmp_path / "worker.log").read_text().split()[1])
    assert not Path(f"/proc/{pid}").exists()


async def test_forced_to_end_nothing_is_waited_for(tmp_path: Path) -> None:
    async with asyncio.timeout(20), open_supervisor(lambda line: None, stop_timeout_s=600) as supervisor:
        supervisor.start({"worker": python(STUBBORN)}, tmp_path)
        await up(tmp_path / "worker.log")
        supervisor.kill()
