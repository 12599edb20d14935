"""POST /v1/chat/completions/batch: several conversations in one request, as `vllm serve` has it, with a choice for each."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.chat import ChatChoiceBuilder
from dynamo.frontend.api.openai.chunks import Details
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.requests import ChatMessage, ChatRequest
from dynamo.frontend.api.openai.response_objects import ChatCompletion, Usage
from dynamo.frontend.api.openai.to_text import call_of, chat_to_text, last_words
from dynamo.frontend.api.openai.whole import WholeResponse, hold_echo
from dynamo.frontend.api.text.gathering import Gathering
from dynamo.frontend.api.text.generations import text_source
from dynamo.frontend.api.text.rules import one_by_one
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.preprocess.parsers import make_parser
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.model_catalog import NamedModel

_ONE = tuple(name for name in ChatRequest.__struct_fields__ if name != "messages")


class ChatBatchRequest(ChatRequest, kw_only=True, frozen=True):
    """POST /v1/chat/completions/batch"""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[ChatMessage], Meta(min_length=1)]], Meta(min_length=1, description="Conversations.")
    ]

    def check(self, most: int) -> None:
        """Raises InvalidRequest for what a batch cannot have."""
        problems = {
            "stream": (self.stream, "a batch cannot be streamed"),
            "tools": (self.tools or self.functions, "conversations of a batch have no tools"),
            "n": ((self.n or 1) > 1, "a batch has one choice for each conversation"),
            "prompt_logprobs": (self.prompt_logprobs is not None, "a batch has no log probabilities of prompts"),
            "return_token_ids": (self.return_token_ids, "a batch has no token ids"),
            "nvext": (self.nvext is not None, "a batch has no 'nvext'"),
        }
        for name, (is_set, message) in problems.items():
            if is_set:
                raise InvalidRequest(message, param=name)
        if len(self.messages) > most:
            raise InvalidRequest(f"got {len(self.messages)} conversations; at most {most} are allowed", param="messages")

    def each(self, model: str) -> list[ChatRequest]:
        """Return a request for each conversation."""
        shared = {name: getattr(self, name) for name in _ONE} | {"model": model}
        return [ChatRequest(messages=messages, **shared) for messages in self.messages]


class ChatBatch:
    """The endpoint."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(ChatBatchRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        created = int(edge.clock())
        call = exchange.call()
        request = edge.completed(await self._reader.read(exchange), exchange.account)
        request.check(edge.limits.max_choices)
        edge.check_template(request.chat_template)
        call = call_of(request, exchange.identified(call, request.request_id))
        serve = partial(self._serve, exchange, request, created)
        await edge.plane.names.serve(call, request.model_name, serve, has_begun=exchange.has_begun, user=request.user)

    async def _serve(self, exchange: Exchange, request: ChatBatchRequest, created: int, model: NamedModel, call: Call) -> None:
        edge = self._edge
        requests = request.each(model.name)
        prepared = [
            await edge.offload.run_if(exchange.has_large_body, chat_to_text, each, model.card, edge.parsers, edge.limits)
            for each in requests
        ]
        texts = None
        if request.logprobs:
            vocabulary = (await edge.plane.text_model(exchange.account, model.name)).tokenizer
            texts = TokenTexts(vocabulary, as_ids=bool(request.return_tokens_as_token_ids))
        echo = [last_words(each) if request.echo else "" for each in requests]
        await hold_echo(exchange, edge.offload, echo, 1)
        call = msgspec.structs.replace(call, prompts=len(prepared))
        generations = [edge.plane.generate(model, each.texts[0], call) for each in prepared]
        async with exchange.attended(), text_source(generations, 1) as source:
            builders = [
                ChatChoiceBuilder(
                    make_parser(each.parsers, (), generation.prompt_end) if each.parsers else None,
                    Details(
                        texts=texts,
                        alternatives=each.alternatives,
                        reasoning=request.include_reasoning is not False,
                        echo=[words] if words else (),
                    ),
                )
                for each, generation, words in zip(prepared, generations, echo, strict=True)
            ]
            gathering = Gathering(exchange.hold)
            while deltas := await source.read():
                gathering.add(deltas)
                await exchange.in_steps(one_by_one(lambda delta: builders[delta.index].add(delta), deltas))
            whole = WholeResponse(exchange, edge.offload)
            for builder in builders:
                await whole.add(False, builder.choice)
            has_parser = bool(prepared[0].parsers)
            reasoning_tokens = sum(builder.reasoning.count for builder in builders) if has_parser else None
            await whole.send(
                lambda choices: ChatCompletion(
                    id=f"chatcmpl-{exchange.request_id}",
                    created=created,
                    model=model.name,
                    choices=choices,
                    usage=Usage.of(source.summary, reasoning_tokens),
                )
            )
