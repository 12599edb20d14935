"""Tokens of a language model over KServe tensors: in requests and in responses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import FinishReason
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import encode_bytes
from dynamo.frontend.api.kserve.text import to_text_requests
from dynamo.frontend.api.kserve.text_responses import TextResponses
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from tests.support.http_edge import Speaker, chat_card, open_http_edge, tokens_of

CARD = chat_card()


def texts(request: ModelInferRequest) -> list[TextRequest]:
    return to_text_requests(TensorRequest.parse(request.SerializeToString()), CARD)


def responses_for(request: ModelInferRequest) -> TextResponses:
    return TextResponses(TensorRequest.parse(request.SerializeToString()), CARD, texts(request))


def tokens_request(
    datatype: str = "INT64", tokens: Sequence[int] = (72, 105), shape: Sequence[int] = (), **outputs: str
) -> ModelInferRequest:
    request = ModelInferRequest(model_name="talker")
    request.inputs.add(name="token_ids", datatype=datatype, shape=list(shape) or [len(tokens)])
    request.raw_input_contents.append(np.array(tokens, "f4" if datatype == "FP32" else datatype.lower()).tobytes())
    for name in outputs.values():
        request.outputs.add(name=name)
    return request


@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT32", "UINT16"])
def test_the_tokens_of_a_prompt_are_a_prompt(datatype: str) -> None:
    for shape in ([2], [1, 2]):
        [text] = texts(tokens_request(datatype, shape=shape))
        assert list(text.prompt or ()) == [72, 105]


def test_tokens_come_back_as_int32_with_the_one_that_ended_them() -> None:
    request = tokens_request(first="token_ids", second="finish_reason")
    gathered = (responses := responses_for(request)).gather()
    gathered.add(0, [TextDelta(0, "a", (97,)), TextDelta(0, "", (98, 99), FinishReason.STOP, stop_token=7)])
    response = ModelInferResponse.FromString(responses.complete(gathered))
    assert [(output.name, output.datatype, list(output.shape)) for output in response.outputs] == [
        ("token_ids", "INT32", [4]),
        ("finish_reason", "BYTES", [1]),
    ]
    assert np.frombuffer(response.raw_output_contents[0], "<i4").tolist() == [97, 98, 99, 7]
    step = ModelInferResponse.FromString(responses.delta([TextDelta(0, "a", (97,))]))
    assert np.frombuffer(step.raw_output_contents[0], "<i4").tolist() == [97]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (tokens_request("FP32"), "must be that of integers"),
        (tokens_request(tokens=[1], shape=[10**6]), "the model's context has 4096 tokens"),
        (tokens_request(tokens=[], shape=[0]), "must be \\[n\\] or \\[1, n\\]"),
        (tokens_request(tokens=[1, 2, 3, 4], shape=[2, 2]), "must be \\[n\\] or \\[1, n\\]"),
    ],
)
def test_wrong_tokens_are_refused(request_: ModelInferRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        texts(request_)


def test_tokens_are_those_of_one_prompt_and_one_choice() -> None:
    both = tokens_request()
    both.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    both.raw_input_contents.append(encode_bytes([b"x"]))
    with pytest.raises(InvalidRequest, match="beside a text"):
        texts(both)
    several = tokens_request(only="token_ids")
    several.parameters["n"].int64_param = 2
    with pytest.raises(InvalidRequest, match="one prompt and one choice"):
        texts(several)


async def test_tokens_go_in_and_come_out_over_rest() -> None:
    speaker = Speaker()
    request = {
        "inputs": [{"name": "token_ids", "datatype": "INT64", "shape": [2], "data": list(tokens_of("Hi"))}],
        "parameters": {"max_tokens": 20},
        "outputs": [{"name": "token_ids"}],
    }
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post("/v2/models/talker/infer", request)
        request["inputs"][0]["data"] = [-1, 2]  # type: ignore[index]
        wrong = await edge.post("/v2/models/talker/infer", request)
    assert response.status_code == 200, response.text
    [output] = response.json()["outputs"]
    assert (output["name"], output["datatype"], output["data"]) == ("token_ids", "INT32", list(tokens_of("Hello you")))
    assert list(speaker.last.tokens) == list(tokens_of("Hi"))
    assert wrong.status_code == 400 and "vocabulary" in wrong.json()["error"]
