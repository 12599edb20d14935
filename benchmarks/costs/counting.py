"""Counts what simulated processes do, while it is told to.

Per process: calls of Python functions, resumptions of generators and coroutines included; calls of functions written in C;
bytecode instructions, on Python 3.12 and later; `allocations`, objects that the garbage collector tracks; `sends` and `receives`,
the system calls of sockets; messages and bytes that it sends to NATS. Of all processes together: `garbage`, objects in cycles,
which only the garbage collector frees.

Python keeps only the difference of objects allocated and freed. `allocations` adds up by how much it grew from each call or
return to the next one: what is freed before that is not in it, nor what comes from a free list. What it takes to set a context
variable is left out: that depends on the variable's address, by which a context finds it, and so on the run.

What stands in for kernel, network, etcd and nats-server does not count, nor does asyncio's loop, which is uvloop's in production.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from tests.simulation.clock import current_process

ALL = "all"
"""Stands for all processes together."""
_ROOT = Path(__file__).parents[2]
_FOREIGN = (
    *(f"{_ROOT / folder}/" for folder in ("benchmarks", "tests")),
    *(str(Path(asyncio.__file__).with_name(f"{module}.py")) for module in ("base_events", "events", "selector_events")),
)
"""Files that stand in for something else, or only measure."""
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_BALLAST = 100_000
"""Objects that keep the collector's count above 0, below which it does not fall when older objects are freed."""


class Count:
    """Counts by process and figure, and calls by process and function, while `window` is open."""

    def __init__(self) -> None:
        self.figures: defaultdict[tuple[str, str], int] = defaultdict(int)  # a Counter would count its own calls
        self.functions: defaultdict[tuple[str, str], int] = defaultdict(int)
        """Calls of each function, named by its file and qualified name."""
        self._names: dict[int, str] = {}
        """By the identity of a function's code; empty: it does not count."""
        self._codes: list[CodeType] = []
        """Code objects of `_names`, kept so that no other gets the same identity."""
        self._is_open = False
        self._tracked = 0
        """Objects allocated less those freed, at the last event."""

    def add(self, figure: str, amount: int = 1) -> None:
        """Count for the process whose code runs."""
        process = current_process()
        if self._is_open and process is not None:
            self.figures[process.name, figure] += amount

    def add_to(self, process: str, figure: str) -> None:
        """Count one for a process by its name."""
        if self._is_open:
            self.figures[process, figure] += 1

    @contextmanager
    def window(self) -> Iterator[None]:
        """Count during the body. Needs the garbage collector to be disabled."""
        gc.collect()
        gc.freeze()  # so that the next collection looks only at what the body leaves
        ballast: list[list[object]] = [[] for _ in range(_BALLAST)]
        self._is_open = True
        _watch_instructions(self._instruction)
        self._tracked = gc.get_count()[0]
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            _watch_instructions(None)
            self._is_open = False
        del ballast
        self.figures[ALL, "garbage"] += gc.collect()

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        own = _made_for_profiler(frame, event, arg)
        grown = gc.get_count()[0] - self._tracked - (own if event in ("call", "c_call") else 0)
        name, process = self._name(frame.f_code), current_process()
        if process is not None:
            of = self._name(frame.f_back.f_code) if event == "call" and frame.f_back else name
            if grown > 0 and of and not _sets_variable(event, arg):
                self.figures[process.name, "allocations"] += grown
            if name and event == "call":
                self.figures[process.name, "calls"] += 1
                self.functions[process.name, name] += 1
            elif name and event == "c_call":
                self.figures[process.name, "C calls"] += 1
        self._tracked = gc.get_count()[0] - (0 if event in ("call", "c_call") else own)

    def _instruction(self, code: CodeType, offset: int) -> Any:
        if not self._name(code):
            return getattr(sys, "monitoring").DISABLE  # noqa: B009  # of Python 3.12
        process = current_process()
        if process is not None:
            self.figures[process.name, "instructions"] += 1
        return None

    def _name(self, code: CodeType) -> str:
        name = self._names.get(id(code))
        if name is None:
            name = "" if code.co_filename.startswith(_FOREIGN) else f"{_short(code.co_filename)}:{code.co_qualname}"
            self._names[id(code)] = name
            self._codes.append(code)
        return name


def _made_for_profiler(frame: FrameType, event: str, arg: Any) -> int:
    """Return the number of objects that Python makes before such an event, or frees after it, only because it is watched.

    It is the frame object of a plain function (that of a coroutine stays until it ends), or a method of a built-in type that is
    bound to its object.
    """
    if event in ("call", "return"):
        return not frame.f_code.co_flags & _SUSPENDS
    return not isinstance(getattr(arg, "__self__", None), ModuleType)


def _sets_variable(event: str, function: Any) -> bool:
    return event == "c_return" and isinstance(getattr(function, "__self__", None), ContextVar)


def _watch_instructions(callback: Any) -> None:
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:
        return
    tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION
    if callback is None:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    else:
        monitoring.use_tool_id(tool, "costs")
        monitoring.register_callback(tool, event, callback)
        monitoring.set_events(tool, event)


def _short(file: str) -> str:
    """Return a file's path from its package on."""
    for folder in ("/site-packages/", "/dynamo/"):
        if folder in file:
            return file.rpartition(folder)[2]
    return Path(file).name
