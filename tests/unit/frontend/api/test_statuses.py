from __future__ import annotations

import logging

import grpc
import pytest

from dynamo.common.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    DynamoError,
    EngineError,
    Forbidden,
    InstanceGone,
    InvalidRequest,
    ModelNotFound,
    NoInstances,
    Overloaded,
    PayloadTooLarge,
    ShuttingDown,
    Unauthenticated,
    Unsupported,
    from_wire,
)
from dynamo.frontend.api.statuses import (
    MAX_MESSAGE_CHARS,
    grpc_status,
    http_status,
    log_failure,
    public_message,
    retry_after_s,
)
from dynamo.frontend.config import OverloadStatus

S = grpc.StatusCode


@pytest.mark.parametrize(
    ("error", "grpc_code", "http_code"),
    [
        (InvalidRequest("x"), S.INVALID_ARGUMENT, 400),
        (PayloadTooLarge("x"), S.RESOURCE_EXHAUSTED, 413),
        (Unauthenticated("x"), S.UNAUTHENTICATED, 401),
        (Forbidden("x"), S.PERMISSION_DENIED, 403),
        (ModelNotFound("m"), S.NOT_FOUND, 404),
        (Unsupported("x"), S.UNIMPLEMENTED, 501),
        (Overloaded("x"), S.UNAVAILABLE, 503),
        (NoInstances("m"), S.UNAVAILABLE, 503),
        (InstanceGone(1), S.UNAVAILABLE, 503),
        (ShuttingDown(), S.UNAVAILABLE, 503),
        (DeadlineExceeded(), S.DEADLINE_EXCEEDED, 504),
        (Cancelled(), S.CANCELLED, 499),
        (EngineError("x"), S.INTERNAL, 500),
        (DynamoError("x"), S.INTERNAL, 500),
        (ValueError("x"), S.INTERNAL, 500),
        (MemoryError(), S.UNAVAILABLE, 503),
    ],
)
def test_each_failure_has_its_statuses(error: Exception, grpc_code: grpc.StatusCode, http_code: int) -> None:
    assert (grpc_status(error), http_status(error)) == (grpc_code, http_code)


@pytest.mark.parametrize("code", list(Code))
def test_every_code_that_travels_has_statuses(code: Code) -> None:
    error = from_wire(code.value, "x", False)
    assert isinstance(grpc_status(error), grpc.StatusCode)
    assert 400 <= http_status(error) < 600


@pytest.mark.parametrize(
    ("chosen", "grpc_code", "http_code"),
    [
        (OverloadStatus.UNAVAILABLE, S.UNAVAILABLE, 503),
        (OverloadStatus.TOO_MANY_REQUESTS, S.RESOURCE_EXHAUSTED, 429),
        (OverloadStatus.OVERLOADED, S.UNAVAILABLE, 529),
    ],
)
def test_the_status_of_overload_is_a_setting(chosen: OverloadStatus, grpc_code: grpc.StatusCode, http_code: int) -> None:
    error = Overloaded("busy", retry_after_s=3.0)
    assert (grpc_status(error, chosen), http_status(error, chosen)) == (grpc_code, http_code)
    assert http_status(NoInstances("m"), chosen) == 503
    assert retry_after_s(error) == 3.0


def test_internal_errors_expose_no_details() -> None:
    assert public_message(InvalidRequest("input 'x' is odd")) == "input 'x' is odd"
    assert public_message(EngineError("CUDA out of memory")) == "CUDA out of memory"
    assert public_message(DynamoError("index 7 of /srv/x")) == "internal error"
    assert public_message(KeyError("/etc/secret")) == "internal error"
    assert public_message(EngineError("")) == "internal error"


def test_messages_are_cut_to_what_fits_a_header() -> None:
    message = public_message(InvalidRequest("a" * 100_000))
    assert len(message) == MAX_MESSAGE_CHARS
    assert message.endswith("…")


def test_only_our_own_failures_are_logged_with_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    log_failure(InvalidRequest("x"), "r1", "ModelInfer")
    log_failure(NoInstances("m"), "r2", "ModelInfer")
    log_failure(EngineError("boom"), "r3", "ModelInfer")
    log_failure(ValueError("bug"), "r4", "ModelInfer")
    assert [(record.levelno, record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
        (logging.WARNING, "ModelInfer failed, request r3: boom", False),
        (logging.ERROR, "ModelInfer failed unforeseen, request r4", True),
    ]
