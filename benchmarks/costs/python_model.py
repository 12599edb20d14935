"""What stands in for the process of a Python-backend model: it returns its inputs as outputs, at once.

The worker's side is the real one, down to the messages on the socket. What the process itself does is not counted.
"""

from __future__ import annotations

import mmap
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import cast

from benchmarks.costs.counting import Count
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.worker.repository.python.environments import OWN, Interpreter
from dynamo.worker.repository.python.stub_process import CallHandlers, StubProcess
from dynamo.worker.repository.wire import wire

_INFER_NS = 20_000


class _Ended:
    """The process: there is none to end."""

    pid = 0

    def kill(self) -> None:
        """Nothing runs."""

    def wait(self) -> int:
        return 0


class EchoSocket:
    """The worker's end of the socket, and the model behind it. `readable` is called when there is something to receive."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._requests = wire.MessageReader()
        self._unread = bytearray()
        self.readable: Callable[[], object] = lambda: None

    def setblocking(self, flag: bool) -> None:
        """It never blocks."""

    def close(self) -> None:
        """Nothing is open."""

    def sendmsg(self, pieces: Sequence[wire.Buffer]) -> int:
        self._count.add("sends")
        data = memoryview(b"".join(pieces))
        rest = data
        while rest.nbytes:
            space = self._requests.space()
            size = min(space.nbytes, rest.nbytes)
            space[:size] = rest[:size]
            rest = rest[size:]
            for message, raws in self._requests.advance(size):
                self._unread += b"".join(_response(message, raws))
        if self._unread:
            self.readable()
        return data.nbytes

    def recv_into(self, buffer: memoryview) -> int:
        self._count.add("receives")
        if not self._unread:
            raise BlockingIOError
        size = min(buffer.nbytes, len(self._unread))
        buffer[:size] = self._unread[:size]
        del self._unread[:size]
        if self._unread:
            self.readable()
        return size


def _response(message: wire.Message, raws: list[memoryview]) -> list[wire.Buffer]:
    if not isinstance(message, wire.Execute):
        return wire.encode(wire.Ready())
    responses = []
    for request in message.requests:
        outputs = tuple(wire.TensorHead("OUTPUT0", each.datatype, each.shape, each.size) for each in request.inputs)
        responses.append(wire.Response(number=request.number, outputs=outputs))
    return wire.encode(wire.Done(number=message.number, responses=tuple(responses), infer_ns=_INFER_NS), raws)


class Stubs:
    """Takes the place of `open_stub`."""

    def __init__(self, count: Count) -> None:
        self._count = count

    async def open(
        self, name: str, handlers: CallHandlers, memory: SharedMemory | None = None, interpreter: Interpreter = OWN
    ) -> StubProcess:
        connection = EchoSocket(self._count)
        process = cast("subprocess.Popen[bytes]", _Ended())
        # Small tensors travel on the socket, with shared memory or without.
        return StubProcess(name, process, cast(socket.socket, connection), mmap.mmap(-1, mmap.PAGESIZE), handlers, None)
