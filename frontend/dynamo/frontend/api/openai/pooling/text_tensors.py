"""The tensors of requests about texts, which may be far longer than the request: token ids are padded to the longest text, and
a query is repeated for each document.

They are written in steps, into the message that is sent, whose size is known and held before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.model_card import ModelCard, TensorSpec
from dynamo.common.process.work import Work
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import encode_bytes
from dynamo.protos.inference_pb2 import ModelInferRequest

_PADDING = -1
_WRITTEN_IDS = 1 << 14
"""Token ids written in one step: about a millisecond."""
_WRITTEN_PADDING = 1 << 18

Rows: TypeAlias = Sequence[Sequence[int]]


def ids_to_tensor(rows: Rows, spec: TensorSpec, model: str, card: ModelCard, max_bytes: int) -> Work[TensorRequest]:
    """Return a request with a row of token ids per text, padded with -1.

    Raises InvalidRequest if a text is longer than the context of the model, and PayloadTooLarge for more than `max_bytes`.
    """
    kind = np.dtype(np.int64 if spec.datatype == "INT64" else np.int32)
    longest = max(map(len, rows))
    _check_context(longest, spec, card)
    size = len(rows) * longest * kind.itemsize
    if size > max_bytes:
        raise PayloadTooLarge(
            f"{len(rows)} texts, padded to the {longest} tokens of the longest, take {size} bytes; at most {max_bytes} are "
            "allowed: send texts of similar lengths together",
            param="input",
        )
    yield size
    head = ModelInferRequest(model_name=model)
    head.inputs.add(name=spec.name, datatype=spec.datatype, shape=(len(rows), longest))
    request, [room] = TensorRequest.with_room(head, [size])
    padded = np.frombuffer(room, kind).reshape(len(rows), longest)
    for row, tokens in zip(padded, rows, strict=True):
        for begin in range(0, len(tokens), _WRITTEN_IDS):
            part = tokens[begin : begin + _WRITTEN_IDS]
            row[begin : begin + len(part)] = part
            yield 0
        for begin in range(len(tokens), longest, _WRITTEN_PADDING):
            row[begin : begin + _WRITTEN_PADDING] = _PADDING
            yield 0
    return request


def _check_context(tokens: int, spec: TensorSpec, card: ModelCard) -> None:
    context = card.llm.context_length if card.llm is not None else spec.shape[-1]
    if 0 < context < tokens:
        raise InvalidRequest(f"a text has {tokens} tokens; the model takes {context}", param="input")


def repeated_query(
    query: str, documents: Sequence[str], names: tuple[str, str], model: str, max_bytes: int
) -> Work[TensorRequest]:
    """Return a request with a pair of the query and each document. Raises PayloadTooLarge for more than `max_bytes`."""
    element, others = encode_bytes([query]), encode_bytes(documents)
    sizes = len(element) * len(documents), len(others)
    if sum(sizes) > max_bytes:
        raise PayloadTooLarge(
            f"the query once for each of {len(documents)} documents, and these, take {sum(sizes)} bytes; at most {max_bytes} are "
            "allowed"
        )
    yield sum(sizes)
    request, [firsts, seconds] = TensorRequest.with_room(pairs_head(model, names, len(documents)), sizes)
    seconds[:] = others
    for begin in range(0, len(firsts), len(element)):
        firsts[begin : begin + len(element)] = element
        yield 0
    return request


def pairs_head(model: str, names: tuple[str, str], count: int) -> ModelInferRequest:
    """Return a request without its tensors, which are two of `count` texts."""
    head = ModelInferRequest(model_name=model)
    for name in names:
        head.inputs.add(name=name, datatype="BYTES", shape=[count])
    return head
