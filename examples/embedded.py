"""A worker and a frontend inside one program, which sends itself one request and ends.

    DYN_ETCD_ENDPOINTS=http://127.0.0.1:2379 DYN_NATS_SERVERS=nats://127.0.0.1:4222 python examples/embedded.py

Both sides belong to the fleet: other frontends may send requests to this worker, and this frontend to other workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dynamo.common.config import load
from dynamo.common.lifecycle import run
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import FrontendConfig
from dynamo.worker.app import serve_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.python import PythonEngine, Tensor

READY_S = 30.0


class Shout:
    """The model `shout`: texts in, the same texts in capitals out."""

    inputs: ClassVar = {"text": Tensor("BYTES", [-1])}
    outputs: ClassVar = {"loud": Tensor("BYTES", [-1])}

    def infer(self, text: NDArray[np.object_]) -> dict[str, NDArray[np.object_]]:
        return {"loud": np.array([element.upper() for element in text], np.object_)}


async def until_ready(frontend: Frontend, model: str) -> None:
    """Returns when an instance has registered the model; raises TimeoutError."""
    changed = asyncio.Event()
    frontend.plane.models.on_change(changed.set)
    async with asyncio.timeout(READY_S):
        while not frontend.readiness.is_model_ready(model):
            changed.clear()
            await changed.wait()


def shout(port: int, text: str) -> str:
    """One request to `shout` over KServe's REST protocol."""
    body = json.dumps({"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}]}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/shout/infer", body, timeout=READY_S) as response:
        loud: str = json.load(response)["outputs"][0]["data"][0]
        return loud


async def main() -> None:
    # Flags, DYN_* variables and a file, as the commands take them. WorkerConfig(nats=NatsOptions(…), …) does without.
    worker = load(WorkerConfig, [], os.environ, program="embedded")
    frontend = load(FrontendConfig, ["--http-port", "0", "--settle-s", "0"], os.environ, program="embedded")
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:  # if the worker fails, what waits for it is cancelled
        tasks.create_task(serve_worker(PythonEngine(Shout), worker, stop=stop))
        async with serve_frontend(frontend) as served:
            await until_ready(served, "shout")
            print(await asyncio.to_thread(shout, served.http_port, "hello, fleet"))
        stop.set()  # the worker deregisters, finishes what it has begun, and returns


if __name__ == "__main__":
    run(main())
