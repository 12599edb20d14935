"""Triton's Python backend: `model.py` with a class TritonPythonModel, each instance in a process of its own.

A process runs one `execute` at a time; `pipeline` gives it the next before it is idle. When one dies, it is started again, and
the requests that it had begun and not responded to run once more: a request that ends a second process fails. Requests that
arrive while no process of the model is alive are refused, so that frontends send them to another worker.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from functools import partial
from pathlib import Path

from dynamo.common.errors import Cancelled, DynamoError, EngineError, InvalidRequest, ModelNotFound
from dynamo.common.process.background import start
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.batching import Batch
from dynamo.worker.paths import relative_path
from dynamo.worker.repository.declared.execution import ModelRegistry, ModelRequest, ModelResult, Version, closing
from dynamo.worker.repository.declared.model_config import ModelInstance, config_from_json, config_to_json, instances_of
from dynamo.worker.repository.python.codes import to_code
from dynamo.worker.repository.python.custom_metrics import CustomMetrics, MetricOwner
from dynamo.worker.repository.python.environments import Environments, Interpreter
from dynamo.worker.repository.python.stub_process import CallHandlers, StubProcess, open_stub
from dynamo.worker.repository.scheduling.decoupled import DecoupledRequest, count_time
from dynamo.worker.repository.scheduling.pipeline import Execution, NoProcess, Pipeline
from dynamo.worker.repository.scheduling.rate_limiter import ExecutionLimits, RateLimiter, limits_of
from dynamo.worker.repository.scheduling.responses import ExecuteRaised, ProcessDied, SingleResponse
from dynamo.worker.repository.stub.pb_utils import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TritonError,
)
from dynamo.worker.repository.wire import wire
from dynamo.worker.repository.wire.calls import CallMemory, check_waiting
from dynamo.worker.repository.wire.raw_tensors import RawTensors, pack

log = logging.getLogger(__name__)

DEFAULT_FILE = "model.py"
_CLASS, _COMPLETES = b"TritonPythonModel", b"auto_complete_config"
_PLAIN_CLASS = re.compile(rb"^class TritonPythonModel(?:\(object\))?:", re.MULTILINE)
_SHORTEST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_RESTART_WAIT_S = 10.0
"""How long the retry of a request waits for a process."""


class PythonBackend:
    """Loads models for one worker. They call its other models by `models`."""

    def __init__(
        self,
        models: ModelRegistry,
        environments: Environments,
        limiter: RateLimiter | None = None,
        call_memory: CallMemory | None = None,
    ) -> None:
        self.memory: SharedMemory | None = None
        """Shared memory of this worker, for the tensors of models that are opened from now on."""
        self.metrics = CustomMetrics()
        """Custom metrics of all models."""
        self._models = models
        self._environments = environments
        self._limiter = limiter
        self._call_memory = call_memory or CallMemory()

    def _handlers(self, metrics: MetricOwner) -> CallHandlers:
        call, control = partial(_serve_call, self._models), partial(_serve_control, self._models)
        return CallHandlers(call, control, metrics.carry_out, self._call_memory)

    async def complete(self, version: Version) -> ModelConfig:
        file = _file_of(version)
        if not _may_complete(await asyncio.to_thread(file.read_bytes)):
            return version.config
        metrics = self.metrics.owner()
        with ExitStack() as environment:
            interpreter = await self._interpreter(version, environment)
            stub = await open_stub(version.name, self._handlers(metrics), interpreter=interpreter)
            try:
                await stub.start(file, version.folder)
                completed = await stub.complete(config_to_json(version.config))
            finally:
                await stub.end()
                metrics.close()
        return config_from_json(completed) if completed else version.config

    async def open(self, version: Version) -> PythonModel:
        [model] = await self._open(version, [list(instances_of(version.config))])
        return model

    async def open_instances(self, version: Version) -> Sequence[PythonModel]:
        return await self._open(version, [[instance] for instance in instances_of(version.config)])

    async def _open(self, version: Version, groups: Sequence[Sequence[ModelInstance]]) -> Sequence[PythonModel]:
        """Return a model for each group of instances."""
        file = _file_of(version)
        environments = [ExitStack() for _ in groups]
        models = []
        try:
            interpreters = [await self._interpreter(version, environment) for environment in environments]
            for group, interpreter, environment in zip(groups, interpreters, environments, strict=True):
                limits = limits_of(self._limiter, group)
                environment.callback(limits.close)
                metrics = self.metrics.owner()
                environment.callback(metrics.close)
                handlers = self._handlers(metrics)
                models.append(PythonModel(version, file, handlers, self.memory, group, limits, interpreter, environment))
        except BaseException:
            for environment in environments:
                environment.close()
            raise
        try:
            await asyncio.gather(*(model.start() for model in models))
        except BaseException:
            await asyncio.gather(*(model.close() for model in models))
            raise
        return models

    async def _interpreter(self, version: Version, environment: ExitStack) -> Interpreter:
        """Return the Python for a model, which is there until `environment` is closed."""
        return await asyncio.to_thread(environment.enter_context, self._environments.open(version.config, version.folder))


def _file_of(version: Version) -> Path:
    file = version.path / relative_path(version.config.default_model_filename or DEFAULT_FILE)
    if not file.is_file():
        raise InvalidRequest(f"there is no file {version.version}/{file.name}")
    return file


def _may_complete(source: bytes) -> bool:
    """Return whether a model may complete its configuration. To find that out for certain takes a process that imports it.

    A class that inherits, or that the file names elsewhere, may have the method although the file does not name it.
    """
    return _COMPLETES in source or source.count(_CLASS) != 1 or _PLAIN_CLASS.search(source) is None


class PythonModel:
    """One version of a model, with its processes."""

    def __init__(
        self,
        version: Version,
        file: Path,
        handlers: CallHandlers,
        memory: SharedMemory | None,
        instances: Sequence[ModelInstance],
        limits: ExecutionLimits,
        interpreter: Interpreter,
        environment: ExitStack,
    ) -> None:
        """`environment`: holds `interpreter`, `limits` and the model's metrics, and is closed with the model."""
        self._version = version
        self._file = file
        self._handlers = handlers
        self._memory = memory
        self._decoupled = version.config.model_transaction_policy.decoupled
        self._instances = instances
        self._limits = limits
        self._interpreter = interpreter
        self._environment = environment
        self._pipeline = Pipeline(version.name)
        self._keeping: list[asyncio.Task[None]] = []

    @property
    def processes(self) -> Sequence[StubProcess]:
        return self._pipeline.processes

    def __repr__(self) -> str:
        return f"<PythonModel {self._version.name}/{self._version.version}, {self._pipeline}>"

    @property
    def waiting(self) -> int:
        return self._limits.waiting + self._pipeline.waiting

    async def start(self) -> None:
        """Start the processes. Raises EngineError with the error of the model."""
        started = await asyncio.gather(*map(self._start, self._instances), return_exceptions=True)
        stubs = [stub for stub in started if isinstance(stub, StubProcess)]
        for stub in stubs:
            self._pipeline.add(stub)
        for error in started:
            if isinstance(error, BaseException):
                raise error
        for instance, stub in zip(self._instances, stubs, strict=True):
            self._keeping.append(start(self._keep(instance, stub), f"instance {instance.name}"))

    async def close(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*(stub.close() for stub in self.processes), *self._keeping, return_exceptions=True)
        self._environment.close()

    async def _start(self, instance: ModelInstance) -> StubProcess:
        version = self._version
        stub = await open_stub(version.name, self._handlers, self._memory, self._interpreter)
        arguments = {
            "model_config": config_to_json(version.config),
            "model_instance_kind": instance.kind,
            "model_instance_name": instance.name,
            "model_instance_device_id": str(instance.device),
            "model_repository": str(version.folder),
            "model_version": version.version,
            "model_name": version.name,
        }
        try:
            await stub.start(self._file, version.folder)
            await stub.initialize(arguments, decoupled=self._decoupled)
        except BaseException:
            await stub.end()
            raise
        return stub

    async def _keep(self, instance: ModelInstance, stub: StubProcess) -> None:
        """Start the process again whenever it has ended."""
        while True:
            await stub.closed.wait()
            await stub.end()
            pause_s = _SHORTEST_PAUSE_S
            while True:
                log.error("instance %s has died; it is started again in %g s", instance.name, pause_s)
                await asyncio.sleep(pause_s)
                try:
                    stub = await self._start(instance)
                    break
                except (DynamoError, OSError) as error:
                    log.error("instance %s does not start: %s", instance.name, error)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._pipeline.add(stub)

    # Requests

    async def respond(self, request: ModelRequest) -> ModelResult:
        if request.context.callers:
            check_waiting(request.context, self._version.name, self.processes)
        submitted = time.perf_counter_ns()
        execution, [response] = self._pipeline.of_one_response([request])
        try:
            self._pipeline.submit(execution, await self._limits.take())
            result_or_error = await response.done
        finally:
            self._pipeline.leave(execution)
            count_time(request, submitted, execution.sent_ns, execution.infer_ns)
        if isinstance(result_or_error, ProcessDied):
            result_or_error = await self._respond_again(request, result_or_error)
        try:
            if isinstance(result_or_error, DynamoError):
                raise result_or_error
            return result_or_error
        finally:
            del result_or_error  # else the traceback of the error keeps this frame, and so the tensors, until memory is collected

    async def respond_all(self, requests: Sequence[ModelRequest]) -> list[ModelResult | DynamoError]:
        """Run requests in one call of `execute`, once: what a process that dies knew of them is lost."""
        return await self._results(*self._pipeline.of_one_response(requests))

    def watch_queue(self, waiting: Callable[[], int], *, has_slots: bool = False) -> None:
        self._pipeline.queued, self._pipeline.has_slots = waiting, has_slots

    async def stream_all(self, requests: Sequence[DecoupledRequest], on_begun: Callable[[], None]) -> None:
        """Run requests of a decoupled model in one call of `execute`, and return when that has.

        `on_begun` is called when the responses can be read.
        """
        execution, streams = self._pipeline.of_many_responses([request.request for request in requests])
        returned = asyncio.Event()
        execution.at_end(returned.set)
        self._pipeline.submit(execution, await self._limits.take())
        for request, stream in zip(requests, streams, strict=True):
            request.begin(self._pipeline, execution, stream)
        on_begun()
        await returned.wait()

    async def run_batch(self, batch: Batch) -> list[ModelResult | DynamoError]:
        """Return the response to each request, or its error."""
        submitted = time.perf_counter_ns()
        execution, responses = self._pipeline.of_one_response(batch.requests)
        try:
            results = await self._results(execution, responses, lambda: not batch.is_abandoned)
            again_for = ProcessDied if len(results) == 1 else (ProcessDied, ExecuteRaised)
            failed = [(index, result) for index, result in enumerate(results) if isinstance(result, again_for)]
            # Each again by itself, so that the request that ends a process, or makes `execute` raise, fails alone.
            again = await asyncio.gather(*(self._respond_again(batch.requests[index], error) for index, error in failed))
            for (index, _), result in zip(failed, again, strict=True):
                results[index] = result
            return results
        finally:
            now = time.perf_counter_ns()
            batch.infer_ns = execution.infer_ns or (now - execution.sent_ns if execution.sent_ns else 0)
            batch.queue_ns = now - submitted - batch.infer_ns

    async def _results(
        self, execution: Execution, responses: Sequence[SingleResponse], is_wanted: Callable[[], bool] = lambda: True
    ) -> list[ModelResult | DynamoError]:
        """Run an execution, and return the response to each request. Raises Cancelled unless it is still wanted by its turn."""
        give_back = await self._limits.take()
        if not is_wanted():
            give_back()
            raise Cancelled()
        self._pipeline.submit(execution, give_back)
        try:
            return [await response.done for response in responses]
        finally:
            self._pipeline.leave(execution)

    async def _respond_again(self, request: ModelRequest, failed: EngineError) -> ModelResult | DynamoError:
        give_up_at = self._give_up_at(request.context)
        while True:
            await self._process_again(request.context, failed, give_up_at)
            with suppress(NoProcess):
                [result] = await self._results(*self._pipeline.of_one_response([request], is_retry=True))
                if not isinstance(result, NoProcess):
                    return result

    async def stream(self, request: ModelRequest, begun: AsyncIterator[ModelResult] | None = None) -> AsyncIterator[ModelResult]:
        """Run one request of a decoupled model, or yield the responses of one that a batch has `begun`.

        Once more, by itself and without queueing again, if its process dies, or the `execute` of its batch raises, before it has
        sent a response.
        """
        if begun is None and request.context.callers:
            check_waiting(request.context, self._version.name, self.processes)
        has_responded = False
        try:
            async with closing(begun or self._stream(request)) as responses:
                async for response in responses:
                    has_responded = True
                    yield response
            return
        except (ProcessDied, ExecuteRaised) as error:
            if has_responded or (begun is None and isinstance(error, ExecuteRaised)):
                raise
            failed = error
        give_up_at = self._give_up_at(request.context)
        while True:
            await self._process_again(request.context, failed, give_up_at)
            with suppress(NoProcess):
                async with closing(self._stream(request, is_retry=True)) as responses:
                    async for response in responses:
                        yield response
                return

    async def _stream(self, request: ModelRequest, *, is_retry: bool = False) -> AsyncIterator[ModelResult]:
        submitted = time.perf_counter_ns()
        execution, [stream] = self._pipeline.of_many_responses([request], is_retry=is_retry)
        try:
            async with aclosing(stream.read()) as responses:
                self._pipeline.submit(execution, await self._limits.take())
                async for response in responses:
                    yield response
        finally:
            self._pipeline.leave(execution)
            count_time(request, submitted, execution.sent_ns)  # `execute` returns long before the last response

    def _give_up_at(self, context: Context) -> float:
        give_up_at = asyncio.get_running_loop().time() + _RESTART_WAIT_S
        return give_up_at if context.deadline is None else min(give_up_at, context.deadline)

    async def _process_again(self, context: Context, failed: EngineError, give_up_at: float) -> None:
        """Wait for a process for the one retry of a request. Raises `failed` if that takes too long."""
        log.warning("%s; its request %s is retried once", failed, context.request_id)
        try:
            async with asyncio.timeout_at(give_up_at):
                await self._pipeline.has_process()
        except TimeoutError:
            raise failed from None


