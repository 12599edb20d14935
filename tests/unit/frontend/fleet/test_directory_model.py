"""The directory against a model of etcd: whatever happens to registrations and to the watch, the view ends up as the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar, cast

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dynamo.common.discovery import WITHDRAWN, Instance, decode_registration, encode_registration
from dynamo.common.etcd import Deleted, Etcd, Events, KeyValue, Put, Reset
from dynamo.common.etcd.errors import EtcdUnavailable
from dynamo.common.etcd.kv import Listing
from dynamo.common.etcd.lease import DEFAULT_TTL_S
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.fleet.directory import ABSENT_S, COALESCE_S, DOWN_S, Directory, open_directory
from dynamo.frontend.fleet.presence import Silent, Unknown
from tests.support.virtual_time import VirtualTimeLoop, in_virtual_time

T = TypeVar("T")
ENDPOINT = Endpoint()
RECONCILE_S = 7.0
RENEWAL_S = DEFAULT_TTL_S / 3
"""A worker learns within this time that its lease is gone."""
SETTLED_S = 2 * max(ABSENT_S, DOWN_S)
GARBAGE = b"garbage"
_UNREADABLE = (GARBAGE, WITHDRAWN)


def variant(number: int, model: str, version: str, size: int, adapter: str) -> Instance:
    """Return a registration; those of a model that differ in size contradict one another."""
    inputs = (TensorSpec(name="x", datatype="FP32", shape=(size,)),)
    aliases = (adapter,) if adapter else ()
    card = ModelCard(name=model, kind=ModelKind.TENSOR, versions=(version,), inputs=inputs, aliases=aliases)
    id_ = InstanceId(number)
    # Two instances each have started at the same time.
    return Instance(id=id_, endpoint=ENDPOINT, subject=ENDPOINT.rpc_subject(id_), card=card, started_at=float(number // 2))


registrations = st.builds(
    variant,
    number=st.integers(1, 6),
    model=st.sampled_from(["a", "b"]),
    version=st.sampled_from(["1", "2"]),
    size=st.sampled_from([4, 8]),
    adapter=st.sampled_from(["", "shared"]),
)


def _other_value(kv: KeyValue) -> bytes:
    """Return the registration with the other version of the model."""
    if kv.value in _UNREADABLE:
        return kv.value
    instance = decode_registration(kv.key, kv.value)
    versions = ("2",) if instance.card.versions == ("1",) else ("1",)
    return encode_registration(msgspec.structs.replace(instance, card=msgspec.structs.replace(instance.card, versions=versions)))


class Store:
    """etcd, with a watch that delivers what a test lets through."""

    def __init__(self) -> None:
        self.kvs: dict[str, KeyValue] = {}
        self.revision = 1
        self.age = 0
        """How often the history was lost."""
        self._log: list[Events] = []
        self._released = 0
        self.hold_back = False
        """Let the watch deliver nothing."""
        self._connected = True
        self._compacted = 0
        self._changed = asyncio.Event()

    # What workers and operators do

    def put(self, key: str, value: bytes) -> None:
        self.revision += 1
        self.kvs[key] = kv = KeyValue(key, value, self.revision)
        self._record(Put(kv))

    def delete(self, *keys: str) -> None:
        """Delete keys in one revision, as when a lease expires."""
        present = [key for key in keys if key in self.kvs]
        if present:
            self.revision += 1
            for key in present:
                del self.kvs[key]
            self._record(*(Deleted(key, self.revision) for key in present))

    def compact(self) -> None:
        self._compacted = self.revision

    def lose_history(self, kept: int) -> None:
        """Begin anew with the first few keys, at a revision that was there before."""
        kvs = list(self.kvs.values())[:kept]
        self._begin_anew([KeyValue(kv.key, kv.value, 2 + number) for number, kv in enumerate(kvs)], 1 + kept)

    def rewrite_history(self) -> None:
        """Begin anew with another past, in which the last changes had the same revisions and other values."""
        self._begin_anew([KeyValue(kv.key, _other_value(kv), kv.mod_revision) for kv in self.kvs.values()], self.revision)

    def _begin_anew(self, kvs: Sequence[KeyValue], revision: int) -> None:
        self.age += 1
        self.revision = self._compacted = self._released = revision
        self.kvs = {kv.key: kv for kv in kvs}
        self._log = []
        self._changed.set()

    def connect(self, connected: bool) -> None:
        self._connected = connected
        self._changed.set()

    def release(self, revision: int) -> None:
        """Let the watch deliver changes up to `revision`."""
        self._released = max(self._released, revision)
        self._changed.set()

    def _record(self, *events: Put | Deleted) -> None:
        self._log.append(Events(events, self.revision))
        self._changed.set()

    # What the directory calls

    async def range(self, key: str, *, prefix: bool) -> Listing:
        if not self._connected:
            raise EtcdUnavailable("etcd is away")
        return Listing(tuple(self.kvs.values()), self.revision)

    async def watch(
        self, prefix: str, on_connected: Callable[[bool], None] = lambda connected: None
    ) -> AsyncGenerator[Events | Reset, None]:
        seen, age, was_connected = 0, self.age, False
        while True:
            self._changed.clear()
            if self._connected != was_connected:
                was_connected = self._connected
                on_connected(was_connected)
                if was_connected and (not seen or seen < self._compacted or age != self.age):
                    history_lost, age, seen = age != self.age, self.age, self.revision
                    yield Reset(tuple(self.kvs.values()), self.revision, history_lost)
                    continue
            elif self._connected and age != self.age:  # the old store closes the connection
                was_connected = False
                continue
            delivers = self._connected and not self.hold_back
            due = [events for events in self._log if seen < events.revision <= self._released] if delivers else []
            if due:
                seen = due[0].revision
                yield due[0]
            else:
                await self._changed.wait()


class Workers:
    """What instances respond when they are queried for the models that they serve: by default nothing."""

    def __init__(self) -> None:
        self.serving: dict[int, tuple[str, ...] | Exception | None] = {}
        self.queries = 0

    async def served_by(self, instance: Instance) -> tuple[str, ...] | None:
        self.queries += 1
        await asyncio.sleep(0.01)
        response = self.serving.get(instance.id, Silent())
        if isinstance(response, Exception):
            raise response
        return response


class DirectoryAndStore(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualTimeLoop()
        self.run(self._open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def _open(self) -> None:
        self.store = Store()
        self.stack = AsyncExitStack()
        etcd = cast(Etcd, self.store)
        self.directory: Directory = await self.stack.enter_async_context(open_directory(etcd, None, reconcile_s=RECONCILE_S))
        self.workers = Workers()
        self.directory.confirm_by(self.workers.served_by)
        self.summed: list[Instance] = []
        """What the changes, added up, say to be registered."""
        self.directory.on_registrations(self._changed)

    def _changed(self, added: Sequence[Instance], removed: Sequence[Instance]) -> None:
        for instance in removed:
            self.summed.remove(instance)
        self.summed += added

    @initialize(instances=st.lists(registrations, max_size=6))
    def begin(self, instances: list[Instance]) -> None:
        for instance in instances:
            self.put(instance)

    @rule(instance=registrations)
    def put(self, instance: Instance) -> None:
        self.store.put(instance.key, encode_registration(instance))

    @rule(instances=st.lists(registrations, min_size=3, max_size=8, unique_by=lambda instance: instance.key))
    def put_many_at_once(self, instances: list[Instance]) -> None:
        """Let one change of the view have them all: the contract of a model may change while its instances do."""
        for instance in instances:
            self.put(instance)
        self.deliver(0)

    @rule(
        numbers=st.sets(st.integers(1, 6), min_size=2, max_size=4),
        model=st.sampled_from(["a", "b"]),
        size=st.sampled_from([4, 8]),
        adapter=st.sampled_from(["", "", "shared"]),
    )
    def roll_out(self, numbers: set[int], model: str, size: int, adapter: str) -> None:
        """Register several equal instances: the contract of their model may change without a change of aliases."""
        for number in numbers:
            self.put(variant(number, model, "1", size, adapter))
        self.deliver(0)

    @rule(instance=registrations)
    def put_garbage(self, instance: Instance) -> None:
        self.store.put(instance.key, GARBAGE)

    @rule(instance=registrations)
    def delete(self, instance: Instance) -> None:
        self.store.delete(instance.key)

    @rule(instance=registrations, is_deleted=st.booleans())
    def withdraw(self, instance: Instance, is_deleted: bool) -> None:
        self.store.put(instance.key, WITHDRAWN)
        if is_deleted:
            self.store.delete(instance.key)

    @rule(number=st.integers(1, 6))
    def expire_lease(self, number: int) -> None:
        self.store.delete(*(key for key in self.store.kvs if key.endswith(f"/{number:x}")))

    @rule(number=st.integers(1, 6), response=st.sampled_from([(), ("a",), ("a", "b"), None, Silent(), Unknown()]))
    def answer(self, number: int, response: tuple[str, ...] | Exception | None) -> None:
        self.workers.serving[number] = response

    @rule()
    def compact(self) -> None:
        self.store.compact()

    @rule(connected=st.booleans())
    def cut_or_mend(self, connected: bool) -> None:
        self.store.connect(connected)
        self.wait(0.0)

    @rule(kept=st.integers(0, 3))
    def lose_history(self, kept: int) -> None:
        self.store.lose_history(min(kept, len(self.store.kvs)))
        self.wait(0.0)

    @rule()
    def rewrite_history(self) -> None:
        self.store.rewrite_history()
        self.wait(0.0)

    @rule(held_back=st.integers(0, 3))
    def deliver(self, held_back: int) -> None:
        self.store.release(self.store.revision - held_back)
        self.wait(0.0)

    @rule(number=st.integers(1, 6), is_down=st.booleans())
    def mark(self, number: int, is_down: bool) -> None:
        async def mark() -> None:
            await asyncio.sleep(2 * COALESCE_S)  # so that nothing else waits to be applied
            mark_one = self.directory.mark_down if is_down else self.directory.mark_up
            mark_one(InstanceId(number))

        self.run(mark())
        if is_down:
            assert all(instance.id != number for name in ("a", "b") for instance in self.directory.instances(name))

    @rule(seconds=st.sampled_from([0.0, 0.02, 0.1, 8.0]))
    def wait(self, seconds: float) -> None:
        async def pass_time() -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            await asyncio.sleep(seconds)

        self.run(pass_time())

    @rule()
    def settle(self) -> None:
        """Mend everything, and compare the view with the store."""
        self.workers.serving.clear()
        self.store.connect(True)
        self.store.release(self.store.revision)
        self.wait(SETTLED_S)
        for name, expected in expected_view(self.store).items():
            assert list(self.directory.instances(name)) == expected
        for name in ("a", "b"):
            newest = max(self.directory.instances(name), key=_age, default=None)
            assert self.directory.card(name) == (None if newest is None else newest.card)
            assert self.directory.count(name) == len(self.directory.instances(name))

    @invariant()
    def changes_add_up_to_the_view(self) -> None:
        assert sorted(self.summed, key=_key) == sorted(self.directory.registered(), key=_key)

    @invariant()
    def only_registered_instances_serve(self) -> None:
        registered = set(map(_key, self.directory.registered()))
        for name in ("a", "b", "shared"):
            assert {instance.key for instance in self.directory.instances(name)} <= registered

    @invariant()
    def an_alias_means_the_model_whose_instance_with_it_is_the_oldest(self) -> None:
        with_alias = [instance for instance in self.directory.registered() if instance.card.aliases]
        oldest = min(with_alias, key=lambda instance: (*_age(instance), instance.card.name), default=None)
        card = self.directory.card("shared")
        assert (card and card.name) == (oldest and oldest.card.name)

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            self.run(self.stack.aclose())
            self.loop.close()


def _key(instance: Instance) -> str:
    return instance.key


def _age(instance: Instance) -> tuple[float, InstanceId]:
    return instance.started_at, instance.id


def expected_view(store: Store) -> dict[str, list[Instance]]:
    """Return the instances that serve each model, in order of id: those of the most frequent size, at a tie of the oldest.

    And those that serve `shared`, the alias: of the model whose instance with it is the oldest.
    """
    result: dict[str, list[Instance]] = {"a": [], "b": []}
    readable = [decode_registration(kv.key, kv.value) for kv in store.kvs.values() if kv.value not in _UNREADABLE]
    for name in result:
        groups: dict[int, list[Instance]] = {}
        for instance in readable:
            if instance.card.name == name:
                groups.setdefault(instance.card.inputs[0].shape[0], []).append(instance)
        if groups:
            chosen = min(groups.values(), key=lambda group: (-len(group), min(map(_age, group))))
            result[name] = sorted(chosen, key=lambda instance: instance.id)
    with_alias = [instance for instances in result.values() for instance in instances if instance.card.aliases]
    oldest = min(with_alias, key=lambda instance: (*_age(instance), instance.card.name), default=None)
    result["shared"] = [] if oldest is None else [each for each in with_alias if each.card.name == oldest.card.name]
    return result


@in_virtual_time
async def test_marks_of_many_instances_are_applied_together() -> None:
    store, made = Store(), [variant(number, "a", "1", 4, "") for number in range(500)]
    for instance in made:
        store.put(instance.key, encode_registration(instance))
    async with open_directory(cast(Etcd, store), None) as directory:
        await directory.ready.wait()
        changes: list[int] = []
        directory.on_change(lambda: changes.append(len(directory.instances("a"))))
        await asyncio.sleep(2 * COALESCE_S)
        for instance in made[:400]:
            directory.mark_down(instance.id)
        directory.mark_up(made[399].id)
        await asyncio.sleep(2 * COALESCE_S)
        assert changes == [499, 101]
        for instance in made:
            directory.mark_up(instance.id)
        await asyncio.sleep(2 * COALESCE_S)
        assert changes == [499, 101, 102, 500]


@asynccontextmanager
async def one_registered() -> AsyncIterator[tuple[Store, Directory, Instance]]:
    """A store with one registration, whose changes are delivered at once, and a directory that has it."""
    store, made = Store(), variant(1, "a", "1", 4, "")
    store.put(made.key, encode_registration(made))
    async with open_directory(cast(Etcd, store), None, reconcile_s=RECONCILE_S) as directory:
        await directory.ready.wait()
        store.release(10**6)
        await asyncio.sleep(2 * COALESCE_S)
        yield store, directory, made


@in_virtual_time
async def test_an_instance_that_lost_its_lease_serves_on_and_its_return_is_no_change() -> None:
    async with one_registered() as (store, directory, instance):
        changes: list[Sequence[Instance]] = []
        directory.on_registrations(lambda added, removed: changes.append([*added, *removed]))
        store.delete(instance.key)
        await asyncio.sleep(1.2 * RENEWAL_S)
        assert list(directory.instances("a")) == [instance]
        store.put(instance.key, encode_registration(instance))
        await asyncio.sleep(2 * ABSENT_S)
        assert list(directory.instances("a")) == [instance]
        assert not changes


@in_virtual_time
async def test_an_instance_whose_lease_expired_and_that_does_not_return_is_gone_soon() -> None:
    async with one_registered() as (store, directory, instance):
        store.delete(instance.key)
        await asyncio.sleep(1.1 * ABSENT_S)
        assert not directory.registered()


@in_virtual_time
async def test_an_instance_that_is_down_is_gone_with_its_lease() -> None:
    async with one_registered() as (store, directory, instance):
        directory.mark_down(instance.id)
        await asyncio.sleep(2 * COALESCE_S)
        store.delete(instance.key)
        await asyncio.sleep(2 * COALESCE_S)
        assert not directory.registered()


@pytest.mark.parametrize("is_deleted", [True, False])
@in_virtual_time
async def test_a_withdrawn_instance_is_gone_at_once(is_deleted: bool) -> None:
    async with one_registered() as (store, directory, instance):
        store.put(instance.key, WITHDRAWN)
        if is_deleted:
            store.delete(instance.key)
        await asyncio.sleep(2 * COALESCE_S)
        assert not directory.registered()


@in_virtual_time
async def test_a_registration_that_expires_in_the_moment_of_its_first_sight_ends_too() -> None:
    async with one_registered() as (store, directory, _):
        other = variant(2, "a", "1", 4, "")
        store.put(other.key, encode_registration(other))
        store.delete(other.key)
        await asyncio.sleep(1.1 * ABSENT_S)
        assert [instance.id for instance in directory.registered()] == [1]


AbsenceBegins = Callable[[Store, Instance], None]


def lease_expires(store: Store, instance: Instance) -> None:
    store.delete(instance.key)


def listing_lacks_it(store: Store, instance: Instance) -> None:
    """The lease expires while the watch is cut, and what happened meanwhile is compacted when it is back."""
    store.connect(False)
    store.delete(instance.key)
    store.compact()
    asyncio.get_running_loop().call_later(1.0, store.connect, True)


def watch_misses_it(store: Store, instance: Instance) -> None:
    """Only the periodic listing shows it."""
    store.hold_back = True
    store.delete(instance.key)


def data_is_lost(store: Store, instance: Instance) -> None:
    store.lose_history(0)


ABSENCES = pytest.mark.parametrize("begin", [lease_expires, listing_lacks_it, watch_misses_it, data_is_lost])
LONG_S = 20 * RECONCILE_S


@ABSENCES
@in_virtual_time
async def test_an_instance_that_is_absent_from_etcd_serves_for_as_long_as_it_responds(begin: AbsenceBegins) -> None:
    async with one_registered() as (store, directory, instance):
        workers = Workers()
        directory.confirm_by(workers.served_by)
        workers.serving[instance.id] = ("a",)
        begin(store, instance)
        await asyncio.sleep(LONG_S)
        assert list(directory.instances("a")) == [instance]
        workers.serving[instance.id] = Silent()
        await asyncio.sleep(1.1 * ABSENT_S)
        assert not directory.registered()


@ABSENCES
@in_virtual_time
async def test_an_absent_instance_that_registers_again_is_queried_no_more(begin: AbsenceBegins) -> None:
    async with one_registered() as (store, directory, instance):
        workers = Workers()
        directory.confirm_by(workers.served_by)
        workers.serving[instance.id] = ("a",)
        begin(store, instance)
        await asyncio.sleep(3 * RECONCILE_S)
        store.hold_back = False
        store.put(instance.key, encode_registration(instance))
        await asyncio.sleep(2 * RECONCILE_S)
        queries = workers.queries
        workers.serving.clear()
        await asyncio.sleep(LONG_S)
        assert workers.queries == queries > 0
        assert list(directory.instances("a")) == [instance]


@ABSENCES
@pytest.mark.parametrize("served", [(), ("another",)])
@in_virtual_time
async def test_an_absent_instance_that_says_it_serves_the_model_no_more_is_gone_at_once(
    begin: AbsenceBegins, served: tuple[str, ...]
) -> None:
    async with one_registered() as (store, directory, instance):
        workers, gone_after_s = Workers(), []
        directory.confirm_by(workers.served_by)
        loop = asyncio.get_running_loop()
        asked_at: list[float] = []

        async def served_by(instance: Instance) -> tuple[str, ...]:
            asked_at.append(loop.time())
            return served

        directory.confirm_by(served_by)
        directory.on_registrations(lambda added, removed: gone_after_s.append(loop.time() - asked_at[0]))
        begin(store, instance)
        await asyncio.sleep(2 * RECONCILE_S)
        assert gone_after_s == [0.0]


@in_virtual_time
async def test_an_absent_instance_is_kept_while_nothing_can_be_said_about_it() -> None:
    async with one_registered() as (store, directory, instance):
        workers = Workers()
        directory.confirm_by(workers.served_by)
        workers.serving[instance.id] = Unknown()
        store.delete(instance.key)
        await asyncio.sleep(LONG_S)
        assert list(directory.instances("a")) == [instance]


@in_virtual_time
async def test_of_an_instances_models_those_are_kept_that_it_serves() -> None:
    async with one_registered() as (store, directory, instance):
        workers, other = Workers(), variant(1, "b", "1", 4, "")
        directory.confirm_by(workers.served_by)
        store.put(other.key, encode_registration(other))
        await asyncio.sleep(2 * COALESCE_S)
        workers.serving[1] = ("b",)
        store.delete(instance.key, other.key)
        await asyncio.sleep(LONG_S)
        assert list(directory.registered()) == [other]


@pytest.mark.parametrize("end", [lease_expires, listing_lacks_it, watch_misses_it])
@in_virtual_time
async def test_a_registration_of_another_protocol_is_told_of_until_it_is_gone(end: AbsenceBegins) -> None:
    async with one_registered() as (store, directory, instance):
        store.put(instance.key, encode_registration(msgspec.structs.replace(instance, protocol=99)))
        await asyncio.sleep(2 * COALESCE_S)
        assert (list(directory.registered()), directory.other_protocols()) == ([], [99])
        end(store, instance)
        await asyncio.sleep(2 * RECONCILE_S)
        assert directory.other_protocols() == []


TestDirectoryAndStore = DirectoryAndStore.TestCase
TestDirectoryAndStore.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
