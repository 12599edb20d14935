"""Keys and values: what they look like, and the calls that read, write and delete them."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.common.etcd.transport import RANGE, Method, Transport
from dynamo.protos import etcd_pb2 as pb

PUT: Method[pb.PutRequest, pb.PutResponse] = Method("/etcdserverpb.KV/Put", pb.PutResponse)
DELETE: Method[pb.DeleteRangeRequest, pb.DeleteRangeResponse] = Method("/etcdserverpb.KV/DeleteRange", pb.DeleteRangeResponse)
# Our keys are ASCII. Foreign ones may be any bytes, and must come through unchanged rather than fail a whole listing.
_ENCODING, _ERRORS = "utf-8", "surrogateescape"


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: str
    value: bytes
    mod_revision: int
    """The store's revision at the last change of this key."""
    lease: int = 0
    """The lease the key dies with; 0: none."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Keys and values in the order of the keys, all as of one revision of the store."""

    kvs: tuple[KeyValue, ...]
    revision: int


def to_key(key: str) -> bytes:
    return key.encode(_ENCODING, _ERRORS)


def from_key(key: bytes) -> str:
    return key.decode(_ENCODING, _ERRORS)


def from_message(kv: pb.KeyValue) -> KeyValue:
    return KeyValue(from_key(kv.key), kv.value, kv.mod_revision, kv.lease)


def interval(key: str, prefix: bool) -> tuple[bytes, bytes]:
    """The interval [start, end) that holds `key`, or exactly the keys beginning with it, as etcd wants it."""
    start = to_key(key)
    if not prefix:
        return start, b""
    body = start.rstrip(b"\xff")
    if not body:  # no last byte to raise: everything from here on; and no key is empty
        return start or b"\0", b"\0"
    return start, body[:-1] + bytes([body[-1] + 1])


async def read(transport: Transport, key: str, *, prefix: bool = False, revision: int = 0) -> Listing:
    """A key, or all keys with a prefix, now or as of a revision; Compacted if that one is gone."""
    start, end = interval(key, prefix)
    answer = await transport.unary(RANGE, pb.RangeRequest(key=start, range_end=end, revision=revision))
    return Listing(tuple(map(from_message, answer.kvs)), answer.header.revision)


async def put(transport: Transport, key: str, value: bytes, *, lease: int = 0) -> int:
    """Sets a key; returns the revision. Raises LeaseLost if the lease is no more."""
    answer = await transport.unary(PUT, pb.PutRequest(key=to_key(key), value=value, lease=lease))
    return answer.header.revision


async def delete(transport: Transport, key: str, *, prefix: bool = False) -> int:
    """Deletes a key, or all keys with a prefix; returns how many there were, which a repeated attempt counts as none."""
    start, end = interval(key, prefix)
    answer = await transport.unary(DELETE, pb.DeleteRangeRequest(key=start, range_end=end))
    return answer.deleted
