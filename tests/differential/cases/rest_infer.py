"""POST …/infer, /generate and /generate_stream: JSON, binary tensors behind it, raw bodies, compression."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

from tests.differential.cases import Case
from tests.differential.cases.tensors import VALUES, elements, raw
from tests.differential.server_client import Response, ServerClient

_ECHO = "/v2/models/echo_fp32/infer"
_PLAIN = '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1],"data":[1.0]}]}'
_LENGTH = "Inference-Header-Content-Length"
_WORDS = ("NaN", "Infinity", "-Infinity", "nan", "null", "true", '"1"', "1e400", "-0", "0x1", "1.", ".5", "1e5", "[]", "{}", "01")


def cases() -> Iterator[Case]:
    for family, group in (
        ("REST JSON", _json()),
        ("REST JSON elements", _elements()),
        ("REST JSON malformed", _malformed()),
        ("REST parameters", _parameters()),
        ("REST classification", _classification()),
        ("REST binary", _binary()),
        ("REST raw body", _raw()),
        ("REST compression", _compression()),
        ("REST generate", _generate()),
    ):
        for what, (path, body, headers) in group:
            yield Case(family, what, partial(_post, path, body, headers))


def _post(path: str, body: bytes | str | object, headers: Mapping[str, str], client: ServerClient) -> Response:
    return client.rest("POST", path, body, headers)


Group = Iterator[tuple[str, tuple[str, Any, Mapping[str, str]]]]


def tensor(name: str, datatype: str, shape: Any, data: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, **({} if data is None else {"data": data}), **more}


def _json() -> Group:
    body: Any
    for datatype in VALUES:
        path = f"/v2/models/echo_{datatype.lower()}/infer"
        values = elements(datatype, 3)
        own = tensor("INPUT0", datatype, [3], values)
        yield f"{datatype}", (path, {"inputs": [own]}, {})
        yield f"{datatype} with an id and an output", (path, {"id": "r 1", "inputs": [own], "outputs": [{"name": "OUTPUT0"}]}, {})
        yield f"{datatype}, nothing", (path, {"inputs": [tensor("INPUT0", datatype, [0], [])]}, {})
        for count in (2, 4):
            yield f"{datatype}, {count} elements for 3", (path, {"inputs": [own | {"data": elements(datatype, count)}]}, {})
        yield f"{datatype}, text", (path, {"inputs": [own | {"data": ["a", "b", "c"]}]}, {})
        yield f"{datatype}, numbers", (path, {"inputs": [own | {"data": [1, 2, 3]}]}, {})
        yield f"{datatype}, fractions", (path, {"inputs": [own | {"data": [1.5, 2.5, -3.5]}]}, {})
        yield f"{datatype}, booleans", (path, {"inputs": [own | {"data": [True, False, True]}]}, {})
        yield f"{datatype}, nulls", (path, {"inputs": [own | {"data": [None, None, None]}]}, {})
        yield f"{datatype}, nested", (path, {"inputs": [own | {"data": [values]}]}, {})
        yield f"{datatype}, not an array", (path, {"inputs": [own | {"data": values[0]}]}, {})
        yield f"{datatype}, an object", (path, {"inputs": [own | {"data": {"a": 1}}]}, {})
        yield f"{datatype}, a huge number", (path, {"inputs": [own | {"data": [10**30, 1, 1]}]}, {})
        yield (
            f"{datatype} sent as another",
            (path, {"inputs": [own | {"datatype": "INT32" if datatype != "INT32" else "INT64"}]}, {}),
        )
    matrix = "/v2/models/echo_matrix/infer"
    nested: tuple[Any, ...] = (
        [[1, 2, 3], [4, 5, 6]],
        [1, 2, 3, 4, 5, 6],
        [[1, 2], [3, 4], [5, 6]],
        [[1, 2, 3], 4, 5, 6],
        [[[1, 2, 3, 4, 5, 6]]],
        [[1, 2, 3], [4, 5]],
    )
    for data in nested:
        yield f"a matrix as {data}", (matrix, {"inputs": [tensor("INPUT0", "INT32", [2, 3], data)]}, {})
    for version, shape in product(("", "/versions/1", "/versions/2", "/versions/3", "/versions/9", "/versions/x"), ([3],)):
        body = {"inputs": [tensor("INPUT0", "FP32", shape, [1, 2, 3])]}
        yield f"versions{version}", (f"/v2/models/versions{version}/infer", body, {})
    both = [tensor(name, "INT32", [1, 16], list(range(16))) for name in ("INPUT0", "INPUT1")]
    for names in ((), ("OUTPUT0",), ("OUTPUT1", "OUTPUT0"), ("OUTPUT0", "OUTPUT0"), ("NONE",), ("",)):
        body = {"inputs": both, "outputs": [{"name": name} for name in names]}
        yield f"add_sub wanting {names}", ("/v2/models/add_sub/infer", body, {})
    for text in ("\ufeff", "\u0000", "\\ud800", "é", "\\u00e9", '\\"', "\\n"):
        written = _PLAIN.replace("FP32", "BYTES").replace("[1.0]", f'["{text}"]')
        yield f"the text {text!a}", ("/v2/models/echo_bytes/infer", written.encode("utf-8", "surrogatepass"), {})
    binary = {"inputs": [tensor("INPUT0", "BYTES", [1], parameters={"binary_data_size": 6})]}
    length = len(json.dumps(binary))
    for element in (b"\xff\xfe", b"ab", b"a\0"):
        body = json.dumps(binary).encode() + b"\x02\0\0\0" + element
        yield f"BYTES {element!r} come back as JSON", ("/v2/models/echo_bytes/infer", body, {_LENGTH: str(length)})
    for code in (
        "INTERNAL",
        "INVALID_ARG",
        "NOT_FOUND",
        "UNAVAILABLE",
        "UNSUPPORTED",
        "ALREADY_EXISTS",
        "CANCELLED",
        "UNKNOWN",
        "raise",
    ):
        body = {"inputs": [tensor("INPUT0", "BYTES", [1], [code])]}
        yield f"a model that fails with {code}", ("/v2/models/fails/infer", body, {})
    for model in ("chain", "completing", "repeat", "late", "broken", "unknown", "a%20b"):
        datatype = "INT32" if model == "repeat" else "FP32"
        yield f"model {model}", (f"/v2/models/{model}/infer", {"inputs": [tensor("INPUT0", datatype, [3], [1, 2, 3])]}, {})


def _elements() -> Group:
    for datatype, word in product(("BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP32", "FP64", "BYTES"), _WORDS):
        written = _PLAIN.replace("FP32", datatype).replace("1.0", word)
        yield f"{datatype} from {word}", (f"/v2/models/echo_{datatype.lower()}/infer", written, {})
    for datatype, value in (
        *(("BOOL", value) for value in (0, 1, 2)),
        *(("INT8", value) for value in (128, -129, 127, 2**40)),
        *(("UINT8", value) for value in (256, -1)),
        *(("INT16", value) for value in (32768, -32769)),
        *(("UINT16", value) for value in (65536, -1)),
        *(("INT32", value) for value in (2**31, -(2**31) - 1)),
        *(("UINT32", value) for value in (2**32, -1)),
        *(("INT64", value) for value in (2**63, -(2**63) - 1)),
        *(("UINT64", value) for value in (2**64, -1)),
        *(("FP32", value) for value in (3.5e38, 1e-50)),
    ):
        body = {"inputs": [tensor("INPUT0", datatype, [1], [value])]}
        yield f"{datatype} from {value}", (f"/v2/models/echo_{datatype.lower()}/infer", body, {})


def _malformed() -> Group:
    value: Any
    body: Any
    good = tensor("INPUT0", "FP32", [3], [1, 2, 3])
    for text in (
        *(
            "",
            "{",
            "[]",
            "null",
            "1",
            '"x"',
            "{}",
            "{]",
            "nonsense",
            '{"inputs":[]',
            "{}{}",
            "{} x",
            "\ufeff{}",
            "//x\n{}",
            "{'a':1}",
        ),
        *(
            '{"inputs":null}',
            '{"inputs":{}}',
            '{"inputs":1}',
            '{"inputs":[1]}',
            '{"inputs":[null]}',
            '{"inputs":[[]]}',
            '{"inputs":[{}]}',
        ),
    ):
        yield f"the body {text!a}", (_ECHO, text, {})
    for key, value in product(
        ("name", "datatype", "shape", "data", "parameters"), (None, 1, "x", [], {}, True, 1.5, ["a"], [[1]])
    ):
        yield f"an input with {key}={value!r}", (_ECHO, {"inputs": [good | {key: value}]}, {})
    for key in ("name", "datatype", "shape", "data"):
        yield f"an input without {key}", (_ECHO, {"inputs": [{name: value for name, value in good.items() if name != key}]}, {})
    for key, value in product(("id", "parameters", "outputs", "inputs", "more"), (None, 1, "x", [], {}, True, [1], [{}], [None])):
        yield f"{key}={value!r}", (_ECHO, {"inputs": [good]} | {key: value}, {})
    for output in (
        {"name": 1},
        {"name": None},
        {"name": "OUTPUT0", "parameters": 1},
        {"name": "OUTPUT0", "parameters": None},
        {"x": 1},
    ):
        yield f"an output {output}", (_ECHO, {"inputs": [good], "outputs": [output]}, {})
    for shape in (
        [-1],
        [-3],
        [3, 1],
        [1.0],
        [3.5],
        ["3"],
        [2**40],
        [2**62, 4],
        [2**63],
        [2**64],
        [2**32, 2**32],
        [None],
        [[3]],
        [True],
        [],
    ):
        yield f"shape {shape}", (_ECHO, {"inputs": [good | {"shape": shape}]}, {})
    for name in ("", "INPUT", "OUTPUT0"):
        yield f"an input named {name!r}", (_ECHO, {"inputs": [good | {"name": name}]}, {})
    yield "an input twice", (_ECHO, {"inputs": [good, good]}, {})
    yield "an input too many", (_ECHO, {"inputs": [good, good | {"name": "INPUT1"}]}, {})
    for pair in ('"id":"a","id":"b"', '"id":"a"', '"inputs":[],"id":"a"', '"outputs":[{"name":"NONE"}],"outputs":[]'):
        written = _PLAIN.replace("{", f"{{{pair},", 1).replace("[1.0]", '[1.0],"data":[2]')
        yield f"keys twice, {pair}", (_ECHO, written, {})
    for depth in (20, 99, 150, 1000):
        body = json.dumps({"inputs": [good | {"data": 0}]}).replace('"data": 0', f'"data": {"[" * depth}{"]" * depth}')
        yield f"data nested {depth} deep", (_ECHO, body, {})
    yield "a content type of its own", (_ECHO, {"inputs": [good]}, {"Content-Type": "text/plain"})
    yield "trailing space", (_ECHO, json.dumps({"inputs": [good]}) + " \n", {})
    for model, shape in (("echo_batched", [5, 4]), ("echo_batched", [4]), ("echo_batched", [0, 4]), ("echo_batched", [1, 3])):
        body = {"inputs": [tensor("INPUT0", "FP32", shape, [1] * (shape[0] * shape[-1] if len(shape) > 1 else 4))]}
        yield f"{model} of {shape}", (f"/v2/models/{model}/infer", body, {})


def _parameters() -> Group:
    values: tuple[Any, ...]
    good = tensor("INPUT0", "INT32", [1], [0])
    keys = (
        *("custom", "", "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"),
        *("triton_enable_empty_final_response", "triton_other"),
    )
    values = (True, 0, 1, -1, 5, 2**63, 2**64, 1.5, "text", "", None, [], {})
    for key, value in product(keys, values):
        body = {"inputs": [good], "parameters": {key: value}}
        yield f"{key}={value!r}", ("/v2/models/parameters/infer", body, {})
    for key, value in product(
        ("custom", "binary_data_size", "shared_memory_region", "shared_memory_offset"), (True, 1, 4, "x", None)
    ):
        body = {"inputs": [good | {"parameters": {key: value}}]}
        yield f"of an input {key}={value!r}", ("/v2/models/parameters/infer", body, {})
    for key, value in product(
        ("custom", "binary_data", "classification", "shared_memory_region"), (True, False, 1, "x", None, 1.5)
    ):
        body = {"inputs": [good], "outputs": [{"name": "OUTPUT0", "parameters": {key: value}}]}
        yield f"of an output {key}={value!r}", ("/v2/models/parameters/infer", body, {})


def _classification() -> Group:
    for model, count, binary in product(
        ("scores", "scores_batched", "scores_int"), (1, 3, 5, 9, 0, -1, "2", True, 2.5), (False, True)
    ):
        shape = [2, 1] if model == "scores_batched" else [1]
        wanted = {"name": "OUTPUT0", "parameters": {"classification": count, "binary_data": binary}}
        body = {"inputs": [tensor("INPUT0", "FP32", shape, [0] * shape[0])], "outputs": [wanted]}
        yield f"{model}, {count!r} classes, binary={binary}", (f"/v2/models/{model}/infer", body, {})


def _binary() -> Group:
    own: Any
    body: Any
    for datatype, in_binary, out_binary in product(VALUES, (True, False), (True, False)):
        if not in_binary and not out_binary:
            continue
        data = raw(datatype, elements(datatype, 3))
        if in_binary:
            own = tensor("INPUT0", datatype, [3], parameters={"binary_data_size": len(data)})
        else:
            own, data = tensor("INPUT0", datatype, [3], elements(datatype, 3)), b""
        wanted = {"name": "OUTPUT0", "parameters": {"binary_data": out_binary}}
        path = f"/v2/models/echo_{datatype.lower()}/infer"
        yield f"{datatype}, in={in_binary}, out={out_binary}", _with_binary(path, {"inputs": [own], "outputs": [wanted]}, data)
        yield (
            f"{datatype}, in={in_binary}, all out={out_binary}",
            _with_binary(path, {"inputs": [own], "parameters": {"binary_data_output": out_binary}}, data),
        )
    sized = tensor("INPUT0", "FP32", [3], parameters={"binary_data_size": 12})
    for size in (0, 8, 11, 13, 16, -1, 2**40, "12", 12.0, True, None):
        body = {"inputs": [sized | {"parameters": {"binary_data_size": size}}]}
        yield f"a size of {size!r} for 12 bytes", _with_binary(_ECHO, body, bytes(12))
    for count in (0, 4, 11, 13, 24):
        yield f"{count} bytes follow, 12 are announced", _with_binary(_ECHO, {"inputs": [sized]}, bytes(count))
    text = json.dumps({"inputs": [sized]})
    for length in (
        "",
        "0",
        "x",
        "-1",
        "1.5",
        str(len(text) - 1),
        str(len(text) + 1),
        "99999",
        "99999999999999999999",
        f" {len(text)} ",
        f"+{len(text)}",
    ):
        yield f"header {length[:20]!r} for {len(text)}", (_ECHO, text.encode() + bytes(12), {_LENGTH: length})
    yield "data and a size", _with_binary(_ECHO, {"inputs": [sized | {"data": [1, 2, 3]}]}, bytes(12))
    pair = [tensor(name, "INT32", [1, 16], parameters={"binary_data_size": 64}) for name in ("INPUT0", "INPUT1")]
    data = raw("INT32", range(16)) * 2
    yield "two inputs", _with_binary("/v2/models/add_sub/infer", {"inputs": pair}, data)
    for own, usual in product((True, False, None), (True, False)):
        outputs = [
            {"name": "OUTPUT0"} if own is None else {"name": "OUTPUT0", "parameters": {"binary_data": own}},
            {"name": "OUTPUT1"},
        ]
        body = {"inputs": pair, "outputs": outputs, "parameters": {"binary_data_output": usual}}
        yield f"one output binary={own} of {usual}", _with_binary("/v2/models/add_sub/infer", body, data)


def _with_binary(path: str, body: object, data: bytes) -> tuple[str, bytes, Mapping[str, str]]:
    text = json.dumps(body).encode()
    return path, text + data, {_LENGTH: str(len(text))}


def _raw() -> Group:
    for model, size in product(
        (
            "echo_fp32",
            "echo_bytes",
            "echo_batched",
            "echo_matrix",
            "echo_uint8",
            "add_sub",
            "optional",
            "unknown",
            "echo_batched_bytes",
        ),
        (0, 1, 4, 12, 16, 24),
    ):
        yield f"{model}, {size} bytes", (f"/v2/models/{model}/infer", bytes(size), {_LENGTH: "0"})


def _compression() -> Group:
    good = json.dumps({"inputs": [tensor("INPUT0", "FP32", [300], [0.25] * 300)]}).encode()
    for encoding, data in (
        ("gzip", gzip.compress(good)),
        ("deflate", zlib.compress(good)),
        ("gzip", good),
        ("deflate", good),
        ("gzip", gzip.compress(good)[:-4]),
        ("gzip", gzip.compress(good)[:30]),
        ("deflate", zlib.compress(good)[:-2]),
        ("br", good),
        ("identity", good),
        ("gzip, deflate", good),
        ("GZIP", gzip.compress(good)),
        ("", good),
    ):
        yield f"{encoding}, {len(data)} bytes", (_ECHO, data, {"Content-Encoding": encoding})
    for accepted in ("gzip", "deflate", "br", "identity", "*", "gzip;q=0", "gzip, deflate", "deflate;q=0.5, gzip;q=0.9", ""):
        yield f"accepts {accepted!r}", (_ECHO, good, {"Accept-Encoding": accepted})


def _generate() -> Group:
    bodies: tuple[Any, ...] = (
        {"text_input": "a"},
        {"text_input": ["a"]},
        {"text_input": ["a", "b"]},
        {"text_input": []},
        {"text_input": ""},
        {"text_input": 1},
        {"text_input": None},
        {"text_input": {"x": 1}},
        {"text_input": True},
        {"text_input": "a", "count": 3},
        {"text_input": "a", "count": [1, 2]},
        {"text_input": "a", "count": "x"},
        {"text_input": "a", "parameters": {"x": 1, "y": "z"}},
        {"text_input": "a", "parameters": {"count": 1}},
        {"text_input": "a", "parameters": 1},
        {"text_input": "a", "other": 1, "flag": True, "name": "n", "ratio": 0.5},
        {"text_input": "a", "other": 2**63, "less": -(2**63) - 1},
        {"text_input": "a", "other": 1, "parameters": {"other": 2}},
        {"text_input": "a", "priority": 3, "timeout": 5_000_000},
        {"text_input": "a", "other": [1, 2]},
        {"text_input": "a", "other": {"x": 1}},
        {"text_input": "a", "other": None},
        {"text_input": "a", "id": "r1"},
        {"text_input": "a", "id": ""},
        {"text_input": "a", "id": 5},
        {},
        {"count": 1},
        [],
        1,
    )
    for word, body in product(("generate", "generate_stream"), bodies):
        yield f"{word} {json.dumps(body)}", (f"/v2/models/text/{word}", body, {})
    for word, text in product(("generate", "generate_stream"), ("", "{", '{"text_input":"a","text_input":"b"}')):
        yield f"{word} {text}", (f"/v2/models/text/{word}", text, {})
    for word, model, body in product(
        ("generate", "generate_stream"),
        ("repeat", "add_sub", "unknown", "late", "fails", "text/versions/1", "text/versions/9"),
        ({"INPUT0": [1]}, {"INPUT0": [1, 2]}, {"INPUT0": ["INTERNAL"]}, {"text_input": "a"}, {"INPUT0": [3, -1]}),
    ):
        yield f"{word} of {model} {json.dumps(body)}", (f"/v2/models/{model}/{word}", body, {})
