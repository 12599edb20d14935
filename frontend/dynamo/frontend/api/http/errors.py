"""How errors are written, and the form that OpenAI clients expect: `{"error": {"message", "type", "param", "code"}}`.

Operations outside of any protocol, such as `/health`, use that form as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from dynamo.common.errors import Code, DynamoError, InvalidRequest, ModelNotFound, NotFound
from dynamo.common.http.served import Header
from dynamo.frontend.api.statuses import public_message
from dynamo.frontend.preprocess.text import ContextExceeded
from dynamo.frontend.security.sharing import RateLimit

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_implemented",
    503: "service_unavailable",
    504: "timeout",
    529: "service_unavailable",
}
_CODES = {
    Code.INVALID_REQUEST: None,
    Code.UNAUTHENTICATED: "invalid_api_key",
    Code.NOT_FOUND: "model_not_found",
    Code.INTERNAL: "internal_error",
}
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorForm:
    """How a protocol writes errors."""

    body: Callable[[BaseException, int], bytes]
    """JSON, from the failure and its HTTP status."""
    event: Callable[[BaseException, int], bytes]
    """The event that ends a stream."""
    request_id: bytes = b""
    """The protocol's own header for the request's id, beside `x-request-id`."""


def _plain_body(error: BaseException, status: int) -> bytes:
    return msgspec.json.encode({"error": public_message(error)})


PLAIN_ERRORS = ErrorForm(body=_plain_body, event=lambda error, status: b"data: " + _plain_body(error, status) + b"\n\n")
"""`{"error": "…"}`, which is KServe's form as well."""


class PathNotFound(DynamoError):
    code = Code.NOT_FOUND

    def __init__(self, path: str) -> None:
        super().__init__(f"path '{path[:200]}' is not found")


class ErrorInfo(Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct, frozen=True):
    error: ErrorInfo


def error_info(error: BaseException, status: int) -> ErrorInfo:
    if isinstance(error, NotFound | PathNotFound) and not isinstance(error, ModelNotFound):
        return ErrorInfo(message=public_message(error), type=_TYPES[404], param=None, code=None)
    code = error.code if isinstance(error, DynamoError) else Code.INTERNAL
    return ErrorInfo(
        message=public_message(error),
        type=_TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error"),
        param=error.param if isinstance(error, InvalidRequest) else "model" if code is Code.NOT_FOUND else None,
        code="context_length_exceeded" if isinstance(error, ContextExceeded) else _CODES.get(code, code.value),
    )


def error_body(error: BaseException, status: int) -> bytes:
    return _encoder.encode(ErrorResponse(error_info(error, status)))


def error_event(error: BaseException, status: int) -> bytes:
    """Return the last event of a stream that failed. No `[DONE]` follows, since the response is incomplete."""
    return b"event: error\ndata: " + error_body(error, status) + b"\n\n"


def retry_after(pause_s: float) -> Header:
    return b"retry-after", b"%d" % max(1, round(pause_s))


def rate_limit_headers(limit: RateLimit) -> tuple[Header, ...]:
    """Return the headers that say what is left of a limit of the caller's key."""
    kind = limit.kind.encode()
    return (
        (b"x-ratelimit-limit-" + kind, b"%d" % limit.size),
        (b"x-ratelimit-remaining-" + kind, b"%d" % limit.remaining),
        (b"x-ratelimit-reset-" + kind, b"%.3fs" % limit.reset_s),
    )


OPENAI_ERRORS = ErrorForm(body=error_body, event=error_event)
