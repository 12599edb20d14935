"""The configuration of `dynamo-local`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dynamo.common.config import group, option, parse_port
from dynamo.common.names import parse_name
from dynamo.common.options import LogOptions
from dynamo.frontend.config import FrontendConfig
from dynamo.planner.config import PlannerConfig
from dynamo.worker.config import TextOptions, WorkerConfig

MAX_WORKERS = 64
"""At once."""
EXIT_UNAUTHENTICATED = 3
"""Exit status of `dynamo.local.ask` if the frontend requires an API key. The launcher reads it without importing that module."""


@dataclass(frozen=True, slots=True)
class FirstRequest:
    """A first request: text for a language model, or `@FILE` with a KServe request in JSON for a tensor model."""

    model: str
    text: str


def parse_first_request(text: str) -> FirstRequest:
    model, equals, content = text.partition("=")
    if not equals or not model or not content:
        raise ValueError("is not of the form MODEL=TEXT or MODEL=@FILE")
    if content.startswith("@") and not Path(content[1:]).is_file():
        raise ValueError(f"names the file {content[1:]}, which does not exist")
    return FirstRequest(model, content)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """A whole deployment on this machine: etcd, nats-server, workers and a frontend, each a process of its own.

    Flags of `dynamo-frontend`, `dynamo-worker` and `dynamo-planner` that are not listed here work, too, if only one of them has
    them, as in `--router-mode kv`; others, such as `--drain-timeout`, go to `--frontend-flag`, `--worker-flag` or
    `--planner-flag`.
    """

    models: tuple[str, ...] = option(
        ("smollm2",),
        flags=("--model",),
        env=("DYN_LOCAL_MODELS",),
        file_key="local.models",
        repeatable=True,
        separator="",
        metavar="MODEL",
        help="What every worker serves, as dynamo-worker takes it: smollm2, a GGUF file, module:Class. Repeatable.",
    )
    model_names: tuple[str, ...] = option(
        (),
        flags=("--model-name", "--served-model-name"),
        env=("DYN_LOCAL_MODEL_NAMES",),
        file_key="local.model_names",
        repeatable=True,
        several=True,
        parse=parse_name,
        metavar="NAME",
        help="Names under which the models are served, as dynamo-worker takes them. Repeatable.",
    )
    workers: int = option(
        1,
        flags=("--workers",),
        env=("DYN_LOCAL_WORKERS",),
        file_key="local.workers",
        minimum=1,
        maximum=MAX_WORKERS,
        help="Workers; with a planner, those at first.",
    )
    http_port: int | None = option(
        None,
        parse=parse_port,
        file_key=("local.http_port", "http.port"),
        help="HTTP port; unset: 8000, or a free one if that is taken.",
    )
    grpc_port: int | None = option(
        None,
        parse=parse_port,
        env=("DYN_GRPC_PORT", "DYNAMO_GRPC_PORT"),
        file_key=("local.grpc_port", "grpc.port", "grpc_service.port"),
        help="KServe gRPC port; unset: 8001, or a free one if that is taken.",
    )
    namespace: str = option("dynamo", parse=parse_name, help="Namespace of the deployment.")
    etcd_endpoints: tuple[str, ...] = option(
        (),
        env=("DYN_ETCD_ENDPOINTS", "ETCD_ENDPOINTS"),
        file_key="etcd.endpoints",
        repeatable=True,
        metavar="URL",
        help="An etcd that runs already; unset: one is started.",
    )
    nats_servers: tuple[str, ...] = option(
        (),
        env=("DYN_NATS_SERVERS", "NATS_SERVER", "NATS_URL"),
        file_key="nats.servers",
        repeatable=True,
        metavar="URL",
        help="A NATS that runs already; unset: one is started.",
    )
    nats_batch: bool = option(
        True,
        env=("DYN_LOCAL_NATS_BATCH",),
        file_key="local.nats_batch",
        help="Schedule the nats-server that is started as a batch process, which interrupts no other: less CPU time under load. "
        "Without, one client alone waits less where other programs keep all cores busy.",
    )
    folder: Path = option(
        Path(".dynamo/local"), env=("DYN_LOCAL_FOLDER",), file_key="local.folder", help="Where data and logs are kept."
    )
    worker_flags: tuple[str, ...] = option(
        (),
        flags=("--worker-flag",),
        env=(),
        file_key="local.worker_flags",
        repeatable=True,
        separator="",
        metavar="FLAG",
        help="A flag for each worker that the frontend has, too, as in --worker-flag=--drain-timeout=5. Repeatable.",
    )
    frontend_flags: tuple[str, ...] = option(
        (),
        flags=("--frontend-flag",),
        env=(),
        file_key="local.frontend_flags",
        repeatable=True,
        separator="",
        metavar="FLAG",
        help="A flag for the frontend that workers have, too, as in --frontend-flag=--drain-timeout=5. Repeatable.",
    )
    planner: bool = option(
        False,
        env=("DYN_LOCAL_PLANNER",),
        file_key="local.planner",
        help="Start a planner, too, and as many workers as it decides; --workers are there at first.",
    )
    planner_flags: tuple[str, ...] = option(
        (),
        flags=("--planner-flag",),
        env=(),
        file_key="local.planner_flags",
        repeatable=True,
        separator="",
        metavar="FLAG",
        help="A flag for the planner that others have, too, as in --planner-flag=--status-port=9090. Repeatable.",
    )
    follow_targets: bool = option(
        False,
        env=("DYN_LOCAL_FOLLOW_TARGETS",),
        file_key="local.follow_targets",
        help="Start and end workers as the targets in etcd say, which a planner writes that another program has started.",
    )
    ask: bool = option(
        True, env=("DYN_LOCAL_ASK",), file_key="local.ask", help="Send a first request to every model and show the response."
    )
    first_requests: tuple[FirstRequest, ...] = option(
        (),
        flags=("--question",),
        env=(),
        file_key="local.questions",
        parse=parse_first_request,
        repeatable=True,
        separator="",
        metavar="MODEL=TEXT",
        help="The first request to a model: a prompt, or @FILE with a KServe request in JSON. Repeatable.",
    )
    once: bool = option(False, env=("DYN_LOCAL_ONCE",), file_key="local.once", help="Stop after the first requests.")
    start_timeout_s: float = option(
        120.0, flags=("--start-timeout",), env=("DYN_LOCAL_START_TIMEOUT_S",), minimum=1, help="Longest start, in seconds."
    )
    stop_timeout_s: float = option(
        15.0,
        flags=("--stop-timeout",),
        env=("DYN_LOCAL_STOP_TIMEOUT_S",),
        minimum=0,
        help="Longest drain of a process after Ctrl-C, in seconds; then it is ended by force.",
    )
    text: TextOptions = group("Language models", prefix="text", default=TextOptions)
    log: LogOptions = group("Logging", prefix="log")

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("--model names nothing to serve")
        if self.planner_flags and not self.planner:
            raise ValueError(f"{self.planner_flags[0].partition('=')[0]} is for a planner, which --planner starts")
        if self.http_port is not None and self.http_port == self.grpc_port != 0:
            raise ValueError(f"--http-port and --grpc-port are both {self.http_port}")

    @property
    def is_scaled(self) -> bool:
        """Whether the number of workers changes while they serve."""
        return self.planner or self.follow_targets


PASSES_ON = {"frontend_flags": FrontendConfig, "worker_flags": WorkerConfig, "planner_flags": PlannerConfig}
"""The programs whose flags `dynamo-local` takes, by the field that they are put into."""
