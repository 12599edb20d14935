"""Whether this process can serve: one view for HTTP probes, KServe readiness and grpc.health.v1."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from enum import StrEnum

from dynamo.common.errors import Unavailable
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.data_plane import DataPlane

_LONGEST_UNNOTICED_S = 0.5
"""A tokenizer that finished loading makes a model ready without a change of the directory; it is noticed this late."""


class State(StrEnum):
    STARTING = "starting"
    READY = "healthy"
    NOT_READY = "unhealthy"
    """No model can be served."""
    SHUTTING_DOWN = "shutting_down"


class Readiness:
    """Whether a request would be served now. A draining process is not ready, though it still serves.

    It exists before the data plane: a process that still waits for NATS is alive, and says what it waits for.
    """

    def __init__(self, *, strict: bool = True) -> None:
        """`strict`: KServe's server is ready only if all models are that should be."""
        self._strict = strict
        self._plane: DataPlane | None = None
        self._change = asyncio.Event()
        self.draining = False

    def attach(self, plane: DataPlane) -> None:
        """Complete the start with the data plane."""
        self._plane = plane
        plane.models.on_change(self._notify)
        self._notify()

    @property
    def plane(self) -> DataPlane:
        """Raises Unavailable while the process starts."""
        if self._plane is None:
            raise Unavailable("the server is starting: it has no connection to NATS yet")
        return self._plane

    def state(self) -> State:
        if self.draining:
            return State.SHUTTING_DOWN
        if self._plane is None:
            return State.STARTING
        return State.READY if self._plane.server_ready() else State.NOT_READY

    def is_ready(self) -> bool:
        return self.state() is State.READY

    def is_server_ready(self) -> bool:
        """Return whether the server is ready in the sense of KServe's health operations."""
        return self._plane is not None and self.is_ready() and (not self._strict or self._plane.all_models_ready())

    def is_model_ready(self, model: str, version: str = "") -> bool:
        if self.draining or self._plane is None:
            return False
        return self._plane.model_ready(self._plane.names.representative(ANONYMOUS, model, version), version)

    def start_draining(self) -> None:
        self.draining = True
        if self._plane is not None:
            self._plane.start_draining()
        self._notify()

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yield at once, and again each time that readiness may have changed, at least twice a second."""
        while True:
            change = self._change  # taken before the caller reads the state, so that no change is missed while it is busy
            yield
            try:
                async with asyncio.timeout(_LONGEST_UNNOTICED_S):
                    await change.wait()
            except TimeoutError:
                pass  # the caller reads the state again anyway

    def _notify(self) -> None:
        change, self._change = self._change, asyncio.Event()
        change.set()
