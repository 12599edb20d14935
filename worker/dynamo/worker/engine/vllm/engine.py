"""vLLM, driven from this process.

    generate() ── AsyncLLM ══ ZMQ ══ vLLM's engine process, one per rank ── its workers, one per GPU
                                       └── KV events, ZMQ ── KvFollower ── KvState

vLLM schedules, batches and caches. This module translates requests and outputs, publishes what is cached and how busy vLLM is,
and reports when it has died. Prompts come as tokens and outputs leave as tokens: vLLM sees no text.
Each data-parallel rank is an engine of its own, and so an instance that routers choose by what it caches and how busy it is.
Images come beside the tokens, and vLLM puts as many as an image takes in the place of the one that stands for it.

Importing this module imports vLLM, which takes seconds.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
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
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal.media import ImageMediaIO
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, NotFound, Overloaded, Unavailable, Unsupported
from dynamo.common.generation import Delta, GenerateRequest, Summary
from dynamo.common.kv.events import KvState
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import AdapterReport, LlmInfo, ModelCard, ModelKind, Role
from dynamo.common.process.ports import first_of_free_ports
from dynamo.worker.engine.base import Context, EngineLoad, TierTotals
from dynamo.worker.engine.open_requests import OpenRequests, empty_response
from dynamo.worker.engine.vllm.ranks import LoadedAdapter, RankStats, Shared, SharedAdapters, SharedSleep, adapter_name
from dynamo.worker.engine.vllm.request import MAX_LOGPROBS, OutputReader, check_request, sampling_settings, structured_settings
from dynamo.worker.kv.vllm_subscriber import KvSource, following
from dynamo.worker.tokenizers.hugging_face import tokenizer_files

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_OFFLOADING = "OffloadingConnector"
"""vLLM's connector that keeps blocks beside the GPU."""


@dataclass(frozen=True, slots=True)
class VllmArguments:
    """The parsed `--engine-args`."""

    engine: Any
    """AsyncEngineArgs."""
    adapters: dict[str, str]
    """Paths by name."""


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
    adapters: dict[str, str] = {}
    for module in parsed.lora_modules:
        name, equals, path = module.partition("=")
        if not (name and equals and path):
            refuse(f"--lora-modules takes NAME=PATH, not {module!r}")
        adapters[name] = path
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    arguments.enable_lora = arguments.enable_lora or bool(adapters)
    if arguments.data_parallel_rank is not None or arguments.data_parallel_external_lb or arguments.data_parallel_hybrid_lb:
        refuse(
            "vLLM runs all of its data-parallel ranks here: give --data-parallel-size, and none of the options for a part of them"
        )
    return VllmArguments(arguments, adapters)


