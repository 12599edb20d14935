"""POST /v1/chat/completions: continue a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec import UNSET, Raw

from dynamo.common.errors import EngineError
from dynamo.common.generation import FinishReason
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_pieces import JsonArray, Spliced
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.chunks import ChatChunks, Details, Head, encode, finish_reason, token_ids
from dynamo.frontend.api.openai.custom_tools import custom_input, custom_names
from dynamo.frontend.api.openai.edge import (
    Edge,
    Extras,
    last_chunk,
    wants_running_usage,
    wants_usage,
    write_prompts,
    write_stream,
)
from dynamo.frontend.api.openai.field_names import fields_named
from dynamo.frontend.api.openai.logprobs import MANY_POSITIONS, chat_logprobs, encoded_prompt_logprobs
from dynamo.frontend.api.openai.requests import ChatRequest, NamedCustomChoice, NamedToolChoice
from dynamo.frontend.api.openai.response_objects import (
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    CustomCall,
    Function,
    ResponseMessage,
    ResponseToolCall,
    Usage,
)
from dynamo.frontend.api.openai.to_text import PreparedRequest, call_of, chat_to_text, last_words, renamed, with_tools
from dynamo.frontend.api.openai.whole import LONG_CHARS, WholeResponse, hold_echo
from dynamo.frontend.api.text.gathering import Gathering
from dynamo.frontend.api.text.generations import read_carried
from dynamo.frontend.api.text.reasoning_tokens import ReasoningTokenCounter
from dynamo.frontend.api.text.rules import new_tool_call_id, one_by_one, parse_delta
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.preprocess.parsers import Content, OutputParser, Part, Reasoning, ToolCall, make_parser
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import Generation
from dynamo.frontend.serving.model_catalog import NamedModel

_MANY_CALLS = 1000
"""Calls in all choices that are not encoded on the event loop."""


class ChatCompletions:
    """The endpoint for chat completions, streamed or whole."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(ChatRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        started = edge.clock()
        call = exchange.call()
        request = with_tools(edge.completed(await self._reader.read(exchange), exchange.account))
        edge.check_template(request.chat_template)
        with fields_named(request.field_names):
            call = call_of(request, exchange.identified(call, request.request_id))
            serve = partial(self._serve, exchange, request, started)
            await edge.plane.names.serve(call, request.model_name, serve, has_begun=exchange.has_begun, user=request.user)

    async def _serve(self, exchange: Exchange, request: ChatRequest, started: float, model: NamedModel, call: Call) -> None:
        edge, card, request = self._edge, model.card, renamed(request, model.name)
        prepared = await edge.offload.run_if(exchange.has_large_body, chat_to_text, request, card, edge.parsers, edge.limits)
        extras = Extras(request, started, edge.clock)
        generation = edge.plane.generate(model, prepared.texts[0], call)
        async with exchange.attended(), generation:
            if exchange.progress.carried is not None:
                return await read_carried(generation)
            details = await self._details(exchange.account, request, prepared, generation)
            await hold_echo(exchange, edge.offload, details.echo, prepared.n)
            head = Head(
                id=f"chatcmpl-{exchange.request_id}",
                kind="chat.completion.chunk",
                created=int(started),
                model=model.name,
                usage=wants_usage(request),
            )
            if request.stream:
                await self._stream(exchange, generation, head, prepared, details, extras)
            else:
                await self._respond(exchange, generation, head, prepared, details, extras)

    async def _stream(
        self,
        exchange: Exchange,
        generation: Generation,
        head: Head,
        prepared: PreparedRequest,
        details: Details,
        extras: Extras,
    ) -> None:
        text = prepared.texts[0]
        chunks = ChatChunks(head, prepared.n, _parsers(prepared, generation), details)
        async with exchange.events() as stream:
            if extras.annotations:
                model = await self._edge.plane.text_model(exchange.account, text.model)
                await stream.write_pieces(await extras.prompt_annotations(exchange, generation, model, text))
            collecting = extras.collecting(chunks)
            if details.echo:
                await write_prompts(stream, generation, collecting, chunks.awaits_prompt)
            await write_stream(stream, generation, collecting, exchange.settings.steps if chunks.parses else None)
            last = last_chunk(head, generation.summary, extras.fields(generation), chunks.reasoning_tokens)
            await stream.end(b"".join(extras.final_annotations(generation)) + last)

    async def _respond(
        self,
        exchange: Exchange,
        generation: Generation,
        head: Head,
        prepared: PreparedRequest,
        details: Details,
        extras: Extras,
    ) -> None:
        parsers: Sequence[OutputParser | None] = _parsers(prepared, generation) or [None] * prepared.n
        builders = [ChatChoiceBuilder(parser, details) for parser in parsers]
        gathering = Gathering(exchange.hold)

        def add(delta: TextDelta) -> None:
            builders[delta.index].add(delta)
            if extras.tokens is not None:
                extras.tokens += delta.tokens

        while deltas := await generation.read():
            gathering.add(deltas)
            if parsers[0] is not None and len(deltas) > 1:
                await exchange.in_steps(one_by_one(add, deltas))
            else:
                for delta in deltas:
                    add(delta)
        whole = WholeResponse(exchange, self._edge.offload)
        is_long = any(len(echo) > LONG_CHARS for echo in details.echo)
        is_long = is_long or sum(builder.calls for builder in builders) > _MANY_CALLS
        for builder in builders:
            await whole.add(is_long, builder.choice)
        of_prompt = None
        if prepared.texts[0].prompt_logprobs is not None and details.texts is not None:
            positions = generation.summary.prompt_logprobs or []
            gathering.add_prompt(positions)
            is_long = len(positions) > MANY_POSITIONS
            of_prompt = await self._edge.offload.run_if(is_long, _of_prompt, positions, details.texts)
        reasoning_tokens = sum(builder.reasoning.count for builder in builders) if parsers[0] is not None else None
        await whole.send(
            lambda choices: ChatCompletion(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=Usage.of(generation.summary, reasoning_tokens),
                prompt_logprobs=of_prompt,
                prompt_token_ids=None if details.prompt_ids is None else [*details.prompt_ids[0]],
                nvext=extras.fields(generation) or UNSET,
            )
        )

    async def _details(
        self, account: Account, request: ChatRequest, prepared: PreparedRequest, generation: Generation
    ) -> Details:
        texts = None
        if request.logprobs or request.prompt_logprobs is not None:
            vocabulary = (await self._edge.plane.text_model(account, request.model_name)).tokenizer
            texts = TokenTexts(vocabulary, as_ids=bool(request.return_tokens_as_token_ids))
        return Details(
            texts=texts,
            alternatives=prepared.alternatives,
            prompt_ids=[generation.prompt_ids] if request.return_token_ids else None,
            running_usage=[generation.prompt_tokens] if wants_running_usage(request) else None,
            reasoning=request.include_reasoning is not False,
            echo=[echo] if request.echo and (echo := last_words(request)) else (),
            has_functions=request.functions is not None,
            partial_calls=isinstance(request.tool_choice, NamedToolChoice | NamedCustomChoice),  # as in vllm serve
            custom_tools=custom_names(request),
        )


