"""The model in its process: imported, initialized, executed and finalized."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.worker.repository.stub import pb_utils
from dynamo.worker.repository.stub.executed import EXECUTED, Executed
from dynamo.worker.repository.stub.pb_utils import InferenceRequest, InferenceResponse, InferenceResponseSender
from dynamo.worker.repository.wire import wire

if TYPE_CHECKING:
    import asyncio

    from dynamo.worker.repository.stub.loop import Stub


class _WrongReturn(pb_utils.TritonModelException):
    """What `execute` returned is not what was expected."""


class ModelProcess:
    """Carries out the worker's messages on the main thread."""

    def __init__(self, stub: Stub, progress: memoryview) -> None:
        """`progress`: words that are shared with the worker, see `wire.BEGUN`."""
        self._stub = stub
        self._progress = progress
        self._class: Any = None
        self._model: Any = None
        self._name = ""
        """Name of the instance."""
        self._outputs: Sequence[str] = ()
        """The names of all outputs of the model."""
        self._bf16: Collection[str] = ()
        """The names of its BF16 inputs."""
        self._decoupled = False
        self._is_iterative = False
        """The worker reschedules requests: they belong to iterative sequences."""
        self._rescheduled: deque[list[InferenceRequest]] = deque()
        """Requests for which `execute` is called again."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Runs `async` executes; created for the first one."""

    def run(self) -> None:
        while True:
            if self._rescheduled:
                self._execute_again(self._rescheduled.popleft())
            following = self._stub.order_at_hand() if self._rescheduled else self._stub.next_order()
            if following is None:
                continue
            order, raws = following
            match order:
                case wire.Execute():
                    self._execute(order, raws)
                case wire.Start():
                    self._report(partial(self._start, order))
                case wire.Complete():
                    self._report(partial(self._complete, order.config))
                case wire.Initialize():
                    self._report(partial(self._initialize, order))
                case wire.Finalize():
                    self._report(self._finalize)
                case _:
                    raise RuntimeError(f"the worker sent a {type(order).__name__}")

    def _report(self, step: Callable[[], str | None]) -> None:
        self._stub.begin_execution()  # the model may call other models here, too
        try:
            ready = wire.Ready(config=step() or "")
        except BaseException as error:
            traceback.print_exc()
            ready = wire.Ready(error=_text(error))
        finally:
            self._stub.end_execution()
        self._stub.send(ready)

    def _start(self, order: wire.Start) -> None:
        if order.memory is not None:
            self._stub.use_memory(order.memory)
        self._stub.model_folder = os.path.dirname(order.file)
        sys.path += order.paths
        module = _import(order.file, order.paths[-1])
        self._class = getattr(module, "TritonPythonModel", None)
        if self._class is None:
            raise ImportError(f"{order.file} has no class TritonPythonModel")
        if not callable(getattr(self._class, "execute", None)):
            raise ImportError(f"TritonPythonModel of {order.file} has no method execute")

    def _complete(self, config: str) -> str:
        hook = getattr(self._class, "auto_complete_config", None)
        if hook is None:
            return ""
        config_before = pb_utils.ModelConfig(config)
        completed = hook(config_before)
        return msgspec.json.encode((completed if completed is not None else config_before).as_dict()).decode()

    def _initialize(self, order: wire.Initialize) -> None:
        config = json.loads(order.arguments["model_config"])
        self._name = self._stub.instance_name = order.arguments["model_instance_name"]
        self._outputs = [output["name"] for output in config["output"]]
        self._bf16 = {tensor["name"] for tensor in config["input"] if tensor["data_type"] == "TYPE_BF16"}
        self._model = self._class()
        self._decoupled = order.decoupled
        self._is_iterative = config.get("sequence_batching", {}).get("iterative_sequence", False)
        if hasattr(self._model, "initialize"):
            self._model.initialize(dict(order.arguments))

    def _finalize(self) -> None:
        if self._model is not None and hasattr(self._model, "finalize"):
            self._model.finalize()

    # Requests

    def _execute(self, order: wire.Execute, raws: Sequence[memoryview]) -> None:
        if self._stub.is_unwanted(order):
            return self._skip(order, wire.Done(number=order.number))
        if order.is_retry:
            self._stub.flush()
        self._progress[wire.BEGUN] = order.number
        if order.number <= self._progress[wire.WITHDRAWN]:
            return self._skip(order, wire.Done(number=order.number, is_withdrawn=True))
        senders = [
            InferenceResponseSender(head.number, self._stub, self._outputs, decoupled=self._decoupled) for head in order.requests
        ]
        call = _Call(order.number, senders)
        self._stub.begin_execution()
        try:
            try:
                requests = self._stub.requests_of(order, raws, senders, self._bf16)
            except BaseException as error:
                return self._failed(call, error)
            self._call_model(call, requests)
        finally:
            self._stub.end_execution()

    def _skip(self, order: wire.Execute, done: wire.Done) -> None:
        for head in order.requests:
            self._stub.over(head.number)
        if wire.has_places(order):
            self._stub.released(order.number)
        self._stub.send_soon(done)

    def _execute_again(self, requests: list[InferenceRequest]) -> None:
        wanted = [request for request in requests if not request.sender.dropped_if_cancelled()]
        if wanted:
            self._stub.begin_execution()
            try:
                self._call_model(_Call(0, [request.sender for request in wanted]), wanted)
            finally:
                self._stub.end_execution()

    def _call_model(self, call: _Call, requests: list[InferenceRequest]) -> None:
        call.requests = requests
        EXECUTED.set(Executed(call.senders))
        try:
            returned = self._model.execute(requests)
        except BaseException as error:  # whatever it raises is the request's failure, not the end of the process
            return self._failed(call, error)
        if isinstance(returned, list) or not inspect.isawaitable(returned):
            self._returned(call, returned)
        else:
            self._follow(call, returned)

    def _follow(self, call: _Call, work: Any) -> None:
        """Await an `async` execute. For a decoupled model the next one may run beside it."""

        async def run() -> None:
            try:
                returned = await work
            except BaseException as error:
                self._failed(call, error)
            else:
                self._returned(call, returned)

        if self._decoupled:
            EXECUTED.set(Executed(call.senders, occupies_process=False))
        import asyncio  # for models that need it only

        future = asyncio.run_coroutine_threadsafe(run(), self._event_loop())
        if self._decoupled:
            self._send_done(call)
        else:
            future.result()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(self._loop,), name="execute", daemon=True).start()
        return self._loop

    def _returned(self, call: _Call, returned: Any) -> None:
        try:
            self._finish(call, returned)
        except BaseException as error:
            return self._failed(call, error)
        again = [request for request in call.requests if request.reschedules()]
        if self._is_iterative:
            call.rescheduled = tuple(number for request in again if (number := request.sender.released()))
            return self._send_done(call)
        self._send_done(call)
        if again:
            if self._decoupled and threading.current_thread() is not threading.main_thread():
                self._call_model(_Call(0, [request.sender for request in again]), again)
            else:
                self._rescheduled.append(again)

    def _finish(self, call: _Call, returned: Any) -> None:
        """Collect the responses that `execute` returned."""
        senders = call.senders
        if returned is None and (self._decoupled or all(map(_may_be_none, senders, call.requests))):
            return
        if self._decoupled:
            raise _WrongReturn("execute of a decoupled model must return None and use response senders")
        if not isinstance(returned, list | tuple):
            raise _WrongReturn(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(senders):
            raise _WrongReturn(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(senders)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        for sender, request, response in zip(senders, call.requests, returned, strict=True):
            if response is None and _may_be_none(sender, request):
                continue
            if not isinstance(response, InferenceResponse):
                raise _WrongReturn(
                    f"Expected an 'InferenceResponse' object in the execute function return list, found type '{type(response)}'."
                )
            head, raws = sender.finish(response)
            call.responses.append(head)
            call.buffers += raws

    def _failed(self, call: _Call, error: BaseException) -> None:
        traceback.print_exception(error)
        text = f"Failed to process the request(s) for model '{self._name}', message: {_text(error)}"
        for sender in call.senders:
            sender.fail(text)
        self._send_done(call)

    def _send_done(self, call: _Call) -> None:
        infer_ns = time.perf_counter_ns() - call.start_ns
        send = self._stub.send if self._decoupled else self._stub.send_soon
        done = wire.Done(number=call.number, responses=tuple(call.responses), infer_ns=infer_ns, rescheduled=call.rescheduled)
        send(done, call.buffers)


@dataclass(slots=True)
class _Call:
    """One call of `execute`, and the responses that it returned."""

    number: int
    """Number of the execution; 0 if the worker takes it to be over."""
    senders: Sequence[InferenceResponseSender]
    requests: Sequence[InferenceRequest] = ()
    start_ns: int = field(default_factory=time.perf_counter_ns)
    responses: list[wire.Response] = field(default_factory=list)
    rescheduled: tuple[int, ...] = ()
    """The requests that the worker reschedules."""
    buffers: list[wire.Buffer] = field(default_factory=list)


def _may_be_none(sender: InferenceResponseSender, request: InferenceRequest) -> bool:
    """Return whether `execute` may return None in place of the response to a request."""
    return sender.taken or request.is_rescheduled


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop of `async` executes. SystemExit of a task of the model ends it, and the process with it."""
    try:
        loop.run_forever()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _import(file: str, folder: str) -> ModuleType:
    """Import a model's file by its place in the model's folder, such as `1.model`, so that its relative imports work."""
    # Python compares seconds and sizes: a file that is changed within a second would be what was compiled before.
    sys.dont_write_bytecode = True
    name = os.path.splitext(os.path.relpath(file, folder))[0].replace(os.sep, ".")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _text(error: BaseException) -> str:
    """Return an error as the caller may see it, with its type unless it is one of this module."""
    text = str(error)
    if isinstance(error, _WrongReturn):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
