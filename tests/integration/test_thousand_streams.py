"""A thousand streams held for half a minute: none fails, and neither process grows."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer

pytestmark = pytest.mark.slow

STREAMS = 1_000
TOKENS = 60
STEP_MS = 200
"""So that a stream of `TOKENS` tokens lasts 12 s."""


@dataclass
class Held:
    """One streamed completion as a client saw it."""

    events: int = 0
    end: bytes = b""

    async def run(self, port: int, request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request)
            async for line in reader:
                if line.startswith(b"data: {"):
                    self.events += 1
                elif line.startswith(b"data: "):
                    self.end = line
                    return
        finally:
            writer.close()


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


async def test_a_thousand_streams_at_once_end_without_an_error_or_growing_memory(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    timing = tmp_path / "steps.csv"
    timing.write_text(f"prefill_tokens,decoding,step_ms\n0,1,{STEP_MS}\n8192,0,{STEP_MS}\n0,1000,{STEP_MS}\n")
    body = {"model": "sim", "prompt": "Once upon", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    model = ("--model", f"sim:timing={timing}", "--max-num-seqs", str(STREAMS))
    async with (
        worker(etcd_server, nats_server, namespace, *model) as engine,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        await front.serves("sim")
        held = [Held() for _ in range(STREAMS)]
        async with asyncio.TaskGroup() as tasks:
            for stream in held:
                tasks.create_task(stream.run(front.http_port, head % len(content) + content))
            async with asyncio.timeout(120):
                while min(stream.events for stream in held) < 10:
                    await asyncio.sleep(0.2)
            before = [rss_mib(process.process.pid) for process in (front, engine)]
            async with asyncio.timeout(120):
                while min(stream.events for stream in held) < TOKENS * 0.8:  # some tokens are no whole character
                    await asyncio.sleep(0.5)
            after = [rss_mib(process.process.pid) for process in (front, engine)]
        assert {stream.end for stream in held} == {b"data: [DONE]\n"}
        grown = [late - early for early, late in zip(before, after, strict=True)]
        assert max(grown) < 10, f"MiB before and after: {before}, {after}"  # ten bytes kept of each message would be a MiB
