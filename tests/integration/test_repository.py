"""A Triton repository served unchanged, and controlled, by Triton's own clients over real processes."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import httpx2
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from dynamo.common.process.ports import free_ports
from dynamo.frontend.security.surfaces import Scope
from dynamo.protos import inference_pb2 as pb
from tests.integration.test_kserve_grpc import run_client
from tests.support.deployment import KeyFile
from tests.support.fleet import SERVICE
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.repositories import EXAMPLES, X_TO_Y, ensemble, python_model, step
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import until

EXPLICIT = ("--model-control-mode", "explicit")
NAMES = ("digits", "llm_model", "read_aloud")

SLOW = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        folder = os.path.dirname(pb_utils.get_model_dir())
        open(os.path.join(folder, f"begun-{os.getpid()}"), "w").close()
        until = time.monotonic() + 120
        while not os.path.exists(os.path.join(folder, "go")):
            assert time.monotonic() < until, "the test has not let it go"
            time.sleep(0.005)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""

COUNTS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("seen_total", "Requests seen.", pb_utils.MetricFamily.COUNTER)
        self.seen = family.Metric(labels={"kind": "x"})
    def execute(self, requests):
        self.seen.increment(len(requests))
        value = np.array([self.seen.value()], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", value)]) for _ in requests]
"""


class Client:
    """KServe calls with this project's own messages."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def call(self, name: str, request: object, response_type: object) -> object:
        method = self._channel.unary_unary(SERVICE + name)
        return response_type.FromString(await method(request.SerializeToString(), timeout=120))  # type: ignore[attr-defined]

    async def index(self) -> dict[str, tuple[str, str]]:
        response = await self.call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)
        return {model.name: (model.state, model.reason) for model in response.models}  # type: ignore[attr-defined]

    async def load(self, model: str, **parameters: str) -> None:
        request = pb.RepositoryModelLoadRequest(model_name=model)
        for name, value in parameters.items():
            request.parameters[name].string_param = value
        response = await self.call("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse)
        assert response.isLoaded  # type: ignore[attr-defined]

    async def unload(self, model: str) -> None:
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        await self.call("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse)

    async def infer(self, model: str, value: float = 1.0, **parameters: int) -> list[float]:
        request = pb.ModelInferRequest(model_name=model)
        for name, number in parameters.items():
            request.parameters[name].int64_param = number
        request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(value)
        response = await self.call("ModelInfer", request, pb.ModelInferResponse)
        return np.frombuffer(response.raw_output_contents[0], "<f4").tolist()  # type: ignore[attr-defined]


async def indexed(client: Client, model: str, state: str | None, reason: str = "", timeout_s: float = 120) -> str:
    """Return when the index has this state and full reason of a model; None: the index does not list it."""
    index: dict[str, tuple[str, str]] = {}
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                index = await client.index()
                seen = index.get(model, (None, ""))
                if seen[0] == state and reason in seen[1]:
                    return seen[1]
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"the index is {index}") from None


def connect(front: FrontendProcess) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(front.grpc_target, options=[("grpc.use_local_subchannel_pool", 1)])


def no_problems(results: list[dict[str, str]], cases: int) -> None:
    assert len(results) == cases
    problems = [f"{line['case']}\n{line['problem']}" for line in results if line["problem"]]
    assert not problems, "\n".join(problems)


async def test_tritons_clients_use_the_three_examples(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model-repository", str(EXAMPLES)) as serving,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        await front.serves(*NAMES)
        results = await run_client("repository_client", "examples", front.grpc_target, str(front.http_port), str(EXAMPLES))
        no_problems(results, 10)
        assert not [line for line in serving.lines if "Traceback" in line]


@dataclass(frozen=True, slots=True)
class Guarded:
    """A frontend that knows a key for each of two models, which are parts of others or call them."""

    front: FrontendProcess
    keys: KeyFile

    def client(self, model: str) -> httpx2.AsyncClient:
        url, headers = f"http://127.0.0.1:{self.front.http_port}", {"x-api-key": self.keys.keys[model]}
        return httpx2.AsyncClient(base_url=url, headers=headers, timeout=120)


@pytest.fixture(scope="module")
def guarded(etcd_server: EtcdServer, nats_server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """The three examples, a model that calls another, and that, with keys for `read_aloud` and for `caller`."""
    folder = tmp_path_factory.mktemp("guarded")
    python_model(folder / "models", "caller", CALLER)
    python_model(folder / "models", "part")
    with (
        start_blocking_portal() as portal,  # its event loop reads what the processes log, while those of tests come and go
        portal.wrap_async_context_manager(_guarded(etcd_server, nats_server, folder)) as deployment,
    ):
        yield deployment


@asynccontextmanager
async def _guarded(etcd: EtcdServer, nats: NatsServer, folder: Path) -> AsyncIterator[Guarded]:
    keys, namespace = KeyFile(folder / "keys.yaml", {}), "guarded"
    for model in ("read_aloud", "caller"):
        keys.add(model, models=(model,))
    repositories = ("--model-repository", str(EXAMPLES), "--model-repository", str(folder / "models"))
    async with (
        worker(etcd, nats, namespace, *repositories),
        frontend(etcd.endpoint, nats.url, namespace, "--api-keys-file", str(keys.path)) as front,
    ):
        for model, key in keys.keys.items():
            await front.serves(model, key=key)
        yield Guarded(front, keys)


async def test_a_key_of_an_ensemble_reaches_its_parts_only_through_it(guarded: Guarded) -> None:
    async with guarded.client("read_aloud") as client:
        image = {"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 8, 8], "data": [0.0] * 64}]}
        text = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["hi"]}]}
        response = await client.post("/v2/models/read_aloud/infer", json=image)
        assert response.status_code == 200, response.text
        for part, body in (("digits", image), ("llm_model", text)):
            refused = await client.post(f"/v2/models/{part}/infer", json=body)
            assert (part, refused.status_code) == (part, 403), refused.text
            for path in ("", "/config", "/stats"):
                assert (await client.get(f"/v2/models/{part}{path}")).status_code == 403
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["read_aloud"]


CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        [r] = requests
        inputs = [pb_utils.Tensor("x", r.inputs()[0].as_numpy())]
        return [pb_utils.InferenceRequest(model_name="part", inputs=inputs, requested_output_names=["y"]).exec()]
"""


