from __future__ import annotations

import asyncio

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.calls import Caller
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call


def call(caller: Caller, request_id: str = "", triton_priority: int = 0) -> Call:
    return caller.call(request_id, triton_priority=triton_priority, endpoint="tensor", request_type=RequestType.UNARY)


async def test_headers_become_the_conditions_of_the_call() -> None:
    headers = [
        ("x-request-id", "r1"),
        ("traceparent", "00-a-b-01"),
        ("x-dynamo-instance", "1f"),
        ("x-dynamo-request-priority", "-3"),
        ("x-dynamo-session", "s"),
        ("user-agent", "test"),
        ("some-bin", b"\0"),
    ]
    made = call(Caller.read(ANONYMOUS, headers, 5.0), "ignored")
    assert made.request_id == "r1"
    assert made.instance == 0x1F
    assert made.priority == -3
    assert made.session == "s"
    assert dict(made.headers) == {"traceparent": "00-a-b-01"}
    assert made.deadline == pytest.approx(asyncio.get_running_loop().time() + 5.0, abs=0.5)


@pytest.mark.parametrize("remaining_s", [None, float("inf"), 9.2e9])
async def test_no_deadline_stays_none(remaining_s: float | None) -> None:
    assert Caller.read(ANONYMOUS, [], remaining_s).deadline is None


@pytest.mark.parametrize(
    ("remaining_s", "timeout_ms", "expected_s"), [(None, "2500", 2.5), (1.0, "2500", 1.0), (9.0, "2500", 2.5)]
)
async def test_the_sooner_of_two_deadlines_applies(remaining_s: float | None, timeout_ms: str, expected_s: float) -> None:
    deadline = Caller.read(ANONYMOUS, [("x-request-timeout-ms", timeout_ms)], remaining_s).deadline
    assert deadline == pytest.approx(asyncio.get_running_loop().time() + expected_s, abs=0.5)


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1.5"])
async def test_a_timeout_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-request-timeout-ms"):
        Caller.read(ANONYMOUS, [("x-request-timeout-ms", value)])


@pytest.mark.parametrize("bad", ["x" * 129, "line\nbreak", "größe", ""])
async def test_an_id_that_would_spoil_logs_is_replaced(bad: str) -> None:
    first, second = call(Caller.read(ANONYMOUS, [("x-request-id", bad)])), call(Caller.read(ANONYMOUS, []), bad)
    assert first.request_id.isalnum()
    assert first.request_id != second.request_id


async def test_the_requests_own_id_is_used_without_a_header() -> None:
    assert call(Caller.read(ANONYMOUS, []), "mine").request_id == "mine"


async def test_tritons_priority_one_is_the_most_urgent_and_zero_the_default() -> None:
    caller = Caller.read(ANONYMOUS, [])
    urgent, less, default, most = (call(caller, triton_priority=level).priority for level in (1, 2, 0, 2**40))
    assert urgent > less > default == 0
    assert most > default


@pytest.mark.parametrize("header", [("x-dynamo-instance", "xyz"), ("x-dynamo-request-priority", "1.5")])
async def test_headers_that_cannot_be_read_are_refused(header: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        Caller.read(ANONYMOUS, [header])


@pytest.mark.parametrize(("value", "wanted"), [("true", True), ("TRUE", True), ("false", False), ("1", False)])
async def test_real_statuses_on_streams_are_requested_by_true(value: str, wanted: bool) -> None:
    assert Caller.read(ANONYMOUS, [("triton_grpc_error", value)]).grpc_errors is wanted


async def test_a_request_may_change_router_settings_and_ask_why() -> None:
    headers = [
        ("x-dynamo-overlap-score-credit", "0"),
        ("x-dynamo-prefill-load-scale", "2.5"),
        ("x-dynamo-router-temperature", "1e-1"),
        ("x-dynamo-session-id", "s"),
        ("x-worker-instance-id", "ff"),
        ("x-dynamo-explain", "True"),
    ]
    made = call(Caller.read(ANONYMOUS, headers))
    assert made.overrides == {"overlap_score_weight": 0.0, "prefill_load_scale": 2.5, "router_temperature": 0.1}
    assert (made.session, made.instance) == ("s", 255)
    assert made.explanation is not None
    plain = call(Caller.read(ANONYMOUS, [("x-dynamo-explain", "false")]))
    assert plain.explanation is None
    assert not plain.overrides


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ([("x-dynamo-router-temperature", "warm")], "'x-dynamo-router-temperature' must be a number, got 'warm'"),
        ([("x-dynamo-router-temperature", "-1")], "'router_temperature' is -1; it must be at least 0 and at most 100"),
        ([("x-dynamo-overlap-score-weight", "nan")], "'overlap_score_weight' is nan"),
        ([("x-dynamo-overlap-score-weight", "1e9")], "it must be at least 0 and at most 1000"),
        ([("x-dynamo-overlap-score-weight", "1"), ("x-dynamo-overlap-score-credit", "2")], "are one setting"),
        ([("x-dynamo-explain", "perhaps")], "'x-dynamo-explain' must be true or false"),
        ([("x-dynamo-session", "s" * 129)], "'x-dynamo-session' has 129 characters; at most 128 are taken"),
        ([("x-worker-instance-id", "worker-3")], "is not an instance id"),
    ],
)
async def test_routing_headers_out_of_range_are_refused_with_a_sentence(headers: list[tuple[str, str]], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        Caller.read(ANONYMOUS, headers)
