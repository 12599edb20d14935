"""Every failure a caller can see, as one tree.

    DynamoError
    ├── InvalidRequest            the caller's mistake
    │   └── PayloadTooLarge
    ├── Unauthenticated, Forbidden
    ├── NotFound
    │   └── ModelNotFound
    ├── AlreadyExists
    ├── Unsupported               this deployment does not do what the request demands
    ├── Overloaded                try again later; carries when
    │   └── RateLimited           the caller has used what it may use; others are served
    ├── Unavailable               nothing can serve this now
    │   ├── NoInstances
    │   ├── ModelStarting         the first instance is not there yet; carries when to try again
    │   ├── InstanceGone          left, or fell silent, while it held the request
    │   └── ShuttingDown          refuses new work; another instance may take it
    ├── DeadlineExceeded
    ├── Cancelled                 the caller left
    └── EngineError               the engine failed; its text may be shown to the caller
        └── UnknownError          a model's own word for it

`code` is what travels between processes and what each protocol edge maps to its own status (`api/statuses.py`).
`retryable` means that nothing of the request took effect for the caller, so another instance may be tried.
"""

from __future__ import annotations

from enum import StrEnum

_LONGEST_NAME_CHARS = 400


class Code(StrEnum):
    """Stable names of the failure classes, as they travel between processes."""

    INVALID_REQUEST = "invalid_request"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    UNSUPPORTED = "unsupported"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limit_exceeded"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal"
    UNKNOWN = "unknown"


class DynamoError(Exception):
    """Base of all failures that cross a module, process or protocol border.

    `str(error)` is one plain sentence that the caller may read; it never holds a traceback or a secret.
    """

    code: Code = Code.INTERNAL
    retryable: bool = False

    def __init__(self, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable


class InvalidRequest(DynamoError):
    """The request cannot be served as written. `param` names the offending field where one is known."""

    code = Code.INVALID_REQUEST

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class HarmfulRequest(InvalidRequest):
    """A request that no engine should get: it might end one, or keep it busy for long."""


class PayloadTooLarge(InvalidRequest):
    """A body or message is above the configured limit; the message names the limit."""

    code = Code.PAYLOAD_TOO_LARGE


class Unauthenticated(DynamoError):
    code = Code.UNAUTHENTICATED


class Forbidden(DynamoError):
    code = Code.FORBIDDEN


class NotFound(DynamoError):
    code = Code.NOT_FOUND


class ModelNotFound(NotFound):
    """No such model, or no such version of it."""

    def __init__(self, model: str, version: str = "", *, is_unloaded: bool = False) -> None:
        """`is_unloaded`: a repository has the model, and was told to unload it or could not load it."""
        self.model, self.version, self.is_unloaded = _shortened(model), _shortened(version), is_unloaded
        has_version = f"has no version '{self.version}'"
        super().__init__(f"model '{self.model}' {has_version if version else 'is not found'}")


class AlreadyExists(DynamoError):
    """What the request wants to make is there."""

    code = Code.ALREADY_EXISTS


class Unsupported(DynamoError):
    code = Code.UNSUPPORTED


class Overloaded(DynamoError):
    """Refused to protect the work already accepted. `retry_after_s` is a hint for the caller."""

    code = Code.OVERLOADED
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """This caller has used up one of its limits, which the message names."""

    code = Code.RATE_LIMITED
    retryable = False


class Unavailable(DynamoError):
    """Nothing can serve this now."""

    code = Code.UNAVAILABLE
    retryable = True


class VersionUnloaded(Unavailable):
    """The model has had this version, which it was told not to serve."""

    def __init__(self, model: str, version: str) -> None:
        self.model, self.version = _shortened(model), _shortened(version)
        super().__init__(f"version '{self.version}' of model '{self.model}' is unloaded")


class NoInstances(Unavailable):
    """The model is registered or declared, but no instance that can serve it is attached."""

    def __init__(self, model: str) -> None:
        super().__init__(f"no instance is serving model '{model}' now")


class ModelStarting(Unavailable):
    """The model has no instance yet, and the request may not wait for it (any longer). `retry_after_s` is a hint."""

    def __init__(self, model: str, why: str, *, retry_after_s: float) -> None:
        super().__init__(f"model '{model}' is starting: {why}")
        self.retry_after_s = retry_after_s


class InstanceGone(Unavailable):
    """The instance left before it had finished the response. Safe to retry if no frame was delivered.

    `is_alive`: the process is there, only this request was lost on it or on the way.
    `was_held`: it may have begun the request, which may be what ended it.
    `has_responded`: it sent something to this process before, so it is not one that connects later than this process.
    """

    def __init__(
        self,
        instance: int,
        why: str = "left while it held the request",
        *,
        is_alive: bool = False,
        was_held: bool = True,
        has_responded: bool = True,
    ) -> None:
        super().__init__(f"instance {instance:x} {why}")
        self.instance = instance
        self.is_alive = is_alive
        self.was_held = was_held
        self.has_responded = has_responded


class ShuttingDown(Unavailable):
    """The process is draining: it finishes what it has and takes nothing new."""

    def __init__(self, what: str = "the server") -> None:
        super().__init__(f"{what} is shutting down and takes no new requests")


class DeadlineExceeded(DynamoError):
    code = Code.DEADLINE_EXCEEDED

    def __init__(self, message: str = "the deadline of the request has passed") -> None:
        super().__init__(message)


class Cancelled(DynamoError):
    code = Code.CANCELLED

    def __init__(self, message: str = "the request was cancelled by its caller") -> None:
        super().__init__(message)


class EngineError(DynamoError):
    """The engine failed on this request. The message is the engine's own and may be shown."""


class UnknownError(EngineError):
    """A model failed on this request, in a way that it calls unknown."""

    code = Code.UNKNOWN


_BY_CODE: dict[Code, type[DynamoError]] = {
    Code.INVALID_REQUEST: InvalidRequest,
    Code.PAYLOAD_TOO_LARGE: PayloadTooLarge,
    Code.UNAUTHENTICATED: Unauthenticated,
    Code.FORBIDDEN: Forbidden,
    Code.NOT_FOUND: NotFound,
    Code.ALREADY_EXISTS: AlreadyExists,
    Code.UNSUPPORTED: Unsupported,
    Code.OVERLOADED: Overloaded,
    Code.RATE_LIMITED: RateLimited,
    Code.UNAVAILABLE: Unavailable,
    Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    Code.CANCELLED: Cancelled,
    Code.INTERNAL: EngineError,
    Code.UNKNOWN: UnknownError,
}


def release(error: BaseException) -> None:
    """Cut the traceback of an error, and its ties to other errors, so that it keeps nothing alive of what failed.

    To be called when it has been logged, and something that outlives the request keeps the error.
    """
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        pending += (current.__cause__, current.__context__)
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
        current.__traceback__ = current.__cause__ = current.__context__ = None


def _shortened(name: str) -> str:
    """Return a client's name for something, short enough for a sentence."""
    return name if len(name) <= _LONGEST_NAME_CHARS else name[: _LONGEST_NAME_CHARS - 1] + "…"


def from_wire(code: str, message: str, retryable: bool) -> DynamoError:
    """The error that another process sent, as the nearest class of this tree. An unknown code is an internal error."""
    error_code = Code(code) if code in Code._value2member_map_ else Code.INTERNAL
    cls = _BY_CODE.get(error_code)
    error = cls(message) if cls else DynamoError(message)
    error.code = error_code
    error.retryable = retryable
    return error
