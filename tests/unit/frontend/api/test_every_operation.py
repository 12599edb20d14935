"""What every operation of every protocol declares, proven for each of them: who may use it, and what one request may cost."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import grpc
import grpc.aio
import httpx2
import pytest
import pytest_asyncio

from dynamo.common.errors import EngineError
from dynamo.frontend.api.calls import TIMEOUT
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.declaration import LITTLE_BYTES, NAME_BYTES, TEXT, Charge, shown
from dynamo.frontend.api.guard import Accounts, Guard, watch_keys
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.errors import OPENAI_ERRORS
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.api.rpc.bounded import bounded
from dynamo.frontend.api.rpc.operation import GrpcOperation
from dynamo.frontend.config import HttpOptions
from dynamo.frontend.security.accounts import KeyAccount
from dynamo.frontend.security.keys import Limits, entry_for, make_key
from dynamo.frontend.security.ledger import UsageCounts
from dynamo.frontend.security.surfaces import Scope, Surface
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import open_edge
from tests.support.every_operation import (
    ALLOWED,
    CONFINED,
    GRPC,
    HTTP,
    MEDIA,
    SHAPES,
    TENSORS,
    Asked,
    BackgroundEntry,
    BatchEntry,
    Client,
    Elsewhere,
    Entry,
    Frontend,
    GrpcContext,
    GrpcEntry,
    HttpEntry,
    Leaving,
    Outcome,
    Sender,
    fail,
    hold,
    largest_response,
    open_frontend,
)
from tests.support.fakes import tensor_card
from tests.support.held import slowness
from tests.support.waiting import until, until_free

TO_MODELS = ("infer", "generate", "generate_stream")
NAMES = [*HTTP, *GRPC, BatchEntry.name, BackgroundEntry.name]
REQUESTS = [
    *(
        f"POST /v1/{word}"
        for word in ("chat/completions", "completions", "responses", "messages", "embeddings", "rerank", "score")
    ),
    "POST /inference/v1/generate",
    "POST /v1/chat/completions/batch",
    *(f"POST /v1/audio/{word}" for word in ("transcriptions", "translations", "speech")),
    *(f"POST /v1/images/{word}" for word in ("generations", "edits", "variations")),
    "POST /v1/videos",
    "POST /v1/videos/sync",
    "GET /v1/realtime",
    *(f"POST {path}" for path in ("/v1/classify", "/v2/rerank", "/rerank", "/score", "/classify", "/pooling", "/invocations")),
    *(f"POST /v2/models/{{model:path}}{version}/{word}" for version in ("", "/versions/{version}") for word in TO_MODELS),
    *(f"/inference.GRPCInferenceService/{method}" for method in ("ModelInfer", "ModelStreamInfer")),
    BatchEntry.name,
    BackgroundEntry.name,
]
"""Operations that are requests to models, written down once more."""
WAITING = [
    "POST /v1/unload_lora_adapter",
    "POST /v1/conversations",
    "GET /v2/models/stats",
    *(f"GET /v2/models/{{model:path}}{version}/stats" for version in ("", "/versions/{version}")),
    *(f"{method} /v1/files" for method in ("POST", "GET")),
    *(f"{method} /v1/files/{{id}}" for method in ("GET", "DELETE")),
    "GET /v1/files/{id}/content",
    *(f"{method} /v1/batches" for method in ("POST", "GET")),
    "GET /v1/batches/{id}",
    "POST /v1/batches/{id}/cancel",
    *(
        f"POST /v2/repository/{named}models/{{model:path}}/{what}"
        for named in ("", "{repository}/")
        for what in ("load", "unload")
    ),
    *(f"/inference.GRPCInferenceService/{what}" for what in ("ModelStatistics", "RepositoryModelLoad", "RepositoryModelUnload")),
]
"""Others that wait for stores and workers, if they are requested as they are here."""
EVERY = pytest.mark.parametrize("name", NAMES)
EVERY_OTHER = pytest.mark.parametrize("name", [name for name in NAMES if name not in REQUESTS])
EVERY_REQUEST = pytest.mark.parametrize("name", REQUESTS)
PLACES = 4
"""Requests at once that each key has."""


def shapes_of(name: str) -> tuple[str, ...]:
    """Return the shapes of the largest requests for an operation; none if it reads no body."""
    if name in GRPC:
        return () if name.endswith(("/Check", "/Watch", "Live", "Ready")) else ("text",)
    body = HTTP[name].of("").body if name in HTTP else {}
    if isinstance(body, bytes):
        return ("text",)
    return () if body is None else SHAPES if name.endswith("/infer") else SHAPES[:-1]


def largest_of(names: Sequence[str]) -> pytest.MarkDecorator:
    """Parametrize over operations with the shape of body that takes longest to read; the other shapes are slow tests."""
    first = {name: ("objects",) if "objects" in shapes else shapes for name in names if (shapes := shapes_of(name))}
    others = {name: shapes for name in first if (shapes := tuple(shape for shape in shapes_of(name) if shape not in first[name]))}
    cases = [pytest.param(*case, id=case[0]) for case in first.items()]
    cases += [pytest.param(*case, id=f"{case[0]}, other shapes", marks=pytest.mark.slow) for case in others.items()]
    return pytest.mark.parametrize(("name", "shapes"), cases)


@dataclass(frozen=True, slots=True)
class Keys:
    """A file of keys, each with all models unless it is `confined`."""

    file: Path
    admin_file: Path
    """The key with the scope of administrators alone: reading all of them takes as long as opening a frontend."""
    headers: dict[str, dict[str, str]]
    """Headers that show the key with a name."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Keys with the names of scopes, and one that may use everything of models with certain names."""
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    made = {name: make_key() for name in (*Scope, "confined")}
    limits = Limits(requests_per_s=1000, tokens_per_minute=1_000_000, concurrent_requests=PLACES)
    entries = {scope: entry_for(made[scope], scope.value, scopes=[scope], limits=limits) for scope in Scope}
    confined = entry_for(made["confined"], "confined", scopes=[Scope.ADMIN], models=[CONFINED])
    file.write_text("".join([*entries.values(), confined]))
    admin_file = file.with_name("admin.yaml")
    admin_file.write_text(entries[Scope.ADMIN])
    return Keys(file, admin_file, {str(name): {"x-api-key": key} for name, key in made.items()})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(keys: Keys) -> AsyncIterator[Frontend]:
    """One frontend for all tests of who may use what: opening one takes longer than its requests."""
    async with open_frontend(keys.file) as front:
        yield front


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone() -> AsyncIterator[Frontend]:
    """One frontend to which neither stores nor workers respond."""
    async with open_frontend(is_alone=True) as front:
        yield front


