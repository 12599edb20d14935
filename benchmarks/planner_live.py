"""`dynamo-local --planner` for real on this machine: simulated engines under a load that swings, and a planner that is killed.

    python -m benchmarks.planner_live --seconds 300

Requests have prompts of 4,000 tokens, which take an engine half a second, and come at 0.5 to 4 per second and back, twice. The
planner is killed half way. Shown are the requests, those that failed, how many workers served, and how long the first token took
as a multiple of what the router predicted: the median of what the planner saw over time, and two shares around 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import httpx2
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.deployment import process
from benchmarks.measuring import children
from dynamo.common.process.ports import free_ports

_PROMPT_TOKENS, _OUTPUT_TOKENS = 4000, 30
_LEAST_PER_S, _MOST_PER_S = 0.5, 4.0
_LOOK_EVERY_S = 5.0
_START_S = 120.0


class Seen(msgspec.Struct):
    """What happened in a run."""

    requests: int = 0
    failed: int = 0
    ttft_s: list[float] = []
    instances: list[int] = []
    ratios: list[float] = []
    """What the planner sees, at each look: observed over predicted, the median of the last requests."""
    away: int = 0
    """Looks at which no planner answered."""


async def send(client: httpx2.AsyncClient, number: int, seen: Seen) -> None:
    body = {
        "model": "sim",
        "prompt": random.Random(number).choices(range(1, 250), k=_PROMPT_TOKENS),
        "max_tokens": _OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    begin, text = time.perf_counter(), ""
    seen.requests += 1
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for part in response.aiter_text():
                if not text:
                    seen.ttft_s.append(time.perf_counter() - begin)
                text += part
            is_whole = response.status_code == 200 and text.endswith("data: [DONE]\n\n") and '"error"' not in text
    except httpx2.HTTPError:
        is_whole = False
    seen.failed += not is_whole


async def load(client: httpx2.AsyncClient, seconds: float, seen: Seen) -> None:
    rng, begin = random.Random(1), time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        while (passed := time.monotonic() - begin) < seconds:
            swing = (1.0 - math.cos(4.0 * math.pi * passed / seconds)) / 2.0
            tasks.create_task(send(client, seen.requests, seen))
            await asyncio.sleep(rng.expovariate(_LEAST_PER_S + swing * (_MOST_PER_S - _LEAST_PER_S)))


async def look(client: httpx2.AsyncClient, seen: Seen) -> None:
    """Note what the planner shows, until cancelled."""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        try:
            shown = (await client.get("/explain")).json()
        except httpx2.HTTPError:
            seen.away += 1
            continue
        for pool in shown["pools"]:
            seen.instances.append(pool["instances"])
            if pool["ttft_ratio"]:
                seen.ratios.append(pool["ttft_ratio"])


def planner_of(local: int) -> int:
    """Return the process id of the planner that `dynamo-local` has started."""
    for pid in children(local):
        if b"dynamo.planner" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return pid
    raise SystemExit("dynamo-local has no planner")


def shares_within(metrics: str) -> Sequence[float]:
    """Return the shares of first tokens that took 0.8 to 1.25 and 0.8 to 1.1 times as long as predicted."""
    buckets: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "dynamo_frontend_router_ttft_ratio_bucket":
                buckets[sample.labels["le"]] = sample.value
    return [(buckets[most] - buckets["0.8"]) / buckets["+Inf"] for most in ("1.25", "1.1")]


async def run(seconds: float) -> None:
    seen = Seen()
    http, grpc, status = free_ports(3)
    flags = [
        "--model",
        "sim:speedup=1",
        "--workers",
        "1",
        "--no-ask",
        "--router-mode",
        "kv",
        "--http-port",
        str(http),
        "--grpc-port",
        str(grpc),
    ]
    planning = ["--planner", "--ttft-ms", "3000", "--max-instances", "4", "--startup-time", "15", "--cool-down", "30"]
    with tempfile.TemporaryDirectory() as folder:
        where = ["--folder", folder, f"--planner-flag=--status-port={status}"]
        command = [sys.executable, "-m", "dynamo.local", *flags, *planning, *where]
        async with (
            process(command, dict(os.environ), Path(folder) / "local.log") as local,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{http}", timeout=120.0) as client,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{status}", timeout=2.0) as planner,
        ):
            await until_ready(client)
            looking = asyncio.create_task(look(planner, seen))
            asyncio.get_running_loop().call_later(seconds / 2, lambda: os.kill(planner_of(local.pid), signal.SIGKILL))
            await load(client, seconds, seen)
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
            metrics = (await client.get("/metrics")).text
    wide, narrow = shares_within(metrics)
    times = sorted(seen.ttft_s)
    print(
        json.dumps(
            {
                "requests": seen.requests,
                "failed": seen.failed,
                "instances": [min(seen.instances), max(seen.instances)],
                "ttft_p50_s": round(median(times), 3),
                "ttft_p99_s": round(times[int(0.99 * (len(times) - 1))], 3),
                "within_3_s": round(sum(each <= 3.0 for each in times) / len(times), 3),
                "ttft_ratio_p50": round(median(seen.ratios), 3),
                "ratio_0.8_to_1.25": round(wide, 3),
                "ratio_0.8_to_1.1": round(narrow, 3),
                "looks_without_planner": seen.away,
            }
        )
    )


async def until_ready(client: httpx2.AsyncClient) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(_START_S):
        while True:
            with suppress(httpx2.HTTPError, ValueError):
                models = (await client.get("/v1/models")).json()["data"]
                if any(model["id"] == "sim" for model in models):
                    return
            await asyncio.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    asyncio.run(run(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
