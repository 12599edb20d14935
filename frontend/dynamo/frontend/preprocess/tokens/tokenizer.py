"""A model's tokenizer: text to token ids, and token ids to pieces of text."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import tokenizers

from dynamo.common.errors import EngineError, HarmfulRequest, InvalidRequest
from dynamo.common.generation import unpack_tokens
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.frontend.preprocess.offload import Offload, TextThreads
from dynamo.frontend.preprocess.tokens.fast_tokens import Encoding, fast_encoders
from dynamo.frontend.preprocess.tokens.tokenizer_file import (
    TokenizerStep,
    check_longest_token,
    failure_of,
    read_tokenizer_file,
)

log = logging.getLogger(__name__)

Piece: TypeAlias = str | bytes
"""The text of a token: a `str` of whole characters, or `bytes` that hold part of a character."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONG_TEXT_CHARS = 2_000
_LONG_TEXT_CHARS_FAST = 20_000
"""Longer texts are encoded in a thread: they take more than about a millisecond. The second is for fastokens."""
_MANY_TOKENS = 2_000
"""More are decoded in a thread."""
_TOKEN_BYTES, _FAST_TOKEN_BYTES = 300, 750
"""Memory that each token of a vocabulary takes, as measured, without and with fastokens."""
_ANCHOR = "a"
"""Decoded in front of a token, since some decoders treat the first token of a text differently."""


class TooManyTokens(InvalidRequest):
    """A text has more tokens than its caller allows."""

    def __init__(self, count: int, max_tokens: int) -> None:
        super().__init__(f"the prompt has {count} tokens; at most {max_tokens} are allowed", param="prompt")
        self.count = count


