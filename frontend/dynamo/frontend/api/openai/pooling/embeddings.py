"""POST /v1/embeddings: texts to vectors.

An embedding model is a tensor model: its input is one BYTES tensor of texts, its output one floating-point tensor with a row per
text. A second, integer output named `prompt_tokens` may report how many tokens each text had. A model that takes token ids too
has an input of that name, with a row per text that is padded with -1.

    inputs:  {name: text,       datatype: BYTES, shape: [-1]}       or [-1, 1]
             {name: token_ids,  datatype: INT32, shape: [-1, -1]}   INT64 too; both inputs optional, and requests have one of them
    outputs: {name: embedding,  datatype: FP32,  shape: [-1, 384]}  FP16, BF16 and FP64 too
             {name: prompt_tokens, datatype: INT32, shape: [-1]}    optional
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.process.work import Work, finish
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import FLOATS, encode_bytes
from dynamo.frontend.api.declaration import Reads
from dynamo.frontend.api.http.exchange import JSON, Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.pooling.text_tensors import ids_to_tensor
from dynamo.frontend.api.openai.pooling.vectors import BRIEF_BYTES, from_tensors, rows_to_json, with_rows
from dynamo.frontend.api.openai.requests import EmbeddingRequest
from dynamo.frontend.api.openai.response_objects import Embedding, Embeddings, EmbeddingUsage
from dynamo.frontend.api.openai.to_text import prompts_of
from dynamo.frontend.api.text.model_names import name_or_only_model
from dynamo.frontend.api.text.rules import check_chars
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.model_catalog import NamedModel
from dynamo.frontend.serving.prompt_tokens import BYTES_PER_TOKEN
from dynamo.protos.inference_pb2 import ModelInferRequest

TOKENS_INPUT = "token_ids"
_BRIEF_INPUTS = 16 * 1024
"""So many characters, or token ids with their padding, are made a tensor at once."""


class EmbeddingsEndpoint:
    """The endpoint for embeddings."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(EmbeddingRequest)

    async def __call__(self, exchange: Exchange) -> None:
        call = exchange.call()
        request = await self._reader.read(exchange)
        plane, limits = self._edge.plane, self._edge.limits
        name = name_or_only_model(plane, exchange.account, request.model, embeds_texts)
        inputs = _inputs(request, limits.max_embedding_inputs)
        check_chars(sum(map(len, inputs)), limits, "input")

        serve = partial(self._serve, exchange, request, inputs)
        await plane.names.serve(call, name, serve, has_begun=exchange.has_begun, user=request.user)

    async def _serve(
        self, exchange: Exchange, request: EmbeddingRequest, inputs: Sequence[str | list[int]], model: NamedModel, call: Call
    ) -> None:
        building = to_tensors(inputs, model.name, model.card, exchange.settings.body_limits[Reads.TENSORS])
        tensors = await exchange.in_steps(building) if len(inputs) * max(map(len, inputs)) > _BRIEF_INPUTS else finish(building)
        call = msgspec.structs.replace(call, expected_tokens=expected_tokens(inputs))
        async with exchange.attended():
            response = await self._edge.plane.infer(model, tensors, call)
            is_long = len(response) > BRIEF_BYTES
            exchange.hold(len(response))
            reading = from_tensors(response, len(inputs))
            vectors, tokens = await exchange.in_steps(reading) if is_long else finish(reading)
            rows = vectors if request.dimensions is None else (shorten(row, request.dimensions) for row in vectors)
            packed = request.encoding_format == "base64"
            writing = rows_to_json(rows, lambda index, row: Embedding(index=index, embedding=row), packed=packed)
            data = await exchange.in_steps(writing) if is_long else finish(writing)
        usage = EmbeddingUsage(tokens, tokens)
        pieces = with_rows(data, lambda data: Embeddings(data=data, model=model.name, usage=usage))
        await exchange.respond_in_pieces(pieces, (JSON,), held_bytes=sum(map(len, pieces)) if is_long else 0)


def _inputs(request: EmbeddingRequest, most: int) -> list[str | list[int]]:
    inputs = prompts_of(request.input, "input")
    if len(inputs) > most:
        raise InvalidRequest(f"got {len(inputs)} texts; at most {most} are allowed", param="input")
    if not all(inputs):
        raise InvalidRequest("'input' must not contain an empty text", param="input")
    return inputs


def expected_tokens(inputs: Sequence[str | list[int]]) -> int:
    return sum(1 + len(item) // BYTES_PER_TOKEN if isinstance(item, str) else len(item) for item in inputs)


def to_tensors(inputs: Sequence[str | list[int]], model: str, card: ModelCard, max_bytes: int) -> Work[TensorRequest]:
    """Return the inference request for an embedding model.

    Raises InvalidRequest if `card` is not one, or takes no token ids, or not as many; PayloadTooLarge if those, padded, take more
    than `max_bytes`.
    """
    if not embeds_texts(card):
        raise InvalidRequest(f"model '{card.name}' does not embed texts", param="model")
    rows = [item for item in inputs if not isinstance(item, str)]
    if rows:
        ids = _token_input(card)
        if ids is None:
            raise InvalidRequest(f"model '{card.name}' takes texts, not token ids", param="input")
        return (yield from ids_to_tensor(rows, ids, model, card, max_bytes))
    text = _text_input(card)
    assert text is not None
    head = ModelInferRequest(model_name=model)
    head.inputs.add(name=text.name, datatype="BYTES", shape=[len(inputs), *[1] * (len(text.shape) - 1)])
    return TensorRequest.build(head, [encode_bytes([item for item in inputs if isinstance(item, str)])])


def embeds_texts(card: ModelCard) -> bool:
    """Whether the model maps a tensor of texts to vectors, as far as its declaration says."""
    is_embedding = card.kind is ModelKind.EMBEDDING or (card.kind is ModelKind.TENSOR and _output(card) is not None)
    return is_embedding and _text_input(card) is not None


def _text_input(card: ModelCard) -> TensorSpec | None:
    """Return the input for texts; None if the model has none, or needs others."""
    candidates = [spec for spec in card.inputs if not spec.optional]
    if not candidates and _token_input(card) is not None:
        candidates = [spec for spec in card.inputs if spec.datatype == "BYTES"]
    return candidates[0] if [spec.datatype for spec in candidates] == ["BYTES"] else None


def _token_input(card: ModelCard) -> TensorSpec | None:
    """Return the input for token ids; None if requests always need a text."""
    if any(not spec.optional for spec in card.inputs):
        return None
    return next((spec for spec in card.inputs if spec.name == TOKENS_INPUT and spec.datatype in ("INT32", "INT64")), None)


def _output(card: ModelCard) -> TensorSpec | None:
    return next((spec for spec in card.outputs if spec.datatype in FLOATS), None)


def shorten(vector: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Return the first `dimensions` of a vector, normalized again. Raises InvalidRequest if there are fewer."""
    if dimensions > len(vector):
        raise InvalidRequest(f"'dimensions' is {dimensions}; the vectors of this model have {len(vector)}", param="dimensions")
    cut = vector[:dimensions]
    norm = np.linalg.norm(cut)
    unit: NDArray[np.float32] = (cut / (norm if norm > 0 else 1)).astype(np.float32)
    return unit
