"""POST /v1/completions"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import FinishReason
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import decode
from dynamo.frontend.api.openai.chunks import CompletionChunks, Head, encode
from dynamo.frontend.api.openai.edge import Edge, Extras, formatted_prompt, last_chunk, wants_usage, write_stream
from dynamo.frontend.api.openai.logprobs import CompletionLogprobWriter, joined, prompt_logprobs
from dynamo.frontend.api.openai.requests import CompletionRequest
from dynamo.frontend.api.openai.response_objects import Completion, CompletionChoice, CompletionLogprobs, Usage
from dynamo.frontend.api.openai.to_text import Asked, call_of, completion_to_text
from dynamo.frontend.api.text.generations import Source, one_source
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import Generation


class Completions:
    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._decoder = msgspec.json.Decoder(CompletionRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        started = edge.clock()
        caller = exchange.caller()
        request = edge.completed(decode(self._decoder, await exchange.body(), exchange.settings.max_json_depth))
        asked = completion_to_text(request, edge.plane.card(exchange.account, request.model), edge.limits)
        call = call_of(request, caller, "completions")
        extras = Extras(request, started, edge.clock)
        if len(asked.texts) > 1 and extras:
            raise InvalidRequest("'nvext.annotations' and 'nvext.extra_fields' are for requests with one prompt", param="nvext")
        generations = [edge.plane.generate(text, call) for text in asked.texts]
        async with exchange.attended(), one_source(generations, asked.n) as source:
            head = Head(
                id=f"cmpl-{secrets.token_hex(12)}",
                kind="text_completion",
                created=int(started),
                model=request.model,
                usage=wants_usage(request),
            )
            if request.stream:
                await self._stream(exchange, request, source, generations, head, asked, extras)
            else:
                await self._answer(exchange, request, source, generations, head, asked, extras)

    async def _stream(
        self,
        exchange: Exchange,
        request: CompletionRequest,
        source: Source,
        generations: Sequence[Generation],
        head: Head,
        asked: Asked,
        extras: Extras,
    ) -> None:
        text = asked.texts[0]
        choices = len(asked.texts) * asked.n
        texts = await self._token_texts(exchange.account, request)
        echo = await self._echo(exchange.account, asked) if request.echo else ()
        chunks = CompletionChunks(head, choices, texts, text.logprobs or 0, echo)
        async with exchange.events() as stream:
            if extras.annotations:
                model = await self._edge.plane.text_model(exchange.account, text.model)
                if annotations := await extras.before(generations[0], model, text, exchange.request_id):
                    await stream.write(b"".join(annotations))
            await write_stream(stream, source, extras.watched(chunks))
            await stream.end(b"".join(extras.after(source)) + last_chunk(head, source.summary, extras.fields(source)))

    async def _answer(
        self,
        exchange: Exchange,
        request: CompletionRequest,
        source: Source,
        generations: Sequence[Generation],
        head: Head,
        asked: Asked,
        extras: Extras,
    ) -> None:
        folds = [CompletionFold() for _ in range(len(asked.texts) * asked.n)]
        while deltas := await source.read():
            for delta in deltas:
                folds[delta.index].add(delta)
                if extras.tokens is not None:
                    extras.tokens += delta.tokens
        texts = await self._token_texts(exchange.account, request)
        echo = await self._echo(exchange.account, asked) if request.echo else [""] * len(folds)
        wanted = request.n or 1
        choices: list[CompletionChoice] = []
        for at, generation in enumerate(generations):
            own = folds[at * asked.n : (at + 1) * asked.n]
            for fold in best(own, wanted) if asked.n > wanted else own:
                choice = fold.choice(len(choices), request, generation, texts, echo[at * asked.n])
                choices.append(choice)
        answer = Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            choices=choices,
            usage=Usage.of(source.summary),
            nvext=extras.fields(source) or UNSET,
        )
        await exchange.answer(encode(answer))

    async def _token_texts(self, account: Account, request: CompletionRequest) -> TokenTexts | None:
        if request.logprobs is None and request.prompt_logprobs is None:
            return None
        return TokenTexts((await self._edge.plane.text_model(account, request.model)).tokenizer)

    async def _echo(self, account: Account, asked: Asked) -> list[str]:
        """The prompt of each choice as text."""
        model = await self._edge.plane.text_model(account, asked.texts[0].model)
        return [prompt for text in asked.texts for prompt in [formatted_prompt(model, text)] * asked.n]


class CompletionFold:
    """Puts the deltas of one choice together."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._positions: list[list[tuple[int, float]]] | None = None
        self._reason: FinishReason | None = None

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        if delta.logprobs is not None:
            self._positions = (self._positions or []) + delta.logprobs
        self._reason = delta.finish_reason or self._reason

    @property
    def mean_logprob(self) -> float:
        """How likely it was, per token. Raises EngineError if the engine did not say."""
        if self._positions is None:
            raise EngineError("the engine reports no log probabilities, which 'best_of' needs")
        return sum(position[0][1] for position in self._positions) / max(1, len(self._positions))

    def choice(
        self, index: int, request: CompletionRequest, generation: Generation, texts: TokenTexts | None, echo: str
    ) -> CompletionChoice:
        """Raises EngineError if the engine did not finish it."""
        if self._reason is None:
            raise EngineError("the engine ended without finishing its answer")
        of_prompt = generation.summary.prompt_logprobs
        logprobs: CompletionLogprobs | None = None
        if request.logprobs is not None and texts is not None:
            writer = CompletionLogprobWriter(texts, request.logprobs)
            parts = []
            if request.echo:
                if of_prompt is None:
                    raise EngineError("the engine reports no log probabilities of the prompt, which 'echo' with 'logprobs' needs")
                parts.append(writer.add(of_prompt, generation.prompt_ids))
            parts.append(writer.add(self._positions or []))
            logprobs = joined(parts, request.logprobs)
        return CompletionChoice(
            index=index,
            text=echo + "".join(self._texts),
            logprobs=logprobs,
            finish_reason=self._reason.value,
            prompt_logprobs=prompt_logprobs(of_prompt or [], texts) if request.prompt_logprobs is not None and texts else UNSET,
        )


def best(folds: Sequence[CompletionFold], count: int) -> list[CompletionFold]:
    """The `count` likeliest per token, the likeliest first."""
    return sorted(folds, key=lambda fold: -fold.mean_logprob)[:count]
