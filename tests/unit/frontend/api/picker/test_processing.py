"""Calls of a gateway: how a request is placed, and how long it is booked."""

from __future__ import annotations

import gc
import gzip
import json
from typing import Any

import grpc
import grpc.aio
import pytest

from dynamo.frontend.api.picker.messages import CHUNK_BYTES
from dynamo.frontend.api.picker.picking import Picking
from dynamo.frontend.config import HttpOptions, PickerOptions, RouterMode, RouterOptions
from dynamo.protos import ext_proc_pb2 as pb
from tests.support.fakes import tensor_card
from tests.support.http_edge import chat_card
from tests.support.memory import instances_of
from tests.support.picker_edge import GatewayCall, headers_of, open_picker_edge, pod_card
from tests.support.waiting import until, until_free

DESTINATION = "x-gateway-destination-endpoint"


def completion(prompt: str = "once", **fields: Any) -> bytes:
    return json.dumps({"model": "talker", "prompt": prompt, "max_tokens": 2, **fields}).encode()


async def body_of(call: GatewayCall) -> tuple[bytes, int]:
    """Return the body that the picker sends back, and the largest chunk of it."""
    parts: list[bytes] = []
    while True:
        chunk = (await call.read()).request_body.response.body_mutation.streamed_response
        parts.append(chunk.body)
        if chunk.end_of_stream:
            return b"".join(parts), max(map(len, parts))


async def test_the_choice_is_a_header_and_metadata_and_the_body_follows_in_chunks() -> None:
    async with open_picker_edge() as edge:
        call = edge.call()
        body = completion("x" * 3000)
        await call.headers()
        for begin in range(0, len(body), 1000):
            await call.body(body[begin : begin + 1000], ends=False)
        await call.body(b"")
        chosen = await call.read()
        headers = headers_of(chosen)
        assert headers[DESTINATION] in ("10.0.0.1:8000", "10.0.0.2:8000")
        assert headers == {DESTINATION: headers[DESTINATION], "x-dynamo-placement": "routed"}
        assert chosen.request_headers.response.clear_route_cache
        assert dict(chosen.dynamic_metadata["envoy.lb"]) == {DESTINATION: headers[DESTINATION]}
        sent, _ = await body_of(call)
        assert json.loads(sent) == {**json.loads(body), "model": "served"}
        assert len(edge.loads) == 1 and not edge.client.streams  # booked, and nothing sent
        assert headers_of(await call.respond()) == {"x-dynamo-placement": "routed"}
        assert await call.ended() is grpc.StatusCode.OK
        await until(lambda: not len(edge.loads))
        await until_free(edge.capacity)
        labels = {"model": "talker", "endpoint": "completions", "request_type": "unary", "error_type": "", "status": "success"}
        assert edge.value("dynamo_frontend_requests_total", **labels) == 1
        assert edge.value("dynamo_frontend_picker_requests_total", outcome="routed") == 1


async def test_a_long_body_comes_back_in_chunks_that_gateways_take() -> None:
    async with open_picker_edge(pod_card(1, context_length=1_000_000)) as edge:
        call = edge.call()
        await call.headers()
        await call.body(completion("x" * 300_000))
        await call.read()
        sent, largest = await body_of(call)
        assert len(json.loads(sent)["prompt"]) == 300_000 and largest == CHUNK_BYTES
        assert await call.ended() is grpc.StatusCode.OK


async def test_requests_in_flight_are_booked_apart_until_they_end_or_are_cut() -> None:
    async with open_picker_edge() as edge:
        calls = [edge.call() for _ in range(4)]
        places = []
        for call in calls:
            await call.headers()
            await call.body(completion())
            places.append(headers_of(await call.read())[DESTINATION])
        assert sorted(places) == ["10.0.0.1:8000"] * 2 + ["10.0.0.2:8000"] * 2
        assert len(edge.loads) == 4
        calls[0].call.cancel()  # the client has left before there was a response
        await until(lambda: len(edge.loads) == 3)
        await calls[1].respond(content_type="text/event-stream")
        calls[1].call.cancel()  # or in the middle of one
        await until(lambda: len(edge.loads) == 2)
        edge.drain.start()  # this process is about to stop: its calls end cleanly
        assert [await call.call.read() for call in calls[2:]] != []
        await until(lambda: not len(edge.loads))
        await until_free(edge.capacity)


async def test_a_request_that_is_cut_before_its_body_is_complete_holds_nothing() -> None:
    async with open_picker_edge() as edge:
        call = edge.call()
        await call.headers()
        await call.body(b'{"model": "talker", ' + b" " * 4096, ends=False)
        await until(lambda: edge.capacity.buffered_bytes)
        call.call.cancel()
        await until_free(edge.capacity)
        assert not len(edge.loads)


