"""Writes the tables in docs/observability.md from the metrics; with `--check`, fails if they are not what it would write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.telemetry import RuntimeMetrics
from dynamo.frontend.metrics import FrontendMetrics, GrpcServerMetrics
from dynamo.worker.metrics import WorkerMetrics

PAGE = Path(__file__).with_name("observability.md")
BEGIN, END = "<!-- made by `make docs` -->\n", "<!-- end of what `make docs` made -->\n"

TABLES: tuple[tuple[str, Callable[[CollectorRegistry], object]], ...] = (
    ("Frontend", FrontendMetrics),
    ("gRPC calls to a frontend", GrpcServerMetrics),
    ("Worker", lambda registry: WorkerMetrics(registry, Endpoint(), InstanceId(0))),
    ("Both", lambda registry: RuntimeMetrics(registry, role="frontend", version="")),
)


def table(make: Callable[[CollectorRegistry], object]) -> str:
    registry = CollectorRegistry()
    make(registry)
    lines = ["| metric | kind | labels | |", "|---|---|---|---|"]
    for metric in registry._collector_to_names:
        if isinstance(metric, MetricWrapperBase):
            name = metric._name + ("_total" if metric._type == "counter" else "")
            labels = ", ".join(f"`{label}`" for label in metric._labelnames)
            lines.append(f"| `{name}` | {metric._type} | {labels} | {metric._documentation} |")
    return "\n".join(lines) + "\n"


def page(before: str) -> str:
    """The page with its tables renewed."""
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    tables = "\n".join(f"**{title}**\n\n{table(make)}" for title, make in TABLES)
    return f"{head}{BEGIN}\n{tables}\n{END}{tail}"


def main() -> None:
    before = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        sys.exit(before != page(before) and f"{PAGE} is out of date; run `make docs`")
    PAGE.write_text(page(before), encoding="utf-8")


if __name__ == "__main__":
    main()
