"""The endpoint picker behind a real Envoy, in front of plain engine pods that workers watch. Real etcd and nats-server."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest
import trustme

from dynamo.common.process.ports import free_ports
from tests.support.certificates import Pair, issue, write_ca
from tests.support.envoy import Change, Envoy, cluster, extensions, manager, start_envoy
from tests.support.pod import Pod, serve_pod
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S, until

LONG = "x" * 100_000
"""A prompt of so many tokens: the tokenizer of the pods has one for each byte."""
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "far", "prompt": "once upon a time", "max_tokens": 2},
    "/v1/chat/completions": {"model": "near", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"model": "far", "input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "far", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v2/models/far/generate": {"text_input": "Hi", "max_tokens": 2},
    "/v2/models/far/infer": {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hi"]}]},
}


@dataclass
class Gateway:
    """Pods, the worker that watches them, and the picker; a test starts its Envoys."""

    pods: list[Pod]
    front: FrontendProcess
    picker_port: int
    picker: tuple[str, ...]
    """Flags of the picker."""
    folder: Path

    def envoy(self, change: Change = lambda config: None) -> Any:
        return start_envoy(self.folder / "envoy", self.picker_port, change)

    async def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the metric's samples that have these labels."""
        async with httpx2.AsyncClient(verify=False) as client:
            text = (await client.get(f"http://127.0.0.1:{self.front.http_port}/metrics")).text
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        lines = [line for line in text.splitlines() if re.match(rf"dynamo_frontend_{name}[{{ ]", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))

    async def idle(self) -> None:
        """Return when no request is booked any more."""
        while await self.metric("inflight_requests"):
            await asyncio.sleep(0.01)

    @property
    def counts(self) -> list[int]:
        return [len(pod.received) for pod in self.pods]


@asynccontextmanager
async def gateway(
    etcd: EtcdServer, nats: NatsServer, namespace: str, folder: Path, *flags: str, pods: int = 2, metrics: str = ""
) -> AsyncIterator[Gateway]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        served = [await enter(serve_pod(f"pod-{number}", folder / "model", metrics=metrics)) for number in range(pods)]
        urls = [flag for pod in served for flag in ("--url", pod.url)]
        await enter(worker(etcd, nats, namespace, *urls, "--served-model-name", "far", "near"))
        [port] = free_ports(1)
        picker = ("--endpoint-picker", "--endpoint-picker-port", str(port), *flags)
        front = await enter(frontend(etcd.endpoint, nats.url, namespace, *picker))
        await front.serves("far")
        yield Gateway(served, front, port, picker, folder)


def client(envoy: Envoy) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=envoy.url, timeout=120, verify=False, limits=httpx2.Limits(max_connections=1000))


def completion(prompt: str = "once", tokens: int = 2, **fields: Any) -> dict[str, Any]:
    return {"model": "far", "prompt": prompt, "max_tokens": tokens, **fields}


