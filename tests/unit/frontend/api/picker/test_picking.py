"""Who may have requests placed, whose turn it is, and what is refused: the rules of every other entry point."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo.frontend.api.guard import Accounts, Guard, watch_keys
from dynamo.frontend.api.picker.gateway_request import GatewayBody
from dynamo.frontend.config import (
    CapacityOptions,
    HttpOptions,
    PickerOptions,
    QueueOptions,
    RouterMode,
    RouterOptions,
    ServingOptions,
    Thresholds,
)
from dynamo.frontend.security.keys import Limits, entry_for, make_key
from dynamo.frontend.security.surfaces import Scope
from dynamo.protos import ext_proc_pb2 as pb
from tests.support.memory import instances_of
from tests.support.picker_edge import GatewayCall, PickerEdge, headers_of, open_picker_edge, pod_card
from tests.support.pictures import huge_png
from tests.support.waiting import WAIT_S, until, until_free

DESTINATION = "x-gateway-destination-endpoint"
BODY = b'{"model": "talker", "prompt": "once upon a time", "max_tokens": 2}'
BUSY = RouterOptions(mode=RouterMode.LEAST_LOADED, thresholds=Thresholds(active_prefill_tokens=8))
"""One request makes an instance busy."""
OBJECTIVES = PickerOptions(objectives=(("batch", -1), ("chat", 5)))


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Keys by name: `all` may use every model, twice, and `free` without limit; `operator` may do all there is; `some` may use
    those whose names begin with `talk`; `other` none of them."""
    made = {name: make_key() for name in ("all", "some", "other", "free", "operator")}
    once = Limits(requests_per_s=2)
    (tmp_path / "keys.yaml").write_text(
        entry_for(made["all"], "all", scopes=[Scope.INFER], limits=once)
        + entry_for(made["some"], "some", scopes=[Scope.INFER], models=["talk*"])
        + entry_for(made["free"], "free", scopes=[Scope.INFER])
        + entry_for(made["operator"], "operator", scopes=[Scope.ADMIN])
        + entry_for(made["other"], "other", scopes=[Scope.INFER], models=["walk*"])
    )
    return {**made, "file": str(tmp_path / "keys.yaml")}


def guard_of(keys: dict[str, str]) -> Guard:
    return Guard(Accounts(watch_keys(Path(keys["file"])), lambda: 0.0))


async def sent(edge: PickerEdge, body: bytes = BODY, path: str = "/v1/completions", **headers: str) -> GatewayCall:
    call = edge.call()
    await call.headers(path, **headers)
    await call.body(body)
    return call


