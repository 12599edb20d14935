"""A gRPC port, served by one of two exchangeable servers.

*http2* is this project's own server on the event loop (`http2/`), which has all options. *grpcio* is gRPC's as it ships, without
some of the bounds; it is kept as a reference. Operations are the same for both: coroutines from bytes to bytes.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from dynamo.common.config import ConfigError
from dynamo.common.http.accepting import Descriptors
from dynamo.common.http.server import ConnectionObserver
from dynamo.common.lifecycle import open_listener
from dynamo.common.security.files import Watched
from dynamo.common.security.tls import TlsContents, read_contents, server_context
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.rpc.handlers import for_grpcio
from dynamo.frontend.api.rpc.http2.server import Http2Server
from dynamo.frontend.api.rpc.http2.windows import RESETS_PER_S
from dynamo.frontend.api.rpc.operation import GrpcOperation
from dynamo.frontend.config import GrpcCompression, GrpcOptions, GrpcServerChoice, OverloadStatus

_COMPRESSION_LEVEL = {GrpcCompression.NONE: 0, GrpcCompression.GZIP: 1, GrpcCompression.DEFLATE: 3}
"""gRPC core's low level is gzip and its high one deflate, if the client accepts that, else the other one, else neither. Naming
an algorithm instead would compress the responses to clients that cannot decompress them as well."""
_log = logging.getLogger(__name__)


class _Stoppable(Protocol):
    async def stop(self, grace: float | None, /) -> None: ...


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A port that is being served."""

    port: int
    _server: _Stoppable

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, let running ones finish for `grace_s` seconds, then cancel them. Idempotent."""
        await self._server.stop(grace_s)


def check_grpc(options: GrpcOptions, *, share_port: bool = False, flag: str = "--grpc-port") -> None:
    """Raise ConfigError for options with which `serve_grpc` would fail, so that a process fails before it waits for others."""
    if options.tls is not None:
        read_contents(options.tls)
    if not share_port:
        open_listener(options.host, options.listen_port, flag=flag).close()


def channel_arguments(options: GrpcOptions, *, share_port: bool) -> list[tuple[str, int]]:
    """Return the options as gRPC core's channel arguments."""
    arguments = [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.max_metadata_size", options.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", options.max_metadata_bytes),
        ("grpc.max_concurrent_streams", options.max_concurrent_streams),
        ("grpc.keepalive_time_ms", int(options.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(options.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", int(options.keepalive_permit_without_calls)),
        ("grpc.http2.max_pings_without_data", options.max_pings_without_data),
        ("grpc.http2.min_ping_interval_without_data_ms", int(options.client_ping_interval_s * 1000)),
        # A port taken by another program must be an error, unless it is one of our own processes that shares it.
        ("grpc.so_reuseport", int(share_port)),
    ]
    # gRPC core has one setting for both windows: the connection's follows the largest of its streams.
    windows = [size for size in (options.initial_connection_window_size, options.initial_stream_window_size) if size is not None]
    if windows:
        arguments.append(("grpc.http2.lookahead_bytes", max(windows)))
    if level := _COMPRESSION_LEVEL[options.compression]:
        arguments.append(("grpc.default_compression_level", level))
    if options.max_connection_age_s is not None:
        arguments.append(("grpc.max_connection_age_ms", int(options.max_connection_age_s * 1000)))
    return arguments


@asynccontextmanager
async def serve_grpc(
    options: GrpcOptions,
    operations: Iterable[GrpcOperation],
    *,
    share_port: bool = False,
    guarded: bool = False,
    capacity: Capacity | None = None,
    memory: SharedMemory | None = None,
    overload: OverloadStatus = OverloadStatus.UNAVAILABLE,
    observer: ConnectionObserver | None = None,
    descriptors: Descriptors | None = None,
    flag: str = "--grpc-port",
    resets_per_s: float = RESETS_PER_S,
) -> AsyncIterator[GrpcServer]:
    """Serve `operations` until the context is left, which cancels running calls.

    `guarded`: callers must show credentials, so messages are read only after the handlers have
    checked the metadata. `capacity` counts what the server keeps of messages, and `memory` is where http2 receives large ones,
    whose connections `observer` learns of and count against `descriptors`, and reset so many streams a second
    before they have a response. Errors name `flag` as that of the port.
    Raises ConfigError if the port or the certificate cannot be used.
    """
    if options.server is GrpcServerChoice.GRPCIO:
        server = await _start_grpcio(options, operations, share_port=share_port, guarded=guarded)
    else:
        http2 = Http2Server(
            options,
            operations,
            capacity or Capacity(),
            guarded=guarded,
            memory=memory,
            overload=overload,
            observer=observer,
            descriptors=descriptors,
            resets_per_s=resets_per_s,
        )
        server = await _start_http2(http2, options, share_port=share_port, flag=flag)
    name = GrpcServerChoice.HTTP2 if options.server is GrpcServerChoice.AUTO else options.server
    secured = "no TLS" if options.tls is None else "TLS"
    _log.info("gRPC on %s:%d by the %s server, %s", options.host, server.port, name, secured)
    try:
        yield server
    finally:
        await server.stop(0.0)


async def _start_http2(server: Http2Server, options: GrpcOptions, *, share_port: bool, flag: str) -> GrpcServer:
    context: ssl.SSLContext | None = None
    if options.tls is not None:
        context = server_context(options.tls, protocols=("h2",))
    listener = open_listener(options.host, options.listen_port, flag=flag, reuse_port=share_port)
    await server.listen(listener, context)
    return GrpcServer(server.port, server)


async def _start_grpcio(
    options: GrpcOptions, operations: Iterable[GrpcOperation], *, share_port: bool, guarded: bool
) -> GrpcServer:
    server = grpc.aio.server(options=channel_arguments(options, share_port=share_port))
    for operation in operations:
        handler = grpc.method_handlers_generic_handler(
            operation.service, {operation.method: for_grpcio(operation, reads_late=guarded)}
        )
        server.add_generic_rpc_handlers((handler,))
    port = _bind(server, options)
    await server.start()
    return GrpcServer(port, server)


def _bind(server: grpc.aio.Server, options: GrpcOptions) -> int:
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{host}:{options.listen_port}"
    try:
        credentials = _credentials(options)
        port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"the gRPC port {address} cannot be opened: {error}") from error
    if port == 0:
        raise ConfigError(f"the gRPC port {address} cannot be opened")
    return port


def _credentials(options: GrpcOptions) -> grpc.ServerCredentials | None:
    """Return credentials that are reloaded when their files change. Raises ConfigError."""
    files = options.tls
    if files is None:
        return None
    watched = Watched(f"the certificate {files.cert}", files.paths, lambda: read_contents(files))
    used = watched.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return changed credentials, or None. gRPC calls this for every handshake, on its own thread."""
        nonlocal used
        newest = watched.current()
        if newest is used:
            return None
        used = newest
        return _configuration(newest)

    demands_clients = files.client_ca is not None
    return grpc.dynamic_ssl_server_credentials(_configuration(used), fetch, demands_clients)  # type: ignore[arg-type]


def _configuration(contents: TlsContents) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.cert)], contents.client_ca)
