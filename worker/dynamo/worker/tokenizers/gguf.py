"""Reads the header of a GGUF file: the model's metadata, its tokenizer and its chat template.

Reading takes a tenth of a second and touches no tensor. A header is untrusted: every length is checked against the file
before memory is allocated, and a malformed header is an `InvalidRequest` that names the file.

The tokenizer comes out as a `tokenizer.json`, the form that the library `tokenizers` reads:

| `tokenizer.ggml.model` | becomes |
|---|---|
| `gpt2` | byte-level BPE, split by the pre-tokenizer that `tokenizer.ggml.pre` names (`PRE_TOKENIZERS`) |
| `llama` | SentencePiece BPE with byte fallback; its merges are derived from the scores |
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

from dynamo.common.errors import InvalidRequest, Unsupported
from dynamo.worker.tokenizers import sentencepiece
from dynamo.worker.tokenizers.sentencepiece import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | Sequence[Any]

MAX_KEYS = 65_536
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 4 << 20
MAX_NESTING = 4

_STRING, _ARRAY = 8, 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

_LENGTH = struct.Struct("<Q")

_T = TypeVar("_T")


class _Cursor:
    """Reads values in sequence, never past the end."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self._data = data
        self._end = len(data)
        self._position = 0

    def bytes(self, size: int, most: int) -> bytes:
        if size > most or size > self._end - self._position:
            raise ValueError(f"a length of {size} at byte {self._position} cannot be right")
        data = self._data[self._position : self._position + size]
        self._position += size
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code), 8))[0]

    def string(self, most: int = MAX_STRING_BYTES) -> str:
        return self.bytes(self.number("Q"), most).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            if depth >= MAX_NESTING:
                raise ValueError("its arrays are nested too deeply")
            return self._array(self.number("I"), self.number("Q"), depth)
        if kind not in _SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        return cast(Scalar, self.number(_SCALARS[kind]))

    def _array(self, kind: int, count: int, depth: int) -> Sequence[Any]:
        if count > MAX_ARRAY_ITEMS:
            raise ValueError(f"an array of {count} items is more than {MAX_ARRAY_ITEMS}")
        if kind in _SCALARS:
            size = struct.calcsize("<" + _SCALARS[kind]) * count
            return struct.unpack(f"<{count}{_SCALARS[kind]}", self.bytes(size, size))
        if kind == _STRING:
            return self._strings(count)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """`string` in a loop, four times as fast: a vocabulary and its merges are some 100,000 strings."""
        data, end, position, read_length = self._data, self._end, self._position, _LENGTH.unpack_from
        strings = []
        for _ in range(count):
            start = position + 8
            position = start + read_length(data, position)[0]
            if position > end:
                raise ValueError(f"a string at byte {start} is longer than the file")
            strings.append(data[start:position].decode("utf-8", "surrogateescape"))
        self._position = position
        return strings


