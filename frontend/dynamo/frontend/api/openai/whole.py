"""Whole responses, whose choices may be long together: each is encoded, and counts as held, by itself, and they are not joined.

Text that is repeated in front of each choice is bounded, and held for all of them, before anything is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate

from msgspec import Raw, Struct

from dynamo.common.errors import PayloadTooLarge
from dynamo.frontend.api.http.exchange import JSON, Exchange
from dynamo.frontend.api.http.json_pieces import Spliced
from dynamo.frontend.api.openai.chunks import encode
from dynamo.frontend.api.openai.pooling.vectors import with_rows
from dynamo.frontend.preprocess.offload import Offload, P

LONG_CHARS = 64 * 1024
"""Text of this length is not encoded on the event loop."""
_BRIEF_BYTES = 64 * 1024
"""Choices of this size together are not worth counting one by one."""


async def hold_echo(exchange: Exchange, offload: Offload, echo: Sequence[str], n: int) -> None:
    """Count what repeating each text in `echo` for `n` choices takes as JSON.

    Raises PayloadTooLarge for more than the largest body, and Overloaded.
    """
    size = 0
    for text in echo:
        size += n * len(await offload.run_if(len(text) > LONG_CHARS, encode, text))
    most = exchange.settings.options.max_body_bytes
    if size > most:
        raise PayloadTooLarge(f"'echo' repeats {size} bytes in the choices; at most {most} are allowed", param="echo")
    if size > _BRIEF_BYTES:
        exchange.hold(size)


class WholeResponse(Struct, eq=False):
    """One response, to which choices are added in their order."""

    _exchange: Exchange
    _offload: Offload
    _choices: list[list[bytes]] = []
    """Each in pieces."""
    _size: int = 0

    async def add(
        self, is_long: bool, choice: Callable[Concatenate[Spliced, int, P], Struct], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Add the choice that `choice` returns for its index, beside the event loop if `is_long`, and spliced.

        Raises Overloaded.
        """
        index = len(self._choices)
        if is_long:
            pieces = await self._offload.run(_encoded, choice, index, *args, **kwargs)
        else:
            pieces = _encoded(choice, index, *args, **kwargs)
        size = sum(map(len, pieces))
        if self._size + size > _BRIEF_BYTES:
            self._exchange.hold(size if self._size > _BRIEF_BYTES else self._size + size)
        self._size += size
        self._choices.append(pieces)

    async def send(self, describe: Callable[[Any], Struct]) -> None:
        """Send the response; `describe` gets what stands for its choices."""
        if self._size <= _BRIEF_BYTES:
            return await self._exchange.respond(encode(describe([Raw(b"".join(pieces)) for pieces in self._choices])))
        array = [part for pieces in self._choices for part in (b",", *pieces)]
        array[0] = b"["
        await self._exchange.respond_in_pieces(with_rows([*array, b"]"], describe), (JSON,), held_bytes=self._size)


def _encoded(
    choice: Callable[Concatenate[Spliced, int, P], Struct], index: int, /, *args: P.args, **kwargs: P.kwargs
) -> list[bytes]:
    long = Spliced()
    return long.pieces(encode(choice(long, index, *args, **kwargs)))
