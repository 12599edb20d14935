"""Models of Triton's Python backend, run in their own processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from dynamo.common.errors import (
    AlreadyExists,
    Cancelled,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
    UnknownError,
    Unsupported,
)
from dynamo.common.repository import LoadRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult, Version, closing
from dynamo.worker.repository.python.environments import Environments
from dynamo.worker.repository.python.python_backend import PythonBackend
from dynamo.worker.repository.scheduling.responses import MAX_UNREAD
from dynamo.worker.repository.stores.content_cache import ContentCache
from dynamo.worker.repository.wire import wire
from tests.support.repositories import X_TO_Y, infer, infer_all, opened, python_model, x
from tests.support.waiting import until

HEAD = """
import asyncio, json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

def tensor(value, name="y"):
    return pb_utils.Tensor(name, np.atleast_1d(np.asarray(value, np.float32)))

class TritonPythonModel:
"""
DECOUPLED = X_TO_Y + "model_transaction_policy { decoupled: true }\n"


async def test_a_model_gets_its_arguments_and_finds_its_own_files(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def initialize(self, args):
        self.args = args
    def execute(self, requests):
        import beside
        config = json.loads(self.args["model_config"])
        args = {
            "config": config["parameters"]["key"]["string_value"], "dims": config["input"][0]["dims"],
            "kind": self.args["model_instance_kind"], "name": self.args["model_instance_name"],
            "version": self.args["model_version"], "model": self.args["model_name"], "beside": beside.VALUE,
            "folder": os.path.basename(pb_utils.get_model_dir()), "repository": os.path.basename(self.args["model_repository"]),
        }
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([json.dumps(args)], np.object_))]) for _ in requests]
"""
    )
    config = (
        X_TO_Y.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING')
        + 'parameters: { key: "key" value: { string_value: "v" } }'
    )
    folder = python_model(tmp_path, "args", code, config)
    (folder / "1" / "beside.py").write_text("VALUE = 5")
    async with opened(tmp_path, "args") as models:
        [args] = (await infer(models, "args", x(1)))["y"]
    assert json.loads(args) == {
        "config": "v",
        "dims": [-1],
        "kind": "CPU",
        "name": "args_0",
        "version": "1",
        "model": "args",
        "beside": 5,
        "folder": "1",
        "repository": "args",
    }


async def test_a_model_is_a_module_of_the_package_of_its_version(tmp_path: Path) -> None:
    code = """
from .beside import VALUE
from . import deep
import beside as same
import pickle
import triton_python_backend_utils as pb_utils

class Box:
    pass

class TritonPythonModel:
    def execute(self, requests):
        unpickled = pickle.loads(pickle.dumps(Box()))
        names = [__name__, __package__, deep.__name__, type(unpickled).__module__, str(same.VALUE + VALUE)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.np.array(names, object))]) for _ in requests]
"""
    folder = python_model(
        tmp_path, "packed", code, X_TO_Y.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING'), version=3
    )
    (folder / "3" / "beside.py").write_text("VALUE = 5")
    (folder / "3" / "deep").mkdir()
    (folder / "3" / "deep" / "__init__.py").write_text("from ..beside import VALUE")
    (folder / "3" / "json.py").write_text("raise ImportError('a module of the model hides none of Python')")
    async with opened(tmp_path, "packed") as models:
        assert await infer(models, "packed", x(1)) == {"y": [b"3.model", b"3", b"3.deep", b"3.model", b"10"]}


async def test_bf16_reaches_a_model_as_such_by_dlpack_and_goes_back(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        outputs = [pb_utils.Tensor.from_dlpack("y", r.inputs()[0].to_dlpack()) for r in requests]
        assert all(output.triton_dtype() == 14 for output in outputs)
        return [pb_utils.InferenceResponse([output]) for output in outputs]
"""
    )
    python_model(tmp_path, "half", code, X_TO_Y.replace("TYPE_FP32", "TYPE_BF16"))
    async with opened(tmp_path, "half") as models:
        assert await infer(models, "half", x(1, -2.5)) == {"y": [1.0, -2.5]}


@pytest.mark.parametrize("decoupled", [False, True])
async def test_a_rescheduled_request_is_executed_again_until_it_is_responded_to(tmp_path: Path, decoupled: bool) -> None:
    code = (
        HEAD
        + f"""
    def initialize(self, args):
        self.left = {{}}
    def execute(self, requests):
        responses = []
        for r in requests:
            count = int(r.inputs()[0].as_numpy()[0])
            left = self.left[count] = self.left.get(count, count) - 1
            if left > 0:
                r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
                continue
            response = pb_utils.InferenceResponse([tensor([count, left])])
            if {decoupled}:
                r.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            responses.append(response)
        return None if {decoupled} else responses
"""
    )
    python_model(tmp_path, "again", code, DECOUPLED if decoupled else X_TO_Y)
    async with opened(tmp_path, "again") as models, asyncio.timeout(120):
        counts = await asyncio.gather(*(infer(models, "again", x(count)) for count in (50, 3, 1, 20)))
    assert [response["y"] for response in counts] == [[50, 0], [3, 0], [1, 0], [20, 0]]


async def test_a_rescheduled_request_ends_when_its_caller_leaves(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        [r] = requests
        if r.inputs()[0].as_numpy()[0]:
            r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [None]
        return [pb_utils.InferenceResponse([tensor(5)])]
"""
    )
    python_model(tmp_path, "forever", code)
    async with opened(tmp_path, "forever") as models:
        forever = asyncio.create_task(infer(models, "forever", x(1)))
        async with asyncio.timeout(120):
            assert await infer(models, "forever", x(0)) == {"y": [5.0]}, "others are executed in between"
            forever.cancel()
            assert await infer(models, "forever", x(0)) == {"y": [5.0]}


