"""Repository requests to several workers, combined into one response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.discovery import Instance
from dynamo.common.errors import (
    DynamoError,
    EngineError,
    Forbidden,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    Unsupported,
)
from dynamo.common.etcd import Deleted, EtcdUnavailable, Events, KeyValue, Listing, Put, Reset
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.work import finish
from dynamo.common.repository import (
    NOT_LOADED,
    UNLOADED,
    ControlMode,
    IndexEntry,
    LoadRequest,
    ModelState,
    RepositoryInstance,
    UnloadRequest,
    decode_repository,
    merge_indexes,
)
from dynamo.frontend.fleet.repository import Repository, RepositoryView
from dynamo.frontend.security.accounts import ANONYMOUS

EXPLICIT = ControlMode.EXPLICIT


def registered(
    number: int,
    mode: ControlMode = EXPLICIT,
    revision: int = 1,
    state: str = "UNAVAILABLE",
    others: tuple[IndexEntry, ...] = (),
) -> KeyValue:
    endpoint, id_ = Endpoint(), InstanceId(number)
    entries = (IndexEntry(name="m", version="1", state=ModelState(state)), *others)
    instance = RepositoryInstance(id=id_, endpoint=endpoint, subject=endpoint.rpc_subject(id_), mode=mode, entries=entries)
    return KeyValue(instance.key, instance.encode(), revision)


class FakeEtcd:
    """Tells a list of changes, then waits for ever; lists what the test set."""

    def __init__(self, *changes: Reset | Events) -> None:
        self.changes = changes
        self.listing: Listing | None = None

    async def watch(self, prefix: str) -> AsyncIterator[Reset | Events]:
        assert prefix == "/dynamo/v1/%repositories/dynamo/"
        for change in self.changes:
            yield change

    async def range(self, key: str, *, prefix: bool) -> Listing:
        if self.listing is None:
            raise EtcdUnavailable("it is away")
        return self.listing


class FakeModels:
    def __init__(self) -> None:
        self.serving: list[int] = []
        self.late: set[str] = set()
        """Models that the directory does not show yet."""
        self.tell: Callable[[], None] = lambda: None

    def instances(self, name: str) -> Sequence[Instance]:
        endpoint, card = Endpoint(), ModelCard(name=name, kind=ModelKind.TENSOR)
        ids = [] if name in self.late else map(InstanceId, self.serving)
        return [Instance(id=i, endpoint=endpoint, subject=endpoint.rpc_subject(i), card=card, started_at=0) for i in ids]

    def on_change(self, callback: Callable[[], None]) -> None:
        self.tell = callback


async def view_of(*changes: Reset | Events) -> RepositoryView:
    """After these changes."""
    etcd: Any = FakeEtcd(*changes)
    view = RepositoryView(etcd, "dynamo")
    async for change in etcd.watch("/dynamo/v1/%repositories/dynamo/"):
        view.apply(change)
    return view


def ids(view: RepositoryView) -> set[int]:
    return {instance.id for instance in view.instances()}


async def test_the_view_follows_what_is_registered() -> None:
    both = Reset((registered(1), registered(2, revision=4)), 5)
    assert ids(await view_of(both)) == {1, 2}
    gone = Events((Deleted(registered(1).key, 6),), 6)
    assert ids(await view_of(both, gone)) == {2}
    assert ids(await view_of(both, gone, Events((Put(registered(3, revision=7)),), 7))) == {2, 3}
    assert ids(await view_of(both, Reset((registered(2),), 9))) == {2}
    broken = KeyValue(registered(1).key, b"{", 7)
    assert ids(await view_of(both, Events((Put(broken),), 7))) == {2}


async def test_events_older_than_the_last_listing_are_ignored() -> None:
    etcd = FakeEtcd()
    view = RepositoryView(etcd, "dynamo")  # type: ignore[arg-type]
    etcd.listing = Listing((registered(1, revision=8, state="READY"),), 9)
    await view.refresh(1.0)
    view.apply(Events((Put(registered(1, revision=3)), Deleted(registered(1).key, 4)), 4))
    [one] = view.instances()
    assert one.entries[0].state is ModelState.READY
    etcd.listing = None
    await view.refresh(1.0)  # etcd is away: what is known stays
    assert ids(view) == {1}


class Fleet:
    """Workers 1, 2, … that respond with these errors; None: done."""

    def __init__(self, *errors: DynamoError | None, mode: ControlMode = EXPLICIT) -> None:
        self.errors = errors
        self.mode = mode
        self.models = FakeModels()
        self.requests: list[tuple[int, str]] = []
        self.etcd = FakeEtcd()
        self.registers_after_load: KeyValue | None = None

    async def request(self, instance: InstanceId, subject: str, verb: str, body: Any, deadline: float) -> bytes:
        assert subject == Endpoint().rpc_subject(instance)
        self.requests.append((instance, verb))
        error = self.errors[instance - 1]
        if error is not None:
            raise error
        self.models.serving = [*self.models.serving, instance] if verb == "repository_load" else []
        if self.registers_after_load is not None:
            self.etcd.listing = Listing((self.registers_after_load,), self.registers_after_load.mod_revision)
        self.models.tell()
        return b""

    async def repository(self) -> Repository:
        kvs = tuple(registered(number, self.mode) for number in range(1, len(self.errors) + 1))
        view = RepositoryView(self.etcd, "dynamo")  # type: ignore[arg-type]
        view.apply(Reset(kvs, 1))
        return Repository(view, self.request, self.models, 5.0)


GONE, BROKEN = ModelNotFound("m"), InvalidRequest("no weights")


@pytest.mark.parametrize("errors", [(None,), (None, None), (GONE, None), (Unsupported("not here"), None)])
async def test_a_model_is_loaded_by_every_worker_that_has_it(errors: tuple[DynamoError | None, ...]) -> None:
    fleet = Fleet(*errors)
    repository = await fleet.repository()
    await repository.load(ANONYMOUS, LoadRequest(model="m"))
    assert fleet.requests == [(number, "repository_load") for number in range(1, len(errors) + 1)]
    await repository.unload(ANONYMOUS, UnloadRequest(model="m"))
    assert fleet.models.serving == []


async def test_a_load_returns_when_the_ensembles_that_came_back_with_the_model_are_visible() -> None:
    fleet = Fleet(None)
    repository = await fleet.repository()
    ensemble = IndexEntry(name="ensemble", version="1", state=ModelState.READY)
    fleet.registers_after_load = registered(1, revision=9, state="READY", others=(ensemble,))
    fleet.models.late = {"ensemble"}
    loading = asyncio.ensure_future(repository.load(ANONYMOUS, LoadRequest(model="m")))
    for _ in range(100):
        await asyncio.sleep(0)
    assert fleet.models.serving == [1]
    assert not loading.done()
    fleet.models.late.clear()
    fleet.models.tell()
    await loading


@pytest.mark.parametrize(
    ("errors", "kind", "text"),
    [
        ((GONE, GONE), EngineError, "failed to load 'm', failed to poll from model repository"),
        ((BROKEN,), InvalidRequest, "no weights"),
        ((None, BROKEN, GONE), InvalidRequest, "model 'm': 1 of 3 workers failed; first: no weights"),
        ((None, EngineError("boom")), EngineError, "1 of 2 workers failed; first: boom"),
        ((Unsupported("no root"), GONE), Unsupported, "no root"),
        ((Forbidden("no"), GONE), Forbidden, "1 of 2 workers failed; first: no"),
        ((None, Unavailable("left")), Unavailable, "first: left"),
    ],
)
async def test_the_error_of_a_worker_is_returned(
    errors: tuple[DynamoError | None, ...], kind: type[DynamoError], text: str
) -> None:
    with pytest.raises(kind) as error:
        await (await Fleet(*errors).repository()).load(ANONYMOUS, LoadRequest(model="m"))
    assert text in str(error.value)


@pytest.mark.parametrize("fleet", [Fleet(), Fleet(None, mode=ControlMode.NONE), Fleet(None, mode=ControlMode.POLL)])
async def test_without_a_worker_in_explicit_mode_no_request_is_sent(fleet: Fleet) -> None:
    with pytest.raises(Unsupported, match="--model-control-mode explicit"):
        await (await fleet.repository()).load(ANONYMOUS, LoadRequest(model="m"))
    assert not fleet.requests


_ENTRIES = st.builds(
    IndexEntry,
    name=st.sampled_from(["a", "b"]),
    version=st.sampled_from(["", "1", "2"]),
    state=st.sampled_from(ModelState),
    reason=st.sampled_from(["", NOT_LOADED, UNLOADED, "it is broken"]),
)
_INDEXES = st.lists(_ENTRIES, max_size=4, unique_by=lambda entry: (entry.name, entry.version))
_CHANGES = st.lists(st.tuples(st.integers(1, 3), st.none() | _INDEXES, st.booleans()), max_size=12)


@given(_CHANGES)
def test_what_has_failed_is_known_without_a_look_at_all_there_is(
    changes: list[tuple[int, list[IndexEntry] | None, bool]],
) -> None:
    """One look at 40 indexes of 20,000 models each took 13 s, at each query of readiness, which needs no key."""
    view, listed = RepositoryView(FakeEtcd(), "dynamo"), dict[str, KeyValue]()  # type: ignore[arg-type]
    for revision, (number, entries, by_listing) in enumerate(changes, 1):
        instance = msgspec.structs.replace(decode_of(registered(number)), entries=tuple(entries or ()))
        listed.pop(instance.key, None)
        if entries is not None:
            listed[instance.key] = KeyValue(instance.key, instance.encode(), revision)
        event = Deleted(instance.key, revision) if entries is None else Put(listed[instance.key])
        view.apply(Reset(tuple(listed.values()), revision) if by_listing else Events((event,), revision))
        merged = finish(merge_indexes(view.instances(), lambda name: True))
        assert view.has_failed == any(entry.is_wanted for entry in merged)
        for model in ("a", "b", "c"):
            for version in ("", "1", "2"):
                of_model = [
                    e for each in view.instances() for e in each.entries if e.name == model and version in ("", e.version)
                ]
                assert view.states(model, version) == {entry.state for entry in of_model}


def decode_of(kv: KeyValue) -> RepositoryInstance:
    return decode_repository(kv.key, kv.value)
