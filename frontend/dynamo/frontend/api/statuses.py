"""The one table from errors to the statuses of gRPC and HTTP, and what a caller may read of an error."""

from __future__ import annotations

import logging

import grpc

from dynamo.common.errors import Code, DynamoError, EngineError, ModelStarting, Overloaded
from dynamo.frontend.config import OverloadStatus

_STATUSES: dict[Code, tuple[grpc.StatusCode, int]] = {
    Code.INVALID_REQUEST: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    Code.UNAUTHENTICATED: (grpc.StatusCode.UNAUTHENTICATED, 401),
    Code.FORBIDDEN: (grpc.StatusCode.PERMISSION_DENIED, 403),
    Code.NOT_FOUND: (grpc.StatusCode.NOT_FOUND, 404),
    Code.ALREADY_EXISTS: (grpc.StatusCode.ALREADY_EXISTS, 400),
    Code.PAYLOAD_TOO_LARGE: (grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
    Code.CANCELLED: (grpc.StatusCode.CANCELLED, 499),
    Code.INTERNAL: (grpc.StatusCode.INTERNAL, 500),
    Code.UNKNOWN: (grpc.StatusCode.UNKNOWN, 400),
    Code.UNSUPPORTED: (grpc.StatusCode.UNIMPLEMENTED, 501),
    Code.OVERLOADED: (grpc.StatusCode.UNAVAILABLE, 503),
    Code.RATE_LIMITED: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    Code.UNAVAILABLE: (grpc.StatusCode.UNAVAILABLE, 503),
    Code.DEADLINE_EXCEEDED: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
}
MAX_MESSAGE_CHARS = 1024
"""Longer messages are cut: gRPC carries them in a header, and clients refuse headers above 8 KiB."""
UNFORESEEN = "internal error"
_NO_MEMORY = "the server has no memory left for the request"

_log = logging.getLogger(__name__)


def grpc_status(error: BaseException, overload: OverloadStatus = OverloadStatus.UNAVAILABLE) -> grpc.StatusCode:
    """Return the gRPC status of an error; INTERNAL unless it is a DynamoError, or no memory is left."""
    if not isinstance(error, DynamoError):
        return grpc.StatusCode.UNAVAILABLE if isinstance(error, MemoryError) else grpc.StatusCode.INTERNAL
    if error.code is Code.OVERLOADED and overload is OverloadStatus.TOO_MANY_REQUESTS:
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return _STATUSES[error.code][0]


def http_status(error: BaseException, overload: OverloadStatus = OverloadStatus.UNAVAILABLE) -> int:
    """Return the HTTP status of an error; 500 unless it is a DynamoError, or no memory is left."""
    if not isinstance(error, DynamoError):
        return 503 if isinstance(error, MemoryError) else 500
    return int(overload) if error.code is Code.OVERLOADED else _STATUSES[error.code][1]


def public_message(error: BaseException) -> str:
    """Return what the caller may read: the sentence of a DynamoError, but no detail of a failure inside this system."""
    if not isinstance(error, DynamoError):
        return _NO_MEMORY if isinstance(error, MemoryError) else UNFORESEEN
    if error.code is Code.INTERNAL and not isinstance(error, EngineError):
        return UNFORESEEN
    text = str(error) or UNFORESEEN
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


def retry_after_s(error: BaseException) -> float | None:
    """Return after how many seconds the caller may retry; None if the error does not say."""
    return error.retry_after_s if isinstance(error, Overloaded | ModelStarting) else None


def log_failure(error: BaseException, request_id: str, what: str) -> None:
    """Log an error once, where the caller gets it: unforeseen errors with a traceback, those of engines in a line, others not."""
    if not isinstance(error, DynamoError):
        _log.error("%s failed unforeseen, request %s", what, request_id, exc_info=error)
    elif error.code is Code.INTERNAL:
        _log.warning("%s failed, request %s: %s", what, request_id, error)
