"""Ensembles: models made of other models of the same worker, tensors flowing between them by name.

A step runs as soon as all tensors that it takes are there, and beside those that it does not need. The first failure ends the
request and cancels what still runs.

A step whose model is decoupled gives its tensors any number of values. The steps behind it run once for each of them, several at
once, and the ensemble is decoupled, too: it has a response for each value of its outputs, in their order. As in Triton, all
tensors that a step takes must come from the same decoupled step, or none of them, and so must the outputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, ModelNotFound, from_wire
from dynamo.common.model_card import ModelCard
from dynamo.common.process.background import awaited
from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig, ModelEnsembling
from dynamo.worker.engine.base import Caller, RequestTimings
from dynamo.worker.repository.declared.execution import ModelRegistry, ModelRequest, ModelResult, Version, closing
from dynamo.worker.repository.declared.model_config import datatype_name

Step = ModelEnsembling.Step
Tensors: TypeAlias = Mapping[str, Array | None]
"""None: an optional tensor that is not there."""

_IN_FLIGHT = 16
"""Requests of one step at once, for one request of the ensemble."""
_UNREAD = 16
"""Values of a tensor that a reader has not taken; at least one and the end."""


class _EndOfValues:
    """Stands behind the last value of a tensor."""


_END = _EndOfValues()


def models_in(config: ModelConfig) -> list[str]:
    """Return the models that an ensemble consists of, each once; none if `config` is not an ensemble."""
    return list(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def ensembles_above(model: str, configs: Mapping[str, ModelConfig]) -> set[str]:
    """Return the ensembles of `configs`, by name, that need a model, and those that need these in turn."""
    pending, above = [model], set[str]()
    while pending:
        needed = pending.pop()
        found = {name for name, config in configs.items() if needed in models_in(config)} - above
        above |= found
        pending += found
    return above


def labels_in(config: ModelConfig, cards: Mapping[str, ModelCard]) -> dict[str, tuple[str, ...]]:
    """Return the labels of an ensemble's outputs: those of the models that give them. None if `config` is not an ensemble.

    `cards` are those of the models in it, by name.
    """
    return {
        target: output.labels
        for step in config.ensemble_scheduling.step
        for output in cards[step.model_name].outputs
        if (target := step.output_map.get(output.name)) is not None
    }


class EnsembleBackend:
    """Opens ensembles of the models of one worker."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models

    async def complete(self, version: Version) -> ModelConfig:
        return version.config

    async def open(self, version: Version) -> Ensemble:
        """Open an ensemble, and note in its configuration whether it is decoupled, which its steps decide.

        Raises InvalidRequest if the steps do not fit together.
        """
        config = version.config
        models = {needed: self._config(needed) for needed in _needed_models(config)}
        check_ensemble(config, models)
        origins = decoupled_origins(config, models)
        config.model_transaction_policy.decoupled = any(origins.values())
        if config.model_transaction_policy.decoupled and config.response_cache.enable:
            raise InvalidRequest("response_cache.enable must be false for an ensemble with a decoupled step")
        return Ensemble(config, models, origins, self._models)

    def _config(self, needed: tuple[str, str]) -> ModelConfig:
        try:
            return self._models.config(*needed)
        except ModelNotFound as error:
            raise InvalidRequest(f"the ensemble needs another model: {error}") from error