async def test_a_key_of_a_model_that_calls_another_reaches_that_only_through_it(guarded: Guarded) -> None:
    x = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3.0]}]}
    async with guarded.client("caller") as client:
        response = await client.post("/v2/models/caller/infer", json=x)
        assert response.status_code == 200, response.text
        assert response.json()["outputs"][0]["data"] == [6.0]
        assert (await client.post("/v2/models/part/infer", json=x)).status_code == 403
        for path in ("", "/config", "/stats"):
            assert (await client.get(f"/v2/models/part{path}")).status_code == 403
        async with connect(guarded.front) as channel:
            request = pb.ModelInferRequest(model_name="part")
            request.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(3.0)
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await infer(request.SerializeToString(), metadata=(("x-api-key", guarded.keys.keys["caller"]),))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_key_of_a_part_does_not_change_it_under_an_ensemble_that_the_key_may_not_use(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    python_model(tmp_path / "models", "part")
    ensemble(tmp_path / "models", step("part", {"x": "x"}, {"y": "y"}))
    keys = KeyFile(tmp_path / "keys.yaml", {})
    of_part = keys.add("part", Scope.INFER, Scope.REPOSITORY, models=("part",))
    of_both = keys.add("both", Scope.INFER, Scope.REPOSITORY, models=("part", "both"))
    path = "/v2/repository/models/part"
    async with (
        worker(
            etcd_server, nats_server, namespace, "--model-repository", str(tmp_path / "models"), *EXPLICIT, "--load-model", "both"
        ),
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--api-keys-file", str(keys.path)) as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as client,
        connect(front) as channel,
    ):
        await front.serves("both", key=of_both)
        calls = (
            ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="part")),
            ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="part")),
        )
        for verb, (name, message) in zip(("load", "unload"), calls, strict=True):
            refused = await client.post(f"{path}/{verb}", json={}, headers={"x-api-key": of_part})
            assert (verb, refused.status_code) == (verb, 403), refused.text
            with pytest.raises(grpc.aio.AioRpcError, match="part of ensembles that the API key may not use") as error:
                await channel.unary_unary(SERVICE + name)(message.SerializeToString(), metadata=(("x-api-key", of_part),))
            assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
        x = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3.0]}]}
        served = await client.post("/v2/models/both/infer", json=x, headers={"x-api-key": of_both})
        assert served.status_code == 200, served.text
        unloaded = await client.post(f"{path}/unload", json={}, headers={"x-api-key": of_both})
        assert unloaded.status_code == 200, unloaded.text


