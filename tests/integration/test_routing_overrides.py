"""What requests, sessions and operators may say about routing: real etcd and nats-server, simulated engines, real clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest

from dynamo.common.names import Endpoint
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import (
    AffinityMode,
    FrontendConfig,
    GrpcOptions,
    HttpOptions,
    KvCost,
    KvRouterOptions,
    RouterMode,
    RouterOptions,
    Thresholds,
)
from dynamo.frontend.router.base import Router
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.measured import MeasuredRouter
from dynamo.frontend.router.policies.affinity import SessionRouter
from dynamo.frontend.router.policies.sequences import SequenceRouter
from dynamo.protos import inference_pb2 as pb
from dynamo.worker.app import Worker, open_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config
from tests.support.fleet import SERVICE, text_request
from tests.support.processes import frontend as frontend_process
from tests.support.processes import worker as worker_process
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import until

SIM = "blocks=4000,block_size=16,speedup=1"
PROMPT = "the same words in each of them, many times over, to fill some blocks; " * 6
KV = RouterOptions(mode=RouterMode.KV)


class FrontendClient:
    """A client of one frontend, over HTTP and gRPC."""

    def __init__(self, frontend: Frontend, http: httpx2.AsyncClient, channel: grpc.aio.Channel) -> None:
        self.frontend = frontend
        self.http = http
        self.channel = channel

    async def complete(self, *, headers: dict[str, str] | None = None, prompt: str = PROMPT, **fields: Any) -> httpx2.Response:
        body = {"model": "sim", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **fields}
        return await self.http.post("/v1/completions", json=body, headers=headers or {})

    async def instance(self, *, headers: dict[str, str] | None = None, nvext: dict[str, Any] | None = None, **fields: Any) -> str:
        """Where a request goes, as `nvext` tells."""
        response = await self.complete(headers=headers, nvext={**(nvext or {}), "extra_fields": ["worker_id"]}, **fields)
        assert response.status_code == 200, response.text
        id_: str = response.json()["nvext"]["worker_id"]["decode_worker_id"]
        return id_

    async def infer(self, *metadata: tuple[str, str], prompt: str = PROMPT) -> list[dict[str, Any]]:
        """The explanation of a ModelInfer call."""
        request = pb.ModelInferRequest.FromString(text_request(prompt, 4))
        del request.inputs[1]  # `streaming`
        call = self.channel.unary_unary(SERVICE + "ModelInfer")(request.SerializeToString(), metadata=metadata, timeout=120)
        await call
        return _explained(await call.trailing_metadata())

    async def stream(self, *metadata: tuple[str, str]) -> list[dict[str, Any]]:
        """The explanation of a ModelStreamInfer call."""
        call = self.channel.stream_stream(SERVICE + "ModelStreamInfer")(metadata=metadata, timeout=120)
        await call.write(text_request(PROMPT, 4))
        await call.done_writing()
        while isinstance(data := await call.read(), bytes):
            assert not pb.ModelStreamInferResponse.FromString(data).error_message
        return _explained(await call.trailing_metadata())

    @asynccontextmanager
    async def holding(self, instance: str) -> AsyncIterator[None]:
        """A long response is on its way from an instance while the body runs."""
        body = {"model": "sim", "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body, headers={"x-dynamo-instance": instance}) as response:
            assert response.status_code == 200
            async with aclosing(response.aiter_lines()) as lines:  # not read to the end, where the response ends
                await anext(lines)
                yield

    async def thresholds(self) -> dict[str, Any]:
        response = await self.http.get("/busy_threshold")
        assert response.status_code == 200
        return {entry.pop("model"): entry for entry in response.json()["thresholds"]}


def _explained(metadata: Any) -> list[dict[str, Any]]:
    explained = dict(metadata or ()).get("x-dynamo-explain", "[]")
    decisions: list[dict[str, Any]] = json.loads(explained)
    return decisions


@dataclass
class Deployment:
    links: dict[str, Any]
    namespace: str
    stack: AsyncExitStack
    workers: list[Worker] = field(default_factory=list)
    clients: list[FrontendClient] = field(default_factory=list)

    @property
    def instances(self) -> list[str]:
        return sorted(f"{worker.instance:x}" for worker in self.workers)

    async def add_worker(self, stack: AsyncExitStack) -> Worker:
        config = WorkerConfig(endpoint=Endpoint(namespace=self.namespace), **self.links)
        engine = SimEngine(sim_config(SIM, "sim", None, None))
        self.workers.append(await stack.enter_async_context(open_worker(engine, config)))
        return self.workers[-1]

    async def add_frontend(self, router: RouterOptions, **options: Any) -> FrontendClient:
        config = FrontendConfig(namespace=self.namespace, router=router, **self.links)
        config = replace(config, **{"http": HttpOptions(port=0), "grpc": GrpcOptions(enabled=True, port=0), **options})
        frontend = await self.stack.enter_async_context(serve_frontend(config))
        http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", timeout=120)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{frontend.grpc_port}")
        client = FrontendClient(
            frontend, await self.stack.enter_async_context(http), await self.stack.enter_async_context(channel)
        )
        await until(lambda: frontend.plane.model_ready("sim"))
        await until(lambda: len(frontend.plane.models.instances("sim")) == len(self.workers))
        self.clients.append(client)
        return client


@asynccontextmanager
async def deployment(etcd: EtcdServer, nats: NatsServer, namespace: str, workers: int = 2) -> AsyncIterator[Deployment]:
    links = {"etcd": EtcdOptions(endpoints=(etcd.endpoint,)), "nats": NatsOptions(servers=(nats.url,)), "log": LogOptions()}
    async with AsyncExitStack() as stack:
        deployment = Deployment(links, namespace, stack)
        for _ in range(workers):
            await deployment.add_worker(stack)
        yield deployment


def router_inside(client: FrontendClient) -> Router:
    """The one that is not there to measure or for sequences."""
    router = client.frontend.plane.router
    while isinstance(router, MeasuredRouter | SequenceRouter):
        router = router.inner
    return router


def sessions_of(client: FrontendClient) -> SessionRouter:
    router = router_inside(client)
    assert isinstance(router, SessionRouter)
    return router


async def until_async(condition: Callable[[], Any], within_s: float = 120) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_a_request_may_name_its_instance_on_every_protocol(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with deployment(etcd_server, nats_server, namespace) as d:
        client = await d.add_frontend(RouterOptions())
        for wanted in d.instances * 2:
            assert await client.instance(headers={"x-dynamo-instance": wanted}) == wanted
            assert await client.instance(headers={"x-worker-instance-id": wanted}) == wanted
            assert await client.instance(nvext={"backend_instance_id": wanted}) == wanted
            (decision,) = await client.infer(("x-dynamo-instance", wanted), ("x-dynamo-explain", "true"))
            assert (decision["instance"], decision["reason"]) == (wanted, "pinned")
        one, other = d.instances
        assert await client.instance(headers={"x-dynamo-instance": one}, nvext={"backend_instance_id": other}) == one
        absent = await client.complete(headers={"x-dynamo-instance": "123"})
        assert absent.status_code == 503
        assert "instance 123 does not serve model 'sim' now" in absent.text


async def test_router_settings_of_one_request_change_its_costs_and_no_others(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with deployment(etcd_server, nats_server, namespace) as d:
        client = await d.add_frontend(replace(KV, kv=KvRouterOptions(cost=KvCost.WEIGHTS, speculative_ttl_s=0)))
        cached = await client.instance()
        kv = router_inside(client)
        assert isinstance(kv, KvRouter)
        await until(lambda: kv.index("sim").held(next(w.instance for w in d.workers if f"{w.instance:x}" == cached)))

        async def by_grpc(*metadata: tuple[str, str]) -> float:
            # Pinned, so that the prompt stays cached there alone.
            return gap(await client.infer(("x-dynamo-explain", "true"), ("x-dynamo-instance", cached), *metadata))

        async def by_http(headers: dict[str, str], **fields: Any) -> float:
            headers = {"x-dynamo-explain": "true", "x-dynamo-instance": cached, **headers}
            return gap(json.loads((await client.complete(headers=headers, **fields)).headers["x-dynamo-explain"]))

        def gap(decisions: list[dict[str, Any]]) -> float:
            """How much less it costs where the prompt is cached."""
            costs = {each["instance"]: each["cost"] for each in decisions[0]["candidates"]}
            return sum(costs.values()) - 2 * costs[cached]

        async with client.holding(cached):  # so that it costs more where the prompt is cached, if that counts for nothing
            usual = await by_grpc()
            assert usual > 0
            assert await by_grpc(("x-dynamo-overlap-score-weight", "0")) < 0
            assert await by_grpc(("x-dynamo-overlap-score-credit", "100")) > 10 * usual
            assert await by_grpc(("x-dynamo-prefill-load-scale", "0")) < 0
            nothing = {"nvext": {"router": {"overlap_score_weight": 0}}}
            assert await by_http({}, **nothing) < 0
            assert await by_http({"x-dynamo-overlap-score-weight": "4"}, **nothing) > 0
            assert await client.instance(nvext=nothing["nvext"]) != cached
        spread = {await client.instance(headers={"x-dynamo-router-temperature": "100"}) for _ in range(20)}
        assert spread == set(d.instances)


@pytest.mark.parametrize("mode", [RouterMode.KV, RouterMode.ROUND_ROBIN])
async def test_settings_out_of_range_are_refused_in_every_mode_and_protocol(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, mode: RouterMode
) -> None:
    async with deployment(etcd_server, nats_server, namespace, workers=1) as d:
        client = await d.add_frontend(RouterOptions(mode=mode))
        for headers, nvext, sentence in (
            ({"x-dynamo-router-temperature": "-1"}, None, "'router_temperature' is -1; it must be at least 0 and at most 100"),
            ({"x-dynamo-overlap-score-weight": "lots"}, None, "'x-dynamo-overlap-score-weight' must be a number, got 'lots'"),
            ({"x-dynamo-explain": "why"}, None, "'x-dynamo-explain' must be true or false"),
            ({}, {"router": {"router_temperature": 101}}, "'nvext.router.router_temperature' must be at most 100"),
            ({}, {"router": {"overlap_score_weight": 1, "overlap_score_credit": 2}}, "are one setting; send one of them"),
            ({}, {"backend_instance_id": "zz"}, "'zz' is not an instance id"),
        ):
            response = await client.complete(headers=headers, **({} if nvext is None else {"nvext": nvext}))
            assert response.status_code == 400
            assert sentence in response.json()["error"]["message"]
        rest = await client.http.post(
            "/v2/models/sim/generate", json={"text_input": "x"}, headers={"x-dynamo-router-temperature": "x"}
        )
        assert (rest.status_code, rest.json()["error"]) == (400, "'x-dynamo-router-temperature' must be a number, got 'x'")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.infer(("x-dynamo-overlap-score-weight", "-0.5"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "'overlap_score_weight' is -0.5" in (refused.value.details() or "")


async def test_explanations_are_returned_on_request_by_every_protocol(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with deployment(etcd_server, nats_server, namespace) as d:
        client = await d.add_frontend(KV, grpc=GrpcOptions(enabled=True, port=0))
        why = {"x-dynamo-explain": "true", "x-request-id": "mine"}
        unary = await client.complete(headers=why)
        streamed = await client.complete(headers=why, stream=True)
        rest = await client.http.post("/v2/models/sim/generate", json={"text_input": PROMPT, "max_tokens": 4}, headers=why)
        events = await client.http.post(
            "/v2/models/sim/generate_stream", json={"text_input": PROMPT, "max_tokens": 4}, headers=why
        )
        explanations = [json.loads(response.headers["x-dynamo-explain"]) for response in (unary, streamed, rest, events)]
        metadata = (("x-dynamo-explain", "true"), ("x-request-id", "mine"))
        explanations += [await client.infer(*metadata), await client.stream(*metadata)]
        for (decision,) in explanations:
            assert (decision["request_id"], decision["model"], decision["instances"]) == ("mine", "sim", 2)
            assert sorted(each["instance"] for each in decision["candidates"]) == d.instances
            assert {"cost", "overlap_blocks", "prefill_tokens", "decode_blocks", "kv_usage"} <= decision["candidates"][0].keys()
        assert explanations[0][0]["reason"] == "kv: nothing cached"
        assert {decision["instance"] for (decision,) in explanations} == {explanations[0][0]["instance"]}
        assert explanations[-1][0]["overlap_blocks"] > 10
        # Who did not ask is told nothing; a call that failed is told what is known.
        assert "x-dynamo-explain" not in (await client.complete()).headers
        assert await client.infer() == []
        decisions = (await client.http.get("/v1/routing/decisions", params={"limit": 6, "model": "sim"})).json()["decisions"]
        assert [decision["request_id"] for decision in decisions] == ["mine"] * 6
        await client.complete(headers={"x-request-id": "watched"})  # from the first reading on, all are shown
        decisions = (await client.http.get("/v1/routing/decisions", params={"limit": 1})).json()["decisions"]
        assert [decision["request_id"] for decision in decisions] == ["watched"]
        wrong = await client.http.get("/v1/routing/decisions", params={"limit": "0"})
        assert wrong.status_code == 400


async def test_a_session_stays_with_its_instance_on_every_protocol_until_that_is_gone(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with deployment(etcd_server, nats_server, namespace) as d, AsyncExitStack() as leaving:
        third = await d.add_worker(leaving)
        client = await d.add_frontend(RouterOptions(session_affinity_ttl_s=60))
        homes = {await client.instance(headers={"x-dynamo-session": f"s{number}"}): f"s{number}" for number in range(3)}
        assert sorted(homes) == d.instances
        home = homes[f"{third.instance:x}"]
        for _ in range(3):
            assert await client.instance(headers={"x-dynamo-session-id": home}) == f"{third.instance:x}"
            assert await client.instance(nvext={"session_id": home}) == f"{third.instance:x}"
            (decision,) = await client.infer(("x-dynamo-session", home), ("x-dynamo-explain", "1"))
            assert (decision["instance"], decision["reason"]) == (f"{third.instance:x}", "session")
        await leaving.aclose()
        await until(lambda: len(client.frontend.plane.models.instances("sim")) == 2)
        moved = await client.instance(headers={"x-dynamo-session": home})
        assert moved != f"{third.instance:x}"
        assert {await client.instance(headers={"x-dynamo-session": home}) for _ in range(4)} == {moved}


async def test_frontends_that_share_bookings_share_sessions(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with deployment(etcd_server, nats_server, namespace) as d:
        options = replace(KV, session_affinity_ttl_s=60, session_affinity_mode=AffinityMode.SOFT, replica_sync=True)
        clients = [await d.add_frontend(options) for _ in range(2)]
        for number in range(6):
            first, other = clients[number % 2], clients[1 - number % 2]
            session = {"x-dynamo-session": f"s{number}"}
            placed = await first.instance(headers=session, prompt=f"{number} {PROMPT}")
            await until(lambda: len(sessions_of(other)) > number)  # noqa: B023  # awaited here and now
            response = await other.complete(headers={**session, "x-dynamo-explain": "true"}, prompt="new")
            (decision,) = json.loads(response.headers["x-dynamo-explain"])
            assert (decision["reason"], decision["instance"]) == ("session", placed)


async def test_busy_thresholds_change_while_it_runs_in_every_frontend(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with deployment(etcd_server, nats_server, namespace) as d:
        one, two = await d.add_frontend(KV), await d.add_frontend(replace(KV, thresholds=Thresholds(active_prefill_tokens=9000)))
        unset = {"active_decode_blocks_threshold": None, "active_prefill_tokens_threshold": None}
        assert await one.thresholds() == {"sim": unset}
        assert await two.thresholds() == {"sim": {**unset, "active_prefill_tokens_threshold": 9000}}

        async def post(client: FrontendClient, **body: Any) -> httpx2.Response:
            return await client.http.post("/busy_threshold", json=body)

        for body, status, sentence in (
            ({"model": "other", "active_decode_blocks_threshold": 0.5}, 404, "model 'other' is not found"),
            ({"model": "sim", "active_decode_blocks_threshold": 1.5}, 400, "'active_decode_blocks_threshold' must be at most 1"),
            (
                {"model": "sim", "active_prefill_tokens_threshold": -1},
                400,
                "'active_prefill_tokens_threshold' must be at least 0",
            ),
            ({"model": "sim", "threshold": 1}, 400, "unknown field 'threshold'"),
            ({}, 400, "the field 'model' is missing"),
        ):
            refused = await post(one, **body)
            assert (refused.status_code, sentence in refused.json()["error"]) == (status, True), refused.text
        first, second = d.instances
        async with one.holding(first), one.holding(second):
            assert (await two.complete()).status_code == 200
            changed = await post(one, model="sim", active_decode_blocks_threshold=0.0)
            assert changed.json() == {"model": "sim", **unset, "active_decode_blocks_threshold": 0.0}

            async def is_shared() -> bool:
                return bool((await two.thresholds())["sim"] == {**unset, "active_decode_blocks_threshold": 0.0})

            await until_async(is_shared)
            for client in (one, two):

                async def refuses(client: FrontendClient = client) -> bool:
                    response = await client.complete()
                    assert response.status_code == 200 or int(response.headers["retry-after"]) >= 1
                    return response.status_code == 503

                await until_async(refuses)  # as soon as both have reported their load
                named = await client.complete(headers={"x-dynamo-instance": first})
                assert (named.status_code, "is busy" in named.text) == (503, True)
            # Who starts later asks those who know.
            three = await d.add_frontend(KV)
            await until_async(lambda: _equals(three.thresholds(), {"sim": {**unset, "active_decode_blocks_threshold": 0.0}}))
            lifted = await post(two, model="sim", active_decode_blocks_threshold=None)
            assert lifted.json() == {"model": "sim", **unset}
            for client in d.clients:
                await until_async(lambda client=client: _equals(client.thresholds(), {"sim": unset}))  # type: ignore[misc]
                assert (await client.complete()).status_code == 200
        assert (await post(one, model="sim")).json() == {"model": "sim", **unset}


async def _equals(value: Any, wanted: object) -> bool:
    return bool(await value == wanted)


async def test_thresholds_need_a_router_that_follows_loads_and_the_admin_paths_can_be_closed(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with deployment(etcd_server, nats_server, namespace, workers=1) as d:
        client = await d.add_frontend(RouterOptions())
        refused = await client.http.post("/busy_threshold", json={"model": "sim", "active_decode_blocks_threshold": 0.5})
        assert (refused.status_code, "does not follow the loads" in refused.json()["error"]) == (400, True)
        closed = await d.add_frontend(RouterOptions(), http=HttpOptions(port=0, admin_api=False))
        for path in ("/busy_threshold", "/v1/routing/decisions"):
            assert (await client.http.get(path)).status_code == 200
            assert (await closed.http.get(path)).status_code == 404


async def test_thresholds_hold_in_all_processes_behind_one_port(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        worker_process(etcd_server, nats_server, namespace, "--model", f"sim:{SIM}"),
        frontend_process(
            etcd_server.endpoint, nats_server.url, namespace, "--processes", "2", "--router-mode", "least-loaded"
        ) as front,
    ):
        await front.serves("sim")
        # Each process accepts connections to the port before it can serve, and listens for gRPC afterwards.
        await front.logged(" gRPC on ", times=2)
        url = f"http://127.0.0.1:{front.http_port}/busy_threshold"

        async def seen() -> set[int | None]:
            """By connections of their own, which the kernel spreads over the processes."""
            thresholds: set[int | None] = set()
            for _ in range(24):
                async with httpx2.AsyncClient(verify=False) as client:  # reading the system's certificates takes 22 ms
                    response = (await client.get(url)).json()
                    thresholds |= {entry["active_prefill_tokens_threshold"] for entry in response.get("thresholds", ())}
            return thresholds

        async with httpx2.AsyncClient() as client:
            response = await client.post(url, json={"model": "sim", "active_prefill_tokens_threshold": 77})
        assert response.status_code == 200, response.text
        await until_async(lambda: _equals(seen(), {77}))
