"""Keys, scopes, limits and restrictions on every protocol of a whole deployment."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import grpc.aio
import pytest

from dynamo.frontend.config import AccessOptions
from dynamo.frontend.security.surfaces import Scope, Surface
from dynamo.protos import inference_pb2 as pb
from tests.support.deployment import TENSOR, InProcessDeployment, KeyFile, infer_request, open_deployment, text_request
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import until

HTTP_REQUESTS = {
    "/v1/chat/completions": {"model": "echo-llm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"model": "echo-llm", "prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"model": "echo-llm", "input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"model": "echo-llm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v2/models/echo/infer": TENSOR,
    "/v2/models/echo-llm/generate": {"text_input": "hi", "max_tokens": 4},
}
HTTP_QUESTIONS = (
    "/v1/models",
    "/v1/models/echo",
    "/v2",
    "/v2/models/echo",
    "/v2/models/echo/config",
    "/v2/models/echo/stats",
    "/v2/repository/index",
    "/metrics",
    "/openapi.json",
    "/busy_threshold",
    "/v1/routing/decisions",
    "/console",
    "/console/",
    "/console/fleet",
    "/docs",
    "/nothing/here",
)


@pytest.fixture
def key_file(tmp_path: Path) -> KeyFile:
    file = KeyFile(tmp_path / "keys.yaml", {})
    file.path.write_text("")
    return file


Open = Callable[..., AbstractAsyncContextManager[InProcessDeployment]]


@pytest.fixture
def deployment_with(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, key_file: KeyFile) -> Open:
    """Open deployments that ask for the keys of `key_file`."""

    def make(**access: object) -> AbstractAsyncContextManager[InProcessDeployment]:
        options = AccessOptions(**({"keys_file": key_file.path} | access))  # type: ignore[arg-type]
        return open_deployment(etcd_server, nats_server, namespace, access=options)

    return make


async def test_who_shows_no_key_is_told_so_on_both_ports(deployment_with: Open) -> None:
    async with deployment_with() as deployment:
        response = await deployment.post("/v2/models/echo/infer", TENSOR)
        assert (response.status_code, "an API key is required" in response.text) == (401, True)
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
        refused = await deployment.call("ModelInfer", infer_request())
        assert refused.status == 401
        assert refused.headers["x-request-id"]
        assert await deployment.stream().code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await deployment.get("/v2/models/echo/ready")).status_code == 200
        assert (await deployment.call("/grpc.health.v1.Health/Check")).status == 200


async def test_a_key_is_taken_in_each_of_its_forms(deployment_with: Open, key_file: KeyFile) -> None:
    key = key_file.add("team", Scope.INFER, Scope.METRICS)
    async with deployment_with() as deployment:
        for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"x_api_key": key}):
            for path, body in HTTP_REQUESTS.items():
                response = await deployment.post(path, body, **headers)
                assert (path, response.status_code) == (path, 200), response.text
            assert (await deployment.call("ModelInfer", infer_request(), **headers)).status == 200
            stream = deployment.stream(**headers)
            await stream.write(infer_request())
            await stream.done_writing()
            assert b"INPUT0" in await stream.read()  # type: ignore[operator]
            assert await stream.code() is grpc.StatusCode.OK
        for headers in ({"authorization": f"Bearer {key}x"}, {"authorization": f"Token {key}"}, {"x_api_key": key[:-1]}):
            assert (await deployment.post("/v2/models/echo/infer", TENSOR, **headers)).status_code == 401
            assert (await deployment.call("ModelInfer", infer_request(), **headers)).status == 401
        login = base64.b64encode(f"prometheus:{key}".encode()).decode()
        assert (await deployment.get("/metrics", authorization=f"Basic {login}")).status_code == 200
        assert (await deployment.post("/v2/models/echo/infer", TENSOR, authorization=f"Basic {login}")).status_code == 200
        assert (await deployment.call("ModelInfer", infer_request(), authorization=f"Basic {login}")).status == 200
        for page, status in (
            ({"origin": "http://elsewhere"}, 403),
            ({"sec_fetch_site": "cross-site"}, 403),
            ({"sec_fetch_site": "same-origin"}, 401),
        ):
            response = await deployment.post("/v2/models/echo/infer", TENSOR, authorization=f"Basic {login}", **page)
            assert response.status_code == status, "browsers send a login that no page has asked for"
        assert (await deployment.get("/metrics")).headers["www-authenticate"].startswith("Basic")


async def test_the_holder_of_one_key_is_not_taken_for_that_of_another(deployment_with: Open, key_file: KeyFile) -> None:
    tensors, texts = key_file.add("tensors", models=("echo",)), key_file.add("texts", models=("echo-llm",))
    async with deployment_with() as deployment:
        for _ in range(3):
            responses = await asyncio.gather(
                *(deployment.call("ModelInfer", infer_request(), x_api_key=key) for key in (tensors, texts, tensors, texts)),
                *(deployment.call("ModelInfer", infer_request()) for _ in range(2)),
            )
            assert [response.status for response in responses] == [200, 403, 200, 403, 401, 401]
            responses = await asyncio.gather(
                *(deployment.post("/v2/models/echo/infer", TENSOR, x_api_key=key) for key in (tensors, texts, tensors, texts))
            )
            assert [response.status_code for response in responses] == [200, 403, 200, 403]


async def test_memory_of_clients_is_used_by_the_key_that_registered_it_alone(deployment_with: Open, key_file: KeyFile) -> None:
    admin, other = key_file.add("admin", Scope.ADMIN, Scope.INFER), key_file.add("other")
    where = {"shared_memory_region": "input_data", "shared_memory_byte_size": 4}
    read = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1], "parameters": where}]}
    write = {**TENSOR, "outputs": [{"name": "INPUT0", "parameters": where}]}
    message = pb.ModelInferRequest(model_name="echo")
    tensor = message.inputs.add(name="INPUT0", datatype="FP32", shape=[1])
    tensor.parameters["shared_memory_region"].string_param = "input_data"
    tensor.parameters["shared_memory_byte_size"].int64_param = 4
    over_grpc = message.SerializeToString()
    memory = SharedMemory(create=True, size=4)
    try:
        memory.buf[:4] = b"mine"
        async with deployment_with() as deployment:
            registered = await deployment.post(
                "/v2/systemsharedmemory/region/input_data/register", {"key": memory.name, "byte_size": 4}, x_api_key=admin
            )
            assert registered.status_code == 200, registered.text
            for body in (read, write):
                refused = await deployment.post("/v2/models/echo/infer", body, x_api_key=other)
                assert (refused.status_code, "input_data" in refused.text) == (404, True)
            assert (await deployment.call("ModelInfer", over_grpc, x_api_key=other)).status == 404
            stream = deployment.stream(x_api_key=other)
            await stream.write(over_grpc)
            assert await in_band(stream) == "Unable to find shared memory region: 'input_data'"
            stream.cancel()
            assert bytes(memory.buf[:4]) == b"mine"
            assert (await deployment.post("/v2/models/echo/infer", read, x_api_key=admin)).status_code == 200
            assert (await deployment.call("ModelInfer", over_grpc, x_api_key=admin)).status == 200
            assert (await deployment.post("/v2/models/echo/infer", write, x_api_key=admin)).status_code == 200
            assert bytes(memory.buf[:4]) != b"mine"
    finally:
        memory.close()
        memory.unlink()


async def test_lists_hold_what_a_key_may_use_and_nothing_else(deployment_with: Open, key_file: KeyFile) -> None:
    key, root = key_file.add("team", models=("echo",)), key_file.add("root", Scope.ADMIN)
    async with deployment_with() as deployment:
        for holder, names in ((key, ["echo"]), (root, ["echo", "echo-llm"])):
            listed = (await deployment.get("/v1/models", x_api_key=holder)).json()["data"]
            assert [model["id"] for model in listed] == names
            statistics = (await deployment.get("/v2/models/stats", x_api_key=holder)).json()["model_stats"]
            assert [entry["name"] for entry in statistics] == names


async def test_answers_in_a_stream_say_in_band_what_is_refused(deployment_with: Open, key_file: KeyFile) -> None:
    async with deployment_with() as deployment:
        key = key_file.add("team", models=("other", "echo"))
        await until_key_is_valid(deployment, key)
        stream = deployment.stream(x_api_key=key)
        await stream.write(text_request(4))
        await stream.write(infer_request())
        await stream.done_writing()
        responses = [pb.ModelStreamInferResponse.FromString(data) async for data in read_all(stream)]
        errors = [response.error_message for response in responses if response.error_message]
        assert errors == ["the API key 'team' may not use model 'echo-llm'"]
        assert [response.infer_response.model_name for response in responses if not response.error_message] == ["echo"]


async def in_band(stream: grpc.aio.StreamStreamCall[bytes, bytes]) -> str:
    """The error that the next answer says; empty if it is a good one."""
    data = await stream.read()
    assert isinstance(data, bytes), "the stream has ended"
    return pb.ModelStreamInferResponse.FromString(data).error_message


async def read_all(stream: grpc.aio.StreamStreamCall[bytes, bytes]) -> AsyncIterator[bytes]:
    while isinstance(data := await stream.read(), bytes):
        yield data


async def test_a_limit_is_one_for_all_protocols_and_says_when_to_come_back(deployment_with: Open, key_file: KeyFile) -> None:
    key = key_file.add("team", requests_per_s=0.01)
    other = key_file.add("other")
    async with deployment_with() as deployment:
        assert (await deployment.call("ModelInfer", infer_request(), x_api_key=key)).status == 200
        refused = await deployment.call("ModelInfer", infer_request(), x_api_key=key)
        assert (refused.status, refused.message) == (429, "the API key 'team' may send 0.01 requests per second")
        assert 90 < float(refused.headers["retry-after"]) <= 100
        for path, body in HTTP_REQUESTS.items():
            response = await deployment.post(path, body, x_api_key=key)
            assert (path, response.status_code) == (path, 429), response.text
            assert 90 < int(response.headers["retry-after"]) <= 100
            assert (await deployment.post(path, body, x_api_key=other)).status_code == 200
        assert (await deployment.get("/v1/models", x_api_key=key)).status_code == 200, "metadata has a rate of its own"
        assert (await deployment.get("/v1/models", x_api_key=key)).status_code == 429
        assert (await deployment.get("/health", x_api_key=key)).status_code == 200


async def test_tokens_of_all_protocols_go_to_one_budget(deployment_with: Open, key_file: KeyFile) -> None:
    key = key_file.add("team", tokens_per_minute=60)
    async with deployment_with() as deployment:
        first = await deployment.post(
            "/v1/completions", {"model": "echo-llm", "prompt": "ten tokens", "max_tokens": 10}, x_api_key=key
        )
        assert first.json()["usage"]["total_tokens"] == 20
        stream = deployment.stream(x_api_key=key)
        await stream.write(text_request(20))
        await stream.done_writing()
        assert not [d for d in [x async for x in read_all(stream)] if pb.ModelStreamInferResponse.FromString(d).error_message]
        refused = await deployment.post("/v1/chat/completions", HTTP_REQUESTS["/v1/chat/completions"], x_api_key=key)
        assert refused.status_code == 429
        assert "of its 60 tokens per minute left" in refused.text
        assert 1 <= int(refused.headers["retry-after"]) <= 60


async def test_prompts_and_choices_count_as_requests_at_once(deployment_with: Open, key_file: KeyFile) -> None:
    key = key_file.add("team", concurrent_requests=3)
    async with deployment_with() as deployment:
        for body in ({"prompt": ["one", "two", "three", "four"]}, {"prompt": "one", "n": 4}, {"prompt": ["one", "two"], "n": 2}):
            response = await deployment.post("/v1/completions", {"model": "echo-llm", "max_tokens": 4, **body}, x_api_key=key)
            assert response.status_code == 400
            assert "this request has more than 3 prompts and choices" in response.text
        for stream in (False, True):
            body = {"model": "echo-llm", "prompt": ["one", "two", "three"], "max_tokens": 4, "stream": stream}
            response = await deployment.post("/v1/completions", body, x_api_key=key)
            assert response.status_code == 200, response.text
            assert "error" not in response.text


async def until_key_is_valid(deployment: InProcessDeployment, key: str) -> None:
    """Returns when the server has read a key that was added while it ran."""
    async with asyncio.timeout(120):
        while (await deployment.get("/v1/models", x_api_key=key)).status_code == 401:
            await asyncio.sleep(0.05)


async def free_again(deployment: InProcessDeployment, key: str) -> None:
    """Returns when a key with one concurrent request has none open."""
    async with asyncio.timeout(120):
        while (await deployment.post("/v2/models/echo/infer", TENSOR, x_api_key=key)).status_code == 429:
            await asyncio.sleep(0.02)


async def busy(deployment: InProcessDeployment, key: str) -> None:
    """Returns when the one request that this key may have open is at the worker."""
    await until(lambda: deployment.worker.requests.open_requests)
    assert (await deployment.post("/v2/models/echo/infer", TENSOR, x_api_key=key)).status_code == 429


LONG = 100_000


async def test_every_ending_of_a_request_gives_its_place_free(deployment_with: Open, key_file: KeyFile) -> None:
    key = key_file.add("team", concurrent_requests=1)
    async with deployment_with() as deployment:
        chat = {"model": "echo-llm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": LONG, "stream": True}

        stream = deployment.stream(x_api_key=key)  # cancelled in the middle of text
        await stream.write(text_request(LONG))
        await stream.read()
        await busy(deployment, key)
        stream.cancel()
        await free_again(deployment, key)

        stream = deployment.stream(x_api_key=key)  # cancelled before the first answer
        await stream.write(infer_request(delay_ms=60_000))
        await busy(deployment, key)
        stream.cancel()
        await free_again(deployment, key)

        async with deployment.http.stream("POST", "/v1/chat/completions", json=chat, headers={"x-api-key": key}) as response:
            lines = response.aiter_lines()  # dropped, it would disconnect before `busy` has looked
            await anext(lines)
            await busy(deployment, key)
        await free_again(deployment, key)

        await past_its_deadline(deployment, key)

        too_long = {**chat, "messages": [{"role": "user", "content": "x" * 140_000}]}
        wrong = {**TENSOR, "inputs": [{**TENSOR["inputs"][0], "datatype": "INT8"}]}  # refused after admission
        for _ in range(3):
            assert (await deployment.post("/v2/models/echo/infer", wrong, x_api_key=key)).status_code == 400
            assert (await deployment.post("/v1/chat/completions", too_long, x_api_key=key)).status_code == 400
        stream = deployment.stream(x_api_key=key)  # an error in the engine, in-band
        await stream.write(infer_request(delay_ms=10**9))
        assert await in_band(stream)
        await stream.done_writing()
        await free_again(deployment, key)

        whole = await deployment.post("/v1/chat/completions", {**chat, "max_tokens": 3}, x_api_key=key)
        assert "data: [DONE]" in whole.text
        await free_again(deployment, key)


async def past_its_deadline(deployment: InProcessDeployment, key: str) -> None:
    """Return when a call whose deadline passed at the worker has given its place free. Busy machines need later deadlines."""
    for timeout_s in (0.5, 2.0, 10.0, 30.0):
        call = deployment.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(  # type: ignore[var-annotated]
            infer_request(delay_ms=60_000), metadata=(("x-api-key", key),), timeout=timeout_s
        )
        await until(lambda call=call: deployment.worker.requests.open_requests or call.done())
        was_there = not call.done()
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await free_again(deployment, key)
        if was_there:
            return
    raise AssertionError("the call never came to the worker")


ENDINGS = ("%0a", "%0A", "%0d%0a", "%00", "%09", "%c2%85", ";", "%2f", "%20")
PAGES = ("/metrics", "/docs", "/openapi.json", "/busy_threshold", "/v1/routing/decisions", "/console", "/console/fleet")


async def test_paths_cannot_be_written_so_that_they_pass_for_others(deployment_with: Open, key_file: KeyFile) -> None:
    key = key_file.add("team")
    async with deployment_with(open_surfaces=(Surface.METADATA,)) as deployment:
        for path in (
            "/v2/repository%2Findex",
            "/v2%2Frepository/index",
            "/v2%2Frepository%2Findex",
            "/v2/%72epository/index",
            "/v2/models/..%2Frepository/index",
            "//v2/repository/index",
            "/v2//repository/index",
            "/v2/repository/index/",
            "/v2/health/../repository/index",
            "/metrics/",
            "/%6Detrics",
            "/v2/models/x/../../../metrics",
            "//metrics",
            "/busy_threshold/",
            "/%62usy_threshold",
            "/v1/models/../routing/decisions",
            *(
                f"{page}{ending}"
                for page in PAGES
                for ending in ("%0a", "%0A", "%0d%0a", "%00", "%09", "%c2%85", ";", "%2f", "%20")
            ),
        ):
            for headers in ({}, {"x-api-key": key}):
                status, body = await raw_get(deployment, path, headers)
                is_metadata = status == 200 and "extensions" in body  # which is open
                assert is_metadata or status in (400, 401, 403, 404), (path, status, body)


async def test_a_credential_that_is_given_twice_is_refused(deployment_with: Open, key_file: KeyFile) -> None:
    root = key_file.add("root", Scope.ADMIN)
    async with deployment_with() as deployment:
        for names in (("authorization", "Authorization"), ("x-api-key", "X-API-Key")):
            values = [f"Bearer {root}", "Bearer wrong"] if names[0] == "authorization" else [root, "wrong"]
            for pair in (values, values[::-1], [values[0]] * 2):
                status, body = await raw_get(deployment, "/metrics", dict(zip(names, pair, strict=True)))
                assert (status, f"'{names[0]}' must not be given twice" in body) == (400, True)


async def test_a_credential_that_is_given_twice_is_refused_over_grpc_as_well(deployment_with: Open, key_file: KeyFile) -> None:
    key = key_file.add("team")
    async with deployment_with() as deployment:
        start = deployment.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")  # type: ignore[var-annotated]
        for values in ((key, "wrong"), ("wrong", key), (key, key)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await start(infer_request(), metadata=tuple(("x-api-key", value) for value in values), timeout=120)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.details() == "the header 'x-api-key' must not be given twice"


async def test_a_key_sees_thresholds_decisions_and_the_console_of_its_models_only(
    deployment_with: Open, key_file: KeyFile
) -> None:
    scopes = (Scope.THRESHOLDS, Scope.CONSOLE, Scope.INFER)
    keys = {
        names: key_file.add("-".join(names), *scopes, models=names) for names in (("echo",), ("echo-llm",), ("echo", "echo-llm"))
    }
    change = {"model": "echo-llm", "active_decode_blocks_threshold": 0.9}
    async with deployment_with() as deployment:
        for path, body in HTTP_REQUESTS.items():
            assert (
                await deployment.post(path, body, x_api_key=keys["echo", "echo-llm"], x_dynamo_explain="1")
            ).status_code == 200
        for names, key in keys.items():
            fleet = (await deployment.get("/console/fleet", x_api_key=key)).json()
            assert [model["name"] for model in fleet["models"]] == list(names)
            thresholds = (await deployment.get("/busy_threshold", x_api_key=key)).json()["thresholds"]
            assert [entry["model"] for entry in thresholds] == [name for name in names if name == "echo-llm"]
            decisions = (await deployment.get("/v1/routing/decisions", x_api_key=key)).json()["decisions"]
            assert {decision["model"] for decision in decisions} == set(names)
            allowed = "echo-llm" in names
            changed = await deployment.post("/busy_threshold", change, x_api_key=key)
            assert (changed.status_code == 403) == (not allowed), changed.text
            for model in ("echo", "echo-llm"):
                limited = (await deployment.get(f"/v1/routing/decisions?model={model}", x_api_key=key)).json()["decisions"]
                assert bool(limited) == (model in names)


async def raw_get(deployment: InProcessDeployment, path: str, headers: dict[str, str]) -> tuple[int, str]:
    """Status and body of a GET whose path no client library has tidied up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", deployment.frontend.http_port)
    lines = [
        f"GET {path} HTTP/1.1",
        "host: localhost",
        "connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def test_a_login_that_makes_no_sense_is_refused_as_one(deployment_with: Open) -> None:
    async with deployment_with(http_restricted="docs:x-admin=s3cret") as deployment:
        for scheme in ("Basic", "Bearer", ""):
            for rest in ("", "é", "=", "/w==", "Og==", "x" * 9000):
                value = f"{scheme} {rest}".strip()
                for path in ("/metrics", "/v1/models"):
                    status, body = await raw_get(deployment, path, {"authorization": value})
                    assert (value, status, "error" in body) == (value, 401, True)
                assert (await raw_get(deployment, "/openapi.json", {"x-admin": value}))[0] == 403


async def test_a_surface_can_be_left_open(deployment_with: Open, key_file: KeyFile) -> None:
    key = key_file.add("team")
    async with deployment_with(open_surfaces=(Surface.METRICS, Surface.INFERENCE)) as deployment:
        assert (await deployment.get("/metrics")).status_code == 200
        assert (await deployment.post("/v2/models/echo/infer", TENSOR)).status_code == 200
        assert (await deployment.call("ModelInfer", infer_request())).status == 200
        assert (await deployment.post("/v2/models/echo/infer", TENSOR, x_api_key=key)).status_code == 200
        wrong = await deployment.post("/v2/models/echo/infer", TENSOR, x_api_key="guessed")
        assert wrong.status_code == 401, "an invalid key is an error, not an anonymous caller"
        assert (await deployment.get("/v1/models")).status_code == 401


async def test_triton_s_header_form_restricts_protocols_without_any_key(deployment_with: Open) -> None:
    async with deployment_with(
        keys_file=None,
        grpc_restricted="model-repository,statistics:admin-key=s3cret\ninference:client=s4cret",
        http_restricted="metrics,model-repository:x-admin=s3cret",
    ) as deployment:
        good = {"triton_grpc_protocol_admin_key": "s3cret"}
        assert (await deployment.call("RepositoryIndex", **good)).status == 200
        for wrong in ({}, {"triton_grpc_protocol_admin_key": "s3cre"}, {"admin_key": "s3cret"}):
            refused = await deployment.call("RepositoryIndex", **wrong)
            assert refused.status == 403
            assert "s3cret" not in refused.message
        assert (await deployment.call("ModelInfer", infer_request())).status == 403
        assert (await deployment.call("ModelInfer", infer_request(), triton_grpc_protocol_client="s4cret")).status == 200
        assert await deployment.stream().code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await deployment.call("ServerMetadata")).status == 200
        assert (await deployment.get("/metrics")).status_code == 403
        assert (await deployment.get("/metrics", x_admin="s3cret")).status_code == 200
        assert (await deployment.post("/v2/models/echo/infer", TENSOR)).status_code == 200


