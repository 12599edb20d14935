"""A SentencePiece model (`tokenizer.model`) as a `tokenizer.json`, the form that the library `tokenizers` reads.

| model type | becomes |
|---|---|
| BPE (Llama 2, Mistral, Gemma) | BPE; its merges are derived from the scores |
| Unigram | Unigram with the same scores |

The file is a protobuf message, of which only a few fields matter, so they are read by hand. The file is untrusted: a malformed
one is an InvalidRequest.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dynamo.common.errors import InvalidRequest, Unsupported
from dynamo.common.tensors.protobuf_wire import BYTES, FIXED32, FIXED64, VARINT, read_varint

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces. GGUF files use the same numbers."""

SPACE: Final = "▁"
"""How a space is written in pieces."""
_UNIGRAM, _BPE = 1, 2
_NEVER = -1e9
"""The score of a piece that is never used."""


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceModel:
    pieces: tuple[Piece, ...]
    is_unigram: bool
    byte_fallback: bool
    bos_id: int
    """-1, or another number that is not a piece: there is none."""
    add_prefix: bool
    """Whether a space is put before each text."""
    remove_extra_spaces: bool
    normalization: bytes
    """The table of characters to replace, in the format of both libraries."""

    @classmethod
    def read(cls, data: bytes) -> SentencePieceModel:
        """Parse a model. Raises InvalidRequest if `data` is not a SentencePiece model, Unsupported for models of words or
        characters.
        """
        try:
            fields = list(_fields(memoryview(data)))
            pieces = tuple(_piece(value) for number, value in fields if number == 1 and isinstance(value, memoryview))
            trainer, normalizer = (_message(fields, number) for number in (2, 3))
            normalization = normalizer.get(2, b"")
        except (IndexError, ValueError, struct.error) as error:
            raise InvalidRequest(f"the file is not a SentencePiece model: {error}") from error
        if not pieces or isinstance(normalization, int):
            raise InvalidRequest("the file is not a SentencePiece model: it has no pieces")
        kind = trainer.get(3, _UNIGRAM)
        if kind not in (_UNIGRAM, _BPE):
            raise Unsupported("the SentencePiece model is one of words or characters; understood are BPE and Unigram")
        return cls(
            pieces=pieces,
            is_unigram=kind == _UNIGRAM,
            byte_fallback=bool(trainer.get(35, 0)),
            bos_id=_signed(trainer.get(41, 1)),
            add_prefix=bool(normalizer.get(3, 1)),
            remove_extra_spaces=bool(normalizer.get(4, 1)),
            normalization=bytes(normalization),
        )

    def tokenizer_json(self, *, add_bos: bool = True) -> bytes:
        """Return a `tokenizer.json`. With `add_bos`, texts begin with the model's BOS, if it has one, which nearly all models
        expect.
        """
        vocabulary = {piece.text: id for id, piece in enumerate(self.pieces)}
        if len(vocabulary) < len(self.pieces):
            raise InvalidRequest("the SentencePiece model has one piece twice")
        bos = self.bos_id if add_bos and 0 <= self.bos_id < len(self.pieces) else None
        return tokenizer_json(
            added_tokens=[
                added_token(id, piece.text, special=piece.kind != USER_DEFINED)
                for id, piece in enumerate(self.pieces)
                if _is_added(piece)
            ],
            post_processor=None if bos is None else bos_in_front(self.pieces[bos].text, bos),
            normalizer=_sequence("normalizers", self._normalizers()),
            decoder=decoder(self.add_prefix),
            model=self._unigram() if self.is_unigram else self._bpe(vocabulary),
        )

    def _normalizers(self) -> list[dict[str, Any]]:
        normalizers: list[dict[str, Any]] = []
        if self.normalization:
            normalizers.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(self.normalization).decode()})
        if self.remove_extra_spaces:
            # In this order, or a text with many spaces would be searched in proportion to the square of their number.
            normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
            normalizers.append({"type": "Replace", "pattern": {"Regex": r"\A | \z"}, "content": ""})
        return normalizers + space_normalizers(self.add_prefix)

    def _bpe(self, vocabulary: Mapping[str, int]) -> dict[str, Any]:
        joined = [piece for piece in self.pieces if piece.kind == NORMAL or (piece.kind == USER_DEFINED and not _is_added(piece))]
        scores = {piece.text: piece.score for piece in joined}
        return bpe(
            vocabulary,
            merges_from_scores(scores, scores),
            unknown=next((piece.text for piece in self.pieces if piece.kind == UNKNOWN), None),
            byte_fallback=self.byte_fallback,
            fuse_unknown=True,
        )

    def _unigram(self) -> dict[str, Any]:
        return {
            "type": "Unigram",
            "unk_id": next((id for id, piece in enumerate(self.pieces) if piece.kind == UNKNOWN), None),
            "vocab": [(piece.text, _NEVER if piece.kind == UNUSED else piece.score) for piece in self.pieces],
            "byte_fallback": self.byte_fallback,
        }


