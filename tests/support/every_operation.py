"""A frontend in the test's process with every operation of every protocol, and a request for each of them.

HTTP is called as by its server and gRPC by the methods' handlers, both behind their guards; lines of batches go through the
runner. An operation that has no request here fails the tests of `test_every_operation.py`.
"""

from __future__ import annotations

import asyncio
import json
import mmap
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol, cast
from urllib.parse import quote

import grpc
import grpc.aio
import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from dynamo.common.errors import EngineError, InstanceGone, Unsupported, release
from dynamo.common.etcd import Etcd, KeyValue, Reset
from dynamo.common.etcd.leases import Leases
from dynamo.common.http.served import Header
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.jetstream.records import Record
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.names import InstanceId
from dynamo.common.process.work import hold_nothing
from dynamo.common.repository import LOAD, UNLOAD, ControlMode, RepositoryInstance
from dynamo.common.scaling.targets import Targets
from dynamo.common.tensors.protobuf_wire import delimited
from dynamo.common.tensors.relay import FORM_PATHS, JSON_PATHS, RELAY_INPUTS, RelayedPart, part_to_outputs
from dynamo.common.tensors.request import build_response
from dynamo.common.tensors.tensors import decode_bytes
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.declaration import FORM_BYTES, LITTLE_BYTES, Declaration, Reads
from dynamo.frontend.api.guard import Accounts, Guard, watch_keys
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.http.guard import HttpGuard
from dynamo.frontend.api.http.json_scan import STRING_VALUES
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.kserve.regions import Regions
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.openai.batches.batch import Batches
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.batches.operations import BatchOperations
from dynamo.frontend.api.openai.batches.runner import BatchRunner
from dynamo.frontend.api.openai.store.background import IN_BACKGROUND, BackgroundResponses
from dynamo.frontend.api.operations import protocol_operations
from dynamo.frontend.api.rpc.bounded import bounded
from dynamo.frontend.api.rpc.guard import account_source, guarded
from dynamo.frontend.api.rpc.handlers import PendingMessage
from dynamo.frontend.api.rpc.operation import GrpcOperation
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.config import CapacityOptions, FrontendConfig, HttpOptions, ServingOptions, TextOptions
from dynamo.frontend.fleet.adapters import Adapters
from dynamo.frontend.fleet.repository import RepositoryView
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.names.rules import Rule, Target
from dynamo.frontend.preprocess.text_files import open_text_files
from dynamo.frontend.router.explain import DecisionLog
from dynamo.frontend.router.loads.thresholds import ThresholdTable
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.security.accounts import ANONYMOUS, KeyAccount
from dynamo.frontend.security.ledger import Ledger, UsageCounts
from dynamo.frontend.security.surfaces import Scope, Surface
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.frontend.wiring.grpc import grpc_operations
from dynamo.frontend.wiring.http import http_operations
from dynamo.protos import inference_pb2 as pb
from tests.support.fake_etcd import FakeEtcd
from tests.support.fake_records import FakeRecords
from tests.support.fakes import (
    ENDPOINT,
    FakeClient,
    FakeDirectory,
    FakeStream,
    echo_tensor,
    in_memory,
    instance,
    relay_card,
    tensor_card,
)
from tests.support.http_edge import FixedRules, Speaker, TextFiles, chat_card, connected, send_delta
from tests.support.served import Asking
from tests.support.statuses import STATUSES
from tests.support.storing import storage_of, stored_responses
from tests.support.waiting import WAIT_S

ALLOWED: dict[Scope, set[Surface]] = {
    Scope.INFER: {Surface.METADATA, Surface.INFERENCE, Surface.MODEL_CONFIG, Surface.STATISTICS},
    Scope.REPOSITORY: {Surface.MODEL_REPOSITORY},
    Scope.METRICS: {Surface.METRICS},
    Scope.DOCS: {Surface.DOCS},
    Scope.CONSOLE: {Surface.CONSOLE},
    Scope.THRESHOLDS: {Surface.THRESHOLDS},
    Scope.NAMES: {Surface.NAMES},
    Scope.USAGE: {Surface.USAGE},
    Scope.ADMIN: set(Surface),
}
"""Written down once more, so that a wrong entry in the server's own table is noticed."""

