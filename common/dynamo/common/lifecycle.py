"""The life of a process: its event loop, its memory settings, the signals that stop it, and the order in which it closes.

def main() -> None:
    config = load_or_exit(FrontendConfig, program="dynamo-frontend")
    setup_logging(config.log)
    run(serve(config), program="dynamo-frontend")

async def serve(config: FrontendConfig) -> None:
    stop = stop_on_signal()
    async with AsyncExitStack() as stack:      # closes in reverse order
        ...
        freeze_garbage()
        await stop.wait()
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import uvloop

from dynamo.common.config import EXIT_CONFIG, ConfigError, exit_with
from dynamo.common.process.background import TaskFailed
from dynamo.common.process.memory import keep_freed_memory

log = logging.getLogger(__name__)

T = TypeVar("T")

_handlers: dict[int, Callable[[int], None]] = {}
"""What `stop_on_signal` installed, by signal."""

EXIT_OK = 0
EXIT_FAILURE = 1
"""Something broke at run time. A wrong configuration ends with `config.EXIT_CONFIG`, 2."""


def run(main: Coroutine[Any, Any, T], *, program: str = "dynamo", exit_timeout_s: float | None = None) -> T:
    """Run `main` on a uvloop event loop, with memory settings for large messages, and return its result.

    A ConfigError (a port that is taken, a certificate that cannot be read) is printed as one sentence; status 2. So is the
    failure of a background task, which has been logged with its traceback; status 1.

    With `exit_timeout_s`, for a program that ends with `run`: that long after `main` has ended, the process ends even if tasks
    or threads do not, and a signal ends it at once.
    """
    keep_freed_memory()
    sys.set_int_max_str_digits(640)  # Python's least; the time goes by the square of the digits
    gc.set_threshold(50_000, 20, 50)  # most of what requests make dies by reference count
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if exit_timeout_s is None:
                return runner.run(main)
            with _ending_within(exit_timeout_s):
                return runner.run(main)
    except ConfigError as error:
        _flush()
        exit_with(program, error)
    except TaskFailed as error:
        _flush()
        print(f"{program}: {error}", file=sys.stderr)  # noqa: T201  # before there is a log, or after it
        sys.exit(EXIT_FAILURE)


@contextmanager
def _ending_within(timeout_s: float) -> Iterator[None]:
    """End the process `timeout_s` after the body, whatever still runs then, with the status that the body ended with."""
    status = EXIT_FAILURE
    try:
        yield
        status = EXIT_OK
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else EXIT_FAILURE
        raise
    except ConfigError:
        status = EXIT_CONFIG
        raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: end_at_once(number))
        timer = threading.Timer(timeout_s, _exit_with_stuck_threads, (timeout_s, status))
        timer.daemon = True
        timer.start()


def _exit_with_stuck_threads(timeout_s: float, status: int) -> None:
    stuck = ", ".join(
        thread.name for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
    )
    log.warning("the process ends with these threads still running after %g s: %s", timeout_s, stuck or "none")
    _flush()
    os._exit(status)


def _flush() -> None:
    """Write what was printed and logged."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def freeze_garbage() -> None:
    """Exempt all objects of now from garbage collection. To be called once, when the start is complete."""
    gc.collect()
    gc.freeze()


def stop_on_signal(at_once: Callable[[int], None] | None = None) -> asyncio.Event:
    """Return an event that the first SIGINT or SIGTERM sets. A second one ends the process at once, or calls `at_once(signal)`.

    To be called on the main thread, inside the running loop.
    """
    stop = asyncio.Event()

    def received(number: int) -> None:
        name = signal.Signals(number).name
        if not stop.is_set():
            log.info("%s: stopping; a second signal ends the process at once", name)
            stop.set()
        else:
            log.warning("second signal (%s): ending at once", name)
            (at_once or end_at_once)(number)

    _handlers.update(dict.fromkeys((signal.SIGINT, signal.SIGTERM), received))
    restore_signals()
    return stop


def restore_signals() -> None:
    """Receive the signals of `stop_on_signal` again, after a library has taken them. Does nothing in a process without it."""
    loop = asyncio.get_running_loop()
    for number, received in _handlers.items():
        loop.add_signal_handler(number, received, number)


def end_at_once(number: int) -> NoReturn:
    """End the process without closing anything, with the status that shells give to that signal."""
    _flush()
    os._exit(128 + number)


async def within(timeout_s: float, step: Awaitable[object], what: str) -> bool:
    """Await one step of a shutdown for at most `timeout_s`; past it, cancel the step, log it and return False.

    The next step must run whatever the last one did, so an error of the step is logged as well. Cancellation passes through.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await step
    except TimeoutError:
        log.warning("%s did not finish within %g s and was cancelled", what, timeout_s)
        return False
    except Exception:
        log.exception("%s failed", what)
        return False
    return True


def open_listener(host: str, port: int, *, flag: str, reuse_port: bool = False) -> socket.socket:
    """Return a listening TCP socket; port 0 lets the system choose. Raises ConfigError naming `flag` if it cannot be opened.

    `reuse_port` lets several processes listen on one port, so it hides that another process listens there already.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot listen on {host}:{port}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{flag}: cannot listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener
