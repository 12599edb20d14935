"""Traces in Triton's format: which requests are traced, what a trace says, and the files."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.common.errors import Code
from dynamo.common.observability.reception import EdgeProtocol, Reception
from dynamo.common.observability.server_settings import ServerSettings, TraceChange
from dynamo.common.options import TraceOptions
from dynamo.common.tensors.tensors import from_numpy
from dynamo.worker.engine.base import Context, RequestTimings
from dynamo.worker.observability.request_trace import RequestTrace
from dynamo.worker.repository.declared.execution import ModelRequest
from dynamo.worker.traces import recorder
from dynamo.worker.traces.recorder import TritonTraces, open_triton_traces
from dynamo.worker.traces.trace import MAX_TRACES, data_text
from tests.support.repositories import opened, python_model, x

ALL = ("TIMESTAMPS", "TENSORS")


def settings(levels: tuple[str, ...] = ("TIMESTAMPS",), rate: int = 1, **others: int) -> ServerSettings:
    return ServerSettings(trace={"": TraceChange(levels=levels, rate=rate, **others)})


def traced(folder: Path, own: ServerSettings, requests: int, *, max_bytes: int = 2**20) -> TritonTraces:
    """Serve requests to the model `m` by these settings, and write what is traced."""
    traces = TritonTraces(TraceOptions(file=folder / "t.json", file_max_bytes=max_bytes), "1a")
    traces.use(own)
    for _ in range(requests):
        if (trace := traces.begin("m", "1", "")) is not None:
            trace.end()
    traces.finish()
    return traces


def ids(file: Path) -> list[int]:
    return [entry["id"] for entry in json.loads(file.read_text()) if "model_name" in entry]


def files(folder: Path) -> dict[str, list[int]]:
    return {path.name: ids(path) for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(
    ("own", "requests", "expected"),
    [
        (settings(), 3, {"t-1a.json": [1, 2, 3]}),
        (settings(rate=2), 5, {"t-1a.json": [1, 2]}),
        (settings(log_frequency=2), 5, {"t-1a.json.0": [1, 2], "t-1a.json.1": [3, 4], "t-1a.json.2": [5]}),
        (settings(count=2), 5, {"t-1a.json.0": [1, 2]}),
        (settings(count=3, log_frequency=2), 9, {"t-1a.json.0": [1, 2], "t-1a.json.1": [3]}),
        (settings(count=9), 2, {"t-1a.json": [1, 2]}),
        (settings(levels=()), 2, {}),
        (ServerSettings(trace={**settings().trace, "m": TraceChange(levels=())}), 2, {}),
        (ServerSettings(trace={"m": TraceChange(levels=ALL, rate=1)}), 1, {"t-1a.json": [1]}),
    ],
)
def test_rate_count_and_frequency_decide_what_is_written_to_which_file(
    tmp_path: Path, own: ServerSettings, requests: int, expected: dict[str, list[int]]
) -> None:
    traced(tmp_path, own, requests)
    assert files(tmp_path) == expected


def test_a_change_of_other_settings_goes_on_counting_and_one_of_its_own_begins_anew(tmp_path: Path) -> None:
    traces = TritonTraces(TraceOptions(file=tmp_path / "t.json"), "1a")
    own = settings(rate=2)
    traces.use(own)
    assert not traces.is_sampled("m")
    traces.use(ServerSettings(trace={**own.trace, "other": TraceChange(rate=7)}))
    assert traces.is_sampled("m")
    assert not traces.is_sampled("m")
    traces.use(settings(rate=2, number=1))
    assert not traces.is_sampled("m")


def test_a_file_is_a_json_array_after_each_trace_and_for_this_user_only(tmp_path: Path) -> None:
    traces = TritonTraces(TraceOptions(file=tmp_path / "t.json"), "1a")
    traces.use(settings())
    for expected in ([1], [1, 2], [1, 2, 3]):
        trace = traces.begin("m", "1", "")
        assert trace is not None
        trace.end()
        traces.finish()
        assert ids(tmp_path / "t-1a.json") == expected
    assert stat.S_IMODE(os.stat(tmp_path / "t-1a.json").st_mode) == 0o600


@pytest.mark.parametrize("name", ["t-1a.json", ".t-1a.json"])
def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / name).symlink_to(elsewhere)
    traced(tmp_path, settings(), 2)
    assert not elsewhere.exists()


def test_traces_that_cannot_be_written_are_dropped_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traced(tmp_path / "nowhere", settings(), 2)
    assert len([record for record in caplog.records if "traces are dropped" in record.message]) == 1


def test_files_stay_below_their_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traced(tmp_path, settings(), 1000, max_bytes=2000)
    assert 1000 < (tmp_path / "t-1a.json").stat().st_size <= 2000
    assert "--trace-file-max-bytes" in caplog.text


def test_small_files_count_as_what_they_take_of_the_disk(tmp_path: Path) -> None:
    traced(tmp_path, settings(log_frequency=1), 100, max_bytes=5 * 4096)
    assert len(files(tmp_path)) == 5


def test_a_worker_without_a_file_says_so_and_traces_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    traces = TritonTraces(TraceOptions(), "1a")
    traces.use(settings())
    assert (traces.is_on, traces.begin("m", "1", "")) == (False, None)
    assert "trace file name is not given" in caplog.text


def entries(folder: Path) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = json.loads((folder / "t-1a.json").read_text())
    return data


async def test_a_trace_whose_thread_has_not_begun_is_written_at_the_end(tmp_path: Path) -> None:
    loop, is_free = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, is_free.wait)
    async with open_triton_traces(TraceOptions(file=tmp_path / "t.json"), "1a") as traces:
        traces.use(settings())
        trace = traces.begin("m", "1", "r")
        assert trace is not None
        trace.end()
        for _ in range(5):
            await asyncio.sleep(0)  # the writer takes it, and waits for the thread
        loop.call_later(0.01, is_free.set)  # while the body's end waits
    await busy
    assert entries(tmp_path)


async def test_a_trace_names_times_tensors_and_its_parent_as_triton_does(tmp_path: Path) -> None:
    async with open_triton_traces(TraceOptions(file=tmp_path / "t.json"), "1a") as traces:
        traces.use(settings(ALL))
        root = traces.begin("ensemble", "2", "my id")
        assert root is not None
        root.is_composed = True
        outer = RequestTrace(root, 10, Reception.of(Reception(EdgeProtocol.HTTP, 3, 4).headers()))
        child = root.child("part", "1", "my id")
        assert child is not None
        inner = RequestTrace(child, 20)
        inner.inputs({"IN": np.array([[1, 2]], np.int32), "NONE": np.zeros(0, np.int32)}, {})
        inner.outputs({"OUT": np.array([b'a"b', b"\xff"], object)}, {})
        inner.end(RequestTimings(queue_ns=1, input_ns=2, infer_ns=3), None, None)
        outer.end(RequestTimings(), None, None)
    found = entries(tmp_path)
    assert found[0] == {"id": 2, "model_name": "part", "model_version": 1, "request_id": "my id", "parent_id": 1}
    tensors = [(entry["activity"], entry["tensor"]) for entry in found if "tensor" in entry]
    assert tensors == [
        ("TENSOR_QUEUE_INPUT", {"name": "IN", "data": "1,2", "shape": "1,2", "dtype": "INT32"}),
        ("TENSOR_BACKEND_OUTPUT", {"name": "OUT", "data": '"a"b","\ufffd"', "shape": "2", "dtype": "BYTES"}),
    ]
    times = {number: [e["timestamps"][0]["name"] for e in found if e["id"] == number and "timestamps" in e] for number in (1, 2)}
    computed = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    start, end = ["REQUEST_START", "QUEUE_START"], ["REQUEST_END"]
    received = ["HTTP_RECV_START", "HTTP_RECV_END"]
    assert times == {1: [*received, *start, *end, "INFER_RESPONSE_COMPLETE"], 2: start + computed + end}
    assert {"id": 1, "model_name": "ensemble", "model_version": 2, "request_id": "my id"} in found


def test_the_clock_of_another_host_is_ignored() -> None:
    [(name, text)] = Reception(EdgeProtocol.GRPC, 3, 4).headers().items()
    assert Reception.of({name: text}) == Reception(EdgeProtocol.GRPC, 3, 4)
    assert Reception.of({name: f"{text}-of-another-host"}) is None
    assert Reception.of({}) is None


CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        [request] = requests
        for id, trace in ("traced", request.trace()), ("untraced", None):
            call = pb_utils.InferenceRequest(id, 0, request.inputs(), ["y"], "part", trace=trace)
            again = pb_utils.InferenceRequest(f"{id} again", 0, request.inputs(), ["y"], "part", trace=call.trace())
            response = call.exec()
            again.exec()
        return [pb_utils.InferenceResponse(response.output_tensors())]
"""


