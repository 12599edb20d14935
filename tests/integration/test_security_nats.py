"""Every way to log in to a real nats-server, TLS, and what each role of the deployment may not do."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import nats
import nkeys  # type: ignore[import-untyped]
import pytest
import trustme
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from nats.js.api import StreamSource
from nats.js.errors import APIError, NotFoundError

from dynamo.common.config import load
from dynamo.common.errors import DynamoError
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.messaging.jetstream.records import open_records
from dynamo.common.messaging.jetstream.store import FileStore
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import NatsOptions
from dynamo.worker.config import WorkerConfig
from tests.support.certificates import issue, write_ca
from tests.support.servers import EtcdServer, NatsServer, ServerTls, start_nats
from tests.support.sim_fleet import KV, SimFleet
from tests.support.waiting import WAIT_S, expiring, until

DEPLOYED = Path(__file__).parents[2] / "deploy" / "k8s" / "base" / "platform" / "nats" / "nats.conf"


class Nkey:
    """A fresh key pair of an operator, an account or a user."""

    def __init__(self, kind: int) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), kind)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.public = self._pair.public_key.decode()

    def sign(self, name: str, subject: str, about: dict[str, object]) -> str:
        """A JWT of this issuer about `subject`."""
        claims = {"jti": name, "iat": 1, "iss": self.public, "name": name, "sub": subject, "nats": {"version": 2, **about}}
        body = ".".join(_base64(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims))
        return f"{body}.{_base64(self._pair.sign(body.encode()))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


async def round_trip(config: NatsOptions) -> None:
    """Publish a message and receive it, over a connection of its own."""
    async with asyncio.timeout(120), connect_nats(config, "test") as connection:
        received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        await connection.subscribe("dynamo.t", lambda subject, reply, payload, missing: received.set_result(bytes(payload)))
        assert connection.publish_nowait("dynamo.t", b"hello")
        assert await received == b"hello"


async def refused(
    config: NatsOptions, caplog: pytest.LogCaptureFixture, *secrets: str, words: str = "Authorization Violation"
) -> None:
    """Check that the server refuses this login, and that the refusal is logged and waited for without showing a secret."""
    caplog.clear()
    caplog.set_level(logging.DEBUG)

    async def never() -> None:
        async with connect_nats(config, "test"):
            raise AssertionError("the login was accepted")

    attempt = asyncio.create_task(never())
    try:
        async with asyncio.timeout(120):
            while words not in caplog.text:
                assert not attempt.done(), attempt
                await asyncio.sleep(0.02)
    finally:
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
    assert not [secret for secret in secrets if secret in caplog.text]


async def test_user_and_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with start_nats(tmp_path, jetstream=False, config="authorization { user: me, password: sesame }") as server:
        await round_trip(NatsOptions(servers=(server.url,), user="me", password="sesame"))
        await refused(NatsOptions(servers=(server.url,), user="me", password="swordfish"), caplog, "swordfish")
        await refused(NatsOptions(servers=(server.url,)), caplog)


async def test_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with start_nats(tmp_path, jetstream=False, config="authorization { token: sesame }") as server:
        await round_trip(NatsOptions(servers=(server.url,), token="sesame"))
        await refused(NatsOptions(servers=(server.url,), token="swordfish"), caplog, "swordfish")


@pytest.mark.parametrize("kind", ["password", "token"])
async def test_a_login_that_changes_is_read_anew_from_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def authorization(secret: str) -> str:
        return f"authorization {{ {'user: me, ' if kind == 'password' else ''}{kind}: {secret} }}"

    file = tmp_path / "secret"
    file.write_text("sesame\n")
    flags = ["--nats-user", "me"] if kind == "password" else []
    async with AsyncExitStack() as former, AsyncExitStack() as stack:
        server = await former.enter_async_context(
            start_nats(tmp_path / "former", jetstream=False, config=authorization("sesame"))
        )
        flags += [f"--nats-{kind}-file", str(file), "--nats-servers", server.url]
        connection = await stack.enter_async_context(connect_nats(load(WorkerConfig, flags, {}, program="worker").nats, "test"))
        back = asyncio.Event()
        connection.on_reconnect(back.set)
        await former.aclose()
        new = start_nats(tmp_path / "new", port=server.port, jetstream=False, config=authorization("swordfish"))
        await stack.enter_async_context(new)
        async with asyncio.timeout(120):
            while "Authorization Violation" not in caplog.text:
                await asyncio.sleep(0.02)
        file.write_text("swordfish\n")
        await asyncio.wait_for(back.wait(), 120)


async def test_nkey(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, other = Nkey(nkeys.PREFIX_BYTE_USER), Nkey(nkeys.PREFIX_BYTE_USER)
    files = {}
    for name, key in (("ours", ours), ("other", other)):
        files[name] = tmp_path / f"{name}.nk"
        files[name].write_bytes(key.seed + b"\n")
    config = f"authorization {{ users: [{{ nkey: {ours.public} }}] }}"
    async with start_nats(tmp_path / "nats", jetstream=False, config=config) as server:
        await round_trip(NatsOptions(servers=(server.url,), nkey_seed_file=str(files["ours"])))
        await refused(NatsOptions(servers=(server.url,), nkey_seed_file=str(files["other"])), caplog, other.seed.decode())


def credentials(user: Nkey, account: Nkey) -> str:
    jwt = account.sign("user", user.public, {"type": "user", "subs": -1, "data": -1, "payload": -1})
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )


async def test_credentials_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    operator = Nkey(nkeys.PREFIX_BYTE_OPERATOR)
    account, stranger = Nkey(nkeys.PREFIX_BYTE_ACCOUNT), Nkey(nkeys.PREFIX_BYTE_ACCOUNT)
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {"wildcards": True}
    of_operator = operator.sign("operator", operator.public, {"type": "operator"})
    of_account = operator.sign("account", account.public, {"type": "account", "limits": limits})
    config = f"operator: {of_operator}\nresolver: MEMORY\nresolver_preload: {{ {account.public}: {of_account} }}"
    user = Nkey(nkeys.PREFIX_BYTE_USER)
    (tmp_path / "user.creds").write_text(credentials(user, account))
    (tmp_path / "stranger.creds").write_text(credentials(user, stranger))
    async with start_nats(tmp_path / "nats", jetstream=False, config=config) as server:
        await round_trip(NatsOptions(servers=(server.url,), credentials_file=str(tmp_path / "user.creds")))
        stranger_config = NatsOptions(servers=(server.url,), credentials_file=str(tmp_path / "stranger.creds"))
        await refused(stranger_config, caplog, user.seed.decode())


async def test_tls_in_both_directions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca, other = trustme.CA(), trustme.CA()
    ca_file, other_file = write_ca(ca, tmp_path / "ca.pem"), write_ca(other, tmp_path / "other.pem")
    server_pair, client = issue(ca, tmp_path, "server"), issue(ca, tmp_path, "client", "worker@example")
    own = {"tls_cert_file": str(client.cert), "tls_key_file": str(client.key)}
    tls = ServerTls(server_pair.cert, server_pair.key, ca_file)
    async with start_nats(tmp_path / "nats", jetstream=False, tls=tls) as server:
        for scheme in ("tls", "nats"):
            url = f"{scheme}://127.0.0.1:{server.port}"
            await round_trip(NatsOptions(servers=(url,), tls_ca_file=str(ca_file), **own))  # type: ignore[arg-type]
        stranger = NatsOptions(servers=(server.url,), tls_ca_file=str(other_file), **own)  # type: ignore[arg-type]
        await refused(stranger, caplog, words="certificate verify failed")
        words = "nats-server requires a client certificate, but --nats-tls-cert-file is not set"
        await refused(NatsOptions(servers=(server.url,), tls_ca_file=str(ca_file)), caplog, words=words)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("authority", "unable to get local issuer certificate"),
        ("host", "certificate is not valid for '127.0.0.1'"),
        ("date", "certificate has expired"),
    ],
)
async def test_a_nats_server_with_a_wrong_certificate_gets_no_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str, words: str
) -> None:
    ca, other = trustme.CA(), trustme.CA()
    ca_file = write_ca(ca, tmp_path / "ca.pem")
    names = ("elsewhere.example", "127.0.0.2") if wrong == "host" else ()
    pair = issue(other if wrong == "authority" else ca, tmp_path, "server", *names, expired=wrong == "date")
    config = "authorization { user: me, password: sesame }\ntrace: true"
    async with start_nats(tmp_path / "nats", jetstream=False, tls=ServerTls(pair.cert, pair.key), config=config) as server:
        options = NatsOptions(servers=(server.url,), user="me", password="sesame", tls_ca_file=str(ca_file))
        await refused(options, caplog, "sesame", words=words)
        assert "CONNECT" not in server.log()


@pytest.mark.parametrize("wrong", ["authority", "date"])
async def test_a_client_with_a_wrong_certificate_is_refused_by_nats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    ca, other = trustme.CA(), trustme.CA()
    ca_file, server_pair = write_ca(ca, tmp_path / "ca.pem"), issue(ca, tmp_path, "server")
    client = issue(other if wrong == "authority" else ca, tmp_path, "client", "worker@example", expired=wrong == "date")
    tls = ServerTls(server_pair.cert, server_pair.key, ca_file)
    async with start_nats(tmp_path / "nats", jetstream=False, tls=tls) as server:
        own = {"tls_cert_file": str(client.cert), "tls_key_file": str(client.key)}
        options = NatsOptions(servers=(server.url,), tls_ca_file=str(ca_file), **own)  # type: ignore[arg-type]
        alert = {"authority": "TLSV1_ALERT_UNKNOWN_CA", "date": "SSLV3_ALERT_CERTIFICATE_EXPIRED"}[wrong]
        await refused(options, caplog, words=f"it may have refused the client certificate ([SSL: {alert}]")


async def test_a_password_is_not_sent_to_a_server_that_offers_no_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca_file = write_ca(trustme.CA(), tmp_path / "ca.pem")
    config = "authorization { user: me, password: sesame }\ntrace: true"
    async with start_nats(tmp_path / "nats", jetstream=False, config=config) as server:
        options = NatsOptions(servers=(server.url,), user="me", password="sesame", tls_ca_file=str(ca_file))
        await refused(options, caplog, "sesame", words="does not offer TLS")
        assert "CONNECT" not in server.log()


# What the roles of the deployment may do

REQUEST, RESPONSE = "dynamo.ns.backend.1f.rpc", "dynamo.ns.responses.c1.1f.1"
NOT_ALLOWED = {
    "frontend": {
        "publish": [
            RESPONSE,
            "dynamo.ns.backend.kv.1f",
            "dynamo.ns.backend.load.1f",
            "dynamo.ns.backend.admission.1f",
            "$O.dynamo-models.M.x",
            "$JS.API.STREAM.DELETE.OBJ_dynamo-models",
            "$JS.API.STREAM.UPDATE.OBJ_dynamo-models",
            "$JS.API.STREAM.CREATE.another",
            "$SYS.REQ.SERVER.PING",
            "elsewhere",
        ],
        "subscribe": [
            REQUEST,
            "dynamo.*.*.*.rpc",
            "dynamo.>",
            ">",
            "*.>",
            "$SYS.>",
            "$JS.API.>",
            "_INBOX.>",
            "_INBOX_worker.>",
        ],
    },
    "worker": {
        "publish": [
            REQUEST,
            "dynamo.ns.backend.bookings",
            "dynamo.ns.demand",
            "dynamo.ns.frontends",
            "dynamo.ns.limits",
            "dynamo.ns.stored.resp_1",
            "dynamo.ns.turns",
            "dynamo.ns.backend.admitted.1f",
            "$JS.API.STREAM.CREATE.OBJ_dynamo-models",
            "$JS.API.STREAM.CREATE.dynamo-kv",
            "$JS.API.STREAM.CREATE.another",
            "$JS.API.STREAM.UPDATE.OBJ_dynamo-models",
            "$JS.API.STREAM.UPDATE.dynamo-kv",
            "$JS.API.STREAM.DELETE.OBJ_dynamo-models",
            "$JS.API.STREAM.DELETE.dynamo-kv",
            "$JS.API.STREAM.PURGE.OBJ_dynamo-models",
            "$JS.API.CONSUMER.CREATE.OBJ_dynamo-models",
            "_INBOX.another",
            "_INBOX_frontend.another",
            "elsewhere",
        ],
        "subscribe": [
            RESPONSE,
            "dynamo.*.responses.>",
            "dynamo.*.*.kv.*",
            "dynamo.*.*.load.*",
            "dynamo.>",
            ">",
            "*.>",
            "$SYS.>",
            "$O.>",
            "_INBOX.>",
            "_INBOX_frontend.>",
        ],
    },
}
ALLOWED = {
    "frontend": {
        "publish": [REQUEST, "dynamo.ns.backend.bookings", "dynamo.ns.demand", "dynamo.ns.backend.admitted.1f"],
        "subscribe": ["dynamo.ns.responses.c1.>", "dynamo.ns.backend.kv.*", "dynamo.ns.*.admission.*", "_INBOX_frontend.1.>"],
    },
    "worker": {
        "publish": [RESPONSE, "dynamo.ns.backend.kv.1f", "dynamo.ns.backend.load.1f", "dynamo.ns.backend.admission.1f"],
        "subscribe": [REQUEST, "dynamo.ns.backend.admitted.1f", "_INBOX_worker.1.>"],
    },
}


LOGINS = {"frontend": {"user": "frontend", "password": "f"}, "worker": {"user": "worker", "password": "w"}}


def deployed_permissions() -> str:
    """Return the permissions of the deployment's nats.conf, as they stand there, for the users of LOGINS."""
    users = "authorization { users: [ {user: frontend, password: f, permissions: $frontend_may}, "
    users += "{user: worker, password: w, permissions: $worker_may} ] }"
    text = DEPLOYED.read_text()
    permissions = re.findall(r"^(?:frontend|worker)_may \{.*?^\}", text, re.DOTALL | re.MULTILINE)
    return "\n".join([*permissions, users])


