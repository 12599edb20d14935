"""`dynamo-local top`: what a frontend's console shows, in a terminal.

dynamo-local top [http://127.0.0.1:8000] [--api-key-file FILE] [--once]

Into a pipe or a file, one screen follows the other.
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import NoReturn

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dynamo.common.admin_api import add_key_option, read_key
from dynamo.common.config import ConfigError
from dynamo.common.lifecycle import EXIT_FAILURE

PROGRAM = "dynamo-local top"
PERIOD_S = 1.0
_TIMEOUT_S = 5.0
_PIPE_COLUMNS = 160
"""Where no terminal says how wide it is."""
_PREFIX = "dynamo_frontend_"


class _Instance(msgspec.Struct, frozen=True):
    id: str
    role: str
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    hit_rate: float | None = None
    queued_prefill_tokens: int | None = None
    step_ms: float | None = None


class _Model(msgspec.Struct, frozen=True):
    name: str
    kind: str
    ready: bool
    instances: list[_Instance]


class _Fleet(msgspec.Struct, frozen=True):
    namespace: str
    router_mode: str
    state: str
    explains: bool
    models: list[_Model]


class _Decision(msgspec.Struct, frozen=True):
    model: str
    at: float
    instance: str
    reason: str
    overlap_blocks: int = 0
    cost: float = 0.0


class _Decisions(msgspec.Struct, frozen=True):
    decisions: list[_Decision]


class Counters:
    """The metrics of one scrape, summed over models; histograms by their upper bounds, cumulative."""

    def __init__(self, text: str, scraped_at: float) -> None:
        self.scraped_at = scraped_at
        self.values: dict[str, float] = {}
        self.buckets: dict[str, dict[float, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.startswith(_PREFIX):
                    continue
                name = sample.name.removeprefix(_PREFIX)
                if name.endswith("_bucket"):
                    counts = self.buckets.setdefault(name.removesuffix("_bucket"), {})
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
                else:
                    key = f"{name}|{sample.labels['status']}" if "status" in sample.labels else name
                    self.values[key] = self.values.get(key, 0.0) + sample.value

    def rate(self, name: str, before: Counters) -> float:
        """Return the increase per second since `before`."""
        grown = self.values.get(name, 0.0) - before.values.get(name, 0.0)
        return max(0.0, grown) / max(self.scraped_at - before.scraped_at, 1e-9)

    def quantile(self, name: str, share: float, before: Counters) -> float | None:
        """Return a quantile of what was observed since `before`, linear within a bucket; None without observations."""
        old = before.buckets.get(name, {})
        counts = sorted((bound, count - old.get(bound, 0.0)) for bound, count in self.buckets.get(name, {}).items())
        if not counts or counts[-1][1] <= 0:
            return None
        wanted, lower, below = share * counts[-1][1], 0.0, 0.0
        for bound, count in counts:
            if count >= wanted:
                inside = (wanted - below) / max(count - below, 1e-9)
                return lower if bound == float("inf") else lower + (bound - lower) * inside
            lower, below = bound, count
        return lower


class Frontend:
    """One frontend's HTTP side."""

    def __init__(self, url: str, key: str) -> None:
        """`key`: empty where none is needed."""
        self._url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def read(self, path: str) -> bytes:
        """Return the body at `path`. Raises OSError with the path and the reason."""
        request = urllib.request.Request(self._url + path, headers=self._headers)  # noqa: S310  # checked by main
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
                data: bytes = response.read()
                return data
        except urllib.error.HTTPError as error:
            detail = error.read(300).decode(errors="replace")
            raise OSError(f"{self._url}{path} responded {error.code}: {detail}") from error
        except (urllib.error.URLError, TimeoutError) as error:
            raise OSError(f"{self._url}{path} cannot be read: {error}") from error


