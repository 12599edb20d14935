from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.errors import (
    DynamoError,
    EngineError,
    InstanceGone,
    InvalidRequest,
    ModelNotFound,
    NoInstances,
    Unavailable,
    Unsupported,
)
from dynamo.common.messaging.request_plane.frames import joined
from dynamo.common.model_card import ModelCard, Role
from dynamo.common.names import InstanceId
from dynamo.common.tensors.request import SEQUENCE_OWNER, TensorRequest
from dynamo.frontend.config import DisaggregationOptions, ServingOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.router.explanation import Explanation
from dynamo.frontend.security.accounts import ANONYMOUS, Account, KeyAccount
from dynamo.frontend.security.keys import MAX_PRIORITY, ApiKey
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane, Generation, TensorResponses, open_data_plane
from dynamo.frontend.serving.shadows import MAX_COPIES
from dynamo.frontend.serving.text.text_models import TextModel
from dynamo.protos.inference_pb2 import (
    InferBatchStatistics,
    InferStatistics,
    ModelInferRequest,
    ModelStatistics,
    ModelStatisticsResponse,
    StatisticDuration,
)
from tests.support.edge import WatchedThread
from tests.support.fakes import (
    FakeClient,
    FakeDirectory,
    FakeLink,
    FakeStream,
    FakeText,
    FakeTexts,
    LoadText,
    RecordingRouter,
    instance,
    llm_card,
    load_fake_text,
    tensor_card,
)
from tests.support.plane import generate, infer, infer_stream
from tests.support.virtual_time import in_virtual_time


@dataclass
class Front:
    plane: DataPlane
    directory: FakeDirectory
    client: FakeClient
    router: RecordingRouter
    registry: CollectorRegistry
    link: FakeLink

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"dynamo_frontend_{name}", labels) or 0.0


@asynccontextmanager
async def front(
    directory: FakeDirectory,
    respond: Callable[[FakeStream], None] = lambda stream: None,
    *,
    load: LoadText = load_fake_text,
    texts: FakeTexts | None = None,
    settings: ServingOptions | None = None,
) -> AsyncIterator[Front]:
    client, router, registry = FakeClient(respond), RecordingRouter(), CollectorRegistry()
    metrics = FrontendMetrics(registry)
    link = FakeLink()
    async with open_data_plane(directory, client, link, router, texts or FakeTexts(load), metrics, settings) as plane:
        await settled()
        yield Front(plane, directory, client, router, registry, link)


async def settled() -> None:
    """Lets everything run that is ready."""
    for _ in range(5):
        await asyncio.sleep(0)


def request(model: str = "adder", version: str = "", size: int = 3) -> TensorRequest:
    head = ModelInferRequest(model_name=model, model_version=version, id="7")
    head.inputs.add(name="x", datatype="INT32", shape=[size])
    head.raw_input_contents.append(bytes(12))
    return TensorRequest.parse(head.SerializeToString())


CALL = Call(account=ANONYMOUS, request_id="r")


# Which models there are


async def test_a_model_is_ready_while_an_instance_is_attached() -> None:
    async with front(FakeDirectory()) as f:
        assert not f.plane.server_ready()
        f.directory.add(instance(1))
        await settled()
        assert f.plane.model_ready("adder")
        assert f.plane.model_ready("adder", "1")
        assert not f.plane.model_ready("adder", "2")
        assert f.plane.server_ready()
        f.directory.remove(1)
        await settled()
        assert not f.plane.model_ready("adder")
        assert not f.plane.server_ready()


async def test_a_server_without_nats_for_seconds_is_not_ready() -> None:
    async with front(FakeDirectory(instance(1))) as f:
        f.link.away_s = 4.9
        assert f.plane.server_ready()
        f.link.away_s = 5.0
        assert not f.plane.server_ready()
        assert f.plane.model_ready("adder")


