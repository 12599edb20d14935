"""What was compiled lately, by the digest of what was wanted."""

from __future__ import annotations

from collections import OrderedDict

MAX_BYTES = 8 << 20
MAX_RESPONSE_BYTES = MAX_BYTES // 8
_ENTRY_BYTES = 256
"""What an entry takes beside its response."""


class CompiledMemory:
    """Responses of the process that compiles grammars. Above `MAX_BYTES`, those go that were used least recently."""

    def __init__(self) -> None:
        self._responses: OrderedDict[bytes, bytes] = OrderedDict()
        self.size_bytes = 0

    def find(self, digest: bytes) -> bytes | None:
        response = self._responses.get(digest)
        if response is not None:
            self._responses.move_to_end(digest)
        return response

    def add(self, digest: bytes, response: bytes) -> None:
        """Remember a response, unless it is so large that it would take the place of many."""
        if len(response) > MAX_RESPONSE_BYTES or digest in self._responses:
            return
        self._responses[digest] = response
        self.size_bytes += len(response) + _ENTRY_BYTES
        while self.size_bytes > MAX_BYTES:
            _, oldest = self._responses.popitem(last=False)
            self.size_bytes -= len(oldest) + _ENTRY_BYTES
