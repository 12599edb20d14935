"""What a worker asks the frontends before it is ready, and what each of their processes responds.

A process has admitted an instance once it sees its registrations, has the tokenizer and template of each model at hand, and knows
what its KV cache holds. Only then do requests for the instance go there without a wait.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_ORIGIN = 64
"""Characters of the name of a process."""


class AdmissionQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks every process of every frontend whether it has admitted the instance that sent it."""

    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    """Counts the queries of this instance."""
    models: Annotated[tuple[str, ...], msgspec.Meta(max_length=4096)]
    """Names of the models that it has registered. Without any, the query only finds out which processes there are."""


class AdmissionReport(msgspec.Struct, frozen=True, array_like=True):
    """The response of one process."""

    origin: Annotated[str, msgspec.Meta(max_length=MAX_ORIGIN)]
    """Name of the process."""
    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    """Number of the query."""
    is_admitted: bool
