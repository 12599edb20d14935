"""Which instances serve which models: the format of a registration, and the view of a set of registrations.

A worker registers each model it serves under its lease (`registration.py`). A frontend lists the prefix, watches from there
on, and keeps the last known view when etcd is away: that is not a failure, only a stale view (`directory.py`). This module
is plain computation, so that routers may import it.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Generic, TypeAlias, TypeVar

import msgspec

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.model_card import ModelCard
from dynamo.common.names import ROOT, Endpoint, GivenInstanceId, InstanceId
from dynamo.common.protocol import UNNAMED, OtherProtocol, check_protocol

log = logging.getLogger(__name__)

WITHDRAWN = b""
"""The value by which an owner says that its registration ends; one that disappears without it has expired."""

MAX_REGISTRATION_BYTES = 1024 * 1024
"""etcd refuses requests above 1.5 MiB."""
_OTHER_RECORD = re.compile(rf"{ROOT}/%[a-z]")
"""Keys of records that are no registrations; no encoded namespace looks like this."""
MAX_CARD_BYTES = MAX_REGISTRATION_BYTES - 64 * 1024
"""The largest card of a model that is loaded at run time: the rest of a registration, and operators' aliases, fit beside it."""
MAX_PROCESS_INSTANCES = 1024
"""Planners count processes by it: a registration with a larger number would have them end all others of its pool."""


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One live process serving one model. This is the value of a registration."""

    id: GivenInstanceId
    endpoint: Endpoint
    subject: str
    """NATS subject that takes this instance's requests."""
    card: ModelCard
    started_at: float
    """Unix time, seconds."""
    arena: str = ""
    """Token of the shared memory by which callers on the same host may send and get bodies; empty: there is none."""
    protocol: int = UNNAMED
    process: str = ""
    """Name of the process, given by what started it: that of its pod, for example; empty: it has none."""
    process_instances: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROCESS_INSTANCES)] = 1
    """How many instances the process has: what ends it ends all of them."""

    @property
    def key(self) -> str:
        """The etcd key of the registration."""
        return self.endpoint.registration_key(self.card.name, self.id)


def check_card_size(card: ModelCard) -> None:
    """Raise InvalidRequest for a card that is too large to be registered."""
    size = len(msgspec.json.encode(card))
    if size > MAX_CARD_BYTES:
        raise InvalidRequest(f"the card of model '{card.name}' has {size} bytes; at most {MAX_CARD_BYTES} are allowed")


def encode_registration(instance: Instance) -> bytes:
    """The JSON that is put under `instance.key`; raises InvalidRequest for a card that is wrong or too large."""
    instance.card.check()
    value = msgspec.json.encode(instance)
    if len(value) > MAX_REGISTRATION_BYTES:
        raise InvalidRequest(
            f"the card of model '{instance.card.name}' has {len(value)} bytes; at most {MAX_REGISTRATION_BYTES} are allowed"
        )
    try:
        _DECODER.decode(value)
    except ValueError as error:
        raise InvalidRequest(f"others could not read the card of model '{instance.card.name}': {error}") from None
    return value


class _RegistrationVersion(msgspec.Struct):
    """All that is certain of a registration of another version."""

    protocol: int = UNNAMED


_DECODER = msgspec.json.Decoder(Instance)
_VERSION_DECODER = msgspec.json.Decoder(_RegistrationVersion)


def decode_registration(key: str, value: bytes) -> Instance:
    """Return the instance registered under `key`.

    Raises InvalidRequest if the value is not a registration that belongs there, OtherProtocol if its version is too far off.
    """
    try:
        instance = _DECODER.decode(value)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError, too
        with suppress(ValueError, RecursionError):
            check_protocol(_VERSION_DECODER.decode(value).protocol)
        raise InvalidRequest(f"it cannot be read: {error}") from None
    check_protocol(instance.protocol)
    instance.card.check()
    if instance.key != key:
        raise InvalidRequest(f"its content belongs under {instance.key}")
    if instance.subject != instance.endpoint.rpc_subject(instance.id):  # callers publish there with permissions that workers lack
        raise InvalidRequest(f"{instance.subject[:200]!r} is not the subject that takes its requests")
    return instance


