"""Requests that no operation can place by their prompt: to the endpoint with the least load of those that serve their model.

Such a request is admitted, counted and booked as others are, with an estimate of its tokens. A key that may use some models only
has none of them: what is not understood may be for any model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final
from urllib.parse import unquote

import msgspec

from dynamo.common.errors import Forbidden, ModelNotFound, NoInstances
from dynamo.common.repository import ALL_MODELS
from dynamo.frontend.api.declaration import TEXT, Declaration
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.surfaces import Surface
from dynamo.frontend.serving.call import Work
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.prompt_tokens import BYTES_PER_TOKEN
from dynamo.frontend.serving.request_scope import RequestScope

MANAGED: Final = replace(TEXT, surface=Surface.MODEL_REPOSITORY, is_action=True)
_SERVING: Final = frozenset({"v1", "tokenize", "detokenize", "rerank", "score", "classify", "pooling", "health", "version"})
"""First parts of paths that engine servers have for the clients of a model."""
_SERVING_MODEL: Final = frozenset({"ready", "config", "stats", "infer", "generate", "generate_stream"})
"""Last parts of paths below a model of KServe that are for its clients; `trace/setting` and others are not."""
_MANAGING: Final = frozenset({"load_lora_adapter", "unload_lora_adapter"})
ENDPOINT: Final = "passed_on"
"""Name in metrics of the API that the request came by."""


def passed_on(path: str) -> Declaration:
    """Declare a request for a path that no operation has: engine servers have some that change or stop them, of every name."""
    whole = unquote(path.partition("?")[0]).replace("\\", "/")
    parts = whole.split("/")
    is_plain = path.startswith("/") and not {"..", ".", *_MANAGING}.intersection(parts) and "" not in parts[1:-1]
    if not is_plain or {"#", ";"}.intersection(whole):  # some servers take the part before these for the path
        return MANAGED
    of_model = parts[1:3] == ["v2", "models"] and (len(parts) == 4 or parts[-1] in _SERVING_MODEL or parts[4:-1] == ["versions"])
    return TEXT if of_model or parts[1] in _SERVING else MANAGED


class PassingOn:
    """The handler of such a request."""

    def __init__(self, plane: DataPlane, look: Callable[[Exchange], Awaitable[str]], size_bytes: Callable[[], int]) -> None:
        """`look` holds what has come of the body, which is kept until the request is placed, and returns the model that it seems
        to name, or an empty string; it may raise DynamoError. `size_bytes`: of what has come."""
        self._plane = plane
        self._look = look
        self._size_bytes = size_bytes

    async def __call__(self, exchange: Exchange) -> None:
        plane, account = self._plane, exchange.account
        call = exchange.call()
        if account.models != ALL_MODELS:
            raise Forbidden(f"the API key '{account.name}' may use some models, and which one this request is for is not known")
        model = self._find(account, await self._look(exchange))
        call = msgspec.structs.replace(call, expected_tokens=1 + self._size_bytes() // BYTES_PER_TOKEN)
        with RequestScope(model, call, None) as scope:
            work = Work(
                model=model.card.name,
                verb="",
                body=b"",
                metrics=model.metrics,
                name=model.name,
                priority=call.priority,
                overrides={},
                request_id=call.request_id,
                explanation=call.explanation,
            )
            async with plane.stream(work, scope.call) as stream:
                while await stream.read():
                    pass
                scope.succeed()
        await exchange.respond(b"")

    def _find(self, account: Account, wanted: str) -> NamedModel:
        """Return the wanted model or, if that is not served, the one with the most endpoints."""
        plane = self._plane
        if wanted:
            try:
                named = plane.model(account, plane.names.representative(account, wanted))
                if named.is_served:
                    return named
            except ModelNotFound:
                pass
        counts = {
            card.name: sum(instance.card.http is not None for instance in plane.models.instances(card.name))
            for card in plane.cards(account)
        }
        name = max(counts, key=lambda name: counts[name], default="")
        if not name or not counts[name]:
            raise NoInstances(wanted or "any")
        return plane.model(account, name)