async def test_tritons_clients_load_and_unload(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "models")
    python_model(tmp_path / "root", "elsewhere")
    flags = ("--model-repository", str(tmp_path / "models"), "--model-path-root", str(tmp_path / "root"))
    async with (
        worker(etcd_server, nats_server, namespace, *flags, *EXPLICIT) as serving,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        await serving.logged("as instance")
        async with connect(front) as channel:
            client = Client(channel)
            async with asyncio.timeout(120):
                await channel.channel_ready()
            await indexed(client, "digits", "UNAVAILABLE", "not loaded")
            await client.load("named", model_path=f"{tmp_path}/root/elsewhere")
            assert await client.infer("named", 3.0) == [6.0]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.load("named", model_path=f"{tmp_path}/root/../models/digits")
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        target, port = front.grpc_target, str(front.http_port)
        no_problems(await run_client("repository_client", "control", target, port, str(tmp_path / "models")), 10)


async def test_all_workers_load_and_unload_and_accepted_requests_finish(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    slow = python_model(tmp_path / "one", "slow", SLOW)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "slow").symlink_to(slow)
    python_model(tmp_path / "two", "only_there")
    python_model(tmp_path / "three", "only_here")
    python_model(tmp_path / "three", "one_sided", version=1)
    python_model(tmp_path / "two", "one_sided", "raise ValueError('not here')")
    flags = [("--model-repository", str(tmp_path / name), *EXPLICIT) for name in ("one", "two")]
    flags[0] = (*flags[0], "--model-repository", str(tmp_path / "three"))
    async with (
        worker(etcd_server, nats_server, namespace, *flags[0]) as first,
        worker(etcd_server, nats_server, namespace, *flags[1]) as second,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
        connect(front) as channel,
    ):
        client = Client(channel)
        for each in (first, second):
            await each.logged("as instance")
        async with asyncio.timeout(120):
            await channel.channel_ready()
        for one_has_it in ("only_here", "only_there"):  # so both workers are known
            await indexed(client, one_has_it, "UNAVAILABLE", "not loaded")
        await indexed(client, "one_sided", "UNAVAILABLE", "not loaded")
        await indexed(client, "slow", "UNAVAILABLE", "not loaded")

        await client.load("slow")
        await client.load("only_there")
        assert (await client.index())["slow"] == ("READY", "")
        open_requests = [asyncio.create_task(client.infer("slow", float(number))) for number in range(2)]
        await until(lambda: len(list(slow.glob("begun-*"))) == 2, 120)  # one at each worker
        unloading = asyncio.create_task(client.unload("slow"))
        await indexed(client, "slow", "UNLOADING", "unloaded")
        (slow / "go").touch()
        assert await asyncio.gather(*open_requests) == [[0.0], [1.0]]
        await unloading
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.infer("slow")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert await client.infer("only_there", 4.0) == [8.0]

        with pytest.raises(grpc.aio.AioRpcError, match=r"1 of 2 workers failed; first: .*not here"):
            await client.load("one_sided")
        reason = await indexed(client, "one_sided", "READY", "not here")
        assert await client.infer("one_sided", 4.0) == [8.0]
        first.terminate()
        assert await first.ended() == 0
        assert await indexed(client, "one_sided", "UNAVAILABLE", "not here") == reason.partition(": ")[2]


async def test_polling_follows_the_folder(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    folder = python_model(tmp_path, "double")
    python_model(tmp_path, "broken", "raise ValueError('not yet')")
    flags = ("--model-control-mode", "poll", "--repository-poll-secs", "0.1", "--model-repository", str(tmp_path))
    async with (
        worker(etcd_server, nats_server, namespace, *flags),
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
        connect(front) as channel,
    ):
        client = Client(channel)
        await front.serves("double")
        await indexed(client, "broken", "UNAVAILABLE", "not yet")
        shutil.copy(folder / "1" / "model.py", tmp_path / "broken" / "1" / "model.py")
        await indexed(client, "broken", "READY")
        assert await client.infer("broken", 3.0) == [6.0]
        python_model(tmp_path, "late")
        await indexed(client, "late", "READY")
        shutil.rmtree(folder)
        await indexed(client, "double", None)
        with pytest.raises(grpc.aio.AioRpcError, match="explicit"):
            await client.load("late")


async def test_a_worker_that_cannot_load_its_repository_fails_to_start_with_the_reason(tmp_path: Path) -> None:
    python_model(tmp_path, "broken", "raise ValueError('no weights')")
    flags = ("--model-repository", str(tmp_path), "--nats-servers", "nats://127.0.0.1:1")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynamo.worker", *flags), stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(120):
        _, output = await process.communicate()
    last = output.decode().splitlines()[-1]
    assert process.returncode == 2 and "model 'broken' of the repository cannot be loaded" in last and "no weights" in last


async def test_metrics_of_a_model_are_on_the_page_of_its_worker_while_it_is_loaded(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    python_model(tmp_path, "counts", COUNTS, X_TO_Y + 'metric_tags { key: "team" value: "red" }')
    [port] = free_ports(1)
    flags = ("--model-repository", str(tmp_path), *EXPLICIT, "--load-model", "counts", "--status-port", str(port))
    traced = ("--trace-file", str(tmp_path / "trace.json"))
    async with (
        worker(etcd_server, nats_server, namespace, *flags, *traced),
        frontend(etcd_server.endpoint, nats_server.url, namespace, *traced) as front,
        connect(front) as channel,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as http,
    ):
        await front.serves("counts")
        client = Client(channel)
        assert [await client.infer("counts"), await client.infer("counts")] == [[1.0], [2.0]]
        page = (await http.get("/metrics")).text
        assert '# TYPE seen_total counter\nseen_total{kind="x"} 2.0\n' in page
        assert re.search(r'^nv_model_load_duration_secs\{_team="red",model="counts",version="1"\} [0-9.]+$', page, re.MULTILINE)
        assert 'nv_inference_pending_request_count{_team="red",model="counts",version="1"} 0.0\n' in page
        assert 'nv_inference_request_success{_team="red",model="counts",version="1"} 2.0\n' in page
        await settings_reach_the_worker(f"http://127.0.0.1:{front.http_port}", client, http, tmp_path)
        await client.unload("counts")
        assert "seen_total" not in (await http.get("/metrics")).text


async def settings_reach_the_worker(url: str, client: Client, http: httpx2.AsyncClient, folder: Path) -> None:
    """Switch traces on over HTTP, and see that the worker writes a file."""
    change = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1", "log_frequency": "1"}
    shown = (await http.post(f"{url}/v2/models/counts/trace/setting", json=change)).json()
    assert shown == {**change, "trace_count": "-1", "trace_mode": "triton", "trace_file": str(folder / "trace.json")}
    async with asyncio.timeout(120):
        while not (files := list(folder.glob("trace-*.json.0"))):
            await client.infer("counts", 7.0)
    entries = json.loads(files[0].read_text())
    assert entries[0] == {"id": 1, "model_name": "counts", "model_version": 1}
    times = [time for entry in entries for time in entry.get("timestamps", ())]
    assert [time["name"] for time in times[:3]] == ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START"]
    assert times == sorted(times, key=lambda time: int(time["ns"])), "the clocks of both processes are one"
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [7.0]}]}
    (await http.post(f"{url}/v2/models/counts/infer", json=body)).raise_for_status()
    async with asyncio.timeout(120):
        while not any("HTTP_RECV_END" in file.read_text() for file in folder.glob("trace-*.json.*")):
            await client.infer("counts", 7.0)
    tensors = {entry["activity"]: entry["tensor"]["data"] for entry in entries if "tensor" in entry}
    assert tensors["TENSOR_QUEUE_INPUT"] == "7"
    assert set(tensors) == {"TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"}


