import random
import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Model

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import Delta, FinishReason
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.preprocess.tokens.detokenize import Detokenizer, new_stoppers
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer

CORPUS = ["hello world, the quick brown fox jumps over the lazy dog. 日本語の文 🦙 é ü naïve END stop STOP\n"] * 20
SPECIAL = ["<s>", "<|end|>"]


def byte_level() -> bytes:
    """As GPT-2, Llama 3, Qwen and SmolLM2 have it: characters outside of the corpus are several tokens."""
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    return model.to_str().encode()


def byte_fallback() -> bytes:
    """As Llama 2, Mistral and Gemma have it: "▁" is a space, characters not in the vocabulary are `<0xE2>`…"""
    words = ["▁", "▁hello", "▁world", "hel", "lo", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!\n", "語"]
    names = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = Model(models.BPE(vocab={name: id for id, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Replace(" ", "▁")
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.add_special_tokens(SPECIAL)
    return model.to_str().encode()


def word_ends() -> bytes:
    """Tokens whose text depends on what follows: no space after the last word."""
    model = Model(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    model.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], end_of_word_suffix="</w>", show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    return model.to_str().encode()


BYTES = Tokenizer(byte_level())
FALLBACK = Tokenizer(byte_fallback())
WORDS = Tokenizer(word_ends())
WORDS_IN_USE = ["hello", "the", "dog", "日本語", "STOP", "fox,", "<|end|>"]


def tokens_of(text: str, tokenizer: Tokenizer = BYTES) -> list[int]:
    return tokenizer.encode_now(text, special_tokens=False)


def cut(tokens: Sequence[int], places: Sequence[int]) -> list[Delta]:
    """`tokens` as deltas, cut at `places` (any numbers), the last one finished."""
    borders = sorted({0, len(tokens), *(place % (len(tokens) + 1) for place in places)})
    deltas = [Delta(tuple(tokens[a:b]), logprobs=[[(token, -1.0)] for token in tokens[a:b]]) for a, b in pairwise(borders)]
    return [*deltas, Delta(finish_reason=FinishReason.LENGTH)]


def fed(detokenizer: Detokenizer, deltas: Sequence[Delta]) -> list[TextDelta]:
    return [text for text in map(detokenizer.feed, deltas) if text is not None]


def joined(texts: Sequence[TextDelta]) -> str:
    return "".join(text.text for text in texts)


def singly(tokens: Sequence[int]) -> list[Delta]:
    return cut(tokens, range(len(tokens)))


@given(st.text(), st.lists(st.integers(0, 200)), st.sampled_from([BYTES, FALLBACK]))
def test_a_text_is_restored_however_its_tokens_are_cut(text: str, places: list[int], tokenizer: Tokenizer) -> None:
    tokens = tokens_of(text, tokenizer)
    texts = fed(Detokenizer(tokenizer), cut(tokens, places))
    assert joined(texts) == (text if tokenizer is BYTES else text.replace("▁", " "))
    assert [token for part in texts for token in part.tokens] == tokens
    assert [entry[0][0] for part in texts for entry in part.logprobs or ()] == tokens


@given(st.lists(st.integers(0, 450)), st.lists(st.integers(0, 200)), st.booleans())
def test_any_tokens_give_the_text_that_the_tokenizer_gives_for_all_at_once(
    tokens: list[int], places: list[int], skip: bool
) -> None:
    texts = fed(Detokenizer(BYTES, skip_special_tokens=skip), cut(tokens, places))
    assert joined(texts) == BYTES.decode(tokens, skip_special_tokens=skip)
    assert all(len(part.text) > 0 for part in texts[:-1])


@given(
    st.lists(st.sampled_from(["hello", "the", "dog", "日本語", "STOP", "fox,", "<|end|>"]), min_size=1),
    st.lists(st.integers(0, 99)),
)
def test_a_text_whose_tokens_depend_on_each_other_is_the_same_however_it_is_cut(words: list[str], places: list[int]) -> None:
    tokens = tokens_of(" ".join(words), WORDS)
    prompt = tokens_of("hello world", WORDS)
    texts = fed(Detokenizer(WORDS, prompt=prompt), cut(tokens, places))
    whole = WORDS.decode(prompt + tokens, skip_special_tokens=True)
    assert joined(texts) == whole.removeprefix(WORDS.decode(prompt, skip_special_tokens=True))


def test_an_incomplete_character_is_never_returned() -> None:
    text = "🦙日é👩‍👩‍👧"
    tokens = tokens_of(text)
    assert len(tokens) > len(text)
    texts = fed(Detokenizer(BYTES), singly(tokens))
    assert joined(texts) == text and "\ufffd" not in joined(texts)


def test_tokens_of_an_incomplete_character_come_with_the_character() -> None:
    tokens = tokens_of("𝄞")
    detokenizer = Detokenizer(BYTES)
    responses = [detokenizer.feed(Delta((token,), logprobs=[[(token, -0.5)]])) for token in tokens]
    assert responses[:-1] == [None] * (len(tokens) - 1)
    assert responses[-1] == TextDelta(0, "𝄞", tuple(tokens), None, [[(token, -0.5)] for token in tokens])


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK])
def test_an_incomplete_character_at_the_end_is_a_replacement_character(tokenizer: Tokenizer) -> None:
    tokens = tokens_of("a𝄞", tokenizer)[:-1]
    assert joined(fed(Detokenizer(tokenizer), singly(tokens))) == "a\ufffd"


def test_tokens_that_never_complete_a_character_do_not_accumulate() -> None:
    start = tokens_of("𝄞")[0]
    detokenizer = Detokenizer(BYTES)
    texts = fed(detokenizer, [Delta((start,))] * 10)
    assert joined(texts) == "\ufffd" * 9


def test_a_response_continues_the_prompt() -> None:
    space = FALLBACK.token_id("▁hello")
    assert space is not None
    detokenizer = Detokenizer(FALLBACK, prompt=tokens_of("abc", FALLBACK))
    assert joined(fed(detokenizer, singly([space]))) == " hello"


def test_ids_outside_of_the_vocabulary_have_no_text() -> None:
    tokens = [*tokens_of("a"), 4_000_000, *tokens_of("b")]
    assert joined(fed(Detokenizer(BYTES), singly(tokens))) == "ab"


def test_special_tokens_are_skipped_or_kept_as_requested() -> None:
    tokens = tokens_of("a<|end|>b")
    assert joined(fed(Detokenizer(BYTES), singly(tokens))) == "ab"
    assert joined(fed(Detokenizer(BYTES, skip_special_tokens=False), singly(tokens))) == "a<|end|>b"


# Stop strings


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What is in front of the stop string that is complete first, by trying every length."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


LETTERS = st.text("ab語🦙\n", max_size=30)
STOPS = st.lists(st.text("ab語🦙\n", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=300)
@given(LETTERS, STOPS, st.lists(st.integers(0, 99)), st.booleans())
def test_the_stop_string_that_is_complete_first_ends_the_text_at_every_cut(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    detokenizer = Detokenizer(BYTES, stop_strings=stops, include_stop_string=include)
    texts = fed(detokenizer, cut(tokens_of(text), places))
    before, stop = first_stop(text, stops)
    assert joined(texts) == before + (stop if include and stop else "")
    assert texts[-1].finish_reason is (FinishReason.LENGTH if stop is None else FinishReason.STOP)
    assert texts[-1].stop_reason == stop
    assert detokenizer.done
    assert all(part.finish_reason is None for part in texts[:-1])


@given(LETTERS, STOPS)
def test_exactly_the_text_that_may_belong_to_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    detokenizer, plain = Detokenizer(BYTES, stop_strings=stops), Detokenizer(BYTES)
    certain = whole = ""
    for token in tokens_of(text):
        certain += joined(fed(detokenizer, [Delta((token,))]))
        whole += joined(fed(plain, [Delta((token,))]))
        if detokenizer.done:
            break
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop)) if whole.endswith(stop[:size])}
        assert certain == whole[: len(whole) - max(map(len, beginnings), default=0)]


def test_text_that_was_held_back_is_returned_once_it_is_not_a_stop_string() -> None:
    detokenizer = Detokenizer(BYTES, stop_strings=["STOPPED"])
    parts = [detokenizer.feed(Delta(tuple(tokens_of(text)))) for text in ("x STOP", "PE", "R y")]
    assert [part and part.text for part in parts] == ["x ", None, "STOPPER y"]
    assert parts[2] is not None and list(parts[2].tokens) == [*tokens_of("PE"), *tokens_of("R y")]


def test_text_that_was_held_back_is_returned_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES, stop_strings=["STOPPED"])
    texts = fed(detokenizer, [Delta(tuple(tokens_of("x STOP"))), Delta(finish_reason=FinishReason.LENGTH)])
    assert [(part.text, part.finish_reason) for part in texts] == [("x ", None), ("STOP", FinishReason.LENGTH)]


