"""Real processes with every kind of secret: none of them shows in logs, metrics, responses or the process list."""

from __future__ import annotations

import asyncio
import re
import secrets
import ssl
from collections.abc import Mapping
from pathlib import Path

import grpc
import grpc.aio
import httpx2
import trustme

from dynamo.frontend.security.surfaces import Scope
from tests.support.certificates import issue, write_ca
from tests.support.deployment import SERVICE, TENSOR, KeyFile, infer_request
from tests.support.processes import FrontendProcess, Process, frontend, worker
from tests.support.servers import EtcdServer, NatsServer, ServerTls, etcdctl, start_etcd, start_nats


def hidden_files(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Secrets by name, and the files that hold them."""
    values = {name: secrets.token_hex(16) for name in ("nats", "etcd", "admin", "client")}
    lines = {
        "nats": values["nats"],
        "etcd": values["etcd"],
        "grpc": f"model-repository:admin={values['admin']}",
        "http": f"model-repository:x-admin={values['client']}",
    }
    files = {}
    for name, line in lines.items():
        path = folder / f"{name}.secret"
        path.write_text(line + "\n")
        files[name] = str(path)
    return values, files


async def test_no_secret_is_shown_anywhere(tmp_path: Path, namespace: str) -> None:
    values, files = hidden_files(tmp_path)
    keys = KeyFile(tmp_path / "keys.yaml", {})
    for name, scopes in (("team", (Scope.INFER,)), ("root", (Scope.ADMIN,))):
        values[name] = keys.add(name, *scopes)
    values["wrong"] = f"dyn-{secrets.token_hex(6)}-{secrets.token_urlsafe(32)}"
    digests = re.findall(r"sha256:\w+:(\w+)", keys.path.read_text())
    values |= {f"hash {number}": digest for number, digest in enumerate(digests)}
    nats_config = f"authorization {{ user: me, password: {values['nats']} }}"
    async with start_etcd(tmp_path / "etcd") as etcd, start_nats(tmp_path / "nats", config=nats_config) as nats:
        for command in (f"user add root:{values['etcd']}", "user grant-role root root", "auth enable"):
            await asyncio.to_thread(etcdctl, etcd.endpoint, *command.split())
        logins = ("--nats-user", "me", "--nats-password-file", files["nats"])
        logins += ("--etcd-user", "root", "--etcd-password-file", files["etcd"], "--log-level", "debug")
        restricted = ("--grpc-restricted-protocol-file", files["grpc"], "--http-restricted-api-file", files["http"])
        access = ("--api-keys-file", str(keys.path), "--api-open", "metadata", *restricted)
        async with (
            worker(etcd, nats, namespace, "--model", "echo", *logins) as back,
            frontend(etcd.endpoint, nats.url, namespace, *logins, *access) as front,
        ):
            await front.serves("echo")
            shown = await every_response(front.http_port, front.grpc_target, values)
            keys.add("another")  # read anew
            keys.path.write_text("- {name: x, hash: " + values["hash 0"] + "}")  # cannot be used
            await request_until_logged(front, values["root"], "the old one stays")
            shown["frontend's arguments"] = arguments(front)
            shown["worker's arguments"] = arguments(back)
            front.terminate()
            back.terminate()
            await front.ended()
            await back.ended()
            shown["frontend's log"], shown["worker's log"] = "\n".join(front.lines), "\n".join(back.lines)
    assert "DEBUG" in shown["frontend's log"]
    leaks = [f"{name} in {where}" for where, text in shown.items() for name, value in values.items() if value in text]
    assert leaks == []


async def request_until_logged(front: FrontendProcess, key: str, words: str) -> None:
    """Make the server look at its key file, which it does when a request comes."""
    async with asyncio.timeout(120), httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}") as client:
        while not any(words in line for line in front.lines):
            await client.get("/metrics", headers={"x-api-key": key})
            await asyncio.sleep(0.1)


def arguments(process: Process) -> str:
    return Path(f"/proc/{process.process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


async def every_response(http_port: int, grpc_target: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return the responses of a frontend to requests with right and wrong secrets."""
    responses = {}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=120) as client:
        for name in ("team", "root", "wrong"):
            headers = {"authorization": f"Bearer {values[name]}", "x-admin": values["client"]}
            for path in ("/v2/models/echo/infer", "/v2/repository/models/echo/load", "/busy_threshold", "/v1/chat/completions"):
                response = await client.post(path, json=TENSOR, headers=headers)
                responses[f"{path} with {name}"] = str(response.headers) + response.text
            wrong = await client.post("/v2/repository/index", headers={**headers, "x-admin": values["admin"]})
            responses[f"a wrong header with {name}"] = str(wrong.headers) + wrong.text
        responses["metrics"] = (await client.get("/metrics", headers={"x-api-key": values["root"]})).text
        responses["health"] = (await client.get("/health?instances=true")).text
    async with grpc.aio.insecure_channel(grpc_target) as channel:
        for method in ("ModelInfer", "RepositoryIndex", "RepositoryModelLoad"):
            for name in ("team", "root", "wrong"):
                metadata = (("x-api-key", values[name]), ("triton-grpc-protocol-admin", values["admin"]))
                start: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SERVICE + method)
                call = start(infer_request() if method == "ModelInfer" else b"", metadata=metadata, timeout=120)
                details = str(await call.details())
                responses[f"{method} with {name}"] = details + str(await call.trailing_metadata())
    return responses


