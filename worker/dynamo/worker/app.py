"""A worker process: its parts in the order in which they start, and, backwards, end.

    engines load their models → NATS, etcd → requests are taken → registered

so a worker is visible only when it can serve. On SIGTERM: deregister, refuse what is new (callers retry elsewhere), finish
what is open within the drain timeout, close. A second signal ends the process at once.

To serve an engine from a program of one's own:

    await serve_worker(MyEngine(), WorkerConfig())                   # until SIGINT or SIGTERM

    async with open_worker(MyEngine(), WorkerConfig()) as worker:    # while the body runs
        print(worker.instance, [card.name for card in worker.cards])
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count, zip_longest
from pathlib import Path

from dynamo.common.config import ConfigError, project_version
from dynamo.common.errors import EngineError, InvalidRequest, Unavailable, Unsupported
from dynamo.common.etcd import Etcd, connect_etcd
from dynamo.common.etcd.config import check_etcd
from dynamo.common.lifecycle import freeze_garbage, stop_on_signal, within
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.messaging.nats.login import check_nats
from dynamo.common.messaging.request_plane.incoming import Handler
from dynamo.common.messaging.request_plane.server import RequestServer, serve_requests
from dynamo.common.model_card import ModelCard
from dynamo.common.names import Endpoint, InstanceId, new_instance_id
from dynamo.common.observability.log_settings import apply_log_settings
from dynamo.common.observability.scrape import Scraper
from dynamo.common.observability.server_settings import ServerSettings, open_server_settings
from dynamo.common.observability.telemetry import RuntimeMetrics, make_registry
from dynamo.common.observability.tracing import Tracing, open_tracing
from dynamo.common.process.background import awaited, running
from dynamo.common.process.memory import Trimmer
from dynamo.common.security.files import Watched, in_thread
from dynamo.common.shared_memory.sharing import SharedMemory, open_shared_memory
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.base import HasFiles, HasRanks, MayFail, TracksKv, UsesSharedMemory
from dynamo.worker.engine.remote.servers import ListedServer, read_servers
from dynamo.worker.engine.sim.tiers import SharedStores
from dynamo.worker.observability.metrics import WorkerMetrics
from dynamo.worker.observability.triton_metrics import MetricsConfig, TritonMetrics
from dynamo.worker.process.adapters import AdapterFollower
from dynamo.worker.process.admission import asked_frontends
from dynamo.worker.process.cards import CardFinisher
from dynamo.worker.process.engine_factory import AnyEngine, make_engine, make_remote, make_repository, split_repositories
from dynamo.worker.process.model_files import ModelFiles
from dynamo.worker.process.offer import Identity, Offer
from dynamo.worker.process.publisher import KvPublishers, publishing
from dynamo.worker.process.registration import Registration
from dynamo.worker.process.servers import follow_servers
from dynamo.worker.process.sleep import Sleeper
from dynamo.worker.process.status import Status, serve_status
from dynamo.worker.repository.control import RepositoryControl
from dynamo.worker.repository.engine import RepositoryEngine
from dynamo.worker.serve import ServedModel, Service, check_names
from dynamo.worker.traces.recorder import TritonTraces, open_triton_traces

log = logging.getLogger(__name__)

_LINK_METRICS_S = 1.0


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that serves. Frontends see it once `registration.registered` is set, which needs etcd."""

    instance: InstanceId
    endpoint: Endpoint
    cards: tuple[ModelCard, ...]
    requests: RequestServer
    registration: Registration
    sleeper: Sleeper
    status_port: int | None
    """None without `--status-port`."""


