from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dynamo.common.errors import InvalidRequest
from dynamo.common.process.work import finish
from dynamo.common.tensors.tensors import (
    DATATYPES,
    bf16_to_float32,
    bytes_array,
    check_bytes,
    decode_bytes,
    element_count,
    encode_bytes,
    encode_bytes_in_steps,
    float32_to_bf16,
    from_numpy,
    takes_long_to_encode,
    to_numpy,
    typed_to_raw,
)
from dynamo.protos.inference_pb2 import InferTensorContents

FIXED = [name for name, kind in DATATYPES.items() if kind.size]
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def arrays(datatype: str) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(DATATYPES[datatype].dtype, shapes)


@pytest.mark.parametrize("datatype", FIXED)
@given(data=st.data())
def test_an_array_comes_back_bit_for_bit(datatype: str, data: st.DataObject) -> None:
    array = data.draw(arrays(datatype))
    name, raw = from_numpy(array, datatype)
    back = to_numpy(raw, name, array.shape)
    assert name == datatype
    assert len(raw) == array.size * DATATYPES[datatype].size
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_an_array_is_not_converted_to_another_type() -> None:
    with pytest.raises(InvalidRequest, match="an array of float64 is FP64 and cannot be sent as FP32"):
        from_numpy(np.ones(2), "FP32")


@pytest.mark.parametrize("datatype", [name for name in FIXED if DATATYPES[name].field])
@given(data=st.data())
def test_typed_contents_hold_the_same_bits_as_the_raw_form(datatype: str, data: st.DataObject) -> None:
    array = data.draw(arrays(datatype))
    raw = bytes(from_numpy(array)[1])
    contents = InferTensorContents()
    getattr(contents, DATATYPES[datatype].field).extend(array.ravel().tolist())
    if DATATYPES[datatype].dtype.kind == "f":
        np.testing.assert_array_equal(np.frombuffer(typed_to_raw(contents, datatype, array.size), array.dtype), array.ravel())
    else:
        assert typed_to_raw(contents, datatype, array.size) == raw


@given(st.lists(st.binary(max_size=40) | st.text(max_size=20)))
def test_bytes_elements_come_back_with_nul_bytes_and_unicode(elements: list[bytes | str]) -> None:
    expected = [element.encode() if isinstance(element, str) else element for element in elements]
    raw = encode_bytes(elements)
    assert decode_bytes(raw, len(elements)) == expected
    assert to_numpy(raw, "BYTES", (len(elements),)).tolist() == expected
    assert typed_to_raw(InferTensorContents(bytes_contents=expected), "BYTES", len(elements)) == raw


@given(st.integers(0, 40), st.integers(0, 9))
def test_equally_long_bytes_elements_are_read_as_any_others(count: int, length: int) -> None:
    elements = [bytes([index]) * length for index in range(count)]
    assert decode_bytes(encode_bytes(elements), count) == elements


@pytest.mark.parametrize("last", [b"", b"a", b"ab"])
def test_long_bytes_are_read_in_steps(last: bytes) -> None:
    elements = [b"a"] * 99_999 + [last]
    raw = encode_bytes(elements)
    assert finish(bytes_array(raw, len(elements))).tolist() == elements
    assert sum(1 for _ in bytes_array(raw, len(elements))) >= 10


def test_memory_is_taken_for_no_more_elements_than_there_can_be() -> None:
    with pytest.raises(InvalidRequest, match="has 3 BYTES elements where its shape needs"):
        to_numpy(bytes(12), "BYTES", (2**50,))


@given(st.binary(max_size=300), st.integers(0, 70))
def test_random_bytes_are_a_bytes_tensor_or_an_invalid_request(raw: bytes, count: int) -> None:
    try:
        elements = decode_bytes(raw, count)
    except InvalidRequest:
        with pytest.raises(InvalidRequest):
            finish(check_bytes(raw, count))
    else:
        finish(check_bytes(raw, count))
        assert encode_bytes(elements) == raw