SHARED = pytest.mark.asyncio(loop_scope="module")


def entry_of(front: Frontend, name: str) -> Entry:
    return next(entry for entry in front.entries if entry.name == name)


def is_open(entry: Entry) -> bool:
    return entry.declared.surface is Surface.HEALTH


async def test_every_operation_has_a_request_here() -> None:
    async with open_frontend() as front:
        shapes = {entry.name: tuple(shape for shape in SHAPES if entry.largest(front, shape, SMALL)) for entry in front.entries}
        assert len(front.entries) == len(NAMES)
    assert shapes == {name: shapes_of(name) for name in NAMES}


# Who may use it


@EVERY
@SHARED
async def test_without_a_key_nothing_but_health_is_served(name: str, shared: Frontend) -> None:
    entry, sent = entry_of(shared, name), len(shared.client.streams)
    statuses = [(await entry.send(shared, headers=shown)).status for shown in ({}, {"x-api-key": "wrong" * 10})]
    assert is_open(entry) or statuses == [401, 401]
    assert is_open(entry) or len(shared.client.streams) == sent


@EVERY
@SHARED
async def test_a_key_is_served_if_one_of_its_scopes_is_that_of_the_operation_and_refused_otherwise(
    name: str, shared: Frontend, keys: Keys
) -> None:
    entry = entry_of(shared, name)
    for scope in Scope:
        is_allowed, sent = is_open(entry) or entry.declared.surface in ALLOWED[scope], len(shared.client.streams)
        outcome = await entry.send(shared, headers=keys.headers[scope], owner=scope)
        assert outcome.status in (SERVED if is_allowed else [403]), scope
        assert is_allowed or len(shared.client.streams) == sent, scope


SERVED = (200, 308, 400, 404, 501, 503)
"""Where there is nothing of a name or id, that is the response."""


