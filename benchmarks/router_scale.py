"""What the KV index and a routing decision cost, for fleets of different sizes.

    python -m benchmarks.router_scale --entries 10000000 --instances 10 100 1000 --holders 1 --plot scale.png

Fills the index with prefixes of `--prompt-tokens` tokens, each held by `--holders` instances, by way of the updates that workers
send; then routes prompts that share a random part of a held prefix, with bookings and reports as in service. One process per
fleet size, so that memory is measured alone. Times are CPU time of the thread, so that other processes on the machine do not
count.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import KvMessage, KvUpdate, LoadReport, message_encoder, read_message, request_key
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.cache.hashing import PromptHashes
from dynamo.frontend.router.kv import KvRouter

MODEL = "scale"
BLOCK_SIZE = 16


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def percentile_us(values: Sequence[float], share: float) -> float:
    return float(np.percentile(np.array(values), share)) * 1e6


def measure(instances: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures for one fleet."""
    rng, numbers = random.Random(options.seed), np.random.default_rng(options.seed)
    llm = LlmInfo(context_length=1 << 20, tokenizer="", block_size=BLOCK_SIZE, total_blocks=1 << 20)
    card = ModelCard(name=MODEL, kind=ModelKind.LLM, llm=llm)
    fleet = tuple(
        Instance(id=InstanceId(number + 1), endpoint=Endpoint(), subject="", card=card, started_at=0.0)
        for number in range(instances)
    )
    router = KvRouter()
    index = router.index(MODEL)
    blocks = options.prompt_tokens // BLOCK_SIZE
    holders = min(options.holders, instances)
    prefixes = max(1, options.entries // blocks // holders)
    before, apply_s, applied, updates = resident_bytes(), 0.0, 0, 0
    held: list[bytes] = []
    for number in range(prefixes):
        packed = pack_hashes(numbers.integers(0, 2**64, blocks, dtype=np.uint64).tolist())
        if number % max(1, prefixes // 200) == 0:
            held.append(packed)
        for instance in rng.sample(fleet, holders):
            for start in range(0, len(packed), options.update_blocks * 8):
                update = KvUpdate(updates, stored=packed[start : start + options.update_blocks * 8])
                wire = message_encoder.encode(KvMessage(MODEL, update))
                updates += 1
                begin = time.thread_time()
                index.apply(instance.id, read_message(wire).update)
                apply_s += time.thread_time() - begin
        applied += blocks * holders
    used = resident_bytes() - before - sum(map(len, held))
    picks, matches, walls = decide(router, fleet, held, blocks, rng, options)
    begin = time.thread_time()
    router.removed(fleet[0].id)
    removal_s = time.thread_time() - begin
    return {
        "instances": instances,
        "entries": applied,
        "events_per_s": applied / apply_s,
        "bytes_per_entry": used / applied,
        "match_p50_us": percentile_us(matches, 50),
        "match_p99_us": percentile_us(matches, 99),
        "pick_p50_us": percentile_us(picks, 50),
        "pick_p99_us": percentile_us(picks, 99),
        "pick_wall_p99_us": percentile_us(walls, 99),
        "remove_instance_us": removal_s * 1e6,
    }


def decide(
    router: KvRouter,
    fleet: tuple[Instance, ...],
    held: Sequence[bytes],
    blocks: int,
    rng: random.Random,
    options: argparse.Namespace,
) -> tuple[list[float], list[float], list[float]]:
    """Times of whole decisions (CPU), of matching alone (CPU) and of whole decisions (wall clock), in seconds."""
    index = router.index(MODEL)
    picks: list[float] = []
    matches: list[float] = []
    walls: list[float] = []
    prompt = bytes(options.prompt_tokens * 4)
    for number in range(options.picks):
        shared = rng.randrange(blocks)
        fresh = [rng.getrandbits(64) for _ in range(blocks - shared)]
        hashes = np.frombuffer(rng.choice(held), dtype="<u8")[:shared].tolist() + fresh
        begin = time.thread_time()
        index.match(hashes)
        matches.append(time.thread_time() - begin)
        prompt_hashes = PromptHashes(b"", BLOCK_SIZE)
        prompt_hashes.values = hashes
        request = RouteRequest(model=MODEL, booking_id=str(number), prompt=prompt, hashes=prompt_hashes)
        begin, wall = time.thread_time(), time.perf_counter()
        choice = router.pick(request, fleet)
        picks.append(time.thread_time() - begin)
        walls.append(time.perf_counter() - wall)
        accepted = pack_hashes([request_key(request.booking_id)])
        router.loads.report(choice.instance.id, LoadReport(running=1, active_blocks=blocks, accepted=accepted), time.monotonic())
        if number >= options.live:
            router.finished(str(number - options.live))
    return picks, matches, walls


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--entries", type=int, default=10_000_000, help="(block, instance) pairs in the index")
    parser.add_argument("--holders", type=int, default=1, help="instances that hold each block")
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument("--update-blocks", type=int, default=64, help="blocks per update message")
    parser.add_argument("--picks", type=int, default=3000)
    parser.add_argument("--live", type=int, default=64, help="requests in flight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--plot", type=Path, help="draw the cost of a decision over the size of the fleet; needs matplotlib")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # this process measures one fleet, the first
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measure(options.instances[0], options)))
        return
    measured: list[dict[str, float]] = []
    for instances in options.instances:
        command = [sys.executable, __file__, *sys.argv[1:], "--alone", "--instances", str(instances)]
        line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        figures: dict[str, float] = json.loads(line)
        if options.json:
            print(line.strip(), flush=True)
        else:
            if not measured:
                print("| " + " | ".join(figures) + " |")
                print("|---" * len(figures) + "|")
            print("| " + " | ".join(f"{value:,.0f}" for value in figures.values()) + " |", flush=True)
        measured.append(figures)
    if options.plot is not None:
        draw(measured, options.plot)


def draw(measured: Sequence[dict[str, float]], path: Path) -> None:
    """Cost of a decision over the size of the fleet, and what it would be if it grew as the fleet does."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    instances = [each["instances"] for each in measured]
    for key, label in (
        ("pick_p99_us", "decision, p99"),
        ("pick_p50_us", "decision, p50"),
        ("match_p50_us", "matching alone, p50"),
    ):
        axes.plot(instances, [each[key] for each in measured], marker="o", label=label)
    first = measured[0]["pick_p50_us"]
    line = [first * each / instances[0] for each in instances]
    axes.plot(instances, line, linestyle=":", color="grey", label="as the fleet grows")
    axes.set(xscale="log", yscale="log", xlabel="instances", ylabel="CPU time, µs")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