async def test_requests_of_every_api_go_straight_to_a_pod_and_are_booked_until_their_response_ends(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with (
        gateway(etcd_server, nats_server, namespace, tmp_path, "--router-mode", "least-loaded") as gate,
        gate.envoy() as envoy,
        client(envoy) as http,
    ):
        for path, body in REQUESTS.items():
            response = await http.post(path, json=body)
            assert (response.status_code, response.headers["x-dynamo-placement"]) == (200, "routed"), response.text
        received = [request for pod in gate.pods for request in pod.received]
        assert sorted(request.path for request in received) == sorted(REQUESTS)
        # A pod knows its model by its own name; elsewhere the body is that of the client.
        for request in received:
            sent = REQUESTS[request.path]
            assert request.json == ({**sent, "model": "served"} if "model" in sent else sent)
        for pod in gate.pods:
            pod.received.clear()

        packed = gzip.compress(json.dumps(completion(LONG)).encode())
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        plain = json.dumps(completion(LONG)).encode()

        async def chunks() -> AsyncIterator[bytes]:
            for begin in range(0, len(plain), 9000):
                yield plain[begin : begin + 9000]

        responses = [
            await http.post("/v1/completions", content=packed, headers=headers),
            await http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"}),
            await http.post("/v1/completions", json=completion(LONG)),
        ]
        assert [(each.status_code, each.headers["x-dynamo-placement"]) for each in responses] == [(200, "routed")] * 3
        sent = [request.json for pod in gate.pods for request in pod.received]
        assert sent == [{**completion(LONG), "model": "served"}] * 3

        # What no operation understands goes to a pod with little load, which says what is wrong with it.
        unclear = [
            await http.get("/v1/models"),
            await http.post("/v1/chat/completions", content=b'{"model": "far", '),
            await http.post("/v1/completions", json={"model": "far"}),
            await http.post("/v1/audio/transcriptions", content=b"\0" * 3_000_000),
            await http.post("/v1/completions", json={"model": "of-the-pods-alone", "prompt": "a"}),
        ]
        assert [each.status_code for each in unclear] == [200, 400, 200, 400, 200]
        assert {each.headers["x-dynamo-placement"] for each in unclear} == {"least-loaded"}
        last = gate.pods[0].received[-1:] + gate.pods[1].received[-1:]
        assert "of-the-pods-alone" in [request.json["model"] for request in last if request.path == "/v1/completions"]

        for pod in gate.pods:
            pod.step_s = 0.05
        async with http.stream("POST", "/v1/completions", json=completion(tokens=1000, stream=True)) as stream:
            parts = stream.aiter_bytes()
            await anext(parts)
            assert await gate.metric("inflight_requests") == 1
        await gate.idle()  # the client has left
        await until(lambda: not any(pod.open_requests for pod in gate.pods))
        async with http.stream("POST", "/v1/completions", json=completion(tokens=5, stream=True)) as stream:
            text = (await stream.aread()).decode()
        assert text.count('"text": "w"') == 5 and text.rstrip().endswith("[DONE]")
        await gate.idle()
        assert await gate.metric("picker_requests_total", outcome="routed") == len(REQUESTS) + 5
        assert await gate.metric("requests_total", status="error", endpoint="completions", error_type="internal") == 0


@pytest.mark.slow  # a flood
async def test_three_hundred_streams_at_once_are_shared_out_and_all_complete(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with (
        gateway(etcd_server, nats_server, namespace, tmp_path, "--router-mode", "least-loaded") as gate,
        gate.envoy() as envoy,
        client(envoy) as http,
    ):
        for pod in gate.pods:
            pod.step_s = 0.1

        async def stream(number: int) -> bool:
            async with http.stream("POST", "/v1/completions", json=completion(f"prompt {number}", 20, stream=True)) as response:
                return (await response.aread()).rstrip().endswith(b"[DONE]")

        assert all(await asyncio.gather(*(stream(number) for number in range(300))))
        assert [count in range(120, 181) for count in gate.counts] == [True, True], gate.counts
        await gate.idle()


async def test_only_endpoints_of_the_subset_are_picked_and_none_is_503(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    rule = {
        "header": "x-subset",
        "on_header_present": {"metadata_namespace": "envoy.lb.subset_hint", "key": "x-gateway-destination-endpoint-subset"},
        "remove": True,
    }
    to_metadata = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"

    def hinting(config: dict[str, Any]) -> None:
        hint = {"@type": to_metadata, "request_rules": [rule]}
        manager(config)["http_filters"].insert(0, {"name": "envoy.filters.http.header_to_metadata", "typed_config": hint})

    async with (
        gateway(etcd_server, nats_server, namespace, tmp_path) as gate,
        gate.envoy(hinting) as envoy,
        client(envoy) as http,
    ):
        for pod in gate.pods:
            for subset in (pod.address, f"10.1.2.3:8000,{pod.address}"):
                for path in ("/v1/completions", "/v1/unknown"):
                    response = await http.post(path, json=completion(), headers={"x-subset": subset})
                    assert response.json()["pod"] == pod.name
        refused = await http.post("/v1/completions", json=completion(), headers={"x-subset": "10.1.2.3:8000"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        # Clients do not choose endpoints, whatever they send.
        steered = await http.post("/v1/completions", json=completion(), headers={"x-gateway-destination-endpoint": "10.1.2.3:1"})
        assert steered.status_code == 200


async def test_a_saturated_fleet_sheds_low_priorities_and_queues_the_others(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    flags = ("--active-prefill-tokens-threshold", "64", "--router-queue-size", "100", "--router-mode", "least-loaded")
    objectives = ("--endpoint-picker-objective", "batch=-1", "--endpoint-picker-objective", "chat=5")
    async with (
        gateway(etcd_server, nats_server, namespace, tmp_path, *flags, *objectives) as gate,
        gate.envoy() as envoy,
        client(envoy) as http,
    ):
        for pod in gate.pods:
            pod.step_s = 0.5
        body = completion("y" * 200, 4)
        running = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in gate.pods]
        await until(lambda: sum(gate.counts) == 2)

        shed = await http.post("/v1/completions", json=body, headers={"x-gateway-inference-objective": "batch"})
        assert (shed.status_code, shed.headers["x-llm-d-request-dropped-reason"]) == (429, "rejected-saturated")
        queued = await http.post("/v1/completions", json=body, headers={"x-gateway-inference-objective": "chat"})
        assert queued.status_code == 200
        assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
        assert await gate.metric("picker_requests_total", outcome="refused") == 1


async def test_the_header_for_another_model_replaces_that_of_the_body(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with (
        gateway(etcd_server, nats_server, namespace, tmp_path, pods=1) as gate,
        gate.envoy() as envoy,
        client(envoy) as http,
    ):
        body = {**completion(), "model": "unheard-of"}
        for name, kind in (("x-gateway-model-name-rewrite", "identity"), ("x-llm-d-model-name-rewrite", "gzip")):
            data = json.dumps(body).encode()
            headers = {name: "near", "content-type": "application/json", "content-encoding": kind}
            content = gzip.compress(data) if kind == "gzip" else data
            response = await http.post("/v1/completions", content=content, headers=headers)
            assert (response.status_code, response.headers["x-dynamo-placement"]) == (200, "routed")
        assert [json.loads(request.body) for request in gate.pods[0].received] == [{**body, "model": "served"}] * 2
        assert [request.headers.get("content-encoding") for request in gate.pods[0].received] == ["identity", None]


async def test_gateways_that_send_bodies_in_another_way_are_served_as_well_as_that_permits(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    def sending(mode: str, config: dict[str, Any]) -> None:
        [host] = manager(config)["route_config"]["virtual_hosts"]
        host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "picked", "timeout": "0s"}}]  # chosen before the body
        back = {"STREAMED": "STREAMED", "NONE": "FULL_DUPLEX_STREAMED"}.get(mode, "NONE")
        extensions(config)["processing_mode"] |= {"request_body_mode": mode, "response_body_mode": back}

    async with gateway(etcd_server, nats_server, namespace, tmp_path) as gate:
        for mode in ("BUFFERED", "BUFFERED_PARTIAL", "STREAMED", "NONE"):
            placement = "routed" if mode.startswith("BUFFERED") else "least-loaded"
            async with gate.envoy(partial(sending, mode)) as envoy, client(envoy) as http:
                for body in (completion(), completion(LONG)):
                    response = await http.post("/v1/completions", json=body)
                    assert (response.status_code, response.headers["x-dynamo-placement"]) == (200, placement), response.text
                async with http.stream("POST", "/v1/completions", json=completion(tokens=5, stream=True)) as stream:
                    assert (await stream.aread()).decode().count('"text": "w"') == 5
            model = "served" if placement == "routed" else "far"  # a body that is not seen is not changed
            assert [received.json["model"] for pod in gate.pods for received in pod.received] == [model] * 3
            for pod in gate.pods:
                pod.received.clear()
        await gate.idle()


async def test_requests_to_a_killed_pod_go_to_the_next_of_several_endpoints(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    """Envoy's `override_host` takes several endpoints, of those that it knows, and retries at the next."""
    async with gateway(etcd_server, nats_server, namespace, tmp_path, "--endpoint-picker-endpoints", "2") as gate:

        def retrying(config: dict[str, Any]) -> None:
            name = "type.googleapis.com/envoy.extensions.load_balancing_policies"
            random = {"name": "envoy.load_balancing_policies.random", "typed_config": {"@type": f"{name}.random.v3.Random"}}
            override = {
                "@type": f"{name}.override_host.v3.OverrideHost",
                "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}],
                "fallback_policy": {"policies": [{"typed_extension_config": random}]},
            }
            picked = cluster(config, "picked")
            del picked["original_dst_lb_config"], picked["lb_policy"]
            picked |= {
                "type": "STATIC",
                "load_balancing_policy": {
                    "policies": [
                        {
                            "typed_extension_config": {
                                "name": "envoy.load_balancing_policies.override_host",
                                "typed_config": override,
                            }
                        }
                    ]
                },
                "load_assignment": {
                    "cluster_name": "picked",
                    "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _socket(pod.port)}} for pod in gate.pods]}],
                },
            }
            [host] = manager(config)["route_config"]["virtual_hosts"]
            host["routes"][0]["route"]["retry_policy"] = {"retry_on": "connect-failure,refused-stream,reset", "num_retries": 2}

        async with gate.envoy(retrying) as envoy, client(envoy) as http:
            first = [(await http.post("/v1/completions", json=completion())).json()["pod"] for _ in range(10)]
            assert Counter(first) == {"pod-0": 5, "pod-1": 5}  # by turns: Envoy follows the choice
            await gate.pods[0].kill()
            responses = await asyncio.gather(*(http.post("/v1/completions", json=completion()) for _ in range(100)))
            assert Counter(response.status_code for response in responses) == {200: 100}
            assert {response.json()["pod"] for response in responses} == {"pod-1"}
            await gate.pods[0].start()
            async with asyncio.timeout(WAIT_S):
                while (await http.post("/v1/completions", json=completion())).json()["pod"] != "pod-0":
                    pass
            await gate.idle()


def _socket(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@pytest.mark.parametrize(
    ("failing", "without"),
    [("open", 200), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("closed", 503), ("strict", 500)))],
)
async def test_requests_without_a_picker_are_as_the_gateway_says_until_one_is_back(
    failing: str, without: int, etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    """`open` and `closed` are the last route, which requests take if `failure_mode_allow`; `strict` has not got that."""
    async with gateway(etcd_server, nats_server, namespace, tmp_path) as gate:

        def routed(config: dict[str, Any]) -> None:
            if failing == "strict":
                extensions(config)["failure_mode_allow"] = False
            else:  # the call ends with the response's headers
                extensions(config)["processing_mode"]["response_trailer_mode"] = "SKIP"
            if failing == "open":
                [host] = manager(config)["route_config"]["virtual_hosts"]
                host["routes"][1] = {"match": {"prefix": "/"}, "route": {"cluster": "any"}}
                endpoints = [{"endpoint": {"address": _socket(pod.port)}} for pod in gate.pods]
                assignment = {"cluster_name": "any", "endpoints": [{"lb_endpoints": endpoints}]}
                config["static_resources"]["clusters"].append({"name": "any", "type": "STATIC", "load_assignment": assignment})

        async with gate.envoy(routed) as envoy, client(envoy) as http:

            async def statuses(requests: int) -> set[int]:
                posts = [http.post("/v1/completions", json=completion()) for _ in range(requests)]
                return {response.status_code for response in await asyncio.gather(*posts, http.get("/v1/models"))}

            for pod in gate.pods:
                pod.step_s = 0.02
            rest = b""
            with suppress(httpx2.RemoteProtocolError):  # the response is cut
                async with http.stream("POST", "/v1/completions", json=completion(tokens=60, stream=True)) as stream:
                    parts = stream.aiter_bytes()
                    await anext(parts)
                    gate.front.process.kill()
                    await gate.front.ended()
                    async for part in parts:
                        rest += part
            assert rest.rstrip().endswith(b"[DONE]") is (failing != "strict"), "who follows a response to its end is missed"
            async with asyncio.timeout(WAIT_S):  # until its health checks say so, Envoy has 500 for some requests
                while (seen := await statuses(20)) != {without}:
                    assert seen <= {without, 500}

            async with frontend(etcd_server.endpoint, nats_server.url, namespace, *gate.picker):
                async with asyncio.timeout(WAIT_S):
                    while "x-dynamo-placement" not in (response := await http.post("/v1/completions", json=completion())).headers:
                        assert response.status_code in (without, 500)  # as above: it may have tried the picker too early
                assert (response.status_code, response.headers["x-dynamo-placement"]) == (200, "routed")
                assert await statuses(20) == {200}


async def test_a_picker_that_is_stopped_ends_its_calls_cleanly(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    def strict(config: dict[str, Any]) -> None:
        extensions(config)["failure_mode_allow"] = False

    async with (
        gateway(etcd_server, nats_server, namespace, tmp_path) as gate,
        gate.envoy(strict) as envoy,
        client(envoy) as http,
    ):
        for pod in gate.pods:
            pod.step_s = 0.02
        async with http.stream("POST", "/v1/completions", json=completion(tokens=100, stream=True)) as stream:
            parts = stream.aiter_bytes()
            await anext(parts)
            gate.front.terminate()
            assert await gate.front.ended() == 0
            rest = b"".join([part async for part in parts])
        assert rest.rstrip().endswith(b"[DONE]")
        assert (await http.post("/v1/completions", json=completion())).status_code == 500


async def test_bookings_end_when_the_gateway_is_killed(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with gateway(etcd_server, nats_server, namespace, tmp_path) as gate, gate.envoy() as envoy, client(envoy) as http:
        for pod in gate.pods:
            pod.step_s = 0.05
        streams = [
            asyncio.create_task(http.post("/v1/completions", json=completion(tokens=1000, stream=True))) for _ in range(20)
        ]
        await until(lambda: sum(gate.counts) == 20)
        await envoy.kill()
        assert all(isinstance(each, httpx2.TransportError) for each in await asyncio.gather(*streams, return_exceptions=True))
        await gate.idle()
        await envoy.start()
        assert (await http.post("/v1/completions", json=completion())).status_code == 200


async def test_a_picker_with_an_authority_is_used_by_gateways_that_it_has_certified_alone(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    ca = trustme.CA()
    authority = write_ca(ca, tmp_path / "ca.pem")
    server, gateway_pair = issue(ca, tmp_path, "server"), issue(ca, tmp_path, "gateway", "gateway@example")

    def speaking_tls(pair: Pair | None, config: dict[str, Any]) -> None:
        context: dict[str, Any] = {
            "alpn_protocols": ["h2"],
            "validation_context": {
                "trusted_ca": {"filename": str(authority)},
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "localhost"}}],
            },
        }
        if pair is not None:
            files = {"certificate_chain": {"filename": str(pair.cert)}, "private_key": {"filename": str(pair.key)}}
            context["tls_certificates"] = [files]
        name = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        cluster(config, "picker")["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": name, "common_tls_context": context, "sni": "localhost"},
        }

    files = {"cert": server.cert, "key": server.key, "client-ca": authority}
    flags = [part for kind, file in files.items() for part in (f"--endpoint-picker-tls-{kind}-file", str(file))]
    async with gateway(etcd_server, nats_server, namespace, tmp_path, *flags, pods=1) as gate:
        for pair, status in ((gateway_pair, 200), (None, 503)):
            async with gate.envoy(partial(speaking_tls, pair)) as envoy, client(envoy) as http:
                assert (await http.post("/v1/completions", json=completion())).status_code == status
        # Envoy asked for its health, too, by the name of the service.
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{gate.picker_port}",
            grpc.ssl_channel_credentials(authority.read_bytes(), gateway_pair.key.read_bytes(), gateway_pair.cert.read_bytes()),
        ) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
                request = b"" if not service else b"\n" + bytes([len(service)]) + service.encode()
                assert await check(request) == b"\x08\x01", service
            with pytest.raises(grpc.aio.AioRpcError, match="service or model not found"):
                await check(b"\n\x04none")