def test_nothing_is_returned_for_a_choice_after_its_stop_string() -> None:
    detokenizer = Detokenizer(BYTES, stop_strings=["END"])
    end = detokenizer.feed(Delta(tuple(tokens_of("a END b"))))
    assert end is not None and (end.text, end.stop_reason, detokenizer.done) == ("a ", "END", True)
    assert detokenizer.feed(Delta(tuple(tokens_of("c")))) is None
    assert detokenizer.feed(Delta(finish_reason=FinishReason.LENGTH)) is None


def test_tokens_after_a_stop_string_are_dropped_with_their_logprobs() -> None:
    before, behind = tokens_of("a END"), tokens_of("日本語")
    tokens = (*before, *behind)
    end = Detokenizer(BYTES, stop_strings=["END"]).feed(Delta(tokens, logprobs=[[(token, -1.0)] for token in tokens]))
    assert end is not None and list(end.tokens) == before
    assert end.logprobs is not None and [entry[0][0] for entry in end.logprobs] == before


def test_choices_end_independently() -> None:
    detokenizer = Detokenizer(BYTES, n=2, stop_strings=["END"])
    assert detokenizer.feed(Delta(tuple(tokens_of("EN")), 0)) is None
    other = detokenizer.feed(Delta(tuple(tokens_of("D of it")), 1))
    assert other is not None and (other.index, other.text) == (1, "D of it")
    first = detokenizer.feed(Delta(tuple(tokens_of("D")), 0))
    assert first is not None and first.finish_reason is FinishReason.STOP
    assert not detokenizer.done
    detokenizer.feed(Delta((), 1, FinishReason.LENGTH))
    assert detokenizer.done


