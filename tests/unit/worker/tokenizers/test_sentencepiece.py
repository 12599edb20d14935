"""`tokenizer.model` files, compared with what the library `sentencepiece` itself makes of a text."""

from __future__ import annotations

import io
import random
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dynamo.common.errors import DynamoError, InvalidRequest, Unsupported
from dynamo.worker.tokenizers.sentencepiece import SentencePieceModel

CORPUS = (Path(__file__).parents[4] / "README.md").read_text().splitlines()
WORDS = sorted(set(" ".join(CORPUS).split(" ")))

MODELS = {
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "no prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, "remove_extra_whitespaces": False},
    "tidied": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"},
    "own words": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": "<sep>,[INST]"},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "unigram of bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity"},
}


@cache
def trained(**options: object) -> bytes:
    file = io.BytesIO()
    options = {"vocab_size": 500, "minloglevel": 2, **options}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=file, **options)
    return file.getvalue()


@cache
def both(name: str) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    data = trained(**MODELS[name])
    ours = SentencePieceModel.read(data).tokenizer_json()
    return sentencepiece.SentencePieceProcessor(model_proto=data), Tokenizer.from_buffer(ours)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=200)
@given(data=st.data())
def test_a_text_has_the_tokens_that_sentencepiece_gives_it(name: str, data: st.DataObject) -> None:
    theirs, ours = both(name)
    words = st.sampled_from(WORDS) | st.sampled_from(["", " ", "\n", "é", "日本", "🦙", "ﬁ"])
    text = data.draw(st.lists(words, max_size=12).map(" ".join) | st.text(st.sampled_from("ab e.\n1é日🦙"), max_size=30))
    got = ours.encode(text, add_special_tokens=False).ids
    assert got == theirs.encode(text)
    assert ours.decode(got, skip_special_tokens=False) == theirs.decode(got) or theirs.unk_id() in got


def test_words_of_the_models_own_are_found_whole() -> None:
    _, ours = both("own words")
    assert [token for token in ours.encode("a[INST]b <sep>", add_special_tokens=False).tokens if token[0] in "[<"] == [
        "[INST]",
        "<sep>",
    ]


def test_prompts_begin_with_bos_if_the_model_has_one_and_it_is_not_refused() -> None:
    model = SentencePieceModel.read(trained(**MODELS["llama"]))
    with_bos, without = (Tokenizer.from_buffer(model.tokenizer_json(add_bos=add)) for add in (True, False))
    assert with_bos.encode("a b").tokens[0] == "<s>"
    assert without.encode("a b").tokens == with_bos.encode("a b").tokens[1:]
    none = SentencePieceModel.read(trained(model_type="bpe", bos_id=-1))
    assert Tokenizer.from_buffer(none.tokenizer_json()).encode("a").tokens[0] != "<s>"


def test_models_of_words_or_characters_are_refused() -> None:
    with pytest.raises(Unsupported, match="BPE and Unigram"):
        SentencePieceModel.read(trained(model_type="char", vocab_size=100))


@pytest.mark.parametrize("data", [b"", b"no model", b"\x0a\xff\x01a", b"\x12\x00", b"\x0f"])
def test_what_is_no_model_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not a SentencePiece model"):
        SentencePieceModel.read(data)


def test_a_damaged_model_is_read_or_refused() -> None:
    rng = random.Random(5)
    whole = trained(**MODELS["llama"])
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            SentencePieceModel.read(bytes(damaged[: rng.randrange(len(damaged))])).tokenizer_json()
        except DynamoError:
            continue