@pytest.mark.parametrize("role", ["frontend", "worker"])
async def test_a_role_of_the_deployment_is_refused_what_it_does_not_need(tmp_path: Path, role: str) -> None:
    async with start_nats(tmp_path, config=deployed_permissions()) as server:
        violations: asyncio.Queue[str] = asyncio.Queue()

        async def failed(error: Exception) -> None:
            violations.put_nowait(str(error).lower())

        client = await nats.connect(server.url, user=role, password=role[0], error_cb=failed)

        async def publish(subject: str) -> None:
            await client.publish(subject, b"")

        async def subscribe(subject: str) -> None:
            await client.subscribe(subject)

        attempts: dict[str, Callable[[str], object]] = {"publish": publish, "subscribe": subscribe}
        for verb, attempt in attempts.items():
            for subject in ALLOWED[role][verb]:
                await attempt(subject)  # type: ignore[misc]
            await client.flush()
            assert violations.empty(), violations
            for subject in NOT_ALLOWED[role][verb]:
                await attempt(subject)  # type: ignore[misc]
                async with asyncio.timeout(120):
                    violation = await violations.get()
                noun = {"publish": "publish", "subscribe": "subscription"}[verb]
                assert f'permissions violation for {noun} to "{subject.lower()}"' in violation
        assert client.is_connected, "a violation costs the message, not the connection"
        await client.close()


