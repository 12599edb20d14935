"""An event loop in virtual time that runs several simulated processes, each of which can be paused and killed.

What a process schedules belongs to it: the loop finds the process in the context of each callback. Callbacks of a paused process
wait until it is resumed, as under SIGSTOP; those of a killed one never run, as under SIGKILL: no `finally` of it is entered.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

from tests.support.virtual_time import VirtualTimeLoop

_current: ContextVar[Process | None] = ContextVar("simulated process", default=None)


def current_process() -> Process | None:
    """Return the process whose code runs; None outside of all."""
    return _current.get()


class Process:
    """One simulated process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self.tasks: set[asyncio.Task[Any]] = set()
        """Tasks that it started and that have not ended."""
        self.at_death: list[Callable[[], None]] = []
        """What the kernel does when it ends."""
        self._held: list[tuple[asyncio.Handle, Callable[[], object]]] = []
        self.context = copy_context()
        self.context.run(_current.set, self)

    def __repr__(self) -> str:
        state = "paused" if self.is_paused else "alive" if self.is_alive else "dead"
        return f"<Process {self.name} {state}, {len(self.tasks)} tasks>"

    def start(self, main: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `main` as the process's main task."""
        return self.context.copy().run(asyncio.get_running_loop().create_task, main, name=self.name)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """Run what became due in the meantime, in the order in which it did."""
        self.is_paused = False
        held, self._held = self._held, []
        loop = asyncio.get_running_loop()
        for handle, callback in held:
            if not handle.cancelled():
                loop.call_soon(callback, context=self.context)

    def kill(self) -> None:
        """End the process without a word: none of its code runs from here on."""
        self.is_alive = False
        self._held.clear()
        while self.at_death:
            self.at_death.pop()()

    def gate(self, handle: list[asyncio.Handle], callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Run `callback`, unless the process is paused or dead."""
        own = handle.pop()  # the two hold each other, and with them what `callback` belongs to
        if not self.is_alive:
            return
        if self.is_paused:
            self._held.append((own, lambda: callback(*args)))
        else:
            callback(*args)


class SimulatedLoop(VirtualTimeLoop):
    """Virtual time; callbacks are gated by their process; tasks are known to it; connections go to `network`."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_make_task)
        self.connect: Callable[[str, int, Callable[[], asyncio.BaseProtocol]], Coroutine[Any, Any, Any]] | None = None
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_numbers = itertools.count()

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        """Run what is ready. asyncio's own way compares timers in Python and looks at sockets, of which there are none here."""
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        timers = self._timers
        while timers and (timers[0][2].cancelled() or timers[0][0] <= self._now or not ready):
            when, _, timer = heapq.heappop(timers)
            if not timer.cancelled():
                self._now = max(self._now, when)
                ready.append(timer)
        if not ready:
            raise AssertionError("the simulation waits for something that nothing will bring about")
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when its time comes."""

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        if self.is_closed():  # what is left of a history is being collected
            return asyncio.Handle(callback, args, self, context)
        process = _current.get() if context is None else context.get(_current)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        cell: list[asyncio.Handle] = []
        handle = super().call_soon(process.gate, cell, callback, args, context=context)
        cell.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        process = _current.get() if context is None else context.get(_current)
        if process is None:
            return self._add_timer(when, callback, args, context)
        cell: list[asyncio.Handle] = []
        handle = self._add_timer(when, process.gate, (cell, callback, args), context)
        cell.append(handle)
        return handle

    def _add_timer(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._timer_numbers), handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Call `func` at once: threads have no place in virtual time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **more: Any) -> Any:
        assert self.connect is not None and not more
        return await self.connect(host, port, protocol_factory)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, **more)
    process = _current.get()
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard, context=Context())
    return task
