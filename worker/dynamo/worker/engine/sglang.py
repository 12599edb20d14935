"""SGLang, driven from this process.

    generate() ── sglang.Engine ══ ZMQ ══ its scheduler and detokenizer processes, one scheduler per GPU
                                            └── KV events, ZMQ ── KvFollower ── KvState

SGLang schedules, batches and caches. Prompts come as tokens and outputs leave as tokens, in the form of its `/generate`, so
requests and responses are those of `remote.sglang`. Written for the sources of SGLang 0.5.23 and tested against a module that
behaves as they say: SGLang needs a GPU, and was not run.

Importing this module imports SGLang, which takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shlex
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from sglang import Engine
from sglang.srt.server_args import prepare_server_args

from dynamo.common.errors import EngineError, InvalidRequest, Unavailable
from dynamo.common.generation import Delta, GenerateRequest, Summary
from dynamo.common.generation_rules import Feature
from dynamo.common.kv.events import KvState
from dynamo.common.lifecycle import restore_signals
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.process.background import awaited
from dynamo.common.process.ports import first_of_free_ports
from dynamo.worker.engine.base import Context, EngineLoad
from dynamo.worker.engine.open_requests import OpenRequests, empty_response
from dynamo.worker.engine.remote.sglang import FEATURES, Event, SglangReader, request_fields
from dynamo.worker.engine.remote.tokens import check_tokens
from dynamo.worker.kv.vllm_subscriber import KvSource, following
from dynamo.worker.tokenizers.hugging_face import tokenizer_files


class SglangEngine:
    """Serves one model with SGLang, on one data-parallel rank."""

    def __init__(
        self,
        model: str,
        *,
        name: str = "",
        engine_args: str = "",
        max_num_seqs: int | None = None,
        context_length: int | None = None,
    ) -> None:
        """`model` is a folder in Hugging Face's format, or another name that SGLang takes; `engine_args`: of its server.

        Raises InvalidRequest for arguments that SGLang does not take.
        """
        self._model = model
        port = first_of_free_ports(2)
        self._kv_source = KvSource(0, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        self._arguments = self._parse(engine_args, max_num_seqs, context_length)
        self._name = name or (Path(model).resolve().name if Path(model).is_dir() else model)
        self.engine: Any = None
        """SGLang's Engine, after `start()`."""
        self._is_closed = False
        self._files: list[bytes] = []
        self._eos: frozenset[int] = frozenset()
        self._context_length = 0
        self._block_size = 1
        self._total_blocks = 0
        self._max_running = 0
        """Requests that SGLang runs at once; 0: it does not say."""
        self._held_tokens = 0
        """Tokens of requests that have not ended, prompts and responses; prefixes that they share count for each."""
        self._numbers = count()
        self._requests = OpenRequests()
        self._died = asyncio.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._stack = AsyncExitStack()
        self.kv = KvState()

    def __repr__(self) -> str:
        return f"<SglangEngine {self._name}, open={self._requests.choices}>"

    def _parse(self, engine_args: str, max_num_seqs: int | None, context_length: int | None) -> Any:
        source = self._kv_source
        events = {"publisher": "zmq", "bind": True, "endpoint": source.events, "replay_endpoint": source.replay}
        arguments = ["--model-path", self._model, "--kv-events-config", json.dumps(events), "--incremental-streaming-output"]
        arguments += ["--max-running-requests", str(max_num_seqs)] if max_num_seqs else []
        arguments += ["--context-length", str(context_length)] if context_length else []
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parsed = prepare_server_args([*arguments, *shlex.split(engine_args)])
        except SystemExit as error:  # argparse's, after it has said why
            reason = said.getvalue().rpartition("error: ")[2].strip()
            raise InvalidRequest(f"--engine-args: {reason}") from error
        except ValueError as error:
            raise InvalidRequest(f"--engine-args: {error}") from error
        if parsed.dp_size != 1:
            raise InvalidRequest("--engine-args: the sglang engine runs one data-parallel rank; start a worker for each")
        return parsed

    async def start(self) -> ModelCard:
        """Start SGLang. Raises EngineError when it fails to start."""
        loop = asyncio.get_running_loop()
        # SGLang sends it to this process when one of its own dies; by default that ends the process with a memory dump.
        loop.add_signal_handler(signal.SIGQUIT, self._died.set)
        async with AsyncExitStack() as stack:
            stack.callback(loop.remove_signal_handler, signal.SIGQUIT)
            try:
                self.engine = await asyncio.to_thread(Engine, server_args=self._arguments)
            except Exception as error:
                raise EngineError(f"SGLang failed to start with {self._model}: {error}") from error
            stack.push_async_callback(asyncio.to_thread, self.engine.shutdown)
            self.engine.tokenizer_manager.auto_create_handle_loop()  # it takes signals over, which end workers
            restore_signals()
            loop.add_signal_handler(signal.SIGQUIT, self._died.set)
            if not self._arguments.disable_radix_cache:
                await stack.enter_async_context(following(self._kv_source, self.kv, self._changed))
            self._stack = stack.pop_all()
        return self._card()

    def _card(self) -> ModelCard:
        manager, arguments = self.engine.tokenizer_manager, self._arguments
        config = manager.model_config
        self._context_length = config.context_len
        settings = arguments.resolved_dict()
        self._block_size = block_size = settings["page_size"]
        self._max_running = settings["max_running_requests"] or 0
        # What its own HTTP server reads it from, too: there is no public way inside a running loop.
        scheduler = self.engine._scheduler_init_result.scheduler_infos[0]
        self._total_blocks = scheduler["max_total_num_tokens"] // block_size
        files = tokenizer_files(manager.tokenizer)
        self._files = [file for file in files if file]
        tokenizer_file, template = files
        self._eos = frozenset(config.hf_eos_token_id or ())
        return ModelCard(
            name=self._name,
            kind=ModelKind.LLM,
            backend="sglang",
            llm=LlmInfo(
                context_length=self._context_length,
                tokenizer=sha256(tokenizer_file).hexdigest() if tokenizer_file else "",
                chat_template=sha256(template).hexdigest() if template else "",
                bos_token=getattr(manager.tokenizer, "bos_token", None) or "",
                eos_token=getattr(manager.tokenizer, "eos_token", None) or "",
                eos_token_ids=tuple(sorted(self._eos)),
                block_size=0 if arguments.disable_radix_cache else block_size,
                total_blocks=self._total_blocks,
                max_num_seqs=self._max_running,
                adapters=tuple(adapter.lora_name for adapter in arguments.lora_paths or ()),
                takes_cache_salt=True,
            ),
        ).check()

    def files(self) -> Sequence[bytes]:
        return self._files

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        check_tokens(request, self._context_length, FEATURES | {Feature.CACHE_SALT}, engine="sglang")
        if self._died.is_set() or self._is_closed:
            raise Unavailable("SGLang's processes have ended")
        if request.stop.max_tokens == 0:
            for part in empty_response(request):
                yield part
            return
        reader = SglangReader(request, self._eos)
        held = request.prompt_tokens
        self._held_tokens += held
        try:
            with self._requests.opened(request) as opened:
                async with aclosing(self._events(request, context)) as events:
                    async for event in events:
                        opened.prefilled()
                        for delta in reader.read_event(event):
                            opened.generated(delta)
                            held += len(delta.tokens)
                            self._held_tokens += len(delta.tokens)
                            yield delta
                yield reader.summary()
        finally:
            self._held_tokens -= held
            self._changed()

    async def _events(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Event, None]:
        """Yield the events of all choices as they come. Each is a request of its own: SGLang gives choices ids that it keeps."""
        ready: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

        async def choose(index: int) -> None:
            single = msgspec.structs.replace(request, n=1, first_choice=request.first_choice + index)
            try:
                async with aclosing(self._single(single, context)) as events:
                    async for event in events:
                        event.index = index
                        ready.put_nowait(event)
                ready.put_nowait(None)
            except Exception as error:  # raised by who reads the queue
                ready.put_nowait(error)

        choices = [awaited(choose(index), f"choice {index}") for index in range(request.n)]
        left = request.n
        try:
            while left:
                event = await ready.get()
                if isinstance(event, BaseException):
                    raise event
                if event is None:
                    left -= 1
                else:
                    yield event
        finally:
            for choice in choices:
                choice.cancel()
            await asyncio.wait(choices)

    async def _single(self, request: GenerateRequest, context: Context) -> AsyncGenerator[Event, None]:
        """Yield the events of a request for one choice; abort it if this is closed before its end."""
        manager = self.engine.tokenizer_manager
        id = f"{context.request_id}-{next(self._numbers)}"
        has_ended = False
        try:
            fields = request_fields(request, self._context_length)
            salt = request.cache_salt or None
            async with aclosing(await self.engine.async_generate(rid=id, cache_salt=salt, **fields)) as outputs:
                async for output in outputs:
                    event = msgspec.convert(output, Event, strict=False)
                    has_ended = event.meta_info is not None and event.meta_info.finish_reason is not None
                    yield event
            has_ended = True
        except ValueError as error:  # what SGLang raises for a request that it refuses
            has_ended = True
            raise InvalidRequest(str(error)) from error
        finally:
            if not has_ended:
                manager.abort_request(id)

    def load(self) -> EngineLoad:
        """Return the load by the requests of this worker, which are all."""
        requests, choices = self._requests, self._requests.choices
        running = min(choices, self._max_running or choices)
        return EngineLoad(
            waiting=choices - running,
            running=running,
            active_blocks=min(self._total_blocks, -(-self._held_tokens // self._block_size)),
            total_blocks=self._total_blocks,
            queued_prefill_tokens=requests.prefilling_tokens,
        )

    def on_step(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def failure(self) -> EngineError:
        """Return when one of SGLang's processes has died, which it does not recover from."""
        await self._died.wait()
        return EngineError("SGLang's processes have died")

    async def close(self) -> None:
        self._is_closed = True
        await self._stack.aclose()

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()
