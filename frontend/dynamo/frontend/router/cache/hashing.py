"""The sequence hashes of one prompt, at once or in steps.

Hashing 128k tokens in blocks of 16 takes 3 ms, during which no stream would get a token. A thread does not help: it holds the
interpreter lock for up to 5 ms at a time. Steps with an iteration of the event loop between them keep each pause near 0.1 ms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from dynamo.common.kv.hashes import TOKEN_BYTES, Buffer, sequence_hashes

LONG_PROMPT_BYTES = 16_384 * TOKEN_BYTES
"""Prompts of this size and above are hashed in steps."""
_STEP_BLOCKS = 512
_WORTH_KEEPING_BLOCKS = 8


class PromptHashes:
    """The sequence hashes of a prompt. With a `block_size` of 0 (the instances have no KV blocks) there are none."""

    __slots__ = ("_parent", "_prompt", "block_size", "values")

    def __init__(self, prompt: Buffer, block_size: int, parent: int | None = None) -> None:
        self.block_size = block_size
        self.values: list[int] = []
        """Complete once `steps` has ended."""
        self._prompt = memoryview(prompt).cast("B")
        self._parent = parent

    @classmethod
    def of(cls, prompt: Buffer, block_size: int, parent: int | None = None) -> PromptHashes:
        """Compute all hashes now."""
        return cls.from_values(sequence_hashes(prompt, block_size, parent) if block_size else [], block_size)

    @classmethod
    def from_values(cls, values: list[int], block_size: int) -> PromptHashes:
        """Wrap hashes that were computed before."""
        hashes = cls(b"", block_size)
        hashes.values = values
        return hashes

    def steps(self) -> Iterator[None]:
        """Compute the hashes in steps of some blocks, yielding between two steps."""
        step_bytes = _STEP_BLOCKS * self.block_size * TOKEN_BYTES
        for start in range(0, len(self._prompt), step_bytes) if step_bytes else ():
            if start:
                yield
            self.values += sequence_hashes(self._prompt[start : start + step_bytes], self.block_size, self._parent)
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
        """Return `sequence_hashes` of the prompt, and how many leading blocks it shares with the last one that begins like it.

        The list must not be modified.
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
            other, other_hashes, guess = before
            shared = _shared_blocks(prompt, other, min(len(other_hashes), len(prompt) // step), guess, step)
            values = other_hashes[:shared] + sequence_hashes(
                memoryview(prompt)[shared * step :], block_size, other_hashes[shared - 1]
            )
        self._recent[key] = (prompt, values, shared)
        return values, shared


def _shared_blocks(prompt: bytes, other: bytes, most: int, guess: int, step: int) -> int:
    """Return how many leading blocks two prompts share; the first block is equal. `guess` is tried first."""
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