async def run(config: WorkerConfig) -> None:
    """Serve the models of `config` until SIGINT or SIGTERM. Raises ConfigError for a model that cannot be served.

    An engine that does not start, or dies, ends the process with status 1.
    """
    if not config.models and not config.repository.repositories and not config.remote.is_used:
        raise ConfigError("--model is required: name what to serve, or set DYN_MODEL; or name a --model-repository or a --url")
    started = count(1)
    fleet: list[list[AnyEngine]] = []

    def freeze_at_last(worker: Worker) -> None:
        if next(started) == len(fleet):
            freeze_garbage()

    try:
        check_nats(config.nats)  # before models are loaded, which may take minutes
        check_etcd(config.etcd)
        if config.remote.url_file is not None:
            return await _serve_listed(config.remote.url_file, config)
        stores = SharedStores()
        for position in range(config.remote.instances or config.num_workers):
            fleet += split_ranks(_make_engines(config, position, stores))
        async with running(Trimmer().run(), "freed memory"):
            await serve_fleet(fleet, config, on_started=freeze_at_last)
    except (InvalidRequest, Unsupported, Unavailable) as error:
        raise ConfigError(str(error)) from error
    except EngineError as error:
        log.critical("%s", error, exc_info=error.__cause__)
        raise SystemExit(1) from error


async def _serve_listed(path: Path, config: WorkerConfig) -> None:
    """Serve the engine servers that a file lists, as it changes, until SIGINT or SIGTERM. Raises ConfigError for the file."""
    listed = Watched(f"the file {path}", (path,), lambda: read_servers(path), run=in_thread)
    ranks = config.remote.data_parallel_size

    async def serve(server: ListedServer, number: int, stop: asyncio.Event) -> None:
        """`number`: the server's own, for the ports of its workers."""
        one = replace(config, remote=server.options(config.remote))
        fleet = [_make_engines(one, position, SharedStores()) for position in range(ranks)]
        await _serve_fleet(fleet, _numbered(one, number * ranks, 1), memory, stop, lambda worker: freeze_garbage())

    async with running(Trimmer().run(), "freed memory"), open_shared_memory(config.shared_memory) as memory:
        await follow_servers(listed.current, serve, stop_on_signal())


