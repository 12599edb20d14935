"""A worker that follows the records of LoRA adapters: what it loads, what it refuses, and what its card says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dynamo.common.adapters import DesiredAdapter, adapter_key, decode_adapter, encode_adapter
from dynamo.common.config import ConfigError, load
from dynamo.common.errors import Code, Forbidden, InvalidRequest, NoInstances, Unsupported
from dynamo.common.generation import GenerateRequest, Stop, pack_tokens, request_encoder
from dynamo.common.model_card import AdapterReport, LlmInfo
from dynamo.worker.config import AdapterOptions, WorkerConfig
from dynamo.worker.engine.echo import EchoTokens
from dynamo.worker.engine.sim.engine import SimConfig, SimEngine
from dynamo.worker.process.adapters import AdapterFollower
from dynamo.worker.serve import ServedModel, Service
from tests.support.fake_etcd import FakeEtcd
from tests.support.incoming import FakeIncoming
from tests.support.waiting import until


@dataclass
class Harness:
    etcd: FakeEtcd
    service: Service
    engine: SimEngine
    folder: Path
    registered: list[LlmInfo]

    @property
    def llm(self) -> LlmInfo:
        card = self.service.models[0].card
        assert card.llm is not None
        return card.llm

    def report(self, name: str) -> AdapterReport | None:
        return self.service.models[0].card.adapter_report(name)

    async def want(self, name: str, path: Path | str | None = None, model: str = "base") -> DesiredAdapter:
        """Write a record. Without `path`, for a folder with an adapter."""
        if path is None:
            path = self.folder / name
            path.mkdir(exist_ok=True)
            (path / "adapter_config.json").write_text('{"r": 8}')
        adapter = DesiredAdapter(name=name, model=model, path=str(path))
        await self.etcd.put(adapter_key("dynamo", name), encode_adapter(adapter))
        return adapter

    async def reported(self, adapter: DesiredAdapter) -> AdapterReport:
        await until(lambda: (report := self.report(adapter.name)) is not None and report.load_id == adapter.load_id)
        report = self.report(adapter.name)
        assert report is not None
        return report

    async def drop(self, name: str) -> None:
        await self.etcd.delete(adapter_key("dynamo", name))
        await until(lambda: self.report(name) is None)


@asynccontextmanager
async def following(tmp_path: Path, adapters: tuple[str, ...] = (), room: int = 2) -> AsyncIterator[Harness]:
    engine = SimEngine(SimConfig(name="base", adapters=adapters, max_adapters=room))
    card = await engine.start()
    service = Service([ServedModel.of(card, engine)])
    etcd: Any = FakeEtcd()
    folder = tmp_path / "root"
    folder.mkdir()
    registered: list[LlmInfo] = []

    async def register() -> None:
        llm = service.models[0].card.llm
        assert llm is not None
        registered.append(llm)

    options = AdapterOptions(allow=True, path_roots=(folder,))
    follower = AdapterFollower(etcd, "dynamo", options, service, register, drain_timeout_s=10)
    running = asyncio.create_task(follower.follow())
    try:
        yield Harness(etcd, service, engine, folder, registered)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.close()


def request(adapter: str) -> FakeIncoming:
    body = GenerateRequest(model="base", prompt=pack_tokens([1, 2]), adapter=adapter, stop=Stop(max_tokens=2))
    return FakeIncoming(request_encoder.encode(body))


async def test_what_the_records_say_is_loaded_registered_and_unloaded(tmp_path: Path) -> None:
    async with following(tmp_path) as worker:
        assert worker.llm.loads_adapters
        adapter = await worker.want("sql")
        await worker.want("other", model="another-model")
        assert await worker.reported(adapter) == AdapterReport(name="sql", path=adapter.path, load_id=adapter.load_id)
        await until(lambda: worker.registered and worker.registered[-1] == worker.llm)
        assert worker.llm.adapters == ("sql",)
        await worker.service.generate(request("sql"))
        await worker.drop("sql")
        assert worker.llm.adapters == ()
        with pytest.raises(NoInstances):  # which other instances may serve
            await worker.service.generate(request("sql"))


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("/etc", Code.FORBIDDEN, "not below a --lora-path-root"),
        ("{root}", Code.FORBIDDEN, "not below a --lora-path-root"),
        ("{root}/../elsewhere", Code.FORBIDDEN, "not below a --lora-path-root"),
        ("{root}/link", Code.FORBIDDEN, "not below a --lora-path-root"),
        ("relative", Code.FORBIDDEN, "not below a --lora-path-root"),
        ("{root}/circle", Code.INVALID_REQUEST, "cannot be followed"),
        ("", Code.INVALID_REQUEST, "empty or too long"),
        ("/a\0b", Code.INVALID_REQUEST, "control characters"),
        ("{root}/none\nINFO dynamo.audit: forged", Code.INVALID_REQUEST, "control characters"),
        ("{root}/none", Code.NOT_FOUND, "No adapter found for"),
        ("{root}/broken", Code.INTERNAL, "cannot be read"),
    ],
)
async def test_a_path_that_cannot_be_used_is_reported_with_the_reason(tmp_path: Path, path: str, code: Code, words: str) -> None:
    async with following(tmp_path) as worker:
        elsewhere = tmp_path / "elsewhere"
        for folder in (elsewhere, worker.folder / "broken"):
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{")
        (worker.folder / "link").symlink_to(elsewhere)
        (worker.folder / "circle").symlink_to(worker.folder / "circle")
        report = await worker.reported(await worker.want("sql", path.replace("{root}", str(worker.folder))))
        assert report.code == code
        assert words in report.error
        assert worker.llm.adapters == ()


async def test_an_instance_holds_no_more_adapters_than_its_engine(tmp_path: Path) -> None:
    async with following(tmp_path, adapters=("static",)) as worker:
        await worker.reported(await worker.want("first"))
        second = await worker.want("second")
        assert "holds 2 LoRA adapters, of at most 2: unload one" in (await worker.reported(second)).error
        await worker.drop("first")
        await until(lambda: "second" in worker.llm.adapters)  # there is room now
        assert worker.llm.adapters == ("static", "second")
        assert (await worker.reported(second)).error == ""


async def test_a_name_that_is_taken_is_refused_but_an_adapter_of_the_start_is_replaced(tmp_path: Path) -> None:
    async with following(tmp_path, adapters=("static",)) as worker:
        assert "another name" in (await worker.reported(await worker.want("base"))).error
        replaced = await worker.want("static")
        assert (await worker.reported(replaced)).error == ""
        assert worker.llm.adapters == ("static",)
        await worker.drop("static")
        assert worker.llm.adapters == ()


async def test_an_adapter_whose_successor_cannot_be_loaded_goes_on_serving(tmp_path: Path) -> None:
    async with following(tmp_path) as worker:
        good = await worker.want("sql")
        await worker.reported(good)
        bad = await worker.reported(await worker.want("sql", worker.folder / "none"))
        assert (bad.path, bad.code) == (good.path, Code.NOT_FOUND)
        assert worker.llm.adapters == ("sql",)
        await worker.service.generate(request("sql"))
        await worker.etcd.put(adapter_key("dynamo", "sql"), encode_adapter(good))  # the frontend takes the other one back
        assert (await worker.reported(good)).error == ""


async def test_the_card_of_an_instance_stays_short_whatever_is_requested(tmp_path: Path) -> None:
    async with following(tmp_path, room=1000) as worker:
        paths = [f"/{'x' * 1500}", *(f"{worker.folder}/{number}-{'x' * 900}" for number in range(80))]
        for number, path in enumerate(paths):
            await worker.want(f"{'n' * 240}{number}", path)
        await worker.reported(await worker.want("sql"))
        last = await worker.reported(await worker.want("last", "/"))
        assert last.code == Code.FORBIDDEN
        assert len(worker.llm.adapter_reports) == 65


async def test_a_worker_that_may_not_put_back_what_etcd_loses_serves_on_and_follows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path) as worker:
        await worker.reported(await worker.want("sql"))

        async def refuse(key: str, value: bytes, *, mod_revision: int) -> NoReturn:
            raise Forbidden("permission denied")

        monkeypatch.setattr(worker.etcd, "replace", refuse)
        worker.etcd.lose_everything()
        await worker.reported(await worker.want("chat"))
        assert worker.report("sql") is not None
        assert "may not put the LoRA adapter" in caplog.text and "cannot be followed" not in caplog.text


async def test_what_etcd_loses_is_put_back_and_stays_loaded(tmp_path: Path) -> None:
    async with following(tmp_path) as worker:
        adapter = await worker.want("sql")
        await worker.reported(adapter)
        worker.etcd.lose_everything()
        key = adapter_key("dynamo", "sql")
        await until(lambda: key in worker.etcd.kvs)
        assert decode_adapter(key, worker.etcd.kvs[key].value) == adapter
        assert worker.llm.adapters == ("sql",)


async def test_a_record_that_cannot_be_read_concerns_no_other(tmp_path: Path) -> None:
    async with following(tmp_path) as worker:
        for number, odd in enumerate((b"{", b"{}", b"[]", b"null", b"3", b'{"name": 3}', b"\xff", b"[" * 10_000)):
            await worker.etcd.put(adapter_key("dynamo", f"odd-{number}"), odd)
        await worker.etcd.put(adapter_key("dynamo", "other"), encode_adapter(DesiredAdapter(name="x", model="base", path="/")))
        await worker.reported(await worker.want("sql"))
        assert worker.llm.adapters == ("sql",)
        assert [report.name for report in worker.llm.adapter_reports] == ["sql"]


async def test_engines_that_load_no_adapters_are_refused_at_the_start(tmp_path: Path) -> None:
    options = AdapterOptions(allow=True, path_roots=(tmp_path,))
    etcd: Any = FakeEtcd()
    for engine in (EchoTokens("echo"), SimEngine(SimConfig(name="sim"))):
        service = Service([ServedModel.of(await engine.start(), engine)])
        with pytest.raises(Unsupported, match=r"adapters|runtime-lora"):
            AdapterFollower(etcd, "dynamo", options, service, asyncio.sleep, drain_timeout_s=1)  # type: ignore[arg-type]
        await engine.close()


@pytest.mark.parametrize("flags", [["--allow-runtime-lora"], ["--allow-runtime-lora", "--lora-path-root", "relative"]])
def test_adapters_may_be_loaded_only_from_folders_that_the_operator_names(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="--lora-path-root"):
        load(WorkerConfig, ["--model", "sim", *flags], {}, program="dynamo-worker")


def test_a_name_that_is_no_name_has_no_key() -> None:
    with pytest.raises(InvalidRequest, match="adapter name"):
        adapter_key("dynamo", "a b")
