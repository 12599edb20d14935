"""What all requests of this process together may occupy: their number, and the bytes of their bodies and messages.

Each request has bounds of its own; many requests within theirs could still exhaust the memory. Past the bounds here requests are
refused with Overloaded, so that those which were admitted can finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from dynamo.common.errors import Overloaded, RateLimited
from dynamo.frontend.config import CapacityOptions

_RETRY_AFTER_S = 1.0


class Capacity:
    """Counts requests and their buffered bytes. One per process, shared by its protocols."""

    def __init__(self, options: CapacityOptions | None = None) -> None:
        self._options = options or CapacityOptions()
        self.requests = 0
        self.buffered_bytes = 0
        self._waiting: Counter[str] = Counter()
        """Bytes of `buffered_bytes` that wait, by API key: incomplete messages, responses that are not read, and requests for
        which there is no instance yet, or none with room."""
        self._streams: Counter[str] = Counter()
        """Streams of `requests`, by API key."""

    def enter(self) -> Occupancy:
        """Count a request until the occupancy is left. Raises Overloaded."""
        if self.requests >= self._options.max_concurrent_requests:
            message = f"the server is processing {self.requests} requests, which is its limit"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
        self.requests += 1
        return Occupancy(self, 1)

    @contextmanager
    def stream(self, key: str) -> Iterator[None]:
        """Count a stream of an API key while the body runs, which may be idle for long. Raises Overloaded.

        A key has half at most of what others leave; the empty name means no key, and has no share.
        """
        left = self._options.max_concurrent_requests - self.requests
        if key and self._streams[key] >= left > 0:
            message = f"the API key '{key}' has {self._streams[key]} streams open; the rest of the server is for others"
            raise RateLimited(message, retry_after_s=_RETRY_AFTER_S)
        occupied = self.enter()
        self._streams[key] += 1
        try:
            yield
        finally:
            occupied.leave()
            self._streams[key] -= 1
            if not self._streams[key]:
                del self._streams[key]

    @contextmanager
    def holding(self) -> Iterator[Occupancy]:
        """Let the body hold bytes until its end for work that counts as a request elsewhere, or as none."""
        occupied = Occupancy(self, 0)
        try:
            yield occupied
        finally:
            occupied.leave()

    def hold(self, size_bytes: int) -> None:
        """Count bytes of a request. Raises Overloaded, and counts none of them then."""
        if self.buffered_bytes + size_bytes > self._options.max_buffered_bytes:
            message = f"the server holds {self.buffered_bytes} bytes of requests, which is near its limit"
            raise Overloaded(message, retry_after_s=_RETRY_AFTER_S)
        self.buffered_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Count bytes that were held no longer."""
        self.buffered_bytes -= size_bytes

    def check_hold(self, size_bytes: int) -> None:
        """Raise Overloaded if so many bytes could not be held now."""
        self.hold(size_bytes)
        self.release(size_bytes)

    def hold_waiting(self, key: str, size_bytes: int, own_bytes: int) -> None:
        """Count bytes that wait for the client: of a message that is incomplete, or a response that is not read.

        `own_bytes` of that message or response wait already. Several of an API key have half at most of what others leave, and
        one alone has all of it. The empty name means no key, and has no share. Raises Overloaded.
        """
        self._check_share(key, size_bytes, own_bytes)
        self.hold(size_bytes)
        self._waiting[key] += size_bytes

    def waiting_over(self, key: str, size_bytes: int) -> None:
        """Bytes, which stay held, wait no longer: the message is complete, the response has been read, or it is dropped."""
        self._waiting[key] -= size_bytes
        if not self._waiting[key]:
            del self._waiting[key]

    def wait_for_instance(self, key: str, size_bytes: int, own_bytes: int) -> None:
        """Count bytes that are held as waiting, until `waiting_over`: of a request of which `own_bytes` wait already.

        Raises RateLimited if a key would have more than its share then.
        """
        waiting, left = self._waiting[key], self._options.max_buffered_bytes - self.buffered_bytes
        if key and waiting > own_bytes and waiting + size_bytes > left:
            message = f"{waiting} bytes of the API key '{key}' wait for instances; the rest is for others"
            raise RateLimited(message, retry_after_s=_RETRY_AFTER_S)
        self._waiting[key] += size_bytes

    @contextmanager
    def unread(self, key: str, size_bytes: int) -> Iterator[None]:
        """Count bytes of a response that are held elsewhere as waiting for the client while the body runs. Raises Overloaded."""
        self._check_share(key, size_bytes, 0)
        self._waiting[key] += size_bytes
        try:
            yield
        finally:
            self.waiting_over(key, size_bytes)

    def _check_share(self, key: str, size_bytes: int, own_bytes: int) -> None:
        left = self._options.max_buffered_bytes - self.buffered_bytes
        waiting = self._waiting[key]
        if key and waiting > own_bytes and waiting + size_bytes > left >= size_bytes:
            message = f"{waiting} bytes of the API key '{key}' wait for its clients to send or read; the rest is for others"
            raise RateLimited(message, retry_after_s=_RETRY_AFTER_S)