async def outcome(edge: PickerEdge, body: bytes = BODY, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
    """Return the status of the refusal and its body, or 200 and the headers of a request that was placed; end the call."""
    response = await edge.call().answer(body, path, **headers)
    if response.HasField("immediate_response"):
        return response.immediate_response.status.code, json.loads(response.immediate_response.body)
    return 200, headers_of(response)


async def test_requests_need_the_keys_that_the_frontend_has(keys: dict[str, str]) -> None:
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        status, body = await outcome(edge)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (await outcome(edge, authorization="Bearer wrong"))[0] == 401
        assert (await outcome(edge, x_api_key=keys["some"]))[0] == 200
        status, body = await outcome(edge, authorization=f"Bearer {keys['other']}")
        assert (status, body["error"]["type"]) == (403, "permission_error")
        anthropic = b'{"model": "talker", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}'
        status, body = await outcome(edge, anthropic, "/v1/messages")
        assert (status, body["error"]["type"]) == (401, "authentication_error")  # in the words of the protocol
        await until_free(edge.capacity)


async def test_what_is_not_understood_is_for_keys_that_may_use_every_model(keys: dict[str, str]) -> None:
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        unclear = b'{"model": "talker", "prompt": 17}'
        status, body = await outcome(edge, unclear, x_api_key=keys["some"])
        assert status == 400 and "'prompt'" in body["error"]["message"]
        assert (await outcome(edge, b"", "/v1/other", x_api_key=keys["some"]))[0] == 403
        assert (await outcome(edge, unclear, x_api_key=keys["all"]))[1]["x-dynamo-placement"] == "least-loaded"


@pytest.mark.parametrize(
    "path",
    [
        "/flush_cache",
        "/v1/load_lora_adapter",
        "/v1/%6coad_lora_adapter",
        "/v1/../flush_cache",
        "/v1//load_lora_adapter",
        "/v1/..\\flush_cache",
        "/v1/load_lora_adapter#a",
        "/v1/embeddings;a",
        "/v2/repository/index",
        "/v2/models/talker/trace/setting",
        "/v2/models/talker/versions/1/trace/setting",
        "/v2/models/talker%2Fload",
        "/inference/v1/generate",
        "*",
    ],
)
async def test_paths_by_which_engine_servers_are_managed_need_a_key_that_may_do_that(keys: dict[str, str], path: str) -> None:
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        of_clients = [(to, "free", 0) for to in ("/v1/embeddings", "/v2/models/talker/versions/1", "/v2/models/talker/infer")]
        for to, key, status in [(path, "free", 403), (path, "operator", 0), *of_clients]:
            call = edge.call()
            await call.headers(to, ends=True, x_api_key=keys[key])
            assert (await call.read()).immediate_response.status.code == status
            await call.ended()


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "talker", "prompt": "a", "kv_transfer_params": {"remote_host": "10.9.9.9"}}',
        b'{"model": "talker", "prompt": "a", "kv_transfer_params": {"remote_host": "10.9.9.9"}, "temperature": NaN}',
        '{"model": "talker", "prompt": "a", "kv_transfer_params": {"remote_host": "10.9.9.9"}}'.encode("utf-16"),
    ],
)
async def test_no_key_has_an_engine_fetch_caches_from_where_it_says(keys: dict[str, str], body: bytes) -> None:
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        assert (await outcome(edge, body, x_api_key=keys["free"]))[0] == 400
        assert (await outcome(edge, body, "/v1/%63ompletions", x_api_key=keys["free"]))[0] in (400, 403)
        assert (await outcome(edge, b'{"model": "talker", "prompt": 17}', x_api_key=keys["free"]))[0] == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"n": 1000}, 400),
        ({"n": 2, "model": "unheard-of"}, 404),
        ({"best_of": 1000, "model": "unheard-of"}, 404),
        ({"prompt": ["a"] * 1000}, 400),
        ({"prompt": [[1], [2]], "model": "unheard-of"}, 404),
        ({"prompt_embeds": ["a", "b"], "model": "unheard-of"}, 404),
        ({"n": 1, "best_of": None, "prompt": [1, 2], "model": "unheard-of"}, 200),
        ({"temperature": -1}, 200),
    ],
)
async def test_a_request_that_is_not_understood_is_one_where_keys_have_limits(
    keys: dict[str, str], fields: dict[str, Any], status: int
) -> None:
    """It is charged as one: others would have more choices and prompts at once than their key may have."""
    body = json.dumps({"model": "talker", "prompt": "a", "max_tokens": 2, **fields}).encode()
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        assert (await outcome(edge, body, x_api_key=keys["all"]))[0] == status
    async with open_picker_edge() as edge:
        assert (await outcome(edge, body))[0] == 200  # no key, no charge


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("name", "some", "every"),
    [
        ("bootstrap_host", 400, 400),
        ("ec_transfer_params", 400, 400),
        ("disaggregated_params", 400, 400),
        ("lora_path", 400, 200),
        ("lora_request", 400, 200),
        ("harmless", 200, 200),
    ],
)
async def test_fields_that_only_engines_know_give_a_key_no_more_than_it_may(
    keys: dict[str, str], path: str, name: str, some: int, every: int
) -> None:
    """What the operation ignores goes on to the engine: a key for some models must not name an adapter there."""
    prompts: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a", "store": False}}
    prompt = prompts.get(path, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
    body = {"model": "talker", **prompt, name: "10.9.9.9"}
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        for key, status in (("some", some), ("free", every)):
            assert (await outcome(edge, json.dumps(body).encode(), path, x_api_key=keys[key]))[0] == status
        assert (await outcome(edge, json.dumps({**body, name: None}).encode(), path, x_api_key=keys["some"]))[0] == 200
        await until_free(edge.capacity)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/unheard-of"])
@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, 200),
        ({"chat_template_kwargs": {"chat_template": "x"}}, 400),
        ({"chat_template_kwargs": {"tokenize": False}}, 400),
        ({"temperature": -1, "chat_template": "x"}, 400),
    ],
)
async def test_no_key_has_an_engine_render_another_template(
    keys: dict[str, str], path: str, said: dict[str, Any], status: int
) -> None:
    """Some servers take the variables for arguments of what renders a template, which may take for ever."""
    if path == "/v1/messages" and "temperature" in said:
        said = {**said, "top_p": -1}
    body = json.dumps({"model": "talker", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **said}).encode()
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        assert (await outcome(edge, body, path, x_api_key=keys["free"]))[0] == status
        await until_free(edge.capacity)