@EVERY
@SHARED
async def test_a_model_that_a_key_may_not_use_is_forbidden_by_whichever_name_and_whether_or_not_it_exists(
    name: str, shared: Frontend, keys: Keys
) -> None:
    entry, sent = entry_of(shared, name), len(shared.client.streams)
    if entry.kind is None or is_open(entry):
        return
    names = [entry.kind.hidden, "nowhere", *([entry.kind.alias] if entry.knows_aliases else ())]
    for model in names:
        assert (await entry.send(shared, model, keys.headers["confined"], owner="confined")).status == 403, model
    assert len(shared.client.streams) == sent
    assert (await entry.send(shared, headers=keys.headers["confined"], owner="confined")).status in SERVED


@EVERY
@SHARED
async def test_a_name_of_operators_is_known_wherever_a_model_is_asked_for(name: str, shared: Frontend, keys: Keys) -> None:
    entry = entry_of(shared, name)
    if entry.kind is not None and entry.knows_aliases:
        outcome = await entry.send(shared, entry.kind.alias, keys.headers[Scope.ADMIN], owner=Scope.ADMIN)
        assert outcome.status == 200, outcome.body


# What it is charged


class Spent:
    """What a key uses up."""

    def __init__(self) -> None:
        self.records: list[UsageCounts] = []

    def record(self, key: str, model: str, usage: UsageCounts) -> None:
        self.records.append(usage)

    def of(self, account: KeyAccount) -> tuple[float, float, int]:
        """Return the calls, requests and requests at once that count."""
        use = account.use()
        assert use.calls is not None and use.requests is not None
        return use.calls.taken, use.requests.taken, use.in_use

    @property
    def prompt_tokens(self) -> int:
        return sum(usage.prompt_tokens for usage in self.records)

    def settled(self, account: KeyAccount, *, errors: int = 0) -> bool:
        """Return whether one request is in the ledger, and its tokens, no more and no less, were taken from the key's."""
        total, tokens = UsageCounts(), account.use().tokens
        for usage in self.records:
            total.add(usage)
        assert tokens is not None
        charged = total.prompt_tokens + total.completion_tokens == tokens.taken
        return charged and (total.requests, total.errors, account.sequences) == (1, errors, 0)


@asynccontextmanager
async def charged(keys: Keys, name: str) -> AsyncIterator[tuple[Frontend, Entry, KeyAccount, Spent]]:
    """A frontend with one operation, the account of a key that may use it, and what is charged to that."""
    spent = Spent()
    async with open_frontend(keys.admin_file, recorded=spent.record) as front:
        yield front, entry_of(front, name), front.account(Scope.ADMIN), spent


@EVERY
async def test_an_operation_that_is_served_is_charged_as_it_declares(name: str, keys: Keys) -> None:
    async with charged(keys, name) as (front, entry, account, spent):
        await entry.send(front, headers=keys.headers[Scope.ADMIN], owner=Scope.ADMIN)
        charges = {Charge.NOTHING: (0, 0, 0), Charge.CALL: (1, 0, 0), Charge.WORK: (1, 0, 0), Charge.REQUESTS: (0, 1, 0)}
        assert spent.of(account) == charges[entry.declared.charge]
        assert spent.settled(account) == (entry.declared.charge is Charge.REQUESTS)
        assert (name in REQUESTS) == (entry.declared.charge is Charge.REQUESTS)
        await until_free(front.capacity)


@EVERY
@SHARED
async def test_an_operation_that_declares_another_charge_can_make_no_request_to_a_model(
    name: str, shared: Frontend, keys: Keys
) -> None:
    declared = entry_of(shared, name).declared
    account = Guard(Accounts(watch_keys(keys.admin_file))).enter(declared, keys.headers[Scope.ADMIN])
    if declared.charge is Charge.REQUESTS or declared.surface is Surface.HEALTH:  # which has no account
        account.admit("m", object()).close()
    else:
        with pytest.raises(EngineError, match="does not declare to be charged"):
            account.admit("m", object())


