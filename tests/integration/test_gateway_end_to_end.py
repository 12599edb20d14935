"""What a gateway has, at two frontends: names of operators, stored responses. Real etcd and nats-server, simulated engines."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest
from openai import AsyncOpenAI, NotFoundError
from openai.types import Batch

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.records import INLINE_BYTES, open_records
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.names import Endpoint
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import AccessOptions, FrontendConfig, GrpcOptions, HttpOptions
from dynamo.frontend.names.__main__ import main
from dynamo.frontend.security.__main__ import main as keys_main
from dynamo.frontend.security.keys import Limits, entry_for, make_key
from dynamo.frontend.security.surfaces import Scope
from dynamo.protos import inference_pb2 as pb
from dynamo.worker.app import open_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config
from tests.support.fleet import SERVICE, text_request
from tests.support.processes import frontend as frontend_process
from tests.support.servers import EtcdServer, NatsServer, start_nats
from tests.support.waiting import until

MODELS = {"large": "blocks=4000,block_size=16,speedup=1", "small": "blocks=4000,block_size=16,speedup=100"}
"""The simulated engine of each."""


@dataclass
class Fleet:
    """Two frontends in front of a worker for each of `MODELS`."""

    frontends: list[Frontend]
    http: list[httpx2.AsyncClient]
    channel: grpc.aio.Channel
    """Channel to the second frontend."""
    key_file: Path
    workers: dict[str, AsyncExitStack]

    async def chat(self, model: str, frontend: int = 1, **headers: str) -> httpx2.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http[frontend].post("/v1/chat/completions", json=body, headers=named)


@asynccontextmanager
async def fleet_of(etcd: EtcdServer, nats: NatsServer, namespace: str, keys: Path) -> AsyncIterator[Fleet]:
    links: dict[str, Any] = {
        "etcd": EtcdOptions(endpoints=(etcd.endpoint,)),
        "nats": NatsOptions(servers=(nats.url,)),
        "log": LogOptions(),
    }
    async with AsyncExitStack() as stack:
        workers = {}
        for model, engine_options in MODELS.items():
            workers[model] = await stack.enter_async_context(AsyncExitStack())
            engine = SimEngine(sim_config(engine_options, model, None, None))
            config = WorkerConfig(endpoint=Endpoint(namespace=namespace), **links)
            await workers[model].enter_async_context(open_worker(engine, config))
        config = FrontendConfig(
            namespace=namespace,
            http=HttpOptions(port=0),
            grpc=GrpcOptions(enabled=True, port=0),
            access=AccessOptions(keys_file=keys),
            **links,
        )
        frontends = [await stack.enter_async_context(serve_frontend(replace(config))) for _ in range(2)]
        http = [
            await stack.enter_async_context(httpx2.AsyncClient(base_url=f"http://127.0.0.1:{each.http_port}", timeout=120))
            for each in frontends
        ]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{frontends[1].grpc_port}"))
        for frontend in frontends:
            await until(lambda frontend=frontend: all(map(frontend.plane.model_ready, MODELS)))  # type: ignore[misc]
        yield Fleet(frontends, http, channel, keys, workers)


async def run(fleet: Fleet, key: Path, *arguments: str) -> None:
    url = f"http://127.0.0.1:{fleet.frontends[0].http_port}"
    await asyncio.to_thread(main, ["--url", url, "--api-key-file", str(key), *arguments])


async def test_a_name_set_at_one_frontend_is_served_by_all_on_every_protocol(
    etcd_server: EtcdServer,
    nats_server: NatsServer,
    namespace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    operator, user, narrow = make_key(), make_key(), make_key()
    keys, operator_file = tmp_path / "keys", tmp_path / "operator"
    keys.write_text(
        entry_for(operator, "operator", scopes=[Scope.NAMES])
        + entry_for(user, "user", scopes=[Scope.INFER])
        + entry_for(narrow, "narrow", scopes=[Scope.INFER], models=["chat", "small"])
    )
    operator_file.write_text(operator)
    caplog.set_level(logging.INFO, logger="dynamo.audit")
    async with fleet_of(etcd_server, nats_server, namespace, keys) as fleet:
        first, second = fleet.frontends
        await run(fleet, operator_file, "set", "chat", "large", "--fallback", "small:no_instances")
        await until(lambda: second.plane.names.has_rule("chat"))
        await run(fleet, operator_file, "list")
        assert capsys.readouterr().out.splitlines() == ["chat large=1 --fallback small:no_instances"] * 2
        assert any("PUT /v1/names/chat by key 'operator'" in record.getMessage() for record in caplog.records)

        assert (await fleet.chat("chat", x_api_key=user)).json()["model"] == "large"
        infer = fleet.channel.unary_unary(SERVICE + "ModelInfer")
        request = pb.ModelInferRequest.FromString(text_request("Hi", 2))
        request.model_name = "chat"
        del request.inputs[1]  # `streaming`
        metadata = (("x-api-key", user),)
        response = pb.ModelInferResponse.FromString(await infer(request.SerializeToString(), metadata=metadata, timeout=120))
        assert response.model_name == "large"
        stream = fleet.channel.stream_stream(SERVICE + "ModelStreamInfer")(metadata=metadata, timeout=120)
        await stream.write(request.SerializeToString())
        await stream.done_writing()
        streamed = pb.ModelStreamInferResponse.FromString(await stream.read())
        assert (streamed.error_message, streamed.infer_response.model_name) == ("", "large")
        assert (await stream.read()) is grpc.aio.EOF

        # A key needs the name and the model; what it may not use is passed over.
        assert (await fleet.chat("chat", x_api_key=narrow)).json()["model"] == "small"
        listed = (await fleet.http[1].get("/v1/models", headers={"x-api-key": narrow})).json()["data"]
        assert [(model["id"], model["root"]) for model in listed] == [("small", "small"), ("chat", "small")]
        refused = await fleet.http[0].put("/v1/names/chat", json={"targets": [{"model": "small"}]}, headers={"x-api-key": user})
        assert refused.status_code == 403
        looped = await fleet.http[0].put(
            "/v1/names/large", json={"targets": [{"model": "chat"}]}, headers={"x-api-key": operator}
        )
        assert (looped.status_code, "loop: " in looped.text) == (400, True)

        await fleet.workers["large"].aclose()
        await until(lambda: not second.plane.model_ready("large"))
        fallen = await fleet.chat("chat", x_api_key=user)
        assert (fallen.status_code, fallen.json()["model"]) == (200, "small")

        await run(fleet, operator_file, "remove", "chat")
        await until(lambda: not second.plane.names.has_rule("chat"))
        assert (await fleet.chat("chat", x_api_key=user)).status_code == 404
        with pytest.raises(SystemExit):
            await run(fleet, operator_file, "remove", "chat")
        assert "responded 404: there is no name 'chat'" in capsys.readouterr().err
        assert first.plane.names.rules == {}


async def test_the_limits_of_a_key_hold_for_all_frontends_together_and_any_of_them_shows_its_usage(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    team, accountant = make_key(), make_key()
    keys, accountant_file = tmp_path / "keys", tmp_path / "accountant"
    keys.write_text(
        entry_for(team, "team", limits=Limits(tokens_per_minute=1000, concurrent_requests=20, stored_bytes=100))
        + entry_for(accountant, "accountant", scopes=[Scope.USAGE])
    )
    accountant_file.write_text(accountant)
    bearer = f"Bearer {team}"
    async with fleet_of(etcd_server, nats_server, namespace, keys) as fleet:

        async def remaining(frontend: int) -> int:
            headers = (await fleet.http[frontend].get("/v1/models", headers={"authorization": bearer})).headers
            return int(headers["x-ratelimit-remaining-tokens"])

        body = {"model": "small", "prompt": "one two three", "max_tokens": 900, "ignore_eos": True}
        served = await fleet.http[0].post("/v1/completions", json=body, headers={"authorization": bearer})
        assert served.status_code == 200, served.text
        async with asyncio.timeout(120):
            while await remaining(1) > 200:
                pass
        refused = await fleet.http[1].post("/v1/completions", json=body, headers={"authorization": bearer})
        assert refused.status_code == 429
        assert "of its 1000 tokens per minute left" in refused.text
        assert int(refused.headers["retry-after"]) > 10

        upload = {"files": {"file": ("f.jsonl", b"x" * 90)}, "data": {"purpose": "batch"}, "headers": {"authorization": bearer}}
        uploads = [await each.post("/v1/files", **upload) for each in fleet.http]  # type: ignore[arg-type]
        assert [upload.status_code for upload in uploads] == [200, 413]
        assert "has stored 90 of its 100 bytes" in uploads[1].text

        options = ["--url", f"http://127.0.0.1:{fleet.frontends[0].http_port}", "--api-key-file", str(accountant_file)]
        today = datetime.now(UTC).date()
        options += ["--from", str(today - timedelta(days=1)), "--to", str(today), "--key", "team", "--model", "small"]
        await asyncio.to_thread(keys_main, ["usage", *options])
        heading, row = capsys.readouterr().out.splitlines()
        assert heading == "day,key,model,requests,errors,prompt_tokens,cached_tokens,completion_tokens,media"
        usage = served.json()["usage"]
        assert row.split(",")[1:] == ["team", "small", "1", "0", str(usage["prompt_tokens"]), "0", "900", "0"]
        assert (await fleet.http[0].get("/v1/usage", headers={"authorization": bearer})).status_code == 403


async def test_a_stored_response_is_there_at_every_frontend_for_its_key_alone(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    user, other = make_key(), make_key()
    keys = tmp_path / "keys"
    keys.write_text(entry_for(user, "user", scopes=[Scope.INFER]) + entry_for(other, "other", scopes=[Scope.INFER]))
    async with fleet_of(etcd_server, nats_server, namespace, keys) as fleet, AsyncExitStack() as stack:
        first, second, foreign = [
            await stack.enter_async_context(
                AsyncOpenAI(base_url=f"http://127.0.0.1:{frontend.http_port}/v1", api_key=key, max_retries=0)
            )
            for frontend, key in zip([*fleet.frontends, fleet.frontends[0]], (user, user, other), strict=True)
        ]
        begun = await first.responses.create(model="small", input="Hi", max_output_tokens=2, store=True)
        following = await second.responses.create(
            model="small", input="And now?", previous_response_id=begun.id, max_output_tokens=2
        )
        assert (await first.responses.retrieve(following.id)).output_text == following.output_text
        items = await first.responses.input_items.list(following.id, order="asc")
        assert [item.type for item in items.data] == ["message", "message", "message"]
        for call in (
            foreign.responses.retrieve(begun.id),
            foreign.responses.delete(begun.id),
            foreign.responses.cancel(begun.id),
        ):
            with pytest.raises(NotFoundError):
                await call
        with pytest.raises(NotFoundError):
            await foreign.responses.create(model="small", input="And now?", previous_response_id=begun.id)

        done = await first.responses.create(model="small", input="Hi", max_output_tokens=2, background=True)
        assert done.status == "queued"
        async with asyncio.timeout(120):
            while (read := await second.responses.retrieve(done.id)).status in ("queued", "in_progress"):
                await asyncio.sleep(0.02)
        assert read.status == "incomplete" and read.output_text

        conversation = await first.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Ada."}])
        stream = await second.responses.create(
            model="small", input="Who am I?", conversation=conversation.id, max_output_tokens=3, background=True, stream=True
        )
        begin = await anext(aiter(stream))
        assert begin.type == "response.created"
        await stream.close()  # as if the connection had been lost
        rest = await first.responses.retrieve(begin.response.id, stream=True, starting_after=begin.sequence_number)
        events = [event async for event in rest]
        numbers = [event.sequence_number for event in events]
        assert (events[-1].type, numbers) == ("response.incomplete", list(range(1, len(numbers) + 1)))
        said = await first.conversations.items.list(conversation.id, order="asc")
        assert [item.role for item in said.data if item.type == "message"] == ["user", "user", "assistant"]
        with pytest.raises(NotFoundError):
            await foreign.conversations.items.list(conversation.id)

        running = await first.responses.create(model="large", input="Hi", max_output_tokens=3000, background=True)
        assert (await second.responses.cancel(running.id)).status == "cancelled"
        assert (await first.responses.retrieve(running.id)).status == "cancelled"
        await second.responses.delete(running.id)
        with pytest.raises(NotFoundError):
            await first.responses.retrieve(running.id)


def batch_file(lines: int, model: str = "small", **body: Any) -> bytes:
    fields = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **body}
    return b"".join(
        json.dumps({"custom_id": f"line-{n}", "method": "POST", "url": "/v1/chat/completions", "body": fields}).encode() + b"\n"
        for n in range(lines)
    )


async def ended(client: AsyncOpenAI, id: str, within_s: float = 120) -> Batch:
    async with asyncio.timeout(within_s):
        while (batch := await client.batches.retrieve(id)).status not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(0.05)
    return batch


async def test_a_batch_is_carried_out_once_for_its_key_alone(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    user, other = make_key(), make_key()
    keys = tmp_path / "keys"
    keys.write_text(
        entry_for(user, "user", scopes=[Scope.INFER], models=["small"]) + entry_for(other, "other", scopes=[Scope.INFER])
    )
    async with fleet_of(etcd_server, nats_server, namespace, keys) as fleet, AsyncExitStack() as stack:
        first, second, foreign = [
            await stack.enter_async_context(
                AsyncOpenAI(base_url=f"http://127.0.0.1:{frontend.http_port}/v1", api_key=key, max_retries=0)
            )
            for frontend, key in zip([*fleet.frontends, fleet.frontends[0]], (user, user, other), strict=True)
        ]
        content = batch_file(150) + batch_file(3, "large").replace(b"line-", b"forbidden-")
        file = await first.files.create(file=("lines.jsonl", content), purpose="batch")
        assert (await second.files.content(file.id)).content == content
        large = random.Random(0).randbytes(1_000_003)  # in the object store, and sent in pieces
        stored = await first.files.create(file=("large.jsonl", large), purpose="batch")
        assert (await second.files.content(stored.id)).content == large
        await second.files.delete(stored.id)
        with pytest.raises(NotFoundError):
            await first.files.content(stored.id)
        batch = await second.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
        with pytest.raises(NotFoundError):
            await foreign.batches.retrieve(batch.id)
        with pytest.raises(NotFoundError):
            await foreign.batches.cancel(batch.id)
        with pytest.raises(NotFoundError):
            await foreign.files.content(file.id)
        with pytest.raises(NotFoundError):
            await foreign.files.delete(file.id)
        done = await ended(first, batch.id)
        assert done.status == "completed" and done.request_counts is not None
        assert done.request_counts.to_dict() == {"total": 153, "completed": 150, "failed": 3}
        assert done.output_file_id and done.error_file_id
        results = [json.loads(line) for line in (await first.files.content(done.output_file_id)).text.splitlines()]
        assert [result["custom_id"] for result in results] == [f"line-{n}" for n in range(150)]
        assert all(result["response"]["body"]["choices"] and result["error"] is None for result in results)
        refused = [json.loads(line) for line in (await first.files.content(done.error_file_id)).text.splitlines()]
        assert [result["response"]["status_code"] for result in refused] == [403] * 3
        assert [each.id async for each in await first.batches.list()] == [batch.id]
        assert {each.id async for each in await first.files.list()} == {file.id, done.output_file_id, done.error_file_id}
        assert [each.id async for each in await foreign.files.list()] == []
        await first.files.delete(file.id)
        with pytest.raises(NotFoundError):
            await second.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


async def test_a_batch_with_wrong_lines_fails_and_one_that_is_cancelled_keeps_what_is_done(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    user = make_key()
    keys = tmp_path / "keys"
    keys.write_text(entry_for(user, "user", scopes=[Scope.INFER]))
    async with (
        fleet_of(etcd_server, nats_server, namespace, keys) as fleet,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{fleet.frontends[0].http_port}/v1", api_key=user, max_retries=0) as client,
    ):
        wrong = await client.files.create(file=("lines.jsonl", batch_file(1) * 2 + b"{"), purpose="batch")
        batch = await client.batches.create(input_file_id=wrong.id, endpoint="/v1/chat/completions", completion_window="24h")
        failed = await ended(client, batch.id)
        assert failed.status == "failed" and failed.errors is not None and failed.errors.data is not None
        assert [(problem.line, problem.code) for problem in failed.errors.data] == [
            (2, "duplicate_custom_id"),
            (3, "invalid_json_line"),
        ]
        slow = await client.files.create(file=("lines.jsonl", batch_file(700, "large", max_tokens=20)), purpose="batch")
        batch = await client.batches.create(input_file_id=slow.id, endpoint="/v1/chat/completions", completion_window="24h")
        async with asyncio.timeout(120):
            while not (counts := (await client.batches.retrieve(batch.id)).request_counts) or not counts.completed:
                await asyncio.sleep(0.02)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        cancelled = await ended(client, batch.id)
        assert cancelled.status == "cancelled" and cancelled.output_file_id and cancelled.error_file_id
        outputs = (await client.files.content(cancelled.output_file_id)).text.splitlines()
        errors = [json.loads(line) for line in (await client.files.content(cancelled.error_file_id)).text.splitlines()]
        assert len(outputs) + len(errors) == 700
        assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}


@pytest.mark.slow
async def test_another_frontend_goes_on_when_the_one_with_the_batch_is_killed(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    """No line is lost, and none is in the output twice."""
    links: dict[str, Any] = {
        "etcd": EtcdOptions(endpoints=(etcd_server.endpoint,)),
        "nats": NatsOptions(servers=(nats_server.url,)),
        "log": LogOptions(),
    }
    engine = SimEngine(sim_config(MODELS["large"], "large", None, None))
    config = WorkerConfig(endpoint=Endpoint(namespace=namespace), **links)
    async with (
        open_worker(engine, config),
        frontend_process(etcd_server.endpoint, nats_server.url, namespace) as killed,
        frontend_process(etcd_server.endpoint, nats_server.url, namespace) as left,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{killed.http_port}/v1", api_key="none", max_retries=0) as first,
        AsyncOpenAI(base_url=f"http://127.0.0.1:{left.http_port}/v1", api_key="none", max_retries=0) as second,
    ):
        await killed.serves("large")
        await left.serves("large")
        file = await first.files.create(file=("lines.jsonl", batch_file(300, "large", max_tokens=20)), purpose="batch")
        batch = await first.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        async with asyncio.timeout(120):
            while not (counts := (await second.batches.retrieve(batch.id)).request_counts) or not counts.completed:
                await asyncio.sleep(0.02)
        assert counts.completed < 300
        await killed.logged(f"batch {batch.id} is carried out here")
        killed.process.kill()
        done = await ended(second, batch.id)
        assert done.status == "completed" and done.output_file_id and done.error_file_id is None
        await left.logged(f"batch {batch.id} is carried out here")
        results = [json.loads(line)["custom_id"] for line in (await second.files.content(done.output_file_id)).text.splitlines()]
        assert results == [f"line-{n}" for n in range(300)]


async def test_records_large_and_small_are_replaced_only_as_they_were_read(nats_server: NatsServer, namespace: str) -> None:
    async with (
        connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as nats,
        open_records(nats, namespace, ttl_s=600, max_bytes=8 << 20) as records,
    ):
        await until(lambda: records.is_ready)
        assert await records.get("a.b%2E") is None
        large = bytes(range(256)) * (INLINE_BYTES // 64)
        for value in (b"", b"small", large, b"small again"):
            await records.put("a.b%2E", value)
            read = await records.get("a.b%2E")
            assert read is not None and read.value == value
        assert read is not None
        assert await records.put("a.b%2E", large, last=read.revision) is not None
        assert await records.put("a.b%2E", b"late", last=read.revision) is None
        assert await records.put("a.b%2E", b"new", last=0) is None
        for number in range(20):
            await records.put(f"many.{number:02}", b"%d" % number)
        await records.put("many.large", large)
        assert await records.values("many.*") == {f"many.{number:02}": b"%d" % number for number in range(20)}
        assert await records.values("none.>") == {}
        await records.delete("a.b%2E")
        await records.delete("a.b%2E")
        assert await records.get("a.b%2E") is None
        assert await records.put("a.b%2E", b"again", last=0) is not None


async def test_records_are_there_again_after_nats_lost_its_data(tmp_path: Path) -> None:
    async with (
        start_nats(tmp_path / "nats") as server,
        connect_nats(NatsOptions(servers=(server.url,)), "test") as nats,
        open_records(nats, "records", ttl_s=600, max_bytes=1 << 20) as records,
    ):
        await until(lambda: records.is_ready)
        await records.put("a", b"lost")
        await nats.client.jetstream().delete_stream("KV_records")
        with pytest.raises(Unavailable):
            await records.put("a", b"refused")
        await until(lambda: records.is_ready)
        assert await records.put("a", b"new", last=0) is not None


async def test_records_that_do_not_fit_are_refused(nats_server: NatsServer, namespace: str) -> None:
    async with (
        connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as nats,
        open_records(nats, namespace, ttl_s=600, max_bytes=INLINE_BYTES) as records,
    ):
        await records.put("a", bytes(INLINE_BYTES // 2))
        with pytest.raises(Unavailable, match="maximum bytes exceeded"):
            await records.put("b", bytes(INLINE_BYTES // 2))
        await until(lambda: records.is_ready)


async def test_records_without_jetstream_are_unavailable_at_once(tmp_path: Path) -> None:
    async with (
        start_nats(tmp_path, jetstream=False) as server,
        connect_nats(NatsOptions(servers=(server.url,)), "test") as nats,
        open_records(nats, "records", ttl_s=600, max_bytes=1 << 20) as records,
    ):
        with pytest.raises(Unavailable, match="the bucket records in JetStream cannot be read"):
            await records.get("a")
        assert not records.is_ready
