"""Inference of KServe v2 with a single response, from parsed request to serialized response, for any transport."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from dynamo.common.errors import Forbidden, InvalidRequest, PayloadTooLarge, Unsupported
from dynamo.common.model_card import ModelKind
from dynamo.common.tensors.relay import relays_http
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.calls import usable_id
from dynamo.frontend.api.kserve.text import to_text_requests, wants_stream
from dynamo.frontend.api.kserve.text_responses import TextResponses
from dynamo.frontend.api.kserve.words import check_version
from dynamo.frontend.api.text.gathering import Gathering
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call, TensorSource, priority_of_level
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.tensor_responses import TensorResponses

B = TypeVar("B", bound=Buffer)
T = TypeVar("T")

Add = Callable[[int, Sequence[TextDelta]], None]
"""Takes the position of a prompt and its deltas as they come."""

TENSOR_ENDPOINT = "tensor"
TEXT_ENDPOINT = "completions"
"""Names of these APIs in metrics."""


def call_for(request: TensorRequest, model: NamedModel, call: Call, request_type: RequestType) -> Call:
    """Return the call of a request: the caller's, with the id and the priority of the request if its headers have none."""
    head = request.head
    return msgspec.structs.replace(
        call,
        request_id=call.request_id or (head.id and usable_id(head.id)) or secrets.token_hex(8),
        priority=call.priority or (priority_of_level(request.priority) if head.parameters else 0),
        endpoint=TEXT_ENDPOINT if model.card.kind is ModelKind.LLM else TENSOR_ENDPOINT,
        request_type=request_type,
    )


def serve(
    plane: DataPlane,
    call: Call,
    request: TensorRequest,
    respond: Callable[[NamedModel, Call], Awaitable[T]],
    has_begun: Callable[[], bool] = lambda: False,
) -> Awaitable[T]:
    """The result of `respond` with a model that the name in the request stands for. Raises DynamoError."""
    version = check_version(request.head.model_version)
    name, sequence = request.head.model_name, request.sequence
    return plane.names.serve(call, name, respond, version=version, has_begun=has_begun, sequence=sequence)


def infer_stream(
    plane: DataPlane, model: NamedModel, request: TensorRequest, call: Call, source: TensorSource | None = None
) -> TensorResponses:
    """The responses of a tensor model, as `DataPlane.infer_stream` has them.

    Raises Forbidden for a relay where there are API keys: the body in its tensors is not read here, and may be for another
    model of its server, say what no key may, or talk without being charged.
    """
    if call.account is not ANONYMOUS and relays_http(model.card):
        raise Forbidden(f"where there are API keys, '{model.name}' is used over OpenAI's API, not over KServe")
    return plane.infer_stream(model, request, call, source)


def infer(
    plane: DataPlane, model: NamedModel, request: TensorRequest, call: Call, source: TensorSource | None = None
) -> Awaitable[Buffer]:
    """Return the response to a request for any kind of model, a serialized ModelInferResponse.

    `source`: where the tensors of the request are read. Raises DynamoError.
    """
    kind = model.card.kind
    if kind is ModelKind.TENSOR:
        return plane.infer(model, request, call, source)
    if kind is ModelKind.LLM:
        return _complete(plane, model, request, call, source)
    raise Unsupported(f"model '{model.card.name}' is of kind {kind.value}, which KServe requests cannot use")


async def _complete(
    plane: DataPlane, model: NamedModel, request: TensorRequest, call: Call, source: TensorSource | None
) -> Buffer:
    """Return the whole texts that a language model generates."""
    request = await read_texts(plane, request, call, source)
    if wants_stream(request):
        raise InvalidRequest("ModelInfer returns one response; omit 'streaming', or use ModelStreamInfer")
    texts = to_text_requests(request, model.card)
    responses = TextResponses(request, model.card, texts)
    gathered = responses.gather()
    await gather_text(plane, model, texts, call, gathered.add)
    return responses.complete(gathered)


async def read_texts(plane: DataPlane, request: TensorRequest, call: Call, source: TensorSource | None) -> TensorRequest:
    """Return the request with its texts, which are read before the number of its prompts is known, and so before it is admitted.

    Reading them counts as one of the requests that its key may have at once. Raises DynamoError.
    """
    if source is None:
        return request
    with call.account.occupy():
        return await plane.read(source, call)


async def gather_text(plane: DataPlane, model: NamedModel, texts: Sequence[TextRequest], call: Call, add: Add) -> None:
    """Call `add` with the position of a prompt and its deltas as they come. They count as held. The prompts run concurrently."""
    if len(texts) == 1:
        return await _gather(plane, model, 0, texts[0], call, add)
    failed: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for prompt, text in enumerate(texts):
                tasks.create_task(_gather(plane, model, prompt, text, call, add))
    except* Exception as failures:  # the others were cancelled: a partial response is useless
        failed.append(first_of(failures))
    if failed:
        raise failed.pop()  # this frame, which its traceback keeps, must not keep the error


async def _gather(plane: DataPlane, model: NamedModel, prompt: int, text: TextRequest, call: Call, add: Add) -> None:
    gathering = Gathering(call.hold)
    async with plane.generate(model, text, call) as generation:
        while deltas := await generation.read():
            gathering.add(deltas)
            add(prompt, deltas)


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that made a task group end."""
    failures.__traceback__ = None  # it leads to a frame of the task group that has `failures` as a local variable
    first = failures.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def check_size(message: B, limit_bytes: int) -> B:
    """Return `message` if it is small enough to be sent. Raises PayloadTooLarge, where a gRPC server would break the call."""
    if len(message) > limit_bytes:
        raise PayloadTooLarge(f"the response has {len(message)} bytes; messages are limited to {limit_bytes}")
    return message
