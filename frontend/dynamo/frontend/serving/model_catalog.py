"""The models that requests can name: those that are served, were served a short while ago, or are declared.

A request for a model that is in here and has no instance raises `NoInstances`; for any other model, `ModelNotFound`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo.common.discovery import Instance, other_names
from dynamo.common.errors import ModelNotFound
from dynamo.common.model_card import ModelCard
from dynamo.common.names import InstanceId
from dynamo.common.tensor_request import RequestChecker
from dynamo.frontend.metrics import FrontendMetrics, ModelMetrics
from dynamo.frontend.serving.call import Instances


class ModelDirectory(Instances, Protocol):
    """The part of `fleet.directory.Directory` that the data plane needs."""

    def registered(self) -> Collection[Instance]:
        """Return every registration, those of instances marked down included."""
        ...

    def card(self, name: str) -> ModelCard | None:
        """Return the card of a model, by its name, alias or adapter; None if no instance has registered it."""
        ...

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback`, synchronously, whenever the result of `registered` or `instances` changes."""
        ...


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as a request names it."""

    card: ModelCard
    metrics: ModelMetrics
    checker: RequestChecker


OnRefresh = Callable[[Sequence[Instance], Collection[InstanceId]], None]


class ModelCatalog:
    """Follows a directory. Lookups are cached until it changes."""

    def __init__(
        self, directory: ModelDirectory, metrics: FrontendMetrics, declared: Iterable[ModelCard], remember_s: float
    ) -> None:
        """`remember_s`: how long a model that lost its last instance is known."""
        self._directory = directory
        self._metrics = metrics
        self._declared = tuple(declared)
        self._remember_s = remember_s
        self._loop = asyncio.get_running_loop()
        self._on_refresh: list[OnRefresh] = []
        self._served: dict[str, list[ModelCard]] = {}
        self._looked_up: dict[tuple[str, str], NamedModel] = {}
        """By the name and version that requests use; all that were looked up since the last change."""
        self._gone: dict[str, tuple[ModelCard, float]] = {}
        self._instances: set[InstanceId] = set()
        self._refresh_due = False
        self._closed = False
        directory.on_change(self._changed)

    def __repr__(self) -> str:
        return f"<ModelCatalog {len(self._served)} served, {len(self._gone)} gone, {len(self._declared)} declared>"

    @property
    def served(self) -> Mapping[str, Sequence[ModelCard]]:
        """The cards of every instance, by model, the newest first."""
        return self._served

    def find(self, name: str, version: str = "") -> NamedModel:
        """Return a model by its name, alias or adapter. Raises ModelNotFound."""
        cached = self._looked_up.get((name, version))
        if cached is not None:
            return cached
        card = self._lookup(name, version)
        model = NamedModel(card, self._metrics.for_model(card.name), RequestChecker(card))
        if card.name in self._served:  # a model without instances is forgotten after a time, which is no change of the directory
            self._looked_up[name, version] = model
        return model

    def cards(self) -> list[ModelCard]:
        """Return one card per model that is served or declared, in order of name."""
        cards = {card.name: card for card in self._declared}
        cards.update((name, of_instances[0]) for name, of_instances in self._served.items())
        return [cards[name] for name in sorted(cards)]

    def on_refresh(self, callback: OnRefresh) -> None:
        """Call `callback` after a change, with all registrations, the newest first, and the instances that are gone."""
        self._on_refresh.append(callback)

    def refresh(self) -> None:
        """Apply the state of the directory."""
        self._refresh_due = False
        if self._closed:
            return
        self._looked_up.clear()
        registered = sorted(self._directory.registered(), key=_started_at, reverse=True)
        self._set_served(registered)
        ids = {instance.id for instance in registered}
        removed, self._instances = self._instances - ids, ids
        for callback in self._on_refresh:
            callback(registered, removed)

    def close(self) -> None:
        """Ignore further changes of the directory."""
        self._closed = True

    def _changed(self) -> None:
        """The directory has changed. Changes come in groups, so they are applied together in the next turn of the loop."""
        self._looked_up.clear()
        if not self._refresh_due and not self._closed:
            self._refresh_due = True
            self._loop.call_soon(self.refresh)

    def _lookup(self, name: str, version: str) -> ModelCard:
        live = self._directory.card(name)
        cards: Sequence[ModelCard]
        if live is not None:
            cards = self._served.get(live.name, [live])
        else:
            now = self._loop.time()
            lost = [card for card, gone_at in self._gone.values() if now - gone_at < self._remember_s]
            if self._refresh_due:  # instances that left in this very turn of the loop are not among them yet
                lost += [cards[0] for cards in self._served.values()]
            cards = [card for card in (*lost, *self._declared) if name in (card.name, *other_names(card))][:1]
        if not cards:
            raise ModelNotFound(name)
        for card in cards:
            if not version or version in card.versions:
                return card
        raise ModelNotFound(name, version)

    def _set_served(self, registered: Sequence[Instance]) -> None:
        now = self._loop.time()
        before, self._served = self._served, {}
        for instance in registered:
            self._served.setdefault(instance.card.name, []).append(instance.card)
        for name in before.keys() - self._served.keys():
            self._gone[name] = (before[name][0], now)
            self._metrics.forget(name)
        self._gone = {
            name: (card, gone_at)
            for name, (card, gone_at) in self._gone.items()
            if name not in self._served and now - gone_at < self._remember_s
        }


def _started_at(instance: Instance) -> float:
    return instance.started_at