class SharedVllm:
    """One AsyncLLM with all of its data-parallel ranks."""

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
        parsed = parse_arguments(engine_args)
        self._arguments = parsed.engine
        self._arguments.model = model
        self._arguments.max_num_seqs = max_num_seqs or self._arguments.max_num_seqs
        self._arguments.max_model_len = context_length or self._arguments.max_model_len
        self.name = name or (Path(model).resolve().name if Path(model).is_dir() else model)
        self.role = role
        self.ranks: int = self._arguments.data_parallel_size
        self.served: set[int] = set()
        """Ranks that have an engine."""
        self.llm: Any = None
        """vLLM's AsyncLLM, while it is open."""
        self.stats = [RankStats() for _ in range(self.ranks)]
        self.kv = [KvState() for _ in range(self.ranks)]
        """What each rank caches."""
        self.numbers = count()
        """For ids of requests, which ranks must not share."""
        self.adapters = SharedAdapters(parsed.adapters, self.ranks, self._load_adapter, self._unload_adapter)
        self.sleeping = SharedSleep(self.ranks, self._fall_asleep, self._wake_up)
        self.opening = Shared(self._open)

    def __repr__(self) -> str:
        return f"<SharedVllm {self.name}, ranks={self.ranks}>"

    def only_transcribes(self) -> bool:
        """Return whether it is a model of speech; also False for one that cannot be read, as starting it will say."""
        try:
            config = self._arguments.create_model_config()
        except (ValueError, OSError):
            return False
        return bool(ModelRegistry.is_transcription_only_model(config.architectures, config))

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        with TemporaryDirectory(prefix="dynamo-vllm-") as folder:  # its engine process binds its sockets there
            try:
                self.llm = await asyncio.to_thread(self._start, folder)
            except asyncio.CancelledError:
                # Loading may take minutes, and the thread cannot be stopped. Without its processes it fails.
                for process in multiprocessing.active_children():
                    process.kill()
                raise
            try:
                yield
            finally:
                await asyncio.to_thread(self.llm.shutdown)

    def _start(self, folder: str) -> Any:
        # The default, fork, is not safe in a process that has threads.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        arguments = self._arguments
        if arguments.kv_events_config is None:
            arguments.kv_events_config = _events_config(folder, self.ranks)
        try:
            config = arguments.create_engine_config()
        except (ValueError, OSError) as error:  # pydantic's, and that of a model that is not there
            raise InvalidRequest(f"vLLM cannot serve {arguments.model}: {error}") from error
        if config.kv_transfer_config is not None and config.kv_transfer_config.kv_connector == _OFFLOADING:
            # Without it, the events of its tiers do not say which tokens a block has.
            config.kv_transfer_config.kv_connector_extra_config.setdefault("self_describing_kv_events", True)
            for stats in self.stats:
                stats.offloads(config.cache_config.block_size)
        try:
            return AsyncLLM.from_vllm_config(
                config, stat_loggers=[self._stat_logger], disable_log_stats=arguments.disable_log_stats
            )
        except Exception as error:
            raise EngineError(f"vLLM failed to start with {arguments.model}: {error}") from error

    def _stat_logger(self, config: Any, engine_index: int = 0) -> RankStats:
        return self.stats[engine_index]

    def kv_source(self, rank: int) -> KvSource | None:
        """Return where a rank publishes; None without prefix caching."""
        config = self.llm.vllm_config
        events = config.kv_events_config
        if not _publishes(config):
            return None
        offset = ZmqEventPublisher.offset_endpoint_port
        return KvSource(0, _reachable(offset(events.endpoint, rank)), _reachable(offset(events.replay_endpoint, rank)) or None)

    async def _load_adapter(self, adapter: LoadedAdapter) -> None:
        try:
            await self.llm.add_lora(_lora_request(adapter))
        except Exception as error:
            if str(LoRAAdapterNotFoundError(adapter.name, adapter.path)) in str(error):
                raise NotFound(str(LoRAAdapterNotFoundError(adapter_name(adapter.name), adapter.path))) from error
            raise EngineError(str(error)) from error

    async def _unload_adapter(self, adapter: LoadedAdapter) -> None:
        try:
            await self.llm.remove_lora(adapter.number)  # False: vLLM had dropped it for want of room
        except Exception as error:
            raise EngineError(f"vLLM did not unload LoRA adapter '{adapter.name}': {error!r}") from error

    async def _fall_asleep(self) -> None:
        try:
            await self.llm.sleep(level=1)
        except Exception as error:
            raise EngineError(f"vLLM did not fall asleep: {error!r}") from error
        self._forget_caches()

    async def _wake_up(self) -> None:
        try:
            awake = await self.llm.wake_up()
        except Exception as error:
            raise EngineError(f"vLLM did not wake up: {error!r}") from error
        if awake is False:  # some versions return None
            raise EngineError("vLLM did not wake up completely")
        self._forget_caches()  # events of its last steps may have come after it fell asleep

    def _forget_caches(self) -> None:
        """Drop the mirrored caches. vLLM reports that it dropped its own only with the events of its next step."""
        for kv, stats in zip(self.kv, self.stats, strict=True):
            kv.clear()
            stats.stepped()


