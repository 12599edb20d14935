"""How many instances a planner wants, as a frontend sees it."""

from __future__ import annotations

import logging

import pytest

from dynamo.common.etcd import Deleted, Etcd, Events, KeyValue, Put, Reset
from dynamo.common.etcd.transport import Transport
from dynamo.common.options import EtcdOptions
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import PoolTarget, Targets, encode_targets, targets_key
from dynamo.frontend.fleet.targets import TargetsView

KEY = targets_key("dynamo")
WANTED = Targets(planner="one", targets=(PoolTarget(pool=Pool("chat"), instances=3),))


@pytest.fixture
async def view() -> TargetsView:
    return TargetsView(Etcd(Transport(EtcdOptions())), "dynamo")


async def test_targets_are_those_of_the_key_until_it_is_deleted(view: TargetsView) -> None:
    view.apply(Reset((KeyValue(KEY, encode_targets(WANTED), 5),), 5))
    assert view.targets == WANTED
    view.apply(Events((Deleted(KEY, 6),), 6))
    assert view.targets == Targets()
    view.apply(Events((Put(KeyValue(KEY, encode_targets(WANTED), 7)),), 7))
    assert view.targets == WANTED
    view.apply(Reset((), 8))
    assert view.targets == Targets()


async def test_targets_of_a_namespace_whose_name_begins_the_same_are_not_its_own(view: TargetsView) -> None:
    view.apply(Events((Put(KeyValue(f"{KEY}-2", encode_targets(WANTED), 5)),), 5))
    assert view.targets == Targets()


async def test_targets_that_are_not_valid_change_nothing(view: TargetsView, caplog: pytest.LogCaptureFixture) -> None:
    view.apply(Reset((KeyValue(KEY, encode_targets(WANTED), 5),), 5))
    with caplog.at_level(logging.WARNING):
        view.apply(Events((Put(KeyValue(KEY, b'{"targets": 1}', 6)),), 6))
    assert view.targets == WANTED
    assert "are not valid" in caplog.text
