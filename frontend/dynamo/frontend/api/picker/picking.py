"""One request of a gateway, from its headers to the endpoint that it is sent to, or to its refusal.

1. A request for an operation that generates text is served by that operation, with all that it declares. It is placed when the
   data plane has booked it, and the operation goes on until the response has ended.
2. What the operation refuses as invalid or unknown, and requests for all other paths, go to an endpoint with little load: the
   engine server there says what is wrong, or understands more. Refusals for lack of rights, limits or endpoints stand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Self

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import (
    DynamoError,
    EngineError,
    HarmfulRequest,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from dynamo.common.http.served import Header, media_type
from dynamo.common.process.background import awaited
from dynamo.common.repository import ALL_MODELS
from dynamo.frontend.api.calls import EXPLAIN
from dynamo.frontend.api.declaration import Declaration, Reads
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.http.body_fields import (
    PLAIN_GUIDES,
    Values,
    asks_for_one,
    beyond_rights,
    cache_salt_in,
    changed_body,
    check_fields,
    check_plain_guides,
    check_tools,
    is_harmless,
    model_in,
    other_guides,
    values_in,
)
from dynamo.frontend.api.http.compression import BRIEF_BYTES, decompress, encoding_of
from dynamo.frontend.api.http.errors import OPENAI_ERRORS, ErrorForm
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.json_scan import is_json
from dynamo.frontend.api.http.operation import Handler, Operation, within_declared
from dynamo.frontend.api.http.paths import PathTable
from dynamo.frontend.api.picker.gateway_request import GatewayBody, GatewayRequest
from dynamo.frontend.api.picker.headers import PLACEMENT, by_name, fairness_id, objective_headers, rewritten_model, value_of
from dynamo.frontend.api.picker.passing_on import ENDPOINT, MANAGED, PassingOn, passed_on
from dynamo.frontend.api.statuses import http_status
from dynamo.frontend.config import PickerOptions
from dynamo.frontend.port_metrics import PickerMetrics
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.security.accounts import ANONYMOUS, Account
from dynamo.frontend.security.derived_accounts import FairAccount
from dynamo.frontend.security.keys import MAX_PRIORITY
from dynamo.frontend.serving.carried import CarriedRequest
from dynamo.frontend.serving.data_plane import DataPlane

_PASSED_ON_STATUSES: Final = frozenset({400, 404, 405, 415, 422, 500, 501})
_FINISH_S: Final = 1.0
"""After the end of the response: the operation may still wait for another of its prompts to be placed."""
_LONG_BYTES: Final = 128 * 1024
"""Reading a longer body takes a turn of the event loop of its own."""
_FAILURES: Final[Mapping[int, type[DynamoError]]] = {
    429: Overloaded,
    501: Unsupported,
    **dict.fromkeys((502, 503, 504), Unavailable),  # of the gateway, too, which does not reach the endpoint
}
_EXPLAINED: Final[Header] = (EXPLAIN.encode(), b"true")


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerParts:
    """What all requests of a picker have in common."""

    plane: DataPlane
    operations: PathTable[Operation]
    """The operations that generate text, by which requests are placed."""
    guard: Guard
    settings: HttpSettings
    options: PickerOptions
    priorities: Mapping[str, int]
    """Priorities of the objectives that requests may name."""
    metrics: PickerMetrics
    refused: Callable[[str, BaseException], None]
    """Counts the failure of a request that the data plane has not begun, by the API that it came by."""
    body_s: float
    """Within which a body must come that decides where its request goes, in seconds, and more by its size."""


class Picked(msgspec.Struct, frozen=True):
    """Where a request goes."""

    endpoints: str
    """Addresses, the best first, separated by commas."""
    headers: Mapping[str, str]
    """Headers that the request gets."""
    is_routed: bool
    """Whether it was placed by its prompt."""
    request: RouteRequest
    decision: RoutingDecision


class Refused(msgspec.Struct, frozen=True):
    """The response to a request that goes nowhere."""

    status: int
    headers: Sequence[Header]
    body: bytes


class Picking:
    """A context manager: leaving it ends the request here, if its response has not ended."""

    def __init__(
        self,
        parts: PickerParts,
        headers: tuple[Header, ...],
        peer: str,
        subset: frozenset[str] | None,
        *,
        has_body: bool,
    ) -> None:
        """`has_body`: the body comes before the request is placed."""
        self._parts = parts
        self._peer = peer
        self._subset = subset
        named = by_name(headers)
        self._method = value_of(named, b":method")
        self._path = value_of(named, b":path")
        self._rewrite = rewritten_model(named)
        self._encoding = value_of(named, b"content-encoding")
        host = named.get(b":authority")
        self._headers: tuple[Header, ...] = (
            *[header for header in headers if header[0][:1] != b":"],
            *(((b"host", host),) if host else ()),
            *objective_headers(named, parts.priorities),
            *((_EXPLAINED,) if parts.options.endpoints > 1 else ()),
        )
        self._fairness_id = fairness_id(named)
        self._operation, self._parameters = self._find() if has_body else (None, {})
        self._is_scanned = has_body and self._operation is None and self._may_say_more(value_of(named, b"content-type"))
        self.body = GatewayBody()
        self.outcome: asyncio.Future[Picked | Refused] = asyncio.get_running_loop().create_future()
        self.needs_body = self.reads_body
        """Whether more of the body is read before the request is placed: nothing counts what comes after a refusal of it."""
        self.removed: tuple[str, ...] = ()
        """Headers that the request loses."""
        self._carried: CarriedRequest | None = None
        self._request: GatewayRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._caller: Account = ANONYMOUS
        self._is_harmful = False
        """Whether the operation refused the request for what it might do to an engine."""

    @property
    def reads_body(self) -> bool:
        """Whether the body decides where the request goes."""
        return self._operation is not None or self._is_scanned

    def _may_say_more(self, content_type: str) -> bool:
        """Whether the body of a request that no operation reads may name its model or, with keys, more than its key permits."""
        if is_json(content_type) or not content_type:
            return True
        return self._parts.guard.requires_keys and media_type(content_type) != "multipart/form-data"

    def _find(self) -> tuple[Operation | None, Mapping[str, str]]:
        try:
            match = self._parts.operations.find(self._path.partition("?")[0].encode("latin-1"))
        except InvalidRequest:
            match = None
        return match if match is not None and self._method == "POST" else (None, {})

    async def __aenter__(self) -> Self:
        self._task = awaited(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, request = self._task, self._request
        assert task is not None
        if not task.done() and (self._carried is None or not self._carried.has_ended):
            if request is not None and request.watch.on_leave is not None:
                request.watch.leave()
            else:
                task.cancel()
        await asyncio.wait([task], timeout=_FINISH_S)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])

    # The response

    def begin(self) -> None:
        """The first token of the response has come."""
        if self._carried is not None:
            self._carried.begin()

    def end(self, status: int = 200) -> None:
        """The response has ended, or another endpoint than the picked one responds. Calls after the first have no effect."""
        if self._carried is None:
            return
        self._carried.end(None if status < 400 else _failure(status))

    # The request

    async def _run(self) -> None:
        try:
            await self._place()
        except Exception as error:
            if not self.outcome.done():
                self.outcome.set_exception(error)
            else:
                raise

    async def _place(self) -> None:
        operation, first = self._operation, None
        if self.reads_body and self._rewrite and (problem := await self._rewrite_model()) is not None:
            return self._refuse(problem)
        if operation is not None:
            handle = within_declared(operation)
            first = await self._serve(operation.declared, operation.errors, operation.endpoint, handle, is_routed=True)
            if self.outcome.done():
                return
            if first.status not in _PASSED_ON_STATUSES or self._is_harmful:
                return self._refuse(first)
            if self._parts.guard.requires_keys and not await self._is_harmless():
                return self._refuse(first)
        self.needs_body = self._is_scanned
        handler = PassingOn(self._parts.plane, self._look, lambda: self.body.size_bytes)
        errors = OPENAI_ERRORS if operation is None else operation.errors
        last = await self._serve(passed_on(self._path), errors, ENDPOINT, handler, is_routed=False)
        if not self.outcome.done():
            self._refuse(first if first is not None and last.status == 403 else last)

    def _refuse(self, request: GatewayRequest) -> None:
        self._decide(Refused(request.status or 500, request.response_headers, b"".join(request.response)))

    def _decide(self, outcome: Picked | Refused) -> None:
        if not self.outcome.cancelled():  # by a gateway that left in this turn of the event loop: the request ends in the next
            self.outcome.set_result(outcome)

    async def _serve(
        self, declared: Declaration, errors: ErrorForm, endpoint: str, handle: Handler, *, is_routed: bool
    ) -> GatewayRequest:
        parts = self._parts
        request = self._request = GatewayRequest(self._method, self._path, self._headers, self._peer, self.body)
        self._carried = CarriedRequest(self._subset, partial(self._placed, request, is_routed))
        exchange = Exchange(request, parts.settings)
        exchange.progress.carried = self._carried
        exchange.route(declared, errors, endpoint, self._parameters, partial(parts.refused, endpoint))
        try:
            account = self._account(exchange, declared)
        except DynamoError as error:
            headers = ((b"www-authenticate", b"Bearer"),) if isinstance(error, Unauthenticated) else ()
            await exchange.refuse(error, http_status(error, parts.settings.overload), errors, headers)
            return request
        self._caller = account
        if is_routed:
            request.check = self._check_fields
        exchange.admit(account)
        try:
            occupied = exchange.occupy()
        except Overloaded as error:
            await exchange.fail(error)
            return request
        try:
            await exchange.run(handle)
        finally:
            occupied.leave()
        self._is_harmful = exchange.failure is not None and issubclass(exchange.failure, HarmfulRequest)
        return request

    def _account(self, exchange: Exchange, declared: Declaration) -> Account:
        """Return the account of the caller. Raises DynamoError for one that may not make the request now."""
        guard = self._parts.guard
        account: Account = ANONYMOUS
        if guard.guards(declared.surface):
            guard.check_unique(exchange.header_names)
            account = guard.enter(declared, exchange.headers)
            account.check_limits()
        # Names that a client invents must not buy a key more turns than one, or more than its share of buffers.
        return FairAccount(account, self._fairness_id) if self._fairness_id and not account.name else account

    def _placed(
        self,
        tried: GatewayRequest,
        is_routed: bool,
        request: RouteRequest,
        decision: RoutingDecision,
        candidates: Sequence[Instance],
    ) -> None:
        tried.is_wanted = False
        http = decision.instance.card.http
        assert http is not None, "only instances with an endpoint are candidates"
        headers = {**http.headers, PLACEMENT: "routed" if is_routed else "least-loaded"}
        endpoints = self._with_others(http.address, decision, candidates)
        self._decide(Picked(endpoints, headers, is_routed, request, decision))

    def _with_others(self, address: str, decision: RoutingDecision, candidates: Sequence[Instance]) -> str:
        """Return the chosen endpoint and, for gateways that retry, the next best ones."""
        wanted = self._parts.options.endpoints
        if wanted == 1:
            return address
        others = {f"{each.id:x}": each.card.http for each in candidates}
        ordered = [others[name] for each in decision.candidates if (name := str(each["instance"])) in others]
        found = [http.address for http in (*ordered, *others.values()) if http is not None]
        return ",".join(list(dict.fromkeys([address, *found]))[:wanted])

    # The body

    async def changed_body(self, picked: Picked) -> bytes | None:
        """Return the body as the picked endpoint has to get it; None: as it came."""
        if not self.reads_body or "model" in self._parameters:
            return None
        try:
            body, encoding = await self._plain_body()
        except DynamoError:
            return None
        card = picked.decision.instance.card
        assert card.http is not None
        if len(body) > _LONG_BYTES:
            await asyncio.sleep(0)
        model, salt = picked.request.adapter or card.http.model, picked.request.cache_salt
        if not picked.is_routed:
            model = model if model_in(body) in (card.name, *card.aliases) else ""
            if card.llm is not None and card.llm.takes_cache_salt:  # the data plane has not seen the one that the client sent
                salt = self._caller.isolate(cache_salt_in(body))
        changed = changed_body(body, model=model, cache_salt=salt)
        if changed is not None and encoding:
            self.removed = ("content-encoding",)
        return changed

    async def _look(self, exchange: Exchange) -> str:
        """Hold what has come of the body, all of it if it is scanned. Return the model that it seems to name, or an empty string.

        Raises InvalidRequest for a body that says more than its key permits, or in which that cannot be seen, and PayloadTooLarge
        for one of too many fields.
        """
        if self._is_scanned:
            await exchange.any_body()
            self.needs_body = False
            managed = exchange.declared is MANAGED
            if self._parts.guard.requires_keys and not managed and self.body.size_bytes and not await self._is_harmless():
                raise InvalidRequest("the body must be a JSON object, without fields that are not for an API key to say")
        else:
            exchange.hold(self.body.size_bytes)
        if "model" in self._parameters or not self.reads_body:
            return self._parameters.get("model", "")
        try:
            body, _ = await self._plain_body()
        except DynamoError:
            return ""
        if len(body) > _LONG_BYTES:
            await asyncio.sleep(0)
        check_fields(body)
        return model_in(body)

    async def _check_fields(self) -> None:
        """Raise InvalidRequest where an engine would read more from the body than the operation, and than its key permits.

        Raises PayloadTooLarge for a body of too many fields.
        """
        body, _ = await self._plain_body()
        if len(body) > _LONG_BYTES:
            await asyncio.sleep(0)
        check_fields(body)
        values, offload, is_long = values_in(body) or {}, self._parts.settings.offload, len(body) > _LONG_BYTES
        if "tools" in values:
            await offload.run_if(is_long, check_tools, values)
        if not PLAIN_GUIDES.keys().isdisjoint(values):
            await offload.run_if(is_long, check_plain_guides, values)
        if not self._parts.guard.requires_keys:
            return
        assert self._operation is not None
        known = {*getattr(self._operation.request, "__struct_fields__", ()), *PLAIN_GUIDES}
        if name := self._beyond_rights(values) or min(other_guides(values, known), default=""):
            raise InvalidRequest(f"'{name}' is not for the API key '{self._caller.name}' to say")

    def _beyond_rights(self, values: Values) -> str:
        caller = self._caller
        return beyond_rights(values, adapters=caller.models != ALL_MODELS, priorities=caller.max_priority < MAX_PRIORITY)

    async def _is_harmless(self) -> bool:
        try:
            body, _ = await self._plain_body()
        except DynamoError:
            return False
        values = values_in(body)
        # It is charged as one request, so it must be one.
        if values is None or not is_harmless(values, with_tools=not self._is_scanned):
            return False
        return asks_for_one(values) and not self._beyond_rights(values)

    async def _plain_body(self) -> tuple[bytes, str]:
        """Return the body without its encoding, and that. Raises DynamoError."""
        body, encoding = self.body.joined(), encoding_of(self._encoding)
        if not encoding:
            return body, ""
        settings = self._parts.settings
        limit, is_long = settings.body_limits[Reads.JSON], len(body) > BRIEF_BYTES
        return await settings.offload.run_if(is_long, decompress, body, encoding, limit), encoding

    async def _rewrite_model(self) -> GatewayRequest | None:
        """Replace the model in the body by the one that a header names. Return the refusal of a body that is too long."""
        settings, number = self._parts.settings, 0
        limit, encoding = settings.body_limits[Reads.JSON], ""
        declared = passed_on(self._path) if self._operation is None else self._operation.declared
        request = GatewayRequest(self._method, self._path, self._headers, self._peer, self.body)
        try:
            account = self._account(Exchange(request, settings), declared)
        except DynamoError:
            return None  # nothing is read for a caller without rights, who is refused as without the header
        try:
            with settings.capacity.holding() as occupied:
                with occupied.arriving(account.name) as arrive:
                    while (part := await self.body.part(number)) is not None:
                        arrive(len(part))
                        number += 1
                        if occupied.held_bytes > limit:
                            raise PayloadTooLarge(f"the body is larger than {limit} bytes")
                body, encoding = await self._plain_body()
                check_fields(body)
                self.body.replace(changed_body(body, model=self._rewrite) or body)
        except DynamoError as error:
            return await self._too_large(error)
        self._headers = tuple(header for header in self._headers if header[0] not in (b"content-encoding", b"content-length"))
        self._encoding = ""
        self.removed = ("content-encoding",) if encoding else ()
        return None

    async def _too_large(self, error: DynamoError) -> GatewayRequest:
        request = GatewayRequest(self._method, self._path, self._headers, self._peer, self.body)
        errors = OPENAI_ERRORS if self._operation is None else self._operation.errors
        settings = self._parts.settings
        await Exchange(request, settings).refuse(error, http_status(error, settings.overload), errors)
        return request


def _failure(status: int) -> DynamoError:
    """Return what a response means for the instance, as a worker reads it that has the same response of its server."""
    kind = _FAILURES.get(status, EngineError if status >= 500 else InvalidRequest)
    return kind(f"the endpoint responded with status {status}")
