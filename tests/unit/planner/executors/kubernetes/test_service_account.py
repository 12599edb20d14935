"""A service account's token and authority, which the kubelet replaces while the process runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trustme

from dynamo.common.config import ConfigError
from dynamo.common.http.client import HttpClient
from dynamo.planner.executors.kubernetes.api import ApiRefused, Kind, KubernetesApi
from dynamo.planner.executors.kubernetes.service_account import ServiceAccount
from tests.support.certificates import issue, write_ca
from tests.support.kubernetes_api import KubernetesApiServer, serving_kubernetes_api
from tests.support.waiting import until

RULES = [{"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get"]}]


def publish(folder: Path, version: str, authority: trustme.CA, token: str) -> None:
    """Replace the files as the kubelet does: a folder for each version, and links that lead to the newest."""
    content = folder / f"..{version}"
    content.mkdir(parents=True)
    write_ca(authority, content / "ca.crt")
    (content / "token").write_text(token)
    (content / "namespace").write_text("dynamo")
    for file in content.iterdir():  # written a while ago, so that they are not taken for half written
        os.utime(file, (time.time() - 10, time.time() - 10))
    link = folder / "..data.new"
    link.symlink_to(content.name)
    os.replace(link, folder / "..data")
    for name in ("ca.crt", "token", "namespace"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


async def test_a_token_and_an_authority_that_are_replaced_are_used_from_then_on(tmp_path: Path) -> None:
    before, after = trustme.CA(), trustme.CA()
    publish(tmp_path / "account", "1", before, "first-token")
    account = ServiceAccount(tmp_path / "account")
    assert account.namespace() == "dynamo"
    server = KubernetesApiServer(RULES)
    server.add_workload("deployments", "workers", 2)
    with serving_kubernetes_api(server, issue(before, tmp_path, "before")):
        port = server.port
        api = KubernetesApi(HttpClient(f"https://127.0.0.1:{port}", timeout_s=120.0, tls=account.tls), account, "dynamo")
        assert (await api.scale(Kind.DEPLOYMENT, "workers")).spec.replicas == 2
        server.tokens = {"second-token"}
        with pytest.raises(ApiRefused, match="401 Unauthorized"):
            await api.scale(Kind.DEPLOYMENT, "workers")
    api.close()
    old = account.tls()
    publish(tmp_path / "account", "2", after, "second-token")
    with serving_kubernetes_api(server, issue(after, tmp_path, "after"), port):
        await until(lambda: account.token() == "second-token" and account.tls() is not old)
        assert (await api.scale(Kind.DEPLOYMENT, "workers")).spec.replicas == 2
    api.close()


async def test_files_that_become_unreadable_leave_the_last_ones_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(tmp_path, "1", trustme.CA(), "first-token")
    account = ServiceAccount(tmp_path)
    (tmp_path / "token").unlink()
    (tmp_path / "token").write_text(" ")
    os.utime(tmp_path / "token", (time.time() - 10, time.time() - 10))
    await until(lambda: account.token() and "holds no token" in caplog.text)
    assert account.token() == "first-token"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("token", b"", "token holds no token"),
        ("token", b"a b", "token holds no token"),
        ("token", b"\xff", "token cannot be read"),
        ("ca.crt", b"no certificate", "the certificate of the API server's authority, .*ca.crt, cannot be read"),
        ("ca.crt", None, "ca.crt, cannot be read: .*No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_mistake_of_the_configuration(
    tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    publish(tmp_path, "1", trustme.CA(), "first-token")
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        ServiceAccount(tmp_path)
