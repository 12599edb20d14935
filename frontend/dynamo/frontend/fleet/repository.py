"""The model repositories of the fleet: which there are, and loading and unloading at all of them.

A worker with a repository registers it in etcd (`common.repository`). Loading and unloading go to every worker in the mode
`explicit`; one that does not have the model is passed over as long as another one has it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dynamo.common.background import running
from dynamo.common.discovery import Instance
from dynamo.common.errors import Code, DynamoError, ModelNotFound, Unsupported, from_wire
from dynamo.common.etcd import Etcd, Events, KeyValue, Put, Reset
from dynamo.common.etcd.transport import backoff
from dynamo.common.messaging.frames import Body, Buffer
from dynamo.common.names import InstanceId, repository_prefix
from dynamo.common.repository import (
    LOAD,
    UNLOAD,
    ControlMode,
    IndexEntry,
    LoadRequest,
    RepositoryInstance,
    UnloadRequest,
    decode_repository,
    merge_indexes,
)
from dynamo.frontend.security.accounts import Account

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 10.0
_SEEN_S = 5.0
"""How long the answer waits for the model to be seen here, or to be gone, when the workers are done."""
_PASSED_OVER = frozenset({Code.NOT_FOUND, Code.UNSUPPORTED})
"""What a worker says that has nothing to do with the model."""

Ask = Callable[[InstanceId, str, str, Body, float], Awaitable[Buffer]]
"""Of the instance with this id and subject: a verb, its body, until a moment. Raises DynamoError."""


class Models(Protocol):
    """Who serves what, as the directory tells it."""

    def instances(self, name: str) -> Sequence[Instance]: ...

    def on_change(self, callback: Callable[[], None]) -> None: ...


class RepositoryView:
    """Every repository that is registered, as far as is known."""

    def __init__(self, etcd: Etcd, namespace: str | None) -> None:
        self._etcd = etcd
        self._prefix = repository_prefix(namespace)
        self._known: dict[str, tuple[RepositoryInstance, int]] = {}
        """By key, with the revision of the store at which it was put."""

    def instances(self) -> list[RepositoryInstance]:
        return [instance for instance, _ in self._known.values()]

    async def follow(self) -> None:
        """Takes over what changes in etcd, until cancelled."""
        pauses = backoff(_LONGEST_PAUSE_S)
        while True:
            try:
                async with aclosing(self._etcd.watch(self._prefix)) as changes:
                    async for change in changes:
                        pauses = backoff(_LONGEST_PAUSE_S)
                        self._apply(change)
            except DynamoError as error:
                log.error("the model repositories cannot be followed; trying on: %s", error)
            await asyncio.sleep(next(pauses))

    async def refresh(self, timeout_s: float) -> None:
        """Looks now, for who cannot wait for the watch to tell. Without etcd, what is known stays."""
        try:
            async with asyncio.timeout(timeout_s):
                listing = await self._etcd.range(self._prefix, prefix=True)
        except (DynamoError, TimeoutError) as error:
            log.warning("the model repositories could not be listed: %s", str(error) or "no answer in time")
            return
        self._take_over(listing.kvs, listing.revision)

    def _apply(self, change: Reset | Events) -> None:
        if isinstance(change, Reset):
            if change.history_lost:
                self._known.clear()
            return self._take_over(change.kvs, change.revision)
        for event in change.events:
            if isinstance(event, Put):
                self._put(event.kv)
            elif event.key in self._known and self._known[event.key][1] < event.revision:
                del self._known[event.key]

    def _take_over(self, kvs: Sequence[KeyValue], revision: int) -> None:
        """All there is at `revision`; what was put later stays."""
        listed = {kv.key for kv in kvs}
        self._known = {key: known for key, known in self._known.items() if key in listed or known[1] > revision}
        for kv in kvs:
            self._put(kv)

    def _put(self, kv: KeyValue) -> None:
        if kv.key in self._known and self._known[kv.key][1] >= kv.mod_revision:
            return
        try:
            self._known[kv.key] = decode_repository(kv.key, kv.value), kv.mod_revision
        except DynamoError as error:
            log.warning("the repository registered at %s is left out: %s", kv.key, error)
            self._known.pop(kv.key, None)


@asynccontextmanager
async def open_repositories(etcd: Etcd, namespace: str | None) -> AsyncIterator[RepositoryView]:
    """The repositories of a namespace, or of all, followed while the body runs."""
    view = RepositoryView(etcd, namespace)
    async with running(view.follow(), "repositories"):
        yield view


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one worker answered."""

    worker: RepositoryInstance
    error: DynamoError | None


