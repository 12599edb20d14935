"""The etcd client as the rest of the project uses it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from dynamo.common.etcd import kv, lease, watch
from dynamo.common.etcd.transport import Transport
from dynamo.common.options import EtcdOptions


class Etcd:
    """One etcd cluster. Every call raises EtcdUnavailable when no endpoint responded within `timeout_s`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def config(self) -> EtcdOptions:
        return self._transport.config

    @property
    def endpoint(self) -> str | None:
        """The endpoint in use; None while there is none."""
        return self._transport.endpoint

    async def range(self, key: str, *, prefix: bool = False, revision: int = 0) -> kv.Listing:
        """Return a key, or all keys with a prefix, now or as of a revision. Raises Compacted if that revision is gone."""
        return await kv.read(self._transport, key, prefix=prefix, revision=revision)

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Set a key; return the revision. Raises LeaseLost if the lease is no more."""
        return await kv.put(self._transport, key, value, lease=lease)

    async def replace(self, key: str, value: bytes, *, mod_revision: int, lease: int = 0) -> bool:
        """Set a key that has not changed since `mod_revision` (0: was not there); return whether it holds `value` now."""
        return await kv.replace(self._transport, key, value, mod_revision=mod_revision, lease=lease)

    async def replace_together(self, values: Mapping[str, bytes], *, key: str, mod_revision: int) -> bool:
        """Set several keys at once if `key` has not changed since `mod_revision` (0: was not there).

        Return whether all of them hold `values` now.
        """
        return await kv.replace_together(self._transport, values, key=key, mod_revision=mod_revision)

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete a key, or all keys with a prefix; return how many there were."""
        return await kv.delete(self._transport, key, prefix=prefix)

    async def remove(self, key: str, *, mod_revision: int) -> bool:
        """Delete a key that has not changed since `mod_revision`; return whether there is no such key now."""
        return await kv.remove(self._transport, key, mod_revision=mod_revision)

    def watch(
        self,
        prefix: str,
        start_revision: int = 0,
        on_connected: Callable[[bool], None] = lambda connected: None,
    ) -> AsyncGenerator[watch.Events | watch.Reset, None]:
        """Yield all changes under a prefix, see `dynamo.common.etcd.watch.watch`. Use it with `aclosing`."""
        return watch.watch(self._transport, prefix, start_revision, on_connected)

    def session(
        self,
        ttl_s: float = lease.DEFAULT_TTL_S,
        on_held: Callable[[int], None] = lambda lease: None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> AbstractAsyncContextManager[lease.LeaseSession]:
        """Keep a lease alive while the body runs, see `dynamo.common.etcd.lease.LeaseSession`."""
        return lease.open_session(self._transport, ttl_s, on_held, on_lost)


@asynccontextmanager
async def connect_etcd(config: EtcdOptions) -> AsyncIterator[Etcd]:
    """Open a client. Does not wait for etcd: connections are made when the first call needs one. Raises InvalidRequest."""
    transport = Transport(config)
    try:
        yield Etcd(transport)
    finally:
        await transport.close()
