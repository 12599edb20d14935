"""What is traced of one request to one model: the phases of its time, under Triton's names, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns

from dynamo.common.observability.reception import Reception
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import Array, element_count, from_numpy, typed_to_raw
from dynamo.worker.engine.base import RequestTimings, TensorResponse
from dynamo.worker.traces.trace import Trace

_INPUT, _OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"


class RequestTrace:
    """The trace of a request while it is served."""

    def __init__(self, trace: Trace, start_ns: int, reception: Reception | None = None) -> None:
        """`reception`: of a request of a client, at a frontend whose clock is that of this process."""
        self._trace = trace
        self._start_ns = start_ns
        self._queued_ns = perf_counter_ns()
        for name, ns in () if reception is None else reception.timestamps():
            trace.timestamp(name, ns)
        trace.timestamp("REQUEST_START", start_ns)
        trace.timestamp("QUEUE_START", self._queued_ns)

    def __repr__(self) -> str:
        return f"<RequestTrace of {self._trace}>"

    def request(self, request: TensorRequest) -> None:
        """Add the inputs of a request of a client. Empty ones are left out, as in Triton."""
        if not self._trace.has_tensors:
            return
        for index, tensor in enumerate(request.head.inputs):
            if 0 not in tensor.shape:
                raws, count = request.raw_inputs, element_count(tensor.shape)
                raw = raws[index] if raws else typed_to_raw(tensor.contents, tensor.datatype, count)
                self._trace.tensor(_INPUT, tensor.name, tensor.datatype, tensor.shape, raw)

    def response(self, response: TensorResponse) -> None:
        """Add the outputs of a response to a client."""
        if not self._trace.has_tensors:
            return
        for index, tensor in enumerate(response.head.outputs):
            raws, count = response.raw_outputs, element_count(tensor.shape)
            raw = raws[index] if raws else typed_to_raw(tensor.contents, tensor.datatype, count)
            self._trace.tensor(_OUTPUT, tensor.name, tensor.datatype, tensor.shape, raw)

    def inputs(self, arrays: Mapping[str, Array], datatypes: Mapping[str, str]) -> None:
        """Add the inputs of a request of another model. `datatypes`: as they are declared."""
        self._arrays(_INPUT, {name: array for name, array in arrays.items() if array.size}, datatypes)

    def outputs(self, arrays: Mapping[str, Array], datatypes: Mapping[str, str]) -> None:
        """Add the outputs of a response to another model."""
        self._arrays(_OUTPUT, arrays, datatypes)

    def _arrays(self, activity: str, arrays: Mapping[str, Array], datatypes: Mapping[str, str]) -> None:
        if not self._trace.has_tensors:
            return
        for name, array in arrays.items():
            datatype, raw = from_numpy(array, "BF16" if datatypes.get(name) == "BF16" else "")
            self._trace.tensor(activity, name, datatype, array.shape, raw)

    def end(self, timings: RequestTimings, *, has_failed: bool) -> None:
        """Add when its phases ended, as far as the model computed anything, and end the trace."""
        ended_ns = perf_counter_ns()
        is_computed = not (self._trace.is_composed or timings.cache_hit_ns or (has_failed and not timings.infer_ns))
        if is_computed:
            self._computed(timings, ended_ns)
        self._trace.timestamp("REQUEST_END", ended_ns)
        if not self._trace.is_part:
            self._trace.timestamp("INFER_RESPONSE_COMPLETE", ended_ns)
        self._trace.end()

    def _computed(self, timings: RequestTimings, ended_ns: int) -> None:
        start = self._queued_ns + timings.queue_ns
        begun = start + timings.input_ns
        infer_ns = timings.infer_ns or ended_ns - begun - timings.output_ns
        for name, ns in (
            ("COMPUTE_START", start),
            ("COMPUTE_INPUT_END", begun),
            ("COMPUTE_OUTPUT_START", begun + max(0, infer_ns)),
            ("COMPUTE_END", ended_ns),
        ):
            self._trace.timestamp(name, min(ns, ended_ns))
