"""How long a process held its event loop, in CPU time: what the kernel gave to others in between is not counted."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import FrontendProcess

PROBE_INTERVAL_S = 0.01
MAX_HELD_S = 0.05
"""CPU time for which one request may hold a frontend's event loop, on the machine of `_REFERENCE_S`."""
_REFERENCE_S = 0.011
"""CPU time of `_reference_work` on the machine for which bounds are chosen."""


def held_s(front: FrontendProcess, attack: Callable[[], object], expected: Container[object]) -> float:
    """Return the CPU time for which a request held the event loop, in seconds of the machine for which bounds are chosen.

    `attack` sends the request and returns its status. The better of two, since a collection of garbage may fall into one.
    """
    probe = Probe(front.http_port, front.process.pid)
    held = float("inf")
    for _ in range(2):
        with probe.watching():
            status = attack()
        assert status in expected, status
        held = min(held, probe.worst_s if probe.worst_s <= MAX_HELD_S else probe.worst_s / slowness())
        if held <= MAX_HELD_S:
            break
    return held


def slowness() -> float:
    """Return how many times the CPU time of the machine for which bounds are chosen a piece of work takes here and now.

    At least 1: what the kernel does (copies, page faults) does not go by the speed of the interpreter.
    """
    return max(1.0, min(_reference_work() for _ in range(3)) / _REFERENCE_S)


def _reference_work() -> float:
    begun = time.thread_time()
    sum(len(str(number)) for number in range(100_000))
    return time.thread_time() - begun


@dataclass(slots=True)
class Probe:
    """Requests `/live` again and again, and finds how much CPU time passes until the event loop of the process responds.

    The response waits for the turn in which the request arrives. The CPU time of the busiest thread is counted: the loop's own,
    or another that holds the GIL. A thread that runs beside the loop does not delay the response, so little of it is counted.
    """

    port: int
    pid: int
    worst_s: float = 0.0
    """The most that one request took while the probe was watching."""

    @contextmanager
    def watching(self) -> Iterator[Probe]:
        self.worst_s = 0.0
        watching, ended = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._watch, args=(watching, ended))
        thread.start()
        try:
            watching.wait()
            yield self
        finally:
            ended.set()
            thread.join()

    def _watch(self, watching: threading.Event, ended: threading.Event) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        while not ended.is_set():
            before = self._ran_s()
            connection.request("GET", "/live")
            connection.getresponse().read()
            self.worst_s = max(self.worst_s, *(ran_s - before.get(thread, 0.0) for thread, ran_s in self._ran_s().items()))
            watching.set()
            time.sleep(PROBE_INTERVAL_S)
        connection.close()

    def _ran_s(self) -> dict[str, float]:
        """Return the CPU time of each thread until now."""
        ran_s: dict[str, float] = {}
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                ran_s[thread.name] = int((thread / "schedstat").read_text().split()[0]) / 1e9
        return ran_s
