"""Tokens of the texts that a tensor model reads, such as one that embeds texts: only the model can count them.

It says so by an output `prompt_tokens`, with an integer per text. Until it has, a request's size is the estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard, TensorSpec
from dynamo.common.tensors.request import parse_response
from dynamo.common.tensors.tensors import FLOATS, Buffer, element_count, to_numpy, typed_to_raw
from dynamo.protos.inference_pb2 import ModelInferResponse

BYTES_PER_TOKEN = 4
"""In a text about as many characters, and in ids of INT32 just as many bytes."""
_TOKENS_OUTPUT = "prompt_tokens"


def counts_tokens(card: ModelCard) -> bool:
    """Whether the model says how many tokens it read for its numbers, as far as its declaration says.

    One that returns tokens without numbers made of them, as a tokenizer does, may call them what it likes.
    """
    return any(map(_is_count, card.outputs)) and any(spec.datatype in FLOATS for spec in card.outputs)


def _is_count(output: ModelInferResponse.InferOutputTensor | TensorSpec) -> bool:
    return output.name == _TOKENS_OUTPUT and "INT" in output.datatype


def tokens_of(encoded: Buffer) -> int:
    """Return how many tokens the texts of a request have, as its ModelInferResponse says; 0: it does not. Raises EngineError."""
    return tokens_in(*parse_response(encoded))


def tokens_in(head: ModelInferResponse, raws: Sequence[Buffer]) -> int:
    """As `tokens_of`, for a response that was parsed."""
    try:
        for index, output in enumerate(head.outputs):
            if _is_count(output) and (index < len(raws) or output.HasField("contents")):
                elements = element_count(output.shape)
                raw = raws[index] if index < len(raws) else typed_to_raw(output.contents, output.datatype, elements)
                return max(0, int(to_numpy(raw, output.datatype, (elements,)).sum()))
    except (InvalidRequest, ValueError) as error:
        raise EngineError(f"the model's response does not say how many tokens its texts have: {error}") from None
    return 0
