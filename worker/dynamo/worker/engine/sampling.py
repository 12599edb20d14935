"""Settings of sampling, as engines and engine servers take them."""

from __future__ import annotations

from dynamo.common.generation import GenerateRequest, Sampling


def sampling_fields(sampling: Sampling) -> dict[str, float | int | None]:
    """Return the settings that engines have by the same names; None: the engine's own default."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }


def choice_seed(request: GenerateRequest) -> int | None:
    """Return the seed of the first choice of the request, which may be a later one of a larger request."""
    seed = request.sampling.seed
    return None if seed is None else seed + request.first_choice
