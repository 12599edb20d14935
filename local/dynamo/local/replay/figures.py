"""What a replay measured, and how it is shown."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Figures:
    """What one replayed mode did. Times are virtual unless stated otherwise."""

    requests: int = 0
    rejected: int = 0
    """Refused by the router or its full queue, or longer than a worker's whole cache."""
    prompt_blocks: int = 0
    """Prompt blocks of requests that were not rejected, as are those of `hit_blocks`."""
    hit_blocks: int = 0
    preempted: int = 0
    good: Counter[int] = field(default_factory=Counter)
    """Requests completed within the goals for TTFT and mean ITL, by priority."""
    arrivals_s: float = 0.0
    """When the last request arrived."""
    virtual_s: float = 0.0
    wall_s: float = 0.0
    """What the replay took."""
    computed_tokens: list[int] = field(default_factory=list)
    """Prompt tokens computed, per worker."""
    output_tokens: int = 0
    e2e_s: array[float] = field(default_factory=lambda: array("d"))
    """From arrival to the last token."""
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    ttft_error_s: array[float] = field(default_factory=lambda: array("d"))
    """Predicted against measured TTFT, of modes that predict it."""
    ttft_ratio: array[float] = field(default_factory=lambda: array("d"))
    """Measured TTFT as a multiple of the predicted one, of modes that predict it."""
    itl_s: array[float] = field(default_factory=lambda: array("f"))
    pick_s: array[float] = field(default_factory=lambda: array("d"))
    """CPU time of each decision, without hashing."""
    instance_s: float = 0.0
    """What the workers cost, each from the decision to start it until it has ended."""
    scaling_events: int = 0
    """How often the number of workers that a planner wanted changed."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One mode in numbers."""

    block_hit_rate: float
    """Share of the prompt blocks of accepted requests that were found in the cache of the worker that got them."""
    imbalance: float
    """Prompt tokens computed by the worker that computed most, against the mean of all; 1: perfectly even."""
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    ttft_error_p50_ms: float
    """Median error of the predicted TTFT; 0: the mode predicts none."""
    ttft_ratio_p50: float
    """Median of the measured TTFT as a multiple of the predicted one; 0: the mode predicts none."""
    e2e_mean_ms: float
    e2e_p90_ms: float
    tokens_per_s: float
    """Output tokens."""
    rejected_share: float
    goodput_rps: float
    """Requests per second that were completed within the goals."""
    goodput_share: float
    """The share of all requests that were."""
    instance_hours: float
    scaling_events: int
    offered_rps: float
    """Over the whole replay, until the last request is completed."""
    requests_per_s: float
    """Until the last request arrives."""
    preempted: int
    pick_p50_us: float
    pick_p99_us: float
    wall_s: float


def summary(figures: Figures) -> Summary:
    mean = sum(figures.computed_tokens) / len(figures.computed_tokens)
    ttft, itl, pick = (_percentiles_ms(values, 50, 90, 99) for values in (figures.ttft_s, figures.itl_s, figures.pick_s))
    return Summary(
        block_hit_rate=figures.hit_blocks / max(1, figures.prompt_blocks),
        imbalance=max(figures.computed_tokens) / mean if mean else 1.0,
        ttft_p50_ms=ttft[0],
        ttft_p90_ms=ttft[1],
        ttft_p99_ms=ttft[2],
        itl_p50_ms=itl[0],
        itl_p99_ms=itl[2],
        ttft_error_p50_ms=_percentiles_ms(figures.ttft_error_s, 50)[0],
        ttft_ratio_p50=float(np.median(figures.ttft_ratio)) if figures.ttft_ratio else 0.0,
        e2e_mean_ms=1e3 * sum(figures.e2e_s) / max(1, len(figures.e2e_s)),
        e2e_p90_ms=_percentiles_ms(figures.e2e_s, 90)[0],
        tokens_per_s=figures.output_tokens / figures.virtual_s if figures.virtual_s else 0.0,
        rejected_share=figures.rejected / figures.requests if figures.requests else 0.0,
        goodput_rps=figures.good.total() / figures.virtual_s if figures.virtual_s else 0.0,
        goodput_share=figures.good.total() / figures.requests if figures.requests else 0.0,
        instance_hours=figures.instance_s / 3600.0,
        scaling_events=figures.scaling_events,
        offered_rps=figures.requests / figures.virtual_s if figures.virtual_s else 0.0,
        requests_per_s=figures.requests / figures.arrivals_s if figures.arrivals_s else 0.0,
        preempted=figures.preempted,
        pick_p50_us=pick[0] * 1e3,
        pick_p99_us=pick[2] * 1e3,
        wall_s=figures.wall_s,
    )


def _percentiles_ms(values: array[float], *shares: float) -> list[float]:
    data: NDArray[np.float64] = np.array(values, dtype=np.float64)
    return [float(np.percentile(data, share)) * 1e3 for share in shares] if len(data) else [0.0] * len(shares)


_COLUMNS = (
    ("hit %", "block_hit_rate", 100.0),
    ("imbalance", "imbalance", 1.0),
    ("TTFT p50 ms", "ttft_p50_ms", 1.0),
    ("p90", "ttft_p90_ms", 1.0),
    ("p99", "ttft_p99_ms", 1.0),
    ("ITL p50 ms", "itl_p50_ms", 1.0),
    ("p99", "itl_p99_ms", 1.0),
    ("TTFT error p50 ms", "ttft_error_p50_ms", 1.0),
    ("TTFT ratio p50", "ttft_ratio_p50", 1.0),
    ("E2E mean ms", "e2e_mean_ms", 1.0),
    ("p90", "e2e_p90_ms", 1.0),
    ("tokens/s", "tokens_per_s", 1.0),
    ("rejected %", "rejected_share", 100.0),
    ("goodput/s", "goodput_rps", 1.0),
    ("goodput %", "goodput_share", 100.0),
    ("offered/s", "offered_rps", 1.0),
    ("instance hours", "instance_hours", 1.0),
    ("scalings", "scaling_events", 1.0),
    ("preempted", "preempted", 1.0),
    ("pick p99 µs", "pick_p99_us", 1.0),
)


def table(results: Mapping[str, Summary]) -> Iterator[str]:
    """Lines of Markdown, a row per mode."""
    yield "| mode | " + " | ".join(title for title, _, _ in _COLUMNS) + " |"
    yield "|---" * (len(_COLUMNS) + 1) + "|"
    for mode, figures in results.items():
        yield f"| {mode} | " + " | ".join(_shown(getattr(figures, key) * scale) for _, key, scale in _COLUMNS) + " |"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
