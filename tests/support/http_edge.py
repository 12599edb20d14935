"""The HTTP side on a real port, with the real data plane and tokenizer behind it and instances in memory behind that."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import httpx2
from prometheus_client import CollectorRegistry

from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Summary,
    delta_encoder,
    request_decoder,
    summary_encoder,
)
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.http.management.server import LinkState, health_operations, model_operations, process_operations
from dynamo.frontend.api.http.openapi import openapi_operations
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.api.http.unknown_fields import UnknownFields
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.openai.operations import read_request_template
from dynamo.frontend.api.openai.store.background import BackgroundResponses
from dynamo.frontend.api.operations import protocol_operations
from dynamo.frontend.config import CapacityOptions, HttpOptions, OverloadStatus, ServingOptions, TextOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.names.rules import Rule
from dynamo.frontend.preprocess.parsers import OutputParsers
from dynamo.frontend.preprocess.text_files import open_text_files
from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.worker.engine.echo import byte_tokenizer
from tests.support.fakes import FakeClient, FakeDirectory, FakeStream, in_memory, instance

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if tools %}tools: {{ tools | tojson }}{{ '\n' }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKENIZER_FILE = byte_tokenizer()
TOKENIZER = Tokenizer(TOKENIZER_FILE)


def chat_card(name: str = "talker", **llm: Any) -> ModelCard:
    """A language model whose tokens are the bytes of the text."""
    info: dict[str, Any] = {
        "context_length": 4096,
        "tokenizer": hashlib.sha256(TOKENIZER_FILE).hexdigest(),
        "chat_template": hashlib.sha256(TEMPLATE.encode()).hexdigest(),
    }
    return ModelCard(name=name, kind=ModelKind.LLM, llm=LlmInfo(**(info | llm)))


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode_now(text, special_tokens=False))


def text_of(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(list(tokens), skip_special_tokens=False)


class TextFiles:
    """The files of `chat_card`."""

    def __init__(self) -> None:
        files = (TOKENIZER_FILE, TEMPLATE.encode())
        self._files = {hashlib.sha256(data).hexdigest(): data for data in files}

    async def get(self, key: str) -> bytes:
        return self._files[key]

    async def fetch(self, key: str) -> None:
        """Each file is at hand."""


@dataclass
class Speaker:
    """A `respond` for FakeClient: says `pieces`, each as one delta, for every choice of every request."""

    pieces: Sequence[str] = ("Hel", "lo", " you")
    reason: FinishReason = FinishReason.STOP
    logprobs: Callable[[int], float] | None = None
    """Log probability of the n-th token of a response; None: the engine does not report any."""
    cached_tokens: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)

    def __call__(self, stream: FakeStream) -> None:
        request = request_decoder.decode(stream.body)
        self.requests.append(request)
        made = 0
        for index in range(request.n):
            position = 0
            for number, piece in enumerate(self.pieces):
                tokens = tokens_of(piece)
                logprobs = None
                if request.logprobs is not None and self.logprobs is not None:
                    logprobs = [[(token, self.logprobs(position + place)), (0, -9.0)] for place, token in enumerate(tokens)]
                reason = self.reason if number == len(self.pieces) - 1 else None
                stream.data(delta_encoder.encode(Delta(tokens, index, reason, logprobs)))
                position += len(tokens)
            made += position
        of_prompt = None
        if request.prompt_logprobs is not None:
            of_prompt = [None, *([(token, -0.5), (0, -9.0)] for token in request.tokens[1:])]
        summary = Summary(
            prompt_tokens=request.prompt_tokens,
            output_tokens=made,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=of_prompt,
        )
        stream.end(summary_encoder.encode(summary))

    @property
    def last(self) -> GenerateRequest:
        return self.requests[-1]

    @property
    def prompt(self) -> str:
        """What the model saw last."""
        return text_of(self.last.tokens)


def send_delta(stream: FakeStream, piece: str, *, index: int = 0, reason: FinishReason | None = None) -> None:
    """One delta, at once."""
    stream.data(delta_encoder.encode(Delta(tokens_of(piece), index, reason)))


def end(stream: FakeStream, output_tokens: int = 0) -> None:
    request = request_decoder.decode(stream.body)
    stream.end(summary_encoder.encode(Summary(prompt_tokens=request.prompt_tokens, output_tokens=output_tokens)))


@dataclass(frozen=True, slots=True)
class FixedRules:
    """A table of names that never changes."""

    rules: Mapping[str, Rule]


def connected() -> Any:
    """Return links that are made; a test may say otherwise."""
    state, directory = LinkState.CONNECTED, SimpleNamespace(other_protocols=tuple)
    return SimpleNamespace(nats_state=state, etcd_state=state, directory=directory, events=SimpleNamespace(is_dropped=False))


@dataclass(frozen=True, slots=True)
class HttpEdge:
    plane: DataPlane
    directory: FakeDirectory
    client: FakeClient
    http: httpx2.AsyncClient
    port: int
    registry: CollectorRegistry
    readiness: Readiness
    capacity: Capacity

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: object, **options: Any) -> httpx2.Response:
        return await self.http.post(path, json=body, **options)

    async def error(self, path: str, body: object, status: int = 400) -> dict[str, Any]:
        """The `error` object of a request that must fail."""
        response = await self.post(path, body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        return error


@asynccontextmanager
async def open_http_edge(
    *cards: ModelCard,
    respond: Callable[[FakeStream], None] | None = None,
    http: HttpOptions | None = None,
    text: TextOptions | None = None,
    overload: OverloadStatus = OverloadStatus.UNAVAILABLE,
    capacity: CapacityOptions | None = None,
    parsers: OutputParsers | None = None,
    declared: tuple[ModelCard, ...] = (),
    rules: Mapping[str, Rule] | None = None,
    background: Callable[[FrontendMetrics], BackgroundResponses] | None = None,
    kserve: KserveServer | None = None,
) -> AsyncIterator[HttpEdge]:
    """An edge whose instances 1, 2, … serve one card each; without cards, one of `chat_card()`. No instance serves `declared`."""
    served = cards or (chat_card(),)
    directory = FakeDirectory(*(instance(number, card) for number, card in enumerate(served, 1)))
    client = FakeClient() if respond is None else FakeClient(respond)
    options = replace(http or HttpOptions(), port=0)
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry)
    settings = ServingOptions(models=declared)
    async with (
        open_text_files(TextFiles(), text or TextOptions()) as texts,
        open_data_plane(
            *in_memory(directory, client), RoundRobin(), texts, metrics, settings, rules=FixedRules(rules or {})
        ) as plane,
    ):
        readiness = Readiness()
        readiness.attach(plane)
        own = OutputParsers({}, {}) if parsers is None else parsers
        stored = None if background is None else background(metrics)
        template = None if text is None else read_request_template(text.request_template)
        operations = [
            *health_operations(readiness, connected()),
            *process_operations(),
            *model_operations(plane, readiness, 1.0),
            *protocol_operations(
                plane, readiness, text or TextOptions(), own, background=stored, kserve=kserve, template=template
            ),
        ]
        operations += openapi_operations(operations)
        counted = Capacity(capacity)
        unknown_fields = UnknownFields(refuse=options.strict_fields, count=metrics.unknown_field)
        http_settings = HttpSettings(options=options, overload=overload, capacity=counted, unknown_fields=unknown_fields)
        app = HttpApp(operations, http_settings, refused=metrics.refused)
        async with (
            serve_http(options, app) as server,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=120, verify=False) as session,
        ):
            for card in served:
                if card.kind is ModelKind.LLM:
                    await plane.text_model(ANONYMOUS, card.name)
            yield HttpEdge(plane, directory, client, session, server.port, registry, readiness, counted)


def events_of(text: str) -> list[tuple[str, str]]:
    """The (event, data) pairs of an event stream; comments are left out."""
    events = []
    for block in text.split("\n\n"):
        event, data = "", []
        for line in block.splitlines():
            if line.startswith("event: "):
                event = line[7:]
            elif line.startswith("data: "):
                data.append(line[6:])
        if data:
            events.append((event, "\n".join(data)))
    return events


@contextmanager
def raw_connection(port: int) -> Iterator[socket.socket]:
    """A socket of one's own, for clients that misbehave."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        yield connection