async def test_a_final_response_says_so_and_an_end_without_one_says_nothing(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        for r in requests:
            sender, final = r.get_response_sender(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if r.inputs()[0].as_numpy()[0] == 1:
                sender.send(pb_utils.InferenceResponse([tensor(1)]))
                sender.send(flags=final)
            elif r.inputs()[0].as_numpy()[0] == 2:
                sender.send(pb_utils.InferenceResponse([tensor(1)]))
                sender.send(pb_utils.InferenceResponse([tensor(2)]), flags=final)
            else:
                sender.send(pb_utils.InferenceResponse([]), flags=final)
"""
    )
    python_model(tmp_path, "ending", code, DECOUPLED)
    async with opened(tmp_path, "ending") as models:
        ends = [[response.is_final for response in await infer_all(models, "ending", x(kind))] for kind in (1, 2, 3)]
    assert ends == [[False], [False, True], [True]]


async def test_a_response_sender_refuses_what_triton_s_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    code = (
        HEAD
        + """
    def execute(self, requests):
        [r] = requests
        sender, final, said = r.get_response_sender(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL, []
        response = pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([b"kept"], object))])
        for arguments in ((), (None, 5), (None, final), (5, final), (response, final), (None, final)):
            try:
                sender.send(*arguments)
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        pb_utils.Logger.log_info(" | ".join(said))
"""
    )
    python_model(tmp_path, "sender", code, X_TO_Y.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING'))
    async with opened(tmp_path, "sender") as models:
        assert await infer(models, "sender", x(1)) == {"y": [b"kept"]}
        await until(lambda: any(" | " in record.getMessage() for record in caplog.records))
    [said] = [record.getMessage() for record in caplog.records if " | " in record.getMessage()]
    assert said.removeprefix("sender: ").split(" | ") == [
        "TritonModelException: Inference Response object must be provided when the response flags is set to zero.",
        "TritonModelException: Unable to send response. Unsupported flag provided.",
        "TritonModelException: Unable to send response. Non-decoupled model cannot send complete final before sending a "
        "response.",
        "TypeError: a response must be InferenceResponse, not int",
        "TritonModelException: Unable to send response. Response sender has been closed.",
    ]


async def test_tensors_of_every_datatype_come_and_go_unchanged(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("o" + t.name(), t.as_numpy()) for t in r.inputs()]) for r in requests]
"""
    )
    kinds = ["BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "STRING"]
    config = "".join(
        f'{way} {{ name: "{prefix}{k}" data_type: TYPE_{k} dims: [ -1, 2 ] }}\n'
        for k in kinds
        for way, prefix in (("input", ""), ("output", "o"))
    )
    python_model(tmp_path, "same", code, config)
    numpy = [np.bool_, "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]
    inputs = {kind: np.array([[0, 1], [1, 0]]).astype(dtype) for kind, dtype in zip(kinds, numpy, strict=False)}
    inputs["STRING"] = np.array([[b"", b"\xff\x00"], ["ä".encode(), b"long " * 500]], object)
    async with opened(tmp_path, "same") as models:
        [response] = await infer_all(models, "same", inputs)
        empty = await infer_all(models, "same", {name: array[:0] for name, array in inputs.items()})
    for name, array in inputs.items():
        assert response.outputs[f"o{name}"].dtype.kind == array.dtype.kind
        np.testing.assert_array_equal(response.outputs[f"o{name}"], array)
        assert empty[0].outputs[f"o{name}"].shape == (0, 2)


async def test_the_parameters_of_a_request_reach_the_model(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        [r] = requests
        args = [r.request_id(), r.correlation_id(), r.flags(), r.priority(), r.timeout(), sorted(r.requested_output_names()),
                json.loads(r.parameters()), r.model_name(), r.model_version(), r.is_cancelled()]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([json.dumps(args)], np.object_))], parameters={"n": 3})]
