"""Neighbours of the frontend's data plane, in memory: they keep the protocols and do what a test tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import msgspec

from dynamo.common.discovery import Instance, View, encode_registration
from dynamo.common.errors import Cancelled, DeadlineExceeded, DynamoError
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Summary,
    delta_encoder,
    pack_tokens,
    request_decoder,
    summary_encoder,
)
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.request_plane.client import RequestClient
from dynamo.common.messaging.request_plane.frames import joined
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, Role, TensorSpec
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.tensors.relay import RELAY_INPUTS, RELAY_OUTPUTS
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.frontend.preprocess.text_files import TextFiles
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.fetch import TierCount, TierFetch
from dynamo.frontend.serving.text.text_models import TextModel
from dynamo.protos import inference_pb2 as pb

ENDPOINT = Endpoint()


def tensor_card(name: str = "adder", *, decoupled: bool = False, versions: tuple[str, ...] = ("1",)) -> ModelCard:
    """A model that maps one INT32 vector to another."""
    return ModelCard(
        name=name,
        kind=ModelKind.TENSOR,
        versions=versions,
        decoupled=decoupled,
        inputs=(TensorSpec(name="x", datatype="INT32", shape=(-1,)),),
        outputs=(TensorSpec(name="y", datatype="INT32", shape=(-1,)),),
    )


def relay_card(name: str = "whisper") -> ModelCard:
    """A model that takes requests as HTTP has them."""
    return ModelCard(name=name, kind=ModelKind.TENSOR, decoupled=True, inputs=RELAY_INPUTS, outputs=RELAY_OUTPUTS)


def llm_card(name: str = "talker", *, role: Role = Role.AGGREGATED, tokenizer: str = "t1") -> ModelCard:
    return ModelCard(name=name, kind=ModelKind.LLM, role=role, llm=LlmInfo(context_length=4096, tokenizer=tokenizer))


def instance(id_: int, card: ModelCard | None = None, started_at: float = 0.0) -> Instance:
    instance_id = InstanceId(id_)
    return Instance(
        id=instance_id,
        endpoint=ENDPOINT,
        subject=ENDPOINT.rpc_subject(instance_id),
        card=card or tensor_card(),
        started_at=started_at,
    )


class FakeDirectory:
    """A directory without etcd: registrations are changed by the test."""

    def __init__(self, *instances: Instance) -> None:
        self._view = View()
        self._callbacks: list[Callable[[], None]] = []
        self._on_registrations: list[Callable[[Sequence[Instance], Sequence[Instance]], None]] = []
        self.down: list[InstanceId] = []
        """Instances as they were marked down."""
        self.add(*instances)

    def instances(self, name: str) -> Sequence[Instance]:
        return self._view.instances(name)

    def registered(self) -> Collection[Instance]:
        return self._view.registered()

    def registrations_of(self, instance: InstanceId) -> Collection[Instance]:
        return self._view.registrations_of(instance).values()

    def card(self, name: str) -> ModelCard | None:
        return self._view.card(name)

    def mark_down(self, instance: InstanceId) -> None:
        self.down.append(instance)
        if self._view.mark_down(instance):
            self._notify()

    def mark_up(self, instance: InstanceId) -> None:
        if self._view.mark_up(instance):
            self._notify()

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def newest_first(self, name: str) -> Iterator[Instance]:
        return self._view.newest_first(name)

    def count(self, name: str) -> int:
        return self._view.count(name)

    def on_registrations(self, callback: Callable[[Sequence[Instance], Sequence[Instance]], None]) -> None:
        self._on_registrations.append(callback)

    def confirm_by(self, served_by: object) -> None:
        """Nothing is absent but what the test removes."""

    def add(self, *instances: Instance) -> None:
        self._apply({instance.key: encode_registration(instance) for instance in instances})

    def remove(self, *ids: int) -> None:
        self._apply({registered.key: None for registered in self.registered() if registered.id in ids})

    def _apply(self, changes: Mapping[str, bytes | None]) -> None:
        change = self._view.apply(changes)
        if change.added or change.removed:
            for callback in self._on_registrations:
                callback(change.added, change.removed)
        if change:
            self._notify()

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()


@dataclass
class FakeLink:
    """The process's own NATS connection; the test cuts and restores it."""

    opened_at: float = float("-inf")
    reconnected_at: float = float("-inf")
    is_silent: bool = False
    away_s: float = 0.0
    _up: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._up.set()

    @property
    def is_connected(self) -> bool:
        return self._up.is_set()

    async def connected(self) -> None:
        await self._up.wait()

    def cut(self) -> None:
        self._up.clear()

    def restore(self) -> None:
        self.reconnected_at = asyncio.get_running_loop().time()
        self._up.set()


