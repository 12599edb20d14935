"""The worked examples of docs/extending.md run, and the page shows them as they are."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import grpc
import httpx2
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.config import ConfigError, load, markdown_table
from dynamo.common.discovery import Instance
from dynamo.common.errors import InvalidRequest, NoInstances
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Stop, Summary, pack_tokens
from dynamo.common.names import InstanceId
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.api.rpc.server import serve_grpc
from dynamo.frontend.config import GrpcOptions, HttpOptions
from dynamo.frontend.router.base import Router, RouteRequest
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.protos.inference_pb2 import ModelReadyRequest, RepositoryIndexResponse
from dynamo.worker.engine.base import Context, Engine, HasFiles
from examples.extending.adapter_router import AdapterRouter
from examples.extending.context_endpoint import context_operations
from examples.extending.instances_extension import instance_methods, instance_operations
from examples.extending.option import ExampleConfig
from examples.extending.prompt_metric import CountingRouter, PromptMetrics
from examples.extending.reverse_engine import ReverseEngine
from tests.support.fakes import instance
from tests.support.http_edge import HttpEdge, open_http_edge

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "extending.md"
FILES = sorted((ROOT / "examples" / "extending").glob("*.py"))


def fleet(*ids: int) -> tuple[Instance, ...]:
    return tuple(instance(number) for number in ids)


# Engine


async def respond(prompt: bytes, **settings: int | None) -> tuple[bytes, FinishReason | None, Summary]:
    """Return text, finish reason and summary of a request to a new engine."""
    engine = ReverseEngine()
    await engine.start()
    request = GenerateRequest(model="reverse", prompt=pack_tokens(list(prompt)), stop=Stop(**settings))  # type: ignore[arg-type]
    *deltas, summary = [item async for item in engine.generate(request, Context("r"))]
    assert engine.load().running == 0
    await engine.close()
    assert isinstance(summary, Summary)
    assert all(isinstance(delta, Delta) for delta in deltas)
    return bytes(token for delta in deltas for token in delta.tokens), deltas[-1].finish_reason, summary  # type: ignore[union-attr]


async def test_the_engine_says_the_prompt_backwards_up_to_the_limit() -> None:
    assert isinstance(ReverseEngine(), Engine) and isinstance(ReverseEngine(), HasFiles)
    assert await respond(b"abc") == (b"cba", FinishReason.STOP, Summary(prompt_tokens=3, output_tokens=3))
    assert await respond(b"abc", max_tokens=2) == (b"cb", FinishReason.LENGTH, Summary(prompt_tokens=3, output_tokens=2))


async def test_the_engine_refuses_several_choices() -> None:
    with pytest.raises(InvalidRequest, match="one choice"):
        await anext(ReverseEngine().generate(GenerateRequest(model="reverse", prompt=b"", n=2), Context("r")))


# Router policy


def test_an_adapter_stays_at_its_instance_while_that_is_there() -> None:
    router: Router = AdapterRouter()
    adapters = [f"adapter-{number}" for number in range(200)]

    def places(candidates: tuple[Instance, ...]) -> dict[str, int]:
        return {name: router.pick(RouteRequest("m", adapter=name), candidates).instance.id for name in adapters}

    three, two = places(fleet(1, 2, 3)), places(fleet(3, 1))
    assert set(three.values()) == {1, 2, 3}
    assert [name for name in adapters if three[name] != 2 and two[name] != three[name]] == []


def test_requests_without_an_adapter_take_turns_and_a_named_instance_is_obeyed() -> None:
    router, two = AdapterRouter(), fleet(1, 2)
    assert {router.pick(RouteRequest("m"), two).instance.id for _ in range(2)} == {1, 2}
    for named in (InstanceId(1), InstanceId(2)):
        assert router.pick(RouteRequest("m", adapter="a", pinned=named), two).instance.id == named
    with pytest.raises(NoInstances):
        router.pick(RouteRequest("m", adapter="a", pinned=InstanceId(9)), two)


# Metric


def test_the_metric_counts_prompt_tokens_by_model() -> None:
    registry = CollectorRegistry()
    router = CountingRouter(RoundRobin(), PromptMetrics(registry))
    for length in (3, 4):
        router.pick(RouteRequest("m", prompt=pack_tokens(range(length))), fleet(1))
    assert registry.get_sample_value("dynamo_frontend_routed_prompt_tokens_total", {"model": "m"}) == 7


# Option


def test_the_option_has_a_flag_a_variable_a_default_and_a_bound() -> None:
    def read(*argv: str, **environ: str) -> ExampleConfig:
        return load(ExampleConfig, argv, environ, program="example")

    assert (read().warm_up.requests, read().warm_up.timeout_s) == (0, 60.0)
    assert read("--warm-up-requests", "3", DYN_WARM_UP_TIMEOUT_S="9").warm_up.timeout_s == 9
    with pytest.raises(ConfigError, match="--warm-up-requests"):
        read("--warm-up-requests", "-1")
    with pytest.raises(ConfigError, match="at least 1"):
        read("--warm-up-requests", "101", "--warm-up-timeout", "0.5")
    assert "`--warm-up-timeout`" in markdown_table(ExampleConfig)


# HTTP endpoint, KServe extension


async def get(edge: HttpEdge, method: str, path: str, body: object = None) -> httpx2.Response:
    """Return the response of a server that has the example's routes, on the data plane of `edge`."""
    app = HttpApp([*instance_operations(edge.plane), *context_operations(edge.plane)])
    async with serve_http(HttpOptions(port=0), app) as server, httpx2.AsyncClient() as session:
        return await session.request(method, f"http://127.0.0.1:{server.port}{path}", json=body)