@pytest.mark.parametrize("name", ["mm_processor_kwargs", "media_io_kwargs"])
async def test_no_key_has_an_engine_enlarge_media(keys: dict[str, str], name: str) -> None:
    """vLLM scales a picture of one pixel up to the `min_pixels` of a request."""
    body = {"model": "talker", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        for said, status in ((None, 200), ({"use_audio_in_video": True}, 200), ({"min_pixels": 10**12}, 400), ([1], 400)):
            for path in ("/v1/chat/completions", "/v1/unheard-of"):
                got = await outcome(edge, json.dumps({**body, name: said}).encode(), path, x_api_key=keys["free"])
                assert got[0] == status
        await until_free(edge.capacity)


@pytest.mark.parametrize(("priority", "status"), [(-100, 400), (5, 400), (0, 200), (None, 200)])
async def test_a_body_gives_an_engine_no_priority_that_its_key_may_not_have(
    keys: dict[str, str], priority: int | None, status: int
) -> None:
    """By header it is bounded as everywhere; the body goes to the engine as it is, and vLLM takes a low number for urgent."""
    body = json.dumps({"model": "talker", "prompt": "a", "priority": priority}).encode()
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        assert (await outcome(edge, body, x_api_key=keys["free"]))[0] == status
        assert (await outcome(edge, x_api_key=keys["free"], x_dynamo_request_priority="5"))[0] == 200
    async with open_picker_edge() as edge:
        assert (await outcome(edge, body))[0] == 200


async def test_limits_of_keys_hold_behind_a_gateway(keys: dict[str, str]) -> None:
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        statuses = [(await outcome(edge, x_api_key=keys["all"]))[0] for _ in range(3)]
        assert statuses == [200, 200, 429]


async def test_prompts_of_a_key_are_cached_apart_at_the_endpoint_as_well(keys: dict[str, str]) -> None:
    async with open_picker_edge(pod_card(1, takes_cache_salt=True), guard=guard_of(keys)) as edge:
        call = await sent(edge, x_api_key=keys["some"])
        await call.read()
        body = (await call.read()).request_body.response.body_mutation.streamed_response.body
        assert json.loads(body)["cache_salt"]
        await call.ended()


async def test_a_request_that_is_not_understood_has_a_cache_of_its_key_too_whatever_salt_it_names(keys: dict[str, str]) -> None:
    """Salts of keys can be told from their names: such a request must not go on with the one of another key."""
    salts = []
    async with open_picker_edge(pod_card(1, takes_cache_salt=True), guard=guard_of(keys)) as edge:
        for fields in ({}, {"cache_salt": "key:of another"}):
            body = {"model": "unheard-of", "prompt": "once", **fields}
            call = await sent(edge, json.dumps(body).encode(), x_api_key=keys["free"])
            assert headers_of(await call.read())["x-dynamo-placement"] == "least-loaded"
            got = json.loads((await call.read()).request_body.response.body_mutation.streamed_response.body)
            salts.append(got.pop("cache_salt"))
            assert got == {"model": "unheard-of", "prompt": "once"}
            await call.ended()
    assert all(salt.startswith("key:") for salt in salts) and len({*salts, "key:of another"}) == 3


async def test_without_room_a_request_waits_its_turn_unless_its_objective_says_that_it_is_shed() -> None:
    serving = ServingOptions(queue=QueueOptions(size=10))
    async with open_picker_edge(pod_card(1), router=BUSY, serving=serving, options=OBJECTIVES) as edge:
        running = await sent(edge)
        assert headers_of(await running.read())[DESTINATION] == "10.0.0.1:8000"
        status, body = await outcome(edge, x_gateway_inference_objective="batch")
        assert (status, body["error"]["code"]) == (429, "overloaded")
        waiting = await sent(edge, x_llm_d_inference_objective="chat")
        turn = asyncio.create_task(waiting.read())
        await running.ended()
        assert headers_of(await turn)[DESTINATION] == "10.0.0.1:8000"
        await waiting.ended()
        await until_free(edge.capacity)


async def test_without_a_queue_requests_are_shed_while_all_endpoints_are_busy() -> None:
    async with open_picker_edge(pod_card(1), router=BUSY) as edge:
        running = await sent(edge)
        await running.read()
        call = await sent(edge)
        refused = (await call.read()).immediate_response
        assert refused.status.code == 429
        headers = {option.header.key: option.header.raw_value for option in refused.headers.set_headers}
        assert headers["x-llm-d-request-dropped-reason"] == b"rejected-saturated" and "content-length" not in headers
        await call.ended()
        await running.ended()


async def test_those_that_a_fairness_id_names_have_turns_of_their_own() -> None:
    serving = ServingOptions(queue=QueueOptions(size=10))
    async with open_picker_edge(pod_card(1), router=BUSY, serving=serving) as edge:
        running = await sent(edge)
        await running.read()
        order: list[str] = []

        async def wait(name: str, call: GatewayCall) -> None:
            await call.read()
            order.append(name)
            await call.ended()

        waiting = []
        for name in ("many", "many", "many", "one"):  # in the order of their arrival
            call = await sent(edge, x_gateway_inference_fairness_id=name)
            waiting.append(asyncio.create_task(wait(name, call)))
            while sum(queued.requests for queued in edge.plane.waiting().values()) < len(waiting):
                await asyncio.sleep(0)
        await running.ended()
        await asyncio.gather(*waiting)
        assert order.index("one") < 3


async def test_requests_and_their_bytes_are_counted_against_the_capacity_of_the_process() -> None:
    async with open_picker_edge(capacity=CapacityOptions(max_concurrent_requests=1)) as edge:
        running = await sent(edge)
        await running.read()
        assert (await outcome(edge))[0] == 429
        await running.ended()
        await until_free(edge.capacity)
    async with open_picker_edge(capacity=CapacityOptions(max_buffered_bytes=2**20)) as edge:
        long = json.dumps({"model": "talker", "prompt": "x" * 400_000}).encode()
        assert (await outcome(edge, long))[0] == 429
        await until_free(edge.capacity)


@pytest.mark.parametrize("header", ["x-gateway-model-name-rewrite", "x-llm-d-model-name-rewrite"])
async def test_a_header_names_another_model(header: str) -> None:
    async with open_picker_edge(pod_card(1, "other"), pod_card(2)) as edge:
        call = await sent(edge, b'{"model": "unknown", "prompt": "a"}', **{header.replace("-", "_"): "other"})
        assert headers_of(await call.read())[DESTINATION] == "10.0.0.1:8000"
        body = (await call.read()).request_body.response.body_mutation.streamed_response.body
        assert json.loads(body) == {"model": "served", "prompt": "a"}
        await call.ended()


async def test_adapters_keep_their_names() -> None:
    async with open_picker_edge(pod_card(1, adapters=("legal",))) as edge:
        call = await sent(edge, b'{"model": "legal", "prompt": "a"}')
        await call.read()
        body = (await call.read()).request_body.response.body_mutation.streamed_response.body
        assert json.loads(body)["model"] == "legal"
        await call.ended()


async def test_nothing_is_left_when_the_gateway_leaves_while_a_request_waits() -> None:
    serving = ServingOptions(queue=QueueOptions(size=10))
    async with open_picker_edge(pod_card(1), router=BUSY, serving=serving) as edge:
        running = await sent(edge)
        await running.read()
        waiting = await sent(edge)
        while not edge.plane.waiting():
            await asyncio.sleep(0)
        waiting.call.cancel()
        while edge.plane.waiting():
            await asyncio.sleep(0)
        await running.ended()
        await until_free(edge.capacity)
        assert not len(edge.loads)


@pytest.mark.parametrize(("status", "opened"), [(500, 1), (501, 0), (503, 0), (429, 0), (400, 0)])
async def test_an_endpoint_whose_engine_fails_gets_no_requests_and_what_clients_do_wrong_opens_nothing(
    status: int, opened: int
) -> None:
    async with open_picker_edge(*map(pod_card, range(1, 4))) as edge:
        sent_to: Counter[str] = Counter()
        for _ in range(60):
            call = await sent(edge)
            address = headers_of(await call.read())[DESTINATION]
            sent_to[address] += 1
            await call.respond(status if address == "10.0.0.1:8000" else 200)
            await call.ended()
        assert (sent_to["10.0.0.1:8000"] == 5) is bool(opened)
        assert edge.value("dynamo_frontend_circuits_opened_total", model="talker") == opened


def kept_bytes() -> int:
    """Return how many bytes of bodies pickers of this process keep."""
    return sum(sum(map(len, each.parts)) for each in instances_of(GatewayBody))


async def test_a_body_that_nothing_reads_is_left_to_the_gateway_while_its_request_waits() -> None:
    serving = ServingOptions(queue=QueueOptions(size=10))
    async with open_picker_edge(pod_card(1), router=BUSY, serving=serving, options=OBJECTIVES) as edge:
        running = await sent(edge)
        await running.read()
        waiting = edge.call()
        await waiting.headers(content_type="text/plain")  # refused for it by the operation: on to the endpoint with little load
        await until(edge.plane.waiting)
        parts = [b"%d" % number * 10_000 for number in range(5)]
        for part in parts:
            await waiting.body(part, ends=part is parts[-1])
        await outcome(edge, x_gateway_inference_objective="batch")  # on the same connection: what was sent before has come
        assert kept_bytes() < 2 * len(parts[0])
        turn = asyncio.create_task(waiting.read())
        await running.ended()
        assert headers_of(await turn)["x-dynamo-placement"] == "least-loaded"
        chunks = [(await waiting.read()).request_body.response.body_mutation.streamed_response for _ in parts]
        assert [chunk.body for chunk in chunks] == parts and chunks[-1].end_of_stream
        await waiting.ended()
        await until_free(edge.capacity)


async def test_a_body_that_was_read_and_not_understood_counts_while_its_request_waits() -> None:
    serving = ServingOptions(queue=QueueOptions(size=10))
    async with open_picker_edge(pod_card(1), router=BUSY, serving=serving) as edge:
        running = await sent(edge)
        await running.read()
        waiting = await sent(edge, b"{" * 50_000)
        await until(edge.plane.waiting)
        assert edge.capacity.buffered_bytes >= 50_000
        waiting.call.cancel()
        await running.ended()
        await until_free(edge.capacity)


async def test_nothing_is_read_for_a_caller_without_a_key_whose_header_names_another_model(keys: dict[str, str]) -> None:
    async with open_picker_edge(guard=guard_of(keys), http=HttpOptions(max_json_bytes=100)) as edge:
        long = b'{"model": "talker", "prompt": "%s"}' % (b"x" * 200)
        assert (await outcome(edge, long, x_gateway_model_name_rewrite="talker"))[0] == 401
        status, _ = await outcome(edge, long, x_gateway_model_name_rewrite="talker", x_api_key=keys["some"])
        assert status == 413


@pytest.mark.parametrize("mode", [pb.FULL_DUPLEX_STREAMED, pb.BUFFERED])
async def test_a_body_that_does_not_come_gives_its_place_back(mode: pb.BodyMode.ValueType) -> None:
    async with open_picker_edge(body_s=0.0) as edge:
        call = edge.call()
        await call.headers(mode=mode)
        if mode == pb.BUFFERED:
            assert (await call.read()).WhichOneof("response") == "request_headers"
        assert (await call.read()).immediate_response.status.code == 408
        await until_free(edge.capacity)


async def test_a_body_that_has_nearly_come_has_no_more_time_than_another() -> None:
    """Otherwise a few megabytes, sent once, would hold their share of what bodies may take for an hour."""
    async with open_picker_edge(body_s=0.2) as edge:
        call = edge.call()
        await call.headers()
        await call.body(b'{"model": "talker", "prompt": "' + b"x" * 1_000_000, ends=False)
        async with asyncio.timeout(WAIT_S):
            assert (await call.read()).immediate_response.status.code == 408
        await until_free(edge.capacity)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"input": "once"}, 200),
        ({"input": "once", "response_format": "mp3"}, 200),
        ({"kv_transfer_params": {"remote_host": "10.9.9.9"}}, 400),
        ({"response_format": {"type": "json_schema"}}, 400),
        ({"guided_regex": "(a{1000}){1000}"}, 400),
        ({"n": 1000}, 400),
        ({"priority": -100}, 400),
    ],
)
async def test_paths_that_no_operation_reads_give_a_key_no_more_than_it_may(
    keys: dict[str, str], fields: dict[str, Any], status: int
) -> None:
    body = json.dumps({"model": "talker", **fields}).encode()
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        assert (await outcome(edge, body, "/v1/embeddings", x_api_key=keys["free"]))[0] == status
        assert (await outcome(edge, body, "/inference/v1/generate", x_api_key=keys["operator"]))[0] == 200  # manages engines
        await until_free(edge.capacity)


