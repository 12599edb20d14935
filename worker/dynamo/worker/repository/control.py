"""A repository inside its process: the verbs of frontends, what is registered, and polling."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.messaging.request_plane.incoming import Handler, Incoming
from dynamo.common.model_card import ModelCard
from dynamo.common.process.background import Tasks
from dynamo.common.repository import LOAD, UNLOAD, ControlMode, Loaded, LoadRequest, UnloadRequest
from dynamo.worker.observability.statistics import VersionStatistics
from dynamo.worker.repository.declared.layout import Fingerprint
from dynamo.worker.repository.engine import RepositoryEngine
from dynamo.worker.serve import ServedModel, Service

log = logging.getLogger(__name__)

T = TypeVar("T")


class RepositoryControl:
    """Connects a repository to the process that serves it. Created when the first models are loaded."""

    def __init__(self, engine: RepositoryEngine, service: Service, register: Callable[[], Awaitable[object]]) -> None:
        """`register` registers what `service` and `engine` hold now."""
        self._engine = engine
        self._service = service
        self._register = register
        self._orders = Tasks()
        engine.models.attach(self)

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {LOAD: self.load, UNLOAD: self.unload}

    # Host

    def serve(self, card: ModelCard) -> None:
        self._service.put(ServedModel.of(card.check(), self._engine))

    def remove(self, model: str) -> None:
        self._service.remove(model)

    async def publish(self) -> None:
        await self._register()

    def statistics(self, model: str, version: str) -> VersionStatistics | None:
        return next((served.statistics.get(version) for served in self._service.models if served.card.name == model), None)

    def count_output_mismatch(self, model: str) -> None:
        self._service.count_output_mismatch(model)

    # Verbs

    async def load(self, incoming: Incoming) -> None:
        """Respond to a `LoadRequest` with `Loaded`, or with the error of the model."""
        request = _decode(incoming, LoadRequest)
        self._engine.models.check_on_request()
        versions = await self._ordered(self._engine.models.load_on_request(request))
        incoming.end(msgspec.msgpack.encode(Loaded(versions=versions)))

    async def unload(self, incoming: Incoming) -> None:
        """Respond to an `UnloadRequest` when the model is unloaded."""
        request = _decode(incoming, UnloadRequest)
        self._engine.models.check_on_request()
        models = self._engine.models
        await self._ordered(models.unload_model(request.model, dependents=request.dependents, permitted=request.permitted))
        incoming.end()

    async def _ordered(self, work: Coroutine[Any, Any, T]) -> T:
        """Complete the change even if the caller leaves: a half-loaded model serves no request."""

        async def order() -> T | DynamoError:
            try:
                return await work
            except DynamoError as error:  # it concerns the caller alone, if that is still there
                return error

        result = await asyncio.shield(self._orders.start(order(), "a change of the repository"))
        if isinstance(result, DynamoError):
            raise result
        return result

    async def finish(self) -> None:
        """Return when no change is in progress."""
        await self._orders.finish()

    # Polling

    async def watch(self, every_s: float) -> None:
        """Scan the folders every `every_s` seconds, until cancelled; in the mode POLL load and unload what has changed."""
        models = self._engine.models
        seen = self._engine.seen
        while True:
            await asyncio.sleep(every_s)
            try:
                await asyncio.to_thread(models.folders.refresh)
                if models.rescan(await asyncio.to_thread(models.folders.list_names)):
                    await self.publish()
                if self._engine.mode is ControlMode.POLL:
                    fingerprints = await asyncio.to_thread(models.folders.fingerprints)
                    seen = await self._follow(seen, fingerprints)
            except (InvalidRequest, OSError) as error:  # a network file system fails now and then
                log.error("the repository cannot be read: %s", error)

    async def _follow(self, before: Mapping[str, Fingerprint], now: Mapping[str, Fingerprint]) -> dict[str, Fingerprint]:
        """Load what has changed and unload what was removed. Return the fingerprints of the models that need no other attempt."""
        models = self._engine.models
        seen = dict(now)
        for name in sorted(now):
            if now[name] != before.get(name):
                try:
                    await models.load_model(LoadRequest(model=name))
                except DynamoError:
                    continue  # logged, and in the index; it is tried again when the files change
                except OSError as error:
                    log.error("model '%s' cannot be read, and is tried again: %s", name, error)
                    del seen[name]
        for name in sorted(before.keys() - now.keys()):
            await models.forget(name)
        return seen


def _decode(incoming: Incoming, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(incoming.body, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"not a {kind.__name__}: {error}") from error
