"""The state of the fleet: models, their instances, the load of each, and the names that operators gave.

Load reports are received only while a console is open, so that a closed one costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
from msgspec import Struct

from dynamo.common.discovery import Instance
from dynamo.common.errors import Unavailable
from dynamo.common.kv.events import LoadReport, load_message_decoder
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.model_card import ModelCard
from dynamo.common.names import InstanceId, instance_of, loads_subject
from dynamo.common.process.background import start
from dynamo.common.scaling.targets import PoolTarget
from dynamo.frontend.fleet.event_bus import EventBus
from dynamo.frontend.names.rules import Fallback, Rule, Sticky
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.frontend.serving.dispatch.circuits import CircuitState

log = logging.getLogger(__name__)

WATCHED_S = 15.0
"""Load reports are received for so long after each read."""
_MAX_REPORTS = 20_000
"""Kept at once, by instance and model: a client could invent any number."""


class InstanceState(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One instance; the fields of load reports are None until the first comes, and for engines that report none."""

    id: str
    """Hexadecimal, as the header `x-dynamo-instance` takes it."""
    component: str
    role: str
    backend: str
    age_s: float
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of the KV blocks that running requests hold, 0 to 1."""
    queued_prefill_tokens: int | None = None
    step_ms: float | None = None
    hit_rate: float | None = None
    """Share of the prompt tokens this process recently sent there that were in its cache, 0 to 1."""
    circuit: CircuitState = CircuitState.CLOSED
    """Other than closed: this process sends it no requests, or only probes, since too many failed."""


class TensorState(Struct, frozen=True):
    name: str
    datatype: str
    shape: tuple[int, ...]


class FleetModelState(Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    ready: bool
    other_names: tuple[str, ...]
    has_chat: bool
    """It takes conversations as well as prompts."""
    decoupled: bool
    inputs: tuple[TensorState, ...]
    instances: tuple[InstanceState, ...]


class ShareState(Struct, frozen=True):
    model: str
    share: float
    """Share of the requests by a name that the model gets, 0 to 1."""


class NameState(Struct, frozen=True, kw_only=True):
    """A name of the operator's; models that the caller may not use are left out."""

    name: str
    targets: tuple[ShareState, ...]
    fallbacks: tuple[Fallback, ...]
    shadows: tuple[ShareState, ...]
    sticky: Sticky | None


class PoolTargetState(Struct, frozen=True, kw_only=True):
    """How many instances a planner wants of a model in one role."""

    model: str
    role: str
    instances: int
    reason: str
    age_s: float
    """How long ago it was decided."""


class FleetState(Struct, frozen=True, kw_only=True):
    version: str
    namespace: str
    router_mode: str
    state: str
    explains: bool
    """Whether `/v1/routing/decisions` is served."""
    asks_keys: bool
    """Requests to models need an API key."""
    processes: int
    """Processes on this port, each with its own decisions and hit rates."""
    models: tuple[FleetModelState, ...]
    names: tuple[NameState, ...]
    targets: tuple[PoolTargetState, ...]
    """Empty without a planner."""


class LoadWatch:
    """The last load report of each instance, while a console reads them."""

    def __init__(self, bus: EventBus, namespace: str, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._subject = loads_subject(namespace)
        self._clock = clock
        self._until = 0.0
        self._reports: dict[tuple[InstanceId, str], LoadReport] = {}
        self._following: asyncio.Task[None] | None = None
        self._unreadable = Unreadable("a load report")

    def read(self) -> Mapping[tuple[InstanceId, str], LoadReport]:
        """Return the reports by instance and model. The first read returns none, since reports come once a second."""
        self._until = self._clock() + WATCHED_S
        if self._following is None or self._following.done():
            self._following = start(self._follow(), "console loads")
        return self._reports

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following

    async def _follow(self) -> None:
        try:
            subscription = await self._bus.subscribe(self._subject, self._on_load)
        except Unavailable as error:
            log.warning("load reports cannot be received for the console: %s", error)
            return
        try:
            while (left := self._until - self._clock()) > 0:  # noqa: ASYNC110  # each read moves the end
                await asyncio.sleep(left)
        finally:
            await subscription.close()
            self._reports.clear()

    def _on_load(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        try:
            message = load_message_decoder.decode(payload)
            key = (instance_of(subject), message.model)
        except (ValueError, RecursionError) as error:
            return self._unreadable.drop(subject, error)
        if key in self._reports or len(self._reports) < _MAX_REPORTS:
            self._reports[key] = message.report


def name_state(name: str, rule: Rule, account: Account) -> NameState:
    whole = sum(target.weight for target in rule.targets)
    permits = account.permits
    return NameState(
        name=name,
        targets=tuple(ShareState(each.model, each.weight / whole) for each in rule.targets if permits(each.model)),
        fallbacks=tuple(each for each in rule.fallbacks if permits(each.model)),
        shadows=tuple(ShareState(each.model, each.share) for each in rule.shadows if permits(each.model)),
        sticky=rule.sticky,
    )


def target_state(target: PoolTarget, unix_time: float) -> PoolTargetState:
    return PoolTargetState(
        model=target.pool.model,
        role=target.pool.role.value,
        instances=target.instances,
        reason=target.reason,
        age_s=max(0.0, unix_time - target.decided_at),
    )


def model_state(
    plane: DataPlane, account: Account, card: ModelCard, reports: Mapping[tuple[InstanceId, str], LoadReport], unix_time: float
) -> FleetModelState:
    """Return the current state of a model and its instances, under the names that the caller may use."""
    llm = card.llm
    name, *other_names = filter(account.permits, (card.name, *card.aliases, *(llm.adapters if llm is not None else ())))
    return FleetModelState(
        name=name,
        kind=card.kind.value,
        ready=plane.model_ready(card.name),
        other_names=tuple(other_names),
        has_chat=llm is not None and bool(llm.chat_template),
        decoupled=card.decoupled,
        inputs=tuple(TensorState(spec.name, spec.datatype, tuple(spec.shape)) for spec in card.inputs),
        instances=tuple(
            _instance_state(plane, instance, reports.get((instance.id, card.name)), unix_time)
            for instance in plane.models.instances(card.name)
        ),
    )


def _instance_state(plane: DataPlane, instance: Instance, report: LoadReport | None, unix_time: float) -> InstanceState:
    state = InstanceState(
        id=f"{instance.id:x}",
        component=instance.endpoint.component,
        role=instance.card.role.value,
        backend=instance.card.backend,
        age_s=round(max(0.0, unix_time - instance.started_at), 1),
        hit_rate=plane.reuse.hit_rate(instance.id) if instance.card.llm is not None else None,
        circuit=plane.circuits.state(instance.card.name, instance.id),
    )
    if report is None:
        return state
    return msgspec.structs.replace(
        state,
        running=report.running,
        waiting=report.waiting,
        kv_usage=round(report.kv_usage, 4) if report.total_blocks else None,
        queued_prefill_tokens=report.queued_prefill_tokens,
        step_ms=round(report.step_ms, 2),
    )
