"""Read objects of a JetStream object store, a piece at a time.

nats-py reads them by a consumer, which sends as fast as it can; and if reading is cancelled, it leaves the consumer, its
subscription and two tasks behind, for as long as the connection lives. Each piece is requested here, when it is wanted.
"""

from __future__ import annotations

import io
from base64 import urlsafe_b64decode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from hashlib import sha256

from nats.js.api import ObjectInfo
from nats.js.errors import DigestMismatchError, NotFoundError, ObjectNotFoundError

from dynamo.common.messaging.connection import Connection


async def object_pieces(connection: Connection, info: ObjectInfo) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of an object, of 256 KiB at most. Close it unless it was read to its end.

    Raises ObjectNotFoundError if the object is deleted or replaced meanwhile, and DigestMismatchError in the place of the last
    piece of an object that is not as it was written.
    """
    stream, subject = f"OBJ_{info.bucket}", f"$O.{info.bucket}.C.{info.nuid}"
    digest, sequence = sha256(), 0
    for number in range(1, (info.chunks or 0) + 1):
        context = connection.client.jetstream()  # of the present connection
        try:
            piece = await context.get_msg(stream, sequence + 1, subject, next=True)
        except NotFoundError:
            raise ObjectNotFoundError from None
        sequence = piece.seq or 0
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