@pytest.mark.parametrize("form", ["short", "long", "stream", "last event"])
@pytest.mark.parametrize("is_admitted", [False, True])
async def test_an_operation_that_declares_requests_responds_with_none_unless_one_was_admitted(
    is_admitted: bool, form: str
) -> None:
    async def handle(exchange: Exchange) -> None:
        exchange.progress.started = is_admitted
        if form in ("short", "long"):
            return await exchange.respond(b"x" * (2 if form == "short" else 1 << 20))
        async with exchange.events() as stream:
            if form == "stream":
                await stream.write(b"data: x\n\n")
            await stream.end(b"data: y\n\n")

    app = HttpApp([Operation(path="/unpaid", declared=TEXT, errors=OPENAI_ERRORS, handle=handle)], HttpSettings())
    async with (
        serve_http(HttpOptions(port=0), app) as server,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client,
    ):
        response = await client.post("/unpaid", json={})
    assert response.status_code == (200 if is_admitted else 500)
    assert is_admitted or "responds without one" in response.text


@pytest.mark.parametrize("name", [name for name in REQUESTS if name in (*HTTP, *GRPC)])
@pytest.mark.parametrize("has_tokens", [False, True])
async def test_a_request_is_not_read_that_would_be_refused_whatever_it_is(has_tokens: bool, name: str, keys: Keys) -> None:
    async with charged(keys, name) as (front, entry, account, spent):
        account.take_tokens(0 if has_tokens else 1_000_000)
        before = account.use()
        headers = keys.headers[Scope.ADMIN]
        if isinstance(entry, GrpcEntry):
            outcome = await entry.send_message(front, b"\xff" * 100_000, headers)
        else:
            assert isinstance(entry, HttpEntry)
            asked = entry.request.of(entry.kind.open if entry.kind else "")
            outcome = await entry.send_asked(front, replace(asked, body=b"{" * 100_000), headers)
        assert outcome.status == (400 if has_tokens else 429), outcome
        assert (front.capacity.peak_bytes > 0) == has_tokens
        assert account.use().tokens == before.tokens and account.use().requests == before.requests and not spent.records
        await until_free(front.capacity)


@pytest.mark.parametrize("name", [name for name in NAMES if name != BatchEntry.name])
async def test_an_operation_counts_among_the_requests_at_once_as_it_declares(name: str, keys: Keys) -> None:
    async with charged(keys, name) as (front, entry, account, spent):
        with ExitStack() as places:
            for _ in range(PLACES):
                places.enter_context(account.occupy())
            outcome = await entry.send(front, headers=keys.headers[Scope.ADMIN], owner=Scope.ADMIN)
            assert (outcome.status == 429) == (entry.declared.charge in (Charge.WORK, Charge.REQUESTS))
            assert spent.of(account)[1] == 0 and not spent.records and not front.requests
        await until_free(front.capacity)


async def test_a_line_of_a_batch_waits_until_its_key_may_have_another_request_at_once(keys: Keys) -> None:
    async with charged(keys, BatchEntry.name) as (front, entry, account, spent):
        with ExitStack() as places:
            for _ in range(PLACES):
                places.enter_context(account.occupy())
            sending = asyncio.ensure_future(entry.send(front, owner=Scope.ADMIN))
            for _ in range(500):
                await asyncio.sleep(0)
            assert not sending.done() and not spent.records and not front.requests
        assert (await sending).status == 200
        assert len(spent.records) == 1
        await until_free(front.capacity)


@EVERY_REQUEST
@pytest.mark.parametrize("behaviour", ["fails", "moves"])
async def test_a_request_is_settled_once_when_its_engine_fails_or_it_moves_to_another(
    name: str, behaviour: str, keys: Keys
) -> None:
    async with charged(keys, name) as (front, entry, account, spent):
        front.engine.behaves = [fail] if behaviour == "fails" else [front.engine.die, front.engine.serve]
        outcome = await entry.send(front, headers=keys.headers[Scope.ADMIN], owner=Scope.ADMIN)
        assert (outcome.status == 200) == (behaviour == "moves")
        assert len(front.requests) == (1 if behaviour == "fails" else 2)
        await until(lambda: not account.sequences)
        assert spent.settled(account, errors=int(behaviour == "fails"))
        assert (spent.prompt_tokens > 0) == (entry.kind not in (TENSORS, MEDIA))
        await until_free(front.capacity)


# Who leaves