async def test_a_model_whose_instances_are_all_marked_down_is_not_ready() -> None:
    async with front(FakeDirectory(instance(1))) as f:
        f.directory.mark_down(InstanceId(1))
        assert not f.plane.model_ready("adder")
        with pytest.raises(NoInstances):
            await infer(f.plane, request(), CALL)


async def test_a_language_model_is_ready_once_its_tokenizer_is_loaded() -> None:
    loaded = asyncio.Event()

    async def load(card: ModelCard) -> TextModel:
        await loaded.wait()
        return FakeText()

    async with front(FakeDirectory(instance(1, llm_card())), load=load) as f:
        assert not f.plane.model_ready("talker")
        loaded.set()
        await settled()
        assert f.plane.model_ready("talker")
        assert f.count("model_ready", model="talker") == 1


async def test_readiness_is_shown_in_the_metrics() -> None:
    async with front(FakeDirectory(instance(1))) as f:
        assert f.count("model_ready", model="adder") == 1
        f.directory.remove(1)
        await settled()
        assert f.count("model_ready", model="adder") == 0


async def test_decode_instances_alone_are_ready_unless_they_may_not_serve_alone() -> None:
    async with front(FakeDirectory(instance(1, llm_card(role=Role.DECODE)))) as f:
        assert f.plane.model_ready("talker")
    enforced = ServingOptions(disaggregation=DisaggregationOptions(enforce=True))
    async with front(FakeDirectory(instance(1, llm_card(role=Role.DECODE))), settings=enforced) as f:
        assert not f.plane.model_ready("talker")
        f.directory.add(instance(2, llm_card(role=Role.PREFILL)))
        await settled()
        assert f.plane.model_ready("talker")


async def test_a_process_that_drains_is_not_ready_but_serves_on() -> None:
    async with front(FakeDirectory(instance(1)), lambda stream: stream.end(b"response")) as f:
        f.plane.start_draining()
        assert not f.plane.server_ready()
        assert await infer(f.plane, request(), CALL) == b"response"


async def test_the_newest_instance_that_has_the_version_describes_it() -> None:
    old = instance(1, tensor_card(versions=("1",)), started_at=1.0)
    new = instance(2, tensor_card(versions=("1", "2")), started_at=2.0)
    async with front(FakeDirectory(new, old)) as f:
        assert f.plane.card(ANONYMOUS, "adder").versions == ("1", "2")
        assert f.plane.card(ANONYMOUS, "adder", "2") == new.card
        with pytest.raises(ModelNotFound, match="model 'adder' has no version '3'"):
            f.plane.card(ANONYMOUS, "adder", "3")


async def test_while_a_new_tokenizer_is_loaded_requests_are_for_the_instances_that_serve() -> None:
    loaded = asyncio.Event()

    async def load(card: ModelCard) -> TextModel:
        if card.llm is not None and card.llm.tokenizer == "new":
            await loaded.wait()
        return await load_fake_text(card)

    old, new = (instance(n, llm_card(tokenizer=name), started_at=n) for n, name in ((1, "old"), (2, "new")))
    async with front(FakeDirectory(old), load=load) as f:
        f.directory.add(new)
        await settled()
        assert f.plane.card(ANONYMOUS, "talker") == old.card
        assert f.plane.server_ready()
        f.directory.mark_down(InstanceId(1))
        assert f.plane.card(ANONYMOUS, "talker") == new.card, "nothing else can serve"
        f.directory.mark_up(InstanceId(1))
        loaded.set()
        await settled()
        assert f.plane.card(ANONYMOUS, "talker") == new.card


async def test_a_model_is_found_by_alias_and_adapter() -> None:
    card = llm_card()
    assert card.llm is not None
    llm = msgspec.structs.replace(card.llm, adapters=("talker-law",))
    async with front(FakeDirectory(instance(1, msgspec.structs.replace(card, aliases=("t",), llm=llm)))) as f:
        assert f.plane.card(ANONYMOUS, "t").name == "talker"
        assert f.plane.card(ANONYMOUS, "talker-law").name == "talker"
        assert [card.name for card in f.plane.cards(ANONYMOUS)] == ["talker"]


