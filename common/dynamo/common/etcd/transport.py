"""Connections to the members of an etcd cluster, login, and calls that survive the loss of a member.

All endpoints are tried at once and the first to be ready serves every call until it fails; then they are tried again. Streams
that did not fail with it go on where they are until the next one has stood for a while, and follow then. Each endpoint has a
channel of its own, because a certificate is checked against the name of one host. The messages are ours and calls go by path,
so that another etcd client may live in the same process.

gRPC loses a cancellation that comes together with the failure of a call: it awaits tasks of its own, which end as if nothing
had happened. What repeats calls would go on for ever then, so each call looks whether its task was cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import grpc
from google.protobuf.message import Message

from dynamo.common.errors import DynamoError
from dynamo.common.etcd.config import check_etcd, parse_endpoint, uses_etcd_tls
from dynamo.common.etcd.errors import EtcdUnavailable, TokenExpired, from_rpc_error
from dynamo.common.options import EtcdOptions
from dynamo.common.process.background import awaited, raise_if_cancelled
from dynamo.protos import etcd_pb2 as pb

log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

_MAX_RECEIVE_BYTES = 512 * 2**20
_FIRST_BACKOFF_S = 0.05
# gRPC also gives up a connection attempt after its minimal reconnect time, and a starting etcd needs a while to accept one.
_MIN_CONNECT_MS = 2_000
_LAST_CALLS_S = 0.01
_LAST_WAITS_S = 0.5
# Ends a stream on a member that has lost its cluster; without it such a member keeps silent.
_REQUIRE_LEADER = ("hasleader", "true")


@dataclass(frozen=True, slots=True)
class EtcdMethod(Generic[Request, Response]):
    """One of etcd's calls."""

    path: str
    response: type[Response]


AUTHENTICATE: EtcdMethod[pb.AuthenticateRequest, pb.AuthenticateResponse] = EtcdMethod(
    "/etcdserverpb.Auth/Authenticate", pb.AuthenticateResponse
)
RANGE: EtcdMethod[pb.RangeRequest, pb.RangeResponse] = EtcdMethod("/etcdserverpb.KV/Range", pb.RangeResponse)