async def test_responses_are_cached_and_queues_have_limits_as_in_triton(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    python_model(tmp_path, "counts", COUNTS, X_TO_Y + "response_cache { enable: true }\n")
    policy = "timeout_action: REJECT default_timeout_microseconds: 60000000 allow_timeout_override: true max_queue_size: 1"
    python_model(tmp_path, "queues", SLOW, f"{X_TO_Y} dynamic_batching {{ default_queue_policy {{ {policy} }} }}")
    [port] = free_ports(1)
    flags = ("--model-repository", str(tmp_path), "--response-cache-byte-size", "1MiB", "--status-port", str(port))
    async with (
        worker(etcd_server, nats_server, namespace, *flags),
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
        connect(front) as channel,
        httpx2.AsyncClient(timeout=120) as http,
    ):
        await front.serves("counts")
        client = Client(channel)
        assert [await client.infer("counts", value) for value in (1.0, 2.0, 1.0, 1.0)] == [[1.0], [2.0], [1.0], [1.0]]
        stats = (await http.get(f"http://127.0.0.1:{front.http_port}/v2/models/counts/stats")).json()["model_stats"][0]
        counts = {name: int(duration["count"]) for name, duration in stats["inference_stats"].items() if duration}
        assert (int(stats["inference_count"]), int(stats["execution_count"])) == (2, 2)
        assert counts["success"] == counts["queue"] == 4 and counts["compute_infer"] == 2
        assert counts["cache_hit"] == counts["cache_miss"] == 2
        page = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        assert 'nv_cache_num_hits_per_model{model="counts",version="1"} 2.0\n' in page
        assert "nv_cache_num_hits 2.0\n" in page and "nv_cache_num_entries 2.0\n" in page
        await queue_limits(front, client, http, tmp_path / "queues", port)


async def queue_limits(front: FrontendProcess, client: Client, http: httpx2.AsyncClient, folder: Path, status_port: int) -> None:
    """The only instance of a model is busy, and one request may wait: Triton's words and statuses, over both protocols."""
    running = asyncio.create_task(client.infer("queues"))
    await until(lambda: list(folder.glob("begun-*")))
    for timeout in (1000, 2000):
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await client.infer("queues", timeout=timeout)
        assert (rejected.value.code(), rejected.value.details()) == (grpc.StatusCode.UNAVAILABLE, "Request timeout expired")
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}], "parameters": {"timeout": 1000}}
    url = f"http://127.0.0.1:{front.http_port}/v2/models/queues/infer"
    response = await http.post(url, json=body)
    assert (response.status_code, response.json()) == (503, {"error": "Request timeout expired"})
    over_grpc, over_http = (
        asyncio.create_task(client.infer("queues")),
        asyncio.create_task(http.post(url, json=body | {"parameters": {}})),
    )
    (refused,), (waiting,) = await asyncio.wait((over_grpc, over_http), return_when=asyncio.FIRST_COMPLETED)
    words = "[request id: <id_unknown>] Exceeds maximum queue size"
    if refused is over_http:
        assert (over_http.result().status_code, over_http.result().json()) == (503, {"error": words})
    else:
        with pytest.raises(grpc.aio.AioRpcError, match="Exceeds maximum queue size"):
            await over_grpc
    page = (await http.get(f"http://127.0.0.1:{status_port}/metrics")).text
    assert 'nv_inference_pending_request_count{model="queues",version="1"} 1.0\n' in page
    assert re.search(r'nv_inference_request_failure\{model="queues",reason="REJECTED",version="1"\} [34]\.0', page)
    (folder / "go").touch()
    await asyncio.gather(running, waiting)