async def test_an_aliased_request_goes_only_to_instances_that_know_the_alias() -> None:
    aliased = msgspec.structs.replace(tensor_card(), aliases=("sum",))
    async with front(FakeDirectory(instance(1), instance(2, aliased)), lambda stream: stream.end(b"response")) as f:
        await infer(f.plane, request("sum"), CALL)
        assert f.client.sent_to == [2]
        f.directory.mark_down(InstanceId(2))
        assert f.plane.model_ready("adder")
        assert not f.plane.model_ready("sum")


@in_virtual_time
async def test_a_model_that_lost_its_instances_is_unavailable_before_it_is_unknown() -> None:
    async with front(FakeDirectory(instance(1)), settings=ServingOptions(remember_s=60)) as f:
        f.directory.remove(1)
        await settled()
        with pytest.raises(NoInstances):
            await infer(f.plane, request(), CALL)
        assert f.plane.cards(ANONYMOUS) == []
        await asyncio.sleep(60)
        with pytest.raises(ModelNotFound):
            await infer(f.plane, request(), CALL)


async def test_a_model_that_lost_its_instances_in_this_turn_of_the_loop_is_known() -> None:
    async with front(FakeDirectory(instance(1))) as f:
        f.directory.remove(1)
        assert f.plane.card(ANONYMOUS, "adder").name == "adder"
        assert not f.plane.model_ready("adder")


async def test_a_declared_model_is_known_before_it_is_served() -> None:
    async with front(FakeDirectory(), settings=ServingOptions(models=(tensor_card("later"),))) as f:
        assert [card.name for card in f.plane.cards(ANONYMOUS)] == ["later"]
        assert not f.plane.model_ready("later")
        with pytest.raises(NoInstances):
            await infer(f.plane, request("later"), CALL)


async def test_unknown_models_share_one_label() -> None:
    async with front(FakeDirectory()) as f:
        for name in ("a", "b"):
            with pytest.raises(ModelNotFound) as failed:
                await infer(f.plane, request(name), CALL)
            f.plane.refused("tensor", failed.value)
        labels = {"endpoint": "tensor", "request_type": "unary", "status": "error", "error_type": "not_found"}
        assert f.count("requests_total", model="unknown_model", **labels) == 2


async def test_the_router_is_notified_of_deregistered_instances_but_not_of_marked_down_ones() -> None:
    async with front(FakeDirectory(instance(1), instance(2))) as f:
        f.directory.mark_down(InstanceId(1))
        await settled()
        assert f.router.gone == []
        f.directory.remove(2)
        await settled()
        assert f.router.gone == [2]


async def test_an_instance_that_was_given_up_gets_requests_again_when_it_sends_something() -> None:
    async with front(FakeDirectory(instance(1)), lambda stream: stream.fail(InstanceGone(InstanceId(1)))) as f:
        with pytest.raises(InstanceGone):
            await infer(f.plane, request(), CALL)
        with pytest.raises(NoInstances):
            await infer(f.plane, request(), CALL)
        f.client.sign_of_life(1)
        f.client.respond = lambda stream: stream.end(b"response")
        assert await infer(f.plane, request(), CALL) == b"response"


# Tensor requests


async def test_a_tensor_request_is_forwarded_as_it_came() -> None:
    async with front(FakeDirectory(instance(1)), lambda stream: stream.end(b"response")) as f:
        sent = request()
        assert await infer(f.plane, sent, CALL) == b"response"
        assert f.client.streams[0].verb == "infer"
        assert f.client.streams[0].body == sent.raw
        labels = {"endpoint": "tensor", "request_type": "unary", "status": "success", "error_type": ""}
        assert f.count("requests_total", model="adder", **labels) == 1
        assert f.count("inflight_requests", model="adder") == 0