def read_metadata(path: Path) -> dict[str, Value]:
    """Return all key-value pairs of the header. Raises InvalidRequest if `path` is not a GGUF file of version 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return parse_metadata(data)
    except (OSError, ValueError, struct.error) as error:  # an empty file cannot be mapped: ValueError
        raise InvalidRequest(f"{path} cannot be read as a GGUF file: {error}") from error


def parse_metadata(data: mmap.mmap | bytes) -> dict[str, Value]:
    """Return the same from the file's contents. Raises ValueError or struct.error."""
    cursor = _Cursor(data)
    if cursor.bytes(4, 4) != b"GGUF":
        raise ValueError("it does not begin with 'GGUF'")
    version = cursor.number("I")
    if version not in (2, 3):
        raise ValueError(f"its version is {version}; versions 2 and 3 are understood (big-endian files are not)")
    cursor.number("Q")  # number of tensors
    keys = cursor.number("Q")
    if keys > MAX_KEYS:
        raise ValueError(f"it claims to have {keys} keys")
    metadata: dict[str, Value] = {}
    for _ in range(keys):
        key = cursor.string(MAX_KEY_BYTES)
        metadata[key] = cursor.value(cursor.number("I"))
    return metadata


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The header of a GGUF file."""

    metadata: Mapping[str, Value] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> GgufModel:
        return cls(read_metadata(path))

    @property
    def name(self) -> str:
        return self._get("general.name", str, "")

    @property
    def context_length(self) -> int:
        """The longest sequence the model was trained for, in tokens; 0 if the file does not say."""
        return self._get(f"{self._get('general.architecture', str, '')}.context_length", int, 0)

    @property
    def kv_values_per_token(self) -> int:
        """Values that the KV cache holds for one token in all layers together; 0 if the file does not say."""
        arch = self._get("general.architecture", str, "")

        def number(key: str, default: int = 0) -> int:
            value = self.metadata.get(f"{arch}.{key}", default)
            return value if isinstance(value, int) else 0  # some models have a list with one for each layer

        heads = number("attention.head_count")
        width = number("embedding_length") // heads if heads else 0
        pair = number("attention.key_length", width) + number("attention.value_length", width)
        return number("block_count") * number("attention.head_count_kv", heads) * pair

    @property
    def tokens(self) -> Sequence[str]:
        """The text of each token in the vocabulary's own spelling (`Ġ` or `▁` for a space)."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, Sequence) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise InvalidRequest("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
        return tokens

    @property
    def chat_template(self) -> str:
        return self._get("tokenizer.chat_template", str, "")

    @property
    def add_bos(self) -> bool:
        """Whether a prompt begins with the BOS token."""
        pre_tokenizer = PRE_TOKENIZERS.get(self._get("tokenizer.ggml.pre", str, ""))
        usual = self._is_sentencepiece or (pre_tokenizer is not None and pre_tokenizer.add_bos)
        return self._get("tokenizer.ggml.add_bos_token", bool, usual) and self.bos_token_id is not None

    @property
    def bos_token_id(self) -> int | None:
        return self._token_id("tokenizer.ggml.bos_token_id")

    @property
    def eos_token_id(self) -> int | None:
        return self._token_id("tokenizer.ggml.eos_token_id")

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a generation: EOS, end of turn, end of message."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        named = [self._token_id(f"tokenizer.ggml.{key}") for key in keys]
        types = self.token_types
        conventional = [id for id, token in enumerate(self.tokens) if token in END_TOKENS and types[id] in _ADDED]
        return tuple(dict.fromkeys([id for id in named if id is not None] + conventional))

    @property
    def token_types(self) -> Sequence[int]:
        """One of NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE per token."""
        types = self.metadata.get("tokenizer.ggml.token_type")
        count = len(self.tokens)
        if types is None:
            return (NORMAL,) * count
        if isinstance(types, str | int | float) or len(types) != count:
            raise InvalidRequest("the GGUF file's token types do not fit its vocabulary")
        return cast(Sequence[int], types)

    def token_text(self, id: int | None) -> str:
        return "" if id is None else self.tokens[id]

    def token_bytes(self) -> list[bytes]:
        """Return what each token adds to the text, in UTF-8; a token may be a part of a character. Control tokens add nothing."""
        to_bytes = _sentencepiece_bytes if self._is_sentencepiece else _byte_level_bytes
        return [
            b"" if kind in (CONTROL, UNKNOWN) else token.encode() if kind == USER_DEFINED else to_bytes(token, kind)
            for token, kind in zip(self.tokens, self.token_types, strict=True)
        ]

    def tokenizer_json(self) -> bytes:
        """Return the tokenizer as a `tokenizer.json`. Raises Unsupported naming a kind of tokenizer that is not supported."""
        kind = self._get("tokenizer.ggml.model", str, "")
        if kind == "gpt2":
            parts = self._byte_level()
        elif kind == "llama":
            parts = self._sentencepiece()
        else:
            raise Unsupported(f"the GGUF file's tokenizer is of the kind {kind!r}; understood are 'gpt2' and 'llama'")
        return sentencepiece.tokenizer_json(added_tokens=self._added_tokens(), post_processor=self._post_processor(), **parts)

    @property
    def _is_sentencepiece(self) -> bool:
        return self.metadata.get("tokenizer.ggml.model") == "llama"

    def _get(self, key: str, kind: type[_T], default: _T) -> _T:
        value = self.metadata.get(key, default)
        if not isinstance(value, kind):
            raise InvalidRequest(f"the GGUF file's {key} is {value!r:.80}, which is not of type {kind.__name__}")
        return value

    def _token_id(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def _added_tokens(self) -> list[dict[str, Any]]:
        return [
            sentencepiece.added_token(id, token, special=kind != USER_DEFINED)
            for id, (token, kind) in enumerate(zip(self.tokens, self.token_types, strict=True))
            if kind in _ADDED and token
        ]

    def _post_processor(self) -> dict[str, Any] | None:
        bos = self.bos_token_id
        return sentencepiece.bos_in_front(self.token_text(bos), bos) if self.add_bos and bos is not None else None

    def _byte_level(self) -> dict[str, Any]:
        name = self._get("tokenizer.ggml.pre", str, "default")
        pre_tokenizer = PRE_TOKENIZERS.get(name)
        if pre_tokenizer is None:
            raise Unsupported(f"the GGUF file's pre-tokenizer {name!r} is not supported")
        merges = self.metadata.get("tokenizer.ggml.merges", ())
        if isinstance(merges, str | int | float):
            raise InvalidRequest("the GGUF file's merges are not a list")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        splits = [
            {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            for regex in pre_tokenizer.splits
        ]
        return {
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "decoder": byte_level,
            "model": sentencepiece.bpe(
                {token: id for id, token in enumerate(self.tokens)},
                [_merge(merge) for merge in merges],
                ignore_merges=pre_tokenizer.ignore_merges,
            ),
        }

    def _sentencepiece(self) -> dict[str, Any]:
        scores = self.metadata.get("tokenizer.ggml.scores", ())
        if isinstance(scores, str | int | float) or len(scores) != len(self.tokens):
            raise InvalidRequest("the GGUF file's token scores do not fit its vocabulary")
        vocabulary = {token: id for id, token in enumerate(self.tokens)}
        normal = [token for token, kind in zip(self.tokens, self.token_types, strict=True) if kind == NORMAL]
        prefix = self._get("tokenizer.ggml.add_space_prefix", bool, True)
        return {
            "normalizer": {"type": "Sequence", "normalizers": sentencepiece.space_normalizers(prefix)},
            "decoder": sentencepiece.decoder(prefix),
            "model": sentencepiece.bpe(
                vocabulary,
                sentencepiece.merges_from_scores(normal, {token: float(scores[id]) for token, id in vocabulary.items()}),
                unknown=self.token_text(self._token_id("tokenizer.ggml.unknown_token_id")) or None,
                byte_fallback=True,
                fuse_unknown=True,
            ),
        }


_ADDED = (UNKNOWN, CONTROL, USER_DEFINED)

END_TOKENS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>",
     "<|eom_id|>", "<EOT>", "<｜end▁of▁sentence｜>", "</s>"}
)  # fmt: skip
"""Tokens that end a generation in the model families that have them."""


