"""Requests of Python models to other models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tests.differential.cases import Case
from tests.differential.cases.tensors import raw, request
from tests.differential.server_client import Response, ServerClient

_X = [["INPUT0", "float32", [1.0, 2.0]]]
_REPEATED = {"model_name": "repeat", "inputs": [["INPUT0", "int32", [1, 2]]]}
_ONE = [["INPUT0", "int32", [1]]]
_CALLS: Mapping[str, Mapping[str, Any]] = {
    "echo": {},
    "an unknown model": {"model_name": "unknown"},
    "a model that is not loaded": {"model_name": "late"},
    "an ensemble": {"model_name": "chain"},
    "a version": {"model_name": "versions", "model_version": 3},
    "a version that is not there": {"model_name": "versions", "model_version": 2},
    "no requested output": {"requested_output_names": []},
    "an unknown output": {"requested_output_names": ["NONE"]},
    "an unknown input": {"inputs": [["NONE", "float32", [1.0]]]},
    "no input": {"inputs": []},
    "no input, with an id": {"inputs": [], "request_id": "own"},
    "an input too many": {"inputs": [*_X, ["INPUT1", "float32", [1.0]]]},
    "one of two inputs": {"model_name": "add_sub", "inputs": _ONE},
    "an optional input left out": {"model_name": "optional", "inputs": _X},
    "a wrong datatype": {"inputs": _ONE},
    "a wrong datatype, with an id": {"inputs": _ONE, "request_id": "own"},
    "a wrong shape": {"model_name": "echo_matrix", "inputs": [["INPUT0", "int32", [[1, 2], [3, 4]]]]},
    "a shape of another rank": {"model_name": "echo_matrix", "inputs": [["INPUT0", "int32", [1, 2]]]},
    "a batch": {"model_name": "echo_batched", "inputs": [["INPUT0", "float32", [[1, 2, 3, 4]] * 4]]},
    "a batch too large": {"model_name": "echo_batched", "inputs": [["INPUT0", "float32", [[1, 2, 3, 4]] * 5]]},
    "text": {"model_name": "echo_bytes", "inputs": [["INPUT0", "object", ["a", "\u00e4", ""]]]},
    "a model that fails": {"model_name": "fails", "inputs": [["INPUT0", "object", ["NOT_FOUND"]]]},
    "ids, flags, a timeout and parameters": {
        "model_name": "parameters",
        "inputs": _ONE,
        "request_id": "own",
        "correlation_id": 5,
        "flags": 1,
        "timeout": 9,
        "parameters": {"text": "x", "number": 1, "flag": True},
    },
    "a text as correlation id": {"model_name": "parameters", "inputs": _ONE, "correlation_id": "abc"},
    "a decoupled model": _REPEATED,
    "a decoupled model, decoupled": {**_REPEATED, "decoupled": True},
    "a decoupled model without responses": {**_REPEATED, "inputs": [["INPUT0", "int32", []]], "decoupled": True},
    "another model, decoupled": {"decoupled": True},
    "an unknown model, decoupled": {"model_name": "unknown", "decoupled": True},
}


def cases() -> Iterator[Case]:
    for what, call in _CALLS.items():
        order = {"model_name": "echo_fp32", "inputs": _X, "requested_output_names": ["OUTPUT0"], **call}
        yield Case("calls of models", what, partial(_run, order))


def _run(order: Mapping[str, Any], client: ServerClient) -> Response:
    message = request("caller", ("INPUT0", "BYTES", (1,)))
    message.raw_input_contents.append(raw("BYTES", [json.dumps(order)]))
    return client.call("ModelInfer", message)
