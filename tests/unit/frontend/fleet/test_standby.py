"""The view of the models that can be started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import pytest

from dynamo.common.discovery import View
from dynamo.common.etcd import Deleted, Events, KeyValue, Put, Reset
from dynamo.common.model_card import ModelCard, Role
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import Standby, delete_standby, encode_standby, put_standby
from dynamo.common.scaling.targets import targets_key
from dynamo.frontend.fleet.standby import MAX_RECORDS, StandbyView, open_standby
from tests.support.fake_etcd import FakeEtcd
from tests.support.fakes import ENDPOINT, llm_card, tensor_card


def record(card: ModelCard, start_s: float = 0.0) -> Standby:
    return Standby(card=card, endpoint=ENDPOINT, start_s=start_s)


def put(view: StandbyView, revision: int, *cards: ModelCard) -> None:
    events = [Put(KeyValue(record(card).key, encode_standby(record(card)), revision)) for card in cards]
    view.apply(Events(tuple(events), revision))


def make_view() -> StandbyView:
    return StandbyView(FakeEtcd(), "dynamo")  # type: ignore[arg-type]


async def test_the_view_follows_etcd() -> None:
    etcd = FakeEtcd()
    await put_standby(etcd, record(tensor_card(), 12.0))
    changes: asyncio.Queue[tuple[Sequence[ModelCard], Sequence[ModelCard]]] = asyncio.Queue()
    async with open_standby(etcd, "dynamo") as view:  # type: ignore[arg-type]
        view.on_change(lambda added, removed: changes.put_nowait((added, removed)))
        await view.ready.wait()
        assert await changes.get() == ([tensor_card()], [])
        assert view.start_s(Pool("adder")) == 12.0
        assert view.start_s(Pool("adder", Role.DECODE)) is None
        await put_standby(etcd, record(llm_card()))
        assert await changes.get() == ([llm_card()], [])
        assert list(view.cards()) == ["adder", "talker"]
        await delete_standby(etcd, "dynamo", Pool("adder"))
        assert await changes.get() == ([], [tensor_card()])
        assert view.card("adder") is None
        etcd.lose_everything()
        assert await changes.get() == ([], [llm_card()])


def test_a_model_is_found_by_its_aliases_and_a_name_of_its_own_comes_first() -> None:
    view = make_view()
    other = msgspec.structs.replace(tensor_card("other"), aliases=("sum", "adder"))
    put(view, 2, tensor_card(), other)
    assert view.card("sum") == other
    assert view.card("adder") == tensor_card()


def test_instances_that_only_compute_prompts_make_no_model() -> None:
    view = make_view()
    put(view, 2, llm_card(role=Role.PREFILL))
    assert view.card("talker") is None
    assert view.start_s(Pool("talker", Role.PREFILL)) == 0.0
    put(view, 3, llm_card(role=Role.DECODE))
    assert view.cards() == {"talker": llm_card(role=Role.DECODE)}


def test_a_record_that_cannot_be_read_is_left_out_and_the_others_are_used(caplog: pytest.LogCaptureFixture) -> None:
    view = make_view()
    broken = KeyValue(record(tensor_card()).key, b"{}", 2)
    whole = KeyValue(record(llm_card()).key, encode_standby(record(llm_card())), 2)
    with caplog.at_level(logging.WARNING):
        view.apply(Reset((broken, whole), 2))
    assert list(view.cards()) == ["talker"]
    assert "left out" in caplog.text


def test_an_older_value_does_not_replace_a_newer_one() -> None:
    view = make_view()
    put(view, 5, tensor_card())
    put(view, 4, tensor_card(versions=("2",)))
    view.apply(Events((Deleted(record(tensor_card()).key, 3),), 6))
    assert view.card("adder") == tensor_card()


def test_the_number_of_records_is_bounded_and_there_is_room_again_when_one_is_deleted(caplog: pytest.LogCaptureFixture) -> None:
    view = make_view()
    with caplog.at_level(logging.ERROR):
        put(view, 2, *(tensor_card(f"model-{number}") for number in range(MAX_RECORDS + 10)))
    assert len(view.cards()) == MAX_RECORDS
    assert len(caplog.records) == 1
    view.apply(Events((Deleted(record(tensor_card("model-3")).key, 3),), 3))
    put(view, 4, tensor_card("another"))
    assert view.card("another") is not None


def test_records_of_planners_are_no_registrations(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        change = View().apply({record(tensor_card()).key: encode_standby(record(tensor_card())), targets_key("dynamo"): b"{}"})
    assert not change
    assert caplog.text == ""
