"""How many requests arrive for each pool, and how much they would have instances compute.

Each frontend publishes a `DemandReport` once a second, each of its processes one of its own. Demand is measured where requests
arrive, so that a fleet which cannot keep up does not look idle. Totals count from the start of the process: a lost report is made
up for by the next one. A pool that is missing in one is in another one of the same second: they are as large as NATS takes. A
frontend that serves more than a thousand pools forgets one, whose totals then begin at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from dynamo.common.kv.hashes import HASH_BYTES
from dynamo.common.names import GivenInstanceId, encode
from dynamo.common.scaling.pool import Pool

REPORT_EVERY_S = 1.0
MAX_SAMPLES = 64
"""Arrivals that one report describes, over all pools. Of more, each described one stands for several."""
MAX_SAVED = 1000
"""Instances of which one report says what their caches saved."""
MAX_SAMPLE_HASHES = 64
"""Hashes that describe one prompt: of a longer prompt, those of every n-th block, where n is a power of two."""
MAX_SAMPLE_TOKENS = 1 << 24
"""Tokens of a prompt that is described: a longer one is described as one of so many."""

# What readers accept, so that no process can make a planner compute with infinities or less than nothing.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_SAMPLE_TOKENS)]
_Hashes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MAX_SAMPLE_HASHES * HASH_BYTES)]
_Duration: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


def demand_subject(namespace: str) -> str:
    """Return the NATS subject of the reports of a namespace."""
    return f"dynamo.{encode(namespace, 'namespace')}.demand"


def thin_hashes(hashes: Sequence[int]) -> tuple[int, Sequence[int]]:
    """Return n, and the hashes of every n-th block of a prompt."""
    every = 1
    while len(hashes) // every > MAX_SAMPLE_HASHES:
        every *= 2
    return every, hashes[every - 1 :: every]


class ArrivalTotals(msgspec.Struct, frozen=True, array_like=True):
    """What arrived at one frontend since it started. A request counts once, however often it is sent to an instance."""

    placed: _Count = 0
    """Requests that were sent to an instance. One whose prompt is computed apart counts for both pools."""
    placed_tokens: _Count = 0
    """The prompt tokens of these."""
    computed_tokens: _Count = 0
    """The part of these that was not cached where they were sent, as far as the router knows caches; none for one that
    gets the computed prompt."""
    output_tokens: _Count = 0
    """The limits of their outputs, summed; a request without a limit adds nothing."""
    refused: _Count = 0
    """Requests that got no instance: there was none, all were busy, goals would have been missed, they waited too long, or for
    longer than their clients did. What their clients sent wrongly is not among them."""
    refused_tokens: _Count = 0
    """The prompt tokens of these that no instance had cached."""


class ArrivalSample(msgspec.Struct, frozen=True, array_like=True):
    """One request that was placed or refused since the last report, so that a planner can try what another number of instances
    would do. Only requests with a prompt are described."""

    age_s: _Duration
    """How long before the report it arrived. It may have waited before it was placed or refused."""
    weight: Annotated[float, msgspec.Meta(ge=1.0, le=1e9)]
    """How many requests it stands for."""
    prompt_tokens: _Tokens
    max_output: _Count = 0
    """The limit of its output; 0: none."""
    priority: int = 0
    tokens_per_hash: _Tokens = 0
    """How many tokens lie between two hashes; 0: its blocks are not known."""
    hashes: _Hashes = b""
    """Sequence hashes of the prompt, see `pack_hashes`: of each block, or of every n-th."""
    expected_output: _Count = 0
    """How many tokens such requests generate, those of its session or API key where these had some; 0: not known."""

    def __post_init__(self) -> None:
        if len(self.hashes) % HASH_BYTES:
            raise ValueError(f"hashes have {HASH_BYTES} bytes each, and there are {len(self.hashes)} bytes")


class PoolDemand(msgspec.Struct, frozen=True, array_like=True):
    """What one frontend knows of the demand for one pool."""

    pool: Pool
    totals: ArrivalTotals
    waiting: _Count = 0
    """Requests that wait for an instance now."""
    waiting_tokens: _Count = 0
    """The prompt tokens of these that no instance has cached."""
    ttft_ratio: _Duration = 0.0
    """The observed time to first token over the predicted one, the median of the last requests; 0: not known."""
    samples: tuple[ArrivalSample, ...] = ()
    saved: tuple[tuple[GivenInstanceId, _Count], ...] = ()
    """Instances, and how many prompt tokens each had cached of what it got since the last report."""


class DemandReport(msgspec.Struct, frozen=True, array_like=True):
    """What one frontend knows of the demand."""

    origin: str
    """The process that sent it."""
    pools: tuple[PoolDemand, ...] = ()