class Ensemble:
    """One ensemble. Its steps run the models, so it loads nothing itself."""

    waiting = 0
    """Requests wait at its models."""

    def __init__(
        self,
        config: ModelConfig,
        models: Mapping[tuple[str, str], ModelConfig],
        origins: Mapping[str, int],
        registry: ModelRegistry,
    ) -> None:
        self._name = config.name
        self._outputs = [output.name for output in config.output]
        self._models = registry
        self._steps = list(config.ensemble_scheduling.step)
        self._runs = [
            self._run_decoupled
            if models[step.model_name, _version(step)].model_transaction_policy.decoupled
            else self._run_repeatedly
            if any(origins[source] for source in step.input_map.values())
            else self._run_once
            for step in self._steps
        ]

    def __repr__(self) -> str:
        return f"<Ensemble {self._name} of {[step.model_name for step in self._steps]}>"

    async def respond(self, request: ModelRequest) -> ModelResult:
        flow = _Flow(request.inputs, self._steps)
        outputs = flow.read({name: name for name in self._outputs})
        async with self._running(flow, request) as steps:
            await steps
        return ModelResult(_present(await outputs.next() or {}))

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelResult]:
        """Yield a response for each value of the outputs, if a step is decoupled."""
        flow = _Flow(request.inputs, self._steps)
        outputs = flow.read({name: name for name in self._outputs})
        async with self._running(flow, request) as steps:
            while True:
                values = awaited(outputs.next())
                try:
                    await asyncio.wait((values, steps), return_when=asyncio.FIRST_COMPLETED)
                    if not values.done():
                        await steps  # raises the failure of a step; if there is none, the values are on their way
                    tensors = await values
                finally:
                    values.cancel()
                if tensors is None:
                    await steps  # those as well whose tensors lead to no output
                    return
                yield ModelResult(_present(tensors), is_final=False)

    async def close(self) -> None:
        return None

    @asynccontextmanager
    async def _running(self, flow: _Flow, request: ModelRequest) -> AsyncIterator[asyncio.Future[list[None]]]:
        """Run all steps until they end, or the body does. Errors name the ensemble, as in Triton."""
        if request.context.trace is not None:
            request.context.trace.is_composed = True
        steps = [awaited(run(step, flow, request)) for run, step in zip(self._runs, flow.steps, strict=True)]
        all_steps = asyncio.gather(*steps)
        try:
            yield all_steps
        except DynamoError as error:
            raise from_wire(error.code, f"in ensemble '{self._name}', {error}", error.retryable) from error
        finally:
            for step in steps:
                step.cancel()
            await asyncio.gather(all_steps, *steps, return_exceptions=True)

    async def _run_once(self, step: _FlowStep, flow: _Flow, request: ModelRequest) -> None:
        if (values := await step.inputs.next()) is not None:
            await flow.put(step, await self._respond(step, values, request))
        await flow.end(step)

    async def _run_repeatedly(self, step: _FlowStep, flow: _Flow, request: ModelRequest) -> None:
        """Run a model for each value of its inputs, several at once, and pass on the responses in the order of the values."""
        begun: asyncio.Queue[asyncio.Task[Tensors] | None] = asyncio.Queue(_IN_FLIGHT)
        runs: set[asyncio.Task[Tensors]] = set()

        async def begin() -> None:
            while (values := await step.inputs.next()) is not None:
                run = awaited(self._respond(step, values, request))
                runs.add(run)
                await begun.put(run)
            await begun.put(None)

        async def pass_on() -> None:
            while (run := await begun.get()) is not None:
                await flow.put(step, await run)
                runs.discard(run)
            await flow.end(step)

        both = [awaited(begin()), awaited(pass_on())]
        try:
            await asyncio.gather(*both)
        finally:
            for task in (*both, *runs):
                task.cancel()
            await asyncio.gather(*both, *runs, return_exceptions=True)

    async def _run_decoupled(self, step: _FlowStep, flow: _Flow, request: ModelRequest) -> None:
        while (values := await step.inputs.next()) is not None:
            async with closing(self._responses(step, values, request)) as responses:
                async for response in responses:
                    if response.outputs or not response.is_final:
                        await flow.put(step, response.outputs)
        await flow.end(step)

    async def _respond(self, step: _FlowStep, values: Tensors, request: ModelRequest) -> Tensors:
        outputs: Tensors = {}
        async with closing(self._responses(step, values, request)) as responses:
            async for response in responses:
                outputs = response.outputs
        return outputs

    def _responses(self, step: _FlowStep, values: Tensors, request: ModelRequest) -> AsyncIterator[ModelResult]:
        model, version = step.config.model_name, _version(step.config)
        optional = {tensor.name for tensor in self._models.config(model, version).input if tensor.optional}
        inputs: dict[str, Array] = {}
        for name, source in step.config.input_map.items():
            array = values[name]
            if array is not None:
                inputs[name] = array
            elif name not in optional:
                raise EngineError(f"ensemble '{self._name}' has no tensor '{source}', which model '{model}' needs")
        callers = (*request.context.callers, Caller(self._name))
        context = msgspec.structs.replace(request.context, version="", timings=RequestTimings(), callers=callers)
        outputs = tuple(step.config.output_map)
        return self._models.run(model, version, ModelRequest(inputs, context, outputs, request.parameters, request.id))


