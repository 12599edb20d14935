"""What engines respond step by step: read within bounds, which an instance could pass in one response of any size."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo.common.errors import EngineError
from dynamo.common.generation import Delta, GenerateRequest, delta_decoder
from dynamo.common.messaging.buffers import Buffer

_QUICK_BYTES = 64 * 1024
"""A response up to here is read at once, whatever it is."""
_MAX_BYTES = 32 * 2**20
_MAX_LOGPROB_BYTES = 8 * 2**20
"""Log probabilities of one response: for 14,000 tokens with 20 alternatives each."""


class _Unread(msgspec.Struct, frozen=True, array_like=True):
    """The first parts of a Delta. What they have in them has not been made yet."""

    tokens: msgspec.Raw = msgspec.Raw()
    index: msgspec.Raw = msgspec.Raw()
    finish_reason: msgspec.Raw = msgspec.Raw()
    logprobs: msgspec.Raw = msgspec.Raw()


_unread_decoder = msgspec.msgpack.Decoder(_Unread)


def decoded(request: GenerateRequest, bodies: list[Buffer]) -> list[Delta]:
    """Return what the engine responded to a request. Raises EngineError for what is none, or is too long to be read."""
    decode = delta_decoder.decode
    try:
        if len(bodies) == 1 and len(bodies[0]) <= _QUICK_BYTES:
            return [decode(bodies[0])]
        return [decode(body) if len(body) <= _QUICK_BYTES else _decoded_long(request, body) for body in bodies]
    except ValueError as error:
        raise EngineError(f"the engine's response cannot be read: {error}") from None


def _decoded_long(request: GenerateRequest, body: Buffer) -> Any:
    """Return a Delta. Raises ValueError."""
    if len(body) > _MAX_BYTES:
        raise ValueError(f"it has {len(body)} bytes; at most {_MAX_BYTES} are allowed")
    has_logprobs = request.logprobs is not None or bool(request.logprob_token_ids)
    size, most = len(memoryview(_unread_decoder.decode(body).logprobs)), _MAX_LOGPROB_BYTES if has_logprobs else _QUICK_BYTES
    if size > most:
        raise ValueError(f"its log probabilities have {size} bytes; at most {most} are allowed")
    return delta_decoder.decode(body)


def numbered(deltas: list[Delta], choice: int) -> list[Delta]:
    """Return the deltas of a request for one choice as deltas of that choice."""
    if any(delta.index for delta in deltas):
        raise EngineError("the engine responded with a choice that was not requested")
    return [msgspec.structs.replace(delta, index=choice) for delta in deltas] if choice else deltas


def cut(delta: Delta, tokens: int) -> Delta:
    """Return the first tokens of a delta, which is not the last of its choice then."""
    if tokens == len(delta.tokens):
        return delta
    logprobs = None if delta.logprobs is None else delta.logprobs[:tokens]
    return Delta(delta.tokens[:tokens], delta.index, logprobs=logprobs)
