"""Calls and requests that are made to break the picker, or to have more than a key permits."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from dynamo.frontend.api.guard import Accounts, Guard, watch_keys
from dynamo.frontend.api.rpc.operation import Context
from dynamo.frontend.config import CapacityOptions, QueueOptions, RouterMode, RouterOptions, ServingOptions, Thresholds
from dynamo.frontend.security.keys import entry_for, make_key
from dynamo.frontend.security.surfaces import Scope
from dynamo.protos import ext_proc_pb2 as pb
from tests.support.picker_edge import GatewayCall, PickerEdge, headers_of, open_picker_edge, pod_card
from tests.support.waiting import until, until_free

BODY = b'{"model": "talker", "prompt": "once upon a time", "max_tokens": 2}'


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Two keys that may use every model."""
    made = {name: make_key() for name in ("one", "other")}
    file = tmp_path / "keys.yaml"
    file.write_text("".join(entry_for(key, name, scopes=[Scope.INFER]) for name, key in made.items()))
    return {**made, "file": str(file)}


def guard_of(keys: dict[str, str]) -> Guard:
    return Guard(Accounts(watch_keys(Path(keys["file"])), lambda: 0.0))


async def status_of(edge: PickerEdge, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> int:
    """Return the status of the refusal; 200 for a request that was placed."""
    response = await edge.call().answer(json.dumps(body).encode(), path, **headers)
    return response.immediate_response.status.code or 200


async def placed(edge: PickerEdge) -> GatewayCall:
    """Return the call of a request that has been placed, and whose body has gone on."""
    call = edge.call()
    await call.headers()
    await call.body(BODY)
    await call.read()
    await call.read()
    return call


class Reset:
    """The context of a call that sends one message and no more."""

    def __init__(self, message: pb.ProcessingRequest) -> None:
        self._messages = [message.SerializeToString()]

    async def read(self) -> bytes:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop()

    async def write(self, message: bytes) -> None:
        raise AssertionError("the call has ended")

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


async def test_a_gateway_that_leaves_in_the_step_in_which_its_request_is_placed_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    message = pb.ProcessingRequest()
    listed = {":method": "GET", ":path": "/v1/models", ":authority": "models.example"}
    values = [pb.HeaderValue(key=key, raw_value=value.encode()) for key, value in listed.items()]
    message.request_headers.CopyFrom(pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=True))
    async with open_picker_edge() as edge:
        with caplog.at_level(logging.WARNING):
            call = asyncio.ensure_future(edge.handle(None, cast(Context, Reset(message))))
            await asyncio.sleep(0)  # it waits for the task that places the request, which has not begun
            call.cancel()
            await asyncio.wait([call])
        assert call.cancelled() and not caplog.records
        await until(lambda: not len(edge.loads))
        await until_free(edge.capacity)


@pytest.mark.parametrize("status", ["9" * 5000, "", "-1", "²00", "0", "2 0", "99"])
async def test_a_status_that_is_none_ends_no_call(status: str) -> None:
    async with open_picker_edge() as edge:
        call = await placed(edge)
        values = [pb.HeaderValue(key=":status", raw_value=status.encode())]
        await call.send(response_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=values)))
        assert headers_of(await call.read()) == {"x-dynamo-placement": "routed"}
        assert await call.ended() is grpc.StatusCode.OK
        await until(lambda: not len(edge.loads))
        await until_free(edge.capacity)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize("name", ["custom_logit_processor", "logits_processors"])
async def test_no_key_has_an_engine_run_code(keys: dict[str, str], path: str, name: str) -> None:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    body = {"model": "talker", "max_tokens": 2, **prompt}
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        for fields in ({name: "{}"}, {name: "{}", "temperature": -1}):  # understood, and not
            assert await status_of(edge, {**body, **fields}, path, x_api_key=keys["one"]) == 400
        assert await status_of(edge, body, path, x_api_key=keys["one"]) == 200
    async with open_picker_edge() as edge:
        assert await status_of(edge, {**body, name: "{}"}, path) == 200


async def test_a_batch_of_conversations_is_not_one_request_of_a_key(keys: dict[str, str]) -> None:
    turn = {"role": "user", "content": "a"}
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        for messages, status in (([turn], 200), ([[turn], [turn]], 400), ([], 200)):
            body = {"model": "talker", "messages": messages}
            assert await status_of(edge, body, "/v1/chat/completions/batch", x_api_key=keys["one"]) == status


async def test_only_a_form_goes_on_unseen_where_there_are_keys(keys: dict[str, str]) -> None:
    """Some servers read JSON whatever its type."""
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        headers = {"x_api_key": keys["one"], "content_type": "multipart/mixed; boundary=x"}
        assert await status_of(edge, {"input": "a", "lora": 1, "n": 9}, "/v1/embeddings", **headers) == 400