FAILURES = {
    400: "validation",
    404: "validation",
    429: "overload",
    500: "internal",
    501: "not_implemented",
    503: "unavailable",
}
"""Statuses of endpoints, and what metrics call them."""


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_response_that_failed_counts_as_a_failure_and_503_has_the_endpoint_left_out(failure: int) -> None:
    async with open_picker_edge() as edge:
        places = []
        for status in (failure, 200, 200):
            call = edge.call()
            await call.headers()
            await call.body(completion())
            places.append(headers_of(await call.read())[DESTINATION][:8])
            await call.respond(status)
            await call.ended()
        first, second, third = places
        assert failure != 503 or (first != second and third == second)
        labels = {"model": "talker", "endpoint": "completions", "request_type": "unary", "status": "error"}
        labels["error_type"] = FAILURES[failure]
        assert edge.value("dynamo_frontend_requests_total", **labels) == 1


async def test_what_cannot_be_read_goes_to_an_endpoint_of_its_model() -> None:
    cards = (pod_card(1, "other"), pod_card(2), pod_card(3), tensor_card("adder"))
    async with open_picker_edge(*cards) as edge:
        for body, wanted in (
            (completion(temperature="hot"), {"10.0.0.2:8000", "10.0.0.3:8000"}),
            (json.dumps({"model": "other-alias"}).encode(), {"10.0.0.1:8000"}),
            (b"{", {"10.0.0.2:8000", "10.0.0.3:8000"}),  # the model with the most endpoints
        ):
            call = edge.call()
            await call.headers()
            await call.body(body)
            headers = headers_of(await call.read())
            assert headers["x-dynamo-placement"] == "least-loaded" and headers[DESTINATION] in wanted
            sent, _ = await body_of(call)
            assert sent == body or json.loads(sent) == {**json.loads(body), "model": "served"}
            assert (sent == body) == (body == b"{")
            await call.ended()
        await until_free(edge.capacity)


async def test_forms_for_paths_without_an_operation_are_not_waited_for() -> None:
    async with open_picker_edge() as edge:
        call = edge.call()
        await call.headers("/v1/audio/transcriptions", content_type="multipart/form-data; boundary=x")
        assert headers_of(await call.read())["x-dynamo-placement"] == "least-loaded"
        for part in (b"one", b"two"):
            await call.body(part, ends=part == b"two")
            chunk = (await call.read()).request_body.response.body_mutation.streamed_response
            assert (chunk.body, chunk.end_of_stream) == (part, part == b"two")
        assert await call.ended() is grpc.StatusCode.OK
        await until(lambda: not len(edge.loads))


async def test_gateways_choose_how_bodies_come() -> None:
    async with open_picker_edge() as edge:
        call = edge.call()
        await call.headers(mode=pb.BUFFERED)
        assert (await call.read()).WhichOneof("response") == "request_headers"
        await call.body(completion())
        chosen = await call.read()
        replaced = chosen.request_body.response.body_mutation.body
        assert json.loads(replaced)["model"] == "served"
        assert headers_of(chosen) == {
            DESTINATION: headers_of(chosen)[DESTINATION],
            "x-dynamo-placement": "routed",
            "content-length": str(len(replaced)),
        }
        await call.ended()

        for mode in (pb.STREAMED, pb.NONE):
            call = edge.call()
            await call.headers(mode=mode, back=pb.STREAMED)
            assert headers_of(await call.read())["x-dynamo-placement"] == "least-loaded"
            if mode == pb.STREAMED:
                await call.body(completion())
                assert not (await call.read()).request_body.response.HasField("body_mutation")
            await call.respond(content_type="text/event-stream")
            await call.send(response_body=pb.HttpBody(body=b"data: 1\n\n"))
            assert (await call.read()).WhichOneof("response") == "response_body"
            await call.send(response_trailers=pb.HttpTrailers())
            assert (await call.read()).WhichOneof("response") == "response_trailers"
            assert await call.ended() is grpc.StatusCode.OK


async def test_trailers_end_a_body_and_bodies_of_responses_are_sent_back() -> None:
    async with open_picker_edge() as edge:
        call = edge.call()
        await call.headers(mode=pb.FULL_DUPLEX_STREAMED, back=pb.FULL_DUPLEX_STREAMED)
        await call.body(completion(), ends=False)
        await call.send(request_trailers=pb.HttpTrailers())
        assert headers_of(await call.read())["x-dynamo-placement"] == "routed"
        assert not (await call.read()).request_body.response.body_mutation.streamed_response.end_of_stream
        assert (await call.read()).WhichOneof("response") == "request_trailers"
        await call.respond()
        await call.send(response_body=pb.HttpBody(body=b"{}", end_of_stream=True))
        chunk = (await call.read()).response_body.response.body_mutation.streamed_response
        assert (chunk.body, chunk.end_of_stream) == (b"{}", True)
        assert await call.ended() is grpc.StatusCode.OK


async def test_a_response_of_another_endpoint_ends_the_booking_and_is_counted() -> None:
    async with open_picker_edge() as edge:
        call = edge.call()
        await call.headers()
        await call.body(completion())
        await body_of_choice(call)
        await call.respond(served="10.0.0.99:8000")
        await until(lambda: not len(edge.loads))
        assert edge.value("dynamo_frontend_picker_served_elsewhere_total") == 1
        await call.ended()


async def body_of_choice(call: GatewayCall) -> None:
    await call.read()
    await body_of(call)


