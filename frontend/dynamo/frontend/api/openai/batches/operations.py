"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace as changed

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.declaration import Charge, Declaration, OtherSites, Reads
from dynamo.frontend.api.http.errors import OPENAI_ERRORS, ErrorResponse
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import read_json
from dynamo.frontend.api.http.multipart import parse_form
from dynamo.frontend.api.http.operation import Handler, Operation
from dynamo.frontend.api.openai.batches.batch import ENDPOINTS, Batch, Batches
from dynamo.frontend.api.openai.batches.files import FileObject, Files
from dynamo.frontend.api.openai.requests import Metadata
from dynamo.frontend.api.openai.store.pages import page
from dynamo.frontend.security.surfaces import Surface

_OWN = Declaration(
    surface=Surface.INFERENCE,
    is_action=False,
    reads=Reads.LITTLE,
    copies=1,
    charge=Charge.WORK,
    deadline_s=300.0,
    other_sites=OtherSites.REFUSED,
)
"""What a key does with its own files and batches."""
_UPLOAD = replace(_OWN, reads=Reads.FILE, copies=3, deadline_s=3600.0)
_DOWNLOAD = replace(_OWN, deadline_s=3600.0)
_BINARY = (b"content-type", b"application/octet-stream")
_CALL_BYTES = 4 << 20
"""Each so many bytes of a file that a batch is to read count as a call."""
_LONG_BYTES = 1 << 20
"""Longer forms are read in a thread."""


class BatchRequest(Struct, kw_only=True, frozen=True):
    """POST /v1/batches"""

    input_file_id: Annotated[str, Meta(max_length=80)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchOperations:
    """What can be done with files and batches. A key has only those that it made."""

    def __init__(self, files: Files, batches: Batches, created: Callable[[], None]) -> None:
        """`created` is called after each new batch."""
        self._files = files
        self._batches = batches
        self._created = created
        self._decoder = msgspec.json.Decoder(BatchRequest)

    def operations(self) -> list[Operation]:
        return [
            _operation("/v1/files", "POST", self.upload, "Upload a file", FileObject, declared=_UPLOAD),
            _operation("/v1/files", "GET", self.list_files, "The files"),
            _operation("/v1/files/{id}", "GET", self.show_file, "A file", FileObject),
            _operation("/v1/files/{id}", "DELETE", self.delete_file, "Delete a file"),
            _operation("/v1/files/{id}/content", "GET", self.content, "The content of a file", declared=_DOWNLOAD),
            _operation("/v1/batches", "POST", self.create, "Carry out the requests in a file", Batch, BatchRequest),
            _operation("/v1/batches", "GET", self.list_batches, "The batches"),
            _operation("/v1/batches/{id}", "GET", self.show, "A batch", Batch),
            _operation("/v1/batches/{id}/cancel", "POST", self.cancel, "Cancel a batch", Batch),
        ]

    async def upload(self, exchange: Exchange) -> None:
        exchange.call()
        body = await exchange.any_body()
        kind = exchange.headers.get("content-type", "")
        parts = await exchange.settings.offload.run_if(len(body) > _LONG_BYTES, parse_form, kind, body)
        file, purpose = parts.get("file"), parts.get("purpose")
        if file is None or not file.filename:
            raise InvalidRequest("the form has no file", param="file")
        if purpose is None or purpose.content != b"batch":
            raise InvalidRequest("'purpose' must be 'batch'", param="purpose")
        made = await self._files.create(exchange.account.name, file.filename[:256], "batch", file.content)
        await exchange.respond(msgspec.json.encode(made))

    async def list_files(self, exchange: Exchange) -> None:
        files = await self._files.owned_by(exchange.account.name)
        await exchange.respond(msgspec.json.encode(page(files, exchange.query, attrgetter("id"))))

    async def show_file(self, exchange: Exchange) -> None:
        file = await self._files.read(exchange.account.name, exchange.parameters["id"])
        await exchange.respond(msgspec.json.encode(file))

    async def delete_file(self, exchange: Exchange) -> None:
        id = exchange.parameters["id"]
        await self._files.delete(exchange.account.name, id)
        await exchange.respond(msgspec.json.encode({"id": id, "object": "file", "deleted": True}))

    async def content(self, exchange: Exchange) -> None:
        content = await self._files.open(exchange.account.name, exchange.parameters["id"])
        await exchange.respond_while_read(content.size_bytes, content.pieces, (_BINARY,))

    async def create(self, exchange: Exchange) -> None:
        exchange.call()
        request = await read_json(exchange, self._decoder)
        if request.endpoint not in ENDPOINTS:
            raise InvalidRequest(f"'endpoint' must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        owner = exchange.account.name
        file = await self._files.read(owner, request.input_file_id)
        batch = await self._batches.create(owner, request.endpoint, request.input_file_id, request.metadata)
        self._created()
        exchange.account.take_calls(file.bytes // _CALL_BYTES)
        await exchange.respond(msgspec.json.encode(batch))

    async def list_batches(self, exchange: Exchange) -> None:
        batches = await self._batches.owned_by(exchange.account.name)
        await exchange.respond(msgspec.json.encode(page(batches, exchange.query, attrgetter("id"))))

    async def show(self, exchange: Exchange) -> None:
        batch = await self._batches.read(exchange.account.name, exchange.parameters["id"])
        await exchange.respond(msgspec.json.encode(batch))

    async def cancel(self, exchange: Exchange) -> None:
        now = self._batches.now

        def cancelled(batch: Batch) -> Batch:
            if batch.status == "cancelling":
                return batch
            return changed(batch, status="cancelling", cancelling_at=now)

        batch = await self._batches.change(exchange.account.name, exchange.parameters["id"], cancelled)
        await exchange.respond(msgspec.json.encode(batch))


def _operation(
    path: str,
    method: str,
    handle: Handler,
    summary: str,
    response: Any = None,
    request: Any = None,
    *,
    declared: Declaration = _OWN,
) -> Operation:
    return Operation(
        path=path,
        method=method,
        declared=declared,
        errors=OPENAI_ERRORS,
        error=ErrorResponse,
        handle=handle,
        summary=summary,
        group="Batches",
        request=request,
        response=response,
    )
