"""`/v1/completions` with token ids in both directions: of `vllm serve`, and of TensorRT-LLM's `trtllm-serve`.

vLLM takes images in conversations only, so those go to its `/v1/chat/completions`, which sends token ids, too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, TokenCount, unpack_text
from dynamo.common.generation_rules import Feature
from dynamo.worker.engine.open_requests import read_finish_reason
from dynamo.worker.engine.remote.dialect import PromptDetails, data_url, decode_event, fills_context, token_limit, without_none
from dynamo.worker.engine.remote.errors import ServerError, stream_error
from dynamo.worker.engine.remote.tokens import TokenReader, any_of, check_tokens, chosen_first, logit_bias
from dynamo.worker.engine.sampling import choice_seed, sampling_fields
from dynamo.worker.engine.text_prompt import with_media
from dynamo.worker.engine.vllm.request import structured_settings

PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
_VLLM_FEATURES = frozenset(
    {
        Feature.GUIDED,
        Feature.LOGIT_BIAS,
        Feature.ALLOWED_IDS,
        Feature.LOGPROB_IDS,
        Feature.ADAPTER,
        Feature.CACHE_SALT,
        Feature.MEDIA,
    }
)
_TENSORRT_FEATURES = frozenset({Feature.GUIDED, Feature.LOGIT_BIAS})
_SERVER_LOGPROBS = 20
"""Logprobs that a server allows unless configured otherwise."""
_ID_DIGITS = 10
_ID_PREFIX = "token_id:"


class Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class TokenChoice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class TokenUsage(msgspec.Struct):
    prompt_tokens: TokenCount = 0
    """With as many for each image as it takes."""
    prompt_tokens_details: PromptDetails | None = None


class TokenChunk(msgspec.Struct):
    choices: list[TokenChoice] = []
    usage: TokenUsage | None = None
    error: ServerError | None = None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    top_logprobs: list[ChatLogprob] = []


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob] | None = None

    def columns(self) -> Logprobs:
        """Return them in the form of plain completions."""
        content = self.content or []
        return Logprobs(
            tokens=[position.token for position in content],
            token_logprobs=[position.logprob for position in content],
            top_logprobs=[{other.token: other.logprob for other in position.top_logprobs} for position in content],
        )


class ChatChoice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    """None: the choice begins."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(msgspec.Struct):
    choices: list[ChatChoice] = []
    usage: TokenUsage | None = None
    error: ServerError | None = None

    def plain(self) -> TokenChunk:
        """Return the chunk in the form of plain completions."""
        choices = [
            TokenChoice(
                index=choice.index,
                token_ids=choice.token_ids,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                logprobs=None if choice.logprobs is None else choice.logprobs.columns(),
            )
            for choice in self.choices
            if choice.token_ids is not None or choice.finish_reason is not None
        ]
        return TokenChunk(choices, self.usage, self.error)


_chunk_decoder = msgspec.json.Decoder(TokenChunk)
_chat_decoder = msgspec.json.Decoder(ChatChunk)


class VllmDialect:
    """`vllm serve`, and frontends of this project. Priorities are not passed on: most servers refuse all but 0."""

    def __init__(self, model: str, context_length: int, eos: frozenset[int]) -> None:
        self._model = model
        self._context_length = context_length
        self._eos = eos

    def call(self, request: GenerateRequest) -> tuple[str, bytes]:
        check_tokens(request, self._context_length, _VLLM_FEATURES)
        sampling = request.sampling
        chosen = None if request.logprobs is None else _with_chosen(request.logprobs)
        fields = {
            **_common(request, request.adapter or self._model, self._context_length),
            "return_token_ids": True,
            "allowed_token_ids": sampling.allowed_token_ids,
            "structured_outputs": structured_settings(sampling.guided) if sampling.guided else None,
            "logprobs": chosen,
            "logprob_token_ids": request.logprob_token_ids or None,
            "return_tokens_as_token_ids": None if request.logprobs is None else True,
            "cache_salt": request.cache_salt or None,
        }
        if not request.media:
            return PATH, msgspec.json.encode(without_none(fields))
        fields |= _conversation(request)
        fields |= {"prompt": None, "logprobs": None if chosen is None else True, "top_logprobs": chosen}
        if fills_context(request, self._context_length):
            fields["max_tokens"] = None
        return CHAT_PATH, msgspec.json.encode(without_none(fields))

    def reader(self, request: GenerateRequest) -> StreamReader:
        kind = ChatReader if request.media else StreamReader
        return kind(request, self._eos, self._context_length)


class TensorRtDialect:
    """`trtllm-serve`, which refuses fields that it does not have, and returns token ids in the place of text."""

    def __init__(self, model: str, context_length: int, eos: frozenset[int]) -> None:
        self._model = model
        self._context_length = context_length
        self._eos = eos

    def call(self, request: GenerateRequest) -> tuple[str, bytes]:
        check_tokens(request, self._context_length, _TENSORRT_FEATURES, logprobs=False)
        guided = request.sampling.guided
        fields = {
            **_common(request, self._model, self._context_length),
            "detokenize": False,
            "response_format": _response_format(structured_settings(guided)) if guided else None,
        }
        return PATH, msgspec.json.encode(without_none(fields))

    def reader(self, request: GenerateRequest) -> StreamReader:
        return StreamReader(request, self._eos, self._context_length)


