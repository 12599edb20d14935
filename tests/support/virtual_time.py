"""An event loop whose clock jumps: a test of a 30 s time-out takes no time, and measures exactly 30 s.

`run(main)` is for code without sockets: whenever nothing is ready, the clock moves to the next timer. What is given to a thread
is done at once.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type, unused-ignore]
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if len(self.get_map()) > 1 and (ready := super().select(0)):  # more than the loop's own pipe
            return ready
        if timeout is None:
            raise AssertionError("the test waits for something that nothing will bring about")
        self.now += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a loop of its own, whose clock begins at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Decorates an async test."""

    @wraps(test)
    def runs(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return runs
