"""Errors of engine servers as errors of ours."""

from __future__ import annotations

from typing import Final

import msgspec

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Overloaded, PayloadTooLarge, Unavailable, Unsupported

OF_SERVER: Final = frozenset({401, 403, 429, 502, 503, 504})
"""Statuses that say something of this worker or of the server, not of the request: other instances may serve it."""
_MAX_MESSAGE_CHARS = 1000
_STATUS_DIGITS = 3
_STATUSES = {
    "invalid_request_error": 400,
    "rate_limit_error": 429,
    "not_implemented": 501,
    "service_unavailable": 503,
    "timeout": 504,
}
"""By the types of errors of servers whose error codes are words, as OpenAI's are."""


class ServerError(msgspec.Struct):
    message: str = ""
    type: str = ""
    code: int | str | None = None


class _ErrorBody(msgspec.Struct):
    error: ServerError | str | None = None
    """Ollama and TGI have a text."""
    message: str = ""
    """TensorRT-LLM has no object around the error."""

    @property
    def text(self) -> str:
        match self.error:
            case None:
                return self.message
            case str():
                return self.error
            case _:
                return self.error.message


_failure_decoder = msgspec.json.Decoder(_ErrorBody)


class NotServed(Unavailable):
    """The server does not have the model, or the path."""


def read_failure(status: int, body: bytes, retry_after: str = "") -> DynamoError:
    """Return the error that a response with a status of failure means."""
    try:
        message = _failure_decoder.decode(body).text
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        message = ""  # such as a page of a proxy
    return to_error(status, message, float(retry_after) if retry_after.isdecimal() else 1.0)


def failure_of(server: object, status: int, body: bytes, retry_after: str) -> DynamoError:
    """Return the failure that one of the statuses `OF_SERVER` says. `server` names it in the message."""
    if status in (401, 403):
        return EngineError(f"the server at {server} refuses the key of its worker")
    return read_failure(status, body, retry_after)


def stream_error(error: ServerError) -> DynamoError:
    """Return our error for one that ends a stream. A server that has begun a response is not too busy for it, but lost it."""
    code = str(error.code)
    status = int(code) if code.isdecimal() and len(code) <= _STATUS_DIGITS else _STATUSES.get(error.type, 500)
    return to_error(502 if status == 503 else status, error.message)


def to_error(status: int, message: str, retry_after_s: float = 1.0) -> DynamoError:
    """Return our error for an HTTP status of the server."""
    text = message[:_MAX_MESSAGE_CHARS] or f"the server responded with status {status}"
    match status:
        case 400 | 422:
            return InvalidRequest(text)
        case 401 | 403:  # some servers repeat the key in their message
            return EngineError("the server refuses the key of its worker")
        case 413:
            return PayloadTooLarge(text)
        case 429 | 503:
            return Overloaded(text, retry_after_s=retry_after_s)
        case 404:  # it serves another model now
            return NotServed(text)
        case 502 | 504:  # a proxy in front of it has lost it
            return Unavailable(text)
        case 501:
            return Unsupported(text)
        case _:
            return EngineError(text)