async def test_a_request_that_does_not_fit_the_model_reaches_no_worker() -> None:
    async with front(FakeDirectory(instance(1))) as f:
        with pytest.raises(InvalidRequest, match="'x'"):
            await infer(f.plane, request(size=4), CALL)
        with pytest.raises(InvalidRequest, match="'x'"):
            async with infer_stream(f.plane, request(size=4), CALL):
                pass
        assert f.client.streams == []
        assert f.count("inflight_requests", model="adder") == 0


async def test_a_decoupled_model_is_refused_over_unary_calls() -> None:
    async with front(FakeDirectory(instance(1, tensor_card(decoupled=True)))) as f:
        with pytest.raises(Unsupported, match="decoupled transaction policy"):
            await infer(f.plane, request(), CALL)


async def test_a_decoupled_model_gives_any_number_of_responses() -> None:
    async with front(FakeDirectory(instance(1, tensor_card(decoupled=True)))) as f:
        f.client.respond = lambda stream: stream.data(b"one", b"two")
        async with infer_stream(f.plane, request(), CALL) as responses:
            assert await responses.read() == [b"one", b"two"]
            f.client.streams[0].end()
            assert await responses.read() == []
        assert f.count("inflight_requests", model="adder") == 0


async def test_a_model_that_is_not_decoupled_gives_one_response_over_a_stream() -> None:
    async with (
        front(FakeDirectory(instance(1)), lambda stream: stream.end(b"response")) as f,
        infer_stream(f.plane, request(), CALL) as responses,
    ):
        assert await responses.read() == [b"response"]
        assert await responses.read() == []
        assert await responses.read() == []


async def test_leaving_a_tensor_stream_cancels_it_at_the_worker() -> None:
    async with front(FakeDirectory(instance(1, tensor_card(decoupled=True)))) as f:
        f.client.respond = lambda stream: stream.data(b"one")
        async with infer_stream(f.plane, request(), CALL) as responses:
            await responses.read()
        assert f.client.streams[0].cancelled
        assert not f.router.open
        labels = {"endpoint": "tensor", "request_type": "unary", "status": "error", "error_type": "cancelled"}
        assert f.count("requests_total", model="adder", **labels) == 1


async def test_a_versioned_request_goes_to_an_instance_that_has_the_version() -> None:
    old, new = instance(1, tensor_card(versions=("1",))), instance(2, tensor_card(versions=("1", "2")))
    async with front(FakeDirectory(old, new), lambda stream: stream.end(b"response")) as f:
        await infer(f.plane, request(version="2"), CALL)
        assert f.client.sent_to == [2]


# Tokenizers


@in_virtual_time
async def test_a_tokenizer_that_cannot_be_read_is_tried_again() -> None:
    attempts = 0

    async def load(card: ModelCard) -> TextModel:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise Unavailable("the object store does not respond")
        return FakeText()

    async with front(FakeDirectory(instance(1, llm_card())), load=load) as f:
        assert not f.plane.model_ready("talker")
        await asyncio.sleep(5)
        assert f.plane.model_ready("talker")
        assert attempts == 3


@in_virtual_time
async def test_a_broken_tokenizer_file_spoils_its_own_model_only() -> None:
    async def load(card: ModelCard) -> TextModel:
        if card.name == "broken":
            raise ValueError("not JSON")
        return FakeText()

    async with front(FakeDirectory(instance(1, llm_card("broken")), instance(2, llm_card("fine"))), load=load) as f:
        assert f.plane.model_ready("fine")
        assert not f.plane.model_ready("broken")


@in_virtual_time
async def test_a_tokenizer_is_prepared_once_for_all_instances_and_again_when_the_model_returns() -> None:
    loads: list[str] = []

    async def load(card: ModelCard) -> TextModel:
        loads.append(card.name)
        return FakeText()

    small, large = llm_card(), llm_card()
    assert large.llm is not None
    large = msgspec.structs.replace(large, llm=msgspec.structs.replace(large.llm, total_blocks=9000))
    async with front(FakeDirectory(instance(1, small), instance(2, large)), load=load) as f:
        assert loads == ["talker"]
        f.directory.remove(1, 2)
        await settled()
        f.directory.add(instance(3, small))
        await settled()
        assert loads == ["talker", "talker"]


