"""ModelStreamInfer: many requests in one call, served concurrently.

1. A request that fails gets an in-band response with `error_message` and its id, and the stream goes on. A client that sent the
   metadata `triton_grpc_error: true` gets the status of the first failure instead, which ends the stream.
2. Responses of tensor models with one response per request come in the order of the requests; those of decoupled models and of
   language models as they are made.
3. Every response says by `triton_final_response` whether it is the last of its request. The responses of a decoupled model may
   end without one that says so; clients that set `triton_enable_empty_final_response` get an empty one after them then.
4. A stream without a request in progress ends after `--grpc-stream-idle-timeout-s`: one look in a quarter of that time costs
   nothing per request.
5. Each request has at most one message waiting to be written. Deltas made meanwhile share the next message: a token is sent at
   once if the client keeps up, and several tokens share a message if not.
6. What waits for messages before it counts against the capacity: a request of some bytes may have a long response, and the client
   may read none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import grpc.aio
import msgspec

from dynamo.common.errors import Cancelled, DeadlineExceeded, DynamoError, InvalidRequest, ShuttingDown, release
from dynamo.common.logs import request_id as logged_id
from dynamo.common.model_card import ModelKind
from dynamo.common.observability.reception import EdgeProtocol
from dynamo.common.process.background import awaited
from dynamo.common.tensors.message_limits import MessageScanner
from dynamo.common.tensors.protobuf_wire import tag, varint
from dynamo.common.tensors.request import TensorRequest, parse_response
from dynamo.common.tensors.response import FINAL_RESPONSE, ResponseForm
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.calls import wants_statuses
from dynamo.frontend.api.capacity import Capacity, Occupancy
from dynamo.frontend.api.kserve.declarations import INFER
from dynamo.frontend.api.kserve.infer import (
    TENSOR_ENDPOINT,
    call_for,
    check_size,
    first_of,
    gather_text,
    infer_stream,
    read_texts,
    serve,
)
from dynamo.frontend.api.kserve.placed import PlacedRequest, Places, is_placed, place
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.kserve.text import to_text_requests, wants_stream
from dynamo.frontend.api.kserve.text_responses import TextResponses
from dynamo.frontend.api.kserve.words import check_version, kserve_message
from dynamo.frontend.api.rpc.operation import Context
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.api.statuses import log_failure
from dynamo.frontend.config import GrpcOptions
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call, Progress
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.protos.inference_pb2 import (
    InferParameter,
    ModelInferResponse,
    ModelStreamInferResponse,
)

_INFER_RESPONSE = tag(ModelStreamInferResponse, "infer_response")
_FINAL = {
    final: ModelInferResponse(parameters={FINAL_RESPONSE: InferParameter(bool_param=final)}).SerializeToString()
    for final in (False, True)
}
"""Concatenated protobuf messages parse as one merged message: put before a serialized response, this adds a parameter to it that
the response may contradict.
"""


_UNCOUNTED_BYTES = 4096
"""Each request has at most one message that waits. Smaller ones, as of tokens, do not depend on the capacity."""
_LOOKS = 4
"""Looks in which a stream has to be idle."""


class _ClientGone(Cancelled):
    """A message could not be written because the client left."""


class _IdleWatch:
    """Ends what runs within `limit` once a stream was idle at `_LOOKS` looks, which are `period_s` apart."""

    __slots__ = ("_activity", "_idle_looks", "_limit", "_loop", "_period_s", "_stream", "_timer")

    def __init__(self, stream: KserveStream, limit: asyncio.Timeout, period_s: float) -> None:
        self._stream = stream
        self._limit = limit
        self._period_s = period_s
        self._activity: int | None = 0
        self._idle_looks = 0
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(period_s, self._look)

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        before, self._activity = self._activity, self._stream.activity
        is_idle = self._activity is not None and self._activity == before
        self._idle_looks = self._idle_looks + 1 if is_idle else 0
        if self._idle_looks >= _LOOKS:
            self._limit.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(self._period_s, self._look)


class KserveStream:
    """One ModelStreamInfer call."""

    def __init__(
        self,
        plane: DataPlane,
        drain: StreamDrain,
        scanner: MessageScanner,
        options: GrpcOptions,
        capacity: Capacity,
        context: Context,
        call: Call,
        server: KserveServer,
    ) -> None:
        """`call` is by the headers of the stream: each request in it has an id and progress of its own."""
        self._plane = plane
        self._drain = drain
        self._scanner = scanner
        self._options = options
        self._capacity = capacity
        self._context = context
        self._call = call
        self._wants_statuses = wants_statuses(context.invocation_metadata() or ())
        self._server = server
        self._started = 0
        """Requests that were read."""
        self._running = 0
        self._room: asyncio.Future[None] | None = None
        self._turn: asyncio.Future[None] | None = None
        """Done when the last request with ordered responses is done."""
        self._writing = asyncio.Lock()
        self._brief_bytes = min(_UNCOUNTED_BYTES, options.max_message_bytes)

    async def run(self) -> None:
        """Serve the call until the client has half-closed and all responses are sent, or the client is gone.

        Raises the first failure if the caller wants statuses, ShuttingDown, after all responses, if this process drains, and
        DeadlineExceeded if the stream was idle for too long.
        """
        stopped: DynamoError | None = None
        failed: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                stopped = await self._read_until_idle(tasks)
        except* Exception as failures:
            failed.append(first_of(failures))
        if failed and isinstance(failed[0], _ClientGone):
            return
        if failed:
            raise failed.pop()
        if stopped is not None:
            raise stopped

    async def _read_until_idle(self, tasks: asyncio.TaskGroup) -> DynamoError | None:
        idle_s = self._options.stream_idle_timeout_s
        limit = asyncio.timeout(None)
        watch = _IdleWatch(self, limit, idle_s / _LOOKS)
        try:
            async with limit:
                return await self._read_requests(tasks)
        except TimeoutError:
            if not limit.expired():
                raise
            return DeadlineExceeded(f"the stream had no request for {idle_s:g} s")
        finally:
            watch.close()

    @property
    def activity(self) -> int | None:
        """How many requests were read, while none is in progress."""
        return None if self._running else self._started

    async def _read_requests(self, tasks: asyncio.TaskGroup) -> ShuttingDown | None:
        while True:
            waits_ns = perf_counter_ns()
            try:
                data = await self._drain.read(self._context)
            except ShuttingDown as error:
                return error
            if data is None:
                return None
            self._start(tasks, data, waits_ns)
            if self._running >= self._options.max_stream_requests:
                self._room = asyncio.get_running_loop().create_future()
                await self._room

    def _start(self, tasks: asyncio.TaskGroup, data: Buffer, waits_ns: int) -> None:
        timed = partial(self._server.timed, edge=EdgeProtocol.GRPC, start_ns=waits_ns, end_ns=perf_counter_ns())
        request: TensorRequest | None = None
        model: NamedModel | None = None
        problem: DynamoError | None = None
        occupied: Occupancy | None = None
        try:
            if self._call.account is not ANONYMOUS:
                self._call.account.check_limits()
            occupied = self._capacity.enter()
            occupied.hold(INFER.copies * len(data))
            request = TensorRequest.parse(data, self._scanner)
            version = check_version(request.head.model_version)
            account, names = self._call.account, self._plane.names
            model = self._plane.model(account, names.representative(account, request.head.model_name, version), version)
        except DynamoError as error:
            release(error)  # this frame, which its traceback keeps, keeps the error
            problem = error
        except BaseException:
            if occupied is not None:
                occupied.leave()
            raise
        turn = after = None
        if model is None or (model.card.kind is ModelKind.TENSOR and not model.card.decoupled):
            turn, after = asyncio.get_running_loop().create_future(), self._turn
            self._turn = turn
        self._started += 1
        self._running += 1
        task = tasks.create_task(self._serve(request, model, problem, occupied, timed, after, turn))
        if occupied is not None:
            task.add_done_callback(lambda _: occupied.leave())

    async def _serve(
        self,
        request: TensorRequest | None,
        model: NamedModel | None,
        problem: DynamoError | None,
        occupied: Occupancy | None,
        timed: Callable[[Call, str], Call],
        after: asyncio.Future[None] | None,
        turn: asyncio.Future[None] | None,
    ) -> None:
        """Serve one request. Its responses wait for `after`, and `turn` is set at its end, however it ended.

        `timed` adds to the call when the request was read, for traces of a model.
        """
        progress, request_id = Progress(), self._call.request_id
        try:
            if request is None or model is None or occupied is None:
                assert problem is not None
                raise problem
            sent = request

            async def respond(model: NamedModel, call: Call) -> None:
                nonlocal request_id
                named = sent.renamed(model.name)
                call = call_for(named, model, timed(call, model.card.name), RequestType.STREAM)
                request_id = call.request_id
                logged_id.set(request_id)
                await self._respond(named, model, call, after)

            call = msgspec.structs.replace(self._call, progress=progress, hold=occupied.hold, waiting=occupied.waiting)
            if self._plane.names.has_rule(request.head.model_name):
                await serve(self._plane, call, request, respond, lambda: progress.responded)
            else:
                await respond(model, call)
        except _ClientGone:
            raise
        except Exception as error:
            if not progress.started:
                self._plane.refused(TENSOR_ENDPOINT, error, RequestType.STREAM)
            log_failure(error, request_id, "ModelStreamInfer")
            if self._wants_statuses:
                raise
            release(error)
            if after is not None:
                await after
            await self._send(_failure(request, error, reached_model=progress.started))
        finally:
            if turn is not None and not turn.done():  # done if the next in line was cancelled while waiting for it
                turn.set_result(None)
            self._running -= 1
            if self._room is not None and not self._room.done():
                self._room.set_result(None)

    async def _respond(
        self,
        request: TensorRequest,
        model: NamedModel,
        call: Call,
        after: asyncio.Future[None] | None,
    ) -> None:
        placed = None
        places: Places = {}
        if is_placed(request.head):
            placed = self._server.find_places(request, call.account, self._context.peer())
            places = placed.places
        if model.card.kind is ModelKind.LLM:
            await self._respond_text(await read_texts(self._plane, request, call, placed), model, call)
        elif model.card.decoupled:
            await self._respond_decoupled(request, model, call, placed)
        else:
            async with infer_stream(self._plane, model, request, call, placed) as responses:
                batch = await responses.read()
            if after is not None and not after.done():
                with self._capacity.holding() as occupied:
                    occupied.hold(sum(map(len, batch)))
                    await after
            for response in batch:
                await self._write(_message(place(response, places), final=True))

    async def _respond_decoupled(
        self, request: TensorRequest, model: NamedModel, call: Call, placed: PlacedRequest | None
    ) -> None:
        last: Buffer = b""
        places: Places = {} if placed is None else placed.places
        async with infer_stream(self._plane, model, request, call, placed) as responses:
            while batch := await responses.read():
                for response in batch:
                    last = place(response, places)
                    await self._write(_message(last, final=False))
        if request.wants_empty_final_response and not _is_final(last):
            final = b"".join(ResponseForm.of(request, model.card).encode_final())
            await self._write(_INFER_RESPONSE + varint(len(final)) + final)

    async def _respond_text(self, request: TensorRequest, model: NamedModel, call: Call) -> None:
        streams = wants_stream(request)
        texts = to_text_requests(request, model.card)
        response = TextResponses(request, model.card, texts)
        if streams:
            await self._stream_texts(response, model, texts, call)
        else:
            gathered = response.gather()
            await gather_text(self._plane, model, texts, call, gathered.add)
            await self._write(response.stream_complete(gathered, final=True))

    async def _stream_texts(self, response: TextResponses, model: NamedModel, texts: list[TextRequest], call: Call) -> None:
        unfinished = sum(text.n for text in texts)

        async def stream(prompt: int, text: TextRequest) -> None:
            nonlocal unfinished
            async with self._plane.generate(model, text, call) as generation:
                while deltas := await generation.read():
                    for delta in deltas:
                        if delta.finish_reason is not None:
                            unfinished -= 1
                    await self._write(response.stream_delta(deltas, prompt=prompt, final=unfinished == 0))

        if len(texts) == 1:  # in a task: a token wakes that one, and not each of the coroutines that wait for the end
            return await awaited(stream(0, texts[0]))
        failed: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt, text in enumerate(texts):
                    tasks.create_task(stream(prompt, text))
        except* Exception as failures:
            failed.append(first_of(failures))
        if failed:
            raise failed.pop()

    async def _write(self, message: bytes) -> None:
        """Send the message of a request. Raises PayloadTooLarge, and Overloaded if it has to wait, and too much does."""
        if len(message) <= self._brief_bytes:
            return await self._send(message)
        size = len(check_size(message, self._options.max_message_bytes))
        if not self._writing.locked():
            return await self._send(message)
        with self._capacity.holding() as occupied:
            occupied.hold(size)
            await self._send(message, partial(occupied.release, size))

    async def _send(self, message: bytes, has_turn: Callable[[], None] | None = None) -> None:
        """Send a message after those that wait; `has_turn` is called before."""
        async with self._writing:  # gRPC takes one message at a time; the lock is fair
            if has_turn is not None:
                has_turn()
            try:
                await self._context.write(message)
            except grpc.aio.BaseError as error:
                raise _ClientGone from error


def _message(response: Buffer, *, final: bool) -> bytes:
    """Return a serialized ModelStreamInferResponse around a serialized ModelInferResponse."""
    mark = _FINAL[final]
    return b"".join((_INFER_RESPONSE, varint(len(response) + len(mark)), mark, response))


def _is_final(response: Buffer) -> bool:
    parameters = parse_response(response)[0].parameters
    return FINAL_RESPONSE in parameters and parameters[FINAL_RESPONSE].bool_param


def _failure(request: TensorRequest | None, error: BaseException, *, reached_model: bool) -> bytes:
    """Return the in-band failure of a request. As in Triton only those of models name the model, and are final."""
    about = ModelInferResponse(id=request.head.id if request is not None else "")
    if request is not None and reached_model and not isinstance(error, InvalidRequest):
        about.model_name = request.head.model_name
        about.parameters[FINAL_RESPONSE].bool_param = True
    return ModelStreamInferResponse(error_message=kserve_message(error), infer_response=about).SerializeToString()
