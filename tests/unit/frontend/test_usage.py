"""The usage ledger: what is in it, after faults as well, and how it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo.common.config import ConfigError, load
from dynamo.common.errors import Unavailable
from dynamo.frontend import metrics as metrics_module
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.management.usage import UsageReport, usage_operations
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.config import FrontendConfig, UsageOptions
from dynamo.frontend.fleet.peers.usage import SAVE_S, UsageStore, open_usage
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.security import ledger as ledger_module
from dynamo.frontend.security.__main__ import main
from dynamo.frontend.security.ledger import MAX_DAYS, OTHER, Ledger, Row, UsageCounts
from tests.support.fake_records import FakeRecords
from tests.support.served import Asking
from tests.support.virtual_time import in_virtual_time

NOON = 1_795_348_800.0
"""Noon of 2026-11-22, UTC."""
DAY_S = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


def store_of(records: FakeRecords, ledger: Ledger, origin: str) -> UsageStore:
    return UsageStore(records, ledger, "ns", origin)  # type: ignore[arg-type]


async def rows_of(store: UsageStore, first: str = "2026-01-01", last: str = "2026-12-31") -> list[tuple[str, str, str, int, int]]:
    return [(row.day, row.key, row.model, row.requests, row.prompt_tokens) for row in await store.read(first, last)]


@in_virtual_time
async def test_the_ledgers_of_all_processes_are_added_up_by_day_key_and_model() -> None:
    records, clock = FakeRecords(), Clock()
    ledgers = [Ledger(clock), Ledger(clock)]
    first, second = (store_of(records, ledger, str(number)) for number, ledger in enumerate(ledgers))
    ledgers[0].add("team", "llama", UsageCounts(requests=2, prompt_tokens=10))
    ledgers[1].add("team", "llama", UsageCounts(requests=1, prompt_tokens=5))
    ledgers[1].add("team", "echo", UsageCounts(requests=1))
    await second.save()
    clock.now += DAY_S
    ledgers[0].add("other", "llama", UsageCounts(requests=1, prompt_tokens=1))
    expected = [
        ("2026-11-22", "team", "echo", 1, 0),
        ("2026-11-22", "team", "llama", 3, 15),
        ("2026-11-23", "other", "llama", 1, 1),
    ]
    assert await rows_of(first) == expected
    assert await rows_of(second) == expected
    assert await rows_of(second, "2026-11-23") == expected[2:]
    assert await rows_of(second, last="2026-11-22") == expected[:2]


@in_virtual_time
async def test_what_is_saved_twice_counts_once_and_days_that_are_over_leave_memory() -> None:
    records, clock = FakeRecords(), Clock()
    ledger = Ledger(clock)
    store = store_of(records, ledger, "a")
    for _ in range(3):
        ledger.add("team", "llama", UsageCounts(requests=1, prompt_tokens=7))
        await store.save()
    assert await rows_of(store) == [("2026-11-22", "team", "llama", 3, 21)]
    ledger.add("team", "llama", UsageCounts(requests=1, prompt_tokens=7))
    clock.now += DAY_S
    ledger.add("team", "llama", UsageCounts(requests=1))
    await store.save()
    assert ledger.row_count == 1
    assert await rows_of(store, last="2026-11-22") == [("2026-11-22", "team", "llama", 4, 28)]


@in_virtual_time
async def test_a_clock_that_steps_back_over_midnight_loses_nothing() -> None:
    records, clock = FakeRecords(), Clock()
    ledger = Ledger(clock)
    store = store_of(records, ledger, "a")
    for step_s in (DAY_S, -DAY_S, DAY_S, -DAY_S):
        ledger.add("team", "llama", UsageCounts(requests=1))
        await store.save()
        ledger.add("team", "llama", UsageCounts(requests=10))
        clock.now += step_s
        await store.save()  # forgets the day that seems to be over
    assert await rows_of(store) == [("2026-11-22", "team", "llama", 22, 0), ("2026-11-23", "team", "llama", 22, 0)]


@in_virtual_time
async def test_nothing_is_lost_while_jetstream_is_away_or_at_an_orderly_end(caplog: pytest.LogCaptureFixture) -> None:
    records, clock = FakeRecords(), Clock()
    ledger = Ledger(clock)
    async with open_usage(records, ledger, "ns", "a") as store:  # type: ignore[arg-type]
        records.is_away = True
        ledger.add("team", "llama", UsageCounts(requests=1))
        await asyncio.sleep(5 * SAVE_S)
        assert caplog.text.count("is not saved for now") == 1
        clock.now += DAY_S
        ledger.add("team", "llama", UsageCounts(requests=2))
        records.is_away = False
        await asyncio.sleep(1.5 * SAVE_S)
        assert len(records.records) == 2
        ledger.add("team", "llama", UsageCounts(requests=4))
    assert [row[3] for row in await rows_of(store)] == [1, 6]
    records.is_away = True
    with pytest.raises(Unavailable):
        await store.read("2026-01-01", "2026-12-31")


def test_a_ledger_is_bounded_in_rows_and_days(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_ROWS", 3)
    clock = Clock()
    ledger = Ledger(clock)
    for number in range(10):
        ledger.add(f"key{number}", "llama", UsageCounts(requests=1))
    rows = {row.key: row.requests for row in ledger.rows("2026-11-22")}
    assert rows == {"key0": 1, "key1": 1, "key2": 1, OTHER: 7}
    for _ in range(2 * MAX_DAYS):
        clock.now += DAY_S
        ledger.add("team", "llama", UsageCounts(requests=1))
    assert (ledger.row_count, len(ledger.unsaved)) == (MAX_DAYS, MAX_DAYS)


def test_metrics_of_keys_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MAX_KEY_MODELS", 2)
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    for number in range(5):
        metrics.key_used(
            f"key{number}", "llama", UsageCounts(requests=3, errors=1, prompt_tokens=4, completion_tokens=2, media=1)
        )
    text = generate_latest(registry).decode()
    assert 'dynamo_frontend_key_requests_total{key="key1",model="llama",status="success"} 2.0' in text
    assert 'dynamo_frontend_key_tokens_total{key="other",kind="prompt",model="other"} 12.0' in text
    assert 'dynamo_frontend_key_media_total{key="other",model="other"} 3.0' in text
    assert "key2" not in text


async def respond(operation: Operation, query: str) -> tuple[int, bytes]:
    exchange = Exchange(asking := Asking(operation.path, query=query), HttpSettings())
    exchange.route(operation.declared, operation.errors)
    await exchange.run(operation.handle)
    return asking.status, asking.response


async def test_usage_is_read_by_days_key_and_model() -> None:
    days: list[tuple[str, str]] = []

    async def read(first: str, last: str) -> list[Row]:
        days.append((first, last))
        return [Row(day=last, key=key, model=model, requests=1) for key in ("a", "b") for model in ("m", "n")]

    (operation,) = usage_operations(cast(Any, SimpleNamespace(read=read)))
    for query, rows in (("", 4), ("from=2026-11-01&to=2026-11-02&key=a", 2), ("to=2026-11-02&key=a&model=n", 1)):
        status, body = await respond(operation, query)
        assert status == 200
        assert len(msgspec.json.decode(body, type=UsageReport).usage) == rows
    assert days[1:] == [("2026-11-01", "2026-11-02"), ("2026-10-03", "2026-11-02")]
    assert (await respond(operation, "to=0001-01-02"))[0] == 200
    for query, words in (
        ("from=yesterday", "'from' must be a date such as 2026-11-22, got 'yesterday'"),
        ("from=2026-11-02&to=2026-11-01", "'from' must be at most 365 days before 'to'"),
        ("from=2026-11-01&" + "x=1&" * 100, "a query may have at most 100 parameters"),
        ("from=2020-01-01", "'from' must be at most 365 days before 'to'"),
    ):
        status, body = await respond(operation, query)
        assert (status, words in body.decode()) == (400, True)


def test_the_ledger_is_kept_for_so_long_and_in_so_much_as_the_flags_say() -> None:
    flags = ["--no-usage-ledger", "--usage-retention-days", "7", "--usage-max-size", "5MiB"]
    assert load(FrontendConfig, flags, {}, program="dynamo-frontend").usage == UsageOptions(
        ledger=False, retention_days=7, max_bytes=5 << 20
    )
    with pytest.raises(ConfigError, match="--usage-retention-days"):
        load(FrontendConfig, ["--usage-retention-days", "0"], {}, program="dynamo-frontend")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--url", "localhost:8000"), "--url must begin with http:// or https://, got 'localhost:8000'"),
        (("--url", "http://127.0.0.1:1"), "http://127.0.0.1:1 cannot be reached"),
        (("--api-key-file", "/nowhere"), "/nowhere: No such file"),
    ],
)
def test_the_program_says_why_it_cannot_show_usage(
    options: Sequence[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["usage", *options])
    assert words in capsys.readouterr().err
