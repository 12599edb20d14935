"""The cases, by families. A case is one request, or a few, to one server; those of a family run in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tests.differential.server_client import Response, ServerClient


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    what: str
    run: Callable[[ServerClient], Response]

    @property
    def name(self) -> str:
        return f"{self.family}: {self.what}"


def all_cases() -> Iterator[Case]:
    """Yield every case. Those that change what later ones see are the last."""
    from tests.differential.cases import (
        calls,
        configurations,
        control,
        grpc_infer,
        memory,
        models,
        python_api,
        rest_infer,
        sequences,
        settings,
        stream,
    )

    for module in (
        models,
        grpc_infer,
        rest_infer,
        stream,
        sequences,
        calls,
        python_api,
        settings,
        memory,
        control,
        configurations,
    ):
        yield from module.cases()


def named_once(cases: Iterable[Case]) -> list[Case]:
    """Return the cases. Raises ValueError if two have the same name, under which their responses are kept."""
    listed = list(cases)
    if doubled := [name for name, count in Counter(case.name for case in listed).items() if count > 1]:
        raise ValueError(f"each case must have a name of its own, got {doubled[0]!r} twice")
    return listed
