"""A lease as an object: granted, kept alive, lost and granted again, revoked at the end.

    no lease ──grant──> held ──responds "gone"─────────────> lost, at once no lease again
                         │ └──silence for the whole TTL──> in doubt ──etcd is back: still there──> held
                         └──body ends──> revoked                └──gone──> lost

A lease outlives a restart of etcd, where its time starts anew. So a lease in doubt is queried before it is given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dynamo.common.errors import DynamoError
from dynamo.common.etcd.errors import EtcdUnavailable, LeaseLost
from dynamo.common.etcd.transport import EtcdMethod, Transport, backoff
from dynamo.common.process.background import running
from dynamo.protos import etcd_pb2 as pb

log = logging.getLogger(__name__)

DEFAULT_TTL_S = 10.0
GRANT: EtcdMethod[pb.LeaseGrantRequest, pb.LeaseGrantResponse] = EtcdMethod(
    "/etcdserverpb.Lease/LeaseGrant", pb.LeaseGrantResponse
)
REVOKE: EtcdMethod[pb.LeaseRevokeRequest, pb.LeaseRevokeResponse] = EtcdMethod(
    "/etcdserverpb.Lease/LeaseRevoke", pb.LeaseRevokeResponse
)
KEEP_ALIVE: EtcdMethod[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse] = EtcdMethod(
    "/etcdserverpb.Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse
)
_KEEP_ALIVES_PER_TTL = 3
_CLOSE_TIMEOUT_S = 2.0


class LeaseSession:
    """One lease, for as long as the process lives. Its number changes when it had to be granted again.

    `on_held(lease)` is called for every lease that is held from now on, and again for one that was in doubt: put the keys
    (again). `on_lost()` is called when it is gone or in doubt. Both are synchronous and must not raise.
    """

    def __init__(self, transport: Transport, ttl_s: float, on_held: Callable[[int], None], on_lost: Callable[[], None]) -> None:
        self.ttl_s = ttl_s
        self.is_held = False
        self._transport = transport
        self._on_held = on_held
        self._on_lost = on_lost
        self._lease = 0
        self._expiry: asyncio.TimerHandle | None = None
        self._failing = False
        self._pauses = backoff(transport.config.max_backoff_s)

    @property
    def lease(self) -> int:
        """The lease to put keys under; 0 while none is held."""
        return self._lease if self.is_held else 0

    async def keep(self) -> None:
        """Hold a lease until cancelled."""
        while True:
            try:
                if not self._lease:
                    await self._grant()
                await self._keep_alive()
            except LeaseLost:
                log.warning("lease %x was lost; a new one is granted", self._lease)
                self._lose()
                self._lease = 0
            except DynamoError as error:
                if not self._failing:
                    log.warning("the lease cannot be kept alive; retrying: %s", error)
                    self._failing = True
                await asyncio.sleep(min(next(self._pauses), self.ttl_s / (2 * _KEEP_ALIVES_PER_TTL)))

    async def close(self) -> None:
        """Revoke the lease, so that what was put under it is gone at once. Without etcd its time runs out by itself."""
        self._cancel_expiry()
        lease, self._lease, self.is_held = self.lease, 0, False
        if not lease:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._transport.unary(REVOKE, pb.LeaseRevokeRequest(ID=lease))
        except LeaseLost:
            pass  # already revoked
        except (DynamoError, TimeoutError) as error:
            why = str(error) or "no response in time"
            log.warning("lease %x could not be revoked and runs out within %g s: %s", lease, self.ttl_s, why)

    async def _grant(self) -> None:
        sent = asyncio.get_running_loop().time()
        response = await self._transport.unary(GRANT, pb.LeaseGrantRequest(TTL=max(1, round(self.ttl_s))))
        self._lease = response.ID
        self._renewed(sent, response.TTL)

    async def _keep_alive(self) -> None:
        """Renew the lease until its stream breaks or the lease is gone."""
        loop = asyncio.get_running_loop()
        interval_s = self.ttl_s / _KEEP_ALIVES_PER_TTL
        async with self._transport.stream(KEEP_ALIVE) as stream:
            while True:
                sent = loop.time()
                try:
                    async with asyncio.timeout(interval_s):
                        await stream.write(pb.LeaseKeepAliveRequest(ID=self._lease))
                        response = await stream.read()
                except TimeoutError:
                    raise EtcdUnavailable(f"etcd at {stream.endpoint} did not renew the lease in time") from None
                if response.TTL <= 0:
                    raise LeaseLost(f"etcd at {stream.endpoint} does not know the lease any more")
                self._renewed(sent, response.TTL)
                await asyncio.sleep(sent + response.TTL / _KEEP_ALIVES_PER_TTL - loop.time())

    def _renewed(self, sent: float, ttl_s: float) -> None:
        self._cancel_expiry()
        # Counted from the moment of the request: etcd's own count began later, so ours never ends after it.
        self._expiry = asyncio.get_running_loop().call_at(sent + ttl_s, self._in_doubt)
        self._failing = False
        self._pauses = backoff(self._transport.config.max_backoff_s)
        if not self.is_held:
            self.is_held = True
            log.info("lease %x is held", self._lease)
            self._on_held(self._lease)

    def _in_doubt(self) -> None:
        log.warning("lease %x was not renewed for its %g s; it may be gone", self._lease, self.ttl_s)
        self._lose()

    def _lose(self) -> None:
        self._cancel_expiry()
        if self.is_held:
            self.is_held = False
            self._on_lost()

    def _cancel_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


@asynccontextmanager
async def open_session(
    transport: Transport,
    ttl_s: float = DEFAULT_TTL_S,
    on_held: Callable[[int], None] = lambda lease: None,
    on_lost: Callable[[], None] = lambda: None,
) -> AsyncIterator[LeaseSession]:
    """A lease kept in the background; does not wait for etcd. `ttl_s` is rounded to whole seconds, and etcd may raise it."""
    session = LeaseSession(transport, ttl_s, on_held, on_lost)
    try:
        async with running(session.keep(), "etcd lease"):
            yield session
    finally:
        await session.close()