async def test_a_request_to_another_model_is_traced_as_a_part_if_it_gets_the_trace(tmp_path: Path) -> None:
    python_model(tmp_path / "models", "part")
    python_model(tmp_path / "models", "caller", CALLER)
    async with (
        opened(tmp_path / "models", "part", "caller") as models,
        open_triton_traces(TraceOptions(file=tmp_path / "t.json"), "1a") as traces,
    ):
        traces.use(settings())
        trace = traces.begin("caller", "1", "top")
        assert trace is not None
        request = RequestTrace(trace, 10)
        inside = Context("top", trace=trace)
        await models.find("caller").respond(ModelRequest(x(1), inside))
        request.end(inside.timings, None, None)
        await models.find("caller").respond(ModelRequest(x(1), Context("not traced")))
    heads = [entry for entry in entries(tmp_path) if "model_name" in entry]
    assert heads == [
        {"id": 2, "model_name": "part", "model_version": 1, "request_id": "traced", "parent_id": 1},
        {"id": 3, "model_name": "part", "model_version": 1, "request_id": "traced again", "parent_id": 1},
        {"id": 1, "model_name": "caller", "model_version": 1, "request_id": "top"},
    ]


def test_a_request_that_failed_before_its_model_ran_has_no_times_of_computing(tmp_path: Path) -> None:
    traces = TritonTraces(TraceOptions(file=tmp_path / "t.json"), "1a")
    traces.use(settings())
    trace = traces.begin("m", "1", "")
    assert trace is not None
    RequestTrace(trace, 10).end(RequestTimings(), None, Code.INTERNAL)
    traces.finish()
    assert not any("COMPUTE" in str(entry) for entry in entries(tmp_path))


