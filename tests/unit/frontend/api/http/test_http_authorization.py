"""Who reaches which operation, however its path is written: generated from the operations themselves.

Each operation's handler is replaced by one that notes that it ran. However a request's path is written, a handler may run only
for a caller that may use the surface of that very operation.
"""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import unquote

import pytest

from dynamo.frontend.api.declaration import shown
from dynamo.frontend.api.guard import Accounts, Guard, watch_keys
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.guard import HttpGuard
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.batches.operations import BatchOperations
from dynamo.frontend.api.operations import protocol_operations
from dynamo.frontend.config import FrontendConfig, HttpOptions, TextOptions
from dynamo.frontend.security.keys import entry_for, make_key
from dynamo.frontend.security.surfaces import Restriction, Scope, Surface
from dynamo.frontend.wiring.http import http_operations
from tests.support.every_operation import ALLOWED
from tests.support.served import Asking

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get", "X")
VARIANTS = 220
"""Ways to write the path of each operation that are tried."""
CALLERS_OF_EACH = 3
"""Callers that try each way to write a path: who may use what does not depend on it."""


class Ran:
    """The operations whose handlers ran."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def noting(self, operation: Operation) -> Operation:
        noted: list[Operation] = []

        async def handle(exchange: Exchange) -> None:
            self.operations.append(noted[0])
            exchange.progress.started = True  # as the data plane says of requests
            await exchange.respond(b"ran")

        noted.append(replace(operation, handle=handle))
        return noted[0]


def all_operations() -> list[Operation]:
    anything: Any = MagicMock()
    protocols = protocol_operations(anything, Readiness(), TextOptions())
    batches = BatchOperations(anything, anything, anything).operations()
    return http_operations(MagicMock(config=FrontendConfig()), anything, anything, [*protocols, *batches])


OPERATIONS = all_operations()


class Caller:
    def __init__(self, name: str, surfaces: set[Surface], *headers: tuple[str, str]) -> None:
        self.name = name
        self.surfaces = surfaces | {Surface.HEALTH}
        self.headers = [(name.encode(), value.encode("latin-1")) for name, value in headers]


def callers_of(file: Path) -> list[Caller]:
    """Kinds of callers, the keys of whom are in `file`."""
    keys = {scope: make_key() for scope in Scope}
    limited, expired = make_key(), make_key()
    entries = [entry_for(key, scope.value, scopes=[scope]) for scope, key in keys.items()]
    entries.append(entry_for(limited, "limited", models=["other"]))
    entries.append(entry_for(expired, "expired", scopes=[Scope.ADMIN], expires="2020-01-01"))
    file.write_text("".join(entries))
    admin, infer = keys[Scope.ADMIN], keys[Scope.INFER]
    login = base64.b64encode(f"operator:{infer}".encode()).decode()
    nothing, infers = set[Surface](), ALLOWED[Scope.INFER]
    return [
        *(Caller(f"a key for {scope}", ALLOWED[scope], ("x-api-key", key)) for scope, key in keys.items()),
        Caller("a key for some models", infers, ("authorization", f"Bearer {limited}")),
        Caller("no key", nothing),
        Caller("an empty key", nothing, ("authorization", "Bearer "), ("x-api-key", "")),
        Caller("a wrong key", nothing, ("x-api-key", admin[:-1] + "_")),
        Caller("an expired key", nothing, ("x-api-key", expired)),
        Caller("a login with a key for inference", infers, ("authorization", f"Basic {login}")),
        Caller("a login that a browser adds", nothing, ("authorization", f"Basic {login}"), ("sec-fetch-site", "cross-site")),
        Caller("a good key beside a proxy's login", infers, ("x-api-key", infer), ("authorization", "Basic cHJveHk6c2VjcmV0")),
        Caller("a wrong bearer beside a good key", nothing, ("authorization", "Bearer wrong"), ("x-api-key", admin)),
        Caller("two credentials", nothing, ("authorization", f"Bearer {admin}"), ("authorization", "Bearer wrong")),
    ]


def canonical(operation: Operation) -> str:
    parameters = {
        "{model:path}": "m",
        "{version}": "1",
        "{repository}": "r",
        "{region:path}": "g",
        "{name:path}": "n",
        "{id}": "i",
        "{item}": "t",
    }
    path = operation.path
    for name, value in parameters.items():
        path = path.replace(name, value)
    assert "{" not in path
    return path


SUFFIXES = (
    "%0a", "%0A", "%0d", "%0d%0a", "%00", "%09", "%0b", "%0c", "%1f", "%20", "%7f", "%85", "%c2%85", "%a0", "%c2%a0",
    "%e2%80%a8", "%e2%80%8b", "%ef%bb%bf", "%ff", "%c0%80", "/", "//", "/.", "/..", "/%2e", "/%2e%2e", ".", "..", ";",
    ";a=b", "%3b", "%3f", "?", "?x=1", "%23", "%2f", "%5c", "\\", "%25", "%250a", "%2500", "+", "*", "~", "%u000a", "\n",
    "\r", "\x00", "\t", " ", "\x7f", "é", ".json", ".html", "/index.html", "/live", "/../live", "/%2e%2e/live", "%2flive",
    "/..;/live", "/ready",
)  # fmt: skip
PREFIXES = (
    "/", "//", "/.", "/./", "/../", "/%2e/", "/%2e%2e/", "/live/../", "/live/..", "/v2/health/../..", "/v1/models/../..",
    "/console/..", "/%00", "/%0a", "/;", "/%2f", "%2f", "\\", "http://localhost", "/v1/models/m/..",
    "/v2/models/m/ready/../../../..",
)  # fmt: skip


def encoded(path: str, position: int, rng: random.Random) -> str:
    """`path` with one character written as a percent-encoding, perhaps twice."""
    code = f"%{ord(path[position]):02{rng.choice('xX')}}"
    return path[:position] + (code.replace("%", "%25") if rng.random() < 0.2 else code) + path[position + 1 :]


def variants(path: str, rng: random.Random) -> Iterator[str]:
    """Ways to write a path, right and wrong, without an end."""
    yield path
    for suffix in SUFFIXES:
        yield path + suffix
    for prefix in PREFIXES:
        yield prefix + path
        yield prefix + path[1:]
    for position in range(1, len(path)):
        yield encoded(path, position, rng)
        yield path[:position] + path[position].swapcase() + path[position + 1 :]
        yield path[:position] + "/" + path[position:]
        yield path[:position] + rng.choice(SUFFIXES) + path[position:]
        yield path[:position]
    yield path.upper()
    yield path.title()
    while True:
        written = path
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(1, len(written)) if len(written) > 1 else 0
            match rng.randrange(6):
                case 0:
                    written = encoded(written, position, rng)
                case 1:
                    written = written[:position] + rng.choice(SUFFIXES) + written[position:]
                case 2:
                    written = written + rng.choice(SUFFIXES)
                case 3:
                    written = rng.choice(PREFIXES) + written
                case 4:
                    written = written[:position] + written[position].swapcase() + written[position + 1 :]
                case _:
                    other = canonical(rng.choice(OPERATIONS))
                    written = rng.choice((f"{written}{other}", f"{other}{written}", f"{written}/..{other}"))
        yield written


class Edge:
    def __init__(self, guard: Guard, options: HttpOptions | None = None) -> None:
        self.ran = Ran()
        self.refusals: list[str] = []
        operations = [self.ran.noting(operation) for operation in OPERATIONS]
        http_guard = HttpGuard(guard, options)
        self._app = HttpApp(operations, HttpSettings(), http_guard, lambda endpoint, error: self.refusals.append(endpoint))

    async def request(self, method: str, written: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, list[Operation]]:
        """Return the status and the operations that ran."""
        self.ran.operations.clear()
        raw = written.partition("?")[0].encode("latin-1", "replace")
        asking = Asking(unquote(raw.decode("latin-1")), method=method, headers=headers)
        asking.raw_path = raw
        await self._app(asking)
        return asking.status, list(self.ran.operations)


async def test_a_handler_runs_only_for_callers_of_its_surface_however_its_path_is_written(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    callers = callers_of(file)
    edge = Edge(Guard(Accounts(watch_keys(file))))
    rng = random.Random(4)
    for operation in OPERATIONS:
        for path in itertools.islice(variants(canonical(operation), rng), VARIANTS):
            for caller in rng.sample(callers, CALLERS_OF_EACH):
                method = operation.method if rng.random() < 0.5 else rng.choice(METHODS)
                status, ran = await edge.request(method, path, caller.headers)
                if ran:
                    assert ran[0].declared.surface in caller.surfaces, (caller.name, method, path, ran[0].path)
                else:
                    assert status in (400, 401, 403, 404, 405), (caller.name, method, path, status)
                    assert status in (400, 401, 403, 405) or caller.surfaces > {Surface.HEALTH}, (caller.name, path)


async def test_what_is_shown_counts_in_each_of_its_forms(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    callers = callers_of(file)
    edge = Edge(Guard(Accounts(watch_keys(file))))
    operation = next(each for each in OPERATIONS if each.path == "/v1/completions")
    for caller in callers:
        status, ran = await edge.request(operation.method, operation.path, caller.headers)
        may = operation.declared.surface in caller.surfaces
        assert (len(ran), status == 200) == (may, may), caller.name


@pytest.mark.parametrize("ending", ["%0a", "%0d%0a", "%00", "%09", "%7f", "%c2%85", "%e2%80%a8", "\n"])
async def test_control_characters_are_refused_before_the_key_is_looked_at(tmp_path: Path, ending: str) -> None:
    file = tmp_path / "keys.yaml"
    callers = callers_of(file)
    edge = Edge(Guard(Accounts(watch_keys(file))))
    for operation, caller in itertools.product(OPERATIONS, callers):
        for path in (canonical(operation) + ending, canonical(operation) + "/x" + ending):
            assert await edge.request(operation.method, path, caller.headers) == (400, []), (caller.name, path)


async def test_a_restriction_covers_every_way_to_write_a_path() -> None:
    restricted = frozenset({Surface.METRICS, Surface.THRESHOLDS, Surface.CONSOLE, Surface.DOCS, Surface.MODEL_REPOSITORY})
    edge = Edge(Guard(None, restrictions=[Restriction(restricted, "x-admin", "secret")]))
    rng = random.Random(5)
    for operation in OPERATIONS:
        for path in itertools.islice(variants(canonical(operation), rng), 300):
            _, ran = await edge.request(operation.method, path, [])
            assert not ran or ran[0].declared.surface not in restricted, path


async def test_refused_requests_are_counted_by_the_endpoint_of_the_operation(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    callers_of(file)
    edge = Edge(Guard(Accounts(watch_keys(file))))
    for operation in OPERATIONS:
        edge.refusals.clear()
        await edge.request(operation.method, canonical(operation), [])
        assert edge.refusals == ([operation.endpoint] if operation.endpoint else []), operation.path


def test_one_path_cannot_have_two_surfaces_or_the_same_method_twice() -> None:
    page = OPERATIONS[0]
    for wrong in (replace(page, method="POST", declared=shown(Surface.METRICS)), page):
        with pytest.raises(ValueError, match=page.path):
            HttpApp([page, wrong])
