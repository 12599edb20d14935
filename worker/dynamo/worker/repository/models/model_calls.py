"""Requests of one model to another, in the same worker: counted and traced as those of clients are."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from dynamo.common.errors import Code, DynamoError
from dynamo.worker.observability.request_trace import RequestTrace
from dynamo.worker.observability.statistics import VersionStatistics
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult, closing
from dynamo.worker.repository.models.loaded import LoadedModel
from dynamo.worker.repository.wire.calls import CallMemory
from dynamo.worker.repository.wire.raw_tensors import RawTensors, forms_of


async def run_counted(
    model: LoadedModel, request: ModelRequest, statistics: VersionStatistics | None, memory: CallMemory
) -> AsyncIterator[ModelResult]:
    """Run a request that `model` has checked. `memory` counts what the callers in processes hold of its responses."""
    context = request.context
    start = time.perf_counter_ns()
    trace = _begin_trace(model, request, start)
    code: Code | None = Code.CANCELLED
    if model.card.max_batch_size:
        context.timings.rows = next((shape[0] for _, _, shape in forms_of(request.inputs) if shape), 1)
    try:
        async with closing(model.run(request)) as responses:
            async for response in responses:
                if trace is not None:
                    trace.outputs(response.outputs, model.datatypes)
                if context.callers and not isinstance(response.outputs, RawTensors):  # which were counted before
                    for output in response.outputs.values():
                        memory.hold(output)
                yield response
        code = None
    except DynamoError as error:
        code = error.code
        if statistics is not None:
            statistics.failed(time.perf_counter_ns() - start, context.timings, code)
        raise
    finally:
        if trace is not None:
            trace.end(context.timings, None, code)
    if statistics is not None:
        statistics.succeeded(time.perf_counter_ns() - start, context.timings)


def _begin_trace(model: LoadedModel, request: ModelRequest, start_ns: int) -> RequestTrace | None:
    """Begin the trace of a request that is a part of another one, if that is traced."""
    context = request.context
    if context.trace is None:
        return None
    context.trace = context.trace.child(model.name, context.version, request.id)
    if context.trace is None:
        return None
    trace = RequestTrace(context.trace, start_ns)
    trace.inputs(request.inputs, {tensor.name: tensor.datatype for tensor in model.card.inputs})
    return trace
