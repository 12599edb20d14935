"""`dynamo-planner explain`: prints what a planner sees, and why it decided so.

With `--url` it is what the status port of a planner says; without, what the targets in etcd say, which are there without a
planner, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.common.admin_api import AdminApi
from dynamo.common.config import ConfigError, exit_with, group, load, option
from dynamo.common.errors import DynamoError
from dynamo.common.etcd import connect_etcd
from dynamo.common.lifecycle import run
from dynamo.common.names import parse_name
from dynamo.common.options import EtcdOptions
from dynamo.common.scaling.targets import Targets, decode_targets, targets_key
from dynamo.planner.process.state import DecisionMade, PlannerState, PoolState

PROGRAM = "dynamo-planner explain"


def _parse_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    return text.rstrip("/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """Prints what a planner sees, and why it decided so: of its status port, or of the targets in etcd."""

    url: str | None = option(
        None,
        env=(),
        file_key=(),
        parse=_parse_url,
        help="Status port of a planner, as in http://127.0.0.1:9090; default: none, and etcd is read.",
    )
    json: bool = option(False, env=(), file_key=(), help="Print JSON.")
    namespace: str = option("dynamo", parse=parse_name, help="Namespace whose targets are read from etcd.")
    etcd: EtcdOptions = group("etcd", prefix="etcd", default=EtcdOptions)


def main(argv: Sequence[str]) -> None:
    try:
        config = load(ExplainConfig, argv, os.environ, program=PROGRAM)
        sys.stdout.write(_of_planner(config, config.url) if config.url is not None else run(_of_etcd(config), program=PROGRAM))
    except (ConfigError, DynamoError) as error:
        exit_with(PROGRAM, error)


def _of_planner(config: ExplainConfig, url: str) -> str:
    body = AdminApi(url, "").send("GET", "/explain")
    try:
        state = msgspec.json.decode(body, type=PlannerState)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{url} is not the status port of a planner: {error}") from None
    return _formatted(state) if config.json else "\n".join(planner_lines(state, time.time())) + "\n"


async def _of_etcd(config: ExplainConfig) -> str:
    """Raises EtcdUnavailable."""
    async with connect_etcd(config.etcd) as etcd:
        listing = await etcd.range(targets_key(config.namespace))
    try:
        targets = decode_targets(listing.kvs[0].value) if listing.kvs else Targets()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the targets of namespace {config.namespace} cannot be read: {error}") from None
    return _formatted(targets) if config.json else "\n".join(target_lines(targets, time.time())) + "\n"


def _formatted(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


def planner_lines(state: PlannerState, now: float) -> Iterator[str]:
    """Yield what is printed of a planner. `now`: unix time."""
    role = "the leader" if state.is_leader else "standing by"
    dry = ", dry run" if state.dry_run else ""
    yield f"planner {state.planner} of {state.namespace}: {role}, every {state.interval_s:g} s, executor {state.executor}{dry}"
    yield f"goals: {', '.join(_goals(state))}"
    if state.holding:
        yield f"targets are left as they are: {state.holding}"
    if state.executor_error:
        yield f"targets are not carried out: {state.executor_error}"
    for pool in state.pools:
        yield ""
        yield from _pool_lines(pool)
    if state.decisions:
        yield ""
        yield "last changes:"
        yield from (_change_line(decision, now) for decision in state.decisions)


def _goals(state: PlannerState) -> Iterator[str]:
    if state.goals.ttft_s is not None:
        yield f"first token within {state.goals.ttft_s * 1e3:g} ms"
    if state.goals.itl_s is not None:
        yield f"a token every {state.goals.itl_s * 1e3:g} ms"
    if state.goals.ttft_s is None and state.goals.itl_s is None:
        yield "none but that no instance is overloaded"
    else:
        yield f"for {state.goals.share:.1%} of the requests"


def _pool_lines(pool: PoolState) -> Iterator[str]:
    missing = f", {pool.missing} of them not coming" if pool.missing else ""
    yield f"{pool.pool}: {pool.target} wanted{missing}, {pool.instances} there, {pool.needed} needed"
    yield f"  arrivals {pool.arrivals_per_s:.3g}/s, forecast {pool.forecast_per_s:.3g}/s, refused {pool.refused_per_s:.3g}/s"
    learned = f"steps learned from {pool.observations} reports" if pool.observations else "no steps learned yet"
    yield f"  work {pool.engine_seconds:.3g} engine-seconds/s, {pool.waiting} requests wait, {learned}"
    goodput = "no what-if" if pool.goodput_share is None else f"{pool.goodput_share:.1%} expected"
    ratio = f"{pool.ttft_ratio:.2f} of the predicted" if pool.ttft_ratio else "not compared"
    startup = f"{pool.startup_s:.3g} s" if pool.startup_s else "not seen"
    yield f"  goodput {goodput}; time to first token {ratio}; startup {startup}"
    yield f"  by {pool.by}: {pool.reason}" if pool.reason else f"  by {pool.by}"
    if pool.warning:
        yield f"  GOALS OUT OF REACH: {pool.warning}"


def _change_line(decision: DecisionMade, now: float) -> str:
    pool = decision.model if decision.role == "aggregated" else f"{decision.model} ({decision.role})"
    ago = _ago(now - decision.at)
    return f"  {ago:>9}  {pool}: {decision.before} -> {decision.instances} by {decision.by}: {decision.reason}"


def target_lines(targets: Targets, now: float) -> Iterator[str]:
    """Yield what is printed of the targets in etcd. `now`: unix time."""
    if not targets.targets:
        yield "no targets: no planner has decided anything"
        return
    yield f"targets of planner {targets.planner}"
    for target in targets.targets:
        yield f"{target.pool}: {target.instances}, decided {_ago(now - target.decided_at)}, {target.reason}"


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"
