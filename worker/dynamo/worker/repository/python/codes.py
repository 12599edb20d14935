"""Errors of models as errors of ours, and ours as Triton's codes."""

from __future__ import annotations

from dynamo.common.errors import (
    AlreadyExists,
    Cancelled,
    Code,
    DynamoError,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    UnknownError,
    Unsupported,
)
from dynamo.worker.repository.scheduling.responses import ExecuteRaised
from dynamo.worker.repository.stub.pb_utils import TritonError
from dynamo.worker.repository.wire import wire

_TO_CODE = {
    Code.INVALID_REQUEST: TritonError.INVALID_ARG,
    Code.PAYLOAD_TOO_LARGE: TritonError.INVALID_ARG,
    Code.NOT_FOUND: TritonError.NOT_FOUND,
    Code.UNSUPPORTED: TritonError.UNSUPPORTED,
    Code.OVERLOADED: TritonError.UNAVAILABLE,
    Code.UNAVAILABLE: TritonError.UNAVAILABLE,
    Code.CANCELLED: TritonError.CANCELLED,
    Code.ALREADY_EXISTS: TritonError.ALREADY_EXISTS,
    Code.UNKNOWN: TritonError.UNKNOWN,
}


def to_error(text: str, code: int) -> DynamoError:
    """Return the error that callers get for a model's TritonError."""
    match code:
        case TritonError.INVALID_ARG:
            return InvalidRequest(text)
        case TritonError.ALREADY_EXISTS:
            return AlreadyExists(text)
        case TritonError.UNKNOWN:
            return UnknownError(text)
        case TritonError.NOT_FOUND:
            error = ModelNotFound("")
            error.args = (text,)
            return error
        case TritonError.UNAVAILABLE:
            return Unavailable(text, retryable=False)
        case TritonError.UNSUPPORTED:
            return Unsupported(text)
        case TritonError.CANCELLED:
            return Cancelled(text)
        case wire.RAISED:
            return ExecuteRaised(text)
        case _:
            return EngineError(text)


def to_code(error: DynamoError) -> int:
    """Return the code of TritonError for an error."""
    return _TO_CODE.get(error.code, TritonError.INTERNAL)