def _merge(text: str) -> tuple[str, str]:
    left, space, right = text[1:].partition(" ")  # the left half may itself begin with a space
    if not text or not space:
        raise InvalidRequest(f"the GGUF file has a merge that is not a pair: {text!r:.80}")
    return text[0] + left, right


def _sentencepiece_bytes(token: str, kind: int) -> bytes:
    if kind == BYTE:
        return bytes([int(token[3:-1], 16)])  # written <0x0A>
    return token.replace("▁", " ").encode("utf-8", "surrogateescape")


def _byte_level_bytes(token: str, kind: int) -> bytes:
    values = [_BYTE_OF.get(character) for character in token]
    return token.encode("utf-8", "surrogateescape") if None in values else bytes(cast(list[int], values))


def _byte_alphabet() -> dict[str, int]:
    """Return the 256 characters with which byte-level vocabularies write bytes: printable Latin-1 as it is, the rest from U+0100
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split before BPE: each regex splits what the ones before it left."""

    splits: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token as a whole is not split."""
    add_bos: bool = False
    """Whether prompts begin with BOS if the file does not say."""


_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CJK = "[一-龥぀-ゟ゠-ヿ]+"


def _modern(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


_GPT2 = PreTokenizer((_WORDS,))
_DIGIT_BY_DIGIT = PreTokenizer((r"\p{N}", _WORDS))
_QWEN2 = PreTokenizer((_modern(r"\p{N}"),))
_LLAMA3 = PreTokenizer((_modern(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_GPT4 = PreTokenizer((_modern(r"\p{N}{1,3}"),))
_QWEN35 = PreTokenizer(
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)
)
_GPT4O = PreTokenizer(
    (rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",)
)
_TEKKEN = PreTokenizer(
    (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",), ignore_merges=True, add_bos=True
)
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        _CJK,
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_DEEPSEEK_CODER = PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _WORDS, "[0-9][0-9][0-9]"))
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"))


def _named(pre_tokenizer: PreTokenizer, *names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names, pre_tokenizer)


PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = (
    _named(_DEFAULT, "default")
    | _named(_GPT2, "gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "granite-docling", "roberta-bpe", "jina-es", "jina-de")
    | _named(_DIGIT_BY_DIGIT, "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
    | _named(_LLAMA3, "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
    | _named(_GPT4, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4")
    | _named(_QWEN2, "qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "grok-2", "solar-open")
    | _named(_QWEN35, "qwen35")
    | _named(_GPT4O, "gpt-4o", "llama4", "minimax-m2")
    | _named(_TEKKEN, "tekken")
    | _named(_DEEPSEEK3, "deepseek-v3", "hunyuan-dense", "joyai-llm")
    | _named(_DEEPSEEK_CODER, "deepseek-coder")
    | _named(_FALCON, "falcon")
)
"""By the names that `tokenizer.ggml.pre` uses."""