@pytest.mark.parametrize(
    ("content_type", "status"), [("application/json", 400), ("text/plain", 400), ("multipart/form-data; boundary=x", 200)]
)
async def test_a_body_in_which_fields_cannot_be_seen_is_a_form_where_there_are_keys(
    keys: dict[str, str], content_type: str, status: int
) -> None:
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        headers = {"x_api_key": keys["free"], "content_type": content_type}
        assert (await outcome(edge, b"--x\r\n", "/v1/audio/transcriptions", **headers))[0] == status
    async with open_picker_edge() as edge:
        assert (await outcome(edge, b"--x\r\n", "/v1/audio/transcriptions", content_type=content_type))[0] == 200


async def test_the_salt_of_a_key_holds_at_paths_that_no_operation_reads(keys: dict[str, str]) -> None:
    async with open_picker_edge(pod_card(1, takes_cache_salt=True), guard=guard_of(keys)) as edge:
        call = await sent(edge, b'{"input": "a", "cache_salt": "key:of another"}', "/v1/embeddings", x_api_key=keys["free"])
        assert headers_of(await call.read())["x-dynamo-placement"] == "least-loaded"
        got = json.loads((await call.read()).request_body.response.body_mutation.streamed_response.body)
        assert got["cache_salt"].startswith("key:") and got["cache_salt"] != "key:of another"
        await call.ended()


