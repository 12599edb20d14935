"""Responses that are stored: in JetStream, for every frontend of the namespace, bound to the API key that made them.

A response has two records: the response itself, and the items that it responded to, those of earlier responses included, so
that a conversation goes on with one read. A response that is generated in the background is stored at its beginning, and its
frontend writes it again every few seconds: one that is silent for longer has died. Each write is made only if the record is as
the writer left it; so a response that was cancelled or deleted elsewhere stays so, and its frontend learns of it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dynamo.common.errors import DynamoError, InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from dynamo.common.messaging.records import RecordStore
from dynamo.common.names import encode
from dynamo.frontend.api.openai.responses.events import ResponseObject
from dynamo.frontend.metrics import FrontendMetrics

MAX_BYTES = 16 << 20
"""Of the items of a conversation, and of a response."""
BEAT_S = 5.0
LOST_S = 30.0
"""A response in the background that was not written for so long belongs to a frontend that died."""
RUNNING = frozenset({"queued", "in_progress"})
_ID = re.compile(r"resp_[0-9a-f]{32}")
_ATTEMPTS = 5

Item = Mapping[str, Any]
Hold = Callable[[int], None]
"""Counts bytes as held for a request. Raises Overloaded."""


class ResponseNotFound(NotFound):
    """There is no such response, or it is another key's."""

    def __init__(self, id: str) -> None:
        super().__init__(f"response '{id[:80]}' is not found")


class _Stored(Struct, frozen=True):
    owner: str
    """The name of the API key; empty without one."""
    response: dict[str, Any]
    written_at: float
    """Unix time, seconds."""


_decoder = msgspec.json.Decoder(_Stored)
_items_decoder = msgspec.json.Decoder(list[dict[str, Any]])


class StoredResponses:
    """The stored responses of a namespace. All methods raise Unavailable without JetStream."""

    def __init__(
        self,
        records: Callable[[], RecordStore],
        namespace: str,
        metrics: FrontendMetrics,
        *,
        by_default: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`records` raises Unavailable until there is a connection. `by_default`: for requests that do not say `store`."""
        self._records = records
        self._prefix = encode(namespace, "namespace")
        self._metrics = metrics
        self._by_default = by_default
        self._clock = clock

    def wants(self, store: bool | None) -> bool:
        """Return whether a response is stored, which by default depends on whether it can be. Raises Unavailable if it cannot."""
        if store is None:
            return self._by_default and self._records().is_ready
        if store and not self._records().is_ready:
            raise Unavailable("responses cannot be stored now: JetStream does not respond")
        return store

    async def save(
        self, owner: str, response: ResponseObject, items: Sequence[Item] | None, *, last: int | None = None
    ) -> int | None:
        """Write a response and, unless None, what it responded to; return its revision. With `last`: see `RecordStore.put`."""
        async with _Counted(self._metrics, "save"):
            if items is not None:
                await self._records().put(self._items_key(response.id), _bounded(msgspec.json.encode(items)), last=0)
            data = msgspec.json.encode({"owner": owner, "response": response, "written_at": self._clock()})
            return await self._records().put(self._key(response.id), _bounded(data), last=last)

    async def running_revision(self, owner: str, id: str) -> int | None:
        """Return the revision of a response that is being generated; None if it was cancelled or deleted."""
        try:
            stored, revision = await self._load(owner, id)
        except ResponseNotFound:
            return None
        return revision if stored.response["status"] in RUNNING else None

    async def read(self, owner: str, id: str) -> dict[str, Any]:
        """Return a response. Raises ResponseNotFound."""
        async with _Counted(self._metrics, "read"):
            stored, _ = await self._load(owner, id)
            return self._shown(stored)

    async def items(self, owner: str, id: str, hold: Hold = lambda size_bytes: None) -> list[dict[str, Any]]:
        """Return what a response responded to, from the beginning of the conversation. Raises ResponseNotFound.

        `hold` is called with the number of bytes that they take, before they are parsed.
        """
        async with _Counted(self._metrics, "read"):
            await self._load(owner, id)
            record = await self._records().get(self._items_key(id))
            if record is None:
                raise ResponseNotFound(id)
            hold(len(record.value))
            return _items_decoder.decode(record.value)

    async def conversation(self, owner: str, id: str, hold: Hold = lambda size_bytes: None) -> list[dict[str, Any]]:
        """Return all items up to the end of a response; `hold` as for `items`.

        Raises ResponseNotFound; InvalidRequest if it has not ended well.
        """
        response = await self.read(owner, id)
        if response["status"] not in ("completed", "incomplete"):
            raise InvalidRequest(f"response '{id}' is {response['status']}; only one that ended can be continued")
        output: list[dict[str, Any]] = response["output"]
        return [*await self.items(owner, id, hold), *output]

    async def delete(self, owner: str, id: str) -> None:
        """Delete a response. Raises ResponseNotFound."""
        async with _Counted(self._metrics, "delete"):
            await self._load(owner, id)
            await self._records().delete(self._key(id))
            await self._records().delete(self._items_key(id))

    async def cancel(self, owner: str, id: str) -> dict[str, Any]:
        """End a response in the background, and return it as it is then. Raises ResponseNotFound, InvalidRequest."""
        async with _Counted(self._metrics, "cancel"):
            for _ in range(_ATTEMPTS):
                stored, revision = await self._load(owner, id)
                response = self._shown(stored)
                if not response["background"]:
                    raise InvalidRequest("only responses in the background can be cancelled")
                if response["status"] not in RUNNING:
                    return response
                response["status"] = "cancelled"
                data = msgspec.json.encode(_Stored(owner, response, self._clock()))
                if await self._records().put(self._key(id), data, last=revision) is not None:
                    return response
            raise InvalidRequest(f"response '{id}' changes too fast to be cancelled; try again")

    async def _load(self, owner: str, id: str) -> tuple[_Stored, int]:
        record = await self._records().get(self._key(id)) if _ID.fullmatch(id) else None
        if record is None:
            raise ResponseNotFound(id)
        stored = _decoder.decode(record.value)
        if stored.owner != owner:
            raise ResponseNotFound(id)
        return stored, record.revision

    def _shown(self, stored: _Stored) -> dict[str, Any]:
        response = dict(stored.response)
        if response["status"] in RUNNING and self._clock() - stored.written_at > LOST_S:
            error = {"code": "server_error", "message": "the frontend that generated the response has ended"}
            response |= {"status": "failed", "error": error}
        return response

    def _key(self, id: str) -> str:
        return f"{self._prefix}.{id}"

    def _items_key(self, id: str) -> str:
        return f"{self._prefix}.{id}.items"


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(16)}"


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise PayloadTooLarge(f"the conversation has {len(data)} bytes; responses are stored up to {MAX_BYTES}")
    return data


class _Counted:
    """Counts an operation on the store by its outcome."""

    def __init__(self, metrics: FrontendMetrics, operation: str) -> None:
        self._metrics = metrics
        self._operation = operation

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        outcome = "success" if error is None else error.code.value if isinstance(error, DynamoError) else "internal"
        self._metrics.stored_response(self._operation, outcome)