class LateTexts(FakeTexts):
    """Loads nothing before a request needs it."""

    async def prepare(self, card: ModelCard) -> None:
        """The files are at hand."""


@in_virtual_time
async def test_a_model_that_cannot_be_loaded_when_a_request_needs_it_is_not_ready_until_it_can() -> None:
    attempts = 0

    async def load(card: ModelCard) -> TextModel:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0)
        if attempts < 5:
            raise EngineError("the model's tokenizer cannot be read")
        return FakeText()

    async with front(FakeDirectory(instance(1, llm_card())), texts=LateTexts(load)) as f:
        assert f.plane.model_ready("talker")
        assert attempts == 0
        requests = [f.plane.text_model(ANONYMOUS, "talker") for _ in range(2)]
        for failure in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(failure, Unavailable)
            assert str(failure) == "the tokenizer of model 'talker' is not available: the model's tokenizer cannot be read"
        assert attempts == 2
        assert not f.plane.model_ready("talker")
        assert f.count("model_ready", model="talker") == 0
        with pytest.raises(Unavailable, match="cannot be read"):
            await f.plane.text_model(ANONYMOUS, "talker")
        assert attempts == 2  # it is not tried for each request
        await asyncio.sleep(10)
        assert attempts == 5
        assert f.plane.model_ready("talker")
        assert f.count("model_ready", model="talker") == 1
        assert await f.plane.text_model(ANONYMOUS, "talker")


# Statistics


def statistics(count: int, ns: int, last: int, batch_size: int) -> ModelStatisticsResponse:
    duration = StatisticDuration(count=count, ns=ns)
    batch = InferBatchStatistics(batch_size=batch_size, compute_infer=duration)
    entry = ModelStatistics(
        name="adder",
        version="1",
        last_inference=last,
        inference_count=count * batch_size,
        execution_count=count,
        inference_stats=InferStatistics(success=duration),
        batch_stats=[batch],
    )
    entry.response_stats["0"].success.CopyFrom(duration)
    return ModelStatisticsResponse(model_stats=[entry])


async def test_statistics_are_added_up_over_instances() -> None:
    responses = {1: statistics(2, 10, 5, 1), 2: statistics(3, 20, 9, 1), 3: statistics(4, 30, 7, 8)}
    async with front(FakeDirectory(instance(1), instance(2), instance(3))) as f:
        f.client.respond = lambda stream: stream.end(responses[int(stream.instance)].SerializeToString())
        total = (await f.plane.statistics(ANONYMOUS, "adder")).model_stats[0]
        assert (total.last_inference, total.inference_count, total.execution_count) == (9, 2 + 3 + 32, 9)
        assert (total.inference_stats.success.count, total.inference_stats.success.ns) == (9, 60)
        assert [(batch.batch_size, batch.compute_infer.ns) for batch in total.batch_stats] == [(1, 30), (8, 30)]
        assert total.response_stats["0"].success.count == 9
        assert msgspec.msgpack.decode(f.client.streams[0].body) == {"model": "adder", "version": ""}


async def test_statistics_are_in_the_order_of_the_numbers_of_versions() -> None:
    of_versions = ModelStatisticsResponse(
        model_stats=[ModelStatistics(name=name, version=version) for name in ("b", "a") for version in ("10", "2", "7")]
    )
    async with front(FakeDirectory(instance(1))) as f:
        f.client.respond = lambda stream: stream.end(of_versions.SerializeToString())
        entries = (await f.plane.statistics(ANONYMOUS, "adder")).model_stats
    assert [(entry.name, entry.version) for entry in entries] == [
        (name, version) for name in "ab" for version in ("2", "7", "10")
    ]


