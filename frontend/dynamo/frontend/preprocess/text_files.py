"""Tokenizers and chat templates in memory, by the digests of their files. Models with the same file share them.

They are loaded when a model that needs them appears, before it is ready: the library holds the interpreter's lock while it
reads a file, 0.3 s for 128,000 tokens, which no request must cause. Beyond a bound they are only fetched, loaded at first use
and evicted by size, so that neither the number of models nor of tokenizers bounds what a frontend can serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from dynamo.common.errors import EngineError
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.frontend.config import TextOptions
from dynamo.frontend.preprocess.media.media import MediaUrls
from dynamo.frontend.preprocess.offload import Offload, TextThreads
from dynamo.frontend.preprocess.shared import Shared

if TYPE_CHECKING:  # heavy; a fleet of tensor models does without
    from dynamo.frontend.preprocess.pipeline import TextPipeline
    from dynamo.frontend.preprocess.plain import PlainTextModel
    from dynamo.frontend.preprocess.templates.template import ChatTemplate
    from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer

K = TypeVar("K", "_TokenizerKey", "_TemplateKey")
V = TypeVar("V")

_FETCHES_AT_ONCE = 4
_TEMPLATE_BYTES = 64 * 1024
_TEMPLATES_BYTES = 256 * _TEMPLATE_BYTES


class TextFileSource(Protocol):
    """The part of `messaging.jetstream.store.FileStore` that is used."""

    async def get(self, key: str) -> bytes:
        """Return the contents of the file with this sha256 (hexadecimal)."""
        ...

    async def fetch(self, key: str) -> None:
        """Get the file into the local cache, so that `get` need not wait for the network."""
        ...


class _TokenizerKey(msgspec.Struct, frozen=True):
    file: str
    bos_token: str
    add_bos: bool


class _TemplateKey(msgspec.Struct, frozen=True):
    file: str
    bos_token: str
    eos_token: str


class TextFiles:
    """Makes text models of files. Use `open_text_files`."""

    def __init__(self, store: TextFileSource, options: TextOptions, offload: Offload) -> None:
        self._store = store
        self._options = options
        self._offload = offload
        self._media = MediaUrls(options.media)
        self._threads = TextThreads()
        """Threads that all tokenizers share."""
        self._tokenizers = Shared(self._tokenizer, lambda made: made.size_bytes, options.tokenizer_cache_bytes)
        self._templates = Shared(self._template, lambda made: _TEMPLATE_BYTES, _TEMPLATES_BYTES)
        self._fetches = asyncio.Semaphore(_FETCHES_AT_ONCE)
        self._turn = asyncio.Lock()
        self._early = asyncio.Lock()
        """Held while something is loaded that no request needs yet, so that room is looked for before each."""

    def __repr__(self) -> str:
        return f"TextFiles(tokenizers={self._tokenizers}, templates={self._templates})"

    def loaded(self, card: ModelCard) -> TextPipeline | PlainTextModel | None:
        """Return the text side of a language model if all of it is in memory."""
        assert card.llm is not None
        if card.llm.takes_text:
            return self._plain_model(card)
        tokenizer = self._tokenizers.get(_tokenizer_key(card.llm))
        if tokenizer is None:
            return None
        template = self._templates.get(_template_key(card.llm)) if card.llm.chat_template else None
        if card.llm.chat_template and template is None:
            return None
        return self._text_model(card, tokenizer, template)

    async def prepare(self, card: ModelCard) -> None:
        """Fetch the files of a language model, and load them while there is room.

        Raises Unavailable, or EngineError for files that are invalid.
        """
        assert card.llm is not None
        if card.llm.takes_text:
            return
        await self._prepare(_tokenizer_key(card.llm), self._tokenizers)
        if card.llm.chat_template:
            await self._prepare(_template_key(card.llm), self._templates)

    async def load(self, card: ModelCard) -> TextPipeline | PlainTextModel:
        """Return the text side of a language model. Raises Unavailable, and EngineError for a file that is invalid."""
        assert card.llm is not None
        if card.llm.takes_text:
            return self._plain_model(card)
        tokenizer = await self._tokenizers.load(_tokenizer_key(card.llm))
        template = await self._templates.load(_template_key(card.llm)) if card.llm.chat_template else None
        return self._text_model(card, tokenizer, template)

    async def close(self) -> None:
        """Stop loading."""
        await self._tokenizers.close()
        await self._templates.close()

    def _text_model(self, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate | None) -> TextPipeline:
        from dynamo.frontend.preprocess.pipeline import TextPipeline

        return TextPipeline(card, tokenizer, template, self._options.limits, self._offload, self._media)

    def _plain_model(self, card: ModelCard) -> PlainTextModel:
        from dynamo.frontend.preprocess.plain import PlainTextModel

        return PlainTextModel(card, self._options.limits, self._offload, self._media)

    async def _prepare(self, key: K, shared: Shared[K, V]) -> None:
        if key not in shared:
            async with self._fetches:  # each holds a file in memory
                await self._store.fetch(key.file)
        async with self._early:
            if key in shared or shared.has_room:
                await shared.load(key)

    async def _tokenizer(self, key: _TokenizerKey) -> Tokenizer:
        data = await self._store.get(key.file)
        async with self._turn:  # one at a time: the library holds the interpreter's lock while it reads a file
            return await asyncio.to_thread(_read_tokenizer, data, key, self._options.fast_tokenizer, self._threads)

    async def _template(self, key: _TemplateKey) -> ChatTemplate:
        data = await self._store.get(key.file)
        async with self._turn:
            return await asyncio.to_thread(_read_template, data, key, self._options.limits.max_prompt_chars)


@asynccontextmanager
async def open_text_files(store: TextFileSource, options: TextOptions) -> AsyncIterator[TextFiles]:
    """Open the tokenizers and chat templates of one process. Closing stops what is being loaded."""
    files = TextFiles(store, options, Offload())
    try:
        yield files
    finally:
        await files.close()


def _tokenizer_key(info: LlmInfo) -> _TokenizerKey:
    return _TokenizerKey(info.tokenizer, info.bos_token if info.add_bos else "", info.add_bos)


def _template_key(info: LlmInfo) -> _TemplateKey:
    return _TemplateKey(info.chat_template, info.bos_token, info.eos_token)


def _read_tokenizer(data: bytes, key: _TokenizerKey, fast: bool, threads: TextThreads) -> Tokenizer:
    from dynamo.frontend.preprocess.pipeline import Tokenizer  # with all that text models need, which is heavy to import

    return Tokenizer(data, bos_token=key.bos_token, add_bos=key.add_bos, fast=fast, threads=threads)


def _read_template(data: bytes, key: _TemplateKey, max_chars: int) -> ChatTemplate:
    from dynamo.frontend.preprocess.templates.template import ChatTemplate

    try:
        source = data.decode()
    except UnicodeDecodeError as error:
        raise EngineError("the model's chat template is not UTF-8") from error
    return ChatTemplate(source, bos_token=key.bos_token, eos_token=key.eos_token, max_chars=max_chars)
