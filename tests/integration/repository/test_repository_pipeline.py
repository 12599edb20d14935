"""Requests on their way through the processes of a Python-backend model: ahead of time, cancelled, and when a process dies."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import EngineError, Unavailable
from dynamo.worker.repository.models.models import RepositoryModels
from dynamo.worker.repository.python.python_backend import PythonModel
from dynamo.worker.repository.python.stub_process import StubProcess
from dynamo.worker.repository.wire import wire
from tests.support.repositories import X_TO_Y, infer, opened, python_model, x

RECORDS = """
import os, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]
        self.count = 0
        self.note(f"pid {os.getpid()}")
    def note(self, line):
        with open(os.path.join(self.folder, "notes"), "a") as file:
            file.write(line + "\\n")
    def execute(self, requests):
        assert len(requests) == 1, "without dynamic batching requests run one by one"
        value = requests[0].inputs()[0].as_numpy()
        self.note(f"begun {int(value[0])}")
        if value[0] == -1:
            os._exit(3)
        if value[0] == -2:
            while not os.path.exists(os.path.join(self.folder, "go")):
                time.sleep(0.001)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * value)])]
"""
TWO = X_TO_Y + "instance_group { count: 2 }"


def begun(folder: Path) -> Counter[int]:
    """Return how often each request was begun, by its value."""
    lines = (folder / "notes").read_text().splitlines()
    return Counter(int(line.split()[1]) for line in lines if line.startswith("begun"))


def pids(folder: Path) -> list[int]:
    return [int(line.split()[1]) for line in (folder / "notes").read_text().splitlines() if line.startswith("pid")]


async def warm(models: RepositoryModels, model: str) -> None:
    """Let the model respond often enough to be known as fast, so that it gets requests ahead of time."""
    for _ in range(20):
        await infer(models, model, x(0))


async def outcomes(models: RepositoryModels, model: str, values: Sequence[int]) -> list[object]:
    return await asyncio.gather(*(infer(models, model, x(value)) for value in values), return_exceptions=True)


async def test_a_poisonous_request_fails_alone_with_many_queued_behind_it(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "fast", RECORDS, TWO)
    async with opened(tmp_path, "fast") as models, asyncio.timeout(120):
        await warm(models, "fast")
        values = [*range(1, 30), -1, *range(30, 60)]
        results = dict(zip(values, await outcomes(models, "fast", values), strict=True))
    counts = begun(folder)
    poisoned = results.pop(-1)
    assert isinstance(poisoned, EngineError) and "ended with status 3" in str(poisoned)
    assert counts[-1] == 2
    for value, result in results.items():
        if isinstance(result, Unavailable):
            assert result.retryable, "both processes were dead before it began"
            assert counts[value] == 0
        else:
            assert result == {"y": [2.0 * value]}
            assert 1 <= counts[value] <= 2, "the response of one that was over may have died with the process"


async def test_requests_end_once_and_begin_at_most_twice_while_processes_are_killed(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "fast", RECORDS, TWO)
    chance = random.Random(7)
    async with opened(tmp_path, "fast") as models, asyncio.timeout(120):
        await warm(models, "fast")
        killed: set[int] = set()

        async def kill_some() -> None:
            for _ in range(6):
                async with asyncio.timeout(120):
                    while not (alive := [pid for pid in pids(folder) if pid not in killed]):
                        await asyncio.sleep(0.01)
                await asyncio.sleep(chance.random() * 0.2)
                victim = chance.choice(alive)
                killed.add(victim)
                os.kill(victim, signal.SIGKILL)

        results: dict[int, object] = {}
        first = 1
        killing = asyncio.ensure_future(kill_some())
        while not killing.done():
            values = range(first, first + 40)
            results |= dict(zip(values, await outcomes(models, "fast", values), strict=True))
            first += 40
            await asyncio.sleep(0)
        await killing
    counts = begun(folder)
    for value, result in results.items():
        assert counts[value] <= 2
        if isinstance(result, Unavailable):
            assert result.retryable and counts[value] == 0
        elif isinstance(result, BaseException):
            assert isinstance(result, EngineError) and counts[value] == 2, "only what began twice fails"
        else:
            assert result == {"y": [2.0 * value]} and counts[value] >= 1
    assert any(isinstance(result, dict) for result in results.values())


async def test_a_request_that_is_cancelled_while_it_is_queued_at_the_process_never_begins(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "fast", RECORDS)
    async with opened(tmp_path, "fast") as models, asyncio.timeout(120):
        await warm(models, "fast")
        blocking = asyncio.create_task(infer(models, "fast", x(-2)))
        while not begun(folder)[-2]:
            await asyncio.sleep(0.001)
        queued = [asyncio.create_task(infer(models, "fast", x(value))) for value in (5, 6, 7)]
        await asyncio.sleep(0)
        queued[1].cancel()
        await asyncio.gather(queued[1], return_exceptions=True)
        (folder / "go").touch()
        assert await blocking == {"y": [-4.0]}
        assert await asyncio.gather(queued[0], queued[2]) == [{"y": [10.0]}, {"y": [14.0]}]
        blocked_and_left = asyncio.create_task(infer(models, "fast", x(8)))
        await asyncio.sleep(0)
        blocked_and_left.cancel()
        await asyncio.gather(blocked_and_left, return_exceptions=True)
        assert await infer(models, "fast", x(9)) == {"y": [18.0]}
    assert begun(folder)[6] == 0


async def test_a_slow_execution_holds_up_no_request_that_another_process_can_take(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "fast", RECORDS, TWO)
    async with opened(tmp_path, "fast") as models, asyncio.timeout(120):
        await warm(models, "fast")
        blocking = asyncio.create_task(infer(models, "fast", x(-2)))
        while not begun(folder)[-2]:
            await asyncio.sleep(0.001)
        for value in range(1, 50):
            assert await infer(models, "fast", x(value)) == {"y": [2.0 * value]}
        (folder / "go").touch()
        await blocking


def processes(models: RepositoryModels, model: str) -> Sequence[StubProcess]:
    executable = models.find(model).versions["1"]
    assert isinstance(executable, PythonModel)
    return executable.processes


async def blocked(models: RepositoryModels, folder: Path) -> asyncio.Task[dict[str, object]]:
    """Have one process run a request until the file `go` is there."""
    blocking = asyncio.create_task(infer(models, "fast", x(-2)))
    while not begun(folder)[-2]:
        await asyncio.sleep(0.001)
    return blocking


async def test_requests_behind_one_that_takes_long_are_withdrawn_and_served_by_another_process(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "fast", RECORDS, TWO)
    async with opened(tmp_path, "fast") as models, asyncio.timeout(120):
        await warm(models, "fast")
        blocking = asyncio.create_task(infer(models, "fast", x(-2)))
        values = range(1, 60)
        assert await outcomes(models, "fast", values) == [{"y": [2.0 * value]} for value in values]
        assert not blocking.done()
        (folder / "go").touch()
        assert await blocking == {"y": [-4.0]}
        assert await outcomes(models, "fast", values) == [{"y": [2.0 * value]} for value in values]
    assert all(begun(folder)[value] == 2 for value in values)


async def test_a_process_that_stands_still_holds_up_no_request_that_it_has_not_begun(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "fast", RECORDS, TWO)
    async with opened(tmp_path, "fast") as models, asyncio.timeout(120):
        await warm(models, "fast")
        os.kill(pids(folder)[0], signal.SIGSTOP)
        values = range(1, 60)
        assert await outcomes(models, "fast", values) == [{"y": [2.0 * value]} for value in values]
        os.kill(pids(folder)[0], signal.SIGCONT)
        assert await outcomes(models, "fast", values) == [{"y": [2.0 * value]} for value in values]
    assert all(begun(folder)[value] == 2 for value in values)


async def test_what_was_withdrawn_from_the_only_process_waits_for_it_in_order(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "fast", RECORDS)
    async with opened(tmp_path, "fast") as models, asyncio.timeout(120):
        await warm(models, "fast")
        blocking = await blocked(models, folder)
        queued = [asyncio.create_task(infer(models, "fast", x(value))) for value in range(5, 25)]
        [process] = processes(models, "fast")
        while process.load > 1:
            await asyncio.sleep(0.001)
        queued[3].cancel()
        (folder / "go").touch()
        await blocking
        results = await asyncio.gather(*queued, return_exceptions=True)
        assert isinstance(results.pop(3), asyncio.CancelledError)
        values = [value for value in range(5, 25) if value != 8]
        assert results == [{"y": [2.0 * value]} for value in values]
    notes = [line.split()[1] for line in (folder / "notes").read_text().splitlines() if line.startswith("begun")]
    assert notes[-len(values) :] == [str(value) for value in values]


async def test_a_process_that_dies_after_a_withdrawal_fails_only_what_it_had_begun(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "fast", RECORDS, TWO)
    async with opened(tmp_path, "fast") as models, asyncio.timeout(120):
        await warm(models, "fast")
        blocking = await blocked(models, folder)
        values = range(1, 60)
        assert await outcomes(models, "fast", values) == [{"y": [2.0 * value]} for value in values]
        [late] = [process for process in processes(models, "fast") if process.load]
        os.kill(late.pid, signal.SIGKILL)
        while begun(folder)[-2] < 2:
            await asyncio.sleep(0.001)
        (folder / "go").touch()
        assert await blocking == {"y": [-4.0]}, "it is retried once"
    assert all(begun(folder)[value] == 1 for value in values)


MESSAGES = st.lists(
    st.tuples(st.integers(0, 2**40), st.lists(st.integers(0, 400_000) | st.integers(0, 40), max_size=3)), min_size=1, max_size=8
)


def encoded(messages: list[tuple[int, list[int]]]) -> bytearray:
    """Return messages, each a response with tensors of some bytes."""
    stream = bytearray()
    for number, sizes in messages:
        arrays = [np.arange(size, dtype=np.uint8) for size in sizes]
        packed = [wire.pack(f"t{index}", array) for index, array in enumerate(arrays)]
        long = {"long": "a" * 135_000} if number % 16 == 1 else {}
        head = wire.Response(number=number, outputs=tuple(head for head, _ in packed), parameters=long)
        for piece in wire.encode(head, [raw for _, raw in packed]):
            stream += piece
    return stream


def read_in_pieces(reader: wire.MessageReader, stream: bytearray, cuts: list[int]) -> list[tuple[wire.Message, list[memoryview]]]:
    came, position, turn = [], 0, 0
    while position < len(stream):
        space = reader.space()
        count = min(len(space), len(stream) - position, cuts[turn % len(cuts)])
        space[:count] = stream[position : position + count]
        came += reader.advance(count)
        position, turn = position + count, turn + 1
    return came


@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 300_000), min_size=1, max_size=20))
def test_what_follows_a_body_that_gets_no_memory_is_whole(messages: list[tuple[int, list[int]]], cuts: list[int]) -> None:
    def admit(message: wire.Message, size: int) -> tuple[wire.Message, memoryview | None]:
        assert isinstance(message, wire.Response) and size >= wire.COUNTED_BYTES
        if message.number % 2:
            return wire.Response(number=message.number, error="refused"), None
        return wire.admit_all(message, size)

    came = read_in_pieces(wire.MessageReader(admit), encoded(messages), cuts)
    assert len(came) == len(messages)
    for (message, raws), (number, sizes) in zip(came, messages, strict=True):
        assert isinstance(message, wire.Response)
        is_refused = number % 2 == 1 and sum(size + -size % 8 for size in sizes) >= wire.COUNTED_BYTES
        assert (message.number, message.error) == (number, "refused" if is_refused else None)
        assert [bytes(raw) for raw in raws] == (
            [] if is_refused else [np.arange(size, dtype=np.uint8).tobytes() for size in sizes]
        )


@given(messages=MESSAGES, cuts=st.lists(st.integers(1, 300_000), min_size=1, max_size=20))
def test_messages_are_whole_however_the_socket_cuts_them(messages: list[tuple[int, list[int]]], cuts: list[int]) -> None:
    stream = encoded(messages)
    came = read_in_pieces(wire.MessageReader(), stream, cuts)
    assert [
        (message.number, [len(raw) for raw in raws]) for message, raws in came if isinstance(message, wire.Response)
    ] == messages
    for message, raws in came:
        assert isinstance(message, wire.Response)
        for head, raw in zip(message.outputs, raws, strict=True):
            array = wire.unpack(head, raw)
            assert (array.flags.writeable and array.ctypes.data % 8 == 0) or not array.size
            np.testing.assert_array_equal(array, np.arange(head.size, dtype=np.uint8))