@asynccontextmanager
async def deployed(folder: Path, etcd: EtcdServer, namespace: str) -> AsyncIterator[tuple[NatsServer, SimFleet]]:
    """Start a NATS with the permissions of a deployment, for a fleet with durable KV events of which nothing runs yet."""
    async with start_nats(folder, config=deployed_permissions()) as server:
        yield server, SimFleet(etcd, server, namespace, durable=True, logins=LOGINS, routing=KV)


async def test_a_deployment_serves_with_the_permissions_of_its_roles(
    tmp_path: Path, etcd_server: EtcdServer, namespace: str
) -> None:
    """Everything that the roles do at NATS: requests, files, KV events, bookings, thresholds, loads, responses."""
    async with deployed(tmp_path, etcd_server, namespace) as (server, fleet):
        async with fleet.frontend():
            await are_made(server, "OBJ_dynamo-models", "dynamo-kv")
        async with fleet.worker(), fleet.worker():
            async with fleet.frontend(replica_sync=True, snapshot_threshold=1), fleet.frontend(replica_sync=True):
                for number in range(4):
                    await fleet.generate("the same prompt " * 20 + str(number))
                    await fleet.generate("the same prompt " * 20 + str(number), frontend=1)
                http = f"http://127.0.0.1:{fleet.frontends[0].http_port}"
                async with httpx2.AsyncClient(base_url=http) as client:
                    changed = {"model": "sim", "active_prefill_tokens_threshold": 9000}
                    assert (await client.post("/busy_threshold", json=changed)).status_code == 200
                    assert (await client.get("/console/fleet")).status_code == 200
                    assert (await client.get("/v2/models/sim/stats")).status_code == 200
                    new = {"model": "sim", "input": "hello", "max_output_tokens": 2, "background": True, "stream": True}
                    followed = (await client.post("/v1/responses", json=new)).text
                    stored = f"/v1/responses/{re.findall('resp_[0-9a-f]{32}', followed)[0]}"
                    assert (await client.get(stored, params={"stream": True, "starting_after": 1})).text in followed
                    assert (await client.delete(stored)).status_code == 200
                await asyncio.sleep(expiring(1.2))  # a load report, a snapshot
            async with fleet.frontend(reset_states=True):
                await fleet.generate("after the record was cleared")
        assert "Violation" not in server.log_file.read_text()


