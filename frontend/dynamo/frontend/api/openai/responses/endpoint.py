"""POST /v1/responses: the Responses API. What is stored is read and changed by `stored_operations`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from dynamo.common.errors import Code, DynamoError, EngineError, RateLimited
from dynamo.common.generation import FinishReason
from dynamo.common.process.background import awaited
from dynamo.common.process.steps import Steps
from dynamo.common.process.work import Work
from dynamo.frontend.api.capacity import Occupancy
from dynamo.frontend.api.declaration import Charge
from dynamo.frontend.api.http.event_stream import EventStream
from dynamo.frontend.api.http.exchange import JSON, Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.chunks import encode
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.field_names import fields_named
from dynamo.frontend.api.openai.logprobs import chat_logprobs
from dynamo.frontend.api.openai.requests import ChatRequest
from dynamo.frontend.api.openai.response_objects import InputTokens, TokenLogprob
from dynamo.frontend.api.openai.responses.requests import ResponsesRequest
from dynamo.frontend.api.openai.responses.tools import leave_out, shown_tools
from dynamo.frontend.api.openai.store.background import FAILURES, Stages
from dynamo.frontend.api.openai.store.event_log import EventLog, follow
from dynamo.frontend.api.openai.store.events import ResponseObject, ResponseWriter
from dynamo.frontend.api.openai.store.items import Item, ItemIds, without_logprobs
from dynamo.frontend.api.openai.store.stored import new_response_id
from dynamo.frontend.api.openai.to_text import call_of, chat_to_text, renamed
from dynamo.frontend.api.statuses import log_failure, public_message
from dynamo.frontend.api.text.gathering import Gathering
from dynamo.frontend.api.text.model_names import described_model
from dynamo.frontend.api.text.rules import parse_delta
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.preprocess.parsers import Content, OutputParser, Part, Reasoning, make_parser
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import Generation
from dynamo.frontend.serving.model_catalog import NamedModel

log = logging.getLogger(__name__)

MAX_FOLLOWERS = 256
"""Streams of stored events that an API key has in a process: each reads and writes what is stored every 0.1 s."""
_RETRY_AFTER_S = 1.0
_FIELDS = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
"""By their names in the chat request that a response is generated for."""


def _no_room() -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResponseWork:
    """A request of the Responses API, ready to be tried on a model."""

    request: ResponsesRequest
    chat: ChatRequest
    id: str
    started: float
    is_large: bool
    account: Account
    items: Sequence[Item] | None
    """What the response is stored with; None: it is not stored."""
    added: Sequence[Item]
    """What is added to the conversation, before the response's own items."""
    steps: Steps
    """For what takes long to parse."""
    give_back: Callable[[], None] = _no_room
    """Gives back the room that is kept for `added`."""

    @property
    def owner(self) -> str:
        return self.account.name

    def response(self, model: str) -> ResponseObject:
        """Return the response as it is at the beginning."""
        return _response(self, model)


