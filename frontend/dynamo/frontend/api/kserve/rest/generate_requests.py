"""The flat JSON of …/generate as a ModelInferRequest, by Triton's generate extension and the Open Inference Protocol's text API.

    {"text_input": "…", "max_tokens": 5, "parameters": {"temperature": 0, "stop": ["."], "details": true}, "id": "…"}

Fields named like an input of the model are inputs, all others are parameters; members of the object `parameters` count as fields.
`priority` and `timeout` are parameters for the model, too, as in Triton; those of a language model are the request's.
A tensor has the model's shape, whose last variable dimension is set to fit the elements that were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.process.work import Work
from dynamo.common.tensors.check import MODELS_OWN
from dynamo.common.tensors.request import MAX_PARAMETERS, MAX_TENSORS, TensorRequest
from dynamo.common.tensors.tensors import Buffer, datatype_named, element_count
from dynamo.frontend.api.kserve.rest.elements import LONG_ELEMENTS, to_raw
from dynamo.frontend.api.kserve.rest.long_arrays import GENERATE_DEPTH, SHORT_BYTES, CutBody, cut_arrays, element_number
from dynamo.frontend.api.kserve.rest.long_tensors import LongTensor, long_tensor
from dynamo.frontend.api.kserve.rest.requests import assembled, object_of, set_model_parameter, set_parameter
from dynamo.frontend.api.kserve.text import MAX_CHOICES
from dynamo.frontend.config import HttpOptions
from dynamo.protos.inference_pb2 import ModelInferRequest

_TEXTS = frozenset(("text_input", "messages", "stop"))
"""What a language model takes as tensors; its settings go as parameters."""
_MAX_FIELDS = MAX_TENSORS + MAX_PARAMETERS
"""Inputs and parameters together; how many there are of each is checked where they are read."""


@dataclass(frozen=True, slots=True)
class RestGenerateRequest:
    request: TensorRequest
    stream: bool | None = None
    """The flag `stream` of a language model's request; None if it is not set."""
    details: bool = False
    """Whether the response has the finish reason and, if requested, the log probabilities of its tokens."""


def read_generate(body: bytes, card: ModelCard, model: str, version: str, bounds: HttpOptions) -> Work[RestGenerateRequest]:
    """Return the request in a JSON body. Raises InvalidRequest, PayloadTooLarge."""
    cut = CutBody(body, {})
    if len(body) > SHORT_BYTES and card.kind is not ModelKind.LLM:
        cut = yield from cut_arrays(body, GENERATE_DEPTH)
    fields = yield from object_of(cut.text, bounds)
    try:
        id_, fields = _flattened(fields)
        if len(fields) > _MAX_FIELDS:  # before a parameter is made of each
            raise InvalidRequest(f"the request has {len(fields)} fields; at most {_MAX_FIELDS} are allowed")
        head = ModelInferRequest(model_name=model, model_version=version, id=id_)
        if card.kind is ModelKind.LLM:
            return _text_request(head, fields)
        raws: list[Buffer | LongTensor] = []
        specs = {spec.name: spec for spec in card.inputs}
        for name, value in fields.items():
            if name in specs:
                raws.append((yield from _tensor(head, specs[name], cut.restored(value))))
            else:
                set_model_parameter(head.parameters[MODELS_OWN.get(name, name)], name, value)
        return RestGenerateRequest((yield from assembled(head, raws, bounds)))
    except UnicodeEncodeError:
        raise InvalidRequest("the body has text with half a surrogate pair, which is no character") from None


def _flattened(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the id, and inputs and parameters as one object."""
    fields = dict(body)
    id_ = fields.pop("id", None)
    if not isinstance(id_, str | None):
        raise InvalidRequest("'id' must be a string", param="id")
    parameters = fields.pop("parameters", None)
    if not isinstance(parameters, dict | None):
        raise InvalidRequest("'parameters' must be an object", param="parameters")
    return id_ or "", fields | (parameters or {})  # of one that is given twice, that within `parameters` counts, as in Triton


def _tensor(head: ModelInferRequest, spec: TensorSpec, value: object) -> Work[Buffer | LongTensor]:
    what = f"input '{spec.name}'"
    kind = datatype_named(spec.datatype, what)
    data: memoryview | list[Any]
    if isinstance(value, memoryview):
        data, count = value, (yield from element_number(value))
    else:
        data = value if isinstance(value, list) else [value]
        count = len(data)
    shape = _fitted(spec.shape, count)
    if element_count(shape, what) != count:
        raise InvalidRequest(f"The schema can not convert {what} to tensor with proper shape", param=spec.name)
    head.inputs.add(name=spec.name, datatype=spec.datatype, shape=shape)
    if isinstance(data, memoryview) or len(data) > LONG_ELEMENTS:
        return (yield from long_tensor(data, kind, shape, what))
    return to_raw(data, kind, shape, what)


def _fitted(declared: Sequence[int], count: int) -> list[int]:
    """Return the shape of `count` elements: the last variable dimension is set to fit them, other variable ones are 1."""
    shape = [1 if dim < 0 else dim for dim in declared]
    variable = [position for position, dim in enumerate(declared) if dim < 0]
    each = 1
    for dim in shape:
        each *= dim
    if variable and each:
        shape[variable[-1]] = count // each
    return shape


# Language models


def _text_request(head: ModelInferRequest, fields: dict[str, Any]) -> RestGenerateRequest:
    if "stream" in fields and "streaming" in fields:
        raise InvalidRequest("'streaming' and 'stream' mean the same; send one of them", param="stream")
    stream = _flag(fields, "stream") if "stream" in fields else _flag(fields, "streaming")
    details = _flag(fields, "details") or False
    if _flag(fields, "logprob"):
        fields.setdefault("logprobs", 0)
    raws: list[Buffer] = []
    for name, value in fields.items():
        if name in _TEXTS:
            if texts := _texts(name, value):
                head.inputs.add(name=name, datatype="BYTES", shape=[len(texts)])
                raws.append(to_raw(texts, datatype_named("BYTES"), [len(texts)], f"input '{name}'"))
        else:
            set_parameter(head.parameters[name], name, value)
    return RestGenerateRequest(TensorRequest.build(head, raws), stream, details or "logprobs" in fields)


def _flag(fields: dict[str, Any], name: str) -> bool | None:
    """Remove a flag from `fields` and return it; None if it is not there."""
    value = fields.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false", param=name)
    return value


def _texts(name: str, value: object) -> list[str]:
    if name == "messages":  # one conversation, which travels as its JSON
        try:
            return [orjson.dumps(value).decode()]
        except orjson.JSONEncodeError as error:
            raise InvalidRequest(f"'messages' cannot be read: {error}", param=name) from None
    texts: list[Any] = value if isinstance(value, list) else [value]
    if len(texts) > MAX_CHOICES:
        raise InvalidRequest(f"'{name}' has {len(texts)} strings; at most {MAX_CHOICES} are allowed", param=name)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"'{name}' must be a string, or an array of strings", param=name)
    return texts
