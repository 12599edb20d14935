"""The serving loop: what a worker does with each request, written once for all engines.

`Service` holds the models of a process and has one handler per verb of the request plane. It finds the model, refuses
late requests, gives the engine one `Context`, encodes the engine's responses, and counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import TypeAlias

import msgspec
from prometheus_client import CollectorRegistry

from dynamo.common import logs
from dynamo.common.errors import DeadlineExceeded, DynamoError, EngineError, InvalidRequest, ModelNotFound, NoInstances
from dynamo.common.generation import Summary, delta_encoder, request_decoder, summary_encoder
from dynamo.common.guided_rules import check_guided
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.request_plane.frames import size_of
from dynamo.common.messaging.request_plane.incoming import Handler, Incoming
from dynamo.common.messaging.request_plane.limits import COPIED_AT_ONCE_BYTES
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.observability.reception import Reception
from dynamo.common.observability.tracing import Tracing, context_of
from dynamo.common.process.steps import Steps
from dynamo.common.tensors.known_heads import KnownHeads, PerHead
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.response import ResponseForm
from dynamo.protos.inference_pb2 import ModelStatisticsResponse
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.canary import Canary, CanaryRequest
from dynamo.worker.engine.base import Context, Engine, RequestTimings, RespondsOnce, TensorEngine, TensorResponse
from dynamo.worker.observability.metrics import WorkerMetrics, WorkerModelMetrics
from dynamo.worker.observability.request_record import RequestRecord, RequestSink
from dynamo.worker.observability.request_trace import RequestTrace
from dynamo.worker.observability.spans import RequestSpan
from dynamo.worker.observability.statistics import VersionStatistics
from dynamo.worker.traces.recorder import TritonTraces

log = logging.getLogger(__name__)

Respond: TypeAlias = Callable[[TensorRequest, Context], Awaitable[TensorResponse]]


class StatisticsQuery(msgspec.Struct, frozen=True):
    """Body of a `statistics` request. An empty field matches all models, or all versions."""

    model: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of this process: its card, its engine, and the statistics of its requests by version."""

    card: ModelCard
    engine: Engine | TensorEngine
    statistics: Mapping[str, VersionStatistics]
    """By version."""
    files: Sequence[bytes] = ()
    """What the card names by digest, for the object store."""

    @classmethod
    def of(cls, card: ModelCard, engine: Engine | TensorEngine, files: Sequence[bytes] = ()) -> ServedModel:
        tags = dict(ModelConfig.FromString(card.model_config).metric_tags)
        return cls(card, engine, {version: VersionStatistics(card.name, version, tags) for version in card.versions}, files)

    def __repr__(self) -> str:
        return f"<ServedModel {self.card.name} of {self.engine!r}>"

    @property
    def names(self) -> Iterator[str]:
        """Yield every name under which requests may name the model."""
        yield self.card.name
        yield from self.card.aliases
        if self.card.llm is not None:
            yield from self.card.llm.adapters

    def version(self, requested: str) -> VersionStatistics:
        """Return the statistics of the requested version, or of the newest if `requested` is empty. Raises ModelNotFound."""
        statistics = self.statistics.get(requested or self.card.versions[-1])
        if statistics is None:
            raise ModelNotFound(self.card.name, requested)
        return statistics


def check_names(models: Sequence[ServedModel]) -> None:
    """Raises InvalidRequest if a name stands for two models."""
    names = [name for model in models for name in (model.card.name, *model.card.aliases)]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"two models of this worker are called '{name}'")


