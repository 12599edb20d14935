"""What arrived since the last look, from the totals of all frontends."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dynamo.common.names import InstanceId
from dynamo.common.scaling.demand import ArrivalSample, ArrivalTotals, DemandReport, PoolDemand
from dynamo.common.scaling.pool import Pool
from dynamo.planner.observe.demand import FORGOTTEN_S, MAX_KEPT_SAMPLES, MAX_ORIGINS, MAX_POOLS, NEW_S, VANISHED_S, DemandLedger

CHAT = Pool("chat")


def report(
    placed: int,
    *,
    origin: str = "f1",
    refused: int = 0,
    waiting: int = 0,
    ratio: float = 0.0,
    pool: Pool = CHAT,
    samples: int = 0,
) -> DemandReport:
    """A report of a frontend whose requests have 100 prompt tokens, 40 of them not cached, and refused ones 30."""
    totals = ArrivalTotals(placed, 100 * placed, 40 * placed, 10 * placed, refused, 30 * refused)
    described = tuple(ArrivalSample(0.1, 1.0, 100) for _ in range(samples))
    return DemandReport(origin, (PoolDemand(pool, totals, waiting, 7 * waiting, ratio, described),))


def requests(ledger: DemandLedger, now: float) -> float:
    taken = ledger.take(now)
    return taken[CHAT].arrivals.requests if CHAT in taken else 0.0


@pytest.fixture
def ledger() -> DemandLedger:
    """One that has heard of the frontend f1, whose totals were 1000 at second 0."""
    ledger = DemandLedger(5.0)
    ledger.report(report(1000), 0.0)
    ledger.take(0.0)
    return ledger


def test_what_a_frontend_counted_before_its_first_report_is_not_of_this_interval() -> None:
    ledger = DemandLedger(5.0)
    ledger.report(report(1000), 0.0)
    assert requests(ledger, 1.0) == 0.0


def test_the_difference_of_two_reports_is_what_arrived_between_them(ledger: DemandLedger) -> None:
    ledger.report(report(1003), 1.0)
    ledger.report(report(1010, refused=2), 2.0)
    arrivals = ledger.take(5.0)[CHAT].arrivals
    assert (arrivals.requests, arrivals.refused, arrivals.seconds) == (12.0, 2.0, 5.0)
    assert (arrivals.prompt_tokens, arrivals.computed_tokens) == (10 * 100 + 2 * 30, 10 * 40 + 2 * 30)
    assert requests(ledger, 10.0) == 0.0


def test_a_lost_report_is_made_up_for_by_the_next(ledger: DemandLedger) -> None:
    ledger.report(report(1008), 4.0)  # those of seconds 1 to 3 are lost
    assert requests(ledger, 5.0) == 8.0


def test_after_a_long_silence_the_rate_counts_and_not_the_sum(ledger: DemandLedger) -> None:
    ledger.report(report(1000 + 4 * 50), 50.0)
    assert requests(ledger, 50.0) == pytest.approx(4 * 5.0)


def test_frontends_add_up(ledger: DemandLedger) -> None:
    ledger.report(report(50, origin="f2", waiting=3), 0.5)
    ledger.report(report(60, origin="f2", waiting=4), 1.5)
    ledger.report(report(1005, waiting=1), 1.5)
    pool = ledger.take(5.0)[CHAT]
    assert (pool.arrivals.requests, pool.waiting, pool.waiting_tokens) == (15.0, 5, 35)


def test_a_frontend_that_begins_anew_under_its_name_counts_from_zero(ledger: DemandLedger) -> None:
    ledger.report(report(4), 1.0)
    assert requests(ledger, 5.0) == 4.0


def test_a_pool_that_a_known_frontend_names_for_the_first_time_begins_at_zero(ledger: DemandLedger) -> None:
    ledger.report(report(6, pool=Pool("other")), NEW_S)
    assert ledger.take(5.0)[Pool("other")].arrivals.requests == 6.0


def test_a_frontend_without_any_pool_so_far_is_known_as_well() -> None:
    ledger = DemandLedger(5.0)
    ledger.report(DemandReport("f1"), 0.0)
    ledger.report(report(6), NEW_S)
    assert requests(ledger, 5.0) == 6.0


def test_pools_that_a_frontend_names_in_several_reports_of_one_second_are_all_known() -> None:
    ledger = DemandLedger(5.0)
    other = Pool("other")
    for second in (0.0, 1.0):
        ledger.report(report(1000 + int(second), waiting=2), second)
        ledger.report(report(2000 + int(second), pool=other, waiting=3), second)
    taken = ledger.take(5.0)
    assert {pool: (each.arrivals.requests, each.waiting) for pool, each in taken.items()} == {CHAT: (1.0, 2), other: (1.0, 3)}


def test_requests_of_a_frontend_that_vanished_wait_no_more(ledger: DemandLedger) -> None:
    ledger.report(report(1001, waiting=3), 1.0)
    assert ledger.take(1.0 + VANISHED_S)[CHAT].waiting == 3
    assert CHAT not in ledger.take(1.5 + VANISHED_S)
    assert ledger.reporting(1.5 + VANISHED_S) == 0


def test_one_that_comes_back_soon_continues_and_after_long_it_is_new(ledger: DemandLedger) -> None:
    ledger.report(report(1100), 60.0)
    assert requests(ledger, 60.0) == pytest.approx(100 * 5 / 60)
    ledger.take(61.0 + FORGOTTEN_S)
    ledger.report(report(5000), 62.0 + FORGOTTEN_S)
    assert requests(ledger, 63.0 + FORGOTTEN_S) == 0.0


def test_the_ratio_is_the_median_of_those_that_know_one(ledger: DemandLedger) -> None:
    for number, ratio in enumerate((0.0, 1.0, 1.5, 9.0)):
        ledger.report(report(1, origin=f"g{number}", ratio=ratio), 1.0)
    assert ledger.take(5.0)[CHAT].ttft_ratio == 1.5


def test_samples_say_how_long_ago_their_requests_arrived(ledger: DemandLedger) -> None:
    ledger.report(report(1001, samples=1), 1.0)
    ledger.report(report(1002, samples=1), 4.0)
    assert [sample.age_s for sample in ledger.take(5.0)[CHAT].samples] == pytest.approx([4.1, 1.1])


def test_what_caches_saved_adds_up_over_frontends_and_is_told_once(ledger: DemandLedger) -> None:
    for origin, tokens in (("f1", 70), ("f2", 30)):
        ledger.report(report(1000, origin=origin), 0.5)
        demand = replace(report(1001, origin=origin).pools[0], saved=((InstanceId(7), tokens),))
        ledger.report(DemandReport(origin, (demand,)), 1.0)
    assert ledger.take(5.0)[CHAT].saved == {7: 100}
    ledger.report(report(1001), 5.5)
    assert ledger.take(6.0)[CHAT].saved == {}


def test_frontends_are_bounded_and_a_silent_one_makes_space(ledger: DemandLedger) -> None:
    for number in range(MAX_ORIGINS):
        ledger.report(report(1, origin=f"g{number}"), 1.0)
    assert (ledger.dropped, ledger.reporting(1.0)) == (1, MAX_ORIGINS)  # f1 among them
    ledger.report(report(2, origin="late"), 2.0 + VANISHED_S)
    ledger.report(report(5, origin="late"), 3.0 + VANISHED_S)
    assert (ledger.dropped, requests(ledger, 3.0 + VANISHED_S)) == (1, 3.0)


def test_pools_of_frontends_that_are_forgotten_make_space() -> None:
    ledger = DemandLedger(5.0)
    for number in range(MAX_POOLS):
        ledger.report(report(1, pool=Pool(f"m{number}"), origin="gone"), 0.0)
    ledger.report(report(1), 1.0)
    assert ledger.dropped == 1
    ledger.take(1.0 + FORGOTTEN_S)
    ledger.report(report(1), 2.0 + FORGOTTEN_S)
    assert (ledger.dropped, CHAT in ledger.take(2.0 + FORGOTTEN_S)) == (1, True)


def test_pools_and_samples_and_names_are_bounded(ledger: DemandLedger) -> None:
    for number in range(MAX_POOLS + 3):
        ledger.report(report(1, pool=Pool(f"m{number}"), origin="g"), 1.0)
    assert len(ledger.take(1.0)) <= MAX_POOLS
    assert ledger.dropped == 4  # chat is one of them
    for _ in range(2):
        ledger.report(report(1001, samples=MAX_KEPT_SAMPLES - 1), 2.0)
    assert len(ledger.take(2.0)[CHAT].samples) == MAX_KEPT_SAMPLES
    ledger.report(report(1, origin="x" * 1000), 2.0)
    assert ledger.dropped == 5
