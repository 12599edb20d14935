from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from google.protobuf import text_format

from dynamo.common.errors import InvalidRequest
from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.config import RepositoryOptions
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import Arrays, ModelRequest, Version
from dynamo.worker.repository.declared.model_config import instances_of
from dynamo.worker.repository.scheduling.batches import BatchedModel
from dynamo.worker.repository.scheduling.rate_limiter import ExecutionLimits, ProvidedResource, RateLimit, RateLimiter
from dynamo.worker.repository.sessions.session import SessionModel
from tests.support.repositories import X_TO_Y, infer, opened, python_model, x
from tests.support.waiting import WAIT_S, until

ALONE = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        lock = os.path.join(os.path.dirname(os.path.dirname(pb_utils.get_model_dir())), "lock")
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
        time.sleep(0.02)
        os.unlink(lock)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""


SLOW = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        folder = os.path.dirname(os.path.dirname(pb_utils.get_model_dir()))
        open(os.path.join(folder, "lock"), "x").close()
        until = time.monotonic() + 120
        while not os.path.exists(os.path.join(folder, "go")):
            assert time.monotonic() < until, "the test has not let it go"
            time.sleep(0.005)
        os.unlink(os.path.join(folder, "lock"))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""

CALLS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.Tensor("x", requests[0].inputs()[0].as_numpy())]
        call = pb_utils.InferenceRequest(model_name="alone", requested_output_names=["y"], inputs=inputs)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", call.exec().output_tensors()[0].as_numpy())])]
"""


def add(limiter: RateLimiter, *groups: str) -> ExecutionLimits:
    """Adds a model with these groups of instances."""
    config = text_format.Parse(" ".join(f"instance_group [ {{ {group} }} ]" for group in groups), ModelConfig(name="m"))
    return limiter.add(instances_of(config))


def needs(name: str, count: int, *, anywhere: bool = False, instances: int = 1, priority: int = 1, more: str = "") -> str:
    resource = f'name: "{name}" count: {count} global: {str(anywhere).lower()}'
    return f"count: {instances} {more} rate_limiter {{ priority: {priority} resources [ {{ {resource} }} ] }}"


def provided(*texts: str) -> list[ProvidedResource]:
    return [ProvidedResource.parse(text) for text in texts]


class Executions:
    """Executions that last until they are ended, and their order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, limits: ExecutionLimits, *names: str) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._run(limits, name))
        await self._settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await self._settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await self._settle()

    async def _run(self, limits: ExecutionLimits, name: str) -> None:
        give_back = await limits.take()
        try:
            self.begun.append(name)
            await self._ends[name].wait()
        finally:
            give_back()

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_models_share_what_there_is_of_a_resource_and_no_instance_runs_twice() -> None:
    limiter, runs = RateLimiter(provided("R:3")), Executions()
    two, three = add(limiter, needs("R", 1, instances=2)), add(limiter, needs("R", 2))
    await runs.begin(two, "a", "b", "c")
    assert runs.begun == ["a", "b"]
    await runs.begin(three, "d")
    assert runs.begun == ["a", "b"]
    await runs.end("a")
    assert runs.begun == ["a", "b", "d"]  # which has had no turn yet, so "c" waits although 1 of 3 would do for it
    await runs.end("b", "d")
    assert runs.begun == ["a", "b", "d", "c"]


async def test_without_provided_resources_there_is_what_the_largest_instance_needs() -> None:
    limiter, runs = RateLimiter(), Executions()
    small, large = add(limiter, needs("R", 1, instances=4)), add(limiter, needs("R", 2))
    await runs.begin(small, "a", "b", "c")
    assert runs.begun == ["a", "b"]
    large.close()
    await runs.end("a", "b")
    assert runs.begun == ["a", "b", "c"]


async def test_a_larger_priority_number_gets_fewer_turns() -> None:
    limiter, runs = RateLimiter(), Executions()
    first, second = add(limiter, needs("R", 1, priority=1)), add(limiter, needs("R", 1, priority=3))
    await runs.begin(first, *(f"first {n}" for n in range(6)))
    await runs.begin(second, *(f"second {n}" for n in range(3)))
    for _ in range(9):
        await runs.end(runs.begun[-1])
    assert [name.split()[0] for name in runs.begun] == [
        *("first", "second"),
        *("first",) * 3,
        *("second", "first", "first", "second"),
    ]


async def test_an_execution_that_is_cancelled_while_it_waits_or_runs_lets_others_run() -> None:
    limiter, runs = RateLimiter(provided("R:2")), Executions()
    one, both = add(limiter, needs("R", 1, instances=2)), add(limiter, needs("R", 2))
    await runs.begin(one, "a")
    await runs.begin(both, "b")
    await runs.begin(one, "c")
    assert runs.begun == ["a"]  # "b" is next
    await runs.cancel("b")
    assert runs.begun == ["a", "c"]
    await runs.begin(both, "d")
    await runs.cancel("a")
    await runs.cancel("c")
    assert runs.begun == ["a", "c", "d"]


