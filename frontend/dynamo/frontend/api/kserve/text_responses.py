"""Text deltas of language models as responses over KServe tensors; `text` has the requests.

Outputs are `text_output`, `finish_reason` (empty until a completion choice ends) and, if requested, `logprobs`: BYTES, one
element per choice, in the order of the prompts. A `logprobs` element is JSON: for each token an array of [token id, log
probability], the chosen token first. `token_ids` is INT32: the tokens of the one choice, with the one that ended it. Responses
have raw or typed contents as their request has.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.common.generation import FinishReason
from dynamo.common.model_card import ModelCard
from dynamo.common.tensors.protobuf_wire import delimited, tag, varint
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import encode_bytes
from dynamo.frontend.api.http.json_pieces import JsonArray
from dynamo.frontend.api.kserve.text import IDS, OUTPUTS
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.protos.inference_pb2 import InferParameter, ModelInferResponse, ModelStreamInferResponse

OutputTensor = ModelInferResponse.InferOutputTensor

_NAME = tag(ModelInferResponse, "model_name")
_VERSION = tag(ModelInferResponse, "model_version")
_ID = tag(ModelInferResponse, "id")
_PARAMETER = tag(ModelInferResponse, "parameters")
_OUTPUT = tag(ModelInferResponse, "outputs")
_RAW = tag(ModelInferResponse, "raw_output_contents")
_INFER_RESPONSE = tag(ModelStreamInferResponse, "infer_response")
_u32 = struct.Struct("<I").pack

_REASON: Mapping[FinishReason | None, bytes] = {None: b"", **{reason: reason.value.encode() for reason in FinishReason}}
_RAW_REASON = {reason: delimited(_RAW, encode_bytes([text])) for reason, text in _REASON.items()}


def _final_parameter(final: bool) -> bytes:
    parameter = delimited(b"\x0a", b"triton_final_response") + delimited(
        b"\x12", InferParameter(bool_param=final).SerializeToString()
    )
    return delimited(_PARAMETER, parameter)  # an entry of a map is a message with the key as field 1, the value as field 2


_FINAL = {True: _final_parameter(True), False: _final_parameter(False), None: b""}


class TextResponses:
    """Serializes the responses to one request. What is the same in all of them is encoded once.

    A response takes any number of deltas: their text is joined, one element per completion choice. `final` adds the parameter
    `triton_final_response` with that value; None omits it.
    """

    __slots__ = ("_choices", "_described", "_has_tokens", "_is_plain", "_n", "_names", "_prefix", "_raw_head")

    def __init__(self, request: TensorRequest, card: ModelCard, texts: Sequence[TextRequest]) -> None:
        """`texts` are the text requests made from `request`."""
        head = request.head
        self._n = texts[0].n
        self._choices = self._n * len(texts)
        usual = OUTPUTS if texts[0].logprobs is not None else OUTPUTS[:2]
        self._names = tuple(output.name for output in head.outputs) or usual
        self._prefix = (
            delimited(_NAME, head.model_name.encode())
            + delimited(_VERSION, (head.model_version or card.versions[-1]).encode())
            + (delimited(_ID, head.id.encode()) if head.id else b"")
        )
        outputs = [OutputTensor(name=name, datatype="BYTES", shape=(self._choices,)) for name in self._names]
        self._described = [output.SerializeToString() for output in outputs]
        self._has_tokens = IDS in self._names
        self._is_plain = self._choices == 1 and self._names == OUTPUTS[:2]
        """One choice and the default outputs: everything but the text and its size is encoded in advance."""
        self._raw_head = self._prefix + b"".join(delimited(_OUTPUT, described) for described in self._described)

    def stream_delta(self, deltas: Sequence[TextDelta], *, prompt: int = 0, final: bool | None = None) -> bytes:
        """Return a serialized ModelStreamInferResponse with deltas of the prompt at the position `prompt`."""
        delta = self.delta(deltas, prompt=prompt, final=final)
        return _INFER_RESPONSE + varint(len(delta)) + delta

    def delta(self, deltas: Sequence[TextDelta], *, prompt: int = 0, final: bool | None = None) -> bytes:
        """Return `stream_delta` as a ModelInferResponse."""
        if not self._is_plain:
            texts = self.gather()
            texts.add(prompt, deltas)
            return self.complete(texts, final=final)
        reason: FinishReason | None = None
        for delta in deltas:
            reason = delta.finish_reason or reason
        text = "".join([delta.text for delta in deltas]).encode()
        size = len(text)
        return b"".join((self._raw_head, _FINAL[final], _RAW, varint(size + 4), _u32(size), text, _RAW_REASON[reason]))

    def gather(self) -> GatheredTexts:
        """Return what takes the deltas of all prompts, as they come, until the response is complete."""
        return GatheredTexts(self._choices, self._n, keeps_tokens=self._has_tokens)

    def stream_complete(self, texts: GatheredTexts, *, final: bool | None = None) -> bytes:
        """Return `complete` as a ModelStreamInferResponse."""
        pieces = self._pieces(texts, final)
        return b"".join((_INFER_RESPONSE, varint(sum(map(len, pieces))), *pieces))

    def complete(self, texts: GatheredTexts, *, final: bool | None = None) -> bytes:
        """Return one ModelInferResponse with all that was gathered."""
        return b"".join(self._pieces(texts, final))

    def _pieces(self, texts: GatheredTexts, final: bool | None) -> list[bytes]:
        """Return the pieces of a ModelInferResponse, which are joined once: they may be long."""
        tokens = texts.tokens if self._has_tokens else b""
        pieces = [self._prefix, _FINAL[final]]
        for name, described in zip(self._names, self._described, strict=True):
            pieces.append(delimited(_OUTPUT, _described_tokens(tokens) if name == IDS else described))
        for name in self._names:
            if name == IDS:
                pieces += (_RAW, varint(len(tokens)), tokens)
                continue
            elements: list[bytes] = []
            for choice in texts.choices:
                element = choice.element(name)
                elements += (_u32(sum(map(len, element))), *element)
            pieces += (_RAW, varint(sum(map(len, elements))), *elements)
        return pieces


def _described_tokens(tokens: bytes) -> bytes:
    return OutputTensor(name=IDS, datatype="INT32", shape=(len(tokens) // 4,)).SerializeToString()


class GatheredTexts:
    """The completion choices of all prompts of a request, as far as their deltas have come."""

    __slots__ = ("_n", "_tokens", "choices")

    def __init__(self, choices: int, n: int, *, keeps_tokens: bool = False) -> None:
        self._n = n
        self._tokens = array("i") if keeps_tokens else None
        self.choices = [_ChoiceParts() for _ in range(choices)]

    @property
    def tokens(self) -> bytes:
        """The tokens of the only choice, little-endian."""
        tokens = self._tokens or array("i")
        if sys.byteorder == "big":
            tokens = tokens[:]
            tokens.byteswap()
        return tokens.tobytes()

    def add(self, prompt: int, deltas: Sequence[TextDelta]) -> None:
        """Add deltas of the prompt at the position `prompt`."""
        for delta in deltas:
            self.choices[prompt * self._n + delta.index].add(delta)
            if self._tokens is not None:
                self._tokens.extend(delta.tokens)
                if delta.stop_token is not None:
                    self._tokens.append(delta.stop_token)


class _ChoiceParts:
    """Collects what deltas add to one completion choice."""

    __slots__ = ("_logprobs", "_reason", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reason: FinishReason | None = None
        self._logprobs = JsonArray()

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._reason = delta.finish_reason or self._reason
        if delta.logprobs:
            self._logprobs.extend(msgspec.json.encode(delta.logprobs))

    def element(self, output: str) -> list[bytes]:
        """Return the element of this choice in an output, in pieces."""
        if output == "text_output":
            return ["".join(self._texts).encode()]
        if output == "finish_reason":
            return [_REASON[self._reason]]
        return self._logprobs.pieces()