def _present(tensors: Tensors) -> dict[str, Array]:
    return {name: array for name, array in tensors.items() if array is not None}


class _Reader:
    """Reads tensors that belong together, one value of each at a time."""

    def __init__(self, queues: Mapping[str, asyncio.Queue[Array | _EndOfValues | None]]) -> None:
        self._queues = queues

    async def next(self) -> dict[str, Array | None] | None:
        """Return the next values by name; None: there are no more."""
        values: dict[str, Array | None] = {}
        for name, queue in self._queues.items():
            value = await queue.get()
            if isinstance(value, _EndOfValues):
                return None
            values[name] = value
        return values


@dataclass(frozen=True, slots=True)
class _FlowStep:
    config: Step
    inputs: _Reader


class _Flow:
    """The tensors of one request. Who writes one waits while a reader of it is far behind.

    All are read-only: a backend may write to an array that it is given otherwise, and another step, the caller or another tensor,
    which lies in the same memory, would have what it wrote.
    """

    def __init__(self, inputs: Mapping[str, Array], steps: Sequence[Step]) -> None:
        self._inputs = inputs
        self._queues: dict[str, list[asyncio.Queue[Array | _EndOfValues | None]]] = {
            target: [] for step in steps for target in step.output_map.values()
        }
        self.steps = [_FlowStep(step, self.read(step.input_map)) for step in steps]

    def read(self, sources: Mapping[str, str]) -> _Reader:
        """Return a reader of tensors, whose names in the ensemble are the values of `sources`."""
        queues: dict[str, asyncio.Queue[Array | _EndOfValues | None]] = {}
        for name, source in sources.items():
            queue: asyncio.Queue[Array | _EndOfValues | None] = asyncio.Queue(_UNREAD)
            queues[name] = queue
            if source in self._queues:
                self._queues[source].append(queue)
            else:
                queue.put_nowait(_read_only(self._inputs.get(source)))
                queue.put_nowait(_END)
        return _Reader(queues)

    async def put(self, step: _FlowStep, outputs: Tensors) -> None:
        for name, target in step.config.output_map.items():
            value = _read_only(outputs.get(name))
            for queue in self._queues[target]:
                await queue.put(value)

    async def end(self, step: _FlowStep) -> None:
        for target in step.config.output_map.values():
            for queue in self._queues[target]:
                await queue.put(_END)


def _read_only(array: Array | None) -> Array | None:
    if array is None or not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def _version(step: Step) -> str:
    return str(step.model_version) if step.model_version > 0 else ""


def _needed_models(config: ModelConfig) -> list[tuple[str, str]]:
    return list(dict.fromkeys((step.model_name, _version(step)) for step in config.ensemble_scheduling.step))


def check_ensemble(config: ModelConfig, models: Mapping[tuple[str, str], ModelConfig]) -> None:
    """Check that the steps fit together. Raises InvalidRequest naming step and tensor.

    `models` are the configurations of the steps' models, by name and version.
    """
    steps = list(config.ensemble_scheduling.step)
    if not steps:
        raise InvalidRequest("the ensemble has no steps")
    types = {tensor.name: datatype_name(tensor) for tensor in config.input}
    for step in steps:
        _check_step(config, step, models[step.model_name, _version(step)], types)
    _check_sources(config, steps, types)
    for output in config.output:
        if output.name not in types or output.name in {tensor.name for tensor in config.input}:
            raise InvalidRequest(f"no step gives the output '{output.name}'")
        _agree(output.name, datatype_name(output), types)
    _check_order(config, steps)


