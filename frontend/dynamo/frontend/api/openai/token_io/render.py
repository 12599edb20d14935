"""POST /v1/chat/completions/render and /v1/completions/render: requests to tokens, as requests for /inference/v1/generate."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import GenerateRequest
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.field_names import fields_named
from dynamo.frontend.api.openai.requests import (
    ChatRequest,
    CompletionRequest,
    StructuredOutputs,
    TextGenerationRequest,
)
from dynamo.frontend.api.openai.to_text import PreparedRequest, chat_to_text, completion_to_text, renamed, with_tools
from dynamo.frontend.api.openai.token_io.objects import RenderedRequest, SamplingParams
from dynamo.frontend.api.text.model_names import described_model
from dynamo.frontend.api.text.rules import llm_of
from dynamo.frontend.preprocess.text import TextRequest

_MANY_TOKENS = 16_384
"""So many are not encoded on the event loop."""


class RenderChat:
    """The endpoint for chat completions, which responds with one request."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(ChatRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        exchange.call()
        request = with_tools(edge.completed(await self._reader.read(exchange), exchange.account))
        edge.check_template(request.chat_template)
        with fields_named(request.field_names):
            model = described_model(edge.plane, exchange.account, request.model)
            request, card = renamed(request, model), edge.plane.card(exchange.account, model)
            prepared = await edge.offload.run_if(exchange.has_large_body, chat_to_text, request, card, edge.parsers, edge.limits)
            [rendered] = await _rendered(edge, exchange, request, prepared, model)
        await _respond(edge, exchange, rendered, len(rendered.token_ids))


class RenderCompletion:
    """The endpoint for plain completions, which responds with one request for each prompt."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(CompletionRequest)

    async def __call__(self, exchange: Exchange) -> None:
        edge = self._edge
        exchange.call()
        request = edge.completed(await self._reader.read(exchange), exchange.account)
        model = described_model(edge.plane, exchange.account, request.model)
        request = renamed(request, model)
        prepared = completion_to_text(request, edge.plane.card(exchange.account, model), edge.limits)
        rendered = await _rendered(edge, exchange, request, prepared, model)
        await _respond(edge, exchange, rendered, sum(len(each.token_ids) for each in rendered))


async def _respond(edge: Edge, exchange: Exchange, rendered: Any, tokens: int) -> None:
    await exchange.respond(await edge.offload.run_if(tokens > _MANY_TOKENS, msgspec.json.encode, rendered))


async def _rendered(
    edge: Edge, exchange: Exchange, request: TextGenerationRequest, prepared: PreparedRequest, model: str
) -> list[RenderedRequest]:
    """Return a request in tokens for each prompt. Raises InvalidRequest."""
    if llm_of(edge.plane.card(exchange.account, model)).takes_text:
        raise InvalidRequest(f"model '{model}' takes text and no tokens", param="model")
    text_model = await edge.plane.text_model(exchange.account, model)
    rendered = []
    for number, text in enumerate(prepared.texts):
        generate = await text_model.to_generate(text, exchange.account.name)
        if generate.media:
            raise InvalidRequest("a request with images cannot be rendered as tokens", param="messages")
        if text.reasoning_limit is not None:
            raise InvalidRequest("a limit of reasoning cannot be rendered", param="thinking_token_budget")
        id = exchange.request_id if len(prepared.texts) == 1 else f"{exchange.request_id}-{number}"
        rendered.append(
            RenderedRequest(
                request_id=id,
                model=model,
                token_ids=list(generate.tokens),
                sampling_params=_sampling(text, generate),
                stream=bool(request.stream),
                stream_options=request.stream_options,
                cache_salt=request.cache_salt,
                priority=request.priority or 0,
            )
        )
    return rendered


def _sampling(text: TextRequest, generate: GenerateRequest) -> SamplingParams:
    sampling, stop = text.sampling, text.stop
    return SamplingParams(
        n=text.n if text.n > 1 else None,
        max_tokens=generate.stop.max_tokens,
        min_tokens=stop.min_tokens or None,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=None if sampling.logit_bias is None else {str(id): bias for id, bias in sampling.logit_bias.items()},
        allowed_token_ids=None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids),
        bad_words=list(text.bad_words) or None,
        stop=list(text.stop_strings) or None,
        stop_token_ids=list(stop.token_ids) or None,
        ignore_eos=stop.ignore_eos or None,
        include_stop_str_in_output=text.include_stop_string or None,
        skip_special_tokens=None if text.skip_special_tokens else False,
        logprobs=text.logprobs,
        prompt_logprobs=text.prompt_logprobs,
        structured_outputs=None if sampling.guided is None else _structured(sampling.guided),
    )


def _structured(guided: dict[str, Any]) -> StructuredOutputs:
    """Return a constraint as requests have it."""
    return msgspec.convert(
        {"json" if kind == "json_schema" else kind: value for kind, value in guided.items()}, StructuredOutputs
    )
