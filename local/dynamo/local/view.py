"""Which workers have registered, read from etcd: how the launcher knows that what it started can serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dynamo.common.discovery import Instance, decode_registration
from dynamo.common.errors import InvalidRequest
from dynamo.common.etcd import Etcd
from dynamo.common.model_card import ModelCard
from dynamo.common.names import InstanceId, namespace_prefix


@dataclass(frozen=True, slots=True)
class ServedModel:
    card: ModelCard
    instances: frozenset[InstanceId]


async def read_instances(etcd: Etcd, namespace: str) -> list[Instance]:
    """Return all registrations of a namespace. Raises EtcdUnavailable."""
    listing = await etcd.range(namespace_prefix(namespace), prefix=True)
    instances = []
    for kv in listing.kvs:
        with suppress(InvalidRequest):  # of another program in a shared etcd; the frontend logs what it cannot read
            instances.append(decode_registration(kv.key, kv.value))
    return instances


def ready_workers(serving: Mapping[str, Sequence[Instance]], models: int) -> int:
    """Return how many workers have registered `models` models or more, each instance of theirs: workers register one by one.

    `serving`: what each worker has registered, by its name.
    """
    return sum(_is_ready(registrations, models) for registrations in serving.values())


def _is_ready(registrations: Sequence[Instance], models: int) -> bool:
    counts = Counter(registration.id for registration in registrations)
    return len(counts) >= registrations[0].process_instances and min(counts.values()) >= models


def served_models(instances: Iterable[Instance]) -> list[ServedModel]:
    """Return the models that `instances` serve, in order of name."""
    cards: dict[str, ModelCard] = {}
    ids: dict[str, set[InstanceId]] = {}
    for instance in instances:
        cards[instance.card.name] = instance.card
        ids.setdefault(instance.card.name, set()).add(instance.id)
    return [ServedModel(cards[name], frozenset(ids[name])) for name in sorted(cards)]
