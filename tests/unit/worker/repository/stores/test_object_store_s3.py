"""A model repository in a real S3 server, in the form of URL that Triton has for those that are not Amazon's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import boto3
import moto.server as moto_server
import pytest

from dynamo.common.errors import InvalidRequest, Unavailable
from dynamo.common.repository import ControlMode, LoadRequest
from dynamo.worker.repository.engine import RepositoryEngine
from dynamo.worker.repository.models.settings import RepositorySettings
from dynamo.worker.repository.stores.object_store import open_store
from tests.support.repositories import DOUBLE, X_TO_Y, infer, x

CONFIG = f'backend: "python"\n{X_TO_Y}'.encode()


class Bucket:
    def __init__(self, host: str) -> None:
        self.host = host
        self.client = boto3.client("s3", endpoint_url=f"http://{host}")
        self.client.create_bucket(Bucket="bucket")

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket="bucket", Key=name, Body=content)

    def put_model(self, name: str, factor: int) -> None:
        self.put(f"{name}/", b"")  # as consoles show a folder
        self.put(f"{name}/1/model.py", DOUBLE.replace("2 *", f"{factor} *").encode())
        self.put(f"{name}/config.pbtxt", CONFIG)

    def remove(self, name: str) -> None:
        for each in self.client.list_objects_v2(Bucket="bucket", Prefix=f"{name}/").get("Contents", ()):
            self.client.delete_object(Bucket="bucket", Key=each["Key"])


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name, value in (("ACCESS_KEY_ID", "key"), ("SECRET_ACCESS_KEY", "secret"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host = "{}:{}".format(*server.get_host_and_port())
    try:
        urlopen(Request(f"http://{host}/moto-api/reset", method="POST")).close()  # one process has one store
        yield Bucket(host)
    finally:
        server.stop()


def engine_on(url: str, tmp_path: Path, mode: ControlMode) -> RepositoryEngine:
    settings = RepositorySettings(folders=(), stores=(url,), copies=tmp_path / "copies")
    return RepositoryEngine(settings, mode, exit_on_error=False)


async def test_models_are_loaded_from_s3_loaded_again_and_followed(tmp_path: Path, bucket: Bucket) -> None:
    bucket.put_model("models/double", factor=2)
    bucket.put_model("models/triple", factor=3)
    bucket.put_model("elsewhere/secret", factor=4)
    engine = engine_on(f"s3://http://{bucket.host}/bucket/models", tmp_path, ControlMode.POLL)
    await engine.start()
    try:
        assert {card.name for card in engine.models.cards()} == {"double", "triple"}
        assert await infer(engine.models, "triple", x(5)) == {"y": [15.0]}
        before = engine.models.folders.fingerprints()
        bucket.put_model("models/double", factor=6)
        bucket.remove("models/triple")
        bucket.put_model("models/new", factor=7)
        assert engine.models.folders.refresh() == []
        after = engine.models.folders.fingerprints()
        assert after.keys() == {"double", "new"} and after["double"] != before["double"]
        await engine.models.load_model(LoadRequest(model="double"))
        assert await infer(engine.models, "double", x(1)) == {"y": [6.0]}
    finally:
        await engine.close()


async def test_a_repository_may_be_a_whole_bucket(tmp_path: Path, bucket: Bucket) -> None:
    bucket.put_model("double", factor=2)
    engine = engine_on(f"s3://{bucket.host}/bucket", tmp_path, ControlMode.NONE)
    [card] = await engine.start()
    assert card.name == "double"
    await engine.close()


def test_credentials_are_read_from_tritons_file(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put_model("models/double", factor=2)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    url = f"s3://{bucket.host}/bucket/models"
    with pytest.raises(Unavailable, match="credentials"):
        open_store(url).list()
    credentials: dict[str, Any] = {"s3": {"": {"key_id": "key", "secret_key": "secret", "region": "us-east-1"}}}
    (tmp_path / "credentials.json").write_text(json.dumps(credentials))
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", str(tmp_path / "credentials.json"))
    assert set(open_store(url).list()) == {"double/1/model.py", "double/config.pbtxt"}


async def test_a_bucket_that_is_not_there_is_an_error(tmp_path: Path, bucket: Bucket) -> None:
    for place in ("other/models", "bucket/nowhere"):
        url = f"s3://{bucket.host}/{place}"
        with pytest.raises(InvalidRequest, match=f"^there is nothing at {url}"):
            await engine_on(url, tmp_path, ControlMode.NONE).start()
