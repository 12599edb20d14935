"""The cases, by families. A case is one request, or a few, to one server; those of a family run in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.differential.doors import Door, Response


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    what: str
    run: Callable[[Door], Response]

    @property
    def name(self) -> str:
        return f"{self.family}: {self.what}"


def all_cases() -> Iterator[Case]:
    """Yield every case. Those that change what later ones see are the last."""
    from tests.differential.cases import calls, control, grpc_infer, memory, models, rest_infer, sequences, settings, stream

    for module in (models, grpc_infer, rest_infer, stream, sequences, calls, settings, memory, control):
        yield from module.cases()
