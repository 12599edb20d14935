"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.errors import OPENAI_ERRORS, ErrorResponse
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import read_json
from dynamo.frontend.api.http.operation import Handler, Operation
from dynamo.frontend.api.openai.batches.batch import ENDPOINTS, Batch, Batches
from dynamo.frontend.api.openai.batches.files import MAX_FILE_BYTES, FileObject, Files
from dynamo.frontend.api.openai.batches.multipart import parse_form
from dynamo.frontend.api.openai.pages import page, read_limit
from dynamo.frontend.api.openai.requests import Metadata
from dynamo.frontend.security.surfaces import Surface

_FORM_BYTES = 64 * 1024
"""Of a form around its file."""
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
            _operation("/v1/files", "POST", self.upload, "Upload a file", FileObject),
            _operation("/v1/files", "GET", self.list_files, "The files"),
            _operation("/v1/files/{id}", "GET", self.show_file, "A file", FileObject),
            _operation("/v1/files/{id}", "DELETE", self.delete_file, "Delete a file"),
            _operation("/v1/files/{id}/content", "GET", self.content, "The content of a file"),
            _operation("/v1/batches", "POST", self.create, "Carry out the requests in a file", Batch, BatchRequest),
            _operation("/v1/batches", "GET", self.list_batches, "The batches"),
            _operation("/v1/batches/{id}", "GET", self.show, "A batch", Batch),
            _operation("/v1/batches/{id}/cancel", "POST", self.cancel, "Cancel a batch", Batch),
        ]

    async def upload(self, exchange: Exchange) -> None:
        exchange.caller()
        with exchange.account.occupy():
            body = await exchange.any_body(min(MAX_FILE_BYTES, exchange.settings.options.max_body_bytes) + _FORM_BYTES)
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
        with exchange.account.occupy():
            await _respond_with(exchange, await self._files.owned_by(exchange.account.name))

    async def show_file(self, exchange: Exchange) -> None:
        with exchange.account.occupy():
            file = await self._files.read(exchange.account.name, exchange.parameters["id"])
        await exchange.respond(msgspec.json.encode(file))

    async def delete_file(self, exchange: Exchange) -> None:
        id = exchange.parameters["id"]
        with exchange.account.occupy():
            await self._files.delete(exchange.account.name, id)
        await exchange.respond(msgspec.json.encode({"id": id, "object": "file", "deleted": True}))

    async def content(self, exchange: Exchange) -> None:
        with exchange.account.occupy():
            content = await self._files.content(exchange.account.name, exchange.parameters["id"])
        await exchange.respond(content, 200, ((b"content-type", b"application/octet-stream"),))

    async def create(self, exchange: Exchange) -> None:
        exchange.caller()
        request = await read_json(exchange, self._decoder)
        if request.endpoint not in ENDPOINTS:
            raise InvalidRequest(f"'endpoint' must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        owner = exchange.account.name
        with exchange.account.occupy():
            await self._files.read(owner, request.input_file_id)
            batch = await self._batches.create(owner, request.endpoint, request.input_file_id, request.metadata)
        self._created()
        await exchange.respond(msgspec.json.encode(batch))

    async def list_batches(self, exchange: Exchange) -> None:
        with exchange.account.occupy():
            await _respond_with(exchange, await self._batches.owned_by(exchange.account.name))

    async def show(self, exchange: Exchange) -> None:
        with exchange.account.occupy():
            batch = await self._batches.read(exchange.account.name, exchange.parameters["id"])
        await exchange.respond(msgspec.json.encode(batch))

    async def cancel(self, exchange: Exchange) -> None:
        now = self._batches.now

        def cancelled(batch: Batch) -> Batch:
            if batch.status == "cancelling":
                return batch
            return replace(batch, status="cancelling", cancelling_at=now)

        with exchange.account.occupy():
            batch = await self._batches.change(exchange.account.name, exchange.parameters["id"], cancelled)
        await exchange.respond(msgspec.json.encode(batch))


async def _respond_with(exchange: Exchange, objects: Sequence[FileObject] | Sequence[Batch]) -> None:
    query = exchange.query
    items = [asdict(each) for each in objects]
    await exchange.respond(msgspec.json.encode(page(items, read_limit(query.get("limit")), query.get("after"))))


def _operation(path: str, method: str, handle: Handler, summary: str, response: Any = None, request: Any = None) -> Operation:
    return Operation(
        path=path,
        method=method,
        surface=Surface.INFERENCE,
        errors=OPENAI_ERRORS,
        error=ErrorResponse,
        handle=handle,
        summary=summary,
        group="Batches",
        request=request,
        response=response,
    )
