"""An OpenTelemetry collector for tests: OTLP over gRPC, kept in memory.

`python -m tests.support.collector 4317` prints the spans that reach it, for debugging without a collector.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"
Value = str | int | float | bool


@dataclass(frozen=True)
class SeenSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    started_ns: int
    ended_ns: int
    attributes: dict[str, Value]
    events: tuple[str, ...]
    failed: bool


@dataclass
class Collector:
    port: int = 0
    spans: list[SeenSpan] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of(self, trace_id: str) -> dict[str, SeenSpan]:
        """The spans of a trace, by `service/name`."""
        return {f"{span.service}/{span.name}": span for span in self.spans if span.trace_id == trace_id}

    async def trace(self, trace_id: str, *names: str, within_s: float = 120) -> dict[str, SeenSpan]:
        """The spans of a trace, once all of these are there."""
        async with asyncio.timeout(within_s):
            while not set(names) <= self.of(trace_id).keys():
                await self.changed()
        return self.of(trace_id)

    async def changed(self) -> None:
        """Wait for the next export."""
        self._news.clear()
        await self._news.wait()

    async def export(self, data: bytes, context: object) -> bytes:
        request = ExportTraceServiceRequest.FromString(data)
        for resource in request.resource_spans:
            about = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {entry.key: getattr(entry.value, str(entry.value.WhichOneof("value"))) for entry in span.attributes}
                    self.spans.append(
                        SeenSpan(
                            service=about["service.name"],
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            started_ns=span.start_time_unix_nano,
                            ended_ns=span.end_time_unix_nano,
                            attributes=values,
                            events=tuple(event.name for event in span.events),
                            failed=span.status.code == 2,
                        )
                    )
        self._news.set()
        return ExportTraceServiceResponse().SerializeToString()


@asynccontextmanager
async def collecting(port: int = 0) -> AsyncIterator[Collector]:
    collector = Collector()
    server = grpc.aio.server()
    export: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(collector.export)
    server.add_registered_method_handlers(EXPORT, {"Export": export})
    collector.port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


async def main(port: int) -> None:
    """Print each span as it arrives, until interrupted."""
    async with collecting(port) as collector:
        shown = 0
        while True:
            for span in collector.spans[shown:]:
                took_ms = (span.ended_ns - span.started_ns) / 1e6
                print(f"{span.trace_id} {span.service}/{span.name} {took_ms:.2f} ms {span.attributes}", flush=True)
            shown = len(collector.spans)
            await collector.changed()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