class _Uses:
    """How many requests use each LoRA adapter now."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._ended = asyncio.Event()

    def begin(self, adapter: str) -> None:
        """Count a request until `end`."""
        self._open[adapter] += 1

    def end(self, adapter: str) -> None:
        self._open[adapter] -= 1
        if not self._open[adapter]:
            del self._open[adapter]
            self._ended.set()

    async def ended(self, adapter: str) -> None:
        while adapter in self._open:
            self._ended.clear()
            await self._ended.wait()


class Service:
    """The models of a process, and the handlers of its requests."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        metrics: WorkerMetrics | None = None,
        tracing: Tracing | None = None,
        on_accepted: Callable[[str, str], None] | None = None,
        traces: TritonTraces | None = None,
        *,
        keep_latencies: bool = False,
    ) -> None:
        """Call `on_accepted` with model and booking of each request for text before an engine gets it.

        Without `metrics`, requests are counted where no registry shows it.
        """
        check_names(models)
        self.models: tuple[ServedModel, ...] = ()
        self._metrics = metrics or WorkerMetrics(CollectorRegistry(), Endpoint(), InstanceId(0))
        self._tracing = tracing
        self._traces = traces
        self._keep_latencies = keep_latencies
        self._measured: dict[str, WorkerModelMetrics] = {}
        """By the model's own name."""
        self._canaries: dict[str, Canary] = {}
        """Canaries of language models, by the model's own name."""
        self._tensor: dict[str, tuple[ServedModel, TensorEngine, Respond, PerHead[ResponseForm]]] = {}
        self._known_heads = KnownHeads()
        self._llm: dict[str, tuple[ServedModel, Engine, VersionStatistics, Canary]] = {}
        """With the statistics of the newest version, and the canary."""
        self._left: set[str] = set()
        """Names of models that were served before: requests for them may still arrive."""
        self._on_accepted = on_accepted
        self._adapters = _Uses()
        self._steps = Steps()
        for model in models:
            self.put(model)
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Service of {[model.card.name for model in self.models]}>"

    def put(self, model: ServedModel) -> None:
        """Serve `model` from now on. It replaces the model of its name if that is served by the same engine.

        Raises InvalidRequest, changing nothing, if another model has one of its names, or the engine does not serve its kind.
        """
        card, engine = model.card, model.engine
        former = next((other for other in self.models if other.card.name == card.name and other.engine is engine), None)
        others = {name for other in self.models if other is not former for name in other.names}
        for name in model.names:
            if name in others:
                raise InvalidRequest(f"two models of this worker are called '{name}'")
        tensor = engine if card.kind is ModelKind.TENSOR and isinstance(engine, TensorEngine) else None
        llm = engine if card.kind is ModelKind.LLM and isinstance(engine, Engine) else None
        if tensor is None and llm is None:
            raise InvalidRequest(f"the engine of model '{card.name}' cannot serve a model of kind '{card.kind}'")
        if former is not None:
            self.remove(card.name)
        if self._keep_latencies:
            for statistics in model.statistics.values():
                statistics.keep_latencies()
        self.models = (*self.models, model)
        if card.name not in self._measured:
            self._measured[card.name] = self._metrics.for_model(card.name)
            self._measured[card.name].follow(engine)
        for version in card.versions:
            self._measured[card.name].show(version)
        if llm is not None and former is None:
            self._canaries[card.name] = Canary(card.name, llm, takes_text=card.llm is not None and card.llm.takes_text)
        forms = PerHead(lambda request: ResponseForm.of(request, card))
        for name in model.names:
            self._left.discard(name)
            if tensor is not None:
                respond = tensor.respond if isinstance(tensor, RespondsOnce) else partial(_only, tensor)
                self._tensor[name] = (model, tensor, respond, forms)
            elif llm is not None:
                self._llm[name] = (model, llm, model.version(""), self._canaries[card.name])

    def remove(self, model: str) -> None:
        """Stop taking requests for `model`. Requests that still arrive get an error that lets callers try another instance."""
        for served in self.models:
            if served.card.name == model:
                self.models = tuple(other for other in self.models if other is not served)
                for name in served.names:
                    self._tensor.pop(name, None)
                    self._llm.pop(name, None)
                    self._left.add(name)

    async def adapter_unused(self, adapter: str) -> None:
        """Return when no request uses a LoRA adapter."""
        await self._adapters.ended(adapter)

    def version_statistics(self) -> Iterator[VersionStatistics]:
        """Yield the statistics of each version of each model that is served."""
        for model in self.models:
            yield from model.statistics.values()

    def count_output_mismatch(self, model: str) -> None:
        """Count a response of `model` with an output other than declared."""
        if (measured := self._measured.get(model)) is not None:
            measured.output_mismatch()

    def _not_served(self, model: str) -> DynamoError:
        return NoInstances(model) if model in self._left else ModelNotFound(model)

    @property
    def handlers(self) -> dict[str, Handler]:
        """The handlers by verb."""
        return {
            "infer": self.infer,
            "generate": self.generate,
            "statistics": self.statistics,
            "ping": self.ping,
            "canary": self.canary,
        }

    async def infer(self, incoming: Incoming) -> None:
        """Respond to a serialized ModelInferRequest with serialized ModelInferResponses."""
        start = perf_counter_ns()
        request = self._known_heads.find(incoming.body)
        if request is None:
            request = TensorRequest.parse(incoming.body)
            self._known_heads.add(request)
        served = self._tensor.get(request.head.model_name)
        if served is None:
            raise self._not_served(request.head.model_name)
        model, engine, respond, forms = served
        statistics = model.version(request.head.model_version)
        context = self._context(incoming, statistics.version)
        if model.card.max_batch_size and request.head.inputs and request.head.inputs[0].shape:
            context.timings.rows = request.head.inputs[0].shape[0]
        form = forms.of(request)
        body: Body = ()
        record = self._record(incoming, context, model, statistics, start, request.head.id)
        try:
            self._refuse_late(incoming)
            if record.sinks:
                record.request(request)
            if model.card.decoupled:
                await self._send_all(engine.infer(request, context), form, record, incoming)
            else:
                response = await respond(request, context)
                made_ns = perf_counter_ns()
                if record.sinks:
                    record.response(response)
                if form.may_be_slow and form.is_slow(response.raw_outputs):
                    body = await self._encoded_in_steps(form, response)
                else:
                    body = form.encode(response.head, response.raw_outputs, response.encoded)
                context.timings.output_ns += perf_counter_ns() - made_ns
            size = size_of(body)
            record.sent_bytes += size
            if size > COPIED_AT_ONCE_BYTES:
                body = await incoming.lend_in_steps(body, last=True)
        except BaseException as error:
            record.fail(error)
            raise
        record.succeed()
        incoming.end(body)

    async def generate(self, incoming: Incoming) -> None:
        """Respond to a `GenerateRequest` with one `Delta` per engine step and choice, then a `Summary`."""
        start = perf_counter_ns()
        try:
            request = request_decoder.decode(incoming.body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidRequest(f"not a request for text generation: {error}") from error
        served = self._llm.get(request.model)
        if served is None:
            raise self._not_served(request.model)
        model, engine, statistics, canary = served
        if request.adapter and request.adapter not in self._llm:  # unloaded since the request was sent
            raise self._not_served(request.adapter)
        context = self._context(incoming, statistics.version)
        encode, send = delta_encoder.encode, incoming.send_nowait
        summary: Summary | None = None
        record = self._record(incoming, context, model, statistics, start, incoming.request_id)
        try:
            if incoming.deadline is not None:
                self._refuse_late(incoming)
            if request.sampling.guided is not None:
                check_guided(request.sampling.guided)
            if self._on_accepted is not None:
                self._on_accepted(model.card.name, incoming.headers.get("booking", ""))
            steps = engine.generate(request, context)
            if request.adapter:
                self._adapters.begin(request.adapter)
            try:
                async for step in steps:
                    if isinstance(step, Summary):
                        summary = step
                        continue
                    delta = encode(step)
                    record.sent_bytes += len(delta)
                    canary.progress += 1
                    if not send(delta):
                        await incoming.ready()
            except BaseException:  # one that was read to its end is closed
                await close(steps)
                raise
            finally:
                if request.adapter:
                    self._adapters.end(request.adapter)
            if summary is None:
                raise EngineError(f"the engine of model '{request.model}' ended without a summary")
        except BaseException as error:
            record.fail(error)
            raise
        record.succeed(summary)
        incoming.end(summary_encoder.encode(summary))

    async def statistics(self, incoming: Incoming) -> None:
        """Respond to a `StatisticsQuery` with a serialized ModelStatisticsResponse."""
        try:
            query = _query_decoder.decode(incoming.body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"not a request for statistics: {error}") from error
        models = [model for model in self.models if not query.model or query.model in model.names]
        if not models:
            raise ModelNotFound(query.model)
        messages = [
            statistics.to_message()
            for model in models
            for version, statistics in model.statistics.items()
            if query.version in ("", version)
        ]
        if not messages:
            raise ModelNotFound(query.model, query.version)
        incoming.end(ModelStatisticsResponse(model_stats=messages).SerializeToString())

    async def ping(self, incoming: Incoming) -> None:
        """Respond with the names of the models that are served, as soon as the event loop runs this."""
        incoming.end(msgspec.msgpack.encode([model.card.name for model in self.models]))

    async def canary(self, incoming: Incoming) -> None:
        """Send an empty response to a `CanaryRequest` once the engine is known to work. Tensor engines are not probed."""
        try:
            request = _canary_decoder.decode(incoming.body)
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"not a CanaryRequest: {error}") from error
        canary = self._canaries.get(request.model)
        if canary is not None and request.model in self._llm:  # a sleeping engine is not probed
            await canary.probe(request.idle_s)
        incoming.end()

    async def close(self) -> None:
        """End the running probes. The engines are closed by their owner."""
        for canary in self._canaries.values():
            await canary.close()

    async def _encoded_in_steps(self, form: ResponseForm, response: TensorResponse) -> list[Buffer]:
        work = form.encode_in_steps(response.head, response.raw_outputs, response.encoded)
        return await self._steps.run(work)

    async def _send_all(
        self, iterator: AsyncIterator[TensorResponse], form: ResponseForm, record: RequestRecord, incoming: Incoming
    ) -> None:
        """Send each response of a decoupled model as it comes, no faster than the caller reads."""
        try:
            async for response in iterator:
                made_ns = perf_counter_ns()
                if record.sinks:
                    record.response(response)
                body: Body
                if form.may_be_slow and form.is_slow(response.raw_outputs):
                    body = await self._encoded_in_steps(form, response)
                else:
                    body = form.encode(response.head, response.raw_outputs, response.encoded)
                size = size_of(body)
                record.responded(made_ns, size, empty=not response.head.outputs)
                if size > COPIED_AT_ONCE_BYTES:
                    body = await incoming.lend_in_steps(body)
                if not incoming.send_nowait(body):
                    await incoming.ready()
        except BaseException:
            await close(iterator)
            raise

    def _context(self, incoming: Incoming, version: str) -> Context:
        request_id = incoming.request_id
        logs.request_id.set(request_id)
        if "traceparent" in incoming.headers:
            context_of(incoming.headers)
        return Context(request_id, incoming.deadline, incoming.headers, incoming.cancelled, version, RequestTimings())

    def _record(
        self,
        incoming: Incoming,
        context: Context,
        model: ServedModel,
        statistics: VersionStatistics,
        start_ns: int,
        request_id: str,
    ) -> RequestRecord:
        """`request_id`: as the client named it."""
        name, traces = model.card.name, self._traces
        sinks: tuple[RequestSink, ...] = ()
        is_sampled = False
        if traces is not None and traces.is_on:
            if traces.to_collector:
                is_sampled = traces.is_sampled(name)
            else:
                context.trace = traces.begin(name, statistics.version, request_id)
                if context.trace is not None:
                    sinks = (RequestTrace(context.trace, start_ns, Reception.of(incoming.headers)),)
        if self._tracing is not None:
            attributes = {"dynamo.model": name, "dynamo.request_id": incoming.request_id}
            span = self._tracing.begin("serve", incoming.headers, attributes, always=is_sampled)
            if span is not None:
                sinks = (*sinks, RequestSpan(span))
        size, decoupled = len(incoming.body), model.card.decoupled
        return RequestRecord(self._measured[name], statistics, sinks, context.timings, size, start_ns, decoupled=decoupled)

    def _refuse_late(self, incoming: Incoming) -> None:
        if incoming.deadline is not None and self._loop.time() >= incoming.deadline:
            raise DeadlineExceeded


async def _only(engine: TensorEngine, request: TensorRequest, context: Context) -> TensorResponse:
    """Return the only response of a model that is not decoupled. Raises EngineError if there are none or several."""
    iterator = engine.infer(request, context)
    only: TensorResponse | None = None
    model = request.head.model_name
    try:
        async for response in iterator:
            if only is not None:
                raise EngineError(f"model '{model}' gave several responses but is not declared as decoupled")
            only = response
    except BaseException:  # one that was read to its end is closed
        await close(iterator)
        raise
    if only is None:
        raise EngineError(f"model '{model}' gave no response")
    return only


async def close(iterator: AsyncIterator[object]) -> None:
    """Close the iterator of an engine, so that an abandoned request stops now rather than when memory is collected."""
    if isinstance(iterator, AsyncGenerator):
        await iterator.aclose()


_canary_decoder = msgspec.msgpack.Decoder(CanaryRequest)
_query_decoder = msgspec.msgpack.Decoder(StatisticsQuery)