# Models: of each kind one that a key may be confined to, one that is hidden from such a key, and a name of operators for that


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of models that operations take."""

    open: str
    hidden: str
    alias: str
    """Stands for the hidden one, and keys may use the name."""


TENSORS, TEXT, TEXTS, MEDIA = (
    Kind(f"open-{kind}", f"hidden-{kind}", f"open-alias-{kind}") for kind in ("tensors", "text", "texts", "media")
)
CONFINED = "open-*"
"""What a confined key may use."""
RULES = {kind.alias: Rule(targets=(Target(model=kind.hidden),)) for kind in (TENSORS, TEXT, TEXTS, MEDIA)}


def _classifier(name: str) -> ModelCard:
    return ModelCard(
        name=name,
        kind=ModelKind.TENSOR,
        inputs=(TensorSpec(name="text", datatype="BYTES", shape=(-1,)),),
        outputs=(
            TensorSpec(name="numbers", datatype="FP32", shape=(-1, 2), labels=("bad", "good")),
            TensorSpec(name="prompt_tokens", datatype="INT32", shape=(-1,)),
        ),
    )


def _cards() -> list[ModelCard]:
    makers = ((TENSORS, tensor_card), (TEXT, chat_card), (TEXTS, _classifier), (MEDIA, relay_card))
    return [make(name) for kind, make in makers for name in (kind.open, kind.hidden)]


class Engine:
    """A `respond` for FakeClient: serves all kinds of models, or does what `behaves` says to the next requests."""

    def __init__(self, *, is_silent: bool = False) -> None:
        self.is_silent = is_silent
        self.behaves: list[Callable[[FakeStream], None]] = []
        """What happens to requests to models, in order; the last one stays."""
        self._speaker = Speaker()

    def __call__(self, stream: FakeStream) -> None:
        if self.is_silent:
            return
        if stream.verb == "statistics":
            return stream.end(pb.ModelStatisticsResponse().SerializeToString())
        if stream.verb in (LOAD, UNLOAD):
            return stream.fail(Unsupported("this worker loads nothing"))
        behave: Callable[[FakeStream], None] = self.serve
        if self.behaves:
            behave = self.behaves.pop(0) if len(self.behaves) > 1 else self.behaves[0]
        behave(stream)

    def serve(self, stream: FakeStream) -> None:
        if stream.verb == "generate":
            return self._speaker(stream)
        request = pb.ModelInferRequest.FromString(stream.body)
        if request.inputs[0].name == "x":
            return echo_tensor(stream)
        if request.inputs[0].name == RELAY_INPUTS[0].name:
            head, raws = part_to_outputs(RelayedPart(b"{}", 200, "application/json"))
            stream.data(b"".join(build_response(head, raws)))
            return stream.end()
        rows = len(decode_bytes(request.raw_input_contents[0], request.inputs[0].shape[0]))
        response = pb.ModelInferResponse()
        response.outputs.add(name="numbers", datatype="FP32", shape=(rows, 2))
        response.outputs.add(name="prompt_tokens", datatype="INT32", shape=(rows,))
        response.raw_output_contents.extend([np.ones((rows, 2), np.float32).tobytes(), np.ones(rows, np.int32).tobytes()])
        stream.end(response.SerializeToString())

    def die(self, stream: FakeStream) -> None:
        """Leave; if text is generated, after the first of it."""
        if stream.verb == "generate":
            send_delta(stream, "H")
        stream.fail(InstanceGone(stream.instance))


def hold(stream: FakeStream) -> None:
    """Let a request wait."""


class EngineClient(FakeClient):
    """A client that leaves out the bodies of requests that only wait: its copy of them is not the frontend's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._engine = engine

    def open(self, instance: InstanceId, subject: str, verb: str, body: Body, **options: Any) -> FakeStream:
        return super().open(instance, subject, verb, b"" if self._engine.behaves == [hold] or verb == LOAD else body, **options)


def fail(stream: FakeStream) -> None:
    stream.fail(EngineError("the model is broken"))


# The frontend


class FreeLeases(Leases):
    """Every caller gets the lease that it wants."""

    def __init__(self) -> None:
        super().__init__(cast(Etcd, None), "")

    async def take(self, name: str) -> bool:
        return True

    async def release(self, name: str) -> None: ...


class PeakCapacity(Capacity):
    """Remembers how much was held at once."""

    peak_bytes = 0

    def hold(self, size_bytes: int) -> None:
        super().hold(size_bytes)
        self.peak_bytes = max(self.peak_bytes, self.buffered_bytes)


class Stalled:
    """A store that responds to nothing."""

    is_ready = True

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, NoReturn]]:
        async def wait(*arguments: object, **options: object) -> NoReturn:
            await asyncio.Event().wait()
            raise AssertionError("nothing is set")

        return wait


class Elsewhere(FakeRecords):
    """Keeps values where Python does not count them: the store is not a part of the frontend."""

    async def put(self, key: str, value: bytes, **more: Any) -> int | None:
        revision = await super().put(key, value, **more)
        if revision is not None and value:
            kept = mmap.mmap(-1, len(value))
            kept[:] = value
            self.records[key] = replace(self.records[key], value=cast(bytes, kept))
        return revision

    async def get(self, key: str, hold: Callable[[int], None] | None = None) -> Record | None:
        record = await super().get(key, hold)
        return None if record is None else replace(record, value=record.value[:])

    async def values(self, pattern: str) -> dict[str, bytes]:
        return {key: value[:] for key, value in (await super().values(pattern)).items()}


@dataclass(frozen=True, slots=True)
class Frontend:
    plane: DataPlane
    client: FakeClient
    engine: Engine
    app: HttpApp
    methods: Mapping[str, GrpcOperation]
    """Behind their guards, by path."""
    runner: BatchRunner
    files: Files
    batches: Batches
    background: BackgroundResponses
    records: FakeRecords
    capacity: PeakCapacity
    accounts: Accounts | None
    operations: Sequence[Operation]
    grpc_operations: Sequence[GrpcOperation]

    @property
    def requests(self) -> list[FakeStream]:
        """What was sent to models."""
        return [stream for stream in self.client.streams if stream.verb not in ("statistics", LOAD, UNLOAD)]

    def account(self, name: str) -> KeyAccount:
        assert self.accounts is not None, "there are no keys"
        return self.accounts.named(name)

    @property
    def entries(self) -> list[Entry]:
        return [
            *(HttpEntry(operation) for operation in self.operations),
            *(GrpcEntry(operation) for operation in self.grpc_operations),
            BatchEntry(next(each.declared for each in self.operations if each.path == _BATCHED)),
            BackgroundEntry(IN_BACKGROUND),
        ]


