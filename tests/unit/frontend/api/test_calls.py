from __future__ import annotations

import asyncio

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.calls import read_call, wants_statuses
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call, Progress


def read(headers: list[tuple[str, str]] | list[tuple[str, str | bytes]], remaining_s: float | None = None) -> Call:
    return read_call(ANONYMOUS, headers, remaining_s, progress=Progress())


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
    made = read(headers, 5.0)
    assert made.request_id == "r1"
    assert made.instance == 0x1F
    assert made.priority == -3
    assert made.session == "s"
    assert dict(made.headers) == {"traceparent": "00-a-b-01"}
    assert made.deadline == pytest.approx(asyncio.get_running_loop().time() + 5.0, abs=0.5)


@pytest.mark.parametrize("remaining_s", [None, float("inf"), 9.2e9])
async def test_no_deadline_stays_none(remaining_s: float | None) -> None:
    assert read([], remaining_s).deadline is None


@pytest.mark.parametrize(
    ("remaining_s", "timeout_ms", "expected_s"), [(None, "2500", 2.5), (1.0, "2500", 1.0), (9.0, "2500", 2.5)]
)
async def test_the_sooner_of_two_deadlines_applies(remaining_s: float | None, timeout_ms: str, expected_s: float) -> None:
    deadline = read([("x-request-timeout-ms", timeout_ms)], remaining_s).deadline
    assert deadline == pytest.approx(asyncio.get_running_loop().time() + expected_s, abs=0.5)


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1.5"])
async def test_a_timeout_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-request-timeout-ms"):
        read([("x-request-timeout-ms", value)])


@pytest.mark.parametrize("bad", ["x" * 129, "line\nbreak", "größe", ""])
async def test_an_id_that_would_spoil_logs_is_left_out(bad: str) -> None:
    assert read([("x-request-id", bad)]).request_id == ""


@pytest.mark.parametrize("header", [("x-dynamo-instance", "xyz"), ("x-dynamo-request-priority", "1.5")])
async def test_headers_that_cannot_be_read_are_refused(header: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        read([header])


@pytest.mark.parametrize(("value", "wanted"), [("true", True), ("TRUE", True), ("false", False), ("1", False)])
async def test_real_statuses_on_streams_are_requested_by_true(value: str, wanted: bool) -> None:
    assert wants_statuses([("x-request-id", "true"), ("triton_grpc_error", value)]) is wanted


async def test_a_request_may_change_router_settings_and_ask_why() -> None:
    headers = [
        ("x-dynamo-overlap-score-credit", "0"),
        ("x-dynamo-prefill-load-scale", "2.5"),
        ("x-dynamo-router-temperature", "1e-1"),
        ("x-dynamo-session-id", "s"),
        ("x-worker-instance-id", "ff"),
        ("x-dynamo-explain", "True"),
    ]
    made = read(headers)
    assert made.overrides == {"overlap_score_weight": 0.0, "prefill_load_scale": 2.5, "router_temperature": 0.1}
    assert (made.session, made.instance) == ("s", 255)
    assert made.explanation is not None
    plain = read([("x-dynamo-explain", "false")])
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
        read(headers)