class Repository:
    """All repositories as one."""

    def __init__(self, view: RepositoryView, ask: Ask, models: Models, timeout_s: float) -> None:
        """`timeout_s`: the longest that loading or unloading may take."""
        self._view = view
        self._ask = ask
        self._models = models
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        models.on_change(self._changed.set)

    def index(self, account: Account) -> list[IndexEntry]:
        """Of all models that the caller may use, loaded or not, in order of name and version."""
        return [entry for entry in merge_indexes(self._view.instances()) if account.permits(entry.name)]

    async def load(self, account: Account, request: LoadRequest) -> None:
        """Returns when every worker that has the model serves it. Raises DynamoError saying why one does not."""
        account.permit(request.model)
        done = await self._order(request.model, LOAD, msgspec.msgpack.encode(request))
        await self._see(lambda: done <= {instance.id for instance in self._models.instances(request.model)})

    async def unload(self, account: Account, request: UnloadRequest) -> None:
        """Returns when no worker serves the model and its accepted requests are over. Raises DynamoError."""
        account.permit(request.model)
        done = await self._order(request.model, UNLOAD, msgspec.msgpack.encode(request))
        await self._see(lambda: done.isdisjoint(instance.id for instance in self._models.instances(request.model)))

    async def _order(self, model: str, verb: str, body: bytes) -> set[InstanceId]:
        """Who has done it."""
        workers = [worker for worker in self._view.instances() if worker.mode is ControlMode.EXPLICIT]
        if not workers:
            raise Unsupported(
                "no worker loads and unloads models on request: that needs a --model-repository and --model-control-mode explicit"
            )
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        outcomes = await asyncio.gather(*(self._ask_one(worker, verb, body, deadline) for worker in workers))
        await self._view.refresh(_SEEN_S)  # the workers have registered what they answer
        done = {outcome.worker.id for outcome in outcomes if outcome.error is None}
        failed = [outcome.error for outcome in outcomes if outcome.error is not None]
        serious = [error for error in failed if error.code not in _PASSED_OVER]
        if serious:
            raise _summed_up(model, serious, len(workers))
        if not done:
            unsupported = [error for error in failed if error.code is Code.UNSUPPORTED]
            raise unsupported[0] if unsupported else ModelNotFound(model)
        return done

    async def _ask_one(self, worker: RepositoryInstance, verb: str, body: bytes, deadline: float) -> _Outcome:
        try:
            await self._ask(worker.id, worker.subject, verb, body, deadline)
        except DynamoError as error:
            return _Outcome(worker, error)
        return _Outcome(worker, None)

    async def _see(self, is_so: Callable[[], bool]) -> None:
        """Waits for the directory to hear of it, so that the caller's next request finds what it was told."""
        try:
            async with asyncio.timeout(_SEEN_S):
                while not is_so():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.warning("the workers have changed their models, but etcd did not tell so within %g s", _SEEN_S)


def _summed_up(model: str, errors: Sequence[DynamoError], asked: int) -> DynamoError:
    first = errors[0]
    if asked == 1:
        return first
    text = f"model '{model}': {len(errors)} of {asked} workers failed; first: {first}"
    return from_wire(first.code, text, first.retryable)
