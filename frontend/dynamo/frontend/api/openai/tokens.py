"""POST /tokenize and /detokenize, in the form of vLLM's API."""

from __future__ import annotations

import asyncio

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import decode
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.requests import DetokenizeRequest, TokenizeRequest
from dynamo.frontend.api.openai.response_objects import Detokenized, Tokenized
from dynamo.frontend.api.openai.to_text import messages_to_text, tools_to_text
from dynamo.frontend.api.text.rules import check_chars, llm_of
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.preprocess.text import TextRequest

_LONG_TOKENS = 2048
"""More tokens are detokenized in a thread."""


class Tokenize:
    """The endpoint that returns the token ids of a prompt or conversation."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._decoder = msgspec.json.Decoder(TokenizeRequest)

    async def __call__(self, exchange: Exchange) -> None:
        exchange.caller()
        request = decode(self._decoder, await exchange.body(), exchange.settings.options.max_json_depth)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either 'prompt' or 'messages'", param="prompt")
        llm = llm_of(self._edge.plane.card(exchange.account, request.model))
        text = await self._edge.plane.text_model(exchange.account, request.model)
        if request.messages is not None:
            messages, media = messages_to_text(request.messages, llm, self._edge.limits)
            rendered = text.render(
                TextRequest(
                    model=request.model,
                    messages=messages,
                    media=media,
                    tools=tools_to_text(request.tools),
                    add_generation_prompt=request.add_generation_prompt is not False,
                    chat_template_kwargs=request.chat_template_kwargs or {},
                )
            )
            tokens = await text.tokenizer.encode(rendered, special_tokens=bool(request.add_special_tokens))
        else:
            prompt = request.prompt or ""
            check_chars(len(prompt), self._edge.limits, "prompt")
            tokens = await text.tokenizer.encode(prompt, special_tokens=request.add_special_tokens is not False)
        strings = None
        if request.return_token_strs:
            texts = TokenTexts(text.tokenizer)
            strings = [texts[token] for token in tokens]
        response = Tokenized(count=len(tokens), max_model_len=llm.context_length, tokens=tokens, token_strs=strings)
        await exchange.respond(msgspec.json.encode(response))


class Detokenize:
    """The endpoint that returns the text of token ids."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._decoder = msgspec.json.Decoder(DetokenizeRequest)

    async def __call__(self, exchange: Exchange) -> None:
        exchange.caller()
        request = decode(self._decoder, await exchange.body(), exchange.settings.options.max_json_depth)
        vocabulary = (await self._edge.plane.text_model(exchange.account, request.model)).tokenizer
        tokens = request.tokens
        if tokens:
            vocabulary.check_ids(tokens)

        def text() -> str:
            return vocabulary.decode(tokens, skip_special_tokens=request.skip_special_tokens is True)

        decoded = text() if len(tokens) <= _LONG_TOKENS else await asyncio.to_thread(text)
        await exchange.respond(msgspec.json.encode(Detokenized(decoded)))