async def test_a_turn_that_comes_as_its_caller_leaves_goes_to_the_next() -> None:
    limiter, runs = RateLimiter(), Executions()
    model = add(limiter, needs("R", 1))
    await runs.begin(model, "a", "b", "c")
    runs.tasks["a"].cancel()
    await asyncio.sleep(0)  # "b" has its turn and does not know it yet
    await runs.cancel("b")
    assert runs.begun == ["a", "c"]


async def test_an_execution_that_waits_when_its_model_is_closed_is_cancelled_and_others_run() -> None:
    limiter, runs = RateLimiter(provided("R:2")), Executions()
    one, both = add(limiter, needs("R", 1, instances=2)), add(limiter, needs("R", 2))
    await runs.begin(one, "a")
    await runs.begin(both, "b")
    await runs.begin(one, "c")
    both.close()
    await runs.end("c")
    assert runs.tasks["b"].cancelled() and runs.begun == ["a", "c"]


@pytest.mark.parametrize(
    ("available", "groups", "reason"),
    [
        (["R:1"], [needs("R", 2)], 'for "R" is limited to 1 which'),
        (["S:4"], [needs("R", 1)], 'for "R" is limited to 0 which'),
        (["R:4:1"], [needs("R", 1)], 'for "R" is limited to 0 which'),
        (["R:4:global"], [needs("R", 1)], 'for "R" is limited to 0 which'),
        (["R:1:0", "R:9:1"], [needs("R", 2, more="kind: KIND_GPU gpus: [ 1, 0 ]")], 'for "R" is limited to 1 which'),
        ([], [needs("R", 1), needs("R", 1, anywhere=True)], 'Resource "R" is present as both global and device-specific'),
    ],
)
def test_a_model_whose_resources_no_worker_provides_is_refused_and_forgotten(
    available: list[str], groups: list[str], reason: str
) -> None:
    limiter = RateLimiter(provided(*available))
    with pytest.raises(InvalidRequest) as refused:
        add(limiter, *groups)
    assert str(refused.value).startswith("instance_group.rate_limiter: ") and reason in str(refused.value)
    add(limiter)


def test_resources_of_a_device_of_each_device_and_global_ones_serve_their_needs() -> None:
    limiter = RateLimiter(provided("all:2", "first:1:0", "once:3:global"))
    add(limiter, needs("all", 2), needs("first", 1), needs("once", 3, anywhere=True))


@pytest.mark.parametrize("text", ["", "R", "R:", "R:x", "R:-1", ":1", "R:1:cpu", "R:1:0:0", "R:global"])
def test_a_resource_that_cannot_be_read_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(ValueError, match=r"--rate-limit-resource must be NAME:COUNT or NAME:COUNT:DEVICE"):
        RepositoryOptions(rate_limit=RateLimit.EXECUTION_COUNT, rate_limit_resources=(text,))


async def test_python_models_that_share_a_resource_run_one_after_another(tmp_path: Path) -> None:
    settings = f"{X_TO_Y} instance_group [ {{ {needs('R', 1, anywhere=True, instances=2)} }} ]"
    for name in ("one", "other"):
        python_model(tmp_path, name, ALONE, settings)
    python_model(tmp_path, "batching", ALONE, f"max_batch_size: 2 dynamic_batching {{ }} {settings}")
    python_model(tmp_path, "greedy", config=f"{X_TO_Y} instance_group [ {{ {needs('R', 3, anywhere=True)} }} ]")
    async with opened(tmp_path, "one", "other", "batching", rate_limiter=RateLimiter(provided("R:1"))) as models:
        assert "which will prevent scheduling" in str((await models.load_all(["greedy"]))["greedy"])
        plain = [infer(models, name, x(1)) for name in ("one", "other") * 4]
        responses = await asyncio.gather(*plain, *(infer(models, "batching", {"x": x(1)["x"][None]}) for _ in range(4)))
        assert responses == [{"y": [1.0]}] * 8 + [{"y": [[1.0]]}] * 4


async def test_a_python_model_holds_its_resource_until_it_returns_though_its_caller_has_left(tmp_path: Path) -> None:
    settings = f"{X_TO_Y} instance_group [ {{ {needs('R', 1, anywhere=True)} }} ]"
    python_model(tmp_path, "slow", SLOW, settings)
    python_model(tmp_path, "alone", ALONE, settings)
    async with opened(tmp_path, "slow", "alone", rate_limiter=RateLimiter(provided("R:1"))) as models:
        slow = asyncio.create_task(infer(models, "slow", x(1)))
        await until((tmp_path / "lock").exists)
        slow.cancel()
        alone = asyncio.create_task(infer(models, "alone", x(1)))
        await until(lambda: models.find("alone").waiting("1") == 1)
        (tmp_path / "go").touch()
        assert await alone == {"y": [1.0]}


