"""POST /v1/embeddings

An embedding model is a tensor model: it takes texts as one BYTES tensor and gives vectors as one floating-point tensor with a row
for each text. A second output of a whole-number type, named `prompt_tokens`, may say how many tokens each text had.

    inputs:  {name: text,       datatype: BYTES, shape: [-1]}       or [-1, 1]
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
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import decode
from dynamo.frontend.api.openai.edge import Edge
from dynamo.frontend.api.openai.requests import EmbeddingRequest
from dynamo.frontend.api.openai.response_objects import Embedding, Embeddings, EmbeddingUsage
from dynamo.frontend.api.openai.to_text import prompts_of
from dynamo.frontend.api.text.rules import check_chars
from dynamo.frontend.metrics import RequestType
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse

TOKENS_OUTPUT = "prompt_tokens"
_FLOATS = frozenset(("FP16", "BF16", "FP32", "FP64"))


class EmbeddingsEndpoint:
    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._decoder = msgspec.json.Decoder(EmbeddingRequest)

    async def __call__(self, exchange: Exchange) -> None:
        caller = exchange.caller()
        request = decode(self._decoder, await exchange.body(), exchange.settings.max_json_depth)
        plane, limits = self._edge.plane, self._edge.limits
        card = plane.card(exchange.account, request.model)
        texts = _texts(request, limits.max_embedding_inputs)
        check_chars(sum(map(len, texts)), limits, "input")
        tensors = to_tensors(texts, request.model, card)
        call = caller.call(endpoint="embeddings", request_type=RequestType.UNARY)
        async with exchange.attended():
            answer = await plane.infer(tensors, call)
        vectors, tokens = from_tensors(bytes(answer), len(texts))
        call.account.charge(tokens)
        if request.dimensions is not None:
            vectors = shortened(vectors, request.dimensions)
        data = [
            Embedding(index=index, embedding=_base64(row) if request.encoding_format == "base64" else row.tolist())
            for index, row in enumerate(vectors)
        ]
        await exchange.answer(
            msgspec.json.encode(Embeddings(data=data, model=request.model, usage=EmbeddingUsage(tokens, tokens)))
        )


def _texts(request: EmbeddingRequest, most: int) -> list[str]:
    inputs = prompts_of(request.input, "input")
    if len(inputs) > most:
        raise InvalidRequest(f"there are {len(inputs)} texts; at most {most} are taken", param="input")
    texts = [text for text in inputs if isinstance(text, str)]
    if len(texts) < len(inputs):
        raise InvalidRequest("the embedding models served here take texts, no token ids", param="input")
    if "" in texts:
        raise InvalidRequest("a text of 'input' is empty", param="input")
    return texts


def to_tensors(texts: Sequence[str], model: str, card: ModelCard) -> TensorRequest:
    """The question to an embedding model. Raises InvalidRequest if `card` is of another kind of model."""
    inputs = [spec for spec in card.inputs if not spec.optional]
    is_embedding = card.kind is ModelKind.EMBEDDING or (card.kind is ModelKind.TENSOR and _output(card) is not None)
    if not is_embedding or len(inputs) != 1 or inputs[0].datatype != "BYTES":
        raise InvalidRequest(f"model '{card.name}' makes no embeddings of texts", param="model")
    head = ModelInferRequest(model_name=model)
    rank = len(inputs[0].shape)
    head.inputs.add(name=inputs[0].name, datatype="BYTES", shape=[len(texts), *[1] * (rank - 1)])
    return TensorRequest.build(head, [encode_bytes(texts)])


def _output(card: ModelCard) -> TensorSpec | None:
    return next((spec for spec in card.outputs if spec.datatype in _FLOATS), None)


def from_tensors(answer: bytes, count: int) -> tuple[NDArray[np.float32], int]:
    """One vector per text, and how many tokens the texts had; 0 if the model does not say. Raises EngineError."""
    try:
        response = ModelInferResponse.FromString(answer)
    except DecodeError:
        raise EngineError("the model's answer cannot be read") from None
    vectors: NDArray[np.float32] | None = None
    tokens = 0
    try:
        for at, output in enumerate(response.outputs):
            is_raw = at < len(response.raw_output_contents)
            elements = element_count(output.shape)
            raw = response.raw_output_contents[at] if is_raw else typed_to_raw(output.contents, output.datatype, elements)
            if output.datatype in _FLOATS and vectors is None:
                array = to_numpy(raw, output.datatype, output.shape)
                floats = bf16_to_float32(array) if output.datatype == "BF16" and array.dtype == np.uint16 else array
                vectors = floats.astype(np.float32).reshape(count, -1)
            elif output.name == TOKENS_OUTPUT:
                tokens = int(to_numpy(raw, output.datatype, output.shape).sum())
    except (InvalidRequest, ValueError) as error:
        raise EngineError(f"the model's answer is no vector for each text: {error}") from None
    if vectors is None or vectors.shape[1] == 0:
        raise EngineError("the model gave no vectors")
    return vectors, tokens


def shortened(vectors: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """The first `dimensions` of each vector, of length 1 again. Raises InvalidRequest if there are fewer."""
    if dimensions > vectors.shape[1]:
        raise InvalidRequest(
            f"'dimensions' is {dimensions}; the vectors of this model have {vectors.shape[1]}", param="dimensions"
        )
    cut = vectors[:, :dimensions]
    norms = np.linalg.norm(cut, axis=1, keepdims=True)
    unit: NDArray[np.float32] = (cut / np.where(norms > 0, norms, 1)).astype(np.float32)
    return unit


def _base64(row: NDArray[np.float32]) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
