"""Read objects of a JetStream object store, a piece at a time, and write objects that are never replaced.

nats-py reads them by a consumer, which sends as fast as it can; and if reading is cancelled, it leaves the consumer, its
subscription and two tasks behind, for as long as the connection lives. Each piece is requested here, when it is wanted. And
nats-py purges the object that a new one replaces, and what a failed write has stored: its login has to be one that may purge all.
"""

from __future__ import annotations

import io
import json
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from hashlib import sha256

from nats.js.api import Header, ObjectInfo, ObjectMetaOptions
from nats.js.errors import DigestMismatchError, NotFoundError, ObjectNotFoundError

from dynamo.common.messaging.nats.connection import Connection

_PIECE_BYTES = 128 << 10
_MAX_DESCRIPTIONS = 16


async def object_pieces(connection: Connection, info: ObjectInfo) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of an object, of 256 KiB at most. Close it unless it was read to its end.

    Raises ObjectNotFoundError if the object is deleted or replaced meanwhile, and DigestMismatchError for one that is longer than
    `info` says, or in the place of the last piece of one that is not as it was written.
    """
    stream, subject = f"OBJ_{info.bucket}", f"$O.{info.bucket}.C.{info.nuid}"
    digest, sequence, left = sha256(), 0, info.size or 0
    for number in range(1, (info.chunks or 0) + 1):
        context = connection.client.jetstream()  # of the present connection
        try:
            piece = await context.get_msg(stream, sequence + 1, subject, next=True)
        except NotFoundError:
            raise ObjectNotFoundError from None
        sequence, left = piece.seq or 0, left - len(piece.data or b"")
        if left < 0:
            raise DigestMismatchError
        digest.update(piece.data or b"")
        if number == info.chunks and digest.digest() != urlsafe_b64decode((info.digest or "").partition("=")[2]):
            raise DigestMismatchError
        yield piece.data or b""


async def read_object(connection: Connection, info: ObjectInfo) -> bytes:
    """Return an object. Raises as `object_pieces` does."""
    data = io.BytesIO()
    async with aclosing(object_pieces(connection, info)) as pieces:
        async for piece in pieces:
            data.write(piece)
    return data.getvalue()


def meta_subject(bucket: str, name: str) -> str:
    """Return the subject of what is said about an object."""
    return f"$O.{bucket}.M.{urlsafe_b64encode(name.encode()).decode()}"


async def descriptions(connection: Connection, bucket: str, name: str) -> AsyncGenerator[ObjectInfo, None]:
    """Yield what is said about an object: the newest first, then from the oldest on, `_MAX_DESCRIPTIONS` at most.

    Those that cannot be read are left out. A login that may write an object may also describe it wrongly, but can neither replace
    nor delete what others have said.
    """
    stream, subject = f"OBJ_{bucket}", meta_subject(bucket, name)
    try:
        newest = message = await connection.client.jetstream().get_last_msg(stream, subject)
        sequence = 0
        for _ in range(_MAX_DESCRIPTIONS):
            if (info := _described(message.data or b"")) is not None:
                yield info
            message = await connection.client.jetstream().get_msg(stream, sequence + 1, subject, next=True)
            sequence = message.seq or 0
            if sequence == newest.seq:
                return
    except NotFoundError:
        return


def _described(data: bytes) -> ObjectInfo | None:
    try:
        info: ObjectInfo = ObjectInfo.from_response(json.loads(data))
        return info
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None


class ObjectWrite:
    """One object on its way into a bucket. What failed is continued by the next call of `run`.

    Each piece names the one before it, so that a piece whose confirmation was lost is not stored twice.
    """

    def __init__(self, bucket: str, name: str) -> None:
        self._bucket = bucket
        self._name = name
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._nuid = secrets.token_hex(11)
        self._pieces = 0
        """How many are stored."""
        self._last = 0
        """Sequence number of the last of them; 0: none is stored."""

    async def run(self, connection: Connection, data: bytes) -> None:
        """Store what is not stored yet of the object, whose content is `data`. Raises what nats-py raises."""
        last = await self._last_stored(connection)
        if last > self._last:  # the piece was stored whose confirmation was lost
            self._pieces, self._last = self._pieces + 1, last
        elif last < self._last:  # the bucket has lost its messages
            self._begin_anew()
        pieces = [data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES)]
        for piece in pieces[self._pieces :]:
            headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(self._last)}
            confirmed = await connection.client.jetstream().publish(self.subject, piece, headers=headers)
            self._pieces, self._last = self._pieces + 1, confirmed.seq
        info = ObjectInfo(
            name=self._name,
            bucket=self._bucket,
            nuid=self._nuid,
            size=len(data),
            mtime=datetime.now(UTC).isoformat(),
            chunks=len(pieces),
            digest=f"SHA-256={urlsafe_b64encode(sha256(data).digest()).decode()}",
            options=ObjectMetaOptions(max_chunk_size=_PIECE_BYTES),
        )
        subject = meta_subject(self._bucket, self._name)
        await connection.client.jetstream().publish(subject, json.dumps(info.as_dict()).encode())

    @property
    def subject(self) -> str:
        """The subject of its pieces."""
        return f"$O.{self._bucket}.C.{self._nuid}"

    async def _last_stored(self, connection: Connection) -> int:
        """Return the sequence number of the last piece that is stored, 0 if none is."""
        try:
            return (await connection.client.jetstream().get_last_msg(f"OBJ_{self._bucket}", self.subject)).seq or 0
        except NotFoundError:
            return 0