def _parsers(prepared: PreparedRequest, generation: Generation) -> list[OutputParser]:
    """Return one parser per choice; an empty list if all of the model's text is content."""
    if not prepared.parsers:
        return []
    parsers = [make_parser(prepared.parsers, prepared.tools, generation.prompt_end) for _ in range(prepared.n)]
    return [parser for parser in parsers if parser is not None]


def _of_prompt(positions: Sequence[Sequence[tuple[int, float]] | None], texts: TokenTexts) -> Raw:
    """Return what stands for `prompt_logprobs`; at most `MAX_PROMPT_LOGPROBS` entries, which may be joined."""
    long = Spliced()
    return Raw(b"".join(long.pieces(bytes(encoded_prompt_logprobs(positions, texts, long)))))


class ChatChoiceBuilder:
    """Builds one choice of a whole response from its deltas."""

    def __init__(self, parser: OutputParser | None, details: Details) -> None:
        self._parser = parser
        self._details = details
        self._content: list[str] = [*details.echo]
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []
        self.reasoning = ReasoningTokenCounter()
        self._logprobs: JsonArray | None = None
        self._ids: list[int] | None = None if details.prompt_ids is None else []
        self._reason: FinishReason | None = None
        self._stop_reason: str | int | None = None

    @property
    def calls(self) -> int:
        """Number of tool calls."""
        return len(self._calls)

    def add(self, delta: TextDelta) -> None:
        if self._ids is not None:
            self._ids += token_ids(delta)
        if self._parser is None:
            self._content.append(delta.text)
        else:
            parts = parse_delta(self._parser, delta)
            self.reasoning.add(parts, len(delta.tokens))
            self._take(parts)
        details = self._details
        if details.texts is not None and delta.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = JsonArray()
            self._logprobs.extend(encode(chat_logprobs(delta.logprobs, details.texts, details.alternatives)))
        if delta.finish_reason is not None:
            self._reason, self._stop_reason = delta.finish_reason, delta.stop_reason

    def _take(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, Content):
                self._content.append(part.text)
            elif isinstance(part, Reasoning):
                if self._details.reasoning:
                    self._reasoning.append(part.text)
            else:
                self._call(part)

    def _call(self, part: ToolCall) -> None:
        if part.index == len(self._calls):
            self._calls.append((part.name, []))
        self._calls[part.index][1].append(part.arguments)

    def _tool_call(self, name: str, arguments: str) -> ResponseToolCall:
        if name in self._details.custom_tools:
            return ResponseToolCall(new_tool_call_id(), type="custom", custom=CustomCall(name, custom_input(arguments)))
        return ResponseToolCall(new_tool_call_id(), Function(name, arguments))

    def choice(self, long: Spliced, index: int) -> ChatChoice:
        """Return the choice. Raises EngineError if the engine did not finish it."""
        if self._reason is None:
            raise EngineError("the engine ended without finishing its response")
        content = "".join(self._content)
        whole = [(name, "".join(arguments)) for name, arguments in self._calls]
        if self._reason is FinishReason.LENGTH and not self._details.partial_calls:  # the last one may have been cut off
            whole = [(name, arguments) for name, arguments in whole if _is_json(arguments)]
        calls = [self._tool_call(name, arguments) for name, arguments in whole]
        reasoning = "".join(self._reasoning)
        has_functions = self._details.has_functions
        message = ResponseMessage(
            content=content if content or not calls else None,
            reasoning_content=reasoning or UNSET,
            reasoning=reasoning or None,
            tool_calls=calls if calls and not has_functions else UNSET,
            function_call=Function(*whole[0]) if calls and has_functions else UNSET,
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=None if self._logprobs is None else ChatLogprobs(Raw(long.put(self._logprobs))),
            finish_reason=finish_reason(self._reason, called=bool(calls), has_functions=has_functions),
            stop_reason=self._stop_reason,
            token_ids=self._ids,
        )


def _is_json(arguments: str) -> bool:
    try:
        msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
