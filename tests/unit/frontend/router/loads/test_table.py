"""Bookings, reports and what peer frontends tell, added up without counting anything twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import LoadReport, request_key
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.router.cache.thinning import DENSE, SPARSE, covered, kept
from dynamo.frontend.router.loads.busy import busy as busy_ones
from dynamo.frontend.router.loads.rows import RowCache
from dynamo.frontend.router.loads.shared_bookings import InstanceBookings, SharedBookings, SharedPrompt
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import Thresholds

A, B = InstanceId(1), InstanceId(2)


def instance(id: InstanceId, total_blocks: int = 100) -> Instance:
    card = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=4096, tokenizer="", total_blocks=total_blocks))
    return Instance(id=id, endpoint=Endpoint(), subject="", card=card, started_at=0.0)


FLEET = (instance(A), instance(B))


def is_registered(instance: InstanceId) -> bool:
    return instance in (A, B)


def sharing(*origins: str) -> list[LoadTable]:
    """The tables of frontends that share their bookings by `send`."""
    tables = [LoadTable(origin) for origin in origins]
    for table in tables:
        table.on_unshared(lambda: None)
    return tables


def send(sender: LoadTable, *receivers: LoadTable) -> None:
    for message in sender.take_unshared(100):
        for receiver in receivers:
            receiver.apply(message, 0.0, is_registered)


def read(table: LoadTable, now: float = 0.0) -> list[tuple[float, float, float]]:
    """(requests, prefill tokens, decode blocks) of A and of B."""
    return [(load.requests, load.prefill_tokens, load.decode_blocks) for load in table.read(table.rows(FLEET), now)]


def reported(*request_ids: str, **fields: int) -> LoadReport:
    return LoadReport(accepted=pack_hashes(map(request_key, request_ids)), **fields)


def test_a_booking_counts_until_it_is_finished() -> None:
    table = LoadTable()
    table.book("r", A, 0.0, prefill_tokens=100, blocks=[1, 2, 3], extra_blocks=1)
    assert read(table) == [(1, 100, 4), (0, 0, 0)]
    table.first_token("r", 0.0)
    table.first_token("r", 0.0)
    assert read(table) == [(1, 0, 4), (0, 0, 0)]
    table.finished("r")
    table.finished("r")
    table.first_token("r", 0.0)
    assert read(table) == [(0, 0, 0), (0, 0, 0)]
    assert len(table) == 0


@pytest.mark.parametrize(("running", "tokens"), [(2, 110), (3, 250)])
def test_what_a_prompt_shares_with_one_that_is_computed_before_it_waits_only_once(running: int, tokens: int) -> None:
    """The frontend knows what is cached of its own two prompts. The third one, of 50 tokens, comes from another frontend."""
    table = LoadTable()
    table.book("first", A, 0.0, prefill_tokens=100, blocks=[1, 2])
    table.book("peer", A, 0.0, prefill_tokens=10, blocks=[1, 3])
    table.report(A, reported("first", "peer", running=running, queued_prefill_tokens=200 if running == 2 else 250), 0.0)
    assert read(table)[0][:2] == (running, tokens)


@pytest.mark.parametrize("reports", [False, True])
def test_prompts_that_wait_are_computed_one_after_the_other(reports: bool) -> None:
    """Each since it was booked, or since the one before it was done."""
    table = LoadTable()
    if reports:
        table.report(A, LoadReport(), 1.0)
    assert table.load_of(A, 1.0).queued_since == math.inf
    table.book("r", A, 1.0, prefill_tokens=100)
    table.book("s", A, 1.1, prefill_tokens=100)
    assert table.load_of(A, 1.2).queued_since == 1.0
    table.first_token("r", 1.5)
    assert table.load_of(A, 1.6).queued_since == 1.5
    table.first_token("s", 1.7)
    table.book("t", A, 2.0, prefill_tokens=100)
    assert table.load_of(A, 2.1).queued_since == 2.0


def test_a_prefix_shared_by_bookings_counts_once() -> None:
    table = LoadTable()
    table.book("r", A, 0.0, prefill_tokens=0, blocks=[1, 2, 3])
    table.book("s", A, 0.0, prefill_tokens=0, blocks=[1, 2, 4, 5])
    table.book("t", B, 0.0, prefill_tokens=0, blocks=[1, 2])
    assert [blocks for _, _, blocks in read(table)] == [5, 2]
    table.finished("r")
    assert [blocks for _, _, blocks in read(table)] == [4, 2]
    table.finished("s")
    assert [blocks for _, _, blocks in read(table)] == [0, 2]


PATHS = st.lists(st.integers(0, 1), max_size=140)


@given(st.lists(st.tuples(PATHS, st.integers(0, 100)), max_size=12))
def test_distinct_blocks_equal_those_of_a_plain_set(prompts: list[tuple[list[int], int]]) -> None:
    table, live = LoadTable(), dict[str, list[int]]()
    for number, (path, victim) in enumerate(prompts):
        blocks = [hash(tuple(path[: at + 1])) % 2**64 for at in range(len(path))]
        live[str(number)] = blocks
        table.book(str(number), A, 0.0, prefill_tokens=0, blocks=blocks)
        if victim % 3 == 0:
            gone = sorted(live)[victim % len(live)]
            del live[gone]
            table.finished(gone)
        # Exact up to so many blocks; after that each booking may count 15 blocks of its own that it shares.
        exact = len({block for blocks in live.values() for block in blocks})
        counted = read(table)[0][2]
        assert exact <= counted <= exact + 15 * sum(len(blocks) > DENSE for blocks in live.values())
    for request in live:
        table.finished(request)
    assert read(table)[0] == (0, 0, 0)


def test_thinned_prompts_stay_comparable() -> None:
    blocks = list(range(1000))
    assert kept(blocks)[:DENSE] == blocks[:DENSE]
    for length in (0, 1, DENSE, DENSE + 1, DENSE + 15, DENSE + 16, 500, 1000):
        nodes = kept(blocks[:length])
        assert nodes == kept(blocks)[: len(nodes)]
        assert length - 15 <= covered(len(nodes)) <= length


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 7, 8, 100, 1000, 100_000])
def test_a_sparse_prefix_is_exact_to_within_half_and_stays_comparable(length: int) -> None:
    blocks = range(length)
    nodes = SPARSE.kept(blocks)
    assert nodes == SPARSE.kept(range(200_000))[: len(nodes)]
    assert len(nodes) <= 17
    assert length / 2 <= SPARSE.covered(len(nodes)) <= length


def test_a_report_replaces_the_bookings_it_reflects() -> None:
    table = LoadTable()
    table.book("seen", A, 0.0, prefill_tokens=100, blocks=[1, 2])
    table.book("on its way", A, 0.01, prefill_tokens=50, blocks=[1, 2, 3])
    table.report(A, reported("seen", running=7, queued_prefill_tokens=80, active_blocks=40), 0.02)
    assert read(table, 0.02)[0] == (8, 130, 41)
    table.report(A, reported("seen", "on its way", running=8, queued_prefill_tokens=120, active_blocks=43), 0.05)
    assert read(table, 0.05)[0] == (8, 120, 43)


def test_reports_of_several_models_of_an_instance_add_up() -> None:
    table = LoadTable()
    full = LoadReport(waiting=5, running=3, active_blocks=15, total_blocks=16, queued_prefill_tokens=40)
    for now in (1.0, 2.0):
        table.report(A, full, now, "full")
        table.report(A, LoadReport(total_blocks=8), now, "idle")
        assert read(table, now)[0] == (8, 40, 15)
        assert table.read(table.rows(FLEET), now)[0].usage == 15 / 24
    table.report(A, LoadReport(total_blocks=16), 3.0, "full")
    assert read(table, 3.0)[0] == (0, 0, 0)


def test_a_booking_that_no_report_names_is_reflected_after_a_while() -> None:
    table = LoadTable(settle_s=1.0)
    table.book("r", A, 0.0, prefill_tokens=100)
    table.report(A, LoadReport(running=1), 0.9)
    assert read(table, 0.9)[0] == (2, 100, 0)
    table.report(A, LoadReport(running=1), 1.0)
    assert read(table, 1.0)[0] == (1, 0, 0)


def test_without_fresh_reports_all_bookings_count() -> None:
    table = LoadTable(report_ttl_s=3.0)
    table.book("r", A, 0.0, prefill_tokens=100, blocks=[1])
    table.report(A, reported("r", running=5, active_blocks=9), 0.0)
    assert read(table, 3.0)[0] == (5, 0, 9)
    assert read(table, 3.1)[0] == (1, 100, 1)


def test_a_finished_booking_is_not_waited_for() -> None:
    table = LoadTable()
    table.report(A, LoadReport(), 0.0)
    table.book("r", A, 0.0, prefill_tokens=100, blocks=[1])
    table.finished("r")
    assert read(table)[0] == (0, 0, 0)


def test_a_booking_that_is_made_again_replaces_the_first_here_and_at_peers() -> None:
    here, there = sharing("here", "there")
    here.book("r", A, 0.0, prefill_tokens=10)
    here.book("r", B, 0.0, prefill_tokens=20)
    send(here, there)
    assert read(here) == read(there) == [(0, 0, 0), (1, 20, 0)]
    here.finished("r")
    send(here, there)
    assert read(here) == read(there) == [(0, 0, 0), (0, 0, 0)]


def test_an_instance_that_left_takes_its_bookings_along() -> None:
    table = LoadTable()
    table.book("r", A, 0.0, prefill_tokens=10)
    table.book("s", B, 0.0, prefill_tokens=20)
    table.report(A, LoadReport(running=9), 0.0)
    table.remove_instance(A)
    table.finished("r")
    assert len(table) == 1
    assert read(table) == [(0, 0, 0), (1, 20, 0)]


def test_rows_are_looked_up_again_when_the_fleet_changed() -> None:
    table = LoadTable()
    cache = RowCache(table)
    rows = cache.rows(FLEET)
    assert cache.rows(FLEET) is rows
    table.remove_instance(A)
    table.book("r", A, 0.0, prefill_tokens=5)
    assert [load.prefill_tokens for load in table.read(cache.rows(FLEET), 0.0)] == [5, 0]
    candidates = [FLEET[0]]
    cache.rows(candidates)
    candidates[0] = FLEET[1]
    assert cache.rows(candidates) == table.rows([FLEET[1]])


def test_instances_without_recent_reports_are_read_with_those_that_report() -> None:
    table = LoadTable()
    table.book("r", A, 0.0, prefill_tokens=1)
    table.book("s", B, 0.0, prefill_tokens=2)
    table.report(A, LoadReport(running=5, queued_prefill_tokens=50), 10.0)
    table.report(B, LoadReport(running=7, queued_prefill_tokens=70), 5.0)
    assert read(table, 10.0) == [(5, 50, 0), (1, 2, 0)]
    assert read(table, 13.5) == [(1, 1, 0), (1, 2, 0)]
    table.report(B, LoadReport(running=7, queued_prefill_tokens=70), 13.5)
    assert read(table, 13.5) == [(1, 1, 0), (7, 70, 0)]


def test_bookings_of_peers_count_like_own_ones() -> None:
    here, there = sharing("here", "there")
    there.book("r", A, 0.0, prefill_tokens=10, blocks=[1, 2], extra_blocks=1)
    here.book("r", A, 0.0, prefill_tokens=5, blocks=[1, 2, 3])
    send(there, here)
    assert read(here)[0] == (2, 15, 6), "blocks that two frontends share count for each"
    assert read(there)[0] == (1, 10, 3)
    there.first_token("r", 0.0)
    send(there, here)
    assert read(here)[0] == (2, 5, 6)
    there.finished("r")
    send(there, here)
    assert read(here)[0] == (1, 5, 3)


def test_a_report_reflects_bookings_of_peers_once_they_have_seen_it() -> None:
    here, there = sharing("here", "there")
    there.book("r", A, 0.0, prefill_tokens=10, blocks=[1, 2])
    send(there, here)
    here.report(A, LoadReport(running=4), 0.0)
    assert read(here)[0] == (5, 10, 2)
    for table in (here, there):
        table.report(A, reported("r", running=5, active_blocks=2), 0.05)
    send(there, here)
    assert read(here, 0.05)[0] == (5, 0, 2)
    assert read(here, 9.0)[0] == (1, 10, 2), "reports have stopped"


def test_bookings_of_a_peer_that_fell_silent_are_released() -> None:
    table = LoadTable("here", peer_ttl_s=5.0)
    for origin in ("silent", "alive"):
        table.apply(SharedBookings(origin, [InstanceBookings(A, 1, 10, 0, 1, 10, 0)]), 0.0, is_registered)
    table.apply(SharedBookings("alive"), 4.0, is_registered)
    table.expire_peers(5.0)
    assert read(table)[0] == (2, 20, 0)
    table.expire_peers(5.1)
    assert read(table)[0] == (1, 10, 0)


@pytest.mark.parametrize("most", [1, 2, 100])
def test_a_lost_message_is_made_up_for_by_the_complete_ones(most: int) -> None:
    here, there = sharing("here", "there")
    for booking_id, instance in (("lost", A), ("open", B)):
        there.book(booking_id, instance, 0.0, prefill_tokens=10)
    send(there, here)
    there.finished("lost")
    there.take_unshared(100)
    for message in there.all_own_bookings(most):
        here.apply(message, 1.0, is_registered)
    assert read(here) == [(0, 0, 0), (1, 10, 0)]
    assert len(here) == 1


def test_bookings_on_an_instance_that_left_and_came_back_start_anew() -> None:
    here, there = sharing("here", "there")
    there.book("r", A, 0.0, prefill_tokens=10)
    send(there, here)
    here.remove_instance(A)
    assert (read(here)[0], len(here)) == ((0, 0, 0), 0)
    for message in there.all_own_bookings(100):
        here.apply(message, 1.0, is_registered)
    assert read(here)[0] == (1, 10, 0)


def test_invented_frontends_and_instances_take_no_memory() -> None:
    table = LoadTable("here")
    for number in range(1000):
        bookings = [InstanceBookings(number, 1, 0, 0, 0, 0, 0)]
        table.apply(SharedBookings(str(number), bookings), 0.0, is_registered)
    assert "instances=2 bookings=0 peers=256" in repr(table)


def invented(number: int, now: float, table: LoadTable) -> None:
    """Apply a message of a frontend that does not exist, with bookings."""
    table.apply(SharedBookings(f"invented {number}", [InstanceBookings(A, 1, 0, 0, 0, 0, 0)]), now, is_registered)


def test_frontends_that_are_invented_displace_no_peer_and_keep_out_none_that_starts_among_them() -> None:
    here, there, late = sharing("here", "there", "late")
    there.book("r", B, 0.0, prefill_tokens=10)
    for second in range(10):
        for message in there.all_own_bookings(100):
            here.apply(message, float(second), is_registered)
    late.book("r", B, 10.0, prefill_tokens=10)
    for step in range(40):  # two seconds
        now = 10 + step * 0.05
        for number in range(250):
            invented(250 * step + number, now, here)
        assert read(here)[1] == (1 + (step > 0), 10 + 10 * (step > 0), 0)
        for message in late.all_own_bookings(100):
            here.apply(message, now, is_registered)
    assert here.frontends == 257


def test_invented_frontends_that_stay_do_not_keep_out_a_peer_that_publishes_more_often() -> None:
    here, late = sharing("here", "late")
    late.book("r", B, 0.0, prefill_tokens=10)
    for second in range(60):
        for number in range(300):
            if (second + number) % 4 == 0:  # often enough to be remembered
                invented(number, float(second), here)
        if second >= 30:
            for message in late.all_own_bookings(100):
                here.apply(message, float(second), is_registered)
        here.expire_peers(float(second))
        if second > 33:
            assert read(here)[1] == (1, 10, 0)
    assert here.frontends == 257


def test_a_peer_that_was_displaced_leaves_no_bookings() -> None:
    table = LoadTable("here")
    for number in range(1000):
        invented(number, number / 1000, table)
    assert read(table)[0] == (256, 0, 0)
    table.expire_peers(100.0)
    assert read(table)[0] == (0, 0, 0)


def test_a_change_is_announced_once_until_it_is_taken() -> None:
    table, announced = LoadTable("here"), []
    table.on_unshared(lambda: announced.append(True))
    table.book("r", A, 0.0, prefill_tokens=10)
    table.share_prompt(A, [1, 2], 2.5)
    table.finished("r")
    assert len(announced) == 1
    [rows, prompts] = table.take_unshared(100)
    assert rows.instances == [InstanceBookings(A, 0, 0, 0, 0, 0, 0)]
    assert prompts.prompts == [SharedPrompt(A, pack_hashes([1, 2]), 2)]
    assert table.take_unshared(100) == []
    table.first_token("r", 0.0)
    assert len(announced) == 1


@pytest.mark.parametrize(
    ("thresholds", "busy"),
    [
        (Thresholds(), None),
        (Thresholds(active_decode_blocks=0.5), [True, False]),
        (Thresholds(active_decode_blocks=0.6), [False, False]),
        (Thresholds(active_prefill_tokens=10), [False, True]),
        (Thresholds(active_decode_blocks=0.5, active_prefill_tokens=10), [True, True]),
    ],
)
def test_thresholds_decide_which_instances_are_busy(thresholds: Thresholds, busy: list[bool] | None) -> None:
    table = LoadTable()
    table.book("r", A, 0.0, prefill_tokens=10, extra_blocks=60)
    table.book("s", B, 0.0, prefill_tokens=11, extra_blocks=50)
    assert busy_ones(table.read(table.rows(FLEET), 0.0), thresholds) == busy


def test_usage_follows_the_reported_size_of_the_cache() -> None:
    table = LoadTable()
    table.report(A, LoadReport(active_blocks=30, total_blocks=40), 0.0)
    unknown = instance(B, total_blocks=0)
    assert [load.usage for load in table.read(table.rows([FLEET[0], unknown]), 0.0)] == [0.75, 0.0]
