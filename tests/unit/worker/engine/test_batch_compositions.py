"""Which requests run together, and in which order, on the same arrivals as at a real Triton.

The expected batches and errors were recorded from Triton 2.51 with its Python backend: a model with one instance and
`max_batch_size: 8` (1 in the tests of queues) that notes the values of each batch, and takes the time that the first request of
`BUSY` says. Here the same arrivals come in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from dynamo.common.errors import DynamoError, Overloaded, Unavailable
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.batching import Batch, Batcher, BatchPolicy, Tensors
from dynamo.worker.engine.batching_settings import Batching
from dynamo.worker.engine.request_queue import NO_OPTIONS, QueueOptions, QueuePolicies, QueuePolicy, TimeoutAction
from tests.support.virtual_time import in_virtual_time


@dataclass(frozen=True)
class Arrival:
    at_ms: int
    value: int
    rows: int = 1
    width: int = 1
    options: QueueOptions = NO_OPTIONS


BUSY_MS = 400
BUSY = Arrival(0, 1000 + BUSY_MS)
"""Keeps the model busy for 400 ms."""


def priority(at_ms: int, value: int, level: int) -> Arrival:
    return Arrival(at_ms, value, options=QueueOptions(priority=level))


def timeout(at_ms: int, value: int, timeout_ms: int) -> Arrival:
    return Arrival(at_ms, value, options=QueueOptions(timeout_us=1000 * timeout_ms))


def while_busy(count: int, rows: int = 1) -> list[Arrival]:
    return [BUSY, *(Arrival(50 + 10 * n, n + 1, rows) for n in range(count))]


def idle(*rows: int, every_ms: int = 20) -> list[Arrival]:
    return [Arrival(every_ms * n, n + 1, count) for n, count in enumerate(rows)]


async def batches_of(policy: BatchPolicy, arrivals: Sequence[Arrival]) -> tuple[list[list[int]], dict[int, DynamoError]]:
    """Return the values of each batch, and the errors by value."""
    batches: list[list[int]] = []
    errors: dict[int, DynamoError] = {}
    instance = asyncio.Lock()

    async def execute(batch: Batch) -> Tensors:
        inputs = batch.inputs()
        async with instance:
            batches.append(inputs["x"][:, 0].tolist())
            await asyncio.sleep(max(0, max(batches[-1]) - 1000) / 1000)
        return inputs

    batcher = Batcher(policy, execute)
    batcher.start()

    async def send(arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at_ms / 1000)
        tensors = {"x": np.full((arrival.rows, arrival.width), arrival.value)}
        try:
            await batcher.submit(tensors, arrival.rows, Context(""), options=arrival.options)
        except DynamoError as error:
            errors[arrival.value] = error

    await asyncio.gather(*map(send, arrivals))
    await batcher.close()
    return batches, errors


def policy(*preferred: int, delay_ms: int = 0, queue: QueuePolicies | None = None, max_batch_size: int = 8) -> BatchPolicy:
    return BatchPolicy(
        max_batch_size=max_batch_size,
        batching=Batching(preferred_batch_size=preferred, max_queue_delay_us=1000 * delay_ms, queue=queue),
        ahead=1,
    )


PLAIN, FOUR, TWO_FOUR = policy(), policy(4), policy(2, 4)
DELAY, FOUR_DELAY, TWO_FOUR_DELAY = policy(delay_ms=300), policy(4, delay_ms=300), policy(2, 4, delay_ms=300)
TIMEOUT = policy(2, 4, queue=QueuePolicies(default=QueuePolicy(timeout_us=5_000_000)))
B = BUSY.value


@pytest.mark.parametrize(
    ("policy", "arrivals", "batches"),
    [
        (PLAIN, while_busy(7), [[B], [1, 2, 3, 4, 5, 6, 7]]),
        (PLAIN, while_busy(12), [[B], [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]),
        (PLAIN, while_busy(4, rows=3), [[B], [1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4]]),
        (PLAIN, idle(1, 3, 1, 2), [[1], [2, 2, 2], [3], [4, 4]]),
        (TWO_FOUR, while_busy(7), [[B], [1, 2], [3, 4, 5, 6], [7]]),
        (TWO_FOUR, while_busy(12), [[B], [1, 2], [3, 4, 5, 6], [7, 8, 9, 10], [11, 12]]),
        (TWO_FOUR, while_busy(4, rows=3), [[B], [1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4]]),
        (TWO_FOUR_DELAY, while_busy(7), [[B, 1], [2, 3, 4, 5, 6, 7]]),
        (TWO_FOUR_DELAY, while_busy(12), [[B, 1], [2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]),
        (TWO_FOUR_DELAY, while_busy(4, rows=3), [[B, 1, 1, 1], [2, 2, 2, 3, 3, 3], [4, 4, 4]]),
        (TWO_FOUR_DELAY, idle(1, 1, 1, every_ms=50), [[1, 2], [3]]),
        (TWO_FOUR_DELAY, idle(1, 1, 1, 1, 1), [[1, 2], [3, 4], [5]]),
        (TWO_FOUR_DELAY, idle(1, 3, 1, 2), [[1, 2, 2, 2], [3, 4, 4]]),
        (FOUR_DELAY, while_busy(7), [[B, 1, 2, 3], [4, 5, 6, 7]]),
        (FOUR_DELAY, while_busy(12), [[B, 1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11, 12]]),
        (FOUR_DELAY, idle(1, 1, 1, every_ms=50), [[1, 2, 3]]),
        (FOUR_DELAY, idle(1, 1, 1, 1, 1), [[1, 2, 3, 4], [5]]),
        (FOUR, while_busy(7), [[B], [1, 2, 3, 4], [5, 6, 7]]),
        (FOUR, while_busy(12), [[B], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
        (DELAY, while_busy(7), [[B, 1, 2, 3, 4, 5, 6, 7]]),
        (DELAY, while_busy(12), [[B, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]),
        (DELAY, idle(1, 3, 1, 2), [[1, 2, 2, 2, 3, 4, 4]]),
        (TIMEOUT, while_busy(7), [[B], [1, 2, 3, 4], [5, 6], [7]]),
        (TIMEOUT, while_busy(12), [[B], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
        (TIMEOUT, while_busy(4, rows=3), [[B], [1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]]),
    ],
)
@in_virtual_time
async def test_batches_are_composed_as_by_triton(policy: BatchPolicy, arrivals: list[Arrival], batches: list[list[int]]) -> None:
    assert await batches_of(policy, arrivals) == (batches, {})


@in_virtual_time
async def test_the_most_urgent_run_first_and_unknown_priorities_are_the_default() -> None:
    queue = QueuePolicies(levels=3, default_level=2)
    arrivals = [BUSY, *(priority(50 + 10 * n, n + 1, level) for n, level in enumerate((3, 0, 1, 2, 9, 3, 1)))]
    batches, errors = await batches_of(policy(queue=queue, max_batch_size=1), arrivals)
    assert (batches, errors) == ([[B], [3], [7], [2], [4], [5], [1], [6]], {})


@in_virtual_time
async def test_each_level_has_a_size_and_a_timeout_of_its_own_and_fills_batches_of_others() -> None:
    by_level = {3: QueuePolicy(timeout_us=200_000, max_size=1)}
    queue = QueuePolicies(levels=3, default_level=2, default=QueuePolicy(max_size=3), by_level=by_level)
    levels = (3, 3, 2, 2, 2, 2, 1, 1, 1, 1)
    arrivals = [BUSY, *(priority(50 + 10 * n, n + 1, level) for n, level in enumerate(levels))]
    batches, errors = await batches_of(policy(queue=queue, max_batch_size=4), arrivals)
    assert batches == [[B], [7, 8, 9, 3], [4, 5]]
    assert {value: str(error) for value, error in errors.items()} == {
        1: "Request timeout expired",
        **dict.fromkeys((2, 6, 10), "[request id: <id_unknown>] Exceeds maximum queue size"),
    }


@in_virtual_time
async def test_requests_beyond_the_size_of_the_queue_are_refused() -> None:
    queue = QueuePolicies(default=QueuePolicy(max_size=2))
    batches, errors = await batches_of(policy(queue=queue, max_batch_size=1), while_busy(5))
    assert batches == [[B], [1], [2]]
    assert {value: type(error) for value, error in errors.items()} == dict.fromkeys((3, 4, 5), Overloaded)


@in_virtual_time
async def test_a_request_is_rejected_after_the_timeout_or_after_its_own_if_that_is_shorter() -> None:
    queue = QueuePolicies(default=QueuePolicy(timeout_us=200_000, allow_timeout_override=True))
    arrivals = [BUSY, Arrival(50, 1), timeout(60, 2, 50), timeout(70, 3, 900), Arrival(300, 4), timeout(310, 5, 20)]
    batches, errors = await batches_of(policy(queue=queue, max_batch_size=1), arrivals)
    assert batches == [[B], [4]]
    assert {(value, str(error)) for value, error in errors.items()} == {(n, "Request timeout expired") for n in (1, 2, 3, 5)}
    assert all(isinstance(error, Unavailable) and not error.retryable for error in errors.values())


@in_virtual_time
async def test_requests_have_no_timeout_of_their_own_where_the_policy_has_none() -> None:
    queue = QueuePolicies(default=QueuePolicy(allow_timeout_override=True))
    batches, errors = await batches_of(policy(queue=queue, max_batch_size=1), [BUSY, Arrival(50, 1), timeout(60, 2, 50)])
    assert (batches, errors) == ([[B], [1], [2]], {})


@in_virtual_time
async def test_delayed_requests_run_when_no_other_waits() -> None:
    queue = QueuePolicies(default=QueuePolicy(timeout_action=TimeoutAction.DELAY, timeout_us=100_000))
    arrivals = [BUSY, Arrival(50, 1), Arrival(60, 2), Arrival(380, 3), Arrival(390, 4)]
    batches, errors = await batches_of(policy(queue=queue, max_batch_size=1), arrivals)
    assert (batches, errors) == ([[B], [3], [4], [1], [2]], {})


@in_virtual_time
async def test_delayed_requests_run_in_the_order_in_which_they_came_whichever_timeout_was_shorter() -> None:
    delay = QueuePolicy(timeout_action=TimeoutAction.DELAY, timeout_us=300_000, allow_timeout_override=True)
    arrivals = [BUSY, Arrival(50, 1), timeout(60, 2, 100), timeout(65, 3, 50), Arrival(70, 4), Arrival(380, 5)]
    batches, errors = await batches_of(policy(queue=QueuePolicies(default=delay), max_batch_size=1), arrivals)
    assert (batches, errors) == ([[B], [5], [1], [2], [3], [4]], {})


@in_virtual_time
async def test_requests_of_another_shape_do_not_end_a_batch_which_triton_does() -> None:
    """Triton runs [1], [2], [3, 4] and [5, 6]."""
    widths = (1, 2, 1, 1, 2, 2)
    arrivals = [BUSY, *(Arrival(50 + 10 * n, n + 1, width=width) for n, width in enumerate(widths))]
    assert await batches_of(PLAIN, arrivals) == ([[B], [1, 3, 4], [2, 5, 6]], {})