async def test_keys_come_and_go_without_a_restart_even_on_streams_that_are_open(deployment_with: Open, key_file: KeyFile) -> None:
    async with deployment_with() as deployment:
        key = key_file.add("team")
        await until_key_is_valid(deployment, key)
        assert (await deployment.call("ModelInfer", infer_request(), x_api_key=key)).status == 200
        stream = deployment.stream(x_api_key=key)
        await stream.write(infer_request())
        assert not await in_band(stream)
        key_file.remove_all()
        async with asyncio.timeout(120):
            while True:
                await stream.write(infer_request())
                if error := await in_band(stream):
                    break
                await asyncio.sleep(0.05)
        assert error == "the API key 'team' is not valid any more"
        stream.cancel()
        assert (await deployment.call("ModelInfer", infer_request(), x_api_key=key)).status == 401
        assert (await deployment.post("/v2/models/echo/infer", TENSOR, x_api_key=key)).status_code == 401


async def test_a_key_that_has_expired_is_told_so(deployment_with: Open, key_file: KeyFile) -> None:
    key = key_file.add("old", expires="2020-01-01")
    async with deployment_with() as deployment:
        refused = await deployment.post("/v2/models/echo/infer", TENSOR, x_api_key=key)
        assert (refused.status_code, "'old' has expired" in refused.text) == (401, True)


