"""`/v1/completions` with token ids in both directions, as `vllm serve` has it: requests, stream events, errors."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Overloaded, PayloadTooLarge, Unavailable, Unsupported
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Summary
from dynamo.common.generation_rules import Feature, check_features, check_prompt
from dynamo.common.generation_rules import check_request as check_ranges
from dynamo.worker.engine.open_requests import read_finish_reason
from dynamo.worker.engine.vllm_request import structured_settings

_SUPPORTED = frozenset(
    {Feature.GUIDED, Feature.LOGIT_BIAS, Feature.ALLOWED_IDS, Feature.LOGPROB_IDS, Feature.ADAPTER, Feature.CACHE_SALT}
)
_SERVER_LOGPROBS = 20
"""Logprobs that a server allows unless configured otherwise."""
_ID_PREFIX = "token_id:"
_MAX_MESSAGE_CHARS = 1000
_STATUSES = {
    "invalid_request_error": 400,
    "rate_limit_error": 429,
    "not_implemented": 501,
    "service_unavailable": 503,
    "timeout": 504,
}
"""By the types of errors of servers whose error codes are words, as OpenAI's are."""


class Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: PromptDetails | None = None


class Error(msgspec.Struct):
    message: str = ""
    type: str = ""
    code: int | str | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Error | None = None


class Failure(msgspec.Struct):
    error: Error


_chunk_decoder = msgspec.json.Decoder(Chunk)
_failure_decoder = msgspec.json.Decoder(Failure)


def check_request(request: GenerateRequest, context_length: int) -> None:
    """Raises InvalidRequest for a request that the server would misunderstand or not bound."""
    check_prompt(request, context_length)
    check_ranges(request)
    check_features(request, "remote", _SUPPORTED)
    if request.data_parallel_rank:
        raise InvalidRequest(f"data_parallel_rank must be 0, got {request.data_parallel_rank}", param="data_parallel_rank")


def request_body(request: GenerateRequest, model: str, context_length: int) -> bytes:
    """Return the body for a request that `check_request` let through. Raises InvalidRequest for unknown structured output.

    Priorities stay here: most servers refuse all but 0.
    """
    sampling, stop = request.sampling, request.stop
    room = context_length - request.prompt_tokens
    max_tokens = room if stop.max_tokens is None else min(stop.max_tokens, room)
    optional = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": None if sampling.seed is None else sampling.seed + request.first_choice,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} if sampling.logit_bias else None,
        "allowed_token_ids": sampling.allowed_token_ids,
        "structured_outputs": structured_settings(sampling.guided) if sampling.guided else None,
        "stop_token_ids": stop.token_ids or None,
        "logprobs": None if request.logprobs is None else _with_chosen(request.logprobs),
        "logprob_token_ids": request.logprob_token_ids or None,
        "return_tokens_as_token_ids": None if request.logprobs is None else True,
        "cache_salt": request.cache_salt or None,
    }
    body: dict[str, Any] = {
        "model": request.adapter or model,
        "prompt": request.tokens.tolist(),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "n": request.n,
        "max_tokens": max_tokens,
        "min_tokens": min(stop.min_tokens, max_tokens),
        "ignore_eos": stop.ignore_eos,
        **{name: value for name, value in optional.items() if value is not None},
    }
    return msgspec.json.encode(body)


def _with_chosen(alternatives: int) -> int:
    """Return the server's number, which counts the likeliest tokens and may include the chosen one."""
    return max(alternatives, min(alternatives + 1, _SERVER_LOGPROBS)) if alternatives else 0


