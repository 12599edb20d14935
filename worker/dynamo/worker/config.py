"""The configuration of a worker process, one frozen object that is built before it starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dynamo.common.adapters import MAX_LOADED
from dynamo.common.config import group, option, parse_bytes, parse_port
from dynamo.common.errors import InvalidRequest
from dynamo.common.http.web_pages import parse_allowed_host
from dynamo.common.messaging.request_plane.limits import MIB, PlaneLimits
from dynamo.common.model_card import Role
from dynamo.common.names import Endpoint, parse_name
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions, SharedMemoryOptions, TraceOptions
from dynamo.common.output_formats import AUTO, parse_reasoning_parser, parse_tool_parser
from dynamo.common.repository import ControlMode
from dynamo.worker.engine.remote.options import RemoteOptions
from dynamo.worker.observability.triton_metrics import MetricsConfig
from dynamo.worker.repository.scheduling.rate_limiter import ProvidedResource, RateLimit

_PASSWORD_IN_URL = re.compile(r"://[^/@]*:[^/@]*@")


class EngineKind(StrEnum):
    """Which implementation runs a model."""

    ECHO = "echo"
    PYTHON = "python"
    LLAMA = "llama"
    SIM = "sim"
    REPOSITORY = "repository"
    VLLM = "vllm"
    SGLANG = "sglang"
    REMOTE = "remote"


def parse_endpoint(text: str) -> Endpoint:
    """Parse `namespace.component.endpoint`. Raises ValueError."""
    try:
        return Endpoint.parse(text)
    except InvalidRequest as error:
        raise ValueError(f"is not an endpoint: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions:
    """The port that reports the worker's health and metrics."""

    host: str = option("127.0.0.1", help="Address to listen on.")
    port: int | None = option(
        None,
        env=("DYN_STATUS_PORT", "DYN_SYSTEM_PORT"),
        parse=parse_port,
        help="Port of /health, /live and /metrics; 0 lets the system choose. Default: none.",
    )
    allow_sleep: bool = option(
        False,
        flags=("--allow-sleep",),
        env=("DYN_ALLOW_SLEEP",),
        help="Let clients of the status port put the worker to sleep and wake it: POST /sleep, POST /wake_up.",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        flags=("--allowed-host",),
        env=("DYN_STATUS_ALLOWED_HOSTS",),
        repeatable=True,
        parse=parse_allowed_host,
        metavar="HOST",
        help="Further names by which the status port may be addressed (the header `Host`), besides addresses, `localhost` and "
        "the name of the machine; /health and /live may be by any. A domain such as `*.example.com` or `.svc` includes all "
        "names in it; `*`: any. May be given several times.",
    )
    metrics_config: tuple[str, ...] = option(
        (),
        flags=("--metrics-config",),
        env=("DYN_METRICS_CONFIG",),
        repeatable=True,
        separator="",
        metavar="NAME=VALUE",
        help="As Triton's: summary_latencies=true shows nv_inference_*_summary_us, summary_quantiles=0.5:0.05,0.9:0.01 says "
        "which quantiles, counter_latencies=false leaves out nv_inference_*_duration_us. Repeatable.",
    )

    def __post_init__(self) -> None:
        _ = self.triton_metrics

    @property
    def triton_metrics(self) -> MetricsConfig:
        """Raises ValueError."""
        try:
            return MetricsConfig.of(self.metrics_config)
        except ValueError as error:
            raise ValueError(f"--metrics-config: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """Model repositories in Triton's layout."""

    repositories: tuple[str, ...] = option(
        (),
        flags=("--model-repository", "--model-store"),
        env=("DYN_MODEL_REPOSITORY",),
        file_key="repository.folders",
        repeatable=True,
        separator="",
        metavar="FOLDER|URL",
        help="A model repository, may be given several times: a folder with one folder per model, or where one is in an object "
        "store, such as s3://bucket/models.",
    )
    control_mode: ControlMode = option(
        ControlMode.NONE,
        flags=("--model-control-mode",),
        env=("DYN_MODEL_CONTROL_MODE",),
        parse=ControlMode,
        choices=tuple(ControlMode),
        help="Which models are loaded. none: all, at the start; explicit: those of --load-model and of later load requests; "
        "poll: all in the folders, which are scanned periodically.",
    )
    load: tuple[str, ...] = option(
        (),
        flags=("--load-model",),
        env=("DYN_LOAD_MODEL",),
        repeatable=True,
        metavar="NAME",
        help="With --model-control-mode explicit: a model to load at the start, may be given several times; * is all of them.",
    )
    poll_s: float = option(
        15.0,
        flags=("--repository-poll-secs",),
        env=("DYN_REPOSITORY_POLL_SECS",),
        minimum=0.05,
        maximum=86_400,
        help="Seconds between two scans of the folders.",
    )
    auto_complete: bool = option(
        True,
        flags=("--auto-complete-config",),
        env=("DYN_AUTO_COMPLETE_CONFIG",),
        help="Take what config.pbtxt leaves open from the model itself. Off, each model needs a complete config.pbtxt.",
    )
    default_max_batch_size: int = option(
        4,
        flags=("--default-max-batch-size",),
        env=("DYN_DEFAULT_MAX_BATCH_SIZE",),
        minimum=0,
        maximum=1 << 20,
        help="Batch size of models whose file says that they can batch and whose configuration has none; 0: no batching.",
    )
    exit_on_error: bool = option(
        True,
        flags=("--exit-on-error",),
        env=("DYN_EXIT_ON_ERROR",),
        help="Do not start if a model does not load. Off, such a model is shown as unavailable, with the reason.",
    )
    strict_outputs: bool = option(
        False,
        flags=("--strict-model-outputs",),
        env=("DYN_STRICT_MODEL_OUTPUTS",),
        help="Fail requests whose Python model gives outputs in another datatype or shape than declared, or not at all. Off, "
        "they are logged, counted and passed on, as Triton does.",
    )
    cache_bytes: int = option(
        0,
        flags=("--response-cache-byte-size",),
        env=("DYN_RESPONSE_CACHE_BYTE_SIZE",),
        parse=parse_bytes,
        minimum=0,
        help="Bytes of the cache for responses of models with response_cache { enable: true }; 0: there is none.",
    )
    calls_bytes: int = option(
        1024 * MIB,
        flags=("--model-calls-byte-size",),
        env=("DYN_MODEL_CALLS_BYTE_SIZE",),
        parse=parse_bytes,
        minimum=1,
        help="Bytes of the tensors that calls of models by models hold in the worker at once; a call beyond them fails.",
    )
    rate_limit: RateLimit = option(
        RateLimit.OFF,
        flags=("--rate-limit",),
        env=("DYN_RATE_LIMIT",),
        parse=RateLimit,
        choices=tuple(RateLimit),
        help="Whether executions wait for the resources of instance_group.rate_limiter, as with Triton. execution_count: the "
        "instance with the least executions, weighted by its priority, is first; off: they do not wait.",
    )
    rate_limit_resources: tuple[str, ...] = option(
        (),
        flags=("--rate-limit-resource",),
        env=("DYN_RATE_LIMIT_RESOURCE",),
        repeatable=True,
        metavar="NAME:COUNT[:DEVICE]",
        help="With --rate-limit execution_count: how much there is of a resource, on one device (a number), on each, or once "
        "(global); may be given several times. None: as much of each as the instance needs that needs most of it.",
    )
    path_roots: tuple[str, ...] = option(
        (),
        flags=("--model-path-root",),
        env=("DYN_MODEL_PATH_ROOT",),
        repeatable=True,
        separator="",
        metavar="FOLDER|URL",
        help="A folder, or an object-store prefix such as s3://bucket/models, below which the load parameter model_path may name "
        "models; may be given several times. None: model_path is refused.",
    )
    path_max_bytes: int = option(
        16 * 1024 * MIB,
        flags=("--model-path-max-bytes",),
        env=("DYN_MODEL_PATH_MAX_BYTES",),
        parse=parse_bytes,
        minimum=1,
        help="Largest model that is copied from an object store, and largest EXECUTION_ENV_PATH archive, unpacked.",
    )
    copies: Path = option(
        Path("~/.cache/dynamo/repository"),
        flags=("--repository-cache",),
        env=("DYN_REPOSITORY_CACHE",),
        metavar="FOLDER",
        help="Where EXECUTION_ENV_PATH archives are unpacked, and models of object stores are copied to; several workers of one "
        "user may share it.",
    )
    copies_bytes: int = option(
        64 * 1024 * MIB,
        flags=("--repository-cache-byte-size",),
        env=("DYN_REPOSITORY_CACHE_BYTE_SIZE",),
        parse=parse_bytes,
        minimum=0,
        help="Bytes of that folder; beyond them what is not in use is removed, least recently used first.",
    )

    def __post_init__(self) -> None:
        if self.load and self.control_mode is not ControlMode.EXPLICIT:
            raise ValueError("--load-model needs --model-control-mode explicit")
        if self.rate_limit_resources and self.rate_limit is RateLimit.OFF:
            raise ValueError("--rate-limit-resource needs --rate-limit execution_count")
        if any(_PASSWORD_IN_URL.search(each) for each in self.repositories):
            raise ValueError("--model-repository holds a password, which logs would show: see docs/repository.md for credentials")
        self.provided_resources()

    def provided_resources(self) -> tuple[ProvidedResource, ...]:
        """Raises ValueError."""
        try:
            return tuple(map(ProvidedResource.parse, self.rate_limit_resources))
        except ValueError as error:
            raise ValueError(f"--rate-limit-resource {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How frontends write prompts for the language models of a worker, and read their output."""

    tool_parser: str = option(
        AUTO,
        flags=("--tool-call-parser",),
        hidden_flags=("--dyn-tool-call-parser",),
        env=("DYN_TOOL_CALL_PARSER",),
        parse=parse_tool_parser,
        metavar="NAME",
        help="Format in which the model writes tool calls, as vLLM names it: hermes, llama3_json, …; auto: by its chat template; "
        "none: requests with tools are refused unless they require a call.",
    )
    reasoning_parser: str = option(
        AUTO,
        hidden_flags=("--dyn-reasoning-parser",),
        flags=("--reasoning-parser",),
        env=("DYN_REASONING_PARSER",),
        parse=parse_reasoning_parser,
        metavar="NAME",
        help="Format in which the model writes its reasoning: deepseek_r1, qwen3, …; auto: by its chat template; none: reasoning "
        "is part of the content.",
    )
    chat_template: Path | None = option(
        None,
        flags=("--chat-template",),
        hidden_flags=("--custom-jinja-template",),
        env=("DYN_CHAT_TEMPLATE",),
        metavar="FILE",
        help="Jinja chat template, instead of the model's own.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """LoRA adapters that are loaded at run time."""

    allow: bool = option(
        False,
        flags=("--allow-runtime-lora",),
        env=("DYN_ALLOW_RUNTIME_LORA",),
        help="Load and unload LoRA adapters on request. Needs --lora-path-root.",
    )
    path_roots: tuple[Path, ...] = option(
        (),
        flags=("--lora-path-root",),
        env=("DYN_LORA_PATH_ROOT",),
        repeatable=True,
        separator="",
        metavar="FOLDER",
        help="A folder below which requests may name LoRA adapters; may be given several times. With --url it is on the server's "
        "host.",
    )
    max_loaded: int | None = option(
        None,
        flags=("--max-runtime-loras",),
        env=("DYN_MAX_RUNTIME_LORAS",),
        minimum=1,
        maximum=MAX_LOADED,
        help="LoRA adapters that an instance holds at once, those of its start included; default: as many as the engine keeps in "
        "memory.",
    )

    def __post_init__(self) -> None:
        if self.allow and not self.path_roots:
            raise ValueError("--allow-runtime-lora needs --lora-path-root")
        for root in self.path_roots:
            if not root.is_absolute():
                raise ValueError(f"--lora-path-root must be an absolute path, got {root}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker: loads models and serves them to all frontends of its namespace."""

    models: tuple[str, ...] = option(
        (),
        flags=("--model",),
        env=("DYN_MODEL",),
        file_key=("model", "worker.models"),
        repeatable=True,
        separator="",
        metavar="MODEL",
        help="What to serve, may be given several times: a .gguf file or smollm2, file.py:Class or module:Class, a model "
        "repository, a folder with a Hugging Face model, echo, sim.",
    )
    model_names: tuple[str, ...] = option(
        (),
        flags=("--model-name", "--served-model-name"),
        env=("DYN_MODEL_NAME",),
        file_key="model_name",
        repeatable=True,
        several=True,
        parse=parse_name,
        metavar="NAME",
        help="Name under which a model is served, in the order of --model; default: its own. With one --model, further names are "
        "aliases of the first.",
    )
    engine: EngineKind | None = option(
        None,
        parse=EngineKind,
        help="Which engine runs the models; default: derived from --model. Experimental, never run on a GPU: sglang.",
    )
    endpoint: Endpoint = option(
        Endpoint("dynamo", "backend", "generate"),
        parse=parse_endpoint,
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="Where the instance registers.",
    )
    namespace: str | None = option(None, parse=parse_name, help="Namespace, instead of that in --endpoint.")
    component: str | None = option(None, parse=parse_name, help="Component, instead of that in --endpoint.")
    threads: int | None = option(
        None, minimum=1, maximum=1024, help="Threads that the engine computes with; default: the engine's choice."
    )
    max_num_seqs: int | None = option(
        None, minimum=1, maximum=1024, help="Sequences that a language model generates at once; default: the engine's choice."
    )
    context_length: int | None = option(
        None,
        flags=("--context-length", "--max-model-len"),
        minimum=16,
        maximum=16 << 20,
        help="Tokens of prompt and output together; default: the engine's choice.",
    )
    engine_args: str = option(
        "",
        metavar="ARGUMENTS",
        help="For vllm: arguments of `vllm serve` that concern its engine, and --lora-modules NAME=PATH; "
        "for sglang: arguments of its server; all in one text, such as '--tensor-parallel-size 2 --quantization fp8'.",
    )
    role: Role | None = option(
        None,
        flags=("--role", "--disaggregation-mode"),
        parse=Role,
        help="Which part of generation vllm or sim does here: aggregated, prefill or decode; default: aggregated, or that of "
        "--model.",
    )
    process_name: str = option(
        "",
        env=("DYN_PROCESS_NAME", "POD_NAME"),
        parse=parse_name,
        metavar="NAME",
        help="What started this process calls it by this name, which is registered: a planner has the process ended, or its pod, "
        "when an instance of it is to leave.",
    )
    num_workers: int = option(
        1,
        minimum=1,
        maximum=1_000,
        help="Instances in this process, each with engines, a registration and connections of its own: for fleets of simulated "
        "engines on one machine. A status port counts up from instance to instance.",
    )
    process_instances: int = 1
    """How many instances this process has, this one included. `serve_fleet` counts them."""
    speedup_ratio: float | None = option(
        None,
        minimum=0,
        help="For sim: how much faster than its timing the engine is; 0: steps take no time. Default: 1, or that of --model.",
    )
    drain_timeout_s: float = option(
        30.0, flags=("--drain-timeout",), minimum=0, help="After SIGTERM, requests may finish for this many seconds."
    )
    close_timeout_s: float = option(
        40.0,
        flags=("--close-timeout",),
        minimum=0,
        help="After that, an engine may take this many seconds to close; the process ends without one that takes longer.",
    )
    max_open_requests: int = option(
        4096, minimum=1, maximum=1_000_000, help="Requests open at once; more are refused as overload."
    )
    max_message_bytes: int = option(
        512 * MIB, flags=("--max-message-size",), env=("DYN_WORKER_MAX_MESSAGE_SIZE",), minimum=1024, help="Longest request."
    )
    ready_timeout_s: float = option(
        60.0,
        flags=("--ready-timeout",),
        minimum=0,
        help="/health is ready once all frontends have admitted the worker, or so many seconds after it registered; 0: then.",
    )
    lease_ttl_s: float = option(
        10.0, minimum=1, maximum=600, help="How long the registration outlives a worker that died silently."
    )
    durable_kv_events: bool = option(
        False,
        help="Record KV events in JetStream, so that frontends with the same option start without querying each worker.",
    )
    text: TextOptions = group("Language models", prefix="text", default=TextOptions)
    adapters: AdapterOptions = group("LoRA adapters", prefix="adapters", default=AdapterOptions)
    remote: RemoteOptions = group("Remote engine", prefix="remote", default=RemoteOptions)
    repository: RepositoryOptions = group("Model repository", prefix="repository", default=RepositoryOptions)
    nats: NatsOptions = group("NATS", prefix="nats", default=NatsOptions)
    etcd: EtcdOptions = group("etcd", prefix="etcd", default=EtcdOptions)
    shared_memory: SharedMemoryOptions = group("Shared memory", prefix="shared_memory", default=SharedMemoryOptions)
    status: StatusOptions = group("Status", prefix="status", default=StatusOptions)
    log: LogOptions = group("Logging", prefix="log", default=LogOptions)
    trace: TraceOptions = group("Tracing", prefix="trace", default=TraceOptions)

    def __post_init__(self) -> None:
        if len(set(self.model_names)) != len(self.model_names):
            raise ValueError("--model-name gives one name twice")
        if self.remote.is_used and (self.models or self.num_workers > 1 or self.engine not in (None, EngineKind.REMOTE)):
            raise ValueError("--url takes the place of --model and --num-workers, and needs --engine remote or none")
        for name, addresses in (
            ("kv-events", self.remote.kv_events),
            ("kv-replay", self.remote.kv_replay),
            ("endpoint", self.remote.endpoints),
        ):
            if addresses and len(addresses) != len(self.remote.urls):
                raise ValueError(f"--remote-{name} is given {len(addresses)} times for {len(self.remote.urls)} --url")
        if self.remote.kv_replay and not self.remote.kv_events:
            raise ValueError("--remote-kv-replay needs --remote-kv-events")
        if self.engine is EngineKind.REMOTE and not self.remote.is_used:
            raise ValueError("--engine remote needs --url")
        if self.model_names and not self._has_one_model and len(self.model_names) != len(self.models):
            raise ValueError(f"--model-name is given {len(self.model_names)} times for {len(self.models)} --model")

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each of `models`; "": its own."""
        return self.model_names[: len(self.models)] or ("",) * len(self.models)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names of the only model."""
        return self.model_names[1:] if self._has_one_model else ()

    @property
    def _has_one_model(self) -> bool:
        return len(self.models) == 1 or self.remote.is_used

    @property
    def served_endpoint(self) -> Endpoint:
        """The endpoint at which the instance registers, with `namespace` and `component` applied."""
        return Endpoint(self.namespace or self.endpoint.namespace, self.component or self.endpoint.component, self.endpoint.name)

    @property
    def limits(self) -> PlaneLimits:
        return PlaneLimits(max_open_requests=self.max_open_requests, max_body_bytes=self.max_message_bytes)
