"""What the protocols have in common that take token ids and send them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import GenerateRequest, Sampling, Summary
from dynamo.common.generation_rules import Feature, check_features, check_prompt
from dynamo.common.generation_rules import check_request as check_ranges
from dynamo.worker.engine.remote.dialect import Choices, check_rank


def check_tokens(
    request: GenerateRequest, context_length: int, features: Collection[Feature], *, logprobs: bool = True, engine: str = "remote"
) -> None:
    """Raises InvalidRequest for a request in token ids that the server would misunderstand or not bound."""
    check_prompt(request, context_length)
    check_ranges(request)
    check_features(request, engine, features)
    check_rank(request)
    if request.logprobs is not None and not logprobs:
        raise InvalidRequest("log probabilities are not supported by the remote engine for this server", param="logprobs")


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches one of `texts`."""
    return f"({'|'.join(map(re.escape, texts))})"


def logit_bias(sampling: Sampling) -> dict[str, float] | None:
    """Return the biases as JSON has them."""
    return {str(token): bias for token, bias in sampling.logit_bias.items()} if sampling.logit_bias else None


def chosen_first(token: int, value: float | None, top: Iterable[tuple[int, float]], alternatives: int) -> list[tuple[int, float]]:
    """Return the log probabilities of one position: the chosen token, then the likeliest others."""
    others = sorted((pair for pair in top if pair[0] != token), key=lambda pair: -pair[1])
    return [(token, value if value is not None else 0.0), *others[:alternatives]]


class TokenReader:
    """What readers of token ids keep of one stream; see `EventReader`."""

    def __init__(self, request: GenerateRequest, eos: frozenset[int], context_length: int | None = None) -> None:
        """`eos` tokens end a generation, unless the request ignores them. `context_length`: None for any."""
        self._request = request
        self._most_tokens = None if context_length is None else request.n * context_length
        self._stops = frozenset(request.stop.token_ids) | (frozenset() if request.stop.ignore_eos else eos)
        self._choices = Choices(request)
        self._prompt_tokens = request.prompt_tokens
        self._output_tokens = 0
        self._cached_tokens = 0

    @property
    def has_finished(self) -> bool:
        return self._choices.has_finished

    def _count(self, tokens: int) -> None:
        """Raises EngineError for more than the model could generate, which would take a frontend long to turn into text."""
        self._output_tokens += tokens
        most = self._most_tokens
        if most is not None and self._output_tokens > most:
            raise EngineError(f"the server sent {self._output_tokens} tokens; the model's context has room for {most}")

    def summary(self) -> Summary:
        return Summary(
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=self._cached_tokens,
            prefill_ms=self._choices.prefill_ms,
        )
