"""Which instances serve which models: the format of a registration, and the view of a set of registrations.

A worker registers each model it serves under its lease (`registration.py`). A frontend lists the prefix, watches from there
on, and keeps the last known view when etcd is away: that is not a failure, only a stale view (`directory.py`). This module
is plain computation, so that routers may import it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, KeysView, Mapping
from dataclasses import dataclass

import msgspec

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.model_card import ModelCard
from dynamo.common.names import REPOSITORY_ROOT, Endpoint, InstanceId

log = logging.getLogger(__name__)

MAX_REGISTRATION_BYTES = 1024 * 1024
"""etcd refuses requests above 1.5 MiB."""
_SUBJECT = re.compile(r"[^\s*>]+")


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One live process serving one model. This is the value of a registration."""

    id: InstanceId
    endpoint: Endpoint
    subject: str
    """NATS subject that takes this instance's requests."""
    card: ModelCard
    started_at: float
    """Unix time, seconds."""

    @property
    def key(self) -> str:
        """The etcd key of the registration."""
        return self.endpoint.registration_key(self.card.name, self.id)


def encode_registration(instance: Instance) -> bytes:
    """The JSON that is put under `instance.key`; raises InvalidRequest for a card that is wrong or too large."""
    instance.card.check()
    value = msgspec.json.encode(instance)
    if len(value) > MAX_REGISTRATION_BYTES:
        raise InvalidRequest(
            f"the card of model '{instance.card.name}' has {len(value)} bytes; at most {MAX_REGISTRATION_BYTES} are allowed"
        )
    return value


_DECODER = msgspec.json.Decoder(Instance)


def decode_registration(key: str, value: bytes) -> Instance:
    """Return the instance registered under `key`. Raises InvalidRequest if the value is not a registration that belongs there."""
    try:
        instance = _DECODER.decode(value)
    except (ValueError, RecursionError) as error:  # text that is not UTF-8 is a ValueError, too
        raise InvalidRequest(f"it cannot be read: {error}") from None
    instance.card.check()
    if instance.key != key:
        raise InvalidRequest(f"its content belongs under {instance.key}")
    if not _SUBJECT.fullmatch(instance.subject):
        raise InvalidRequest(f"{instance.subject!r} is not a subject to send requests to")
    return instance


