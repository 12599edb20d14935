"""Keys and values: what they look like, and the calls that read, write and delete them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dynamo.common.etcd.transport import RANGE, EtcdMethod, Transport
from dynamo.protos import etcd_pb2 as pb

PUT: EtcdMethod[pb.PutRequest, pb.PutResponse] = EtcdMethod("/etcdserverpb.KV/Put", pb.PutResponse)
TXN: EtcdMethod[pb.TxnRequest, pb.TxnResponse] = EtcdMethod("/etcdserverpb.KV/Txn", pb.TxnResponse)
DELETE: EtcdMethod[pb.DeleteRangeRequest, pb.DeleteRangeResponse] = EtcdMethod(
    "/etcdserverpb.KV/DeleteRange", pb.DeleteRangeResponse
)
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
    """Return the interval [start, end) of `key`, or of exactly the keys that begin with it, as etcd expects it."""
    start = to_key(key)
    if not prefix:
        return start, b""
    body = start.rstrip(b"\xff")
    if not body:  # no last byte to raise: everything from here on; and no key is empty
        return start or b"\0", b"\0"
    return start, body[:-1] + bytes([body[-1] + 1])


async def read(transport: Transport, key: str, *, prefix: bool = False, revision: int = 0) -> Listing:
    """Return a key, or all keys with a prefix, now or as of a revision. Raises Compacted if that revision is gone."""
    start, end = interval(key, prefix)
    response = await transport.unary(RANGE, pb.RangeRequest(key=start, range_end=end, revision=revision))
    return Listing(tuple(map(from_message, response.kvs)), response.header.revision)


async def put(transport: Transport, key: str, value: bytes, *, lease: int = 0) -> int:
    """Set a key; return the revision. Raises LeaseLost if the lease is no more."""
    response = await transport.unary(PUT, pb.PutRequest(key=to_key(key), value=value, lease=lease))
    return response.header.revision


async def replace(transport: Transport, key: str, value: bytes, *, mod_revision: int, lease: int = 0) -> bool:
    """Set a key whose last change was at `mod_revision` (0: there is no such key); return whether it holds `value` now.

    So a repeated attempt, whose first response was lost, is no failure. Raises LeaseLost if the lease is no more.
    """
    name = to_key(key)
    unchanged = pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=name, mod_revision=mod_revision)
    put = pb.RequestOp(request_put=pb.PutRequest(key=name, value=value, lease=lease))
    read = pb.RequestOp(request_range=pb.RangeRequest(key=name))
    response = await transport.unary(TXN, pb.TxnRequest(compare=[unchanged], success=[put], failure=[read]))
    if response.succeeded:
        return True
    return any(kv.value == value and kv.lease == lease for kv in response.responses[0].response_range.kvs)


async def replace_together(transport: Transport, values: Mapping[str, bytes], *, key: str, mod_revision: int) -> bool:
    """Set several keys in one transaction if `key` was last changed at `mod_revision` (0: there is no such key).

    Return whether all of them hold `values` now. So a repeated attempt, whose first response was lost, is no failure.
    """
    unchanged = pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=to_key(key), mod_revision=mod_revision)
    puts = [pb.RequestOp(request_put=pb.PutRequest(key=to_key(name), value=value)) for name, value in values.items()]
    reads = [pb.RequestOp(request_range=pb.RangeRequest(key=to_key(name))) for name in values]
    response = await transport.unary(TXN, pb.TxnRequest(compare=[unchanged], success=puts, failure=reads))
    if response.succeeded:
        return True
    found = {kv.key: kv.value for part in response.responses for kv in part.response_range.kvs}
    return all(found.get(to_key(name)) == value for name, value in values.items())


async def delete(transport: Transport, key: str, *, prefix: bool = False) -> int:
    """Delete a key, or all keys with a prefix; return how many there were (a repeated attempt counts none)."""
    start, end = interval(key, prefix)
    response = await transport.unary(DELETE, pb.DeleteRangeRequest(key=start, range_end=end))
    return response.deleted


async def remove(transport: Transport, key: str, *, mod_revision: int) -> bool:
    """Delete a key whose last change was at `mod_revision`; return whether there is no such key now."""
    name = to_key(key)
    unchanged = pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=name, mod_revision=mod_revision)
    delete = pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=name))
    read = pb.RequestOp(request_range=pb.RangeRequest(key=name))
    response = await transport.unary(TXN, pb.TxnRequest(compare=[unchanged], success=[delete], failure=[read]))
    return response.succeeded or not response.responses[0].response_range.kvs
