"""Requests to load a model with its files, which are neither copied nor decoded in one go."""

from __future__ import annotations

import json
import string
from base64 import b64encode
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.process.work import finish
from dynamo.common.repository import LoadRequest
from dynamo.frontend.api.kserve.model_files import MAX_SETTINGS_BYTES, ModelLoadRequest
from dynamo.frontend.api.kserve.repository_requests import load_request
from dynamo.frontend.api.kserve.rest.model_files import cut_strings, load_from_json
from dynamo.frontend.config import HttpOptions
from dynamo.protos import inference_pb2 as pb
from tests.support.every_operation import Asked, HttpEntry, open_frontend

KIB, MIB = 1 << 10, 1 << 20
LONG = Random(0).randbytes(3 * MIB)


def message(model: str = "m", **files: bytes) -> pb.RepositoryModelLoadRequest:
    request = pb.RepositoryModelLoadRequest(model_name=model)
    request.parameters["config"].string_param = "{}"
    for name, content in files.items():
        request.parameters[f"file:1/{name}"].bytes_param = content
    return request


def read(data: bytes) -> tuple[LoadRequest, dict[str, bytes]]:
    parsed = ModelLoadRequest.parse(data)
    request, files = load_request(parsed.head.model_name, parsed.parameters())
    assert isinstance(request, LoadRequest)
    return request, {name: b"".join(content) for name, content in files.items()}


def read_json(body: bytes) -> tuple[LoadRequest, dict[str, bytes]]:
    text, long = finish(cut_strings(body))
    request, files = finish(load_from_json("m", json.loads(text), long))
    assert isinstance(request, LoadRequest)
    return request, {name: b"".join(content) for name, content in files.items()}


def in_json(value: str) -> bytes:
    return b'{"parameters":{"config":"{}","file:1/a":"%b"}}' % value.encode()


# Over gRPC


def test_long_files_of_a_message_stay_where_they_arrived() -> None:
    data = message(a=LONG, b=b"short", c=LONG[::-1]).SerializeToString()
    parsed = ModelLoadRequest.parse(data)
    assert {content.obj is data for content in parsed.contents.values()} == {True}
    assert len(parsed.contents) == 2 and parsed.head.ByteSize() < 1000
    assert read(data) == (LoadRequest(model="m", config="{}"), {"1/a": LONG, "1/b": b"short", "1/c": LONG[::-1]})


def test_of_a_parameter_that_is_there_twice_the_last_one_counts_as_in_protobuf() -> None:
    short, long, other = (message(a=content).SerializeToString() for content in (b"short", LONG, LONG[::-1]))
    assert [read(data)[1]["1/a"] for data in (short + long, long + short, long + other)] == [LONG, b"short", LONG[::-1]]


def test_a_long_parameter_that_is_no_file_is_read_as_it_is() -> None:
    request = message()
    request.parameters["config"].string_param = "x" * MIB
    assert read(request.SerializeToString())[0].config == "x" * MIB


@pytest.mark.parametrize("padding", ["config", "another field"])
def test_what_is_beside_the_files_is_bounded(padding: str) -> None:
    request = message(a=LONG)
    data = request.SerializeToString()
    if padding == "config":
        request.parameters["config"].string_param = "x" * MAX_SETTINGS_BYTES
        data = request.SerializeToString()
    else:
        data += b"\xfa\x7f\x80\x80\x80\x04" + bytes(8 * MIB)
    with pytest.raises(PayloadTooLarge, match="beside its files; at most 4194304 are allowed"):
        ModelLoadRequest.parse(data)


def test_many_short_fields_are_refused_before_they_are_read() -> None:
    for data in (b"\x0a\x00" * MIB, message(a=LONG).SerializeToString() + b"\x0a\x00" * 9000):
        with pytest.raises(PayloadTooLarge, match="more than 8192 fields"):
            ModelLoadRequest.parse(data)