async def test_a_worker_may_not_delete_the_files_of_models(tmp_path: Path) -> None:
    async with start_nats(tmp_path, config=deployed_permissions()) as server:
        own = {role: NatsOptions(servers=(server.url,), user=role, password=role[0]) for role in LOGINS}
        async with connect_nats(own["frontend"], "frontend", role="frontend") as frontend:
            await FileStore(frontend, tmp_path / "frontend").ensure()
        async with connect_nats(own["worker"], "worker", role="worker") as worker:
            store = FileStore(worker, tmp_path / "worker")
            key = await store.put(b"tokenizer")
            stream = worker.client.jetstream()
            with pytest.raises(APIError, match="rollup not permitted"):
                await stream.publish("$O.dynamo-models.M.x", b"", headers={"Nats-Rollup": "all"})
            assert await store.missing([key]) == set()


async def test_a_worker_does_not_receive_what_a_frontend_reads_from_the_store(tmp_path: Path) -> None:
    """A worker runs models of users. Each role has inboxes of its own, and may subscribe no others."""
    secret = b"the stored response of another key"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        server = await enter(start_nats(tmp_path, config=deployed_permissions()))
        worker = await nats.connect(server.url, user="worker", password="w", error_cb=ignore)
        stack.push_async_callback(worker.close)
        received: list[bytes] = []

        async def keep(message: Msg) -> None:
            received.append(message.data)

        for subject in ("_INBOX.>", "_INBOX_frontend.>", "_INBOX_worker.>", "*.*", "*.*.*"):
            await worker.subscribe(subject, cb=keep)
        await worker.flush()
        own = NatsOptions(servers=(server.url,), user="frontend", password="f")
        frontend = await enter(connect_nats(own, "frontend", role="frontend"))
        records = await enter(open_records(frontend, "dynamo-responses", ttl_s=3600, max_bytes=64 << 20))
        await records.put("rev.small", secret)
        await records.put("rev.large", secret * 100_000)
        record = await records.get("rev.small")
        assert record is not None and record.value == secret
        record = await records.get("rev.large")
        assert record is not None and len(record.value) == 100_000 * len(secret)
        await worker.flush()
        assert received == []