class Responses:
    """The endpoint of the Responses API: streamed, whole, or in the background."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(ResponsesRequest)
        self._followers: Counter[str] = Counter()
        """Streams of stored events, by API key."""

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        started = edge.clock()
        call = exchange.call()
        request = await self._read(exchange)
        request.check()
        call = exchange.identified(call, request.request_id)
        id = new_response_id()
        continued, items, added = await self._with_history(exchange, request, id)
        chat = edge.completed(await edge.offload.run_if(exchange.has_large_body, continued.to_chat), exchange.account)
        with fields_named(_FIELDS):
            call = call_of(chat, call)
        work = _ResponseWork(
            request=request,
            chat=chat,
            id=id,
            started=started,
            is_large=exchange.has_large_body,
            account=exchange.account,
            items=items,
            added=added,
            steps=exchange.settings.steps,
        )
        if request.background:
            assert exchange.occupancy is not None, "requests to models are counted"
            response = await self._start(work, call, exchange.occupancy.handed_over())
            return await (self.follow(exchange, id, is_new=True) if request.stream else exchange.respond(encode(response)))
        async with self._room_for_added(work) as work:
            serve = partial(self._serve, exchange, work)
            await edge.plane.names.serve(call, chat.model_name, serve, has_begun=exchange.has_begun, user=chat.user)

    async def _read(self, exchange: Exchange) -> ResponsesRequest:
        read = await self._reader.read(exchange)
        request, left_out = await self._edge.offload.run_if(exchange.has_large_body, read.understood)
        leave_out(exchange, left_out)
        return request

    async def _serve(self, exchange: Exchange, work: _ResponseWork, model: NamedModel, call: Call) -> None:
        async with exchange.attended(), self._generating(work, model, call) as (generation, feeder):
            if work.request.stream:
                await self._stream(exchange, work, generation, feeder)
            else:
                response = await self._complete(work, generation, feeder)
                await exchange.respond_in_pieces(feeder.writer.encoded(response), (JSON,))

    async def follow(self, exchange: Exchange, id: str, first: int = 0, *, is_new: bool = False) -> None:
        """Write the events of a stored response from the number `first` on, as they come.

        Raises RateLimited if an API key follows too many, unless the response `is_new`: its client has no other way to know it.
        """
        stored, owner = self._edge.required_store(), exchange.account.name
        if owner and not is_new and self._followers[owner] >= MAX_FOLLOWERS:
            message = f"the API key '{owner}' follows stored responses {self._followers[owner]} times; more are not allowed"
            raise RateLimited(message, retry_after_s=_RETRY_AFTER_S)
        self._followers[owner] += 1
        try:
            async with (
                exchange.attended(),
                exchange.events() as stream,
                aclosing(follow(stored, owner, id, first)) as chunks,
            ):
                async for events in chunks:
                    await stream.write(events)
                await stream.end(b"")
        finally:
            self._followers[owner] -= 1
            if not self._followers[owner]:
                del self._followers[owner]

    async def count(self, exchange: Exchange) -> None:
        """Respond with the number of tokens that the input of a response would have."""
        edge = self._edge
        exchange.call()
        request = await self._read(exchange)
        request = msgspec.structs.replace(request, store=False, background=None)
        continued, *_ = await self._with_history(exchange, request, new_response_id())
        with fields_named(_FIELDS):
            chat = edge.completed(await edge.offload.run_if(exchange.has_large_body, continued.to_chat), exchange.account)
            model = described_model(edge.plane, exchange.account, chat.model)
            chat = msgspec.structs.replace(chat, model=model)
            card = edge.plane.card(exchange.account, model)
            is_large = exchange.has_large_body
            prepared = await edge.offload.run_if(is_large, chat_to_text, chat, card, edge.parsers, edge.limits)
            text = await edge.plane.text_model(exchange.account, model)
            rendered = await text.render(prepared.texts[0])
            tokens = await text.tokenizer.encode(rendered, special_tokens=False)
        await exchange.respond(msgspec.json.encode(InputTokens(input_tokens=len(tokens))))

    async def _with_history(
        self, exchange: Exchange, request: ResponsesRequest, id: str
    ) -> tuple[ResponsesRequest, list[Item] | None, list[Item]]:
        """Return the request with what it continues, the items to be stored (None: nothing is), and those that are new."""
        edge, owner = self._edge, exchange.account.name
        reads = bool(request.previous_response_id) or request.conversation_id is not None or request.has_references
        if edge.stored is None and not (request.store or request.background or reads):
            return request, None, []
        stored = edge.required_store()
        is_stored = await stored.may_store(owner, True if request.background else request.store)
        if not (is_stored or reads):
            return request, None, []
        ids = ItemIds(id, output=False)
        new: list[Item] = [*await edge.offload.run_if(exchange.has_large_body, request.items, ids)]
        if not reads:
            return request, new, new
        has_place = exchange.declared.charge is Charge.WORK
        # What is read may be far larger than the request, which is not admitted yet.
        with nullcontext() if has_place else exchange.account.occupy():
            history: list[dict[str, Any]] = []
            if request.previous_response_id:
                history = await stored.history(owner, request.previous_response_id, exchange.hold_stored)
            elif request.conversation_id is not None:
                history = await stored.conversations.items(owner, request.conversation_id, exchange.hold_stored)
            new = await stored.resolved(owner, new, history, ids, exchange.hold_stored)
        items: list[Item] = [*history, *new]
        return await edge.offload.run(request.with_items, items), items if is_stored else None, new

    async def _start(self, work: _ResponseWork, call: Call, occupied: Occupancy) -> ResponseObject:
        """Begin a response in the background, and return it as it is then. Raises what keeps the request from being admitted."""
        edge, chat = self._edge, work.chat
        assert edge.background is not None and work.items is not None
        detached = msgspec.structs.replace(call, deadline=None, explanation=None, hold=occupied.hold, waiting=occupied.waiting)

        async def generate(stages: Stages) -> ResponseObject:
            async def attempt(model: NamedModel, call: Call) -> ResponseObject:
                async with self._generating(work, model, call) as (generation, feeder):
                    generation.check_line()
                    await stages.admitted()
                    if not work.request.stream:
                        return await _read_all(generation, feeder, edge.clock)
                    async with events.writing():
                        return await _read_all(generation, feeder, edge.clock, events.add)

            detached.progress.on_sent = stages.sent
            async with self._room_for_added(work) as kept:
                response = await edge.plane.names.serve(
                    detached, chat.model_name, attempt, has_begun=lambda: events.begun, user=chat.user
                )
                await self._add_to_conversation(kept, response)
            return response

        plane, account = edge.plane, work.account
        plane.described(account, chat.model_name)  # what is not there fails now
        queued = msgspec.structs.replace(work.response(chat.model_name), status="queued")
        events = EventLog(edge.background.stored, work.owner, queued)
        return await edge.background.start(work.owner, queued, work.items, generate, occupied)

    @asynccontextmanager
    async def _generating(self, work: _ResponseWork, model: NamedModel, call: Call) -> AsyncIterator[tuple[Generation, _Feeder]]:
        """Generate a response by a model while the body runs."""
        edge, request = self._edge, work.request
        chat, card = renamed(work.chat, model.name), model.card
        with fields_named(_FIELDS):
            prepared = await edge.offload.run_if(work.is_large, chat_to_text, chat, card, edge.parsers, edge.limits)
            text = msgspec.structs.replace(prepared.texts[0], drops_messages=request.truncation == "auto")
            async with edge.plane.generate(model, text, call) as generation:
                texts = None
                if request.wants_logprobs:
                    texts = TokenTexts((await edge.plane.text_model(work.account, model.name)).tokenizer)
                parser = make_parser(prepared.parsers, prepared.tools, generation.prompt_end)
                gathering = Gathering(call.hold)
                yield generation, _Feeder(work.response(model.name), request, parser, texts, gathering, work.steps)

    async def _complete(self, work: _ResponseWork, generation: Generation, feeder: _Feeder) -> ResponseObject:
        """Return the whole response, stored if it is to be."""
        response = await _read_all(generation, feeder, self._edge.clock)
        return await self._save(work, response)

    async def _stream(self, exchange: Exchange, work: _ResponseWork, generation: Generation, feeder: _Feeder) -> None:
        writer = feeder.writer
        async with exchange.events() as stream:
            try:
                # In a task of its own: a token wakes that one, and not all coroutines that wait for the end of the stream.
                reason = await awaited(_write_parts(stream, generation, feeder))
                response = writer.finish(_finished(reason), generation.summary, self._edge.clock())
                response = await self._save(work, response)
                writer.end(response)
                events = writer.take()
            except Exception as error:
                if not stream.begun or exchange.client_left:  # it can still fail with a status, or the client is gone
                    raise
                log_failure(error, exchange.request_id, exchange.path)
                code = error.code if isinstance(error, DynamoError) else Code.INTERNAL
                writer.fail(FAILURES.get(code, "server_error"), public_message(error))
                events = writer.take()
            *before, last = events
            await stream.write_pieces(before)
            await stream.end(last)

    async def _save(self, work: _ResponseWork, response: ResponseObject) -> ResponseObject:
        """Store a response that is to be, and return it with what became of that.

        Only where the request says so explicitly, a failure is the request's.
        """
        await self._add_to_conversation(work, response)
        stored = self._edge.stored
        if work.items is None or stored is None:
            return response
        try:
            await stored.save(work.owner, response, work.items, last=0)
        except DynamoError as error:
            if work.request.store:
                raise
            log.warning("response %s is not stored: %s", response.id, error)
            return msgspec.structs.replace(response, store=False)
        return response

    async def _add_to_conversation(self, work: _ResponseWork, response: ResponseObject) -> None:
        id, stored = work.request.conversation_id, self._edge.stored
        if id is not None and stored is not None:
            output = map(without_logprobs, response.output)
            await stored.conversations.add(work.owner, id, [*work.added, *output], is_bounded=False)
            work.give_back()

    @asynccontextmanager
    async def _room_for_added(self, work: _ResponseWork) -> AsyncIterator[_ResponseWork]:
        """Keep room for what is added to the conversation; the response's own items are kept in any case.

        Raises PayloadTooLarge if the key may not store so much more.
        """
        stored = self._edge.stored
        if work.request.conversation_id is None or stored is None:
            yield work
            return
        async with stored.conversations.room(work.owner, work.added) as give_back:
            yield replace(work, give_back=give_back)


async def _write_parts(stream: EventStream, generation: Generation, feeder: _Feeder) -> FinishReason | None:
    """Write the events before the last ones; return why the response has ended."""
    reason, writer = None, feeder.writer
    while deltas := await generation.read():
        reason = (feeder.add(deltas) if len(deltas) == 1 else await feeder.add_many(deltas)) or reason
        await stream.write_pieces(writer.take())
    return reason


async def _read_all(
    generation: Generation, feeder: _Feeder, clock: Callable[[], float], on_events: Callable[[list[bytes]], None] | None = None
) -> ResponseObject:
    """Return the whole response; `on_events` gets the events before the last one."""
    reason, writer = None, feeder.writer
    while deltas := await generation.read():
        reason = (feeder.add(deltas) if len(deltas) == 1 else await feeder.add_many(deltas)) or reason
        if on_events is not None:
            on_events(writer.take())
    response = writer.finish(_finished(reason), generation.summary, clock())
    if on_events is not None:
        on_events(writer.take())
    return response


class _Feeder:
    """Parses deltas and hands their parts to a writer."""

    def __init__(
        self,
        response: ResponseObject,
        request: ResponsesRequest,
        parser: OutputParser | None,
        texts: TokenTexts | None,
        gathering: Gathering,
        steps: Steps,
    ) -> None:
        """`texts` is for log probabilities; None: there are none. `gathering`: the last event has the whole response."""
        self._gathering = gathering
        self._steps = steps
        self.writer = ResponseWriter(
            response, request.called_tools, stream=bool(request.stream), is_created=bool(request.background)
        )
        self._parser = parser
        self._texts = texts
        self._alternatives = request.top_logprobs or 0
        self._shows_reasoning = request.include_reasoning is not False
        self._logprobs: list[TokenLogprob] = []
        """Log probabilities of tokens whose text the parser holds back."""

    async def add_many(self, deltas: list[TextDelta]) -> FinishReason | None:
        """Do what `add` does, in steps if that may take long."""
        return self.add(deltas) if self._parser is None else await self._steps.run(self._add_one_by_one(deltas))

    def _add_one_by_one(self, deltas: list[TextDelta]) -> Work[FinishReason | None]:
        reason = None
        for delta in deltas:
            reason = self.add([delta]) or reason
            yield 0
        return reason

    def add(self, deltas: list[TextDelta]) -> FinishReason | None:
        """Return the reason if the deltas end the response. Raises Overloaded."""
        self._gathering.add(deltas)
        reason = None
        for delta in deltas:
            parts: Sequence[Part] = [Content(delta.text)] if delta.text else []
            if self._parser is not None:
                parts = parse_delta(self._parser, delta)
            self.writer.reasoning.add(parts, len(delta.tokens))
            if self._texts is not None and delta.logprobs:
                self._logprobs += chat_logprobs(delta.logprobs, self._texts, self._alternatives)
            for part in parts:
                if self._shows_reasoning or not isinstance(part, Reasoning):
                    self.writer.add(part, self._logprobs if isinstance(part, Content) else ())
                self._logprobs = []
            reason = delta.finish_reason or reason
        return reason


def _finished(reason: FinishReason | None) -> FinishReason:
    if reason is None:
        raise EngineError("the engine ended without finishing its response")
    return reason


def _response(work: _ResponseWork, model: str) -> ResponseObject:
    request = work.request
    format: dict[str, Any] = {"type": "text"}
    if request.text is not None and request.text.format is not None:
        format = _set_fields(request.text.format)
    return ResponseObject(
        id=work.id,
        background=bool(request.background),
        previous_response_id=request.previous_response_id,
        conversation=None if request.conversation_id is None else {"id": request.conversation_id},
        store=work.items is not None,
        truncation=request.truncation or "disabled",
        created_at=int(work.started),
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": request.reasoning.effort if request.reasoning is not None else None, "summary": None},
        temperature=request.temperature,
        text={"format": format},
        tool_choice=request.tool_choice or "auto",
        tools=shown_tools(request.tools or ()),
        top_logprobs=request.top_logprobs or 0,
        top_p=request.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )


def _set_fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that the request set."""
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}
