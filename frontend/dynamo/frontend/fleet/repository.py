"""The model repositories of the fleet: their index, and loading and unloading models in all of them.

A worker with a repository registers it in etcd (`common.repository`). Load and unload requests go to every worker in the mode
`explicit`; a worker without the model is ignored as long as another one has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import msgspec

from dynamo.common.discovery import WITHDRAWN
from dynamo.common.errors import Code, DynamoError, EngineError, ModelNotFound, Unsupported, from_wire
from dynamo.common.etcd import Etcd, Events, KeyValue, Put, Reset
from dynamo.common.etcd.follow import follow
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.names import InstanceId, repository_prefix
from dynamo.common.process.background import running
from dynamo.common.process.work import Work
from dynamo.common.repository import (
    LOAD,
    NO_FILES,
    UNLOAD,
    ControlMode,
    Files,
    IndexEntry,
    LoadRequest,
    ModelState,
    RepositoryInstance,
    UnloadRequest,
    decode_repository,
    is_wanted,
    merge_indexes,
)
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.security.accounts import Account

log = logging.getLogger(__name__)

_SEEN_S = 5.0
"""How long the response waits for the directory to show the change after the workers are done."""
_PASSED_OVER = frozenset({Code.NOT_FOUND, Code.UNSUPPORTED})
"""Errors of workers that do not have the model, or no repository that loads models."""

SendRequest = Callable[[InstanceId, str, str, Body, float], Awaitable[Buffer]]
"""Sends a request to an instance and returns the response: (id, subject, verb, body, deadline). Raises DynamoError."""


class RepositoryView:
    """The registered repositories."""

    def __init__(self, etcd: Etcd, namespace: str | None) -> None:
        self._etcd = etcd
        self._prefix = repository_prefix(namespace)
        self._registered: dict[str, tuple[RepositoryInstance, int]] = {}
        """Repositories by key, each with the revision of the store at which it was put."""
        self._holders: dict[str, dict[str, dict[str, IndexEntry]]] = {}
        """What repositories say about models, by name, version, and their keys. All together may have millions of entries."""
        self._failed: set[tuple[str, str]] = set()
        """Names and versions of models that should be loaded and are nowhere."""

    def instances(self) -> list[RepositoryInstance]:
        return [instance for instance, _ in self._registered.values()]

    async def follow(self) -> None:
        """Apply changes in etcd until cancelled."""
        await follow("model repositories", partial(self._etcd.watch, self._prefix), self.apply)

    async def refresh(self, timeout_s: float) -> None:
        """List the repositories now instead of waiting for the watch. Without etcd, the view stays as it is."""
        try:
            async with asyncio.timeout(timeout_s):
                listing = await self._etcd.range(self._prefix, prefix=True)
        except (DynamoError, TimeoutError) as error:
            log.warning("the model repositories could not be listed: %s", str(error) or "no response in time")
            return
        self._take_over(listing.kvs, listing.revision)

    def apply(self, change: Reset | Events) -> None:
        if isinstance(change, Reset):
            if change.history_lost:
                self._remove([*self._registered])
            return self._take_over(change.kvs, change.revision)
        for event in change.events:
            if isinstance(event, Put):
                self._put(event.kv)
            elif event.key in self._registered and self._registered[event.key][1] < event.revision:
                self._remove([event.key])

    def _take_over(self, kvs: Sequence[KeyValue], revision: int) -> None:
        """Replace the view by a listing at `revision`, except for what was put later."""
        listed = {kv.key for kv in kvs}
        self._remove([key for key, (_, put_at) in self._registered.items() if key not in listed and put_at <= revision])
        for kv in kvs:
            self._put(kv)

    def _put(self, kv: KeyValue) -> None:
        if kv.key in self._registered and self._registered[kv.key][1] >= kv.mod_revision:
            return
        if kv.value == WITHDRAWN:
            return self._remove([kv.key])
        try:
            instance = decode_repository(kv.key, kv.value)
        except DynamoError as error:
            log.warning("the repository registered at %s is left out: %s", kv.key, error)
            return self._remove([kv.key])
        self._replace(kv.key, instance.entries)
        self._registered[kv.key] = instance, kv.mod_revision

    def _remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._replace(key, ())
            self._registered.pop(key, None)

    def _replace(self, key: str, entries: Sequence[IndexEntry]) -> None:
        """Replace what the repository under `key` says. Costs as much as it says."""
        former = self._registered[key][0].entries if key in self._registered else ()
        before = {(entry.name, entry.version): entry for entry in former}
        after = {(entry.name, entry.version): entry for entry in entries}
        for name, version in before.keys() - after.keys():
            versions = self._holders[name]
            del versions[version][key]
            if not versions[version]:
                del versions[version]
            if not versions:
                del self._holders[name]
        changed = [place for place, entry in after.items() if before.get(place) != entry]
        for name, version in changed:
            self._holders.setdefault(name, {}).setdefault(version, {})[key] = after[name, version]
        for name, version in (*changed, *(before.keys() - after.keys())):
            self._judge(name, version)
            self._judge(name, "")

    def _judge(self, name: str, version: str) -> None:
        versions = self._holders.get(name, {})
        holders = versions.get(version, {}).values()
        # A model that one repository has never loaded has no versions there; others may.
        if (version or len(versions) == 1) and is_wanted(holders):
            self._failed.add((name, version))
        else:
            self._failed.discard((name, version))

    @property
    def has_failed(self) -> bool:
        """Whether some model should be loaded and is not."""
        return bool(self._failed)

    def states(self, model: str, version: str) -> set[ModelState]:
        """Return the states of a model, or of one version of it, in all repositories."""
        versions = self._holders.get(model, {})
        holders = [versions.get(version, {})] if version else versions.values()
        return {entry.state for each in holders for entry in each.values()}


@asynccontextmanager
async def open_repositories(etcd: Etcd, namespace: str | None) -> AsyncIterator[RepositoryView]:
    """Follow the repositories of a namespace, or of all, while the body runs."""
    view = RepositoryView(etcd, namespace)
    async with running(view.follow(), "repositories"):
        yield view


@dataclass(frozen=True, slots=True)
class _WorkerOutcome:
    """The response of one worker."""

    worker: RepositoryInstance
    error: DynamoError | None


class Repository:
    """All repositories as one."""

    def __init__(self, view: RepositoryView, send: SendRequest, models: Directory, timeout_s: float) -> None:
        """`timeout_s`: the longest that loading or unloading may take."""
        self._view = view
        self._send = send
        self._models = models
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        models.on_change(self._changed.set)

    def index(self, account: Account) -> Work[list[IndexEntry]]:
        """Return the models that the caller may use, loaded or not, in order of name and version."""
        return merge_indexes(self._view.instances(), account.permits)

    def is_unloaded(self, model: str, version: str = "") -> bool:
        """Return whether a repository holds a model, or one version of it, and none has it loaded."""
        states = self._view.states(model, version)
        return ModelState.UNAVAILABLE in states and ModelState.READY not in states

    def has_failed(self) -> bool:
        """Return whether some model should be loaded and is not."""
        return self._view.has_failed

    async def load(self, account: Account, request: LoadRequest, files: Files = NO_FILES) -> None:
        """Load a model. Returns when every worker that has the model serves it; raises the DynamoError of one that fails."""
        account.permit(request.model)
        request = msgspec.structs.replace(request, permitted=account.models)
        before = self._loaded()
        try:
            done = await self._send_to_all(request.model, LOAD, request.encoded(files))
        except ModelNotFound as error:
            raise EngineError(f"failed to load '{error.model}', failed to poll from model repository") from error
        await self._wait_until_visible(before, dict.fromkeys(((worker, request.model) for worker in done), True))

    async def unload(self, account: Account, request: UnloadRequest) -> None:
        """Unload a model. Returns when no worker serves it and its accepted requests are done. Raises DynamoError."""
        account.permit(request.model)
        request = msgspec.structs.replace(request, permitted=account.models)
        before = self._loaded()
        done = await self._send_to_all(request.model, UNLOAD, msgspec.msgpack.encode(request))
        await self._wait_until_visible(before, dict.fromkeys(((worker, request.model) for worker in done), False))

    def _loaded(self) -> set[tuple[InstanceId, str]]:
        """Return which worker says that it has loaded which model."""
        return {
            (worker.id, entry.name)
            for worker in self._view.instances()
            for entry in worker.entries
            if entry.state is ModelState.READY
        }

    async def _send_to_all(self, model: str, verb: str, body: Body) -> set[InstanceId]:
        """Send a request to all workers, and return the ids of those that succeeded."""
        workers = [worker for worker in self._view.instances() if worker.mode is ControlMode.EXPLICIT]
        if not workers:
            raise Unsupported(
                "no worker loads and unloads models on request: that needs a --model-repository and --model-control-mode explicit"
            )
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        outcomes = await asyncio.gather(*(self._send_to(worker, verb, body, deadline) for worker in workers))
        await self._view.refresh(_SEEN_S)  # the workers registered the change before they responded
        done = {outcome.worker.id for outcome in outcomes if outcome.error is None}
        failed = [outcome.error for outcome in outcomes if outcome.error is not None]
        serious = [error for error in failed if error.code not in _PASSED_OVER]
        if serious:
            raise _summarize(model, serious, len(workers))
        if not done:
            unsupported = [error for error in failed if error.code is Code.UNSUPPORTED]
            raise unsupported[0] if unsupported else ModelNotFound(model)
        return done

    async def _send_to(self, worker: RepositoryInstance, verb: str, body: Body, deadline: float) -> _WorkerOutcome:
        try:
            await self._send(worker.id, worker.subject, verb, body, deadline)
        except DynamoError as error:
            return _WorkerOutcome(worker, error)
        return _WorkerOutcome(worker, None)

    async def _wait_until_visible(
        self, before: Set[tuple[InstanceId, str]], requested: Mapping[tuple[InstanceId, str], bool]
    ) -> None:
        """Wait until the directory shows what has changed, so that the caller's next request sees it.

        `requested`: whether a worker serves the model of the request. Other models may have changed with it, as an ensemble does
        with its parts: those that these workers say they have loaded, and had not `before`, or the other way round.
        """
        workers, now = {worker for worker, _ in requested}, self._loaded()
        expected = {change: change in now for change in now ^ before if change[0] in workers} | dict(requested)

        def is_served(instance: InstanceId, model: str) -> bool:
            return any(serving.id == instance for serving in self._models.instances(model))

        try:
            async with asyncio.timeout(_SEEN_S):
                while any(is_served(*change) is not served for change, served in expected.items()):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("the workers have changed their models, but etcd did not show it within %g s", _SEEN_S)


def _summarize(model: str, errors: Sequence[DynamoError], count: int) -> DynamoError:
    first = errors[0]
    if count == 1:
        return first
    text = f"model '{model}': {len(errors)} of {count} workers failed; first: {first}"
    return from_wire(first.code, text, first.retryable)