async def are_made(server: NatsServer, *names: str) -> None:
    """Return once these streams exist."""
    client = await nats.connect(server.url, inbox_prefix="_INBOX_frontend", **LOGINS["frontend"])
    try:
        async with asyncio.timeout(120):
            for name in names:
                while not await exists(client.jetstream(), name):
                    await asyncio.sleep(0.02)
    finally:
        await client.close()


async def exists(context: JetStreamContext, stream: str) -> bool:
    try:
        await context.stream_info(stream)
    except NotFoundError:
        return False
    return True


async def test_a_worker_makes_no_stream_into_which_those_of_frontends_are_copied(tmp_path: Path) -> None:
    """The login that makes a stream says what is copied into it, and a worker's login may read what it writes."""
    async with start_nats(tmp_path, config=deployed_permissions()) as server:
        worker = await nats.connect(server.url, inbox_prefix="_INBOX_worker", error_cb=ignore, **LOGINS["worker"])
        context, patient = worker.jetstream(timeout=expiring(0.5)), worker.jetstream(timeout=WAIT_S)
        for name in ("OBJ_dynamo-models", "dynamo-kv"):
            with pytest.raises(NatsTimeoutError):
                await context.add_stream(name=name, sources=[StreamSource(name="KV_dynamo-responses")])
            assert not await exists(patient, name)
            assert f"$JS.API.STREAM.CREATE.{name}" in server.log()
        await worker.close()


