"""What the simulated language models generate: a fixed function of all tokens before."""

from __future__ import annotations

from dynamo.worker.engine.sim.tokens import START, advance, next_token

VOCABULARY = 256


def expected_tokens(prompt: list[int], seed: int, count: int) -> list[int]:
    """Return what the simulated engine generates after `prompt`."""
    state = mixed = START
    for part in (0, seed, 0):  # the engine's seed, the request's, and the number of the choice
        mixed = advance(mixed, part)
    for token in prompt:
        state = advance(state, token)
    tokens = []
    for _ in range(count):
        token = next_token(state, mixed, VOCABULARY)
        tokens.append(token)
        state = advance(state, token)
    return tokens
