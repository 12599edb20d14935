"""Long requests and responses of KServe in JSON: read and written in short steps, and counted before memory is taken for them."""

from __future__ import annotations

import base64
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import EngineError, InvalidRequest, PayloadTooLarge
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.process.work import Work, finish
from dynamo.common.tensors.tensors import datatype_named, decode_bytes, encode_bytes
from dynamo.frontend.api.kserve.rest.bodies import split
from dynamo.frontend.api.kserve.rest.elements import json_pieces
from dynamo.frontend.api.kserve.rest.generate_requests import read_generate
from dynamo.frontend.api.kserve.rest.long_arrays import PIECE_BYTES
from dynamo.frontend.api.kserve.rest.long_strings import escaped, unescaped
from dynamo.frontend.api.kserve.rest.long_tensors import long_tensor
from dynamo.frontend.api.kserve.rest.requests import read_request
from dynamo.frontend.api.openai.pooling.vectors import from_tensors, rows_to_json
from dynamo.frontend.api.openai.response_objects import Embedding
from dynamo.frontend.config import HttpOptions
from dynamo.protos import inference_pb2 as pb
from tests.support.held import slowness

MIB = 2**20
CARD = ModelCard(name="m", kind=ModelKind.TENSOR, inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1,)),))
BOUNDS = HttpOptions()
MAX_STEP_S = 0.05
"""CPU time of a step. None of the steps below takes half of it."""
ALLOWED_BYTES = 4 * MIB
"""Taken beside what is counted: what one step needs."""
TYPES = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}


def request(datatype: str, count: int, data: bytes, more: bytes = b"") -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"%b","shape":[%d],"data":%b}]%b}' % (datatype.encode(), count, data, more)


def array_of(item: bytes, size: int) -> tuple[int, bytes]:
    count = size // (len(item) + 1)
    return count, b"[" + item + (b"," + item) * (count - 1) + b"]"


def tensor_of(datatype: str, item: bytes, size: int = 2 * MIB) -> bytes:
    return request(datatype, *array_of(item, size))


def reading(body: bytes) -> Work[object]:
    return read_request(split(body, None, len(body)), CARD, "m", "", BOUNDS)


def generating(body: bytes) -> Work[object]:
    return read_generate(body, CARD, "m", "", BOUNDS)


def writing(datatype: str, raw: bytes, count: int) -> Work[object]:
    return json_pieces(raw, datatype, [count], "y")


def embedding(rows: int, width: int, datatype: str = "FP32", *, packed: bool = False) -> Work[object]:
    response = pb.ModelInferResponse()
    response.outputs.add(name="v", datatype=datatype, shape=[rows, width])
    response.raw_output_contents.append(np.linspace(0, 1, rows * width, dtype=TYPES[datatype]).tobytes())
    return embedded(response.SerializeToString(), rows, packed=packed)


def embedded(response: bytes, rows: int, *, packed: bool) -> Work[object]:
    vectors, _ = yield from from_tensors(response, rows)
    return (yield from rows_to_json(vectors, lambda index, row: Embedding(index=index, embedding=row), packed=packed))