@asynccontextmanager
async def open_frontend(
    keys: Path | None = None,
    *,
    http: HttpOptions | None = None,
    capacity: CapacityOptions | None = None,
    records: FakeRecords | None = None,
    recorded: Callable[[str, str, UsageCounts], None] = lambda key, model, usage: None,
    is_alone: bool = False,
) -> AsyncIterator[Frontend]:
    """`keys`: the file of API keys; None: none are needed. The clock of their limits stands still.

    `recorded` is called with what the ledger gets. `is_alone`: nothing else, neither stores nor workers, responds to it.
    """
    records, engine = records or FakeRecords(), Engine(is_silent=is_alone)
    store: Any = Stalled() if is_alone else records
    etcd = cast(Etcd, Stalled() if is_alone else FakeEtcd())
    cards = [card for card in _cards() for _ in range(2)]  # so that each has another instance to go to
    directory = FakeDirectory(*(instance(number, card) for number, card in enumerate(cards, 1)))
    client = EngineClient(engine)
    metrics = FrontendMetrics(CollectorRegistry())
    occupied = PeakCapacity(capacity)
    accounts = None if keys is None else Accounts(watch_keys(keys), lambda: 0.0, Ledger(counted=recorded))
    guard = Guard(accounts)
    config = FrontendConfig(http=http or HttpOptions())
    repositories = RepositoryView(etcd, "ns")
    worker = RepositoryInstance(
        id=InstanceId(1), endpoint=ENDPOINT, subject=ENDPOINT.rpc_subject(InstanceId(1)), mode=ControlMode.EXPLICIT
    )
    repositories.apply(Reset((KeyValue(worker.key, worker.encode(), 1),), 1))
    adapters = Adapters(etcd, "ns", cast(Any, directory), timeout_s=WAIT_S)
    async with (
        _memory_of_clients() as folder,
        open_text_files(TextFiles(), TextOptions()) as texts,
        open_data_plane(
            *in_memory(directory, client),
            RoundRobin(),
            texts,
            metrics,
            ServingOptions(),
            repositories=repositories,
            rules=FixedRules(RULES),
            adapters=adapters,
        ) as plane,
    ):
        readiness = Readiness()
        readiness.attach(plane)
        for kind in (TEXT.open, TEXT.hidden):
            await plane.text_model(ANONYMOUS, kind)
        kserve = KserveServer(shared_regions=Regions(folder, max_request_bytes=config.grpc.max_message_bytes))
        background = BackgroundResponses(stored_responses(store, metrics), beat_s=0.01)
        files, batches = Files(storage_of(store)), Batches(storage_of(store))
        settings = HttpSettings(options=config.http, capacity=occupied)
        protocols = protocol_operations(plane, readiness, TextOptions(), kserve=kserve, background=background)
        by_path = {operation.path: operation for operation in protocols if operation.method == "POST"}
        runner = BatchRunner(files, batches, FreeLeases(), by_path, settings, guard.account_named, metrics, key_wait_s=0.0)
        control = SimpleNamespace(
            thresholds=ThresholdTable(), decisions=DecisionLog(), follows_loads=True, set_thresholds=lambda model, wanted: None
        )
        parts: Any = SimpleNamespace(config=config, readiness=readiness, metrics=SimpleNamespace(scrape=_scrape))
        loads = SimpleNamespace(read=dict)
        targets = SimpleNamespace(targets=Targets())
        reached: Any = SimpleNamespace(plane=plane, control=control, loads=loads, targets=targets, names=_Names(), usage=_Usage())
        batched = BatchOperations(files, batches, runner.poke).operations()
        operations = http_operations(parts, connected(), reached, [*protocols, *batched])
        app = HttpApp(operations, settings, HttpGuard(guard, config.http), metrics.refused)
        methods = grpc_operations(config, plane, readiness, StreamDrain(), account_source(guard), occupied, kserve)
        wrapped = {each.path: each for each in guarded(bounded(methods, occupied), guard)}
        try:
            yield Frontend(
                plane=plane,
                client=client,
                engine=engine,
                app=app,
                methods=wrapped,
                runner=runner,
                files=files,
                batches=batches,
                background=background,
                records=records,
                capacity=occupied,
                accounts=accounts,
                operations=operations,
                grpc_operations=methods,
            )
        finally:
            await background.drain(0.0)
            kserve.regions.close()


@asynccontextmanager
async def _memory_of_clients() -> AsyncIterator[str]:
    """A folder in place of /dev/shm, with one object that clients may register."""
    with TemporaryDirectory() as folder:
        (Path(folder) / _OBJECT).write_bytes(bytes(64))
        yield folder


async def _scrape() -> tuple[bytes, str]:
    return b"", "text/plain"


class _Names:
    rules = RULES

    async def change(self, change: Callable[[dict[str, Rule]], None]) -> None:
        change(dict(RULES))


class _Usage:
    async def read(self, first: str, last: str) -> list[Any]:
        return []


