"""One text generation, from text to text: tokenized, dispatched, moved to another instance if its own dies, detokenized.

Migration re-sends the prompt and all tokens received so far, with what is left of `max_tokens`; the text goes on without a seam.
The tokens are the ones that an undisturbed run had given if the next token depends on those before it only: greedy sampling, and
engines that derive randomness from seed and position. An engine that draws from one stream of random numbers per request begins
that stream anew, and presence or frequency penalties count only tokens generated since. Not moved, but failed: requests with
several choices, and structured output, whose grammar an engine would begin anew in the middle.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from dynamo.common.errors import (
    Cancelled,
    DeadlineExceeded,
    DynamoError,
    EngineError,
    InvalidRequest,
    Unavailable,
)
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Summary,
    delta_decoder,
    pack_tokens,
    request_encoder,
    summary_decoder,
    unpack_tokens,
)
from dynamo.common.messaging.frames import Buffer
from dynamo.common.model_card import ModelCard
from dynamo.common.security.accounts import Ticket, admit
from dynamo.common.telemetry import ModelMetrics, Request
from dynamo.frontend.disaggregation import Disaggregation, Prefill
from dynamo.frontend.dispatch import Call, DispatchedStream, Dispatcher, Work
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.frontend.router.base import Choice
from dynamo.frontend.text_models import Detokenizer, TextModels, Vocabulary

_END_TOKENS = 16
"""Enough for the tags that a chat template ends with."""


class Generation:
    """Made by `DataPlane.generate`. Entering it tokenizes; leaving it early cancels the engine."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        disaggregation: Disaggregation,
        texts: TextModels,
        metrics: ModelMetrics,
        migration_limit: int,
        card: ModelCard,
        request: TextRequest,
        call: Call,
    ) -> None:
        self._dispatcher = dispatcher
        self._disaggregation = disaggregation
        self._prefill: Prefill | None = None
        """Of the prompt, if another instance computed it."""
        self._is_placed = False
        """It was decided which instances may work on the prompt."""
        self._texts = texts
        self._metrics = metrics
        self._migrations_left = migration_limit
        self._card = card
        self._request = request
        self._call = call
        self._measured: Request | None = None
        """None before the generation is entered, and when it is over."""
        self._ticket: Ticket | None = None
        self._stream: DispatchedStream
        self._detokenizer: Detokenizer
        self._vocabulary: Vocabulary
        self._prompt: GenerateRequest
        self._input_tokens = 0
        self._migrated = False
        self._unfinished: set[int] = set()
        """Choices that the engine has not finished."""
        self._received: array[int] = array("I")
        """Tokens of the only choice, for migration."""
        self._output_tokens = 0
        self.summary = Summary()
        """What it took, after `read` returned []."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens; known once entered."""
        return self._input_tokens

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
    def choice(self) -> Choice | None:
        """Where the request is and why; None before the first `read`."""
        return self._stream.choice

    async def __aenter__(self) -> Self:
        self._measured = self._metrics.start(self._call.endpoint, self._call.request_type)
        self._call = self._dispatcher.traced(self._call, self._measured, self._card.name)
        try:
            self._ticket = admit(self._request.model, self._call)
            deadline = self._dispatcher.deadline(self._call)
            if deadline != self._call.deadline:
                self._call = msgspec.structs.replace(self._call, deadline=deadline)
            text = await self._texts.get(self._card, deadline)
            try:
                async with asyncio.timeout_at(deadline):
                    prompt = await text.to_generate(self._request)
            except TimeoutError:
                raise DeadlineExceeded() from None
            self._prompt = self._addressed(prompt)
            self._input_tokens = self._prompt.prompt_tokens
            if self._ticket is not None:
                self._ticket.charge(self._input_tokens)
            self._unfinished = set(range(self._prompt.n))
            self._vocabulary = text.tokenizer
            self._detokenizer = text.detokenizer(self._request, self._prompt)
            self._stream = self._dispatcher.stream(self._work(self._prompt), self._call)
        except BaseException as error:
            self._over(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close()
        self._over(Cancelled())

    async def read(self) -> list[TextDelta]:
        """All text that became certain since the last call, at least one delta; [] at the end. Raises DynamoError."""
        try:
            while self._measured is not None:
                deltas = await self._deltas()
                if not deltas:
                    self._complete(self._trailer())
                    break
                texts = self._feed(deltas)
                if self._detokenizer.done and self._unfinished:  # by stop strings, of which the engine knows nothing
                    self._stream.close()
                    self._complete(None)
                if texts:
                    return texts
            return []
        except DynamoError as error:
            self._over(error)
            raise

    def _addressed(self, prompt: GenerateRequest) -> GenerateRequest:
        """`prompt` under the model's own name: the request may have used an alias or an adapter's name."""
        assert self._card.llm is not None
        adapter = self._request.model if self._request.model in self._card.llm.adapters else prompt.adapter
        return msgspec.structs.replace(prompt, model=self._card.name, adapter=adapter, priority=self._call.priority)

    async def _place(self, prompt: GenerateRequest) -> None:
        """Decides who answers; where there are prefill instances, one computes the prompt before."""
        placed = await self._disaggregation.place(self._work(prompt), prompt, self._call)
        self._prefill = placed.prefill
        self._stream.redirect(placed.work)

    def _work(self, prompt: GenerateRequest) -> Work:
        assert self._card.llm is not None
        return Work(
            model=self._card.name,
            verb="generate",
            body=_encoded(prompt),
            metrics=self._metrics,
            name=self._request.model,
            tokenizer=self._card.llm.tokenizer,
            prompt=prompt.prompt,
            adapter=prompt.adapter,
            cache_salt=prompt.cache_salt,
            expected_output_tokens=prompt.stop.max_tokens or 0,
        )

    async def _deltas(self) -> list[Delta]:
        """What the engine made since the last call; [] at the end."""
        while True:
            try:
                if not self._is_placed:
                    self._is_placed = True
                    await self._place(self._prompt)
                return _decoded(await self._stream.read())
            except DynamoError as error:
                if not isinstance(error, Unavailable) or not self._stream.started:
                    raise
                if not self._unfinished:
                    return []  # all was said; only the trailer is lost
                if self._received and self._tokens_left() == 0:
                    return [Delta(finish_reason=FinishReason.LENGTH)]
                await self._migrate(error)

    async def _migrate(self, error: Unavailable) -> None:
        """Lets another instance generate the rest. Raises `error` if that cannot be."""
        prompt = self._prompt
        if prompt.n != 1 or prompt.sampling.guided is not None or self._migrations_left == 0:
            raise error
        received = len(self._received)
        rest = msgspec.structs.replace(
            prompt,
            prompt=prompt.prompt + pack_tokens(self._received),
            stop=msgspec.structs.replace(
                prompt.stop, max_tokens=self._tokens_left(), min_tokens=max(0, prompt.stop.min_tokens - received)
            ),
            data_parallel_rank=None,
            kv_transfer=None,
        )
        self._migrations_left -= 1
        await self._stream.move(error, self._work(rest))
        await self._place(rest)
        self._migrated = True
        self._metrics.migrated(ongoing=True)

    def _tokens_left(self) -> int | None:
        limit = self._prompt.stop.max_tokens
        return None if limit is None else max(0, limit - len(self._received))

    def _feed(self, deltas: list[Delta]) -> list[TextDelta]:
        texts = []
        count = 0
        unfinished, feed = self._unfinished, self._detokenizer.feed
        received = self._received if self._prompt.n == 1 else None
        for delta in deltas:
            if delta.index not in unfinished:
                raise EngineError("the engine went on with a choice that it had finished, or that was not asked for")
            tokens = delta.tokens
            count += len(tokens)
            if received is not None:
                received.extend(tokens)
            if delta.finish_reason is not None:
                unfinished.remove(delta.index)
            text = feed(delta)
            if text is not None:
                texts.append(text)
        if count:
            self._output_tokens += count
            if self._ticket is not None:
                self._ticket.charge(count)
            if self._measured is not None:
                self._measured.tokens(count)
        return texts

    def _trailer(self) -> Summary | None:
        """The engine's summary, None if it got lost. Raises EngineError if the engine ended too early or wrote nonsense."""
        if self._unfinished:
            raise EngineError("the engine ended without finishing its answer")
        try:
            return summary_decoder.decode(self._stream.trailer) if self._stream.trailer else None
        except msgspec.MsgspecError:
            raise EngineError("the engine's summary cannot be read") from None

    def _complete(self, summary: Summary | None) -> None:
        prompt_tokens = self._input_tokens
        if summary is None:  # cut off here, or lost: what the engine alone knows stays unknown
            summary = Summary(prompt_tokens=prompt_tokens, output_tokens=self._output_tokens)
        elif self._migrated:  # the last instance counts tokens of the answer as prompt
            summary = msgspec.structs.replace(
                summary,
                prompt_tokens=prompt_tokens,
                output_tokens=self._output_tokens,
                cached_tokens=min(summary.cached_tokens, prompt_tokens),
                prompt_logprobs=summary.prompt_logprobs and summary.prompt_logprobs[:prompt_tokens],
            )
        prefill, choice = self._prefill, self._stream.choice
        if prefill is not None and not self._migrated:  # what the decode instance found, it had been given
            summary = msgspec.structs.replace(
                summary,
                cached_tokens=prefill.summary.cached_tokens,
                queue_ms=summary.queue_ms + prefill.summary.queue_ms,
                prefill_ms=prefill.summary.prefill_ms,
            )
        self.summary = summary
        computed_at = prefill.instance if prefill is not None else choice.instance.id if choice is not None else None
        if computed_at is not None:
            self._dispatcher.reuse.add(computed_at, summary.prompt_tokens, summary.cached_tokens)
        self._over(None)

    def _over(self, error: BaseException | None) -> None:
        measured, self._measured = self._measured, None
        if measured is not None:
            measured.finish(
                error,
                input_tokens=self._input_tokens,
                output_tokens=self._output_tokens,
                cached_tokens=self.summary.cached_tokens,
            )
        if self._ticket is not None:
            self._ticket.close()


def _encoded(prompt: GenerateRequest) -> bytes:
    try:
        return request_encoder.encode(prompt)
    except OverflowError:  # JSON, of which a schema for structured output is made, has no such bound
        raise InvalidRequest("a number in the request has more than 64 bits") from None


def _decoded(bodies: list[Buffer]) -> list[Delta]:
    decode = delta_decoder.decode
    try:
        return [decode(body) for body in bodies]
    except msgspec.MsgspecError:
        raise EngineError("the engine's answer cannot be read") from None