@dataclass(frozen=True, slots=True)
class Change:
    """Registrations that were added and removed. One whose content changed is in both."""

    added: tuple[Instance, ...] = ()
    removed: tuple[Instance, ...] = ()
    revived: frozenset[InstanceId] = frozenset()
    """Instances that were marked down and have registered again."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.revived)


class View:
    """Registrations, and which instances serve a name that requests use.

    Which of several cards of one model counts: requests are checked and routed as if all instances of a model were equal,
    so those whose card takes other tensors (kind, inputs, outputs, batching or decoupling differ) are left out. The card
    that most instances show wins, at a tie the one of the instance that started first. Thus a rolling upgrade that changes
    a model's inputs switches over when half of the instances are new, and every frontend comes to the same conclusion.

    Which model an alias or an adapter's name means: a model of that very name comes first, then the model whose instance
    with that alias started first.
    """

    def __init__(self) -> None:
        self._by_model: dict[str, dict[str, Instance]] = {}
        self._by_key: dict[str, Instance] = {}
        self._down: set[InstanceId] = set()
        # Filled on demand, cleared by changes. Only registered names get in, since clients choose which names are looked up.
        self._agreeing: dict[str, tuple[Instance, ...]] = {}
        self._serving: dict[str, tuple[Instance, ...]] = {}
        self._names: dict[str, str] | None = None
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"<View of {len(self._by_key)} registrations of {len(self._by_model)} models, {len(self._down)} instances down>"

    # Lookup

    def instances(self, name: str) -> tuple[Instance, ...]:
        """Return the instances that serve a model, alias or adapter now, in order of id; the same tuple until a change."""
        cached = self._serving.get(name)
        if cached is not None:
            return cached
        model = self.model_of(name)
        if model is None:
            return ()
        up = (i for i in self._agreeing_on(model) if i.id not in self._down)
        serving = tuple(i for i in up if name == model or name in other_names(i.card))
        self._serving[name] = serving
        return serving

    def model_of(self, name: str) -> str | None:
        """Return the model that a name stands for; None if it is not registered."""
        if name in self._by_model:
            return name
        if self._names is None:
            self._names = self._find_names()
        return self._names.get(name)

    def models(self) -> list[str]:
        """Return the names of the registered models, sorted, without aliases and adapters."""
        return sorted(self._by_model)

    def card(self, name: str) -> ModelCard | None:
        """Return the card of a model, by any of its names: that of the newest instance."""
        model = self.model_of(name)
        return None if model is None else max(self._agreeing_on(model), key=_age).card

    def registered(self) -> Collection[Instance]:
        """Return every registration that agrees with the others of its model, including instances that are marked down."""
        return tuple(instance for model in self._by_model for instance in self._agreeing_on(model))

    @property
    def keys(self) -> KeysView[str]:
        """The keys of all registrations that can be decoded."""
        return self._by_key.keys()

    # Changes

    def apply(self, changes: Mapping[str, bytes | None]) -> Change:
        """Apply new values of keys, None for deleted ones. A value that cannot be decoded counts as deleted, and is logged."""
        added: list[Instance] = []
        removed: list[Instance] = []
        revived: set[InstanceId] = set()
        for key, value in changes.items():
            old, new = self._by_key.get(key), self._read(key, value)
            if new is not None and new.id in self._down:
                self._mark_up(new.id)
                revived.add(new.id)
            if old == new:
                continue
            if old is not None:
                removed.append(old)
                self._forget(key, old)
            if new is not None:
                added.append(new)
                self._by_key[key] = new
                self._by_model.setdefault(new.card.name, {})[key] = new
        if added or removed:
            self._names = None
            self._serving.clear()
            for instance in (*added, *removed):
                self._agreeing.pop(instance.card.name, None)
            self._down.intersection_update([instance.id for instance in self._by_key.values()])
        return Change(tuple(added), tuple(removed), frozenset(revived))

    def mark_down(self, instance: InstanceId) -> bool:
        """Leave an instance out until `mark_up` or until it registers again. Return False if that changes nothing."""
        if instance in self._down or all(registered.id != instance for registered in self._by_key.values()):
            return False
        self._down.add(instance)
        self._serving.clear()
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
        self._serving.clear()

    def _forget(self, key: str, instance: Instance) -> None:
        del self._by_key[key]
        of_model = self._by_model[instance.card.name]
        del of_model[key]
        if not of_model:
            del self._by_model[instance.card.name]

    def _read(self, key: str, value: bytes | None) -> Instance | None:
        if value is None:
            self._warned.discard(key)
            return None
        if key.startswith(REPOSITORY_ROOT):  # seen by views of all namespaces
            return None
        try:
            return decode_registration(key, value)
        except DynamoError as error:
            self._warn_once(key, f"the registration {key!r} is ignored: {error}")
            return None

    def _warn_once(self, key: str, sentence: str) -> None:
        """Log once for each registration: a wrong one stays for as long as its worker lives."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning("%s", sentence)

    def _agreeing_on(self, model: str) -> tuple[Instance, ...]:
        agreeing = self._agreeing.get(model)
        if agreeing is None:
            agreeing = self._agreeing[model] = self._agree(self._by_model[model])
        return agreeing

    def _agree(self, registrations: Mapping[str, Instance]) -> tuple[Instance, ...]:
        groups: dict[object, list[Instance]] = {}
        for instance in registrations.values():
            groups.setdefault(_contract(instance.card), []).append(instance)
        oldest = {contract: min(map(_age, group)) for contract, group in groups.items()}
        chosen = min(groups, key=lambda contract: (-len(groups[contract]), oldest[contract]))
        for key, instance in registrations.items():
            if _contract(instance.card) != chosen:
                self._warn_once(
                    key,
                    f"instance {instance.id:x} serves another '{instance.card.name}' than most others do "
                    "(kind, inputs, outputs, batching or decoupling differ); it is left out",
                )
        return tuple(sorted(groups[chosen], key=lambda instance: instance.id))

    def _find_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        agreeing = (instance for model in self._by_model for instance in self._agreeing_on(model))
        for instance in sorted(agreeing, key=_age):
            for name in other_names(instance.card):
                names.setdefault(name, instance.card.name)
        return names


def other_names(card: ModelCard) -> Iterable[str]:
    """Return the other names by which requests may name a model: aliases and adapters."""
    return (*card.aliases, *(card.llm.adapters if card.llm is not None else ()))


def _contract(card: ModelCard) -> object:
    """Return what requests are checked against before they are routed to an instance."""
    return card.kind, frozenset(card.inputs), frozenset(card.outputs), card.max_batch_size, card.decoupled


def _age(instance: Instance) -> tuple[float, InstanceId]:
    return instance.started_at, instance.id
