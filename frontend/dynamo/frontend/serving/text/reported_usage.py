"""What engines report that they have read and generated, within what the request allows, and of the whole response.

Keys are charged by what an engine that takes text reports, so that one that counts wrongly must not take a key's limit for years.
"""

from __future__ import annotations

import msgspec

from dynamo.common.generation import GenerateRequest, Summary

_ADDED_TOKENS = 4096
"""What a server may put around a prompt, such as instructions of its own."""


def usage_within(request: GenerateRequest, context_length: int, reported: Summary, received: Summary) -> Summary:
    """Return `reported` with numbers that the request can have, and those of `received` where the engine counts none.

    A prompt has at most a token for each of its bytes, unless there are images in it. `context_length`: 0 if it is not known.
    """
    prompt_tokens = reported.prompt_tokens or received.prompt_tokens
    longest = [context_length] if context_length else []
    if not request.media:
        longest.append(len(request.prompt) + _ADDED_TOKENS)
    prompt_tokens = min([prompt_tokens, *(request.n * tokens for tokens in longest)])
    limit = request.stop.max_tokens
    output_tokens = reported.output_tokens if limit is None else min(reported.output_tokens, limit * request.n)
    return msgspec.structs.replace(
        reported,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens or received.output_tokens,
        cached_tokens=min(reported.cached_tokens, prompt_tokens),
    )


def cached_within(request: GenerateRequest, reported: Summary) -> Summary:
    """Return `reported` with no more cached tokens than the prompt has, of an engine that takes tokens.

    Only the engine knows how many tokens an image is.
    """
    most = max(request.prompt_tokens, reported.prompt_tokens) if request.media else request.prompt_tokens
    return reported if reported.cached_tokens <= most else msgspec.structs.replace(reported, cached_tokens=most)


def usage_of_all(reported: Summary, prompt_tokens: int, output_tokens: int) -> Summary:
    """Return what the last instance of a response that moved reports, with the numbers of the whole response.

    To that instance, tokens of the response that came before were part of the prompt.
    """
    return msgspec.structs.replace(
        reported,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_logprobs=reported.prompt_logprobs and reported.prompt_logprobs[:prompt_tokens],
    )


def usage_with_prefill(reported: Summary, prefill: Summary) -> Summary:
    """Return what a decode instance reports, to which all of the prompt was cached, with what the prefill instance did."""
    return msgspec.structs.replace(
        reported,
        cached_tokens=prefill.cached_tokens,
        queue_ms=reported.queue_ms + prefill.queue_ms,
        prefill_ms=prefill.prefill_ms,
    )
