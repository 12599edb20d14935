"""Stands in for `dynamo.runtime`: endpoints that serve a worker's async generators on our plane.

The worker is configured by the variables of `dynamo-worker` (`DYN_NATS_SERVERS`, …). `DYN_NAMESPACE`, if set, replaces the
namespace that a worker names: frontends here serve one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dynamo.common import names
from dynamo.common.config import load
from dynamo.common.lifecycle import stop_on_signal
from dynamo.common.logs import setup_logging
from dynamo.worker import app
from dynamo.worker.compat.engines import Context, Handler, make_engine
from dynamo.worker.compat.models import RegisteredModel
from dynamo.worker.config import WorkerConfig

__all__ = ["Context", "DistributedRuntime", "configure_dynamo_logging", "dynamo_worker"]

log = logging.getLogger(__name__)


@dataclass
class Endpoint:
    """`namespace.component.endpoint`, and the models that were registered for it."""

    runtime: DistributedRuntime
    address: names.Endpoint
    models: list[RegisteredModel] = field(default_factory=list)

    async def serve_endpoint(self, handler: Handler, **settings: Any) -> None:
        """Serve `handler` until the process is told to stop."""
        if settings:
            log.info("serve_endpoint: %s have no effect here", ", ".join(sorted(settings)))
        if not self.models:
            log.warning("no model is registered for %s: nothing reaches its handler", self.address)
            await self.runtime.stopping.wait()
            return
        config = self.runtime.config
        address = replace(self.address, namespace=config.namespace or self.address.namespace)
        engines = [make_engine(model, handler) for model in self.models]
        await app.serve_worker(engines, replace(config, endpoint=address, namespace=None), stop=self.runtime.stopping)


@dataclass(frozen=True)
class Component:
    runtime: DistributedRuntime
    namespace: str
    name: str

    async def create_service(self) -> None:
        """Does nothing: older versions required it."""

    def endpoint(self, name: str) -> Endpoint:
        return Endpoint(self.runtime, names.Endpoint(self.namespace, self.name, name))


@dataclass(frozen=True)
class Namespace:
    runtime: DistributedRuntime
    name: str

    def component(self, name: str) -> Component:
        return Component(self.runtime, self.name, name)


class DistributedRuntime:
    """What a worker's main function gets."""

    def __init__(self, config: WorkerConfig, stopping: asyncio.Event) -> None:
        self.config = config
        self.stopping = stopping

    def namespace(self, name: str) -> Namespace:
        return Namespace(self, name)

    def endpoint(self, address: str) -> Endpoint:
        """Return the endpoint called `namespace.component.endpoint`."""
        namespace, component, name = address.removeprefix("dyn://").split(".")
        return Endpoint(self, names.Endpoint(namespace, component, name))

    def shutdown(self) -> None:
        self.stopping.set()


Main = Callable[..., Awaitable[Any]]


def dynamo_worker(main: Main | None = None, /, **settings: Any) -> Any:
    """Decorate a worker's main function, which gets the runtime before its own arguments. `settings` have no effect here."""

    def decorate(function: Main) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(function)
        async def run(*args: Any, **kwargs: Any) -> Any:
            config = load(WorkerConfig, (), os.environ, program="dynamo.worker.compat")
            setup_logging(config.log)
            return await function(DistributedRuntime(config, stop_on_signal()), *args, **kwargs)

        return run

    return decorate if main is None else decorate(main)


def configure_dynamo_logging(*args: Any, **kwargs: Any) -> None:
    """Does nothing: `dynamo_worker` sets up the log, by the options of `dynamo-worker`."""
