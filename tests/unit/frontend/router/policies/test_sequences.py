"""All frontends send the requests of one sequence to one instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dynamo.common.discovery import Instance
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.policies.sequences import SequenceRouter
from dynamo.frontend.router.simple import RandomChoice, RoundRobin
from tests.support.fakes import instance

FOUR = tuple(map(instance, (1, 2, 3, 4)))


def place(sequence: str, candidates: Sequence[Instance] = FOUR, router: SequenceRouter | None = None, **more: object) -> int:
    request = RouteRequest(model="m", booking_id="b", sequence=sequence, **more)  # type: ignore[arg-type]
    return (router or SequenceRouter(RandomChoice())).pick(request, candidates).instance.id


def test_frontends_agree_on_the_instance_of_a_sequence_whatever_the_order_of_instances() -> None:
    for number in range(50):
        assert place(str(number)) == place(str(number), FOUR[::-1], SequenceRouter(RoundRobin()))


def test_sequences_spread_over_the_instances() -> None:
    counts = Counter(place(str(number)) for number in range(400))
    assert set(counts) == {1, 2, 3, 4} and min(counts.values()) > 60


def test_an_instance_that_joins_takes_over_its_share_and_moves_no_other_sequence() -> None:
    before = {str(number): place(str(number), FOUR[:3]) for number in range(400)}
    moved = {sequence for sequence, at in before.items() if place(sequence) != at}
    assert 50 < len(moved) < 150 and {place(sequence) for sequence in moved} == {4}


def test_a_retry_goes_to_the_next_in_the_same_order_at_every_frontend() -> None:
    for number in range(20):
        first = place(str(number))
        rest = [candidate for candidate in FOUR if candidate.id != first]
        assert place(str(number), rest) == place(str(number), rest[::-1]) != first


def test_requests_without_a_sequence_and_those_that_name_their_instance_are_left_to_the_wrapped_router() -> None:
    router = SequenceRouter(RoundRobin())
    assert {place("", router=router) for _ in range(4)} == {1, 2, 3, 4}
    assert {place("s", router=router, pinned=FOUR[number].id) for number in range(4)} == {1, 2, 3, 4}
