"""A small asyncio client of etcd: range, put, delete, lease and watch. Only this package knows how etcd is spoken to."""

from dynamo.common.etcd.client import Etcd, connect_etcd
from dynamo.common.etcd.errors import Compacted, EtcdUnavailable, LeaseLost
from dynamo.common.etcd.kv import KeyValue, Listing
from dynamo.common.etcd.lease import Session
from dynamo.common.etcd.watch import Deleted, Events, Put, Reset

__all__ = [
    "Compacted",
    "Deleted",
    "Etcd",
    "EtcdUnavailable",
    "Events",
    "KeyValue",
    "LeaseLost",
    "Listing",
    "Put",
    "Reset",
    "Session",
    "connect_etcd",
]
