"""What changes under a prefix, without gaps: list at a revision, watch from the next one.

The watch resumes after a lost connection from the last revision it has delivered. Only events and the server's own
progress notices advance that revision: the response that confirms a watch carries the store's revision, which runs ahead of
events still to come. Progress is never requested either, since etcd before 3.5.8 may respond with a revision whose events
are still on their way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from dynamo.common.errors import DynamoError, Forbidden
from dynamo.common.etcd.errors import Compacted, EtcdUnavailable, TokenExpired, from_text
from dynamo.common.etcd.kv import KeyValue, from_key, from_message, interval, read
from dynamo.common.etcd.transport import EtcdMethod, EtcdStream, Transport, backoff
from dynamo.protos import etcd_pb2 as pb

log = logging.getLogger(__name__)

WATCH: EtcdMethod[pb.WatchRequest, pb.WatchResponse] = EtcdMethod("/etcdserverpb.Watch/Watch", pb.WatchResponse)
_WatchStream = EtcdStream[pb.WatchRequest, pb.WatchResponse]


@dataclass(frozen=True, slots=True)
class Put:
    """A key was set."""

    kv: KeyValue


@dataclass(frozen=True, slots=True)
class Deleted:
    """A key was deleted, or its lease ended."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Events:
    """Changes in the order in which they happened, never a part of a revision. `revision` is the last one's."""

    events: tuple[Put | Deleted, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Reset:
    """All there is under the prefix at `revision`: at the start, and when changes in between are lost."""

    kvs: tuple[KeyValue, ...]
    revision: int
    history_lost: bool = False
    """The store is younger than it was: restored, or begun anew. Owners of keys may still be putting them back."""


class _HistoryLost(DynamoError):
    """The store's revision is behind what was seen before, or it is another store."""


async def watch(
    transport: Transport,
    prefix: str,
    start_revision: int = 0,
    on_connected: Callable[[bool], None] = lambda connected: None,
) -> AsyncGenerator[Events | Reset, None]:
    """Changes from `start_revision` on; without one, first a Reset with all there is, then the changes since.

    Never ends by itself, and waits for as long as etcd is away; `on_connected` says when that begins and ends. Raises what
    waiting will not mend: Forbidden, Unauthenticated, InvalidRequest. To be closed by its user (`aclosing`).
    """
    next_revision, cluster_id = start_revision, 0
    connected = history_lost = False
    login_may_be_old = transport.config.user is not None
    pauses = backoff(transport.config.max_backoff_s)
    while True:
        try:
            if not next_revision:
                listing = await read(transport, prefix, prefix=True)
                next_revision = listing.revision + 1
                yield Reset(listing.kvs, listing.revision, history_lost)
                history_lost = False
            async with transport.stream(WATCH) as stream:
                created = await _create(stream, prefix, next_revision, transport.config.timeout_s)
                if created.header.revision < next_revision - 1 or cluster_id not in (0, created.header.cluster_id):
                    raise _HistoryLost(f"etcd at {stream.endpoint} has lost its history; {prefix} is listed again")
                cluster_id = created.header.cluster_id
                connected = True
                on_connected(True)
                pauses = backoff(transport.config.max_backoff_s)
                login_may_be_old = transport.config.user is not None
                while True:
                    response = _checked(await stream.read(), stream.endpoint)
                    if response.events:
                        batch = _to_events(response)
                        next_revision = batch.revision + 1
                        yield batch
                    else:
                        next_revision = max(next_revision, response.header.revision + 1)
        except Compacted:
            next_revision = 0
            continue
        except _HistoryLost as lost:
            log.warning("%s", lost)
            next_revision, cluster_id, history_lost = 0, 0, True
        except (TokenExpired, Forbidden):
            # A watch is refused as forbidden for an expired token, too.
            if not login_may_be_old:
                raise
            login_may_be_old = False
            transport.forget_login()
            continue
        except EtcdUnavailable as unavailable:
            if connected:
                log.warning("the watch of %s is interrupted: %s", prefix, unavailable)
                connected = False
                on_connected(False)
        await asyncio.sleep(next(pauses))


async def _create(stream: _WatchStream, prefix: str, start_revision: int, timeout_s: float) -> pb.WatchResponse:
    start, end = interval(prefix, prefix=True)
    create = pb.WatchCreateRequest(key=start, range_end=end, start_revision=start_revision, progress_notify=True)
    try:
        async with asyncio.timeout(timeout_s):
            await stream.write(pb.WatchRequest(create_request=create))
            return _checked(await stream.read(), stream.endpoint)
    except TimeoutError:
        raise EtcdUnavailable(f"etcd at {stream.endpoint} did not confirm a watch in time") from None


def _checked(response: pb.WatchResponse, endpoint: str) -> pb.WatchResponse:
    if response.compact_revision:
        raise Compacted(f"etcd at {endpoint} has compacted what came before revision {response.compact_revision}")
    if response.canceled:
        raise from_text(response.cancel_reason or "the watch was cancelled", endpoint)
    return response


def _to_events(response: pb.WatchResponse) -> Events:
    events = tuple(
        Deleted(from_key(event.kv.key), event.kv.mod_revision) if event.type == pb.Event.DELETE else Put(from_message(event.kv))
        for event in response.events
    )
    return Events(events, response.events[-1].kv.mod_revision)
