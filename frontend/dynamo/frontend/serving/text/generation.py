"""One text generation, from text to text: tokenized, dispatched, moved to another instance if its own dies, detokenized.

Migration re-sends the prompt and all tokens received so far, with what is left of `max_tokens`; the text goes on without a seam.
The tokens are those of an undisturbed run if the next token depends only on the ones before it: with greedy sampling, and with
engines that derive randomness from seed and position. An engine that draws from one stream of random numbers per request begins
that stream anew, and presence or frequency penalties count only tokens generated since. Completion choices are moved separately:
each goes on as a request for one choice, which says which it is. Structured output is not moved but fails, since an engine would
begin its grammar anew in the middle. Nor are models that take text: what they generated so far is no part of their prompt.

A budget for reasoning works in the same way: when it is spent, the request is ended, and goes on after a tag that ends reasoning.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from hashlib import sha256
from types import TracebackType
from typing import Self

import msgspec

from dynamo.common.errors import DeadlineExceeded, DynamoError, EngineError, InvalidRequest, Unavailable
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Summary,
    pack_tokens,
    read_summary,
    request_encoder,
    unpack_tokens,
)
from dynamo.common.messaging.buffers import Buffer
from dynamo.common.names import InstanceId
from dynamo.common.process.background import awaited
from dynamo.frontend.preprocess.media.images import prompt_of_contents
from dynamo.frontend.preprocess.media.media import media_length
from dynamo.frontend.preprocess.reasoning.budget import ReasoningBudget
from dynamo.frontend.preprocess.text import TextDelta, TextRequest, in_pieces
from dynamo.frontend.router.base import RoutingDecision
from dynamo.frontend.router.cache.hashing import LONG_PROMPT_BYTES
from dynamo.frontend.serving.call import Stream, Work
from dynamo.frontend.serving.dispatch.disaggregation import Disaggregation, Prefill
from dynamo.frontend.serving.dispatch.dispatched_stream import DispatchedStream
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.request_scope import RequestScope
from dynamo.frontend.serving.text.deltas import cut, decoded, numbered
from dynamo.frontend.serving.text.reported_usage import cached_within, usage_of_all, usage_with_prefill, usage_within
from dynamo.frontend.serving.text.text_models import DeltaDecoder, TextModel, TextModels, Vocabulary

_END_TOKENS = 16
"""Enough for the tags that a chat template ends with."""
_TURN_BYTES = 64 * 1024
"""Bytes of responses handled before other requests have their turns of the event loop: some thousand log probabilities."""


class _StreamPart(msgspec.Struct, eq=False):
    """What one stream generates: all choices, or, after they were moved, one of them."""

    stream: DispatchedStream
    work: Work
    """`prompt` for the dispatcher."""
    prompt: GenerateRequest
    """As requested in `stream`."""
    migrations_left: int
    is_moved: bool = False
    is_placed: bool = False
    """Whether it was decided which instances may work on the prompt."""
    reading: asyncio.Task[list[Delta]] | None = None
    """The read of the next deltas, where there are several parts."""
    waiting: list[Buffer] = []
    """What was read from `stream` and not returned yet."""

    async def next_waiting(self) -> list[Buffer]:
        """Return what is `waiting`, when others have had their turns."""
        await asyncio.sleep(0)
        bodies, self.waiting = self.waiting, []
        return bodies

    def first(self, bodies: list[Buffer]) -> list[Buffer]:
        """Return as many of these responses as the event loop has time for in one turn, and keep the others in `waiting`."""
        first, self.waiting = _first(bodies)
        return first

    def go_on(self, work: Work, rest: GenerateRequest) -> None:
        """Note that `stream` was moved and requests `rest` now, which is `work` for the dispatcher."""
        self.work = work
        self.prompt = rest
        self.migrations_left -= 1
        self.is_moved = True
        self.is_placed = False

    @property
    def choices(self) -> range:
        return range(self.prompt.first_choice, self.prompt.first_choice + self.prompt.n)


class Generation:
    """Made by `DataPlane.generate`. Entering it tokenizes; leaving it early cancels the engine."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        disaggregation: Disaggregation | None,
        texts: TextModels,
        migration_limit: int,
        model: NamedModel,
        request: TextRequest,
        scope: RequestScope,
    ) -> None:
        """`disaggregation`: None where one instance computes the prompt and responds."""
        self._dispatcher = dispatcher
        self._disaggregation = disaggregation
        self._prefill: Prefill | None = None
        """Set if another instance computed the prompt."""
        self._texts = texts
        self._metrics = model.metrics
        self._card = card = model.card
        self._takes_text = card.llm is not None and card.llm.takes_text
        self._context_length = 0 if card.llm is None else card.llm.context_length
        self._migration_limit = 0 if self._takes_text else migration_limit
        self._request = request
        self._call = scope.call
        """Once entered: traced, and with the deadline that applies."""
        self._scope = scope
        self._stream: DispatchedStream
        """The one that the request began with; later it carries the first of the choices that were moved."""
        self._parts: list[_StreamPart] = []
        """The parts that have not ended."""
        self._direct: Stream | None = None
        """The stream at the instance, while all that is expected of it is tokens: `read` then reads it itself."""
        self._is_split = False
        self._detokenizer: DeltaDecoder
        self._vocabulary: Vocabulary
        self._prompt: GenerateRequest
        self._was_resumed = False
        """The last request to an engine had a part of the response in its prompt."""
        self._budget: ReasoningBudget | None = None
        """For the reasoning, until that has ended here."""
        self._reasoning_end: tuple[int, ...] = ()
        self._unfinished: set[int] = set()
        """Choices that the engine has not finished."""
        self._received: list[array[int]] = []
        """Tokens of each choice."""
        self._chargeable_tokens = 1 << 62
        """Output tokens that a key may still be charged for, of all choices; without a limit, more than there can be."""
        self.summary = Summary()
        """What it took, after `read` returned []."""

    def __repr__(self) -> str:
        parts = [part.stream for part in self._parts]
        return f"<Generation of {self._scope!r}, {len(self._unfinished)} unfinished choices at {parts}>"

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens; known once entered."""
        return self._scope.input_tokens

    @property
    def prompt_ids(self) -> Sequence[int]:
        """The prompt in tokens; known once entered."""
        return self._prompt.tokens

    @property
    def prompt_end(self) -> str:
        """The end of the prompt as text, with special tokens; known once entered."""
        tail = self._prompt.prompt[-4 * _END_TOKENS :]
        return self._vocabulary.decode(list(unpack_tokens(tail)), skip_special_tokens=False)

    @property
    def decision(self) -> RoutingDecision | None:
        """Where the request is and why; None before the first `read`."""
        return self._stream.decision

    @property
    def prefill_instance(self) -> InstanceId | None:
        """The instance that computed the prompt; None before the first `read`."""
        if self._prefill is not None:
            return self._prefill.instance
        return None if self.decision is None else self.decision.instance.id

    async def __aenter__(self) -> Self:
        self._call = self._scope.__enter__().call
        try:
            deadline = self._dispatcher.deadline(self._call)
            if deadline != self._call.deadline:
                self._call = msgspec.structs.replace(self._call, deadline=deadline)
            text = await self._texts.get(self._card, deadline)
            if deadline is None:
                prompt = await text.to_generate(self._request, self._call.account.name)
            else:
                prompt = await self._in_tokens_until(text, deadline)
            if prompt.media:  # what came with the request is counted already, what was fetched is not
                self._call.hold(max(0, media_length(prompt.media) - media_length(self._request.media)))
            if len(prompt.prompt) >= LONG_PROMPT_BYTES:  # kept for another instance, and once more as it is sent
                self._call.hold(2 * len(prompt.prompt))
            self._prompt = self._addressed(prompt)
            limit = self._request.stop.max_tokens
            self._scope.prompt(prompt.prompt_tokens, None if limit is None else self._prompt.n * (prompt.stop.max_tokens or 0))
            self._scope.media = len(self._prompt.media)
            if prompt.stop.max_tokens is not None:
                self._chargeable_tokens = self._prompt.n * prompt.stop.max_tokens
            self._unfinished = set(range(self._prompt.n))
            self._received = [array("I") for _ in range(self._prompt.n)]
            self._vocabulary = text.tokenizer
            self._detokenizer = text.detokenizer(self._request, self._prompt)
            if self._request.reasoning_limit is not None:
                self._budget = ReasoningBudget(self._request.reasoning_limit, self.prompt_end, self._decode)
                self._reasoning_end = tuple(await self._vocabulary.encode(self._budget.ending, special_tokens=False))
            work = self._work(self._prompt)
            self._stream = self._dispatcher.stream(work, self._call)
            self._parts = [_StreamPart(self._stream, work, self._prompt, self._migration_limit)]
        except BaseException as error:
            self._scope.fail(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._close()
        finally:
            self._scope.__exit__(kind, error, traceback)

    def check_line(self) -> None:
        """Raise Overloaded if the request would have to wait for an instance now, and has no place in line."""
        self._stream.check_line()

    async def read(self) -> list[TextDelta]:
        """Return all text that became certain since the last call, at least one delta; [] at the end. Raises DynamoError."""
        try:
            while not self._scope.is_over:
                bodies: list[Buffer] = []
                is_enough = self._budget is not None and self._has_reasoned_enough
                direct = None if is_enough else self._direct or self._direct_stream()
                if direct is not None:
                    try:
                        bodies = await direct.read()
                    except DynamoError:
                        bodies = []  # how it has failed, or ended, shows the next reading of the part
                if bodies:
                    part = self._parts[0]
                    if not part.stream.started:
                        part.stream.responded()
                    if len(bodies) > 1:
                        bodies = part.first(bodies)
                    self._direct = None if part.waiting else direct
                    texts = self._feed(decoded(self._prompt, bodies))
                elif is_enough:
                    texts = await self._end_reasoning()
                elif deltas := await (self._read_any() if self._is_split else self._read(self._parts[0])):
                    self._direct = None
                    texts = self._feed(deltas)
                elif not self._is_split or not self._parts:  # else it was split just now
                    self._complete(self._trailer())
                    break
                else:
                    continue
                # By stop strings, which the engine does not know. The last text of all is then the end of a choice.
                if texts and texts[-1].finish_reason is not None and self._unfinished and self._detokenizer.done:
                    await self._close()
                    self._complete(None)
                if texts:
                    return texts
            return []
        except DynamoError as error:
            self._scope.fail(error)
            raise

    def _decode(self, tokens: list[int]) -> str:
        return self._vocabulary.decode(tokens, skip_special_tokens=False)

    @property
    def _has_reasoned_enough(self) -> bool:
        return self._budget is not None and bool(self._unfinished) and self._budget.is_spent(len(self._received[0]))

    async def _end_reasoning(self) -> list[TextDelta]:
        """Add the tag that ends reasoning to the response, and have the rest of it generated; return the text of the tag."""
        self._budget = None
        await self._close()
        end = self._reasoning_end
        self._received[0].extend(end)
        self._scope.tokens(len(end))
        finish_reason = FinishReason.LENGTH if self._tokens_left(0) == 0 else None
        logprobs = None if self._prompt.logprobs is None else [[(token, 0.0)] for token in end]
        text = self._detokenizer.feed(Delta(end, 0, finish_reason, logprobs))
        if not self._detokenizer.done:
            rest = self._rest(0)
            work = self._work(rest)
            self._stream = self._dispatcher.stream(work, self._call)
            self._parts = [_StreamPart(self._stream, work, rest, self._migration_limit)]
            self._was_resumed = True
        return [] if text is None else [text]

    async def _in_tokens_until(self, text: TextModel, deadline: float) -> GenerateRequest:
        """Return the request with its prompt in tokens. Raises DeadlineExceeded, InvalidRequest."""
        try:
            async with asyncio.timeout_at(deadline):
                return await text.to_generate(self._request, self._call.account.name)
        except TimeoutError:
            raise DeadlineExceeded() from None

    def _addressed(self, prompt: GenerateRequest) -> GenerateRequest:
        """`prompt` under the model's own name: the request may have used an alias or an adapter's name."""
        assert self._card.llm is not None
        adapter = self._request.model if self._request.model in self._card.llm.adapters else prompt.adapter
        return msgspec.structs.replace(prompt, model=self._card.name, adapter=adapter, priority=self._call.priority)

    async def _place(self, part: _StreamPart) -> None:
        """Decide which instances may respond; where there are prefill instances, one of them computes the prompt before."""
        part.is_placed = True
        if self._disaggregation is not None:
            placed = await self._disaggregation.place(part.work, part.prompt, self._call)
            self._prefill = placed.prefill
            part.stream.redirect(placed.work)
        if part.is_moved:
            self._was_resumed = True
            self._metrics.migrated(ongoing=True)

    async def _close(self) -> None:
        """End the parts that have not ended, here and at the engines."""
        parts, self._parts, self._direct = self._parts, [], None
        readings = [part.reading for part in parts if part.reading is not None] if self._is_split else []
        try:
            for reading in readings:
                reading.cancel()
            if readings:
                await asyncio.wait(readings)
        finally:
            for part in parts:
                part.stream.close()

    def _work(self, prompt: GenerateRequest) -> Work:
        assert self._card.llm is not None
        call, lengths, has_images = self._call, self._scope.lengths, bool(prompt.media) and not self._takes_text
        return Work(
            model=self._card.name,
            verb="generate",
            body=_encoded(prompt),
            metrics=self._metrics,
            name=self._request.model,
            tokenizer=self._card.llm.tokenizer,
            prompt=prompt_of_contents(prompt, self._card.llm.image_token) if has_images else prompt.prompt,
            adapter=prompt.adapter,
            cache_salt=prompt.cache_salt,
            expected_output_tokens=prompt.stop.max_tokens or 0,
            sequences=prompt.n,
            learned_output=0.0 if lengths is None else lengths.expected(self._card.name, call.account.name, call.session),
            fingerprint=b"" if prompt.sampling.guided is None else _fingerprint(prompt),
            grammar_owner="" if prompt.sampling.guided is None else call.account.name,
            priority=call.priority,
            pinned=call.instance,
            needs_room=call.instance is not None,
            session=call.session,
            session_owner=call.account.name if call.session else "",
            overrides=call.overrides,
            is_counted=prompt is not self._prompt,  # else it is the rest of a response
            request_id=call.request_id,
            explanation=call.explanation,
        )

    def _direct_stream(self) -> Stream | None:
        """Return the stream of a request that is read in no other way than from one stream; None if that is over, too."""
        if self._is_split or not self._unfinished or len(self._parts) != 1:
            return None
        part = self._parts[0]
        has_to_be_placed = not part.is_placed and (part.is_moved or self._disaggregation is not None)
        return None if part.waiting or has_to_be_placed else part.stream.at_once()

    async def _read_any(self) -> list[Delta]:
        """Return what the first streams to have any have generated; [] when all have ended."""
        while parts := self._parts:
            for part in parts:
                if part.reading is None:
                    part.reading = awaited(self._read(part))
            await asyncio.wait([part.reading for part in parts if part.reading is not None], return_when=asyncio.FIRST_COMPLETED)
            deltas: list[Delta] = []
            for part in list(parts):
                if part.reading is not None and part.reading.done():
                    read, part.reading = part.reading.result(), None
                    deltas += read
                    if not read:
                        parts.remove(part)
            if deltas:
                return deltas
        return []

    async def _read(self, part: _StreamPart) -> list[Delta]:
        """Return what the engine has generated for this part since the last call; [] at its end, or if it was split."""
        while True:
            try:
                if not part.is_placed and (part.is_moved or self._disaggregation is not None):
                    await self._place(part)
                bodies = await (part.next_waiting() if part.waiting else part.stream.read())
                if not bodies:
                    return []
                deltas = decoded(self._prompt, bodies if len(bodies) == 1 else part.first(bodies))
                return numbered(deltas, part.prompt.first_choice) if self._is_split else deltas
            except DynamoError as error:
                if not isinstance(error, Unavailable) or not part.stream.started:
                    raise
                unfinished = [choice for choice in part.choices if choice in self._unfinished]
                complete = [choice for choice in unfinished if self._received[choice] and self._tokens_left(choice) == 0]
                rest = [choice for choice in unfinished if choice not in complete]
                if rest:
                    await self._migrate(part, rest, error)
                if complete or len(rest) != 1:  # of complete choices, only the end was lost
                    return [Delta(index=choice, finish_reason=FinishReason.LENGTH) for choice in complete]

    async def _migrate(self, part: _StreamPart, choices: list[int], error: Unavailable) -> None:
        """Let other instances generate the rest of these choices, each by itself. Raises `error` if that cannot be."""
        if self._prompt.sampling.guided is not None or self._prompt.conversation or part.migrations_left == 0:
            raise error
        rests = [(self._work(rest), rest) for rest in map(self._rest, choices)]
        await part.stream.move(error, rests[0][0])
        part.go_on(*rests[0])
        self._parts += [
            _StreamPart(part.stream.split(error, work), work, rest, part.migrations_left, is_moved=True)
            for work, rest in rests[1:]
        ]
        self._is_split = self._prompt.n > 1

    def _rest(self, choice: int) -> GenerateRequest:
        """Return the request for what is missing of one choice."""
        prompt, received = self._prompt, self._received[choice]
        return msgspec.structs.replace(
            prompt,
            prompt=prompt.prompt + pack_tokens(received),
            stop=msgspec.structs.replace(
                prompt.stop, max_tokens=self._tokens_left(choice), min_tokens=max(0, prompt.stop.min_tokens - len(received))
            ),
            n=1,
            first_choice=choice,
            data_parallel_rank=None,
            kv_transfer=None,
        )

    def _tokens_left(self, choice: int) -> int | None:
        limit = self._prompt.stop.max_tokens
        return None if limit is None else max(0, limit - len(self._received[choice]))

    def _feed(self, deltas: list[Delta]) -> list[TextDelta]:
        texts: list[TextDelta] = []
        count = 0
        unfinished, feed = self._unfinished, self._detokenizer.feed
        received, budget = self._received, self._budget
        for delta in deltas:
            if delta.index not in unfinished:
                raise EngineError("the engine went on with a choice that it had finished, or that was not requested")
            if budget is not None:
                delta = cut(delta, budget.admit(received[delta.index], delta.tokens))
            tokens = delta.tokens
            count += len(tokens) or bool(delta.text)
            received[delta.index].extend(tokens)
            if delta.finish_reason is not None:
                unfinished.remove(delta.index)
            if (text := feed(delta)) is not None:
                if delta.text:
                    texts += in_pieces(text)
                else:
                    texts.append(text)
            if budget is not None and self._has_reasoned_enough:
                break  # what follows is not part of the response
        if count > self._chargeable_tokens:  # a key pays for no more than it wanted
            count = self._chargeable_tokens
        if count:
            self._chargeable_tokens -= count
            self._scope.tokens(count)
        return texts

    def _trailer(self) -> Summary | None:
        """Return the engine's summary; None if it got lost. Raises EngineError if it ended too early or cannot be read."""
        if self._unfinished:
            raise EngineError("the engine ended without finishing its response")
        try:
            return read_summary(self._stream.trailer) if self._stream.trailer else None
        except ValueError:
            raise EngineError("the engine's summary cannot be read") from None

    def _complete(self, summary: Summary | None) -> None:
        prompt_tokens, decision = self._scope.input_tokens, self._stream.decision
        if summary is not None and decision is not None and decision.fetch is not None and not self._was_resumed:
            self._stream.found_cached(summary.cached_tokens)
        if summary is None:  # cut off here, or lost: what only the engine knows stays unknown
            summary = Summary(prompt_tokens=prompt_tokens, output_tokens=self._scope.output_tokens)
        elif self._takes_text:  # its engine may not count tokens
            received = Summary(prompt_tokens=prompt_tokens, output_tokens=self._scope.output_tokens)
            summary = usage_within(self._prompt, self._context_length, summary, received)
            self._scope.settle(summary.prompt_tokens, summary.output_tokens)
        elif self._was_resumed:
            summary = usage_of_all(summary, prompt_tokens, self._scope.output_tokens)
        prefill = self._prefill
        if prefill is not None and not self._was_resumed:
            summary = usage_with_prefill(summary, prefill.summary)
        if summary.cached_tokens and not self._takes_text:
            summary = cached_within(self._prompt, summary)
        self.summary = summary
        computed_at = prefill.instance if prefill is not None else None if decision is None else decision.instance.id
        if computed_at is not None:
            self._dispatcher.reuse.add(computed_at, summary.prompt_tokens, summary.cached_tokens)
        self._scope.succeed(cached_tokens=summary.cached_tokens)


def _encoded(prompt: GenerateRequest) -> bytes:
    try:
        return request_encoder.encode(prompt)
    except OverflowError:  # JSON, of which a schema for structured output is made, has no such bound
        raise InvalidRequest("a number in the request has more than 64 bits") from None


def _fingerprint(prompt: GenerateRequest) -> bytes:
    """Return what requests with the same schema or grammar share."""
    return sha256(prompt.model.encode() + b"\0" + request_encoder.encode(prompt.sampling.guided)).digest()


def _first(bodies: list[Buffer]) -> tuple[list[Buffer], list[Buffer]]:
    """Return the first of `bodies`, of `_TURN_BYTES` together if there are several, and the rest."""
    size = 0
    for count, body in enumerate(bodies):
        size += len(body)
        if size > _TURN_BYTES and count:
            return bodies[:count], bodies[count:]
    return bodies, []
