"""What a large fleet costs a frontend: changes of membership, listings, routing decisions by load, and shared bookings.

    python -m benchmarks.fleet_scale [--instances 5000] [--wave 500] [--models 1]

A frontend follows registrations in a real etcd that another process writes; the instances do not exist. Figures of waves are CPU
time of the frontend's process, from the first change until it is idle again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import uvloop

from benchmarks.deployment import bus
from dynamo.common.discovery import Instance, encode_registration
from dynamo.common.etcd import connect_etcd
from dynamo.common.kv.events import message_encoder
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.options import EtcdOptions, NatsOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import FrontendConfig, HttpOptions, KvRouterOptions, RouterMode, RouterOptions
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.shared_bookings import SharedBookings
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import ThresholdTable
from dynamo.frontend.router.policies.balance import LoadRouter, least_loaded, power_of_two

ENDPOINT = Endpoint()
_AT_ONCE = 64
_LOOKUP_EVERY_S = 0.005
_QUIET_S = 0.5
_SETTLE_S = 2.0
_CALLS = 5000
_REQUESTS = 10_000
_decoder = msgspec.msgpack.Decoder(SharedBookings)


def registration(number: int, models: int) -> Instance:
    """Return one of a fleet of language models whose caches differ in size."""
    llm = LlmInfo(context_length=131_072, tokenizer="", block_size=16, total_blocks=40_000 + number % 97)
    card = ModelCard(name=f"model-{number % models}", kind=ModelKind.LLM, llm=llm)
    id_ = InstanceId(1_000_000 + number)
    return Instance(id=id_, endpoint=ENDPOINT, subject=ENDPOINT.rpc_subject(id_), card=card, started_at=1e9 + number)


async def write(endpoint: str, puts: Iterable[Instance], deletes: Iterable[Instance]) -> None:
    """Put and delete registrations, many at once."""
    async with connect_etcd(EtcdOptions(endpoints=(endpoint,), timeout_s=60.0)) as etcd:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def change(instance: Instance, is_put: bool) -> None:
            async with turns:
                if is_put:
                    await etcd.put(instance.key, encode_registration(instance))
                else:
                    await etcd.delete(instance.key)

        async with asyncio.TaskGroup() as tasks:
            for instance in puts:
                tasks.create_task(change(instance, True))
            for instance in deletes:
                tasks.create_task(change(instance, False))


async def written(endpoint: str, models: int, puts: range, deletes: range) -> None:
    """Run `write` in a process of its own."""
    numbers = [str(number) for part in (puts, deletes) for number in (part.start, part.stop)]
    command = [sys.executable, "-m", "benchmarks.fleet_scale", "--write", endpoint, str(models), *numbers]
    child = await asyncio.create_subprocess_exec(*command)
    if await child.wait():
        raise RuntimeError("the registrations could not be written")


def registered(frontend: Frontend) -> int:
    return len(frontend.plane.models.registered())


async def wave(frontend: Frontend, endpoint: str, models: int, puts: range, deletes: range) -> float:
    """Return the CPU seconds of a wave of changes, while every 5 ms something looks up where a request may go."""
    expected = registered(frontend) + len(puts) - len(deletes)
    began = time.process_time()
    writing = asyncio.create_task(written(endpoint, models, puts, deletes))
    while not writing.done():
        await asyncio.sleep(_LOOKUP_EVERY_S)
        frontend.plane.model_ready("model-0")
    await writing
    while registered(frontend) != expected:  # noqa: ASYNC110  # followers would be part of what is measured
        await asyncio.sleep(_QUIET_S)
    await asyncio.sleep(_QUIET_S)
    return time.process_time() - began


async def measure_membership(options: argparse.Namespace) -> None:
    size, count, models = options.instances, options.wave, options.models
    waves = {
        "joins": (range(size, size + count), range(0)),
        "leaves": (range(0), range(count)),
        "half of each": (range(size + count, size + count * 3 // 2), range(count, count * 3 // 2)),
    }
    async with bus("fleet") as (_, etcd, nats):
        await written(etcd.endpoint, models, range(size), range(0))
        config = FrontendConfig(
            etcd=EtcdOptions(endpoints=(etcd.endpoint,)),
            nats=NatsOptions(servers=(nats.url,)),
            http=HttpOptions(port=0),
            # Instances that do not exist cannot be queried for their caches.
            router=RouterOptions(mode=RouterMode.KV, kv=KvRouterOptions(use_kv_events=False)),
        )
        began, wall = time.process_time(), time.perf_counter()
        async with serve_frontend(config) as frontend:
            used, waited = time.process_time() - began, time.perf_counter() - wall
            print(f"ready with {size} instances of {models} models: {used:.2f} CPU-s, {waited:.2f} s", flush=True)
            await asyncio.sleep(_SETTLE_S)
            for name, (puts, deletes) in waves.items():
                used = await wave(frontend, etcd.endpoint, models, puts, deletes)
                print(f"a wave of {count} {name}: {used:.2f} CPU-s", flush=True)


def fleet(size: int) -> tuple[Instance, ...]:
    return tuple(registration(number, 1) for number in range(size))


def measure_decisions(sizes: Sequence[int]) -> None:
    for name, strategy in (("power-of-two", power_of_two), ("least-loaded", least_loaded)):
        for size in sizes:
            router, instances = LoadRouter(name, strategy, ThresholdTable()), fleet(size)
            used = _per_call(lambda number: router.pick(RouteRequest(model="m", booking_id=str(number)), instances))  # noqa: B023
            print(f"{name} of {size}: {used * 1e6:.1f} µs", flush=True)


def measure_shared_bookings(size: int, per_s: int) -> None:
    """Print what a peer frontend's requests cost here, and sharing ours costs us, with prompts of different lengths."""
    for blocks in (32, 2048):
        here, there = (KvRouter(loads=LoadTable(name)) for name in ("here", "there"))
        here.loads.on_unshared(lambda: None)
        instances, rng = fleet(size), random.Random(0)
        sent = received = 0.0
        for start in range(0, _REQUESTS, per_s // 20):
            for number in range(start, start + per_s // 20):
                instance, hashes = rng.choice(instances).id, [rng.getrandbits(64) for _ in range(blocks)]
                here.loads.book(str(number), instance, number / per_s, prefill_tokens=blocks * 16, blocks=hashes)
                began = time.thread_time()
                here.loads.share_prompt(instance, hashes, 0.5)
                sent += time.thread_time() - began
                if number >= per_s:
                    here.loads.finished(str(number - per_s))
            began = time.thread_time()
            payloads = [message_encoder.encode(message) for message in here.loads.take_unshared(1000)]
            middle = time.thread_time()
            for payload in payloads:
                there.loads.apply(_decoder.decode(payload), start / per_s, lambda instance: True)
            sent, received = sent + middle - began, received + time.thread_time() - middle
        costs = f"{received / _REQUESTS * 1e6:.1f} µs at a peer, {sent / _REQUESTS * 1e6:.1f} µs here"
        print(f"a shared request of {blocks} blocks, {per_s} per second over {size} instances: {costs}", flush=True)


def _per_call(call: Callable[[int], object]) -> float:
    for number in range(100):
        call(-number)
    began = time.thread_time()
    for number in range(_CALLS):
        call(number)
    return (time.thread_time() - began) / _CALLS


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        endpoint, models, *numbers = sys.argv[2:]
        first, last, gone, gone_last = map(int, numbers)
        puts = (registration(number, int(models)) for number in range(first, last))
        deletes = (registration(number, int(models)) for number in range(gone, gone_last))
        uvloop.run(write(endpoint, puts, deletes))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", type=int, default=5000)
    parser.add_argument("--wave", type=int, default=500, help="registrations that change")
    parser.add_argument("--models", type=int, default=1)
    options = parser.parse_args()
    measure_decisions((10, 1000, options.instances))
    measure_shared_bookings(100, 2000)
    uvloop.run(measure_membership(options))


if __name__ == "__main__":
    main()
