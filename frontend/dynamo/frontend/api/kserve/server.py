"""What the gRPC and the REST side of KServe v2 share in one process."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import msgspec

from dynamo.common.errors import Forbidden, InvalidRequest, ModelNotFound, NotFound, Unsupported
from dynamo.common.observability.reception import EdgeProtocol, Reception
from dynamo.common.observability.server_settings import LocalSettings
from dynamo.common.options import TraceOptions
from dynamo.common.process.background import running
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.api.kserve.placed import PlacedRequest, find_places
from dynamo.frontend.api.kserve.regions import Regions
from dynamo.frontend.api.kserve.registrations import SharedRegistrations
from dynamo.frontend.api.kserve.settings import Settings, Values
from dynamo.frontend.config import KserveOptions
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane

NO_CUDA = "this server reads no memory of GPUs; register system shared memory instead"
_CLOSE_STALE_S = 5.0
"""How long a process may keep memory open that was unregistered at another one."""


@dataclass(frozen=True, slots=True)
class KserveServer:
    name: str = "dynamo"
    shared_regions: Regions | None = None
    """None: clients cannot register memory."""
    allows_remote_memory: bool = False
    """Whether clients on other hosts may register memory of this one."""
    settings: Settings = field(default_factory=lambda: Settings(LocalSettings(), TraceOptions()))

    @property
    def regions(self) -> Regions:
        """Raises Unsupported if clients cannot register memory."""
        if self.shared_regions is None:
            raise Unsupported("shared memory of clients is switched off: it needs --client-shared-memory")
        return self.shared_regions

    def register_memory(self, account: Account, peer: str, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Register memory for an account's client at `peer`. Raises Unsupported, Forbidden, and what `Regions.register` does."""
        self._regions_for(peer).register(name, key, offset, size_bytes, account.name)

    def find_places(self, request: TensorRequest, account: Account, peer: str) -> PlacedRequest:
        """Return where the inputs of a request are in shared memory, and where its outputs go.

        A region is used by the account that registered it, and from where it may be registered. Raises Unsupported, Forbidden,
        InvalidRequest, NotFound, PayloadTooLarge.
        """
        return find_places(request, self._regions_for(peer), account.name)

    def _regions_for(self, peer: str) -> Regions:
        regions = self.regions
        if not self.allows_remote_memory:
            check_is_local(peer)
        return regions

    def timed(self, call: Call, model: str, edge: EdgeProtocol, start_ns: int, end_ns: int) -> Call:
        """Return `call` with the time in which its request was read, if requests to the model may be traced."""
        if not self.settings.has_times(model):
            return call
        headers = Reception(edge, start_ns, end_ns).headers()
        return msgspec.structs.replace(call, headers={**call.headers, **headers})

    async def trace_settings(
        self, plane: DataPlane, account: Account, model: str, changes: Mapping[str, Values]
    ) -> dict[str, list[str]]:
        """Change trace settings of a model, or of the server if it is empty. Return all.

        Raises InvalidRequest, Unsupported, Unavailable.
        """
        check_traced(plane, account, model)
        await self.settings.change_trace(model, changes)
        return self.settings.trace(model)


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


def check_is_local(peer: str) -> None:
    """Raises Forbidden for a caller on another host, who cannot have made memory of this one. `peer` is as gRPC or HTTP say."""
    scheme, _, rest = peer.partition(":")
    if scheme == "unix":
        return
    host = unquote(rest).rpartition(":")[0].strip("[]") if scheme in ("ipv4", "ipv6") else peer
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    mapped = getattr(address, "ipv4_mapped", None)
    if address is None or not (mapped or address).is_loopback:
        raise Forbidden(
            "shared memory is registered and used by clients on the host of the server, over its loopback address; "
            "--client-shared-memory-remote lets others do it, too"
        )


@asynccontextmanager
async def open_kserve(options: KserveOptions, folder: Path | None, max_request_bytes: int) -> AsyncIterator[KserveServer]:
    """Make the state of a process; close the regions that clients have left registered at the end.

    `folder`: shared by all processes on the same ports, if there are several. `max_request_bytes`: see `Regions`.
    """
    if not options.client_shared_memory:
        yield KserveServer(options.server_name)
        return
    registrations = None if folder is None else SharedRegistrations(folder / "regions")
    keys = options.client_shared_memory_keys
    regions = Regions(registrations=registrations, keys=keys, max_request_bytes=max_request_bytes)
    server = KserveServer(options.server_name, regions, allows_remote_memory=options.client_shared_memory_remote)
    try:
        if folder is None:
            yield server
        else:
            async with running(_close_stale(regions), "shared memory"):
                yield server
    finally:
        regions.close()


async def _close_stale(regions: Regions) -> None:
    while True:
        await asyncio.sleep(_CLOSE_STALE_S)
        regions.close_stale()
