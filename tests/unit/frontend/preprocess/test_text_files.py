"""Tokenizers and chat templates that models share, with real files of them."""

from __future__ import annotations

import asyncio
import json

import pytest

from dynamo.common.errors import EngineError, Unavailable
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.frontend.config import TextOptions
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.preprocess.text_files import TextFiles, open_text_files
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer
from dynamo.worker.engine.echo import byte_tokenizer

pytestmark = pytest.mark.usefixtures("no_collector")
"""What is evicted must go by its reference count."""


TOKENIZER_BYTES = Tokenizer(byte_tokenizer(), fast=False).size_bytes


class Files:
    """A store whose tokenizer `tN` has the additional token `<N>`, and whose template `cN` renders `N`."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.fetched: list[str] = []
        self.broken: set[str] = set()

    async def get(self, key: str) -> bytes:
        self.read.append(key)
        await asyncio.sleep(0)
        if key in self.broken:
            return b"\xff"
        return tokenizer_file(key[1:]) if key[0] == "t" else key[1:].encode()

    async def fetch(self, key: str) -> None:
        self.fetched.append(key)


def tokenizer_file(name: str) -> bytes:
    file = json.loads(byte_tokenizer())
    token = {"content": f"<{name}>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    file["added_tokens"].append({"id": 300, **token})
    return json.dumps(file).encode()


def card(name: str, tokenizer: str, template: str = "") -> ModelCard:
    return ModelCard(name=name, kind=ModelKind.LLM, llm=LlmInfo(context_length=64, tokenizer=tokenizer, chat_template=template))


async def test_models_share_the_tokenizer_and_the_template_of_their_files() -> None:
    files = Files()
    async with open_text_files(files, TextOptions()) as texts:
        first, second = await asyncio.gather(texts.load(card("a", "t1", "c1")), texts.load(card("b", "t1", "c1")))
        assert first.tokenizer is second.tokenizer
        assert files.read == ["t1", "c1"]


async def test_models_that_differ_in_their_template_only_share_the_tokenizer() -> None:
    async with open_text_files(Files(), TextOptions()) as texts:
        first, second = await texts.load(card("a", "t1", "c1")), await texts.load(card("b", "t1", "c2"))
        request = TextRequest(model="a", messages=({"role": "user", "content": "hi"},))
        assert first.tokenizer is second.tokenizer
        assert [await first.render(request), await second.render(request)] == ["1", "2"]


async def test_tokenizers_and_templates_are_loaded_before_a_request_needs_them_while_there_is_room() -> None:
    files = Files()
    cards = [card(f"m{number}", f"t{number}", f"c{number}") for number in range(5)]
    options = TextOptions(tokenizer_cache_bytes=int(3.5 * TOKENIZER_BYTES), fast_tokenizer=False)
    async with open_text_files(files, options) as texts:
        await asyncio.gather(*map(texts.prepare, cards))
        assert sorted(files.fetched) == sorted(f"{kind}{number}" for kind in "tc" for number in range(5))
        assert sorted(files.read) == ["c0", "c1", "c2", "c3", "c4", "t0", "t1", "t2"]
        assert [card.name for card in cards if texts.loaded(card) is not None] == ["m0", "m1", "m2"]
        await texts.load(cards[-1])
        assert texts.loaded(cards[-1]) is not None


async def test_preparing_a_model_evicts_no_tokenizer_and_loads_none_twice() -> None:
    files = Files()
    options = TextOptions(tokenizer_cache_bytes=int(1.5 * TOKENIZER_BYTES), fast_tokenizer=False)
    async with open_text_files(files, options) as texts:
        for name, file in (("a", "t1"), ("b", "t2"), ("c", "t1")):
            await texts.prepare(card(name, file))
        assert files.read == ["t1"]
        assert texts.loaded(card("a", "t1")) is not None
        assert texts.loaded(card("b", "t2")) is None


async def evict(texts: TextFiles, evicted: ModelCard) -> None:
    """Load others until it is gone: the thread that made it may still refer to it."""
    for number in range(3, 100):
        await texts.load(card("last", f"t{number}"))
        if texts.loaded(evicted) is None:
            return
    pytest.fail("it is never evicted")


@pytest.mark.parametrize("fast", [True, False])
async def test_tokenizers_beyond_the_bound_are_evicted_unless_a_request_holds_them(fast: bool) -> None:
    options = TextOptions(tokenizer_cache_bytes=1, fast_tokenizer=fast)
    async with open_text_files(Files(), options) as texts:
        held = await texts.load(card("held", "t1"))
        assert list(map(held.tokenizer.pieces_without_special.__getitem__, (65, 300)))  # type: ignore[union-attr]
        await texts.load(card("free", "t2"))
        await evict(texts, card("free", "t2"))
        again = texts.loaded(card("held", "t1"))
        assert again is not None
        assert again.tokenizer is held.tokenizer
        del held, again
        await texts.load(card("next", "t100"))
        assert texts.loaded(card("held", "t1")) is None


async def test_a_tokenizer_that_was_evicted_is_loaded_again() -> None:
    files = Files()
    async with open_text_files(files, TextOptions(tokenizer_cache_bytes=0)) as texts:
        await texts.load(card("a", "t1"))
        await evict(texts, card("a", "t1"))
        await texts.load(card("a", "t1"))
        assert files.read.count("t1") == 2


async def test_a_file_that_cannot_be_read_spoils_what_needs_it_only() -> None:
    files = Files()
    files.broken = {"t1", "c1"}
    async with open_text_files(files, TextOptions()) as texts:
        for broken in (card("a", "t1"), card("b", "t2", "c1")):
            with pytest.raises(EngineError):
                await texts.prepare(broken)
        assert (await texts.load(card("c", "t2", "c2"))).tokenizer
        files.broken.clear()
        await texts.prepare(card("a", "t1"))
        assert texts.loaded(card("a", "t1")) is not None


async def test_loads_that_are_running_are_stopped_at_the_end() -> None:
    class Silent(Files):
        async def get(self, key: str) -> bytes:
            await asyncio.Event().wait()
            raise Unavailable("never")

    async with open_text_files(Silent(), TextOptions()) as texts:
        waiting = asyncio.create_task(texts.load(card("a", "t1")))
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert isinstance(texts, TextFiles)
