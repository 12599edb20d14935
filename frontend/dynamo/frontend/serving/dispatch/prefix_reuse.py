"""How much of the prompts each instance had cached, by the summaries that this process received."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamo.common.names import InstanceId

HALF_LIFE_S = 60.0


@dataclass(slots=True)
class _Tokens:
    counted_at: float
    prompt: float = 0.0
    cached: float = 0.0


class PrefixReuse:
    """Prompt tokens and cached ones per instance; what is a minute old counts half."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_instance: dict[InstanceId, _Tokens] = {}

    def add(self, instance: InstanceId, prompt_tokens: int, cached_tokens: int) -> None:
        """Count a prompt that an instance has served."""
        now = self._clock()
        tokens = self._by_instance.get(instance)
        if tokens is None:
            tokens = self._by_instance[instance] = _Tokens(now)
        left = 0.5 ** ((now - tokens.counted_at) / HALF_LIFE_S)
        tokens.counted_at = now
        tokens.prompt = tokens.prompt * left + prompt_tokens
        tokens.cached = tokens.cached * left + cached_tokens

    def hit_rate(self, instance: InstanceId) -> float | None:
        """Return the share of the prompt tokens that were cached, 0 to 1; None if the instance had no prompts."""
        tokens = self._by_instance.get(instance)
        return round(min(1.0, tokens.cached / tokens.prompt), 4) if tokens is not None and tokens.prompt else None

    def forget(self, instance: InstanceId) -> None:
        """Drop what was counted of an instance that is gone."""
        self._by_instance.pop(instance, None)
