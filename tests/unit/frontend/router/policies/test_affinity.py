"""Sessions stay where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from dynamo.common.discovery import Instance
from dynamo.common.errors import NoInstances, Overloaded
from dynamo.common.kv.events import LoadReport
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, Role
from dynamo.common.names import InstanceId
from dynamo.frontend.config import AffinityMode
from dynamo.frontend.router.base import Router, RouteRequest
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import Thresholds, ThresholdTable
from dynamo.frontend.router.policies.affinity import SessionKey, SessionRouter
from dynamo.frontend.router.policies.balance import LoadRouter, least_loaded
from dynamo.frontend.router.simple import RandomChoice, RoundRobin
from tests.support.fakes import instance
from tests.support.memory import kept_objects

THREE = tuple(map(instance, (1, 2, 3)))


class Sessions:
    def __init__(
        self, inner: Router | None = None, mode: AffinityMode = AffinityMode.HARD, max_sessions: int = 100, ttl_s: float = 60.0
    ) -> None:
        self.now = 0.0
        self.placements: list[tuple[SessionKey, InstanceId]] = []
        self.router = SessionRouter(
            inner or RoundRobin(),
            ttl_s,
            mode,
            max_sessions,
            on_placed=lambda key, instance: self.placements.append((key, instance)),
            clock=lambda: self.now,
        )
        self._count = 0

    def begin(self, session: str, candidates: Sequence[Instance] = THREE, **fields: object) -> str:
        """The booking of a request that goes on."""
        self._count += 1
        booking = str(self._count)
        request = RouteRequest(model="m", booking_id=booking, session=session, **fields)  # type: ignore[arg-type]
        self.decision = self.router.pick(request, candidates)
        return booking

    def ask(self, session: str, candidates: Sequence[Instance] = THREE, **fields: object) -> int:
        """Where a request goes that is over at once."""
        self.router.finished(self.begin(session, candidates, **fields))
        return self.decision.instance.id


def test_requests_of_one_session_go_to_one_instance() -> None:
    sessions = Sessions()
    placed = {name: sessions.ask(name) for name in "abc"}
    assert sorted(placed.values()) == [1, 2, 3]
    for _ in range(5):
        assert {name: sessions.ask(name) for name in "cab"} == placed
    assert sessions.decision.reason == "session"


def test_requests_without_a_session_are_routed_as_ever() -> None:
    sessions = Sessions()
    assert Counter(sessions.ask("") for _ in range(9)) == {1: 3, 2: 3, 3: 3}
    assert len(sessions.router) == 0


def test_models_and_roles_keep_their_sessions_apart() -> None:
    llm = LlmInfo(context_length=8, tokenizer="")
    prefill = instance(4, ModelCard(name="m", kind=ModelKind.LLM, llm=llm, role=Role.PREFILL))
    sessions = Sessions()
    decode = sessions.ask("a")
    assert sessions.ask("a", (prefill,)) == 4
    assert sessions.ask("a") == decode


def test_an_idle_session_is_forgotten_and_one_in_use_is_not() -> None:
    sessions = Sessions(ttl_s=60.0)
    first = sessions.ask("a")
    sessions.now = 59.0
    assert sessions.ask("a") == first
    sessions.now = 118.0
    assert sessions.ask("a") == first
    sessions.now = 178.0
    assert sessions.ask("a") != first  # its turn is over: round-robin goes on


def test_a_session_is_not_idle_while_a_request_of_it_runs() -> None:
    sessions = Sessions(ttl_s=60.0)
    long = sessions.begin("a")
    first = sessions.decision.instance.id
    sessions.now = 1000.0
    sessions.ask("other")
    assert sessions.ask("a") == first
    sessions.router.finished(long)
    sessions.now = 1059.0
    assert sessions.ask("a") == first
    kept = kept_objects(sessions.router)
    for _ in range(10):
        sessions.ask("a")
    assert kept_objects(sessions.router) == kept


def test_idle_sessions_take_no_memory_for_long() -> None:
    sessions = Sessions(ttl_s=60.0)
    for number in range(50):
        sessions.ask(str(number))
    sessions.now = 61.0
    for _ in range(20):
        sessions.ask("x")
    assert len(sessions.router) == 1


def test_memory_is_bounded_and_the_least_recently_used_session_goes_first() -> None:
    sessions = Sessions(max_sessions=3)
    kept = sessions.ask("kept")
    for number in range(20):
        sessions.ask(f"other {number}")
        assert sessions.ask("kept") == kept
    assert len(sessions.router) == 3


def test_keys_have_sessions_of_their_own() -> None:
    sessions = Sessions()
    first = sessions.ask("chat", session_owner="a")
    other = InstanceId(first % 3 + 1)
    assert sessions.ask("chat", session_owner="b", pinned=other) == other
    assert sessions.ask("chat", session_owner="a") == first
    assert sessions.ask("chat", session_owner="b") == other


def test_a_key_with_many_sessions_evicts_none_of_those_of_keys_with_few() -> None:
    sessions = Sessions(max_sessions=6)
    for number in range(9):
        sessions.ask(f"invented {number}", session_owner="a")
    homes = {(owner, name): sessions.ask(name, session_owner=owner) for owner in "bc" for name in ("x", "y")}
    for number in range(30):
        sessions.ask(f"more {number}", session_owner="a")
    for (owner, name), home in homes.items():
        assert sessions.ask(name, session_owner=owner) == home
        assert sessions.decision.reason == "session"
    assert len(sessions.router) == 6


def test_more_keys_than_sessions_leave_each_a_chance_and_no_memory() -> None:
    sessions = Sessions(max_sessions=3)
    for number in range(20):
        sessions.ask("x", session_owner=str(number % 5))
    assert len(sessions.router) == 3
    sessions.now = 61.0
    for _ in range(20):
        sessions.ask("y", session_owner="last")
    kept = kept_objects(sessions.router)
    for number in range(20):
        sessions.now += 61.0
        sessions.ask("y", session_owner=str(number))
    assert (len(sessions.router), kept_objects(sessions.router)) == (1, kept)


def test_a_session_whose_instance_is_gone_moves_to_another_and_stays_there() -> None:
    sessions = Sessions()
    first = sessions.ask("a")
    left = tuple(i for i in THREE if i.id != first)
    second = sessions.ask("a", left)
    assert second != first
    assert {sessions.ask("a", left) for _ in range(4)} == {second}
    assert sessions.ask("a") == second  # also when the first one is back


def test_a_pin_goes_before_the_session_which_follows_it() -> None:
    sessions = Sessions()
    first = sessions.ask("a")
    other = InstanceId(first % 3 + 1)
    assert sessions.ask("a", pinned=other) == other
    assert sessions.ask("a") == other
    with pytest.raises(NoInstances):
        sessions.ask("a", pinned=InstanceId(99))


@pytest.mark.parametrize("kind", ["kv", "least-loaded"])
@pytest.mark.parametrize("mode", list(AffinityMode))
def test_a_busy_instance_keeps_a_hard_session_and_loses_a_soft_one(mode: AffinityMode, kind: str) -> None:
    loads = LoadTable()
    limits = ThresholdTable(Thresholds(active_prefill_tokens=10))

    def clock() -> float:
        return 0.0

    inner: Router = KvRouter(None, limits, loads, clock=clock)
    if kind == "least-loaded":
        inner = LoadRouter(kind, least_loaded, limits, loads, clock=clock)
    sessions = Sessions(inner, mode)
    first = sessions.ask("a")
    for load in (0, 11):
        loads.report(InstanceId(first), LoadReport(queued_prefill_tokens=load, running=5), 0.0)
        second = sessions.ask("a")
        assert (second == first) is (load == 0 or mode is AffinityMode.HARD)
    loads.report(InstanceId(first), LoadReport(), 0.0)
    assert sessions.ask("a") == second
    for each in THREE:
        loads.report(each.id, LoadReport(queued_prefill_tokens=11), 0.0)
    if mode is AffinityMode.SOFT:
        with pytest.raises(Overloaded):
            sessions.ask("a")
    else:
        assert sessions.ask("a") == second


def test_every_router_honours_a_preferred_instance() -> None:
    for inner in (RoundRobin(), RandomChoice()):
        sessions = Sessions(inner, AffinityMode.SOFT)
        first = sessions.ask("a")
        assert {sessions.ask("a") for _ in range(30)} == {first}


def test_placements_of_sessions_are_published_but_not_for_every_request() -> None:
    one, other = Sessions(ttl_s=60.0), Sessions(ttl_s=60.0)
    first = one.ask("a")
    for _ in range(10):
        one.ask("a")
    assert one.placements == [(SessionKey("m", "aggregated", "a"), first)]
    one.now = 31.0  # lest the others take the session for an idle one
    one.ask("a")
    assert len(one.placements) == 2
    other.ask("b")
    other.ask("c")
    for placement in one.placements:
        other.router.placed(*placement)
    assert other.ask("a") == first
    assert [key.session for key, _ in other.placements] == ["b", "c"]  # received placements are not forwarded
