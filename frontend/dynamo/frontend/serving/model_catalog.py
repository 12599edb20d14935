"""The models that requests can name: those that are served, can be started, were served a short while ago, or are declared.

A request for a model that is in here and has no instance waits if it can be started, and raises `NoInstances` otherwise; for any
other model, it raises `ModelNotFound`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo.common.discovery import Instance, other_names
from dynamo.common.errors import ModelNotFound, VersionUnloaded
from dynamo.common.model_card import ModelCard, Role
from dynamo.common.names import InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.common.tensors.check import RequestChecker
from dynamo.common.tensors.relay import relays_http
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.fleet.repository import Repository
from dynamo.frontend.metrics import FrontendMetrics, ModelMetrics
from dynamo.frontend.serving.prompt_tokens import counts_tokens
from dynamo.frontend.serving.queue.starting import NoStandby, StandbyModels


class TextReadiness(Protocol):
    """The part of `text.text_models.TextModels` that the catalog needs."""

    def is_ready(self, card: ModelCard) -> bool:
        """Return whether the text side of a language model is at hand."""
        ...

    def on_change(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with each model whose text side has become ready, or is not ready any more."""
        ...


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model as a request names it."""

    name: str
    """The name that the request uses: the card's, an alias or an adapter."""
    version: str
    """Empty: any."""
    card: ModelCard
    metrics: ModelMetrics
    checker: RequestChecker
    is_served: bool
    """Whether it has instances."""
    counts_tokens: bool = False
    """Whether the tokens of a request are charged by what the model says; see `prompt_tokens`."""
    has_prefill: bool = False
    """Whether some of them compute prompts for others, or can be started to do so."""


@dataclass(frozen=True, slots=True)
class CatalogChange:
    """A change of what is registered."""

    added: Sequence[Instance]
    removed: Sequence[Instance]
    models: Collection[str]
    """The models that these belong to and that are served now."""
    gone: Collection[InstanceId]
    """The instances that serve no model any more."""


OnCatalogChange = Callable[[CatalogChange], None]