def draw(fleet: _Fleet, now: Counters, before: Counters, decisions: Sequence[_Decision]) -> Group:
    """Return one screen."""

    def ms(name: str, share: float) -> str:
        seconds = now.quantile(name, share, before)
        return "–" if seconds is None else f"{seconds * 1e3:.1f} ms"

    head = Text.assemble(
        (f"dynamo {fleet.namespace}", "bold"),
        f"  {fleet.state}, {fleet.router_mode} routing\n",
        f"requests/s {now.rate('requests_total|success', before):.1f}  failed/s {now.rate('requests_total|error', before):.1f}  ",
        f"running {now.values.get('inflight_requests', 0):.0f}  tokens/s {now.rate('output_tokens_total', before):,.0f}\n",
        f"TTFT {ms('time_to_first_token_seconds', 0.5)} (95 %: {ms('time_to_first_token_seconds', 0.95)})  ",
        f"ITL {ms('inter_token_latency_seconds', 0.5)}  request {ms('request_duration_seconds', 0.5)}",
    )
    instances = Table("model", "instance", "role", box=None, pad_edge=False)
    for column in ("running", "waiting", "KV usage", "hit rate", "prefill queue", "step ms"):
        instances.add_column(column, justify="right")
    for model in fleet.models:
        name = model.name if model.ready else f"{model.name} (not ready)"
        if not model.instances:
            instances.add_row(name, "none")
        for instance in model.instances:
            instances.add_row(name, instance.id, instance.role, *_figures(instance))
    chosen = Table("decided", "model", "instance", "why", box=None, pad_edge=False)
    for column in ("cached blocks", "cost"):
        chosen.add_column(column, justify="right")
    for decision in decisions:
        decided_at = time.strftime("%H:%M:%S", time.localtime(decision.at))
        chosen.add_row(
            decided_at, decision.model, decision.instance, decision.reason, str(decision.overlap_blocks), f"{decision.cost:.1f}"
        )
    return Group(head, "", instances, *(("", chosen) if decisions else ()))


def _figures(instance: _Instance) -> list[str]:
    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.0%}"

    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:g}"

    return [
        *(number(instance.running), number(instance.waiting), share(instance.kv_usage), share(instance.hit_rate)),
        *(number(instance.queued_prefill_tokens), number(instance.step_ms)),
    ]


def watch(frontend: Frontend, *, once: bool, console: Console) -> None:
    """Draw until interrupted; with `once`, one screen with the rates of one second.

    Raises OSError at the first failure, on a terminal only at that.
    """
    fleet = msgspec.json.Decoder(_Fleet)
    decided = msgspec.json.Decoder(_Decisions)

    def scrape() -> Counters:
        return Counters(frontend.read("/metrics").decode(), time.monotonic())

    def screen(before: Counters) -> tuple[Group, Counters]:
        now = scrape()
        shown = fleet.decode(frontend.read("/console/fleet"))
        decisions = decided.decode(frontend.read("/v1/routing/decisions?limit=10")).decisions if shown.explains else []
        return draw(shown, now, before, decisions), now

    before = scrape()
    frontend.read("/console/fleet")  # from here on the frontend follows loads
    time.sleep(PERIOD_S)
    if once:
        console.print(screen(before)[0])
        return
    if not console.is_terminal:
        while True:
            drawn, before = screen(before)
            console.print(drawn, "")
            time.sleep(PERIOD_S)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                drawn, before = screen(before)
            except OSError as error:
                drawn = Group(Text(str(error), "red"))  # it may be back in a moment
            live.update(drawn, refresh=True)
            time.sleep(PERIOD_S)


def main(arguments: Sequence[str]) -> NoReturn:
    parser = argparse.ArgumentParser(PROGRAM, description="Shows what a frontend and its fleet are doing.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="HTTP side of the frontend (%(default)s)")
    add_key_option(parser)
    parser.add_argument("--once", action="store_true", help="print one screen and end")
    given = parser.parse_args(arguments)
    if not given.url.startswith(("http://", "https://")):
        parser.error(f"{given.url} is not an http:// or https:// URL")
    try:
        console = Console()
        if not console.is_terminal:
            console.width = _PIPE_COLUMNS
        watch(Frontend(given.url, read_key(given.api_key_file)), once=given.once, console=console)
    except (OSError, ConfigError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        sys.exit(EXIT_FAILURE)
    except KeyboardInterrupt:
        pass
    sys.exit(0)