"""
    )
    python_model(tmp_path, "args", code, X_TO_Y.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING'))
    async with opened(tmp_path, "args") as models:
        parameters = {"sequence_id": "s-1", "sequence_start": True, "priority": 2, "timeout": 900, "mine": 1.5}
        [response] = await infer_all(models, "args", x(1), parameters=parameters, outputs=["y"])
        assert response.outputs["y"].tolist() == [b'["request-7", "s-1", 1, 2, 900, ["y"], {"mine": 1.5}, "args", 1, false]']
        assert response.parameters == {"n": 3}
        parameters = {"priority": 2, "triton_models_priority": "high", "triton_models_timeout": 5}
        [response] = await infer_all(models, "args", x(1), parameters=parameters, outputs=["y"])
    own = b'{"priority": "high", "timeout": 5}'
    assert response.outputs["y"].tolist() == [b'["request-7", 0, 0, 2, 0, ["y"], %b, "args", 1, false]' % own]


async def test_an_error_of_a_model_is_that_error_to_its_caller_only(tmp_path: Path) -> None:
    model = (
        HEAD
        + """
    def execute(self, requests):
        found = []
        for r in requests:
            value = pb_utils.get_input_tensor_by_name(r, "x").as_numpy()
            code = json.loads(r.parameters()).get("code")
            error = None if code is None else pb_utils.TritonError("too low", getattr(pb_utils.TritonError, code))
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", value)], error))
        return found
"""
    )
    batching = "max_batch_size: 9\ndynamic_batching { max_queue_delay_microseconds: 5000000 preferred_batch_size: [ 9 ] }\n"
    python_model(tmp_path, "picky", model, X_TO_Y + batching)
    kinds = {
        "UNKNOWN": UnknownError,
        "ALREADY_EXISTS": AlreadyExists,
        "INTERNAL": EngineError,
        "INVALID_ARG": InvalidRequest,
        "NOT_FOUND": ModelNotFound,
        "UNAVAILABLE": Unavailable,
        "UNSUPPORTED": Unsupported,
        "CANCELLED": Cancelled,
    }
    row = {"x": np.ones((1, 1), np.float32)}
    async with opened(tmp_path, "picky") as models:
        good, *bad = await asyncio.gather(
            infer(models, "picky", row),
            *(infer(models, "picky", row, parameters={"code": code}) for code in kinds),
            return_exceptions=True,
        )
    assert good == {"y": [[1.0]]}
    assert [type(error) for error in bad] == list(kinds.values())
    assert {str(error) for error in bad} == {"too low"}


async def test_requests_that_come_together_are_one_execute(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([tensor([[len(requests)]] * len(r.inputs()[0].as_numpy()))]) for r in requests]
"""
    )
    batching = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 5000000 preferred_batch_size: [ 8 ] }\n"
    python_model(tmp_path, "counts", code, X_TO_Y + batching)
    async with opened(tmp_path, "counts") as models:
        two_rows = {"x": np.zeros((2, 1), np.float32)}
        responses = await asyncio.gather(*(infer(models, "counts", two_rows) for _ in range(4)))
    assert responses == [{"y": [[4.0], [4.0]]}] * 4


RAISES = """
    def execute(self, requests):
        responses = []
        for request in requests:
            rows = request.inputs()[0].as_numpy()
            if rows.min() < 0:
                raise ValueError("below 0")
            responses.append(pb_utils.InferenceResponse([tensor(2 * rows)]))
        return responses
"""
SENDS_OR_RAISES = """
    def execute(self, requests):
        for request in requests:
            if request.inputs()[0].as_numpy().min() < 0:
                raise ValueError("below 0")
        for request in requests:
            sender, rows = request.get_response_sender(), request.inputs()[0].as_numpy()
            sender.send(pb_utils.InferenceResponse([tensor(2 * rows)]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.mark.parametrize(
    ("code", "transactions"),
    [
        pytest.param(RAISES, "", id="one-response"),
        pytest.param(SENDS_OR_RAISES, "model_transaction_policy { decoupled: true }", id="decoupled"),
    ],
)
async def test_an_exception_of_execute_fails_the_request_at_fault_alone(tmp_path: Path, code: str, transactions: str) -> None:
    batching = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 5000000 preferred_batch_size: [ 3 ] }\n"
    python_model(tmp_path, "raises", HEAD + code, X_TO_Y + batching + transactions)
    async with opened(tmp_path, "raises") as models:
        rows = [{"x": np.array([[value]], np.float32)} for value in (1, -1, 3)]
        results = await asyncio.gather(*(infer(models, "raises", row) for row in rows), return_exceptions=True)
    assert (results[0], results[2]) == ({"y": [[2.0]]}, {"y": [[6.0]]})
    assert isinstance(results[1], EngineError) and "below 0" in str(results[1])


async def test_a_decoupled_model_sends_any_number_of_responses_from_any_thread(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        for r in requests:
            threading.Thread(target=self.count, args=(r,)).start()
    def count(self, r):
        sender = r.get_response_sender()
        for left in range(int(r.inputs()[0].as_numpy()[0]), 0, -1):
            sender.send(pb_utils.InferenceResponse([tensor(left)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )
    python_model(tmp_path, "counter", code, DECOUPLED)
    async with opened(tmp_path, "counter") as models:
        responses = await infer_all(models, "counter", x(3))
        many = await infer_all(models, "counter", x(1000))
        none = await infer_all(models, "counter", x(0))
    assert [each.outputs["y"].tolist() for each in responses] == [[3], [2], [1]]
    assert len(many) == 1000 and none == []


async def test_a_decoupled_model_sees_that_its_request_was_cancelled(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def initialize(self, args):
        self.noticed = threading.Event()
    def execute(self, requests):
        for r in requests:
            if r.inputs()[0].as_numpy()[0] < 0:
                sender = r.get_response_sender()
                sender.send(pb_utils.InferenceResponse([tensor(float(self.noticed.wait(120)))]), flags=1)
            else:
                threading.Thread(target=self.send, args=(r,)).start()
    def send(self, r):
        sender = r.get_response_sender()
        while not r.is_cancelled():
            sender.send(pb_utils.InferenceResponse([tensor(1)]))
            time.sleep(0.001)
        self.noticed.set()
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )
    python_model(tmp_path, "endless", code, DECOUPLED)
    async with opened(tmp_path, "endless") as models:
        async with closing(models.run("endless", "", ModelRequest(x(1), Context("r")))) as responses:
            async for _ in responses:
                break
        [noticed] = await infer_all(models, "endless", x(-1))
        await asyncio.wait_for(models.find("endless").drained(), 120)
    assert noticed.outputs["y"].tolist() == [1.0]


async def test_async_models_work_and_decoupled_ones_run_concurrently(tmp_path: Path) -> None:
    plain = (
        HEAD
        + """
    async def execute(self, requests):
        await asyncio.sleep(0)
        return [pb_utils.InferenceResponse([tensor(7)]) for _ in requests]
