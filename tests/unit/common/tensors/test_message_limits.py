"""Limits on the parts of protobuf messages, checked before anything is parsed."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import DynamoError, InvalidRequest, PayloadTooLarge
from dynamo.common.tensors.check import RequestChecker
from dynamo.common.tensors.message_limits import MessageLimits, MessageScanner, parse_message
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import check_contents, datatype_named
from dynamo.protos import inference_pb2 as pb
from tests.support.fakes import tensor_card
from tests.support.wire import BOMBS

MIB = 2**20
SCANNER = MessageScanner(pb.ModelInferRequest)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_message_of_too_many_parts_is_refused_before_it_is_parsed(bomb: str) -> None:
    data = BOMBS[bomb]()
    started = time.thread_time()
    with pytest.raises(PayloadTooLarge):
        TensorRequest.parse(data, SCANNER)
    assert time.thread_time() - started < 0.2  # some 10 ms; parsing takes from one to eighty seconds


def test_who_sends_too_many_typed_strings_learns_how_to_send_them() -> None:
    request = pb.ModelInferRequest()
    request.inputs.add(contents=pb.InferTensorContents(bytes_contents=[b"x"] * 200_000))
    with pytest.raises(PayloadTooLarge, match=r"more than 131072 fields; .*raw_input_contents"):
        TensorRequest.parse(request.SerializeToString(), SCANNER)


def test_the_limits_hold_exactly() -> None:
    scanner = MessageScanner(pb.ModelInferRequest, MessageLimits(max_message_fields=3, max_packed_integers=4, max_name_bytes=5))
    request = pb.ModelInferRequest(model_name="a" * 5)
    request.inputs.add(shape=[1, 1, 1, 300])
    scanner.check(request.SerializeToString())
    for change in (
        lambda r: setattr(r, "model_name", "a" * 6),
        lambda r: r.inputs[0].shape.append(1),
        lambda r: setattr(r, "id", "x"),
        lambda r: r.inputs[0].contents.int_contents.append(1),
    ):
        changed = pb.ModelInferRequest()
        changed.CopyFrom(request)
        change(changed)
        with pytest.raises(PayloadTooLarge):
            scanner.check(changed.SerializeToString())


def test_large_typed_floats_and_parameters_are_accepted() -> None:
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", shape=[MIB]).contents.fp32_contents.extend(np.zeros(MIB).tolist())
    request.parameters["text"].string_param = "a" * MIB
    assert TensorRequest.parse(request.SerializeToString(), SCANNER).head == request


def test_all_but_raw_tensors_has_a_bound_in_bytes_that_is_checked_before_it_is_parsed() -> None:
    scanner = MessageScanner(pb.ModelInferRequest, MessageLimits(max_typed_bytes=MIB))
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(4 * MIB)])
    request.inputs.add(name="x")
    parsed = TensorRequest.parse(request.SerializeToString(), scanner)
    assert [len(raw) for raw in parsed.raw_inputs] == [4 * MIB]
    for change in (
        lambda r: r.inputs[0].contents.fp32_contents.extend(np.zeros(MIB // 4).tolist()),
        lambda r: r.inputs[0].contents.bytes_contents.append(bytes(MIB)),
        lambda r: r.parameters["text"].MergeFrom(pb.InferParameter(string_param="a" * MIB)),
    ):
        changed = pb.ModelInferRequest()
        changed.CopyFrom(request)
        change(changed)
        with pytest.raises(PayloadTooLarge, match=r"apart from raw tensors, .* send tensors in raw_input_contents"):
            TensorRequest.parse(changed.SerializeToString(), scanner)


@given(st.binary(max_size=200))
def test_the_scan_accepts_what_the_parser_accepts_apart_from_groups(noise: bytes) -> None:
    scanner = MessageScanner(pb.ModelInferRequest)
    try:
        scanner.check(noise)
        accepted = True
    except (ValueError, IndexError):
        accepted = False
    try:
        pb.ModelInferRequest.FromString(noise)
    except Exception:
        return
    has_group = not accepted and any(octet & 7 in (3, 4) for octet in noise)
    assert accepted or has_group


@given(st.binary(max_size=200))
def test_noise_is_parsed_or_refused(noise: bytes) -> None:
    try:
        parse_message(pb.RepositoryModelLoadRequest, noise * 200)
    except DynamoError as error:
        assert isinstance(error, InvalidRequest)


def test_range_checks_of_many_elements_name_the_first_wrong_one() -> None:
    values = [1] * 100_000
    values[70_000] = 300
    contents = pb.InferTensorContents(uint_contents=values)
    with pytest.raises(InvalidRequest, match="a tensor has the value 300 at 70000, outside the range of UINT8"):
        check_contents(contents, datatype_named("UINT8"), len(values))


def test_only_checks_of_many_elements_are_slow() -> None:
    checker = RequestChecker(tensor_card())
    small = TensorRequest.build(pb.ModelInferRequest(), [bytes(10)])
    large = TensorRequest.build(pb.ModelInferRequest(), [bytes(MIB)])
    typed = TensorRequest(bytes(MIB), pb.ModelInferRequest(), ())
    assert [checker.is_slow(request) for request in (small, large, typed)] == [False, False, True]
