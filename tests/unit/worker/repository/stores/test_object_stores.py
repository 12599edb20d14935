"""Model repositories in object stores, with the store in memory; `test_object_store_s3.py` has one over S3."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dynamo.common.config import ConfigError, load
from dynamo.common.errors import DynamoError, InvalidRequest, ModelNotFound, Unavailable
from dynamo.common.process.background import running
from dynamo.common.repository import ControlMode, LoadRequest
from dynamo.worker.config import WorkerConfig
from dynamo.worker.repository.control import RepositoryControl
from dynamo.worker.repository.engine import RepositoryEngine
from dynamo.worker.repository.models.settings import RepositorySettings
from dynamo.worker.repository.stores.content_cache import ContentCache
from dynamo.worker.repository.stores.object_store import StoredObject, open_store, parse_url
from dynamo.worker.repository.stores.remote_repository import RemoteRepository
from dynamo.worker.serve import Service
from tests.support.repositories import DOUBLE, X_TO_Y, infer, x

URL = "memory://bucket/models"
CONFIG = f'backend: "python"\n{X_TO_Y}'.encode()


class Bucket:
    def __init__(self) -> None:
        self._store = fsspec.filesystem("memory")

    def put(self, name: str, content: bytes | str) -> None:
        self._store.pipe(f"/bucket/models/{name}", content.encode() if isinstance(content, str) else content)

    def put_model(self, name: str, factor: int = 2, version: int = 1) -> None:
        self.put(f"{name}/{version}/model.py", DOUBLE.replace("2 *", f"{factor} *"))
        self.put(f"{name}/config.pbtxt", CONFIG)

    def remove(self, name: str) -> None:
        self._store.rm(f"/bucket/models/{name}", recursive=True)

    def clear(self) -> None:
        if self._store.exists("/bucket"):
            self._store.rm("/bucket", recursive=True)


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    made = Bucket()
    yield made
    made.clear()


@asynccontextmanager
async def engine_of(tmp_path: Path, mode: ControlMode = ControlMode.EXPLICIT, **settings: Any) -> Any:
    engine = RepositoryEngine(
        RepositorySettings(folders=(), stores=(URL,), copies=tmp_path / "copies", **settings),
        mode,
        exit_on_error=False,
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def copies_in(tmp_path: Path) -> list[Path]:
    return [entry for entry in (tmp_path / "copies").glob("model-*") if entry.is_dir()]


async def test_a_model_is_copied_when_it_is_loaded_and_the_others_are_only_listed(tmp_path: Path, bucket: Bucket) -> None:
    bucket.put_model("double")
    bucket.put_model("other")
    async with engine_of(tmp_path) as engine:
        assert {entry.name for entry in engine.models.index()} == {"double", "other"}
        assert copies_in(tmp_path) == []
        await engine.models.load_on_request(LoadRequest(model="double"))
        assert await infer(engine.models, "double", x(3)) == {"y": [6.0]}
        [copy] = copies_in(tmp_path)
        assert {file.name for file in copy.rglob("*.p*") if file.suffix != ".pyc"} == {"config.pbtxt", "model.py"}
        bucket.put_model("double", factor=3)
        bucket.put_model("late", factor=5)
        await engine.models.load_on_request(LoadRequest(model="double"))
        await engine.models.load_on_request(LoadRequest(model="late"))
        assert await infer(engine.models, "double", x(3)) == {"y": [9.0]}
        assert await infer(engine.models, "late", x(3)) == {"y": [15.0]}
        await engine.models.unload_model("double")
        with pytest.raises(ModelNotFound):
            engine.models.find("double")


async def test_a_copy_serves_the_next_worker_too(tmp_path: Path, bucket: Bucket) -> None:
    bucket.put_model("double")
    for _ in range(2):
        async with engine_of(tmp_path, ControlMode.NONE) as engine:
            assert await infer(engine.models, "double", x(3)) == {"y": [6.0]}
        assert len(copies_in(tmp_path)) == 1


async def test_polling_follows_what_is_put_into_the_store_changed_and_removed(tmp_path: Path, bucket: Bucket) -> None:
    bucket.put_model("kept")
    bucket.put_model("gone")
    async with engine_of(tmp_path, ControlMode.POLL) as engine:
        changed = asyncio.Event()

        async def register() -> None:
            changed.set()

        async def until_loaded(names: set[str]) -> None:
            while {card.name for card in engine.models.cards()} != names:
                await changed.wait()
                changed.clear()

        control = RepositoryControl(engine, Service([]), register)
        kept = engine.models.find("kept")
        async with asyncio.timeout(120), running(control.watch(0.01), "repository"):
            bucket.put_model("new", factor=4)
            bucket.remove("gone")
            await until_loaded({"kept", "new"})
            assert await infer(engine.models, "new", x(1)) == {"y": [4.0]}
            assert engine.models.find("kept") is kept
            bucket.put("new/2/model.py", DOUBLE.replace("2 *", "7 *"))
            while engine.models.find("new").card.versions != ("2",):
                await changed.wait()
                changed.clear()
            assert await infer(engine.models, "new", x(1)) == {"y": [7.0]}


async def test_the_models_serve_on_while_the_store_is_away(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_model("double")
    bucket.put_model("other")
    async with engine_of(tmp_path) as engine:
        await engine.models.load_on_request(LoadRequest(model="double"))

        def fail(*_: object, **__: object) -> None:
            raise ConnectionError("the store is away")

        with monkeypatch.context() as patched:
            patched.setattr(fsspec.get_filesystem_class("memory"), "find", fail)
            [error] = engine.models.folders.refresh()
            assert str(error) == f"{URL} cannot be read: ConnectionError: the store is away"
            with pytest.raises(Unavailable, match="the store is away"):
                await engine.models.load_on_request(LoadRequest(model="other"))
        assert await infer(engine.models, "double", x(3)) == {"y": [6.0]}
        await engine.models.load_on_request(LoadRequest(model="other"))
        assert {entry.name for entry in engine.models.index()} == {"double", "other"}


@pytest.mark.parametrize("name", ["bad/1/../../../out", "bad/1/a\\b", "bad//out", "bad/1/a\nb"])
async def test_objects_whose_names_are_no_paths_keep_their_model_from_loading_and_no_other(
    tmp_path: Path, bucket: Bucket, name: str
) -> None:
    bucket.put_model("double")
    bucket.put_model("bad")
    bucket.put(name, "x")
    async with engine_of(tmp_path) as engine:
        with pytest.raises(InvalidRequest, match="is not a path inside the model's folder"):
            await engine.models.load_on_request(LoadRequest(model="bad"))
        await engine.models.load_on_request(LoadRequest(model="double"))
    assert not list(tmp_path.rglob("out"))


async def test_a_model_that_is_too_large_is_not_copied(tmp_path: Path, bucket: Bucket) -> None:
    bucket.put_model("double")
    async with engine_of(tmp_path, path_max_bytes=100) as engine:
        with pytest.raises(DynamoError, match="--model-path-max-bytes allows 100"):
            await engine.models.load_on_request(LoadRequest(model="double"))
    assert copies_in(tmp_path) == []


async def test_a_store_without_models_serves_none_and_a_url_below_which_there_is_nothing_is_an_error(
    tmp_path: Path, bucket: Bucket
) -> None:
    bucket.put("placeholder", b"")
    async with engine_of(tmp_path) as engine:
        assert engine.models.index() == ()
    bucket.clear()
    with pytest.raises(InvalidRequest, match=f"there is nothing at {URL}"):
        async with engine_of(tmp_path):
            pass


class UploadsMeanwhile:
    """Changes a model whenever one of its files has been read."""

    def __init__(self, bucket: Bucket, times: int) -> None:
        self.left = times
        self._bucket = bucket
        self._get_file = fsspec.get_filesystem_class("memory").get_file

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def get_file(store: Any, remote: str, local: str) -> None:
            self._get_file(store, remote, local)
            if self.left and remote.endswith("model.py"):
                self.left -= 1
                self._bucket.put_model("double", factor=10 + self.left)

        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "get_file", get_file)


def test_a_copy_is_of_one_state_even_if_the_model_is_replaced_meanwhile(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put_model("double")
    UploadsMeanwhile(bucket, times=1).install(monkeypatch)
    remote = RemoteRepository(URL, ContentCache(tmp_path / "copies", 10**6), 10**6)
    with remote.open("double") as folder:
        assert "10 *" in (folder / "1" / "model.py").read_text()
    remote.close()
    assert len(copies_in(tmp_path)) == 1


def test_a_model_that_changes_without_end_is_not_served(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put_model("double")
    UploadsMeanwhile(bucket, times=100).install(monkeypatch)
    remote = RemoteRepository(URL, ContentCache(tmp_path / "copies", 10**6), 10**6)
    with pytest.raises(Unavailable, match="changes while it is read"), remote.open("double"):
        pass
    remote.close()
    assert copies_in(tmp_path) == []


def test_an_object_that_arrives_by_half_is_an_error(tmp_path: Path, bucket: Bucket) -> None:
    bucket.put("double/1/model.py", "x")
    with pytest.raises(Unavailable, match=r"the object '1/model\.py' was not read whole"):
        open_store(URL).download("double", {"1/model.py": StoredObject(2, "")}, tmp_path)


@pytest.mark.parametrize(
    ("url", "address", "options"),
    [
        ("s3://bucket/models", "s3://bucket/models", {}),
        ("s3://127.0.0.1:9000/bucket/models/", "s3://bucket/models", {"endpoint_url": "http://127.0.0.1:9000"}),
        ("s3://http://store:9000/bucket", "s3://bucket", {"endpoint_url": "http://store:9000"}),
        ("s3://https://store.example:443/bucket/a/b", "s3://bucket/a/b", {"endpoint_url": "https://store.example:443"}),
        ("gs://bucket/models", "gs://bucket/models", {}),
        ("as://account/container/models", "abfs://container/models", {"account_name": "account"}),
        ("as://account.blob.core.windows.net/container/m", "abfs://container/m", {"account_name": "account"}),
    ],
)
def test_urls_are_read_as_triton_reads_them(
    url: str, address: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "TRITON_CLOUD_CREDENTIAL_PATH"):
        monkeypatch.delenv(name, raising=False)
    parsed = parse_url(url)
    assert parsed.url == address
    assert {name: value for name, value in parsed.options.items() if name != "config_kwargs"} == options


CREDENTIALS = {
    "s3": {
        "": {"key_id": "k", "secret_key": "s", "region": "eu-1", "session_token": "", "profile": ""},
        "s3://special": {"key_id": "k2", "secret_key": "s2", "region": "", "session_token": "t2", "profile": "p"},
    },
    "gs": {"gs://one": "one.json"},
    "as": {"": {"account_str": "a", "account_key": "b"}},
}


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/m", {"key": "k", "secret": "s", "client_kwargs": {"region_name": "eu-1"}}),
        ("s3://special/m", {"key": "k2", "secret": "s2", "token": "t2", "profile": "p"}),
        ("gs://one/m", {"token": "one.json"}),
        ("as://x/container/m", {"account_name": "a", "account_key": "b"}),
    ],
)
def test_credentials_are_those_of_the_longest_prefix_in_tritons_file(
    tmp_path: Path, url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials.json").write_text(json.dumps(CREDENTIALS))
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", str(tmp_path / "credentials.json"))
    assert {name: value for name, value in parse_url(url).options.items() if name != "config_kwargs"} == options


@pytest.mark.parametrize(
    ("content", "url", "expected"),
    [
        (json.dumps(CREDENTIALS), "gs://two/m", r"has no credentials for gs://two/m"),
        ("{", "gs://one/m", r"credentials\.json cannot be read: JSONDecodeError"),
        ("[]", "gs://one/m", r"credentials\.json cannot be read: AttributeError"),
        (None, "gs://one/m", r"credentials\.json cannot be read: FileNotFoundError"),
    ],
)
def test_a_file_of_credentials_that_does_not_help_is_an_error(
    tmp_path: Path, content: str | None, url: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "credentials.json").write_text(content)
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", str(tmp_path / "credentials.json"))
    with pytest.raises(InvalidRequest, match=f"^TRITON_CLOUD_CREDENTIAL_PATH: .*{expected}"):
        parse_url(url)


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_store_without_its_package_says_what_to_install() -> None:
    with pytest.raises(InvalidRequest, match=r"^s3:// URLs need another package: install dynamo-serving\[s3\]$"):
        open_store("s3://bucket/models")


@pytest.mark.parametrize("url", ["ftp://user:secret@host/x", "s3://https://key:secret@host:9000/bucket/x"])
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="--model-repository holds a password") as refused:
        load(WorkerConfig, ["--model-repository", url], {}, program="dynamo-worker")
    assert "secret" not in str(refused.value)


def test_a_container_of_an_account_is_no_password() -> None:
    url = "abfs://container@account.dfs.core.windows.net/models"
    config = load(WorkerConfig, ["--model-repository", url], {}, program="dynamo-worker")
    assert config.repository.repositories == (url,)