def _make_engines(config: WorkerConfig, position: int, stores: SharedStores) -> list[AnyEngine]:
    """Return the engines of one instance of this process."""
    models, folders = split_repositories(zip(config.models, config.names, strict=True), config.engine)
    engines: list[AnyEngine] = [
        make_engine(
            model,
            config.engine,
            name=name,
            threads=config.threads,
            max_num_seqs=config.max_num_seqs,
            context_length=config.context_length,
            role=config.role,
            speedup_ratio=config.speedup_ratio,
            engine_args=config.engine_args,
            stores=stores,
        )
        for model, name in models
    ]
    if config.remote.urls:
        engines.append(
            make_remote(
                config.remote.urls[position // config.remote.data_parallel_size],
                config.remote,
                position=position,
                name=next(iter(config.model_names), ""),
                context_length=config.context_length,
                max_num_seqs=config.max_num_seqs,
            )
        )
    if config.repository.repositories or folders:
        engines.append(make_repository(config.repository, folders, config.drain_timeout_s))
    return engines


def split_ranks(engines: Sequence[AnyEngine]) -> list[list[AnyEngine]]:
    """Return the engines of each instance: one for each data-parallel rank, of which the first has the engines without ranks."""
    ranked = [engine.ranks() if isinstance(engine, HasRanks) else [engine] for engine in engines]
    return [[engine for engine in instance if engine is not None] for instance in zip_longest(*ranked)]


async def serve_fleet(
    fleet: Sequence[AnyEngine | Sequence[AnyEngine]],
    config: WorkerConfig,
    *,
    stop: asyncio.Event | None = None,
    on_started: Callable[[Worker], None] = lambda worker: None,
) -> None:
    """Serve each item of `fleet` as a worker of its own, as `serve_worker` does with one. If one fails, all of them stop.

    All of them use one arena.
    """
    async with open_shared_memory(config.shared_memory) as memory:
        await _serve_fleet(fleet, config, memory, stop if stop is not None else stop_on_signal(), on_started)


async def _serve_fleet(
    fleet: Sequence[AnyEngine | Sequence[AnyEngine]],
    config: WorkerConfig,
    memory: SharedMemory | None,
    stopping: asyncio.Event,
    on_started: Callable[[Worker], None],
) -> None:
    workers = [
        awaited(serve_worker(engines, _numbered(config, number, len(fleet)), stop=stopping, on_started=on_started, memory=memory))
        for number, engines in enumerate(fleet)
    ]
    try:
        await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    except asyncio.CancelledError:
        for worker in workers:
            worker.cancel()
        raise
    finally:
        stopping.set()
        await asyncio.wait(workers)
    for worker in workers:
        worker.result()


def _numbered(config: WorkerConfig, number: int, instances: int) -> WorkerConfig:
    """Return the configuration of one of the instances of this process."""
    port = config.status.port and config.status.port + number
    return replace(config, process_instances=instances, status=replace(config.status, port=port))


async def serve_worker(
    engines: AnyEngine | Sequence[AnyEngine],
    config: WorkerConfig,
    *,
    stop: asyncio.Event | None = None,
    on_started: Callable[[Worker], None] = lambda worker: None,
    memory: SharedMemory | None = None,
) -> None:
    """Starts `engines`, serves them until `stop` is set, and drains. Without `stop`: until SIGINT or SIGTERM.

    `on_started` is called once, when requests can be served. Without `memory` the worker creates an arena. Stopping while models
    still load abandons the start. Raises InvalidRequest for a model that cannot be served, Unavailable when NATS refuses us,
    whatever an engine raises while it starts, and the failure that an engine does not survive.
    """
    stopping = stop if stop is not None else stop_on_signal()
    started = asyncio.Event()

    async def serve() -> None:
        async with open_worker(engines, config, memory) as worker:
            started.set()
            on_started(worker)
            await _until(stopping, [engine for engine in _listed(engines) if isinstance(engine, MayFail)])

    serving = awaited(serve())
    stopped = awaited(stopping.wait())
    try:
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done() and not started.is_set():
            log.info("stopped before all models were loaded")
            serving.cancel()
        await asyncio.wait((serving,))
    finally:
        stopped.cancel()
        serving.cancel()
        await asyncio.gather(stopped, serving, return_exceptions=True)
    if not serving.cancelled():
        serving.result()


def _listed(engines: AnyEngine | Sequence[AnyEngine]) -> Sequence[AnyEngine]:
    return engines if isinstance(engines, Sequence) else [engines]


async def _until(stopping: asyncio.Event, engines: Sequence[MayFail]) -> None:
    """Return when `stopping` is set. Raises the error of an engine that can serve nothing more."""
    stopped = awaited(stopping.wait())
    failures = [awaited(engine.failure()) for engine in engines]
    try:
        await asyncio.wait((stopped, *failures), return_when=asyncio.FIRST_COMPLETED)
        for failure in failures:
            if failure.done():
                raise failure.result()
    finally:
        for task in (stopped, *failures):
            task.cancel()


@asynccontextmanager
async def open_worker(
    engines: AnyEngine | Sequence[AnyEngine], config: WorkerConfig, memory: SharedMemory | None = None
) -> AsyncIterator[Worker]:
    """Start `engines` and serve them while the body runs; on the way out deregister and drain."""
    async with AsyncExitStack() as stack:
        if memory is None:
            memory = await stack.enter_async_context(open_shared_memory(config.shared_memory))
        arena = "" if memory is None else memory.token
        identity = Identity(new_instance_id(), config.served_endpoint, arena, config.process_name, config.process_instances)
        observers = await _open_observers(config, identity, stack)
        for engine in _listed(engines):
            if memory is not None and isinstance(engine, UsesSharedMemory):
                engine.use_shared_memory(memory)
            if isinstance(engine, RepositoryEngine):
                observers.metrics.include(engine.models.custom_metrics)
                observers.metrics.include(engine.models.gauges)
                if engine.models.cache is not None:
                    observers.metrics.include(engine.models.cache)
        models = await _start_engines(_listed(engines), config, stack)
        observers.status.show_models([model.card.name for model in models])
        nats, etcd = await _connect(config, identity, observers, stack)
        publishers = await _open_publishers(config, identity, models, nats, stack)
        await stack.enter_async_context(open_server_settings(etcd, identity.endpoint.namespace, observers.follow))
        service = await _open_service(models, observers, publishers, config.status.triton_metrics, stack)
        files = ModelFiles(models, nats)
        await files.store(models)
        registration = Registration(etcd)
        offer = Offer(identity, service, observers.status, registration, _repository_in(_listed(engines)), files)
        handlers = {**service.handlers, **publishers.handlers, **await _open_repository(config, offer, stack)}
        requests = await stack.enter_async_context(
            serve_requests(nats, identity.endpoint, identity.instance, handlers, config.limits, memory)
        )
        await stack.enter_async_context(running(_follow_link(observers.metrics, requests), "link metrics"))
        stack.push_async_callback(_drain, requests, config.drain_timeout_s)
        if config.adapters.allow:
            namespace = identity.endpoint.namespace
            adapters = AdapterFollower(etcd, namespace, config.adapters, service, offer.renew, config.drain_timeout_s)
            await stack.enter_async_context(running(adapters.follow(), "LoRA adapters"))
        admission = await stack.enter_async_context(
            asked_frontends(nats, identity.endpoint, identity.instance, offer.registered_models, config.ready_timeout_s)
        )
        await _register(config, offer, observers, stack)

        def announce() -> None:
            names = ", ".join(model.card.name for model in models if not files.is_waiting(model.card.name)) or "no model yet"
            log.info("serving %s at %s as instance %x", names, identity.endpoint, identity.instance)

        async def offer_more() -> None:
            await offer.renew()
            announce()

        await stack.enter_async_context(running(files.keep_stored(lambda: service.models, offer_more), "model files"))
        sleeper = Sleeper(_listed(engines), service, requests, offer.hide, config.drain_timeout_s)
        stack.push_async_callback(sleeper.close)
        observers.status.start_serving(registration.registered, files.are_stored, admission.admitted, sleeper)
        stack.callback(observers.status.start_draining)
        announce()
        cards = tuple(model.card for model in models)
        yield Worker(identity.instance, identity.endpoint, cards, requests, registration, sleeper, observers.status_port)
        log.info("leaving: deregistering instance %x", identity.instance)


@dataclass(frozen=True, slots=True)
class Observers:
    """What operators see of a worker: its status port, its metrics and its traces."""

    status: Status
    status_port: int | None
    metrics: WorkerMetrics
    runtime: RuntimeMetrics
    tracing: Tracing | None
    traces: TritonTraces

    def follow(self, settings: ServerSettings) -> None:
        """Trace and log by settings that clients have changed."""
        self.traces.use(settings)
        apply_log_settings(settings.log)


async def _open_observers(config: WorkerConfig, identity: Identity, stack: AsyncExitStack) -> Observers:
    registry = make_registry()
    status = Status(identity.endpoint, identity.instance)
    metrics = WorkerMetrics(registry, identity.endpoint, identity.instance)
    runtime = RuntimeMetrics(registry, role="worker", version=project_version())
    port = await stack.enter_async_context(serve_status(config.status, status, Scraper(registry, (metrics.tally,)).scrape))
    attributes = {"service.instance.id": f"{identity.instance:x}", "dynamo.endpoint": str(identity.endpoint)}
    tracing = await stack.enter_async_context(open_tracing(config.trace, "dynamo-worker", attributes))
    await stack.enter_async_context(running(metrics.link.measure_lag(), "lag of the event loop"))
    traces = await stack.enter_async_context(open_triton_traces(config.trace, f"{identity.instance:x}"))
    return Observers(status, port, metrics, runtime, tracing, traces)


async def _start_engines(engines: Sequence[AnyEngine], config: WorkerConfig, stack: AsyncExitStack) -> list[ServedModel]:
    """Start each engine and return its models. Raises InvalidRequest if two models have the same name."""
    finisher = CardFinisher(config.text, config.aliases)  # reads files, before models are loaded
    models: list[ServedModel] = []
    for engine in engines:
        models += await _start(engine, config.close_timeout_s, finisher, stack)
    check_names(models)
    return models


async def _connect(
    config: WorkerConfig, identity: Identity, observers: Observers, stack: AsyncExitStack
) -> tuple[Connection, Etcd]:
    name = f"dynamo-worker {identity.instance:x}"
    nats = await stack.enter_async_context(connect_nats(config.nats, name, role="worker"))
    observers.status.show_connection(nats)
    observers.metrics.link.follow("requests", nats)
    observers.runtime.nats_connected.set_function(lambda: nats.is_connected)
    return nats, await stack.enter_async_context(connect_etcd(config.etcd))


async def _open_publishers(
    config: WorkerConfig, identity: Identity, models: Sequence[ServedModel], nats: Connection, stack: AsyncExitStack
) -> KvPublishers:
    """Publish KV events and loads of the engines that have them."""
    tracked = [
        (model.card.name, model.engine) for model in models if isinstance(model.engine, TracksKv) and _has_blocks(model.card)
    ]
    record = KvStream(nats) if config.durable_kv_events else None
    return await stack.enter_async_context(publishing(nats, identity.endpoint, identity.instance, tracked, record))


def _has_blocks(card: ModelCard) -> bool:
    """Whether the size of the KV cache is known: a report without it would hide what routers estimate themselves."""
    return card.llm is not None and card.llm.total_blocks > 0


async def _open_service(
    models: Sequence[ServedModel],
    observers: Observers,
    publishers: KvPublishers,
    shown: MetricsConfig,
    stack: AsyncExitStack,
) -> Service:
    """Return the service of `models`."""
    service = Service(
        models,
        observers.metrics,
        observers.tracing,
        publishers.accepted,
        observers.traces,
        keep_latencies=shown.summary_latencies,
    )
    observers.metrics.include(TritonMetrics(service.version_statistics, shown))
    stack.push_async_callback(service.close)
    return service


def _repository_in(engines: Sequence[AnyEngine]) -> RepositoryEngine | None:
    return next((engine for engine in engines if isinstance(engine, RepositoryEngine)), None)


async def _open_repository(config: WorkerConfig, offer: Offer, stack: AsyncExitStack) -> Mapping[str, Handler]:
    """Let the models of the repository change while the worker runs; return the handlers of the verbs for that."""
    if offer.repository is None:
        return {}
    control = RepositoryControl(offer.repository, offer.service, offer.renew)
    stack.push_async_callback(_finish, control, config.drain_timeout_s)
    await stack.enter_async_context(running(control.watch(config.repository.poll_s), "repository"))
    return control.handlers


async def _register(config: WorkerConfig, offer: Offer, observers: Observers, stack: AsyncExitStack) -> None:
    """Make the worker visible to frontends until `stack` is closed."""
    registration = offer.registration
    await offer.renew()
    await stack.enter_async_context(registration.kept(config.lease_ttl_s))
    observers.runtime.etcd_stale.set_function(lambda: not registration.registered.is_set())


async def _start(engine: AnyEngine, close_timeout_s: float, finisher: CardFinisher, stack: AsyncExitStack) -> list[ServedModel]:
    begun = time.monotonic()
    started = await engine.start()
    stack.push_async_callback(_close, engine, close_timeout_s)
    cards = [started] if isinstance(started, ModelCard) else list(started)
    files = engine.files() if isinstance(engine, HasFiles) else ()
    models = []
    for card in cards:
        log.info("model %s is loaded after %.1f s", card.name, time.monotonic() - begun)
        finished = finisher.finish(card, files)
        models.append(ServedModel.of(finished.card.check(), engine, finished.files))
    return models


async def _close(engine: AnyEngine, timeout_s: float) -> None:
    """Close an engine. One that takes too long, because its code is stuck, is left behind: the process ends without it."""
    await within(timeout_s, engine.close(), f"closing the {type(engine).__name__}")


async def _follow_link(metrics: WorkerMetrics, requests: RequestServer) -> None:
    """Keep the metrics of the connection to NATS and of shared memory current."""
    clock = asyncio.get_running_loop().time
    while True:
        metrics.link.show(clock(), open_streams=requests.open_requests, free_credit_bytes=requests.free_upload_bytes)
        metrics.memory.show(requests.memory)
        await asyncio.sleep(_LINK_METRICS_S)


async def _finish(control: RepositoryControl, timeout_s: float) -> None:
    await within(timeout_s, control.finish(), "loading models")


async def _drain(requests: RequestServer, timeout_s: float) -> None:
    requests.refuse_new()
    log.info("draining %d open requests", requests.open_requests)
    await within(timeout_s, requests.drained(), "draining")
