"""etcd's and gRPC's failures as ours, translated at the one place where etcd is called."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from dynamo.common.errors import (
    DynamoError,
    Forbidden,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
)


class EtcdUnavailable(Unavailable):
    """No endpoint responds, or the one that does has no leader. It may be back at any moment."""


class LeaseLost(DynamoError):
    """The lease has expired or was revoked; a new one must be granted."""


class Compacted(DynamoError):
    """The requested revision has been compacted away; only a new listing shows what is there."""


class TokenExpired(Unauthenticated):
    """The login has to be repeated. Handled inside the client."""


_BY_STATUS: dict[grpc.StatusCode, Callable[[str], DynamoError]] = {
    grpc.StatusCode.UNAVAILABLE: EtcdUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: EtcdUnavailable,
    grpc.StatusCode.CANCELLED: EtcdUnavailable,  # by the server; our own cancellation is never an RpcError
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: Compacted,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}
# etcd's own words decide where its statuses are ambiguous.
_BY_TEXT: dict[str, Callable[[str], DynamoError]] = {
    "requested lease not found": LeaseLost,
    "invalid auth token": TokenExpired,
    "revision of auth store is old": TokenExpired,
    "user name is empty": Unauthenticated,
    "authentication failed": Unauthenticated,
    "permission denied": Forbidden,
}


def from_rpc_error(error: grpc.aio.AioRpcError, endpoint: str) -> DynamoError:
    """Return the failure of one call on one endpoint as an error of ours, with etcd's text."""
    return from_text(error.details() or error.code().name, endpoint, error.code())


def from_text(text: str, endpoint: str, status: grpc.StatusCode | None = None) -> DynamoError:
    """Return the error for etcd's `text`; a watch gives no status."""
    text = text.rpartition("etcdserver: ")[2]
    sentence = f"etcd at {endpoint}: {text}"
    for words, make in _BY_TEXT.items():
        if words in text:
            return make(sentence)
    return _BY_STATUS.get(status, DynamoError)(sentence) if status is not None else EtcdUnavailable(sentence)