def _conversation(request: GenerateRequest) -> dict[str, object]:
    """Return the fields that a conversation with images has in the place of a prompt."""
    if not request.conversation:
        raise InvalidRequest("this server takes images in conversations only", param="prompt")
    images = [{"type": "image_url", "image_url": {"url": data_url(image["data"])}} for image in request.media]
    prompt = with_media(unpack_text(request.conversation), images)
    return {
        "messages": prompt.messages,
        "tools": prompt.tools or None,
        "tool_choice": "none" if prompt.tools else None,  # frontends parse calls: the server is to leave them in the text
        "chat_template_kwargs": prompt.template_variables or None,
    }


def _common(request: GenerateRequest, model: str, context_length: int) -> dict[str, object]:
    """Return the fields that both servers have; None where the request leaves the server's own default."""
    sampling, stop = request.sampling, request.stop
    max_tokens = token_limit(request, context_length)
    return {
        "model": model,
        "prompt": request.tokens.tolist(),
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": request.n,
        "max_tokens": max_tokens,
        "min_tokens": min(stop.min_tokens, max_tokens),
        "ignore_eos": stop.ignore_eos,
        **sampling_fields(sampling),
        "seed": choice_seed(request),
        "logit_bias": logit_bias(sampling),
        "stop_token_ids": stop.token_ids or None,
    }


def _response_format(settings: dict[str, Any]) -> dict[str, Any]:
    """Return TensorRT-LLM's `response_format`. Raises InvalidRequest for what it does not have."""
    [(kind, value)] = settings.items()
    match kind:
        case "json":
            return {"type": "json", "schema": value}
        case "json_object":
            return {"type": "json_object"}
        case "regex":
            return {"type": "regex", "regex": value}
        case "grammar":
            return {"type": "ebnf", "ebnf": value}
        case "choice":
            return {"type": "regex", "regex": any_of(value)}
        case _:
            raise InvalidRequest(f"structured output by '{kind}' is not supported by this server", param=kind)


def _with_chosen(alternatives: int) -> int:
    """Return the server's number, which counts the likeliest tokens and may include the chosen one."""
    return max(alternatives, min(alternatives + 1, _SERVER_LOGPROBS)) if alternatives else 0


class StreamReader(TokenReader):
    """Reads the events of one stream; see `EventReader`."""

    def read(self, event: bytes) -> list[Delta]:
        return self._read(decode_event(_chunk_decoder, event))

    def _read(self, chunk: TokenChunk) -> list[Delta]:
        if chunk.error is not None:
            raise stream_error(chunk.error)
        if chunk.usage is not None:
            self._prompt_tokens = chunk.usage.prompt_tokens or self._prompt_tokens
            details = chunk.usage.prompt_tokens_details
            self._cached_tokens = (details.cached_tokens or 0) if details is not None else self._cached_tokens
        return [delta for choice in chunk.choices if (delta := self._delta(choice)) is not None]

    def _delta(self, choice: TokenChoice) -> Delta | None:
        self._choices.check(choice.index)
        if choice.token_ids is None:
            raise EngineError("the server sent no token ids, although they are requested")
        tokens = choice.token_ids
        logprobs = self._logprobs(choice.logprobs, tokens)
        reason, stop_token = read_finish_reason(choice.finish_reason, "the server"), None
        if reason is FinishReason.STOP and tokens and (tokens[-1] in self._stops or tokens[-1] == choice.stop_reason):
            stop_token, tokens = tokens[-1], tokens[:-1]
        elif reason is FinishReason.STOP and isinstance(choice.stop_reason, int):
            stop_token = choice.stop_reason  # which TensorRT-LLM leaves out
        if reason is not None:
            self._choices.finish(choice.index)
        elif not tokens:
            return None
        self._count(len(tokens))
        return Delta(tuple(tokens), choice.index, reason, logprobs, stop_token)

    def _logprobs(self, logprobs: Logprobs | None, tokens: list[int]) -> list[list[tuple[int, float]]] | None:
        if self._request.logprobs is None or not tokens:
            return None
        if logprobs is None or min(len(logprobs.tokens), len(logprobs.token_logprobs)) < len(tokens):
            raise EngineError("the server sent tokens without their log probabilities")
        tops = logprobs.top_logprobs or [None] * len(tokens)
        alternatives = len(self._request.logprob_token_ids) or self._request.logprobs
        return [
            chosen_first(token, value, [(_token_id(name), other) for name, other in (top or {}).items()], alternatives)
            for token, value, top in zip(tokens, logprobs.token_logprobs, tops, strict=False)
        ]


class ChatReader(StreamReader):
    """Reads the events of one stream of a chat completion."""

    def read(self, event: bytes) -> list[Delta]:
        return self._read(decode_event(_chat_decoder, event).plain())


def _token_id(name: str) -> int:
    number = name.removeprefix(_ID_PREFIX)
    if number == name or not number.isdecimal() or len(number) > _ID_DIGITS:
        raise EngineError(f"the server names a token {name[:40]!r} although 'return_tokens_as_token_ids' is set")
    return int(number)
