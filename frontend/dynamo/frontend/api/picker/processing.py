"""One call of the gateway: the messages about one request and its response.

| body of the request comes | the endpoint is said in response to |
|---|---|
| in full duplex, as protocol 1.0.0 has it | the headers, when the body is complete; then the body is sent back in chunks |
| buffered | the body |
| in pieces, or not at all | the headers, without knowledge of the body: an endpoint with little load |

Once the request is placed the call ends cleanly if this process is about to stop, which leaves the response alone.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

from dynamo.common.errors import DeadlineExceeded, InvalidRequest, ShuttingDown
from dynamo.frontend.api.picker import messages
from dynamo.frontend.api.picker.headers import DROPPED, PLACEMENT, by_name, headers_of, served_by, subset_of, value_of
from dynamo.frontend.api.picker.messages import GO_ON, body_chunks, chosen, chosen_often, refused
from dynamo.frontend.api.picker.picking import Picked, PickerParts, Picking, Refused
from dynamo.frontend.api.rpc.operation import Context
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.protos import ext_proc_pb2 as pb

_FIRST_MESSAGE_S: Final = 30.0
"""Within which a call has to say what it is about."""
_MIN_BODY_BYTES_PER_S: Final = 1024
"""A body that decides where its request goes has `body_s`, and a second more for so many bytes that come, but never more than
`body_s` from then: what has come is held, so it must not buy time in which nothing does."""
_WHOLE: Final = (pb.BUFFERED, pb.BUFFERED_PARTIAL)
_DROPPED_REASONS: Final = {429: b"rejected-saturated", 503: b"rejected-no-endpoints", 504: b"rejected-ttl-expired"}


class Processing:
    def __init__(self, parts: PickerParts, drain: StreamDrain, context: Context) -> None:
        self._parts = parts
        self._drain = drain
        self._context = context
        self._request_mode: int = pb.FULL_DUPLEX_STREAMED
        self._response_mode: int = pb.FULL_DUPLEX_STREAMED
        self._status = 0
        """The status of the response; 0: it has not begun."""
        self._is_stream = False
        self._patience: asyncio.Timeout | None = None
        """Runs out when a part of the body has not come in time, or is not wanted any more."""

    async def run(self) -> None:
        """Return when the response has ended. Raises InvalidRequest for a call that is none of the protocol, DeadlineExceeded."""
        try:
            async with asyncio.timeout(_FIRST_MESSAGE_S):
                message = await self._next()
        except TimeoutError:
            raise DeadlineExceeded() from None
        if message is None or message.observability_mode:
            return
        if message.WhichOneof("request") != "request_headers":
            raise InvalidRequest("the first message must have the headers of a request")
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        headers = headers_of(message.request_headers)
        subset = subset_of(message.metadata_context.filter_metadata)
        is_whole = self._request_mode in (pb.FULL_DUPLEX_STREAMED, *_WHOLE)
        has_body = is_whole and not message.request_headers.end_of_stream
        picking = Picking(self._parts, headers, self._context.peer(), subset, has_body=has_body)
        if message.request_headers.end_of_stream:
            picking.body.add(b"", is_last=True)
        async with picking:
            try:
                if await self._place(picking):
                    await self._follow(picking)
            except asyncio.CancelledError:  # the gateway has reset the call, as it does at the end of a response, too
                if self._status:
                    picking.end(self._status)
                raise
            if self._status:
                picking.end(self._status)

    async def _next(self) -> pb.ProcessingRequest | None:
        data: object = await self._context.read()
        return messages.read(data) if isinstance(data, bytes | memoryview) else None

    # The request

    async def _place(self, picking: Picking) -> bool:
        """Say where the request goes. Return False if it goes nowhere."""
        picking.outcome.add_done_callback(self._decided)
        if self._request_mode in _WHOLE and picking.reads_body:
            return await self._place_buffered(picking)
        has_trailers = False
        now, body_s = asyncio.get_running_loop().time, self._parts.body_s
        deadline = now() + body_s
        while picking.needs_body and not picking.body.is_complete and not picking.outcome.done():
            message = await self._next_of_body(picking, deadline)
            if message is None:
                if picking.outcome.done():
                    break
                return False
            deadline = min(deadline + len(message.request_body.body) / _MIN_BODY_BYTES_PER_S, now() + body_s)
            if has_trailers := message.WhichOneof("request") == "request_trailers":
                picking.body.add(b"", is_last=True)
            else:
                picking.body.add(message.request_body.body, is_last=message.request_body.end_of_stream)
        outcome = await self._outcome(picking)
        if not isinstance(outcome, Picked):
            return False
        changed = await picking.changed_body(outcome)
        await self._context.write(chosen_often(outcome.endpoints, tuple(outcome.headers.items()), picking.removed))
        if picking.reads_body:
            picking.body.flush()
            parts = picking.body.parts if changed is None else [changed]
            for chunk in body_chunks(parts, is_last=picking.body.is_complete and not has_trailers):
                await self._context.write(chunk)
            picking.body.clear()
            if has_trailers:
                await self._context.write(GO_ON["request_trailers"])
        return True

    async def _next_of_body(self, picking: Picking, deadline: float) -> pb.ProcessingRequest | None:
        """Return the next message; None after the last, or once the request is refused, as it is past the deadline, on the loop's
        clock."""
        try:
            async with asyncio.timeout_at(deadline) as self._patience:
                return await self._next()
        except TimeoutError:
            if not picking.outcome.done():
                await self._context.write(refused(408, (), b"The body of the request did not arrive in time."))
            return None
        finally:
            self._patience = None

    def _decided(self, outcome: asyncio.Future[Picked | Refused]) -> None:
        """Wait for no more of the body of a request that is refused."""
        if self._patience is None or self._patience.expired() or outcome.cancelled():
            return
        if outcome.exception() is not None or isinstance(outcome.result(), Refused):
            self._patience.reschedule(0.0)

    async def _place_buffered(self, picking: Picking) -> bool:
        await self._context.write(GO_ON["request_headers"])
        message = await self._next_of_body(picking, asyncio.get_running_loop().time() + self._parts.body_s)
        if message is None:
            if picking.outcome.done():
                await self._outcome(picking)
            return False
        picking.body.add(message.request_body.body, is_last=True)
        outcome = await self._outcome(picking)
        if not isinstance(outcome, Picked):
            return False
        if message.WhichOneof("request") == "request_body":
            changed = await picking.changed_body(outcome)
            if changed is None and picking.removed:
                changed = picking.body.joined()
            headers = outcome.headers if changed is None else {**outcome.headers, "content-length": str(len(changed))}
            await self._context.write(chosen(outcome.endpoints, headers, picking.removed, with_body=True, body=changed))
        else:
            await self._context.write(GO_ON["request_trailers"])
        picking.body.clear()
        return True

    async def _outcome(self, picking: Picking) -> Picked | Refused:
        began = perf_counter()
        outcome = await picking.outcome
        if isinstance(outcome, Picked):
            self._parts.metrics.picked("routed" if outcome.is_routed else "least_loaded", perf_counter() - began)
            return outcome
        self._parts.metrics.picked("refused", perf_counter() - began)
        headers = [*outcome.headers]
        if (reason := _DROPPED_REASONS.get(outcome.status)) is not None:
            headers.append((DROPPED.encode(), reason))
        await self._context.write(refused(outcome.status, headers, outcome.body))
        return outcome

    # The response

    async def _follow(self, picking: Picking) -> None:
        """Follow the request to the end of its response."""
        while (message := await self._next_or_stop()) is not None:
            kind = message.WhichOneof("request")
            if kind == "response_headers":
                await self._begin_response(picking, message)
            elif kind in ("request_body", "response_body"):
                body = message.request_body if kind == "request_body" else message.response_body
                mode = self._request_mode if kind == "request_body" else self._response_mode
                if kind == "response_body" and self._is_stream and body.body:
                    picking.begin()
                if mode == pb.FULL_DUPLEX_STREAMED:
                    for chunk in body_chunks([body.body], is_last=body.end_of_stream, kind=kind):
                        await self._context.write(chunk)
                else:
                    await self._context.write(GO_ON[kind])
            elif kind is not None:
                await self._context.write(GO_ON[kind])

    async def _next_or_stop(self) -> pb.ProcessingRequest | None:
        """Return the next message; None at the end of the call, or when this process is about to stop."""
        try:
            data = await self._drain.read(self._context)
        except ShuttingDown:
            return None
        return None if data is None else messages.read(data)

    async def _begin_response(self, picking: Picking, message: pb.ProcessingRequest) -> None:
        headers = by_name(headers_of(message.response_headers))
        status = value_of(headers, b":status")
        self._status = int(status) if len(status) == 3 and status.isdecimal() else 200
        self._is_stream = value_of(headers, b"content-type").startswith("text/event-stream")
        picked = picking.outcome.result()
        assert isinstance(picked, Picked)
        served = served_by(message.metadata_context.filter_metadata)
        if served and served != picked.endpoints.partition(",")[0]:
            self._parts.metrics.served_elsewhere()
            picking.end()
        await self._context.write(messages.response_headers(((PLACEMENT, picked.headers[PLACEMENT]),)))
