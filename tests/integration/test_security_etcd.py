"""Users and roles of a real etcd: what each role of a deployment may do there, and logins that expire."""

from __future__ import annotations

import asyncio
import re
import shlex
from contextlib import aclosing
from pathlib import Path

import pytest
import trustme

from dynamo.common.errors import Forbidden
from dynamo.common.etcd import Etcd, EtcdUnavailable, connect_etcd
from dynamo.common.names import ADAPTERS_ROOT, LEASES_ROOT, NAMES_ROOT, SETTINGS_ROOT
from dynamo.common.options import EtcdOptions
from tests.support.certificates import issue, write_ca
from tests.support.deployment import TENSOR, InProcessDeployment, open_deployment
from tests.support.servers import EtcdServer, NatsServer, ServerTls, etcdctl, start_etcd
from tests.support.waiting import WAIT_S, expiring

LOGINS = {
    "frontend": {"user": "frontend", "password": "f4sesame"},
    "worker": {"user": "worker", "password": "w4sesame"},
}
COMMANDS = re.findall(r"^etcdctl .*$", (Path(__file__).parents[2] / "docs" / "security.md").read_text(), re.MULTILINE)
PASSWORDS = {"$FRONTEND_PASSWORD": "f4sesame", "$WORKER_PASSWORD": "w4sesame", "$ROOT_PASSWORD": "r4sesame"}


def enable_roles(server: EtcdServer, namespace: str = "dynamo") -> None:
    """Run the commands that docs/security.md has, for the roles of a namespace."""
    assert len(COMMANDS) >= 8
    for line in COMMANDS:
        for command in line.split("&&"):
            words = shlex.split(command)[1:]
            words = [word.removesuffix("/dynamo/") + f"/{namespace}/" if word.endswith("/dynamo/") else word for word in words]
            for variable, password in PASSWORDS.items():
                words = [word.replace(variable, password) for word in words]
            etcdctl(server.endpoint, *words)


def config_of(server: EtcdServer, role: str) -> EtcdOptions:
    return EtcdOptions(endpoints=(server.endpoint,), **LOGINS[role])


async def may_put(etcd: Etcd, key: str) -> bool:
    try:
        await etcd.put(key, b"1")
    except Forbidden:
        return False
    return True


async def may_read(etcd: Etcd, prefix: str) -> bool:
    try:
        await etcd.range(prefix, prefix=True)
    except Forbidden:
        return False
    return True


async def may_watch(etcd: Etcd, prefix: str) -> bool:
    try:
        async with aclosing(etcd.watch(prefix)) as batches:
            await anext(batches)
    except Forbidden:
        return False
    return True


async def test_a_role_is_refused_what_it_does_not_need(tmp_path: Path) -> None:
    async with start_etcd(tmp_path) as server:
        await asyncio.to_thread(enable_roles, server)
        async with connect_etcd(config_of(server, "frontend")) as frontend, connect_etcd(config_of(server, "worker")) as worker:
            for key in ("/dynamo/v1/dynamo/k", "/dynamo/v1/%repositories/dynamo/k"):
                assert await may_put(worker, key)
                assert not await may_put(frontend, key)
                with pytest.raises(Forbidden):
                    await frontend.delete(key)
            roots = (NAMES_ROOT, SETTINGS_ROOT, LEASES_ROOT, ADAPTERS_ROOT)
            for key in (*(f"{root}/dynamo" for root in roots), "/dynamo/v1/other/k", "/dynamo/v1/%repositories/other/k"):
                assert not await may_put(worker, key), key
            for etcd in (frontend, worker):
                assert await may_read(etcd, "/dynamo/v1/")
                assert await may_watch(etcd, "/dynamo/v1/")
                for prefix in ("/", "/dynamo/", "/dynamo/v1", "/elsewhere"):
                    assert not await may_read(etcd, prefix)
                    assert not await may_watch(etcd, prefix)
                    assert not await may_put(etcd, f"{prefix}x")