"""
    )
    meeting = (
        HEAD
        + """
    def initialize(self, args):
        self.both, self.count = asyncio.Event(), 0
    async def execute(self, requests):
        [r] = requests
        self.count += 1
        if self.count == 2:
            self.both.set()
        await asyncio.wait_for(self.both.wait(), 120)
        r.get_response_sender().send(pb_utils.InferenceResponse([tensor(self.count)]), flags=1)
"""
    )
    python_model(tmp_path, "plain", plain)
    python_model(tmp_path, "meeting", meeting, DECOUPLED)
    async with opened(tmp_path, "plain", "meeting") as models:
        assert await infer(models, "plain", x(1)) == {"y": [7.0]}
        responses = await asyncio.gather(infer(models, "meeting", x(1)), infer(models, "meeting", x(1)))
    assert responses == [{"y": [2.0]}, {"y": [2.0]}]


async def test_wrong_requests_of_other_models_are_refused_in_tritons_words(tmp_path: Path) -> None:
    row = np.zeros(1, np.float32)
    id, missing = "[request id: request-7] ", "but missing required input(s)"
    wrong: list[tuple[dict[str, object], str]] = [
        ({}, f"{id}expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], {missing} ['x']. Please provide"),
        ({"x": row, "z": row}, f"{id}expected 1 inputs but got 2 inputs for model 'm'. Got input(s) ['x','z'], {missing} []."),
        ({"z": row}, "unexpected inference input 'z' for model 'm'"),
        ({"x": row.astype(np.int8)}, f"{id}inference input 'x' data-type is 'INT8', but model 'm' expects 'FP32'"),
        ({"x": row[None]}, f"{id}unexpected shape for input 'x' for model 'm'. Expected [-1], got [1,1]. "),
    ]
    python_model(tmp_path, "m")
    async with opened(tmp_path, "m") as models:
        for inputs, words in wrong:
            with pytest.raises(InvalidRequest, match=f"^{re.escape(words)}"):
                await infer(models, "m", inputs)
        with pytest.raises(InvalidRequest, match=r"^unexpected inference output 'z' for model 'm'"):
            await infer(models, "m", {"x": row}, outputs=["y", "z"])


async def test_the_timeout_of_a_call_reaches_the_called_model_and_is_no_deadline(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        inputs = requests[0].inputs()
        call = pb_utils.InferenceRequest(model_name="called", inputs=inputs, requested_output_names=["y"], timeout=1)
        return [pb_utils.InferenceResponse(call.exec().output_tensors())]
"""
    )
    called = (
        HEAD
        + "\n    def execute(self, requests):\n        return [pb_utils.InferenceResponse([tensor(requests[0].timeout())])]\n"
    )
    python_model(tmp_path, "caller", code)
    python_model(tmp_path, "called", called)
    async with opened(tmp_path, "caller", "called") as models:
        assert await infer(models, "caller", x(1)) == {"y": [1.0]}


