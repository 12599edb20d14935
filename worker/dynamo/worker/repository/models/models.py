"""The models of a repository: loading, unloading, dependencies between them, and the index of their states.

One change is made at a time. A model that is loaded again serves its old form until the new one is there, and for good if that
does not load. Unloading deregisters first, then lets the accepted requests finish, then frees.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from dynamo.common.errors import (
    DynamoError,
    EngineError,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    Unsupported,
    from_wire,
)
from dynamo.common.model_card import ModelCard
from dynamo.common.names import check_name
from dynamo.common.process.background import Tasks
from dynamo.common.repository import (
    ALL_MODELS,
    MAX_REASON_CHARS,
    NOT_LOADED,
    UNLOADED,
    IndexEntry,
    LoadRequest,
    ModelState,
    matches,
)
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.declared.agents import run_agents
from dynamo.worker.repository.declared.config_checks import check_settings
from dynamo.worker.repository.declared.execution import ModelBackend, ModelRequest, ModelResult, Version
from dynamo.worker.repository.declared.layout import Fingerprint, served_versions, versions_in
from dynamo.worker.repository.declared.model_config import (
    CONFIG_FILE,
    check_supported,
    check_tensors,
    config_from_json,
    fill_defaults,
    ignored_settings,
    read_config,
    settle_backend,
)
from dynamo.worker.repository.models.ensemble import EnsembleBackend, ensembles_above, labels_in, models_in
from dynamo.worker.repository.models.loaded import LoadedModel
from dynamo.worker.repository.models.model_calls import run_counted
from dynamo.worker.repository.models.model_folders import ModelFolders
from dynamo.worker.repository.models.model_gauges import ModelGauges
from dynamo.worker.repository.models.opening import SESSIONS, open_versions
from dynamo.worker.repository.models.response_cache import ResponseCache
from dynamo.worker.repository.models.settings import Host, RepositorySettings
from dynamo.worker.repository.models.warmup import warm_up
from dynamo.worker.repository.python.custom_metrics import CustomMetrics
from dynamo.worker.repository.python.environments import Environments
from dynamo.worker.repository.python.python_backend import PythonBackend
from dynamo.worker.repository.sessions.session import SessionBackend
from dynamo.worker.repository.stores.content_cache import ContentCache
from dynamo.worker.repository.stores.source import FilesNotWritten, ModelPaths
from dynamo.worker.repository.wire.calls import CallMemory, check_depth

log = logging.getLogger(__name__)
_LOADS_AT_ONCE = 4
_MAX_MISMATCHES = 16
"""Log lines about outputs of one model that are not as declared."""
_MAX_SENT = 1000


@dataclass(slots=True)
class _State:
    """What the index shows of a model that is not loaded, or about to change."""

    state: ModelState = ModelState.UNAVAILABLE
    reason: str = NOT_LOADED
    versions: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class _Override:
    config: str
    files: Fingerprint
    """Fingerprint of the model's folder when the override was set."""