@in_virtual_time
async def test_statistics_leave_out_instances_that_do_not_respond() -> None:
    def respond(stream: FakeStream) -> None:
        if stream.instance == 1:
            stream.end(statistics(2, 10, 5, 1).SerializeToString())

    async with front(FakeDirectory(instance(1), instance(2)), respond) as f:
        total = await f.plane.statistics(ANONYMOUS)
        assert total.model_stats[0].execution_count == 2
        assert asyncio.get_running_loop().time() == 5.0


@pytest.mark.parametrize("error", [InstanceGone(InstanceId(1)), None])
async def test_statistics_fail_if_no_instance_gives_any(error: DynamoError | None) -> None:
    def respond(stream: FakeStream) -> None:
        if error is None:
            stream.end(b"\xff\xff")
        else:
            stream.fail(error)

    async with front(FakeDirectory(instance(1)), respond) as f:
        with pytest.raises(Unavailable, match="no instance returned statistics"):
            await f.plane.statistics(ANONYMOUS, "adder")


async def test_long_statistics_are_read_and_added_up_beside_the_event_loop_up_to_a_bound() -> None:
    """A model without any statistics is two bytes; five million of them held a frontend for more than 30 s."""
    async with front(FakeDirectory(instance(1))) as f:
        f.plane.descriptions = thread = WatchedThread()
        f.client.respond = lambda stream: stream.end(b"\x0a\x00" * 5000)
        assert len((await f.plane.statistics(ANONYMOUS, "adder")).model_stats) == 1  # the same one 5000 times
        assert thread.has_run == ["read_statistics", "add_up"]
        long = ModelStatisticsResponse(model_stats=[ModelStatistics(name=f"m{number}") for number in range(5000)])
        f.client.respond = lambda stream: stream.end(long.SerializeToString())
        assert len((await f.plane.statistics(ANONYMOUS, "adder")).model_stats) == 5000
        assert thread.has_run == 2 * ["read_statistics", "add_up"]
        f.client.respond = lambda stream: stream.end(b"\x0a\x00" * (2**18 + 1))
        with pytest.raises(Unavailable, match="more than 262144 fields"):
            await f.plane.statistics(ANONYMOUS, "adder")


async def test_an_instance_that_serves_two_models_is_queried_once_for_all_statistics() -> None:
    async with front(FakeDirectory(instance(1), instance(1, tensor_card("other")))) as f:
        f.client.respond = lambda stream: stream.end(b"")
        await f.plane.statistics(ANONYMOUS)
        assert f.client.sent_to == [1]


# Copies for shadows


async def test_a_request_whose_copy_is_dropped_is_not_copied() -> None:
    small = request()
    large = TensorRequest(bytes(8 << 20), small.head, small.raw_inputs)
    held = asyncio.Event()

    async def wait(model: str, call: Call) -> None:
        await held.wait()

    async with front(FakeDirectory(instance(1)), lambda stream: stream.end(b"response")) as f:
        for _ in range(MAX_COPIES):
            f.plane.shadows.copy("shadow", 1, CALL, wait)
        tracemalloc.start()
        try:
            await infer(f.plane, large, msgspec.structs.replace(CALL, shadows=("shadow",)))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            held.set()
        assert f.count("shadow_requests_total", model="shadow", outcome="dropped") == 1
    assert peak < len(large.raw)


# Priorities


