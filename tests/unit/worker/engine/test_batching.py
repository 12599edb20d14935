from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from dynamo.common.errors import DeadlineExceeded, EngineError, InvalidRequest, Overloaded
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.batching import Batch, Batcher, BatchPolicy, Tensors
from dynamo.worker.engine.batching_settings import Batching
from dynamo.worker.engine.request_queue import QueuePolicies, QueuePolicy
from tests.support.waiting import WAIT_S


class Model:
    """Doubles its input, remembers the sizes of its batches, and waits at a gate if it is closed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.check: Callable[[Tensors], None] = lambda inputs: None

    async def __call__(self, batch: Batch) -> Tensors:
        inputs = batch.inputs()
        self.sizes.append(batch.rows)
        self.entered.set()
        await self.gate.wait()
        self.check(inputs)
        return {"y": inputs["x"] * 2}


def policy_of(**settings: object) -> BatchPolicy:
    options = {name: settings.pop(name) for name in ("preferred_batch_size", "max_queue_delay_us", "queue") if name in settings}
    return BatchPolicy(batching=Batching(**options), **{"max_batch_size": 8, **settings})  # type: ignore[arg-type]


@asynccontextmanager
async def batching(model: Model, **policy: object) -> AsyncIterator[Batcher]:
    batcher = Batcher(policy_of(**policy), model)
    batcher.start()
    try:
        yield batcher
    finally:
        await batcher.close()


def x(*values: float, width: int = 1) -> Tensors:
    return {"x": np.array([[value] * width for value in values], np.float32)}


async def settle() -> None:
    """Lets everything that can run now run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def submit_while_busy(
    batcher: Batcher, model: Model, requests: list[tuple[Tensors, Context]]
) -> list[asyncio.Task[Tensors]]:
    """Occupies the only execution slot, queues `requests`, and frees the slot."""
    model.gate.clear()
    first = asyncio.create_task(batcher.submit(x(0), 1, Context("first")))
    await model.entered.wait()
    tasks = [asyncio.create_task(batcher.submit(inputs, len(inputs["x"]), context)) for inputs, context in requests]
    await settle()
    model.sizes.clear()
    model.gate.set()
    await first
    return tasks


async def test_requests_that_arrive_together_are_one_execution_and_get_their_own_rows() -> None:
    model = Model()
    async with batching(model) as batcher:
        responses = await asyncio.gather(*(batcher.submit(x(n, n + 0.5), 2, Context(str(n))) for n in range(4)))
    assert model.sizes == [8]
    for n, response in enumerate(responses):
        np.testing.assert_array_equal(response["y"], [[2 * n], [2 * n + 1]])


async def test_a_batch_is_never_larger_than_the_model_allows() -> None:
    model = Model()
    async with batching(model, max_batch_size=5) as batcher:
        tasks = await submit_while_busy(batcher, model, [(x(1, 2), Context(str(n))) for n in range(5)])
        await asyncio.gather(*tasks)
    assert model.sizes == [4, 4, 2]


@pytest.mark.parametrize(
    ("rows", "policy", "handed_over"),
    [
        ([1, 1, 1, 1], {}, [4]),
        ([1] * 11, {}, [4, 4]),
        ([1] * 20, {}, [4, 4]),
        ([3, 3], {}, [3]),
        ([1, 1, 1], {}, []),
        ([1, 1, 1], {"preferred_batch_size": (2,)}, [2]),
        ([1, 1, 1], {"preferred_batch_size": (2,), "max_queue_delay_us": 60_000_000}, []),
        ([1] * 5, {"preferred_batch_size": (2,), "max_queue_delay_us": 60_000_000}, []),
        ([2] * 2, {"preferred_batch_size": (4,), "max_queue_delay_us": 60_000_000}, [4]),
    ],
)
async def test_while_the_model_is_busy_only_batches_that_cannot_grow_are_handed_over(
    rows: list[int], policy: dict[str, object], handed_over: list[int]
) -> None:
    model = Model()
    async with batching(model, max_batch_size=4, ahead=2, **policy) as batcher:
        model.gate.clear()
        tasks = [asyncio.create_task(batcher.submit(x(*range(4)), 4, Context("first")))]
        await model.entered.wait()
        tasks += [asyncio.create_task(batcher.submit(x(*range(count)), count, Context("next"))) for count in rows]
        await settle()
        assert model.sizes == [4, *handed_over]
        model.gate.set()
        await settle()
        if not policy.get("max_queue_delay_us"):
            await asyncio.gather(*tasks)
            assert sum(model.sizes) == 4 + sum(rows)
        for task in tasks:
            task.cancel()


