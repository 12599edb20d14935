"""How well the KV router predicts latencies of vLLM: two workers with a model of two layers on the CPU, and real steps.

    .venv-vllm/bin/python -m benchmarks.router_vllm        in the environment that `make test-vllm` makes

Clients send prompts of groups with common prefixes, one after the other. Shown are errors as shares of what was measured: of the
steps between two load reports, as predicted before the router learns from them, and of the time to first token, as predicted by
the decision. What the same equation would reach, fitted in hindsight to just these steps, tells how much of the error is noise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dynamo.common.generation import Sampling, Stop
from dynamo.common.kv.events import NO_STEPS, LoadReport, StepTotals
from dynamo.common.names import InstanceId
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import FrontendConfig, HttpOptions, RouterMode, RouterOptions
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.router.base import RouterWrapper
from dynamo.frontend.router.cost.step_model import StepModel
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.instance_load import InstanceLoad
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call
from tests.support.processes import worker
from tests.support.servers import start_etcd, start_nats
from tests.support.tiny_llama import make_tiny_llama
from tests.support.waiting import until

ENGINE = "--enforce-eager --dtype float32 --block-size 32 --kv-cache-memory-bytes 64M"
NAMESPACE = "router-vllm"
WORKERS = 2
GROUPS = 8
START_TIMEOUT_S = 400.0


@dataclass
class Measured:
    """Pairs of predicted and measured seconds."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    work: list[tuple[int, int, int, int]] = field(default_factory=list)
    """What was done in these steps: their number, prompt tokens, sequences and KV blocks."""
    ttft: list[tuple[float, float]] = field(default_factory=list)


class StepsMeasured:
    """Compares each load report with what a model predicts that has learned from those before it."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._model = StepModel()
        self._totals: dict[InstanceId, StepTotals] = {}

    def report(self, row: InstanceLoad, model: str, report: LoadReport, now: float) -> None:
        before = self._totals.get(row.instance, NO_STEPS)
        window = report.totals - before
        self._totals[row.instance] = report.totals
        if before.steps and window.steps > 0:
            work = (window.steps, window.prefill_tokens, window.sequences, window.blocks)
            self._measured.steps.append((self._model.times.window_s(*work), window.seconds))
            self._measured.work.append(work)
        self._model.report(row.instance, report.totals, now)


def router_of(frontend: Frontend) -> KvRouter:
    router = frontend.plane.router
    while isinstance(router, RouterWrapper):
        router = router.inner
    assert isinstance(router, KvRouter)
    return router


def random_prompt(rng: random.Random) -> str:
    """A token is a byte."""
    prefix = f"group {rng.randrange(GROUPS)}; " * 80
    return prefix + "".join(chr(rng.randint(97, 122)) for _ in range(rng.randint(50, 700)))


async def send(frontend: Frontend, rng: random.Random, number: int, measured: Measured) -> None:
    stop = Stop(max_tokens=rng.randint(5, 60), ignore_eos=True)
    request = TextRequest(model="tiny", prompt=random_prompt(rng), stop=stop, sampling=Sampling(temperature=0.0))
    begun = time.perf_counter()
    first_s = 0.0
    model, call = frontend.plane.model(ANONYMOUS, request.model), Call(account=ANONYMOUS, request_id=f"{number}")
    async with frontend.plane.generate(model, request, call) as generation:
        while await generation.read():
            first_s = first_s or time.perf_counter() - begun
        assert generation.decision is not None and generation.decision.ttft_s is not None
        measured.ttft.append((generation.decision.ttft_s, first_s))


async def measure(clients: int, requests: int, seed: int) -> Measured:
    measured = Measured()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "tiny")
        flags = ("--engine", "vllm", "--model", str(model), "--engine-args", ENGINE)
        async with start_etcd(Path(folder) / "etcd") as etcd, start_nats(Path(folder) / "nats") as nats:
            config = FrontendConfig(
                namespace=NAMESPACE,
                router=RouterOptions(mode=RouterMode.KV),
                http=HttpOptions(port=0),
                log=LogOptions(),
                etcd=EtcdOptions(endpoints=(etcd.endpoint,)),
                nats=NatsOptions(servers=(nats.url,)),
            )
            async with (
                worker(etcd, nats, NAMESPACE, *flags),
                worker(etcd, nats, NAMESPACE, *flags),
                serve_frontend(config) as frontend,
            ):
                await until(lambda: len(frontend.plane.models.instances("tiny")) == WORKERS, START_TIMEOUT_S)
                router_of(frontend).loads.on_report(StepsMeasured(measured).report)
                rng, numbers = random.Random(seed), iter(range(requests))

                async def client() -> None:
                    for number in numbers:
                        await send(frontend, rng, number, measured)

                async with asyncio.TaskGroup() as tasks:
                    for _ in range(clients):
                        tasks.create_task(client())
    return measured


def best_in_hindsight(measured: Measured) -> list[tuple[float, float]]:
    """Return what the equation of the step model predicts with the best coefficients, by iteratively reweighted squares."""
    work, seconds = np.array(measured.work, dtype=float), np.array([each for _, each in measured.steps])
    predicted = seconds
    for _ in range(100):
        weights = 1.0 / np.sqrt(np.maximum(abs(predicted - seconds) / seconds, 0.02)) / seconds
        coefficients, *_ = np.linalg.lstsq(work * weights[:, None], seconds * weights, rcond=None)
        predicted = work @ np.maximum(coefficients, 0.0)
    return list(zip(predicted.tolist(), seconds.tolist(), strict=True))


def shown(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the errors in the second half of the pairs: the first half is for learning."""
    predicted, seconds = np.array(pairs[len(pairs) // 2 :]).T
    errors = abs(predicted - seconds) / seconds
    medians = f"{np.median(predicted) * 1e3:.1f} ms predicted, {np.median(seconds) * 1e3:.1f} ms measured"
    return f"{np.median(errors):.1%} in the median of {len(errors)}; medians: {medians}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    measured = asyncio.run(measure(options.clients, options.requests, options.seed))
    print(f"error of steps between reports: {shown(measured.steps)}")
    print(f"the same, fitted in hindsight: {shown(best_in_hindsight(measured))}")
    print(f"error of the time to first token: {shown(measured.ttft)}")


if __name__ == "__main__":
    main()
