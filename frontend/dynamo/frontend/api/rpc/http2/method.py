"""A method as the server calls it."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import grpc.aio

from dynamo.frontend.api.rpc.operation import Handler


class CallCancelled(grpc.aio.BaseError):
    """The client has cancelled the call, or its connection is lost."""


@dataclass(frozen=True, slots=True)
class GrpcMethod:
    """A method that the server has."""

    handle: Handler
    reads_stream: bool
    writes_stream: bool
    reads_late: bool
    """The handler checks the caller before it reads the message of a unary call."""
    max_message_bytes: int
