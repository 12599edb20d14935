"""Configurations that are sent with a load: which of them are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dynamo.protos import inference_pb2 as pb
from tests.differential.cases import Case
from tests.differential.server_client import Response, ServerClient

_MODEL = "overridden"
_BASE: Mapping[str, Any] = {
    "name": _MODEL,
    "backend": "python",
    "max_batch_size": 4,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [1]}],
}
_DECOUPLED = {"model_transaction_policy": {"decoupled": True}}
_WARMUP = {"name": "w", "batch_size": 1, "inputs": {"INPUT0": {"data_type": "TYPE_FP32", "dims": [1], "zero_data": True}}}


def cases() -> Iterator[Case]:
    for what, change in _changes():
        yield Case("configurations", what, partial(_load, {**_BASE, **change}))


def _load(config: Mapping[str, Any], client: ServerClient) -> Response:
    request = pb.RepositoryModelLoadRequest(model_name=_MODEL)
    request.parameters["config"].string_param = json.dumps(config)
    response = client.call("RepositoryModelLoad", request)
    return replace(response, body={"loads": response.status == "OK"})  # statuses and words of refusals may differ, not whether


def _changes() -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "as it is", {}
    yield "a negative batch size", {"max_batch_size": -1}
    yield "dynamic batching without a batch size", {"max_batch_size": 0, "dynamic_batching": {}}
    for what, policy in (("", {}), ("decoupled, ", _DECOUPLED)):
        for name, batching in _batching().items():
            yield f"{what}{name}", {**policy, "dynamic_batching": batching}
    for name, sequences in _sequences().items():
        yield name, {"sequence_batching": sequences}
    for name, tensor in _tensors().items():
        yield f"input with {name}", {"input": [{"name": "INPUT0", "data_type": "TYPE_FP32", **tensor}]}
    for name, cached in (("sequences", {"sequence_batching": {}}), ("a decoupled model", _DECOUPLED)):
        yield f"response cache of {name}", {**cached, "response_cache": {"enable": True}}
    for name, batching in (("", {}), ("sequences, ", {"sequence_batching": {}})):
        yield f"{name}warm-up", {**batching, "model_warmup": [_WARMUP]}
    yield "warm-up with an unknown input", {"model_warmup": [{**_WARMUP, "inputs": {"NONE": _WARMUP["inputs"]["INPUT0"]}}]}  # type: ignore[index]
    yield "two schedulers", {"sequence_batching": {}, "dynamic_batching": {}}
    yield "a negative count of instances", {"instance_group": [{"count": -1, "kind": "KIND_CPU"}]}


def _batching() -> Mapping[str, Mapping[str, Any]]:
    delay = {"timeout_action": "DELAY"}
    return {
        "a preferred size beyond the batch": {"preferred_batch_size": [8]},
        "the preferred size 0": {"preferred_batch_size": [0]},
        "levels without a default": {"priority_levels": 3},
        "a default beyond the levels": {"priority_levels": 3, "default_priority_level": 4},
        "a policy beyond the levels": {
            "priority_levels": 2,
            "default_priority_level": 1,
            "priority_queue_policy": {"3": {}},
        },
        "an order and levels": {"preserve_ordering": True, "priority_levels": 2, "default_priority_level": 1},
        "an order and DELAY without a timeout": {"preserve_ordering": True, "default_queue_policy": delay},
        "an order and DELAY": {
            "preserve_ordering": True,
            "default_queue_policy": {**delay, "default_timeout_microseconds": 1},
        },
    }


def _sequences() -> Mapping[str, Mapping[str, Any]]:
    sequences: dict[str, Mapping[str, Any]] = {
        "oldest without a count": {"oldest": {}},
        "oldest with a negative count": {"oldest": {"max_candidate_sequences": -1}},
        "oldest, a preferred size beyond the batch": {"oldest": {"max_candidate_sequences": 4, "preferred_batch_size": [9]}},
        "iterative sequences": {"iterative_sequence": True},
    }
    start = "CONTROL_SEQUENCE_START"
    controls: dict[str, Mapping[str, Any]] = {
        "no values": {"kind": start},
        "one value": {"kind": start, "int32_false_true": [0]},
        "values of two kinds": {"kind": start, "int32_false_true": [0, 1], "fp32_false_true": [0, 1]},
        "no type": {"kind": "CONTROL_SEQUENCE_CORRID"},
        "the type FP32": {"kind": "CONTROL_SEQUENCE_CORRID", "data_type": "TYPE_FP32"},
    }
    for what, control in controls.items():
        sequences[f"a {control['kind']} with {what}"] = {"control_input": [{"name": "C", "control": [control]}]}
    good = {"name": "i", "data_type": "TYPE_FP32", "dims": [2], "zero_data": True}
    initials: dict[str, list[Mapping[str, Any]]] = {
        "two initial states": [good, good],
        "an initial state of another type": [{**good, "data_type": "TYPE_INT32"}],
        "an initial state without a name": [{**good, "name": ""}],
        "an initial state of another rank": [{**good, "dims": [2, 1]}],
        "an initial state of variable size": [{**good, "dims": [-1]}],
        "an initial state of another size": [{**good, "dims": [3]}],
        "an initial state without data": [{key: value for key, value in good.items() if key != "zero_data"}],
    }
    for what, initial in initials.items():
        state = {"input_name": "S", "output_name": "T", "data_type": "TYPE_FP32", "dims": [2], "initial_state": initial}
        sequences[what] = {"state": [state]}
    return sequences


def _tensors() -> Mapping[str, Mapping[str, Any]]:
    return {
        "no dims": {},
        "dims 0": {"dims": [0]},
        "dims -2": {"dims": [-2]},
        "a reshape of another size": {"dims": [4], "reshape": {"shape": [3]}},
        "a variable size reshaped to a fixed one": {"dims": [-1], "reshape": {"shape": [3]}},
        "a reshape across a variable size": {"dims": [2, -1, 6], "reshape": {"shape": [3, -1, 4]}},
        "a reshape between variable sizes": {"dims": [2, 4, -1, 6], "reshape": {"shape": [8, -1, 1, 6]}},
        "a reshape to nothing": {"dims": [1], "reshape": {"shape": []}},
        "a reshape with 0": {"dims": [1], "reshape": {"shape": [0]}},
        "another number of variable sizes": {"dims": [-1, 1], "reshape": {"shape": [-1, -1]}},
    }
