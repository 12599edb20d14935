"""Everything a worker process can be told, as one frozen object built before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dynamo.common.config import group, option, parse_port
from dynamo.common.errors import InvalidRequest
from dynamo.common.messaging.limits import MIB, PlaneLimits
from dynamo.common.names import Endpoint, check_name
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions, TraceOptions


class EngineKind(StrEnum):
    """What runs a model."""

    ECHO = "echo"
    PYTHON = "python"
    LLAMA = "llama"
    SIM = "sim"


def parse_endpoint(text: str) -> Endpoint:
    """`namespace.component.endpoint` as an Endpoint; ValueError says what is wrong."""
    try:
        return Endpoint.parse(text)
    except InvalidRequest as error:
        raise ValueError(f"is no endpoint: {error}") from error


def _name(text: str) -> str:
    try:
        return check_name(text)
    except InvalidRequest as error:
        raise ValueError(f"is not usable: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions:
    """The port on which a worker tells how it is."""

    host: str = option("127.0.0.1", help="Address to listen on.")
    port: int | None = option(
        None,
        env=("DYN_STATUS_PORT", "DYN_SYSTEM_PORT"),
        parse=parse_port,
        help="Port of /health, /live and /metrics; 0 lets the system choose. Default: none.",
    )


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
        help="What to serve, may be given several times: a .gguf file or smollm2, file.py:Class or module:Class, echo, sim.",
    )
    model_names: tuple[str, ...] = option(
        (),
        flags=("--model-name", "--served-model-name"),
        env=("DYN_MODEL_NAME",),
        file_key="model_name",
        repeatable=True,
        parse=_name,
        metavar="NAME",
        help="Name under which a model is served, in the order of --model; default: its own.",
    )
    engine: EngineKind | None = option(
        None, parse=EngineKind, help="Which engine runs the models; default: told by what --model is."
    )
    endpoint: Endpoint = option(
        Endpoint("dynamo", "backend", "generate"),
        parse=parse_endpoint,
        metavar="NAMESPACE.COMPONENT.ENDPOINT",
        help="Where the instance registers.",
    )
    namespace: str | None = option(None, parse=_name, help="Namespace, instead of that in --endpoint.")
    component: str | None = option(None, parse=_name, help="Component, instead of that in --endpoint.")
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
        help="Tokens of prompt and answer together; default: the engine's choice.",
    )
    drain_timeout_s: float = option(
        30.0, flags=("--drain-timeout",), minimum=0, help="After SIGTERM, requests may finish for this many seconds."
    )
    max_open_requests: int = option(
        4096, minimum=1, maximum=1_000_000, help="Requests open at once; more are refused as overload."
    )
    max_message_bytes: int = option(
        512 * MIB, flags=("--max-message-size",), env=("DYN_WORKER_MAX_MESSAGE_SIZE",), minimum=1024, help="Longest request."
    )
    lease_ttl_s: float = option(
        10.0, minimum=1, maximum=600, help="How long the registration outlives a worker that died without a word."
    )
    nats: NatsOptions = group("NATS", prefix="nats", default=NatsOptions)
    etcd: EtcdOptions = group("etcd", prefix="etcd", default=EtcdOptions)
    status: StatusOptions = group("Status", prefix="status", default=StatusOptions)
    log: LogOptions = group("Logging", prefix="log", default=LogOptions)
    trace: TraceOptions = group("Tracing", prefix="trace", default=TraceOptions)

    def __post_init__(self) -> None:
        if self.model_names and len(self.model_names) != len(self.models):
            raise ValueError(f"--model-name is given {len(self.model_names)} times for {len(self.models)} --model")

    @property
    def served_endpoint(self) -> Endpoint:
        """Where the instance registers, with `namespace` and `component` taken into account."""
        return Endpoint(self.namespace or self.endpoint.namespace, self.component or self.endpoint.component, self.endpoint.name)

    @property
    def limits(self) -> PlaneLimits:
        return PlaneLimits(max_open_requests=self.max_open_requests, max_body_bytes=self.max_message_bytes)
