"""An operation: one method of a gRPC service, with everything the wrappers and the servers derive from it.

    GrpcOperation(
        path="/inference.GRPCInferenceService/ModelConfig", declared=shown(Surface.MODEL_CONFIG), handle=handle,
    )

Authorization, audits, the capacity, metrics and both servers read the same object, as those of HTTP read an `Operation`. What
has no default must be declared: a process in which a method lacks it does not start.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.declaration import Declaration

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
Handler: TypeAlias = Callable[[Any, Context], Awaitable[Any]]
"""A coroutine function of the request, or of the iterator of requests, and the context; the same for all kinds of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcOperation:
    """One method of a service. Messages are bytes or views; the handler takes that of a unary request by `read_message`."""

    path: str
    """`/SERVICE/METHOD`, with the full name of the service."""
    declared: Declaration
    handle: Handler
    reads_stream: bool = False
    """The client sends a stream of requests, which the handler reads by its context."""
    writes_stream: bool = False
    """The handler writes a stream of responses by its context."""
    model_of: Callable[[Buffer], str] | None = None
    """For audits of actions: returns the model that a message names. Raises InvalidRequest."""

    @property
    def service(self) -> str:
        return self.path.split("/")[1]

    @property
    def method(self) -> str:
        return self.path.split("/")[2]
