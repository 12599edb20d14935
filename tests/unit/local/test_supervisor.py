"""Child processes that die and are restarted, that stop in order, and that will not stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from dynamo.local.supervisor import ChildDied, Restarts, open_supervisor
from tests.support.servers import EtcdServer, etcdctl

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
    async with asyncio.timeout(120):
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


def test_a_process_that_keeps_ending_at_once_is_restarted_later_each_time_and_then_no_more() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(0.1) for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, None]


def test_a_process_that_ran_for_a_while_is_restarted_soon_however_often() -> None:
    restarts = Restarts()
    assert [restarts.pause_s(60.0) for _ in range(10)] == [0.5] * 10
    restarts.pause_s(0.1)
    assert (restarts.pause_s(60.0), restarts.pause_s(0.1)) == (0.5, 1.0), "a long run begins the count anew"


async def test_a_process_that_dies_is_restarted_and_the_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarts, "FIRST_PAUSE_S", 0.01)
    reported: list[str] = []
    restarted = asyncio.Event()

    def report(line: str) -> None:
        reported.append(line)
        if line == "worker 1 was restarted":
            restarted.set()

    async with asyncio.timeout(120), open_supervisor(report, stop_timeout_s=20) as supervisor:
        supervisor.start({"worker 1": python(STUBBORN), "worker 2": python(STUBBORN)}, tmp_path)
        await up(tmp_path / "worker-1.log")
        await up(tmp_path / "worker-2.log")
        supervisor.keep_running()
        first = int((tmp_path / "worker-1.log").read_text().split()[1])
        os.kill(first, signal.SIGKILL)
        await supervisor.unless_died(restarted.wait())
        async with asyncio.timeout(120):
            while (tmp_path / "worker-1.log").read_text().count("up") < 2:
                await asyncio.sleep(0.01)
        assert (tmp_path / "worker-2.log").read_text().count("up") == 1
        supervisor.kill()
    assert reported[0].startswith("worker 1 was ended by signal 9; it is restarted in 0.02 s, its log is ")


async def test_a_process_that_keeps_ending_ends_the_deployment_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Restarts, "FIRST_PAUSE_S", 0.001)
    async with asyncio.timeout(120), open_supervisor(lambda line: None, stop_timeout_s=20) as supervisor:
        supervisor.keep_running()
        supervisor.start({"worker 1": python("import sys; sys.exit('out of memory')")}, tmp_path)
        with pytest.raises(
            ChildDied, match=r"^worker 1 ended with status 1 5 times, each soon after its start; .*\nout of memory$"
        ):
            await supervisor.unless_died(asyncio.Event().wait())
    assert (tmp_path / "worker-1.log").read_text().count("out of memory") == Restarts.MAX_SHORT_RUNS


async def test_a_process_whose_configuration_is_wrong_is_not_restarted(tmp_path: Path) -> None:
    async with asyncio.timeout(120), open_supervisor(lambda line: None, stop_timeout_s=20) as supervisor:
        supervisor.keep_running()
        supervisor.start({"frontend": python("import sys; print('no such key file'); sys.exit(2)")}, tmp_path)
        with pytest.raises(ChildDied, match=r"^frontend ended with status 2; .*\nno such key file$"):
            await supervisor.unless_died(asyncio.Event().wait())


async def test_a_server_that_dies_is_restarted_on_its_port_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarts, "FIRST_PAUSE_S", 0.01)
    restarted = asyncio.Event()
    server = EtcdServer(tmp_path, fsync=False)
    async with (
        asyncio.timeout(120),
        open_supervisor(lambda line: restarted.set() if "was restarted" in line else None, stop_timeout_s=20) as supervisor,
    ):
        await supervisor.start_server("etcd", server)
        supervisor.keep_running()
        endpoint = server.endpoint
        await asyncio.to_thread(etcdctl, endpoint, "put", "/k", "kept")
        os.kill(server.pid, signal.SIGKILL)
        await supervisor.unless_died(restarted.wait())
        assert server.endpoint == endpoint
        assert "kept" in await asyncio.to_thread(etcdctl, endpoint, "get", "/k")


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
    async with asyncio.timeout(120), open_supervisor(lambda line: None, stop_timeout_s=600) as supervisor:
        supervisor.start({"worker": python(STUBBORN)}, tmp_path)
        await up(tmp_path / "worker.log")
        supervisor.kill()


async def test_one_process_of_a_stage_ends_and_another_one_joins_while_the_rest_goes_on(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    async with open_supervisor(lambda line: None, stop_timeout_s=20) as supervisor:
        names = ("worker 1", "worker 2")
        stage = supervisor.start({name: python(OBEDIENT, str(stopped), name[-1]) for name in names}, tmp_path)
        supervisor.keep_running()
        await up(tmp_path / "worker-1.log")
        await up(tmp_path / "worker-2.log")
        await supervisor.remove(stage, "worker 1", timeout_s=120)
        assert stopped.read_text().split() == ["1"]
        supervisor.add(stage, "worker 3", python(OBEDIENT, str(stopped), "3"))
        await up(tmp_path / "worker-3.log")
        assert [member.name for member in stage.members] == ["worker 2", "worker 3"]
    assert sorted(stopped.read_text().split()) == ["1", "2", "3"]


async def test_a_process_that_is_ended_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Restarts, "FIRST_PAUSE_S", 3600.0)
    reported = asyncio.Queue[str]()
    async with asyncio.timeout(120), open_supervisor(reported.put_nowait, stop_timeout_s=20) as supervisor:
        supervisor.keep_running()
        stage = supervisor.start({"worker": python("import sys; sys.exit(3)")}, tmp_path)
        assert (await reported.get()).startswith("worker ended with status 3; it is restarted in 7200 s")
        await supervisor.remove(stage, "worker", timeout_s=120)
        assert stage.members == []


async def test_a_process_that_is_ending_gets_no_second_signal_when_all_stop(tmp_path: Path) -> None:
    counting = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
open(sys.argv[1], "w").close()
while not signal.sigtimedwait([signal.SIGINT], 0.01):
    if signal.SIGTERM in signal.sigpending():
        sys.exit("a second SIGTERM")
print("ended in order", flush=True)
"""
    reported = asyncio.Queue[str]()
    async with asyncio.timeout(120), open_supervisor(reported.put_nowait, stop_timeout_s=120) as supervisor:
        stage = supervisor.start({"worker": python(counting, str(tmp_path / "ending"))}, tmp_path)
        await up(tmp_path / "worker.log")
        removing = asyncio.create_task(supervisor.remove(stage, "worker", timeout_s=120))
        while not (tmp_path / "ending").exists():
            await asyncio.sleep(0.01)
        removing.cancel()
        await asyncio.wait({removing})
        stopping = asyncio.create_task(supervisor.stop())
        assert await reported.get() == "stopping worker"
        os.kill(stage.member("worker").process.pid, signal.SIGINT)
        await stopping
    assert (tmp_path / "worker.log").read_text().splitlines() == ["up", "ended in order"]


async def test_the_deployment_goes_on_without_a_process_that_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Restarts, "FIRST_PAUSE_S", 0.001)
    reported: list[str] = []
    given_up = asyncio.Event()

    def report(line: str) -> None:
        reported.append(line)
        if "The deployment goes on without it." in line:
            given_up.set()

    async with asyncio.timeout(120), open_supervisor(report, stop_timeout_s=20) as supervisor:
        supervisor.keep_running()
        supervisor.start({"planner": python("import sys; sys.exit('no goal')")}, tmp_path, is_essential=False)
        await supervisor.unless_died(given_up.wait())
    assert reported[-1].startswith("planner ended with status 1 5 times") and "no goal" in reported[-1]


async def test_while_it_starts_the_deployment_needs_every_process(tmp_path: Path) -> None:
    async with open_supervisor(lambda line: None, stop_timeout_s=20) as supervisor:
        supervisor.start({"planner": python("import sys; sys.exit(2)")}, tmp_path, is_essential=False)
        with pytest.raises(ChildDied, match=r"^planner ended with status 2;"):
            await supervisor.unless_died(asyncio.Event().wait())