async def test_a_model_calls_other_models_and_queries_the_repository(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        [r] = requests
        inputs = [pb_utils.Tensor("x", r.inputs()[0].as_numpy())]
        inner = pb_utils.InferenceRequest(model_name="double", inputs=inputs, requested_output_names=["y"])
        once = pb_utils.get_output_tensor_by_name(inner.exec(), "y").as_numpy()
        many = pb_utils.InferenceRequest(model_name="counter", inputs=inputs, requested_output_names=["y"])
        *counted, end = many.exec(decoupled=True)
        assert not end.output_tensors() and not end.has_error()
        total = sum(float(response.output_tensors()[0].as_numpy()[0]) for response in counted)
        plain = many.exec()
        assert plain.has_error() and "Please use 'decoupled=True'" in plain.error().message(), plain.error()
        bad = pb_utils.InferenceRequest(model_name="missing", inputs=inputs, requested_output_names=["y"]).exec()
        assert bad.error().code() == pb_utils.TritonError.INTERNAL
        assert bad.error().message().endswith("Failed for execute the inference request. Model 'missing' is not ready.")
        ready = [pb_utils.is_model_ready("double"), pb_utils.is_model_ready("double", "2"), pb_utils.is_model_ready("missing"),
                 pb_utils.is_model_ready("double", "x"), inner.is_cancelled()]
        return [pb_utils.InferenceResponse([tensor([*once, total, *ready])])]
"""
    )
    counter = (
        HEAD
        + """
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for left in range(int(r.inputs()[0].as_numpy()[0]), 0, -1):
                sender.send(pb_utils.InferenceResponse([tensor(left)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )
    python_model(tmp_path, "caller", code)
    python_model(tmp_path, "double")
    python_model(tmp_path, "counter", counter, DECOUPLED)
    async with opened(tmp_path, "caller", "double", "counter") as models:
        assert await infer(models, "caller", x(4)) == {"y": [8.0, 10.0, 1.0, 0.0, 0.0, 0.0, 0.0]}


async def test_a_model_calls_and_queries_others_while_it_is_initialized_and_finalized(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def initialize(self, args):
        self.folder = os.path.dirname(pb_utils.get_model_dir())
        self.begun = self.double(3) if pb_utils.is_model_ready("double") else None
    def double(self, value):
        request = pb_utils.InferenceRequest(model_name="double", inputs=[tensor(value, "x")], requested_output_names=["y"])
        return request.exec().output_tensors()[0].as_numpy()
    def execute(self, requests):
        return [pb_utils.InferenceResponse([tensor(self.begun)]) for _ in requests]
    def finalize(self):
        with open(os.path.join(self.folder, "ended"), "w") as file:
            file.write(str(self.double(4)[0]))
"""
    )
    folder = python_model(tmp_path, "caller", code)
    python_model(tmp_path, "double")
    async with opened(tmp_path, "double") as models, asyncio.timeout(120):
        await models.load_model(LoadRequest(model="caller"))
        assert await infer(models, "caller", x(0)) == {"y": [6.0]}
        await models.unload_model("caller")
    assert (folder / "ended").read_text() == "8.0"


async def test_an_async_model_awaits_several_models_at_once(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    async def execute(self, requests):
        [r] = requests
        calls = [
            pb_utils.InferenceRequest(model_name="double", inputs=[tensor(n, "x")], requested_output_names=["y"]).async_exec()
            for n in range(5)
        ]
        found = await asyncio.gather(*calls)
        return [pb_utils.InferenceResponse([tensor([each.output_tensors()[0].as_numpy()[0] for each in found])])]
"""
    )
    python_model(tmp_path, "caller", code)
    python_model(tmp_path, "double", config=X_TO_Y + "instance_group { count: 2 }")
    async with opened(tmp_path, "caller", "double") as models:
        assert await infer(models, "caller", x(1)) == {"y": [0.0, 2.0, 4.0, 6.0, 8.0]}


async def test_a_model_loads_and_unloads_others_where_that_is_allowed(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        [r] = requests
        try:
            pb_utils.load_model("double")
            found = [pb_utils.is_model_ready("double")]
            pb_utils.unload_model("double")
            found.append(pb_utils.is_model_ready("double"))
        except pb_utils.TritonModelException as error:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.UNAVAILABLE))]
        return [pb_utils.InferenceResponse([tensor(found)])]
"""
    )
    python_model(tmp_path, "chief", code)
    python_model(tmp_path, "double")
    async with opened(tmp_path, "chief") as models:
        assert await infer(models, "chief", x(1)) == {"y": [1.0, 0.0]}
    async with opened(tmp_path, "chief", on_request=False) as models:
        with pytest.raises(Unavailable, match="--model-control-mode explicit"):
            await infer(models, "chief", x(1))


async def test_instances_work_at_the_same_time(tmp_path: Path) -> None:
    """Each waits until a file of the other is there."""
    code = (
        HEAD
        + """
    def initialize(self, args):
        self.folder = args["model_repository"]
    def execute(self, requests):
        open(os.path.join(self.folder, f"here-{os.getpid()}"), "w").close()
        until = time.monotonic() + 120
        while sum(name.startswith("here-") for name in os.listdir(self.folder)) < 2:
            assert time.monotonic() < until, "the other instance never ran"
            time.sleep(0.005)
        return [pb_utils.InferenceResponse([tensor(os.getpid())]) for _ in requests]
"""
    )
    python_model(tmp_path, "pair", code, X_TO_Y.replace("FP32", "FP32") + "instance_group { count: 2 }")
    async with opened(tmp_path, "pair") as models:
        one, other = await asyncio.gather(infer(models, "pair", x(1)), infer(models, "pair", x(1)))
    assert one != other


async def test_a_process_that_dies_fails_its_request_and_is_started_again(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0] < 0:
            os._exit(3)
        return [pb_utils.InferenceResponse([tensor(os.getpid())]) for _ in requests]
"""
    )
    python_model(tmp_path, "mortal", code)
    async with opened(tmp_path, "mortal") as models:
        before = await infer(models, "mortal", x(1))
        with pytest.raises(EngineError, match="ended with status 3"):
            await infer(models, "mortal", x(-1))
        after = None
        async with asyncio.timeout(120):
            while after is None:
                try:
                    after = await infer(models, "mortal", x(1))
                except Unavailable as error:
                    assert error.retryable
                    await asyncio.sleep(0.02)
    assert after != before


