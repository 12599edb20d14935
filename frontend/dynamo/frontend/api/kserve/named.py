"""Tensor and text requests of KServe by names of operators, which stand for models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from dynamo.common.model_card import ModelCard
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.api.calls import Caller
from dynamo.frontend.api.kserve.words import check_version
from dynamo.frontend.names.plan import Identity
from dynamo.frontend.serving.data_plane import DataPlane

T = TypeVar("T")

Attempt = Callable[[TensorRequest, ModelCard, Caller], Awaitable[T]]
"""Serves a request that names the model with this card."""


async def serve_by_name(
    plane: DataPlane,
    request: TensorRequest,
    caller: Caller,
    attempt: Attempt[T],
    has_begun: Callable[[], bool] = lambda: False,
) -> T:
    """Return the result of `attempt` with a model that the request's name stands for, or with another one if that cannot.

    Requests of one sequence go to one model. Raises DynamoError.
    """
    version = check_version(request.head.model_version)

    async def by_model(model: str, shadows: tuple[str, ...]) -> T:
        card = plane.card(caller.account, model, version)
        return await attempt(
            request.renamed(model), card, msgspec.structs.replace(caller, shadows=shadows) if shadows else caller
        )

    identity = Identity(session=caller.session, user=caller.account.name, sequence=request.sequence)
    return await plane.names.serve(
        caller.account, request.head.model_name, identity, by_model, version=version, has_begun=has_begun
    )
