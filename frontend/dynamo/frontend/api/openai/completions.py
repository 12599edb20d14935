"""POST /v1/completions: continue one or more prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET, Raw, Struct

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import FinishReason
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_pieces import Spliced
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.chunks import CompletionChunks, Details, Head, token_ids
from dynamo.frontend.api.openai.edge import (
    Edge,
    Extras,
    formatted_prompt,
    last_chunk,
    wants_running_usage,
    wants_usage,
    write_prompts,
    write_stream,
)
from dynamo.frontend.api.openai.logprobs import (
    MANY_POSITIONS,
    CompletionLogprobWriter,
    EncodedLogprobs,
    PackedLogprobs,
    encoded_prompt_logprobs,
)
from dynamo.frontend.api.openai.requests import CompletionRequest
from dynamo.frontend.api.openai.response_objects import Completion, CompletionChoice, Usage
from dynamo.frontend.api.openai.to_text import PreparedRequest, call_of, completion_to_text, renamed
from dynamo.frontend.api.openai.whole import LONG_CHARS, WholeResponse, hold_echo
from dynamo.frontend.api.text.gathering import Gathering
from dynamo.frontend.api.text.generations import TextSource, read_carried, text_source
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane, Generation
from dynamo.frontend.serving.model_catalog import NamedModel


class Completions:
    """The endpoint for plain completions, streamed or whole."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(CompletionRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge, plane = self._edge, self._edge.plane
        started = edge.clock()
        call = exchange.call()
        request = edge.completed(await self._reader.read(exchange), call.account)
        if request.request_id:
            call = exchange.identified(call, request.request_id)
        call = call_of(request, call)
        serve = partial(self._serve, plane, exchange, request, started)
        await plane.names.serve(call, request.model_name, serve, has_begun=exchange.has_begun, user=request.user)

    async def _serve(
        self,
        plane: DataPlane,
        exchange: Exchange,
        request: CompletionRequest,
        started: float,
        model: NamedModel,
        call: Call,
    ) -> None:
        edge, request = self._edge, renamed(request, model.name)
        prepared = completion_to_text(request, model.card, edge.limits)
        extras = Extras(request, started, edge.clock)
        if len(prepared.texts) > 1 and extras:
            raise InvalidRequest("'nvext.annotations' and 'nvext.extra_fields' need a request with one prompt", param="nvext")
        if len(prepared.texts) > 1:
            call = msgspec.structs.replace(call, prompts=len(prepared.texts))
        generations = [plane.generate(model, text, call) for text in prepared.texts]
        async with exchange.attended(), text_source(generations, prepared.n) as source:
            if exchange.progress.carried is not None:
                return await read_carried(source)
            head = Head(
                id=f"cmpl-{exchange.request_id}",
                kind="text_completion",
                created=int(started),
                model=model.name,
                usage=wants_usage(request),
            )
            if request.stream:
                await self._stream(exchange, request, source, generations, head, prepared, extras)
            else:
                await self._respond(exchange, request, source, generations, head, prepared, extras)

    async def _stream(
        self,
        exchange: Exchange,
        request: CompletionRequest,
        source: TextSource,
        generations: Sequence[Generation],
        head: Head,
        prepared: PreparedRequest,
        extras: Extras,
    ) -> None:
        text = prepared.texts[0]
        choices = len(prepared.texts) * prepared.n
        texts = await self._token_texts(exchange, request)
        details = Details(
            texts=texts if request.logprobs is not None else None,
            alternatives=prepared.alternatives,
            prompt_ids=[generation.prompt_ids for generation in generations] if request.return_token_ids else None,
            running_usage=[generation.prompt_tokens for generation in generations] if wants_running_usage(request) else None,
            echo=await self._echo(exchange, prepared) if request.echo else (),
        )
        chunks = CompletionChunks(head, choices, details)
        async with exchange.events() as stream:
            if extras.annotations:
                model = await self._edge.plane.text_model(exchange.account, text.model)
                await stream.write_pieces(await extras.prompt_annotations(exchange, generations[0], model, text))
            collecting = extras.collecting(chunks)
            if request.echo or request.return_token_ids:
                await write_prompts(stream, source, collecting, chunks.awaits_prompt)
            await write_stream(stream, source, collecting)
            await stream.end(b"".join(extras.final_annotations(source)) + last_chunk(head, source.summary, extras.fields(source)))

    async def _respond(
        self,
        exchange: Exchange,
        request: CompletionRequest,
        source: TextSource,
        generations: Sequence[Generation],
        head: Head,
        prepared: PreparedRequest,
        extras: Extras,
    ) -> None:
        echo = await self._echo(exchange, prepared) if request.echo else [""] * (len(prepared.texts) * prepared.n)
        builders = [CompletionChoiceBuilder(prepared.alternatives) for _ in range(len(prepared.texts) * prepared.n)]
        gathering = Gathering(exchange.hold)
        while deltas := await source.read():
            gathering.add(deltas)
            for delta in deltas:
                builders[delta.index].add(delta)
                if extras.tokens is not None:
                    extras.tokens += delta.tokens
        texts = await self._token_texts(exchange, request)
        wanted = request.n or 1
        positions = sum(builder.positions for builder in builders) if texts is not None else 0
        whole = WholeResponse(exchange, self._edge.offload)
        for index, generation in enumerate(generations):
            own = builders[index * prepared.n : (index + 1) * prepared.n]
            if texts is not None and generation.summary.prompt_logprobs:
                gathering.add_prompt(generation.summary.prompt_logprobs)
            for builder in best(own, wanted) if prepared.n > wanted else own:
                prompt = echo[index * prepared.n]
                has_many = texts is not None and positions + len(generation.summary.prompt_logprobs or ()) > MANY_POSITIONS
                repeated = len(prompt) + (len(generation.prompt_ids) if request.return_token_ids else 0)
                is_long = has_many or repeated > LONG_CHARS
                await whole.add(is_long, builder.choice, request, generation, texts, prompt)
        await whole.send(
            lambda choices: Completion(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=Usage.of(source.summary),
                nvext=extras.fields(source) or UNSET,
            )
        )

    async def _token_texts(self, exchange: Exchange, request: CompletionRequest) -> TokenTexts | None:
        if request.logprobs is None and request.prompt_logprobs is None:
            return None
        vocabulary = (await self._edge.plane.text_model(exchange.account, request.model_name)).tokenizer
        return TokenTexts(vocabulary, as_ids=bool(request.return_tokens_as_token_ids))

    async def _echo(self, exchange: Exchange, prepared: PreparedRequest) -> list[str]:
        """Return the prompt of each choice as text. Raises PayloadTooLarge, Overloaded."""
        model = await self._edge.plane.text_model(exchange.account, prepared.texts[0].model)
        prompts = [await formatted_prompt(model, text) for text in prepared.texts]
        await hold_echo(exchange, self._edge.offload, prompts, prepared.n)
        return [prompt for prompt in prompts for _ in range(prepared.n)]