@pytest.mark.parametrize("body", [b'{"model": "other-alias"}', b'{"model": "other"}'])
async def test_a_path_that_no_operation_reads_goes_to_the_model_that_its_body_names(body: bytes) -> None:
    async with open_picker_edge(pod_card(1), pod_card(2), pod_card(3, "other")) as edge:
        call = await sent(edge, body, "/v1/embeddings")
        assert headers_of(await call.read())[DESTINATION] == "10.0.0.3:8000"
        got = (await call.read()).request_body.response.body_mutation.streamed_response.body
        assert json.loads(got) == {"model": "served"}
        await call.ended()
        call = await sent(edge, b'{"model": "talker"}', "/v1/embeddings", x_gateway_model_name_rewrite="other")
        assert headers_of(await call.read())[DESTINATION] == "10.0.0.3:8000"
        await call.ended()
        await until_free(edge.capacity)


async def test_a_schema_that_no_engine_should_compile_is_not_passed_on() -> None:
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000_000}
    body = {
        "model": "talker",
        "prompt": "a",
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    async with open_picker_edge() as edge:
        status, refusal = await outcome(edge, json.dumps(body).encode())
        assert status == 400 and "minItems" in refusal["error"]["message"]
        assert (await outcome(edge, json.dumps({**body, "response_format": 17}).encode()))[0] == 200


@pytest.mark.parametrize(
    "said",
    [
        {"stop_token_ids": [999_999], "min_tokens": 1},
        {"logit_bias": {"999999": 1}},
        {"prompt": [999_999]},
        {"prompt": None, "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "x"}},
    ],
)
async def test_what_might_end_an_engine_is_not_passed_on(said: dict[str, Any]) -> None:
    path = "/v1/chat/completions" if "messages" in said else "/v1/completions"
    body = {name: value for name, value in {"model": "talker", "prompt": "a", **said}.items() if value is not None}
    async with open_picker_edge() as edge:
        assert (await outcome(edge, json.dumps(body).encode(), path))[0] == 400
        await until_free(edge.capacity)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    ("costly", "cheap"),
    [
        ({"ebnf": 'root ::= "a"{1000000000}'}, {"ebnf": 'root ::= "a"{10}'}),
        ({"regex": "a{1000}{1000}"}, {"regex": "a+"}),
        ({"json_schema": '{"type": "array", "minItems": 1000000000}'}, {"json_schema": '{"type": "array", "minItems": 1}'}),
        ({"structural_tag": {"format": {"minItems": 1_000_000_000}}}, {"structural_tag": {"format": {}}}),
    ],
)
async def test_guides_that_only_engines_know_have_the_same_bounds(
    path: str, costly: dict[str, Any], cheap: dict[str, Any]
) -> None:
    """SGLang has them in requests of which the operation understands the rest."""
    prompts: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a", "store": False}}
    prompt = prompts.get(path, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2})
    async with open_picker_edge() as edge:
        for said, status in ((costly, 400), (cheap, 200)):
            assert (await outcome(edge, json.dumps({"model": "talker", **prompt, **said}).encode(), path))[0] == status
        await until_free(edge.capacity)


