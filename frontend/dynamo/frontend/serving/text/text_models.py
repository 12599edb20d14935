"""The text side of each language model (tokenizer, chat template): prepared when the model appears, loaded when it is used."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import msgspec

from dynamo.common.errors import DeadlineExceeded, DynamoError, Unavailable
from dynamo.common.generation import Delta, GenerateRequest
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.frontend.preprocess.text_files import TextFiles

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LONGEST_WAIT_S = 60.0


class DeltaDecoder(Protocol):
    """The part of `preprocess.tokens.detokenize.Detokenizer` that a generation needs."""

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        ...

    def feed(self, delta: Delta) -> TextDelta | None: ...


class Vocabulary(Protocol):
    """The part of `preprocess.tokens.tokenizer.Tokenizer` that protocol edges need."""

    async def encode(self, text: str, *, special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of `text`. Raises InvalidRequest, also for more than `max_tokens`."""
        ...

    def decode(self, tokens: list[int], /, *, skip_special_tokens: bool) -> str: ...

    async def decode_prompt(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of any number of tokens."""
        ...

    def token_bytes(self, token: int, /) -> bytes | None:
        """Return the bytes of a token, which may be a part of a character; None if they depend on its neighbours."""
        ...

    def token_name(self, token: int, /) -> str:
        """Return a token as the vocabulary has it, such as `ĠHello`."""
        ...

    def check_ids(self, tokens: Sequence[int], param: str = "prompt", /) -> None:
        """Raise InvalidRequest if one of `tokens`, which are not empty, is not in the vocabulary."""
        ...


class TextModel(Protocol):
    """The part of `preprocess.pipeline.TextPipeline` that a generation and the protocol edges need."""

    @property
    def tokenizer(self) -> Vocabulary: ...

    @property
    def template_source(self) -> str:
        """The chat template as it was read; empty if the model has none."""
        ...

    async def render(self, request: TextRequest) -> str:
        """Return the conversation of `request` as the text that the model gets. Raises InvalidRequest."""
        ...

    async def to_generate(self, request: TextRequest, key: str = "") -> GenerateRequest: ...

    def detokenizer(self, request: TextRequest, prompt: GenerateRequest) -> DeltaDecoder: ...


_Key: TypeAlias = tuple[str, LlmInfo]


def _key(card: ModelCard) -> _Key:
    """Return what cards must agree in to share a text model; memory and load of an instance do not matter for text."""
    assert card.llm is not None
    return card.name, msgspec.structs.replace(
        card.llm,
        block_size=0,
        total_blocks=0,
        max_num_seqs=0,
        max_batched_tokens=0,
        data_parallel_size=1,
        adapters=(),
        adapter_reports=(),
        loads_adapters=False,
    )


class _ModelText:
    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.is_ready = False
        """Whether the files are at hand, and the last load did not fail."""
        self.problem = ""
        self.settled = asyncio.Event()
        """Set at the first success or failure."""
        self.task: asyncio.Task[None] | None = None


class TextModels:
    """Prepares models in the background, for as long as it takes, and loads them when a request needs them.

    A model whose files cannot be fetched or read is not ready, and tried again.
    """

    def __init__(self, loader: TextFiles) -> None:
        self._loader = loader
        self._callbacks: list[Callable[[str], None]] = []
        self._entries: dict[_Key, _ModelText] = {}
        self._registrations: Counter[_Key] = Counter()
        """How many registrations share each text side."""
        self._unregistered: set[_Key] = set()
        """Text models loaded for a request to a model that has no registration; dropped at the next change."""
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for key in list(self._entries):
            self._drop(key)
        await self._tasks.__aexit__(None, None, None)  # `error` comes from elsewhere and goes on as it is

    def on_change(self, callback: Callable[[str], None]) -> None:
        """Call `callback`, synchronously, with the name of each model that has become ready, or is not ready any more."""
        self._callbacks.append(callback)

    def follow(self, added: Iterable[ModelCard] = (), removed: Iterable[ModelCard] = ()) -> None:
        """Prepare new language models, and forget those whose last registration was removed."""
        new = [(_key(card), card) for card in added if card.llm is not None]
        gone = [_key(card) for card in removed if card.llm is not None]
        self._registrations.update(key for key, _ in new)
        self._registrations.subtract(gone)
        for key in dict.fromkeys((*gone, *self._unregistered)):
            if not self._registrations[key]:
                del self._registrations[key]
                self._drop(key)
        self._unregistered.clear()
        for key, card in new:
            if key not in self._entries:
                self._add(key, card)

    def _drop(self, key: _Key) -> None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        if entry.task is not None:
            entry.task.cancel()
        entry.is_ready = False
        entry.problem = entry.problem or "the model is gone"
        entry.settled.set()

    def is_ready(self, card: ModelCard) -> bool:
        """Return whether the model's files are at hand, and could be read if they have been read."""
        entry = self._entries.get(_key(card))
        return entry is not None and entry.is_ready

    async def get(self, card: ModelCard, deadline: float | None) -> TextModel:
        """Return the text side of a model, loaded now if it is not in memory. Raises Unavailable, DeadlineExceeded."""
        if (loaded := self._loader.loaded(card)) is not None:
            return loaded
        key = _key(card)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._add(key, card)
            self._unregistered.add(key)
        longest = asyncio.get_running_loop().time() + _LONGEST_WAIT_S
        try:
            async with asyncio.timeout_at(longest if deadline is None else min(deadline, longest)):
                await entry.settled.wait()
                if entry.is_ready and (model := await self._load(entry)) is not None:
                    return model
        except TimeoutError:
            if deadline is not None and deadline <= longest:
                raise DeadlineExceeded() from None
            raise _unavailable(card, "it is still being loaded") from None
        raise _unavailable(card, entry.problem)

    def _add(self, key: _Key, card: ModelCard) -> _ModelText:
        entry = self._entries[key] = _ModelText(card)
        self._try_until_ready(entry, self._loader.prepare)
        return entry

    async def _load(self, entry: _ModelText) -> TextModel | None:
        try:
            return await self._loader.load(entry.card)
        except Exception as error:
            self._failed(entry, error)
        if entry.is_ready:  # the first request that fails
            entry.is_ready = False
            self._try_until_ready(entry, self._loader.load, _FIRST_PAUSE_S)
            self._changed(entry)
        return None

    def _try_until_ready(
        self, entry: _ModelText, attempt: Callable[[ModelCard], Awaitable[object]], pause_s: float = 0.0
    ) -> None:
        work = self._until_ready(entry, attempt, pause_s)
        entry.task = self._tasks.create_task(work, name=f"load the tokenizer of {entry.card.name}")

    async def _until_ready(self, entry: _ModelText, attempt: Callable[[ModelCard], Awaitable[object]], pause_s: float) -> None:
        while not entry.is_ready:
            await asyncio.sleep(pause_s)
            pause_s = min(max(pause_s * 2, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            try:
                await attempt(entry.card)
                entry.is_ready = True
            except Exception as error:  # a file that its library cannot read must not take the other models down
                self._failed(entry, error)
            entry.settled.set()
        self._changed(entry)

    def _failed(self, entry: _ModelText, error: Exception) -> None:
        if isinstance(error, DynamoError):
            entry.problem = str(error)
            log.warning("the tokenizer of model %s could not be loaded: %s", entry.card.name, error)
        else:
            entry.problem = "its files cannot be read"
            log.error("the tokenizer of model %s could not be loaded", entry.card.name, exc_info=error)

    def _changed(self, entry: _ModelText) -> None:
        for callback in self._callbacks:
            callback(entry.card.name)


def _unavailable(card: ModelCard, problem: str) -> Unavailable:
    return Unavailable(f"the tokenizer of model '{card.name}' is not available: {problem}", retryable=False)
