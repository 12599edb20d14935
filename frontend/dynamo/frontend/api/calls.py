"""From gRPC metadata or HTTP headers to the conditions of a call."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.names import InstanceId, parse_instance
from dynamo.common.observability.tracing import context_of
from dynamo.common.process.work import hold_nothing
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.router.explanation import Explanation
from dynamo.frontend.router.overrides import LIMITS, read_overrides
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.keys import MAX_PRIORITY
from dynamo.frontend.serving.call import Call, Progress, priority_of_level

MAX_ID_CHARS = 128
EXPLAIN = "x-dynamo-explain"
"""With the value `true` in a request, why its instance was chosen comes back in a header or trailing metadata of this name."""
TIMEOUT = "x-request-timeout-ms"
"""The time in milliseconds within which a request must be complete; the sooner of this and a gRPC deadline applies."""
_PASSED_ON = frozenset({"traceparent", "tracestate", "baggage"})
_LONGEST_DEADLINE_S = 10 * 365 * 86400.0
"""gRPC says "no deadline" by one that is centuries away."""
_OVERRIDES = {f"x-dynamo-{name.replace('_', '-')}": name for name in LIMITS}
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """What the headers of a call say about the requests in it, of which a stream has many."""

    account: Account
    """The caller, as the guard has it."""
    progress: Progress | None = None
    """Progress of the one request in the call; None: there may be many, each with a progress of its own."""
    request_id: str = ""
    deadline: float | None = None
    """Absolute, on the event loop's clock."""
    instance: InstanceId | None = None
    prefill_instance: InstanceId | None = None
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    priority: int = 0
    session: str = ""
    overrides: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Router settings for these requests alone."""
    explanation: Explanation | None = None
    """Collects why instances are chosen; None if the caller does not want to know."""
    shadows: tuple[str, ...] = ()
    """Models that get a copy of the request, by the rule for its model's name."""
    hold: Callable[[int], None] = hold_nothing
    """Counts bytes that are kept for these requests until the end of the call."""
    grpc_errors: bool = False
    """On a stream: the first failure ends it with a status, instead of going in-band."""

    @classmethod
    def read(
        cls,
        account: Account,
        headers: Iterable[tuple[str, str | bytes]],
        remaining_s: float | None = None,
        progress: Progress | None = None,
    ) -> Caller:
        """Read headers with lower-case names; `remaining_s` are the seconds until the deadline. Raises InvalidRequest."""
        request_id = session = ""
        instance = prefill_instance = None
        priority = 0
        grpc_errors = False
        explanation = None
        overrides: dict[str, float] = {}
        passed_on: dict[str, str] = {}
        for name, value in headers:
            if not isinstance(value, str):
                continue
            if name in _PASSED_ON:
                passed_on[name] = value
                if name == "traceparent":
                    context_of(passed_on)
            elif name == "x-request-id":
                request_id = usable_id(value)
            elif name == "triton_grpc_error":
                grpc_errors = value.lower() == "true"
            elif not name.startswith("x-"):
                continue
            elif name in ("x-dynamo-instance", "x-worker-instance-id"):
                instance = parse_instance(value)
            elif name == "x-prefill-instance-id":
                prefill_instance = parse_instance(value)
            elif name == "x-dynamo-request-priority":
                priority = _whole_number(name, value)
                if abs(priority) > MAX_PRIORITY:
                    raise InvalidRequest(f"'{name}' must be from -{MAX_PRIORITY} to {MAX_PRIORITY}", param=name)
            elif name == TIMEOUT:
                timeout_s = read_timeout_s(value)
                remaining_s = timeout_s if remaining_s is None else min(remaining_s, timeout_s)
            elif name in ("x-dynamo-session", "x-dynamo-session-id"):
                session = read_session(value, name)
            elif name in _OVERRIDES:
                overrides[_OVERRIDES[name]] = _number(name, value)
            elif name == EXPLAIN and _boolean(name, value):
                explanation = Explanation()
        return cls(
            account=account,
            progress=progress,
            request_id=request_id,
            deadline=None if remaining_s is None else _deadline(remaining_s),
            instance=instance,
            prefill_instance=prefill_instance,
            headers=passed_on,
            priority=priority,
            session=session,
            overrides=read_overrides(overrides) if overrides else overrides,
            explanation=explanation,
            grpc_errors=grpc_errors,
        )

    def call(
        self,
        request_id: str = "",
        *,
        triton_priority: int = 0,
        endpoint: str,
        request_type: RequestType,
    ) -> Call:
        """Return the conditions of one request. `request_id` is the request's own, used if the headers have none."""
        return Call(
            account=self.account,
            progress=Progress() if self.progress is None else self.progress,
            request_id=self.request_id or usable_id(request_id) or secrets.token_hex(8),
            deadline=self.deadline,
            instance=self.instance,
            prefill_instance=self.prefill_instance,
            headers=self.headers,
            priority=self.priority or priority_of_level(triton_priority),
            session=self.session,
            overrides=self.overrides,
            explanation=self.explanation,
            shadows=self.shadows,
            endpoint=endpoint,
            request_type=request_type,
            hold=self.hold,
        )


def _deadline(after_s: float) -> float | None:
    return asyncio.get_running_loop().time() + after_s if after_s < _LONGEST_DEADLINE_S else None


def usable_id(text: str) -> str:
    """Return `text` if it can name a request in logs and headers, else an empty string."""
    return text if len(text) <= MAX_ID_CHARS and text.isascii() and text.isprintable() else ""


def read_timeout_s(value: str) -> float:
    """Return what the header `TIMEOUT` says, in seconds. Raises InvalidRequest."""
    timeout_s = _whole_number(TIMEOUT, value) / 1e3
    if timeout_s <= 0:
        raise InvalidRequest(f"'{TIMEOUT}' must be above 0", param=TIMEOUT)
    return timeout_s


def read_limit(text: str, most: int) -> int:
    """Return the query field `limit`, of how many items a list has. Raises InvalidRequest."""
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"'limit' must be an integer from 1 to {most}", param="limit")
    return int(text)


def read_session(text: str, name: str) -> str:
    """Return a session's id; `name` is the header or field that contains it. Raises InvalidRequest."""
    if len(text) > MAX_ID_CHARS:
        raise InvalidRequest(f"'{name}' has {len(text)} characters; at most {MAX_ID_CHARS} are taken", param=name)
    return text


def _whole_number(name: str, value: str) -> int:
    try:
        return int(value[:20])
    except ValueError:
        raise InvalidRequest(f"'{name}' must be an integer, got {value[:40]!r}", param=name) from None


def _number(name: str, value: str) -> float:
    try:
        return float(value[:40])
    except ValueError:
        raise InvalidRequest(f"'{name}' must be a number, got {value[:40]!r}", param=name) from None


def _boolean(name: str, value: str) -> bool:
    flag = _BOOLEANS.get(value.lower())
    if flag is None:
        raise InvalidRequest(f"'{name}' must be true or false, got {value[:40]!r}", param=name)
    return flag
