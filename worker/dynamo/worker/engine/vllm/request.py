"""Translates requests for text generation to vLLM's terms, and vLLM's outputs to ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Summary
from dynamo.common.generation_rules import Feature, check_features, check_prompt
from dynamo.worker.engine.open_requests import read_finish_reason
from dynamo.worker.engine.sampling import choice_seed, sampling_fields

MAX_CHOICES = 128
MAX_LOGPROBS = 128
"""Alternatives per token that a request may have. The engine must allow one more, for the chosen token."""

_OF_TEXT_MODELS = frozenset(Feature) - {Feature.MEDIA}

_GUIDED = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""Our names of structured output → vLLM's."""


class Logprob(Protocol):
    @property
    def logprob(self) -> float: ...


class Output(Protocol):
    """What one step added to one choice: vLLM's CompletionOutput, of kind DELTA."""

    index: int
    token_ids: Iterable[int]
    logprobs: Iterable[Mapping[int, Logprob]] | None
    finish_reason: str | None


class StateStats(Protocol):
    """Times of one request, in seconds on a clock of the engine's own."""

    queued_ts: float
    scheduled_ts: float
    first_token_ts: float


class RequestOutput(Protocol):
    """What one step added to one request."""

    outputs: Iterable[Output]
    prompt_token_ids: Sequence[int] | None
    """With as many tokens for each image as it takes."""
    prompt_logprobs: Iterable[Mapping[int, Logprob] | None] | None
    num_cached_tokens: int | None
    metrics: StateStats | None
    kv_transfer_params: dict[str, Any] | None


