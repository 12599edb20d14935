"""How a process starts, is stopped, and closes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import msgspec
import pytest

from dynamo.common.config import EXIT_CONFIG, ConfigError
from dynamo.common.lifecycle import EXIT_FAILURE, freeze_garbage, open_listener, run, stop_on_signal, within
from dynamo.common.process.background import running


@pytest.fixture
def _settings() -> Iterator[None]:
    before, digits = gc.get_threshold(), sys.get_int_max_str_digits()
    yield
    gc.set_threshold(*before)
    sys.set_int_max_str_digits(digits)


@pytest.mark.usefixtures("_settings")
def test_the_main_coroutine_runs_on_uvloop_and_its_result_is_returned() -> None:
    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(main()).startswith("uvloop")


@pytest.mark.usefixtures("_settings")
def test_numbers_of_a_request_have_a_length_that_takes_no_time_to_read() -> None:
    async def main() -> object:
        return msgspec.json.decode(b"9" * 640)

    assert run(main()) == int("9" * 640)
    with pytest.raises(msgspec.ValidationError, match="out of range"):
        msgspec.json.decode(b"9" * 641)


@pytest.mark.usefixtures("_settings")
def test_a_configuration_that_turns_out_wrong_ends_with_status_2_and_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def main() -> None:
        raise ConfigError("--grpc-port: cannot listen")

    with pytest.raises(SystemExit) as caught:
        run(main(), program="server")
    assert caught.value.code == EXIT_CONFIG
    assert capsys.readouterr().err == "server: --grpc-port: cannot listen\n"


@pytest.mark.usefixtures("_settings")
def test_a_background_task_that_fails_ends_the_process_with_status_1_and_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def follow() -> None:
        raise LookupError("no such shelf")

    async def main() -> None:
        async with running(follow(), "directory"):
            await asyncio.Event().wait()

    with pytest.raises(SystemExit) as caught:
        run(main(), program="server")
    assert caught.value.code == EXIT_FAILURE
    assert capsys.readouterr().err == "server: directory failed: LookupError: no such shelf\n"


async def test_the_first_signal_asks_and_the_second_ends() -> None:
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = stop_on_signal(at_once=ended.set_result)
    assert not stop.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stop.wait(), 120)
    assert not ended.done()
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(ended, 120) == signal.SIGINT


def test_a_process_that_will_not_stop_ends_at_the_second_signal() -> None:
    program = """
        import asyncio, os, signal
        from dynamo.common.lifecycle import run, stop_on_signal
        async def main():
            stop = stop_on_signal()
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        run(main())
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120, check=False)
    assert ended.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize(("end", "status"), [("return", 0), ("raise SystemExit(3)", 3)])
def test_a_process_ends_in_time_with_its_status_though_a_thread_is_stuck(end: str, status: int) -> None:
    program = f"""
        import threading
        from dynamo.common.lifecycle import run
        async def main():
            threading.Thread(target=threading.Event().wait, name="stuck").start()
            {end}
        run(main(), exit_timeout_s=0.1)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120, check=False, capture_output=True)
    assert (ended.returncode, b"0.1 s: stuck" in ended.stderr) == (status, True)


async def test_a_shutdown_step_that_takes_too_long_is_cut_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert await within(0.01, asyncio.Event().wait(), "draining") is False
    assert "draining did not finish within 0.01 s" in caplog.text


async def test_a_shutdown_step_that_fails_does_not_keep_the_next_from_running(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise OSError("broken pipe")

    async def succeed() -> None:
        return None

    assert await within(5, fail(), "closing NATS") is False
    assert "closing NATS failed" in caplog.text
    assert await within(5, succeed(), "closing etcd") is True


def test_what_lives_at_start_leaves_garbage_collection() -> None:
    gc.unfreeze()
    freeze_garbage()
    assert gc.get_freeze_count() > 1000
    gc.unfreeze()


def test_a_port_that_is_taken_is_named_with_its_flag() -> None:
    with open_listener("127.0.0.1", 0, flag="--http-port") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--http-port: cannot listen on 127.0.0.1:{port}: Address already in use"):
            open_listener("127.0.0.1", port, flag="--http-port")


def test_processes_may_share_a_port_when_told_so() -> None:
    with (
        open_listener("127.0.0.1", 0, flag="--http-port", reuse_port=True) as first,
        open_listener("127.0.0.1", first.getsockname()[1], flag="--http-port", reuse_port=True) as second,
    ):
        assert first.getsockname() == second.getsockname()


def test_a_host_that_does_not_exist_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"--http-host: cannot listen on 300\.0\.0\.1:0"):
        open_listener("300.0.0.1", 0, flag="--http-host").close()


def test_a_listener_accepts_connections() -> None:
    with open_listener("127.0.0.1", 0, flag="--http-port") as listener:
        socket.create_connection(listener.getsockname(), timeout=120).close()
