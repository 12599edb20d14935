"""Calls of models by models of the same worker: requests of Python models, and the steps of ensembles.

What one is and may cost, as frontends declare it for operations:

| | |
|---|---|
| use | any model of the worker, whatever the key of the request may use: who may use the calling model was checked |
| charge | nothing: the request is charged, once, as it would be without calls |
| owner | that of its parents (`wire.CallModel`), else that of the requests; of several owners: see `owner_of` |
| deadline | that of the request; of several in one `execute`, or of a thread's, the latest |
| end | it is cancelled as soon as no caller waits for any of these requests |
| at once | `MAX_CALLS` of one process |
| depth | `MAX_DEPTH`, and none that waits for itself: a process that all processes of the called model wait for |
| bytes | inputs and outputs of all calls, from `wire.COUNTED_BYTES` on and until their memory is free: `CallMemory` |
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from math import prod

import numpy as np

from dynamo.common.errors import InvalidRequest, Overloaded
from dynamo.common.tensors.request import SEQUENCE_OWNER, SEVERAL_OWNERS
from dynamo.common.tensors.tensors import Array
from dynamo.worker.engine.base import Caller, Context
from dynamo.worker.repository.wire.wire import TensorHead

MAX_CALLS = 1024
MAX_DEPTH = 32
MAX_BYTES = 2**30
"""By default. As much as the bodies of requests that come from frontends."""
_OBJECT_BYTES = 64
"""What an element of BYTES takes at least when it becomes an object."""


class CallMemory:
    """What the tensors of calls hold in one worker: of those that models made, and of what the called models respond."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"<CallMemory, held={self.held_bytes} of {self._max_bytes}>"

    def allocate(self, size: int, tensors: Iterable[TensorHead]) -> memoryview:
        """Return memory for the bytes of tensors, which counts until its last view is gone. Raises Overloaded."""
        objects = sum(prod(tensor.shape) for tensor in tensors if tensor.datatype == "BYTES")
        self._check(needed := size + objects * _OBJECT_BYTES)
        memory = np.empty(size, np.uint8)
        self._count(memory, needed)
        return memory.data

    def hold(self, array: Array) -> None:
        """Count an array that is there until it is gone. Raises Overloaded."""
        self._check(needed := array.nbytes + (array.size * _OBJECT_BYTES if array.dtype.hasobject else 0))
        self._count(array, needed)

    def _check(self, needed: int) -> None:
        if self.held_bytes + needed > self._max_bytes:
            raise Overloaded(
                f"{needed} bytes more than the {self.held_bytes} that calls of models by models hold; --model-calls-byte-size "
                f"is {self._max_bytes}"
            )

    def _count(self, array: Array, size: int) -> None:
        self.held_bytes += size
        weakref.finalize(array, self._free, size).atexit = False

    def _free(self, size: int) -> None:
        self.held_bytes -= size


def check_depth(context: Context) -> None:
    """Raises InvalidRequest if too many models wait for this request."""
    if len(context.callers) > MAX_DEPTH:
        models = " -> ".join(caller.model for caller in context.callers[-3:])
        raise InvalidRequest(f"models call models {MAX_DEPTH} deep, which is the most: ... -> {models}")


def check_waiting(context: Context, model: str, processes: Sequence[object]) -> None:
    """Raises InvalidRequest if all processes of a model wait for this request."""
    waiting = [caller.process for caller in context.callers]
    if processes and all(process in waiting for process in processes):
        chain = " -> ".join([*(caller.model for caller in context.callers), model])
        raise InvalidRequest(
            f"{chain}: each process of model '{model}' ({len(processes)}) waits for this call, which would wait for ever; "
            "a model that calls itself needs as many instances as it is deep"
        )


def owner_of(contexts: Iterable[Context]) -> str:
    """Return whose sequences those of a call are that one of these requests makes; unless they have one owner, it is not known.

    Then it is a name that no key has, and with which a call has no sequence by an id, which might be of another owner.
    """
    owners = {context.headers.get(SEQUENCE_OWNER, "") for context in contexts}
    return owners.pop() if len(owners) == 1 else SEVERAL_OWNERS + SEVERAL_OWNERS.join(sorted(owners))


def context_of_call(request_id: str, version: str, outer: Sequence[Context], caller: Caller, owner: str = "") -> Context:
    """Return the context of a call that is made for all requests `outer`; there may be none."""
    deadlines = [context.deadline for context in outer if context.deadline is not None]
    deepest = max((context.callers for context in outer), key=len, default=())
    deadline = max(deadlines) if deadlines and len(deadlines) == len(outer) else None
    headers = {SEQUENCE_OWNER: owner} if owner else {}
    return Context(request_id, deadline, headers, version=version, callers=(*deepest, caller))
