"""What the ports of a frontend share."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.common.http.accepting import Descriptors
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.wiring.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PortParts:
    """What all ports are given."""

    config: FrontendConfig
    metrics: Metrics
    readiness: Readiness
    capacity: Capacity
    descriptors: Descriptors
    kserve: KserveServer
    share_port: bool
    """Whether other processes listen on the same ports."""
