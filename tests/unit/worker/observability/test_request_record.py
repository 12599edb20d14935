"""The record of a worker's request, and its two sinks: a span with children, and a trace in Triton's format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from dynamo.common.errors import EngineError
from dynamo.common.generation import Delta, GenerateRequest, Summary, pack_tokens, request_encoder
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, TensorSpec
from dynamo.common.observability.server_settings import ServerSettings, TraceChange
from dynamo.common.observability.tracing import Tracing
from dynamo.common.options import TraceOptions
from dynamo.common.tensors.request import TensorRequest
from dynamo.protos.inference_pb2 import ModelInferRequest
from dynamo.worker.engine.base import Context, EngineLoad, RequestTimings, TensorResponse
from dynamo.worker.engine.echo import EchoTensors
from dynamo.worker.observability.request_record import Phase, phases_of
from dynamo.worker.serve import ServedModel, Service
from dynamo.worker.traces.recorder import TritonTraces
from tests.support.incoming import FakeIncoming

TENSORS = (TensorSpec(name="X", datatype="INT8", shape=(2,)),)
TENSOR_MODEL = ModelCard(name="m", kind=ModelKind.TENSOR, inputs=TENSORS, outputs=TENSORS)
TEXT_MODEL = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=100, tokenizer=""))


class Measured(EchoTensors):
    """An engine that measures all phases but the output."""

    async def respond(self, request: TensorRequest, context: Context) -> TensorResponse:
        context.timings.queue_ns, context.timings.input_ns, context.timings.infer_ns = 5, 0, 7
        return await super().respond(request, context)


class Failing(EchoTensors):
    async def respond(self, request: TensorRequest, context: Context) -> TensorResponse:
        raise EngineError("out of memory")


class Speaker:
    """A language model that never has a queue."""

    async def start(self) -> ModelCard:
        return TEXT_MODEL

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        yield Delta(tokens=(1, 2))
        yield Summary(prompt_tokens=8, output_tokens=2, cached_tokens=6, queue_ms=0.0, prefill_ms=0.0001)

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        return


def tracing() -> tuple[Tracing, InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider.get_tracer("test"), 1.0), exporter


def inference() -> FakeIncoming:
    request = ModelInferRequest(model_name="m")
    request.inputs.add(name="X", datatype="INT8", shape=[2])
    request.raw_input_contents.append(b"\1\2")
    return FakeIncoming(request.SerializeToString())


def served_and_children(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """Return the span of the request, which ends last, and its children."""
    *children, served = exporter.get_finished_spans()
    assert served.name == "serve"
    context = served.get_span_context()
    assert context is not None
    for child in children:
        assert child.parent is not None and child.parent.span_id == context.span_id
    return served, children


@pytest.mark.parametrize(
    ("timings", "ends"),
    [
        (RequestTimings(), [0, 0, 100, 100]),
        (RequestTimings(queue_ns=10, input_ns=20, output_ns=30), [10, 30, 70, 100]),
        (RequestTimings(queue_ns=10, infer_ns=5, output_ns=30), [10, 10, 15, 45]),
        (RequestTimings(queue_ns=90, infer_ns=50), [90, 90, 100, 100]),
        (RequestTimings(queue_ns=80, output_ns=40), [80, 80, 80, 100]),
    ],
)
def test_the_phases_of_an_inference_follow_one_another_until_its_end_at_most(timings: RequestTimings, ends: list[int]) -> None:
    names = ("queue", "input", "infer", "output")
    assert phases_of(timings, 100) == [
        Phase(name, start, end) for name, start, end in zip(names, [0, *ends[:-1]], ends, strict=True)
    ]


async def test_a_span_has_the_phases_that_took_time_as_children_in_a_row() -> None:
    spans, exporter = tracing()
    await Service([ServedModel.of(TENSOR_MODEL, Measured())], tracing=spans).infer(inference())
    served, (queue, infer, output) = served_and_children(exporter)
    assert (queue.name, infer.name, output.name) == ("queue", "infer", "output")
    assert queue.start_time == served.start_time
    assert (queue.end_time, infer.end_time) == (infer.start_time, output.start_time)
    assert queue.start_time is not None and queue.end_time == queue.start_time + 5


async def test_the_span_of_a_generation_has_each_phase_even_without_a_queue() -> None:
    spans, exporter = tracing()
    incoming = FakeIncoming(request_encoder.encode(GenerateRequest(model="m", prompt=pack_tokens(range(8)))))
    await Service([ServedModel.of(TEXT_MODEL, Speaker())], tracing=spans).generate(incoming)
    _, children = served_and_children(exporter)
    assert [(child.name, dict(child.attributes or {})) for child in children] == [
        ("queue", {}),
        ("prefill", {"dynamo.prompt_tokens": 8, "dynamo.cached_tokens": 6}),
        ("decode", {"dynamo.output_tokens": 2}),
    ]


async def test_the_span_of_a_failed_request_has_its_error_and_no_phases() -> None:
    spans, exporter = tracing()
    with pytest.raises(EngineError):
        await Service([ServedModel.of(TENSOR_MODEL, Failing())], tracing=spans).infer(inference())
    served, children = served_and_children(exporter)
    assert not children
    assert dict(served.attributes or {})["error.type"] == "internal"


async def test_a_request_may_leave_a_span_and_a_trace_with_its_tensors(tmp_path: Path) -> None:
    spans, exporter = tracing()
    traces = TritonTraces(TraceOptions(file=tmp_path / "t.json"), "1a")
    traces.use(ServerSettings(trace={"": TraceChange(levels=("TIMESTAMPS", "TENSORS"), rate=1)}))
    await Service([ServedModel.of(TENSOR_MODEL, Measured())], tracing=spans, traces=traces).infer(inference())
    traces.finish()
    entries = json.loads((tmp_path / "t-1a.json").read_text())
    tensors = [(entry["activity"], entry["tensor"]["data"]) for entry in entries if "tensor" in entry]
    assert tensors == [("TENSOR_QUEUE_INPUT", "1,2"), ("TENSOR_BACKEND_OUTPUT", "1,2")]
    times = {entry["timestamps"][0]["name"]: entry["timestamps"][0]["ns"] for entry in entries if "timestamps" in entry}
    assert times["COMPUTE_START"] == times["QUEUE_START"] + 5
    assert times["COMPUTE_OUTPUT_START"] == times["COMPUTE_INPUT_END"] + 7
    assert times["COMPUTE_END"] == times["REQUEST_END"]
    _, children = served_and_children(exporter)
    assert len(children) == 3
