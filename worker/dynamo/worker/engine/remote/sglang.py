"""SGLang's own `/generate`, with token ids in both directions."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, TokenCount
from dynamo.common.generation_rules import Feature
from dynamo.worker.engine.open_requests import read_finish_reason
from dynamo.worker.engine.remote.dialect import data_url, decode_event, fills_context, token_limit, without_none
from dynamo.worker.engine.remote.errors import ServerError, stream_error, to_error
from dynamo.worker.engine.remote.tokens import TokenReader, any_of, check_tokens, chosen_first, logit_bias
from dynamo.worker.engine.sampling import choice_seed, sampling_fields
from dynamo.worker.engine.vllm.request import structured_settings

PATH = "/generate"
FEATURES = frozenset({Feature.GUIDED, Feature.LOGIT_BIAS, Feature.ADAPTER})


class Finish(msgspec.Struct):
    type: str = ""
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


TokenLogprob = tuple[float | None, int, str | None]


class MetaInfo(msgspec.Struct):
    finish_reason: Finish | None = None
    prompt_tokens: TokenCount = 0
    """With as many for each image as it takes."""
    completion_tokens: TokenCount = 0
    """Tokens generated in all events so far."""
    cached_tokens: TokenCount = 0
    output_token_logprobs: list[TokenLogprob] | None = None
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None


class Event(msgspec.Struct):
    index: int = 0
    output_ids: list[int] | None = None
    meta_info: MetaInfo | None = None
    error: ServerError | None = None


_event_decoder = msgspec.json.Decoder(Event)


class SglangDialect:
    """`python -m sglang.launch_server`."""

    def __init__(self, context_length: int, eos: frozenset[int]) -> None:
        self._context_length = context_length
        self._eos = eos

    def call(self, request: GenerateRequest) -> tuple[str, bytes]:
        check_tokens(request, self._context_length, FEATURES | {Feature.MEDIA})
        fields = request_fields(request, self._context_length)
        if request.media:
            fields["image_data"] = [data_url(image["data"]) for image in request.media]
        return PATH, msgspec.json.encode(fields)

    def reader(self, request: GenerateRequest) -> SglangReader:
        return SglangReader(request, self._eos, self._context_length)


def request_fields(request: GenerateRequest, context_length: int) -> dict[str, object]:
    """Return a request as SGLang takes it. Raises InvalidRequest for structured output of another kind."""
    sampling, stop = request.sampling, request.stop
    max_tokens = token_limit(request, context_length)
    settings = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min(stop.min_tokens, max_tokens),
        "ignore_eos": stop.ignore_eos,
        "stop_token_ids": stop.token_ids or None,
        "n": request.n,
        **sampling_fields(sampling),
        "sampling_seed": choice_seed(request),
        "logit_bias": logit_bias(sampling),
        **(_constraint(structured_settings(sampling.guided)) if sampling.guided else {}),
    }
    given = without_none(settings)
    if fills_context(request, context_length):
        given["max_new_tokens"] = None  # without it, the limit is 128
    fields = {
        "input_ids": request.tokens.tolist(),
        "sampling_params": given,
        "stream": True,
        "return_logprob": None if request.logprobs is None else True,
        "top_logprobs_num": None if request.logprobs is None else request.logprobs + 1,
        "lora_path": request.adapter or None,
    }
    return without_none(fields)


def _constraint(settings: dict[str, Any]) -> dict[str, str]:
    """Return SGLang's setting for structured output."""
    [(kind, value)] = settings.items()
    match kind:
        case "json":
            return {"json_schema": msgspec.json.encode(value).decode()}
        case "json_object":
            return {"json_schema": '{"type": "object"}'}
        case "choice":
            return {"regex": any_of(value)}
        case "grammar":
            return {"ebnf": value}
        case "regex" | "structural_tag":
            return {kind: value}
        case _:
            raise InvalidRequest(f"structured output by '{kind}' is not supported by this server", param=kind)


class SglangReader(TokenReader):
    """Reads the events of one stream; see `EventReader`.

    An event has all tokens of its choice so far or, of servers with `--incremental-streaming-output`, the new ones.
    """

    def __init__(self, request: GenerateRequest, eos: frozenset[int], context_length: int | None = None) -> None:
        super().__init__(request, eos, context_length)
        self._received = [0] * request.n

    def read(self, event: bytes) -> list[Delta]:
        return self.read_event(decode_event(_event_decoder, event))

    def read_event(self, data: Event) -> list[Delta]:
        """Return the deltas of a decoded event. Raises as `read` does."""
        if data.error is not None:
            raise stream_error(data.error)
        if data.output_ids is None or data.meta_info is None:
            raise EngineError("the server sent no token ids")
        delta = self._delta(data.index, data.output_ids, data.meta_info)
        return [] if delta is None else [delta]

    def _delta(self, index: int, tokens: list[int], info: MetaInfo) -> Delta | None:
        self._choices.check(index)
        self._cached_tokens = max(self._cached_tokens, info.cached_tokens)
        self._prompt_tokens = max(self._prompt_tokens, info.prompt_tokens)
        if len(tokens) == info.completion_tokens:
            tokens = tokens[self._received[index] :]
        self._received[index] += len(tokens)
        reason, stop_token = _finish_reason(info.finish_reason), None
        logprobs = self._logprobs(info, tokens)
        if reason is FinishReason.STOP and tokens and (tokens[-1] in self._stops or _matches(info.finish_reason, tokens[-1])):
            stop_token, tokens = tokens[-1], tokens[:-1]
        if reason is not None:
            self._choices.finish(index)
        elif not tokens:
            return None
        self._count(len(tokens))
        return Delta(tuple(tokens), index, reason, logprobs, stop_token)

    def _logprobs(self, info: MetaInfo, tokens: list[int]) -> list[list[tuple[int, float]]] | None:
        count = len(tokens)
        if self._request.logprobs is None or not count:
            return None
        chosen = (info.output_token_logprobs or [])[-count:]
        tops = (info.output_top_logprobs or [None] * count)[-count:]
        if len(chosen) < count or len(tops) < count:
            raise EngineError("the server sent tokens without their log probabilities")
        return [
            chosen_first(token, value, [(other, prob or 0.0) for prob, other, _ in top or ()], self._request.logprobs)
            for token, (value, *_), top in zip(tokens, chosen, tops, strict=True)
        ]


def _matches(finish: Finish | None, token: int) -> bool:
    return finish is not None and finish.matched in (token, [token])


def _finish_reason(finish: Finish | None) -> FinishReason | None:
    """Raises the error of a request that the server gave up."""
    if finish is not None and finish.type == "abort" and finish.status_code is not None:
        raise to_error(502 if finish.status_code == 503 else finish.status_code, finish.message or "")
    return read_finish_reason(None if finish is None else finish.type, "the server")