class EtcdStream(Generic[Request, Response]):
    """A call with messages both ways. Its failures are DynamoErrors."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Response], endpoint: str) -> None:
        self._call = call
        self._is_ended = False
        self.endpoint = endpoint

    async def write(self, request: Request) -> None:
        try:
            with self._plain_errors():
                await self._call.write(request)
        except asyncio.InvalidStateError:  # it ended before; reading says why
            await self.read()
            raise EtcdUnavailable(f"etcd at {self.endpoint}: the stream has ended") from None

    async def read(self) -> Response:
        with self._plain_errors():
            response = await self._call.read()
        if response is grpc.aio.EOF:
            raise EtcdUnavailable(f"etcd at {self.endpoint}: the stream has ended")
        return cast(Response, response)

    def end(self) -> None:
        """Let reading and writing raise EtcdUnavailable from now on."""
        self._is_ended = True
        self._call.cancel()

    @contextmanager
    def _plain_errors(self) -> Iterator[None]:
        try:
            yield
            raise_if_cancelled()
        except grpc.aio.AioRpcError as error:
            raise_if_cancelled()
            raise from_rpc_error(error, self.endpoint) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_ended or (task is not None and task.cancelling()):
                raise
            raise EtcdUnavailable(f"etcd at {self.endpoint}: calls use another connection by now") from None


@dataclass(slots=True, eq=False)
class _EtcdChannel:
    """A channel to one endpoint and how many calls are on it."""

    endpoint: str
    channel: grpc.aio.Channel
    users: int = 0
    retired: bool = False
    streams: set[EtcdStream[Any, Any]] = field(default_factory=set)


class Transport:
    """Calls by method, on the endpoint that responds. Call `close` after all users of its streams."""

    def __init__(self, config: EtcdOptions) -> None:
        check_etcd(config)
        self.config = config
        self._current: _EtcdChannel | None = None
        self._retired: set[_EtcdChannel] = set()
        """Links that have failed and are used by streams that have not."""
        self._settling: asyncio.TimerHandle | None = None
        self._electing = asyncio.Lock()
        self._token: str | None = None
        self._logging_in = asyncio.Lock()

    @property
    def endpoint(self) -> str | None:
        """The endpoint in use; None while there is none."""
        return self._current.endpoint if self._current else None

    async def close(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        if self._current is not None:
            self._current.retired = True
            await self._current.channel.close()
            self._current = None
        # gRPC finishes cancelled calls on a thread of its own and has no way to wait for it. The loop may be closed next,
        # and then their ends would be reported as errors by whichever loop comes after it in this process.
        await asyncio.sleep(_LAST_CALLS_S)

    async def unary(self, method: EtcdMethod[Request, Response], request: Request) -> Response:
        """Return the response. While no endpoint responds, repeat the call until `timeout_s`: every call here may be repeated."""
        error: DynamoError = EtcdUnavailable(f"etcd at {', '.join(self.config.endpoints)} did not respond in time")
        pauses = backoff(self.config.max_backoff_s)
        login_may_be_old = True
        try:
            async with asyncio.timeout(self.config.timeout_s):
                while True:
                    try:
                        return await self._attempt(method, request)
                    except TokenExpired as expired:
                        if not login_may_be_old:
                            raise
                        error, login_may_be_old = expired, False
                    except EtcdUnavailable as unavailable:
                        error = unavailable
                        await asyncio.sleep(next(pauses))
        except TimeoutError:
            raise error from None

    @asynccontextmanager
    async def stream(self, method: EtcdMethod[Request, Response]) -> AsyncIterator[EtcdStream[Request, Response]]:
        """Open a stream on one endpoint. If it fails as unavailable, the next call chooses an endpoint again."""
        async with self._link() as link:
            metadata = (*await self._login(link), _REQUIRE_LEADER)
            start: grpc.aio.StreamStreamMultiCallable[Request, Response] = link.channel.stream_stream(
                method.path, request_serializer=_serialize, response_deserializer=method.response.FromString
            )
            call = start(metadata=metadata)
            stream = EtcdStream(call, link.endpoint)
            link.streams.add(stream)
            try:
                yield stream
            finally:
                link.streams.discard(stream)
                call.cancel()

    def forget_login(self) -> None:
        """Log in again with the next call, if a user is configured."""
        self._token = None

    async def _attempt(self, method: EtcdMethod[Request, Response], request: Request) -> Response:
        async with self._link() as link:
            # Half of the time, so that an endpoint that hangs leaves some to another one.
            timeout_s = self.config.timeout_s / 2
            return await _call(link, method, request, await self._login(link), timeout_s)

    @asynccontextmanager
    async def _link(self) -> AsyncIterator[_EtcdChannel]:
        link = await self._elected()
        link.users += 1
        try:
            yield link
        except TokenExpired:
            self.forget_login()
            raise
        except EtcdUnavailable:
            link.retired = True
            self._retired.add(link)
            if self._current is link:
                self._current = None
            raise
        finally:
            link.users -= 1
            if link.retired and not link.users:  # not before: closing a channel cancels what others have on it
                self._retired.discard(link)
                await link.channel.close()

    async def _elected(self) -> _EtcdChannel:
        async with self._electing:
            if self._current is None:
                self._current = link = await self._elect()
                if self._settling is not None:
                    self._settling.cancel()
                self._settling = asyncio.get_running_loop().call_later(self.config.keepalive_s, self._settle, link)
            return self._current

    def _settle(self, link: _EtcdChannel) -> None:
        """End the streams on links that have failed, so that they follow to `link`, unless that has failed meanwhile, too.

        Otherwise each fault would leave further connections behind, for as long as their streams find nothing wrong.
        """
        if link is not self._current:
            return
        for retired in self._retired:
            for stream in retired.streams:
                stream.end()

    async def _elect(self) -> _EtcdChannel:
        links = [_EtcdChannel(endpoint, _open_channel(endpoint, self.config)) for endpoint in self.config.endpoints]
        ready = {awaited(link.channel.channel_ready(), f"etcd {link.endpoint}"): link for link in links}
        winner: _EtcdChannel | None = None
        try:
            done, _ = await asyncio.wait(ready, timeout=self.config.connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            winner = next((ready[task] for task in done), None)
            if winner is None:
                raise EtcdUnavailable(f"etcd cannot be reached: {await _why_not(links[0])}")
            log.debug("etcd at %s is used", winner.endpoint)
            return winner
        finally:
            for link in links:
                if link is not winner:
                    await link.channel.close()
            await _ended(ready)

    async def _login(self, link: _EtcdChannel) -> tuple[tuple[str, str], ...]:
        """Return the metadata that authenticate a call; empty without a user."""
        user, password = self.config.user, self.config.password
        if user is None or password is None:
            return ()
        async with self._logging_in:
            if self._token is None:
                request = pb.AuthenticateRequest(name=user, password=password)
                try:
                    response = await _call(link, AUTHENTICATE, request, (), self.config.timeout_s)
                except DynamoError as error:
                    if "authentication is not enabled" not in str(error):
                        raise
                    log.warning("etcd has no authentication enabled; the configured user is not used")
                    return ()
                self._token = response.token
            return (("token", self._token),)


async def _ended(waits: Collection[asyncio.Task[None]]) -> None:
    """Return when the waits for closed channels have ended.

    Closing ends them. Cancelled instead, their operations inside gRPC would outlive them, and perhaps the loop. But a few, whose
    channel changed its state as it was closed, never end by themselves (grpcio 1.85, 1 of 100 to a port that refuses).
    """
    try:
        await asyncio.wait(waits, timeout=_LAST_WAITS_S)
    finally:
        for wait in waits:
            wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def _call(
    link: _EtcdChannel,
    method: EtcdMethod[Request, Response],
    request: Request,
    metadata: tuple[tuple[str, str], ...],
    timeout_s: float,
) -> Response:
    call: grpc.aio.UnaryUnaryMultiCallable[Request, Response] = link.channel.unary_unary(
        method.path, request_serializer=_serialize, response_deserializer=method.response.FromString
    )
    try:
        return await call(request, metadata=metadata, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise_if_cancelled()
        raise from_rpc_error(error, link.endpoint) from None


async def _why_not(link: _EtcdChannel) -> str:
    """Return gRPC's reason why a channel is not ready, which only a call gets to see."""
    try:
        await _call(link, RANGE, pb.RangeRequest(key=b"\0"), (), 0.2)
    except DynamoError as error:
        return str(error)
    return "no endpoint was ready in time"


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _open_channel(endpoint: str, config: EtcdOptions) -> grpc.aio.Channel:
    target, tls = parse_endpoint(endpoint, uses_etcd_tls(config))
    options: list[tuple[str, Any]] = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the old one's waiting times
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", max(_MIN_CONNECT_MS, int(config.connect_timeout_s * 1000))),
        ("grpc.max_reconnect_backoff_ms", int(config.max_backoff_s * 1000)),
        ("grpc.keepalive_time_ms", int(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.keepalive_s * 500)),
        ("grpc.keepalive_permit_without_calls", 0),  # etcd ends connections that ping without a call on them
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC measures bandwidth with pings of its own. One of those under way takes the keepalive ping's place, and is
        # waited for a minute otherwise.
        ("grpc.http2.ping_timeout_ms", int(config.keepalive_s * 500)),
        ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
    ]
    if not tls:
        return grpc.aio.insecure_channel(target, options=options)
    if config.server_name is not None:
        options.append(("grpc.ssl_target_name_override", config.server_name))
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(config.tls_ca_file),
        private_key=_read(config.tls_key_file),
        certificate_chain=_read(config.tls_cert_file),
    )
    return grpc.aio.secure_channel(target, credentials, options=options)


def _read(file: str | None) -> bytes | None:
    """Read a small file, each time a connection is made."""
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        # A certificate that is being replaced is there again in a moment.
        raise EtcdUnavailable(f"etcd's certificate file {file} cannot be read: {error.strerror}") from None


def backoff(longest_s: float) -> Iterator[float]:
    """Yield growing pauses, with jitter so that a fleet does not come back at once."""
    pause_s = _FIRST_BACKOFF_S
    while True:
        yield random.uniform(pause_s / 2, pause_s)
        pause_s = min(pause_s * 2, longest_s)
