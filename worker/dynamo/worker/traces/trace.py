"""One trace, and how it is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dynamo.common.observability.server_settings import TENSORS, TIMESTAMPS
from dynamo.common.tensors.tensors import Array, Buffer, bf16_to_float32, to_numpy

MAX_TRACES = 1000
"""In one group; further parts of a request have no trace."""


@dataclass(frozen=True, slots=True)
class _Timestamp:
    name: str
    ns: int


@dataclass(frozen=True, slots=True)
class _TracedTensor:
    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | None
    """None: there was no room."""


class TraceGroup:
    """The trace of a request of a client, and those of the requests inside it."""

    def __init__(
        self,
        levels: Sequence[str],
        number: Callable[[], int],
        reserve: Callable[[int], bool],
        ended: Callable[[TraceGroup], None],
    ) -> None:
        """`number` returns the id of a new trace, `reserve` whether so many bytes can be kept until they are written."""
        self.tensor_bytes = 0
        self.has_timestamps = TIMESTAMPS in levels
        self.has_tensors = TENSORS in levels
        self._number = number
        self._reserve = reserve
        self._on_end = ended
        self._begun: list[Trace] = []
        self._ended: list[Trace] = []

    def begin(self, model: str, version: str, request_id: str, parent: int | None = None) -> Trace | None:
        """Begin a trace; the first that is begun is the last to end. None if there are too many."""
        if len(self._begun) == MAX_TRACES:
            return None
        trace = Trace(self, self._number(), model, version, request_id, parent)
        self._begun.append(trace)
        return trace

    def end(self, trace: Trace) -> None:
        self._ended.append(trace)
        if trace is self._begun[0]:
            self._on_end(self)

    def copy(self, raw: Buffer) -> bytes | None:
        """Return the bytes of a tensor; None if there is no room for them."""
        size = raw.nbytes if isinstance(raw, memoryview) else len(raw)
        if not self._reserve(size):
            return None
        self.tensor_bytes += size
        return bytes(raw)

    def encode(self) -> str:
        """Return all traces as JSON objects, separated by commas."""
        return ",".join(entry for trace in self._ended for entry in trace.encode())


class Trace:
    """The trace of one request to one model."""

    def __init__(self, group: TraceGroup, number: int, model: str, version: str, request_id: str, parent: int | None) -> None:
        self.is_composed = False
        """Whether the model is an ensemble, which computes nothing itself."""
        self.is_part = parent is not None
        """Whether it is inside another trace."""
        self._group = group
        self._number = number
        self._head: dict[str, int | str] = {
            "id": number,
            "model_name": model,
            "model_version": int(version) if version.isdecimal() else version,
        }
        if request_id:
            self._head["request_id"] = request_id
        if parent is not None:
            self._head["parent_id"] = parent
        self._entries: list[_Timestamp | _TracedTensor] = []

    def __repr__(self) -> str:
        return f"<Trace {self._head}>"

    @property
    def has_tensors(self) -> bool:
        """Whether tensors are wanted."""
        return self._group.has_tensors

    def timestamp(self, name: str, ns: int) -> None:
        """Add a time of `perf_counter_ns`, if times are wanted."""
        if self._group.has_timestamps:
            self._entries.append(_Timestamp(name, ns))

    def tensor(self, activity: str, name: str, datatype: str, shape: Sequence[int], raw: Buffer) -> None:
        """Add a tensor as it is now."""
        self._entries.append(_TracedTensor(activity, name, datatype, tuple(shape), self._group.copy(raw)))

    def child(self, model: str, version: str, request_id: str) -> Trace | None:
        """Begin the trace of a request to another model that is a part of this one."""
        return self._group.begin(model, version, request_id, self._number)

    def end(self) -> None:
        self._group.end(self)

    def encode(self) -> Iterator[str]:
        """Yield JSON objects: the head, then times and tensors."""
        yield _json(self._head)
        for entry in self._entries:
            if isinstance(entry, _Timestamp):
                yield _json({"id": self._number, "timestamps": [{"name": entry.name, "ns": entry.ns}]})
            else:
                about = {
                    "name": entry.name,
                    "data": "" if entry.data is None else data_text(entry.data, entry.datatype, entry.shape),
                    "shape": ",".join(map(str, entry.shape)),
                    "dtype": entry.datatype,
                }
                yield _json({"id": self._number, "activity": entry.activity, "tensor": about})


def data_text(raw: bytes, datatype: str, shape: Sequence[int]) -> str:
    """Return the elements of a tensor as Triton writes them: with commas between them, floats with six digits, text in quotes."""
    array: Array = to_numpy(raw, datatype, tuple(shape))
    if datatype == "BF16":
        array = bf16_to_float32(array)
    elements = array.ravel().tolist()
    if datatype == "BYTES":
        return ",".join(f'"{element.decode(errors="replace")}"' for element in elements)
    if array.dtype.kind == "f":
        return ",".join(f"{element:g}" for element in elements)
    return ",".join(str(int(element)) for element in elements)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