@EVERY_REQUEST
async def test_a_request_is_stopped_within_a_step_and_settled_once_when_its_caller_leaves(name: str, keys: Keys) -> None:
    async with charged(keys, name) as (front, entry, account, spent):
        front.engine.behaves = [hold]
        leaving = Leaving()
        sending = asyncio.create_task(entry.send(front, headers=keys.headers[Scope.ADMIN], owner=Scope.ADMIN, leaving=leaving))
        [stream] = await front.client.opened_streams(1)
        assert account.sequences == 1 and front.capacity.requests >= 1
        leaving.leave()
        if entry.declared.deadline_s is None:  # a response in the background is cancelled by a request of its own
            for _ in range(TURNS):
                await asyncio.sleep(0)
            assert stream.cancelled
        assert (await sending).status == 499
        await until(lambda: stream.cancelled)
        await until_free(front.capacity)
        if name == BatchEntry.name:  # it is carried out again elsewhere, and settled then
            assert not spent.records and not account.sequences
        else:
            assert spent.settled(account, errors=1)
            assert (spent.prompt_tokens > 0) == (entry.kind not in (TENSORS, MEDIA))


@EVERY_OTHER
@SHARED
async def test_whatever_else_waits_for_others_is_stopped_within_a_step_when_its_caller_leaves(name: str, alone: Frontend) -> None:
    entry, leaving = entry_of(alone, name), Leaving()
    sending = asyncio.create_task(entry.send(alone, leaving=leaving))
    for _ in range(200):
        await asyncio.sleep(0)
    assert sending.done() == (name not in WAITING)
    await stopped(sending, leaving)
    await until_free(alone.capacity)


@largest_of([name for name in NAMES if name not in REQUESTS])
async def test_work_on_a_long_request_is_stopped_within_a_step_when_its_caller_leaves(name: str, shapes: Sequence[str]) -> None:
    async with open_frontend() as front:
        for shape in shapes:
            for largest, turns in product(entry_of(front, name).largest(front, shape, HttpOptions()), (1, 10, 100, 1000)):
                leaving = Leaving()
                sending = asyncio.create_task(largest(leaving=leaving))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await stopped(sending, leaving)
                await until_free(front.capacity)  # a thread may hold its bytes a while longer, which would refuse the next one


async def stopped(sending: asyncio.Task[Outcome], leaving: Leaving) -> None:
    """Have the caller of a request leave, unless that has ended, and check that it ends."""
    if not sending.done():
        leaving.leave()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert sending.done() and (sending.result().status == 499 or leaving.was_late)


TURNS = 20
"""Turns of the event loop, in which nothing waits for time or for others."""


# What it holds

AT_ONCE = 4
MAX_TURN_S = 0.05
"""CPU time of one turn of the event loop, on the machine of `held.py`."""
TRIES = 3
JSON_BYTES, TENSOR_BYTES = 128 * 1024, 512 * 1024
SMALL = HttpOptions(
    max_json_bytes=JSON_BYTES, max_tensor_json_bytes=TENSOR_BYTES // 2, max_body_bytes=TENSOR_BYTES, max_json_values=23_438
)
"""Bounds with the proportions of the defaults."""
_SLACK_BYTES = 80 * 1024
"""What one request takes whatever it is."""
_CACHED_BYTES = 64 * 1024
"""What stays of the first request of a kind: caches that it fills."""


@largest_of(NAMES)
async def test_the_largest_requests_together_take_no_more_than_is_held_for_them(name: str, shapes: Sequence[str]) -> None:
    async with open_frontend(http=SMALL, records=Elsewhere()) as front:
        front.engine.behaves = [hold]
        entry = entry_of(front, name)
        excess = {shape: await excess_bytes(front, entry.largest(front, shape, SMALL, AT_ONCE)) for shape in shapes}
        assert {shape: size for shape, size in excess.items() if size > AT_ONCE * _SLACK_BYTES + _CACHED_BYTES} == {}


async def excess_bytes(front: Frontend, senders: Sequence[Sender]) -> int:
    """Return how much more requests take at once than is held for them."""
    await until_free(front.capacity)
    front.capacity.peak_bytes, sent = 0, len(front.requests)
    gc.collect()
    tracemalloc.start()
    try:
        requests = [asyncio.create_task(send()) for send in senders]

        def all_wait() -> bool:
            ended = sum(request.done() for request in requests)
            return ended == len(requests) or ended + len(front.requests) - sent >= AT_ONCE

        await until(all_wait)
        taken_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        for request in requests:
            request.cancel()
        await asyncio.wait(requests)
    return taken_bytes - front.capacity.peak_bytes