@pytest.mark.parametrize(
    ("raw", "count", "sentence"),
    [
        (b"\x05\0\0\0abc", 1, "a tensor has a BYTES element 0 of 5 bytes, but only 3 bytes follow its length"),
        (b"\xff\xff\xff\xffabc", 1, "element 0 of 4294967295 bytes"),
        (b"\x01\0\0\0a\x01\0", 2, "a tensor ends inside the length of BYTES element 1"),
        (b"\x01\0\0\0a", 2, "a tensor has 1 BYTES elements where its shape needs 2"),
        (b"\x01\0\0\0ab", 1, "a tensor has 1 bytes left over after its 1 BYTES elements"),
        (b"\0\0\0\0" * 20, 19, "4 bytes left over"),
        (b"\0\0\0\0" * 19 + b"\1\0\0\0", 20, "element 19 of 1 bytes"),
    ],
)
def test_malformed_bytes_are_explained(raw: bytes, count: int, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        decode_bytes(raw, count)


def test_arrays_and_buffers_share_their_memory() -> None:
    array = np.arange(12, dtype=np.float32)
    raw = from_numpy(array)[1]
    assert np.shares_memory(array, np.frombuffer(raw, np.float32))
    back = to_numpy(raw, "FP32", (3, 4))
    assert np.shares_memory(array, back)
    assert not back.flags.writeable


def test_arrays_in_another_layout_or_byte_order_are_sent_in_the_right_one() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    assert bytes(from_numpy(array)[1]) == np.arange(6, dtype="<i4").tobytes()
    assert bytes(from_numpy(array.T)[1]) == np.array([0, 3, 1, 4, 2, 5], "<i4").tobytes()


def test_the_payload_of_a_nan_survives() -> None:
    bits = struct.pack("<I", 0x7FC12345)
    assert to_numpy(bits, "FP32", (1,)).tobytes() == bits


def test_text_arrays_become_bytes() -> None:
    assert from_numpy(np.array(["ä", "b"])) == ("BYTES", b"\x02\0\0\0\xc3\xa4\x01\0\0\0b")
    assert from_numpy(np.array(b"x")) == ("BYTES", b"\x01\0\0\0x")
    with pytest.raises(InvalidRequest, match="a BYTES element is a int"):
        from_numpy(np.array([1], object))


def test_a_bool_is_true_for_any_non_zero_byte() -> None:
    flags = to_numpy(b"\0\1\2\xff", "BOOL", (4,))
    assert flags.dtype == np.bool_
    assert flags.tolist() == [False, True, True, True]


@given(st.floats(width=32, allow_nan=False))
def test_bf16_is_the_nearest_value_with_eight_bits_of_precision(value: float) -> None:
    bits = float32_to_bf16(np.array(value, np.float32))
    back = float(bf16_to_float32(bits))
    if math.isinf(back):
        assert abs(value) >= 3.3895313892515355e38
    else:
        neighbours = [float(bf16_to_float32(np.array((int(bits) + step) & 0xFFFF, np.uint16))) for step in (-1, 1)]
        assert all(abs(back - value) <= abs(other - value) for other in neighbours if math.isfinite(other))


def test_bf16_keeps_nan_infinity_and_ties_to_even() -> None:
    values = np.array([0x7F800001, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000], np.uint32).view(np.float32)
    nan, *others = float32_to_bf16(values).tolist()
    assert math.isnan(bf16_to_float32(np.array(nan, np.uint16)))
    assert others == [0x7F80, 0xFF80, 0x3F80, 0x3F82]
    assert from_numpy(np.ones(1, np.float32), "BF16") == ("BF16", b"\x80\x3f")


@pytest.mark.parametrize(
    ("contents", "datatype", "count", "sentence"),
    [
        (InferTensorContents(uint_contents=[300]), "UINT8", 1, "x has the value 300 at 0, outside the range of UINT8"),
        (InferTensorContents(uint_contents=[1, 65536]), "UINT16", 2, "the value 65536 at 1"),
        (InferTensorContents(int_contents=[-129]), "INT8", 1, "the value -129"),
        (InferTensorContents(int_contents=[32768]), "INT16", 1, "the value 32768"),
        (InferTensorContents(int_contents=[1]), "FP32", 1, "x is FP32 and belongs in fp32_contents, not in int_contents"),
        (InferTensorContents(int_contents=[1], fp32_contents=[1]), "FP32", 1, "x fills int_contents and fp32_contents"),
        (InferTensorContents(fp32_contents=[1]), "FP32", 2, "x has 1 elements in its contents where its shape needs 2"),
        (InferTensorContents(), "FP32", 1, "x has 0 elements"),
        (InferTensorContents(fp32_contents=[1]), "FP16", 1, "x is FP16, which has no typed contents"),
        (InferTensorContents(), "FLOAT", 1, "x has the unknown datatype 'FLOAT'; expected one of BOOL"),
    ],
)
def test_typed_contents_that_do_not_fit_are_explained(
    contents: InferTensorContents, datatype: str, count: int, sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        typed_to_raw(contents, datatype, count, "x")


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ((2, -1), "the negative dimension -1"),
        ((2**62, 4), "overflows 64 bits"),
        ((2**62, 4, 0), "overflows 64 bits"),
        ((1,) * 17, "17 dimensions; at most 16"),
    ],
)
def test_a_shape_that_means_nothing_is_explained(shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        element_count(shape)


def test_scalars_and_empty_tensors_have_shapes_too() -> None:
    assert element_count(()) == 1
    assert element_count((3, 0)) == 0
    assert to_numpy(b"", "INT8", (3, 0)).shape == (3, 0)
    with pytest.raises(InvalidRequest, match=r"has 3 bytes where INT16 of shape \[2\] needs 4"):
        to_numpy(b"abc", "INT16", (2,))


@pytest.mark.parametrize("kind", ["O", "S", "U"])
def test_long_bytes_are_encoded_in_steps_as_at_once(kind: str) -> None:
    array = np.array([["", "a"], ["ä" if kind != "S" else "b", "abc"]] * 10_000, kind)
    steps = encode_bytes_in_steps(array)
    assert finish(encode_bytes_in_steps(array.T, "BYTES")) == from_numpy(array.T)
    assert sum(1 for _ in steps) >= 5
    with pytest.raises(InvalidRequest, match="cannot be sent as FP32"):
        finish(encode_bytes_in_steps(array, "FP32"))


def test_large_numbers_take_long_only_if_they_are_copied() -> None:
    array = np.zeros((1024, 2048), np.float32)
    assert not takes_long_to_encode(array, "FP32")
    assert takes_long_to_encode(array.T, "FP32")
    assert takes_long_to_encode(array, "BF16")
    assert not takes_long_to_encode(array[:100, :100], "FP32")