async def test_a_batch_that_the_next_request_does_not_fit_into_is_handed_over() -> None:
    model = Model()
    async with batching(model, max_batch_size=4, ahead=1) as batcher:
        model.gate.clear()
        tasks = []
        for rows, sizes in ((4, [4]), (3, [4]), (2, [4, 3])):
            tasks.append(asyncio.create_task(batcher.submit(x(*range(rows)), rows, Context("r"))))
            await settle()
            assert model.sizes == sizes
        model.gate.set()
        await asyncio.gather(*tasks)


async def test_requests_of_other_shapes_are_not_joined() -> None:
    model = Model()
    async with batching(model) as batcher:
        requests = [(x(1), Context("a")), (x(1, width=3), Context("b")), (x(2), Context("c"))]
        narrow, wide, other = await asyncio.gather(*await submit_while_busy(batcher, model, requests))
    assert model.sizes == [2, 1]
    assert (narrow["y"].shape, wide["y"].shape, other["y"].shape) == ((1, 1), (1, 3), (1, 1))


async def test_a_preferred_size_runs_at_once_and_the_rest_waits_for_its_delay() -> None:
    model = Model()
    async with batching(model, preferred_batch_size=(2, 4), max_queue_delay_us=60_000_000) as batcher:
        tasks = [asyncio.create_task(batcher.submit(x(n), 1, Context(str(n)))) for n in range(5)]
        async with asyncio.timeout(WAIT_S):
            while len(waiting := [task for task in tasks if not task.done()]) > 1:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await settle()
        assert (model.sizes, [task.done() for task in waiting], batcher.waiting) == ([4], [False], 1)
        for task in waiting:
            task.cancel()


async def test_a_lonely_request_waits_no_longer_than_the_queue_delay() -> None:
    model = Model()
    loop = asyncio.get_running_loop()
    async with batching(model, max_queue_delay_us=50_000) as batcher:
        start = loop.time()
        async with asyncio.timeout(120):
            await batcher.submit(x(1), 1, Context("a"))
        assert loop.time() - start > 0.04


async def test_a_request_with_a_deadline_waits_for_company_only_half_of_its_time() -> None:
    model = Model()
    loop = asyncio.get_running_loop()
    async with batching(model, max_queue_delay_us=60_000_000) as batcher:
        await asyncio.wait_for(batcher.submit(x(1), 1, Context("a", deadline=loop.time() + 0.2)), 120)
    assert model.sizes == [1]


async def test_a_cancelled_request_never_reaches_the_model() -> None:
    model = Model()
    async with batching(model) as batcher:
        kept, dropped = await submit_while_busy_and_cancel(batcher, model)
        assert (await kept)["y"].tolist() == [[2]]
        with pytest.raises(asyncio.CancelledError):
            await dropped
    assert model.sizes == [1]


async def submit_while_busy_and_cancel(batcher: Batcher, model: Model) -> list[asyncio.Task[Tensors]]:
    model.gate.clear()
    first = asyncio.create_task(batcher.submit(x(0), 1, Context("first")))
    await model.entered.wait()
    tasks = [asyncio.create_task(batcher.submit(x(n), 1, Context(str(n)))) for n in (1, 2)]
    await settle()
    tasks[1].cancel()
    model.sizes.clear()
    model.gate.set()
    await first
    return tasks


