"""Routing with caches beyond the GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dynamo.common.discovery import Instance
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvSnapshot, KvUpdate
from dynamo.common.kv.hashes import pack_hashes, sequence_hashes
from dynamo.common.kv.tiers import Tier, TierChange
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.config import KvRouterOptions
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.fetch import TierCount
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.thresholds import ThresholdTable
from dynamo.frontend.router.simple import RoundRobin

SIZE = 16
PROMPT = pack_tokens(range(100 * SIZE))
HASHES = sequence_hashes(PROMPT, SIZE)
BLOCK_S = SIZE * 0.125e-3
"""What computing a block takes before anything is learned."""
CARD = ModelCard(
    name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=1 << 20, tokenizer="", block_size=SIZE, total_blocks=1000)
)
FLEET = tuple(Instance(id=InstanceId(number), endpoint=Endpoint(), subject="", card=CARD, started_at=0.0) for number in (1, 2, 3))
A, B, C = (instance.id for instance in FLEET)


class Fleet:
    def __init__(self, **options: object) -> None:
        self.now = 100.0
        config = KvRouterOptions(speculative_ttl_s=0.0, **options)  # type: ignore[arg-type]
        self.router = KvRouter(config, ThresholdTable(), rng=random.Random(0), clock=lambda: self.now)
        self._number = 0

    def store(self, instance: InstanceId, tier: Tier, blocks: Sequence[int]) -> None:
        packed = pack_hashes(blocks)
        tiers = () if tier is Tier.GPU else (TierChange(tier.value, packed),)
        self.router.apply("m", instance, KvUpdate(0, packed if tier is Tier.GPU else b"", tiers=tiers))

    def route(self, prompt: bytes = PROMPT, **fields: object) -> tuple[RouteRequest, RoutingDecision]:
        self._number += 1
        request = RouteRequest(model="m", booking_id=str(self._number), prompt=prompt, **fields)  # type: ignore[arg-type]
        return request, self.router.pick(request, FLEET, explain=True)

    def serve(self, pinned: InstanceId, fetch_s: float) -> RoutingDecision:
        """Route a request whose first token comes when predicted, but for the time of fetching, which is `fetch_s`."""
        request, decision = self.route(pinned=pinned)
        assert decision.ttft_s is not None and decision.fetch is not None
        began = self.now
        self.now = began + decision.ttft_s - decision.fetch.assumed_s + fetch_s
        self.router.first_token(request.booking_id)
        self.router.finished(request.booking_id)
        self.now = began + 60.0
        return decision


def test_a_prompt_in_host_memory_is_better_than_none_and_worse_than_one_on_the_gpu() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.CPU, HASHES[:80])
    _, decision = fleet.route()
    assert (decision.instance.id, decision.overlap_blocks) == (A, 0)
    assert decision.fetch is not None
    assert decision.fetch.hits == ((Tier.CPU, 80),)
    assert decision.reason == "kv"
    fleet.router.finished("1")
    fleet.store(B, Tier.GPU, HASHES[:80])
    assert fleet.route()[1].instance.id == B


def test_a_block_on_several_tiers_counts_once_on_the_fastest() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.GPU, HASHES[:30])
    fleet.store(A, Tier.CPU, HASHES[:50])
    fleet.store(A, Tier.DISK, HASHES[:90])
    _, decision = fleet.route()
    assert decision.fetch is not None
    assert (decision.overlap_blocks, decision.fetch.hits) == (30, ((Tier.CPU, 20), (Tier.DISK, 40)))
    assert decision.fetch.fetched == 60


def test_a_hit_in_the_shared_store_prefers_no_instance_and_shortens_the_prefill_of_each() -> None:
    fleet = Fleet()
    _, without = fleet.route()
    fleet.router.finished("1")
    fleet.store(A, Tier.SHARED, HASHES[:90])
    _, decision = fleet.route()
    assert len({candidate["cost"] for candidate in decision.candidates}) == 1
    assert [candidate["shared_blocks"] for candidate in decision.candidates] == [90, 90, 90]
    assert decision.ttft_s is not None and without.ttft_s is not None
    saved_s = without.ttft_s - decision.ttft_s
    assert 0.0 < saved_s < 90 * BLOCK_S


def test_an_explanation_shows_hits_and_prices_by_tier() -> None:
    fleet = Fleet(tier_price=((Tier.CPU, 0.0002),))
    fleet.store(A, Tier.CPU, HASHES[:10])
    shown = {candidate["instance"]: candidate for candidate in fleet.route()[1].candidates}
    assert (shown["1"]["cpu_blocks"], shown["1"]["cpu_block_ms"]) == (10, 0.2)
    assert "cpu_blocks" not in shown["2"]


def test_a_tier_that_is_dearer_than_computing_is_not_chased() -> None:
    fleet = Fleet(tier_price=((Tier.DISK, 1.1 * BLOCK_S),))
    fleet.store(A, Tier.DISK, HASHES)
    _, decision = fleet.route()
    assert len({candidate["cost"] for candidate in decision.candidates}) == 1
    assert decision.fetch is None or decision.fetch.fetched == 0


def test_the_price_of_a_tier_is_learned_from_first_tokens() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.CPU, HASHES[:90])
    for _ in range(60):
        fleet.serve(A, fetch_s=90 * 0.7e-3)
        fleet.serve(B, fetch_s=0.0)
    prices = [candidate.get("cpu_block_ms") for candidate in fleet.route()[1].candidates]
    assert pytest.approx(0.7, rel=0.1) in [price for price in prices if price is not None]


def test_a_tier_that_turns_out_slow_loses_the_requests() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.DISK, HASHES[:90])
    assert fleet.route()[1].instance.id == A
    fleet.router.finished("1")
    for _ in range(40):
        fleet.serve(A, fetch_s=90 * 3 * BLOCK_S)
    assert len({candidate["cost"] for candidate in fleet.route()[1].candidates}) == 1


def test_what_is_fetched_is_not_booked_as_work() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.CPU, HASHES)
    fleet.route()
    [load] = [each for each in fleet.route()[1].candidates if each["instance"] == "1"]
    assert load["requests"] == 1
    assert load["prefill_tokens"] == 1, "an engine computes at least the last token of a prompt"


def test_missing_tokens_leave_out_what_is_fetched() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.CPU, HASHES[:60])
    request = RouteRequest(model="m", prompt=PROMPT)
    assert fleet.router.missing_tokens(request, FLEET) == 40 * SIZE


def test_a_fleet_without_slow_tiers_has_nothing_to_fetch() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.GPU, HASHES[:10])
    request, decision = fleet.route()
    assert decision.fetch is None
    assert fleet.router.found_cached(request, decision, 160) == ()
    assert RoundRobin().found_cached(request, decision, 160) == ()


def test_tiers_are_part_of_a_snapshot() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.CPU, [1, 2, 3])
    fleet.router.replace("m", A, KvSnapshot(4, pack_hashes(HASHES[:5]), (TierChange("cpu", pack_hashes(HASHES[5:40])),)))
    _, decision = fleet.route()
    assert decision.fetch is not None
    assert (decision.overlap_blocks, decision.fetch.hits) == (5, ((Tier.CPU, 35),))
    assert fleet.router.index("m").held(A, Tier.CPU) == set(HASHES[5:40])


def test_what_an_engine_found_is_compared_by_tier() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.GPU, HASHES[:10])
    fleet.store(A, Tier.CPU, HASHES[:30])
    fleet.store(A, Tier.SHARED, HASHES[:50])
    request, decision = fleet.route(pinned=A)
    found = [list(fleet.router.found_cached(request, decision, SIZE * blocks)) for blocks in (50, 24, 4)]
    assert found == [
        [TierCount(Tier.GPU, 10, 10), TierCount(Tier.CPU, 20, 20), TierCount(Tier.SHARED, 20, 20)],
        [TierCount(Tier.GPU, 10, 10), TierCount(Tier.CPU, 20, 14), TierCount(Tier.SHARED, 20, 0)],
        [TierCount(Tier.GPU, 10, 4), TierCount(Tier.CPU, 20, 0), TierCount(Tier.SHARED, 20, 0)],
    ]


def test_blocks_that_a_store_lost_without_a_word_are_not_counted_on_until_they_are_announced_anew() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.SHARED, HASHES[:50])
    request, decision = fleet.route(pinned=B)
    fleet.router.found_cached(request, decision, SIZE * 20)
    for instance in (A, B):
        fetch = fleet.route(pinned=instance)[1].fetch
        assert fetch is not None and fetch.hits == ((Tier.SHARED, 20),)
    fleet.store(C, Tier.SHARED, HASHES[20:21])
    fetch = fleet.route(pinned=A)[1].fetch
    assert fetch is not None and fetch.hits == ((Tier.SHARED, 50),)


def test_host_memory_whose_removals_are_announced_is_not_doubted() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.CPU, HASHES[:50])
    request, decision = fleet.route(pinned=A)
    fleet.router.found_cached(request, decision, SIZE * 20)
    fetch = fleet.route(pinned=A)[1].fetch
    assert fetch is not None and fetch.hits == ((Tier.CPU, 50),)


def test_an_instance_that_never_reports_cached_tokens_says_nothing_by_that() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.SHARED, HASHES[:50])
    request, decision = fleet.route(pinned=A)
    assert not fleet.router.found_cached(request, decision, 0)
    fetch = fleet.route(pinned=A)[1].fetch
    assert fetch is not None and fetch.hits == ((Tier.SHARED, 50),)
    fleet.router.found_cached(request, decision, SIZE * 50)
    assert fleet.router.found_cached(request, decision, 0)[1] == TierCount(Tier.SHARED, 50, 0)


def test_while_caches_are_unknown_slow_tiers_are_as_well() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.CPU, HASHES)
    fleet.router.set_current(False)
    decision = fleet.route()[1]
    assert decision.fetch is not None and not decision.fetch.hits
    assert decision.reason == "kv: caches unknown"


def test_an_instance_that_leaves_takes_its_tiers_with_it() -> None:
    fleet = Fleet()
    fleet.store(A, Tier.CPU, HASHES)
    fleet.store(B, Tier.CPU, HASHES[:7])
    fleet.router.removed(A)
    decision = fleet.route(pinned=B)[1]
    assert [candidate.get("cpu_blocks", 0) for candidate in decision.candidates] in ([7, 0, 0], [0, 0, 7], [0, 7, 0])


def test_a_block_that_moves_to_host_memory_has_not_been_evicted() -> None:
    """Placements pay for evictions that have blocks computed again: fetching them back is no computing."""
    costs = []
    for tier in (None, "cpu"):
        fleet = Fleet()
        fleet.route()  # from here on the instances' roles are known
        fleet.router.finished("1")
        blocks = [number << 4 for number in range(1, 200)]
        for number in range(40):
            packed = pack_hashes(blocks)
            tiers = () if tier is None else (TierChange(tier, packed),)
            fleet.router.apply("m", A, KvUpdate(number, stored=packed))
            fleet.router.apply("m", A, KvUpdate(number, removed=packed, tiers=tiers))
        fleet.router.apply("m", A, KvUpdate(99, tiers=(TierChange("cpu", pack_hashes([77])),)))
        costs.append(fleet.route(pinned=A)[1].cost)
    assert costs[1] < costs[0]