async def test_a_deployment_serves_with_these_roles_and_outlives_its_tokens(
    tmp_path: Path, nats_server: NatsServer, namespace: str
) -> None:
    async with start_etcd(tmp_path, extra_flags=("--auth-token-ttl", "1")) as server:
        await asyncio.to_thread(enable_roles, server, namespace)
        async with open_deployment(server, nats_server, namespace, logins=LOGINS) as deployment:
            assert (await deployment.post("/v2/models/echo/infer", TENSOR)).status_code == 200
            await lost_and_registered_again(server, deployment)
            assert (await deployment.post("/v2/models/echo/infer", TENSOR)).status_code == 200


async def lost_and_registered_again(server: EtcdServer, deployment: InProcessDeployment) -> None:
    """Returns when the worker has put its registrations again, with a token that it had to fetch anew.

    An expired token shows only when it is used, so the worker is made to use it: by the loss of its lease.
    """
    root = ("--user", "root:r4sesame")
    leases = (await asyncio.to_thread(etcdctl, server.endpoint, *root, "lease", "list")).split()
    for revoked in leases[leases.index("leases") + 1 :]:
        await asyncio.to_thread(etcdctl, server.endpoint, *root, "lease", "revoke", revoked)
    async with asyncio.timeout(120):
        while True:
            registered = await asyncio.to_thread(etcdctl, server.endpoint, *root, "get", "--prefix", "--keys-only", "/dynamo/v1/")
            if registered.count("/dynamo/v1/") == 2 and deployment.frontend.readiness.is_model_ready("echo"):
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("wrong", ["authority", "host", "date"])
async def test_an_etcd_with_a_wrong_certificate_is_not_used(tmp_path: Path, wrong: str) -> None:
    ca, other = trustme.CA(), trustme.CA()
    ca_file = write_ca(ca, tmp_path / "ca.pem")
    good = issue(ca, tmp_path, "good")
    names = ("elsewhere.example", "127.0.0.2") if wrong == "host" else ()
    bad = issue(other if wrong == "authority" else ca, tmp_path, "bad", *names, expired=wrong == "date")
    for pair, is_let_in in ((good, True), (bad, False)):
        async with start_etcd(tmp_path / pair.cert.stem, tls=ServerTls(pair.cert, pair.key)) as server:
            options = EtcdOptions(
                endpoints=(server.endpoint,),
                tls_ca_file=str(ca_file),
                user="root",
                password="r4sesame",
                timeout_s=WAIT_S if is_let_in else expiring(2),
            )
            async with connect_etcd(options) as client:
                if is_let_in:
                    await client.put("/k", b"1")
                    continue
                with pytest.raises(EtcdUnavailable) as caught:
                    await client.put("/k", b"1")
            assert "r4sesame" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["authority", "date", "none"])
async def test_a_client_with_a_wrong_certificate_is_refused_by_etcd(tmp_path: Path, wrong: str) -> None:
    ca, other = trustme.CA(), trustme.CA()
    ca_file, server_pair = write_ca(ca, tmp_path / "ca.pem"), issue(ca, tmp_path, "server")
    client_pair = issue(other if wrong == "authority" else ca, tmp_path, "client", "worker@example", expired=wrong == "date")
    own = {} if wrong == "none" else {"tls_cert_file": str(client_pair.cert), "tls_key_file": str(client_pair.key)}
    async with start_etcd(tmp_path / "etcd", tls=ServerTls(server_pair.cert, server_pair.key, ca_file)) as server:
        limits = {"timeout_s": 2.0, "connect_timeout_s": 1.0}
        options = EtcdOptions(endpoints=(server.endpoint,), tls_ca_file=str(ca_file), **own, **limits)  # type: ignore[arg-type]
        async with connect_etcd(options) as client:
            with pytest.raises(EtcdUnavailable):
                await client.put("/k", b"1")
