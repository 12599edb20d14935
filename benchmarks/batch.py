"""How long a batch of 10,000 lines takes, and whether every line is in its output once.

    python -m benchmarks.batch --lines 10000 --frontends 2

The engine is simulated and takes no time: what is measured is what carrying out a batch costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import httpx2
import uvloop

from benchmarks.deployment import ours
from benchmarks.measuring import Meter

MODEL = "sim"
TIMEOUT_S = 600.0
POLL_S = 0.2


def lines_of(count: int) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Say something short."}], "max_tokens": 16}
    lines = ({"custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions", "body": body} for n in range(count))
    return "\n".join(map(json.dumps, lines)).encode()


async def measure(lines: int, frontends: int) -> None:
    started = ours(
        models=("sim:speedup=0",),
        worker_flags=("--model-name", MODEL),
        wait_for=(MODEL,),
        more_frontends=["auto"] * (frontends - 1),
    )
    async with (
        started as system,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{system.http_port}", timeout=60) as client,
        asyncio.timeout(TIMEOUT_S),
    ):
        file = await client.post("/v1/files", files={"file": ("f.jsonl", lines_of(lines))}, data={"purpose": "batch"})
        request = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        with Meter(system.pids) as meter:
            batch = (await client.post("/v1/batches", json=request)).json()
            while batch["status"] in ("validating", "in_progress", "finalizing"):
                await asyncio.sleep(POLL_S)
                batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        output = (await client.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
    ids = [json.loads(line)["custom_id"] for line in output]
    if ids != [f"c{n}" for n in range(lines)]:
        raise RuntimeError(f"the batch is {batch['status']}, and its output has {len(ids)} lines, {len(set(ids))} different ones")
    print(f"{lines} lines in {meter.wall_s:.1f} s: {lines / meter.wall_s:.0f} a second, each in the output once and in order")
    for name, seconds in meter.cpu_s.items():
        print(f"  {name}: {seconds:.1f} s of CPU, {seconds / lines * 1e3:.2f} ms a line")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch", description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--frontends", type=int, default=1)
    options = parser.parse_args()
    uvloop.run(measure(options.lines, options.frontends))


if __name__ == "__main__":
    main()
