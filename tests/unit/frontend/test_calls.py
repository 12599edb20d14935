from __future__ import annotations

import asyncio

import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.telemetry import RequestType
from dynamo.frontend.api.calls import Caller
from dynamo.frontend.data_plane import Call


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
    made = call(Caller.read(headers, 5.0), "ignored")
    assert made.request_id == "r1"
    assert made.instance == 0x1F
    assert made.priority == -3
    assert made.session == "s"
    assert dict(made.headers) == {"traceparent": "00-a-b-01"}
    assert made.deadline == pytest.approx(asyncio.get_running_loop().time() + 5.0, abs=0.5)


@pytest.mark.parametrize("remaining_s", [None, float("inf"), 9.2e9])
async def test_no_deadline_stays_none(remaining_s: float | None) -> None:
    assert Caller.read([], remaining_s).deadline is None


@pytest.mark.parametrize("bad", ["x" * 129, "line\nbreak", "größe", ""])
async def test_an_id_that_would_spoil_logs_is_replaced(bad: str) -> None:
    first, second = call(Caller.read([("x-request-id", bad)])), call(Caller.read([]), bad)
    assert first.request_id.isalnum()
    assert first.request_id != second.request_id


async def test_the_requests_own_id_is_used_without_a_header() -> None:
    assert call(Caller.read([]), "mine").request_id == "mine"


async def test_tritons_priority_one_is_the_most_urgent_and_zero_the_default() -> None:
    caller = Caller.read([])
    urgent, less, default, most = (call(caller, triton_priority=level).priority for level in (1, 2, 0, 2**40))
    assert urgent > less > default == 0
    assert most > default


@pytest.mark.parametrize("header", [("x-dynamo-instance", "xyz"), ("x-dynamo-request-priority", "1.5")])
async def test_headers_that_cannot_be_read_are_refused(header: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        Caller.read([header])


@pytest.mark.parametrize(("value", "wanted"), [("true", True), ("TRUE", True), ("false", False), ("1", False)])
async def test_real_statuses_on_streams_are_asked_for_by_true(value: str, wanted: bool) -> None:
    assert Caller.read([("triton_grpc_error", value)]).grpc_errors is wanted
