from __future__ import annotations

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.errors import EngineError
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import encode_bytes
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.security.accounts import KeyAccount
from dynamo.frontend.security.keys import ApiKey, Limits
from dynamo.frontend.security.ledger import Ledger
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import open_data_plane
from dynamo.frontend.serving.prompt_tokens import counts_tokens, tokens_of
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, FakeStream, FakeTexts, RecordingRouter, instance
from tests.support.plane import infer, infer_stream

TEXT = TensorSpec(name="text", datatype="BYTES", shape=(-1,))
VECTOR = TensorSpec(name="embedding", datatype="FP32", shape=(-1, 2))
COUNT = TensorSpec(name="prompt_tokens", datatype="INT32", shape=(-1,))
WORDS = TensorSpec(name="prompt_tokens", datatype="BYTES", shape=(-1,))


def card(*outputs: TensorSpec) -> ModelCard:
    return ModelCard(name="embedder", kind=ModelKind.TENSOR, inputs=(TEXT,), outputs=outputs)


def response(*counts: int) -> bytes:
    """Return the response for texts with so many tokens; without any, the model does not say."""
    message = ModelInferResponse(model_name="embedder")
    message.outputs.add(name="embedding", datatype="FP32", shape=[1, 2])
    message.raw_output_contents.append(bytes(8))
    if counts:
        message.outputs.add(name="prompt_tokens", datatype="INT32", shape=[len(counts)])
        message.raw_output_contents.append(np.array(counts, np.int32).tobytes())
    return message.SerializeToString()


def request() -> TensorRequest:
    head = ModelInferRequest(model_name="embedder")
    head.inputs.add(name="text", datatype="BYTES", shape=[1])
    return TensorRequest.build(head, [encode_bytes(["a" * 400])])


ESTIMATE = 1 + len(request().raw) // 4


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [((VECTOR, COUNT), True), ((VECTOR,), False), ((COUNT,), False), ((VECTOR, WORDS), False)],
    ids=["numbers and tokens", "numbers alone", "a tokenizer", "texts of that name"],
)
def test_a_model_counts_tokens_if_it_declares_them_beside_its_numbers(outputs: tuple[TensorSpec, ...], expected: bool) -> None:
    assert counts_tokens(card(*outputs)) is expected


def test_the_tokens_of_all_texts_are_added() -> None:
    assert tokens_of(response(7, 5)) == 12
    assert tokens_of(response()) == 0


def test_an_output_that_is_not_in_the_message_says_nothing() -> None:
    message = ModelInferResponse(model_name="embedder")
    message.outputs.add(name="prompt_tokens", datatype="INT32", shape=[1]).parameters["shared_memory_region"].string_param = "r"
    assert tokens_of(message.SerializeToString()) == 0


def test_counts_that_do_not_fit_their_shape_are_an_error_of_the_engine() -> None:
    message = ModelInferResponse.FromString(response(7, 5))
    message.outputs[1].shape[0] = 3
    with pytest.raises(EngineError, match="how many tokens"):
        tokens_of(message.SerializeToString())


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("outputs", "counts", "charged"),
    [((VECTOR, COUNT), (7, 5), 12), ((VECTOR, COUNT), (), ESTIMATE), ((VECTOR,), (7, 5), 0)],
    ids=["counted", "not requested", "not declared"],
)
async def test_a_tensor_request_is_charged_as_the_model_counts(
    outputs: tuple[TensorSpec, ...], counts: tuple[int, ...], charged: int, *, is_stream: bool
) -> None:
    ledger, limits = Ledger(), Limits(tokens_per_minute=10_000)
    account = KeyAccount(ApiKey(name="team", salt=b"", digest=b"", limits=limits), lambda: 0.0, ledger=ledger)
    call = Call(account=account, request_id="r")

    def respond(stream: FakeStream) -> None:
        stream.end(response(*counts))

    directory, metrics = FakeDirectory(instance(1, card(*outputs))), FrontendMetrics(CollectorRegistry())
    async with open_data_plane(directory, FakeClient(respond), FakeLink(), RecordingRouter(), FakeTexts(), metrics) as plane:
        if is_stream:
            async with infer_stream(plane, request(), call) as responses:
                await responses.read()
        else:
            await infer(plane, request(), call)
    [row] = ledger.rows(ledger.today())
    assert row.prompt_tokens == charged
    assert [limit.remaining for limit in account.rate_limits()] == [10_000 - charged]


async def test_an_estimate_of_the_protocol_comes_before_one_by_size() -> None:
    account = KeyAccount(ApiKey(name="team", salt=b"", digest=b"", limits=Limits(tokens_per_minute=10_000)), lambda: 0.0)
    call = msgspec.structs.replace(Call(account=account, request_id="r"), expected_tokens=3)
    directory, metrics = FakeDirectory(instance(1, card(VECTOR, COUNT))), FrontendMetrics(CollectorRegistry())
    client = FakeClient(lambda stream: stream.end(response()))
    async with open_data_plane(directory, client, FakeLink(), RecordingRouter(), FakeTexts(), metrics) as plane:
        await infer(plane, request(), call)
    assert [limit.remaining for limit in account.rate_limits()] == [9_997]