async def test_a_model_that_waits_for_one_that_needs_its_resource_ends_when_its_caller_leaves(tmp_path: Path) -> None:
    settings = f"{X_TO_Y} instance_group [ {{ {needs('R', 1, anywhere=True)} }} ]"
    python_model(tmp_path, "calls", CALLS, settings)
    python_model(tmp_path, "alone", ALONE, settings)
    async with opened(tmp_path, "calls", "alone", rate_limiter=RateLimiter(provided("R:1"))) as models:
        calls = asyncio.create_task(infer(models, "calls", x(1)))
        await until(lambda: models.find("alone").waiting("1") == 1)
        calls.cancel()
        assert await infer(models, "alone", x(2)) == {"y": [2.0]}


class Gated:
    """A session that runs when it is told to."""

    signature = None

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.go = threading.Event()

    def run(self, outputs: Sequence[str], inputs: Arrays) -> Sequence[Array]:
        self.seen.append(float(inputs["x"][0][0]))
        assert self.go.wait(WAIT_S)
        return [inputs["x"]]


async def test_a_batch_whose_callers_have_left_while_it_waited_for_an_instance_is_not_executed(tmp_path: Path) -> None:
    config = text_format.Parse(f"{X_TO_Y} max_batch_size: 1 dynamic_batching {{ }}", ModelConfig(name="m"))
    session = Gated()
    model = BatchedModel(config, SessionModel(Version("m", "1", config, tmp_path), session, None))
    row = {number: {"x": x(number)["x"][None]} for number in (1, 2, 3)}
    running, leaving = (asyncio.create_task(model.respond(ModelRequest(row[number], Context("c")))) for number in (1, 2))
    await until(lambda: session.seen == [1] and model.waiting == 1)
    leaving.cancel()
    await asyncio.wait([leaving])
    last = asyncio.create_task(model.respond(ModelRequest(row[3], Context("c"))))
    session.go.set()
    assert (await last).outputs["y"].tolist() == [[3.0]]
    await running
    assert session.seen == [1, 3]
    await model.close()


async def test_a_python_batch_whose_callers_have_left_while_it_waited_for_its_resource_is_not_executed(tmp_path: Path) -> None:
    settings = f"{X_TO_Y} instance_group [ {{ {needs('R', 1, anywhere=True)} }} ]"
    python_model(tmp_path, "slow", SLOW, settings)
    counting = ALONE.replace(
        "        lock =", '        open(os.path.join(pb_utils.get_model_dir(), "ran"), "a").write("x")\n        lock ='
    )
    python_model(tmp_path, "batching", counting, f"max_batch_size: 2 dynamic_batching {{ }} {settings}")
    async with opened(tmp_path, "slow", "batching", rate_limiter=RateLimiter(provided("R:1"))) as models:
        slow = asyncio.create_task(infer(models, "slow", x(1)))
        await until((tmp_path / "lock").exists)
        leaving = asyncio.create_task(infer(models, "batching", {"x": x(1)["x"][None]}))
        await until(lambda: models.find("batching").waiting("1") == 1)
        leaving.cancel()
        await asyncio.wait([leaving])
        (tmp_path / "go").touch()
        await slow
        assert await infer(models, "batching", {"x": x(2)["x"][None]}) == {"y": [[2.0]]}
    assert (tmp_path / "batching" / "1" / "ran").read_text() == "x"


async def test_a_thread_holds_its_resource_until_it_returns_though_its_caller_has_left(tmp_path: Path) -> None:
    class Session:
        signature = None

        def __init__(self) -> None:
            self.begun = 0
            self.go = threading.Event()

        def run(self, outputs: Sequence[str], inputs: Arrays) -> Sequence[Array]:
            self.begun += 1
            assert self.go.wait(WAIT_S)
            return [inputs["x"]]

    group = f"instance_group [ {{ {needs('R', 1, instances=2)} }} ]"
    config = text_format.Parse(f"{X_TO_Y} {group}", ModelConfig(name="m"))
    session = Session()
    model = SessionModel(Version("m", "1", config, tmp_path), session, RateLimiter(provided("R:1")))
    first = asyncio.create_task(model.respond(ModelRequest(x(1), Context("a"))))
    await until(lambda: session.begun == 1)
    first.cancel()
    second = asyncio.create_task(model.respond(ModelRequest(x(2), Context("b"))))
    await until(lambda: model.waiting == 1)
    assert session.begun == 1
    session.go.set()
    assert (await second).outputs == {"y": [2.0]}
    await model.close()
