"""Files and batches: uploads, lines, and what becomes of a batch when things go wrong."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from dynamo.common.errors import InvalidRequest, NoInstances, PayloadTooLarge, RateLimited, Unauthenticated, Unavailable
from dynamo.common.etcd.leases import Leases
from dynamo.common.messaging.buffers import Buffer
from dynamo.common.messaging.jetstream.records import Record
from dynamo.common.process.work import hold_nothing
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.declaration import TEXT
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.errors import OPENAI_ERRORS
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.multipart import parse_form
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.openai.batches import batch as batch_module
from dynamo.frontend.api.openai.batches import batch_key
from dynamo.frontend.api.openai.batches import files as files_module
from dynamo.frontend.api.openai.batches import index as index_module
from dynamo.frontend.api.openai.batches import runner as runner_module
from dynamo.frontend.api.openai.batches.batch import (
    LOST_S,
    MAX_LINES,
    SEGMENT_LINES,
    WINDOW_S,
    Batch,
    Batches,
    InvalidBatch,
    Lines,
    TakenOver,
    parse_lines,
)
from dynamo.frontend.api.openai.batches.batch_key import FindAccount
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.batches.lines import SLOW_S
from dynamo.frontend.api.openai.batches.operations import BatchOperations
from dynamo.frontend.api.openai.batches.runner import MAX_BATCHES, MAX_SLOW, BatchRunner
from dynamo.frontend.api.openai.batches.segments import RequestCounts, Segment
from dynamo.frontend.api.openai.store.owned import owner_token
from dynamo.frontend.api.openai.store.quota import COUNTED_S, StoredBytes
from dynamo.frontend.config import CapacityOptions, HttpOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.security.accounts import ANONYMOUS, Account, KeyAccount
from dynamo.frontend.security.keys import ApiKey, Limits
from dynamo.frontend.security.ledger import Ledger, UsageCounts
from dynamo.frontend.security.surfaces import Surface
from tests.support.fake_records import PIECE_BYTES, FakeRecords
from tests.support.served import Asking, Unanswered
from tests.support.storing import storage_of
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import counting_turns, until

URL = "/v1/completions"
MAX_LINE_BYTES = 10_000


def lines_of(count: int, **changes: Any) -> bytes:
    lines = ({"custom_id": f"c{n}", "method": "POST", "url": URL, "body": {"prompt": n}} | changes for n in range(count))
    return b"\n".join(json.dumps(line).encode() for line in lines)


# Uploads


def form(*parts: bytes) -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"


def named(filename: bytes) -> bytes:
    """Return a form with one file, whose name is given by a parameter."""
    return form(b'Content-Disposition: form-data; name="file"; ' + filename + b"\r\n\r\nx")


def test_a_form_has_its_fields_and_files_byte_for_byte() -> None:
    content = bytes(range(256)) + b"\r\n--not the boundary\r\n"
    body = form(
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        b'Content-Disposition: form-data; name="file"; filename="a b.jsonl"\r\nContent-Type: text/plain\r\n\r\n' + content,
    )
    parts = parse_form("multipart/form-data; boundary=b", body)
    assert parts["purpose"].content == b"batch"
    assert (parts["file"].filename, parts["file"].content) == ("a b.jsonl", content)


@pytest.mark.parametrize("filename", ['filename="é.jsonl"', "filename*=utf-8''%C3%A9.jsonl"])
def test_names_of_files_may_have_any_letters(filename: str) -> None:
    body = form(f'Content-Disposition: form-data; name="file"; {filename}\r\n\r\nx'.encode())
    assert parse_form("multipart/form-data; boundary=b", body)["file"].filename == "é.jsonl"


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("application/json", b"{}", "must be 'multipart/form-data'"),
        ("multipart/form-data", b"", "with a boundary"),
        ('multipart/form-data; boundary="' + ";" * 60_000, b"", "content-type has more than 32 parameters"),
        ("multipart/form-data; boundary*0=x; boundary*=y", b"", "content-type has malformed parameters"),
        (f"multipart/form-data; boundary*{'9' * 5000}=x", b"", "with a boundary|malformed"),
        (
            "multipart/form-data; boundary=b",
            form(b"Content-Disposition: form-data; " + b";" * 1900 + b"\r\n\r\nx"),
            "content-disposition has more than 32 parameters",
        ),
        ("multipart/form-data; boundary=b", named(b"filename*=utf-7''+2AA-"), "must be in UTF-8"),
        ("multipart/form-data; boundary=b", named(b"filename*=iso-8859-1''%E9"), "must be in UTF-8"),
        ("multipart/form-data; boundary=b", named(b"filename*=utf-8''%ED%A0%80"), "must be in UTF-8"),
        ("multipart/form-data; boundary=b", named("filename*=utf-8''€".encode()), "must be in UTF-8"),
        ("multipart/form-data; boundary=b", b"--b\r\nno end", "not a complete"),
        ("multipart/form-data; boundary=b", b"--b" + b"x" * 20000, "not a complete"),
        ("multipart/form-data; boundary=b", form(b"Content-Disposition: form-data\r\n\r\nx"), "has no name"),
        ("multipart/form-data; boundary=b", form(*[b'Content-Disposition: form-data; name="a"\r\n\r\n'] * 40), "more than 32"),
    ],
)
def test_what_is_no_form_is_refused_with_a_sentence(kind: str, body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_form(kind, body)


class _Searched(bytes):
    """Bytes that keep how much each search may look at."""

    windows: list[int]

    def find(self, sought: Any, start: Any = 0, end: Any = None) -> int:
        self.windows.append((len(self) if end is None else end) - start)
        return super().find(sought, start, end)


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4, 5])
def test_a_long_form_is_searched_in_steps_wherever_these_end(shift: int) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    content = b"\n" * (2 * (1 << 20) + len(b"--b") - len(head) - shift)
    body = _Searched(head + content + b"\r\n--b--\r\n")
    body.windows = []
    assert parse_form("multipart/form-data; boundary=b", body)["file"].content == content
    assert max(body.windows) <= (1 << 20) + 100


async def test_a_key_has_a_bounded_number_of_files_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(storage_of(FakeRecords()))
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 10)
    monkeypatch.setattr(files_module, "MAX_FILES", 2)
    with pytest.raises(PayloadTooLarge, match="11 bytes"):
        await files.create("a", "f", "batch", b"x" * 11)
    made = [await files.create("a", "f", "batch", b"x") for _ in range(2)]
    with pytest.raises(InvalidRequest, match="2 files already"):
        await files.create("a", "f", "batch", b"x")
    await files.create("b", "f", "batch", b"x")
    await files.delete("a", made[0].id)
    assert [file.id for file in await files.owned_by("a")] == [made[1].id]


async def test_a_page_of_a_list_reads_only_what_has_changed() -> None:
    records, now = FakeRecords(), [1000.0]
    records.clock = lambda: now[0]
    files, batches = Files(storage_of(records, lambda: now[0])), Batches(storage_of(records, lambda: now[0]))
    made = []
    for _ in range(300):
        now[0] += 1
        made.append(await files.create("a", "f", "batch", b"x"))
    batch = await batches.create("a", URL, made[0].id, None)
    before = records.listed
    assert before <= 300, "each was read once, also while others were made"

    async def page(query: str) -> list[str]:
        operations = BatchOperations(files, batches, lambda: None).operations()
        exchange = Exchange(asking := Asking("/v1/files", query=query), HttpSettings())
        exchange.route(operations[1].declared, operations[1].errors)
        exchange.admit(KeyAccount(ApiKey(name="a", salt=b"", digest=b"")))
        await operations[1].handle(exchange)
        body = json.loads(asking.response)
        assert body["has_more"]
        return [item["id"] for item in body["data"]]

    newest = [file.id for file in reversed(made)]
    for _ in range(10):
        assert await page("limit=2") == newest[:2]
        assert await page(f"limit=2&after={newest[99]}") == newest[100:102]
    assert records.listed - before <= 1
    await files.delete("a", newest[0])
    assert await page("limit=2") == newest[1:3]
    assert records.listed - before <= 2
    for status in ("in_progress", "completed"):
        await batches.change("a", batch.id, lambda batch, status=status: replace(batch, status=status))  # type: ignore[misc]
        assert [each.status for each in await batches.owned_by("a")] == [status]
    now[0] += records.ttl_s - 100
    assert await page("limit=2") == newest[1:3]
    assert len(await files.owned_by("a")) == 99, "the others have expired, and one was deleted"


async def test_what_keys_have_is_forgotten_once_other_keys_have_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_ITEMS", 10)
    records = FakeRecords()
    files = Files(storage_of(records))
    for owner in "abc":
        for _ in range(6):
            await files.put(owner, f"file-{secrets.token_hex(16)}", "f", "batch", b"x")
    for owner in "abc":
        assert len(await files.owned_by(owner)) == 6
    before = records.listed
    assert len(await files.owned_by("c")) == 6 and records.listed == before
    assert len(await files.owned_by("a")) == 6 and records.listed == before + 6


async def test_an_upload_is_bounded_by_what_any_body_may_have() -> None:
    records = FakeRecords()
    upload = BatchOperations(Files(storage_of(records)), Batches(storage_of(records)), lambda: None).operations()[0]
    asking = Unanswered("/v1/files", method="POST", headers=[(b"content-length", b"200000")])
    exchange = Exchange(asking, HttpSettings(options=HttpOptions(max_body_bytes=1024)))
    exchange.route(upload.declared, upload.errors)
    exchange.admit(ANONYMOUS)
    with pytest.raises(PayloadTooLarge, match="larger than"):
        await upload.handle(exchange)


# Downloads


class Download(Asking):
    """A client that downloads a file; it reads no further than `reads` pieces, and then leaves or waits."""

    def __init__(self, files: Files, id: str, settings: HttpSettings, method: str = "GET", reads: int = 1000) -> None:
        super().__init__(f"/v1/files/{id}/content", method=method)
        self.is_stuck = asyncio.Event()
        self._files = files
        self._settings = settings
        self._reads = reads

    async def run(self) -> None:
        operations = BatchOperations(self._files, Batches(storage_of(FakeRecords())), lambda: None).operations()
        await HttpApp(operations, self._settings)(self)

    async def write(self, body: Buffer, *, is_last: bool = False) -> None:
        if self._reads:
            self._reads -= 1
            return await super().write(body, is_last=is_last)
        self.is_stuck.set()
        await asyncio.Event().wait()


def settings_of(max_buffered_bytes: int) -> HttpSettings:
    return HttpSettings(capacity=Capacity(CapacityOptions(max_buffered_bytes=max_buffered_bytes)))


async def test_files_are_sent_while_they_are_read_however_many_at_once() -> None:
    files, content, settings = Files(storage_of(FakeRecords())), bytes(range(256)) * (8 << 10), settings_of(12 << 19)
    made = await files.create("", "f", "batch", content)
    downloads = [Download(files, made.id, settings) for _ in range(12)]
    await asyncio.gather(*(download.run() for download in downloads))
    assert all(download.response == content for download in downloads)
    assert {(download.status, download.response_headers[b"content-length"]) for download in downloads} == {(200, b"2097152")}
    head = Download(files, made.id, settings, method="HEAD")
    await head.run()
    assert (head.status, head.response_headers[b"content-length"], head.response) == (200, b"2097152", b"")
    assert (settings.capacity.requests, settings.capacity.buffered_bytes) == (0, 0)


async def test_a_file_is_read_no_faster_than_its_client_takes_it_and_no_further_when_it_leaves() -> None:
    records = FakeRecords()
    files, settings = Files(storage_of(records)), settings_of(1 << 20)
    made = await files.create("", "f", "batch", b"x" * (8 << 20))
    slow = Download(files, made.id, settings, reads=2)
    running = asyncio.create_task(slow.run())
    await asyncio.wait_for(slow.is_stuck.wait(), 120)
    assert (records.pieces_read, settings.capacity.requests) == (3, 1)
    assert settings.capacity.buffered_bytes == 512 << 10
    slow.watch.leave()
    await asyncio.wait_for(running, 120)
    assert records.pieces_read == 3
    assert (settings.capacity.requests, settings.capacity.buffered_bytes) == (0, 0)


async def test_a_file_is_refused_before_it_is_read_while_there_is_no_room() -> None:
    records = FakeRecords()
    files, settings = Files(storage_of(records)), settings_of(1 << 20)
    made = await files.create("", "f", "batch", b"x" * (1 << 20))
    with settings.capacity.holding() as others:
        others.hold(600 << 10)
        refused = Download(files, made.id, settings)
        await refused.run()
    assert (refused.status, refused.response_headers[b"retry-after"], records.pieces_read) == (503, b"1", 0)
    assert settings.capacity.buffered_bytes == 0


async def test_a_file_that_cannot_be_read_is_an_error_or_an_incomplete_response() -> None:
    records = FakeRecords()
    files, settings = Files(storage_of(records)), settings_of(1 << 20)
    made = await files.create("", "f", "batch", b"x" * (1 << 20))
    unknown = Download(files, "file-" + "0" * 32, settings)
    await unknown.run()
    records.fails_at_piece = 0
    unreadable = Download(files, made.id, settings)
    await unreadable.run()
    records.fails_at_piece = 2
    cut = Download(files, made.id, settings)
    await cut.run()
    assert (unknown.status, unreadable.status, cut.status) == (404, 503, 200)
    assert len(cut.response) == 2 * PIECE_BYTES
    assert settings.capacity.buffered_bytes == 0


# Lines


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (b"{", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b'{"custom_id": "a"}', "invalid_json_line"),
        (lines_of(1, body=[1]), "invalid_json_line"),
        (lines_of(1, method="GET"), "invalid_json_line"),
        (lines_of(1, url="/v1/embeddings"), "mismatched_url"),
        (lines_of(2, custom_id="x"), "duplicate_custom_id"),
        (lines_of(1, body={"stream": True}), "invalid_body"),
        (lines_of(1, body={"background": True}), "invalid_body"),
        (lines_of(1, body={"stream": [1]}), "invalid_body"),
        (b"\n" * (2 * MAX_LINES + 1), "too_many_tasks"),
        (b"\r" * (2 * MAX_LINES + 1), "too_many_tasks"),
        (b"\n\r" * (2 * MAX_LINES + 1), "too_many_tasks"),
        (b" \r\n" * (2 * MAX_LINES + 1), "too_many_tasks"),
        (b" " * (MAX_LINE_BYTES + 1), "line_too_long"),
        (lines_of(3) + b"\n" + b"x" * (MAX_LINE_BYTES + 1), "line_too_long"),
        (lines_of(MAX_LINES + 1), "too_many_tasks"),
    ],
)
def test_lines_that_cannot_be_carried_out_are_named(content: bytes, code: str) -> None:
    with pytest.raises(InvalidBatch) as refused:
        parse_lines(content, URL, MAX_LINE_BYTES)
    assert refused.value.problems[-1].code == code


def test_what_follows_a_line_that_is_too_long_is_not_looked_into() -> None:
    content = b"\n".join((b"{", b"x" * (MAX_LINE_BYTES + 1), b"{"))
    with pytest.raises(InvalidBatch) as refused:
        parse_lines(content, URL, MAX_LINE_BYTES)
    assert [(problem.line, problem.code) for problem in refused.value.problems] == [
        (1, "invalid_json_line"),
        (2, "line_too_long"),
    ]


@pytest.mark.parametrize("shift", [-3, -2, -1, 0, 1, 2])
@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r\n", b" \t\r\n", b"\r\n\r"], ids=repr)
def test_lines_end_with_either_character_or_both_wherever_they_end(end: bytes, shift: int) -> None:
    first, second = lines_of(2, body={"stream": False, "background": None}).splitlines()
    content = first + b" " * ((1 << 16) + shift - len(first)) + end + second  # a file is looked at in blocks of so many bytes
    assert [line.custom_id for line in parse_lines(content, URL, 1 << 17)] == ["c0", "c1"]
    with pytest.raises(InvalidBatch) as refused:
        parse_lines(content + end + b"{", URL, 1 << 17)
    assert refused.value.problems[0].line == 1 + len((content + end).splitlines())
    for count in ((1 << 16) + shift, (1 << 16) + shift - 1):
        with pytest.raises(InvalidBatch, match=f"more than {count - 1} bytes"):
            parse_lines(b"x" * count + end, URL, count - 1)


def test_no_more_problems_are_listed_than_one_reads() -> None:
    with pytest.raises(InvalidBatch) as refused:
        parse_lines(b"{\n" * 100, URL, MAX_LINE_BYTES)
    assert len(refused.value.problems) == 20


# Carrying out


class FreeLeases(Leases):
    """Every caller gets them."""

    def __init__(self) -> None:
        nothing: Any = None
        super().__init__(nothing, "")

        self.are_to_have = True

    async def take(self, name: str) -> bool:
        return self.are_to_have

    async def release(self, name: str) -> None: ...


class Running:
    """A runner whose endpoint is `handle`, and after `die` another one, as if of another frontend."""

    def __init__(self, records: FakeRecords, now: list[float], start: Callable[[Running], asyncio.Task[None]]) -> None:
        self.records = records
        self.now = now
        self.leases = FreeLeases()
        self.tasks: list[asyncio.Task[None]] = []
        self._start = start
        self.begin()

    runner: BatchRunner
    files: Files
    batches: Batches

    def begin(self) -> None:
        self.is_alive = [True]
        self.tasks.append(self._start(self))

    def die(self) -> None:
        """End the frontend, which writes nothing any more, and begin another one."""
        self.is_alive[0] = False
        self.tasks[-1].cancel()
        self.begin()

    def record_of(self, batch: Batch) -> bytes:
        [record] = [record for key, record in self.records.records.items() if f".batch.{owner_token('')}.{batch.id}" in key]
        return record.value

    async def create(self, content: bytes) -> Batch:
        file = await self.files.create("", "f", "batch", content)
        return await self.batches.create("", URL, file.id, None)

    async def ended(self, batch: Batch) -> Batch:
        self.runner.poke()
        async with asyncio.timeout(120):
            while (read := await self.batches.read("", batch.id)).status not in ("completed", "failed", "cancelled", "expired"):
                await asyncio.sleep(0)
            while any(".waiting." in key for key in self.records.records):
                await asyncio.sleep(0)
        return read

    async def results(self, id: str | None) -> list[dict[str, Any]]:
        return [] if id is None else [json.loads(line) for line in (await self.files.content("", id, hold_nothing)).splitlines()]


class RecordsOfProcess:
    """Records as one frontend sees them: it does nothing with them after its end."""

    def __init__(self, records: FakeRecords, is_alive: Sequence[bool]) -> None:
        self._records = records
        self._is_alive = is_alive

    def __getattr__(self, name: str) -> Any:
        if not self._is_alive[0]:
            raise Unavailable("the frontend has ended")
        return getattr(self._records, name)


@asynccontextmanager
async def running(
    handle: Callable[[Exchange], Any],
    account: FindAccount = lambda name, surface: ANONYMOUS,
    capacity: Capacity | None = None,
    quota: StoredBytes | None = None,
    records: FakeRecords | None = None,
    settings: HttpSettings | None = None,
    key_wait_s: float = batch_key.WAIT_S,
) -> AsyncIterator[Running]:
    operation = Operation(path=URL, declared=TEXT, errors=OPENAI_ERRORS, handle=_begun(handle))
    metrics = FrontendMetrics(CollectorRegistry())
    settings = settings or HttpSettings(capacity=capacity or Capacity())
    now = [1000.0]

    def start(r: Running) -> asyncio.Task[None]:
        store = RecordsOfProcess(r.records, r.is_alive)
        r.files = Files(storage_of(store, lambda: now[0], quota))
        r.batches = Batches(storage_of(store, lambda: now[0], quota))
        r.runner = BatchRunner(r.files, r.batches, r.leases, {URL: operation}, settings, account, metrics, key_wait_s)
        return asyncio.create_task(r.runner.run())

    r = Running(records or FakeRecords(), now, start)
    try:
        yield r
    finally:
        for task in r.tasks:
            task.cancel()
        await asyncio.wait(r.tasks)


def _begun(handle: Callable[[Exchange], Any]) -> Callable[[Exchange], Any]:
    async def begun(exchange: Exchange) -> None:
        exchange.progress.started = True  # as the data plane says of requests
        await handle(exchange)

    return begun


async def prompt_of(exchange: Exchange) -> int:
    prompt: int = json.loads(await exchange.body())["prompt"]
    return prompt


async def test_the_output_has_the_order_of_the_lines_and_errors_lie_apart() -> None:
    priorities: set[str] = set()

    async def handle(exchange: Exchange) -> None:
        prompt = await prompt_of(exchange)
        priorities.add(exchange.headers["x-dynamo-request-priority"])
        for _ in range(prompt % 7):
            await asyncio.sleep(0)
        if prompt % 10 == 3:
            raise InvalidRequest("not this one")
        await exchange.respond(json.dumps({"echo": prompt}).encode())

    async with running(handle) as r:
        done = await r.ended(await r.create(lines_of(150)))
        outputs, errors = await r.results(done.output_file_id), await r.results(done.error_file_id)
    assert (done.status, done.request_counts) == ("completed", RequestCounts(150, 135, 15))
    assert [output["custom_id"] for output in outputs] == [f"c{n}" for n in range(150) if n % 10 != 3]
    assert outputs[0]["response"]["body"] == {"echo": 0}
    assert [error["custom_id"] for error in errors] == [f"c{n}" for n in range(3, 150, 10)]
    assert errors[0]["response"]["body"]["error"]["message"] == "not this one"
    assert len({result["id"] for result in outputs + errors}) == 150
    assert priorities == {"-1000"}


class AwayKey:
    """The account of a key; `is_away`: the key file lacks it. It is another account afterwards, as `Accounts` has it."""

    def __init__(self) -> None:
        self.is_away = False
        self.refusals = 0
        self._account = self._new()

    def find(self, name: str, surface: Surface) -> Account:
        self._follow()
        if self.is_away:
            self.refusals += 1
            raise Unauthenticated("there is no such API key any more")
        if self._account.withdrawn:
            self._account = self._new()
        return self._account

    def _new(self) -> KeyAccount:
        return KeyAccount(ApiKey(name="", salt=b"", digest=b""), follow=self._follow)

    def _follow(self) -> None:
        if self.is_away:
            self._account.withdrawn = True


async def test_lines_wait_while_their_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_key, "POLL_S", 0.001)
    key, prompts = AwayKey(), list[int]()

    async def handle(exchange: Exchange) -> None:
        prompts.append(await prompt_of(exchange))
        if len(prompts) == 30:
            key.is_away = True
        with exchange.account.admit("m", object()):  # refuses this one, too
            await exchange.respond(b"{}")

    key.is_away = True
    async with running(handle, key.find) as r:
        batch = await r.create(lines_of(100))
        r.runner.poke()
        await until(lambda: key.refusals > 3)
        assert prompts == [], "a batch whose key is refused does not begin"
        key.is_away, key.refusals = False, 0
        await until(lambda: key.refusals > 10)
        assert len(prompts) == 30
        key.is_away = False
        done = await r.ended(batch)
    assert done.request_counts == RequestCounts(100, 100, 0)
    assert (len(prompts), {*prompts}) == (101, {*range(100)})


async def test_lines_fail_whose_key_has_been_refused_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_key, "POLL_S", 0.001)
    key = AwayKey()

    async def handle(exchange: Exchange) -> None:
        key.is_away = await prompt_of(exchange) == 19
        exchange.account.admit("m", object()).close()
        await exchange.respond(b"{}")

    async with running(handle, key.find, key_wait_s=0.01) as r:
        done = await r.ended(await r.create(lines_of(100)))
        errors = await r.results(done.error_file_id)
    assert done.request_counts == RequestCounts(100, 19, 81)
    assert {error["response"]["status_code"] for error in errors} == {401}


async def test_a_batch_fails_whose_key_has_been_refused_for_long_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_key, "POLL_S", 0.001)
    key = AwayKey()
    key.is_away = True
    async with running(lambda exchange: None, key.find, key_wait_s=0.01) as r:
        done = await r.ended(await r.create(lines_of(1)))
    assert (done.status, done.errors and done.errors.data[0].message) == ("failed", "there is no such API key any more")
    assert key.refusals > 1


async def test_files_of_batches_are_read_beside_the_threads_for_large_requests() -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(b"{}")

    async with running(handle, settings=HttpSettings(offload=Offload(max_pending=0))) as r:
        done = await r.ended(await r.create(lines_of(1)))
    assert done.request_counts == RequestCounts(1, 1, 0)


async def test_the_longest_line_is_as_long_as_a_request_may_be() -> None:
    async def handle(exchange: Exchange) -> None:
        raise AssertionError("nothing is carried out")

    async with running(handle, settings=HttpSettings(options=HttpOptions(max_json_bytes=1024))) as r:
        failed = await r.ended(await r.create(lines_of(1, body={"prompt": "x" * 1024})))
    assert (failed.status, failed.errors and failed.errors.data[0].code) == ("failed", "line_too_long")


async def test_a_batch_is_charged_by_the_size_of_its_file() -> None:
    records = FakeRecords()
    files, batches = Files(storage_of(records)), Batches(storage_of(records))
    account = KeyAccount(ApiKey(name="a", salt=b"", digest=b"", limits=Limits(requests_per_s=10)))
    create = next(each for each in BatchOperations(files, batches, lambda: None).operations() if each.handle.__name__ == "create")
    taken = []
    for size in (1000, (12 << 20) + 5):
        file = await files.create("a", "f", "batch", b"x" * size)
        body = json.dumps({"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"}).encode()

        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        exchange = Exchange(Asking("/v1/batches", method="POST", headers=headers, body=body), HttpSettings())
        exchange.route(create.declared, create.errors)
        exchange.admit(account)
        await create.handle(exchange)
        used = account.use().calls
        taken.append(used and used.taken)
    assert taken == [0, 3]


async def test_lines_wait_while_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "FIRST_PAUSE_S", 0.0)
    refusals = [3]

    async def handle(exchange: Exchange) -> None:
        if refusals[0]:
            refusals[0] -= 1
            raise NoInstances("m")
        await exchange.respond(b"{}")

    async with running(handle) as r:
        done = await r.ended(await r.create(lines_of(1)))
    assert done.request_counts == RequestCounts(1, 1, 0)


@in_virtual_time
@pytest.mark.parametrize(
    "limits", [Limits(requests_per_s=0.2), Limits(tokens_per_minute=120), Limits(concurrent_requests=2)], ids=repr
)
async def test_lines_are_carried_out_as_fast_as_the_limits_of_their_key_let_them(limits: Limits) -> None:
    loop = asyncio.get_running_loop()
    team = KeyAccount(ApiKey(name="", salt=b"", digest=b"", limits=limits), loop.time)
    attempts: list[float] = []

    async def handle(exchange: Exchange) -> None:
        attempts.append(loop.time())
        with exchange.account.admit("m", object()) as ticket:
            ticket.reserve(4, 6)
            await asyncio.sleep(1.0)
            ticket.charge(10)
            await exchange.respond(b"{}")

    async with running(handle, lambda name, surface: team) as r:
        batch = await r.create(lines_of(60))
        r.runner.poke()
        while (done := await r.batches.read("", batch.id)).status != "completed":
            await asyncio.sleep(0.5)
        took_s = loop.time() - attempts[0]
    assert done.request_counts == RequestCounts(60, 60, 0)
    # 60 lines at 0.2 a second; 600 tokens, 120 of them at once, at 2 a second; 2 lines at once, of a second each.
    expected_s = {limits.requests_per_s: 295.0, limits.tokens_per_minute: 240.0, limits.concurrent_requests: 30.0}
    assert took_s == pytest.approx(next(seconds for limit, seconds in expected_s.items() if limit is not None), rel=0.1)
    assert len(attempts) < 4 * 60


@in_virtual_time
async def test_a_batch_that_is_cancelled_waits_for_no_limits() -> None:
    loop = asyncio.get_running_loop()
    team = KeyAccount(ApiKey(name="", salt=b"", digest=b"", limits=Limits(requests_per_s=1 / 3600)), loop.time)

    async def handle(exchange: Exchange) -> None:
        with exchange.account.admit("m", object()):
            await exchange.respond(b"{}")

    async with running(handle, lambda name, surface: team) as r:
        batch = await r.create(lines_of(5))
        r.runner.poke()
        while (read := await r.batches.read("", batch.id)).status == "validating":
            await asyncio.sleep(0.5)
        await asyncio.sleep(7300.0)
        await r.batches.change("", batch.id, lambda batch: replace(batch, status="cancelling"))
        while (read := await r.batches.read("", batch.id)).status == "cancelling":
            await asyncio.sleep(0.5)
        errors = await r.results(read.error_file_id)
    assert (read.status, read.request_counts) == ("cancelled", RequestCounts(5, 3, 0))
    assert [error["error"]["code"] for error in errors] == ["batch_cancelled"] * 2
    assert loop.time() < 8000.0


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_line_that_is_carried_out_again_is_in_the_ledger_once(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger()
    team = KeyAccount(ApiKey(name="", salt=b"", digest=b""), ledger=ledger)
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    monkeypatch.setattr(runner_module, "FIRST_PAUSE_S", 0.0)
    calls = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal calls
        calls += 1
        exchange.account.record("m", UsageCounts(requests=1, prompt_tokens=7))
        if calls == 1 and not is_lost:
            raise NoInstances("m")
        await exchange.respond(b"{}")

    async with running(handle, lambda name, surface: team) as r:
        put_segment, failures = r.batches.put_segment, [is_lost]

        async def fail_once(*args: Any) -> bool:
            if failures.pop() if failures else False:
                raise Unavailable("the results are not kept")
            return await put_segment(*args)

        monkeypatch.setattr(r.batches, "put_segment", fail_once)
        done = await r.ended(await r.create(lines_of(1)))
    assert (done.request_counts, calls) == (RequestCounts(1, 1, 0), 2)
    (row,) = ledger.rows(ledger.today())
    assert (row.requests, row.prompt_tokens) == (1, 7)


class LateRecords(FakeRecords):
    """A store that does its first write of results, and says that it failed; `late_s`: after so long, else before that."""

    def __init__(self, late_s: float = 0.0) -> None:
        super().__init__()
        self.late_s = late_s
        self.writes = 0

    async def put(self, key: str, value: bytes, *, last: int | None = None, inline_bytes: int | None = None) -> int | None:
        self.writes += ".segment." in key
        if ".segment." not in key or self.writes > 1:
            return await super().put(key, value, last=last, inline_bytes=inline_bytes)
        if not self.late_s:
            await super().put(key, value, last=last)
            raise Unavailable("no response in time")
        self.is_away = True

        def late() -> None:
            self.is_away = False
            self.records[key] = Record(value, 10**6)

        asyncio.get_running_loop().call_later(self.late_s, late)
        raise Unavailable("no response in time")


@in_virtual_time
@pytest.mark.parametrize("late_s", [0.0, 40.0])
async def test_lines_whose_results_are_kept_later_than_the_store_said_are_charged_and_counted(late_s: float) -> None:
    ledger = Ledger()
    team = KeyAccount(ApiKey(name="", salt=b"", digest=b""), ledger=ledger)
    calls = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal calls
        calls += 1
        exchange.account.record("m", UsageCounts(requests=1, prompt_tokens=7))
        await exchange.respond(b"{}")

    records = LateRecords(late_s)
    async with running(handle, lambda name, surface: team, records=records) as r:
        batch = await r.create(lines_of(5))
        r.runner.poke()
        while any(".waiting." in key for key in records.records):
            await asyncio.sleep(1.0)
        done = await r.batches.read("", batch.id)
    assert (done.status, done.request_counts, calls, records.writes) == ("completed", RequestCounts(5, 5, 0), 5, 2)
    (row,) = ledger.rows(ledger.today())
    assert (row.requests, row.prompt_tokens) == (5, 35)


@in_virtual_time
async def test_results_that_are_being_kept_when_a_frontend_stops_are_charged_and_counted() -> None:
    ledger, is_written, records = Ledger(), asyncio.Event(), FakeRecords()
    team = KeyAccount(ApiKey(name="", salt=b"", digest=b""), ledger=ledger)

    async def handle(exchange: Exchange) -> None:
        exchange.account.record("m", UsageCounts(requests=1))
        await exchange.respond(b"{}")

    async with running(handle, lambda name, surface: team, records=records) as r:
        put = r.batches.put_segment

        async def slow_put(*args: Any) -> bool:
            is_kept = await put(*args)
            is_written.set()
            await asyncio.sleep(1.0)
            return is_kept

        r.batches.put_segment = slow_put  # type: ignore[assignment,method-assign]
        batch = await r.create(lines_of(5))
        r.runner.poke()
        await is_written.wait()
    async with running(handle, lambda name, surface: team, records=records) as r:
        r.runner.poke()
        while any(".waiting." in key for key in records.records):
            await asyncio.sleep(1.0)
        done = await r.batches.read("", batch.id)
    assert (done.status, done.request_counts) == ("completed", RequestCounts(5, 5, 0))
    (row,) = ledger.rows(ledger.today())
    assert row.requests == 5


@in_virtual_time
async def test_a_store_that_does_not_respond_holds_up_no_frontend_that_stops() -> None:
    endpoint, loop = Lethal(), asyncio.get_running_loop()
    endpoint.may_respond.clear()

    async def stuck(*args: object) -> None:
        await asyncio.Event().wait()

    async with running(endpoint.handle) as r:
        await r.create(lines_of(5))
        r.runner.poke()
        await until(lambda: len(endpoint.in_flight) == 5)
        r.batches.stop = stuck  # type: ignore[assignment,method-assign]
        begin = loop.time()
    assert loop.time() - begin == runner_module.STOP_S


async def test_a_frontend_that_was_overtaken_keeps_no_results() -> None:
    batches = Batches(storage_of(FakeRecords()))
    id = (await batches.create("", URL, "file", None)).id
    await batches.take_over("", id, "first")
    await batches.take_over("", id, "second")
    segment = Segment(b"x", b"", RequestCounts(1, 1, 0))
    assert not await batches.put_segment("", id, "first", 0, segment)
    assert await batches.segments(id, hold_nothing) == {}


async def test_results_that_an_earlier_frontend_could_not_count_are_counted() -> None:
    async def handle(exchange: Exchange) -> None:
        raise AssertionError("nothing is carried out")

    async with running(handle) as r:
        batch = await r.create(lines_of(5))
        await r.batches.put_segment("", batch.id, "", 0, Segment(b"{}\n" * 4, b"{}\n", RequestCounts(5, 4, 1)))
        done = await r.ended(batch)
    assert (done.status, done.request_counts) == ("completed", RequestCounts(5, 4, 1))


async def test_a_batch_waits_until_there_is_room_for_its_file_and_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    capacity = Capacity(CapacityOptions(max_buffered_bytes=100_000))
    held: list[int] = []

    async def handle(exchange: Exchange) -> None:
        held.append(capacity.buffered_bytes)
        await exchange.respond(b"{}")

    async with running(handle, capacity=capacity) as r:
        content = lines_of(2)
        with capacity.holding() as others:
            others.hold(100_000)
            batch = await r.create(content)
            r.runner.poke()
            await until(lambda: r.records.reads >= 10)
            assert held == []
        done = await r.ended(batch)
    assert (done.request_counts, held) == (RequestCounts(2, 2, 0), [len(content), len(content) + len(b"{}")])
    assert capacity.buffered_bytes == 0


async def test_a_batch_whose_results_do_not_fit_into_memory_goes_on_when_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    content = lines_of(SEGMENT_LINES)
    capacity = Capacity(CapacityOptions(max_buffered_bytes=len(content) + 100_000))
    prompts: list[int] = []

    async def handle(exchange: Exchange) -> None:
        prompts.append(await prompt_of(exchange))
        await exchange.respond(b"{}")

    async with running(handle, capacity=capacity) as r:
        with capacity.holding() as others:
            others.hold(99_000)
            batch = await r.create(content)
            r.runner.poke()
            await until(lambda: len(prompts) == SEGMENT_LINES)
            await until(lambda: capacity.buffered_bytes == 99_000)
        done = await r.ended(batch)
    assert (done.status, done.request_counts) == ("completed", RequestCounts(SEGMENT_LINES, SEGMENT_LINES, 0))
    assert sorted(prompts) == list(range(SEGMENT_LINES))
    assert capacity.buffered_bytes == 0


async def test_the_batches_of_one_key_leave_room_for_those_of_others() -> None:
    begun: list[str] = []
    may_end = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        begun.append(exchange.account.name)
        await may_end.wait()
        await exchange.respond(b"{}")

    def account(name: str, surface: Surface) -> Account:
        return KeyAccount(ApiKey(name=name, salt=b"", digest=b""))

    async with running(handle, account) as r:
        made = []
        for owner in (*["heavy"] * 5, "light", "lighter"):
            file = await r.files.create(owner, "f", "batch", lines_of(1))
            made.append((owner, await r.batches.create(owner, URL, file.id, None)))
        r.runner.poke()
        async with asyncio.timeout(120):
            while len(begun) < 3:
                await asyncio.sleep(0)
            may_end.set()
            while any(".waiting." in key for key in r.records.records):
                await asyncio.sleep(0)
        statuses = {(await r.batches.read(owner, batch.id)).status for owner, batch in made}
    assert {*begun[:3]} == {"heavy", "light", "lighter"}
    assert (statuses, len(begun)) == ({"completed"}, 7)


async def count_to(number: int, items: Collection[str], *, step_s: float) -> None:
    """Wait for so many items, in steps of the clock: a thread reads files meanwhile, for which the clock does not wait."""
    for _ in range(1_000_000):
        if len(items) >= number:
            return
        await asyncio.sleep(step_s)
    raise AssertionError(f"there are {len(items)}")


def of_key(name: str, surface: Surface) -> Account:
    return KeyAccount(ApiKey(name=name, salt=b"", digest=b""))


@in_virtual_time
async def test_batches_whose_model_hangs_keep_those_of_others_waiting_for_half_a_minute_at_most() -> None:
    begun: list[str] = []

    async def handle(exchange: Exchange) -> None:
        begun.append(exchange.account.name)
        with exchange.account.admit("m", object()):
            if exchange.account.name != "light":
                await asyncio.Event().wait()
        await exchange.respond(b"{}")

    async with running(handle, of_key) as r:
        for owner in (*["heavy"] * 3, "b", "c", "d", "e", "light"):
            r.now[0] += 1
            file = await r.files.create(owner, "f", "batch", lines_of(SEGMENT_LINES))
            await r.batches.create(owner, URL, file.id, None)
        r.runner.poke()
        await count_to(SEGMENT_LINES, begun, step_s=0.0)
        await asyncio.sleep(SLOW_S - 1.0)
        assert len(begun) == SEGMENT_LINES
        await count_to(7 * SEGMENT_LINES, begun, step_s=0.1)
        await asyncio.sleep(4 * SLOW_S)
    assert Counter(begun) == dict.fromkeys("bcde", SEGMENT_LINES) | {"heavy": 2 * SEGMENT_LINES, "light": SEGMENT_LINES}


@in_virtual_time
async def test_a_process_carries_out_sixteen_batches_at_most() -> None:
    begun: set[str] = set()

    async def handle(exchange: Exchange) -> None:
        begun.add(exchange.account.name)
        await asyncio.Event().wait()

    async with running(handle, of_key) as r:
        for number in range(20):
            file = await r.files.create(f"key-{number}", "f", "batch", lines_of(1))
            await r.batches.create(f"key-{number}", URL, file.id, None)
        r.runner.poke()
        await count_to(MAX_BATCHES, begun, step_s=0.0)
        await asyncio.sleep(SLOW_S - 1.0)
        assert len(begun) == MAX_BATCHES
        await count_to(MAX_BATCHES + MAX_SLOW, begun, step_s=0.1)
        await asyncio.sleep(4 * SLOW_S)
    assert len(begun) == MAX_BATCHES + MAX_SLOW


@pytest.mark.parametrize("is_mixed", [True, False], ids=["created in turn", "created key by key"])
async def test_the_batches_of_all_keys_are_carried_out_in_turn_the_oldest_of_each_first(is_mixed: bool) -> None:
    owners = ["heavy", *(f"key-{letter}" for letter in "abcdefg")]
    created = [(owner, number) for number in range(6) for owner in owners]
    begun: list[tuple[str, int]] = []

    async def handle(exchange: Exchange) -> None:
        begun.append((exchange.account.name, await prompt_of(exchange)))
        await exchange.respond(b"{}")

    async with running(handle, lambda name, surface: KeyAccount(ApiKey(name=name, salt=b"", digest=b""))) as r:
        for owner, number in created if is_mixed else sorted(created):
            r.now[0] += 1
            line = {"custom_id": "c", "method": "POST", "url": URL, "body": {"prompt": number}}
            file = await r.files.create(owner, "f", "batch", json.dumps(line).encode())
            await r.batches.create(owner, URL, file.id, None)
        r.runner.poke()
        async with asyncio.timeout(120):
            while any(".waiting." in key for key in r.records.records):
                await asyncio.sleep(0)
    for owner in owners:
        assert [number for name, number in begun if name == owner] == list(range(6))
    for count in range(len(begun)):
        done = [sum(name == owner for name, _ in begun[:count]) for owner in owners]
        assert max(done) - min(done) <= 2, "no key is more than a round ahead of another"


async def test_what_was_done_before_is_not_done_again() -> None:
    prompts: list[int] = []

    async def handle(exchange: Exchange) -> None:
        prompts.append(await prompt_of(exchange))
        await exchange.respond(b"{}")

    async with running(handle) as r:
        batch = await r.create(lines_of(SEGMENT_LINES + 5))
        kept = Segment(b'{"custom_id": "kept"}\n', b"", RequestCounts(SEGMENT_LINES, SEGMENT_LINES, 0))
        assert await r.batches.put_segment("", batch.id, "", 0, kept)
        assert not await r.batches.put_segment("", batch.id, "", 0, kept)
        done = await r.ended(batch)
        results = await r.results(done.output_file_id)
    assert sorted(prompts) == [SEGMENT_LINES + n for n in range(5)]
    assert [result["custom_id"] for result in results] == ["kept", *(f"c{SEGMENT_LINES + n}" for n in range(5))]
    assert done.request_counts == RequestCounts(SEGMENT_LINES + 5, SEGMENT_LINES + 5, 0)


@pytest.mark.parametrize("part", ["content", "segment"])
async def test_a_batch_whose_input_or_results_are_damaged_fails(part: str) -> None:
    async def handle(exchange: Exchange) -> None:
        await exchange.respond(b"{}")

    async with running(handle) as r:
        batch = await r.create(lines_of(1))
        await r.batches.put_segment("", batch.id, "", 0, Segment(b"", b"", RequestCounts(1, 0, 0)))
        r.records.damaged = {key for key in r.records.records if f".{part}." in key}
        assert len(r.records.damaged) == 1
        failed = await r.ended(batch)
        assert not any(".segment." in key for key in r.records.records)
    assert (failed.status, failed.errors and failed.errors.data[0].code) == ("failed", "damaged_record")


async def test_a_batch_that_takes_too_long_expires_with_what_is_done() -> None:
    async def handle(exchange: Exchange) -> None:
        r.now[0] = 1001.0 + WINDOW_S
        await exchange.respond(b"{}")

    async with running(handle) as r:
        done = await r.ended(await r.create(lines_of(SEGMENT_LINES + 1)))
        outputs, errors = await r.results(done.output_file_id), await r.results(done.error_file_id)
    assert (done.status, len(outputs)) == ("expired", SEGMENT_LINES)
    assert [(error["custom_id"], error["error"]["code"]) for error in errors] == [(f"c{SEGMENT_LINES}", "batch_expired")]


async def test_a_batch_ends_when_its_results_get_too_large_and_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_RESULT_BYTES", 20_000)
    monkeypatch.setattr(files_module, "MAX_FILE_BYTES", 10_000)

    async def handle(exchange: Exchange) -> None:
        await exchange.respond(json.dumps("x" * 1000).encode())

    async with running(handle) as r:
        done = await r.ended(await r.create(lines_of(SEGMENT_LINES + 1)))
        outputs, errors = await r.results(done.output_file_id), await r.results(done.error_file_id)
    assert done.status == "failed" and done.errors is not None and done.errors.data[0].code == "output_too_large"
    assert len(outputs) == 19, "of 1,002 bytes each"
    assert {error["error"]["code"] for error in errors} == {"output_too_large"} and len(errors) == SEGMENT_LINES + 1 - len(
        outputs
    )


@pytest.mark.parametrize("is_counted_again", [False, True])
async def test_batches_that_were_created_together_store_no_more_than_their_key_may(is_counted_again: bool) -> None:
    now = [0.0]
    quota = StoredBytes(lambda owner: 100_000, lambda: now[0])
    served = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal served
        served += 1
        if is_counted_again:
            now[0] += COUNTED_S
        await exchange.respond(json.dumps("x" * 1000).encode())

    async with running(handle, quota=quota) as r:
        batches = [await r.create(lines_of(SEGMENT_LINES)) for _ in range(6)]
        ended = [await r.ended(batch) for batch in batches]
        stored = [file.bytes for file in await r.files.owned_by("")]
        outputs = [await r.results(batch.output_file_id) for batch in ended]
        with pytest.raises(PayloadTooLarge):
            await r.files.create("", "f", "batch", b"x" * 2000)
    assert 50_000 < sum(stored) < 130_000, "the limit, and a short line of the error file for each of 64 lines"
    assert {batch.status for batch in ended} <= {"completed", "failed"}
    failed = [batch for batch in ended if batch.status == "failed"]
    assert failed and all(batch.errors and batch.errors.data[0].code == "output_too_large" for batch in failed)
    assert sum(map(len, outputs)) < 90 and served < 4 * SEGMENT_LINES


async def test_the_results_of_a_batch_count_once_from_when_there_are_some_until_their_file_is_deleted() -> None:
    quota, counts = StoredBytes(lambda owner: 200_000, lambda: 0.0), list[int]()
    going_on = asyncio.Event()

    async def room_of() -> int:
        low, high = 0, 200_000
        while low < high:
            middle = (low + high + 1) // 2
            try:
                await quota.check("", middle)
                low = middle
            except PayloadTooLarge:
                high = middle - 1
        return low

    async def handle(exchange: Exchange) -> None:
        if await prompt_of(exchange) == SEGMENT_LINES:
            counts.append(await room_of())
            await going_on.wait()
        await exchange.respond(json.dumps("x" * 1000).encode())

    async with running(handle, quota=quota) as r:
        batch = await r.create(lines_of(SEGMENT_LINES + 1))
        before = await room_of()
        r.runner.poke()
        async with asyncio.timeout(120):
            while not counts:
                await asyncio.sleep(0)
        going_on.set()
        done = await r.ended(batch)
        after = await room_of()
        assert done.output_file_id is not None
        size = (await r.files.read("", done.output_file_id)).bytes
        await r.files.delete("", done.output_file_id)
        deleted = await room_of()
    assert (size * 9) // 10 < before - counts[0] < size
    assert before - after == size
    assert deleted == before


async def test_a_batch_whose_input_is_gone_when_another_frontend_goes_on_keeps_the_results_that_it_has() -> None:
    has_come = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        if await prompt_of(exchange) == SEGMENT_LINES:
            has_come.set()
            await asyncio.Event().wait()
        await exchange.respond(b"{}")

    async with running(handle) as r:
        batch = await r.create(lines_of(SEGMENT_LINES + 1))
        r.runner.poke()
        await has_come.wait()
        await r.files.delete("", batch.input_file_id)
        r.die()
        done = await r.ended(batch)
        outputs = await r.results(done.output_file_id)
    assert done.status == "failed" and done.errors is not None and batch.input_file_id in done.errors.data[0].message
    assert [output["custom_id"] for output in outputs] == [f"c{number}" for number in range(SEGMENT_LINES)]
    assert done.request_counts == RequestCounts(SEGMENT_LINES + 1, SEGMENT_LINES, 0)


async def test_a_batch_that_is_given_up_in_its_second_segment_keeps_the_results_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)

    async def handle(exchange: Exchange) -> None:
        await exchange.respond(b"{}")

    async with running(handle) as r:
        put = r.batches.put_segment

        async def full(owner: str, id: str, by: str, number: int, segment: Segment) -> bool:
            if number:
                raise Unavailable("the store has no room")
            return await put(owner, id, by, number, segment)

        r.batches.put_segment = full  # type: ignore[method-assign]
        done = await r.ended(await r.create(lines_of(SEGMENT_LINES + 1)))
        outputs = await r.results(done.output_file_id)
    assert done.status == "failed" and done.errors is not None and done.errors.data[0].code == "too_many_attempts"
    assert len(outputs) == SEGMENT_LINES


async def test_a_batch_that_has_no_results_after_ten_attempts_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)

    async def full(*args: object) -> bool:
        raise Unavailable("the store has no room")

    served = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal served
        served += 1
        await exchange.respond(b"{}")

    async with running(handle) as r:
        r.batches.put_segment = full  # type: ignore[assignment,method-assign]
        batch = await r.create(lines_of(2))
        done = await r.ended(batch)
    assert served == 2 * runner_module.MAX_ATTEMPTS
    assert done.status == "failed" and done.errors is not None and done.errors.data[0].code == "too_many_attempts"


class Lethal:
    """An endpoint that ends the frontend with some prompts; others take some turns of the loop."""

    def __init__(self, *prompts: int, at_first: int = 1) -> None:
        """`at_first`: as many lines are carried out when the first frontend ends."""
        self.prompts = prompts
        self.at_first = at_first
        self.in_flight: list[int] = []
        self.most = 0
        """So many lines were carried out at once."""
        self.ended: list[tuple[int, int]] = []
        """The prompts that ended a frontend, each with how many lines it carried out."""
        self.die: Callable[[], None] | None = None
        self.may_respond = asyncio.Event()
        if not prompts:
            self.may_respond.set()

    async def handle(self, exchange: Exchange) -> None:
        exchange.account.admit("m", object()).close()  # the next line has its turn
        self.in_flight.append(prompt := await prompt_of(exchange))
        self.most = max(self.most, len(self.in_flight))
        try:
            for _ in range(100):
                await asyncio.sleep(0)
            if prompt in self.prompts and self.die is not None:
                while not self.ended and len(self.in_flight) < self.at_first:
                    await asyncio.sleep(0)
                self.may_respond.set()
                self.ended.append((prompt, len(self.in_flight)))
                self.die()
                await asyncio.Event().wait()
            await self.may_respond.wait()
            await exchange.respond(b"{}")
        finally:
            self.in_flight.remove(prompt)


async def test_a_line_at_which_two_frontends_end_is_an_error_and_all_others_are_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    endpoint = Lethal(6, at_first=SEGMENT_LINES)
    async with running(endpoint.handle) as r:
        endpoint.die = r.die
        done = await r.ended(await r.create(lines_of(150)))
        outputs, errors = await r.results(done.output_file_id), await r.results(done.error_file_id)
    assert endpoint.ended == [(6, SEGMENT_LINES), (6, 1)]
    assert (done.status, done.request_counts) == ("completed", RequestCounts(150, 149, 1))
    assert [output["custom_id"] for output in outputs] == [f"c{n}" for n in range(150) if n != 6]
    assert [(error["custom_id"], error["error"]["code"]) for error in errors] == [("c6", "frontends_ended")]


async def test_a_batch_at_which_three_frontends_end_fails_and_keeps_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    count = 5 * SEGMENT_LINES
    endpoint = Lethal(*range(5, count, SEGMENT_LINES))
    async with running(endpoint.handle) as r:
        endpoint.die = r.die
        done = await r.ended(await r.create(lines_of(count)))
        outputs, errors = await r.results(done.output_file_id), await r.results(done.error_file_id)
    assert [(prompt, at_once == 1) for prompt, at_once in endpoint.ended] == [
        (5, False),
        (5, True),
        (SEGMENT_LINES + 5, True),
    ]
    assert done.status == "failed" and done.errors is not None and done.errors.data[0].code == "frontends_ended"
    assert (len(outputs), len(errors)) == (SEGMENT_LINES - 1, 4 * SEGMENT_LINES + 1)


async def test_lines_that_end_frontends_only_together_take_two_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    in_flight, ended = 0, 0

    async def handle(exchange: Exchange) -> None:
        nonlocal in_flight, ended
        exchange.account.admit("m", object()).close()
        in_flight += 1
        try:
            for _ in range(10):
                await asyncio.sleep(0)
            if in_flight > 1:
                in_flight, ended = -SEGMENT_LINES, ended + 1
                r.die()
                await asyncio.Event().wait()
            await exchange.respond(b"{}")
        finally:
            in_flight = max(0, in_flight - 1)

    async with running(handle) as r:
        done = await r.ended(await r.create(lines_of(3 * SEGMENT_LINES)))
    assert (done.request_counts, ended) == (RequestCounts(3 * SEGMENT_LINES, 3 * SEGMENT_LINES, 0), 2)


async def test_what_ends_frontends_before_any_line_is_carried_out_takes_three_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    ended = 0

    async def handle(exchange: Exchange) -> None:
        raise AssertionError("nothing is carried out")

    class Lethal(FakeRecords):
        async def get(self, key: str, hold: Callable[[int], None] | None = None) -> Record | None:
            nonlocal ended
            if ".content." in key:
                ended += 1
                r.die()
                await asyncio.Event().wait()
            return await super().get(key, hold)

    async with running(handle, records=Lethal()) as r:
        done = await r.ended(await r.create(lines_of(3)))
    assert ended == 3
    assert done.status == "failed" and done.errors is not None and done.errors.data[0].code == "frontends_ended"


async def test_a_frontend_that_loses_its_lease_goes_on_with_the_lines_that_it_carries_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    prompts: list[int] = []
    may_respond = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        exchange.account.admit("m", object()).close()
        prompts.append(await prompt_of(exchange))
        await may_respond.wait()
        await exchange.respond(b"{}")

    async with running(handle) as r:
        batch = await r.create(lines_of(3))
        r.runner.poke()
        await until(lambda: len(prompts) == 3)
        for _ in range(5):
            r.leases.are_to_have = False
            r.leases.lost()
            await until(lambda: b'"is_unleased":true' in r.record_of(batch))
            with pytest.raises(TakenOver):
                await r.batches.take_over("", batch.id, "another frontend")
            r.leases.are_to_have = True
            await until(lambda: b'"is_unleased":false' in r.record_of(batch))
        may_respond.set()
        done = await r.ended(batch)
    assert (done.request_counts, sorted(prompts)) == (RequestCounts(3, 3, 0), [0, 1, 2])


async def test_a_frontend_that_loses_its_lease_stops_when_another_one_has_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    endpoint = Lethal()
    endpoint.may_respond.clear()
    async with running(endpoint.handle) as r:
        batch = await r.create(lines_of(3))
        r.runner.poke()
        await until(lambda: len(endpoint.in_flight) == 3)
        r.leases.are_to_have = False
        await r.batches.take_over("", batch.id, "another frontend")
        r.leases.lost()
        await until(lambda: not endpoint.in_flight)
        assert b'"by":"another frontend"' in r.record_of(batch)


async def test_a_batch_is_taken_over_from_a_frontend_that_has_been_silent_since_it_lost_its_lease() -> None:
    now = [1000.0]
    records = FakeRecords(lambda: now[0])
    batches = Batches(storage_of(records))
    id = (await batches.create("", URL, "file", None)).id
    await batches.take_over("", id, "first")
    await batches.attempt("", id, "first", Lines(0, 5))
    for _ in range(3):
        await batches.go_on("", id, "first", is_unleased=True)
        now[0] += LOST_S - 1
        with pytest.raises(TakenOver):
            await batches.take_over("", id, "second")
    now[0] += 2
    owned = await batches.take_over("", id, "second")
    assert (owned.ended, owned.ended_at, owned.by) == (1, (Lines(0, 5),), "second")
    for late in (
        batches.go_on("", id, "first", is_unleased=True),
        batches.attempt("", id, "first", Lines(0, 5)),
        batches.begin("", id, "first", None),
        batches.succeeded("", id, "first", 0, lambda batch: batch),
    ):
        with pytest.raises(TakenOver):
            await late
    await batches.stop("", id, "first")
    assert (await batches.take_over("", id, "second")).by == "second"


async def test_what_an_earlier_version_was_carrying_out_counts_as_well() -> None:
    records = FakeRecords()
    batches = Batches(storage_of(records))
    id = (await batches.create("", URL, "file", None)).id
    [key] = [key for key in records.records if ".batch." in key]
    record = json.loads(records.records[key].value)
    for name in ("by", "is_unleased", "ended"):
        del record[name]
    record["begun"] = {"lines": {"first": 0, "end": 5}, "by": "a token"}
    await records.put(key, json.dumps(record).encode())
    owned = await batches.take_over("", id, "second")
    assert (owned.ended, owned.ended_at) == (1, (Lines(0, 5),))


async def test_lines_that_may_have_ended_a_frontend_are_carried_out_beside_none_of_another_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    endpoint = Lethal(0, at_first=11)
    async with running(endpoint.handle, lambda name, surface: KeyAccount(ApiKey(name=name, salt=b"", digest=b""))) as r:
        endpoint.die = r.die
        made = []
        for owner, content in (("bad", lines_of(3)), ("good", lines_of(8, body={"prompt": 9}))):
            file = await r.files.create(owner, "f", "batch", content)
            made.append((owner, await r.batches.create(owner, URL, file.id, None)))
        r.runner.poke()
        async with asyncio.timeout(120):
            while any(".waiting." in key for key in r.records.records):
                await asyncio.sleep(0)
        bad, good = [await r.batches.read(owner, batch.id) for owner, batch in made]
    assert endpoint.ended == [(0, 11), (0, 1)]
    assert (bad.request_counts, good.request_counts) == (RequestCounts(3, 2, 1), RequestCounts(8, 8, 0))


async def test_a_line_that_takes_long_alone_lets_those_of_other_keys_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    monkeypatch.setattr(runner_module, "ALONE_S", 0.0)
    in_flight, responses_to_others = 0, 0
    others_are_done = asyncio.Event()

    async def handle(exchange: Exchange) -> None:
        nonlocal in_flight, responses_to_others
        exchange.account.admit("m", object()).close()
        prompt = await prompt_of(exchange)
        in_flight += 1
        if in_flight <= 5:
            if in_flight == 5:
                r.die()
            await asyncio.Event().wait()
        if prompt == 9:
            responses_to_others += 1
            if responses_to_others == 2:
                others_are_done.set()
        else:
            await others_are_done.wait()
        await exchange.respond(b"{}")

    async with running(handle, lambda name, surface: KeyAccount(ApiKey(name=name, salt=b"", digest=b""))) as r:
        for owner, content in (("slow", lines_of(3)), ("other", lines_of(2, body={"prompt": 9}))):
            file = await r.files.create(owner, "f", "batch", content)
            await r.batches.create(owner, URL, file.id, None)
        r.runner.poke()
        async with asyncio.timeout(120):
            while any(".waiting." in key for key in r.records.records):
                await asyncio.sleep(0)
    assert (in_flight, responses_to_others) == (10, 2)


async def test_results_are_kept_as_they_are_whatever_their_characters() -> None:
    records = FakeRecords()
    batches = Batches(storage_of(records))
    lines = [
        json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in ("a", '"\\', "é\u2028", "😀" * 1000, "\x7f\x00\r\n")
    ]
    id = (await batches.create("", URL, "file", None)).id
    segment = Segment("".join(lines).encode(), lines[3].encode(), RequestCounts(6, 5, 1))
    assert await batches.put_segment("", id, "", 3, segment)
    assert await batches.segments(id, lambda size: None) == {3: segment}
    [record] = [record for key, record in records.records.items() if ".segment." in key]
    assert json.loads(record.value)["outputs"] == "".join(lines), "frontends of an earlier version read a text"


@pytest.mark.parametrize("shift", range(-13, 2))
async def test_long_results_are_written_and_read_in_steps_wherever_these_end(shift: int) -> None:
    records = FakeRecords()
    batches = Batches(storage_of(records))
    text = "x" * ((1 << 18) + shift) + '\\\\"\\"\n\x01é😀' * 3 + "y" * (1 << 19) + "\n"
    id = (await batches.create("", URL, "file", None)).id
    segment = Segment(text.encode(), text.encode(), RequestCounts(2, 1, 1))
    async with counting_turns() as turns:
        assert await batches.put_segment("", id, "", 0, segment)
        assert turns[0] >= 6
        assert await batches.segments(id, lambda size: None) == {0: segment}
        assert turns[0] >= 12
    [record] = [record for key, record in records.records.items() if ".segment." in key]
    assert json.loads(record.value)["errors"] == text


async def test_a_long_list_is_read_in_steps() -> None:
    records = FakeRecords()
    batches = Batches(storage_of(records))
    for _ in range(3000):
        await batches.create("", URL, "file", None)
        for key in await records.keys("ns.waiting.>"):
            await records.delete(key)
    async with counting_turns() as turns:
        assert len(await batches.owned_by("")) == 3000
        assert turns[0] >= 6


async def test_frontends_that_stop_in_good_order_are_not_held_against_the_lines() -> None:
    endpoint, records = Lethal(), FakeRecords()
    batch: Batch | None = None
    endpoint.may_respond.clear()
    for _ in range(runner_module.MAX_ATTEMPTS + 2):
        async with running(endpoint.handle, records=records) as r:
            batch = batch or await r.create(lines_of(5))
            r.runner.poke()
            await until(lambda: len(endpoint.in_flight) == 5)
    assert batch is not None
    endpoint.may_respond.set()
    endpoint.most = 0
    async with running(endpoint.handle, records=records) as r:
        done = await r.ended(batch)
    assert (done.request_counts, endpoint.most) == (RequestCounts(5, 5, 0), 5)


async def test_lines_whose_results_could_not_be_stored_are_not_held_to_have_ended_a_frontend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.001)
    endpoint, at_once = Lethal(), list[int]()
    async with running(endpoint.handle) as r:
        put, stop, failures = r.batches.put_segment, r.batches.stop, [True] * 3

        async def failing_put(*args: Any) -> bool:
            at_once.append(endpoint.most)
            endpoint.most = 0
            if len(at_once) < 4:
                raise Unavailable("the store is away")
            return await put(*args)

        async def failing_stop(*args: Any) -> None:
            if failures and failures.pop():
                raise Unavailable("the store is away")
            await stop(*args)

        monkeypatch.setattr(r.batches, "put_segment", failing_put)
        monkeypatch.setattr(r.batches, "stop", failing_stop)
        done = await r.ended(await r.create(lines_of(5)))
    assert (done.request_counts, at_once) == (RequestCounts(5, 5, 0), [5] * 4)


async def test_a_frontend_that_was_overtaken_leaves_a_batch_that_has_ended_as_it_is() -> None:
    async def handle(exchange: Exchange) -> None:
        await r.batches.change("", batch.id, lambda batch: replace(batch, status="completed", output_file_id="file-x"))
        await exchange.respond(b"{}")

    async with running(handle) as r:
        batch = await r.create(lines_of(1))
        done = await r.ended(batch)
        assert [file.purpose for file in await r.files.owned_by("")] == ["batch"]
    assert (done.status, done.output_file_id, done.request_counts.completed) == ("completed", "file-x", 0)


async def test_a_key_has_a_bounded_number_of_batches_that_have_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MAX_WAITING", 2)
    batches = Batches(storage_of(FakeRecords()))
    made = [await batches.create("a", URL, "f", None) for _ in range(2)]
    with pytest.raises(RateLimited, match="2 batches that have not ended"):
        await batches.create("a", URL, "f", None)
    other = await batches.create("b", URL, "f", None)
    await batches.done("a", made[0].id)
    again = await batches.create("a", URL, "f", None)
    waiting = [(each.owner, each.id) for each in await batches.waiting()]
    assert sorted(waiting) == sorted([("a", made[1].id), ("b", other.id), ("a", again.id)])


async def test_a_burst_of_one_key_makes_no_more_batches_than_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "MAX_WAITING", 2)
    records = FakeRecords()
    keys = records.keys

    async def slow_keys(pattern: str) -> list[str]:
        found = await keys(pattern)
        await asyncio.sleep(0)
        return found

    records.keys = slow_keys  # type: ignore[method-assign]
    batches = Batches(storage_of(records))
    made = await asyncio.gather(*(batches.create("a", URL, "f", None) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(each, Batch) for each in made) == len(await batches.waiting()) == 2
    assert all(isinstance(each, Batch | RateLimited) for each in made)


@pytest.mark.parametrize("write", [1, 2])
async def test_a_batch_that_could_not_be_made_is_neither_shown_nor_waits_for_ever(write: int) -> None:
    async def handle(exchange: Exchange) -> None:
        raise AssertionError("nothing is carried out")

    async with running(handle) as r:
        put, writes = r.records.put, [0]

        async def failing(key: str, value: bytes, *, last: int | None = None, inline_bytes: int | None = None) -> int | None:
            writes[0] += 1
            if writes[0] == write:
                raise Unavailable("the bucket is full")
            return await put(key, value, last=last)

        file = await r.files.create("", "f", "batch", lines_of(1))
        r.records.put = failing  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await r.batches.create("", URL, file.id, None)
        r.records.put = put  # type: ignore[method-assign]
        assert await r.batches.owned_by("") == []
        r.runner.poke()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(await r.batches.waiting()) == write - 1, "it may yet be written"
        r.now[0] += runner_module.CREATED_WITHIN_S + 1
        r.runner.poke()
        async with asyncio.timeout(120):
            while await r.batches.waiting():
                await asyncio.sleep(0)


async def test_a_batch_without_its_key_or_its_file_fails() -> None:
    def withdrawn(name: str, surface: Surface) -> Account:
        raise Unauthenticated("there is no API key 'x' any more")

    async def handle(exchange: Exchange) -> None:
        raise AssertionError("nothing is carried out")

    async with running(handle, withdrawn, key_wait_s=0.0) as r:
        keyless = await r.ended(await r.create(lines_of(1)))
    async with running(handle) as r:
        fileless = await r.ended(await r.batches.create("", URL, "file-" + "0" * 32, None))
    for batch, words in ((keyless, "no API key 'x'"), (fileless, "is not found")):
        assert batch.status == "failed" and batch.errors is not None
        assert words in batch.errors.data[0].message


async def test_without_jetstream_a_batch_goes_on_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.01)
    monkeypatch.setattr(batch_module, "READY_S", 0.01)
    calls = [0]

    async def handle(exchange: Exchange) -> None:
        calls[0] += 1
        if calls[0] == 1:
            r.records.is_away = True
            asyncio.get_running_loop().call_later(0.05, setattr, r.records, "is_away", False)
        await exchange.respond(b"{}")

    async with running(handle) as r:
        batch = await r.create(lines_of(1))
        r.runner.poke()
        async with asyncio.timeout(120):
            while any(".waiting." in key for key in r.records.records):
                await asyncio.sleep(0)
        done = await r.batches.read("", batch.id)
    assert (done.status, calls[0]) == ("completed", 1), "its results wait for the store"


async def test_a_batch_that_is_cancelled_before_it_began_says_how_many_lines_it_has() -> None:
    async with running(prompt_of) as r:
        batch = await r.create(lines_of(3))
        await r.batches.change("", batch.id, lambda batch: replace(batch, status="cancelling"))
        ended = await r.ended(batch)
        assert (ended.status, ended.request_counts) == ("cancelled", RequestCounts(total=3))
        assert len(await r.results(ended.error_file_id)) == 3
