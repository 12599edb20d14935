"""Frontend and worker inside another program, by the public Python API."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.support.servers import EtcdServer, NatsServer, etcdctl

ROOT = Path(__file__).parents[2]


async def run_example(**variables: str) -> tuple[int | None, str, str]:
    """Exit status, output and errors of the example, which must end by itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DYN")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "examples/embedded.py",
        cwd=ROOT,
        env=kept | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(120):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(), errors.decode()


async def test_the_example_serves_asks_itself_and_leaves_nothing_behind(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    status, output, errors = await run_example(
        DYN_ETCD_ENDPOINTS=etcd_server.endpoint, DYN_NATS_SERVERS=nats_server.url, DYN_NAMESPACE=namespace
    )
    assert (status, output) == (0, "HELLO, FLEET\n"), errors
    assert "Traceback" not in errors
    assert not etcdctl(etcd_server.endpoint, "get", "--prefix", "--keys-only", f"/dynamo/v1/{namespace}/").strip()


async def test_the_example_says_in_one_sentence_what_is_wrong_with_its_configuration() -> None:
    status, output, errors = await run_example(DYN_DRAIN_TIMEOUT="soon")
    assert (status, output) == (2, "")
    assert errors.startswith("dynamo: ")
    assert "DYN_DRAIN_TIMEOUT" in errors
    assert errors.count("\n") == 1
