"""The sequence hashes of one prompt, at once or in steps.

Hashing 128k tokens in blocks of 16 takes 3 ms, during which no stream would get a token. A thread does not help: it holds the
interpreter lock for up to 5 ms at a time. Steps with a turn of the event loop between them keep each pause near 0.1 ms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from dynamo.common.kv.hashes import TOKEN_BYTES, Buffer, sequence_hashes

LONG_PROMPT_BYTES = 16_384 * TOKEN_BYTES
"""From here on a prompt is hashed in steps."""
_STEP_BLOCKS = 512
_WORTH_KEEPING_BLOCKS = 8


class PromptHashes:
    """`block_size` 0: the instances have no blocks that could be told apart, and there is nothing to hash."""

    __slots__ = ("_parent", "_prompt", "block_size", "values")

    def __init__(self, prompt: Buffer, block_size: int, parent: int | None = None) -> None:
        self.block_size = block_size
        self.values: list[int] = []
        """Complete once `steps` has ended."""
        self._prompt = memoryview(prompt).cast("B")
        self._parent = parent

    @classmethod
    def of(cls, prompt: Buffer, block_size: int, parent: int | None = None) -> PromptHashes:
        """All of them, computed now."""
        return cls.known(sequence_hashes(prompt, block_size, parent) if block_size else [], block_size)

    @classmethod
    def known(cls, values: list[int], block_size: int) -> PromptHashes:
        """Those computed before."""
        hashes = cls(b"", block_size)
        hashes.values = values
        return hashes

    def steps(self) -> Iterator[None]:
        """Hashes some blocks, yields, hashes some more, until all are."""
        step_bytes = _STEP_BLOCKS * self.block_size * TOKEN_BYTES
        for at in range(0, len(self._prompt), step_bytes) if step_bytes else ():
            if at:
                yield
            self.values += sequence_hashes(self._prompt[at : at + step_bytes], self.block_size, self._parent)
            self._parent = self.values[-1] if self.values else None


class RecentPrompts:
    """Hashes prompts that begin like one before, such as the next turn of a conversation, from where they differ.

    Keeps the last `most` prompts that begin with different blocks; of those that begin with the same one, the last.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._recent: OrderedDict[tuple[bytes, int, int | None], tuple[bytes, list[int], int]] = OrderedDict()
        """By first block: the prompt, its hashes, and how many blocks it shared with the one before."""

    def hashes(self, prompt: bytes, block_size: int, parent: int | None = None) -> tuple[list[int], int]:
        """As `sequence_hashes`, and how many leading blocks the prompt shares with the last one that begins like it.

        The list is not to be changed.
        """
        step = block_size * TOKEN_BYTES
        if not _WORTH_KEEPING_BLOCKS * step <= len(prompt) < LONG_PROMPT_BYTES:
            return sequence_hashes(prompt, block_size, parent), 0
        key = (prompt[:step], block_size, parent)
        before = self._recent.pop(key, None)
        if before is None:
            shared = 0
            values = sequence_hashes(prompt, block_size, parent)
            if len(self._recent) >= self._most:
                self._recent.popitem(last=False)
        else:
            other, known, guess = before
            shared = _shared_blocks(prompt, other, min(len(known), len(prompt) // step), guess, step)
            values = known[:shared] + sequence_hashes(memoryview(prompt)[shared * step :], block_size, known[shared - 1])
        self._recent[key] = (prompt, values, shared)
        return values, shared


def _shared_blocks(prompt: bytes, other: bytes, most: int, guess: int, step: int) -> int:
    """How many leading blocks two prompts share, of which the first is equal. `guess` is tried first, and found fastest."""
    low, high = 1, most
    if low < guess < high:
        if not prompt.startswith(other[: guess * step]):
            high = guess - 1
        elif prompt[guess * step : (guess + 1) * step] == other[guess * step : (guess + 1) * step]:
            low = guess + 1
        else:
            return guess
    while low < high:
        middle = (low + high + 1) // 2
        if prompt.startswith(other[low * step : middle * step], low * step):
            low = middle
        else:
            high = middle - 1
    return low
