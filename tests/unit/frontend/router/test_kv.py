"""Decisions of the KV router. Most prompts here are far too short to take seconds, so its cost is that by weights."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from dynamo.common.discovery import Instance
from dynamo.common.errors import InvalidRequest, NoInstances, Overloaded
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvSnapshot, KvUpdate, LoadReport
from dynamo.common.kv.hashes import pack_hashes, sequence_hashes, space_hash
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.config import KvCost, KvRouterOptions
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.cache.hashing import PromptHashes
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import NEVER_BUSY, Thresholds, ThresholdTable
from dynamo.frontend.router.measured import MeasuredRouter

SIZE = 4


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def fleet(count: int, total_blocks: int = 1000) -> tuple[Instance, ...]:
    llm = LlmInfo(context_length=4096, tokenizer="", block_size=SIZE, total_blocks=total_blocks)
    card = ModelCard(name="m", kind=ModelKind.LLM, llm=llm)
    return tuple(
        Instance(id=InstanceId(number + 1), endpoint=Endpoint(), subject="", card=card, started_at=0.0) for number in range(count)
    )


FLEET = fleet(3)
A, B, C = (instance.id for instance in FLEET)
PROMPT = pack_tokens(range(40))
HASHES = sequence_hashes(PROMPT, SIZE)
WEIGHTS = KvRouterOptions(cost=KvCost.WEIGHTS)


def router(
    config: KvRouterOptions | None = None, thresholds: Thresholds = NEVER_BUSY, clock: FakeClock | None = None
) -> KvRouter:
    return KvRouter(config or WEIGHTS, ThresholdTable(thresholds), rng=random.Random(0), clock=clock or FakeClock())


def ask(
    router: KvRouter,
    booking_id: str = "r",
    prompt: bytes = PROMPT,
    candidates: Sequence[Instance] = FLEET,
    **fields: object,
) -> RoutingDecision:
    return router.pick(RouteRequest(model="m", booking_id=booking_id, prompt=prompt, **fields), candidates)  # type: ignore[arg-type]


def store(router: KvRouter, instance: InstanceId, blocks: Sequence[int]) -> None:
    router.apply("m", instance, KvUpdate(0, stored=pack_hashes(blocks)))


def test_the_longest_cached_prefix_wins() -> None:
    kv = router()
    store(kv, A, HASHES[:3])
    store(kv, B, HASHES[:7])
    decision = ask(kv)
    assert (decision.instance.id, decision.overlap_blocks) == (B, 7)


def test_load_outweighs_a_short_prefix() -> None:
    kv = router()
    store(kv, A, HASHES[:1])
    kv.loads.report(A, LoadReport(queued_prefill_tokens=5000), 100.0)
    assert ask(kv).instance.id != A


def test_the_cost_is_what_the_module_says() -> None:
    kv = router(KvRouterOptions(overlap_score_weight=2.0, prefill_load_scale=3.0))
    store(kv, A, HASHES[:4])
    kv.loads.report(A, LoadReport(queued_prefill_tokens=8, active_blocks=5), 100.0)
    decision = kv.pick(RouteRequest(model="m", prompt=PROMPT), FLEET, explain=True)
    by_instance = {candidate["instance"]: candidate for candidate in decision.candidates}
    assert by_instance["1"] == {
        "instance": "1",
        "cost": 3 * ((8 + 40) / SIZE - 2 * 4) + 5,
        "overlap_blocks": 4,
        "prefill_tokens": 8,
        "decode_blocks": 5,
        "kv_usage": 0.005,
        "requests": 0,
    }
    assert by_instance["2"]["cost"] == 3 * 40 / SIZE
    assert [candidate["cost"] for candidate in decision.candidates] == sorted(
        candidate["cost"] for candidate in decision.candidates
    )
    assert decision.cost == decision.candidates[0]["cost"]


def test_equal_instances_get_equally_many_requests() -> None:
    kv = router(KvRouterOptions(cost=KvCost.WEIGHTS, speculative_ttl_s=0.0))
    counts: Counter[int] = Counter()
    for number in range(300):
        counts[ask(kv, str(number)).instance.id] += 1
        kv.finished(str(number))
    assert set(counts) == {A, B, C}
    assert min(counts.values()) >= 98


def test_an_instance_that_is_new_is_not_owed_what_others_got_before() -> None:
    """Also if it comes back again and again under a new id, and is alone among the candidates of its first request."""
    kv = router(KvRouterOptions(cost=KvCost.WEIGHTS, speculative_ttl_s=0.0))
    for number in range(300):
        ask(kv, str(number))
        kv.finished(str(number))
    got = 0
    for number in range(30):
        late = fleet(130)[100 + number]
        if number % 2:
            kv.loads.rows((late,))
        chosen = kv.pick(RouteRequest(model="m", booking_id=f"late {number}"), (*FLEET[:2], late)).instance.id
        kv.finished(f"late {number}")
        got += chosen == late.id
    assert got <= 15


def burst(routers: Sequence[KvRouter]) -> int:
    """How many instances get a part of 100 prompts that have 128 blocks in common, all sent before any event comes."""
    common = pack_tokens(range(128 * SIZE))
    prompts = [common + pack_tokens([number] * SIZE) for number in range(100)]
    return len({ask(routers[number % len(routers)], str(number), prompt).instance.id for number, prompt in enumerate(prompts)})


def test_a_burst_of_a_hundred_requests_with_one_prefix_lands_together() -> None:
    assert burst([router()]) == 1


def test_a_burst_of_requests_with_one_prefix_over_two_frontends_that_share_bookings_lands_together() -> None:
    assert burst(sharing_bookings(WEIGHTS, 2)) == 1


def test_without_speculation_a_burst_scatters() -> None:
    config = KvRouterOptions(cost=KvCost.WEIGHTS, speculative_ttl_s=0.0)
    assert burst([router(config)]) == 3
    assert burst(sharing_bookings(config, 2)) == 3


def test_a_prompt_at_a_peer_counts_as_cached_to_within_half() -> None:
    one, other = sharing_bookings(WEIGHTS, 2)
    prompt = pack_tokens(range(100 * SIZE))
    here = ask(one, prompt=prompt).instance
    there = ask(other, "s", prompt)
    assert there.instance == here
    assert 50 <= there.overlap_blocks <= 100


def test_a_guess_that_no_event_confirms_is_forgotten() -> None:
    clock = FakeClock()
    kv = router(clock=clock)
    first = ask(kv).instance.id
    clock.now += 1.9
    assert ask(kv, "s").overlap_blocks == len(HASHES)
    assert ask(kv, "s").instance.id == first
    clock.now += 2.1
    assert ask(kv, "t").overlap_blocks == 0


def test_without_events_decisions_are_remembered_for_their_ttl() -> None:
    clock = FakeClock()
    kv = router(KvRouterOptions(cost=KvCost.WEIGHTS, use_kv_events=False, ttl_s=120.0), clock=clock)
    store(kv, A, HASHES)
    first = ask(kv)
    assert first.overlap_blocks == 0  # events are not looked at
    clock.now += 119.0
    assert ask(kv, "s").overlap_blocks == len(HASHES)
    clock.now += 121.0
    assert ask(kv, "t").overlap_blocks == 0


def test_adapters_and_salts_have_caches_of_their_own() -> None:
    kv = router()
    store(kv, A, sequence_hashes(PROMPT, SIZE, space_hash("lora", "tenant")))
    assert ask(kv, adapter="lora", cache_salt="tenant").overlap_blocks == len(HASHES)
    assert ask(kv, "s").overlap_blocks == 0
    assert ask(kv, "t", adapter="lora").overlap_blocks == 0


def test_models_have_caches_of_their_own() -> None:
    kv = router()
    store(kv, A, HASHES)
    assert kv.pick(RouteRequest(model="other", booking_id="r", prompt=PROMPT), FLEET).overlap_blocks == 0


def test_a_nearly_full_instance_does_not_win() -> None:
    without = router(KvRouterOptions(cost=KvCost.WEIGHTS, kv_full_penalty=0.0))
    with_penalty = router()
    for kv in (without, with_penalty):
        store(kv, A, HASHES[:1])
        kv.loads.report(A, LoadReport(active_blocks=40, total_blocks=42), 100.0)
    assert ask(without).instance.id == A
    assert ask(with_penalty).instance.id != A


def test_a_temperature_spreads_choices_by_cost() -> None:
    counts: dict[float, Counter[int]] = {}
    for temperature in (0.0, 0.5, 100.0):
        kv = router(KvRouterOptions(temperature=temperature, speculative_ttl_s=0.0))
        store(kv, A, HASHES)
        counts[temperature] = Counter()
        for number in range(500):
            counts[temperature][ask(kv, str(number)).instance.id] += 1
            kv.finished(str(number))
    assert counts[0.0] == {A: 500}
    assert 300 < counts[0.5][A] < 480  # e² / (e² + 2) = 0.79 of 500
    assert 120 < counts[100.0][A] < 220


def test_a_request_may_override_weights() -> None:
    kv = router(KvRouterOptions(cost=KvCost.WEIGHTS, speculative_ttl_s=0.0))
    store(kv, A, HASHES[:5])
    kv.loads.report(A, LoadReport(queued_prefill_tokens=40), 100.0)
    assert ask(kv).instance.id == A
    assert ask(kv, "s", overrides={"overlap_score_weight": 0.0}).instance.id != A
    assert ask(kv, "t", overrides={"overlap_score_credit": 0.0}).instance.id != A
    assert ask(kv, "u", overrides={"unknown": 1.0}).instance.id == A
    with pytest.raises(InvalidRequest, match="router_temperature"):
        ask(kv, "v", overrides={"router_temperature": -1.0})


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        (KvRouterOptions(), 10 + 1),
        (KvRouterOptions(assume_kv_reuse=False), 2 * 10),
        (KvRouterOptions(track_output_blocks=True), 10 + 1 + 2 * 3),
        (KvRouterOptions(track_active_blocks=False), 0),
    ],
)
def test_what_a_booking_counts_is_a_setting(config: KvRouterOptions, blocks: int) -> None:
    kv = router(config)
    ask(kv, "r", PROMPT, FLEET[:1], expected_output_tokens=12)
    ask(kv, "s", PROMPT[:-4], FLEET[:1], expected_output_tokens=12)  # its last block is not full
    assert [load.decode_blocks for load in kv.loads.read(kv.loads.rows(FLEET[:1]), 100.0)] == [blocks]


def test_a_booking_counts_the_output_of_all_choices() -> None:
    kv = router(KvRouterOptions(track_output_blocks=True))
    ask(kv, "r", PROMPT, FLEET[:1], expected_output_tokens=12, sequences=4)
    assert [load.decode_blocks for load in kv.loads.read(kv.loads.rows(FLEET[:1]), 100.0)] == [10 + 4 * 3]


def test_only_what_is_not_cached_is_booked_as_prefill() -> None:
    kv = router()
    store(kv, A, HASHES[:7])
    ask(kv)
    ask(kv, "again")  # expected to be cached completely: its last token is computed all the same
    assert [load.prefill_tokens for load in kv.loads.read(kv.loads.rows(FLEET[:1]), 100.0)] == [40 - 28 + 1]
    kv.first_token("r")
    kv.first_token("again")
    assert [load.prefill_tokens for load in kv.loads.read(kv.loads.rows(FLEET[:1]), 100.0)] == [0]


def test_busy_instances_get_nothing_and_all_busy_is_overload() -> None:
    kv = router(thresholds=Thresholds(active_prefill_tokens=100))
    store(kv, A, HASHES)
    kv.loads.report(A, LoadReport(queued_prefill_tokens=101), 100.0)
    assert ask(kv).instance.id != A
    for busy in (B, C):
        kv.loads.report(busy, LoadReport(queued_prefill_tokens=1000), 100.0)
    with pytest.raises(Overloaded) as refused:
        ask(kv, "s")
    assert refused.value.retry_after_s > 0
    kv.thresholds.set("m", NEVER_BUSY, 1)
    assert ask(kv, "t").instance.id == A


def test_a_pinned_request_goes_to_its_instance() -> None:
    kv = router(thresholds=Thresholds(active_prefill_tokens=0))
    store(kv, A, HASHES)
    kv.loads.report(C, LoadReport(queued_prefill_tokens=1000), 100.0)
    assert ask(kv, pinned=C).instance.id == C
    assert len(kv.loads) == 1
    with pytest.raises(Overloaded, match="is busy"):
        ask(kv, pinned=C, needs_room=True)
    assert ask(kv, "t", pinned=B, needs_room=True).instance.id == B
    with pytest.raises(NoInstances):
        ask(kv, pinned=InstanceId(99))


def test_an_instance_that_left_is_forgotten() -> None:
    kv = router()
    store(kv, A, HASHES)
    ask(kv)
    kv.removed(A)
    decision = ask(kv, "s", candidates=FLEET[1:])
    assert decision.overlap_blocks == 0
    assert kv.index("m").instances() == []


def test_a_snapshot_replaces_the_previous_blocks() -> None:
    kv = router()
    store(kv, A, HASHES)
    kv.replace("m", A, KvSnapshot(3, pack_hashes(HASHES[:2])))
    assert ask(kv).overlap_blocks == 2


def test_requests_without_tokens_go_by_load() -> None:
    kv = router()
    kv.loads.report(A, LoadReport(running=3), 100.0)
    kv.loads.report(B, LoadReport(running=2, active_blocks=1), 100.0)
    assert ask(kv, prompt=b"").instance.id == C


def test_a_prompt_may_be_hashed_beforehand() -> None:
    kv = router()
    store(kv, A, HASHES)
    request = RouteRequest(model="m", booking_id="r", prompt=PROMPT)
    hashes = kv.prompt_hashes(request, FLEET)
    assert hashes is not None
    assert list(hashes.steps()) == []  # a short prompt needs one step
    assert hashes.values == HASHES
    del hashes.values[4:]  # now they can be told from what `pick` would compute
    assert kv.pick(replace(request, hashes=hashes), FLEET).overlap_blocks == 4


def test_hashes_in_blocks_of_another_size_are_not_used() -> None:
    kv = router()
    store(kv, A, HASHES)
    request = RouteRequest(model="m", booking_id="r", prompt=PROMPT, hashes=PromptHashes.of(PROMPT, SIZE * 2))
    assert kv.pick(request, FLEET).overlap_blocks == len(HASHES)


@pytest.mark.parametrize("tokens", [0, 3, 4, 511 * 4, 512 * 4, 512 * 4 + 1, 513 * 4, 5000])
@pytest.mark.parametrize("parent", [None, 7])
def test_a_prompt_hashed_in_steps_has_the_same_hashes(tokens: int, parent: int | None) -> None:
    prompt = pack_tokens(range(tokens))
    hashes = PromptHashes(prompt, SIZE, parent)
    pauses = len(list(hashes.steps()))
    assert hashes.values == PromptHashes.of(prompt, SIZE, parent).values == sequence_hashes(prompt, SIZE, parent)
    assert pauses == max(0, tokens - 1) // (512 * SIZE)


@pytest.mark.parametrize("field", ["overlap_score_weight", "prefill_load_scale", "temperature", "kv_full_penalty"])
def test_weights_below_zero_are_refused(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        KvRouterOptions(**{field: -0.1})
    with pytest.raises(InvalidRequest, match=field):
        KvRouterOptions(**{field: float("nan")})


class SharingRouter(KvRouter):
    """Publishes its bookings to the others after every decision."""

    others: Sequence[KvRouter] = ()

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        decision = super().pick(request, candidates, explain=explain)
        for message in self.loads.take_unshared(1000):
            for other in self.others:
                other.loads.apply(message, 100.0, lambda instance: True)
        return decision


def sharing_bookings(config: KvRouterOptions, count: int) -> list[KvRouter]:
    """The routers of so many frontends, each of which receives at once what the others book."""
    routers = [
        SharingRouter(config, loads=LoadTable(str(number)), rng=random.Random(0), clock=FakeClock()) for number in range(count)
    ]
    for router in routers:
        router.others = routers
        router.loads.on_unshared(lambda: None)
    return list(routers)


def strangers(config: KvRouterOptions, count: int) -> list[KvRouter]:
    """The routers of so many frontends, none of which hears of what the others book."""
    return [KvRouter(config, rng=random.Random(number), clock=FakeClock()) for number in range(count)]


def test_a_burst_over_two_frontends_scatters_unless_they_share_bookings() -> None:
    def instances(routers: Sequence[KvRouter]) -> int:
        """Each frontend has a request under way of its own, and both have heard that a third instance is not quite idle."""
        ask(routers[0], "first", pack_tokens(range(7_000, 7_400)), FLEET[:1])
        ask(routers[1], "second", pack_tokens(range(8_000, 8_400)), FLEET[1:2])
        for each in routers:
            each.loads.report(C, LoadReport(active_blocks=1, kv_number=0), 100.0)
        return burst(routers)

    assert instances(sharing_bookings(WEIGHTS, 2)) == 1
    assert instances(strangers(WEIGHTS, 2)) == 2


def test_a_burst_over_two_frontends_piles_up_at_one_instance_unless_they_share_bookings() -> None:
    def at_the_idle_one(routers: Sequence[KvRouter]) -> int:
        """Return how many of 20 different prompts go to the idle instance; as much as 10 of them waits at each other one."""
        for each in routers:
            for busy in (B, C):
                each.loads.report(busy, LoadReport(queued_prefill_tokens=10 * 400), 100.0)
        prompts = [pack_tokens(range(number * 1000, number * 1000 + 400)) for number in range(20)]
        chosen = [ask(routers[number % 2], str(number), prompt).instance.id for number, prompt in enumerate(prompts)]
        return chosen.count(A)

    assert at_the_idle_one(sharing_bookings(WEIGHTS, 2)) <= 14, "from there on, the others have less to do"
    assert at_the_idle_one(strangers(WEIGHTS, 2)) >= 18


def test_a_measured_router_reports_its_decisions() -> None:
    class Watcher:
        def __init__(self) -> None:
            self.picks: list[tuple[int, float]] = []
            self.refusals = 0
            self.predictions: list[tuple[str, float, float]] = []

        def picked(self, request: RouteRequest, decision: RoutingDecision, seconds: float) -> None:
            self.picks.append((decision.overlap_blocks, seconds))

        def refused(self, request: RouteRequest) -> None:
            self.refusals += 1

        def predicted(self, model: str, predicted_s: float, seconds: float) -> None:
            self.predictions.append((model, predicted_s, seconds))

    kv, watcher = router(KvRouterOptions()), Watcher()
    store(kv, A, HASHES)
    times = iter([1.0, 1.5, 2.0, 3.5])
    watched = MeasuredRouter(kv, watcher, clock=lambda: next(times))
    decision = watched.pick(RouteRequest(model="m", booking_id="r", prompt=PROMPT), FLEET)
    assert watcher.picks == [(10, 0.5)]
    kv.thresholds.set("m", Thresholds(active_prefill_tokens=0), 1)
    for instance in (A, B, C):
        kv.loads.report(instance, LoadReport(queued_prefill_tokens=1), 100.0)
    with pytest.raises(Overloaded):
        watched.pick(RouteRequest(model="m", booking_id="s", prompt=PROMPT), FLEET)
    assert watcher.refusals == 1
    watched.first_token("r")
    watched.first_token("r")
    assert watcher.predictions == [("m", decision.ttft_s, 2.0)]
    watched.finished("r")
    watched.removed(A)
    assert len(kv.loads) == 0
