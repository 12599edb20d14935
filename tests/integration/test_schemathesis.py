"""Requests made from /openapi.json, right and wrong ones, to every path of a running frontend: none may break it."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NAMES = ("echo-llm", "sim", "types", "repeater", "embedder")
MODELS = (*NAMES, "echo-llm", "sim", "missing")
SERVED = (
    "echo:llm",
    f"echo:{HERE}/clients/models/types.yaml",
    f"echo:{HERE}/clients/models/repeater.yaml",
    f"{HERE}/clients/models/embedder.py:Embedder",
)
VERSIONS = ("1", "2", "latest")
DATATYPES = ("", "INT32", "FP32", "BYTES", "BOOL")
NEEDED = ("model", "messages", "prompt", "input", "inputs", "max_tokens", "text", "tokens")
EXAMPLES = 4
"""Examples of each method of each path, of right requests and of wrong ones each."""
BROKEN = (500, 502)
MOST_TOKENS = 64
PLAIN = {"messages": [{"role": "user", "content": "Hello"}], "prompt": "Hello", "input": "Hello", "text": "Hello"}
SIMPLE = (0, 1, 3)
"""So many optional fields are looked at for themselves, in a request that is right but for them."""
LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


def aimed(case: Case, model: str, version: str, datatype: str, kept: int, chance: random.Random) -> Case:
    """The case with names of models and inputs, which chance does not find, and without an order for a million tokens.

    At most `kept` of the optional fields stay, as with many there is always one that the server refuses.
    """
    parameters = {"model": model, "version": version}
    case.path_parameters = {name: parameters.get(name, value) for name, value in (case.path_parameters or {}).items()}
    body = case.body
    if not isinstance(body, dict):
        return case
    optional = [name for name in body if name not in NEEDED]
    for name in chance.sample(optional, max(0, len(optional) - kept)):
        del body[name]
    if case.path.rpartition("/")[2].startswith("generate"):
        body |= {"text_input": "Hello", "max_tokens": MOST_TOKENS}
    if limit := LIMITS.get(case.path):
        body.setdefault(limit, MOST_TOKENS)
    if kept in SIMPLE:
        body |= {name: simple for name, simple in PLAIN.items() if name in body}
    if "model" in body or (case.path in LIMITS and kept in SIMPLE):
        body["model"] = model
    for name in (*LIMITS.values(), "min_tokens", "n", "best_of"):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], MOST_TOKENS)
    tensors = body.get("inputs")
    for tensor in tensors if isinstance(tensors, list) else ():
        if isinstance(tensor, dict) and datatype:
            tensor["name"] = tensor["datatype"] = datatype
    return case


def attack(url: str) -> list[str]:
    """The requests that broke the server, as curl commands."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    broken: list[str] = []
    count = 0
    for described in schema.get_all_operations():
        operation = described.ok()
        for mode in GenerationMode:
            test = _attack_one(operation.as_strategy(generation_mode=mode), broken)
            try:
                test()
            except hypothesis.errors.Unsatisfiable:
                continue  # it takes nothing that could be wrong
            count += 1
    assert count > 50, count
    return broken


def _attack_one(cases: st.SearchStrategy[Case], broken: list[str]) -> Callable[[], None]:
    @hypothesis.seed(20260711)
    @hypothesis.settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(
        case=cases,
        kept=st.sampled_from([100, *SIMPLE]),
        chance=st.randoms(),
        model=st.sampled_from(MODELS),
        version=st.sampled_from(VERSIONS),
        datatype=st.sampled_from(DATATYPES),
    )
    def test(case: Case, model: str, version: str, datatype: str, kept: int, chance: random.Random) -> None:
        response = aimed(case, model, version, datatype, kept, chance).call(timeout=120)
        if response.status_code in BROKEN:
            broken.append(f"{response.status_code} {response.text[:300]}\n  {case.as_curl_command()[:1500]}")

    return test


async def test_no_request_breaks_the_frontend(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    models = [flag for model in SERVED for flag in ("--model", model)]
    async with (
        worker(etcd_server, nats_server, namespace, *models),
        worker(etcd_server, nats_server, namespace, "--model", "sim:speedup=20"),
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        await front.serves(*NAMES)
        # In a process of its own: Python 3.11 at times fails to parse in one thread what it also parses in another.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as attackers:
            broken = await asyncio.get_running_loop().run_in_executor(attackers, attack, f"http://127.0.0.1:{front.http_port}")
        assert not broken, "\n".join(broken)
        assert not [line for line in front.lines if " ERROR " in line or "Traceback" in line]
        status, _ = await front.health()
        assert status == 200
