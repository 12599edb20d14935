"""Which models an engine server has, once it is up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from dynamo.common.errors import InvalidRequest, Overloaded, Unavailable
from dynamo.common.http.client import HttpClient
from dynamo.worker.engine.remote.errors import read_failure

log = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_PAUSE_S = 5.0
_MAX_MODELS = 4096
"""With its adapters. A registration names all of them, and etcd takes 1.5 MiB."""
_MAX_OWNER_CHARS = 64


class ModelMeta(msgspec.Struct):
    n_ctx: int | None = None
    n_ctx_train: int | None = None


class Architecture(msgspec.Struct):
    input_modalities: list[str] = []


class ListedModel(msgspec.Struct):
    """A model in the server's list."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str = ""
    meta: ModelMeta | None = None
    """What llama.cpp's server says of the model, as it does in `architecture`."""
    architecture: Architecture | None = None

    @property
    def backend(self) -> str:
        """What the server calls itself."""
        return self.owned_by[:_MAX_OWNER_CHARS] or "remote"

    @property
    def name(self) -> str:
        """The name to serve it by: of a file without folder and suffix."""
        return self.id.rpartition("/")[2].removesuffix(".gguf") if self.id.startswith("/") else self.id

    @property
    def context_length(self) -> int | None:
        meta = self.meta or ModelMeta()
        return self.max_model_len or meta.n_ctx or meta.n_ctx_train

    @property
    def modalities(self) -> tuple[str, ...]:
        """What it takes besides text. A server that does not say so refuses what its model does not take."""
        if self.architecture is None:
            return ("image", "audio")
        return tuple(kind for kind in ("image", "audio") if kind in self.architecture.input_modalities)


class ModelList(msgspec.Struct):
    data: list[ListedModel]


async def when_ready(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `call`, repeated while the server cannot be reached or takes no requests, as when it starts."""
    pause_s = 0.5
    while True:
        try:
            return await call()
        except (Unavailable, Overloaded) as error:
            log.warning("waiting for the engine server: %s", error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def fetch_models(client: HttpClient) -> list[ListedModel]:
    """Return the server's models, at least one. Raises InvalidRequest for a server that has none."""
    status, body = await client.fetch("GET", "/v1/models")
    if status in (401, 403):
        raise InvalidRequest(f"the server at {client} refuses the key: set DYN_REMOTE_API_KEY")
    if status in (429, 502, 503, 504):
        raise read_failure(status, body)
    try:
        models = msgspec.json.decode(body, type=ModelList).data if status == 200 else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        models = []
    if not models:
        raise InvalidRequest(f"the server at {client} lists no model: GET /v1/models has status {status}")
    if len(models) > _MAX_MODELS:
        raise InvalidRequest(f"the server at {client} lists {len(models)} models; at most {_MAX_MODELS} are taken")
    return models