def _check_step(config: ModelConfig, step: Step, model: ModelConfig, types: dict[str, str]) -> None:
    where = f"the step of model '{step.model_name}'"
    if config.max_batch_size > model.max_batch_size:
        raise InvalidRequest(
            f"the max_batch_size is {config.max_batch_size}, but model '{step.model_name}' takes {model.max_batch_size}"
        )
    inputs = {tensor.name: tensor for tensor in model.input}
    outputs = {tensor.name: tensor for tensor in model.output}
    if unknown := sorted(step.input_map.keys() - inputs.keys()):
        raise InvalidRequest(f"{where} maps the input '{unknown[0]}', which the model does not have")
    if unknown := sorted(step.output_map.keys() - outputs.keys()):
        raise InvalidRequest(f"{where} maps the output '{unknown[0]}', which the model does not have")
    for name, tensor in inputs.items():
        if name not in step.input_map and not tensor.optional:
            raise InvalidRequest(f"{where} gives the model no input '{name}'")
    if not step.input_map:  # as in Triton; nothing would say how often the step runs
        raise InvalidRequest(f"{where} must have an input_map")
    for name, target in step.output_map.items():
        if target in types:
            raise InvalidRequest(f"the tensor '{target}' comes from two places")
        types[target] = datatype_name(outputs[name])
    for name, source in step.input_map.items():
        if source in types:
            _agree(source, datatype_name(inputs[name]), types)


def _check_sources(config: ModelConfig, steps: Sequence[Step], types: Mapping[str, str]) -> None:
    used = {source for step in steps for source in step.input_map.values()}
    if missing := sorted(used - types.keys()):
        raise InvalidRequest(f"no step or input gives the tensor '{missing[0]}'")
    if unused := sorted({tensor.name for tensor in config.input} - used):
        raise InvalidRequest(f"no step takes the input '{unused[0]}'")


def _agree(name: str, datatype: str, types: Mapping[str, str]) -> None:
    if types[name] != datatype:
        raise InvalidRequest(f"the tensor '{name}' is {types[name]} where it comes from and {datatype} where it goes")


def _check_order(config: ModelConfig, steps: Sequence[Step]) -> None:
    """Check that an order of the steps exists in which the inputs of each are available. Raises InvalidRequest."""
    available = {tensor.name for tensor in config.input}
    remaining = list(steps)
    while remaining:
        ready = [step for step in remaining if available.issuperset(step.input_map.values())]
        if not ready:
            raise InvalidRequest(f"the step of model '{remaining[0].model_name}' waits, by way of others, for itself")
        for step in ready:
            available.update(step.output_map.values())
            remaining.remove(step)


def decoupled_origins(config: ModelConfig, models: Mapping[tuple[str, str], ModelConfig]) -> dict[str, int]:
    """Return for each tensor which decoupled step it comes from, by a number; 0: from none. The steps have an order.

    Raises InvalidRequest, in Triton's words, for a step or outputs with tensors from several.
    """
    origins = {tensor.name: 0 for tensor in config.input}
    remaining = list(config.ensemble_scheduling.step)
    while remaining:
        step = next(step for step in remaining if origins.keys() >= set(step.input_map.values()))
        remaining.remove(step)
        origin = _only_origin(config, f"step of model '{step.model_name}'", [origins[name] for name in step.input_map.values()])
        if models[step.model_name, _version(step)].model_transaction_policy.decoupled:
            origin = 1 + max(origins.values())
        origins |= dict.fromkeys(step.output_map.values(), origin)
    _only_origin(config, "its response", [origins[output.name] for output in config.output])
    return origins


def _only_origin(config: ModelConfig, where: str, origins: Sequence[int]) -> int:
    if len(set(origins)) > 1:
        raise InvalidRequest(f"in ensemble {config.name}, {where} receives inputs originated from different decoupled models")
    return next(iter(origins), 0)
