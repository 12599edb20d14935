"""Tokenizers whose files ask for more than a frontend has: they come from workers, which may run models of users."""

import asyncio
import base64
import json
import threading
from typing import Any

import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.frontend.preprocess.offload import TextThreads
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer
from dynamo.frontend.preprocess.tokens.tokenizer_file import read_tokenizer_file
from tests.support.waiting import WAIT_S

LETTERS = {chr(code): code - 32 for code in range(32, 127)}
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def file_with(**parts: Any) -> bytes:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    model = {"type": "BPE", "vocab": LETTERS, "merges": []} | parts.pop("model", {})
    return json.dumps({"version": "1.0", "added_tokens": [], **empty, "model": model, **parts}).encode()


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def replace(text: str, content: str, kind: str = "Replace") -> dict[str, Any]:
    return {"type": kind, "pattern": {"String": text}, "content": content}


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"y" * 100 + b"\0").decode()
TOO_LONG = {
    "replacements": {"normalizer": sequence("normalizers", *[replace("q", "qqqq")] * 4)},
    "replacements of a type that the library does not know": {"normalizer": replace("q", "q" * 100, kind="Other")},
    "a pattern that is empty": {"normalizer": replace("", "q" * 100)},
    "bytes as characters": {"pre_tokenizer": sequence("pretokenizers", *[BYTE_LEVEL] * 8)},
    "a map of characters": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    "tokens as text": {"decoder": replace("q", "q" * 100)},
    "a text that is there many times": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100,
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("parts", TOO_LONG.values(), ids=TOO_LONG)
def test_a_file_that_makes_texts_many_times_longer_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="64 times longer"):
        Tokenizer(file_with(**parts))


REFUSED = {
    "a beginning": ({"normalizer": {"type": "Prepend", "prepend": "q" * 2000}}, "around a text"),
    "added tokens": ({"added_tokens": [{"id": 200 + at, "content": "q" * 1000 + str(at)} for at in range(1100)]}, "added tokens"),
    "long words": ({"model": {"type": "WordPiece", "max_input_chars_per_word": 10**12}}, "words of more than 1000"),
    "a long token": ({"model": {"vocab": LETTERS | {"q" * 2000: 200}}}, "a token of 2000 characters"),
    "a slow decoder": ({"decoder": {"type": "Replace", "pattern": {"Regex": "(q+)+z"}, "content": ""}}, "may take long"),
    "steps": ({"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 300)}, "more than 256 steps"),
    "many tokens": ({"model": {"vocab": dict(LETTERS, **{f"t{at}": at for at in range(640_000)})}}, "more than 640000 tokens"),
    "a step without a type": ({"normalizer": {"pattern": {"String": "q"}, "content": "q"}}, "cannot be read: .*`type`"),
}


@pytest.mark.parametrize(("parts", "why"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_would_take_a_frontends_time_or_memory_is_refused(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(EngineError, match=why):
        Tokenizer(file_with(**parts))


def test_a_file_with_the_usual_steps_is_taken() -> None:
    """T5 and its kin have these; their map of characters makes 18 of one at most."""
    charsmap = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + ("\u0635" * 18).encode() + b"\0").decode()
    spaces = [{"type": "Replace", "pattern": {"Regex": regex}, "content": " "} for regex in (" {2,}", r"[\r\n]+", r"\s", "\n")]
    steps = sequence("normalizers", {"type": "Precompiled", "precompiled_charsmap": charsmap}, *spaces, replace(" ", "\u2581"))
    with pytest.raises(EngineError, match="64 times longer"):
        read_tokenizer_file(file_with(normalizer=steps, pre_tokenizer=sequence("pretokenizers", BYTE_LEVEL, BYTE_LEVEL)))
    assert read_tokenizer_file(file_with(normalizer=steps)).is_linear


@pytest.mark.parametrize("regex", [GPT2, LLAMA3, O200K, DEEPSEEK, r"\p{N}", " {2,}", "[0-9][0-9][0-9]", "[一-龥]+"])
def test_patterns_of_well_known_tokenizers_need_no_thread_of_their_own(regex: str) -> None:
    assert Tokenizer(file_with(pre_tokenizer=split(regex))).own_thread is None


@pytest.mark.parametrize(
    "regex", ["q*q*q*[^q]", "(q+)+z", "q+z", "(?:q?){14}q{14}z", "q?" * 9, r"\s*[\r\n]+", r"\s+(?!\S)|x", r"(q)\1+", "q{5000}"]
)
def test_patterns_that_may_take_hours_for_some_text_have_a_thread_of_their_own(regex: str) -> None:
    assert Tokenizer(file_with(pre_tokenizer=split(regex))).own_thread is not None
    assert Tokenizer(file_with(normalizer={"type": "Replace", "pattern": {"Regex": regex}, "content": ""})).own_thread is not None


async def test_a_tokenizer_with_unusual_patterns_holds_up_no_other() -> None:
    threads, release = TextThreads(), threading.Event()
    unusual = Tokenizer(file_with(pre_tokenizer=split("(q+)+z")), threads=threads)
    usual = Tokenizer(file_with(), threads=threads)
    assert unusual.own_thread is not None
    stuck = [asyncio.ensure_future(unusual.own_thread.run(release.wait, WAIT_S)) for _ in range(8)]
    waiting = asyncio.ensure_future(unusual.encode_prompt("qq", special_tokens=False))
    try:
        assert len(await usual.encode_prompt("q" * 5000, special_tokens=False)) == 5000
        assert len(await usual.encode_prompt("q" * 500_000, special_tokens=False)) == 500_000
        assert not waiting.done()
    finally:
        release.set()
    await asyncio.gather(*stuck)
    assert [*await waiting] == [LETTERS["q"]] * 2


def test_a_panic_of_the_library_is_an_error() -> None:
    tokenizer = Tokenizer(file_with(pre_tokenizer={"type": "FixedLength", "length": 0}))
    with pytest.raises(InvalidRequest, match="chunk size must be non-zero"):
        tokenizer.encode_now("abc", special_tokens=False)
    tokenizer = Tokenizer(file_with(decoder={"type": "Strip", "content": "a", "start": 3, "stop": 3}))
    with pytest.raises(EngineError, match="index out of bounds"):
        tokenizer.decode([LETTERS["q"], LETTERS["a"]], skip_special_tokens=True)