class FakeStream:
    """One open request. `data`, `end` and `fail` are what its instance says."""

    def __init__(self, instance: InstanceId, verb: str, body: bytes, headers: Mapping[str, str], deadline: float | None) -> None:
        self.deadline = deadline
        self.instance = instance
        self.verb = verb
        self.body = body
        self.headers = headers
        self.started = False
        self.trailer: Buffer = b""
        self.cancelled = False
        self._responses: list[Buffer] = []
        self._over = False
        self._failure: DynamoError | None = None
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self.fail, DeadlineExceeded())

    @property
    def is_over(self) -> bool:
        return self._over

    def data(self, *bodies: bytes) -> None:
        if not self._over:
            self.started = True
            self._responses += bodies
            self._news.set()

    def end(self, trailer: bytes = b"") -> None:
        if not self._over:
            self.started = True
            self.trailer = trailer
            self._finish()

    def fail(self, error: DynamoError) -> None:
        if not self._over:
            self._failure = error
            self._finish()

    async def read(self) -> list[Buffer]:
        while not self._responses:
            if self._failure is not None:
                raise self._failure
            if self._over:
                return []
            self._news.clear()
            await self._news.wait()
        responses, self._responses = self._responses, []
        return responses

    async def result(self) -> Buffer:
        while not self._over:
            self._news.clear()
            await self._news.wait()
        if self._failure is not None:
            raise self._failure
        return self.trailer

    def cancel(self) -> None:
        if not self._over:
            self.cancelled = True
            self.fail(Cancelled())

    def _finish(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._news.set()


class FakeClient:
    """Opens fake streams; `respond`, called as each is opened, may respond at once or leave that to the test."""

    def __init__(self, respond: Callable[[FakeStream], None] = lambda stream: None) -> None:
        self.respond = respond
        self.streams: list[FakeStream] = []
        self.opened = asyncio.Event()
        self._on_sign_of_life: list[Callable[[InstanceId], None]] = []

    def on_sign_of_life(self, callback: Callable[[InstanceId], None]) -> None:
        self._on_sign_of_life.append(callback)

    def sign_of_life(self, id_: int) -> None:
        """An instance that was given up sends something."""
        for callback in self._on_sign_of_life:
            callback(InstanceId(id_))

    def open(
        self,
        instance: InstanceId,
        subject: str,
        verb: str,
        body: Body,
        *,
        headers: Mapping[str, str] | None = None,
        deadline: float | None = None,
        arena: str = "",
    ) -> FakeStream:
        stream = FakeStream(instance, verb, bytes(joined(body)), headers or {}, deadline)
        self.streams.append(stream)
        self.opened.set()
        self.respond(stream)
        return stream

    @property
    def sent_to(self) -> list[int]:
        """The instances that were sent requests, in order."""
        return [int(stream.instance) for stream in self.streams]

    async def opened_streams(self, count: int) -> list[FakeStream]:
        """Return the streams when at least `count` have been opened. Raises TimeoutError."""
        async with asyncio.timeout(120):
            while len(self.streams) < count:
                self.opened.clear()
                await self.opened.wait()
        return self.streams

    async def next_stream(self) -> FakeStream:
        """The stream opened last, or the next one if that is over."""
        while not self.streams or self.streams[-1].is_over:
            self.opened.clear()
            await self.opened.wait()
        return self.streams[-1]


def echo_tensor(stream: FakeStream) -> None:
    """A `respond` for FakeClient: send the first tensor of the request back as `y`."""
    request = pb.ModelInferRequest.FromString(stream.body)
    response = pb.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    response.outputs.add(name="y", datatype="INT32", shape=request.inputs[0].shape)
    response.raw_output_contents.append(request.raw_input_contents[0])
    stream.end(response.SerializeToString())


class RecordingRouter:
    """Takes the first candidate and keeps the books that a test looks at."""

    def __init__(self) -> None:
        self.requests: list[RouteRequest] = []
        self.open: dict[str, InstanceId] = {}
        self.first_tokens: list[str] = []
        self.outcomes: list[DynamoError | None] = []
        self.gone: list[InstanceId] = []
        self.fetch: TierFetch | None = None
        """What each instance has of each prompt on slow tiers."""
        self.found: list[int] = []
        """The cached tokens that responses reported."""

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> None:
        return None

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance], *, with_room: bool = False) -> int | None:
        return None

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        assert request.booking_id not in self.open, "booked twice"
        self.requests.append(msgspec.structs.replace(request))  # as it is at this attempt
        self.open[request.booking_id] = candidates[0].id
        return RoutingDecision(candidates[0], "first", fetch=self.fetch)

    def found_cached(self, request: RouteRequest, decision: RoutingDecision, tokens: int) -> Sequence[TierCount]:
        self.found.append(tokens)
        return ()

    def first_token(self, booking_id: str) -> None:
        assert booking_id in self.open
        self.first_tokens.append(booking_id)

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        del self.open[booking_id]
        self.outcomes.append(error)

    def removed(self, instance: InstanceId) -> None:
        self.gone.append(instance)


class DyingEngine:
    """The beginning of a `respond` for FakeClient: `deaths` says after how much each request, in order, loses its instance."""

    def __init__(self, deaths: Sequence[int]) -> None:
        self._deaths = iter(deaths)
        self.requests: list[GenerateRequest] = []

    def next_request(self, stream: FakeStream) -> tuple[GenerateRequest, int, int | None]:
        """The next request, how many tokens it wants, and its death; None: it is served to the end."""
        request = request_decoder.decode(stream.body)
        self.requests.append(request)
        limit = request.stop.max_tokens
        assert limit is not None
        return request, limit, next(self._deaths, None)


