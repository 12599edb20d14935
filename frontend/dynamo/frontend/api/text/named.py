"""Text requests by names of operators, which stand for models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from dynamo.frontend.api.calls import Caller
from dynamo.frontend.names.plan import Identity
from dynamo.frontend.serving.data_plane import DataPlane

T = TypeVar("T")


async def serve_by_name(
    plane: DataPlane,
    caller: Caller,
    name: str,
    attempt: Callable[[str, Caller], Awaitable[T]],
    has_begun: Callable[[], bool],
    *,
    session: str | None = None,
    user: str | None = None,
) -> T:
    """Return the result of `attempt` with a model that `name` stands for, or with another one if that cannot. Raises DynamoError.

    `session` and `user` are those in the request's body, if any; a request without a user is its API key's.
    """
    if not plane.names.has_rule(name):  # it is a model's own, as most are
        return await attempt(name, caller)

    async def by_model(model: str, shadows: tuple[str, ...]) -> T:
        return await attempt(model, msgspec.structs.replace(caller, shadows=shadows) if shadows else caller)

    identity = Identity(session=caller.session or session or "", user=user or caller.account.name)
    return await plane.names.serve(caller.account, name, identity, by_model, has_begun=has_begun)
