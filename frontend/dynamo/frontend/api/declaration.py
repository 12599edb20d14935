"""What an operation declares, whichever protocol it is called by: what it is, and what one call of it may cost.

    Declaration(
        surface=Surface.METADATA, is_action=False, reads=Reads.JSON, copies=3, charge=Charge.WORK, deadline_s=300.0,
        other_sites=OtherSites.REFUSED,
    )

The servers of HTTP and gRPC, batches, and responses in the background enforce it. Nothing has a default: a process in which an
operation lacks a part does not start. Protocols that have the same operation share one declaration.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from dynamo.common.errors import DeadlineExceeded
from dynamo.frontend.security.surfaces import Surface

NAME_BYTES = 16 * 1024
LITTLE_BYTES = 64 * 1024
MAX_FILE_BYTES = 64 << 20
FORM_BYTES = 64 * 1024
"""Bytes of a form around its file, at most."""


class Reads(StrEnum):
    """What the body of a request, or one message, may contain; each kind has its bound in bytes."""

    NAME = "name"
    """The name of a model or a service, or nothing: `NAME_BYTES`."""
    LITTLE = "little"
    """Some settings, or nothing: `LITTLE_BYTES`."""
    JSON = "json"
    """JSON without tensors: `--http-max-json-size`. Its values are counted before any is built, and count as bytes."""
    TENSORS = "tensors"
    """Tensors, or a model's files: `--http-max-body-size` and `--max-message-size`."""
    FILE = "file"
    """A form with one file of `MAX_FILE_BYTES`, or of `--http-max-body-size` if that is less."""


class Charge(StrEnum):
    """What a call takes of the limits of its key, and until when."""

    NOTHING = "nothing"
    CALL = "call"
    """One of the calls that are no requests to models, which have a key's rate once more; before anything is read."""
    WORK = "work"
    """A call, and one of the requests at once: from before the body is read until the operation ends."""
    REQUESTS = "requests"
    """Requests and their tokens: refused before the body is read if the key has nothing left for any, else admitted by the data
    plane when the request has been read, and settled once, when it ends, however it does. Over HTTP an operation that responds
    without one fails, and so do requests for a key by one that declares another charge."""


class OtherSites(StrEnum):
    """What browsers may do with an operation for pages of other sites that `--allowed-origins` does not name.

    No page can make a gRPC call, so that port has nothing to enforce.
    """

    REFUSED = "refused"
    LINKED = "linked"
    """Follow a link to it, as to any page; nothing else."""
    SERVED = "served"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    surface: Surface
    """What a caller must be allowed to use."""
    is_action: bool
    """Changes something for others, or would if this server allowed it, so each use is recorded for audits."""
    reads: Reads
    """What is read before the request is admitted to a model, and is refused above its bound."""
    copies: int
    """How many times what was read is held at most until the end; so often it counts against `--max-buffered-size`."""
    charge: Charge
    deadline_s: float | None
    """Time after which a server ends it, if the caller's own deadline is not sooner; None: what it calls keeps the time."""
    other_sites: OtherSites


HEALTH = Declaration(
    surface=Surface.HEALTH,
    is_action=False,
    reads=Reads.NAME,
    copies=1,
    charge=Charge.NOTHING,
    deadline_s=None,  # a watch goes on, and all else responds at once
    other_sites=OtherSites.SERVED,
)


def shown(surface: Surface, *, other_sites: OtherSites = OtherSites.REFUSED) -> Declaration:
    """Declare what a process shows of itself or of the fleet."""
    return Declaration(
        surface=surface,
        is_action=False,
        reads=Reads.LITTLE,
        copies=1,
        charge=Charge.CALL,
        deadline_s=60.0,
        other_sites=other_sites,
    )


def changed(surface: Surface, *, reads: Reads, copies: int, deadline_s: float | None) -> Declaration:
    """Declare what administrators change."""
    return Declaration(
        surface=surface,
        is_action=True,
        reads=reads,
        copies=copies,
        charge=Charge.CALL,
        deadline_s=deadline_s,
        other_sites=OtherSites.REFUSED,
    )


TEXT = Declaration(
    surface=Surface.INFERENCE,
    is_action=False,
    reads=Reads.JSON,
    copies=3,
    charge=Charge.REQUESTS,
    deadline_s=None,
    other_sites=OtherSites.REFUSED,
)
"""A request in JSON to a language model, by whichever API."""
TOKENS = replace(TEXT, surface=Surface.METADATA, copies=12, charge=Charge.WORK, deadline_s=300.0)
"""Work with a model's tokenizer, which no instance takes part in: a token of each byte takes 8."""


@asynccontextmanager
async def within(limit_s: float | None) -> AsyncIterator[None]:
    """Cancel the body of the context after a time, and raise DeadlineExceeded; None: never."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise DeadlineExceeded() from None
        raise