class VllmEngine:
    """Serves one model with vLLM, on one of its data-parallel ranks."""

    def __init__(self, vllm: SharedVllm, rank: int = 0) -> None:
        self.vllm = vllm
        self.kv = vllm.kv[rank]
        vllm.served.add(rank)
        self._rank = rank
        self._stats = vllm.stats[rank]
        self._files: list[bytes] = []
        self._defaults: dict[str, Any] = {}
        self._eos: frozenset[int] = frozenset()
        self._context_length = 0
        self._takes_images = False
        self._traced = False
        self._requests = OpenRequests()
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<VllmEngine {self.vllm.name}, rank={self._rank}, open={self._requests.choices}>"

    def ranks(self) -> Sequence[VllmEngine]:
        return [self, *(VllmEngine(self.vllm, rank) for rank in range(1, self.vllm.ranks))]

    async def start(self) -> ModelCard:
        """Start vLLM, unless another rank has. Raises InvalidRequest for a model or settings that it cannot serve.

        Raises EngineError when it fails to start.
        """
        if len(self.vllm.served) < self.vllm.ranks:
            raise InvalidRequest(
                f"vLLM has {self.vllm.ranks} data-parallel ranks: serve each of them, as `split_ranks` returns them"
            )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.vllm.opening.opened())
            source = self.vllm.kv_source(self._rank)
            if source is not None:
                await stack.enter_async_context(following(source, self.kv, self._stats.stepped, adapter_name))
            card = self._card()
            self._stack = stack.pop_all()
        return card

    def _card(self) -> ModelCard:
        llm = self.vllm.llm
        config, tokenizer = llm.vllm_config, llm.get_tokenizer()
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        self._defaults = model.get_diff_sampling_param()
        self._context_length = model.max_model_len
        self._stats.total_blocks = (cache.num_gpu_blocks or 0) // self.vllm.ranks  # vLLM says those of all ranks
        self._takes_images = _takes_images(llm.renderer.mm_processor)
        self._traced = config.observability_config.otlp_traces_endpoint is not None
        files = tokenizer_files(tokenizer)
        self._files = [file for file in files if file]
        tokenizer_file, template = files
        eos = _eos_ids(model, tokenizer)
        self._eos = frozenset(eos)
        adapters = self.vllm.adapters.paths(self._rank)
        return ModelCard(
            name=self.vllm.name,
            kind=ModelKind.LLM,
            role=self.vllm.role,
            backend="vllm",
            llm=LlmInfo(
                context_length=self._context_length,
                tokenizer=sha256(tokenizer_file).hexdigest() if tokenizer_file else "",
                chat_template=sha256(template).hexdigest() if template else "",
                bos_token=getattr(tokenizer, "bos_token", None) or "",
                eos_token=getattr(tokenizer, "eos_token", None) or "",
                eos_token_ids=eos,
                block_size=cache.block_size if _publishes(config) else 0,
                total_blocks=self._stats.total_blocks,
                max_num_seqs=scheduler.max_num_seqs,
                max_batched_tokens=scheduler.max_num_batched_tokens,
                adapters=tuple(adapters),
                adapter_reports=tuple(AdapterReport(name=name, path=path) for name, path in adapters.items()),
                takes_cache_salt=True,
                modalities=("image",) if self._takes_images else (),
                image_token=_image_token(model, tokenizer) if self._takes_images else None,
            ),
        ).check()

    def files(self) -> Sequence[bytes]:
        return self._files

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        check_request(request, context_length=self._context_length, takes_images=self._takes_images)
        if request.stop.max_tokens == 0:
            for part in empty_response(request):
                yield part
            return
        reader = OutputReader(request, self._eos)
        try:
            images = await asyncio.to_thread(_read_images, request.media) if request.media else {}
            with self._requests.opened(request) as opened:
                self._stats.request_sent()
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
            self._stats.stepped()

    def _start_request(self, request: GenerateRequest, images: dict[str, object], context: Context) -> Any:
        """Return vLLM's own generator, which aborts the request when it is closed."""
        adapter = None
        if request.adapter and (adapter := self.vllm.adapters.used(self._rank, request.adapter)) is None:
            raise InvalidRequest(f"there is no adapter '{request.adapter}'", param="adapter")
        settings = sampling_settings(request, self._defaults)
        if request.sampling.guided:
            settings["structured_outputs"] = StructuredOutputsParams(**structured_settings(request.sampling.guided))
        prompt: dict[str, object] = {"prompt_token_ids": request.tokens.tolist(), **images}
        if not images:
            prompt["type"] = "token"  # nothing is left to process: of such a prompt vLLM would ignore images
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        return self.vllm.llm.generate(
            prompt,
            SamplingParams(output_kind=RequestOutputKind.DELTA, **settings),
            # A request may come a second time, also to another rank, before vLLM has forgotten the first.
            f"{context.request_id}-{next(self.vllm.numbers)}",
            lora_request=None if adapter is None else _lora_request(adapter),
            trace_headers=_trace(context) if self._traced else None,
            priority=-request.priority,  # vLLM serves the lowest number first
            data_parallel_rank=self._rank if self.vllm.ranks > 1 else None,
        )

    def load(self) -> EngineLoad:
        """Return the load. vLLM reports after steps only, so requests that ended since the last one are subtracted."""
        stats, choices = self._stats, self._requests.choices
        if not choices:
            return EngineLoad(total_blocks=stats.total_blocks, step_ms=stats.step_ms, totals=stats.totals)
        running = min(stats.running, choices)
        return EngineLoad(
            waiting=choices - running,
            running=running,
            active_blocks=round(stats.kv_usage * stats.total_blocks),
            total_blocks=stats.total_blocks,
            queued_prefill_tokens=self._requests.prefilling_tokens,
            step_ms=stats.step_ms,
            totals=stats.totals,
        )

    def tiers(self) -> Mapping[Tier, TierTotals]:
        """Return what each tier did, which vLLM counts in tokens; nothing unless it offloads blocks."""
        return self._stats.tiers

    def on_step(self, callback: Callable[[], None]) -> None:
        self._stats.callbacks.append(callback)

    async def failure(self) -> EngineError:
        """Return when vLLM's engine process has died, which it does not recover from."""
        return await died(self.vllm)

    @property
    def max_adapters(self) -> int | None:
        lora = self.vllm.llm.vllm_config.lora_config
        return None if lora is None else lora.max_cpu_loras or lora.max_loras

    @property
    def reads_adapters_here(self) -> bool:
        return True

    def check_adapters(self) -> None:
        if self.vllm.llm.vllm_config.lora_config is None:
            raise Unsupported("vLLM was started without --engine-args '--enable-lora'")

    async def load_adapter(self, name: str, path: str) -> None:
        await self.vllm.adapters.load(self._rank, name, path)

    async def unload_adapter(self, name: str) -> None:
        await self.vllm.adapters.unload(self._rank, name)

    def check_sleep(self) -> None:
        # Without the option vLLM claims to sleep but frees nothing.
        if not self.vllm.llm.vllm_config.model_config.enable_sleep_mode:
            raise Unsupported("vLLM was started without --engine-args '--enable-sleep-mode'")

    async def sleep(self) -> None:
        await self.vllm.sleeping.sleep(self._rank)

    async def wake(self) -> None:
        await self.vllm.sleeping.wake(self._rank)

    async def close(self) -> None:
        await self._stack.aclose()


async def died(vllm: SharedVllm) -> EngineError:
    """Return when the engine process of an open vLLM has died."""
    while not vllm.llm.errored:  # noqa: ASYNC110 - vLLM offers no event for it
        await asyncio.sleep(_LOOK_S)
    return EngineError("vLLM's engine process has died")


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


def _lora_request(adapter: LoadedAdapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.number, adapter.path)


def _trace(context: Context) -> dict[str, str]:
    return {name: context.headers[name] for name in ("traceparent", "tracestate") if name in context.headers}


def _events_config(folder: str, ranks: int) -> Any:
    """Return where KV events are published: sockets in `folder` for one rank, else ports, since vLLM counts up from one."""
    if ranks == 1:
        endpoint, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
    else:
        port = first_of_free_ports(2 * ranks)
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
