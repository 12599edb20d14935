"""A gRPC port, served by one of two exchangeable servers.

*native* (pygrpc-native, the extra `fast`) does HTTP/2 in Rust outside the GIL and passes bidirectional calls to a grpcio server
behind it; *grpcio* does everything itself and has TLS, compressed responses, connection ages and adjustable windows. Handlers
are the same for both: coroutines from bytes to bytes.

Native is several times faster but, as of 0.5.0, checks the size limit only when a whole message has been received and
decompressed: any client that can connect can fill the memory, with gzip by few bytes. So `auto` uses it only if just this machine
can connect and needs no credentials; `--grpc-server native` uses it anywhere, for networks where every client is trusted.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio

from dynamo.common.config import ConfigError
from dynamo.common.lifecycle import open_listener
from dynamo.common.security.files import Watched
from dynamo.common.security.tls import TlsContents, read_contents
from dynamo.frontend.api.rpc.handlers import Handlers, for_grpcio
from dynamo.frontend.api.rpc.hardening import make_grpcio_server
from dynamo.frontend.config import GrpcCompression, GrpcOptions, GrpcServerChoice

_COMPRESSION_LEVEL = {GrpcCompression.NONE: 0, GrpcCompression.GZIP: 1, GrpcCompression.DEFLATE: 3}
"""gRPC core's low level is gzip and its high one deflate, if the client accepts that, else the other one, else neither. Naming
an algorithm instead would compress the responses to clients that cannot decompress them as well."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerChoice:
    server: GrpcServerChoice
    """NATIVE or GRPCIO, never AUTO."""
    why: str


@dataclass(frozen=True, slots=True)
class GrpcServer:
    """A port that is being served."""

    port: int
    choice: ServerChoice
    _server: grpc.aio.Server

    async def stop(self, grace_s: float) -> None:
        """Stop accepting calls, let running ones finish for `grace_s` seconds, then cancel them. Idempotent."""
        await self._server.stop(grace_s)


def needs_grpcio(options: GrpcOptions) -> str:
    """Return the first option set that only grpcio supports, as a reason; empty if there is none."""
    if options.tls_cert_file is not None:
        return "TLS is configured"
    if options.compression is not GrpcCompression.NONE:
        return "compression of responses is configured"
    if options.max_connection_age_s is not None:
        return "a connection age is configured"
    if options.initial_connection_window_size is not None or options.initial_stream_window_size is not None:
        return "HTTP/2 windows are configured"
    return ""


def choose_server(options: GrpcOptions, native_installed: bool, *, guarded: bool = False) -> ServerChoice:
    """Choose the server. Raises ConfigError if the native one is configured and cannot be used."""
    obstacle = needs_grpcio(options)
    if options.server is GrpcServerChoice.GRPCIO:
        return ServerChoice(GrpcServerChoice.GRPCIO, "it is configured")
    if options.server is GrpcServerChoice.NATIVE:
        if not native_installed:
            raise ConfigError("--grpc-server native needs the package pygrpc-native (extra `fast`)")
        if obstacle:
            raise ConfigError(f"--grpc-server native cannot be used: {obstacle}, which only grpcio supports")
        return ServerChoice(GrpcServerChoice.NATIVE, "it is configured")
    if obstacle:
        return ServerChoice(GrpcServerChoice.GRPCIO, obstacle)
    if not native_installed:
        return ServerChoice(GrpcServerChoice.GRPCIO, "pygrpc-native (extra `fast`) is not installed")
    if not options.is_local:
        why = "other machines can connect, and native does not bound what they send; with trusted clients use native"
        return ServerChoice(GrpcServerChoice.GRPCIO, why)
    if guarded:
        why = "callers must show credentials, and native receives whole messages before these are checked"
        return ServerChoice(GrpcServerChoice.GRPCIO, why)
    return ServerChoice(GrpcServerChoice.NATIVE, "it is installed, nothing needs grpcio, and only this machine can connect")


def check_grpc(options: GrpcOptions, *, share_port: bool = False) -> None:
    """Raise ConfigError for options with which `serve_grpc` would fail, so that a process fails before it waits for others."""
    choose_server(options, importlib.util.find_spec("pygrpc_native") is not None)
    if options.tls is not None:
        read_contents(options.tls)
    if not share_port:
        open_listener(options.host, options.listen_port, flag="--grpc-port").close()


def channel_arguments(options: GrpcOptions, *, share_port: bool) -> list[tuple[str, int]]:
    """Return the options as gRPC core's channel arguments, which the native server takes as well."""
    arguments = [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", options.max_message_bytes),
        ("grpc.max_metadata_size", options.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", options.max_metadata_bytes),
        ("grpc.max_concurrent_streams", options.max_concurrent_streams),
        ("grpc.keepalive_time_ms", int(options.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(options.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(options.client_ping_interval_s * 1000)),
        # A port taken by someone else must be an error, unless it is one of our own processes that shares it.
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
    options: GrpcOptions, services: Mapping[str, Handlers], *, share_port: bool = False, guarded: bool = False
) -> AsyncIterator[GrpcServer]:
    """Serve `services` (full service name → handlers) until the context is left, which cancels running calls.

    `guarded`: callers must show credentials, so messages are read only after the handlers have
    checked the metadata. Raises ConfigError if the port, the certificate or the chosen server cannot be used.
    """
    choice = choose_server(options, importlib.util.find_spec("pygrpc_native") is not None, guarded=guarded)
    if guarded and choice.server is GrpcServerChoice.NATIVE:
        _log.warning("the native gRPC server receives and decompresses messages before their credentials are checked")
    server = _make_server(options, choice.server, share_port)
    for service, handlers in services.items():
        ready = for_grpcio(handlers, reads_late=guarded) if choice.server is GrpcServerChoice.GRPCIO else handlers
        server.add_registered_method_handlers(service, dict(ready))
    port = _bind(server, options)
    await server.start()
    secured = "TLS" if options.tls_cert_file is not None else "no TLS"
    _log.info("gRPC on %s:%d by the %s server (%s), %s", options.host, port, choice.server, choice.why, secured)
    try:
        yield GrpcServer(port, choice, server)
    finally:
        await server.stop(None)


def _make_server(options: GrpcOptions, kind: GrpcServerChoice, share_port: bool) -> grpc.aio.Server:
    arguments = channel_arguments(options, share_port=share_port)
    if kind is GrpcServerChoice.GRPCIO:
        return make_grpcio_server(arguments)
    from dynamo.frontend.api.rpc.native import NativeServer  # needs the extra `fast`

    server: grpc.aio.Server = NativeServer(options=arguments, io_threads=options.workers)
    return server


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