@pytest.mark.parametrize("salt", [["key:of another"], 5, {"a": 1}])
async def test_a_salt_that_is_no_text_is_replaced_too(keys: dict[str, str], salt: object) -> None:
    async with open_picker_edge(pod_card(1, takes_cache_salt=True), guard=guard_of(keys)) as edge:
        call = edge.call()
        await call.headers("/v1/embeddings", x_api_key=keys["one"])
        await call.body(json.dumps({"input": "a", "cache_salt": salt}).encode())
        await call.read()
        got = json.loads((await call.read()).request_body.response.body_mutation.streamed_response.body)
        assert got["cache_salt"].startswith("key:")
        await call.ended()


async def test_names_that_a_client_invents_buy_its_key_no_turns(keys: dict[str, str]) -> None:
    serving = ServingOptions(queue=QueueOptions(size=10))
    busy = RouterOptions(mode=RouterMode.LEAST_LOADED, thresholds=Thresholds(active_prefill_tokens=8))
    order: list[str] = []

    async def wait(name: str, call: GatewayCall) -> None:
        await call.read()
        order.append(name)
        await call.ended()

    async with open_picker_edge(pod_card(1), router=busy, serving=serving, guard=guard_of(keys)) as edge:
        running = edge.call()
        await running.headers(x_api_key=keys["one"])
        await running.body(BODY)
        await running.read()
        waiting = []
        for number, name in enumerate(["one"] * 5 + ["other"]):  # in the order of their arrival
            call = edge.call()
            await call.headers(x_api_key=keys[name], x_gateway_inference_fairness_id=f"invented-{number}")
            await call.body(BODY)
            waiting.append(asyncio.create_task(wait(name, call)))
            await until(lambda: sum(each.requests for each in edge.plane.waiting().values()) == len(waiting))
        await running.ended()
        await asyncio.gather(*waiting)
    assert order.index("other") < 3


async def test_names_that_a_client_invents_buy_its_key_no_more_room_for_bodies(keys: dict[str, str]) -> None:
    start = b'{"model": "talker", "prompt": "' + b"x" * 60_000
    async with open_picker_edge(guard=guard_of(keys), capacity=CapacityOptions(max_buffered_bytes=2**20)) as edge:
        stalled = [edge.call() for _ in range(16)]
        for number, call in enumerate(stalled):
            await call.headers(x_api_key=keys["one"], x_llm_d_inference_fairness_id=f"invented-{number}")
            await call.body(start, ends=False)
        reads = [asyncio.create_task(call.read()) for call in stalled]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        refusal = next(each.result().immediate_response for each in reads if each.done())
        assert refusal.status.code == 429 and b"the API key 'one'" in refusal.body
        for call, read in zip(stalled, reads, strict=True):
            call.call.cancel()
            read.cancel()
        await asyncio.wait(reads)
        await until_free(edge.capacity)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("rewrite", [{}, {"x_gateway_model_name_rewrite": "talker"}])
async def test_a_body_of_very_many_fields_is_refused_before_it_takes_the_event_loop(
    keys: dict[str, str], path: str, rewrite: dict[str, str]
) -> None:
    """Each is cheap; 4 MiB of them took a second, several times over. Fields of messages and tools are not written anew."""
    many = {f"f{number}": 1 for number in range(10_001)}
    for guard in (None, guard_of(keys)):
        async with open_picker_edge(pod_card(1, context_length=1_000_000), guard=guard) as edge:
            headers = {"x_api_key": keys["one"], **rewrite}
            assert await status_of(edge, {"model": "talker", "prompt": "a", **many}, path, **headers) == 413
            packed = gzip.compress(json.dumps({"model": "talker", "prompt": "a", **many}).encode())
            answer = await edge.call().answer(packed, path, **headers, content_encoding="gzip")
            assert answer.immediate_response.status.code == 413
            chat = {"model": "talker", "messages": [{"role": "user", "content": "a:" * 20_000}], "max_tokens": 2}
            assert await status_of(edge, chat, "/v1/chat/completions", **headers) == 200
            await until_free(edge.capacity)


async def test_the_last_of_several_fields_of_a_name_is_the_one_that_is_checked(keys: dict[str, str]) -> None:
    async with open_picker_edge(guard=guard_of(keys)) as edge:
        for first, last, status in (("1", "0", 0), ("0", "1", 400)):
            call = edge.call()
            await call.headers(x_api_key=keys["one"])
            await call.body(f'{{"model": "talker", "prompt": "a", "priority": {first}, "\\u0070riority": {last}}}'.encode())
            assert (await call.read()).immediate_response.status.code == status
            await call.ended()


async def test_clients_that_leave_often_do_not_end_the_calls_of_others() -> None:
    """A gateway has one connection for all of them."""
    async with open_picker_edge() as edge:
        running = await placed(edge)
        for _ in range(15):
            left = [edge.call() for _ in range(100)]
            for call in left:
                await call.headers()  # its body does not come
            await until(lambda: edge.capacity.requests > 100)
            for call in left:
                call.call.cancel()
            await until(lambda: edge.capacity.requests < 3)
        assert headers_of(await running.respond()) == {"x-dynamo-placement": "routed"}
        assert await running.ended() is grpc.StatusCode.OK
