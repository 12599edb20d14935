"""Copies of requests to shadow models, made beside the requests themselves; their responses are dropped.

Copies belong to the operator: they count against no key and need no permission of it. Past a number of copies, or of bytes in
them, further copies are dropped, so that a slow shadow costs the requests nothing. One that fails is not sent to another
instance, since the retries of requests have a budget in common.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec

from dynamo.common.errors import DynamoError
from dynamo.common.process.background import Tasks
from dynamo.frontend.metrics import FrontendMetrics, RequestType
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call, Progress, wait_uncounted

log = logging.getLogger(__name__)

MAX_COPIES = 64
MAX_BYTES = 64 << 20
ENDPOINT = "shadow"
"""The name of these requests in metrics."""
_PRIORITY = -1000


class Shadows:
    """The copies of one process. To be closed."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._tasks = Tasks()
        self._held_bytes = 0

    def copy(self, model: str, size_bytes: int, call: Call, send: Callable[[str, Call], Awaitable[object]]) -> None:
        """Let `send` copy the request and send it to `model`, under the conditions that it is called with. Does not wait.

        A copy that is dropped is not made: `send` is not called.
        """
        if len(self._tasks) >= MAX_COPIES or self._held_bytes + size_bytes > MAX_BYTES:
            self._metrics.shadowed(model, "dropped")
            return
        self._held_bytes += size_bytes
        self._tasks.start(self._send(model, size_bytes, _of_operator(call), send), f"copy to {model}")

    async def _send(self, model: str, size_bytes: int, call: Call, send: Callable[[str, Call], Awaitable[object]]) -> None:
        outcome = "error"
        try:
            await send(model, call)
            outcome = "success"
        except DynamoError as error:
            log.debug("the copy of request %s to the shadow '%s' failed: %s", call.request_id, model, error)
        finally:
            self._held_bytes -= size_bytes
            self._metrics.shadowed(model, outcome)

    async def close(self) -> None:
        """Cancel what still runs."""
        await self._tasks.close()


def _of_operator(call: Call) -> Call:
    return msgspec.structs.replace(
        call,
        account=ANONYMOUS,
        instance=None,
        prefill_instance=None,
        overrides={},
        headers={},
        priority=min(call.priority, _PRIORITY),
        explanation=None,
        shadows=(),
        is_copy=True,
        endpoint=ENDPOINT,
        request_type=RequestType.UNARY,
        progress=Progress(),
        span=None,
        waiting=wait_uncounted,
    )


def content_length(content: object, depth: int = 3) -> int:
    """Return about how many characters a message's content has, the parts and the URLs in these included."""
    if isinstance(content, str):
        return len(content)
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return sum(content_length(value, depth - 1) for value in values) if depth else 0
