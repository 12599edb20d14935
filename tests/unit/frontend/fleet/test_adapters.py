"""LoRA adapters of the fleet: what is refused before any instance is concerned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import cast

import pytest

from dynamo.common.adapters import DesiredAdapter, LoadAdapter, adapter_key, encode_adapter
from dynamo.common.discovery import Instance
from dynamo.common.errors import AlreadyExists, Unavailable
from dynamo.common.etcd import Etcd
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.fleet.adapters import Adapters
from dynamo.frontend.security.accounts import ANONYMOUS
from tests.support.fake_etcd import FakeEtcd
from tests.support.waiting import WAIT_S, until


def card(name: str, *, adapters: tuple[str, ...] = (), loads: bool = False) -> ModelCard:
    llm = LlmInfo(context_length=100, tokenizer="bytes", adapters=adapters, loads_adapters=loads)
    return ModelCard(name=name, kind=ModelKind.LLM, llm=llm)


class Directory:
    """One instance of each model."""

    def __init__(self, *cards: ModelCard) -> None:
        self._instances = [
            Instance(id=InstanceId(number), endpoint=Endpoint(), subject="s", card=card, started_at=0.0)
            for number, card in enumerate(cards)
        ]

    def registered(self) -> Collection[Instance]:
        return self._instances

    def card(self, name: str) -> ModelCard | None:
        cards = [instance.card for instance in self._instances]
        return next((card for card in cards if card.llm and name in (card.name, *card.llm.adapters)), None)

    def on_change(self, callback: Callable[[], None]) -> None:
        pass


@pytest.mark.parametrize("name", ["base", "other", "others-adapter"])
async def test_an_adapter_takes_no_name_of_a_model_even_in_place(name: str) -> None:
    etcd = FakeEtcd()
    directory = Directory(card("base", loads=True), card("other", adapters=("others-adapter",)))
    adapters = Adapters(cast(Etcd, etcd), "ns", directory, timeout_s=WAIT_S)
    with pytest.raises(AlreadyExists, match=f"the name '{name}' is taken by model"):
        await adapters.load(ANONYMOUS, LoadAdapter(name=name, path="/adapters/x", model="base", in_place=True))
    assert not etcd.kvs


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_load_ends_whose_adapter_others_unload_or_replace_meanwhile(is_replaced: bool) -> None:
    etcd, key = FakeEtcd(), adapter_key("ns", "new")
    adapters = Adapters(cast(Etcd, etcd), "ns", Directory(card("base", loads=True)), timeout_s=WAIT_S)
    loading = asyncio.create_task(adapters.load(ANONYMOUS, LoadAdapter(name="new", path="/adapters/x", model="base")))
    await until(lambda: key in etcd.kvs)
    if is_replaced:
        await etcd.put(key, encode_adapter(DesiredAdapter(name="new", model="base", path="/adapters/y")))
    else:
        await etcd.delete(key)
    with pytest.raises(Unavailable, match="'new' was unloaded or replaced by others meanwhile"):
        await loading