class RepositoryModels:
    def __init__(self, settings: RepositorySettings) -> None:
        """Raises InvalidRequest for a folder that does not exist."""
        self._settings = settings
        copies = ContentCache(settings.copies, settings.copies_bytes)
        paths = ModelPaths(settings.path_roots, settings.path_max_bytes)
        self.folders = ModelFolders(settings.folders, settings.stores, copies, paths)
        self._loaded: dict[str, LoadedModel] = {}
        self._states: dict[str, _State] = {}
        self._sent: deque[str] = deque(maxlen=_MAX_SENT)
        """Models that are unloaded and in no folder: they were sent with their files, or loaded from a path."""
        self._wanted: set[str] = set()
        """Models that were loaded for their own sake, not for that of an ensemble."""
        self._dropped: dict[str, list[str]] = {}
        """Versions of loaded models that were served once, and are left out by what they were loaded with since."""
        self._suspended: set[str] = set()
        """Ensembles that were unloaded because a model in them was."""
        self._overrides: dict[str, _Override] = {}
        """Configurations that load requests brought along, by model."""
        self._mismatches: dict[str, set[str]] = {}
        """The sentences that were logged about outputs of a model."""
        self._retiring = Tasks()
        self._lock = asyncio.Lock()
        self._host: Host | None = None
        self.cache = ResponseCache(settings.cache_bytes) if settings.cache_bytes else None
        self._call_memory = CallMemory(settings.calls_bytes)
        environments = Environments(copies, settings.path_max_bytes)
        self._python = PythonBackend(self, environments, settings.rate_limiter, self._call_memory)
        batch_size = settings.default_max_batch_size if settings.auto_complete else 0
        self._backends: dict[str, ModelBackend] = {
            **{name: SessionBackend(open_session, batch_size, settings.rate_limiter) for name, open_session in SESSIONS.items()},
            "python": self._python,
            "ensemble": EnsembleBackend(self),
        }
        self.rescan()

    def __repr__(self) -> str:
        return (
            f"<RepositoryModels in {[*map(str, self._settings.folders), *self._settings.stores]}, loaded={sorted(self._loaded)}>"
        )

    def use_shared_memory(self, memory: SharedMemory) -> None:
        """Let processes of models that are loaded from now on read and write tensors in shared memory."""
        self._python.memory = memory

    @property
    def custom_metrics(self) -> CustomMetrics:
        """The metrics that Python models declare themselves."""
        return self._python.metrics

    @property
    def gauges(self) -> ModelGauges:
        """The metrics of the models that are loaded when they are read."""
        return ModelGauges(lambda: tuple(self._loaded.values()))

    def attach(self, host: Host) -> None:
        """Report changes to `host` from now on."""
        self._host = host

    # What there is

    def cards(self) -> list[ModelCard]:
        return [model.card for model in self._loaded.values()]

    def find(self, model: str) -> LoadedModel:
        """Return a loaded model. Raises ModelNotFound."""
        loaded = self._loaded.get(model)
        if loaded is None:
            raise ModelNotFound(model)
        return loaded

    def config(self, model: str, version: str) -> ModelConfig:
        loaded = self.find(model)
        if version and version not in loaded.card.versions:
            raise ModelNotFound(model, version)
        return loaded.config

    def index(self) -> tuple[IndexEntry, ...]:
        """Return the state of every model in the folders or loaded otherwise."""
        entries: list[IndexEntry] = []
        for name in sorted(self._states.keys() | self._loaded.keys()):
            state = self._states.get(name)
            loaded = self._loaded.get(name)
            if loaded is not None and (state is None or state.state is not ModelState.UNLOADING):
                entries += [IndexEntry(name=name, version=v, state=ModelState.READY) for v in loaded.card.versions]
                entries += [IndexEntry(name=name, version=v, reason=UNLOADED) for v in self._dropped.get(name, ())]
            elif state is not None:
                reason = state.reason[:MAX_REASON_CHARS]
                entries += [
                    IndexEntry(name=name, version=version, state=state.state, reason=reason)
                    for version in state.versions or ("",)
                ]
        return tuple(entries)

    def rescan(self, names: Collection[str] | None = None) -> bool:
        """Update the index to `names`, or to the models in the folders. Return True if it has changed."""
        names = set(self.folders.list_names() if names is None else names)
        indexed = set(self._states)
        for name in names - indexed:
            self._states[name] = _State()
        for name in indexed - names - self._loaded.keys() - set(self._sent):
            del self._states[name]
        return indexed != set(self._states)

    # Requests of other models

    def run(self, model: str, version: str, request: ModelRequest) -> AsyncIterator[ModelResult]:
        check_depth(request.context)
        loaded = self.find(model)
        loaded.check(request, version)
        request.context.version = version or loaded.card.versions[-1]
        statistics = None if self._host is None else self._host.statistics(loaded.name, request.context.version)
        return run_counted(loaded, request, statistics, self._call_memory)

    def _on_mismatch(self, model: str, what: str) -> None:
        """Count and log, each sentence once, that outputs are not as declared. Raises EngineError if they have to be."""
        if self._host is not None:
            self._host.count_output_mismatch(model)
        if self._settings.strict_outputs:
            raise EngineError(what)
        logged = self._mismatches.setdefault(model, set())
        if what not in logged and len(logged) < _MAX_MISMATCHES:
            logged.add(what)
            log.warning("%s; it is passed on as it is", what)

    async def load(self, model: str, config: str, files: Mapping[str, bytes]) -> None:
        self._check_change()
        await self.load_on_request(LoadRequest(model=model, config=config, files=files))

    async def unload(self, model: str, dependents: bool) -> None:
        self._check_change()
        await self.unload_model(model, dependents=dependents)

    def check_on_request(self) -> None:
        """Raises Unsupported if models are not loaded and unloaded on request."""
        if not self._settings.on_request:
            raise Unsupported("models are loaded and unloaded on request only with --model-control-mode explicit")

    def _check_change(self) -> None:
        self.check_on_request()
        if self._lock.locked():  # a model that waits for its own loading to end would wait for ever
            raise Unavailable("a model of this worker is being loaded or unloaded just now: try again")

    # Loading

    async def load_all(self, names: Sequence[str]) -> dict[str, DynamoError]:
        """Load models, several at once, ensembles last. Return the errors by name."""
        failed: dict[str, DynamoError] = {}
        limit = asyncio.Semaphore(_LOADS_AT_ONCE)

        async def load(name: str) -> None:
            try:
                async with limit:
                    await self._load(LoadRequest(model=name), ())
            except DynamoError as error:
                failed[name] = error

        async with self._lock:
            self._wanted.update(names)
            ensembles = [name for name in names if self.folders.is_ensemble(name)]
            await asyncio.gather(*(load(name) for name in names if name not in ensembles))
            for name in ensembles:
                if name not in self._loaded:
                    await load(name)
        return failed

    async def load_on_request(self, request: LoadRequest) -> tuple[str, ...]:
        """Load a model as `load_model` does, as it is in the object stores now."""
        await asyncio.to_thread(self.folders.refresh)
        return await self.load_model(request)

    async def load_model(self, request: LoadRequest) -> tuple[str, ...]:
        """Load a model, or load it again. Return the versions that are served now. Raises DynamoError with the reason if that
        fails.
        """
        async with self._lock:
            self.rescan()
            self._check_dependents(request.model, request.permitted)
            try:
                loaded = await self._load(self._with_override(request), ())
                self._wanted.add(request.model)
                await self._load_suspended()
            except EngineError as error:
                version = self.folders.newest_version(request.model) or "1"
                raise InvalidRequest(
                    f"load failed for model '{request.model}': version {version} is at UNAVAILABLE state: Internal: {error};"
                ) from error
            except InvalidRequest as error:
                raise from_wire(error.code, f"failed to load '{request.model}', {error}", error.retryable) from error
            finally:
                await self._publish()
        return loaded.card.versions

    def _with_override(self, request: LoadRequest) -> LoadRequest:
        """Let a model that is loaded with a configuration of a request keep it, as in Triton, unless its files have changed."""
        override = self._overrides.get(request.model)
        if override is None or request.config or request.path or request.model not in self._loaded:
            return request
        if override.files != self.folders.fingerprint(request.model):
            return request
        return LoadRequest(model=request.model, config=override.config)

    def _remember_override(self, request: LoadRequest) -> None:
        if request.config and not request.files and not request.path:
            self._overrides[request.model] = _Override(request.config, self.folders.fingerprint(request.model))
        else:
            self._overrides.pop(request.model, None)

    async def _load_suspended(self) -> None:
        """Load the ensembles again that were unloaded because of a model that is loaded now."""
        for name in sorted(self._suspended):
            config = self.folders.config(name)
            if name not in self._loaded and config is not None and all(needed in self._loaded for needed in models_in(config)):
                try:
                    await self._load(LoadRequest(model=name), ())
                except DynamoError:
                    continue  # logged, and in the index

    async def _load(self, request: LoadRequest, above: tuple[str, ...]) -> LoadedModel:
        """`above`: the ensembles that this model is loaded for."""
        name = request.model
        before = self._states.get(name)
        if name not in self._loaded and name in self._states:
            self._states[name] = _State(ModelState.LOADING, "being loaded")
        start = time.monotonic()
        try:
            if name in above:
                raise InvalidRequest(f"the ensembles {' and '.join(dict.fromkeys(above))} need each other")
            loaded = await self._open(request, above)
            loaded.load_s = time.monotonic() - start
            self._take(loaded)
            self._remember_override(request)
        except BaseException as error:
            if isinstance(error, DynamoError) and not isinstance(error, ModelNotFound | FilesNotWritten):
                self._fail(name, f"Internal: {error}" if isinstance(error, EngineError) else str(error))
            elif before is not None:
                self._states[name] = before
            raise
        log.info("model %s is loaded after %.1f s", name, time.monotonic() - start)
        return loaded

    def _fail(self, name: str, reason: str) -> None:
        if name in self._loaded:
            log.error("model '%s' cannot be loaded again, and serves on as it is: %s", name, reason)
            return
        log.error("model '%s' cannot be loaded: %s", name, reason)
        if name in self._sent:
            self._states[name] = _State(reason=UNLOADED)
            return
        if not self.folders.of(name):  # the files came with the request, whose caller gets the error
            self._states.pop(name, None)
            return
        self._states[name] = _State(ModelState.UNAVAILABLE, reason, (self.folders.newest_version(name),))

    async def _open(self, request: LoadRequest, above: tuple[str, ...]) -> LoadedModel:
        check_name(request.model)
        files = AsyncExitStack()
        try:
            folder = await self.folders.open(request, files)
            config = self._config_of(request, folder)
            await asyncio.to_thread(run_agents, config, folder)
            ensemble = config.HasField("ensemble_scheduling")
            for needed in models_in(config):
                if needed not in self._loaded:
                    await self._load_needed(needed, (*above, request.model))
            versions = ["1"] if ensemble and not versions_in(folder) else served_versions(config, folder)
            backend = self._backend(config)
            if self._settings.auto_complete:
                config = await backend.complete(Version(config.name, versions[-1], config, folder))
                config.name = request.model
            check_supported(config)
            if ignored := ignored_settings(
                config, has_cache=self.cache is not None, has_rate_limiter=self._settings.rate_limiter is not None
            ):
                log.warning("model %s: its configuration has %s, which is not acted on", request.model, ", ".join(ignored))
            check_tensors(config)
            check_settings(config)
            fill_defaults(config)
            loaded = await open_versions(backend, config, folder, versions)
            try:
                labels = labels_in(config, {name: self._loaded[name].card for name in models_in(config)})
                model = LoadedModel(config, folder, loaded, files, self._on_mismatch, labels)
                model.warmed_up(await warm_up(model, folder))
                if self.cache is not None and config.response_cache.enable:
                    model.keep_responses(self.cache.for_model(model.name, model.config.metric_tags))
            except BaseException:
                await asyncio.gather(*(executable.close() for executable in loaded.values()))
                raise
            return model
        except BaseException:
            await files.aclose()
            raise

    async def _load_needed(self, needed: str, above: tuple[str, ...]) -> None:
        try:
            await self._load(LoadRequest(model=needed), above)
        except DynamoError as error:
            raise InvalidRequest(f"it needs model '{needed}', which cannot be loaded: {error}") from error

    def _config_of(self, request: LoadRequest, folder: Path) -> ModelConfig:
        config = ModelConfig()
        if request.config:
            config = config_from_json(request.config)
        elif (folder / CONFIG_FILE).exists():
            config = read_config(folder / CONFIG_FILE)
        elif not self._settings.auto_complete:
            raise InvalidRequest(f"there is no {CONFIG_FILE}, and configurations are not completed here")
        if config.name and config.name != request.model and not request.path:
            raise InvalidRequest(f"the configuration is that of a model named '{config.name}'")
        config.name = request.model
        versions = versions_in(folder)
        settle_backend(config, folder / str(versions[-1]) if versions else None)
        check_supported(config)
        return config

    def _backend(self, config: ModelConfig) -> ModelBackend:
        backend = self._backends.get(config.platform if config.platform == "ensemble" else config.backend)
        if backend is None:
            raise InvalidRequest(f"the backend '{config.backend}' is not supported; {', '.join(self._backends)} are")
        return backend

    def _take(self, model: LoadedModel) -> None:
        """Serve a model. It replaces the loaded model of its name."""
        try:
            if self._host is not None:
                self._host.serve(model.card)
        except InvalidRequest:
            self._retire(model)
            raise
        self._mismatches.pop(model.name, None)
        self._suspended.discard(model.name)
        for warmup in model.warmups:
            if self._host is not None and (statistics := self._host.statistics(model.name, warmup.version)) is not None:
                statistics.warmed_up(warmup.total_ns, warmup.timings)
        former = self._loaded.get(model.name)
        self._loaded[model.name] = model
        if former is not None:
            known = (*self._dropped.get(model.name, ()), *former.card.versions)
            self._dropped[model.name] = [version for version in dict.fromkeys(known) if version not in model.card.versions]
        self._states[model.name] = _State(ModelState.READY, "", model.card.versions)
        if former is not None:
            self._retire(former)

    # Unloading

    async def unload_model(self, name: str, *, dependents: bool = False, permitted: Collection[str] = ALL_MODELS) -> None:
        """Unload a model: return when it takes no requests and its open ones have ended or timed out. An unknown one is unloaded.

        Ensembles that need it are unloaded, too, and loaded again with it; with `dependents` also the models that were loaded
        only because this ensemble needs them. The caller may use the models that `permitted` matches: no other one is unloaded.

        Raises Forbidden if an ensemble would be.
        """
        async with self._lock:
            self.rescan()
            self._check_dependents(name, permitted)
            self._suspended.discard(name)
            self._wanted.discard(name)
            if name in self._loaded or name in self._states:
                await self._unload(name, UNLOADED, parts=permitted if dependents else ())

    def _check_dependents(self, name: str, permitted: Collection[str]) -> None:
        """Raise Forbidden unless the caller may use every ensemble that needs a model, and those that need these in turn.

        Ensembles that were unloaded with the model count, too: they come back with it. None is named, since the caller may not
        know of it.
        """
        configs = {other: model.config for other, model in self._loaded.items()}
        for other in self._suspended - configs.keys():
            if (config := self.folders.config(other)) is not None:
                configs[other] = config
        if not all(matches(other, permitted) for other in ensembles_above(name, configs)):
            raise Forbidden(f"model '{name}' is part of ensembles that the API key may not use")

    async def _unload(self, name: str, reason: str, *, parts: Collection[str] = ()) -> None:
        """`parts`: patterns of the models that are unloaded as well if only this ensemble needs them."""
        model = self._loaded.get(name)
        if model is None:
            self._states[name] = _State(reason=reason)
            await self._publish()
            return
        for other in [other.name for other in self._loaded.values() if name in models_in(other.config)]:
            await self._unload(other, "unloaded")
            self._suspended.add(other)
        self._states[name] = _State(ModelState.UNLOADING, reason, model.card.versions)
        if self._host is not None:
            self._host.remove(name)
        await self._publish()
        await self._finish(model)
        del self._loaded[name]
        self._dropped.pop(name, None)
        self._overrides.pop(name, None)
        self._states[name] = _State(ModelState.UNAVAILABLE, reason, model.card.versions)
        if name not in self._sent and not self.folders.of(name):
            self._sent.append(name)  # the index goes on to say that it is unloaded, so that frontends need not remember it
        self.rescan()
        log.info("model %s is unloaded", name)
        for needed in models_in(model.config):
            if needed not in self._loaded or needed in self._wanted or not matches(needed, parts):
                continue
            if not any(needed in models_in(other.config) for other in self._loaded.values()):
                await self._unload(needed, UNLOADED, parts=parts)
        await self._publish()

    async def forget(self, name: str) -> None:
        """Unload a model whose folder was removed."""
        async with self._lock:
            self._wanted.discard(name)
            await self._unload(name, "its folder was removed")
            if name in self._sent:
                self._sent.remove(name)
            self._states.pop(name, None)
            await self._publish()

    def _retire(self, model: LoadedModel) -> None:
        self._retiring.start(self._finish(model), f"the end of the former '{model.name}'")

    async def _finish(self, model: LoadedModel) -> None:
        """Close a model when its requests have ended."""
        try:
            async with asyncio.timeout(self._settings.drain_s):
                await model.drained()
        except TimeoutError:
            log.warning("model '%s' is closed with %d requests open", model.name, model.open_requests)
        await model.close()

    async def _publish(self) -> None:
        if self._host is not None:
            await self._host.publish()

    async def close(self) -> None:
        """Close all models. Their requests have ended or timed out before."""
        await asyncio.gather(self._retiring.finish(), *(model.close() for model in self._loaded.values()))
        self._loaded.clear()
        self.folders.close()
