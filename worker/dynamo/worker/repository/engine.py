"""The engine that the serving loop sees: any number of models, which come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TypeAlias

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard
from dynamo.common.process.steps import Steps
from dynamo.common.repository import ControlMode
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.common.tensors.known_heads import PerHead
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.response import FINAL_RESPONSE
from dynamo.common.tensors.tensors import DATATYPES, LONG_BYTES, Buffer, element_count, from_numpy, takes_long_to_encode
from dynamo.protos.inference_pb2 import ModelInferResponse
from dynamo.worker.engine.base import Context, TensorResponse
from dynamo.worker.engine.python import encode_long, has_long_bytes, read_in_steps, read_inputs
from dynamo.worker.repository.declared.execution import Arrays, ModelRequest, ModelResult, closing, from_parameter, to_parameter
from dynamo.worker.repository.declared.layout import Fingerprint
from dynamo.worker.repository.models.loaded import LoadedModel, output_datatype
from dynamo.worker.repository.models.models import RepositoryModels
from dynamo.worker.repository.models.settings import RepositorySettings
from dynamo.worker.repository.wire.raw_tensors import Kind, RawTensors
from dynamo.worker.repository.wire.wire import TensorHead

log = logging.getLogger(__name__)

ALL = "*"
_CONVERTED = ("BOOL", "BF16")
"""Datatypes of which arrays have other bytes: a true BOOL is 1, and BF16 is float32."""
_MAX_HEADS = 256
Encoded: TypeAlias = dict[str, tuple[str, Buffer]]
"""Datatypes and raw forms of outputs, by name."""


class RepositoryEngine:
    """Serves the models of one or several repositories."""

    def __init__(
        self,
        settings: RepositorySettings,
        mode: ControlMode = ControlMode.NONE,
        load: Sequence[str] = (),
        *,
        exit_on_error: bool = True,
    ) -> None:
        """`load`: the models to load at the start in the mode EXPLICIT; `*` means all. Raises InvalidRequest."""
        self.mode = mode
        self.models = RepositoryModels(settings)
        self.seen: dict[str, Fingerprint] = {}
        """In the mode POLL: the fingerprints of the folders when the models were loaded."""
        self._load = tuple(load)
        self._inputs = PerHead(_heads_of)
        self._responses = _ResponseEncoder()
        self._steps = Steps()
        self._exit_on_error = exit_on_error

    def __repr__(self) -> str:
        return f"<RepositoryEngine, mode={self.mode}, {self.models}>"

    def use_shared_memory(self, memory: SharedMemory) -> None:
        self.models.use_shared_memory(memory)

    async def start(self) -> Sequence[ModelCard]:
        """Load the models. Raises InvalidRequest for a model that does not load, except in the mode POLL or without
        `exit_on_error`, and InvalidRequest or Unavailable for an object store that cannot be read.
        """
        try:
            for error in await asyncio.to_thread(self.models.folders.refresh):
                raise error
            names = self.models.folders.list_names()
            self.models.rescan(names)
            if self.mode is ControlMode.EXPLICIT and ALL not in self._load:
                names = list(self._load)
            if self.mode is ControlMode.POLL:
                self.seen = await asyncio.to_thread(self.models.folders.fingerprints)
            failed = await self.models.load_all(names)
        except BaseException:
            await self.models.close()
            raise
        if failed and self._exit_on_error and self.mode is not ControlMode.POLL:
            name, error = next(iter(failed.items()))
            more = f" (and {len(failed) - 1} others)" if len(failed) > 1 else ""
            await self.models.close()
            raise InvalidRequest(f"model '{name}'{more} of the repository cannot be loaded: {error}")
        return self.models.cards()

    def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        return self._stream(self.models.find(request.head.model_name), request, context)

    async def respond(self, request: TensorRequest, context: Context) -> TensorResponse:
        model = self.models.find(request.head.model_name)
        inputs = await self._decoded(request) if model.reads_strings else None
        result = await model.respond(self._to_model_request(request, context, inputs))
        long = {} if result.outputs.__class__ is RawTensors else await self._encode_long(result.outputs, model.datatypes)
        return self._responses.encode(result, model.datatypes, long)

    async def close(self) -> None:
        await self.models.close()

    async def _stream(self, model: LoadedModel, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        inputs = await self._decoded(request) if model.reads_strings else None
        async with closing(model.run(self._to_model_request(request, context, inputs))) as responses:
            async for response in responses:
                outputs = response.outputs
                long = {} if outputs.__class__ is RawTensors else await self._encode_long(outputs, model.datatypes)
                yield self._responses.encode(response, model.datatypes, long, is_final=response.is_final)

    async def _encode_long(self, outputs: Arrays, datatypes: Mapping[str, str]) -> Encoded:
        """Encode the outputs that take long, beside other requests."""
        encoded: Encoded = {}
        for name, array in outputs.items():
            if array.nbytes > LONG_BYTES:
                datatype = output_datatype(array, datatypes[name])
                if takes_long_to_encode(array, datatype):
                    encoded[name] = await encode_long(array, datatype, self._steps)
        return encoded

    async def _decoded(self, request: TensorRequest) -> Arrays | None:
        """Return the inputs, read in steps, if some are long BYTES; None for others."""
        return await read_in_steps(request, self._steps, aligned=False) if has_long_bytes(request) else None

    def _to_model_request(self, request: TensorRequest, context: Context, inputs: Arrays | None) -> ModelRequest:
        head, heads = request.head, self._inputs.of(request)
        if inputs is None:
            inputs = read_inputs(request, aligned=False) if heads is None else RawTensors(heads, request.raw_inputs)
        return ModelRequest(
            inputs,
            context,
            tuple([output.name for output in head.outputs]) if head.outputs else (),
            {name: to_parameter(value) for name, value in head.parameters.items()} if head.parameters else {},
            head.id,
        )


def _heads_of(request: TensorRequest) -> Sequence[TensorHead] | None:
    """Return what a request's tensors are. None if they have to become arrays: other bytes, or none, may be in these."""
    inputs, raws = request.head.inputs, request.raw_inputs
    if len(raws) != len(inputs):
        return None
    heads = []
    for tensor, raw in zip(inputs, raws, strict=True):
        head = TensorHead(tensor.name, tensor.datatype, tuple(tensor.shape), len(raw))
        if head.datatype in _CONVERTED or not _is_whole(head):
            return None
        heads.append(head)
    return heads


