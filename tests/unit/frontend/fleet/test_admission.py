from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from dynamo.common.admission import AdmissionQuery, AdmissionReport
from dynamo.common.model_card import ModelCard
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.fleet.admission import Admissions, reported_admissions
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.fakes import FakeDirectory, instance, llm_card

INSTANCE = InstanceId(31)


class State:
    """What the parts of a frontend say that an admission depends on."""

    def __init__(self) -> None:
        self.texts: set[str] = set()
        self.caches: set[tuple[InstanceId, str]] = set()

    def has_text(self, card: ModelCard) -> bool:
        return card.llm is None or card.llm.tokenizer in self.texts

    def is_in_step(self, instance: InstanceId, model: str) -> bool:
        return (instance, model) in self.caches


def test_an_instance_is_admitted_when_it_is_seen_its_text_is_at_hand_and_its_cache_is_known() -> None:
    directory, state = FakeDirectory(), State()
    admissions = Admissions(directory, state.has_text, state.is_in_step)
    assert not admissions.has_admitted(INSTANCE, ["talker"])
    directory.add(instance(INSTANCE, llm_card(tokenizer="new")))
    assert not admissions.has_admitted(INSTANCE, ["talker"])
    state.texts.add("new")
    assert not admissions.has_admitted(INSTANCE, ["talker"])
    state.caches.add((INSTANCE, "talker"))
    assert admissions.has_admitted(INSTANCE, ["talker"])


def test_each_model_of_an_instance_counts() -> None:
    directory, state = FakeDirectory(instance(INSTANCE, llm_card("talker", tokenizer="a"))), State()
    state.texts, state.caches = {"a", "b"}, {(INSTANCE, "talker"), (INSTANCE, "writer")}
    admissions = Admissions(directory, state.has_text, state.is_in_step)
    assert admissions.has_admitted(INSTANCE, ["talker"])
    assert not admissions.has_admitted(INSTANCE, ["talker", "writer"])
    directory.add(instance(INSTANCE, llm_card("writer", tokenizer="b")))
    assert admissions.has_admitted(INSTANCE, ["talker", "writer"])


async def test_a_frontend_responds_to_each_instance_with_its_name_and_drops_what_it_cannot_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus, state = FakeBus(), State()
    directory = FakeDirectory(instance(INSTANCE))
    state.caches.add((INSTANCE, "adder"))
    admissions = Admissions(directory, state.has_text, state.is_in_step)
    reports: asyncio.Queue[AdmissionReport] = asyncio.Queue()

    def received(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        reports.put_nowait(msgspec.msgpack.decode(payload, type=AdmissionReport))

    worker, endpoint = FakeConnection(bus), Endpoint()
    await worker.subscribe(endpoint.admitted_subject(INSTANCE), received)
    async with reported_admissions(FakeConnection(bus), "dynamo", "f1", admissions):
        worker.publish_nowait(endpoint.admission_subject(INSTANCE), msgspec.msgpack.encode(AdmissionQuery(1, ("adder",))))
        assert await reports.get() == AdmissionReport("f1", 1, is_admitted=True)
        with caplog.at_level(logging.WARNING):
            worker.publish_nowait(endpoint.admission_subject(INSTANCE), b"\xc1")
            worker.publish_nowait("dynamo.dynamo.backend.admission.none", msgspec.msgpack.encode(AdmissionQuery(2, ())))
            worker.publish_nowait(endpoint.admission_subject(INSTANCE), msgspec.msgpack.encode(AdmissionQuery(3, ("other",))))
            assert await reports.get() == AdmissionReport("f1", 3, is_admitted=False)
        assert "a query about an admission" in caplog.text
