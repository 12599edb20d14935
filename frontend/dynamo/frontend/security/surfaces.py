"""What can be protected, and what a key may be allowed to do.

*Surfaces* are groups of calls, the same for all protocols; the first nine are named as Triton names them. A *scope* is what a key
holds to use a surface.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Surface(StrEnum):
    HEALTH = "health"
    METADATA = "metadata"
    """Which models there are, what they take, and how text becomes tokens."""
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"
    METRICS = "metrics"
    DOCS = "docs"
    """The API's description, and gRPC reflection."""
    CONSOLE = "console"
    THRESHOLDS = "thresholds"
    """When an instance counts as busy."""


class Scope(StrEnum):
    INFER = "infer"
    REPOSITORY = "repository"
    METRICS = "metrics"
    DOCS = "docs"
    CONSOLE = "console"
    THRESHOLDS = "thresholds"
    ADMIN = "admin"
    """Everything, with what has no scope of its own."""


SCOPES: dict[Surface, Scope] = {
    Surface.METADATA: Scope.INFER,
    Surface.INFERENCE: Scope.INFER,
    Surface.MODEL_CONFIG: Scope.INFER,
    Surface.STATISTICS: Scope.INFER,
    Surface.SHARED_MEMORY: Scope.ADMIN,
    Surface.TRACE: Scope.ADMIN,
    Surface.LOGGING: Scope.ADMIN,
    Surface.MODEL_REPOSITORY: Scope.REPOSITORY,
    Surface.METRICS: Scope.METRICS,
    Surface.DOCS: Scope.DOCS,
    Surface.CONSOLE: Scope.CONSOLE,
    Surface.THRESHOLDS: Scope.THRESHOLDS,
}
"""What a key needs. Health needs none."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """These surfaces answer only to requests with this header."""

    surfaces: frozenset[Surface]
    header: str
    """In lower case."""
    value: str = field(repr=False)


def parse_restrictions(text: str, prefix: str = "") -> tuple[Restriction, ...]:
    """Triton's `surface,…:header=value`, one a line; `prefix` goes before the header's name.

    Raises ValueError with the end of a sentence that does not show the value.
    """
    return tuple(_parse_restriction(line.strip(), prefix) for line in text.splitlines() if line.strip())


def _parse_restriction(line: str, prefix: str) -> Restriction:
    names, colon, rest = line.partition(":")
    header, equals, value = rest.partition("=")
    header = header.strip().lower()
    if not (colon and equals and header and value) or not header.isascii() or not all(c.isalnum() or c in "-_" for c in header):
        raise ValueError("is not of the form surface,…:header=value")
    surfaces = set()
    for name in (name.strip() for name in names.split(",")):
        if not all(c.isalnum() or c == "-" for c in name):  # perhaps a part of the value, which must not be shown
            raise ValueError("is not of the form surface,…:header=value")
        if name not in Surface._value2member_map_:
            raise ValueError(f"names the surface {name!r}; there are {', '.join(Surface)}")
        surfaces.add(Surface(name))
    return Restriction(frozenset(surfaces), prefix + header, value)
