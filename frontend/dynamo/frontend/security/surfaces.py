"""What can be protected, and what a key may be allowed to use.

A *surface* is a group of calls, the same for all protocols; the first nine have Triton's names. A key that holds the *scope* of a
surface may use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Surface(StrEnum):
    HEALTH = "health"
    METADATA = "metadata"
    """The models, their inputs, and tokenization."""
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
    """The loads from which instances count as busy."""
    NAMES = "names"
    """What the names of operators stand for."""
    USAGE = "usage"
    """What all keys have used."""


class Scope(StrEnum):
    INFER = "infer"
    REPOSITORY = "repository"
    METRICS = "metrics"
    DOCS = "docs"
    CONSOLE = "console"
    THRESHOLDS = "thresholds"
    NAMES = "names"
    USAGE = "usage"
    ADMIN = "admin"
    """Everything, including surfaces without a scope of their own."""


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
    Surface.NAMES: Scope.NAMES,
    Surface.USAGE: Scope.USAGE,
}
"""The scope that each surface needs. Health needs none."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """Surfaces that serve only requests with a header."""

    surfaces: frozenset[Surface]
    header: str
    """In lower case."""
    value: str = field(repr=False)


def parse_restrictions(text: str, prefix: str = "") -> tuple[Restriction, ...]:
    """Parse Triton's `surface,…:header=value`, one a line; `prefix` is put before the header's name.

    Raises ValueError; its message is the end of a sentence and does not show the value.
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