@pytest.mark.slow  # a kill
async def test_a_worker_that_is_killed_leaves_no_processes(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    code = (
        SLOW + "    def initialize(self, args):\n        open(args['model_repository'] + '/pid', 'w').write(str(os.getpid()))\n"
    )
    folder = python_model(tmp_path, "slow", code)
    async with (
        worker(etcd_server, nats_server, namespace, "--model-repository", str(tmp_path)) as serving,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
        connect(front) as channel,
    ):
        await front.serves("slow")
        open_request = asyncio.create_task(Client(channel).infer("slow"))
        await until(lambda: list(folder.glob("begun-*")), 120)
        pid = int((folder / "pid").read_text())
        assert Path(f"/proc/{pid}").exists()
        serving.process.kill()
        await until(lambda: not is_alive(pid), 120)
        with pytest.raises(grpc.aio.AioRpcError):
            await open_request


def is_alive(pid: int) -> bool:
    """Return whether a process is alive. One that is not reaped yet is dead all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


TOTAL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.totals = {}
    def execute(self, requests):
        responses = []
        for r in requests:
            before = 0 if r.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START else self.totals[r.correlation_id()]
            self.totals[r.correlation_id()] = total = before + r.inputs()[0].as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", total.astype(np.float32))]))
        return responses
"""
SEQUENCES = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 64 } }
"""


async def add(client: Client, sequence: int, value: float, *, start: bool = False) -> list[float]:
    request = pb.ModelInferRequest(model_name="total")
    request.parameters["sequence_id"].int64_param = sequence
    request.parameters["sequence_start"].bool_param = start
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.raw_input_contents.append(struct.pack("<f", value))
    response = await client.call("ModelInfer", request, pb.ModelInferResponse)
    return list(struct.unpack("<f", response.raw_output_contents[0]))  # type: ignore[attr-defined]


async def refusal(client: Client, sequence: int) -> grpc.aio.AioRpcError:
    """Return why requests of a sequence are refused, once it is known that its instance is gone."""
    while True:
        try:
            raise AssertionError(await add(client, sequence, 1.0))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return error


async def instances_are(front: FrontendProcess, count: int) -> None:
    async with asyncio.timeout(120):
        while len((await front.health())[1]["instances"]) != count:
            await asyncio.sleep(0.05)


@pytest.mark.slow  # four processes, one of which is killed
async def test_sequences_stay_on_their_instance_at_every_frontend_and_end_with_it(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    python_model(tmp_path, "total", TOTAL, SEQUENCES)
    arguments = (etcd_server, nats_server, namespace, "--model-repository", str(tmp_path))
    async with (
        worker(*arguments) as first,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as other,
        connect(front) as channel,
        connect(other) as other_channel,
    ):
        await front.serves("total")
        await other.serves("total")
        clients = (Client(channel), Client(other_channel))
        sequences = range(1, 9)
        for sequence in sequences:
            assert await add(clients[sequence % 2], sequence, 1.0, start=True) == [1.0]
        async with worker(*arguments):
            await asyncio.gather(instances_are(front, 2), instances_are(other, 2))
            for sequence in sequences:  # some belong to the new instance now, which does not know them
                assert [await add(client, sequence, 1.0) for client in clients] == [[2.0], [3.0]]
            for sequence in range(11, 19):
                assert await add(clients[0], sequence, 5.0, start=True) == [5.0]
                assert await add(clients[1], sequence, 5.0) == [10.0]
            first.process.kill()
            for sequence in sequences:
                error = await refusal(clients[sequence % 2], sequence)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "must specify the START flag on the first request of the sequence" in (error.details() or "")