async def test_instances_without_an_address_are_no_candidates() -> None:
    async with open_picker_edge(chat_card(), pod_card(2)) as edge:
        for _ in range(3):
            call = edge.call()
            await call.headers()
            await call.body(completion())
            assert headers_of(await call.read())[DESTINATION] == "10.0.0.2:8000"
            await call.ended()
        edge.directory.remove(2)
        call = edge.call()
        await call.headers()
        await call.body(completion())
        refused = (await call.read()).immediate_response
        assert refused.status.code == 503 and b"no instance is serving model 'talker'" in refused.body


async def test_several_endpoints_are_given_the_best_first() -> None:
    async with open_picker_edge(*map(pod_card, range(1, 5)), options=PickerOptions(endpoints=3)) as edge:
        call = edge.call()
        await call.headers(subset=["10.0.0.2:8000", "10.0.0.3", "10.0.0.4:8000"])
        await call.body(completion())
        listed = headers_of(await call.read())[DESTINATION].split(",")
        assert len(listed) == 3 and set(listed) == {"10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000"}
        other = edge.call()
        await other.headers(subset=["10.0.0.2:8000", "10.0.0.3", "10.0.0.4:8000"])
        await other.body(completion())
        assert headers_of(await other.read())[DESTINATION].split(",")[0] != listed[0]
        await call.ended()


async def test_endpoints_to_retry_at_are_none_that_fail_or_lack_what_is_needed() -> None:
    cards = [pod_card(number, adapters=("legal",) * (number < 4)) for number in range(1, 5)]
    async with open_picker_edge(*cards, options=PickerOptions(endpoints=4)) as edge:

        async def listed(status: int = 200, model: str = "talker") -> list[str]:
            call = edge.call()
            await call.headers()
            await call.body(completion(model=model))
            addresses = headers_of(await call.read())[DESTINATION].split(",")
            await call.respond(status)
            await call.ended()
            return [address[:8] for address in addresses]

        assert sorted(await listed(model="legal")) == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        left_out = (await listed(503))[0]
        assert left_out not in await listed() and len(await listed()) == 3
        edge.directory.mark_down(4 if left_out != "10.0.0.4" else 3)
        assert len(await listed()) == 2


async def test_a_body_above_the_bound_is_refused_as_the_http_port_does() -> None:
    async with open_picker_edge(http=HttpOptions(max_json_bytes=2048)) as edge:
        for body, encoding in ((completion("x" * 3000), ""), (gzip.compress(completion("x" * 3000)), "gzip")):
            for rewrite in ("", "talker"):
                call = edge.call()
                await call.headers(content_encoding=encoding, x_gateway_model_name_rewrite=rewrite)
                await call.body(body)
                refused = (await call.read()).immediate_response
                assert (refused.status.code, json.loads(refused.body)["error"]["code"]) == (413, "payload_too_large")
                await call.ended()
        await until_free(edge.capacity)


async def test_messages_that_are_none_of_the_protocol_end_the_call() -> None:
    async with open_picker_edge() as edge:
        for data in (b"\xff\xff\xff", pb.ProcessingRequest(request_body=pb.HttpBody()).SerializeToString()):
            call = edge.call()
            await call.call.write(data)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.call.read()
            assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        watching = edge.call()
        await watching.send(request_headers=pb.HttpHeaders(), observability_mode=True)
        assert await watching.ended() is grpc.StatusCode.OK
        await until_free(edge.capacity)


async def test_a_prompt_goes_to_the_endpoint_that_has_its_beginning_cached() -> None:
    cards = [pod_card(number, block_size=16) for number in range(1, 6)]
    async with open_picker_edge(*cards, router=RouterOptions(mode=RouterMode.KV)) as edge:

        async def placed(path: str, body: bytes) -> str:
            call = edge.call()
            await call.headers(path)
            await call.body(body)
            place = headers_of(await call.read())[DESTINATION]
            await call.ended()
            await until(lambda: not len(edge.loads))
            return place

        beginning = "a long beginning, " * 30
        first = await placed("/v1/completions", completion(beginning))
        assert [await placed("/v1/completions", completion(f"{beginning}{end}")) for end in range(5)] == [first] * 5
        chat = {"model": "talker", "messages": [{"role": "user", "content": beginning}], "max_tokens": 2}
        other = await placed("/v1/chat/completions", json.dumps(chat).encode())
        chat["messages"] += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
        assert await placed("/v1/messages", json.dumps(chat).encode()) == other  # the same conversation, by another protocol


async def test_calls_that_are_over_keep_nothing_alive() -> None:
    async with open_picker_edge() as edge:
        for path, model in [("/v1/completions", "talker"), ("/v1/completions", "none"), ("/other", "talker")]:
            call = edge.call()
            await call.headers(path)
            await call.body(completion(model=model))
            await call.read()
            await call.ended()
        cut = edge.call()
        await cut.headers()
        cut.call.cancel()

        def kept() -> list[Picking]:
            gc.collect()
            return instances_of(Picking)

        await until(lambda: not kept())