@pytest.mark.parametrize(
    ("account", "sequence", "owner"),
    [
        (KeyAccount(ApiKey(name="team", salt=b"", digest=b"")), True, "team"),
        (KeyAccount(ApiKey(name="team", salt=b"", digest=b"")), False, None),
        (ANONYMOUS, True, None),
    ],
)
async def test_a_worker_is_told_whose_sequence_it_is(account: Account, sequence: bool, owner: str | None) -> None:
    wanted = request()
    if sequence:
        wanted.head.parameters["sequence_id"].int64_param = 42
        wanted = TensorRequest.build(wanted.head, wanted.raw_inputs)
    call = msgspec.structs.replace(CALL, account=account)
    async with front(FakeDirectory(instance(1)), lambda stream: stream.end(b"response")) as f:
        await infer(f.plane, wanted, call)
        async with infer_stream(f.plane, wanted, call) as responses:
            await responses.read()
        for stream in f.client.streams:
            assert stream.headers.get(SEQUENCE_OWNER) == owner
            assert bytes(joined(stream.body)) == bytes(wanted.raw), "the id is as the client sent it"


@pytest.mark.parametrize("changes", [{"has_sequences": True}, {"backend": "ensemble"}, {"backend": "python"}])
async def test_a_worker_is_told_whose_sequence_begins_without_an_id(changes: dict[str, object]) -> None:
    call = msgspec.structs.replace(CALL, account=KeyAccount(ApiKey(name="team", salt=b"", digest=b"")))
    served = instance(1)
    served = msgspec.structs.replace(served, card=msgspec.structs.replace(served.card, **changes))
    async with front(FakeDirectory(served), lambda stream: stream.end(b"response")) as f:
        await infer(f.plane, request(), call)
        [stream] = f.client.streams
        assert stream.headers[SEQUENCE_OWNER] == "team"


async def test_the_router_gets_what_the_caller_demands_of_tensors_and_of_text() -> None:
    account, explanation = KeyAccount(ApiKey(name="team", salt=b"", digest=b"")), Explanation()
    wishes = {"instance": InstanceId(1), "priority": -3, "session": "s", "overrides": {"ttft_goal": 1.0}}
    call = Call(account=account, request_id="r", explanation=explanation, **wishes)  # type: ignore[arg-type]

    def refuse(stream: FakeStream) -> None:
        stream.fail(InvalidRequest("enough is known"))

    directory = FakeDirectory(instance(2), instance(1), instance(1, llm_card()))
    async with front(directory, refuse) as f:
        text = TextRequest(model="talker", prompt="hello")
        for read in (
            infer(f.plane, request(), call),
            _first(infer_stream(f.plane, request(), call)),
            _first(generate(f.plane, text, call)),
        ):
            with pytest.raises(InvalidRequest, match="enough is known"):
                await read
    assert [sent.model for sent in f.router.requests] == ["adder", "adder", "talker"]
    for sent in f.router.requests:
        assert (sent.pinned, sent.needs_room, sent.priority) == (1, True, -3)
        assert (sent.session, sent.session_owner, sent.overrides) == ("s", "team", {"ttft_goal": 1.0})
        assert (sent.request_id, sent.explanation) == ("r", explanation)
        assert not (sent.was_admitted or sent.waited_s)


async def _first(source: TensorResponses | Generation) -> None:
    async with source:
        await source.read()


@pytest.mark.parametrize(("max_priority", "level"), [(0, 0), (MAX_PRIORITY, 1), (2**20 - 2, 0), (2**20 - 1, 1)])
async def test_a_worker_is_told_no_level_of_triton_that_the_key_may_not_use(max_priority: int, level: int) -> None:
    account = KeyAccount(ApiKey(name="team", salt=b"", digest=b"", max_priority=max_priority))
    head = request().head
    head.parameters["priority"].int64_param = 1
    urgent = TensorRequest.build(head, [bytes(12)])
    call = msgspec.structs.replace(CALL, account=account, priority=-1)  # as a header may say besides
    async with front(FakeDirectory(instance(1)), lambda stream: stream.end(b"response")) as f:
        await infer(f.plane, urgent, call)
        async with infer_stream(f.plane, urgent, call) as responses:
            await responses.read()
        for stream in f.client.streams:
            sent = TensorRequest.parse(bytes(joined(stream.body)))
            assert sent.priority == level
            assert sent.raw_inputs == urgent.raw_inputs