async def test_all_links_speak_tls_and_certificates_are_renewed_in_every_process(tmp_path: Path, namespace: str) -> None:
    ca = trustme.CA()
    ca_file = write_ca(ca, tmp_path / "ca.pem")
    server, client = issue(ca, tmp_path, "server"), issue(ca, tmp_path, "client", "client@example")
    tls = ServerTls(server.cert, server.key, ca_file)
    etcd_server, nats_server = start_etcd(tmp_path / "etcd", tls=tls), start_nats(tmp_path / "nats", tls=tls)
    own = tuple(
        word
        for system in ("nats", "etcd")
        for flag, path in (("ca", ca_file), ("cert", client.cert), ("key", client.key))
        for word in (f"--{system}-tls-{flag}-file", str(path))
    )
    front = issue(ca, tmp_path, "front")
    ports = ("--use-tls", "--cert-file", str(front.cert), "--key-file", str(front.key), "--client-ca-file", str(ca_file))
    async with etcd_server as etcd, nats_server as nats:
        await serves_with_tls(etcd, nats, namespace, own, (*own, *ports, "--processes", "2"), ca, tmp_path)


async def serves_with_tls(
    etcd: EtcdServer,
    nats: NatsServer,
    namespace: str,
    worker_flags: tuple[str, ...],
    frontend_flags: tuple[str, ...],
    ca: trustme.CA,
    folder: Path,
) -> None:
    ca_file, client_cert, client_key = (folder / name for name in ("ca.pem", "client.pem", "client.key"))
    context = ssl.create_default_context(cafile=str(ca_file))
    context.load_cert_chain(client_cert, client_key)
    credentials = grpc.ssl_channel_credentials(ca_file.read_bytes(), client_key.read_bytes(), client_cert.read_bytes())
    async with (
        worker(etcd, nats, namespace, "--model", "echo", *worker_flags),
        frontend(etcd.endpoint, nats.url, namespace, *frontend_flags) as front,
        httpx2.AsyncClient(base_url=f"https://127.0.0.1:{front.http_port}", verify=context) as http,
        grpc.aio.secure_channel(front.grpc_target, credentials) as channel,
    ):
        async with asyncio.timeout(120):
            while True:
                try:
                    if (await http.post("/v2/models/echo/infer", json=TENSOR)).status_code == 200:
                        break
                except httpx2.TransportError:
                    assert front.process.returncode is None
                await asyncio.sleep(0.1)
        infer: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"{SERVICE}ModelInfer")
        assert await infer(infer_request(), wait_for_ready=True, timeout=120)
        front_key, front_cert = folder / "front.key", folder / "front.pem"
        issued = ca.issue_cert("127.0.0.1")
        front_key.write_bytes(issued.private_key_pem.bytes())
        front_cert.write_bytes(issued.cert_chain_pems[0].bytes())
        expected = ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())
        for port in (front.http_port, front.grpc_port):
            in_a_row = 0
            async with asyncio.timeout(120):
                while in_a_row < 12:  # of two processes that share the port
                    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
                    writer.close()
                    in_a_row = in_a_row + 1 if shown == expected else 0
                    await asyncio.sleep(0.02)
        assert await infer(infer_request(), timeout=120)
