"""What a drill judges: counts and states, never how long something took."""

from __future__ import annotations

from typing import Any, cast

from dynamo.common.kv.tiers import Tier
from tests.drill.__main__ import Drilled
from tests.drill.caches import Caches
from tests.drill.faults import Fault
from tests.drill.fleet import Held
from tests.drill.load import Load

HELD = Held(memory_mib=100, files=10, open_requests=0, credit_mib=50)


CACHES = Caches({Tier.GPU: 3, Tier.CPU: 5})


async def nothing(fleet: object) -> None: ...


def drilled(after: Held = HELD, caches: Caches = CACHES, **seen: Any) -> Drilled:
    load = Load(cast(Any, None), 60.0, (), **seen)
    return Drilled(Fault("a pause", nothing, seconds=3.0), load, HELD, after, caches, "")


def test_a_slow_request_is_told_and_breaks_no_promise() -> None:
    slow = drilled(durations=[0.1, 50.0], longest_silence_s=40.0)
    assert list(slow.broken_promises()) == []
    assert list(slow.delays()) == ["a request took 50.00 s, more than 5", "a stream paused for 40.00 s, more than 5"]
    assert list(drilled(durations=[4.9]).delays()) == []


def test_a_request_that_fails_or_stays_open_breaks_a_promise() -> None:
    failed = drilled(failures=["DEADLINE_EXCEEDED: the deadline of the request has passed"])
    assert list(failed.broken_promises()) == failed.load.failures
    kept = drilled(after=Held(memory_mib=140, files=11, open_requests=2, credit_mib=40))
    assert list(kept.broken_promises()) == [
        "memory grew from 100 to 140 MiB",
        "open files grew from 10 to 11",
        "2 requests stayed open",
        "credit fell from 50 to 40 MiB",
    ]


def test_a_cache_that_is_not_known_exactly_breaks_a_promise() -> None:
    assert list(drilled().broken_promises()) == []
    assert drilled(durations=[0.1]).row().endswith("| 3 gpu, 5 cpu |")
    wrong = "a frontend knows 2 of 3 blocks on the tier cpu of 7, and 1 that are not there"
    assert list(drilled(caches=Caches(differences=[wrong])).broken_promises()) == [wrong]
