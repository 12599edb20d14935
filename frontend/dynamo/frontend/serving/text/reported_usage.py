"""What an engine that takes text reports that it has read and generated, within what the request allows.

Keys are charged by it, so that an engine server that counts wrongly must not take a key's limit for years.
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