@dataclass(frozen=True, slots=True)
class Change:
    """The instances that `View.registered` has and had not before, and those that it had. One whose card changed is in both."""

    added: tuple[Instance, ...] = ()
    removed: tuple[Instance, ...] = ()
    revived: frozenset[InstanceId] = frozenset()
    """Instances that were marked down and have registered again."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.revived)


_Age: TypeAlias = tuple[float, InstanceId]
_K = TypeVar("_K", InstanceId, _Age)


def _contract(card: ModelCard) -> object:
    """Return what requests are checked against before they are routed to an instance."""
    return card.kind, frozenset(card.inputs), frozenset(card.outputs), card.max_batch_size, card.decoupled


def _age(instance: Instance) -> _Age:
    return instance.started_at, instance.id


def _id(instance: Instance) -> InstanceId:
    return instance.id


class _Ordered(Generic[_K]):
    """Instances in the order of a key. To add or remove one takes a binary search and a move of pointers."""

    __slots__ = ("_key", "_keys", "instances")

    def __init__(self, key: Callable[[Instance], _K]) -> None:
        self._key: Callable[[Instance], _K] = key
        self._keys: list[_K] = []
        self.instances: list[Instance] = []

    def add(self, instance: Instance) -> None:
        key = self._key(instance)
        position = bisect_right(self._keys, key)
        self._keys.insert(position, key)
        self.instances.insert(position, instance)

    def remove(self, instance: Instance) -> None:
        position = bisect_left(self._keys, self._key(instance))
        while self.instances[position] is not instance:  # an id may be registered under two endpoints
            position += 1
        del self._keys[position], self.instances[position]


class _ContractGroup:
    """The registrations of one model whose cards agree in what requests are checked against."""

    __slots__ = ("by_age", "by_id")

    def __init__(self) -> None:
        self.by_id = _Ordered(_id)
        self.by_age = _Ordered(_age)

    def __len__(self) -> int:
        return len(self.by_id.instances)

    def add(self, instance: Instance) -> None:
        self.by_id.add(instance)
        self.by_age.add(instance)

    def remove(self, instance: Instance) -> None:
        self.by_id.remove(instance)
        self.by_age.remove(instance)


_NO_GROUP = _ContractGroup()


class _ModelRegistrations:
    """The registrations of one model, grouped by contract, and the contract that counts."""

    __slots__ = ("_groups", "contract")

    def __init__(self) -> None:
        self._groups: dict[object, _ContractGroup] = {}
        self.contract: object = None
        """The contract of most registrations as of the last `choose`; None before."""

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def agreeing(self) -> _ContractGroup:
        return self._groups.get(self.contract, _NO_GROUP)

    def add(self, instance: Instance) -> None:
        self._groups.setdefault(_contract(instance.card), _ContractGroup()).add(instance)

    def remove(self, instance: Instance) -> None:
        contract = _contract(instance.card)
        group = self._groups[contract]
        group.remove(instance)
        if not group:
            del self._groups[contract]

    def choose(self) -> bool:
        """Choose the contract that counts. Return whether it is another one now."""
        before = self.contract
        if len(self._groups) == 1:
            (self.contract,) = self._groups
        else:
            self.contract = min(self._groups, key=self._rank, default=None)
        return self.contract != before

    def agrees(self, instance: Instance) -> bool:
        return len(self._groups) == 1 or _contract(instance.card) == self.contract

    def others(self) -> Iterator[Instance]:
        """Yield the registrations that are left out."""
        for contract, group in self._groups.items():
            if contract != self.contract:
                yield from group.by_id.instances

    def _rank(self, contract: object) -> tuple[int, _Age]:
        group = self._groups[contract]
        return -len(group), _age(group.by_age.instances[0])


class View:
    """Registrations, and which instances serve a name that requests use.

    Which of several cards of one model counts: requests are checked and routed as if all instances of a model were equal,
    so those whose card takes other tensors (kind, inputs, outputs, batching or decoupling differ) are left out. The card
    that most instances show wins, at a tie the one of the instance that started first. Thus a rolling upgrade that changes
    a model's inputs switches over when half of the instances are new, and every frontend comes to the same conclusion.

    Which model an alias or an adapter's name means: a model of that very name comes first, then the model whose instance
    with that alias started first; of two models of one instance, the first by name.

    A change costs what it changes, not all there is. A tuple of instances is made at the first lookup after a change.
    """

    def __init__(self) -> None:
        self._models: dict[str, _ModelRegistrations] = {}
        self._by_key: dict[str, Instance] = {}
        self._of_instance: dict[InstanceId, dict[str, Instance]] = {}
        """The registrations of each instance, by key."""
        self._by_name: dict[str, dict[str, Instance]] = {}
        """The registrations that have an alias or adapter, by that and by key."""
        self._down: set[InstanceId] = set()
        # Filled on demand, cleared by changes. Only registered names get in, since clients choose which names are looked up.
        self._serving: dict[str, dict[str, tuple[Instance, ...]]] = {}
        """By model, then by the name that was looked up."""
        self._names: dict[str, _OtherName] = {}
        self._warned: set[str] = set()
        self._other_protocols: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<View of {len(self._by_key)} registrations of {len(self._models)} models, {len(self._down)} instances down>"

    # Lookup

    def instances(self, name: str) -> tuple[Instance, ...]:
        """Return the instances that serve a model, alias or adapter now, in order of id; the same tuple until a change."""
        model = name if name in self._models else self.model_of(name)
        if model is None:
            return ()
        cached = self._serving.setdefault(model, {})
        serving = cached.get(name)
        if serving is None:
            serving = cached[name] = self._find_serving(model, name)
        return serving

    def model_of(self, name: str) -> str | None:
        """Return the model that a name stands for; None if it is not registered."""
        if name in self._models:
            return name
        other = self._other_name(name)
        return None if other is None else other.model

    def models(self) -> list[str]:
        """Return the names of the registered models, sorted, without aliases and adapters."""
        return sorted(self._models)

    def card(self, name: str) -> ModelCard | None:
        """Return the card of a model, by any of its names: that of the newest instance."""
        return next((instance.card for instance in self.newest_first(name)), None)

    def newest_first(self, name: str) -> Iterator[Instance]:
        """Yield the registrations that have a name, the newest first, including instances marked down."""
        model = self.model_of(name)
        if model is None:
            return iter(())
        instances = self._models[model].agreeing.by_age.instances if name == model else self._holders(name)
        return reversed(instances)

    def count(self, model: str) -> int:
        """Return how many registrations a model has, by its own name."""
        return len(self._models[model].agreeing) if model in self._models else 0

    def registered(self) -> Collection[Instance]:
        """Return every registration that agrees with the others of its model, including instances that are marked down."""
        return tuple(instance for model in self._models.values() for instance in model.agreeing.by_id.instances)

    def get(self, key: str) -> Instance | None:
        """Return the registration under a key; None if there is none that can be decoded."""
        return self._by_key.get(key)

    def registrations_of(self, instance: InstanceId) -> Mapping[str, Instance]:
        """Return the registrations of one instance by key."""
        return self._of_instance.get(instance, {})

    @property
    def other_protocols(self) -> Mapping[str, int]:
        """Versions of the protocol of registrations that are left out for it, by key."""
        return self._other_protocols

    @property
    def keys(self) -> KeysView[str]:
        """The keys of all registrations that can be decoded."""
        return self._by_key.keys()

    # Changes

    def apply(self, changes: Mapping[str, bytes | None]) -> Change:
        """Apply new values of keys, None for deleted ones. One that cannot be decoded, or is WITHDRAWN, counts as deleted."""
        added: dict[str, list[Instance]] = {}
        removed: dict[str, list[Instance]] = {}
        revived: set[InstanceId] = set()
        for key, value in changes.items():
            old, new = self._by_key.get(key), self._read(key, value)
            if new is not None and new.id in self._down:
                self._mark_up(new.id)
                revived.add(new.id)
            if old == new:
                continue
            if old is not None:
                removed.setdefault(old.card.name, []).append(old)
                self._remove(key, old)
            if new is not None:
                added.setdefault(new.card.name, []).append(new)
                self._add(key, new)
        for instances in removed.values():
            self._down.difference_update([instance.id for instance in instances if instance.id not in self._of_instance])
        appeared: list[Instance] = []
        left: list[Instance] = []
        for model in dict.fromkeys((*removed, *added)):
            here, gone = self._settle(model, added.get(model, []), removed.get(model, []))
            appeared += here
            left += gone
        return Change(tuple(appeared), tuple(left), frozenset(revived))

    def mark_down(self, instance: InstanceId) -> bool:
        """Leave an instance out until `mark_up` or until it registers again. Return False if that changes nothing."""
        if instance in self._down or instance not in self._of_instance:
            return False
        self._down.add(instance)
        self._clear_serving(instance)
        return True

    def mark_up(self, instance: InstanceId) -> bool:
        """Undo `mark_down`. Return False if that changes nothing."""
        if instance not in self._down:
            return False
        self._mark_up(instance)
        return True

    def is_down(self, instance: InstanceId) -> bool:
        return instance in self._down

    def _mark_up(self, instance: InstanceId) -> None:
        self._down.discard(instance)
        self._clear_serving(instance)

    def _clear_serving(self, instance: InstanceId) -> None:
        for registration in self._of_instance.get(instance, {}).values():
            self._serving.pop(registration.card.name, None)

    def _add(self, key: str, instance: Instance) -> None:
        self._by_key[key] = instance
        self._of_instance.setdefault(instance.id, {})[key] = instance
        self._models.setdefault(instance.card.name, _ModelRegistrations()).add(instance)
        for name in dict.fromkeys(other_names(instance.card)):
            self._by_name.setdefault(name, {})[key] = instance
            self._names.clear()

    def _remove(self, key: str, instance: Instance) -> None:
        del self._by_key[key]
        registrations = self._of_instance[instance.id]
        del registrations[key]
        if not registrations:
            del self._of_instance[instance.id]
        self._models[instance.card.name].remove(instance)
        for name in dict.fromkeys(other_names(instance.card)):
            holders = self._by_name[name]
            del holders[key]
            if not holders:
                del self._by_name[name]
            self._names.clear()

    def _settle(self, name: str, added: list[Instance], removed: list[Instance]) -> tuple[list[Instance], list[Instance]]:
        """Complete a change of one model's registrations. Return what it added to those that count, and removed from them."""
        self._serving.pop(name, None)
        model = self._models[name]
        contract, members = model.contract, model.agreeing.by_id.instances
        removed = [instance for instance in removed if _contract(instance.card) == contract]
        left_out: Iterable[Instance]
        if model.choose():
            self._names.clear()
            new = set(map(id, added))
            removed += [instance for instance in members if id(instance) not in new]
            added, left_out = list(model.agreeing.by_id.instances), model.others()
        else:
            left_out = [instance for instance in added if not model.agrees(instance)]
            added = [instance for instance in added if model.agrees(instance)]
        for instance in left_out:
            self._warn_once(
                instance.key,
                f"instance {instance.id:x} serves another '{name}' than most others do "
                "(kind, inputs, outputs, batching or decoupling differ); it is left out",
            )
        if not model:
            del self._models[name]
        return added, removed

    def _read(self, key: str, value: bytes | None) -> Instance | None:
        self._other_protocols.pop(key, None)
        if value is None or value == WITHDRAWN:
            self._warned.discard(key)
            return None
        if _OTHER_RECORD.match(key):  # seen by views of all namespaces
            return None
        try:
            return decode_registration(key, value)
        except OtherProtocol as error:
            self._other_protocols[key] = error.protocol
            self._warn_once(key, f"the registration {key!r} is left out: {error}")
            return None
        except DynamoError as error:
            self._warn_once(key, f"the registration {key!r} is ignored: {error}")
            return None

    def _warn_once(self, key: str, sentence: str) -> None:
        """Log once for each registration: a wrong one stays for as long as its worker lives."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s", sentence)

    def _find_serving(self, model: str, name: str) -> tuple[Instance, ...]:
        down = self._down
        serving = self._models[model].agreeing.by_id.instances if name == model else sorted(self._holders(name), key=_id)
        return tuple(serving) if not down else tuple(instance for instance in serving if instance.id not in down)

    def _holders(self, name: str) -> list[Instance]:
        """Return the registrations that have an alias or adapter, the oldest first."""
        other = self._other_name(name)
        return [] if other is None else other.holders

    def _other_name(self, name: str) -> _OtherName | None:
        """Return what an alias or adapter means; None for any other name. Costs as much as it has holders after a change."""
        other = self._names.get(name)
        if other is None:
            agreeing = [each for each in self._by_name.get(name, {}).values() if self._models[each.card.name].agrees(each)]
            if not agreeing:
                return None
            agreeing.sort(key=lambda instance: (_age(instance), instance.card.name))
            model = agreeing[0].card.name
            other = self._names[name] = _OtherName(model, [each for each in agreeing if each.card.name == model])
        return other


@dataclass(frozen=True, slots=True)
class _OtherName:
    """An alias or adapter: what is known of it without a look at all names of each instance, of which there may be thousands."""

    model: str
    holders: list[Instance]
    """The registrations of the model that have it, the oldest first."""


def other_names(card: ModelCard) -> tuple[str, ...]:
    """Return the other names by which requests may name a model: aliases and adapters."""
    return (*card.aliases, *(card.llm.adapters if card.llm is not None else ()))
