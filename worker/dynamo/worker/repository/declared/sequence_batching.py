"""What Triton's `sequence_batching` says: when requests run, and which tensors they get: control inputs, and states, which models
hand from one request to the next.

An option is read, checked and given its default in this module, and nowhere else; `scheduling.sequences` acts on it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dynamo.common.errors import InvalidRequest
from dynamo.common.tensors.tensors import Array, datatype_of_config, element_count, to_numpy
from dynamo.protos.model_config_pb2 import DataType, ModelConfig, ModelSequenceBatching
from dynamo.worker.paths import relative_path
from dynamo.worker.repository.declared.execution import ModelResult

Control = ModelSequenceBatching.Control

STATE_FOLDER = "initial_state"
_IDLE_US = 1_000_000
_NUMBERS: dict[int, Any] = {
    DataType.TYPE_INT32: np.int32,
    DataType.TYPE_INT64: np.int64,
    DataType.TYPE_UINT32: np.uint32,
    DataType.TYPE_UINT64: np.uint64,
}
_FLAGS = (Control.CONTROL_SEQUENCE_START, Control.CONTROL_SEQUENCE_END, Control.CONTROL_SEQUENCE_READY)


class SequenceSettings:
    """When a sequence has a slot of an instance, and when its requests run."""

    def __init__(self, config: ModelConfig) -> None:
        batching = config.sequence_batching
        direct, oldest = batching.direct, batching.oldest  # one of them is empty
        self.is_direct = not batching.HasField("oldest")
        """Whether a sequence keeps its row of the batch; otherwise batches hold the requests that have waited longest."""
        self.is_iterative = batching.iterative_sequence
        self.is_ordered = oldest.preserve_ordering
        """Whether responses of a decoupled model come in the order of the requests."""
        self.slots = max(0, oldest.max_candidate_sequences) or max(1, config.max_batch_size)
        """Sequences that an instance has at once."""
        self.idle_s = batching.max_sequence_idle_microseconds / 1e6
        """How long a sequence lasts without a request."""
        delay_us = direct.max_queue_delay_microseconds if direct.minimum_slot_utilization else oldest.max_queue_delay_microseconds
        self.delay_s = delay_us / 1e6
        """How long a batch may wait for more requests."""
        self.enough = direct.minimum_slot_utilization * self.slots
        """Requests that need not wait for more, of the strategy direct."""
        self.preferred = frozenset(oldest.preferred_batch_size)
        """Batch sizes that need not wait for more, of the strategy oldest."""


def fill_sequence_defaults(config: ModelConfig) -> None:
    """Set what `sequence_batching` leaves out to what is in effect."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or _IDLE_US
    if batching.HasField("oldest") and config.max_batch_size:
        batching.oldest.preferred_batch_size[:] = batching.oldest.preferred_batch_size or [config.max_batch_size]


def sequence_problems(config: ModelConfig) -> Iterator[str]:
    """Yield what Triton, too, refuses in `sequence_batching`."""
    utilization, most = config.sequence_batching.direct.minimum_slot_utilization, max(1, config.max_batch_size)
    if not 0 <= utilization <= 1:
        yield f"sequence_batching.direct.minimum_slot_utilization must be from 0 to 1, got {utilization:g}"
    for size in config.sequence_batching.oldest.preferred_batch_size:
        if not 1 <= size <= most:
            yield f"sequence_batching.oldest.preferred_batch_size must be from 1 to {most}, got {size}"


def added_tensors(config: ModelConfig) -> tuple[set[str], set[str]]:
    """Return the names of the inputs and outputs that a model has beside those that clients see."""
    batching = config.sequence_batching
    inputs = {control.name for control in batching.control_input} | {state.input_name for state in batching.state}
    return inputs, {state.output_name for state in batching.state}


def check_added_inputs(config: ModelConfig) -> None:
    """Raises InvalidRequest for control inputs, and for names that inputs share, that a model cannot have."""
    batching = config.sequence_batching
    names = [tensor.name for tensor in config.input]
    names += [control.name for control in batching.control_input]
    names += [state.input_name for state in batching.state]
    for name in names:
        if not name or names.count(name) > 1:
            raise InvalidRequest(
                f"the inputs of the model and of sequence_batching have the name '{name}' more than once, or empty"
            )
    ControlInputs(config)