# Requests


Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int
    """HTTP's; gRPC's is mapped to it."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for an operation."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    """JSON, or bytes."""
    query: str = ""
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def encoded(self) -> bytes:
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


class Client(Asking):
    """An HTTP request and its client, which sends `body`, and leaves when it is told to."""

    def __init__(self, method: str, path: str, headers: Sequence[Header] = (), query: str = "", body: bytes = b"") -> None:
        super().__init__(path, method=method, headers=headers, query=query)
        self.received = b""
        self._to_send = memoryview(body)
        self._sent = 0
        self._left = asyncio.Event()

    def leave(self) -> None:
        self._left.set()
        self.watch.leave()

    async def read(self) -> bytes | None:
        if self._sent > len(self._to_send) or (self._sent == len(self._to_send) and self._sent):
            await self._left.wait()
            return None
        await asyncio.sleep(0)  # as others do, it comes in turn with other requests
        piece = bytes(self._to_send[self._sent : self._sent + _PIECE_BYTES])
        self._sent += len(piece) or 1
        self.more_body = self._sent < len(self._to_send)
        return piece

    async def write(self, body: Buffer, *, is_last: bool = False) -> None:
        self.received += bytes(body)[: _KEPT_BYTES - len(self.received)]
        if not is_last:
            await asyncio.sleep(0)  # the connection takes it when the client has read what was before


_PIECE_BYTES = 64 * 1024
_LONG_BYTES = 4 << 20
_KEPT_BYTES = 1 << 20


class Entry:
    """An operation, and how it is called."""

    declared: Declaration
    name: str
    kind: Kind | None
    """Kind of the models that requests name; None: they name none."""
    knows_aliases: bool

    async def send(
        self, front: Frontend, model: str = "", headers: Headers | None = None, *, owner: str = "", leaving: Leaving | None = None
    ) -> Outcome:
        """Send a request. `owner`: the name of the key in `headers`, for what is not called by clients."""
        raise NotImplementedError

    def largest(self, front: Frontend, shape: str, options: HttpOptions, count: int = 1) -> Sequence[Sender]:
        """Return what sends `count` of the largest requests; nothing if there is no such, or if it is one of another entry."""
        return ()


@dataclass(slots=True)
class Leaving:
    """Set by the entry: lets the client of the request leave."""

    leave: Callable[[], None] = lambda: None
    was_late: bool = False
    """The request had ended by itself when the client left, though its sender had not taken note of that."""

    def by(self, task: asyncio.Future[Any]) -> None:
        """The client leaves by cancelling a task."""

        def leave() -> None:
            self.was_late = not task.cancel()

        self.leave = leave


class Sender(Protocol):
    """Sends one request."""

    def __call__(self, *, leaving: Leaving | None = None) -> Coroutine[Any, Any, Outcome]: ...


ITEMS = {"integers": ("1000", 1), "fractions": ("0.1", 2), "strings": ('"é€"', STRING_VALUES), "objects": ('{"é":"€"}', 22)}
"""What long arrays consist of, and what each of them counts."""
TENSORS_IN_JSON = {
    "integers": ("INT64", "1000", 8),
    "fractions": ("FP64", "0.1", 8),
    "strings": ("BYTES", '"é€"', 9),
    "objects": ("BOOL", "true", 1),
}
"""The tensors in the same shapes: datatype, element, and the bytes of that in binary."""
SHAPES = ("text", *ITEMS, "tensors")
"""Shapes of the largest bodies: one long string, as many values as are allowed, and as many tensors in JSON."""
_MARGIN_BYTES = 2048
_TENSORS = 4096


def _values(shape: str, options: HttpOptions, limit: int) -> str:
    item, weight = ITEMS[shape]
    size = len(item.encode()) + 1
    count = min((options.max_json_values - _MARGIN_BYTES) // weight, (limit - _MARGIN_BYTES) // size)
    return f"[{','.join([item] * count)}]"


def _tensors(shape: str, options: HttpOptions) -> bytes:
    """Return a request of infer with the largest tensor in JSON, or with the most."""
    datatype, element, size = TENSORS_IN_JSON.get(shape, TENSORS_IN_JSON["fractions"])
    text, tensors = len(element.encode()) + 1, _TENSORS if shape == "tensors" else 1
    limit = min(options.max_tensor_json_bytes, options.max_body_bytes) - _MARGIN_BYTES
    each = min(limit // tensors - len(_TENSOR % ("", "", 10**8, "")), options.max_body_bytes // tensors)
    count = min(each // text, (options.max_body_bytes - _MARGIN_BYTES) // size // tensors)
    tensor = _TENSOR % ("x", datatype, count, ",".join([element] * count))
    return b'{"inputs":[%b]}' % ",".join([tensor] * tensors).encode()


def largest_response(shape: str) -> bytes:
    """Return a model's response with large tensors, of numbers that take long to write."""
    datatype, element, _ = TENSORS_IN_JSON.get(shape, TENSORS_IN_JSON["fractions"])
    random = np.random.default_rng(0)
    if datatype == "BYTES":
        text = json.loads(element).encode()
        raw, count = (len(text).to_bytes(4, "little") + text) * _WORDS, _WORDS
    elif datatype == "BOOL":
        raw, count = random.integers(0, 2, _WORDS, np.uint8).tobytes(), _WORDS
    else:
        numbers = random.random(_NUMBERS) if datatype == "FP64" else random.integers(0, 2**62, _NUMBERS)
        raw, count = numbers.tobytes(), _NUMBERS
    response = pb.ModelInferResponse(model_name="m", model_version="1")
    tensors = _TENSORS if shape == "tensors" else 1
    for _ in range(tensors):
        response.outputs.add(name="y", datatype=datatype, shape=[count // tensors])
        response.raw_output_contents.append(raw[: len(raw) // tensors])
    return response.SerializeToString()


_NUMBERS, _WORDS = 4 << 20, 1 << 20
_TENSOR = '{"name":"%s","datatype":"%s","shape":[%d],"data":[%s]}'


class HttpEntry(Entry):
    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.declared = operation.declared
        self.name = f"{operation.method} {operation.path}"
        self.request = HTTP[self.name]
        self.kind, self.knows_aliases = self.request.kind, self.request.knows_aliases

    async def send(
        self, front: Frontend, model: str = "", headers: Headers | None = None, *, owner: str = "", leaving: Leaving | None = None
    ) -> Outcome:
        asked = self.request.of(model or (self.kind.open if self.kind else ""))
        return await self.send_asked(front, asked, headers, leaving=leaving)

    def largest(self, front: Frontend, shape: str, options: HttpOptions, count: int = 1) -> Sequence[Sender]:
        asked = self.request.of(self.kind.open if self.kind else "")
        headers: dict[str, str] = {}
        if self.declared.reads is Reads.FILE:
            limit = HttpSettings(options=options).body_limits[Reads.FILE]
            body = form(self.kind.open if self.kind else "", bytes(limit - FORM_BYTES)) if shape == "text" else None
        elif self.name.endswith("/infer") and shape == "text":
            size = (options.max_body_bytes - _MARGIN_BYTES) // 4
            tensor = {"name": "x", "datatype": "INT32", "shape": [size], "parameters": {"binary_data_size": 4 * size}}
            head = json.dumps({"inputs": [tensor]}).encode()
            headers["inference-header-content-length"] = str(len(head))
            body = head + bytes(4 * size)
        else:
            body = self.largest_json(shape, options)
        return [] if body is None else [partial(self.send_asked, front, replace(asked, body=body), headers)] * count

    def largest_json(self, shape: str, options: HttpOptions) -> bytes | None:
        """Return one of the largest bodies in JSON; None if there is none of this shape."""
        asked = self.request.of(self.kind.open if self.kind else "")
        limit = HttpSettings(options=options).body_limits[self.declared.reads]
        if self.name.endswith("/infer"):
            body = _tensors(shape, options)
        elif self.name.startswith("POST") and self.name.endswith("/load") and shape == "text":
            file = b64encode(bytes((limit - _MARGIN_BYTES) // 4 * 3))
            body = b'{"parameters":{"config":"{}","file:1/model.py":"%b"}}' % file
        elif not isinstance(asked.body, dict) or shape == "tensors":
            return None
        else:
            filler = json.dumps("a" * (limit - _MARGIN_BYTES)) if shape == "text" else _values(shape, options, limit)
            fields = TOKENS | FIELDS if shape == "integers" else FIELDS
            field = (fields.get(self.name, '"padding":%s') % filler).encode()
            body = asked.encoded[:-1] + (b"," if asked.body else b"") + field + b"}"
        assert len(body) <= limit, (len(body), limit)
        return body

    async def send_asked(
        self, front: Frontend, asked: Asked, headers: Headers | None = None, *, leaving: Leaving | None = None
    ) -> Outcome:
        path = self.operation.path
        for name, value in ({"{version}": "1", "{repository}": "models"} | dict(asked.parameters)).items():
            path = path.replace(name, quote(value, safe=""))
        assert "{" not in path, path
        body = asked.encoded
        given = {
            "content-type": asked.kind,
            "content-length": str(len(body)),
            "host": "127.0.0.1",
            **asked.headers,
            **(headers or {}),
        }
        encoded = [(name.encode(), value.encode()) for name, value in given.items()]
        client = Client(self.operation.method, path, encoded, asked.query, body)
        if leaving is not None:
            leaving.leave = client.leave
        await front.app(client)
        return Outcome(client.status or 499, client.received)


class GrpcEntry(Entry):
    def __init__(self, operation: GrpcOperation) -> None:
        self.operation = operation
        self.declared = operation.declared
        self.name = operation.path
        self.request = GRPC[operation.path]
        self.kind, self.knows_aliases = self.request.kind, self.request.knows_aliases

    async def send(
        self, front: Frontend, model: str = "", headers: Headers | None = None, *, owner: str = "", leaving: Leaving | None = None
    ) -> Outcome:
        message = self.request.of(model or (self.kind.open if self.kind else ""))
        return await self.send_message(front, message, headers, leaving=leaving)

    def largest(self, front: Frontend, shape: str, options: HttpOptions, count: int = 1) -> Sequence[Sender]:
        if shape != "text" or self.declared.surface is Surface.HEALTH:
            return ()
        if self.declared.reads is Reads.TENSORS and "Infer" in self.name:
            message = infer_message(TENSORS.open, (options.max_body_bytes - _MARGIN_BYTES) // 4)
        elif self.declared.reads is Reads.TENSORS:
            load = pb.RepositoryModelLoadRequest(model_name=TENSORS.open)
            load.parameters["config"].string_param = "{}"
            load.parameters["file:1/model.py"].bytes_param = bytes(options.max_body_bytes - _MARGIN_BYTES)
            message = load.SerializeToString()
        else:
            padding = bytes(LITTLE_BYTES - _MARGIN_BYTES)  # of a field that there is not
            message = self.request.of(self.kind.open if self.kind else "") + delimited(b"\xfa\x7f", padding)
        return [partial(self.send_message, front, message)] * count

    async def send_message(
        self, front: Frontend, message: bytes, headers: Headers | None = None, *, leaving: Leaving | None = None
    ) -> Outcome:
        method = front.methods[self.operation.path]
        context = GrpcContext([message], {"triton_grpc_error": "true", **(headers or {})})
        handler = asyncio.ensure_future(_handled(method, context))
        if leaving is not None:
            leaving.by(handler)
        try:
            response = await handler
        except asyncio.CancelledError:
            if handler.cancelled():
                return Outcome(499)
            raise
        return Outcome(STATUSES[context.code], bytes(response or b"".join(context.written)))


async def _handled(method: GrpcOperation, context: GrpcContext) -> Any:
    request = None if method.reads_stream else PendingMessage(cast(Any, context))
    if method.path != "/grpc.health.v1.Health/Watch":  # which has no end
        try:
            return await method.handle(request, cast(Any, context))
        except grpc.aio.AbortError as error:
            release(error)  # as the server does, at once
            return None
    watching = asyncio.ensure_future(method.handle(request, cast(Any, context)))
    await context.has_written.wait()
    watching.cancel()
    await asyncio.wait([watching])


class GrpcContext:
    """The context of one call, as handlers use it."""

    def __init__(self, messages: Sequence[bytes], metadata: Mapping[str, str]) -> None:
        self.code: grpc.StatusCode = grpc.StatusCode.OK
        self.written: list[bytes] = []
        self.has_written = asyncio.Event()
        self._messages = list(messages)
        self._metadata = tuple(metadata.items())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def set_trailing_metadata(self, metadata: object) -> None: ...

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None

    async def read(self) -> object:
        if not self._messages:
            return grpc.aio.EOF
        message = self._messages.pop(0)
        if len(message) < _LONG_BYTES:
            return bytes(memoryview(message))  # each has memory of its own
        copied = await asyncio.to_thread(lambda: bytes(memoryview(message)))  # which a server fills piece by piece
        return memoryview(copied)

    async def write(self, message: bytes) -> None:
        self.written.append(message)
        self.has_written.set()

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: object = ()) -> NoReturn:
        self.code = code
        raise grpc.aio.AbortError(details)


_BATCHED = "/v1/chat/completions"


class BatchEntry(Entry):
    """A line of a batch, carried out for the key that made it."""

    name = "a line of a batch"
    kind, knows_aliases = TEXT, True

    def __init__(self, declared: Declaration) -> None:
        self.declared = declared

    async def send(
        self, front: Frontend, model: str = "", headers: Headers | None = None, *, owner: str = "", leaving: Leaving | None = None
    ) -> Outcome:
        body = HTTP[f"POST {_BATCHED}"].of(model or TEXT.open).encoded
        return await self._carry_out(front, _line(0, body), owner, leaving=leaving)

    def largest(self, front: Frontend, shape: str, options: HttpOptions, count: int = 1) -> Sequence[Sender]:
        line = HttpEntry(next(each for each in front.operations if each.path == _BATCHED)).largest_json(shape, options)
        if line is None:
            return []
        return [partial(self._carry_out, front, b"".join(_line(number, line) for number in range(count)), ANONYMOUS.name)]

    async def _carry_out(self, front: Frontend, line: bytes, owner: str, *, leaving: Leaving | None = None) -> Outcome:
        file = await front.files.create(owner, "f", "batch", line)
        batch = await front.batches.create(owner, _BATCHED, file.id, None)
        running = asyncio.ensure_future(front.runner.run())
        if leaving is not None:
            leaving.by(running)
        try:
            while (batch := await front.batches.read(owner, batch.id)).output_file_id is None and batch.error_file_id is None:
                if batch.status in ("failed", "expired") or running.done():
                    return Outcome(499 if batch.errors is None else 403 if "scope" in batch.errors.data[0].message else 401)
                await asyncio.sleep(0)
        finally:
            running.cancel()
            await asyncio.wait([running])
        content = await front.files.content(owner, batch.output_file_id or batch.error_file_id or "", hold_nothing)
        response = json.loads(content)["response"]
        return Outcome(response["status_code"], content)


def _line(number: int, body: bytes) -> bytes:
    return b'{"custom_id":"%d","method":"POST","url":"%b","body":%b}\n' % (number, _BATCHED.encode(), body)


class BackgroundEntry(Entry):
    """A response in the background, which may be refused at its start only."""

    name = "a response in the background"
    kind, knows_aliases = TEXT, True

    def __init__(self, declared: Declaration) -> None:
        self.declared = declared

    async def send(
        self, front: Frontend, model: str = "", headers: Headers | None = None, *, owner: str = "", leaving: Leaving | None = None
    ) -> Outcome:
        created = await self._create(front, self._operation(front).request.of(model or TEXT.open).encoded, headers)
        if created.status != 200:
            return created
        id = json.loads(created.body)["id"]
        cancel = HttpEntry(next(each for each in front.operations if each.path == "/v1/responses/{id}/cancel"))
        cancelled: list[asyncio.Future[Outcome]] = []
        if leaving is not None:
            of_id = Asked(parameters={"{id}": id})
            leaving.leave = lambda: cancelled.append(asyncio.ensure_future(cancel.send_asked(front, of_id, headers)))
        while (response := await front.background.stored.read(owner, id))["status"] not in ("completed", "failed", "cancelled"):
            await asyncio.sleep(0)
        await asyncio.gather(*cancelled)
        return Outcome({"completed": 200, "failed": 500, "cancelled": 499}[response["status"]], msgspec.json.encode(response))

    def largest(self, front: Frontend, shape: str, options: HttpOptions, count: int = 1) -> Sequence[Sender]:
        body = self._operation(front).largest_json(shape, options)
        if body is None:
            return []

        async def send(*, leaving: Leaving | None = None) -> Outcome:
            created = await self._create(front, body)
            if created.status == 200:
                await asyncio.Event().wait()  # it goes on
            return created

        return [send] * count

    def _operation(self, front: Frontend) -> HttpEntry:
        return HttpEntry(next(each for each in front.operations if each.path == "/v1/responses"))

    async def _create(self, front: Frontend, body: bytes, headers: Headers | None = None) -> Outcome:
        return await self._operation(front).send_asked(front, Asked(body=b'{"background":true,' + body[1:]), headers)


@dataclass(frozen=True, slots=True)
class Http:
    """How an operation is requested."""

    of: Callable[[str], Asked]
    """Returns a request by the name of a model, which is empty where requests name none."""
    kind: Kind | None = None
    knows_aliases: bool = True


@dataclass(frozen=True, slots=True)
class Grpc:
    of: Callable[[str], bytes]
    kind: Kind | None = None
    knows_aliases: bool = True


def _nothing() -> Http:
    return Http(lambda model: Asked())


def _at(**parameters: str) -> Http:
    """A path with an id."""
    return Http(lambda model: Asked(parameters={f"{{{name}}}": value for name, value in parameters.items()}))


def _of_model(kind: Kind, body: Any = None, *, knows_aliases: bool = True) -> Http:
    """A path with a model."""
    return Http(lambda model: Asked({"{model:path}": model}, body), kind, knows_aliases)


def _with(kind: Kind, **fields: Any) -> Http:
    """A body that names a model."""
    return Http(lambda model: Asked(body={"model": model, **fields}), kind)


def _real(kind: Kind, name: str, **fields: Any) -> Http:
    """A body that names a model, not by a name of operators."""
    return Http(lambda model: Asked(body={name: model, **fields}), kind, knows_aliases=False)


def _region(**fields: Any) -> Http:
    return Http(lambda model: Asked({"{region:path}": "r"}, fields or None))


_TOOL = '{"type":"function","function":{"name":"f","parameters":{"x":%s}}}'
FIELDS = {
    "POST /v1/chat/completions": f'"tools":[{_TOOL}]',
    "POST /v1/completions": '"nvext":{"annotations":[],"x":%s}',
    "POST /v1/chat/completions/render": f'"tools":[{_TOOL}]',
    "POST /v1/chat/completions/batch": '"chat_template_kwargs":{"x":%s}',
    "POST /v1/completions/render": '"nvext":{"annotations":[],"x":%s}',
    "POST /v1/chat/completions/derender": f'"chat_request":{{"messages":[{{"role":"user","content":"a"}}],"tools":[{_TOOL}]}}',
    "POST /v1/responses": '"tools":[{"type":"function","name":"f","parameters":{"x":%s}}]',
    "POST /v1/responses/input_tokens": '"tools":[{"type":"function","name":"f","parameters":{"x":%s}}]',
    "POST /v1/messages": '"tools":[{"name":"f","input_schema":{"type":"object","x":%s}}]',
    "POST /v1/messages/count_tokens": '"tools":[{"name":"f","input_schema":{"type":"object","x":%s}}]',
    "POST /tokenize": '"chat_template_kwargs":{"x":%s}',
}
"""The field of a request that may contain most; without one, an unknown field does."""
TOKENS = {
    "POST /v1/completions": '"prompt":%s',
    "POST /v1/embeddings": '"input":%s',
    "POST /inference/v1/generate": '"token_ids":%s',
    "POST /v1/completions/render": '"prompt":%s',
    **dict.fromkeys(("POST /detokenize", "POST /v1/detokenize"), '"tokens":%s'),
}
"""The field that takes ids of tokens."""
_OBJECT = "object"
_GENERATED = {"choices": [{"index": 0, "token_ids": [65], "finish_reason": "stop"}]}
MESSAGES = [{"role": "user", "content": "Hi"}]


def form(model: str, file: bytes) -> bytes:
    """Return a form with a file: for a model, or as one of a batch."""
    name, value = (b"model", model.encode()) if model else (b"purpose", b"batch")
    return (
        b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n%b\r\n--b--\r\n'
    ) % (name, value, file)


def _form(kind: Kind | None = None) -> Http:
    return Http(lambda model: Asked(body=form(model, b"{}"), kind="multipart/form-data; boundary=b"), kind)


WEB_SOCKET = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "sec-websocket-version": "13",
}
TENSOR = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [2], "data": [1, 2]}]}
_ID, _CONVERSATION, _FILE, _BATCH = "resp_" + "0" * 48, "conv_" + "0" * 48, "file-" + "0" * 32, "batch_" + "0" * 32
_V = "/v2/models/{model:path}/versions/{version}"
_M = "/v2/models/{model:path}"
_R = "/v2/repository/{repository}"

HTTP: dict[str, Http] = {
    **dict.fromkeys(
        ("GET /ping", "POST /ping", "GET /live", "GET /health", "GET /metrics", "GET /version", "GET /load"), _nothing()
    ),
    "GET /v1/models": _nothing(),
    "GET /v1/models/{model:path}/ready": _of_model(TEXT),
    "GET /v1/models/{model:path}": _of_model(TEXT),
    "POST /v1/load_lora_adapter": _real(TEXT, "lora_name", lora_path="/a"),
    "POST /v1/unload_lora_adapter": _real(TEXT, "lora_name"),
    "POST /v1/chat/completions": _with(TEXT, messages=MESSAGES),
    "POST /v1/completions": _with(TEXT, prompt="Hi"),
    "POST /v1/responses": _with(TEXT, input="Hi"),
    "POST /v1/responses/input_tokens": _with(TEXT, input="Hi"),
    "POST /v1/responses/compact": _nothing(),
    **dict.fromkeys(("GET /v1/responses/{id}", "DELETE /v1/responses/{id}", "POST /v1/responses/{id}/cancel"), _at(id=_ID)),
    "GET /v1/responses/{id}/input_items": _at(id=_ID),
    "POST /v1/conversations": Http(lambda model: Asked(body={"items": MESSAGES})),
    **dict.fromkeys(("GET /v1/conversations/{id}", "DELETE /v1/conversations/{id}"), _at(id=_CONVERSATION)),
    "POST /v1/conversations/{id}": Http(lambda model: Asked({"{id}": _CONVERSATION}, {"metadata": {"a": "b"}})),
    "POST /v1/conversations/{id}/items": Http(lambda model: Asked({"{id}": _CONVERSATION}, {"items": MESSAGES})),
    "GET /v1/conversations/{id}/items": _at(id=_CONVERSATION),
    "GET /v1/conversations/{id}/items/{item}": _at(id=_CONVERSATION, item="msg_1"),
    "DELETE /v1/conversations/{id}/items/{item}": _at(id=_CONVERSATION, item="msg_1"),
    "POST /v1/embeddings": _with(TEXTS, input="Hi"),
    **dict.fromkeys(("POST /v1/rerank", "POST /v2/rerank", "POST /rerank"), _with(TEXTS, query="a", documents=["b"])),
    **dict.fromkeys(("POST /v1/score", "POST /score"), _with(TEXTS, text_1="a", text_2="b")),
    **dict.fromkeys(("POST /v1/classify", "POST /classify", "POST /pooling"), _with(TEXTS, input="Hi")),
    "POST /invocations": _with(TEXTS, input="Hi"),
    **{f"POST {path}": _form(MEDIA) for path in FORM_PATHS},
    **{f"POST {path}": _with(MEDIA, input="Hi") for path in JSON_PATHS},
    "GET /v1/realtime": Http(lambda model: Asked(query=f"model={model}", headers=WEB_SOCKET), MEDIA),
    **dict.fromkeys(("POST /tokenize", "POST /v1/tokenize"), _with(TEXT, prompt="Hi")),
    "GET /tokenizer_info": Http(lambda model: Asked(query=f"model={model}"), TEXT),
    **dict.fromkeys(("POST /detokenize", "POST /v1/detokenize"), _with(TEXT, tokens=[65])),
    "POST /inference/v1/generate": _with(TEXT, token_ids=[65], sampling_params={}),
    "POST /v1/chat/completions/batch": _with(TEXT, messages=[MESSAGES]),
    "POST /v1/chat/completions/render": _with(TEXT, messages=MESSAGES),
    "POST /v1/completions/render": _with(TEXT, prompt="Hi"),
    "POST /v1/chat/completions/derender": _with(TEXT, generate_response=_GENERATED),
    "POST /v1/completions/derender": _with(TEXT, generate_responses=[_GENERATED]),
    "POST /v1/messages": _with(TEXT, messages=MESSAGES, max_tokens=5),
    "POST /v1/messages/count_tokens": _with(TEXT, messages=MESSAGES),
    **dict.fromkeys(("GET /v2", "GET /v2/health/live", "GET /v2/health/ready", "GET /v2/models/stats"), _nothing()),
    **{f"{method} {path}/index": _nothing() for method in ("GET", "POST") for path in ("/v2/repository", _R)},
    **{
        f"POST /v2/repository/models/{{model:path}}/{word}": _of_model(TENSORS, {}, knows_aliases=False)
        for word in ("load", "unload")
    },
    **{  # there is one repository, without a name, so no model is looked at
        f"POST {_R}/models/{{model:path}}/{word}": Http(lambda model: Asked({"{model:path}": "m"}, {}))
        for word in ("load", "unload")
    },
    **{f"GET {path}{end}": _of_model(TENSORS) for path in (_V, _M) for end in ("", "/ready", "/config", "/stats")},
    **{f"POST {path}/infer": _of_model(TENSORS, TENSOR) for path in (_V, _M)},
    **{
        f"POST {path}/{word}": _of_model(TEXT, {"text_input": "Hi"})
        for path in (_V, _M)
        for word in ("generate", "generate_stream")
    },
    **{f"GET {path}/trace/setting": _of_model(TENSORS, knows_aliases=False) for path in (_V, _M)},
    **{f"POST {path}/trace/setting": _of_model(TENSORS, {"trace_count": "1"}, knows_aliases=False) for path in (_V, _M)},
    "GET /v2/trace/setting": _nothing(),
    "POST /v2/trace/setting": Http(lambda model: Asked(body={"trace_count": "1"})),
    "GET /v2/logging": _nothing(),
    "POST /v2/logging": Http(lambda model: Asked(body={"log_info": True})),
    **{
        f"{method} /v2/{memory}sharedmemory{region}/{word}": _region()
        for memory in ("system", "cuda")
        for region in ("", "/region/{region:path}")
        for method, word in (("GET", "status"), ("POST", "unregister"))
    },
    **{
        f"POST /v2/{memory}sharedmemory{region}/register": _region(key=_OBJECT, byte_size=1)
        for memory in ("system", "cuda")
        for region in ("", "/region/{region:path}")
    },
    "POST /v1/files": _form(),
    "GET /v1/files": _nothing(),
    **dict.fromkeys(("GET /v1/files/{id}", "DELETE /v1/files/{id}", "GET /v1/files/{id}/content"), _at(id=_FILE)),
    "POST /v1/batches": Http(
        lambda model: Asked(body={"input_file_id": _FILE, "endpoint": _BATCHED, "completion_window": "24h"})
    ),
    "GET /v1/batches": _nothing(),
    **dict.fromkeys(("GET /v1/batches/{id}", "POST /v1/batches/{id}/cancel"), _at(id=_BATCH)),
    **dict.fromkeys(("GET /console", "GET /console/console.css", "GET /console/console.js", "GET /console/"), _nothing()),
    "GET /console/fleet": _nothing(),
    "GET /busy_threshold": _nothing(),
    "POST /busy_threshold": _real(TEXT, "model"),
    "GET /v1/routing/decisions": _nothing(),
    "GET /v1/names": _nothing(),
    "GET /v1/names/{name:path}": Http(lambda model: Asked({"{name:path}": model}), TEXT, knows_aliases=False),
    "PUT /v1/names/{name:path}": Http(
        lambda model: Asked({"{name:path}": model}, {"targets": [{"model": TEXT.open}]}), TEXT, knows_aliases=False
    ),
    "DELETE /v1/names/{name:path}": Http(lambda model: Asked({"{name:path}": model}), TEXT, knows_aliases=False),
    "GET /v1/usage": _nothing(),
    **dict.fromkeys(("GET /openapi.json", "GET /docs"), _nothing()),
}


def infer_message(model: str, numbers: int = 2) -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(4 * numbers)])
    request.inputs.add(name="x", datatype="INT32", shape=[numbers])
    return request.SerializeToString()