@given(st.integers(0, 200_000), st.binary(min_size=1, max_size=4))
def test_a_message_that_was_tampered_with_is_refused_or_read_as_protobuf_does(position: int, noise: bytes) -> None:
    whole = message(a=LONG[: 100 * KIB], b=LONG[: 90 * KIB]).SerializeToString()
    position %= len(whole)
    data = whole[:position] + noise + whole[position + len(noise) :]
    try:
        parsed = ModelLoadRequest.parse(data)
    except (InvalidRequest, PayloadTooLarge):
        return
    expected = pb.RepositoryModelLoadRequest.FromString(data).parameters
    found = parsed.parameters()
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        kind = parameter.WhichOneof("parameter_choice")
        assert found[name] == (None if kind is None else getattr(parameter, kind))


# As JSON


@pytest.mark.parametrize("size", [0, 1, 2, 3, 12_287, 12_288, 70_000, 3 * MIB])
@pytest.mark.parametrize("escaped", [False, True])
def test_a_file_in_base64_is_decoded_whatever_its_length_and_with_escaped_slashes(size: int, escaped: bool) -> None:
    text = b64encode(LONG[:size]).decode()
    assert read_json(in_json(text.replace("/", r"\/") if escaped else text))[1] == {"1/a": LONG[:size]}


@pytest.mark.parametrize("size", [100, MIB])
@pytest.mark.parametrize("flaw", ["a?", "=", "====", "é", "a", r"\x", "==aa"])
def test_what_is_not_base64_is_refused(size: int, flaw: str) -> None:
    text = b64encode(LONG[: size // 3 * 3]).decode()
    with (
        pytest.raises(InvalidRequest, match="'file:1/a' is not base64")
        if flaw != r"\x" or size > 100
        else pytest.raises(ValueError)
    ):
        read_json(in_json(text + flaw))


def test_a_configuration_may_be_long_and_have_quotes() -> None:
    config = json.dumps({"a": '\\"' * 40_000 + "\\" * 70_001})
    body = {"parameters": {"config": config, "file:1/a": b64encode(LONG).decode()}, "other": "\\" * 100_000}
    assert read_json(json.dumps(body).encode()) == (LoadRequest(model="m", config=config), {"1/a": LONG})


@given(st.lists(st.text(string.printable, max_size=20).map(lambda text: text * 7000) | st.text(max_size=9), max_size=5))
def test_long_strings_are_cut_out_of_any_json(texts: list[str]) -> None:
    body = json.dumps(texts).encode()
    text, long = finish(cut_strings(body))
    restored: list[Any] = [json.loads(bytes(long[value])) if value in long else value for value in json.loads(text)]
    assert restored == texts
    assert len(text) <= 5 * (64 * KIB + 2) + 10


async def test_a_model_of_more_bytes_than_other_json_may_have_is_sent_to_workers_over_rest() -> None:
    async with open_frontend() as front:
        load = next(each for each in front.operations if each.path == "/v2/repository/models/{model:path}/load")
        body = in_json(b64encode(2 * LONG).decode())
        assert len(body) > HttpOptions().max_json_bytes
        outcome = await HttpEntry(load).send_asked(front, Asked({"{model:path}": "m"}, body))
        assert (outcome.status, b"this worker loads nothing" in outcome.body) == (501, True)


# To workers


@pytest.mark.parametrize("request_", [LoadRequest(model="m"), LoadRequest(model="m", config="{}", path="/p")])
def test_a_worker_reads_the_files_of_a_request(request_: LoadRequest) -> None:
    files = {"1/a": [LONG, memoryview(b"b")], "1/empty": [], "c": [b""]}
    encoded = b"".join(request_.encoded(files))
    expected = msgspec.structs.replace(request_, files={"1/a": LONG + b"b", "1/empty": b"", "c": b""})
    assert msgspec.msgpack.decode(encoded, type=LoadRequest) == expected
    assert msgspec.msgpack.decode(b"".join(request_.encoded({})), type=LoadRequest) == request_
