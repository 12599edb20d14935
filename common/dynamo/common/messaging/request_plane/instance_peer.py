"""An instance, as the client of the request plane knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo.common.messaging.request_plane.outbox import Outbox
from dynamo.common.names import InstanceId
from dynamo.common.shared_memory.neighbour import Neighbour

if TYPE_CHECKING:
    from dynamo.common.messaging.request_plane.request_stream import RequestStream


LARGE_RESPONSE_BYTES = 256
"""Smaller ones fit into windows."""
_MAX_UNKNOWN = 1000
"""An instance names a stream again with its next beat, so what is left out is cancelled then."""


class InstancePeer:
    """An instance as this client knows it."""

    __slots__ = (
        "absent_batch",
        "absent_until",
        "instance",
        "is_far",
        "is_suspect",
        "last_frame_at",
        "max_unacknowledged",
        "neighbour",
        "outbox",
        "overdue_s",
        "probed_at",
        "response_bytes",
        "streams",
        "unacknowledged",
        "unknown",
        "used_at",
    )

    def __init__(
        self, instance: InstanceId, outbox: Outbox, neighbour: Neighbour | None, max_unacknowledged: int, now: float
    ) -> None:
        self.instance = instance
        self.outbox = outbox
        self.neighbour = neighbour
        """Its arena, if it shares memory with this process."""
        self.is_far = False
        """It could not read what was lent to it, or the other way round: nothing more is lent in either direction."""
        self.streams: dict[int, RequestStream] = {}
        self.response_bytes: dict[str, int] = {}
        """How much credit the last streams could have begun with, by verb, where that is more than a window."""
        self.max_unacknowledged = max_unacknowledged
        """How much of requests may be sent without credit, and `unacknowledged`: how much is."""
        self.unacknowledged = 0
        self.used_at = now
        """When it last had a stream."""
        self.last_frame_at = float("-inf")
        """When its last frame came."""
        self.probed_at: float | None = None
        """When the first probe was sent since its last frame."""
        self.overdue_s = 0.0
        """How long a response has been overdue, while this process was able to receive it."""
        self.absent_until: float | None = None
        """Until when it may subscribe again, after nats-server reported it without subscription; None after its next frame."""
        self.absent_batch = 0
        """The batch for which nats-server reported it."""
        self.is_suspect = False
        """A stream failed because it is gone; no frame has come since."""
        self.unknown: set[int] = set()
        """Streams that it still works on and that are over here."""

    @property
    def near(self) -> Neighbour | None:
        """Its arena, if bodies may be lent."""
        return None if self.is_far else self.neighbour

    def note_unknown(self, stream: int) -> None:
        """Have a stream cancelled that is over here, unless very many are due: then a later beat names it again."""
        if len(self.unknown) < _MAX_UNKNOWN:
            self.unknown.add(stream)

    def learn(self, verb: str, size: int) -> None:
        """Expect a stream of `verb` to need `size` bytes of credit; where that varies, the larger number."""
        expected = max(size, self.response_bytes.get(verb, 0) // 2)
        if expected >= LARGE_RESPONSE_BYTES:
            self.response_bytes[verb] = expected
        else:
            self.response_bytes.pop(verb, None)

    def record_frame(self, now: float) -> None:
        self.last_frame_at = now
        self.probed_at = self.absent_until = None
        self.overdue_s = 0.0
