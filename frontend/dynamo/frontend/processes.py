"""Several frontend processes on the same ports: the kernel spreads connections over them, their metrics are added up.

The first process only supervises. It stops its children with one SIGTERM when it is stopped itself, and restarts a child
that ended by itself, after a pause that grows while children keep ending.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import time
from multiprocessing.context import SpawnProcess
from types import FrameType

from prometheus_client.multiprocess import mark_process_dead

from dynamo.common.config import EXIT_CONFIG, ConfigError
from dynamo.common.errors import InvalidRequest
from dynamo.common.etcd.config import check_etcd
from dynamo.common.lifecycle import EXIT_FAILURE, EXIT_OK, open_listener, run
from dynamo.common.logs import setup_logging
from dynamo.common.messaging.nats.login import check_nats
from dynamo.common.security.tls import read_contents
from dynamo.frontend import app
from dynamo.frontend.api.guard import watch_keys
from dynamo.frontend.api.rpc.server import check_grpc
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.wiring.picker import PORT_FLAG

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_STEADY_S = 60.0
"""A child that ran for so long did not fail at its start."""
_METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def supervise(config: FrontendConfig, program: str) -> int:
    """Run `config.processes` frontends until SIGINT or SIGTERM; return the exit status.

    Raises ConfigError for a port that is taken. A second signal ends all of them at once.
    """
    try:
        check_nats(config.nats)
        check_etcd(config.etcd)
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error
    if config.access.keys_file is not None:
        watch_keys(config.access.keys_file)
    # The children share the ports, which hides that another process listens there already.
    open_listener(config.http.host, config.http.port, flag="--http-port").close()
    if config.prometheus.port is not None:
        open_listener(config.prometheus.host, config.prometheus.port, flag="--prometheus-port").close()
    if config.grpc.wanted:
        check_grpc(config.grpc)
    if config.endpoint_picker.enabled:
        check_grpc(config.picker_grpc, flag=PORT_FLAG)
    if config.http.tls is not None:
        read_contents(config.http.tls)
    folder = tempfile.mkdtemp(prefix="dynamo-metrics-")
    os.environ[_METRICS_FOLDER] = folder  # read by the metrics library when a child imports it
    try:
        return _Supervisor(config, program, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Supervisor:
    def __init__(self, config: FrontendConfig, program: str, folder: str) -> None:
        self._config = config
        self._program = program
        self._folder = folder
        self._children: dict[SpawnProcess, float] = {}
        """With the time of their start."""
        self._stopping: signal.Signals | None = None
        """The signal by which the children are to end."""
        self._signalled_children: set[SpawnProcess] = set()
        self._status = EXIT_OK

    def run(self) -> int:
        wake, wakes = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)  # a signal must end the wait below, whose system call Python restarts
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signalled)
        pause_s = _FIRST_PAUSE_S
        for _ in range(self._config.processes):
            if self._stopping is None:
                self._start()
        while self._children:
            multiprocessing.connection.wait([wake, *(child.sentinel for child in self._children)])
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)
            for child, started in [item for item in self._children.items() if not item[0].is_alive()]:
                del self._children[child]
                mark_process_dead(child.pid, self._folder)  # type: ignore[no-untyped-call]
                if self._stopping:
                    ended_early = child.exitcode == -signal.SIGTERM  # before it handled signals, so it served nothing
                    self._status = self._status or (EXIT_FAILURE if child.exitcode and not ended_early else EXIT_OK)
                elif child.exitcode == EXIT_CONFIG:  # a configuration that one child cannot use, none can
                    self._stop(signal.SIGTERM)
                    self._status = child.exitcode
                else:
                    pause_s = _FIRST_PAUSE_S if time.monotonic() - started > _STEADY_S else pause_s
                    log.error("process %s ended with status %s; starting another in %g s", child.pid, child.exitcode, pause_s)
                    multiprocessing.connection.wait([wake], pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    if self._stopping is None:
                        self._start()
        return self._status

    def _start(self) -> None:
        arguments = (self._config, self._program, self._folder)
        child = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments)
        child.start()
        self._children[child] = time.monotonic()
        if self._stopping is not None and child not in self._signalled_children:  # the signal came while it was started
            self._signal(child, self._stopping)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            log.warning("second signal: ending all processes at once")
        self._stop(signal.SIGKILL if self._stopping else signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping = number
        for child in self._children:
            self._signal(child, number)

    def _signal(self, child: SpawnProcess, number: signal.Signals) -> None:
        self._signalled_children.add(child)
        if child.pid is not None and child.is_alive():
            os.kill(child.pid, number)


def _serve(config: FrontendConfig, program: str, folder: str) -> None:
    """Run one frontend in a child process."""
    os.setsid()  # a terminal's Ctrl-C goes to the supervisor alone, or else each of us would count two signals
    threading.Thread(target=_end_with_supervisor, name="supervisor", daemon=True).start()
    setup_logging(config.log)
    run(app.run(config, metrics_folder=folder), program=program)


def _end_with_supervisor() -> None:
    """Stop this process when the supervisor has ended without stopping it.

    Linux could do that by PR_SET_PDEATHSIG, but sends that signal for each thread of the dead process, and a second SIGTERM ends
    us at once, whatever we are doing.
    """
    supervisor = multiprocessing.parent_process()
    assert supervisor is not None
    multiprocessing.connection.wait([supervisor.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