MORTAL = """
    def execute(self, requests):
        responses = []
        for r in requests:
            value = float(r.inputs()[0].as_numpy().reshape(-1)[0])
            if value < 0:
                with open(os.path.join(pb_utils.get_model_dir(), "deaths"), "a") as file:
                    file.write("x")
                    deaths = file.tell()
                if value == -1 or deaths == 1:
                    os._exit(3)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * r.inputs()[0].as_numpy())]))
        return responses
"""


async def test_a_request_whose_process_dies_is_retried_once_and_then_fails(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "mortal", HEAD + MORTAL)
    async with opened(tmp_path, "mortal") as models:
        with pytest.raises(EngineError, match="ended with status 3"):
            await infer(models, "mortal", x(-1))
    assert (folder / "1" / "deaths").read_text() == "xx"


async def test_a_retry_after_the_death_of_a_process_succeeds(tmp_path: Path) -> None:
    python_model(tmp_path, "mortal", HEAD + MORTAL)
    async with opened(tmp_path, "mortal") as models:
        assert await infer(models, "mortal", x(-2)) == {"y": [-4.0]}


async def test_the_other_requests_of_a_batch_whose_process_dies_succeed(tmp_path: Path) -> None:
    config = X_TO_Y + "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: 3 }"
    python_model(tmp_path, "mortal", HEAD + MORTAL, config)
    async with opened(tmp_path, "mortal") as models:
        rows = [{"x": np.array([[value]], np.float32)} for value in (1, -1, 3)]
        results = await asyncio.gather(*(infer(models, "mortal", row) for row in rows), return_exceptions=True)
    assert (results[0], results[2]) == ({"y": [[2.0]]}, {"y": [[6.0]]})
    assert isinstance(results[1], EngineError) and "ended with status 3" in str(results[1])


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("error", ["KeyboardInterrupt('stop')", "SystemExit(2)", "Odd('stop')", "asyncio.CancelledError('stop')"])
async def test_a_base_exception_of_a_model_fails_the_request_and_the_process_goes_on(
    tmp_path: Path, kind: str, error: str
) -> None:
    code = (
        HEAD.replace("class TritonPythonModel", "class Odd(BaseException):\n    pass\n\nclass TritonPythonModel")
        + f"""
    {kind} execute(self, requests):
        if requests[0].inputs()[0].as_numpy()[0] < 0:
            raise {error}
        return [pb_utils.InferenceResponse([tensor([os.getpid() >> 16, os.getpid() & 0xFFFF])]) for _ in requests]
"""
    )
    python_model(tmp_path, "odd", code)
    async with opened(tmp_path, "odd") as models, asyncio.timeout(120):
        before = await infer(models, "odd", x(1))
        with pytest.raises(EngineError, match=error.partition("(")[0].removeprefix("asyncio.")):
            await infer(models, "odd", x(-1))
        assert await infer(models, "odd", x(1)) == before


class BrokenModels:
    """The other models of a worker, of which each fails in a way that is not foreseen."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def run(self, model: str, version: str, request: ModelRequest) -> AsyncIterator[ModelResult]:
        raise self._error

    def config(self, model: str, version: str) -> ModelConfig:
        raise self._error

    async def load(self, model: str, config: str, files: Mapping[str, bytes]) -> None:
        raise self._error

    async def unload(self, model: str, dependents: bool) -> None:
        raise self._error


@pytest.mark.parametrize("error", [RuntimeError("boom"), OSError(116, "stale"), asyncio.CancelledError()])
async def test_an_unforeseen_error_of_a_called_model_reaches_the_caller(tmp_path: Path, error: BaseException) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        inner = pb_utils.InferenceRequest(model_name="other", inputs=[tensor(1, "x")], requested_output_names=["y"])
        failed = [inner.exec().has_error()]
        try:
            pb_utils.load_model("other")
        except pb_utils.TritonModelException:
            failed.append(True)
        return [pb_utils.InferenceResponse([tensor([*failed])])]
"""
    )
    folder = python_model(tmp_path, "caller", code)
    config = text_format.Parse((folder / "config.pbtxt").read_text(), ModelConfig())
    environments = Environments(ContentCache(tmp_path, 0), 0)
    model = await PythonBackend(BrokenModels(error), environments).open(Version("caller", "1", config, folder))
    try:
        async with asyncio.timeout(120):
            [response] = [await model.respond(ModelRequest(x(1), Context("r")))]
    finally:
        await model.close()
    assert response.outputs["y"].tolist() == [1.0, 1.0]


