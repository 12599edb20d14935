"""What the gRPC and the REST side of KServe v2 share in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from dynamo.common.errors import InvalidRequest, ModelNotFound, NotFound, Unsupported
from dynamo.frontend.api.kserve.regions import Regions
from dynamo.frontend.api.kserve.settings import LogSettings, TraceSettings, Values
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane

NO_CUDA = "this server reads no memory of GPUs; register system shared memory instead"


@dataclass(frozen=True, slots=True)
class KserveServer:
    name: str = "dynamo"
    shared_regions: Regions | None = None
    """None: clients cannot register memory."""
    trace: TraceSettings = field(default_factory=TraceSettings)
    log: LogSettings = field(default_factory=LogSettings)

    @property
    def regions(self) -> Regions:
        """Raises Unsupported if clients cannot register memory."""
        if self.shared_regions is None:
            raise Unsupported("shared memory of clients is switched off: it needs --client-shared-memory and --processes 1")
        return self.shared_regions

    def trace_settings(
        self, plane: DataPlane, account: Account, model: str, changes: Mapping[str, Values]
    ) -> dict[str, list[str]]:
        """Change trace settings of a model, or of the server if it is empty. Return all. Raises InvalidRequest, Unsupported."""
        check_traced(plane, account, model)
        self.trace.change(model, changes)
        return self.trace.read(model)


def check_traced(plane: DataPlane, account: Account, model: str) -> None:
    """Raises InvalidRequest if there is no such model; an empty name stands for the server."""
    if not model:
        return
    try:
        plane.card(account, model)
    except ModelNotFound as error:
        raise InvalidRequest(f"Request for unknown model : {error.model}") from error


def check_cuda(region: str) -> None:
    """Raises NotFound if a region is named: there is none in the memory of GPUs."""
    if region:
        raise NotFound(f"Unable to find cuda shared memory region: '{region[:200]}'")


@contextmanager
def open_kserve(name: str, *, shares_memory: bool) -> Iterator[KserveServer]:
    """Make the state of a process; close the regions that clients have left registered at the end."""
    regions = Regions()
    try:
        yield KserveServer(name, regions if shares_memory else None)
    finally:
        regions.close()
