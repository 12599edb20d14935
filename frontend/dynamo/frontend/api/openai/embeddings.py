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

import base64
from collections.abc import Sequence

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensor_request import TensorRequest
from dynamo.common.tensors import bf16_to_float32, element_count, encode_bytes, to_numpy, typed_to_raw
from dynamo.frontend.api.calls import Caller
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.requests import EmbeddingRequest
from dynamo.frontend.api.openai.response_objects import Embedding, Embeddings, EmbeddingUsage
from dynamo.frontend.api.openai.to_text import prompts_of
from dynamo.frontend.api.text.model_names import name_or_only_model
from dynamo.frontend.api.text.named import serve_by_name
from dynamo.frontend.api.text.rules import check_chars
from dynamo.frontend.metrics import RequestType
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse

TOKENS_INPUT = "token_ids"
TOKENS_OUTPUT = "prompt_tokens"
_PADDING = -1
_CHARS_PER_TOKEN = 4
"""Of common text, for an estimate; the model counts."""
FLOATS = frozenset(("FP16", "BF16", "FP32", "FP64"))


class EmbeddingsEndpoint:
    """The endpoint for embeddings."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._reader = RequestReader(EmbeddingRequest)

    async def __call__(self, exchange: Exchange) -> None:
        caller = exchange.caller()
        request = await self._reader.read(exchange)
        plane, limits = self._edge.plane, self._edge.limits
        model = name_or_only_model(plane, exchange.account, request.model, embeds_texts)
        inputs = _inputs(request, limits.max_embedding_inputs)
        check_chars(sum(map(len, inputs)), limits, "input")

        async def attempt(model: str, caller: Caller) -> None:
            await self._serve(exchange, request, inputs, model, caller)

        await serve_by_name(plane, caller, model, attempt, exchange.has_begun, user=request.user)

    async def _serve(
        self, exchange: Exchange, request: EmbeddingRequest, inputs: Sequence[str | list[int]], model: str, caller: Caller
    ) -> None:
        plane = self._edge.plane
        card = plane.card(exchange.account, model)
        tensors = to_tensors(inputs, model, card)
        call = caller.call(endpoint=exchange.endpoint, request_type=RequestType.UNARY)
        call = msgspec.structs.replace(call, expected_tokens=expected_tokens(inputs))
        async with exchange.attended():
            response = await plane.infer(tensors, call)
        vectors, tokens = from_tensors(bytes(response), len(inputs))
        call.account.charge(model, tokens)
        if request.dimensions is not None:
            vectors = shorten(vectors, request.dimensions)
        data = [
            Embedding(index=index, embedding=base64_of(row) if request.encoding_format == "base64" else row.tolist())
            for index, row in enumerate(vectors)
        ]
        await exchange.respond(msgspec.json.encode(Embeddings(data=data, model=model, usage=EmbeddingUsage(tokens, tokens))))


def _inputs(request: EmbeddingRequest, most: int) -> list[str | list[int]]:
    inputs = prompts_of(request.input, "input")
    if len(inputs) > most:
        raise InvalidRequest(f"got {len(inputs)} texts; at most {most} are allowed", param="input")
    if not all(inputs):
        raise InvalidRequest("'input' must not contain an empty text", param="input")
    return inputs


def expected_tokens(inputs: Sequence[str | list[int]]) -> int:
    return sum(1 + len(item) // _CHARS_PER_TOKEN if isinstance(item, str) else len(item) for item in inputs)


def to_tensors(inputs: Sequence[str | list[int]], model: str, card: ModelCard) -> TensorRequest:
    """Return the inference request for an embedding model. Raises InvalidRequest if `card` is not one, or takes no token ids."""
    if not embeds_texts(card):
        raise InvalidRequest(f"model '{card.name}' does not embed texts", param="model")
    head = ModelInferRequest(model_name=model)
    rows = [item for item in inputs if not isinstance(item, str)]
    if rows:
        ids = _token_input(card)
        if ids is None:
            raise InvalidRequest(f"model '{card.name}' takes texts, not token ids", param="input")
        padded = np.full((len(rows), max(map(len, rows))), _PADDING, np.int64 if ids.datatype == "INT64" else np.int32)
        for row, tokens in zip(padded, rows, strict=True):
            row[: len(tokens)] = tokens
        head.inputs.add(name=ids.name, datatype=ids.datatype, shape=padded.shape)
        return TensorRequest.build(head, [padded.tobytes()])
    text = _text_input(card)
    assert text is not None
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


def from_tensors(encoded: bytes, count: int) -> tuple[NDArray[np.float32], int]:
    """Decode a ModelInferResponse: a float32 vector per text, shape (count, dimensions), and the number of tokens or 0.

    Raises EngineError if the response does not have that form.
    """
    try:
        response = ModelInferResponse.FromString(encoded)
    except DecodeError:
        raise EngineError("the model's response cannot be decoded") from None
    vectors: NDArray[np.float32] | None = None
    tokens = 0
    try:
        for index, output in enumerate(response.outputs):
            is_raw = index < len(response.raw_output_contents)
            elements = element_count(output.shape)
            raw = response.raw_output_contents[index] if is_raw else typed_to_raw(output.contents, output.datatype, elements)
            if output.datatype in FLOATS and vectors is None:
                array = to_numpy(raw, output.datatype, output.shape)
                floats = bf16_to_float32(array) if output.datatype == "BF16" and array.dtype == np.uint16 else array
                vectors = floats.astype(np.float32).reshape(count, -1)
            elif output.name == TOKENS_OUTPUT:
                tokens = int(to_numpy(raw, output.datatype, output.shape).sum())
    except (InvalidRequest, ValueError) as error:
        raise EngineError(f"the model's response does not have one vector per text: {error}") from None
    if vectors is None or vectors.shape[1] == 0:
        raise EngineError("the model's response has no vectors")
    return vectors, tokens


def shorten(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Return the first `dimensions` of each vector, normalized again. Raises InvalidRequest if there are fewer."""
    if dimensions > vectors.shape[1]:
        raise InvalidRequest(
            f"'dimensions' is {dimensions}; the vectors of this model have {vectors.shape[1]}", param="dimensions"
        )
    cut = vectors[:, :dimensions]
    norms = np.linalg.norm(cut, axis=1, keepdims=True)
    unit: NDArray[np.float32] = (cut / np.where(norms > 0, norms, 1)).astype(np.float32)
    return unit


def base64_of(row: NDArray[np.float32]) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
