"""The simulated engine in real time: schedulers on the event loop, and streams that take what their steps made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Any
from zlib import crc32

import msgspec
from msgspec.structs import replace

from dynamo.common.errors import EngineError, InvalidRequest, NotFound, Unsupported
from dynamo.common.generation import Delta, GenerateRequest, Summary
from dynamo.common.generation_rules import Feature, check_features
from dynamo.common.kv.events import NO_STEPS, KvState
from dynamo.common.kv.hashes import sequence_hashes, space_hash
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import AdapterReport, LlmInfo, ModelCard, ModelKind, Role
from dynamo.common.process.background import start
from dynamo.worker.engine.base import Context, EngineLoad, TierTotals
from dynamo.worker.engine.open_requests import empty_response
from dynamo.worker.engine.sim.scheduler import Scheduler, SchedulerConfig, SimSequence, StepResult
from dynamo.worker.engine.sim.script import Script
from dynamo.worker.engine.sim.tiers import BlockCache
from dynamo.worker.engine.sim.tokens import state_of

_generated = attrgetter("generated")
_MAX_CHOICES = 128
_MAX_LOGPROBS = 20
_SUPPORTED = frozenset({Feature.GUIDED, Feature.ADAPTER, Feature.CACHE_SALT, Feature.KV_TRANSFER, Feature.LOGPROB_IDS})
_HASH_IN_THREAD_BYTES = 256 * 1024
"""Prompts from this size on are hashed outside of the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    name: str = "sim"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    context_length: int = 131_072
    data_parallel_size: int = 1
    role: Role = Role.AGGREGATED
    seed: int = 0
    default_max_tokens: int = 256
    steps_per_turn: int = 1
    """At infinite speed: steps made before streams are read, so that the deltas of several steps arrive together."""
    tokenizer: bytes = b""
    """A `tokenizer.json`. Empty: only token ids can be served, not text."""
    chat_template: bytes = b""
    eos_token: str = ""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it has from its start."""
    max_adapters: int = 0
    """Adapters that it holds at once; 0: it loads none."""
    calls: bool = False
    """Respond to conversations by calls of their tools: see `Script`."""

    def __post_init__(self) -> None:
        if self.data_parallel_size < 1 or self.steps_per_turn < 1 or self.context_length < 2:
            raise InvalidRequest("data_parallel_size, steps_per_turn and context_length of the simulated engine must be positive")


class _Stream(msgspec.Struct, eq=False):
    """What the steps have made for one request and its handler has not taken yet.

    Bounded by the request's own token limit. A waiting handler is woken once per step, however many choices got a token.
    """

    choices: list[SimSequence] = []
    new: dict[int, list[int]] = {}
    """By choice: tokens not taken yet."""
    finished: list[int] = []
    """Choices that ended and are not reported yet."""
    error: BaseException | None = None
    waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class _SimRank:
    """One data-parallel rank: a scheduler and the task that steps it while there is something to do."""

    def __init__(self, number: int, config: SimConfig, store: BlockCache) -> None:
        self.number = number
        self.scheduler = Scheduler(config.scheduler, store)
        self.awaits_work: asyncio.Future[None] | None = None
        """Set while the task has nothing to do."""
        self.idle = asyncio.Event()
        """Set while no sequence holds a block, or when the rank has ended."""
        self.streams: dict[SimSequence, tuple[_Stream, int]] = {}
        self.step_ms = 0.0
        self.computing_tokens = 0
        """Prompt tokens of the present step, which the scheduler has counted as computed since it began."""
        self.error: EngineError | None = None
        """Why the rank has ended."""
        self.aborted: list[SimSequence] = []
        """Removed before the next step, since the present one still has them in its batch."""

    def wake(self) -> None:
        """There is work."""
        if self.awaits_work is not None and not self.awaits_work.done():
            self.awaits_work.set_result(None)


class SimEngine:
    """An engine that schedules and caches like a real one and invents its tokens. See `SimConfig`."""

    def __init__(self, config: SimConfig, store: BlockCache | None = None) -> None:
        """`store`: the one that it shares with other engines; without, its ranks share one."""
        self.config = config
        self._store = BlockCache(config.scheduler.tiers.shared_blocks) if store is None else store
        self._ranks: list[_SimRank] = []
        self._script = Script(config.tokenizer)
        self._tasks: list[asyncio.Task[None]] = []
        self._adapters: dict[str, int] = {}
        """Seeds of the adapters that were loaded, by name."""
        self.kv = KvState()
        self._step_callbacks: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<SimEngine {self.config.name}, {self.load()}>"

    async def start(self) -> ModelCard:
        config, scheduler = self.config, self.config.scheduler
        self._ranks = [_SimRank(number, config, self._store) for number in range(config.data_parallel_size)]
        self._tasks = [start(self._run(rank), f"scheduler of rank {rank.number}") for rank in self._ranks]
        return ModelCard(
            name=config.name,
            kind=ModelKind.LLM,
            role=config.role,
            backend="sim",
            llm=LlmInfo(
                context_length=config.context_length,
                tokenizer=sha256(config.tokenizer).hexdigest() if config.tokenizer else "",
                chat_template=sha256(config.chat_template).hexdigest() if config.chat_template else "",
                eos_token=config.eos_token,
                eos_token_ids=() if scheduler.eos_token is None else (scheduler.eos_token,),
                block_size=scheduler.block_size if scheduler.prefix_caching else 0,
                total_blocks=scheduler.total_blocks * config.data_parallel_size,
                max_num_seqs=scheduler.max_num_seqs * config.data_parallel_size,
                max_batched_tokens=scheduler.max_batched_tokens,
                data_parallel_size=config.data_parallel_size,
                adapters=config.adapters,
                adapter_reports=tuple(AdapterReport(name=name) for name in config.adapters),
                tool_parser="hermes" if config.calls else "",
                takes_cache_salt=True,
            ),
        ).check()

    def files(self) -> Sequence[bytes]:
        return [file for file in (self.config.tokenizer, self.config.chat_template) if file]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for rank in self._ranks:
            self._fail(rank, EngineError("the engine was closed"))

    def load(self) -> EngineLoad:
        waiting = running = active_blocks = total_blocks = queued_tokens = 0
        step_ms, totals = 0.0, NO_STEPS
        for rank in self._ranks:
            scheduler = rank.scheduler
            waiting += scheduler.waiting
            running += len(scheduler.running)
            active_blocks += scheduler.blocks.active
            total_blocks += scheduler.blocks.total
            queued_tokens += scheduler.queued_prefill_tokens + rank.computing_tokens
            step_ms = max(step_ms, rank.step_ms)
            totals = scheduler.totals if totals is NO_STEPS else totals + scheduler.totals
        return EngineLoad(waiting, running, active_blocks, total_blocks, queued_tokens, step_ms, totals)

    def tiers(self) -> Mapping[Tier, TierTotals]:
        """Return what each tier did, on all ranks."""
        sums: dict[Tier, TierTotals] = {}
        for rank in self._ranks:
            for name, totals in rank.scheduler.tier_totals.items():
                sums[name] = sums[name] + totals if name in sums else totals
        return sums

    def on_step(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each step, on the event loop."""
        self._step_callbacks.append(callback)

    def check_sleep(self) -> None:
        """Sleeping is always possible."""

    async def sleep(self) -> None:
        """Drop the cache. There are no weights to move."""
        for rank in self._ranks:
            await rank.idle.wait()  # what was closed just now is taken out before the next step
            if rank.error is not None:
                raise rank.error
            rank.scheduler.clear()
            for tier in (Tier.GPU, Tier.CPU):
                self.kv.clear(rank.number, tier)
        for callback in self._step_callbacks:
            callback()

    async def wake(self) -> None:
        """There is nothing to restore."""

    @property
    def max_adapters(self) -> int:
        return self.config.max_adapters

    @property
    def reads_adapters_here(self) -> bool:
        return True

    def check_adapters(self) -> None:
        """Raises Unsupported without room for adapters."""
        if not self.config.max_adapters:
            raise Unsupported(
                "the simulated engine was started without the setting 'adapters', the number of adapters that it holds"
            )

    async def load_adapter(self, name: str, path: str) -> None:
        """Read the adapter's configuration. What the model generates with it depends on that."""
        self._adapters[name] = await asyncio.to_thread(_read_adapter, name, path)

    async def unload_adapter(self, name: str) -> None:
        del self._adapters[name]

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        prompt_tokens = request.prompt_tokens
        self._check(request, prompt_tokens)
        if request.stop.max_tokens == 0:
            for part in empty_response(request):
                yield part
            return
        is_scripted = self.config.calls or request.sampling.guided is not None
        script = self._scripted(request) if is_scripted else ()
        config = self.config.scheduler
        space = space_hash(request.adapter, request.cache_salt) if request.adapter or request.cache_salt else None
        hashes: list[int] = []
        if config.prefix_caching and len(request.prompt) >= _HASH_IN_THREAD_BYTES:
            hashes = await asyncio.to_thread(sequence_hashes, request.prompt, config.block_size, space)
        elif config.prefix_caching:
            hashes = sequence_hashes(request.prompt, config.block_size, space)
        rank = self._choose_rank(request.data_parallel_rank, hashes) if len(self._ranks) > 1 else self._ranks[0]
        if rank.error is not None:
            raise rank.error
        stream = _Stream()
        # What is left over ends with the iterator, however it ends: at the end, by an error, or closed by the caller.
        try:
            loop = asyncio.get_running_loop()
            for index in range(request.n):
                sequence = self._sequence(request, prompt_tokens, hashes, space, request.first_choice + index, script)
                rank.scheduler.add(sequence, loop.time())
                rank.streams[sequence] = (stream, index)
                stream.choices.append(sequence)
            if rank.awaits_work is not None:
                rank.wake()
            unfinished = request.n
            while unfinished:
                if not stream.new and not stream.finished:
                    if stream.error is not None:
                        raise stream.error
                    stream.waiter = loop.create_future()
                    await stream.waiter
                    stream.waiter = None
                    continue
                for delta in _take(stream, request.logprobs, request.logprob_token_ids):
                    if delta.finish_reason is not None:
                        unfinished -= 1
                    yield delta
            yield self._summary(stream, request, prompt_tokens)
        finally:
            for sequence in stream.choices:
                if rank.streams.pop(sequence, None) is not None:
                    rank.aborted.append(sequence)
                    rank.wake()

    def _check(self, request: GenerateRequest, tokens: int) -> None:
        """Raises InvalidRequest for a request that this engine cannot run."""
        check_features(request, "sim", _SUPPORTED)
        limit = self.config.context_length
        if tokens >= limit:
            raise InvalidRequest(f"the prompt of {tokens} tokens leaves no room in the context of {limit}", param="prompt")
        if not 1 <= request.n <= _MAX_CHOICES:
            raise InvalidRequest(f"n must be from 1 to {_MAX_CHOICES}", param="n")
        if request.stop.max_tokens is not None and request.stop.max_tokens < 0:
            raise InvalidRequest("max_tokens must be at least 0", param="max_tokens")
        if request.logprobs is not None and not 0 <= request.logprobs <= _MAX_LOGPROBS:
            raise InvalidRequest(f"logprobs must be from 0 to {_MAX_LOGPROBS}", param="logprobs")
        rank = request.data_parallel_rank
        if rank is not None and not 0 <= rank < len(self._ranks):
            raise InvalidRequest(f"there is no data-parallel rank {rank}", param="data_parallel_rank")

    def _scripted(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the tokens to generate for a request; empty: they are invented. Raises InvalidRequest."""
        conversation = request.tokens if self.config.calls else ()
        if request.sampling.guided is not None:
            return self._script.guided(request.sampling.guided, conversation)
        return self._script.response(conversation) if conversation else ()

    def _choose_rank(self, requested: int | None, hashes: Sequence[int]) -> _SimRank:
        """Return the rank with the least work left for this prompt, including the queued requests."""
        if requested is not None:
            return self._ranks[requested]

        def work(rank: _SimRank) -> float:
            scheduler = rank.scheduler
            queued = scheduler.queued_prefill_tokens / scheduler.config.block_size
            return queued + scheduler.blocks.active - scheduler.blocks.cached_prefix(hashes)

        return min(self._ranks, key=work)

    def _sequence(
        self,
        request: GenerateRequest,
        prompt_tokens: int,
        hashes: list[int],
        space: int | None,
        index: int,
        script: tuple[int, ...],
    ) -> SimSequence:
        config = self.config
        room = config.context_length - prompt_tokens
        limit = min(config.default_max_tokens if request.stop.max_tokens is None else request.stop.max_tokens, room)
        transfer: dict[str, Any] = request.kv_transfer or {}
        if transfer.get("do_remote_decode"):
            limit = 1
        stop_tokens = frozenset(request.stop.token_ids)
        eos = config.scheduler.eos_token
        if eos is not None and not request.stop.ignore_eos:
            stop_tokens |= {eos}
        # Each choice and each seed has its own continuation; without a seed, all requests share the engine's.
        adapter = (self._adapters[request.adapter],) if request.adapter in self._adapters else ()
        seed = state_of(config.seed, request.sampling.seed or 0, index, *adapter)
        return SimSequence(
            prompt=bytes(request.prompt),
            hashes=list(hashes),
            limit=limit,
            space=space,
            seed=seed,
            min_tokens=request.stop.min_tokens,
            stop_tokens=stop_tokens,
            ignore_eos=request.stop.ignore_eos,
            priority=request.priority,
            fetched=bool(transfer.get("do_remote_prefill")),
            script=script,
        )

    def _summary(self, stream: _Stream, request: GenerateRequest, prompt_tokens: int) -> Summary:
        first = stream.choices[0]
        queue_s = prefill_s = 0.0
        if first.scheduled_at is not None and first.prefilled_at is not None:
            queue_s = max(0.0, first.scheduled_at - first.arrived_at)
            prefill_s = first.prefilled_at - first.scheduled_at
        offered: dict[str, Any] | None = None
        if request.kv_transfer and request.kv_transfer.get("do_remote_decode"):
            offered = {"do_remote_prefill": True, "do_remote_decode": False, "remote_tokens": prompt_tokens}
        return Summary(
            prompt_tokens=prompt_tokens,
            output_tokens=sum(map(_generated, stream.choices)),
            cached_tokens=first.cached_tokens,
            queue_ms=queue_s * 1e3,
            prefill_ms=prefill_s * 1e3,
            kv_transfer=offered,
        )

    async def _run(self, rank: _SimRank) -> None:
        try:
            await self._step_forever(rank)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(rank, EngineError(f"the simulated engine failed: {error!r}"))
            raise

    async def _step_forever(self, rank: _SimRank) -> None:
        scheduler, loop = rank.scheduler, asyncio.get_running_loop()
        steps = self.config.steps_per_turn
        now = loop.time()
        while True:
            for sequence in rank.aborted:
                scheduler.abort(sequence)
            rank.aborted.clear()
            if not scheduler.busy:
                rank.idle.set()
                rank.awaits_work = loop.create_future()
                await rank.awaits_work
                rank.awaits_work = None
                rank.idle.clear()
                now = loop.time()
                continue
            start = perf_counter()
            result = scheduler.step(now)
            if result.duration_s:
                # Steps follow each other in the simulated time: what waking up late costs is made up for in the next one, unless
                # the loop has fallen far behind.
                now = max(now + result.duration_s, loop.time() - 0.1)
                rank.computing_tokens = result.prefill_tokens
                await asyncio.sleep(now - loop.time())
                rank.computing_tokens = 0
                rank.step_ms = result.duration_s * 1e3
                self._deliver(rank, result)
                continue
            self._deliver(rank, result)
            for _ in range(steps - 1):
                if not scheduler.busy or rank.aborted:
                    break
                self._deliver(rank, scheduler.step(now))
            rank.step_ms = (perf_counter() - start) * 1e3
            await asyncio.sleep(0)
            now = loop.time()

    def _deliver(self, rank: _SimRank, result: StepResult) -> None:
        """Hand one step's tokens to all streams and apply its changes to the cache."""
        woken: dict[_Stream, None] = {}
        streams = rank.streams
        for sequence, token in result.emitted:
            entry = streams.get(sequence)
            if entry is None:
                continue
            stream, index = entry
            tokens = stream.new.get(index)
            if tokens is None:
                stream.new[index] = [token]
            else:
                tokens.append(token)
            woken[stream] = None
        for sequence in result.finished:
            entry = streams.pop(sequence, None)
            if entry is not None:
                entry[0].finished.append(entry[1])
                woken[entry[0]] = None
        for stream in woken:
            waiter = stream.waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
        if result.removed:
            self.kv.remove(result.removed, rank.number)
        if result.stored:
            self.kv.store(result.stored, rank.number)
        for tier, removed, stored in result.tiers:
            self.kv.remove(removed, rank.number, tier)
            self.kv.store(stored, rank.number, tier)
        for callback in self._step_callbacks:
            callback()

    @staticmethod
    def _fail(rank: _SimRank, error: EngineError) -> None:
        rank.error = error
        rank.idle.set()
        for stream, _ in rank.streams.values():
            stream.error = error
            stream.wake()


def _take(stream: _Stream, alternatives: int | None, reported: Sequence[int]) -> list[Delta]:
    """Return one delta per step since the last call. A list, since a generator costs more per token than the rest of this."""
    new, stream.new = stream.new, {}
    finished, stream.finished = stream.finished, []
    deltas: list[Delta] = []
    for index, tokens in new.items():
        if alternatives is None and len(tokens) == 1:  # the short way of an engine that takes its time
            deltas += [Delta((tokens[0],), index)]
        elif alternatives is None:
            deltas += [Delta((token,), index) for token in tokens]
        else:
            deltas += [Delta((token,), index, None, [_logprobs(token, alternatives, reported)]) for token in tokens]
        if index in finished:
            finished.remove(index)
            deltas[-1] = _ended(deltas[-1], stream.choices[index], alternatives, reported)
    if finished:
        deltas += [_ended(Delta((), index), stream.choices[index], alternatives, reported) for index in finished]
    return deltas


def _ended(delta: Delta, choice: SimSequence, alternatives: int | None, reported: Sequence[int]) -> Delta:
    """Return the last delta of a choice."""
    logprobs, stop = delta.logprobs, choice.stop_token
    if alternatives is not None and stop is not None:
        logprobs = [*(logprobs or ()), _logprobs(stop, alternatives, reported)]
    return replace(delta, finish_reason=choice.finish_reason, logprobs=logprobs, stop_token=stop)


def _logprobs(token: int, alternatives: int, reported: Sequence[int]) -> list[tuple[int, float]]:
    """Return invented probabilities: half for the token, halving with each neighbour or, if there are any, reported token."""
    tokens = [token, *reported] if reported else [token ^ rank for rank in range(alternatives + 1)]
    return [(other, -0.6931471805599453 * (rank + 1)) for rank, other in enumerate(tokens)]


def _read_adapter(name: str, path: str) -> int:
    """Return a seed from the configuration of an adapter. Raises NotFound, EngineError."""
    try:
        configuration = (Path(path) / "adapter_config.json").read_bytes()
        msgspec.json.decode(configuration, type=dict[str, Any])
    except OSError as error:
        raise NotFound(f"Loading lora {name} failed: No adapter found for {path}") from error
    except msgspec.MsgspecError as error:
        raise EngineError(f"Loading lora {name} failed: its adapter_config.json cannot be read: {error}") from error
    return crc32(configuration)
