"""What a worker process offers to the fleet: its registrations, as models come and go."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dynamo.common.discovery import Instance
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.protocol import PROTOCOL
from dynamo.common.repository import RepositoryInstance
from dynamo.worker.process.model_files import ModelFiles
from dynamo.worker.process.registration import Registered, Registration
from dynamo.worker.process.status import Status
from dynamo.worker.repository.engine import RepositoryEngine
from dynamo.worker.serve import ServedModel, Service


@dataclass(frozen=True, slots=True)
class Identity:
    """Which instance of which endpoint a worker is."""

    instance: InstanceId
    endpoint: Endpoint
    arena: str
    """Token of the process's shared memory; empty: it has none."""
    process: str
    """Name of the process; empty: it has none."""
    process_instances: int


class Offer:
    """What the process offers to the fleet, which a model repository may change while it runs."""

    def __init__(
        self,
        identity: Identity,
        service: Service,
        status: Status,
        registration: Registration,
        repository: RepositoryEngine | None,
        files: ModelFiles,
    ) -> None:
        self.service = service
        self.registration = registration
        self.repository = repository
        self._files = files
        self._identity = identity
        self._status = status
        self._started_at = time.time()
        self._hidden = False

    def __repr__(self) -> str:
        return f"<Offer of {self._identity.instance:x}, {self.service}, hidden={self._hidden}>"

    def registrations(self) -> list[Registered]:
        """Return what etcd is to hold now: each model, and the index of the repository."""
        if self._hidden:
            return []
        instance, endpoint = self._identity.instance, self._identity.endpoint
        subject = endpoint.rpc_subject(instance)
        registrations: list[Registered] = [
            Instance(
                id=instance,
                endpoint=endpoint,
                subject=subject,
                card=model.card,
                started_at=self._started_at,
                arena=self._identity.arena,
                protocol=PROTOCOL,
                process=self._identity.process,
                process_instances=self._identity.process_instances,
            )
            for model in self._offered
        ]
        if self.repository is not None:
            index, mode = self.repository.models.index(), self.repository.mode
            registrations.append(
                RepositoryInstance(id=instance, endpoint=endpoint, subject=subject, mode=mode, entries=index, protocol=PROTOCOL)
            )
        return registrations

    @property
    def _offered(self) -> list[ServedModel]:
        return [model for model in self.service.models if not self._files.is_waiting(model.card.name)]

    def registered_models(self) -> list[str] | None:
        """Return the names of the models that etcd has; None while some are still to be registered."""
        is_complete = self.registration.registered.is_set() and self._files.are_stored.is_set()
        return [model.card.name for model in self._offered] if is_complete else None

    async def renew(self) -> bool:
        """Register what is offered now. Return False if that happens later: etcd is away, or the worker is still starting."""
        self._status.show_models([] if self._hidden else [model.card.name for model in self._offered])
        return await self.registration.update(self.registrations())

    async def hide(self, hidden: bool) -> bool:
        """Offer nothing, or everything again. Return what `renew` does."""
        self._hidden = hidden
        return await self.renew()