async def test_a_worker_that_may_make_no_stream_waits_for_a_frontend_to_make_it(
    tmp_path: Path, etcd_server: EtcdServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with deployed(tmp_path, etcd_server, namespace) as (server, fleet), fleet.worker() as worker:
        await until(lambda: "model sim waits for its files to be stored" in caplog.text)
        await until(lambda: "KV events are not recorded until JetStream is there" in caplog.text)
        assert caplog.text.count("it is not there yet, and this login may not make it") >= 2
        fleet.workers.remove(worker)  # which `frontend` would wait for, and it cannot come while that one starts
        async with fleet.frontend() as front:
            fleet.workers.append(worker)
            await until(lambda: bool(fleet.frontends[front].plane.models.instances("sim")))
            await fleet.generate("hello")
            await are_recorded(server, namespace)


async def are_recorded(server: NatsServer, namespace: str) -> None:
    """Return once KV events are on record."""
    options = NatsOptions(servers=(server.url,), **LOGINS["frontend"])  # type: ignore[arg-type]
    async with asyncio.timeout(120), connect_nats(options, "test", role="frontend") as connection:
        while not await KvStream(connection).count(f"dynamo.{namespace}.*.kv.*"):
            await asyncio.sleep(0.02)


async def test_a_frontend_makes_what_workers_write_again_in_a_nats_that_lost_it(
    tmp_path: Path, etcd_server: EtcdServer, namespace: str
) -> None:
    async with deployed(tmp_path, etcd_server, namespace) as (server, fleet), fleet.frontend():
        await are_made(server, "OBJ_dynamo-models", "dynamo-kv")
        server.kill()
        shutil.rmtree(tmp_path / "jetstream")
        await server.restart()
        await are_made(server, "OBJ_dynamo-models", "dynamo-kv")


async def test_a_process_may_be_given_inboxes_of_its_own(tmp_path: Path) -> None:
    permissions = '{ publish: ["dynamo.>", "$JS.API.>"], subscribe: ["pools.a.inbox.>"] }'
    config = f"authorization {{ users: [ {{user: a, password: a, permissions: {permissions} }} ] }}"
    async with start_nats(tmp_path, config=config) as server:
        options = NatsOptions(servers=(server.url,), user="a", password="a", inbox_prefix="pools.a.inbox")
        async with asyncio.timeout(120), connect_nats(options, "worker", role="worker") as connection:
            assert (await connection.client.jetstream().account_info()).streams == 0
        assert "Violation" not in server.log()


async def ignore(error: Exception) -> None: ...


@pytest.mark.parametrize("role", ["frontend", "worker"])
async def test_a_role_may_not_act_as_the_other(tmp_path: Path, etcd_server: EtcdServer, namespace: str, role: str) -> None:
    """A process that logs in with the password of the other role cannot serve; nats-server refuses what it tries."""
    other = {"frontend": "worker", "worker": "frontend"}[role]
    async with start_nats(tmp_path, config=deployed_permissions()) as server:
        fleet = SimFleet(etcd_server, server, namespace, logins=LOGINS | {role: LOGINS[other]}, routing=KV)

        async def serve() -> None:
            async with fleet.worker(), fleet.frontend():
                await fleet.generate("hello")

        serving = asyncio.create_task(serve())
        await until(lambda: "Violation" in server.log_file.read_text())
        with pytest.raises((DynamoError, TimeoutError)):
            async with asyncio.timeout(expiring(5)):
                await serving