async def test_no_key_says_guides_of_another_api(keys: dict[str, str]) -> None:
    body = {"model": "talker", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        for said, status in (({"output_format": {"a": 1}}, 400), ({"ebnf": 'root ::= "a"'}, 200), ({"text": "a"}, 200)):
            got = await outcome(edge, json.dumps({**body, **said}).encode(), "/v1/chat/completions", x_api_key=keys["free"])
            assert got[0] == status
        await until_free(edge.capacity)


async def test_a_picture_of_too_many_pixels_is_not_passed_on() -> None:
    async with open_picker_edge(pod_card(1, modalities=("image",))) as edge:
        for width, status in ((1, 200), (100_000, 400)):
            url = "data:image/png;base64," + base64.b64encode(huge_png(width, width)).decode()
            message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            body = json.dumps({"model": "talker", "messages": [message]}).encode()
            assert (await outcome(edge, body, "/v1/chat/completions"))[0] == status
        await until_free(edge.capacity)


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/v1/chat/completions", lambda schema: {"function": {"name": "f", "parameters": schema, "strict": True}}),
        ("/v1/responses", lambda schema: {"name": "f", "parameters": schema, "strict": True}),
    ],
)
async def test_neither_are_tools_whose_schemas_engines_compile(path: str, tool: Callable[[object], dict[str, Any]]) -> None:
    """SGLang and vLLM compile those of tools that say `strict`, though the model need not call any."""
    prompt: dict[str, Any] = {"input": "a", "store": False}
    if path == "/v1/chat/completions":
        prompt = {"messages": [{"role": "user", "content": "a"}]}

    def body(**schema: object) -> bytes:
        return json.dumps({"model": "talker", **prompt, "tools": [{"type": "function", **tool(schema)}]}).encode()

    async with open_picker_edge() as edge:
        status, refusal = await outcome(edge, body(type="array", minItems=1_000_000_000), path)
        assert status == 400 and "minItems" in refusal["error"]["message"]
        assert (await outcome(edge, body(type="array", minItems=1), path))[0] == 200


