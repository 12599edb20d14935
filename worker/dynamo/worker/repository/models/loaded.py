"""One model of the repository as it is served: its versions, loaded, and the requests that are open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from dynamo.common.discovery import check_card_size
from dynamo.common.errors import EngineError, InvalidRequest, ModelNotFound
from dynamo.common.model_card import ModelCard, TensorSpec
from dynamo.common.tensors.check import BATCH_NOTE
from dynamo.common.tensors.tensors import Array, datatype_of_array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context, RequestTimings
from dynamo.worker.engine.declaration import from_model_config
from dynamo.worker.repository.declared.execution import Arrays, Executable, ModelRequest, ModelResult, Streams, closing
from dynamo.worker.repository.declared.model_config import Reshape
from dynamo.worker.repository.models.response_cache import ModelCache
from dynamo.worker.repository.wire.raw_tensors import Kind, RawTensors, forms_of

OnMismatch: TypeAlias = Callable[[str, str], None]
"""Called with a model and a sentence about outputs of it that are not as declared. What it raises fails the request."""
_MAX_KINDS = 256


class WarmUp(NamedTuple):
    """A request that was sent to a version before it was served."""

    version: str
    total_ns: int
    timings: RequestTimings


class LoadedModel:
    """One model of the repository as it is served. Its requests run to their end when another version of it takes its place."""

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        versions: Mapping[str, Executable],
        files: AsyncExitStack,
        on_mismatch: OnMismatch,
        labels: Mapping[str, tuple[str, ...]],
    ) -> None:
        """`files` is closed with the model: it holds the temporary folder, if there is one. `labels`: of outputs without a file.

        Raises InvalidRequest if `config` contradicts itself.
        """
        self._on_mismatch = on_mismatch
        self._files = files
        self.config = config
        self.card = make_card(config, folder, tuple(versions), labels)
        self.versions = versions
        self._cache: ModelCache | None = None
        self._reshape = Reshape(config)
        self._inputs = {spec.name: spec for spec in self.card.inputs}
        self._outputs = {spec.name: spec for spec in self.card.outputs}
        self.datatypes = {spec.name: spec.datatype for spec in self.card.outputs}
        """Datatypes of the outputs, by name."""
        self.reads_strings = (config.backend != "python" or self.card.has_sequences) and any(
            spec.datatype == "BYTES" for spec in self.card.inputs
        )
        """Whether BYTES of requests become arrays in this process."""
        self._as_declared: set[Kind] = set()
        """Kinds of outputs that need neither a conversion nor a warning."""
        self.warmups: Sequence[WarmUp] = ()
        self.load_s = 0.0
        """How long loading took."""
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<LoadedModel {self.name}, versions={list(self.versions)}, open_requests={self._open}>"

    def warmed_up(self, warmups: Sequence[WarmUp]) -> None:
        """Note what warm-up requests took, for the statistics of the model once it is served."""
        self.warmups = warmups

    def keep_responses(self, cache: ModelCache) -> None:
        """Respond to equal requests from `cache`, from now on. It is closed with the model."""
        self._cache = cache

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def open_requests(self) -> int:
        return self._open

    def waiting(self, version: str) -> int:
        """Return how many requests of a version have not begun. May be called on any thread."""
        return self.versions[version].waiting

    def check(self, request: ModelRequest, version: str) -> None:
        """Check a request as frontends check those from outside, with Triton's words. Raises InvalidRequest, ModelNotFound."""
        if version and version not in self.versions:
            raise ModelNotFound(self.name, version)
        for name in request.outputs:
            if name not in self._outputs:
                raise InvalidRequest(f"unexpected inference output '{name}' for model '{self.name}'")
        required = [name for name, spec in self._inputs.items() if not spec.optional]
        missing = [name for name in required if name not in request.inputs]
        if not len(required) <= len(request.inputs) <= len(self._inputs):
            raise self._wrong_number(request, len(required), missing)
        for name, datatype, shape in forms_of(request.inputs):
            spec = self._inputs.get(name)
            if spec is None:
                raise InvalidRequest(f"unexpected inference input '{name}' for model '{self.name}'")
            self._check_input(request, spec, datatype, shape)
        if missing:
            raise self._wrong_number(request, len(required), missing)

    def _check_input(self, request: ModelRequest, spec: TensorSpec, datatype: str, shape: tuple[int, ...]) -> None:
        given = "BF16" if spec.datatype == "BF16" else datatype
        limit = self.card.max_batch_size
        if given != spec.datatype:
            raise _refusal(
                request,
                f"inference input '{spec.name}' data-type is '{given}', but model '{self.name}' expects '{spec.datatype}'",
            )
        if limit and shape and shape[0] > limit:
            raise _refusal(request, f"inference request batch-size must be <= {limit} for '{self.name}'")
        if not _fits(shape, spec.shape):
            shapes = f"Expected {_listed(spec.shape)}, got {_listed(shape)}. {BATCH_NOTE if limit else ''}"
            raise _refusal(request, f"unexpected shape for input '{spec.name}' for model '{self.name}'. {shapes}")

    def _wrong_number(self, request: ModelRequest, required: int, missing: Sequence[str]) -> InvalidRequest:
        most = len(self._inputs)
        expected = f"{most} inputs but" if most == required else f"number of inputs between {required} and {most} but"
        given = _listed([f"'{name}'" for name in request.inputs])
        lacking = _listed([f"'{name}'" for name in missing])
        return _refusal(
            request,
            f"expected {expected} got {len(request.inputs)} inputs for model '{self.name}'. Got input(s) {given}, but missing "
            f"required input(s) {lacking}. Please provide all required input(s).",
        )

    async def respond(self, request: ModelRequest) -> ModelResult:
        """Run a request on the version that its context names, or on the newest. The model is not decoupled."""
        executable = self._executable(request.context)
        self._begin()
        try:
            if self._cache is None:
                return await self._computed(executable, request)
            return await self._cached(self._cache, executable, request)
        finally:
            self._end()

    async def _computed(self, executable: Executable, request: ModelRequest) -> ModelResult:
        response = await executable.respond(self._reshaped(request))
        return ModelResult(self._checked(response.outputs, request.outputs), response.parameters)

    async def _cached(self, cache: ModelCache, executable: Executable, request: ModelRequest) -> ModelResult:
        """Return a response of the cache, which has outputs only, or compute it and keep those."""
        key, outputs = await cache.find(request, request.outputs or self._outputs)
        if outputs is not None:
            return ModelResult(outputs)
        response = await self._computed(executable, request)
        await cache.insert(key, response.outputs, request.context)
        return response

    async def run(self, request: ModelRequest) -> AsyncIterator[ModelResult]:
        """Do the same as `respond`, for decoupled models and others."""
        executable = self._executable(request.context)
        if not isinstance(executable, Streams) or not self.card.decoupled:
            yield await self.respond(request)
            return
        self._begin()
        try:
            async with closing(executable.stream(self._reshaped(request))) as responses:
                async for response in responses:
                    outputs = self._checked(response.outputs, () if response.outputs else None)
                    yield ModelResult(outputs, response.parameters, response.is_final)
        finally:
            self._end()

    def _executable(self, context: Context) -> Executable:
        context.version = context.version or self.card.versions[-1]
        executable = self.versions.get(context.version)
        if executable is None:
            raise ModelNotFound(self.name, context.version)
        return executable

    def _begin(self) -> None:
        self._open += 1
        self._idle.clear()

    def _end(self) -> None:
        self._open -= 1
        if not self._open:
            self._idle.set()

    def _reshaped(self, request: ModelRequest) -> ModelRequest:
        if not self._reshape.has_inputs:
            return request
        inputs = {name: self._reshape.input(name, array) for name, array in request.inputs.items()}
        return msgspec.structs.replace(request, inputs=inputs)

    def _checked(self, outputs: Arrays, wanted: Collection[str] | None) -> Arrays:
        """Return the declared outputs in their declared shapes, as far as the model gave them.

        As in Triton, those that the model gave in another datatype or shape are returned as they are, and missing ones are
        left out; `on_mismatch` is called then. `wanted`: the requested outputs; empty: all; None: the model may give none.
        """
        if isinstance(outputs, RawTensors) and self._are_as_declared(outputs):
            return outputs
        checked = {}
        for name, array in outputs.items():
            spec = self._outputs.get(name)
            if spec is not None:
                checked[name] = self._checked_output(spec, array)
        if wanted is not None:
            for name in wanted or self._outputs:
                if name not in checked:
                    self._on_mismatch(self.name, f"model '{self.name}' did not give its output '{name}'")
        return checked

    def _are_as_declared(self, outputs: RawTensors) -> bool:
        """Return whether these are all outputs, each once, and need no conversion."""
        if outputs.kind in self._as_declared:
            return True
        heads = outputs.heads
        if self._reshape.has_outputs or len(heads) != len(self._outputs) or {head.name for head in heads} != set(self._outputs):
            return False
        for head in heads:
            spec = self._outputs[head.name]
            if spec.datatype != head.datatype or not _fits(head.shape, spec.shape):
                return False
        if len(self._as_declared) >= _MAX_KINDS:
            self._as_declared.clear()
        self._as_declared.add(outputs.kind)
        return True

    def _checked_output(self, spec: TensorSpec, array: Array) -> Array:
        try:
            array = self._reshape.output(spec.name, array)
        except InvalidRequest as error:
            self._on_mismatch(self.name, f"model '{self.name}': {error}")
        datatype = output_datatype(array, spec.datatype)
        if datatype != spec.datatype:
            self._on_mismatch(
                self.name, f"model '{self.name}' gave its output '{spec.name}' as {datatype}; it declares {spec.datatype}"
            )
        if not _fits(array.shape, spec.shape):
            shapes = f"in shape {list(array.shape)}; it declares {list(spec.shape)}"
            self._on_mismatch(self.name, f"model '{self.name}' gave its output '{spec.name}' {shapes}")
        return array

    async def drained(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    async def close(self) -> None:
        await asyncio.gather(*(executable.close() for executable in self.versions.values()))
        if self._cache is not None:
            self._cache.close()
        await self._files.aclose()


def _refusal(request: ModelRequest, sentence: str) -> InvalidRequest:
    return InvalidRequest(f"[request id: {request.id[:200] or '<id_unknown>'}] {sentence}")


def _listed(items: Iterable[object]) -> str:
    return f"[{','.join(map(str, items))}]"


def _fits(shape: tuple[int, ...], declared: tuple[int, ...]) -> bool:
    """Return whether a declaration, in which -1 stands for any size, allows a shape."""
    if shape == declared:
        return True
    return len(shape) == len(declared) and all(w in (-1, h) for w, h in zip(declared, shape, strict=True))


def output_datatype(array: Array, declared: str) -> str:
    """Return the datatype of an output, whose model declares this one. BF16 comes as float32 or as bits. Raises EngineError."""
    try:
        datatype = datatype_of_array(array).name
    except InvalidRequest as error:
        raise EngineError(str(error)) from error
    return declared if declared == "BF16" and datatype in ("FP32", "UINT16") else datatype


def make_card(
    config: ModelConfig, folder: Path, versions: tuple[str, ...], labels: Mapping[str, tuple[str, ...]] | None = None
) -> ModelCard:
    """Return the model card that is registered. `labels` are those of outputs without a label file. Raises InvalidRequest."""
    plain = ModelConfig()
    plain.CopyFrom(config)
    for tensor in plain.input:
        tensor.ClearField("reshape")
        tensor.ClearField("allow_ragged_batch")
    for output in plain.output:
        output.ClearField("reshape")
    if plain.HasField("ensemble_scheduling"):
        plain.backend = "ensemble"
    plain.ClearField("scheduling_choice")  # which a declaration knows less of
    declaration = from_model_config(plain, folder)
    serialized = config.SerializeToString(deterministic=True)
    card = replace(declaration, versions=versions, model_config=serialized).to_card(
        config.name,
        needs_outputs=config.backend != "python",  # whose outputs need not be those that are declared
    )
    if config.HasField("sequence_batching"):
        card = msgspec.structs.replace(card, has_sequences=True)
    if labels:
        outputs = (
            spec if spec.labels else msgspec.structs.replace(spec, labels=labels.get(spec.name, ())) for spec in card.outputs
        )
        card = msgspec.structs.replace(card, outputs=tuple(outputs))
    check_card_size(card)
    return card
