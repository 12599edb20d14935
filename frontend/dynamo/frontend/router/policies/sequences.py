"""The requests of one sequence go to one instance, on which all frontends agree without a word: by rendezvous hashing.

Each instance gets a score from the hash of its id and the sequence's, and the highest is chosen. An instance that joins takes
over some sequences; those that began before are not known there. It refuses their requests such that they are tried at the
others, in the order of their scores: the table of the sequences is what the workers hold, which survives any frontend.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from dynamo.common.discovery import Instance
from dynamo.frontend.router.base import RouteRequest, RouterWrapper, RoutingDecision


class SequenceRouter(RouterWrapper):
    """Wraps a router, which decides for requests without a sequence and for those that name their instance."""

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        if not request.sequence or request.pinned is not None:
            return self.inner.pick(request, candidates, explain=explain)
        seed = f"{request.model}\0{request.sequence}".encode()
        chosen = max(candidates, key=lambda instance: _score(seed, instance))
        decision = self.inner.pick(msgspec.structs.replace(request, pinned=chosen.id), candidates, explain=explain)
        return msgspec.structs.replace(decision, reason="sequence")


def _score(seed: bytes, instance: Instance) -> bytes:
    return blake2b(seed, digest_size=8, salt=instance.id.to_bytes(8, "little")).digest()
