"""Dynamic batching: the requests of a model in batches, and the responses in order, as its ModelConfig declares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from typing import Any

from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.batching import Batch, Batcher, BatchPolicy, rows_of
from dynamo.worker.engine.batching_settings import Batching
from dynamo.worker.engine.request_queue import QueueOptions
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult, RunsBatches, closing
from dynamo.worker.repository.declared.model_config import instances_of
from dynamo.worker.repository.declared.ragged import ragged_inputs
from dynamo.worker.repository.scheduling.decoupled import DecoupledRequest, StreamsBatches
from dynamo.worker.repository.scheduling.response_order import ResponseOrder
from dynamo.worker.repository.wire.calls import check_waiting


class BatchedModel:
    """One version of a model with dynamic batching, whose requests queue here until `model` runs them.

    Those of a model without a batch dimension run one by one; they queue, as one row each, if there are queue policies.
    """

    def __init__(self, config: ModelConfig, model: RunsBatches) -> None:
        self._config = config
        self._model = model
        self._streams = model if config.model_transaction_policy.decoupled and isinstance(model, StreamsBatches) else None
        if self._streams is not None:
            self._streams.watch_queue(lambda: self.waiting)
        rows, ragged, count = max(1, config.max_batch_size), ragged_inputs(config), len(list(instances_of(config)))
        batching = Batching.read(config.dynamic_batching)
        policy = BatchPolicy(max_batch_size=rows, batching=batching, ragged_inputs=ragged, concurrency=count, ahead=count)
        execute = model.run_batch if self._streams is None else self._stream_batch
        self._batcher = Batcher(policy, execute) if config.max_batch_size or not batching.policies.is_plain else None
        self._order = ResponseOrder() if config.dynamic_batching.preserve_ordering else None
        if self._batcher is not None:
            self._batcher.start()

    def __repr__(self) -> str:
        return f"<BatchedModel of {self._model}>"

    @property
    def waiting(self) -> int:
        return self._model.waiting + (0 if self._batcher is None else self._batcher.waiting)

    async def close(self) -> None:
        if self._batcher is not None:
            await self._batcher.close()
        await self._model.close()

    def respond(self, request: ModelRequest) -> Coroutine[Any, Any, ModelResult]:
        if request.context.callers:  # before it takes its place in the order, which a caller of it may have before it
            check_waiting(request.context, self._config.name, self._model.processes)
        response = self._model.respond(request) if self._batcher is None else self._respond(self._batcher, request)
        return response if self._order is None else self._order.in_turn(response)

    async def _respond(self, batcher: Batcher, request: ModelRequest) -> ModelResult:
        response = await self._submit(batcher, request, request)
        return response if isinstance(response, ModelResult) else ModelResult(response)

    def _submit(
        self, batcher: Batcher, request: ModelRequest, submitted: ModelRequest | DecoupledRequest
    ) -> Coroutine[Any, Any, Any]:
        """Queue a request. The batch has `submitted` in its place."""
        options = QueueOptions.of(request.id, request.parameters)
        rows = rows_of(request.inputs) if self._config.max_batch_size else 1
        return batcher.submit(request.inputs, rows, request.context, request.context.version, submitted, options)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelResult]:
        if self._streams is None:
            yield await self.respond(request)
            return
        if request.context.callers:
            check_waiting(request.context, self._config.name, self._model.processes)
        own = DecoupledRequest(request)
        try:
            if self._batcher is None:
                responses = self._streams.stream(request)
            else:
                await self._submit(self._batcher, request, own)
                responses = self._streams.stream(request, own.read())
            async with closing(responses if self._order is None else self._order.ordered(responses)) as ordered:
                async for response in ordered:
                    yield response
        finally:
            own.leave()

    async def _stream_batch(self, batch: Batch) -> list[None]:
        assert self._streams is not None
        await self._streams.stream_all(batch.requests, batch.hand_over)
        return [None] * len(batch.requests)