WORK: dict[str, Callable[[], Work[object]]] = {
    "short numbers": lambda: reading(tensor_of("FP32", b"1")),
    "long numbers": lambda: reading(tensor_of("FP64", b"0.10000000149011612")),
    "numbers at the end of the range": lambda: reading(tensor_of("FP64", b"1.7976931348623157e308")),
    "words for numbers": lambda: reading(tensor_of("FP32", b"NaN")),
    "integers": lambda: reading(tensor_of("UINT64", b"18446744073709551615")),
    "flags": lambda: reading(tensor_of("BOOL", b"true")),
    "short strings": lambda: reading(tensor_of("BYTES", b'""', MIB)),
    "a long string": lambda: reading(request("BYTES", 1, b'["' + b"\\n" * (4 * MIB) + b'"]')),
    "a long string of text": lambda: reading(request("BYTES", 1, b'["' + "a\u00e9\u20ac".encode() * MIB + b'"]')),
    "many tensors": lambda: reading(
        b'{"inputs":[' + b",".join(tensor_of("FP32", b"1", 2000)[11:-2] for _ in range(1000)) + b"]}"
    ),
    "nested lists": lambda: reading(request("FP32", 1, b"[" * 16 + array_of(b"1", MIB)[1][1:-1] + b"]" * 16)),
    "white space": lambda: reading(request("FP32", 1, b"[" + b" " * (8 * MIB) + b"1]")),
    "white space after a number": lambda: reading(request("FP32", 1, b"[1" + b" " * (8 * MIB) + b"]")),
    "digits": lambda: reading(request("FP32", 1, b"[" + b"1" * (8 * MIB) + b"]")),
    "parameters": lambda: reading(b'{"inputs":[],"parameters":{' + b",".join(b'"%d":0' % key for key in range(60_000)) + b"}}"),
    "values that are no tensor": lambda: reading(b'{"inputs":[],"parameters":{"a":' + array_of(b"1e308", 3 * MIB)[1] + b"}}"),
    "words for numbers that are no tensor": lambda: reading(
        b'{"inputs":[NaN],"parameters":{"a":' + array_of(b"1", MIB)[1] + b"}}"
    ),
    "dimensions": lambda: reading(
        b'{"inputs":[{"name":"x","datatype":"FP32","data":[1],"shape":' + array_of(b"1", MIB)[1] + b"}]}"
    ),
    "outputs": lambda: reading(b'{"inputs":[],"outputs":[' + b",".join([b'{"name":"y"}'] * 50_000) + b"]}"),
    "a flat object": lambda: generating(b'{"x":' + array_of(b"1", 2 * MIB)[1] + b"}"),
    "a flat object of words": lambda: generating(b'{"x":' + array_of(b"NaN", 3 * MIB)[1] + b"}"),
    "an array among the parameters of a flat object": lambda: generating(b'{"parameters":{"x":' + array_of(b"1", MIB)[1] + b"}}"),
    "written floats": lambda: writing("FP64", np.linspace(0, 1, MIB).tobytes(), MIB),
    "written words": lambda: writing("FP32", np.full(MIB // 2, np.nan, "<f4").tobytes(), MIB // 2),
    "written flags": lambda: writing("BOOL", bytes(4 * MIB), 4 * MIB),
    "written strings": lambda: writing("BYTES", encode_bytes([b""] * 250_000), 250_000),
    "a written long string": lambda: writing("BYTES", encode_bytes([b"\n" * (8 * MIB)]), 1),
    "vectors": lambda: embedding(1024, 1024),
    "one long vector": lambda: embedding(1, MIB),
    "vectors in base64": lambda: embedding(1024, 1024, packed=True),
    "vectors of another type": lambda: embedding(1024, 1024, "FP16"),
}


def steps_of(work: Work[object]) -> Iterator[tuple[float, int]]:
    """The CPU time of each step, and the bytes that it asks for at its end. An error ends the work as a result does."""
    while True:
        began = time.thread_time()
        try:
            size = next(work)
        except (StopIteration, InvalidRequest):
            yield time.thread_time() - began, 0
            return
        yield time.thread_time() - began, size


@pytest.mark.parametrize("name", WORK)
def test_no_step_of_the_most_expensive_work_takes_long(name: str) -> None:
    bound_s = MAX_STEP_S
    for _ in range(2):  # a collection of garbage may fall into one
        longest_s = max(seconds for seconds, _ in steps_of(WORK[name]()))
        if longest_s >= bound_s:
            bound_s = MAX_STEP_S * slowness()
        if longest_s < bound_s:
            return
    pytest.fail(f"a step took {longest_s} s of CPU time; allowed are {bound_s} s")


OF_NO_SIZE = ("white space", "white space after a number", "digits")
MANY_OBJECTS = (
    *("short numbers", "short strings", "many tensors", "a flat object", "a flat object of words"),
    *("written words", "written strings", "vectors", "vectors of another type", "one long vector"),
)
"""Work that takes longest while memory is traced. Other work above reads and writes by the same functions."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in MANY_OBJECTS else []) for name in WORK if name not in OF_NO_SIZE],
)
def test_what_work_takes_is_counted_before(name: str) -> None:
    work = WORK[name]()
    asked = 0
    gc.collect()
    tracemalloc.start()
    try:
        for _, size in steps_of(work):
            assert tracemalloc.get_traced_memory()[0] <= asked + ALLOWED_BYTES
            asked += size
        assert tracemalloc.get_traced_memory()[1] <= asked + ALLOWED_BYTES
    finally:
        tracemalloc.stop()


def test_the_tensors_of_a_request_are_bounded_as_they_are_in_binary() -> None:
    bounds = HttpOptions(max_body_bytes=MIB)
    count, data = array_of(b"1", MIB)
    for datatype, is_allowed in (("INT8", True), ("UINT16", True), ("FP32", False), ("FP64", False)):
        work = read_request(split(request(datatype, count, data), None, 2 * MIB), CARD, "m", "", bounds)
        if is_allowed:
            finish(work)
        else:
            with pytest.raises(PayloadTooLarge, match=f"have {count * datatype_named(datatype).size} bytes in binary"):
                finish(work)


def test_the_json_beside_long_arrays_is_bounded_as_other_json_is() -> None:
    bounds = HttpOptions(max_json_bytes=MIB)
    body = request("FP32", *array_of(b"1", 2 * MIB), more=b',"id":"' + b"a" * MIB + b'"')
    with pytest.raises(PayloadTooLarge, match="bytes beside long arrays of data"):
        finish(read_request(split(body, None, len(body)), CARD, "m", "", bounds))


@pytest.mark.parametrize(
    ("extra", "sentence"), [(b"NaN", "numbers such as NaN"), (b'1,"id":1,"id":2', "members that may be there twice")]
)
def test_what_only_the_slow_decoder_reads_is_bounded_further(extra: bytes, sentence: str) -> None:
    body = b'{"inputs":[],"parameters":{"a":' + array_of(b"1", MIB)[1] + b',"b":' + extra + b"}}"
    with pytest.raises(InvalidRequest, match=sentence):
        finish(reading(body))


def test_a_flat_object_with_long_arrays_is_read_like_one_with_short_arrays() -> None:
    values = np.linspace(0, 1, 50_000).astype("<f4")
    body = json.dumps({"id": "a", "x": values.tolist(), "p": "[[1]]"}).encode()
    read = finish(read_generate(body, CARD, "m", "", BOUNDS)).request
    assert bytes(read.raw_inputs[0]) == values.tobytes()
    assert list(read.head.inputs[0].shape) == [50_000]
    assert (read.head.id, read.head.parameters["p"].string_param) == ("a", "[[1]]")
    message = pb.ModelInferRequest.FromString(bytes(read.raw))
    assert message.raw_input_contents[0] == values.tobytes()


def test_a_shape_cannot_stand_for_a_long_array() -> None:
    with pytest.raises(InvalidRequest, match="far too many dimensions; at most 16"):
        finish(WORK["dimensions"]())


# Strings


TEXTS = st.text(st.sampled_from('a\n\\"/\u00e9\u20ac\U0001f600\x00'), max_size=12)


@given(st.integers(0, 40), TEXTS, TEXTS, st.booleans())
def test_a_long_string_is_read_and_written_like_a_short_one(offset: int, middle: str, end: str, ascii_only: bool) -> None:
    text = "x" * (PIECE_BYTES - 20 - offset) + middle + end + middle + "y" * PIECE_BYTES
    string = json.dumps(text, ensure_ascii=ascii_only).encode()
    assert b"".join(unescaped(memoryview(string))) == text.encode()
    assert json.loads(b"".join(escaped(text.encode()))) == text


@pytest.mark.parametrize("wrong", [b'"\\', b"\\u12", b"\\ud83d", b"\\ude00", b"\xff", b'a"b', b"\n", b"\\ud83dx"])
@pytest.mark.parametrize("offset", range(0, 12, 3))
def test_a_long_string_that_is_none_is_refused(wrong: bytes, offset: int) -> None:
    data = b'["' + b"x" * (PIECE_BYTES - offset) + wrong + b'"]'
    with pytest.raises(InvalidRequest, match="data that is not JSON"):
        long_raw("BYTES", [1], data)


def long_raw(datatype: str, shape: list[int], data: bytes) -> bytes:
    return b"".join(finish(long_tensor(memoryview(data), datatype_named(datatype), shape, "x")).pieces)


def test_long_and_short_strings_may_be_mixed() -> None:
    texts = ["", "a" * 100_000, "b", "\u00e9" * 50_000, *["c"] * 20_001, "d" * 100_000]
    shape = [2, len(texts) // 2]
    nested = json.dumps([texts[: shape[1]], texts[shape[1] :]]).encode()
    for data in (json.dumps(texts).encode(), nested, nested.replace(b",", b" ,\n")):
        assert [text.decode() for text in decode_bytes(long_raw("BYTES", shape, data), len(texts))] == texts
    assert json.loads(b"".join(finish(json_pieces(encode_bytes(texts), "BYTES", shape, "y")))) == texts


def test_text_that_is_not_utf8_is_found_in_long_elements() -> None:
    for texts in ([b"a", b"b" * 40_000 + b"\xff"], [b"a", b"b" * 40_000 + b"\xe2\x82"]):
        with pytest.raises(InvalidRequest, match="is not UTF-8 at element 1; request it with 'binary_data'"):
            finish(json_pieces(encode_bytes(texts), "BYTES", [2], "y"))


@pytest.mark.parametrize("shape", [[3], [1], [2**40]])
def test_a_long_output_that_contradicts_its_shape_is_the_models_fault(shape: list[int]) -> None:
    for datatype, raw in (("BYTES", encode_bytes([b"a" * 40_000, b"b" * 40_000])), ("FP64", bytes(100_000))):
        with pytest.raises(EngineError, match="the model responded with a malformed tensor"):
            finish(json_pieces(raw, datatype, shape, "y"))


# Vectors


@pytest.mark.parametrize("width", [1, 3, 12_288, 30_000])
@pytest.mark.parametrize("packed", [True, False])
def test_vectors_are_written_as_msgspec_writes_them(width: int, packed: bool) -> None:
    vectors = np.linspace(-1, 1, 3 * width, dtype=np.float32).reshape(3, width)
    pieces = finish(rows_to_json(vectors, lambda index, row: Embedding(index=index, embedding=row), packed=packed))
    written = msgspec.json.decode(b"".join(pieces), type=list[Embedding])
    for index, (row, of) in enumerate(zip(vectors, written, strict=True)):
        assert of.index == index
        assert of.embedding == (base64.b64encode(row.tobytes()).decode() if packed else row.tolist())
