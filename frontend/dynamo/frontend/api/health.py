"""Whether this process can serve: one view for HTTP probes, KServe readiness and grpc.health.v1."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum

from dynamo.common.discovery import Instance
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.data_plane import DataPlane


class State(StrEnum):
    STARTING = "starting"
    READY = "healthy"
    NOT_READY = "unhealthy"
    """No model can be served, or started."""
    SHUTTING_DOWN = "shutting_down"


class Readiness:
    """Whether a request would be served now. A draining process is not ready, though it still serves.

    It exists before the data plane: a process that still waits for NATS is alive, and says what it waits for.
    """

    def __init__(self, *, strict: bool = True) -> None:
        """`strict`: KServe's server is ready only if all models are that should be."""
        self._strict = strict
        self._plane: DataPlane | None = None
        self._on_change: list[Callable[[], None]] = []
        self.draining = False

    def attach(self, plane: DataPlane) -> None:
        """Complete the start with the data plane."""
        self._plane = plane
        plane.models.on_change(self._notify)
        plane.standby.on_change(lambda added, removed: self._notify())
        self._notify()

    def registered(self) -> Collection[Instance]:
        """Return the registrations that are followed; none while the process starts."""
        return () if self._plane is None else self._plane.models.registered()

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

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback`, synchronously, whenever a change of the fleet or of this process may have changed readiness.

        A tokenizer that has loaded makes a model ready without such a change.
        """
        self._on_change.append(callback)

    def _notify(self) -> None:
        for callback in self._on_change:
            callback()