class Tokenizer:
    """Immutable; may be shared between threads."""

    def __init__(
        self, data: bytes, *, bos_token: str = "", add_bos: bool = False, fast: bool = True, threads: TextThreads | None = None
    ) -> None:
        """`data` is the contents of a `tokenizer.json`. With `add_bos`, every text starts with `bos_token`. Raises EngineError.

        With `fast`, texts are encoded by fastokens if it is installed and gives the same ids. Long texts are encoded and decoded
        in `threads`, which several tokenizers may share.
        """
        try:
            file = read_tokenizer_file(data)
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(data)
        except EngineError:
            raise
        except BaseException as error:
            failure = failure_of(error)
            raise EngineError(f"the model's tokenizer cannot be read: {failure}") from failure
        self._decoders = file.decoders
        self.own_thread = None if file.is_linear else Offload()
        """A thread beside the event loop and those that all tokenizers share, if its patterns may take hours for some text."""
        self._threads = threads or TextThreads()
        if self.own_thread is not None:
            self._threads = TextThreads(self.own_thread)
            log.warning("a tokenizer has unusual patterns, so its texts are encoded one at a time, without fastokens")
        # Truncation and padding left in the file by a training run would change prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocabulary_size = 1 + max(vocabulary.values(), default=-1)
        """One above the highest token id."""
        # Byte-level vocabularies have a character for each byte. 32: a run of spaces, or an unknown word, may be one token.
        self.longest_token_chars = max(32, max(map(len, vocabulary), default=0))
        """Upper bound on the characters of one token."""
        check_longest_token(self.longest_token_chars)
        self._bos: int | None = None
        if add_bos:
            self._bos = self.token_id(bos_token)
            if self._bos is None:
                raise EngineError(f"the model's tokenizer has no token {bos_token!r}, with which each prompt should start")
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        # No bound method: a tokenizer that is part of a reference cycle would stay long after its eviction.
        reference = partial(_encode, self._tokenizer)
        fast_path = fast_encoders(data, reference, added) if fast and file.is_linear else None
        self.is_fast = fast_path is not None
        self._encode = reference if fast_path is None else fast_path.encode
        self._pack = None if fast_path is None else fast_path.pack
        self._long_text_chars = _LONG_TEXT_CHARS_FAST if self.is_fast else _LONG_TEXT_CHARS
        if self.own_thread is not None:
            self._long_text_chars = 0

    @property
    def size_bytes(self) -> int:
        """Estimate of the memory that it takes."""
        return self.vocabulary_size * (_FAST_TOKEN_BYTES if self.is_fast else _TOKEN_BYTES)

    def __repr__(self) -> str:
        return f"Tokenizer(vocabulary_size={self.vocabulary_size}, is_fast={self.is_fast})"

    async def encode(self, text: str, *, special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Return `encode_now(text)`, computed in a thread if the text is long; the tokenizer releases the GIL."""
        if len(text) < self._long_text_chars:
            return self.encode_now(text, special_tokens=special_tokens, max_tokens=max_tokens)
        return await self._threads.run(len(text), self.encode_now, text, special_tokens=special_tokens, max_tokens=max_tokens)

    async def encode_prompt(self, text: str, *, special_tokens: bool, max_tokens: int | None = None) -> Sequence[int]:
        """Return what `encode` does, as an array if the text is long: the event loop packs and frees it faster than a list."""
        if len(text) < self._long_text_chars:
            return self.encode_now(text, special_tokens=special_tokens, max_tokens=max_tokens)
        return await self._threads.run(len(text), self.encode_array, text, special_tokens=special_tokens, max_tokens=max_tokens)

    def encode_array(self, text: str, *, special_tokens: bool, max_tokens: int | None = None) -> array[int]:
        """Return what `encode_now` does, as an array. Raises the same."""
        packed = None if self._pack is None else self._pack(text, special_tokens)
        if packed is None:
            return array("I", self.encode_now(text, special_tokens=special_tokens, max_tokens=max_tokens))
        count = len(packed) // TOKEN_BYTES
        if max_tokens is not None and count > max_tokens:
            raise TooManyTokens(count, max_tokens)
        tokens = unpack_tokens(packed)
        if special_tokens and self._bos is not None and (not tokens or tokens[0] != self._bos):
            tokens.insert(0, self._bos)
        return tokens

    def encode_now(self, text: str, *, special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of `text`. Takes about 0.3 µs per character, or 0.02 µs with fastokens.

        Names of special tokens in the text become these tokens. `special_tokens` adds the ones that the tokenizer puts
        around a text, such as BOS; a rendered conversation has its own. Raises InvalidRequest for text that it cannot
        encode, and TooManyTokens for more than `max_tokens`, before a list is made of them.
        """
        try:
            encoding = self._encode(text, special_tokens)
        except BaseException as error:  # lone surrogates; characters that a vocabulary without an unknown token lacks
            failure = failure_of(error)
            raise InvalidRequest(f"the prompt cannot be tokenized: {failure}", param="prompt") from failure
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokens(len(encoding), max_tokens)
        ids = encoding.ids
        if special_tokens and self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def check_ids(self, tokens: Sequence[int], param: str = "prompt") -> None:
        """Raises InvalidRequest about `param` unless all of `tokens`, of which there is at least one, are in the vocabulary."""
        try:
            least, most = min(tokens), max(tokens)
        except TypeError:
            raise InvalidRequest(f"the token ids in '{param}' must be integers", param=param) from None
        if least < 0 or most >= self.vocabulary_size:
            wrong = least if least < 0 else most
            raise out_of_vocabulary(param, wrong, self.vocabulary_size)

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        try:
            text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise failure_of(error) from None
        return text

    async def decode_prompt(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return `decode(tokens)`, computed in a thread if there are many; the tokenizer releases the GIL."""
        if len(tokens) < _MANY_TOKENS:
            return self.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return await self._threads.run(len(tokens), self._decode_many, tokens, skip_special_tokens)

    def _decode_many(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        # The batch call releases the GIL; `decode` does not.
        try:
            texts: list[str] = self._tokenizer.decode_batch([tokens], skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise failure_of(error) from None
        return texts[0]

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a token, which may be a part of a character; None if they depend on its neighbours."""
        if self.pieces is None:
            return None
        piece = self.pieces[token]
        return piece.encode() if isinstance(piece, str) else piece

    def token_name(self, token: int) -> str:
        """Return a token as the vocabulary has it, such as `ĠHello`; empty if there is none of that id."""
        name: str | None = self._tokenizer.id_to_token(token)
        return name or ""

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    @cached_property
    def pieces(self) -> Mapping[int, Piece] | None:
        """Map each token to its text, unknown ids to ""; None if a token's text depends on its neighbours."""
        return _TokenPieces(partial(_piece, self._tokenizer, self._decoders)) if _is_local(self._decoders) else None

    @cached_property
    def pieces_without_special(self) -> Mapping[int, Piece] | None:
        """`pieces` with "" for special tokens."""
        if self.pieces is None:
            return None
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = frozenset(token.content for token in added if token.special)
        return _TokenPieces(partial(_piece, self._tokenizer, self._decoders, special=special))


def _encode(tokenizer: Any, text: str, special_tokens: bool) -> Encoding:
    # The batch call releases the GIL; `encode` does not.
    encoding: Encoding = tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)[0]
    return encoding


def _piece(tokenizer: Any, decoders: Sequence[TokenizerStep], token: int, special: Collection[str] = ()) -> Piece | None:
    """Return the text of a token, "" for those in `special`; None if there is no such token."""
    content: str | None = tokenizer.id_to_token(token)
    if content is None:
        return None
    if content in special:
        return ""
    if not decoders:
        return " " + content
    kinds = [decoder.type for decoder in decoders]
    if kinds == ["ByteLevel"]:
        return _as_text_if_whole(_bytes_of(content))
    byte = _BYTE_TOKEN.fullmatch(content) if "ByteFallback" in kinds else None
    if byte is not None:
        return _as_text_if_whole(bytes([int(byte[1], 16)]))
    try:
        text: str = tokenizer.decoder.decode([_ANCHOR, content])
    except BaseException as error:
        raise failure_of(error) from None
    return text.removeprefix(_ANCHOR)


class _TokenPieces(dict[int, Piece]):
    """Filled on demand: requests use only part of a vocabulary."""

    def __init__(self, find: Callable[[int], Piece | None]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token: int) -> Piece:
        piece = self._find(token)
        if piece is None:  # not cached, so that invalid ids of an engine take no memory
            return ""
        self[token] = piece
        return piece


def _is_local(decoders: Sequence[TokenizerStep]) -> bool:
    """Return whether the text of each token, except the first of a text, depends on that token alone.

    1. ByteLevel: the bytes of the tokens, one after the other (GPT-2, Llama 3, Qwen, SmolLM2).
    2. Metaspace, WordPiece, Replace, ByteFallback, Strip: each token by itself (Llama 2, Mistral, Gemma, BERT), as long as
       nothing looks at the fused text but a Strip of its beginning.
    """
    kinds = [decoder.type for decoder in decoders]
    if kinds == ["ByteLevel"]:
        return True
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    alone = {"Metaspace", "WordPiece", "Replace", "ByteFallback", "Strip"}
    return set(kinds[:fused]) <= alone and all(
        decoder.type == "Fuse" or (decoder.type == "Strip" and decoder.stop == 0) for decoder in decoders[fused:]
    )


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level vocabularies: printable Latin-1 is itself, other bytes are mapped to U+0100 and above."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _bytes_of(content: str) -> bytes:
    """Return the bytes of a byte-level token; added tokens with other characters are plain UTF-8."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in content])
    except KeyError:
        return content.encode()


def _as_text_if_whole(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def out_of_vocabulary(param: str, token: int, size: int) -> InvalidRequest:
    """Return the error for a token id that a vocabulary of `size` does not have: engines have ended by one as an index."""
    return HarmfulRequest(
        f"'{param}' has the token id {token}, which is out of vocabulary: the model has {size}, from 0 to {size - 1}", param=param
    )