class CompletionChoiceBuilder(Struct, eq=False):
    """Builds one choice of a whole response from its deltas."""

    _alternatives: int
    _texts: list[str] = []
    _ids: list[int] = []
    _positions: PackedLogprobs | None = None
    _reason: FinishReason | None = None
    _stop_reason: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._ids += token_ids(delta)
        if delta.logprobs is not None:
            if self._positions is None:
                self._positions = PackedLogprobs()
            self._positions.add(delta.logprobs)
        if delta.finish_reason is not None:
            self._reason, self._stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def positions(self) -> int:
        """Number of tokens with log probabilities."""
        return 0 if self._positions is None else len(self._positions)

    @property
    def mean_logprob(self) -> float:
        """Mean log probability per token. Raises EngineError if the engine reports none."""
        if self._positions is None:
            raise EngineError("the engine reports no log probabilities, which 'best_of' needs")
        return self._positions.total / max(1, len(self._positions))

    def choice(
        self,
        long: Spliced,
        index: int,
        request: CompletionRequest,
        generation: Generation,
        texts: TokenTexts | None,
        echo: str,
    ) -> CompletionChoice:
        """Return the choice. Raises EngineError if the engine did not finish it."""
        if self._reason is None:
            raise EngineError("the engine ended without finishing its response")
        of_prompt = generation.summary.prompt_logprobs
        logprobs: Raw | None = None
        if request.logprobs is not None and texts is not None:
            columns = EncodedLogprobs(CompletionLogprobWriter(texts, self._alternatives))
            if request.echo:
                if of_prompt is None:
                    raise EngineError("the engine reports no log probabilities of the prompt, which 'echo' with 'logprobs' needs")
                columns.add(of_prompt, generation.prompt_ids)
            columns.add(() if self._positions is None else self._positions)
            logprobs = columns.finish(long)
        shown = None
        if request.prompt_logprobs is not None and texts is not None:
            shown = encoded_prompt_logprobs(of_prompt or [], texts, long)
        return CompletionChoice(
            index=index,
            text=echo + "".join(self._texts),
            logprobs=logprobs,
            finish_reason=str(self._reason),
            stop_reason=self._stop_reason,
            prompt_logprobs=shown,
            prompt_token_ids=[*generation.prompt_ids] if request.return_token_ids else None,
            token_ids=self._ids if request.return_token_ids else None,
        )

    def bare_choice(self, long: Spliced, index: int, texts: TokenTexts | None) -> CompletionChoice:
        """Return the choice without anything of its prompt. `texts`: for log probabilities, if there are any."""
        logprobs: Raw | None = None
        if texts is not None:
            columns = EncodedLogprobs(CompletionLogprobWriter(texts, self._alternatives))
            columns.add(() if self._positions is None else self._positions)
            logprobs = columns.finish(long)
        text, reason = "".join(self._texts), str(self._reason)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason, stop_reason=self._stop_reason)


def best(builders: Sequence[CompletionChoiceBuilder], count: int) -> list[CompletionChoiceBuilder]:
    """Return the `count` choices with the highest mean log probability, the best first."""
    return sorted(builders, key=lambda builder: -builder.mean_logprob)[:count]