class TokenEngine(DyingEngine):
    """A `respond` for FakeClient: the token after n tokens is a function of all n, as in greedy sampling.

    `deaths` says after how many tokens each request, in order, loses its instance; the rest are served to the end.
    """

    def __init__(self, deaths: Sequence[int], error: Callable[[InstanceId], DynamoError], per_step: int = 1) -> None:
        super().__init__(deaths)
        self._error = error
        self._per_step = per_step

    def __call__(self, stream: FakeStream) -> None:
        request, limit, death = self.next_request(stream)
        response = continuation(request.tokens, limit)
        whole = response if death is None else response[:death]
        for start in range(0, len(whole), self._per_step):
            step = tuple(whole[start : start + self._per_step])
            ends = death is None and start + self._per_step >= len(whole)
            stream.data(delta_encoder.encode(Delta(step, finish_reason=FinishReason.LENGTH if ends else None)))
        if death is None:
            trailer = Summary(prompt_tokens=request.prompt_tokens, output_tokens=len(response), cached_tokens=1)
            stream.end(summary_encoder.encode(trailer))
        else:
            stream.fail(self._error(stream.instance))


def continuation(prompt: Sequence[int], length: int) -> list[int]:
    """The tokens that TokenEngine appends to `prompt`."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append((sum((position + 1) * token for position, token in enumerate(tokens)) * 31 + 7) % 50_000)
    return tokens[len(prompt) :]


class FakeText:
    """A text model whose token 5 reads "5 ". It knows stop strings that are one token long."""

    def __init__(self, default_max_tokens: int = 16) -> None:
        self._default_max_tokens = default_max_tokens
        self.tokenizer = FakeVocabulary()
        self.template_source = ""

    async def render(self, request: TextRequest) -> str:
        raise NotImplementedError("it has no chat template")

    async def to_generate(self, request: TextRequest, key: str = "") -> GenerateRequest:
        assert request.prompt is not None
        tokens = [ord(c) for c in request.prompt] if isinstance(request.prompt, str) else request.prompt
        max_tokens = request.stop.max_tokens or self._default_max_tokens
        return GenerateRequest(
            model=request.model,
            prompt=pack_tokens(tokens),
            sampling=request.sampling,
            stop=type(request.stop)(max_tokens=max_tokens, min_tokens=request.stop.min_tokens),
            n=request.n,
            cache_salt=request.cache_salt,
            media=request.media,
        )

    def detokenizer(self, request: TextRequest, prompt: GenerateRequest) -> FakeDetokenizer:
        return FakeDetokenizer(request)


LoadText: TypeAlias = Callable[[ModelCard], Awaitable[TextModel]]


async def load_fake_text(card: ModelCard) -> TextModel:
    """Return a text model without reading files."""
    return FakeText()


class FakeTexts:
    """Loads text models early, by `load`, and keeps them by the names of their models."""

    def __init__(self, load: LoadText = load_fake_text) -> None:
        self._load = load
        self._models: dict[str, TextModel] = {}

    def loaded(self, card: ModelCard) -> TextModel | None:
        return self._models.get(card.name)

    async def prepare(self, card: ModelCard) -> None:
        await self.load(card)

    async def load(self, card: ModelCard) -> TextModel:
        model = self._models[card.name] = await self._load(card)
        return model


class FakeVocabulary:
    """Prompts are characters, responses are numbers."""

    async def encode(self, text: str, *, special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(_words(tokens))

    async def decode_prompt(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(_words(tokens))

    def token_name(self, token: int) -> str:
        return str(token)

    def token_bytes(self, token: int) -> bytes | None:
        return None

    def check_ids(self, tokens: Sequence[int], param: str = "prompt", /) -> None:
        return


class FakeDetokenizer:
    def __init__(self, request: TextRequest) -> None:
        self._stops = request.stop_strings
        self._left = set(range(request.n))

    @property
    def done(self) -> bool:
        return not self._left

    def feed(self, delta: Delta) -> TextDelta | None:
        if delta.index not in self._left:
            return None
        words: list[str] = []
        for word in _words(delta.tokens):
            if word in self._stops:
                self._left.discard(delta.index)
                return TextDelta(delta.index, "".join(words), delta.tokens, FinishReason.STOP, stop_reason=word)
            words.append(word)
        if delta.finish_reason is not None:
            self._left.discard(delta.index)
        return TextDelta(delta.index, "".join(words), delta.tokens, delta.finish_reason)


def _words(tokens: Sequence[int]) -> Iterator[str]:
    return (f"{token} " for token in tokens)


def in_memory(
    directory: FakeDirectory, client: FakeClient, link: FakeLink | None = None
) -> tuple[Directory, RequestClient, Connection]:
    """Return what a data plane reaches the fleet by, in its types."""
    return cast(Directory, directory), cast(RequestClient, client), cast(Connection, link or FakeLink())


def fake_texts() -> TextFiles:
    """Return a `FakeTexts` in the type that a data plane takes."""
    return cast(TextFiles, FakeTexts())
