"""LoRA adapters at run time: what etcd says that the models of this worker are to have, they load, and what is gone they unload.

    record in etcd → loaded by the engine → in the model's card → registered, which is how frontends learn of it
    record gone    → out of the card → registered → no request uses it → unloaded by the engine

A record that cannot be carried out is reported in the card with the reason, and tried again once a minute and with each change.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from dynamo.common.adapters import MAX_ERROR_CHARS, MAX_LOADED, MAX_PATH_CHARS, DesiredAdapter, decode_adapter, encode_adapter
from dynamo.common.errors import AlreadyExists, Code, DynamoError, Forbidden, InvalidRequest, Unsupported
from dynamo.common.etcd import Etcd, Events, KeyValue, Put, Reset
from dynamo.common.etcd.follow import follow
from dynamo.common.lifecycle import within
from dynamo.common.model_card import AdapterReport
from dynamo.common.names import adapters_prefix
from dynamo.common.process.background import running_tasks
from dynamo.worker.config import AdapterOptions
from dynamo.worker.engine.base import LoadsAdapters
from dynamo.worker.serve import ServedModel, Service

log = logging.getLogger(__name__)

_RETRY_S = 60.0
_MAX_FAILURES = 64
"""Shown in a card, whose length is bounded: the last ones."""


class DesiredAdapters:
    """The records of a namespace."""

    def __init__(self, etcd: Etcd, namespace: str, changed: Callable[[], None]) -> None:
        """`changed` is called after each change."""
        self._etcd = etcd
        self._prefix = adapters_prefix(namespace)
        self._changed = changed
        self._records: dict[str, DesiredAdapter] = {}
        """By key."""
        self._lost: set[str] = set()
        """Keys of records that etcd has lost, and that are not put back so far."""

    def __repr__(self) -> str:
        return f"<DesiredAdapters {sorted(record.name for record in self._records.values())}>"

    def of(self, model: str) -> dict[str, DesiredAdapter]:
        """Return the adapters that a model is to have, by name."""
        return {record.name: record for record in self._records.values() if record.model == model}

    async def follow(self) -> None:
        """Apply changes in etcd until cancelled."""
        await follow("LoRA adapters in etcd", partial(self._etcd.watch, self._prefix), self._apply)

    async def _apply(self, change: Reset | Events) -> None:
        if isinstance(change, Reset):
            if change.history_lost:
                self._lost.update(self._records)
            self._lost -= {kv.key for kv in change.kvs}
            self._records = {key: self._records[key] for key in self._lost}
            for kv in change.kvs:
                self._put(kv)
        else:
            for event in change.events:
                if isinstance(event, Put):
                    self._put(event.kv)
                else:
                    self._records.pop(event.key, None)
        self._changed()
        for key in sorted(self._lost):
            log.warning("etcd has lost the LoRA adapter at %s; it is put back", key)
            try:
                await self._etcd.replace(key, encode_adapter(self._records[key]), mod_revision=0)
            except Forbidden as error:
                log.error("this worker may not put the LoRA adapter at %s back, and serves on with it: %s", key, error)
                continue
            self._lost.discard(key)

    def _put(self, kv: KeyValue) -> None:
        self._lost.discard(kv.key)
        try:
            self._records[kv.key] = decode_adapter(kv.key, kv.value)
        except DynamoError as error:
            log.warning("the LoRA adapter at %s is left out: %s", kv.key, error)
            self._records.pop(kv.key, None)


@dataclass(frozen=True, slots=True)
class _AdapterFailure:
    code: Code
    text: str


class AdapterFollower:
    """Keeps the engines of one worker as the records say. Changes happen one at a time."""

    def __init__(
        self,
        etcd: Etcd,
        namespace: str,
        options: AdapterOptions,
        service: Service,
        register: Callable[[], Awaitable[object]],
        drain_timeout_s: float,
    ) -> None:
        """`register` registers the cards of `service`. Raises Unsupported if an engine was not started to load adapters."""
        self._options = options
        self._service = service
        self._register = register
        self._drain_timeout_s = drain_timeout_s
        self._changed = asyncio.Event()
        self._desired = DesiredAdapters(etcd, namespace, self._changed.set)
        self._loaded: dict[str, dict[str, DesiredAdapter]] = {}
        """What was loaded at run time, by model and name."""
        self._failed: dict[str, dict[str, tuple[DesiredAdapter, _AdapterFailure]]] = {}
        self._engines = {model.card.name: model.engine for model in service.models if isinstance(model.engine, LoadsAdapters)}
        if not self._engines:
            raise Unsupported("--allow-runtime-lora is for the engines vllm, remote and sim")
        self._static = {name: _static_adapters(service, name) for name in self._engines}
        """The adapters that an engine has had from its start, unless a record has replaced them."""
        for name, engine in self._engines.items():
            engine.check_adapters()
            self._loaded[name], self._failed[name] = {}, {}
            self._show(name)

    def __repr__(self) -> str:
        return f"<AdapterFollower of {list(self._engines)}, loaded={self._loaded}>"

    async def follow(self) -> None:
        """Carry out the records until cancelled."""
        async with running_tasks() as tasks:
            tasks.start(self._desired.follow(), "LoRA adapters in etcd")
            while True:
                try:
                    async with asyncio.timeout(_RETRY_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass
                self._changed.clear()
                for model in self._engines:
                    await self._reconcile(model)

    async def _reconcile(self, name: str) -> None:
        """Unload what a model is not to have any more, then load what it lacks."""
        desired, loaded = self._desired.of(name), self._loaded[name]
        failed = self._failed[name] = {adapter: failure for adapter, failure in self._failed[name].items() if adapter in desired}
        if gone := [loaded.pop(adapter) for adapter in sorted(loaded.keys() - desired.keys())]:
            await self._renew(name)
            for adapter in gone:
                await self._unload(name, adapter)
        for adapter in desired.values():
            if loaded.get(adapter.name) == adapter:
                failed.pop(adapter.name, None)  # of a load that was taken back
                continue
            try:
                await self._load(name, adapter)
                failed.pop(adapter.name, None)
                log.info("model %s: LoRA adapter '%s' of %s is loaded", name, adapter.name, adapter.path)
            except DynamoError as error:
                failure = _AdapterFailure(error.code, str(error)[:MAX_ERROR_CHARS])
                if failed.pop(adapter.name, None) != (adapter, failure):
                    log.warning("model %s: LoRA adapter '%s' is not loaded: %s", name, adapter.name, error)
                failed[adapter.name] = adapter, failure
            await self._renew(name)
        await self._renew(name)

    async def _load(self, name: str, adapter: DesiredAdapter) -> None:
        """Raises DynamoError."""
        engine, static, loaded = self._engines[name], self._static[name], self._loaded[name]
        is_replaced = adapter.name in loaded or adapter.name in static
        if not is_replaced and adapter.name in {other for served in self._service.models for other in served.names}:
            raise AlreadyExists(f"'{adapter.name}' is another name of this worker's")
        held, limit = len(static) + len(loaded), min(MAX_LOADED, self._options.max_loaded or engine.max_adapters or MAX_LOADED)
        if not is_replaced and held >= limit:
            raise InvalidRequest(f"the instance holds {held} LoRA adapters, of at most {limit}: unload one of them first")
        path = await asyncio.to_thread(self._path, adapter.path, engine)
        await engine.load_adapter(adapter.name, path)
        static.pop(adapter.name, None)
        loaded[adapter.name] = adapter

    async def _unload(self, name: str, adapter: DesiredAdapter) -> None:
        what = f"requests with LoRA adapter '{adapter.name}'"
        await within(self._drain_timeout_s, self._service.adapter_unused(adapter.name), what)
        try:
            await self._engines[name].unload_adapter(adapter.name)
            log.info("model %s: LoRA adapter '%s' is unloaded", name, adapter.name)
        except DynamoError as error:
            log.error("model %s: LoRA adapter '%s' is not used any more, but not unloaded: %s", name, adapter.name, error)

    def _path(self, text: str, engine: LoadsAdapters) -> str:
        """Return the path that the engine is to read. Raises Forbidden, InvalidRequest."""
        if not text or len(text) > MAX_PATH_CHARS or any(character < " " for character in text):
            raise InvalidRequest("the path of a LoRA adapter is empty or too long, or has control characters")
        path, roots = Path(os.path.normpath(text)), list(self._options.path_roots)
        if engine.reads_adapters_here:  # where links lead is what counts
            try:
                path, roots = path.resolve(), [root.resolve() for root in roots]
            except (OSError, RuntimeError) as error:  # links in a circle
                raise InvalidRequest(f"the path {text[:200]!r} of a LoRA adapter cannot be followed: {error}") from error
        if not Path(text).is_absolute() or not any(path.is_relative_to(root) and path != root for root in roots):
            raise Forbidden(f"the path {text[:200]!r} of a LoRA adapter is not below a --lora-path-root")
        return str(path)

    async def _renew(self, name: str) -> None:
        """Show what has changed in the card, here and in etcd."""
        if self._show(name):
            await self._register()

    def _show(self, name: str) -> bool:
        """Put into the model's card what is loaded. Return whether that changes the card."""
        model = self._find(name)
        if model is None:
            return False
        assert model.card.llm is not None
        static, loaded = self._static[name], self._loaded[name]
        reports = dict(static)
        for adapter in loaded.values():
            reports[adapter.name] = AdapterReport(name=adapter.name, path=adapter.path, load_id=adapter.load_id)
        for adapter, failure in list(self._failed[name].values())[-_MAX_FAILURES:]:
            path = reports[adapter.name].path if adapter.name in reports else adapter.path
            reports[adapter.name] = AdapterReport(
                name=adapter.name, path=path, load_id=adapter.load_id, error=failure.text, code=failure.code
            )
        shown = msgspec.structs.replace(
            model.card.llm, adapters=(*static, *loaded), adapter_reports=tuple(reports.values()), loads_adapters=True
        )
        if shown == model.card.llm:
            return False
        self._service.put(replace(model, card=msgspec.structs.replace(model.card, llm=shown)))
        return True

    def _find(self, name: str) -> ServedModel | None:
        """Return a model; None while the worker sleeps."""
        return next((model for model in self._service.models if model.card.name == name), None)


def _static_adapters(service: Service, name: str) -> dict[str, AdapterReport]:
    llm = next(model.card.llm for model in service.models if model.card.name == name)
    return {} if llm is None else {report.name: report for report in llm.adapter_reports}