async def audited(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """The audit records, of which so many must come; the last may come a moment after its answer."""
    async with asyncio.timeout(120):
        while len(lines := [record.getMessage() for record in caplog.records if record.name == "dynamo.audit"]) < count:
            await asyncio.sleep(0.01)
    return lines


async def test_what_administrators_do_is_recorded_under_an_id_that_they_get(
    deployment_with: Open, key_file: KeyFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dynamo.audit")
    key = key_file.add("root", Scope.ADMIN)
    async with deployment_with() as deployment:
        change = {"model": "echo-llm", "active_decode_blocks_threshold": 0.9}
        done = await deployment.post("/busy_threshold", change, x_api_key=key, x_request_id="change-1")
        load = pb.RepositoryModelLoadRequest(model_name="forged\nline").SerializeToString()
        loaded = await deployment.call("RepositoryModelLoad", load, x_api_key=key)
        await audited(caplog, 2)  # grpcio responds before it records
        http_loaded = await deployment.post("/v2/repository/models/some%20model/load", {}, x_api_key=key)
        forged = await deployment.post("/v2/repository/models/forged%0Aline/load", {}, x_api_key=key)
        refused = await deployment.post("/busy_threshold", change)
        await deployment.call("RepositoryModelLoad", load, x_api_key="unknown", x_request_id="try-7")
        await deployment.get("/busy_threshold", x_api_key=key)  # reading is no action
        lines = await audited(caplog, 5)
        assert lines[0] == f"POST /busy_threshold by key 'root' from 127.0.0.1, request change-1: {done.status_code}"
        assert done.headers["x-request-id"] == "change-1"
        assert lines[1].startswith("RepositoryModelLoad 'forged\\nline' by key 'root' from ")
        assert lines[1].split("request ")[1].split(":")[0] == loaded.headers["x-request-id"]
        assert forged.status_code == 400
        assert lines[2].startswith("POST /v2/repository/models/some%20model/load by key 'root' from 127.0.0.1, request ")
        assert lines[2].split("request ")[1].split(":")[0] == http_loaded.headers["x-request-id"]
        assert lines[3] == (
            f"POST /busy_threshold from 127.0.0.1, request {refused.headers['x-request-id']}: refused: "
            "an API key is required, as 'authorization: Bearer KEY' or 'x-api-key: KEY'"
        )
        assert lines[4].startswith("RepositoryModelLoad from ")  # its message was not looked at
        assert lines[4].endswith("request try-7: refused: the API key is not valid")
        assert len(lines) == 5
        assert not any("\n" in line or key in line for line in lines)
        ids = [line.split("request ")[1].split(":")[0] for line in lines]
        assert [vars(record)["request_id"] for record in caplog.records if record.name == "dynamo.audit"] == ids


async def test_without_keys_actions_are_recorded(deployment_with: Open, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dynamo.audit")
    async with deployment_with(keys_file=None) as deployment:
        done = await deployment.post("/busy_threshold", {"model": "echo-llm", "active_decode_blocks_threshold": 0.9})
        loaded = await deployment.call("RepositoryModelLoad")
        await deployment.call("SystemSharedMemoryStatus")  # reading is no action
        memory = await deployment.call("SystemSharedMemoryRegister")
        lines = await audited(caplog, 3)
        assert lines[0].startswith("POST /busy_threshold by a caller without a key from 127.0.0.1, request ")
        assert done.headers["x-request-id"] in lines[0]
        assert lines[1].startswith("RepositoryModelLoad '' by a caller without a key from ")
        assert loaded.headers["x-request-id"] in lines[1]
        assert lines[2].startswith("SystemSharedMemoryRegister by a caller without a key from ")
        assert (memory.status, lines[2].endswith(": failed")) == (500, True)
        assert len(lines) == 3


async def test_every_answer_over_http_has_an_id(deployment_with: Open) -> None:
    async with deployment_with(keys_file=None) as deployment:
        responses = [await deployment.get(path) for path in (*HTTP_QUESTIONS, "/live", "/health", "/v2/health/ready")]
        responses += [await deployment.post(path, body) for path, body in HTTP_REQUESTS.items()]
        responses += [await deployment.post(path, {}) for path in HTTP_REQUESTS]
        responses.append(await deployment.post("/busy_threshold", {"model": "echo-llm"}))
        assert responses[-1].status_code == 200
        ids = [response.headers.get("x-request-id", "") for response in responses]
        assert [response.url.path for response, id_ in zip(responses, ids, strict=True) if not id_] == []
        assert len(set(ids)) == len(ids)
        repeated = await deployment.get("/metrics", x_request_id="mine-1")
        assert repeated.headers["x-request-id"] == "mine-1"


async def test_every_refusal_over_grpc_has_an_id(deployment_with: Open) -> None:
    async with deployment_with(keys_file=None) as deployment:
        for method, message in (("ModelInfer", b"\xff"), ("ModelMetadata", b""), ("CudaSharedMemoryRegister", b"")):
            failed = await deployment.call(method, message)
            assert failed.status != 200
            assert failed.headers["x-request-id"]
            assert (await deployment.call(method, message, x_request_id="mine-1")).headers["x-request-id"] == "mine-1"