# Calls and queries of models


async def _serve_call(
    models: ModelRegistry, stub: StubProcess, message: wire.CallModel, raws: Sequence[memoryview], context: Context
) -> None:
    call = message.request
    has_ended = False
    try:
        with _errors_to(stub, call.number), stub.call_window(call.number) as window:
            request = _to_request(call, raws, context)
            async with closing(_responses_to(models, message, request)) as responses:
                async for response in responses:
                    await window.take()  # meanwhile the called model gets no credit either
                    has_ended = response.is_final
                    await _send_response(stub, call, response)
            if not has_ended:
                stub.send(wire.Response(number=call.number, only_ends=True))
    finally:
        context.cancelled.set()


def _to_request(call: wire.InferenceHead, raws: Sequence[memoryview], context: Context) -> ModelRequest:
    parameters = dict(call.parameters)
    if call.correlation_id:
        parameters["sequence_id"] = call.correlation_id
        parameters["sequence_start"] = bool(call.flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
        parameters["sequence_end"] = bool(call.flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    if call.timeout_us:
        parameters["timeout"] = call.timeout_us  # for the queue of the called model; it is no deadline, as in Triton
    return ModelRequest(RawTensors(call.inputs, raws), context, call.outputs, parameters, call.request_id)


def _responses_to(models: ModelRegistry, call: wire.CallModel, request: ModelRequest) -> AsyncIterator[ModelResult]:
    """Begin a call of a model. Raises EngineError in Triton's words if the model does not take it."""
    model = call.request.model
    try:
        if models.config(model, call.request.version).model_transaction_policy.decoupled and not call.decoupled:
            raise InvalidRequest(
                f"Model {model} is using the decoupled. The current BLS request call doesn't support models using the decoupled "
                "transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled "
                "models.'"
            )
        return models.run(model, call.request.version, request)
    except ModelNotFound:
        why = f"Failed for execute the inference request. Model '{model}' is not ready."
    except InvalidRequest as error:
        why = str(error)
    raise EngineError(f"Model {model} - Error when running inference: {why}")


async def _send_response(stub: StubProcess, call: wire.InferenceHead, response: ModelResult) -> None:
    """Send the requested outputs of a response to a call."""
    packed = [
        (tensor, raw)
        for tensor, raw in zip(*pack(response.outputs), strict=True)
        if not call.outputs or tensor.name in call.outputs
    ]
    outputs = tuple(tensor for tensor, _ in packed)
    head = wire.Response(number=call.number, outputs=outputs, final=response.is_final, parameters=dict(response.parameters))
    await stub.send_in_time(head, [raw for _, raw in packed])


async def _serve_control(models: ModelRegistry, stub: StubProcess, control: wire.Control) -> None:
    parameters: dict[str, wire.Parameter] = {}
    with _errors_to(stub, control.number):
        match control.verb:
            case "ready":
                parameters["ready"] = _is_ready(models, control)
            case "load":
                try:
                    await models.load(control.model, control.config, control.files)
                except ModelNotFound as error:
                    raise EngineError(f"failed to load '{error.model}', failed to poll from model repository") from error
            case "unload":
                await models.unload(control.model, control.dependents)
            case _:
                raise InvalidRequest(f"there is no {control.verb!r}")
        stub.send(wire.Response(number=control.number, parameters=parameters))


@contextmanager
def _errors_to(stub: StubProcess, number: int) -> Iterator[None]:
    """Send every error of the body to the model, which waits for a response to its call `number`."""
    try:
        yield
    except DynamoError as error:
        stub.send(wire.Response(number=number, error=str(error), code=to_code(error)))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # by the process of the model, which says so
            raise
        stub.send(wire.Response(number=number, error="the request was cancelled", code=TritonError.CANCELLED))
    except BaseException as error:
        log.exception("a call of a model failed")
        stub.send(wire.Response(number=number, error=f"internal error: {type(error).__name__}", code=TritonError.INTERNAL))


def _is_ready(models: ModelRegistry, control: wire.Control) -> bool:
    try:
        models.config(control.model, control.version)
    except ModelNotFound:
        return False
    return True
