"""The responses to one tensor request, and what more goes to the instance that responds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

import msgspec

from dynamo.common.errors import DynamoError, EngineError
from dynamo.common.messaging.buffers import Buffer
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.security.keys import MAX_PRIORITY
from dynamo.frontend.serving.call import Call, Progress, TensorSource, Work, priority_of_level
from dynamo.frontend.serving.dispatch.dispatched_stream import DispatchedStream
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.prompt_tokens import BYTES_PER_TOKEN, tokens_of
from dynamo.frontend.serving.request_scope import RequestScope

_CALLERS: Final = ("ensemble", "python")
"""Models that may call one with sequences, which may be iterative and begin without an id."""


class TensorResponses:
    """The responses to one tensor request. Leaving it early cancels the request at the instance."""

    def __init__(
        self,
        model: NamedModel,
        scope: RequestScope,
        begin: Callable[[], Awaitable[DispatchedStream]],
        dispatch: Callable[[Work, Call], DispatchedStream],
    ) -> None:
        """`begin` reads, checks and dispatches the request, once the scope is entered; `dispatch`: see `DataPlane.stream`."""
        self._model = model
        self._scope = scope
        self._begin = begin
        self._dispatch = dispatch
        self._stream: DispatchedStream | None = None

    async def __aenter__(self) -> Self:
        scope = self._scope
        scope.__enter__()
        try:
            self._stream = await self._begin()
        except BaseException as error:
            scope.fail(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()
        self._scope.__exit__(kind, error, traceback)

    async def read(self) -> list[Buffer]:
        """Return all serialized ModelInferResponses since the last call, at least one; [] at the end. Raises DynamoError."""
        scope, stream = self._scope, self._stream
        if stream is None or scope.is_over:
            return []
        try:
            if not self._model.card.decoupled:
                response = await stream.result()
                if self._model.counts_tokens:
                    scope.counted(tokens_of(response))
                scope.succeed()
                return [response]
            responses = await stream.read()
        except DynamoError as error:
            scope.fail(error)
            raise
        if responses:
            scope.responded()
        else:
            scope.succeed()
        return responses

    async def send(self, request: TensorRequest) -> None:
        """Send more to the instance that responds, as a part of this request: charged with it. Returns once it is taken.

        Its own response is dropped. It may arrive twice. Raises DynamoError.
        """
        stream = self._stream
        if stream is None or stream.decision is None:
            raise EngineError("nothing has been read of the responses yet, so no instance is known to send more to")
        call = msgspec.structs.replace(self._scope.call, instance=stream.decision.instance.id, progress=Progress())
        work = infer_work(request, self._model, call)
        work.needs_room = False
        async with self._dispatch(work, call) as sent:
            while await sent.read():
                pass

    def used(self, input_tokens: int, output_tokens: int) -> None:
        """The model has counted so many tokens since the request began, by which it is charged."""
        self._scope.settle(input_tokens, output_tokens)


def with_estimate(call: Call, request: TensorRequest, source: TensorSource | None) -> Call:
    """Return a call of a model that counts tokens with an estimate of them, unless its protocol made a better one."""
    if call.expected_tokens:
        return call
    size = len(request.raw) if source is None else source.size_bytes
    return msgspec.structs.replace(call, expected_tokens=1 + size // BYTES_PER_TOKEN)


def infer_work(request: TensorRequest, model: NamedModel, call: Call) -> Work:
    """Return what instances have to do for a tensor request."""
    account = call.account
    # Workers order requests by the level in the message.
    is_too_urgent = account.max_priority < MAX_PRIORITY and priority_of_level(request.priority) > account.max_priority
    sequence = request.sequence if model.card.has_sequences else ""
    parameters = request.head.parameters
    has_owner = model.card.has_sequences or model.card.backend in _CALLERS or (parameters and "sequence_id" in parameters)
    owner = account.name if has_owner else ""
    if sequence and owner:
        sequence = f"{owner}\0{sequence}"
    return Work(
        model=model.card.name,
        verb="infer",
        body=request.without_priority() if is_too_urgent else request.raw,
        metrics=model.metrics,
        name=model.name,
        version=model.version,
        sequence=sequence,
        sequence_owner=owner,
        priority=call.priority,
        pinned=call.instance,
        needs_room=call.instance is not None,
        session=call.session,
        session_owner=call.account.name if call.session else "",
        overrides=call.overrides,
        request_id=call.request_id,
        explanation=call.explanation,
    )