class ControlInputs:
    """The inputs that tell a model of the sequence of a request."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises InvalidRequest naming the control input that is not usable."""
        self._shape = (1, 1) if config.max_batch_size else (1,)
        self._flags: list[tuple[str, int, Array, Array]] = []
        """Name, kind, and the tensors of false and true."""
        self._id: tuple[str, int] | None = None
        """Name and datatype of the input with the sequence's id."""
        kinds: set[int] = set()
        for control_input in config.sequence_batching.control_input:
            for control in control_input.control:
                if control.kind in kinds:
                    raise InvalidRequest(f"sequence_batching.control_input has {Control.Kind.Name(control.kind)} more than once")
                kinds.add(control.kind)
                self._add(control_input.name, control)

    def _add(self, name: str, control: ModelSequenceBatching.Control) -> None:
        kind = Control.Kind.Name(control.kind)
        if control.kind not in _FLAGS:
            if control.data_type not in (*_NUMBERS, DataType.TYPE_STRING):
                raise InvalidRequest(
                    f"sequence_batching.control_input '{name}' of kind {kind} needs a data_type: TYPE_INT32, TYPE_INT64, "
                    "TYPE_UINT32, TYPE_UINT64 or TYPE_STRING"
                )
            self._id = (name, control.data_type)
            return
        given = [
            (values, dtype)
            for values, dtype in (
                (control.int32_false_true, np.int32),
                (control.fp32_false_true, np.float32),
                (control.bool_false_true, np.bool_),
            )
            if values
        ]
        if len(given) != 1 or len(given[0][0]) != 2:
            raise InvalidRequest(
                f"sequence_batching.control_input '{name}' of kind {kind} needs two values in one of int32_false_true, "
                "fp32_false_true and bool_false_true"
            )
        [(values, dtype)] = given
        false, true = (np.full(self._shape, value, dtype) for value in values)
        self._flags.append((name, control.kind, false, true))

    def of(self, id: int | str, *, starts: bool, ends: bool) -> dict[str, Array]:
        on: dict[int, bool] = {
            Control.CONTROL_SEQUENCE_START: starts,
            Control.CONTROL_SEQUENCE_END: ends,
            Control.CONTROL_SEQUENCE_READY: True,
        }
        inputs = {name: true if on[kind] else false for name, kind, false, true in self._flags}
        if self._id is not None:
            inputs[self._id[0]] = self._id_tensor(id)
        return inputs

    def of_empty_row(self) -> dict[str, Array]:
        inputs = {name: false for name, _, false, _ in self._flags}
        if self._id is not None:
            inputs[self._id[0]] = self._id_tensor("" if self._id[1] == DataType.TYPE_STRING else 0)
        return inputs

    def _id_tensor(self, id: int | str) -> Array:
        assert self._id is not None
        if self._id[1] == DataType.TYPE_STRING:
            return np.full(self._shape, str(id).encode(), object)
        return np.full(self._shape, _as_number(id, np.dtype(_NUMBERS[self._id[1]])))


def _as_number(id: int | str, dtype: np.dtype[Any]) -> Array:
    """Return what Triton gives a model for an id that does not fit: its lowest bytes, those of a name with its length before."""
    text = id.encode() if isinstance(id, str) else b""
    raw = struct.pack("<I", len(text)) + text if text else (id & (2**64 - 1)).to_bytes(8, "little")  # type: ignore[operator]
    return np.frombuffer(raw.ljust(8, b"\0")[: dtype.itemsize], dtype.newbyteorder("<")).astype(dtype)


class States:
    """Outputs of a model that are inputs of the next request of the same sequence."""

    def __init__(self, config: ModelConfig, folder: Path) -> None:
        """Initial states of files are read from `folder`. Raises InvalidRequest naming the state that is not usable."""
        self._batch = (1,) if config.max_batch_size else ()
        self._inputs = {state.output_name: state.input_name for state in config.sequence_batching.state}
        self._initial = {state.input_name: self._read(state, folder) for state in config.sequence_batching.state}

    def initial(self) -> dict[str, Array]:
        return {name: array.copy() for name, array in self._initial.items()}

    def after(self, result: ModelResult) -> dict[str, Array]:
        """Return the states that a response gives, for the next request."""
        return {self._inputs[name]: array for name, array in result.outputs.items() if name in self._inputs}

    def _read(self, state: ModelSequenceBatching.State, folder: Path) -> Array:
        name = f"sequence_batching.state '{state.input_name}'"
        datatype = datatype_of_config(state.data_type)
        if datatype is None or not state.output_name:
            raise InvalidRequest(f"{name} needs an output_name and a data_type")
        _check_initial_state(state)
        given = state.initial_state[0] if state.initial_state else None
        dims = tuple(state.dims if given is None else given.dims)
        shape = (*self._batch, *(max(1, size) if size < 0 else size for size in dims))
        element_count(shape, name)
        if given is None or given.WhichOneof("state_data") != "data_file":
            return np.full(shape, b"", object) if datatype.name == "BYTES" else np.zeros(shape, datatype.dtype)
        path = folder / STATE_FOLDER / relative_path(given.data_file)
        try:
            return to_numpy(path.read_bytes(), datatype.name, shape, name)
        except OSError as error:
            raise InvalidRequest(f"{name}: {STATE_FOLDER}/{given.data_file} cannot be read: {error.strerror}") from error


def _check_initial_state(state: ModelSequenceBatching.State) -> None:
    """Raises InvalidRequest, in Triton's words, for an initial state that is not one of this state."""
    name, count = state.input_name, len(state.initial_state)
    if count > 1:
        raise InvalidRequest(
            f"initial_state field for state input '{name}' must contain exactly one or zero element. Found '{count}' elements."
        )
    for given in state.initial_state:
        if given.data_type != state.data_type:
            raise InvalidRequest(
                f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
            )
        if not given.name:
            raise InvalidRequest(f"Field 'name' must be set when using initial_state for state input '{name}'.")
        if len(given.dims) != len(state.dims):
            raise InvalidRequest(
                f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input '{name}'. "
                f"{len(given.dims)} != {len(state.dims)}"
            )
        for size, expected in zip(given.dims, state.dims, strict=True):
            if size == -1:
                raise InvalidRequest(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
            if expected not in (-1, size):
                raise InvalidRequest(
                    f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {size} != {expected}"
                )
        if given.WhichOneof("state_data") is None:
            raise InvalidRequest(f"initial_state setting expects state '{name}' to have state_data set")