def _message(make: Callable[[str], Any], kind: Kind | None = None, *, knows_aliases: bool = True) -> Grpc:
    return Grpc(lambda model: bytes(make(model).SerializeToString()), kind, knows_aliases)


_EMPTY = Grpc(lambda model: b"")
_KSERVE: dict[str, Grpc] = {
    "ModelInfer": Grpc(infer_message, TENSORS),
    "ModelStreamInfer": Grpc(infer_message, TENSORS),
    "ServerLive": _EMPTY,
    "ServerReady": _EMPTY,
    "ModelReady": _message(lambda model: pb.ModelReadyRequest(name=model), TENSORS),
    "ServerMetadata": _EMPTY,
    "ModelMetadata": _message(lambda model: pb.ModelMetadataRequest(name=model), TENSORS),
    "ModelConfig": _message(lambda model: pb.ModelConfigRequest(name=model), TENSORS),
    "ModelStatistics": _message(lambda model: pb.ModelStatisticsRequest(name=model), TENSORS),
    "RepositoryIndex": _EMPTY,
    "RepositoryModelLoad": _message(lambda model: pb.RepositoryModelLoadRequest(model_name=model), TENSORS, knows_aliases=False),
    "RepositoryModelUnload": _message(
        lambda model: pb.RepositoryModelUnloadRequest(model_name=model), TENSORS, knows_aliases=False
    ),
    "TraceSetting": _message(lambda model: pb.TraceSettingRequest(model_name=model), TENSORS, knows_aliases=False),
    "LogSettings": _EMPTY,
    "SystemSharedMemoryStatus": _EMPTY,
    "SystemSharedMemoryRegister": _message(
        lambda model: pb.SystemSharedMemoryRegisterRequest(name="r", key=_OBJECT, byte_size=1)
    ),
    "SystemSharedMemoryUnregister": _EMPTY,
    "CudaSharedMemoryStatus": _EMPTY,
    "CudaSharedMemoryRegister": _EMPTY,
    "CudaSharedMemoryUnregister": _EMPTY,
}
GRPC: dict[str, Grpc] = {
    **{f"/inference.GRPCInferenceService/{name}": request for name, request in _KSERVE.items()},
    "/grpc.health.v1.Health/Check": _EMPTY,
    "/grpc.health.v1.Health/Watch": _EMPTY,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": _EMPTY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _EMPTY,
}