THREADED = """
    def initialize(self, args):
        self.sent = self.executions = 0
        self.executed_again = threading.Event()
    def execute(self, requests):
        self.executions += 1
        if self.executions > 1:
            self.executed_again.set()
        for r in requests:
            threading.Thread(target=self.respond, args=(r.get_response_sender(), int(r.inputs()[0].as_numpy()[0]))).start()
    def respond(self, sender, count):
        for number in range(abs(count)):
            if number == 1 and count < 0:
                self.executed_again.wait()  # else others wait for the end of its `execute`, and it may send more for their sake
            sender.send(pb_utils.InferenceResponse([tensor(self.sent)]))
            self.sent += count < 0
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


async def test_a_slow_reader_delays_no_other_stream_of_its_process_and_stops_its_own(tmp_path: Path) -> None:
    python_model(tmp_path, "threaded", HEAD + THREADED, DECOUPLED)
    async with (
        opened(tmp_path, "threaded") as models,
        asyncio.timeout(120),
        closing(models.run("threaded", "", ModelRequest(x(-5000), Context("slow")))) as slow,
    ):
        await anext(slow)
        responses = await infer_all(models, "threaded", x(2000))
        assert len(responses) == 2000
        [last] = await infer_all(models, "threaded", x(1))
        assert last.outputs["y"][0] <= 2 * wire.RESPONSE_WINDOW, "the model waits for the slow reader"
        assert len([response async for response in slow]) == 4999


async def test_a_model_that_does_not_read_what_it_called_stops_the_called_model(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        [r] = requests
        def call(count):
            request = pb_utils.InferenceRequest(model_name="threaded", inputs=[tensor(count, "x")], requested_output_names=["y"])
            return request.exec(decoupled=True)
        slow = call(-5000)
        first = next(slow)
        beside = len([response for response in call(2000) if response.output_tensors()])
        last, end = call(1)
        sent = last.output_tensors()[0].as_numpy()[0]
        return [pb_utils.InferenceResponse([tensor([beside, sent, len(list(slow))])])]
"""
    )
    python_model(tmp_path, "caller", code)
    python_model(tmp_path, "threaded", HEAD + THREADED, DECOUPLED)
    async with opened(tmp_path, "caller", "threaded") as models, asyncio.timeout(120):
        response = await infer(models, "caller", x(1))
    beside, sent, total = response["y"]
    assert (beside, total) == (2000, 5000)
    assert sent <= 3 * wire.RESPONSE_WINDOW, "one window of the caller, and two of the model that it called"


@pytest.mark.parametrize("response", ["next(many.exec(decoupled=True))", "many.exec(decoupled=True)"])
async def test_responses_that_a_caller_leaves_unread_are_cancelled(tmp_path: Path, response: str) -> None:
    code = (
        HEAD
        + f"""
    def execute(self, requests):
        def wait_until(state):
            request = pb_utils.InferenceRequest(model_name="endless", inputs=[tensor(state, "x")], requested_output_names=["y"])
            return next(request.exec(decoupled=True)).output_tensors()
        many = pb_utils.InferenceRequest(model_name="endless", inputs=[tensor(-1, "x")], requested_output_names=["y"])
        response = {response}
        wait_until(0)
        del response
        return [pb_utils.InferenceResponse(wait_until(1))]
"""
    )
    endless = (
        HEAD
        + """
    def initialize(self, args):
        self.begun, self.cancelled = self.states = [threading.Event(), threading.Event()]
    def execute(self, requests):
        for r in requests:
            state = int(r.inputs()[0].as_numpy()[0])
            respond, arguments = (self.respond, ()) if state < 0 else (self.wait, (self.states[state],))
            threading.Thread(target=respond, args=(r.get_response_sender(), *arguments)).start()
    def respond(self, sender):
        self.begun.set()
        while not sender.is_cancelled():
            sender.send(pb_utils.InferenceResponse([tensor(1)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self.cancelled.set()
    def wait(self, sender, state):
        response = pb_utils.InferenceResponse([tensor(state.wait(120))])
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )
    python_model(tmp_path, "caller", code)
    python_model(tmp_path, "endless", endless, DECOUPLED)
    async with opened(tmp_path, "caller", "endless") as models, asyncio.timeout(120):
        assert await infer(models, "caller", x(1)) == {"y": [1.0]}


async def test_a_model_that_ignores_its_slow_reader_fails_that_request_alone(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    async def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for number in range(int(r.inputs()[0].as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([tensor(number)]))
                await asyncio.sleep(0)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )
    python_model(tmp_path, "async", code, DECOUPLED)
    async with (
        opened(tmp_path, "async") as models,
        asyncio.timeout(120),
        closing(models.run("async", "", ModelRequest(x(MAX_UNREAD + 500), Context("slow")))) as slow,
    ):
        await anext(slow)
        assert len(await infer_all(models, "async", x(MAX_UNREAD))) == MAX_UNREAD
        with pytest.raises(Overloaded, match="too slowly"):
            async for _ in slow:
                pass


async def test_processes_end_with_their_model(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([tensor([os.getpid() >> 16, os.getpid() & 0xFFFF])]) for _ in requests]
    def finalize(self):
        open(os.path.join(pb_utils.get_model_dir(), "finalized"), "w").close()
"""
    )
    folder = python_model(tmp_path, "mortal", code)
    async with opened(tmp_path, "mortal") as models:
        high, low = (await infer(models, "mortal", x(1)))["y"]
        await models.unload_model("mortal")
        assert (folder / "1" / "finalized").exists()
        with pytest.raises(ProcessLookupError):
            os.kill((int(high) << 16) + int(low), signal.SIGCONT)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import nonsense_that_is_not_there", "nonsense_that_is_not_there"),
        ("x = 1", "no class TritonPythonModel"),
        ("class TritonPythonModel: pass", "no method execute"),
        (HEAD + "    def execute(self, r): ...\n    def initialize(self, args): raise ValueError('no weights')", "no weights"),
        (HEAD + "    def execute(self, r): ...\n    def initialize(self, args): os._exit(9)", "ended with status 9"),
    ],
)
async def test_a_load_failure_names_its_reason(tmp_path: Path, code: str, reason: str) -> None:
    python_model(tmp_path, "broken", code)
    async with opened(tmp_path) as models:
        failed = await models.load_all(["broken"])
        assert reason in str(failed["broken"])
        [entry] = models.index()
        assert entry.state == "UNAVAILABLE" and reason in entry.reason
        with pytest.raises(InvalidRequest, match="load failed for model 'broken': version 1 is at UNAVAILABLE state: Internal: "):
            await models.load_model(LoadRequest(model="broken"))


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("[]", "InferenceRequest.s. size is:1, and InferenceResponse.s. size is:0"),
        ("None", "Expected a list in the execute return, found type '<class 'NoneType'>'"),
        ("[5]", "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'int'>'"),
        ("1 / 0", "Failed to process the request.s. for model 'wrong_0', message: ZeroDivisionError: division by zero"),
        ("[pb_utils.Tensor('', None)]", "message: TritonModelException: Tensor name cannot be an empty string"),
    ],
)
async def test_a_malformed_response_fails_its_request(tmp_path: Path, returned: str, reason: str) -> None:
    python_model(tmp_path, "wrong", HEAD + f"    def execute(self, requests):\n        return {returned}\n")
    async with opened(tmp_path, "wrong") as models:
        for _ in range(2):
            with pytest.raises(EngineError, match=reason):
                await infer(models, "wrong", x(1))


