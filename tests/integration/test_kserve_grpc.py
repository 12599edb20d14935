"""A KServe request end to end: Triton's client → gRPC → frontend → NATS → worker and back."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import trustme

from dynamo.frontend.security.keys import entry_for, make_key
from tests.support.certificates import issue, write_ca
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


async def run_client(module: str, *arguments: str, timeout_s: float = 600.0) -> list[dict[str, str]]:
    """The JSON lines that a client program prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"tests.integration.clients.{module}", *arguments),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    lines = [json.loads(line) for line in output.splitlines()]
    assert process.returncode == 0, f"the client failed after {lines[-1:]}"
    return lines


async def test_tritons_client_finds_everything_as_it_expects(deployment: FrontendProcess) -> None:
    result = await run_client("kserve_conformance", deployment.grpc_target)
    assert sum(line["kind"] == "good" for line in result) >= 40
    assert sum(line["kind"] == "bad" for line in result) >= 60
    problems = [f"{line['kind']}: {line['case']}\n{line['problem']}" for line in result if line["problem"]]
    assert not problems, "\n".join(problems)
    pool = await asyncio.create_subprocess_exec(
        *(sys.executable, "examples/clients/pool.py", deployment.grpc_target, "classifier", "--requests", "50"),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    printed, _ = await pool.communicate()
    assert printed == b"50 responses over 4 connections: ['probability', 'digit', 'name']\n"
    assert not [line for line in deployment.lines if " ERROR " in line or "Traceback" in line]


async def test_the_options_of_tritons_clients_work(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    ca = trustme.CA()
    authority, pair = write_ca(ca, tmp_path / "ca.pem"), issue(ca, tmp_path, "server", "localhost")
    key = make_key()
    (tmp_path / "keys.yaml").write_text(entry_for(key, "triton"))
    tls = ("--use-tls", "--cert-file", str(pair.cert), "--key-file", str(pair.key))
    flags = (*tls, "--api-keys-file", str(tmp_path / "keys.yaml"))
    async with (
        worker(etcd_server, nats_server, namespace, "--model", f"echo:{HERE}/clients/models/types.yaml"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
    ):
        ports = (str(front.grpc_port), str(front.http_port))
        result = await run_client("triton_options", *ports, str(authority), key)
    assert len(result) == 14
    assert [f"{line['case']}: {line['problem']}" for line in result if line["problem"]] == []
