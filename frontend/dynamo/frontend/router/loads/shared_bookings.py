"""The messages in which frontends share their bookings: sums per instance, and the prompts that instances will have cached.

Sums are absolute. So a message that was lost is made up for by the next one about its instance, and by the complete ones that
each frontend sends periodically.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from dynamo.common.kv.hashes import HASH_BYTES
from dynamo.common.names import LAST_INSTANCE_ID

SHARE_S = 0.05
"""Changes are published at most this often."""
LAST_ID = LAST_INSTANCE_ID
MAX_PROMPT_BYTES = 24 * HASH_BYTES
MAX_WAIT_S = 60
"""Longer waits for a prompt to be computed count as this one."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=LAST_ID)]


class InstanceBookings(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The sums of one frontend's bookings on one instance."""

    instance: _Id
    requests: _Count
    prefill_tokens: _Count
    blocks: _Count
    unreflected_requests: _Count
    """Requests of bookings that the last load report of the instance does not reflect; the next two are of the same bookings."""
    unreflected_prefill_tokens: _Count
    unreflected_blocks: _Count


class SharedPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt that was sent to an instance."""

    instance: _Id
    blocks: Annotated[bytes, msgspec.Meta(max_length=MAX_PROMPT_BYTES)]
    """Sequence hashes of some of its blocks, packed; see `thinning.SPARSE`."""
    wait_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0
    """Until the instance is expected to have computed the prompt."""


class SharedBookings(msgspec.Struct, frozen=True, array_like=True):
    """One message of a frontend to its peers."""

    origin: Annotated[str, msgspec.Meta(max_length=64)]
    instances: Sequence[InstanceBookings] = ()
    prompts: Sequence[SharedPrompt] = ()
    first: _Id = 1
    last: _Id = 0
    """The frontend has no bookings on instances with ids from `first` to `last` that are not in `instances`."""
