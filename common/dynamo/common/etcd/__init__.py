"""A small asyncio client of etcd: range, put, delete, lease and watch. Only this package knows how etcd is spoken to.

| module | holds |
|---|---|
| `client` | the etcd client as the rest of the project uses it |
| `config` | what connecting to etcd takes from its options |
| `document` | one value in etcd that every process follows and any of them may change |
| `errors` | etcd's and gRPC's failures as ours, translated at the one place where etcd is called |
| `follow` | follow what is under a prefix for as long as the process lives, also where etcd refuses it for a while |
| `kv` | keys and values |
| `lease` | a lease as an object |
| `leases` | work that one process of the fleet does at a time |
| `transport` | connections to the members of an etcd cluster, login, and calls that survive the loss of a member |
| `watch` | what changes under a prefix, without gaps |
"""

from dynamo.common.etcd.client import Etcd, connect_etcd
from dynamo.common.etcd.errors import Compacted, EtcdUnavailable, LeaseLost
from dynamo.common.etcd.kv import KeyValue, Listing
from dynamo.common.etcd.lease import LeaseSession
from dynamo.common.etcd.watch import Deleted, Events, Put, Reset

__all__ = [
    "Compacted",
    "Deleted",
    "Etcd",
    "EtcdUnavailable",
    "Events",
    "KeyValue",
    "LeaseLost",
    "LeaseSession",
    "Listing",
    "Put",
    "Reset",
    "connect_etcd",
]
