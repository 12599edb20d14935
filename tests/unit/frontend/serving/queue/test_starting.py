"""Requests for a model that has no instance and can be started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.discovery import Instance
from dynamo.common.errors import (
    DeadlineExceeded,
    ModelNotFound,
    ModelStarting,
    NoInstances,
    RateLimited,
    ShuttingDown,
    Unavailable,
)
from dynamo.common.etcd import Deleted, Events, KeyValue, Put
from dynamo.common.model_card import ModelCard, Role
from dynamo.common.names import InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import Standby, encode_standby
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.health import Readiness, State
from dynamo.frontend.config import CapacityOptions, DisaggregationOptions, ServingOptions, StartOptions
from dynamo.frontend.fleet.standby import StandbyView
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.names.rules import Fallback, Rule, Target
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.router.demand import DemandTable, WaitingRequests
from dynamo.frontend.security.accounts import ANONYMOUS, Account, KeyAccount
from dynamo.frontend.security.keys import ApiKey
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.names import RuleTable
from dynamo.frontend.serving.queue.starting import LEAVING_S
from dynamo.protos.inference_pb2 import ModelInferRequest
from tests.support.fake_etcd import FakeEtcd
from tests.support.fakes import (
    ENDPOINT,
    FakeClient,
    FakeDirectory,
    FakeLink,
    FakeStream,
    FakeTexts,
    RecordingRouter,
    TokenEngine,
    instance,
    llm_card,
    tensor_card,
)
from tests.support.plane import generate, infer
from tests.support.virtual_time import in_virtual_time

ADDER = Pool("adder")


class Fleet:
    """A data plane, and the records and registrations that a test makes."""

    def __init__(
        self, plane: DataPlane, directory: FakeDirectory, client: FakeClient, view: StandbyView, demand: DemandTable
    ) -> None:
        self.plane, self.directory, self.client, self.view, self.demand = plane, directory, client, view, demand
        self._revision = 1

    def stand_by(self, *cards: ModelCard, start_s: float = 0.0) -> None:
        for card in cards:
            self._revision += 1
            standby = Standby(card=card, endpoint=ENDPOINT, start_s=start_s)
            self.view.apply(Events((Put(KeyValue(standby.key, encode_standby(standby), self._revision)),), self._revision))

    def forget(self, card: ModelCard) -> None:
        self._revision += 1
        key = Standby(card=card, endpoint=ENDPOINT).key
        self.view.apply(Events((Deleted(key, self._revision),), self._revision))

    def send(self, model: str = "adder", account: Account = ANONYMOUS, **call: Any) -> asyncio.Task[Any]:
        head = ModelInferRequest(model_name=model, id="7")
        head.inputs.add(name="x", datatype="INT32", shape=[3])
        head.raw_input_contents.append(bytes(12))
        request = TensorRequest.parse(head.SerializeToString())

        async def sent() -> Any:
            return await infer(self.plane, request, Call(account=account, request_id="r", **call))

        return asyncio.create_task(sent())

    async def text(self, model: str = "talker") -> list[int]:
        tokens: list[int] = []
        request = TextRequest(model=model, prompt="hello")
        async with generate(self.plane, request, Call(account=ANONYMOUS, request_id="r")) as generation:
            while deltas := await generation.read():
                tokens += [token for delta in deltas for token in delta.tokens]
        return tokens


def respond(stream: FakeStream) -> None:
    stream.end(b"response")


@asynccontextmanager
async def open_fleet(
    *instances: Instance,
    respond: Callable[[FakeStream], None] = respond,
    settings: ServingOptions | None = None,
    rules: RuleTable | None = None,
) -> AsyncIterator[Fleet]:
    directory, client, metrics = FakeDirectory(*instances), FakeClient(respond), FrontendMetrics(CollectorRegistry())
    view, demand = StandbyView(FakeEtcd(), "dynamo"), DemandTable()  # type: ignore[arg-type]
    async with open_data_plane(
        *(directory, client, FakeLink(), RecordingRouter(), FakeTexts(), metrics, settings),
        rules=rules,
        demand=demand,
        standby=view,
    ) as plane:
        yield Fleet(plane, directory, client, view, demand)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_without_a_record_everything_is_as_before() -> None:
    async with open_fleet() as fleet:
        with pytest.raises(ModelNotFound):
            await fleet.send()
        fleet.directory.add(instance(1))
        assert await fleet.send() == b"response"
        fleet.directory.remove(1)
        with pytest.raises(NoInstances):
            await fleet.send()


@in_virtual_time
async def test_requests_wait_and_are_sent_in_order_as_soon_as_an_instance_has_registered() -> None:
    async with open_fleet() as fleet:
        fleet.stand_by(tensor_card())
        tasks = [fleet.send(request_id) for request_id in ["adder"] * 3]
        await asyncio.sleep(100)
        assert fleet.plane.waiting() == {ADDER: WaitingRequests(3)}
        assert fleet.client.streams == []
        before = asyncio.get_running_loop().time()
        fleet.directory.add(instance(1))
        assert await asyncio.gather(*tasks) == [b"response"] * 3
        assert asyncio.get_running_loop().time() == before
        assert fleet.plane.waiting() == {}
        assert fleet.demand.of("adder", Role.AGGREGATED).refused == 0


@in_virtual_time
async def test_a_prompt_is_tokenized_before_there_is_an_instance() -> None:
    def never(id_: InstanceId) -> Exception:
        raise AssertionError(id_)

    async with open_fleet(respond=TokenEngine([], never)) as fleet:  # type: ignore[arg-type]
        fleet.stand_by(llm_card())
        task = asyncio.create_task(fleet.text())
        await asyncio.sleep(1)
        assert fleet.plane.waiting() == {Pool("talker"): WaitingRequests(1, len("hello"))}
        fleet.directory.add(instance(1, llm_card()))
        assert len(await task) == 16


async def test_a_model_on_standby_is_listed_and_not_ready_and_the_server_is_ready() -> None:
    async with open_fleet() as fleet:
        readiness, told = Readiness(), []
        readiness.attach(fleet.plane)
        readiness.on_change(lambda: told.append(readiness.state()))
        assert readiness.state() is State.NOT_READY
        fleet.stand_by(tensor_card())
        assert told == [State.READY]
        assert readiness.is_server_ready()
        assert not readiness.is_model_ready("adder")
        assert fleet.plane.cards(ANONYMOUS) == [tensor_card()]
        assert fleet.plane.card(ANONYMOUS, "adder") == tensor_card()
        fleet.directory.add(instance(1))
        assert readiness.is_model_ready("adder")
        fleet.directory.remove(1)
        fleet.forget(tensor_card())
        assert not readiness.is_ready()


async def test_the_card_of_an_instance_counts_before_that_of_the_record() -> None:
    async with open_fleet(instance(1, tensor_card(versions=("1", "2")))) as fleet:
        fleet.stand_by(tensor_card())
        assert fleet.plane.card(ANONYMOUS, "adder").versions == ("1", "2")
        assert [card.versions for card in fleet.plane.cards(ANONYMOUS)] == [("1", "2")]


@in_virtual_time
async def test_a_request_fails_when_the_start_takes_too_long_and_says_when_to_try_again() -> None:
    async with open_fleet() as fleet:
        fleet.stand_by(tensor_card(), start_s=45.0)
        begun_at = asyncio.get_running_loop().time()
        with pytest.raises(ModelStarting, match="model 'adder' is starting: no instance serves it after 120 s") as failure:
            await fleet.send()
        assert asyncio.get_running_loop().time() == begun_at + 120.0
        assert failure.value.retry_after_s == 45.0
        assert fleet.demand.of("adder", Role.AGGREGATED).refused == 1


@in_virtual_time
async def test_the_wait_is_bounded_however_often_other_instances_come_and_go() -> None:
    async with open_fleet(settings=ServingOptions(start=StartOptions(timeout_s=10.0))) as fleet:
        fleet.stand_by(llm_card(role=Role.DECODE), llm_card(role=Role.PREFILL))
        task = asyncio.create_task(fleet.text())
        for number in range(1, 9):
            await asyncio.sleep(1)
            fleet.directory.add(instance(number, llm_card(role=Role.PREFILL)))
        begun_at = asyncio.get_running_loop().time()
        with pytest.raises(ModelStarting):
            await task
        assert asyncio.get_running_loop().time() == begun_at + 2


@in_virtual_time
async def test_a_deadline_that_comes_first_is_obeyed() -> None:
    async with open_fleet() as fleet:
        fleet.stand_by(tensor_card())
        with pytest.raises(DeadlineExceeded):
            await fleet.send(deadline=asyncio.get_running_loop().time() + 5)


async def test_no_more_than_so_many_requests_of_a_model_wait() -> None:
    async with open_fleet(settings=ServingOptions(start=StartOptions(queue_size=2))) as fleet:
        fleet.stand_by(tensor_card(), tensor_card("other"))
        waiting = [fleet.send() for _ in range(2)]
        await settled()
        with pytest.raises(ModelStarting, match="2 requests wait for its first instance, and no more may") as failure:
            await fleet.send()
        assert failure.value.retry_after_s >= 1
        other = fleet.send("other")
        await settled()
        assert not other.done()
        fleet.directory.add(instance(1), instance(2, tensor_card("other")))
        assert await asyncio.gather(*waiting, other) == [b"response"] * 3


async def test_a_queue_of_no_size_refuses_at_once() -> None:
    async with open_fleet(settings=ServingOptions(start=StartOptions(queue_size=0))) as fleet:
        fleet.stand_by(tensor_card())
        with pytest.raises(ModelStarting):
            await fleet.send()


async def test_a_key_that_fills_the_queue_makes_room_for_another_one() -> None:
    greedy, modest = (KeyAccount(ApiKey(name=name, salt=b"", digest=b"")) for name in ("greedy", "modest"))
    async with open_fleet(settings=ServingOptions(start=StartOptions(queue_size=3))) as fleet:
        fleet.stand_by(tensor_card())
        waiting = [fleet.send(account=greedy) for _ in range(3)]
        await settled()
        late = fleet.send(account=modest)
        with pytest.raises(ModelStarting):
            await waiting[-1]
        with pytest.raises(ModelStarting):
            await fleet.send(account=greedy)
        fleet.directory.add(instance(1))
        assert await asyncio.gather(*waiting[:2], late) == [b"response"] * 3


async def test_a_request_whose_client_leaves_waits_no_more() -> None:
    async with open_fleet() as fleet:
        fleet.stand_by(tensor_card())
        tasks = [fleet.send() for _ in range(2)]
        await settled()
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert fleet.plane.waiting() == {ADDER: WaitingRequests(1)}
        fleet.directory.add(instance(1))
        assert await tasks[1] == b"response"
        assert len(fleet.client.streams) == 1
        assert fleet.demand.of("adder", Role.AGGREGATED).refused == 1


async def test_a_request_by_a_name_with_a_fallback_uses_that_and_counts_for_the_model_that_starts() -> None:
    class Table:
        def __init__(self) -> None:
            self.rules = {"adder": Rule(targets=(Target(model="adder"),), fallbacks=(Fallback(model="other"),))}

    async def serve(model: NamedModel, call: Call) -> str:
        return model.name

    async with open_fleet(instance(1, tensor_card("other")), rules=Table()) as fleet:
        fleet.stand_by(tensor_card())
        assert await fleet.plane.names.serve(Call(account=ANONYMOUS), "adder", serve) == "other"
        assert fleet.demand.of("adder", Role.AGGREGATED).refused == 1
        fleet.directory.add(instance(2))
        assert await fleet.plane.names.serve(Call(account=ANONYMOUS), "adder", serve) == "adder"
        assert fleet.demand.of("adder", Role.AGGREGATED).refused == 1


async def test_requests_do_not_wait_for_a_model_that_is_managed_no_more() -> None:
    async with open_fleet() as fleet:
        fleet.stand_by(tensor_card())
        task = fleet.send()
        await settled()
        fleet.forget(tensor_card())
        with pytest.raises(NoInstances):
            await task


async def test_a_request_that_names_its_instance_does_not_wait_for_another() -> None:
    async with open_fleet() as fleet:
        fleet.stand_by(tensor_card())
        with pytest.raises(Unavailable, match="instance 7 does not serve"):
            await fleet.send(instance=InstanceId(7))


async def test_a_request_that_the_last_instance_refuses_while_it_leaves_waits_for_the_next_one() -> None:
    def leaving(stream: FakeStream) -> None:
        if stream.instance == 1:
            stream.fail(ShuttingDown("the worker"))
        else:
            stream.end(b"response")

    async with open_fleet(instance(1), respond=leaving) as fleet:
        with pytest.raises(ShuttingDown):
            await fleet.send()
        fleet.stand_by(tensor_card())
        task = fleet.send()
        await settled()
        fleet.directory.remove(1)
        await settled()
        assert not task.done()
        fleet.directory.add(instance(2))
        assert await task == b"response"


@in_virtual_time
async def test_an_instance_that_fails_requests_and_stays_is_no_reason_to_wait_for_another() -> None:
    def unwell(stream: FakeStream) -> None:
        stream.fail(Unavailable("its engine server ended its response early"))

    async with open_fleet(instance(1), respond=unwell) as fleet:
        fleet.stand_by(tensor_card())
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unavailable, match="ended its response early"):
            await fleet.send()
        assert asyncio.get_running_loop().time() - began == LEAVING_S
        assert len(fleet.client.streams) == 2


async def test_requests_that_waited_are_sent_in_several_turns_of_the_event_loop() -> None:
    async with open_fleet() as fleet:
        fleet.stand_by(tensor_card())
        tasks = [fleet.send() for _ in range(100)]
        await settled()
        fleet.directory.add(instance(2))
        sent = []
        while len(fleet.client.streams) < len(tasks):
            before = len(fleet.client.streams)
            await asyncio.sleep(0)
            sent.append(len(fleet.client.streams) - before)
        assert max(sent) < 40
        assert await asyncio.gather(*tasks) == [b"response"] * 100


async def test_what_the_requests_of_a_key_hold_that_wait_for_a_start_leaves_room_for_others() -> None:
    capacity = Capacity(CapacityOptions(max_buffered_bytes=1000))
    async with open_fleet() as fleet:
        fleet.stand_by(tensor_card())
        key = KeyAccount(ApiKey(name="a", salt=b"", digest=b""))
        tasks = []
        for _ in range(4):
            occupied = capacity.enter()
            occupied.hold(200)
            tasks.append(fleet.send(account=key, waiting=occupied.waiting))
            await settled()
            if tasks[-1].done():
                occupied.leave()
        assert [task.done() for task in tasks] == [False, False, True, True]
        with pytest.raises(RateLimited, match="400 bytes of the API key 'a' wait for instances"):
            await tasks[2]
        fleet.directory.add(instance(2))
        assert await asyncio.gather(*tasks[:2]) == [b"response"] * 2
        capacity.wait_for_instance("a", 1000, 0)  # of those that waited nothing is counted any more
        with pytest.raises(RateLimited):
            capacity.wait_for_instance("a", 1, 0)


async def test_a_request_of_several_prompts_that_wait_for_a_start_counts_once() -> None:
    capacity = Capacity(CapacityOptions(max_buffered_bytes=1000))
    occupied = capacity.enter()
    occupied.hold(400)
    async with open_fleet() as fleet:
        fleet.stand_by(tensor_card())
        key = KeyAccount(ApiKey(name="a", salt=b"", digest=b""))
        tasks = [fleet.send(account=key, waiting=occupied.waiting) for _ in range(3)]
        await settled()
        occupied.hold(100)
        tasks.append(fleet.send(account=key, waiting=occupied.waiting))
        await settled()
        assert not any(task.done() for task in tasks)
        other = capacity.enter()
        other.hold(1)
        with pytest.raises(RateLimited, match="500 bytes of the API key 'a'"), other.waiting("a"):
            pass
        fleet.directory.add(instance(2))
        assert await asyncio.gather(*tasks) == [b"response"] * 4
        with other.waiting("a"):
            pass


async def test_instances_with_another_tokenizer_are_no_reason_to_wait() -> None:
    async with open_fleet() as fleet:
        fleet.stand_by(llm_card())
        task = asyncio.create_task(fleet.text())
        while not fleet.plane.waiting():
            await asyncio.sleep(0)
        fleet.directory.add(instance(1, llm_card(tokenizer="t2")))
        with pytest.raises(NoInstances):
            await task


@in_virtual_time
async def test_where_prompts_are_computed_apart_requests_wait_for_both_roles_or_for_the_one_that_responds() -> None:
    prefill, decode = llm_card(role=Role.PREFILL), llm_card(role=Role.DECODE)
    both = {Pool("talker", role): WaitingRequests(1, 5) for role in (Role.PREFILL, Role.DECODE)}

    def never(id_: InstanceId) -> Exception:
        raise AssertionError(id_)

    for enforce in (False, True):
        settings = ServingOptions(disaggregation=DisaggregationOptions(enforce=enforce))
        async with open_fleet(respond=TokenEngine([], never), settings=settings) as fleet:  # type: ignore[arg-type]
            fleet.stand_by(prefill, decode)
            task = asyncio.create_task(fleet.text())
            await asyncio.sleep(1)
            assert fleet.plane.waiting() == both
            fleet.directory.add(instance(1, decode))
            await asyncio.sleep(1)
            assert task.done() is not enforce
            if enforce:
                assert fleet.plane.waiting() == {Pool("talker", Role.PREFILL): WaitingRequests(1, 5)}
                with pytest.raises(ModelStarting):
                    await task
            else:
                assert len(await task) == 16
                await fleet.text()
                assert fleet.demand.of("talker", Role.PREFILL).refused >= 1  # so that a planner starts one
