"""The configuration of a planner process, one frozen object that is built before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dynamo.common.config import group, option, parse_port
from dynamo.common.http.web_pages import parse_allowed_host
from dynamo.common.names import parse_name
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.common.scaling.targets import MAX_INSTANCES
from dynamo.frontend.config import RouterMode
from dynamo.planner.executors.options import ExecutorOptions
from dynamo.planner.pools import Bounds, Goals
from dynamo.planner.schedule import EXAMPLE, Schedule, parse_schedule

MAX_GPUS = 1024
"""GPUs of one instance."""


@dataclass(frozen=True, slots=True)
class PerModel:
    """A number for one model, or for all that have none of their own."""

    value: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """`NAME=LEAST:MOST`."""

    model: str
    least: int
    most: int


def _parse_count(text: str, most: int) -> PerModel:
    model, equals, number = text.rpartition("=")
    if not number.isdecimal() or (equals and not model):
        raise ValueError("is neither a number nor of the form MODEL=NUMBER")
    if int(number) > most:
        raise ValueError(f"is more than {most}")
    return PerModel(int(number), parse_name(model) if model else "")


def _parse_bounds(text: str) -> ModelBounds:
    model, _, numbers = text.rpartition("=")
    least, colon, most = numbers.partition(":")
    if not model or not colon or not least.isdecimal() or not most.isdecimal():
        raise ValueError("is not of the form MODEL=LEAST:MOST, as in chat=2:8")
    if int(most) > MAX_INSTANCES:
        raise ValueError(f"is more than {MAX_INSTANCES} instances")
    if int(least) > int(most):
        raise ValueError(f"asks for at least {least} and at most {most} instances")
    return ModelBounds(parse_name(model), int(least), int(most))


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalOptions:
    """What requests are to get. Without a goal, instances are kept from being overloaded."""

    ttft_ms: float | None = option(
        None,
        flags=("--ttft-ms",),
        env=("DYN_PLANNER_TTFT_MS",),
        file_key="planner.ttft_ms",
        minimum=1,
        maximum=3_600_000,
        help="Time to first token that requests are to have.",
    )
    itl_ms: float | None = option(
        None,
        flags=("--itl-ms",),
        env=("DYN_PLANNER_ITL_MS",),
        file_key="planner.itl_ms",
        minimum=0.1,
        maximum=60_000,
        help="Mean time between two tokens of a request.",
    )
    goodput_share: float = option(
        0.95,
        flags=("--goodput-share",),
        env=("DYN_PLANNER_GOODPUT_SHARE",),
        file_key="planner.goodput_share",
        minimum=0.01,
        maximum=1,
        help="Share of the requests that are to reach both.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundOptions:
    """How many instances there may be, and how fast that may change."""

    min_instances: int = option(
        1,
        flags=("--min-instances",),
        env=("DYN_PLANNER_MIN_INSTANCES",),
        file_key="planner.min_instances",
        minimum=0,
        maximum=MAX_INSTANCES,
        help="Least instances of each pool: of a model, and of each of its roles where prefill and decode are apart.",
    )
    max_instances: int = option(
        8,
        flags=("--max-instances",),
        env=("DYN_PLANNER_MAX_INSTANCES",),
        file_key="planner.max_instances",
        minimum=1,
        maximum=MAX_INSTANCES,
        help="Most instances of each pool.",
    )
    of_models: tuple[ModelBounds, ...] = option(
        (),
        flags=("--instances",),
        env=("DYN_PLANNER_INSTANCES",),
        file_key="planner.instances",
        repeatable=True,
        parse=_parse_bounds,
        metavar="MODEL=LEAST:MOST",
        help="Least and most instances of each pool of one model, as in chat=2:8; may be given several times.",
    )
    schedules: tuple[Schedule, ...] = option(
        (),
        flags=("--schedule",),
        env=("DYN_PLANNER_SCHEDULE",),
        file_key="planner.schedules",
        repeatable=True,
        separator=";",
        parse=parse_schedule,
        metavar="[MODEL=]DAYS FROM-TO ZONE INSTANCES",
        help=f"Least instances at certain times, as in '{EXAMPLE}'; may be given several times, separated by semicolons in the "
        "variable. The most instances bound it.",
    )
    gpu_budget: int | None = option(
        None,
        flags=("--gpu-budget",),
        env=("DYN_PLANNER_GPU_BUDGET",),
        file_key="planner.gpu_budget",
        minimum=1,
        maximum=10_000_000,
        help="GPUs that all instances together may have; default: no such limit.",
    )
    gpus_per_instance: tuple[PerModel, ...] = option(
        (),
        flags=("--gpus-per-instance",),
        env=("DYN_PLANNER_GPUS_PER_INSTANCE",),
        file_key="planner.gpus_per_instance",
        repeatable=True,
        parse=partial(_parse_count, most=MAX_GPUS),
        metavar="[MODEL=]GPUS",
        help="GPUs of an instance, of one model or of all others; may be given several times. Default: 1.",
    )
    startup_time_s: float = option(
        60.0,
        flags=("--startup-time",),
        env=("DYN_PLANNER_STARTUP_TIME",),
        file_key="planner.startup_time",
        minimum=0,
        maximum=3600,
        help="Seconds from the decision that wants an instance until it serves; used until that has been seen.",
    )
    cool_up_s: float = option(
        30.0,
        flags=("--cool-up",),
        env=("DYN_PLANNER_COOL_UP",),
        file_key="planner.cool_up",
        minimum=0,
        maximum=86_400,
        help="Seconds after a change in which the number is raised by a quarter or more, or not at all.",
    )
    cool_down_s: float = option(
        120.0,
        flags=("--cool-down",),
        env=("DYN_PLANNER_COOL_DOWN",),
        file_key="planner.cool_down",
        minimum=0,
        maximum=86_400,
        help="Seconds for which fewer instances must have been needed before some are taken away.",
    )
    idle_timeout_s: float = option(
        0.0,
        flags=("--idle-timeout",),
        env=("DYN_PLANNER_IDLE_TIMEOUT",),
        file_key="planner.idle_timeout",
        minimum=0,
        maximum=30 * 86_400,
        help="A pool without requests for so many seconds gets no instance, until a request waits for it; 0: it keeps its least.",
    )

    def __post_init__(self) -> None:
        if self.min_instances > self.max_instances:
            raise ValueError(f"--min-instances {self.min_instances} is more than --max-instances {self.max_instances}")
        _check_once("--instances", [bounds.model for bounds in self.of_models])
        _check_once("--gpus-per-instance", [each.model for each in self.gpus_per_instance])
        if any(each.value < 1 for each in self.gpus_per_instance):
            raise ValueError("--gpus-per-instance must be at least 1")
        for schedule in self.schedules:
            most = [bounds.most for bounds in self.of_models if bounds.model == schedule.model] or [self.max_instances]
            if schedule.instances > most[0]:
                raise ValueError(f"--schedule '{schedule}' asks for more than the most instances, {most[0]}")
        self._check_budget()

    def _check_budget(self) -> None:
        """Raise ValueError for a budget that is less than the least instances of the models with bounds need, or than one has."""
        if self.gpu_budget is None:
            return
        needed = {bounds.model: bounds.least * self.gpus_of(bounds.model) for bounds in self.of_models}
        if sum(needed.values()) > self.gpu_budget:
            listed = ", ".join(f"{model} {gpus}" for model, gpus in needed.items())
            raise ValueError(f"--gpu-budget {self.gpu_budget} is less than the least instances need ({listed})")
        if self.gpus_of("") > self.gpu_budget:
            raise ValueError(f"--gpu-budget {self.gpu_budget} is less than one instance has ({self.gpus_of('')})")

    def gpus_of(self, model: str) -> int:
        """Return how many GPUs an instance of a model has."""
        by_model = {each.model: each.value for each in self.gpus_per_instance}
        return by_model.get(model, by_model.get("", 1))

    def bounds_of(self, model: str) -> Bounds:
        """Return the bounds of each pool of a model that hold at any time: without schedules, and also while it is idle."""
        own = self._own(model)
        return Bounds(
            least=0 if self.idle_timeout_s else self.least_of(model),
            most=self.max_instances if own is None else own.most,
            startup_s=self.startup_time_s,
            cool_up_s=self.cool_up_s,
            cool_down_s=self.cool_down_s,
            idle_s=self.idle_timeout_s,
        )

    def least_of(self, model: str) -> int:
        """Return the least instances of each pool of a model that is not idle."""
        own = self._own(model)
        return self.min_instances if own is None else own.least

    def _own(self, model: str) -> ModelBounds | None:
        return next((bounds for bounds in self.of_models if bounds.model == model), None)


def _check_once(flag: str, models: Sequence[str]) -> None:
    if len(set(models)) != len(models):
        raise ValueError(f"{flag} is given twice for one model")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerStatusOptions:
    """The port that reports the planner's health, metrics and decisions."""

    host: str = option("127.0.0.1", help="Address to listen on.")
    port: int | None = option(
        None,
        env=("DYN_STATUS_PORT", "DYN_SYSTEM_PORT"),
        parse=parse_port,
        help="Port of /health, /live, /metrics and /explain; 0 lets the system choose. Default: none.",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        flags=("--allowed-host",),
        env=("DYN_STATUS_ALLOWED_HOSTS",),
        repeatable=True,
        parse=parse_allowed_host,
        metavar="HOST",
        help="Further names by which the status port may be addressed (the header `Host`), besides addresses, `localhost` and "
        "the name of the machine; /health and /live may be by any. May be given several times.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """A planner: decides how many instances each language model needs. Several of one namespace have one leader."""

    namespace: str = option("dynamo", parse=parse_name, help="Namespace whose models are scaled.")
    models: tuple[str, ...] = option(
        (),
        flags=("--model",),
        env=("DYN_PLANNER_MODEL",),
        file_key="planner.models",
        repeatable=True,
        parse=parse_name,
        metavar="NAME",
        help="A model to scale, may be given several times; default: each language model that has registered.",
    )
    interval_s: float = option(
        5.0,
        flags=("--interval",),
        env=("DYN_PLANNER_INTERVAL",),
        file_key="planner.interval",
        minimum=0.2,
        maximum=300,
        help="Seconds between two decisions.",
    )
    dry_run: bool = option(
        False,
        flags=("--dry-run",),
        env=("DYN_PLANNER_DRY_RUN",),
        file_key="planner.dry_run",
        help="Decide, and only say so: no target is written, and nothing is carried out.",
    )
    whatif_cpu: float = option(
        0.1,
        flags=("--whatif-cpu",),
        env=("DYN_PLANNER_WHATIF_CPU",),
        file_key="planner.whatif_cpu",
        minimum=0,
        maximum=1,
        help="Share of one core that may go into replays of the last minutes with other numbers of instances; 0: none.",
    )
    whatif_router_mode: RouterMode = option(
        RouterMode.ROUND_ROBIN,
        flags=("--whatif-router-mode",),
        env=("DYN_PLANNER_WHATIF_ROUTER_MODE", "DYN_ROUTER_MODE"),
        file_key=("planner.whatif_router_mode", "router.mode"),
        help="How requests are routed in these replays; give the --router-mode of the frontends. direct: no replays.",
    )
    lease_ttl_s: float = option(
        10.0,
        minimum=1,
        maximum=600,
        help="How long a planner that died silently remains the leader.",
    )
    goals: GoalOptions = group("Goals", prefix="goals", default=GoalOptions)
    bounds: BoundOptions = group("Bounds", prefix="bounds", default=BoundOptions)
    executor: ExecutorOptions = group("Executor", prefix="executor", default=ExecutorOptions)
    nats: NatsOptions = group("NATS", prefix="nats", default=NatsOptions)
    etcd: EtcdOptions = group("etcd", prefix="etcd", default=EtcdOptions)
    status: PlannerStatusOptions = group("Status", prefix="status", default=PlannerStatusOptions)
    log: LogOptions = group("Logging", prefix="log", default=LogOptions)

    def __post_init__(self) -> None:
        named = {bounds.model for bounds in self.bounds.of_models} | {each.model for each in self.bounds.schedules}
        if self.models and (unknown := sorted(named - {"", *self.models})):
            raise ValueError(f"bounds are given for {', '.join(unknown)}, which no --model names")

    @property
    def goals_of_requests(self) -> Goals:
        """The goals, in seconds."""
        ttft_ms, itl_ms = self.goals.ttft_ms, self.goals.itl_ms
        return Goals(
            ttft_s=None if ttft_ms is None else ttft_ms / 1e3,
            itl_s=None if itl_ms is None else itl_ms / 1e3,
            share=self.goals.goodput_share,
        )