class StreamReader:
    """Turns the events of one stream into deltas and a summary."""

    def __init__(self, request: GenerateRequest, eos: frozenset[int]) -> None:
        """`eos` tokens end a generation, unless the request ignores them."""
        self._request = request
        self._stops = frozenset(request.stop.token_ids) | (frozenset() if request.stop.ignore_eos else eos)
        self._started_at = time.monotonic()
        self._prefill_ms = 0.0
        self._output_tokens = 0
        self._cached_tokens = 0
        self._unfinished = set(range(request.n))

    @property
    def has_finished(self) -> bool:
        """Whether each choice has ended."""
        return not self._unfinished

    def read(self, event: bytes) -> list[Delta]:
        """Return the deltas of an event. Raises the error that it holds, EngineError for an event that cannot be read."""
        try:
            chunk = _chunk_decoder.decode(event)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise EngineError(f"the server sent an event that cannot be read: {error}") from error
        if chunk.error is not None:
            raise _stream_error(chunk.error)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            self._cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
        return [delta for choice in chunk.choices if (delta := self._delta(choice)) is not None]

    def summary(self) -> Summary:
        return Summary(
            prompt_tokens=self._request.prompt_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=self._cached_tokens,
            prefill_ms=self._prefill_ms,
        )

    def _delta(self, choice: Choice) -> Delta | None:
        if choice.index not in self._unfinished:
            raise EngineError(f"the server sent choice {choice.index}, which has ended or was not requested")
        if choice.token_ids is None:
            raise EngineError("the server sent no token ids, although 'return_token_ids' is set")
        self._prefill_ms = self._prefill_ms or (time.monotonic() - self._started_at) * 1e3
        tokens = choice.token_ids
        reason, stop_token = read_finish_reason(choice.finish_reason, "the server"), None
        if reason is FinishReason.STOP and tokens and (tokens[-1] in self._stops or tokens[-1] == choice.stop_reason):
            stop_token, tokens = tokens[-1], tokens[:-1]
        if reason is not None:
            self._unfinished.remove(choice.index)
        elif not tokens:
            return None
        self._output_tokens += len(tokens)
        return Delta(tuple(tokens), choice.index, reason, self._logprobs(choice.logprobs, tokens), stop_token)

    def _logprobs(self, logprobs: Logprobs | None, tokens: list[int]) -> list[list[tuple[int, float]]] | None:
        if self._request.logprobs is None or not tokens:
            return None
        if logprobs is None or min(len(logprobs.tokens), len(logprobs.token_logprobs)) < len(tokens):
            raise EngineError("the server sent tokens without their log probabilities")
        tops = logprobs.top_logprobs or [None] * len(tokens)
        alternatives = len(self._request.logprob_token_ids) or self._request.logprobs
        return [
            _position(token, value, top or {}, alternatives)
            for token, value, top in zip(tokens, logprobs.token_logprobs, tops, strict=False)
        ]


def _position(token: int, value: float | None, top: dict[str, float], alternatives: int) -> list[tuple[int, float]]:
    others = [(_token_id(name), other) for name, other in top.items()]
    others = sorted((pair for pair in others if pair[0] != token), key=lambda pair: -pair[1])
    return [(token, value if value is not None else 0.0), *others[:alternatives]]


def _token_id(name: str) -> int:
    number = name.removeprefix(_ID_PREFIX)
    if number == name or not number.isdecimal():
        raise EngineError(f"the server names a token {name[:40]!r} although 'return_tokens_as_token_ids' is set")
    return int(number)


def _stream_error(error: Error) -> DynamoError:
    """Return our error for one that ends a stream. A server that has begun a response is not too busy for it, but lost it."""
    code = str(error.code)
    status = int(code) if code.isdecimal() else _STATUSES.get(error.type, 500)
    return to_error(502 if status == 503 else status, error.message)


def read_failure(status: int, body: bytes, retry_after: str = "") -> DynamoError:
    """Return the error that a response with a status of failure means."""
    try:
        message = _failure_decoder.decode(body).error.message
    except (msgspec.MsgspecError, RecursionError):
        message = ""  # such as a page of a proxy
    return to_error(status, message, float(retry_after) if retry_after.isdecimal() else 1.0)


def to_error(status: int, message: str, retry_after_s: float = 1.0) -> DynamoError:
    """Return our error for an HTTP status of the server."""
    text = message[:_MAX_MESSAGE_CHARS] or f"the server responded with status {status}"
    match status:
        case 400 | 422:
            return InvalidRequest(text)
        case 413:
            return PayloadTooLarge(text)
        case 429 | 503:
            return Overloaded(text, retry_after_s=retry_after_s)
        case 404 | 502 | 504:  # it serves another model now, or a proxy in front of it has lost it
            return Unavailable(text)
        case 501:
            return Unsupported(text)
        case _:
            return EngineError(text)
