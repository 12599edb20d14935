"""LoRA adapters at run time, in the form of `vllm serve`.

POST /v1/load_lora_adapter    {"lora_name", "lora_path", "load_inplace", "base_model_name"}
POST /v1/unload_lora_adapter  {"lora_name"}

The response is a sentence, errors have vLLM's types. `/v1/models` lists the adapters.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from dynamo.common.adapters import LoadAdapter
from dynamo.common.errors import AlreadyExists, InvalidRequest
from dynamo.frontend.api.declaration import Reads, changed
from dynamo.frontend.api.http.errors import ErrorForm, error_event, error_info
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import read_json
from dynamo.frontend.api.http.operation import Handler, Operation
from dynamo.frontend.security.surfaces import Surface
from dynamo.frontend.serving.data_plane import DataPlane

_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)
_TYPES = {400: "BadRequestError", 403: "PermissionDeniedError", 404: "NotFoundError", 500: "InternalServerError"}


class LoadAdapterRequest(Struct, frozen=True, kw_only=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Replace an adapter of that name."""
    is_3d_lora_weight: bool = False
    base_model_name: str = ""
    """The model that gets the adapter; needed where several models load adapters."""


class UnloadAdapterRequest(Struct, frozen=True, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None
    """Is not used, as in vLLM."""


class AdapterError(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class AdapterErrorResponse(Struct, frozen=True):
    error: AdapterError


class MissingField(InvalidRequest):
    """A field of the request is empty."""


def adapter_operations(plane: DataPlane) -> list[Operation]:
    load_decoder = msgspec.json.Decoder(LoadAdapterRequest)
    unload_decoder = msgspec.json.Decoder(UnloadAdapterRequest)

    async def load(exchange: Exchange) -> None:
        exchange.call()
        request = await read_json(exchange, load_decoder)
        if not request.lora_name or not request.lora_path:
            raise MissingField("Both 'lora_name' and 'lora_path' must be provided.")
        if request.is_3d_lora_weight:
            raise InvalidRequest("'is_3d_lora_weight' is not supported", param="is_3d_lora_weight")
        adapter = LoadAdapter(
            name=request.lora_name, path=request.lora_path, model=request.base_model_name, in_place=request.load_inplace
        )
        await plane.load_model(exchange.account, adapter)
        await exchange.respond(f"Success: LoRA adapter '{adapter.name}' added successfully.".encode(), 200, _TEXT)

    async def unload(exchange: Exchange) -> None:
        exchange.call()
        request = await read_json(exchange, unload_decoder)
        if not request.lora_name:
            raise MissingField("'lora_name' needs to be provided to unload a LoRA adapter.")
        await plane.unload_adapter(exchange.account, request.lora_name)
        await exchange.respond(f"Success: LoRA adapter '{request.lora_name}' removed successfully.".encode(), 200, _TEXT)

    def operation(path: str, handle: Handler, summary: str, request: type) -> Operation:
        return Operation(
            path=path,
            declared=changed(Surface.MODEL_REPOSITORY, reads=Reads.LITTLE, copies=3, deadline_s=None),
            errors=ErrorForm(body=_error_body, event=error_event),
            handle=handle,
            summary=summary,
            group="LoRA adapters",
            request=request,
            error=AdapterErrorResponse,
        )

    return [
        operation("/v1/load_lora_adapter", load, "Load a LoRA adapter into all instances of a model", LoadAdapterRequest),
        operation("/v1/unload_lora_adapter", unload, "Unload a LoRA adapter everywhere", UnloadAdapterRequest),
    ]


def _error_body(error: BaseException, status: int) -> bytes:
    info = error_info(error, status)
    kind = "InvalidUserInput" if isinstance(error, AlreadyExists | MissingField) else _TYPES.get(status, info.type)
    return msgspec.json.encode(AdapterErrorResponse(AdapterError(info.message, kind, info.param, status)))