# Parts of a tokenizer.json, for GGUF files too


def tokenizer_json(*, added_tokens: list[dict[str, Any]], post_processor: dict[str, Any] | None, **parts: Any) -> bytes:
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "pre_tokenizer": None,
        "post_processor": post_processor,
        **parts,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def added_token(id: int, text: str, *, special: bool) -> dict[str, Any]:
    sides = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id, "content": text, **sides, "special": special}


def bos_in_front(bos: str, id: int) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
    }


def space_normalizers(add_prefix: bool) -> list[dict[str, Any]]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return [{"type": "Prepend", "prepend": SPACE}, replace] if add_prefix else [replace]


def decoder(add_prefix: bool) -> dict[str, Any]:
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _sequence("decoders", decoders)


def bpe(
    vocabulary: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    unknown: str | None = None,
    byte_fallback: bool = False,
    fuse_unknown: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fuse_unknown,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def merges_from_scores(tokens: Iterable[str], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the merges. SentencePiece joins the neighbours whose union scores best, which equals merges ranked by that score."""
    ranked = [
        (-scores[token], token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    ranked.sort(key=lambda item: item[0])
    return [(left, right) for _, left, right in ranked]


def _sequence(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", name: parts}


def _is_added(piece: Piece) -> bool:
    """Return whether a piece is an added token, which is matched in the raw text and so cannot contain spaces."""
    return bool(piece.text) and (piece.kind in (UNKNOWN, CONTROL) or (piece.kind == USER_DEFINED and SPACE not in piece.text))


# The message


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield field numbers and values. Raises ValueError, IndexError."""
    position, end = 0, len(data)
    while position < end:
        key, position = read_varint(data, position)
        wire = key & 7
        if wire == VARINT:
            number, position = read_varint(data, position)
            yield key >> 3, number
            continue
        if wire == BYTES:
            size, position = read_varint(data, position)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"a field of wire type {wire}")
        if size > end - position:
            raise ValueError(f"a field of {size} bytes, {size - (end - position)} more than there are")
        yield key >> 3, data[position : position + size]
        position += size


def _message(fields: Sequence[tuple[int, int | memoryview]], number: int) -> dict[int, int | memoryview]:
    """Return the fields of the message in field `number`; none if it is missing."""
    data = next((value for field, value in fields if field == number), None)
    return dict(_fields(data)) if isinstance(data, memoryview) else {}


def _piece(data: memoryview) -> Piece:
    fields = dict(_fields(data))
    text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, NORMAL)
    if isinstance(text, int) or isinstance(score, int) or not isinstance(kind, int):
        raise ValueError("a piece that is none")
    return Piece(bytes(text).decode(), struct.unpack("<f", score)[0], kind)


def _signed(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise InvalidRequest("the file is not a SentencePiece model: an id is not a number")
    return value - (1 << 64) if value >= 1 << 63 else value