async def test_a_request_whose_deadline_passed_in_the_queue_is_refused_and_not_computed() -> None:
    model = Model()
    async with batching(model) as batcher:
        late = Context("late", deadline=asyncio.get_running_loop().time() - 1)
        tasks = await submit_while_busy(batcher, model, [(x(1), late), (x(2), Context("ok"))])
        with pytest.raises(DeadlineExceeded):
            await tasks[0]
        assert (await tasks[1])["y"].tolist() == [[4]]
    assert model.sizes == [1]


async def test_a_full_queue_refuses_more() -> None:
    model = Model()
    model.gate.clear()
    async with batching(model, queue=QueuePolicies(default=QueuePolicy(max_size=2)), max_batch_size=1) as batcher:
        tasks = [asyncio.create_task(batcher.submit(x(0), 1, Context("0")))]
        await model.entered.wait()
        tasks += [asyncio.create_task(batcher.submit(x(n), 1, Context(str(n)))) for n in (1, 2)]
        await settle()
        with pytest.raises(Overloaded):
            await batcher.submit(x(3), 1, Context("3"))
        model.gate.set()
        await asyncio.gather(*tasks)


async def test_more_rows_than_a_batch_may_have_are_an_invalid_request() -> None:
    async with batching(Model(), max_batch_size=2) as batcher:
        with pytest.raises(InvalidRequest, match="at most 2"):
            await batcher.submit(x(1, 2, 3), 3, Context("a"))


async def test_a_model_that_fails_once_gets_each_request_of_the_batch_again_alone() -> None:
    model = Model()

    def broken_once(inputs: Tensors) -> None:
        model.check = lambda inputs: None
        raise EngineError("no")

    model.check = broken_once
    async with batching(model) as batcher:
        results = await asyncio.gather(*(batcher.submit(x(n), 1, Context(str(n))) for n in range(3)))
    assert model.sizes == [3, 1, 1, 1]
    assert [result["y"].tolist() for result in results] == [[[0]], [[2]], [[4]]]


@pytest.mark.parametrize("error", [InvalidRequest("x is negative"), EngineError("no"), ArithmeticError("no")])
async def test_only_the_request_at_fault_fails_of_a_batch(error: Exception) -> None:
    def refuse_negative(inputs: Tensors) -> None:
        if (inputs["x"] < 0).any():
            raise error

    model = Model()
    model.check = refuse_negative
    async with batching(model) as batcher:
        results = await asyncio.gather(*(batcher.submit(x(n), 1, Context(str(n))) for n in (1, -1, 2)), return_exceptions=True)
    assert results[1] is error
    assert [results[0]["y"].tolist(), results[2]["y"].tolist()] == [[[2]], [[4]]]  # type: ignore[index]


async def test_outputs_that_lost_rows_are_an_engine_error() -> None:
    async def lossy(batch: Batch) -> Tensors:
        return {"y": batch.inputs()["x"][:0]}

    batcher = Batcher(BatchPolicy(max_batch_size=4), lossy)
    batcher.start()
    results = await asyncio.gather(
        batcher.submit(x(1), 1, Context("a")), batcher.submit(x(2), 1, Context("b")), return_exceptions=True
    )
    await batcher.close()
    assert all(isinstance(result, EngineError) and "first dimension must be 1" in str(result) for result in results)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3)])
async def test_a_model_that_ends_its_execution_fails_its_requests_and_takes_the_next(error: BaseException) -> None:
    model = Model()

    def end(inputs: Tensors) -> None:
        raise error

    async with batching(model) as batcher:
        model.check = end
        with pytest.raises(EngineError, match=r"the model cancelled its own execution|the model raised SystemExit"):
            await batcher.submit(x(1), 1, Context("a"))
        model.check = lambda inputs: None
        assert (await batcher.submit(x(2), 1, Context("b")))["y"] == [[4]]


