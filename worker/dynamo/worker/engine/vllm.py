"""vLLM, driven from this process.

    generate() ── AsyncLLM ══ ZMQ ══ vLLM's engine process ── its workers, one per GPU
                                       └── KV events, ZMQ ── KvFollower ── KvState

vLLM schedules, batches and caches. This module translates requests and outputs, publishes what is cached and how busy vLLM is,
and reports when it has died. Prompts come as tokens and outputs leave as tokens: vLLM sees no text.
Images come beside the tokens, and vLLM puts as many as an image takes in the place of the one that stands for it.

Importing this module imports vLLM, which takes seconds.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import ZmqEventPublisher
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import GracefulHTTPError, LoRAAdapterNotFoundError, VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model_cls
from vllm.multimodal.media import ImageMediaIO
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, NotFound, Overloaded, Unavailable, Unsupported
from dynamo.common.generation import Delta, GenerateRequest, Summary
from dynamo.common.kv.events import NO_STEPS, KvState, StepTotals
from dynamo.common.model_card import AdapterReport, LlmInfo, ModelCard, ModelKind, Role
from dynamo.worker.engine.base import Context, EngineLoad
from dynamo.worker.engine.open_requests import OpenRequests, empty_response
from dynamo.worker.engine.vllm_request import MAX_LOGPROBS, OutputReader, check_request, sampling_settings, structured_settings
from dynamo.worker.kv.ports import free_ports
from dynamo.worker.kv.vllm_subscriber import KvSource, following
from dynamo.worker.tokenizers.hugging_face import tokenizer_files

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_NUMBER = "#"
"""Between an adapter's name and a number, in names at vLLM. Names have no such character."""


class _EngineStats:
    """vLLM's statistics of each rank, which its engine process reports after each step. vLLM calls it."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        self.running: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.kv_usage: dict[int, float] = {}
        self.rank_blocks = 0
        """KV blocks of one rank."""
        self.step_ms = 0.0
        self._on_step = on_step
        self._stepped_at: dict[int, float] = {}
        """By rank; none while it has nothing to do."""
        self.totals = NO_STEPS

    # What vLLM calls: it makes a logger for each rank by calling the factory, which is this object itself.

    def __call__(self, config: Any, engine_index: int = 0) -> _EngineStats:
        return self

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        if scheduler_stats is None:
            return
        self.running[engine_idx] = scheduler_stats.num_running_reqs
        self.waiting[engine_idx] = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.kv_usage[engine_idx] = scheduler_stats.kv_cache_usage
        now = time.monotonic()
        stepped_at = self._stepped_at.pop(engine_idx, None)
        if stepped_at is not None:
            self.step_ms = (now - stepped_at) * 1e3
            if iteration_stats is not None:
                self._count(now - stepped_at, scheduler_stats, iteration_stats)
        if scheduler_stats.num_running_reqs:
            self._stepped_at[engine_idx] = now
        self._on_step()

    def _count(self, seconds: float, scheduler_stats: Any, iteration_stats: Any) -> None:
        cached = scheduler_stats.prefix_cache_stats
        self.totals += StepTotals(
            steps=1,
            seconds=seconds,
            # vLLM counts cached tokens when a prompt is scheduled, and the prompt when all of it is computed.
            prefill_tokens=iteration_stats.num_prompt_tokens - (cached.hits if cached is not None else 0),
            sequences=iteration_stats.num_generation_tokens,
            blocks=round(scheduler_stats.kv_cache_usage * self.rank_blocks),
            finished=len(iteration_stats.finished_requests),
            generated=sum(request.num_generation_tokens for request in iteration_stats.finished_requests),
        )

    def log_engine_initialized(self) -> None:
        """Does nothing: load reports say it."""

    def log(self) -> None:
        """Does nothing: load reports say it."""

    def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the requests are aborted, which reports it."""

    def record_admission_rejection(self, reason: str) -> None:
        """Does nothing: the requests are refused, which reports it."""


