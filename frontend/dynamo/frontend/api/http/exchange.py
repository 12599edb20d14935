"""One HTTP request and its response, straight on the server: no framework between a token and the socket.

    async def handle(exchange: Exchange) -> None: ...      # the handler of an `Operation`
    await Exchange(request, settings).run(handle)

`Exchange.attended` ends the work when the client leaves. Failures become an error response, or the last event of a stream.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import TracebackType
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec

from dynamo.common.errors import Cancelled, Code, DynamoError, EngineError, InvalidRequest, PayloadTooLarge, RateLimited, release
from dynamo.common.http.served import ClientWatch, Header, ServedRequest
from dynamo.common.logs import request_id as logged_id
from dynamo.common.process.steps import Steps
from dynamo.common.process.work import Work
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.calls import EXPLAIN, read_call, usable_id
from dynamo.frontend.api.capacity import Capacity, Occupancy
from dynamo.frontend.api.declaration import FORM_BYTES, LITTLE_BYTES, MAX_FILE_BYTES, NAME_BYTES, Charge, Declaration, Reads
from dynamo.frontend.api.http.compression import BRIEF_BYTES, UnknownEncoding, decompress_steps, encoding_of
from dynamo.frontend.api.http.errors import PLAIN_ERRORS, ErrorForm, rate_limit_headers, retry_after
from dynamo.frontend.api.http.event_stream import EventStream
from dynamo.frontend.api.http.json_scan import is_json
from dynamo.frontend.api.http.unknown_fields import UnknownFields
from dynamo.frontend.api.statuses import http_status, log_failure, retry_after_s
from dynamo.frontend.config import HttpOptions, OverloadStatus
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.router.explanation import Explanation
from dynamo.frontend.security.accounts import ANONYMOUS, Account
from dynamo.frontend.security.keys import key_name
from dynamo.frontend.serving.call import Call, Progress

log = logging.getLogger(__name__)
T = TypeVar("T")
JSON = (b"content-type", b"application/json")
HTML = (b"content-type", b"text/html; charset=utf-8")
_LARGE_BODY_BYTES = 64 * 1024
_QUERY_FIELDS = 100
_PIECE_BYTES = 256 * 1024
"""Bytes of a long response that go to the connection at once, when the client has read most of those before."""
_JOINED_BYTES = 4 << 20
"""The pieces of a longer body are joined in a thread, which leaves the interpreter to others meanwhile: 0.7 ms for each MiB."""
_FREED_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of all HTTP operations."""

    options: HttpOptions = field(default_factory=HttpOptions)
    overload: OverloadStatus = OverloadStatus.UNAVAILABLE
    capacity: Capacity = field(default_factory=Capacity)
    """Shared with all other requests of the process."""
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    offload: Offload = field(default_factory=lambda: Offload(threads=2))
    """For large bodies, whose (de)compression leaves the interpreter to the other thread."""
    steps: Steps = field(default_factory=lambda: Steps(owner=key_name.get))
    """For what is long and in Python."""
    body_limits: Mapping[Reads, int] = field(init=False)
    """The largest body of a request, in bytes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "body_limits", _body_limits(self.options))


def _body_limits(options: HttpOptions) -> Mapping[Reads, int]:
    most = options.max_body_bytes
    return {
        Reads.JSON: min(options.max_json_bytes, most),
        Reads.TENSORS: most,
        Reads.FILE: min(MAX_FILE_BYTES, most) + FORM_BYTES,
        Reads.LITTLE: min(LITTLE_BYTES, most),
        Reads.NAME: NAME_BYTES,
    }


class Exchange:
    """One request and its response, which is either one `respond` or a stream of `events`."""

    declared: Declaration
    """Declaration of the operation that the request is for: there from `route` on."""
    account: Account
    """The account of the caller: there from `admit` on."""

    def __init__(self, request: ServedRequest, settings: HttpSettings) -> None:
        self.settings = settings
        self.method = request.method
        self.scheme = request.scheme
        """Scheme of this server's port; the client's is another one if a proxy ends TLS."""
        self.path = request.path
        """Decoded; for messages. What the request is for stands in `parameters`."""
        self.raw_path = request.raw_path
        self.parameters: Mapping[str, str] = {}
        """The values of the parameters in the operation's path."""
        self.endpoint = ""
        """The operation's name in metrics."""
        self.errors: ErrorForm = PLAIN_ERRORS
        self.status: int | None = None
        """Status of the response, once it has begun."""
        self.began_ns = perf_counter_ns()
        """When its headers had been read."""
        self.body_read_ns = self.began_ns
        """When its body had been read, once it was."""
        self.headers: dict[str, str] = {}
        for name, value in request.headers:
            self.headers[name.decode("latin-1")] = value.decode("latin-1")
        self.scanned: bytes | None = None
        """The JSON body of a request that was passed on; see `take_scanned`."""
        self.body_bytes = 0
        """Length of the request's body, once it was read."""
        self.request_id = ""
        """Set by `call`, at the latest when the response begins, whose headers repeat it."""
        self.explanation: Explanation | None = None
        """The caller's, if it wants one; goes into the same headers."""
        self.client_left = False
        self.limited_s: float | None = None
        """After how many seconds the limits of the caller's key have room for the request, which they refused."""
        self.stream: EventStream | None = None
        self.progress = Progress()
        """Progress of the request, for calls made from it."""
        self.occupancy: Occupancy | None = None
        """What the request occupies of the capacity of the process until its end; None for requests that do not count."""
        self.failure: type[BaseException] | None = None  # of the handler
        self._is_request = False
        """Whether the operation declares to be charged as a request to a model: it responds once one was admitted."""
        self._on_refused: Callable[[BaseException], None] | None = None
        self._added_headers: tuple[Header, ...] = ()
        self._limited: Account = ANONYMOUS  # whose limits the headers of the response have
        self._request = request

    def add_headers(self, headers: tuple[Header, ...]) -> None:
        """Let the response have these headers, too."""
        self._added_headers = headers

    def route(
        self,
        declared: Declaration,
        errors: ErrorForm,
        endpoint: str = "",
        parameters: Mapping[str, str] | None = None,
        on_refused: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Say what the request is for: an operation that declares this, with the parameters in its path.

        `on_refused` counts the failure of a request that the data plane has not begun.
        """
        self.declared, self._is_request = declared, declared.charge is Charge.REQUESTS
        self.errors, self.endpoint, self._on_refused = errors, endpoint, on_refused
        if parameters is not None:
            self.parameters = parameters

    def admit(self, account: Account) -> None:
        """Let the caller use the operation, by this account."""
        self.account = self._limited = account
        key_name.set(account.name)

    def occupy(self) -> Occupancy:
        """Count the request against the capacity of the process until the end of what this returns. Raises Overloaded."""
        self.occupancy = occupancy = self.settings.capacity.enter()
        return occupancy

    def identify(self, request_id: str) -> None:
        """Let the response, and what is logged, have this id."""
        self.request_id = request_id
        logged_id.set(request_id)

    def pass_on(self, endpoint: str, body: bytes) -> None:
        """Leave the request to the handler of another endpoint, which gets `body` as the JSON body that was scanned."""
        self.endpoint, self.scanned = endpoint, body

    def take_scanned(self) -> bytes:
        """Return the body of a request that was passed on, which is not kept here any longer."""
        body, self.scanned = self.scanned, None
        assert body is not None, "the request was passed on, and its body not taken yet"
        return body

    def lose_client(self) -> None:
        """Write no response any more: the client has left."""
        self.client_left = True

    @property
    def peer(self) -> str:
        """The address of the client."""
        return self._request.client

    @property
    def header_names(self) -> Iterator[str]:
        """The names of all headers, in lower case, as often as they were sent."""
        return (name.decode("latin-1") for name, _ in self._request.headers)

    @property
    def query(self) -> dict[str, str]:
        """The parameters after the path's `?`, the last of each name. Raises InvalidRequest if there are more than 100."""
        text = self._request.query.decode("latin-1")
        try:
            parameters = parse_qs(text, keep_blank_values=True, max_num_fields=_QUERY_FIELDS)
        except ValueError:
            raise InvalidRequest(f"a query may have at most {_QUERY_FIELDS} parameters") from None
        return {name: values[-1] for name, values in parameters.items()}

    async def run(self, handle: Callable[[Exchange], Awaitable[None]]) -> None:
        """Let `handle` respond; respond with its failure if it fails."""
        try:
            await handle(self)
        except asyncio.CancelledError as error:
            if self.client_left:
                return release(error)
            if self.stream is not None:
                await self.stream.cut_off(self.errors.event)
            raise
        except UnknownEncoding as error:
            await self.refuse(error, 415, self.errors, ((b"accept-encoding", b"gzip, deflate"),))
        except Exception as error:
            try:
                await self.fail(error)
            finally:
                release(error)  # the frames of its traceback hold the request, and often the error

    def call(self, *, has_own_id: bool = False) -> Call:
        """Return the call of the request, by its headers, with the id that the response repeats. Raises InvalidRequest.

        `has_own_id`: the request may have an id of its own, which the caller of this uses if the headers have none.
        """
        # Not `self.hold`: a response in the background would keep this exchange, and with it the body.
        occupied, progress = self.occupancy, self.progress
        call = read_call(self.account, self.headers.items(), progress=progress, endpoint=self.endpoint, occupied=occupied)
        self.explanation = call.explanation
        self.request_id = call.request_id or self.request_id
        if has_own_id:
            return call
        self.request_id = self.request_id or secrets.token_hex(16)
        logged_id.set(self.request_id)
        return call if call.request_id else msgspec.structs.replace(call, request_id=self.request_id)

    def identified(self, call: Call, request_id: str | None) -> Call:
        """Return `call` with the id in the request's body, if its headers have none; the response repeats it."""
        if not request_id or usable_id(self.headers.get("x-request-id", "")) or not usable_id(request_id):
            return call
        self.identify(request_id)
        return msgspec.structs.replace(call, request_id=request_id)

    def has_begun(self) -> bool:
        """Return whether a part of the response, a comment perhaps, has been sent."""
        return self.status is not None or (self.stream is not None and self.stream.begun)

    @property
    def has_large_body(self) -> bool:
        """Whether the body, with what was stored, is so long that code which walks through it should leave the event loop."""
        return self.body_bytes > _LARGE_BODY_BYTES

    async def body(self) -> bytes:
        """Return the request's JSON body, which has no tensors in it. Raises as `decompressed_body` does."""
        kind = self.headers.get("content-type")
        if kind is not None and kind != "application/json" and not is_json(kind):
            raise InvalidRequest(f"the content type is {kind[:80]!r}; it must be 'application/json'")
        return await (self.decompressed_body() if "content-encoding" in self.headers else self.any_body())

    async def decompressed_body(self, max_bytes: int | None = None) -> bytes:
        """Return the request's body, whose declared bound, or `max_bytes` if that is less, holds compressed and decompressed.

        Raises PayloadTooLarge, Overloaded, InvalidRequest for invalid compressed data, UnknownEncoding, and Cancelled if the
        client left.
        """
        codings = self.headers.get("content-encoding")
        encoding = "" if codings is None else encoding_of(codings)
        body = await self.any_body(max_bytes)
        if not encoding:
            return body
        limit = self.settings.body_limits[self.declared.reads]
        steps = decompress_steps(body, encoding, limit if max_bytes is None else min(limit, max_bytes))
        if len(body) <= BRIEF_BYTES:
            decompressed = b"".join(steps)
            self.hold(self.declared.copies * len(decompressed))
        else:
            decompressed = await self._decompressed(steps)
        self.body_bytes = len(decompressed)
        return decompressed

    async def _decompressed(self, steps: Iterator[bytes]) -> bytes:
        pieces: list[bytes] = []
        while (piece := await self.settings.offload.run(next, steps, None)) is not None:
            self.hold(self.declared.copies * len(piece))
            pieces.append(piece)
        return await self._joined(pieces)

    async def _joined(self, pieces: list[bytes]) -> bytes:
        """Return the pieces of a body, which take twice their size meanwhile. Raises Overloaded."""
        size = sum(map(len, pieces))
        with self.holding() as hold:
            hold(size if self.declared.copies == 1 else 0)
            return await self.settings.offload.run_if(size > _JOINED_BYTES, _join, pieces)

    def hold(self, size_bytes: int) -> None:
        """Count bytes that are kept for this request until its end. Raises Overloaded."""
        if self.occupancy is not None:
            self.occupancy.hold(size_bytes)

    def hold_stored(self, size_bytes: int) -> None:
        """Count what is read from a store and put together with the body, as often as the body. Raises Overloaded."""
        self.hold(self.declared.copies * size_bytes)
        self.body_bytes += size_bytes

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """Give a function that counts bytes until the context is left, which may raise Overloaded."""
        held = 0

        def hold(size_bytes: int) -> None:
            nonlocal held
            self.hold(size_bytes)
            held += size_bytes

        try:
            yield hold
        finally:
            if self.occupancy is not None:
                self.occupancy.release(held)

    async def in_steps(self, work: Work[T]) -> T:
        """Return the result of long work, whose memory counts until the end of this request. Raises Overloaded."""
        return await self.settings.steps.run(work, self.hold)

    async def any_body(self, max_bytes: int | None = None) -> bytes:
        """Return the request's body as it was sent. Raises PayloadTooLarge, Overloaded, and Cancelled if the client left."""
        limit = self.settings.body_limits[self.declared.reads]
        if max_bytes is not None and max_bytes < limit:
            limit = max_bytes
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise _too_large(limit)
        request = self._request
        body = await request.read()
        if body is not None and not request.more_body:
            if len(body) > limit:
                raise _too_large(limit)
            if self.occupancy is not None:
                self.occupancy.hold(self.declared.copies * len(body))
            self.body_bytes = len(body)
            self.body_read_ns = perf_counter_ns()
            return body
        return await self._long_body(body, limit)

    async def _long_body(self, part: bytes | None, limit: int) -> bytes:
        occupied, key = self.occupancy, self.account.name
        parts: list[bytes] = []
        size = 0
        try:
            while part is not None:
                if occupied is not None:
                    occupied.arrive(key, self.declared.copies * len(part))
                parts.append(part)
                self.body_bytes = size = size + len(part)
                if size > limit:
                    raise _too_large(limit)
                if not self._request.more_body:
                    break
                part = await self._request.read()
            else:
                self.lose_client()
                raise Cancelled()
        finally:
            if occupied is not None:
                occupied.arrived(key, self.declared.copies * size)
        self.body_read_ns = perf_counter_ns()
        return b"".join(parts) if size <= _PIECE_BYTES else await self._joined(parts)

    def attended(self) -> Attended:
        """Cancel the body of the context when the client leaves, and raise Cancelled."""
        return Attended(self, self._request.watch)

    async def respond(self, body: bytes, status: int = 200, headers: tuple[Header, ...] = (JSON,)) -> None:
        """Send the whole response. Raises Overloaded for a long one if the process holds too much."""
        if len(body) > _LARGE_BODY_BYTES:
            return await self.respond_in_pieces((body,), headers, status)
        self._check_charged(status)
        self.status = status
        length = (b"content-length", b"%d" % len(body))
        self._request.begin(status, (*headers, length, *self._common()))
        await self._request.write(body, is_last=True)

    async def respond_in_pieces(
        self, pieces: Sequence[Buffer], headers: tuple[Header, ...], status: int = 200, *, held_bytes: int = 0
    ) -> None:
        """Send the whole response, piece by piece so that large ones need not be joined. `held_bytes` of them count already.

        Waits while the client does not read, so that what is not sent counts against the capacity. Raises Overloaded.
        """
        size = sum(map(len, pieces))
        if size <= _LARGE_BODY_BYTES:
            return await self.respond(b"".join(pieces), status, headers)
        self.hold(size - held_bytes)
        self._check_charged(status)
        length = (b"content-length", b"%d" % size)
        with self.settings.capacity.unread(self.account.name, size):
            self.status = status
            self._request.begin(status, (*headers, length, *self._common()))
            for piece in pieces:
                view = memoryview(piece)
                for offset in range(0, len(view), _PIECE_BYTES):
                    await self._request.write(view[offset : offset + _PIECE_BYTES])
            await self._request.write(b"", is_last=True)

    async def respond_while_read(
        self, size_bytes: int | None, pieces: AsyncGenerator[Buffer, None], headers: tuple[Header, ...], status: int = 200
    ) -> None:
        """Send a response while it is read, the next piece when the client has taken most of those before.

        So it takes the memory of two pieces, which count against the capacity. `size_bytes`: of all of them; None: not known, and
        a client that closes its side has left, since nothing can be sent to try it. Closes `pieces`. Raises Overloaded, and what
        reading the first piece raises.
        """
        length = () if size_bytes is None else ((b"content-length", b"%d" % size_bytes),)
        async with aclosing(pieces):
            self.hold(held_bytes := 2 * _PIECE_BYTES if size_bytes is None else min(size_bytes, 2 * _PIECE_BYTES))
            piece = await anext(pieces, b"")
            self._check_charged(status)
            with self.settings.capacity.unread(self.account.name, held_bytes):
                self.status = status
                self._request.on_half_close = self._request.watch.leave if size_bytes is None else None
                self._request.begin(status, (*headers, *length, *self._common()))
                while piece and self.method != "HEAD":
                    await self._request.write(piece)
                    piece = await anext(pieces, b"")
                await self._request.write(b"", is_last=True)

    async def upgrade(self, headers: Sequence[Header]) -> ServedRequest:
        """Respond with 101, and return the request, whose `read` and `write` are from then on the bytes of another protocol."""
        self._check_charged(101)
        self.status = 101
        self._request.begin(101, (*headers, *self._common()))
        await self._request.write(b"")
        return self._request

    @asynccontextmanager
    async def events(self) -> AsyncIterator[EventStream]:
        """A stream of server-sent events. Its head goes with the first event, so that an earlier failure has its own status."""
        self.stream = stream = EventStream(self._request, self._common, self._check_charged, self.settings.options.keepalive_s)
        self._request.on_half_close = stream.comment
        try:
            yield stream
        finally:
            self._request.on_half_close = None
            stream.close()

    async def refuse(self, error: BaseException, status: int, form: ErrorForm, headers: tuple[Header, ...] = ()) -> None:
        """Respond with a failure that keeps a request from its handler."""
        if self._on_refused is not None:
            self._on_refused(error)
        pause_s = retry_after_s(error)
        if pause_s is not None:
            headers = (*headers, retry_after(pause_s))
        await self.respond(form.body(error, status), status, (JSON, *headers))

    async def fail(self, error: BaseException) -> None:
        """Respond with the failure of the handler, in whichever way is still possible."""
        self.failure = type(error)
        if self.client_left:
            log.info("the client of %s left before its response was complete (499), request %s", self.path, self.request_id)
            return
        if self._on_refused is not None and not self.progress.started:
            self._on_refused(error)
        if isinstance(error, RateLimited):
            self.limited_s = error.retry_after_s
        log_failure(error, self.ensure_id(), f"{self.method} {self.path}")
        status = http_status(error, self.settings.overload)
        if self.stream is not None and self.stream.begun:
            return await self.stream.end(self.errors.event(error, status))
        if self.status is not None:  # it failed while the response was written, which therefore stays incomplete
            return
        pause_s = retry_after_s(error)
        if pause_s is None and isinstance(error, DynamoError) and error.code is Code.UNAVAILABLE and error.retryable:
            pause_s = 1.0
        headers = (JSON,) if pause_s is None else (JSON, retry_after(pause_s))
        await self.respond(self.errors.body(error, status), status, headers)

    def _check_charged(self, status: int = 200) -> None:
        """Raise EngineError for a request to a model that none was admitted for, before it gets a response other than errors."""
        if status < 400 and self._is_request and not self.progress.started:
            raise EngineError("the operation declares to be charged as a request to a model, and responds without one")

    def ensure_id(self) -> str:
        """Return the request's id: the caller's, or a new one."""
        if not self.request_id:
            self.request_id = usable_id(self.headers.get("x-request-id", "")) or secrets.token_hex(16)
        return self.request_id

    def _common(self) -> tuple[Header, ...]:
        """Return the headers that every response has."""
        request_id = (self.request_id or self.ensure_id()).encode()
        headers: tuple[Header, ...] = ((b"x-request-id", request_id), *self._added_headers)
        if self.errors.request_id:
            headers += ((self.errors.request_id, request_id),)
        for limit in self._limited.rate_limits():
            headers += rate_limit_headers(limit)
        if self.explanation is not None and (explained := self.explanation.to_json()):
            headers += ((EXPLAIN.encode(), explained),)
        return headers


class Attended(msgspec.Struct, eq=False):
    """The context of `Exchange.attended`."""

    _exchange: Exchange
    _watch: ClientWatch
    _handler: asyncio.Task[object] | None = None

    async def __aenter__(self) -> None:
        self._handler = asyncio.current_task()
        self._watch.on_leave = self._cancel
        if self._watch.has_left:
            self._cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watch.on_leave = None
        if isinstance(error, asyncio.CancelledError) and self._exchange.client_left:
            assert self._handler is not None
            if self._handler.uncancel() == 0:
                raise Cancelled() from None

    def _cancel(self) -> None:
        self._exchange.lose_client()
        assert self._handler is not None
        self._handler.cancel()


def _join(pieces: list[bytes]) -> bytes:
    """Return the pieces as one, and free them, between which other threads run."""
    body = b"".join(pieces)
    while pieces:
        del pieces[-_FREED_AT_ONCE:]
    return body


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes")
