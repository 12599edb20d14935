"""An option: one field of a configuration class gives a flag, a variable, a key of the file, a bound, and a line of the help."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.common.config import group, option


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpOptions:
    """What an instance does before it registers."""

    requests: int = option(0, minimum=0, maximum=1000, help="Requests that an instance serves before it registers.")
    timeout_s: float = option(60.0, flags=("--warm-up-timeout",), minimum=0.1, help="Longest warm-up, in seconds.")

    def __post_init__(self) -> None:
        if self.requests > 100 and self.timeout_s < 1:
            raise ValueError("more than 100 warm-up requests need a --warm-up-timeout of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleConfig:
    """A process's configuration, with this group of options in it."""

    warm_up: WarmUpOptions = group("Warm-up", prefix="warm_up", default=WarmUpOptions)
