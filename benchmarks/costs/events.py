"""What is no request: KV events, routing decisions, and what a fleet does without requests."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.costs.deployment import Fleet, Loop, Plan, open_fleet
from benchmarks.costs.recording import Recorder
from dynamo.common.discovery import Instance
from dynamo.common.kv.events import KvUpdate, LoadReport, request_key
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.config import RouterMode
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.cache.hashing import PromptHashes
from dynamo.frontend.router.kv import KvRouter
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config
from tests.simulation.clock import Process

INSTANCES = 100
_IDLE_S = 15
_EVENTS = 20
_EVENT_BLOCKS = 4
_BETWEEN_EVENTS_S = 0.06
"""Longer than a load report waits, so that each event has one."""
_DECISIONS = 100
_PROMPT_BLOCKS = 64
_BLOCK_SIZE = 16
_LIVE = 32
"""Requests that run while one is routed."""
_IDLE = f"idle second with {INSTANCES} instances"
_EVENT = f"KV event of {_EVENT_BLOCKS} blocks stored and removed"


class SteppingEngine(SimEngine):
    """A simulated engine whose cache can change without a request."""

    def __init__(self) -> None:
        super().__init__(sim_config("speedup=0", "sim", None, None))
        self._stepped: list[Callable[[], None]] = []
        self._blocks = itertools.count(1)

    def on_step(self, callback: Callable[[], None]) -> None:
        super().on_step(callback)
        self._stepped.append(callback)

    def step(self) -> None:
        """Store some blocks and remove those before them."""
        first = next(self._blocks) * _EVENT_BLOCKS
        self.kv.remove(range(first - _EVENT_BLOCKS, first))
        self.kv.store(range(first, first + _EVENT_BLOCKS))
        for callback in self._stepped:
            callback()


async def count_idle(loop: Loop, recorder: Recorder) -> None:
    """Count what a frontend that routes by KV cache, and one of its workers, do without requests."""
    if recorder.wants(_IDLE):
        async with open_fleet(loop, recorder.count, Plan((SteppingEngine,), ("sim",), INSTANCES, RouterMode.KV)):
            await recorder.record(_IDLE, partial(asyncio.sleep, _IDLE_S), times=_IDLE_S, warm_up=1)


async def count_kv_events(loop: Loop, recorder: Recorder) -> None:
    """Count a change of a worker's cache, with the load report that follows it, in the worker and in the frontend."""
    if recorder.wants(_EVENT):
        engine = SteppingEngine()
        async with open_fleet(loop, recorder.count, Plan((lambda: engine,), ("sim",), mode=RouterMode.KV)) as fleet:
            await recorder.record(_EVENT, partial(_events, fleet, engine), times=_EVENTS)


async def _events(fleet: Fleet, engine: SteppingEngine) -> None:
    for _ in range(_EVENTS):
        fleet.loop.call_soon(engine.step, context=fleet.worker_process.context)
        await asyncio.sleep(_BETWEEN_EVENTS_S)


async def count_decisions(loop: Loop, recorder: Recorder) -> None:
    """Count a decision of the KV router, with the booking, the report that confirms it, and its end."""
    for instances in (8, 64):
        path = f"routing decision among {instances} instances"
        if not recorder.wants(path):
            continue
        process, decide = Process("frontend"), Decisions(instances, loop.time)

        async def decided(process: Process = process, decide: Decisions = decide) -> None:
            process.context.run(decide.some)

        await recorder.record(path, decided, times=_DECISIONS)


class Decisions:
    """Routes prompts of which a random part is cached somewhere."""

    def __init__(self, instances: int, clock: Callable[[], float]) -> None:
        llm = LlmInfo(context_length=1 << 20, tokenizer="", block_size=_BLOCK_SIZE, total_blocks=1 << 20)
        card = ModelCard(name="sim", kind=ModelKind.LLM, llm=llm)
        self._fleet = tuple(
            Instance(id=InstanceId(number + 1), endpoint=Endpoint(), subject="", card=card, started_at=0.0)
            for number in range(instances)
        )
        self._clock = clock
        self._router = KvRouter(rng=random.Random(1), clock=clock)
        self._rng = random.Random(2)
        self._held = [[self._rng.getrandbits(64) for _ in range(_PROMPT_BLOCKS)] for _ in range(instances)]
        for instance, blocks in zip(self._fleet, self._held, strict=True):
            self._router.index("sim").apply(instance.id, KvUpdate(0, stored=pack_hashes(blocks)))
        self._numbers = itertools.count()

    def some(self) -> None:
        for request in list(self._requests()):
            choice = self._router.pick(request, self._fleet)
            number = int(request.booking_id)
            accepted = pack_hashes([request_key(request.booking_id)])
            report = LoadReport(running=1, active_blocks=_PROMPT_BLOCKS, accepted=accepted)
            self._router.loads.report(choice.instance.id, report, self._clock())
            if number >= _LIVE:
                self._router.finished(str(number - _LIVE))

    def _requests(self) -> Iterator[RouteRequest]:
        for number in itertools.islice(self._numbers, _DECISIONS):
            shared = self._rng.randrange(_PROMPT_BLOCKS)
            fresh = [self._rng.getrandbits(64) for _ in range(_PROMPT_BLOCKS - shared)]
            hashes = PromptHashes(b"", _BLOCK_SIZE)
            hashes.values = self._rng.choice(self._held)[:shared] + fresh
            prompt = bytes(4 * _PROMPT_BLOCKS * _BLOCK_SIZE)
            yield RouteRequest(model="sim", booking_id=str(number), prompt=prompt, hashes=hashes)