async def test_the_endpoint_tells_how_much_of_the_context_is_left() -> None:
    async with open_http_edge() as edge:
        response = await get(edge, "POST", "/v1/context", {"model": "talker", "prompt": "hello"})
        assert (response.status_code, response.json()) == (200, {"prompt_tokens": 5, "tokens_left": 4091})
        assert (await get(edge, "POST", "/v1/context", {"model": "nothing", "prompt": ""})).status_code == 404
        wrong = await get(edge, "POST", "/v1/context", {"model": "talker", "prompts": ""})
        assert (wrong.status_code, "prompts" in wrong.json()["error"]["message"]) == (400, True)


async def test_the_extension_gives_the_same_over_rest_and_grpc() -> None:
    async with open_http_edge() as edge:
        response = await get(edge, "GET", "/v2/models/talker/instances")
        assert response.json() == {"name": "talker", "instances": ["1"]}
        assert (await get(edge, "GET", "/v2/models/nothing/instances")).status_code == 404
        async with (
            serve_grpc(GrpcOptions(port=0), instance_methods(edge.plane, lambda: ANONYMOUS)) as server,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        ):
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInstances")
            index = RepositoryIndexResponse.FromString(await call(ModelReadyRequest(name="talker").SerializeToString()))
            assert [(entry.name, entry.state) for entry in index.models] == [("1", "READY")]
            with pytest.raises(grpc.aio.AioRpcError, match="nothing"):
                await call(ModelReadyRequest(name="nothing").SerializeToString())


# The page


def test_the_page_names_every_example_and_its_code_is_that_of_the_examples() -> None:
    page, sources = PAGE.read_text(), "\n".join(file.read_text() for file in FILES)
    assert [file.name for file in FILES if f"examples/extending/{file.name}" not in page] == []
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert blocks
    assert [block for block in blocks if block.strip() not in sources] == []


def test_modules_and_symbols_that_the_page_names_exist() -> None:
    for module, name in re.findall(r"`(dynamo(?:\.\w+)+):(\w+)`", PAGE.read_text()):
        assert hasattr(importlib.import_module(module), name), f"{module}:{name}"