# How long it holds the event loop


@largest_of(NAMES)
async def test_the_most_expensive_request_holds_the_event_loop_for_short_turns(name: str, shapes: Sequence[str]) -> None:
    async with open_frontend() as front:
        front.engine.behaves = [hold]
        entry = entry_of(front, name)
        held = [(shape, await held_s(front, send)) for shape in shapes for send in entry.largest(front, shape, HttpOptions())]
        assert [(shape, seconds) for shape, seconds in held if seconds > MAX_TURN_S] == []


@pytest.mark.parametrize(
    "shape", ["fractions", *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:] if shape != "fractions")]
)
async def test_the_most_expensive_response_in_json_holds_the_event_loop_for_short_turns(shape: str) -> None:
    response = largest_response(shape)
    async with open_frontend() as front:
        front.engine.behaves = [lambda stream: stream.end(response)]
        entry = entry_of(front, "POST /v2/models/{model:path}/infer")
        assert (await entry.send(front)).status == 200
        assert await held_s(front, partial(entry.send, front), until_sent=False) <= MAX_TURN_S


async def held_s(front: Frontend, send: Sender, *, until_sent: bool = True) -> float:
    """Return for how long a request holds the event loop at most, in seconds of the machine for which bounds are chosen.

    The best of some tries: a collection of garbage may fall into one.
    """
    longest_s = float("inf")
    for _ in range(TRIES):
        longest_s = min(longest_s, await longest_turn_s(front, send, until_sent=until_sent))
        if longest_s <= MAX_TURN_S:
            return longest_s
    return longest_s / slowness()


async def longest_turn_s(front: Frontend, send: Sender, *, until_sent: bool) -> float:
    """Return the most CPU time that the thread of the event loop takes in one turn, until a request waits for its engine."""
    longest_s, sent = 0.0, len(front.requests)
    request = asyncio.ensure_future(send())
    while not request.done() and not (until_sent and len(front.requests) > sent):
        begun = time.thread_time()
        await asyncio.sleep(0)
        longest_s = max(longest_s, time.thread_time() - begun)
    request.cancel()
    await asyncio.wait([request])
    return longest_s


# When it ends, and what it may read


@pytest.mark.parametrize(("limit_s", "headers"), [(0.001, {}), (60.0, {TIMEOUT: "1"}), (None, {TIMEOUT: "1"})])
async def test_what_is_no_request_ends_at_the_sooner_of_its_own_deadline_and_its_callers(
    limit_s: float | None, headers: dict[str, str]
) -> None:
    async def wait(exchange: Exchange) -> None:
        await asyncio.Event().wait()

    declared = replace(shown(Surface.METADATA), deadline_s=limit_s)
    operation = Operation(method="GET", path="/wait", declared=declared, errors=OPENAI_ERRORS, handle=wait)
    client = Client("GET", "/wait", [(name.encode(), value.encode()) for name, value in headers.items()])
    await HttpApp([operation])(client)
    assert client.status == 504


async def test_a_grpc_call_ends_at_the_deadline_that_its_method_declares() -> None:
    async def wait(request: object, context: object) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError("nothing is set")

    operation = GrpcOperation(path="/a.B/C", declared=replace(shown(Surface.METADATA), deadline_s=0.001), handle=wait)
    [method] = bounded([operation], Capacity())
    context = GrpcContext([], {})
    with pytest.raises(grpc.aio.AbortError):
        await method.handle(b"", context)
    assert context.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_settings_are_small_on_both_ports_and_names_are_smaller() -> None:
    async with open_frontend() as front:
        logging = entry_of(front, "POST /v2/logging")
        assert isinstance(logging, HttpEntry)
        body = {"log_info": True, "padding": "x" * LITTLE_BYTES}
        assert (await logging.send_asked(front, Asked(body=body))).status == 413
    async with open_edge(tensor_card()) as edge:
        ready = pb.ModelReadyRequest(name="adder").SerializeToString()
        assert pb.ModelReadyResponse.FromString(await edge.call("ModelReady", ready)).ready
        with pytest.raises(grpc.aio.AioRpcError, match=f"messages are limited to {NAME_BYTES}"):
            await edge.call("ModelReady", ready + bytes([0xFA, 0x7F, 0x80, 0x80, 0x01]) + bytes(NAME_BYTES))
