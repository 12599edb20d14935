"""Canaries: every instance is probed now and then whether its engine works, and left out while it does not.

What a request notices (a process that died, a connection that is lost) needs none of this. A canary finds the instance that is
alive and registered, and whose engine hangs or fails: before a request does, and again when it has recovered. An instance whose
engine serves requests is not disturbed; an idle one generates one token (`worker/canary.py`). Instances that are left out are
used nevertheless where a model has no others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DeadlineExceeded, DynamoError, EngineError
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.model_card import ModelKind
from dynamo.common.names import InstanceId
from dynamo.common.process.background import running
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.metrics import FrontendMetrics

log = logging.getLogger(__name__)

_AT_ONCE = 32


class CanaryDispatcher(Protocol):
    """The part of `serving.dispatch.dispatcher.Dispatcher` that canaries need."""

    async def query(self, instance: Instance, verb: str, body: Body, deadline: float) -> Buffer: ...

    def leave_out(self, instance: InstanceId) -> None: ...

    def take_back(self, instance: InstanceId) -> None: ...


class Canaries:
    """Probes all instances in turn. Use `watching_instances`."""

    def __init__(
        self, directory: Directory, dispatcher: CanaryDispatcher, metrics: FrontendMetrics, *, wait_s: float, timeout_s: float
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._failing: dict[InstanceId, set[str]] = {}
        """Models of each instance that failed their last canary."""

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            started_at = self._loop.time()
            await self.round()
            await asyncio.sleep(max(0.0, started_at + self._wait_s - self._loop.time()))

    async def round(self) -> None:
        """Probe every instance once."""
        instances = [instance for instance in self._directory.registered() if instance.card.kind is ModelKind.LLM]
        self._forget_all_but(instances)
        limit = asyncio.Semaphore(_AT_ONCE)

        async def probe(instance: Instance) -> None:
            async with limit:
                self._conclude(instance, await self._failure(instance))

        async with asyncio.TaskGroup() as tasks:
            for instance in instances:
                tasks.create_task(probe(instance))
        self._show(instances)

    async def _failure(self, instance: Instance) -> DynamoError | None:
        """Return why an instance failed its canary; None if it passed or could not be reached, which requests notice."""
        body = msgspec.msgpack.encode({"model": instance.card.name, "idle_s": self._wait_s})
        try:
            await self._dispatcher.query(instance, "canary", body, self._loop.time() + self._timeout_s)
        except (DeadlineExceeded, EngineError) as error:
            return error
        except DynamoError as error:
            log.debug("instance %x was not probed: %s", instance.id, error)
        return None

    def _conclude(self, instance: Instance, failure: DynamoError | None) -> None:
        model = instance.card.name
        self._metrics.for_model(model).canary("passed" if failure is None else "failed")
        failing = self._failing.setdefault(instance.id, set())
        was_failing = bool(failing)
        if failure is None:
            failing.discard(model)
        else:
            failing.add(model)
        if failing and not was_failing:
            log.warning("instance %x failed a canary of %s and is left out: %s", instance.id, model, failure)
            self._dispatcher.leave_out(instance.id)
        elif was_failing and not failing:
            log.info("instance %x passed its canary and gets requests again", instance.id)
            self._dispatcher.take_back(instance.id)

    def _forget_all_but(self, instances: Iterable[Instance]) -> None:
        registered = {instance.id for instance in instances}
        self._failing = {instance: failing for instance, failing in self._failing.items() if instance in registered}

    def _show(self, instances: Iterable[Instance]) -> None:
        counts = {instance.card.name: 0 for instance in instances}
        for instance in instances:
            counts[instance.card.name] += bool(self._failing.get(instance.id))
        for model, count in counts.items():
            self._metrics.for_model(model).set_left_out(count)


@asynccontextmanager
async def watching_instances(canaries: Canaries) -> AsyncIterator[None]:
    """Probe instances while the body runs."""
    async with running(canaries.run(), "canaries"):
        yield