class ModelCatalog:
    """Follows a directory. Lookups are cached until it changes."""

    def __init__(
        self,
        directory: Directory,
        metrics: FrontendMetrics,
        declared: Iterable[ModelCard],
        remember_s: float,
        texts: TextReadiness,
        standby: StandbyModels | None = None,
    ) -> None:
        """`remember_s`: how long a model that lost its last instance is known."""
        self._texts = texts
        self._standby = standby or NoStandby()
        self._directory = directory
        self._metrics = metrics
        self._declared = tuple(declared)
        self._remember_s = remember_s
        self._loop = asyncio.get_running_loop()
        self._on_change: list[OnCatalogChange] = []
        self._served: set[str] = set()
        self.relays: set[str] = set()
        """Models that are relays, as `dynamo.common.tensors.relay` has it; always the same set."""
        self._looked_up: dict[tuple[str, str], NamedModel] = {}
        """By the name and version that requests use; all that were looked up since the last change."""
        self._gone: dict[str, tuple[ModelCard, float]] = {}
        self._models_of: Counter[InstanceId] = Counter()
        """How many models each instance serves."""
        self._closed = False
        self._standby.on_change(lambda added, removed: self._looked_up.clear())
        directory.on_registrations(self._registrations_changed)
        directory.on_change(self._looked_up.clear)
        texts.on_change(lambda model: self._looked_up.clear())
        self._registrations_changed(tuple(directory.registered()), ())

    def __repr__(self) -> str:
        return f"<ModelCatalog {len(self._served)} served, {len(self._gone)} gone, {len(self._declared)} declared>"

    @property
    def served(self) -> Collection[str]:
        """The names of the models that have instances."""
        return self._served

    def find(self, name: str, version: str = "") -> NamedModel:
        """Return a model by its name, alias or adapter. Raises ModelNotFound."""
        cached = self._looked_up.get((name, version))
        if cached is not None:
            return cached
        card = self._lookup(name, version)
        is_served = card.name in self._served
        has_prefill = any(instance.card.role is Role.PREFILL for instance in self._directory.newest_first(name))
        has_prefill = has_prefill or self._standby.start_s(Pool(card.name, Role.PREFILL)) is not None
        metrics = self._metrics.for_model(card.name)
        model = NamedModel(name, version, card, metrics, RequestChecker(card), is_served, counts_tokens(card), has_prefill)
        if is_served:  # a model without instances is forgotten after a time, which is no change of the directory
            self._looked_up[name, version] = model
        return model

    def cards(self) -> list[ModelCard]:
        """Return one card per model that is served, can be started, or is declared, in order of name."""
        cards = {card.name: card for card in self._declared}
        cards.update(self._standby.cards())
        cards.update((name, card) for name in self._served if (card := self._directory.card(name)) is not None)
        return [cards[name] for name in sorted(cards)]

    def on_change(self, callback: OnCatalogChange) -> None:
        """Call `callback`, synchronously, after each change of what is registered."""
        self._on_change.append(callback)

    def close(self) -> None:
        """Ignore further changes of the directory."""
        self._closed = True

    def _registrations_changed(self, added: Sequence[Instance], removed: Sequence[Instance]) -> None:
        if self._closed:
            return
        self._looked_up.clear()
        models = dict.fromkeys(instance.card.name for instance in (*removed, *added))
        served = [name for name in models if self._directory.count(name)]
        self._served.update(served)
        self.relays.update(instance.card.name for instance in added if relays_http(instance.card))
        self._remember_gone(models.keys() - served, removed)
        change = CatalogChange(added, removed, served, self._count_models(added, removed))
        for callback in self._on_change:
            callback(change)

    def _count_models(self, added: Iterable[Instance], removed: Iterable[Instance]) -> list[InstanceId]:
        """Keep count of the models of each instance; return the instances that have none left."""
        self._models_of.update(instance.id for instance in added)
        self._models_of.subtract(instance.id for instance in removed)
        gone = [instance for instance in dict.fromkeys(instance.id for instance in removed) if not self._models_of[instance]]
        for instance in gone:
            del self._models_of[instance]
        return gone

    def _lookup(self, name: str, version: str) -> ModelCard:
        live = self._directory.card(name)
        cards: Iterable[ModelCard]
        if live is not None:
            cards = self._live_cards(name)
        else:
            now = self._loop.time()
            lost = (card for card, gone_at in self._gone.values() if now - gone_at < self._remember_s)
            startable = self._standby.card(name)
            cards = [card for card in (*lost, *self._declared) if name in (card.name, *other_names(card))][:1]
            cards = cards if startable is None else [startable]
            if not cards:
                raise ModelNotFound(name)
        for card in cards:
            if not version or version in card.versions:
                return card
        raise ModelNotFound(name, version)

    def _live_cards(self, name: str) -> Iterator[ModelCard]:
        """Yield the cards that a name has, the newest first, before these the ones whose text is at hand.

        So while a new tokenizer is loaded, as in a rollout, requests are prepared for instances that have another one and serve.
        """
        serving = self._directory.instances(name)
        for instance in self._directory.newest_first(name):
            if instance.card.llm is None or (self._texts.is_ready(instance.card) and instance in serving):
                yield instance.card
        for instance in self._directory.newest_first(name):
            yield instance.card

    def _remember_gone(self, models: Collection[str], removed: Iterable[Instance]) -> None:
        """Remember the newest card of each of the models, which have lost their last instance, for a time."""
        now = self._loop.time()
        self._served.difference_update(models)
        self.relays.difference_update(models)
        for instance in sorted(removed, key=_started_at):
            if instance.card.name in models:
                self._gone[instance.card.name] = (instance.card, now)
        for name in models:
            self._metrics.forget(name)
        self._gone = {
            name: (card, gone_at)
            for name, (card, gone_at) in self._gone.items()
            if name not in self._served and now - gone_at < self._remember_s
        }


def find_loaded(catalog: ModelCatalog, repository: Repository | None, name: str, version: str) -> NamedModel:
    """Return a model by its name, an alias or an adapter. Raises ModelNotFound, and VersionUnloaded as repositories say."""
    try:
        model = catalog.find(name, version)
    except ModelNotFound:
        if version and repository is not None and repository.is_unloaded(name, version):
            raise VersionUnloaded(name, version) from None
        raise
    if not model.is_served and repository is not None and repository.is_unloaded(model.card.name):
        raise ModelNotFound(name, is_unloaded=True)
    return model


def _started_at(instance: Instance) -> float:
    return instance.started_at
