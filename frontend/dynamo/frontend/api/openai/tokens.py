"""POST /tokenize and /detokenize, in the form of vLLM's API."""

from __future__ import annotations

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.requests import DetokenizeRequest, TokenizeRequest
from dynamo.frontend.api.openai.response_objects import Detokenized, Tokenized, TokenizerDescription
from dynamo.frontend.api.openai.to_text import messages_to_text, tools_to_text
from dynamo.frontend.api.text.model_names import described_model
from dynamo.frontend.api.text.rules import check_chars, llm_of
from dynamo.frontend.preprocess.text import TextRequest

_MAX_TOKENS = 1 << 20
_LONG_TOKENS = 2048
"""The texts of more tokens are looked up in a thread."""


class Tokenize:
    """The endpoint that returns the token ids of a prompt or conversation."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(TokenizeRequest)

    async def __call__(self, exchange: Exchange) -> None:
        exchange.call()
        request = await self._reader.read(exchange)
        response = await self._tokenized(exchange, request)
        await exchange.respond(msgspec.json.encode(response))

    async def _tokenized(self, exchange: Exchange, request: TokenizeRequest) -> Tokenized:
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give either 'prompt' or 'messages'", param="prompt")
        self._edge.check_template(request.chat_template)
        model = described_model(self._edge.plane, exchange.account, request.model)
        llm = llm_of(self._edge.plane.card(exchange.account, model))
        text = await self._edge.plane.text_model(exchange.account, model)
        if request.messages is not None:
            offload, is_large = self._edge.offload, exchange.has_large_body
            messages, media = await offload.run_if(is_large, messages_to_text, request.messages, llm, self._edge.limits)
            rendered = await text.render(
                TextRequest(
                    model=model,
                    messages=messages,
                    media=media,
                    tools=tools_to_text(request.tools),
                    add_generation_prompt=request.add_generation_prompt is not False,
                    continues_last=bool(request.continue_final_message),
                    chat_template=request.chat_template or "",
                    chat_template_kwargs=request.chat_template_kwargs or {},
                )
            )
            special_tokens = bool(request.add_special_tokens)
        else:
            rendered = request.prompt or ""
            check_chars(len(rendered), self._edge.limits, "prompt")
            special_tokens = request.add_special_tokens is not False
        tokens = await text.tokenizer.encode(rendered, special_tokens=special_tokens, max_tokens=_MAX_TOKENS)
        strings = None
        if request.return_token_strs:
            names = map(text.tokenizer.token_name, tokens)
            strings = await self._edge.offload.run_if(len(tokens) > _LONG_TOKENS, list, names)
        return Tokenized(count=len(tokens), max_model_len=llm.context_length, tokens=tokens, token_strs=strings)


class TokenizerInfo:
    """The endpoint that describes a model's tokenizer; `?model=` names the model if several are served."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def __call__(self, exchange: Exchange) -> None:
        model = described_model(self._edge.plane, exchange.account, exchange.query.get("model"))
        llm = llm_of(self._edge.plane.card(exchange.account, model))
        text = await self._edge.plane.text_model(exchange.account, model)
        described = TokenizerDescription(
            model_max_length=llm.context_length,
            add_bos_token=llm.add_bos,
            bos_token=llm.bos_token or None,
            eos_token=llm.eos_token or None,
            chat_template=text.template_source or None,
        )
        await exchange.respond(msgspec.json.encode(described))


class Detokenize:
    """The endpoint that returns the text of token ids."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(DetokenizeRequest)

    async def __call__(self, exchange: Exchange) -> None:
        exchange.call()
        request = await self._reader.read(exchange)
        tokens = request.tokens
        model = described_model(self._edge.plane, exchange.account, request.model)
        vocabulary = (await self._edge.plane.text_model(exchange.account, model)).tokenizer
        if tokens:
            vocabulary.check_ids(tokens, "tokens")
        decoded = await vocabulary.decode_prompt(tokens, skip_special_tokens=request.skip_special_tokens is True)
        await exchange.respond(msgspec.json.encode(Detokenized(decoded)))