def _is_whole(head: TensorHead) -> bool:
    """Return whether a tensor has a datatype and the size that its shape needs; BYTES may have any. Raises InvalidRequest."""
    kind = DATATYPES.get(head.datatype)
    return kind is not None and (not kind.size or kind.size * element_count(head.shape) == head.size)


class _ResponseEncoder:
    """Encodes responses. Those that differ in the elements of their tensors alone share a head."""

    def __init__(self) -> None:
        self._heads: dict[Kind, tuple[ModelInferResponse, bytes]] = {}

    def encode(
        self, response: ModelResult, datatypes: Mapping[str, str], long: Encoded, *, is_final: bool = False
    ) -> TensorResponse:
        """Return a response. Raises EngineError.

        `long`: outputs that have been encoded before. `is_final`: mark it as the last one of several.
        """
        outputs = response.outputs
        if isinstance(outputs, RawTensors):
            head, encoded = self._heads.get(outputs.kind) or self._head(outputs)
            made = TensorResponse(head, outputs.raws, encoded)
            if not response.parameters and not is_final:
                return made
            made = TensorResponse(ModelInferResponse.FromString(encoded), outputs.raws)
        else:
            made = _from_arrays(outputs, datatypes, long)
        for name, value in response.parameters.items():
            made.head.parameters[name].CopyFrom(from_parameter(value))
        if is_final:
            made.head.parameters[FINAL_RESPONSE].bool_param = True
        return made

    def _head(self, outputs: RawTensors) -> tuple[ModelInferResponse, bytes]:
        head = ModelInferResponse()
        for output in outputs.heads:
            if not _is_whole(output):
                raise EngineError(f"the model gave its output '{output.name}' with {output.size} bytes")
            head.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        made = head, head.SerializeToString()
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        self._heads[outputs.kind] = made
        return made


def _from_arrays(outputs: Arrays, datatypes: Mapping[str, str], long: Encoded) -> TensorResponse:
    head = ModelInferResponse()
    raws: list[Buffer] = []
    for name, array in outputs.items():
        declared = datatypes[name]
        if name in long:
            datatype, raw = long[name]
        else:
            datatype, raw = from_numpy(array, output_datatype(array, declared) if declared == "BF16" else "")
        head.outputs.add(name=name, datatype=datatype, shape=array.shape)
        raws.append(raw)
    return TensorResponse(head, raws)
