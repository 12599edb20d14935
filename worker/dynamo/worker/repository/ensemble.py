"""Ensembles: models made of other models of the same worker, tensors flowing between them by name.

A step runs as soon as all tensors that it takes are there, and beside those that it does not need. The first failure ends the
request and cancels what still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynamo.common.background import awaited
from dynamo.common.errors import EngineError, InvalidRequest, ModelNotFound
from dynamo.common.model_card import ModelCard
from dynamo.common.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig, ModelEnsembling
from dynamo.worker.engine.base import RequestTimings
from dynamo.worker.repository.execution import ModelRegistry, ModelRequest, ModelResult, Version, closing
from dynamo.worker.repository.model_config import datatype_name

Step = ModelEnsembling.Step


def models_in(config: ModelConfig) -> list[str]:
    """Return the models that an ensemble consists of, each once; none if `config` is not an ensemble."""
    return list(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


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
        """Open an ensemble. Raises InvalidRequest if the steps do not fit together."""
        check_ensemble(version.config, {needed: self._config(needed) for needed in _needed_models(version.config)})
        return Ensemble(version.config, self._models)

    def _config(self, needed: tuple[str, str]) -> ModelConfig:
        try:
            return self._models.config(*needed)
        except ModelNotFound as error:
            raise InvalidRequest(f"the ensemble needs another model: {error}") from error


class Ensemble:
    """One ensemble. Its steps run the models, so it loads nothing itself."""

    def __init__(self, config: ModelConfig, models: ModelRegistry) -> None:
        self._name = config.name
        self._steps = list(config.ensemble_scheduling.step)
        self._outputs = [output.name for output in config.output]
        self._models = models

    def __repr__(self) -> str:
        return f"<Ensemble {self._name} of {[step.model_name for step in self._steps]}>"

    async def respond(self, request: ModelRequest) -> ModelResult:
        flow = _Flow(request.inputs, self._steps)
        steps = [awaited(self._run_step(step, flow, request)) for step in self._steps]
        try:
            await asyncio.gather(*steps)
        finally:
            for step in steps:
                step.cancel()
            await asyncio.gather(*steps, return_exceptions=True)
        outputs = {name: await flow.get(name) for name in self._outputs}
        return ModelResult({name: array for name, array in outputs.items() if array is not None})

    async def close(self) -> None:
        return None

    async def _run_step(self, step: Step, flow: _Flow, request: ModelRequest) -> None:
        config = self._models.config(step.model_name, _version(step))
        optional = {tensor.name for tensor in config.input if tensor.optional}
        inputs: dict[str, Array] = {}
        for name, source in step.input_map.items():
            array = await flow.get(source)
            if array is not None:
                inputs[name] = array
            elif name not in optional:
                raise EngineError(f"ensemble '{self._name}' has no tensor '{source}', which model '{step.model_name}' needs")
        context = replace(request.context, version="", timings=RequestTimings())
        model_request = ModelRequest(inputs, context, tuple(step.output_map), request.parameters, request.id)
        async with closing(self._models.run(step.model_name, _version(step), model_request)) as responses:
            async for response in responses:
                for name, target in step.output_map.items():
                    flow.put(target, response.outputs.get(name))


class _Flow:
    """The tensors of one request, each of which can be awaited. None means that an optional tensor is not produced."""

    def __init__(self, inputs: Mapping[str, Array], steps: Sequence[Step]) -> None:
        loop = asyncio.get_running_loop()
        self._inputs = inputs
        self._made: dict[str, asyncio.Future[Array | None]] = {
            target: loop.create_future() for step in steps for target in step.output_map.values()
        }

    async def get(self, name: str) -> Array | None:
        future = self._made.get(name)
        return self._inputs.get(name) if future is None else await future

    def put(self, name: str, array: Array | None) -> None:
        if not self._made[name].done():
            self._made[name].set_result(array)


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
    if config.model_transaction_policy.decoupled:
        raise InvalidRequest("a decoupled ensemble is not supported")
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
    if model.model_transaction_policy.decoupled:
        raise InvalidRequest(f"{where} is decoupled, which is not supported in ensembles")
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