class Occupancy(msgspec.Struct, eq=False):
    """What one request occupies of a capacity."""

    _capacity: Capacity
    _requests: int
    held_bytes: int = 0
    _has_left: bool = False
    _waiting_parts: int = 0
    """Parts of the request that wait for an instance, such as one prompt of several."""
    _waiting_bytes: int = 0
    """What is counted as waiting for all of them together."""
    _arriving_bytes: int = 0
    """What is counted as waiting for the client to send the rest."""

    def hold(self, size_bytes: int) -> None:
        """Count bytes that are kept for the request until its end. Raises Overloaded."""
        if self._has_left:
            return
        self._capacity.hold(size_bytes)
        self.held_bytes += size_bytes

    def arrive(self, key: str, size_bytes: int) -> None:
        """Count bytes as held until the end of the request and, if an API key has it, as waiting for its client until `arrived`.

        Raises Overloaded, and RateLimited if the key would have more than its share.
        """
        if key and size_bytes:
            self._capacity.hold_waiting(key, size_bytes, self._arriving_bytes)
            self._arriving_bytes += size_bytes
        else:
            self._capacity.hold(size_bytes)
        self.held_bytes += size_bytes

    def arrived(self, key: str, size_bytes: int) -> None:
        """Bytes, which stay held, wait no longer: the body is complete, or is not read on."""
        if key and size_bytes:
            self._capacity.waiting_over(key, size_bytes)
            self._arriving_bytes -= size_bytes

    @contextmanager
    def arriving(self, key: str, *, stays_held: bool = True) -> Iterator[Callable[[int], None]]:
        """Give a function that counts bytes as `arrive` does. When the body ends they have arrived, and may stay held."""
        size = 0

        def arrive(size_bytes: int) -> None:
            nonlocal size
            self.arrive(key, size_bytes)
            size += size_bytes

        try:
            yield arrive
        finally:
            self.arrived(key, size)
            if not stays_held:
                self.release(size)

    @contextmanager
    def waiting(self, key: str) -> Iterator[None]:
        """Count what is held as waiting for an instance, for an API key, while the body runs: once, however many parts of the
        request wait. Raises RateLimited."""
        if self._has_left:
            yield
            return
        more = max(0, self.held_bytes - self._waiting_bytes)
        self._capacity.wait_for_instance(key, more, self._waiting_bytes)
        self._waiting_bytes += more
        self._waiting_parts += 1
        try:
            yield
        finally:
            self._waiting_parts -= 1
            if not self._waiting_parts:
                over, self._waiting_bytes = self._waiting_bytes, 0
                self._capacity.waiting_over(key, over)

    def handed_over(self) -> Occupancy:
        """Return the occupancy of what goes on with the bytes of this request after its end. Raises Overloaded."""
        rest = self._capacity.enter()
        rest.held_bytes, self.held_bytes = self.held_bytes, 0
        return rest

    def release(self, size_bytes: int) -> None:
        """Count bytes that were held no longer."""
        if self._has_left:
            return
        self._capacity.release(size_bytes)
        self.held_bytes -= size_bytes

    def leave(self) -> None:
        """Count the request and its bytes no longer."""
        self._has_left = True
        self._capacity.requests -= self._requests
        self._capacity.buffered_bytes -= self.held_bytes