def test_a_tensor_that_finds_no_room_is_written_without_data_and_room_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_TENSOR_BYTES", 5)
    traces = TritonTraces(TraceOptions(file=tmp_path / "t.json"), "1a")
    traces.use(settings(ALL))
    for _ in range(2):
        trace = traces.begin("m", "1", "")
        assert trace is not None
        trace.tensor("TENSOR_QUEUE_INPUT", "A", "INT8", [3], bytes(3))
        trace.tensor("TENSOR_QUEUE_INPUT", "B", "INT8", [3], bytes(3))
        trace.end()
        traces.finish()
    assert [entry["tensor"]["data"] for entry in entries(tmp_path) if "tensor" in entry] == ["0,0,0", ""] * 2


def test_an_output_that_is_not_what_it_says_costs_only_its_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traces = TritonTraces(TraceOptions(file=tmp_path / "t.json"), "1a")
    traces.use(settings(ALL))
    for size in (3, 2):
        trace = traces.begin("m", "1", "")
        assert trace is not None
        trace.tensor("TENSOR_BACKEND_OUTPUT", "A", "INT8", [2], bytes(size))
        trace.end()
        traces.finish()
    assert ids(tmp_path / "t-1a.json") == [2]
    assert "traces are dropped" in caplog.text


def test_a_group_of_traces_is_bounded(tmp_path: Path) -> None:
    traces = TritonTraces(TraceOptions(file=tmp_path / "t.json"), "1a")
    traces.use(settings())
    trace = traces.begin("m", "1", "")
    assert trace is not None
    children = [trace.child("part", "1", "") for _ in range(MAX_TRACES)]
    assert [child is None for child in children[-2:]] == [False, True]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.array([0.1, 3e20, 1e-10, np.nan, -np.inf, 1 / 3], np.float32), "0.1,3e+20,1e-10,nan,-inf,0.333333"),
        (np.array([True, False]), "1,0"),
        (np.array([2**63], np.uint64), str(2**63)),
        (np.array([1.5], np.float16), "1.5"),
    ],
)
def test_elements_are_written_as_triton_writes_them(array: Any, text: str) -> None:
    datatype, raw = from_numpy(array)
    assert data_text(bytes(raw), datatype, array.shape) == text
