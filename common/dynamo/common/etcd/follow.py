"""Follow what is under a prefix for as long as the process lives, also where etcd refuses it for a while."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import NoReturn

from dynamo.common.errors import DynamoError
from dynamo.common.etcd.transport import backoff
from dynamo.common.etcd.watch import Events, Reset

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 10.0

Change = Events | Reset


async def follow(
    name: str,
    watch: Callable[[], AsyncGenerator[Change, None]],
    apply: Callable[[Change], Awaitable[None] | None],
    on_error: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Call `apply` with each change that `watch` yields, until cancelled.

    If either raises DynamoError, that is logged, `on_error` is called, and `watch` again after a pause: what is not permitted
    or not understood may be corrected in etcd. `name`: of what is followed, for log lines; a plural.
    """
    pauses = backoff(LONGEST_PAUSE_S)
    while True:
        try:
            async with aclosing(watch()) as changes:
                async for change in changes:
                    pauses = backoff(LONGEST_PAUSE_S)
                    applied = apply(change)
                    if applied is not None:
                        await applied
        except DynamoError as error:
            log.error("the %s cannot be followed; retrying: %s", name, error)
            on_error()
        await asyncio.sleep(next(pauses))
