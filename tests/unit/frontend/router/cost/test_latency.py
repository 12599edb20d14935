"""Placements that the KV router makes by predicted latency."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from dynamo.common.discovery import Instance
from dynamo.common.errors import Cancelled, DynamoError, Overloaded
from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvUpdate, LoadReport, StepTotals
from dynamo.common.kv.hashes import pack_hashes, sequence_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, Role
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.config import KvCost, KvRouterOptions
from dynamo.frontend.router.base import RouteRequest, RoutingDecision, TooLate
from dynamo.frontend.router.cost.goals import Demand
from dynamo.frontend.router.cost.traffic import FleetTraffic
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.shared_bookings import InstanceBookings, SharedBookings
from dynamo.frontend.router.loads.thresholds import Thresholds, ThresholdTable

SIZE = 512
CARD = ModelCard(
    name="m",
    kind=ModelKind.LLM,
    llm=LlmInfo(context_length=1 << 20, tokenizer="", block_size=SIZE, total_blocks=1000),
)
FLEET = tuple(Instance(id=InstanceId(n), endpoint=Endpoint(), subject="", card=CARD, started_at=0.0) for n in (1, 2, 3, 4))
A, B, C, D = (instance.id for instance in FLEET)


class Situation:
    """A router whose clock the test sets."""

    def __init__(self, options: KvRouterOptions | None = None, busy_from: float | None = None) -> None:
        self.now = 100.0
        thresholds = ThresholdTable(Thresholds(active_decode_blocks=busy_from))
        self.router = KvRouter(options, thresholds, rng=random.Random(0), clock=lambda: self.now)
        self.bookings = 0

    def store(self, instance: InstanceId, prompt: bytes) -> None:
        self.router.apply("m", instance, KvUpdate(0, stored=pack_hashes(sequence_hashes(prompt, SIZE))))

    def report(self, instance: InstanceId, **load: object) -> None:
        self.router.loads.report(instance, LoadReport(**{"total_blocks": 1000, **load}), self.now, "m")  # type: ignore[arg-type]

    def send(self, prompt: bytes, count: int = 4, **fields: object) -> RoutingDecision:
        self.bookings += 1
        request = RouteRequest(model="m", booking_id=str(self.bookings), prompt=prompt, **fields)  # type: ignore[arg-type]
        return self.router.pick(request, FLEET[:count])

    def costs(self, prompt: bytes, **fields: object) -> dict[InstanceId, float]:
        request = RouteRequest(model="m", booking_id="costs", prompt=prompt, **fields)  # type: ignore[arg-type]
        candidates = self.router.pick(request, FLEET, explain=True).candidates
        self.router.finished("costs")
        return {InstanceId(int(str(each["instance"]), 16)): float(each["cost"]) for each in candidates}

    def evict(self, instance: InstanceId, turns: int = 200) -> None:
        """Have an instance evict what it computes next, over and over. The first request names the engines."""
        self.costs(prompt(1, 900))
        for turn in range(turns):
            blocks = pack_hashes(sequence_hashes(prompt(10, turn % 2 + 500), SIZE))
            self.router.apply("m", instance, KvUpdate(0, removed=blocks))
            self.router.apply("m", instance, KvUpdate(0, stored=blocks))

    def pass_requests(self, count: int, per_s: float) -> None:
        """Send requests of one block that end at once, so that the fleet is not quiet."""
        for number in range(count):
            self.now += 1 / per_s
            self.send(prompt(1, number % 4 + 1_000))
            self.router.finished(str(self.bookings))


def prompt(blocks: int, number: int = 0) -> bytes:
    return pack_tokens(range(number * 100_000, number * 100_000 + blocks * SIZE))


def test_a_cached_prefix_is_worth_the_prefill_that_it_saves() -> None:
    """A has 8 blocks cached, which take half a second to compute, and a queue before them."""
    for queued, chosen in ((2 * SIZE, A), (20 * SIZE, B)):
        s = Situation()
        s.store(A, prompt(8))
        s.report(A, running=1, queued_prefill_tokens=queued)
        s.report(B)
        assert s.send(prompt(9), 2).instance.id == chosen


def test_a_request_that_is_expected_to_generate_much_goes_where_fewer_run() -> None:
    """A has the prompt cached and more requests; each of the tokens takes longer there."""
    costs: list[dict[InstanceId, float]] = []
    for output, chosen in ((5.0, A), (2000.0, B)):
        s = Situation()
        s.store(A, prompt(6))
        s.report(A, running=4)
        s.report(B, running=1)
        costs.append(s.costs(prompt(7), learned_output=output))
        assert s.send(prompt(7), 2, learned_output=output).instance.id == chosen
    assert costs[1][A] > 10 * costs[0][A]
    limited, unknown = Situation(), Situation()
    assert limited.costs(prompt(7), learned_output=900.0, expected_output_tokens=1)[A] < unknown.costs(prompt(7))[A]


def test_a_long_prompt_stays_away_from_many_running_requests() -> None:
    """Each of them would wait for its prefill; cached blocks do not make up for that of the rest."""
    s = Situation()
    s.store(A, prompt(4))
    s.report(A, running=20)
    s.report(B)
    assert s.send(prompt(16), 2).instance.id == B


def test_a_burst_of_requests_with_one_prefix_lands_together_only_while_that_pays() -> None:
    s = Situation()
    first = s.send(prompt(32)).instance.id
    s.now += 1.0
    s.report(first, running=1, queued_prefill_tokens=16 * SIZE)
    instances = {s.send(prompt(32) + prompt(1, number)).instance.id for number in range(1, 3)}
    assert instances == {first}, "the prefix takes 2 s, of which one has passed"
    rest = Counter(s.send(prompt(32) + prompt(1, number)).instance.id for number in range(3, 200))
    assert max(rest.values()) < 0.4 * rest.total(), "a hundred more would wait for each other"


def test_a_request_passes_a_queue_by_where_as_much_of_its_prompt_is_cached() -> None:
    """A has the lowest cost, but B, with one request more and no queue, gives the first token earlier."""
    for cached, blocks, running, chosen in (((), 0, 9, B), ((A, B), 8, 9, B), ((A,), 8, 9, A), ((A,), 1, 9, A), ((), 0, 12, A)):
        s = Situation()
        for instance in cached:
            s.store(instance, prompt(blocks))
        s.report(A, running=8, queued_prefill_tokens=2 * SIZE)
        s.report(B, running=running)
        decision = s.send(prompt(9), 2)
        assert decision.instance.id == chosen, f"{blocks} blocks cached at {cached}, {running} requests at B"
        assert (decision.reason == "kv: shorter queue") == (chosen == B)


def test_a_request_passes_no_queue_by_where_that_would_miss_a_goal_or_the_other_is_busy() -> None:
    s = Situation(KvRouterOptions(itl_goal_s=0.0092))
    s.report(A, running=8, queued_prefill_tokens=2 * SIZE)
    s.report(B, running=9)
    assert s.send(prompt(1), 2).instance.id == A
    s = Situation(busy_from=0.5)
    s.report(A, running=8, queued_prefill_tokens=2 * SIZE)
    s.report(B, running=9, active_blocks=501)
    assert s.send(prompt(1), 2).instance.id == A


def test_requests_do_not_crowd_where_a_prefix_is_cached_while_few_prompts_are_computed() -> None:
    def chosen(running: int, arrivals_per_s: float, blocks: int = 1, cached: int = 8) -> InstanceId:
        s = Situation()
        for number in range(100):
            s.now += 1 / arrivals_per_s
            s.send(prompt(blocks, number % 4 + 1), 2)
            s.router.finished(str(number + 1))
        s.store(A, prompt(cached))
        s.report(A, running=running)
        s.report(B)
        return s.send(prompt(9), 2).instance.id

    assert [chosen(running, 0.5) for running in (1, 2)] == [A, B]
    assert [chosen(running, 10.0) for running in (1, 2)] == [A, A], "many steps compute prompts"
    assert [chosen(2, 0.5, 100, cached) for cached in (8, 0)] == [A, B], "prompts take most of the time"


@pytest.mark.parametrize("fields", [{"pinned": A}, {"preferred": A}])
def test_requests_that_do_not_choose_their_instance_do_not_spread_a_prefix(fields: dict[str, object]) -> None:
    """One in twenty requests that do choose goes to the idle instance without the prefix."""

    def instances(**fields: object) -> set[InstanceId]:
        s = Situation()
        s.store(A, prompt(8))
        s.report(A, running=1, queued_prefill_tokens=2 * SIZE)
        s.report(B)
        used = set()
        for number in range(1, 21):
            last = s.send(prompt(9), 2, **(fields if number < 20 else {}))
            s.router.finished(str(number))
            used.add(last.instance.id)
        return used

    assert instances() == {A, B}
    assert instances(**fields) == {A}


def test_a_prefix_that_all_have_is_spread_evenly() -> None:
    s = Situation()
    for instance in (A, B, C, D):
        s.store(instance, prompt(8))
    counts = Counter(s.send(prompt(8) + prompt(1, number)).instance.id for number in range(1, 41))
    assert set(counts.values()) == {10}


def test_of_instances_with_equal_costs_the_one_with_fewest_requests_recently_gets_the_next() -> None:
    """A alone has the first prefix, and gets all of its requests, one after the other; later prompts have nothing in common."""
    s = Situation()
    s.store(A, prompt(8))
    got = Counter[InstanceId]()
    for number in range(1, 61):
        s.now += 1.0
        chosen = s.send(prompt(9) if number <= 20 else prompt(1, number)).instance.id
        got[chosen] += 1
        s.router.finished(str(number))
    assert got[A] == 20 and got[B] + got[C] + got[D] == 40
    assert max(got[B], got[C], got[D]) <= 14


def test_time_since_a_report_shortens_the_queue_by_at_most_one_batch() -> None:
    s = Situation()
    s.report(A, running=1, queued_prefill_tokens=8000)
    s.report(B, running=2)
    s.now += 0.9
    s.report(B, running=2, queued_prefill_tokens=2000)
    assert s.send(prompt(1), 2).instance.id == A, "it has computed most of the 8,000 by now"
    s = Situation()
    s.report(A, running=1, queued_prefill_tokens=80_000)
    s.now += 2.9
    s.report(B, running=1, queued_prefill_tokens=60_000)
    assert s.send(prompt(1), 2).instance.id == B, "a report would have come after the first batch"


def test_an_excess_of_requests_counts_only_as_long_as_it_will_last() -> None:
    """An instance runs some requests more than the mean, which later ones level in part of the time that this one takes."""

    def cost_of(more: int) -> float:
        s = Situation()
        s.pass_requests(400, per_s=40.0)
        for other, running in zip((A, B, C, D), (20 - min(more, 20), 20 + more, 20, 20), strict=True):
            s.report(other, running=running)
        costs = s.costs(prompt(1))
        return costs[B] - costs[C]

    assert cost_of(15) > 1.3 * 15 / 2 * cost_of(2)
    assert cost_of(80) - cost_of(70) == pytest.approx(cost_of(70) - cost_of(60), rel=0.05), (
        "all of it, from 1.5 times the mean on"
    )
    assert cost_of(30) > 30 / 15 * cost_of(15)


def test_blocks_that_an_instance_holds_count_however_many_requests_hold_them() -> None:
    def cost_of(running: int, blocks: int) -> float:
        s = Situation()
        s.send(prompt(1), 1)
        totals = StepTotals()
        for held in (*(0, 1000) * 100, 0):
            s.now += 1.0
            totals += StepTotals(1, 0.01 + held * 1e-4, 0, 1, held, 1, 200)
            s.report(A, totals=totals, total_blocks=0)
        s.pass_requests(400, per_s=40.0)
        for other in FLEET:
            s.report(other.id, running=20, active_blocks=1000, total_blocks=0)
        s.report(A, running=running, active_blocks=blocks, total_blocks=0)
        return s.costs(prompt(1))[A]

    assert cost_of(20, 2000) - cost_of(20, 1000) == pytest.approx(0.1 * 200, rel=0.2)
    assert cost_of(20, 2000) > cost_of(10, 2000) > cost_of(4, 2000)


def test_where_caches_are_full_and_evicted_blocks_are_needed_again_a_cached_prefix_is_worth_more() -> None:
    for evicted, chosen in ((False, B), (True, A)):
        s = Situation()
        s.pass_requests(100, per_s=10.0)
        if evicted:
            s.evict(A)
            s.evict(B)
        s.store(A, prompt(8))
        s.report(A, running=5, queued_prefill_tokens=50 * SIZE)
        s.report(B, running=4)
        assert s.send(prompt(9), 2).instance.id == chosen


def test_what_a_full_cache_computes_again_delays_the_mean_number_of_requests_but_nothing_of_prompts_computed_elsewhere() -> None:
    def more_on_full(**fields: object) -> float:
        s = Situation()
        s.pass_requests(400, per_s=40.0)
        s.evict(A)
        for other in FLEET:
            s.report(other.id, running=9)
        costs = s.costs(prompt(8), **fields)
        return costs[A] - costs[B]

    prefill_s = 8 * SIZE * 0.125e-3 + 6.0e-3 + 9 * 0.35e-3
    assert more_on_full() == pytest.approx(4 * prefill_s * 10, rel=0.01)
    assert more_on_full(is_prefilled=True) == 0.0


def test_what_instances_evict_that_only_decode_does_not_count_for_those_that_compute_prompts() -> None:
    s = Situation()
    decoding = replace(FLEET[0], id=InstanceId(9), card=replace(CARD, role=Role.DECODE))
    for candidates in (FLEET, (decoding,)):
        s.router.pick(RouteRequest(model="m", booking_id=str(len(candidates)), prompt=prompt(1)), candidates)
    for number in range(200):
        blocks = pack_hashes(sequence_hashes(prompt(10, number), SIZE))
        s.router.apply("m", A, KvUpdate(0, stored=blocks))
        s.router.apply("m", A, KvUpdate(0, removed=blocks))
        s.router.apply("m", decoding.id, KvUpdate(0, removed=pack_hashes(sequence_hashes(prompt(10, number + 1), SIZE))))
    s.report(A)
    s.router.finished("4")
    costs = s.costs(prompt(8, 300))
    assert costs[A] == costs[B]


def test_an_instance_that_left_and_came_back_is_not_taken_to_be_full() -> None:
    s = Situation()
    s.evict(A)
    s.report(A)
    costs = s.costs(prompt(8))
    assert costs[A] > costs[B]
    s.router.removed(A)
    s.report(A)
    costs = s.costs(prompt(8))
    assert costs[A] == costs[B]


@pytest.mark.parametrize(("error", "chosen"), [(None, A), (Cancelled(), B)])
def test_a_prompt_that_was_cancelled_while_it_waited_does_not_count_as_cached(
    error: DynamoError | None, chosen: InstanceId
) -> None:
    s = Situation(KvRouterOptions(speculative_ttl_s=2.0))
    s.pass_requests(100, per_s=10.0)
    s.report(A, running=1, queued_prefill_tokens=80_000)
    s.send(prompt(8), 1)
    s.router.finished(str(s.bookings), error)
    s.now += 3.0
    s.report(A, running=3)
    s.report(B)
    assert s.send(prompt(9), 2).instance.id == chosen


def test_a_prompt_counts_as_cached_for_at_most_a_minute_more_here_and_at_peers() -> None:
    for later_s, chosen in ((61.0, A), (70.0, B)):
        s = Situation(KvRouterOptions(speculative_ttl_s=2.0))
        peer = Situation(KvRouterOptions(speculative_ttl_s=2.0))
        s.router.loads.on_unshared(lambda: None)
        for each in (s, peer):
            each.pass_requests(100, per_s=10.0)
            each.report(A, running=1, queued_prefill_tokens=8_000_000)
        s.send(prompt(8), 1)
        for message in s.router.loads.take_unshared(1000):
            peer.router.loads.apply(replace(message, origin="other", instances=()), peer.now, lambda instance: True)
        for each in (s, peer):
            each.now += later_s
            each.report(A, running=3)
            each.report(B)
            assert each.send(prompt(9), 2).instance.id == chosen


def test_a_prompt_that_waits_for_others_counts_as_cached_until_it_should_have_been_computed() -> None:
    for later_s, chosen in ((11.0, A), (20.0, B)):
        s = Situation(KvRouterOptions(speculative_ttl_s=2.0))
        s.pass_requests(100, per_s=10.0)
        s.report(A, running=1, queued_prefill_tokens=80_000)
        assert s.send(prompt(8), 1).ttft_s == pytest.approx(10.6, abs=0.2)
        s.now += later_s
        s.report(A, running=3)
        s.report(B)
        assert s.send(prompt(9), 2).instance.id == chosen


def test_a_prompt_that_was_computed_elsewhere_goes_by_decoding_alone() -> None:
    s = Situation()
    s.store(A, prompt(16))
    s.report(A, running=2)
    s.report(B, running=1)
    assert s.send(prompt(16), 2, is_prefilled=True).instance.id == B


@pytest.mark.parametrize(("ms_per_token", "chosen"), [(0.001, B), (1.0, A)])
def test_what_a_cached_block_is_worth_is_learned_from_reports(ms_per_token: float, chosen: InstanceId) -> None:
    s = Situation()
    s.send(prompt(1, 9), 2)  # the first request names the engines
    totals = StepTotals()
    for _ in range(200):
        for tokens in (0, 4096):
            s.now += 1.0
            totals += StepTotals(1, 0.02 + tokens * ms_per_token / 1e3, tokens, 0, 0, 1, 50)
            s.router.loads.report(A, LoadReport(totals=totals), s.now, "m")
    s.router.finished("1")
    s.store(A, prompt(8))
    s.report(A, running=6)
    s.report(B)
    assert s.send(prompt(8), 2).instance.id == chosen


def test_an_explanation_has_the_predicted_latencies_of_each_candidate() -> None:
    s = Situation()
    s.store(A, prompt(8))
    s.report(A, running=10, queued_prefill_tokens=SIZE)
    request = RouteRequest(model="m", booking_id="r", prompt=prompt(8))
    decision = s.router.pick(request, FLEET[:2], explain=True)
    shown = {each["instance"]: (each["ttft_ms"], each["itl_ms"]) for each in decision.candidates}
    busy_step_ms = 6.0 + 10 * 0.35
    assert shown["1"] == (pytest.approx(SIZE * 0.125 + 2.5 * busy_step_ms, abs=0.1), pytest.approx(busy_step_ms + 0.35, abs=0.01))
    assert shown["2"] == (pytest.approx(8 * SIZE * 0.125 + 6.0, abs=0.1), pytest.approx(6.35, abs=0.01))
    assert decision.ttft_s is not None
    assert decision.ttft_s * 1e3 == pytest.approx(float(shown[f"{decision.instance.id:x}"][0]), abs=0.1)


def test_steps_that_a_prompt_shares_with_others_that_wait_delay_it_but_cost_nothing() -> None:
    s = Situation()
    s.report(A, running=10, queued_prefill_tokens=SIZE)
    s.report(B, running=10)
    explained = s.router.pick(RouteRequest(model="m", booking_id="r", prompt=prompt(8)), FLEET[:2], explain=True).candidates
    cost, ttft_ms = ({each["instance"]: float(each[name]) for each in explained} for name in ("cost", "ttft_ms"))
    step_ms, queue_ms = 6.0 + 10 * 0.35, SIZE * 0.125
    assert (cost["1"] - cost["2"]) * 1e3 == pytest.approx(queue_ms - 0.5 * step_ms, abs=0.1)
    assert ttft_ms["1"] - ttft_ms["2"] == pytest.approx(queue_ms + 1.0 * step_ms, abs=0.2)


def test_what_no_instance_can_begin_in_time_is_refused_with_the_time_to_wait() -> None:
    s = Situation(KvRouterOptions(ttft_goal_s=1.0))
    s.store(A, prompt(10))
    s.report(A, running=1, queued_prefill_tokens=6000)
    s.report(B, running=1, queued_prefill_tokens=28_000)
    assert s.send(prompt(11), 2).instance.id == A, "0.75 s for those that wait, and one block"
    with pytest.raises(Overloaded, match="goals") as refused:
        s.send(prompt(11, 1), 2)
    assert 0.5 < refused.value.retry_after_s < 1.5
    assert len(s.router.loads) == 1, "what is refused is not booked"


def test_a_refusal_says_which_latency_misses_its_goal() -> None:
    s = Situation(KvRouterOptions(ttft_goal_s=1.0, itl_goal_s=0.02))
    s.report(A, running=45)
    with pytest.raises(Overloaded, match="goals: a token would come every 22 ms on average, not 20"):
        s.send(prompt(1), 1)
    with pytest.raises(
        Overloaded, match=r"goals: the first token would come after about 0\.26 s, and 0\.10 s of the goal are left"
    ):
        s.send(prompt(4), 2, waited_s=0.9)


def test_a_prompt_longer_than_the_goal_is_refused_only_for_what_waits_before_it() -> None:
    s = Situation(KvRouterOptions(ttft_goal_s=1.0))
    s.report(A, running=1, queued_prefill_tokens=16_000)
    decision = s.send(prompt(32), 2)
    assert decision.instance.id == B
    assert decision.ttft_s == pytest.approx(2.05, abs=0.01)
    with pytest.raises(TooLate, match=r"goals: the prompt would wait for about 2\.0\d s, and 1\.00 s of the goal are left"):
        s.send(prompt(32, 1), 2)
    s.now += 2.0
    s.report(B, running=1)
    assert s.send(prompt(32), 2, waited_s=0.5).ttft_s == pytest.approx(0.0, abs=0.01), "what was served is cached"
    with pytest.raises(TooLate):
        s.send(prompt(32, 1), 2, waited_s=1.1)


def test_a_prompt_longer_than_the_goal_does_not_wait_for_the_goal_between_tokens() -> None:
    s = Situation(KvRouterOptions(ttft_goal_s=1.0, itl_goal_s=0.02))
    s.report(A, running=45)
    with pytest.raises(TooLate, match="goals: a token would come every"):
        s.send(prompt(32), 1)


@pytest.mark.parametrize(("served", "refused", "admitted"), [(0, 0, 4), (10, 0, 2), (0, 10, 2), (20, 20, 1)])
def test_prompts_longer_than_the_goal_have_half_of_the_time_that_others_leave_and_a_little_at_least(
    served: int, refused: int, admitted: int
) -> None:
    """Each of them adds 0.15 to their share of the time, and each of the others 0.05."""
    s = Situation(KvRouterOptions(ttft_goal_s=1.0))

    def serve(tokens: int, **fields: object) -> None:
        s.send(prompt(tokens // SIZE, s.bookings), 1, **fields)
        s.router.first_token(str(s.bookings))
        s.router.finished(str(s.bookings))

    for _ in range(served):
        serve(8 * SIZE, was_admitted=True)
    s.report(A, running=1, queued_prefill_tokens=16_000)
    for _ in range(refused):
        with pytest.raises(TooLate):
            serve(8 * SIZE)
    s.report(A)
    for _ in range(admitted):
        serve(24 * SIZE)
    with pytest.raises(
        TooLate, match=r"goals: the prompt alone would take 1\.54 s, the goal is 1\.00 s, and such prompts have \d+%"
    ):
        serve(24 * SIZE)
    serve(24 * SIZE, pinned=A, needs_room=True)
    s.now += 30.0
    serve(24 * SIZE)


def test_less_important_requests_make_no_room_for_prompts_that_are_longer_than_the_goal() -> None:
    def admits(blocks: int) -> bool:
        """Whether a less important request is admitted after some of so many blocks were refused."""
        s = Situation(KvRouterOptions(ttft_goal_s=1.0))
        s.report(A, running=1, queued_prefill_tokens=10_000)
        for number in range(20):
            with pytest.raises(TooLate):
                s.send(prompt(blocks, number), 1, priority=1)
        s.report(A, running=1, queued_prefill_tokens=1_000)
        try:
            s.send(prompt(1, 20), 1)
        except Overloaded:
            return False
        return True

    assert not admits(12)
    assert admits(32)


def test_a_request_may_have_goals_of_its_own() -> None:
    s = Situation()
    for instance in (A, B):
        s.report(instance, running=1, queued_prefill_tokens=16_000)
    assert s.send(prompt(1), 2).ttft_s == pytest.approx(2.1, abs=0.1)
    with pytest.raises(Overloaded):
        s.send(prompt(1), 2, overrides={"ttft_goal": 1.5})
    with pytest.raises(Overloaded):
        s.send(prompt(1), 2, overrides={"itl_goal": 0.005})
    s.send(prompt(1), 2, overrides={"ttft_goal": 3.0, "itl_goal": 0.05})


@pytest.mark.parametrize("exempt", [{"pinned": A}, {"was_admitted": True}, {"is_prefilled": True}])
def test_goals_refuse_nothing_that_was_begun_or_that_names_its_instance(exempt: dict[str, object]) -> None:
    s = Situation(KvRouterOptions(ttft_goal_s=1.0))
    for instance in (A, B):
        s.report(instance, running=1, queued_prefill_tokens=16_000)
    s.send(prompt(1), 2, **exempt)


def test_goals_refuse_a_request_of_a_client_whose_instance_misses_them() -> None:
    s = Situation(KvRouterOptions(ttft_goal_s=1.0))
    s.report(A, running=1, queued_prefill_tokens=16_000)
    with pytest.raises(Overloaded):
        s.send(prompt(1), 1, pinned=A, needs_room=True)
    s.send(prompt(1), 1, pinned=A)


def test_a_frontend_knows_the_traffic_of_the_others_by_the_reports_of_instances() -> None:
    """A frontend places a quarter of 8,000 tokens per second itself."""
    traffic = FleetTraffic()
    for second in range(100):
        traffic.report(A, computed=6_000 * second, queued=10_000, now=float(second))
        traffic.report(B, computed=0, queued=2_000 * second, now=float(second))
        traffic.add(2_000)
    requests, tokens = traffic.of_fleet(frontends=1)
    assert tokens == pytest.approx(8_000, rel=0.1)
    assert requests == pytest.approx(4.0, rel=0.1)
    traffic.report(A, computed=100, queued=0, now=99.0)
    assert traffic.of_fleet(frontends=1)[1] == tokens, "it has started anew: nothing is known of what it did before"
    assert traffic.queued == 2_000 * 99
    traffic.remove_instance(B)
    assert traffic.queued == 0


def test_where_instances_do_not_report_what_they_compute_frontends_are_taken_to_have_equal_shares() -> None:
    traffic = FleetTraffic()
    traffic.add(2_000)
    assert traffic.of_fleet(frontends=3) == (pytest.approx(0.3), pytest.approx(600))


def test_prompts_placed_since_the_last_report_count_before_the_next_one() -> None:
    s = Situation(KvRouterOptions(itl_goal_s=0.02))
    for _ in range(2):
        s.report(A, totals=StepTotals(1, 0.1, prefill_tokens=1))
        s.send(prompt(1), 1, priority=1)
    s.router.loads.apply(  # of a peer frontend
        SharedBookings("peer", [InstanceBookings(A, 9, 80_000, 160, 9, 80_000, 160)]), s.now, lambda instance: True
    )
    with pytest.raises(Overloaded):
        s.send(prompt(1, 1), 1)


def test_the_time_that_a_request_has_waited_counts_for_its_goal() -> None:
    s = Situation(KvRouterOptions(ttft_goal_s=2.0))
    s.report(A, running=1, queued_prefill_tokens=8_000)
    with pytest.raises(TooLate):
        s.send(prompt(1), 1, waited_s=1.5)
    s.send(prompt(1), 1, waited_s=0.5)


def test_where_instances_compute_too_many_prompts_short_requests_may_wait_and_long_ones_may_not() -> None:
    s = Situation(KvRouterOptions(ttft_goal_s=2.0, itl_goal_s=0.02))
    for number in range(3):
        s.send(prompt(4, number), 1, was_admitted=True)
        s.router.first_token(str(number + 1))
    s.report(A, running=45)
    with pytest.raises(TooLate):
        s.send(prompt(12, 3), 1)
    with pytest.raises(Overloaded) as refused:
        s.send(prompt(1, 4), 1)
    assert not isinstance(refused.value, TooLate)


@pytest.mark.parametrize(
    ("goal_s", "overrides", "may_wait"),
    [(0.02, {}, True), (0.001, {}, False), (None, {"itl_goal": 0.02}, False), (None, {"itl_goal": 0.001}, False)],
)
def test_no_request_waits_behind_a_request_for_what_no_instance_reaches_or_only_it_demands(
    goal_s: float | None, overrides: dict[str, float], may_wait: bool
) -> None:
    s = Situation(KvRouterOptions(itl_goal_s=goal_s))
    s.report(A, running=45)
    with pytest.raises(Overloaded) as refused:
        s.send(prompt(1), 1, overrides=overrides)
    assert isinstance(refused.value, TooLate) is not may_wait


@pytest.mark.parametrize(("seconds", "is_refused"), [(1, True), (30, False)])
def test_the_first_seconds_of_traffic_count_as_if_it_lasted(seconds: int, is_refused: bool) -> None:
    """One second has brought 7,500 tokens, of 8,000 that the instance computes in a second; thirty seconds, no more than that."""
    s = Situation(KvRouterOptions(itl_goal_s=0.02))
    s.send(prompt(1), 1)
    for second in range(seconds + 1):
        s.now += second > 0
        s.report(A, running=1, totals=StepTotals(1 + second, 0.1, prefill_tokens=7_500 * (second > 0)))
    if is_refused:
        with pytest.raises(Overloaded):
            s.send(prompt(1, 1), 1)
    else:
        s.send(prompt(1, 1), 1)


def test_being_short_does_not_make_a_request_pass_the_goal_between_tokens() -> None:
    """Instances compute prompts for four fifths of their time, most of them long."""
    s = Situation(KvRouterOptions(itl_goal_s=0.02))
    for second in range(60):
        s.now += 1.0
        s.report(A, running=1, totals=StepTotals(1 + second, 0.1, prefill_tokens=6_500 * second))
        s.send(prompt(12, second), 1, was_admitted=True)
        s.router.first_token(str(second + 1))
    with pytest.raises(Overloaded):
        s.send(prompt(1, 60), 1)


def test_a_goal_is_stricter_for_a_request_while_more_important_ones_need_much_of_the_time() -> None:
    for priority, is_refused in ((0, True), (1, False), (2, False)):
        s = Situation(KvRouterOptions(ttft_goal_s=2.0))
        for number in range(10):
            s.now += 1.0
            s.send(prompt(10, number), 1, priority=1)
            s.router.first_token(str(number + 1))
            s.router.finished(str(number + 1))
        s.report(A, running=1, queued_prefill_tokens=12_000)
        if is_refused:
            with pytest.raises(Overloaded):
                s.send(prompt(1, 10), 1, priority=priority)
        else:
            s.send(prompt(1, 10), 1, priority=priority)


def test_while_important_requests_are_refused_others_are_too_and_retries_in_line_count_once() -> None:
    def refused_after(tries: int, request_id: str) -> bool:
        s = Situation(KvRouterOptions(itl_goal_s=0.02))
        s.report(A, running=45)
        for _ in range(tries):
            with pytest.raises(Overloaded):
                s.send(prompt(8), 1, priority=1, request_id=request_id)
        s.report(A, running=20)
        try:
            s.send(prompt(1), 1)
        except Overloaded:
            return True
        return False

    assert not refused_after(1, "first in line")
    assert not refused_after(10, "first in line")
    assert refused_after(10, "")


def test_less_important_prompts_take_nothing_from_those_that_are_longer_than_the_goal() -> None:
    demand = Demand()
    for priority, is_late in ((0, True), (0, False), (1, True), (1, True), (1, False)):
        demand.place(priority, 1_000, now=1.0, is_late=is_late)
    demand.refuse(0, 4_000, 1.0, "")
    demand.refuse(1, 2_000, 1.0, "")
    least, most = (demand.competition(priority, now=1.0) for priority in (0, 1))
    assert (least.late, least.others) == (pytest.approx(300), pytest.approx(800))
    assert (most.late, most.others) == (pytest.approx(200), pytest.approx(300))


def test_a_client_that_makes_up_priorities_does_not_make_the_router_remember_all_of_them() -> None:
    demand = Demand()
    for priority in range(1000):
        demand.place(priority, 100, now=1.0)
    demand.place(2000, 700, now=1.0)
    demand.place(0, 100, now=1.0)
    assert demand.competition(1999, now=1.0).above == pytest.approx(70)
    assert demand.competition(-1, now=1.0).above < 400


def test_requests_stay_away_from_instances_that_would_miss_the_goal_for_tokens() -> None:
    for goal_s, chosen in ((None, A), (0.02, B)):
        s = Situation(KvRouterOptions(itl_goal_s=goal_s))
        s.store(A, prompt(16))
        s.report(A, running=42)
        s.report(B, running=36)
        assert s.send(prompt(16), 2).instance.id == chosen


def test_weights_take_the_place_of_seconds_where_a_weight_is_set() -> None:
    assert KvRouterOptions().effective_cost is KvCost.LATENCY
    assert KvRouterOptions(overlap_score_weight=1.0).effective_cost is KvCost.WEIGHTS
    assert KvRouterOptions(prefill_load_scale=1.0).effective_cost is KvCost.WEIGHTS
    assert KvRouterOptions(prefill_load_scale=1.0, cost=KvCost.LATENCY).effective_cost is KvCost.LATENCY
    s = Situation()
    s.report(A, active_blocks=30)
    s.report(B, queued_prefill_tokens=SIZE)
    assert s.send(prompt(1), 2).instance.id == A
    assert s.send(prompt(1, 1), 2, overrides={"prefill_load_scale": 1.0}).instance.id == B
