"""A request that is found has the same parts as when it is parsed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.check import RequestChecker
from dynamo.common.tensors.known_heads import KnownHeads, PerHead
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import Buffer
from dynamo.protos.inference_pb2 import ModelInferRequest


def message(elements: bytes, *, model: str = "echo", id: str = "", shape: Sequence[int] | None = None) -> bytes:
    request = ModelInferRequest(model_name=model, id=id, raw_input_contents=[elements])
    request.inputs.add(name="A", datatype="UINT8", shape=[len(elements)] if shape is None else shape)
    return request.SerializeToString()


GROUP = b"\xa3\x06\xa4\x06"
"""An unknown field of the kind that protobuf has deprecated: where it begins, and where it ends."""


def received(heads: KnownHeads, data: Buffer) -> tuple[TensorRequest, bool]:
    """Return a request as a server reads it, and whether its head was known."""
    known = heads.find(data)
    if known is not None:
        return known, True
    request = TensorRequest.parse(data)
    heads.add(request)
    return request, False


@pytest.mark.parametrize("size", [1, 64, 70_000])
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_a_head_is_known_from_its_third_request_on(size: int, kind: type[bytes] | type[memoryview]) -> None:
    heads = KnownHeads()
    requests = [received(heads, kind(message(bytes((number,)) * size))) for number in range(4)]
    assert [is_known for _, is_known in requests] == [False, False, True, True]
    for number, (request, _) in enumerate(requests):
        assert request.head == requests[0][0].head
        assert [bytes(raw) for raw in request.raw_inputs] == [bytes((number,)) * size]
    assert requests[2][0].head is requests[3][0].head


MESSAGES = st.builds(
    lambda elements, model, id, rows: message(elements, model=model, id=id, shape=[rows, len(elements)]),
    st.binary(min_size=1, max_size=3),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["", "x", "y"]),
    st.integers(1, 2),
)
TWISTED = st.builds(
    lambda first, second: first + second,  # a message after which the fields of another one follow
    MESSAGES,
    st.sampled_from([b"", message(b"abc"), GROUP, ModelInferRequest(id="zzz").SerializeToString()]),
)


@given(st.lists(TWISTED, max_size=30))
def test_what_is_found_is_what_would_have_been_parsed(messages: list[bytes]) -> None:
    heads = KnownHeads()
    for data in [one for one in messages for _ in range(3)]:
        request, _ = received(heads, data)
        parsed = TensorRequest.parse(data)
        assert request.head == parsed.head
        assert list(request.raw_inputs) == list(parsed.raw_inputs)


def test_a_request_with_an_unknown_group_is_parsed_each_time() -> None:
    heads = KnownHeads()
    requests = [received(heads, GROUP + message(b"abc")) for _ in range(4)]
    assert [is_known for _, is_known in requests] == [False] * 4
    assert [bytes(raw) for request, _ in requests for raw in request.raw_inputs] == [b"abc"] * 4


def test_requests_that_differ_in_ids_or_parameters_are_not_remembered() -> None:
    heads = KnownHeads()
    assert not any(received(heads, message(b"abc", id=f"{number:04}"))[1] for number in range(10))
    request = ModelInferRequest(model_name="echo", raw_input_contents=[b"abc"])
    request.inputs.add(name="A", datatype="UINT8", shape=[3])
    request.parameters["sequence_id"].int64_param = 7
    assert not any(received(heads, request.SerializeToString())[1] for _ in range(10))


def test_a_known_head_is_checked_against_each_model_card() -> None:
    def card(*shape: int) -> ModelCard:
        return ModelCard(name="echo", kind=ModelKind.TENSOR, inputs=(TensorSpec(name="A", datatype="UINT8", shape=shape),))

    heads, checker = KnownHeads(), RequestChecker(card(-1))
    for _ in range(4):
        request, _ = received(heads, message(b"abc"))
        checker.check(request)
    with pytest.raises(InvalidRequest, match="unexpected shape"):
        RequestChecker(card(4)).check(request)


def test_what_depends_on_the_head_is_computed_once_per_known_head() -> None:
    heads = KnownHeads()
    computed: list[str] = []

    def compute(request: TensorRequest) -> str:
        computed.append(request.head.model_name)
        return request.head.model_name

    names = PerHead(compute)
    for model in ("a", "b", "a"):
        for _ in range(5):
            assert names.of(received(heads, message(b"abc", model=model))[0]) == model
    assert computed == ["a"] * 3 + ["b"] * 3, "twice before a head is known, and once for all requests with it"