def test_a_stop_string_among_the_first_min_tokens_is_ignored() -> None:
    tokens = tokens_of("END END x")
    least = len(tokens_of("END"))
    texts = fed(Detokenizer(BYTES, stop_strings=["END"], min_tokens=least), singly(tokens))
    assert joined(texts) == "END " and texts[-1].stop_reason == "END"


def test_a_stop_token_is_the_reason_unless_it_is_an_eos_token() -> None:
    last = Delta((), 0, FinishReason.STOP, [[(7, -0.5)]], 7)
    detokenized = Detokenizer(BYTES, eos_token_ids=frozenset((8,))).feed(last)
    eos = Detokenizer(BYTES, eos_token_ids=frozenset((7,))).feed(last)
    assert detokenized is not None and (detokenized.stop_reason, detokenized.logprobs) == (7, [[(7, -0.5)]])
    assert eos is not None and eos.stop_reason is None and eos.finish_reason is FinishReason.STOP


def test_long_repetitive_stop_strings_match() -> None:
    stop = "a" * 1000 + "b"
    text = "a" * 5000 + "b"
    texts = fed(Detokenizer(BYTES, stop_strings=[stop, "aab" * 300]), singly(tokens_of(text)))
    assert joined(texts) == "a" * 4000 and texts[-1].stop_reason == stop


# The tokenizer


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_is_not_a_tokenizer_is_rejected(data: bytes) -> None:
    with pytest.raises(EngineError, match="tokenizer cannot be read"):
        Tokenizer(data)


def test_a_bos_token_that_does_not_exist_is_rejected() -> None:
    with pytest.raises(EngineError, match="no token '<bos>'"):
        Tokenizer(byte_level(), bos_token="<bos>", add_bos=True)


def test_bos_is_added_to_texts_once_and_to_conversations_never() -> None:
    tokenizer = Tokenizer(byte_level(), bos_token="<s>", add_bos=True)
    bos = tokenizer.token_id("<s>")
    hello = tokens_of("hello")
    assert tokenizer.encode_now("hello", special_tokens=True) == [bos, *hello]
    assert tokenizer.encode_now("<s>hello", special_tokens=True) == [bos, *hello]
    assert tokenizer.encode_now("hello", special_tokens=False) == hello


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    model = Model.from_str(byte_level().decode())
    model.enable_truncation(3)
    model.enable_padding(length=50)
    tokenizer = Tokenizer(model.to_str().encode())
    text = "hello world " * 10
    assert tokenizer.encode_now(text, special_tokens=True) == tokens_of(text)
    assert tokenizer.encode_now("a", special_tokens=True) == tokens_of("a")


def test_half_of_a_surrogate_pair_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match="cannot be tokenized"):
        BYTES.encode_now("a\ud800b", special_tokens=False)


async def test_a_long_text_gives_the_same_tokens_as_a_short_one() -> None:
    text = "".join(random.Random(1).choices("hello wörld 日本\n", k=20_000))
    assert await BYTES.encode(text, special_tokens=True) == BYTES.encode_now(text, special_tokens=True)


def test_ids_are_checked_against_the_vocabulary() -> None:
    BYTES.check_ids([0, BYTES.vocabulary_size - 1])
    for wrong in (-1, BYTES.vocabulary_size):
        with pytest.raises(InvalidRequest, match=f"token id {wrong}"):
            BYTES.check_ids([0, wrong, 1])


@settings(max_examples=300)
@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=3),
    first=st.integers(0, 20),
    long=st.integers(250, 600),
)
def test_stop_strings_are_found_in_long_text_as_in_short(text: str, stops: list[str], first: int, long: int) -> None:
    texts = [text[:first], "c" * 300 + text[first:] + "ab" * (long // 2), text]
    for pieces in (texts, [text[:first] + "c" * 300 + text[first:]], ["ab" * (long // 2) + text, *texts]):
        expected, at_once = new_stoppers(stops, 2)
        assert expected is not None and at_once is not None
        for piece in pieces:
            one_by_one = ""
            for character in piece:
                one_by_one += expected.push(character)
                if expected.hit is not None:
                    break
            assert (at_once.push(piece), at_once.hit, at_once.held) == (one_by_one, expected.hit, expected.held)
            if expected.hit is not None:
                break


def test_long_text_is_not_looked_at_character_by_character() -> None:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    [stopper] = new_stoppers([f"s{number}" for number in range(32)], 1)
    assert stopper is not None
    sys.setprofile(count)
    try:
        stopper.push("ssss" * 100_000)
    finally:
        sys.setprofile(None)
    assert calls < 1000
