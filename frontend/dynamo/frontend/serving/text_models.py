"""The text side of each language model (tokenizer, chat template): loaded when the model appears, dropped when it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeAlias

import msgspec

from dynamo.common.errors import DeadlineExceeded, DynamoError, Unavailable
from dynamo.common.generation import Delta, GenerateRequest
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.frontend.preprocess.text import TextDelta, TextRequest

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LONGEST_WAIT_S = 60.0


class Detokenizer(Protocol):
    """The part of `preprocess.pipeline.Detokenizer` that a generation needs."""

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        ...

    def feed(self, delta: Delta) -> TextDelta | None: ...


class Vocabulary(Protocol):
    """The part of `preprocess.tokenizer.Tokenizer` that protocol edges need."""

    async def encode(self, text: str, *, special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of `text`. Raises InvalidRequest, also for more than `max_tokens`."""
        ...

    def decode(self, tokens: list[int], /, *, skip_special_tokens: bool) -> str: ...

    async def decode_prompt(self, tokens: Sequence[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of any number of tokens."""
        ...

    def check_ids(self, tokens: Sequence[int], /) -> None:
        """Raise InvalidRequest if one of `tokens`, which are not empty, is not in the vocabulary."""
        ...


class TextModel(Protocol):
    """The part of `preprocess.pipeline.TextModel` that a generation and the protocol edges need."""

    @property
    def tokenizer(self) -> Vocabulary: ...

    async def render(self, request: TextRequest) -> str:
        """Return the conversation of `request` as the text that the model gets. Raises InvalidRequest."""
        ...

    async def to_generate(self, request: TextRequest) -> GenerateRequest: ...

    def detokenizer(self, request: TextRequest, prompt: GenerateRequest) -> Detokenizer: ...


LoadText: TypeAlias = Callable[[ModelCard], Awaitable[TextModel]]
_Key: TypeAlias = tuple[str, LlmInfo]


def _key(card: ModelCard) -> _Key:
    """Return what cards must agree in to share a tokenizer; memory and load of an instance do not matter for text."""
    assert card.llm is not None
    return card.name, msgspec.structs.replace(
        card.llm, block_size=0, total_blocks=0, max_num_seqs=0, max_batched_tokens=0, data_parallel_size=1, adapters=()
    )


class _Entry:
    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.model: TextModel | None = None
        self.problem = ""
        self.settled = asyncio.Event()
        """Set at the first success or failure."""
        self.task: asyncio.Task[None] | None = None


class TextModels:
    """Loads in the background, for as long as it takes; a model whose files cannot be read now is tried again."""

    def __init__(self, load: LoadText) -> None:
        self._load = load
        self._callbacks: list[Callable[[], None]] = []
        self._entries: dict[_Key, _Entry] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.keep(())
        await self._tasks.__aexit__(None, None, None)  # `error` comes from elsewhere and goes on as it is

    def on_loaded(self, callback: Callable[[], None]) -> None:
        """Call `callback`, synchronously, whenever a model has been loaded."""
        self._callbacks.append(callback)

    def keep(self, cards: Iterable[ModelCard]) -> None:
        """Load the tokenizers of new language models, and drop those of models that are not among `cards`."""
        wanted = {_key(card): card for card in cards if card.llm is not None}
        for key in self._entries.keys() - wanted.keys():
            entry = self._entries.pop(key)
            if entry.task is not None:
                entry.task.cancel()
            entry.problem = entry.problem or "the model is gone"
            entry.settled.set()
        for key, card in wanted.items():
            if key not in self._entries:
                self._start(key, card)

    def is_loaded(self, card: ModelCard) -> bool:
        entry = self._entries.get(_key(card))
        return entry is not None and entry.model is not None

    async def get(self, card: ModelCard, deadline: float | None) -> TextModel:
        """Return the text side of a model; wait while it is loaded for the first time. Raises Unavailable, DeadlineExceeded."""
        entry = self._entries.get(_key(card)) or self._start(_key(card), card)
        if entry.model is not None:
            return entry.model
        longest = asyncio.get_running_loop().time() + _LONGEST_WAIT_S
        try:
            async with asyncio.timeout_at(longest if deadline is None else min(deadline, longest)):
                await entry.settled.wait()
        except TimeoutError:
            if deadline is not None and deadline <= longest:
                raise DeadlineExceeded() from None
            entry.problem = "it is still being loaded"
        if entry.model is None:
            raise Unavailable(f"the tokenizer of model '{card.name}' is not available: {entry.problem}", retryable=False)
        return entry.model

    def _start(self, key: _Key, card: ModelCard) -> _Entry:
        entry = self._entries[key] = _Entry(card)
        entry.task = self._tasks.create_task(self._load_until_loaded(entry), name=f"load the tokenizer of {card.name}")
        return entry

    async def _load_until_loaded(self, entry: _Entry) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                entry.model = await self._load(entry.card)
            except DynamoError as error:
                entry.problem = str(error)
                log.warning("the tokenizer of model %s could not be loaded: %s", entry.card.name, error)
            except Exception:  # a file that its library cannot read must not take the other models down
                entry.problem = "its files cannot be read"
                log.exception("the tokenizer of model %s could not be loaded", entry.card.name)
            entry.settled.set()
            if entry.model is not None:
                for callback in self._callbacks:
                    callback()
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
