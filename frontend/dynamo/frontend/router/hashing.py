"""The sequence hashes of one prompt, at once or in steps.

Hashing 128k tokens in blocks of 16 takes 3 ms, during which no stream would get a token. A thread does not help: it holds the
interpreter lock for up to 5 ms at a time. Steps with a turn of the event loop between them keep each pause near 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Iterator

from dynamo.common.kv.hashes import TOKEN_BYTES, Buffer, sequence_hashes

LONG_PROMPT_BYTES = 16_384 * TOKEN_BYTES
"""From here on a prompt is hashed in steps."""
_STEP_BLOCKS = 512


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
        hashes = cls(b"", block_size)
        if block_size:
            hashes.values = sequence_hashes(prompt, block_size, parent)
        return hashes

    def steps(self) -> Iterator[None]:
        """Hashes some blocks, yields, hashes some more, until all are."""
        step_bytes = _STEP_BLOCKS * self.block_size * TOKEN_BYTES
        for at in range(0, len(self._prompt), step_bytes) if step_bytes else ():
            if at:
                yield
            self.values += sequence_hashes(self._prompt[at : at + step_bytes], self.block_size, self._parent)
            self._parent = self.values[-1] if self.values else None
