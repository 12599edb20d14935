"""What is traced of one request to one model: the phases of its time, under Triton's names, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import TypeAlias

from dynamo.common.errors import Code
from dynamo.common.generation import Summary
from dynamo.common.observability.reception import Reception
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import Array, Buffer, element_count, from_numpy, typed_to_raw
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from dynamo.worker.engine.base import RequestTimings, TensorResponse
from dynamo.worker.observability.request_record import RequestSink, phases_of
from dynamo.worker.traces.trace import Trace

_Tensor: TypeAlias = ModelInferRequest.InferInputTensor | ModelInferResponse.InferOutputTensor

_INPUT, _OUTPUT = "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"
_ENDS = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
"""Triton's names of the ends of queue, input, inference and output."""


class RequestTrace(RequestSink):
    """The trace of a request while it is served."""

    def __init__(self, trace: Trace, start_ns: int, reception: Reception | None = None) -> None:
        """`reception`: of a request of a client, at a frontend whose clock is that of this process."""
        self._trace = trace
        self._queued_ns = perf_counter_ns()
        for name, ns in () if reception is None else reception.timestamps():
            trace.timestamp(name, ns)
        trace.timestamp("REQUEST_START", start_ns)
        trace.timestamp("QUEUE_START", self._queued_ns)

    def __repr__(self) -> str:
        return f"<RequestTrace of {self._trace}>"

    def request(self, request: TensorRequest) -> None:
        """Add the inputs. Empty ones are left out, as in Triton."""
        if self._trace.has_tensors:
            for index, tensor in enumerate(request.head.inputs):
                if 0 not in tensor.shape:
                    self._tensor(_INPUT, tensor, request.raw_inputs, index)

    def response(self, response: TensorResponse) -> None:
        if self._trace.has_tensors:
            for index, tensor in enumerate(response.head.outputs):
                self._tensor(_OUTPUT, tensor, response.raw_outputs, index)

    def _tensor(self, activity: str, tensor: _Tensor, raws: Sequence[Buffer], index: int) -> None:
        raw = raws[index] if raws else typed_to_raw(tensor.contents, tensor.datatype, element_count(tensor.shape))
        self._trace.tensor(activity, tensor.name, tensor.datatype, tensor.shape, raw)

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

    def end(self, timings: RequestTimings, summary: Summary | None, error: Code | None) -> None:
        """Add when its phases ended, as far as the model computed anything, and end the trace."""
        ended_ns = perf_counter_ns()
        is_computed = timings.infer_ns or error is None
        if is_computed and not self._trace.is_composed and not timings.cache_hit_ns:
            ends = [self._queued_ns + phase.end_ns for phase in phases_of(timings, ended_ns - self._queued_ns)]
            for name, ns in zip(_ENDS, (*ends[:-1], ended_ns), strict=True):
                self._trace.timestamp(name, ns)
        self._trace.timestamp("REQUEST_END", ended_ns)
        if not self._trace.is_part:
            self._trace.timestamp("INFER_RESPONSE_COMPLETE", ended_ns)
        self._trace.end()
