"""The worker's side: a process that compiles one grammar at a time, and is started anew when a grammar was too much for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import msgspec

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Overloaded
from dynamo.worker.engine.llama.grammars.memory import CompiledMemory
from dynamo.worker.engine.llama.grammars.turns import Turns

MAX_CPU_S = 1
"""CPU time of one grammar. llama.cpp takes about as long again, in which it generates nothing."""
MAX_MEMORY_BYTES = 256 << 20
"""Address space of the process; it takes 40 MiB with nothing to do."""
MAX_WAITING = 64
_MAX_WALL_S = 120.0
"""For a process that waits instead of computing, or gets no CPU: the kernel bounds the time that it computes. The first grammar
waits for the interpreter to start, too, which takes long while others read the disk."""
_TOO_MUCH = frozenset({-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV, 1})
"""How a process ends that exceeds its bounds: of CPU time; of memory, in Rust, in C, in Python."""
_REMEMBERED = _TOO_MUCH - {1}
"""A process that cannot be started ends with 1, too."""
_MAX_LINE_BYTES = 8 << 20
_EXIT_S = 30.0
_TRIES = 3
_log = logging.getLogger(__name__)
COMMAND = (sys.executable, "-P", "-m", "dynamo.worker.engine.llama.grammars")


class Wanted(msgspec.Struct, frozen=True):
    guided: dict[str, Any]
    """As in `Sampling.guided`."""


class Compiled(msgspec.Struct, frozen=True, omit_defaults=True):
    grammar: str = ""
    problem: str = ""
    """Why there is no grammar."""
    param: str | None = None


class GrammarCompiler:
    """Compiles grammars from the first call of `compile` to `close`, on one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turns = Turns(MAX_WAITING)
        self._memory = CompiledMemory()

    async def compile(self, guided: Mapping[str, Any], key: str = "") -> str:
        """Return the grammar of `guided`. Raises InvalidRequest if there is none within the bounds, Overloaded, EngineError.

        `key`: the API key on whose behalf, which takes turns with the others. What was compiled, or refused, lately waits for no
        turn.
        """
        line = msgspec.json.encode(Wanted(dict(guided))) + b"\n"
        digest = sha256(line).digest()
        if (response := self._memory.find(digest)) is None:
            async with self._turns.turn(key):
                if (response := self._memory.find(digest)) is None:  # as of a request that came before
                    response = await self._compiled(line, next(iter(guided), "structured output"))
                    self._memory.add(digest, response)
        compiled = msgspec.json.decode(response, type=Compiled)
        if compiled.problem:
            raise InvalidRequest(compiled.problem, param=compiled.param)
        return compiled.grammar

    async def _compiled(self, line: bytes, kind: str) -> bytes:
        """Return the process's response, or that it exceeded its bounds. Raises Overloaded, EngineError, and InvalidRequest if it
        ended in a way that may not repeat.

        A process that ends is replaced, since it may have ended for another reason: one has lost its input as it was started. A
        grammar that takes too much memory takes it `_TRIES` times; one that takes too long has shown that.
        """
        status: int | None = None
        for _ in range(_TRIES):
            process = self._process or await self._start()
            if response := await self._response(process, line, kind):
                return response
            status = await self._exit_status(process)
            _log.warning("the process that compiles grammars ended with status %s over a %s", status, kind)
            if status == -signal.SIGPROF:
                break
        failure = _failure(status, kind)
        if status not in _REMEMBERED:
            raise failure
        return msgspec.json.encode(Compiled(problem=str(failure), param=kind))

    async def _response(self, process: asyncio.subprocess.Process, line: bytes, kind: str) -> bytes:
        """Return what a process responds; empty if it has ended. Raises Overloaded."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_MAX_WALL_S):
                # It has ended, which the next read says. RuntimeError: uvloop's for a pipe that it has closed.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
                    process.stdin.write(line)
                    await process.stdin.drain()
                response = await process.stdout.readline()
        except TimeoutError as error:
            await self.close()
            raise Overloaded(f"{kind} was not compiled within {_MAX_WALL_S:.0f} s") from error
        except BaseException:  # it must not give the next request this one's response
            await self.close()
            raise
        return response if response.endswith(b"\n") else b""

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, limit=_MAX_LINE_BYTES)
        except OSError as error:
            raise EngineError(f"the process that compiles grammars cannot be started: {error}") from error
        self._process = process
        return process

    async def _exit_status(self, process: asyncio.subprocess.Process) -> int | None:
        """Return how a process ended that has closed its output; None if it has not ended, and was killed."""
        self._process = None
        try:
            async with asyncio.timeout(_EXIT_S):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _failure(status: int | None, kind: str) -> DynamoError:
    """Return what the end of the process means for the request that it was compiling."""
    if status in _TOO_MUCH:
        return InvalidRequest(
            f"{kind} takes more than {MAX_CPU_S} s of CPU time, or more than {MAX_MEMORY_BYTES >> 20} MiB, to compile", param=kind
        )
    return EngineError(f"the process that compiles grammars ended with status {status}")
