"""The turns of an event loop: how long each took.

While turns are recorded the loop never sleeps, so that a turn is all that is done between two calls of the recorder. What counts
is the CPU time of its thread, which can be read on a machine that does other things as well. The rest of its time, others had the
processor or the interpreter.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns, thread_time_ns

_SHORT_NS = 200_000
"""Turns with less CPU time are not recorded."""


@dataclass(frozen=True, slots=True)
class Turn:
    wall_ms: float
    ran_ms: float
    """CPU time of the loop's thread."""


async def record_turns(path: Path) -> None:
    """Append a line for each turn between one SIGUSR1 and the next, until cancelled."""
    wanted = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: wanted.clear() if wanted.is_set() else wanted.set())
    with path.open("a", buffering=1) as file:
        while True:
            await wanted.wait()
            wall, ran = monotonic_ns(), thread_time_ns()
            while wanted.is_set():
                await asyncio.sleep(0)
                wall_now, ran_now = monotonic_ns(), thread_time_ns()
                if ran_now - ran > _SHORT_NS:
                    file.write(f"{wall_now - wall} {ran_now - ran}\n")
                wall, ran = wall_now, ran_now


def read_turns(path: Path) -> list[Turn]:
    """Return what was recorded. A line that is not complete yet is left out."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Turn(*(int(number) / 1e6 for number in line.split())) for line in lines]
