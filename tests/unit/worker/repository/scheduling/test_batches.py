"""Dynamic batching around a model that knows nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Caller, Context
from dynamo.worker.engine.batching import Batch, Tensors
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult
from dynamo.worker.repository.scheduling.batches import BatchedModel
from tests.support.waiting import until


class Doubling:
    """A model of one process that keeps what it ran, and runs nothing before `go` is set."""

    def __init__(self) -> None:
        self.waiting = 0
        self.processes: Sequence[object] = (self,)
        self.go = asyncio.Event()
        self.batches: list[int] = []
        self.alone: list[float] = []
        self.is_closed = False

    async def respond(self, request: ModelRequest) -> ModelResult:
        value = float(request.inputs["x"][0])
        await self.go.wait()
        self.alone.append(value)
        if value < 0:
            raise EngineError("negative")
        if not value:  # it ends after the others
            await until(lambda: len(self.alone) == 3)
        return ModelResult({"y": request.inputs["x"] * 2})

    async def run_batch(self, batch: Batch) -> Tensors | list[Any]:
        await self.go.wait()
        self.batches.append(batch.rows)
        return {"y": batch.inputs()["x"] * 2}

    async def close(self) -> None:
        self.is_closed = True


def scheduled(model: Doubling, settings: str) -> BatchedModel:
    return BatchedModel(text_format.Parse(settings, ModelConfig(name="m")), model)


def request(*values: float, callers: tuple[Caller, ...] = ()) -> ModelRequest:
    return ModelRequest({"x": np.array(values, np.float32)}, Context("r", callers=callers))


async def test_requests_run_in_one_batch_and_get_their_own_rows() -> None:
    model = Doubling()
    batched = scheduled(model, "max_batch_size: 8 dynamic_batching { }")
    responses = [asyncio.create_task(batched.respond(request(*values))) for values in ((1, 2), (3,))]
    model.go.set()
    results = await asyncio.gather(*responses)
    assert ([result.outputs["y"].tolist() for result in results], model.batches) == ([[2, 4], [6]], [3])
    await batched.close()
    assert model.is_closed


async def test_what_waits_for_its_batch_and_what_waits_in_the_model_add_up() -> None:
    model = Doubling()
    model.waiting = 5
    batched = scheduled(model, "max_batch_size: 1 dynamic_batching { }")
    responses = [asyncio.create_task(batched.respond(request(1))) for _ in range(4)]
    await asyncio.sleep(0)
    assert batched.waiting == 5 + 4
    model.go.set()
    await asyncio.gather(*responses)
    assert batched.waiting == 5
    await batched.close()


async def test_responses_keep_their_order_where_requests_run_one_by_one() -> None:
    model = Doubling()
    batched = scheduled(model, "dynamic_batching { preserve_ordering: true }")
    ended: list[float] = []

    async def send(value: float) -> None:
        with suppress(EngineError):
            await batched.respond(request(value))
        ended.append(value)

    model.go.set()
    await asyncio.gather(*(send(value) for value in (0, -1, 2)))
    assert (ended, sorted(model.alone), model.batches) == ([0, -1, 2], [-1, 0, 2], [])
    await batched.close()


async def test_a_request_that_all_processes_wait_for_does_not_queue() -> None:
    model = Doubling()
    batched = scheduled(model, "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 60000000 }")
    with pytest.raises(InvalidRequest, match=r"each process of model 'm' \(1\) waits for this call"):
        await batched.respond(request(1, callers=(Caller("m", model),)))
    assert batched.waiting == 0
    await batched.close()


@pytest.mark.parametrize(
    "settings", ["dynamic_batching { preserve_ordering: true }", "max_batch_size: 1 dynamic_batching { preserve_ordering: true }"]
)
async def test_a_request_of_a_model_to_itself_does_not_wait_for_the_response_that_waits_for_it(settings: str) -> None:
    model = Doubling()
    batched = scheduled(model, settings)
    outer = asyncio.create_task(batched.respond(request(1)))
    await asyncio.sleep(0)
    async with asyncio.timeout(120):
        with pytest.raises(InvalidRequest, match="waits for this call"):
            await batched.respond(request(2, callers=(Caller("m", model),)))
    model.go.set()
    assert (await outer).outputs["y"].tolist() == [2]
    await batched.close()


async def test_a_request_whose_inputs_differ_in_their_batch_size_is_refused() -> None:
    batched = scheduled(Doubling(), "max_batch_size: 8 dynamic_batching { }")
    uneven = ModelRequest({"a": np.zeros((1, 1)), "b": np.zeros((2, 1))}, Context("r"))
    with pytest.raises(InvalidRequest, match="differ in their first dimension"):
        await batched.respond(uneven)
    await batched.close()