def check_request(request: GenerateRequest, *, context_length: int, takes_images: bool = False) -> None:
    """Raises InvalidRequest for a request that vLLM would misunderstand or not bound."""
    check_prompt(request, context_length)
    _between("n", request.n, 1, MAX_CHOICES)
    _between("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    _between("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    _between("max_tokens", request.stop.max_tokens, 0, None)
    _between("min_tokens", request.stop.min_tokens, 0, context_length)
    _between("data_parallel_rank", request.data_parallel_rank, 0, 0)
    check_features(request, "vllm", frozenset(Feature) if takes_images else _OF_TEXT_MODELS)


def _between(name: str, value: int | None, least: int, most: int | None) -> None:
    if value is not None and (value < least or (most is not None and value > most)):
        bounds = f"{least} or more" if most is None else f"{least}" if least == most else f"between {least} and {most}"
        raise InvalidRequest(f"{name} must be {bounds}, got {value}", param=name)


def sampling_settings(request: GenerateRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams except structured output. `defaults` are the model's own."""
    sampling, stop = request.sampling, request.stop
    transfer = request.kv_transfer
    max_tokens = stop.max_tokens
    if transfer and transfer.get("do_remote_decode"):
        max_tokens = 1  # a prefill: the rest is made elsewhere
    named = {
        **sampling_fields(sampling),
        "seed": choice_seed(request),  # vLLM adds the index of each choice
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": None if sampling.allowed_token_ids is None else [*sampling.allowed_token_ids],
        # vLLM's public field takes words, and would have its tokenizer find their tokens.
        "_bad_words_token_ids": _lists(sampling.bad_words_token_ids),
        "logprobs": None if request.logprobs is None or request.logprob_token_ids else _with_chosen(request.logprobs),
        "logprob_token_ids": [*request.logprob_token_ids] or None,
        "prompt_logprobs": None if request.prompt_logprobs is None else _with_chosen(request.prompt_logprobs),
        "stop_token_ids": [*stop.token_ids] or None,
        "max_tokens": max_tokens,
        "min_tokens": min(stop.min_tokens, max_tokens) if max_tokens is not None else stop.min_tokens,
        "extra_args": None if transfer is None else {"kv_transfer_params": transfer},
    }
    given = {name: value for name, value in named.items() if value is not None}
    return {
        "max_tokens": None,  # as many as fit; vLLM's own default is 16
        **defaults,
        **given,
        "n": request.n,
        "ignore_eos": stop.ignore_eos,
        "detokenize": False,
    }


def _lists(words: Iterable[Iterable[int]] | None) -> list[list[int]] | None:
    return [[*word] for word in words] if words else None


def _with_chosen(alternatives: int) -> int:
    """Return vLLM's number, which counts the likeliest tokens and may include the chosen one."""
    return alternatives + 1 if alternatives else 0


def structured_settings(guided: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of vLLM's StructuredOutputsParams for `Sampling.guided`. Raises InvalidRequest."""
    chosen = [(kind, value) for kind, value in guided.items() if value not in (None, False)]
    if len(chosen) != 1:
        raise InvalidRequest(
            "guided decoding takes exactly one of json_schema, json_object, regex, choice, grammar and structural_tag"
        )
    [(kind, value)] = chosen
    match kind, value:
        case "json_schema", str():
            return {"json": _parsed(value)}
        case ("json_object", True) | ("json_schema", dict()) | ("regex" | "grammar" | "structural_tag", str()):
            return {_GUIDED[kind]: value}
        case "choice", [_, *_] if all(isinstance(choice, str) and choice for choice in value):
            return {"choice": [*value]}
        case _:
            raise InvalidRequest(f"guided decoding cannot use this value of '{kind:.40}'", param=f"{kind:.40}")


def _parsed(schema: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is not a JSON schema: {error}", param="json_schema") from error


class OutputReader:
    """Turns vLLM's outputs for one request into deltas and a summary."""

    def __init__(self, request: GenerateRequest, eos: frozenset[int]) -> None:
        """`eos` tokens end a generation, unless the request ignores them."""
        self._request = request
        self._stops = frozenset(request.stop.token_ids) | (frozenset() if request.stop.ignore_eos else eos)
        self._prompt_tokens = request.prompt_tokens
        self._output_tokens = 0
        self._cached_tokens = 0
        self._transfer: dict[str, Any] | None = None
        self._prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
        self._times: StateStats | None = None

    def read(self, output: RequestOutput) -> list[Delta]:
        """Return the deltas of an output. Raises Unavailable if vLLM aborted the request, EngineError if it failed."""
        self._times = output.metrics or self._times
        self._prompt_tokens = len(output.prompt_token_ids or ()) or self._prompt_tokens
        self._cached_tokens = max(self._cached_tokens, output.num_cached_tokens or 0)
        self._transfer = output.kv_transfer_params or self._transfer
        if self._prompt_logprobs is None and output.prompt_logprobs is not None and self._request.prompt_logprobs is not None:
            alternatives = self._request.prompt_logprobs
            self._prompt_logprobs = [None if step is None else _step(step, alternatives) for step in output.prompt_logprobs]
        return [delta for choice in output.outputs if (delta := self._delta(choice)) is not None]

    def summary(self) -> Summary:
        times = self._times
        queue_s = prefill_s = 0.0
        if times is not None and times.first_token_ts >= times.scheduled_ts >= times.queued_ts > 0:
            queue_s, prefill_s = times.scheduled_ts - times.queued_ts, times.first_token_ts - times.scheduled_ts
        return Summary(
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=self._cached_tokens,
            queue_ms=queue_s * 1e3,
            prefill_ms=prefill_s * 1e3,
            kv_transfer=self._transfer,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _delta(self, choice: Output) -> Delta | None:
        tokens = [*choice.token_ids]
        logprobs = None
        if (alternatives := self._request.logprobs) is not None and choice.logprobs is not None:
            alternatives = len(self._request.logprob_token_ids) or alternatives
            logprobs = [_step(step, alternatives) for step in choice.logprobs]
        reason, stop_token = read_finish_reason(choice.finish_reason, "vLLM"), None
        if reason is FinishReason.STOP and tokens and tokens[-1] in self._stops:
            stop_token = tokens.pop()
        if not tokens and reason is None:
            return None
        self._output_tokens += len(tokens)
        return Delta(tuple(tokens), choice.index, reason, logprobs, stop_token)


def _step(step: Mapping[int, Logprob], alternatives: int) -> list[tuple[int, float]]:
    """Return the chosen token, which vLLM names first, and `alternatives` others; vLLM may send one more."""
    return [(token, value.logprob) for token, value in step.items()][: alternatives + 1]
