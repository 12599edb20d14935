"""Ranges of generation parameters. Checked by the frontend, and by engines that would take invalid values silently."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from math import isfinite

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import GenerateRequest, Sampling, Stop
from dynamo.common.guided_rules import check_guided

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKENS = 1024
MAX_TOP_K = 1 << 20
_DEFAULTS = Sampling()


class Feature(StrEnum):
    """What a request may need of an engine besides tokens, by the name of the parameter."""

    GUIDED = "structured output"
    LOGIT_BIAS = "logit_bias"
    ALLOWED_IDS = "allowed_token_ids"
    BAD_WORDS = "bad_words"
    LOGPROB_IDS = "logprob_token_ids"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ADAPTER = "adapter"
    CACHE_SALT = "cache_salt"
    KV_TRANSFER = "kv_transfer"
    MEDIA = "media"


def check_features(request: GenerateRequest, engine: str, supported: Collection[Feature]) -> None:
    """Raises InvalidRequest for the first feature that the request needs and that is not `supported`."""
    sampling = request.sampling
    needed = {
        Feature.GUIDED: sampling.guided is not None,
        Feature.LOGIT_BIAS: bool(sampling.logit_bias),
        Feature.ALLOWED_IDS: sampling.allowed_token_ids is not None,
        Feature.BAD_WORDS: bool(sampling.bad_words_token_ids),
        Feature.LOGPROB_IDS: bool(request.logprob_token_ids),
        Feature.PROMPT_LOGPROBS: request.prompt_logprobs is not None,
        Feature.ADAPTER: bool(request.adapter),
        Feature.CACHE_SALT: bool(request.cache_salt),
        Feature.KV_TRANSFER: request.kv_transfer is not None,
        Feature.MEDIA: bool(request.media),
    }
    for feature, is_needed in needed.items():
        if is_needed and feature not in supported:
            raise InvalidRequest(f"{feature} is not supported by the {engine} engine", param=feature)


def check_prompt(request: GenerateRequest, context_length: int) -> None:
    """Raises InvalidRequest for a prompt without tokens, or one that fills the model's context."""
    tokens = request.prompt_tokens
    if not tokens:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    if tokens >= context_length:
        raise InvalidRequest(
            f"the prompt has {tokens} tokens, which leaves no room for output in a context of {context_length} tokens",
            param="prompt",
        )


def check_request(request: GenerateRequest) -> None:
    """Raises InvalidRequest, with the field as `param`, for the first parameter that is out of range."""
    if request.sampling != _DEFAULTS:
        check_sampling(request.sampling)
    check_stop(request.stop)
    if request.n != 1:
        _within("n", request.n, 1, MAX_CHOICES)
    if request.logprobs is not None:
        _within("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if request.prompt_logprobs is not None:
        _within("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    if len(request.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
        count = len(request.logprob_token_ids)
        _within("the number of logprob_token_ids", count, 0, MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids")


def check_sampling(sampling: Sampling) -> None:
    """Raises InvalidRequest, with the field as `param`, for a sampling parameter that is out of range."""
    _within("temperature", sampling.temperature, 0, 100)
    _within("top_p", sampling.top_p, 0, 1)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be above 0, got 0", param="top_p")
    _within("top_k", sampling.top_k, -1, MAX_TOP_K)
    _within("min_p", sampling.min_p, 0, 1)
    _within("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _within("presence_penalty", sampling.presence_penalty, -2, 2)
    _within("repetition_penalty", sampling.repetition_penalty, 0, 100)
    if sampling.repetition_penalty == 0:
        raise InvalidRequest("repetition_penalty must be above 0, got 0", param="repetition_penalty")
    _within("seed", sampling.seed, -(2**63), 2**64 - 1)
    biases = sampling.logit_bias or {}
    _within("the number of entries in logit_bias", len(biases), 0, MAX_LOGIT_BIASES, "logit_bias")
    for token, bias in biases.items():
        _within(f"logit_bias of token {token}", bias, -100, 100, "logit_bias")
    check_guided(sampling.guided)


def check_stop(stop: Stop) -> None:
    """Raises InvalidRequest, with the field as `param`, for a stop condition that is out of range."""
    _within("max_tokens", stop.max_tokens, 0, 2**31 - 1)
    if stop.min_tokens:
        _within("min_tokens", stop.min_tokens, 0, 2**31 - 1)
    if stop.max_tokens is not None and stop.min_tokens > stop.max_tokens:
        raise InvalidRequest(f"min_tokens is {stop.min_tokens}, above max_tokens {stop.max_tokens}", param="min_tokens")
    if len(stop.token_ids) > MAX_STOP_TOKENS:
        _within("the number of stop token ids", len(stop.token_ids), 0, MAX_STOP_TOKENS, "stop_token_ids")


def _within(name: str, value: float | None, least: float, most: float, param: str | None = None) -> None:
    if value is not None and not (isfinite(value) and least <= value <= most):
        raise InvalidRequest(f"{name} must be between {least} and {most}, got {value}", param=param or name)