@pytest.mark.parametrize(
    ("outputs", "given", "about"),
    [
        ("tensor([[1]])", {"y": [[1.0]]}, "gave its output 'y' in shape [1, 1]; it declares [-1]"),
        ("pb_utils.Tensor('y', np.array([1], np.int8))", {"y": [1]}, "gave its output 'y' as INT8; it declares FP32"),
        ("pb_utils.Tensor('y', np.array(2, np.float32))", {"y": 2.0}, "gave its output 'y' in shape []; it declares [-1]"),
        ("pb_utils.Tensor('z', np.array([1], np.int8))", {}, "did not give its output 'y'"),
        ("", {}, "did not give its output 'y'"),
    ],
)
async def test_outputs_other_than_declared_are_logged_once_and_passed_on_or_are_errors_on_demand(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, outputs: str, given: dict[str, object], about: str
) -> None:
    code = (
        HEAD + f"    def execute(self, requests):\n        return [pb_utils.InferenceResponse([{outputs}]) for _ in requests]\n"
    )
    python_model(tmp_path, "loose", code)
    async with opened(tmp_path, "loose") as models:
        for _ in range(2):
            assert await infer(models, "loose", x(1)) == given
        assert [record.getMessage().count(about) for record in caplog.records if record.levelname == "WARNING"] == [1]
    async with opened(tmp_path, "loose", strict_outputs=True) as models:
        with pytest.raises(EngineError, match=re.escape(about)):
            await infer(models, "loose", x(1))


async def test_a_model_completes_its_configuration(tmp_path: Path) -> None:
    code = (
        HEAD
        + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(16)
        config.set_dynamic_batching()
        return config
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
    )
    python_model(tmp_path, "complete", code, config="")
    async with opened(tmp_path, "complete") as models:
        card = models.find("complete").card
        assert card.max_batch_size == 16 and card.inputs[0].shape == (-1, -1) and card.backend == "python"
        assert models.config("complete", "").HasField("dynamic_batching")
    async with opened(tmp_path, auto_complete=False) as models:
        assert "there is no config.pbtxt" in str((await models.load_all(["complete"]))["complete"])


@pytest.mark.parametrize(
    "model", ["class TritonPythonModel(Base): pass", "TritonPythonModel = Base", "from beside import Base as TritonPythonModel"]
)
async def test_a_model_completes_its_configuration_by_code_of_another_file(tmp_path: Path, model: str) -> None:
    base = """
class Base:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [-1]})
        return config
    def execute(self, requests): ...
"""
    folder = python_model(
        tmp_path, "inherits", f"from beside import Base\n{model}\n", config='output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    (folder / "1" / "beside.py").write_text(base)
    async with opened(tmp_path, "inherits") as models:
        assert [tensor.name for tensor in models.find("inherits").card.inputs] == ["x"]


async def test_a_model_that_completes_nothing_is_imported_once(tmp_path: Path) -> None:
    """Imports of a model may take long, such as that of PyTorch."""
    imports = tmp_path / "imports"
    code = f"open({str(imports)!r}, 'a').write('once')\nclass TritonPythonModel:\n    def execute(self, requests): ...\n"
    python_model(tmp_path, "plain", code)
    async with opened(tmp_path, "plain"):
        assert imports.read_text() == "once"
