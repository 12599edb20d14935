"""LoRA adapters that an engine server loads and unloads while it runs, by its own calls."""

from __future__ import annotations

from typing import Protocol

import msgspec

from dynamo.common.errors import DynamoError, InvalidRequest, NotFound, Unsupported
from dynamo.common.http.client import HttpClient
from dynamo.worker.engine.remote.errors import NotServed, read_failure


class ServerAdapters(Protocol):
    """The calls of one kind of server."""

    async def load(self, name: str, path: str, former: str | None) -> None:
        """Load an adapter in the place of the one from `former`, if there is one. Nothing changes on failure.

        Raises NotFound for a path without an adapter, Unsupported if the server was not started to change adapters.
        """
        ...

    async def unload(self, name: str) -> None:
        """Raises NotFound if the server has no such adapter."""
        ...

    def is_lost(self, error: DynamoError) -> bool:
        """Whether a request was refused because the server has no such adapter."""
        ...


class VllmAdapters:
    """`/v1/load_lora_adapter` of `vllm serve`."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def load(self, name: str, path: str, former: str | None) -> None:
        await self._change("load", {"lora_name": name, "lora_path": path, "load_inplace": True})

    async def unload(self, name: str) -> None:
        await self._change("unload", {"lora_name": name})

    def is_lost(self, error: DynamoError) -> bool:
        return isinstance(error, NotServed)

    async def _change(self, verb: str, fields: dict[str, object]) -> None:
        path = f"/v1/{verb}_lora_adapter"
        status, body = await self._client.fetch("POST", path, msgspec.json.encode(fields))
        if status == 200:
            return
        error = read_failure(status, body)
        if status == 404 and str(fields["lora_name"]) not in str(error):  # the path itself is unknown
            raise Unsupported(
                f"the server at {self._client} has no {path}: start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            )
        raise NotFound(str(error)) if status == 404 else error


class _ChangeResult(msgspec.Struct):
    error_message: str | None = None


class SglangAdapters:
    """`/load_lora_adapter` of SGLang, which refuses a name that it has: that adapter is unloaded before."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def load(self, name: str, path: str, former: str | None) -> None:
        if former is not None:
            await self.unload(name)
        try:
            await self._change("load", {"lora_name": name, "lora_path": path})
        except DynamoError:
            if former is not None:
                await self._change("load", {"lora_name": name, "lora_path": former})
            raise

    async def unload(self, name: str) -> None:
        try:
            await self._change("unload", {"lora_name": name})
        except InvalidRequest as error:
            if "does not exist" in str(error):
                raise NotFound(str(error)) from error
            raise

    def is_lost(self, error: DynamoError) -> bool:
        return isinstance(error, InvalidRequest) and "LoRA adapters are not loaded" in str(error)

    async def _change(self, verb: str, fields: dict[str, object]) -> None:
        path = f"/{verb}_lora_adapter"
        status, body = await self._client.fetch("POST", path, msgspec.json.encode(fields))
        if status == 200:
            return
        if status == 404:
            raise Unsupported(f"the server at {self._client} has no {path}")
        try:
            message = msgspec.json.decode(body, type=_ChangeResult).error_message
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            message = None
        raise InvalidRequest(message) if status == 400 and message else read_failure(status, body)
