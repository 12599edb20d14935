"""What a repository is given: its settings, and the process that serves its models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynamo.common.model_card import ModelCard
from dynamo.worker.observability.statistics import VersionStatistics
from dynamo.worker.repository.scheduling.rate_limiter import RateLimiter
from dynamo.worker.repository.wire.calls import MAX_BYTES


class Host(Protocol):
    """The process that serves the models."""

    def serve(self, card: ModelCard) -> None:
        """Take requests for this model from now on. Raises InvalidRequest if another model has its name."""
        ...

    def remove(self, model: str) -> None:
        """Take no more requests for a model."""
        ...

    async def publish(self) -> None:
        """Register the models and the index."""
        ...

    def statistics(self, model: str, version: str) -> VersionStatistics | None: ...

    def count_output_mismatch(self, model: str) -> None:
        """Count a response with an output other than declared."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositorySettings:
    folders: tuple[Path, ...]
    stores: tuple[str, ...] = ()
    """URLs of repositories in object stores."""
    copies: Path
    """Where unpacked environments and models of object stores are kept."""
    auto_complete: bool = True
    default_max_batch_size: int = 4
    drain_s: float = 30.0
    """How long, in seconds, open requests of an unloaded model may still take."""
    path_roots: tuple[str, ...] = ()
    path_max_bytes: int = 16 * 2**30
    copies_bytes: int = 64 * 2**30
    on_request: bool = True
    """Whether requests may load and unload models."""
    strict_outputs: bool = False
    """Whether a request fails whose model gives outputs that are not as declared."""
    cache_bytes: int = 0
    """Capacity of the response cache; 0: there is none."""
    calls_bytes: int = MAX_BYTES
    """What calls of models by models may hold."""
    rate_limiter: RateLimiter | None = None
    """Limiter of the resources of all models; None: they are not limited."""
