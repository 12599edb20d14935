from __future__ import annotations

import asyncio
import weakref
from time import perf_counter

import pytest

from dynamo.common.errors import Cancelled
from dynamo.common.http.served import ClientWatch
from dynamo.common.messaging.buffers import Buffer
from dynamo.common.process.work import Work
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.http.event_stream import EventStream
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.security.accounts import ANONYMOUS, KeyAccount
from dynamo.frontend.security.keys import ApiKey, Limits, key_name
from tests.support.served import Asking


async def test_what_is_left_of_a_keys_limits_is_in_the_headers() -> None:
    now = 100.0
    limits = Limits(requests_per_s=5, tokens_per_minute=600)
    account = KeyAccount(ApiKey(name="team", salt=b"", digest=b"", limits=limits), clock=lambda: now)
    exchange = Exchange(asking := Asking(), HttpSettings())
    exchange.admit(account)
    with account.admit("m", object()) as ticket:
        ticket.reserve(100, 20)
        await exchange.respond(b"{}")
    headers = asking.response_headers
    assert {name.decode(): value.decode() for name, value in headers.items() if name.startswith(b"x-ratelimit")} == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "0.200s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "480",
        "x-ratelimit-reset-tokens": "12.000s",
    }


def test_there_is_no_account_before_the_caller_is_admitted() -> None:
    exchange = Exchange(Asking(), HttpSettings())
    with pytest.raises(AttributeError, match="account"):
        _ = exchange.account
    exchange.admit(ANONYMOUS)
    assert exchange.account is ANONYMOUS


async def test_what_is_done_for_a_caller_is_known_to_be_its_keys() -> None:
    exchange = Exchange(Asking(), HttpSettings())
    exchange.admit(KeyAccount(ApiKey(name="team", salt=b"", digest=b"")))
    assert await asyncio.create_task(asyncio.to_thread(key_name.get)) == "team"


async def test_the_long_work_of_keys_has_turns() -> None:
    settings, taken = HttpSettings(), []

    def work(key: str) -> Work[None]:
        for _ in range(3):
            taken.append(key)
            ends_at = perf_counter() + 0.004  # a step at least
            while perf_counter() < ends_at:
                pass
            yield 0

    async def ask(key: str) -> None:
        exchange = Exchange(Asking(), settings)
        exchange.admit(KeyAccount(ApiKey(name=key, salt=b"", digest=b"")))
        await exchange.in_steps(work(key))

    await asyncio.gather(*map(ask, "aaaaaaaaab"))
    assert max(index for index, key in enumerate(taken) if key == "b") < 16


async def stream(exchange: Exchange, events: int) -> None:
    async with exchange.events() as stream:
        for _ in range(events):
            await stream.write(b"data: {}\n\n")
        if events:
            await stream.end(b"data: [DONE]\n\n")


@pytest.mark.parametrize("events", [0, 2], ids=["that never began", "with events"])
async def test_a_stream_leaves_no_work_for_the_garbage_collector(events: int, no_collector: None) -> None:
    exchange = Exchange(Asking(), HttpSettings())
    await stream(exchange, events)
    left = weakref.ref(exchange)
    del exchange
    assert left() is None


@pytest.mark.parametrize("headers", [[], [(b"x-request-id", b"mine-1")], [(b"x-request-id", b"no good id\n")]])
async def test_a_response_has_an_id_when_the_caller_was_not_identified(headers: list[tuple[bytes, bytes]]) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(b"{}")

    async def handle_in_pieces(exchange: Exchange) -> None:
        await exchange.respond_in_pieces([b"{", b"}"], ())

    async def handle_by_events(exchange: Exchange) -> None:
        await stream(exchange, 1)

    ids = []
    for way in (handle, handle_in_pieces, handle_by_events):
        await Exchange(asking := Asking(headers=headers), HttpSettings()).run(way)
        ids.append(asking.response_headers[b"x-request-id"])
    if headers and headers[0][1] == b"mine-1":
        assert ids == [b"mine-1"] * 3
    else:
        assert len(set(ids)) == 3 and all(len(made_up) == 32 for made_up in ids)


@pytest.mark.parametrize("has_left", [True, False], ids=["before the work", "during the work"])
async def test_the_work_of_a_client_that_leaves_is_cancelled_once(has_left: bool) -> None:
    watch = ClientWatch()
    exchange = Exchange(Asking(watch=watch), HttpSettings())
    entered = asyncio.Event()

    async def work() -> None:
        async with exchange.attended():
            entered.set()
            await asyncio.Event().wait()

    if has_left:
        watch.leave()
    task = asyncio.create_task(work())
    await entered.wait()
    watch.leave()
    watch.leave()
    with pytest.raises(Cancelled):
        await task
    assert exchange.client_left
    assert task.cancelling() == 0


async def test_a_client_that_leaves_after_the_work_cancels_nothing() -> None:
    watch = ClientWatch()
    exchange = Exchange(Asking(watch=watch), HttpSettings())
    async with exchange.attended():
        pass
    watch.leave()
    await asyncio.sleep(0)
    assert not exchange.client_left


async def test_work_that_its_own_task_cancels_is_not_taken_for_one_of_a_client_that_left() -> None:
    exchange = Exchange(Asking(), HttpSettings())

    async def work() -> None:
        async with exchange.attended():
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_work_of_a_client_that_leaves_ends_within_a_step_and_gives_its_memory_back() -> None:
    watch, capacity = ClientWatch(), Capacity()
    exchange = Exchange(Asking(watch=watch), HttpSettings(capacity=capacity))
    occupied = exchange.occupy()
    entered, ended = asyncio.Event(), asyncio.Event()

    def endless() -> Work[None]:
        yield 1000
        try:
            while True:
                entered.set()
                yield 0
        finally:
            ended.set()

    async def work() -> None:
        async with exchange.attended():
            await exchange.in_steps(endless())

    task = asyncio.create_task(work())
    await entered.wait()
    assert capacity.buffered_bytes == 1000
    watch.leave()
    with pytest.raises(Cancelled):
        await task
    assert ended.is_set()
    occupied.leave()
    assert capacity.buffered_bytes == 0


async def test_memory_that_is_held_for_a_part_of_a_request_is_given_back_however_it_ends() -> None:
    capacity = Capacity()
    exchange = Exchange(Asking(), HttpSettings(capacity=capacity))
    occupied = exchange.occupy()
    exchange.hold(5)
    with exchange.holding() as hold:
        hold(10)
        assert capacity.buffered_bytes == 15
    with pytest.raises(ZeroDivisionError), exchange.holding() as hold:
        hold(1 // 0)
    assert capacity.buffered_bytes == 5
    occupied.leave()
    assert capacity.buffered_bytes == 0


async def test_no_comment_comes_between_the_pieces_of_an_event() -> None:
    sent: list[bytes] = []
    goes_on = asyncio.Event()

    class Slow(Asking):
        async def write(self, body: Buffer, *, is_last: bool = False) -> None:
            await goes_on.wait()
            sent.append(bytes(body))

    stream = EventStream(Slow(), tuple, lambda: None, 1000.0)
    stream.comment()  # waits for the client
    writing = asyncio.create_task(stream.write_pieces([b"data: ", b"1", b"\n\n"]))
    await asyncio.sleep(0)
    stream.comment()
    goes_on.set()
    await writing
    stream.comment()
    await stream.end(b"")
    assert b"".join(sent).replace(b": keepalive\n\n", b"") == b"data: 1\n\n"
    assert b"data: 1\n\n" in b"".join(sent)
