"""From gRPC metadata or HTTP headers to the conditions of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from dynamo.common.errors import InvalidRequest
from dynamo.common.names import parse_instance
from dynamo.common.observability.tracing import context_of
from dynamo.common.process.work import hold_nothing
from dynamo.frontend.api.capacity import Occupancy
from dynamo.frontend.router.explanation import Explanation
from dynamo.frontend.router.overrides import LIMITS, read_overrides
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.security.keys import MAX_PRIORITY
from dynamo.frontend.serving.call import Call, Progress, wait_uncounted

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


def read_call(
    account: Account,
    headers: Iterable[tuple[str, str | bytes]],
    remaining_s: float | None = None,
    *,
    progress: Progress,
    endpoint: str = "tensor",
    occupied: Occupancy | None = None,
) -> Call:
    """Read headers with lower-case names; `remaining_s` are the seconds until the deadline. Raises InvalidRequest."""
    request_id = session = ""
    instance = prefill_instance = None
    priority = 0
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
    return Call(
        account=account,
        request_id=request_id,
        deadline=None if remaining_s is None else _deadline(remaining_s),
        instance=instance,
        prefill_instance=prefill_instance,
        headers=passed_on,
        priority=priority,
        session=session,
        overrides=read_overrides(overrides) if overrides else overrides,
        explanation=explanation,
        endpoint=endpoint,
        progress=progress,
        hold=hold_nothing if occupied is None else occupied.hold,
        waiting=wait_uncounted if occupied is None else occupied.waiting,
    )


def wants_statuses(headers: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether the first failure on a stream is to end it with a status, instead of going in-band."""
    return any(name == "triton_grpc_error" and isinstance(value, str) and value.lower() == "true" for name, value in headers)


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