async def test_a_model_that_responds_to_fewer_requests_than_it_got_fails_them_and_takes_the_next() -> None:
    responses: list[list[object]] = [[], [{"y": np.zeros(1)}]]

    async def execute(batch: Batch) -> list[object]:
        return responses.pop(0)

    batcher = Batcher(BatchPolicy(max_batch_size=1), execute)
    batcher.start()
    try:
        with pytest.raises(EngineError, match="the model gave 0 responses to 1 requests"):
            await batcher.submit(x(1), 1, Context("a"))
        assert (await batcher.submit(x(1), 1, Context("b")))["y"] == [0]
    finally:
        await batcher.close()


async def test_requests_fail_when_no_batch_can_be_chosen() -> None:
    class Odd(Context):
        reads: int = 0

        @property
        def deadline(self) -> float | None:  # type: ignore[override]
            self.reads += 1
            if self.reads > 1:  # the first comes from its own caller
                raise ArithmeticError("what time is it?")
            return None

        @deadline.setter
        def deadline(self, value: float | None) -> None: ...

    model = Model()
    async with batching(model) as batcher:
        with pytest.raises(EngineError, match="requests could not be batched"):
            await batcher.submit(x(1), 1, Odd("a"))
        assert (await batcher.submit(x(2), 1, Context("b")))["y"] == [[4]]


async def test_one_request_of_a_batch_stands_for_the_execution() -> None:
    model = Model()
    contexts = [Context(str(n)) for n in range(3)]
    async with batching(model) as batcher:
        await asyncio.gather(*(batcher.submit(x(n), 1, context) for n, context in enumerate(contexts)))
    assert sorted(context.timings.execution_rows for context in contexts) == [0, 0, 3]
    assert all(context.timings.batched for context in contexts)


async def test_two_slots_execute_two_batches_at_once() -> None:
    model = Model()
    model.gate.clear()
    async with batching(model, max_batch_size=1, concurrency=2) as batcher:
        tasks = [asyncio.create_task(batcher.submit(x(n), 1, Context(str(n)))) for n in range(3)]
        await settle()
        assert model.sizes == [1, 1]
        model.gate.set()
        await asyncio.gather(*tasks)


async def test_closing_ends_requests_that_still_wait() -> None:
    model = Model()
    model.gate.clear()
    batcher = Batcher(BatchPolicy(max_batch_size=1), model)
    batcher.start()
    tasks = [asyncio.create_task(batcher.submit(x(n), 1, Context(str(n)))) for n in range(3)]
    await model.entered.wait()
    await batcher.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)


async def test_closing_ends_requests_whose_execution_has_not_taken_its_first_step() -> None:
    model = Model()
    batcher = Batcher(BatchPolicy(max_batch_size=1), model)
    batcher.start()
    task = asyncio.create_task(batcher.submit(x(1), 1, Context("a")))
    await asyncio.sleep(0)
    assert batcher.waiting == 1
    while batcher.waiting:
        await asyncio.sleep(0)
    assert not model.entered.is_set()  # or the test is of something else
    await batcher.close()
    async with asyncio.timeout(120):
        [result] = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, asyncio.CancelledError) and not model.sizes


async def test_closing_ends_requests_that_run_again_alone() -> None:
    model = Model()

    def refuse_batches(inputs: Tensors) -> None:
        model.gate.clear()  # the first request stays in its second execution
        raise InvalidRequest("one of them is wrong")

    model.check = refuse_batches
    batcher = Batcher(BatchPolicy(max_batch_size=2), model)
    batcher.start()
    tasks = [asyncio.create_task(batcher.submit(x(n), 1, Context(str(n)))) for n in range(2)]
    await settle()
    assert model.sizes == [2, 1]
    await batcher.close()
    async with asyncio.timeout(120):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)


@pytest.mark.parametrize(
    "policy",
    [{"max_batch_size": 0}, {"max_batch_size": 4, "preferred_batch_size": (5,)}, {"max_batch_size": 4, "concurrency": 0}],
)
def test_a_policy_that_contradicts_itself_is_refused(policy: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        policy_of(**policy)
