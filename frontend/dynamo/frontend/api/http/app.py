"""The application of the HTTP port: finds a request's operation, lets the guard check the caller, runs its handler.

1. A path that contains control characters is refused with 400, before anything else looks at it.
2. What the operation declares, and nothing else about the path, says what the caller must be allowed to use, whether a browser
   may use it for a page of another site, and what one request may cost.
3. A path without any operation needs what the list of models needs, so that only callers with a key learn what is not there; then
   it is 404. A path that lacks the method is 405, after the same check as its other methods.
4. Past the capacity of the process, requests are refused with 503. Health is always served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from dynamo.common.errors import Forbidden, InvalidRequest, Overloaded
from dynamo.common.http.served import ServedRequest
from dynamo.frontend.api.declaration import Charge, Declaration, OtherSites, shown
from dynamo.frontend.api.http.errors import OPENAI_ERRORS, ErrorForm, PathNotFound
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.guard import HttpGuard
from dynamo.frontend.api.http.operation import Operation, within_declared
from dynamo.frontend.api.http.paths import PathTable, Template
from dynamo.frontend.security.surfaces import Surface

Refused = Callable[[str, BaseException], None]
"""Called with an operation's `endpoint` and the failure of a request that did not reach the data plane."""

_UNKNOWN_PATHS = shown(Surface.METADATA)


class HttpApp:
    """Serves operations."""

    def __init__(
        self,
        operations: Sequence[Operation],
        settings: HttpSettings | None = None,
        guard: HttpGuard | None = None,
        refused: Refused | None = None,
    ) -> None:
        """Without a `guard` no key is needed. Raises as `attach` does."""
        self._settings = settings or HttpSettings()
        self._guard = guard or HttpGuard(options=self._settings.options)
        self._refused = refused
        self._cors = self._guard.cors
        self.attach(operations)

    def attach(self, operations: Sequence[Operation]) -> None:
        """Serve `operations` from now on, and no others. Raises ValueError for operations that contradict one another."""
        self._table: PathTable[_Resource] = PathTable()
        self._errors: dict[tuple[str, ...], ErrorForm] = {}
        beginnings: list[tuple[tuple[str, ...], ErrorForm]] = []
        for resource in _resources(operations):
            self._table.add(resource.path, resource)
            beginnings.append((Template(resource.path).fixed_words, resource.errors))
        for words, errors in sorted(beginnings, key=lambda item: len(item[0])):  # `/v2` is KServe's, not that of `/v2/rerank`
            for count in range(1, len(words) + 1):
                self._errors.setdefault(words[:count], errors)

    async def __call__(self, request: ServedRequest) -> None:
        exchange = Exchange(request, self._settings)
        if "origin" in exchange.headers:
            if preflight := self._cors.preflight(exchange.method, exchange.headers):
                return await exchange.respond(b"", 200, preflight)
            if self._cors.is_preflight(exchange.method, exchange.headers):
                error = Forbidden("pages of this origin may not use the API: see --allowed-origins")
                return await exchange.refuse(error, 403, self._errors_near(exchange.path))
            exchange.add_headers(self._cors.headers(exchange.headers))
        try:
            match = self._table.find(exchange.raw_path)
        except InvalidRequest as error:
            return await exchange.refuse(error, 400, self._errors_near(exchange.path))
        if match is None:
            return await self._not_found(exchange)
        resource, parameters = match
        operation = resource.operations.get(exchange.method)
        if operation is None:
            exchange.route(resource.declared, resource.errors, parameters=parameters)
        else:
            on_refused = partial(self._refused, operation.endpoint) if operation.endpoint and self._refused is not None else None
            exchange.route(operation.declared, operation.errors, operation.endpoint, parameters, on_refused)
        if not await self._guard.admits(exchange):
            return
        if operation is None:
            not_allowed = InvalidRequest(f"method {exchange.method} is not allowed for '{exchange.path}'")
            return await exchange.refuse(not_allowed, 405, resource.errors, ((b"allow", resource.allow),))
        if operation.declared.surface is Surface.HEALTH:
            return await exchange.run(operation.handle)
        try:
            occupied = exchange.occupy()
        except Overloaded as error:
            return await exchange.fail(error)
        try:
            if operation.declared.is_action:
                await self._guard.run_recorded(exchange, operation.handle)
            else:
                await exchange.run(operation.handle)
        finally:
            occupied.leave()

    async def _not_found(self, exchange: Exchange) -> None:
        exchange.route(_UNKNOWN_PATHS, self._errors_near(exchange.path))
        if await self._guard.admits(exchange):
            await exchange.refuse(PathNotFound(exchange.path), 404, exchange.errors)

    def _errors_near(self, path: str) -> ErrorForm:
        """Return the form of errors of the operations whose paths begin as this one, which is not theirs, does."""
        words = tuple(path.split("/", 4)[1:4])
        for count in range(len(words), 0, -1):
            if (form := self._errors.get(words[:count])) is not None:
                return form
        return OPENAI_ERRORS


@dataclass(slots=True)
class _Resource:
    """A path and what can be done with it."""

    path: str
    declared: Declaration
    """What requests with another method than those of the operations have to be allowed to."""
    errors: ErrorForm
    operations: dict[str, Operation] = field(default_factory=dict)
    allow: bytes = b""
    """The value of the header `Allow`."""


def _resources(operations: Sequence[Operation]) -> list[_Resource]:
    resources: dict[str, _Resource] = {}
    for operation in operations:
        path = operation.path
        declared = replace(operation.declared, other_sites=OtherSites.REFUSED, charge=Charge.CALL)
        resource = resources.setdefault(path, _Resource(path, declared, operation.errors))
        if (declared.surface, operation.errors) != (resource.declared.surface, resource.errors):
            raise ValueError(f"the operations of {path} have different surfaces or forms of errors")
        served = replace(operation, handle=within_declared(operation))
        for method in ("GET", "HEAD") if operation.method == "GET" else (operation.method,):
            if method in resource.operations:
                raise ValueError(f"{method} {path} is declared twice")
            resource.operations[method] = served
        resource.allow = ", ".join(resource.operations).encode()
    return list(resources.values())
