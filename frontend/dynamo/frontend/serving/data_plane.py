"""What every protocol edge calls: which models there are, and requests to them.

A model is *ready* when an instance that can serve it is registered and, for a language model, its tokenizer is at hand here.
A model that can be started is not ready without an instance, and requests for it wait. A model that was served a short while ago,
or that the configuration declares, is known but not ready: requests for it raise `NoInstances`. Requests for any other model
raise `ModelNotFound`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from dynamo.common.adapters import LoadAdapter
from dynamo.common.discovery import Instance, other_names
from dynamo.common.errors import DynamoError, InvalidRequest, ModelNotFound, NoInstances, Unavailable, Unsupported
from dynamo.common.messaging.buffers import Buffer
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.request_plane.client import RequestClient
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.observability.tracing import Tracing
from dynamo.common.process.work import Work as LongWork
from dynamo.common.repository import NO_FILES, Files, IndexEntry, LoadRequest, UnloadRequest, merge_indexes
from dynamo.common.scaling.pool import Pool
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.config import ServingOptions
from dynamo.frontend.fleet.adapters import Adapters
from dynamo.frontend.fleet.canary import Canaries, watching_instances
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.fleet.presence import Presence
from dynamo.frontend.fleet.repository import Repository, RepositoryView
from dynamo.frontend.fleet.statistics import add_up, read_statistics
from dynamo.frontend.metrics import FrontendMetrics, RequestType
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.preprocess.text_files import TextFiles
from dynamo.frontend.router.base import Router
from dynamo.frontend.router.demand import DemandTable, WaitingRequests
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.call import Call, TensorSource, Work
from dynamo.frontend.serving.dispatch.disaggregation import Disaggregation
from dynamo.frontend.serving.dispatch.dispatched_stream import DispatchedStream
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher
from dynamo.frontend.serving.model_catalog import CatalogChange, ModelCatalog, NamedModel, find_loaded
from dynamo.frontend.serving.names import ModelNames, NoRules, RuleTable
from dynamo.frontend.serving.output_lengths import OutputLengths
from dynamo.frontend.serving.prompt_tokens import tokens_of
from dynamo.frontend.serving.queue.admission import AdmissionQueue
from dynamo.frontend.serving.queue.fair_share import FairShares
from dynamo.frontend.serving.queue.starting import NoStandby, StandbyModels, StartQueue
from dynamo.frontend.serving.request_scope import RequestScope
from dynamo.frontend.serving.shadows import Shadows, content_length
from dynamo.frontend.serving.tensor_responses import TensorResponses, infer_work, with_estimate
from dynamo.frontend.serving.text.generation import Generation
from dynamo.frontend.serving.text.text_models import TextModel, TextModels
from dynamo.protos.inference_pb2 import ModelStatisticsResponse

__all__ = ["DataPlane", "Generation", "TensorResponses", "open_data_plane"]

log = logging.getLogger(__name__)

_UNREADY_AFTER_S = 5.0
"""Without NATS: requests wait for it, but others should go to a frontend that has it."""

_STATISTICS_AT_ONCE = 32
_QUICK_STATISTICS_BYTES = 4096
"""Longer ones take a thread: a model without any may be two bytes."""
_QUICK_READ_BYTES = 4 << 20
"""Copying more in memory takes a thread."""


class DataPlane:
    """One per process; use `open_data_plane`."""

    def __init__(
        self,
        directory: Directory,
        catalog: ModelCatalog,
        link: Connection,
        dispatcher: Dispatcher,
        texts: TextModels,
        metrics: FrontendMetrics,
        settings: ServingOptions,
        tracing: Tracing | None = None,
        repository: Repository | None = None,
        rules: RuleTable | None = None,
        adapters: Adapters | None = None,
        standby: StandbyModels | None = None,
    ) -> None:
        self.standby = standby or NoStandby()
        """The models that can be started."""
        self.models = directory
        """The live view of registrations."""
        self.names = ModelNames(rules or NoRules(), metrics, self.model, self.model_ready, passed_over=dispatcher.passed_over)
        """The names of operators. All other methods take names of models."""
        self.shadows = Shadows(metrics)
        self._link = link
        self._dispatcher = dispatcher
        self._repository = repository
        self._adapters = adapters
        self._texts = texts
        self._metrics = metrics
        self._settings = settings
        self._tracing = tracing
        self._lengths = OutputLengths()
        self._checks = Offload()
        """Checks large requests without holding up the event loop."""
        self.descriptions = Offload()
        """A thread for what workers say of models, which may be long, apart from those of requests to models."""
        self._loop = asyncio.get_running_loop()
        self._disaggregation = Disaggregation(dispatcher, settings.disaggregation)
        self.reuse, self.circuits = dispatcher.reuse, dispatcher.circuits
        self._draining = False
        self._catalog, self.relays = catalog, catalog.relays
        catalog.on_change(self._changed)
        texts.on_change(self._show_readiness_of)
        self._texts.follow(added=[instance.card for instance in directory.registered()])
        self._texts.follow(added=self.standby.cards().values())
        self.standby.on_change(self._texts.follow)
        self._show_readiness(catalog.served)

    # Models

    @property
    def router(self) -> Router:
        """The router that requests meet: the one that measures and explains, around the one that decides."""
        return self._dispatcher.router

    @property
    def fair_shares(self) -> FairShares | None:
        """The fair shares of keys whose requests wait in queues; None without a queue."""
        return self._dispatcher.fair_shares

    def waiting(self) -> Mapping[Pool, WaitingRequests]:
        """Return how many requests wait for the instances of each pool."""
        return self._dispatcher.waiting()

    def server_ready(self) -> bool:
        """Return whether a model is ready or can be started, nats-server was heard lately, and this process is not to stop."""
        if self._draining or self._link.away_s >= _UNREADY_AFTER_S:
            return False
        return any(map(self.model_ready, self._catalog.served)) or any(map(self.has_text, self.standby.cards().values()))

    def has_text(self, card: ModelCard) -> bool:
        """Return whether the tokenizer and template of a model are at hand, if it has any."""
        return card.llm is None or self._texts.is_ready(card)

    def all_models_ready(self) -> bool:
        """Return whether every model is ready that is registered, or that a repository should have loaded."""
        if not all(map(self.model_ready, self._catalog.served)):
            return False
        return self._repository is None or not self._repository.has_failed()

    def model_ready(self, model: str, version: str = "") -> bool:
        try:
            card = self._catalog.find(model, version).card
        except ModelNotFound:
            return False
        tokenizer = card.llm.tokenizer if card.llm is not None else ""
        if not self._dispatcher.candidates.able_to_serve(model, version, tokenizer):
            return False
        if card.llm is not None and not self._disaggregation.is_complete(model, tokenizer):
            return False
        return self.has_text(card)

    def model(self, account: Account, name: str, version: str = "") -> NamedModel:
        """Return a model by its name, an alias or an adapter. Raises ModelNotFound, VersionUnloaded, Forbidden."""
        account.permit(name)
        return find_loaded(self._catalog, self._repository, name, version)

    def card(self, account: Account, name: str, version: str = "") -> ModelCard:
        """Return the card of a model, by its name, an alias or an adapter. Raises ModelNotFound, Forbidden."""
        return self.model(account, name, version).card

    def described(self, account: Account, name: str, version: str = "") -> ModelCard:
        """Return the card that describes a name, of an operator or of a model. Raises ModelNotFound, Forbidden."""
        return self.card(account, self.names.representative(account, name, version), version)

    def cards(self, account: Account) -> list[ModelCard]:
        """Return one card per model that is served, startable or declared and that the caller may use, in order of name."""
        return [card for card in self._catalog.cards() if any(map(account.permits, (card.name, *other_names(card))))]

    def start_draining(self) -> None:
        """Report from now on that this process is not ready. It goes on serving requests."""
        self._draining = True

    # Requests

    async def infer(
        self,
        model: NamedModel,
        request: TensorRequest,
        call: Call,
        source: TensorSource | None = None,
    ) -> Buffer:
        """Return the serialized ModelInferResponse. Raises DynamoError. `source`: where the tensors of the request are read."""
        if model.counts_tokens:
            call = with_estimate(call, request, source)
        with RequestScope(model, call, self._tracing) as scope:
            if model.card.decoupled:
                raise Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")
            stream = await self.dispatched(model, request, scope, source)
            response = await stream.result()
            if model.counts_tokens:
                scope.counted(tokens_of(response))
            scope.succeed()
            return response

    def infer_stream(
        self, model: NamedModel, request: TensorRequest, call: Call, source: TensorSource | None = None, sequences: int = 1
    ) -> TensorResponses:
        """The responses of any tensor model, decoupled or not, which count as so many requests of the caller.

        `source`: see `infer`. Entering and reading raise DynamoError.
        """
        if model.counts_tokens:
            call = with_estimate(call, request, source)
        scope = RequestScope(model, call, self._tracing, sequences)
        begin = partial(self.dispatched, model, request, scope, source)
        return TensorResponses(model, scope, begin, self._dispatcher.stream)

    async def dispatched(
        self, model: NamedModel, request: TensorRequest, scope: RequestScope, source: TensorSource | None
    ) -> DispatchedStream:
        """Return the stream of a request that has been admitted, and is read, copied to shadows and checked here."""
        call = scope.call
        if source is not None:
            request = await self.read(source, call)
        if call.shadows:
            self._copy_tensors(request, call)
        checker = model.checker
        if checker.is_slow(request):
            await self._checks.run(checker.check, request)
        else:
            checker.check(request)
        return self._dispatcher.stream(infer_work(request, model, call), call)

    async def read(self, source: TensorSource, call: Call) -> TensorRequest:
        """Return a request that has been admitted with its tensors, which are counted before. Raises DynamoError."""
        call.hold(source.size_bytes)
        return await self._checks.run_if(source.size_bytes > _QUICK_READ_BYTES, source.read)

    def generate(self, model: NamedModel, request: TextRequest, call: Call, owner: Account | None = None) -> Generation:
        """Text of a language model. Raises InvalidRequest; entering and reading raise the rest.

        `owner`, which is the caller if None, shares cached prompts with no other account, where the engine can tell them apart.
        """
        if model.card.kind is not ModelKind.LLM:
            raise InvalidRequest(f"model '{model.card.name}' takes tensors; it does not generate text")
        copy = partial(self._copy_text, request, call) if call.shadows else None
        if model.card.llm is not None and model.card.llm.takes_cache_salt:
            salt = (owner or call.account).isolate(request.cache_salt)
            if salt != request.cache_salt:
                request = msgspec.structs.replace(request, cache_salt=salt)
        scope = RequestScope(model, call, self._tracing, request.n, copy, self._lengths)
        may_be_apart = model.has_prefill or call.prefill_instance is not None or self._settings.disaggregation.enforce
        is_whole = request.kv_transfer is None and call.progress.carried is None
        disaggregation = self._disaggregation if may_be_apart and is_whole else None
        limit = self._settings.retry.migration_limit
        return Generation(self._dispatcher, disaggregation, self._texts, limit, model, request, scope)

    def stream(self, work: Work, call: Call) -> DispatchedStream:
        """Work that is dispatched as it is, for a scope that the caller has entered."""
        return self._dispatcher.stream(work, call)

    def _copy_tensors(self, request: TensorRequest, call: Call) -> None:
        async def send(name: str, call: Call) -> None:
            model = self._catalog.find(name, request.head.model_version)
            async with self.infer_stream(model, request.renamed(name), call) as responses:
                while await responses.read():
                    pass

        for model in call.shadows:
            self.shadows.copy(model, len(request.raw), call, send)

    def _copy_text(self, request: TextRequest, call: Call) -> None:
        async def send(name: str, copy: Call) -> None:
            model, renamed = self._catalog.find(name), msgspec.structs.replace(request, model=name)
            async with self.generate(model, renamed, copy, call.account) as generation:
                while await generation.read():
                    pass

        size_bytes = len(request.prompt or ()) + sum(content_length(message.get("content")) for message in request.messages or ())
        for model in call.shadows:
            self.shadows.copy(model, size_bytes, call, send)

    def refused(self, endpoint: str, error: BaseException, request_type: RequestType = RequestType.UNARY) -> None:
        """Count a request that fails at its protocol's edge, and that was not begun here."""
        self._metrics.refused(endpoint, error, request_type)

    async def text_model(self, account: Account, model: str) -> TextModel:
        """Return tokenizer and template of a language model. Raises ModelNotFound, InvalidRequest if it is none, Unavailable."""
        card = self.card(account, model)
        if card.kind is not ModelKind.LLM:
            raise InvalidRequest(f"model '{card.name}' takes tensors; it has no tokenizer", param="model")
        return await self._texts.get(card, None)

    async def statistics(self, account: Account, model: str = "", version: str = "") -> ModelStatisticsResponse:
        """Return the statistics of one model, or of all that the caller may use, added up over their instances.

        Instances that do not respond in time are left out, with a warning in the log. Raises ModelNotFound, NoInstances if the
        model has none, and Unavailable if none responded.
        """
        names: set[str] | None = None
        if model:
            card = self.described(account, model, version)
            queried = [i for i in self.models.instances(card.name) if not version or version in i.card.versions]
            if not queried:
                raise NoInstances(card.name)
            model = card.name
        else:
            names = {card.name for card in self.cards(account) if card.name in self._catalog.served}
            queried = list({instance.id: instance for name in names for instance in self.models.instances(name)}.values())
        body = msgspec.msgpack.encode({"model": model, "version": version})
        deadline, limit = self._loop.time() + self._settings.statistics_timeout_s, asyncio.Semaphore(_STATISTICS_AT_ONCE)
        failures: list[DynamoError] = []
        parts: list[ModelStatisticsResponse] = []

        async def query(instance: Instance) -> None:
            try:
                async with limit:
                    response = await self._dispatcher.query(instance, "statistics", body, deadline)
                is_long = len(response) > _QUICK_STATISTICS_BYTES
                parts.append(await self.descriptions.run_if(is_long, read_statistics, response))
            except DynamoError as error:
                failures.append(error)

        async with asyncio.TaskGroup() as tasks:
            for instance in queried:
                tasks.create_task(query(instance))
        if failures:
            log.warning("%d of %d instances returned no statistics; first: %s", len(failures), len(queried), failures[0])
            if not parts:
                raise Unavailable(f"no instance returned statistics: {failures[0]}") from failures[0]
        is_long = sum(part.ByteSize() for part in parts) > _QUICK_STATISTICS_BYTES
        return await self.descriptions.run_if(is_long, add_up, parts, names)

    # Model repositories

    def repository_index(self, account: Account) -> LongWork[list[IndexEntry]]:
        """Return what the workers' repositories hold, and the LoRA adapters of models, as far as the caller may use it."""
        entries = [] if self._repository is None else (yield from self._repository.index(account))
        if self._adapters is not None:
            entries += yield from merge_indexes([*self._adapters.index()], account.permits)
        return entries

    async def load_model(self, account: Account, request: LoadRequest | LoadAdapter, files: Files = NO_FILES) -> None:
        """Have the workers that can load a model, with its files, or a LoRA adapter, do so. Raises DynamoError."""
        if isinstance(request, LoadAdapter):
            await self._loaded_adapters().load(account, request)
        else:
            await self._repositories().load(account, request, files)

    async def unload_model(self, account: Account, request: UnloadRequest) -> None:
        """Have every worker unload a model or a LoRA adapter; return when its accepted requests are over. Raises DynamoError."""
        if self._adapters is not None and self._adapters.has(request.model):
            await self._adapters.unload(account, request.model)
        else:
            await self._repositories().unload(account, request)

    async def unload_adapter(self, account: Account, name: str) -> None:
        """Unload a LoRA adapter everywhere. Raises DynamoError."""
        await self._loaded_adapters().unload(account, name)

    def _loaded_adapters(self) -> Adapters:
        if self._adapters is None:
            raise Unsupported("this server loads no LoRA adapters")
        return self._adapters

    def _repositories(self) -> Repository:
        if self._repository is None:
            raise Unsupported("this server has no model repositories")
        return self._repository

    # Following the catalog

    def _changed(self, change: CatalogChange) -> None:
        for instance in change.gone:
            self._dispatcher.removed(instance)
        self._texts.follow([instance.card for instance in change.added], [instance.card for instance in change.removed])
        self._show_readiness(change.models)

    def _show_readiness(self, models: Iterable[str]) -> None:
        for name in models:
            self._show_readiness_of(name)
            card, count = self._catalog.find(name).card, self.models.count(name)
            self._metrics.describe(card, instances=count, migration_limit=self._settings.retry.migration_limit)

    def _show_readiness_of(self, model: str) -> None:
        self._metrics.for_model(model).ready.set(self.model_ready(model))