@dataclass(frozen=True, slots=True)
class VllmArguments:
    """The parsed `--engine-args`."""

    engine: Any
    """AsyncEngineArgs."""
    adapters: dict[str, LoRARequest]


def parse_arguments(text: str) -> VllmArguments:
    """Parse arguments of `vllm serve` for the engine, and `--lora-modules NAME=PATH …`. Raises InvalidRequest."""

    def refuse(message: str) -> NoReturn:
        raise InvalidRequest(f"--engine-args: {message}")

    parser = FlexibleArgumentParser(add_help=False)
    parser.error = refuse
    AsyncEngineArgs.add_cli_args(parser)
    parser.add_argument("--lora-modules", nargs="+", default=[])
    # Requests have priorities, and logprobs name the chosen token and up to MAX_LOGPROBS others.
    parser.set_defaults(scheduling_policy="priority", max_logprobs=MAX_LOGPROBS + 1)
    try:
        parsed = parser.parse_args(shlex.split(text))
    except ValueError as error:  # a quote without its end
        refuse(str(error))
    adapters: dict[str, LoRARequest] = {}
    for number, module in enumerate(parsed.lora_modules, 1):
        name, equals, path = module.partition("=")
        if not (name and equals and path):
            refuse(f"--lora-modules takes NAME=PATH, not {module!r}")
        adapters[name] = LoRARequest(name, number, path)
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    arguments.enable_lora = arguments.enable_lora or bool(adapters)
    return VllmArguments(arguments, adapters)


