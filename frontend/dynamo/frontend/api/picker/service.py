"""The gRPC service of an endpoint picker: `envoy.service.ext_proc.v3.ExternalProcessor`, and its health."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from dynamo.frontend.api.declaration import Charge, Declaration, OtherSites, Reads
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.http.paths import PathTable
from dynamo.frontend.api.picker.picking import PickerParts
from dynamo.frontend.api.picker.processing import Processing
from dynamo.frontend.api.rpc.http2.method import CallCancelled
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.config import PickerOptions
from dynamo.frontend.port_metrics import PickerMetrics
from dynamo.frontend.security.surfaces import Surface
from dynamo.frontend.serving.data_plane import DataPlane

PICKER_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
RESETS_PER_S: Final = 10_000.0
"""A gateway carries the requests of many clients over one connection, and resets a call when its client leaves: no client may end
the calls of all others by leaving often."""
PROCESS: Final = Declaration(
    surface=Surface.INFERENCE,
    is_action=False,
    reads=Reads.JSON,
    copies=1,
    charge=Charge.NOTHING,  # the request in it is charged, by what its operation declares
    deadline_s=None,
    other_sites=OtherSites.REFUSED,
)
_PLACED: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        *(
            f"/v2/models/{{model:path}}{version}/{verb}"
            for version in ("", "/versions/{version}")
            for verb in ("generate", "generate_stream", "infer")
        ),
    }
)
"""Paths of the operations by which requests are placed."""


class PickerService:
    def __init__(
        self,
        plane: DataPlane,
        operations: Iterable[Operation],
        guard: Guard,
        settings: HttpSettings,
        options: PickerOptions,
        metrics: PickerMetrics,
        refused: Callable[[str, BaseException], None],
        drain: StreamDrain,
        body_s: float = 30.0,
    ) -> None:
        table: PathTable[Operation] = PathTable()
        for operation in operations:
            if operation.path in _PLACED and operation.method == "POST":
                table.add(operation.path, operation)
        self._parts = PickerParts(
            plane=plane,
            operations=table,
            guard=guard,
            settings=settings,
            options=options,
            priorities=dict(options.objectives),
            metrics=metrics,
            refused=refused,
            body_s=body_s,
        )
        self._drain = drain

    def operations(self) -> list[GrpcOperation]:
        path = f"/{PICKER_SERVICE}/Process"
        return [GrpcOperation(path=path, declared=PROCESS, handle=self._process, reads_stream=True, writes_stream=True)]

    async def _process(self, unused: object, context: Context) -> None:
        with suppress(CallCancelled):  # the gateway may leave at any time
            await Processing(self._parts, self._drain, context).run()