@asynccontextmanager
async def open_data_plane(
    directory: Directory,
    client: RequestClient,
    link: Connection,
    router: Router,
    text_loader: TextFiles,
    metrics: FrontendMetrics,
    settings: ServingOptions | None = None,
    tracing: Tracing | None = None,
    repositories: RepositoryView | None = None,
    rules: RuleTable | None = None,
    adapters: Adapters | None = None,
    demand: DemandTable | None = None,
    standby: StandbyModels | None = None,
) -> AsyncIterator[DataPlane]:
    """Open a data plane that follows `directory`. `text_loader` reads tokenizers; `link` is the client's connection.

    `demand` counts the requests that get no instance, beside those that `router` places.
    """
    settings = settings or ServingOptions()
    queue: AdmissionQueue | None = None

    def refused(model: str, reason: str) -> None:
        metrics.for_model(model).queue_refused(reason)

    if settings.queue.size:

        def changed(model: str, waiting: int) -> None:
            metrics.for_model(model).set_router_queue(waiting)

        def waited(model: str, priority: int, waited_s: float) -> None:
            metrics.for_model(model).queue_waited(priority, waited_s)

        queue = AdmissionQueue(settings.queue.size, settings.queue.policy, changed, refused, waited)
    client.on_sign_of_life(directory.mark_up)
    standby = standby or NoStandby()
    starts = StartQueue(directory, standby, settings.start, refused)
    directory.on_change(starts.changed)
    dispatcher = Dispatcher(directory, client, link, router, settings, queue, demand, starts, metrics.circuit_changed)
    directory.confirm_by(Presence(dispatcher, link).served_by)
    async with TextModels(text_loader) as texts:
        repository = None
        if repositories is not None:
            repository = Repository(repositories, dispatcher.query_at, directory, settings.repository_timeout_s)
        catalog = ModelCatalog(directory, metrics, settings.models, settings.remember_s, texts, standby)
        plane = DataPlane(
            directory, catalog, link, dispatcher, texts, metrics, settings, tracing, repository, rules, adapters, standby
        )
        try:
            if (wait_s := settings.canary.wait_s) is None:
                yield plane
                return
            canaries = Canaries(directory, dispatcher, metrics, wait_s=wait_s, timeout_s=settings.canary.timeout_s)
            async with watching_instances(canaries):
                yield plane
        finally:
            catalog.close()
            await plane.shadows.close()