class VllmEngine:
    """Serves one model with vLLM."""

    def __init__(
        self,
        model: str,
        *,
        name: str = "",
        engine_args: str = "",
        role: Role = Role.AGGREGATED,
        max_num_seqs: int | None = None,
        context_length: int | None = None,
    ) -> None:
        """`model` is a folder in Hugging Face's format, or another name that vLLM takes; `engine_args`: see `parse_arguments`.

        Raises InvalidRequest for arguments that vLLM does not take.
        """
        arguments = parse_arguments(engine_args)
        self._arguments = arguments.engine
        self._arguments.model = model
        self._arguments.max_num_seqs = max_num_seqs or self._arguments.max_num_seqs
        self._arguments.max_model_len = context_length or self._arguments.max_model_len
        self._adapters = arguments.adapters
        self._adapter_names = set(arguments.adapters)
        """Every name that an adapter has had."""
        self._adapter_numbers = count(len(arguments.adapters) + 1)
        self._name = name or (Path(model).resolve().name if Path(model).is_dir() else model)
        self._role = role
        self._files: list[bytes] = []
        self.llm: Any = None
        """vLLM's AsyncLLM, after `start()`."""
        self._defaults: dict[str, Any] = {}
        self._eos: frozenset[int] = frozenset()
        self._context_length = 0
        self._takes_images = False
        self._ranks = 1
        self._total_blocks = 0
        self._traced = False
        self._numbers = count()
        self._requests = OpenRequests()
        self._stats = _EngineStats(self._stepped)
        self._callbacks: list[Callable[[], None]] = []
        self._stack = AsyncExitStack()
        self.kv = KvState()

    def __repr__(self) -> str:
        return f"<VllmEngine {self._name}, open={self._requests.choices}>"

    async def start(self) -> ModelCard:
        """Start vLLM. Raises InvalidRequest for a model or settings that it cannot serve, EngineError when it fails to start."""
        async with AsyncExitStack() as stack:
            # Its engine process binds its sockets there.
            folder = stack.enter_context(TemporaryDirectory(prefix="dynamo-vllm-"))
            try:
                self.llm = await asyncio.to_thread(self._start, folder)
            except asyncio.CancelledError:
                # Loading may take minutes, and the thread cannot be stopped. Without its processes it fails.
                for process in multiprocessing.active_children():
                    process.kill()
                raise
            stack.push_async_callback(asyncio.to_thread, self.llm.shutdown)
            for source in self._kv_sources():
                await stack.enter_async_context(following(source, self.kv, self._stepped, _adapter_name))
            self._stack = stack.pop_all()
        return self._card()

    def _start(self, folder: str) -> Any:
        # The default, fork, is not safe in a process that has threads.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        arguments = self._arguments
        if arguments.kv_events_config is None:
            arguments.kv_events_config = _events_config(folder, arguments.data_parallel_size)
        try:
            config = arguments.create_engine_config()
        except (ValueError, OSError) as error:  # pydantic's, and that of a model that is not there
            raise InvalidRequest(f"vLLM cannot serve {arguments.model}: {error}") from error
        try:
            return AsyncLLM.from_vllm_config(config, stat_loggers=[self._stats], disable_log_stats=arguments.disable_log_stats)
        except Exception as error:
            raise EngineError(f"vLLM failed to start with {arguments.model}: {error}") from error

    def _kv_sources(self) -> list[KvSource]:
        config = self.llm.vllm_config
        events = config.kv_events_config
        if not _publishes(config):
            return []
        offset = ZmqEventPublisher.offset_endpoint_port
        return [
            KvSource(rank, _reachable(offset(events.endpoint, rank)), _reachable(offset(events.replay_endpoint, rank)) or None)
            for rank in range(config.parallel_config.data_parallel_size)
        ]

    def _card(self) -> ModelCard:
        config, tokenizer = self.llm.vllm_config, self.llm.get_tokenizer()
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        self._defaults = model.get_diff_sampling_param()
        self._context_length = model.max_model_len
        self._ranks = config.parallel_config.data_parallel_size
        self._total_blocks = cache.num_gpu_blocks or 0  # of all ranks
        self._stats.rank_blocks = self._total_blocks // self._ranks
        self._takes_images = _takes_images(self.llm.renderer.mm_processor)
        self._traced = config.observability_config.otlp_traces_endpoint is not None
        files = tokenizer_files(tokenizer)
        self._files = [file for file in files if file]
        tokenizer_file, template = files
        eos = _eos_ids(model, tokenizer)
        self._eos = frozenset(eos)
        return ModelCard(
            name=self._name,
            kind=ModelKind.LLM,
            role=self._role,
            backend="vllm",
            llm=LlmInfo(
                context_length=self._context_length,
                tokenizer=sha256(tokenizer_file).hexdigest() if tokenizer_file else "",
                chat_template=sha256(template).hexdigest() if template else "",
                bos_token=getattr(tokenizer, "bos_token", None) or "",
                eos_token=getattr(tokenizer, "eos_token", None) or "",
                eos_token_ids=eos,
                block_size=cache.block_size if _publishes(config) else 0,
                total_blocks=self._total_blocks,
                max_num_seqs=scheduler.max_num_seqs * self._ranks,
                max_batched_tokens=scheduler.max_num_batched_tokens,
                data_parallel_size=self._ranks,
                adapters=tuple(self._adapters),
                adapter_reports=tuple(AdapterReport(name=name, path=lora.path) for name, lora in self._adapters.items()),
                modalities=("image",) if self._takes_images else (),
                image_token=_image_token(model, tokenizer) if self._takes_images else None,
            ),
        ).check()

    def files(self) -> Sequence[bytes]:
        return self._files

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        check_request(request, context_length=self._context_length, ranks=self._ranks, takes_images=self._takes_images)
        if request.stop.max_tokens == 0:
            for part in empty_response(request):
                yield part
            return
        reader = OutputReader(request, self._eos)
        try:
            images = await asyncio.to_thread(_read_images, request.media) if request.media else {}
            with self._requests.opened(request) as opened:
                async with aclosing(self._start_request(request, images, context)) as outputs:
                    async for output in outputs:
                        opened.prefilled()
                        for delta in reader.read(output):
                            opened.generated(delta)
                            yield delta
                yield reader.summary()
        except (EngineDeadError, EngineGenerateError, VLLMClientError, GracefulHTTPError, ValueError) as error:
            raise _to_error(error) from error
        finally:
            self._stepped()

    def _start_request(self, request: GenerateRequest, images: dict[str, object], context: Context) -> Any:
        """Return vLLM's own generator, which aborts the request when it is closed."""
        adapter = None
        if request.adapter and (adapter := self._adapters.get(request.adapter)) is None:
            raise InvalidRequest(f"there is no adapter '{request.adapter}'", param="adapter")
        settings = sampling_settings(request, self._defaults)
        if request.sampling.guided:
            settings["structured_outputs"] = StructuredOutputsParams(**structured_settings(request.sampling.guided))
        prompt: dict[str, object] = {"prompt_token_ids": request.tokens.tolist(), **images}
        if not images:
            prompt["type"] = "token"  # nothing is left to process: of such a prompt vLLM would ignore images
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        return self.llm.generate(
            prompt,
            SamplingParams(output_kind=RequestOutputKind.DELTA, **settings),
            # A request may come a second time, before vLLM has forgotten the first.
            f"{context.request_id}-{next(self._numbers)}",
            lora_request=adapter,
            trace_headers=_trace(context) if self._traced else None,
            priority=-request.priority,  # vLLM serves the lowest number first
            data_parallel_rank=request.data_parallel_rank,
        )

    def load(self) -> EngineLoad:
        """Return the load. vLLM reports after steps only, so requests that ended since the last one are subtracted."""
        if not self._requests.choices:
            return EngineLoad(total_blocks=self._total_blocks, step_ms=self._stats.step_ms, totals=self._stats.totals)
        running = min(sum(self._stats.running.values()), self._requests.choices)
        per_rank = self._total_blocks / self._ranks
        return EngineLoad(
            waiting=self._requests.choices - running,
            running=running,
            active_blocks=round(sum(self._stats.kv_usage.values()) * per_rank),
            total_blocks=self._total_blocks,
            queued_prefill_tokens=self._requests.prefilling_tokens,
            step_ms=self._stats.step_ms,
            totals=self._stats.totals,
        )

    def on_step(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def failure(self) -> EngineError:
        """Return when vLLM's engine process has died, which it does not recover from."""
        while not self.llm.errored:  # noqa: ASYNC110 - vLLM offers no event for it
            await asyncio.sleep(_LOOK_S)
        return EngineError("vLLM's engine process has died")

    @property
    def max_adapters(self) -> int | None:
        lora = self.llm.vllm_config.lora_config
        return None if lora is None else lora.max_cpu_loras or lora.max_loras

    @property
    def reads_adapters_here(self) -> bool:
        return True

    def check_adapters(self) -> None:
        if self.llm.vllm_config.lora_config is None:
            raise Unsupported("vLLM was started without --engine-args '--enable-lora'")

    async def load_adapter(self, name: str, path: str) -> None:
        number = next(self._adapter_numbers)
        former = self._adapters.get(name)
        # vLLM keys cached blocks by this name, and other weights must not share them.
        adapter = LoRARequest(f"{name}{_NUMBER}{number}" if name in self._adapter_names else name, number, path)
        try:
            await self.llm.add_lora(adapter)
        except Exception as error:
            if str(LoRAAdapterNotFoundError(adapter.lora_name, path)) in str(error):
                raise NotFound(str(LoRAAdapterNotFoundError(name, path))) from error
            raise EngineError(str(error)) from error
        self._adapters[name] = adapter
        self._adapter_names.add(name)
        if former is not None:
            await self._remove(former)

    async def unload_adapter(self, name: str) -> None:
        await self._remove(self._adapters.pop(name))

    async def _remove(self, adapter: Any) -> None:
        try:
            await self.llm.remove_lora(adapter.lora_int_id)  # False: vLLM had dropped it for want of room
        except Exception as error:
            raise EngineError(f"vLLM did not unload LoRA adapter '{adapter.lora_name}': {error!r}") from error

    def check_sleep(self) -> None:
        # Without the option vLLM claims to sleep but frees nothing.
        if not self.llm.vllm_config.model_config.enable_sleep_mode:
            raise Unsupported("vLLM was started without --engine-args '--enable-sleep-mode'")

    async def sleep(self) -> None:
        try:
            await self.llm.sleep(level=1)
        except Exception as error:
            raise EngineError(f"vLLM did not fall asleep: {error!r}") from error
        self._forget_cache()

    async def wake(self) -> None:
        try:
            awake = await self.llm.wake_up()
        except Exception as error:
            raise EngineError(f"vLLM did not wake up: {error!r}") from error
        if awake is False:  # some versions return None
            raise EngineError("vLLM did not wake up completely")
        self._forget_cache()  # events of its last steps may have come after it fell asleep

    def _forget_cache(self) -> None:
        """Drop the mirrored cache. vLLM reports that it dropped its own only with the events of its next step."""
        for rank in range(self._ranks):
            self.kv.clear(rank)
        self._stepped()

    async def close(self) -> None:
        await self._stack.aclose()

    def _stepped(self) -> None:
        for callback in self._callbacks:
            callback()


def _to_error(error: Exception) -> DynamoError:
    match error:
        case EngineDeadError():
            return Unavailable("vLLM's engine process has died")  # others can take the request over
        case GracefulHTTPError():
            return Overloaded(str(error) or "vLLM takes no more requests now")
        case EngineGenerateError() if not isinstance(error.__cause__, ValueError):
            return EngineError(f"vLLM failed on the request: {error.__cause__!r}")
        case _:
            return InvalidRequest(str(error.__cause__ or error))


def _takes_images(processor: Any) -> bool:
    """Whether the model takes images, and `--limit-mm-per-prompt` allows one. `processor` is None for a model of text alone."""
    return processor is not None and bool(processor.info.allowed_mm_limits.get("image"))


def _image_token(model: Any, tokenizer: Any) -> int | None:
    """Return the token that a chat template writes for an image; None for models whose placeholder is not one token."""
    placeholder = get_model_cls(model).get_placeholder_str("image", 1)
    tokens = tokenizer.encode(placeholder, add_special_tokens=False) if placeholder else []
    config = model.hf_config
    named = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    token = named if named in tokens else tokens[0] if len(tokens) == 1 else None
    return None if token is None else int(token)


def _read_images(media: Sequence[dict[str, Any]]) -> dict[str, object]:
    """Return the part of vLLM's prompt that has the images. Raises ValueError for one that cannot be read, or is too large.

    Their digests name them in vLLM's caches, also those of blocks.
    """
    reader = ImageMediaIO()
    return {
        "multi_modal_data": {"image": [reader.load_bytes(image["data"]) for image in media]},
        "multi_modal_uuids": {"image": [image["sha256"].hex() for image in media]},
    }


def _adapter_name(lora_name: str) -> str:
    """Return the name of an adapter from its name at vLLM."""
    return lora_name.partition(_NUMBER)[0]


def _trace(context: Context) -> dict[str, str]:
    return {name: context.headers[name] for name in ("traceparent", "tracestate") if name in context.headers}


def _events_config(folder: str, ranks: int) -> Any:
    """Return where KV events are published: sockets in `folder` for one rank, else ports, since vLLM counts up from one."""
    if ranks == 1:
        endpoint, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    else:
        port = free_ports(2 * ranks)
        endpoint, replay = f"tcp://*:{port}", f"tcp://127.0.0.1:{port + ranks}"
    return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay)


def _reachable(endpoint: str | None) -> str:
    """Return the address to connect to, for a socket that is bound to `endpoint`."""
    return (endpoint or "").replace("*", "127.0.0.1")


def _publishes(config: Any) -> bool:
    events = config.kv_events_config
    is_published = events is not None and events.enable_kv_cache_events and events.publisher == "zmq"
    return bool(is_published and config.cache_config.enable_prefix_caching)


def _eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a generation: the tokenizer's first, then those of the model's generation settings."""
    token_ids: dict[int, None] = {}
    if (own := getattr(tokenizer, "eos_token_id", None)) is not None:
        token_ids[own] = None
    configured = model.try_get_generation_config().get("eos_token_id")
    if configured is not None:
        token_ids.update(dict.fromkeys([configured] if isinstance(configured, int) else configured))
    return tuple(token_ids)