async def test_a_refusal_does_not_wait_for_more_of_the_body(keys: dict[str, str]) -> None:
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        for mode in (pb.FULL_DUPLEX_STREAMED, pb.BUFFERED):
            call = edge.call()
            await call.headers(mode=mode, x_api_key="wrong")
            if mode == pb.BUFFERED:
                assert (await call.read()).WhichOneof("response") == "request_headers"
            async with asyncio.timeout(WAIT_S):
                assert (await call.read()).immediate_response.status.code == 401
            await call.ended()


async def test_bodies_of_one_key_that_do_not_come_leave_room_for_those_of_others(keys: dict[str, str]) -> None:
    """Each is within its bounds, and has half a minute: together they could hold all that the process may."""
    start = b'{"model": "talker", "prompt": "' + b"x" * 60_000
    async with open_picker_edge(guard=guard_of(keys), capacity=CapacityOptions(max_buffered_bytes=2**20)) as edge:
        stalled = [edge.call() for _ in range(8)]
        for call in stalled:
            await call.headers(x_api_key=keys["free"])
            await call.body(start, ends=False)
        refused = [asyncio.create_task(call.read()) for call in stalled]
        await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
        assert all(each.result().immediate_response.status.code == 429 for each in refused if each.done())
        other = edge.call()
        await other.headers(x_api_key=keys["some"])
        await other.body(start, ends=False)
        await other.body(b'"}')
        refusal = (await other.read()).immediate_response
        assert refusal.status.code == 400 and b"context_length_exceeded" in refusal.body  # it was read
        for call, read in zip(stalled, refused, strict=True):
            call.call.cancel()
            read.cancel()
        await asyncio.wait(refused)
        await other.ended()
        await until_free(edge.capacity)
