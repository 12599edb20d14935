"""Sequence batching: order, slots, control inputs, states, and the end of sequences."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Overloaded
from dynamo.common.tensors.request import SEQUENCE_OWNER
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context, RequestTimings
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult
from dynamo.worker.repository.models.models import RepositoryModels
from dynamo.worker.repository.scheduling.pipeline import NoProcess
from dynamo.worker.repository.scheduling.sequences import SequenceModel, UnknownSequence
from tests.support.repositories import infer, infer_all, opened, python_model
from tests.support.virtual_time import run as run_in_virtual_time
from tests.support.waiting import WAIT_S, until

CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } }
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_STRING dims: [ 1 ] }
"""
ABOUT = """
import json, os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.instance = args["model_instance_name"]
    def execute(self, requests):
        folder = os.path.dirname(pb_utils.get_model_dir())
        if any(r.inputs()[0].as_numpy().any() for r in requests):
            open(os.path.join(folder, f"begun-{self.instance}"), "w").close()
            while not os.path.exists(os.path.join(folder, "go")):
                time.sleep(0.002)
        responses = []
        for row, r in enumerate(requests):
            inputs = {t.name(): t.as_numpy() for t in r.inputs()}
            about = {name: a.ravel().tolist()[0] for name, a in inputs.items() if name != "x" and a.dtype != object}
            about |= {"row": row, "rows": len(requests), "on": self.instance, "pid": os.getpid(), "id": r.correlation_id()}
            about |= {"flags": r.flags(), "shape": list(inputs.get("START", inputs["x"]).shape)}
            text = np.full(inputs["x"].shape, json.dumps(about), object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", text)]))
        return responses
"""


async def send(models: RepositoryModels, id: int | str, flags: str = "", value: float = 0.0, model: str = "reporter") -> Any:
    """Send a request of a sequence; return what the model was given. `flags`: "s" for START, "e" for END."""
    parameters = {"sequence_id": id, "sequence_start": "s" in flags, "sequence_end": "e" in flags}
    shape = (1, 1) if models.find(model).card.max_batch_size else (1,)
    response = await infer(models, model, {"x": np.full(shape, value, np.float32)}, parameters=parameters)
    return json.loads(np.array(response["y"], object).ravel()[0])


async def until_unknown(models: RepositoryModels, id: int) -> None:
    """Send requests of a sequence until the worker does not know it."""
    while True:
        try:
            await send(models, id)
        except UnknownSequence:
            return
        except DynamoError:
            continue  # what failed with the process


def sequences_of(models: RepositoryModels, model: str = "reporter") -> SequenceModel:
    executable = models.find(model).versions["1"]
    assert isinstance(executable, SequenceModel)
    return executable


def make_reporter(repository: Path, batching: str = f"sequence_batching {{ {CONTROLS} }}", more: str = "") -> Path:
    return python_model(repository, "reporter", ABOUT, f"{TENSORS}\n{batching}\n{more}")


async def test_a_model_sees_where_in_its_sequence_a_request_is(tmp_path: Path) -> None:
    make_reporter(tmp_path)
    async with opened(tmp_path, "reporter") as models:
        reports = [await send(models, 5, flags) for flags in ("s", "", "e", "se")]
    assert [[about[name] for name in ("START", "END", "READY", "ID", "id", "flags")] for about in reports] == [
        [1.0, False, 1, 5, 5, 1],
        [0.0, False, 1, 5, 5, 0],
        [0.0, True, 1, 5, 5, 2],
        [1.0, True, 1, 5, 5, 3],
    ]
    assert {tuple(about["shape"]) for about in reports} == {(1,)}


async def test_requests_outside_of_a_sequence_are_refused_in_triton_s_words(tmp_path: Path) -> None:
    make_reporter(tmp_path, more="max_batch_size: 2")
    unknown = (
        "inference request for sequence 7 to model 'reporter' must specify the START flag on the first request of the sequence"
    )
    async with opened(tmp_path, "reporter") as models:
        with pytest.raises(InvalidRequest, match="must specify a non-zero or non-empty correlation ID"):
            await send(models, 0, "s")
        with pytest.raises(UnknownSequence, match=unknown) as caught:
            await send(models, 7)
        assert caught.value.retryable, "another worker may know it"
        await send(models, 7, "se")
        with pytest.raises(UnknownSequence, match=unknown):
            await send(models, 7)
        two_rows = {"x": np.zeros((2, 1), np.float32)}
        with pytest.raises(InvalidRequest, match="must specify batch-size 1 due to requirements of sequence batcher"):
            await infer(models, "reporter", two_rows, parameters={"sequence_id": 1, "sequence_start": True})


async def test_sequences_may_have_names(tmp_path: Path) -> None:
    make_reporter(tmp_path, f"sequence_batching {{ {CONTROLS.replace('TYPE_UINT64', 'TYPE_STRING')} }}")
    async with opened(tmp_path, "reporter") as models:
        assert (await send(models, "first", "s"))["id"] == "first"
        assert (await send(models, "first", "e"))["flags"] == 2


async def test_direct_sequences_keep_their_row_and_rows_below_it_are_not_ready(tmp_path: Path) -> None:
    folder = make_reporter(tmp_path, more="max_batch_size: 3")
    async with opened(tmp_path, "reporter") as models, asyncio.timeout(WAIT_S):
        rows = [await send(models, id, "s") for id in (1, 2, 3)]
        assert [(about["row"], about["rows"]) for about in rows] == [(0, 1), (1, 2), (2, 3)]
        again = await send(models, 2)
        assert (again["row"], again["rows"], again["ID"], again["READY"], again["shape"]) == (1, 2, 2, 1, [1, 1])
        busy = asyncio.create_task(send(models, 1, value=1.0))
        while not (folder / "begun-reporter_0").exists():
            await asyncio.sleep(0.002)
        waiting = [asyncio.create_task(send(models, id)) for id in (1, 3)]
        await asyncio.sleep(0)
        (folder / "go").touch()
        together = [await request for request in (busy, *waiting)]
    assert [(about["row"], about["rows"]) for about in together] == [(0, 1), (0, 3), (2, 3)]


async def test_a_sequence_without_a_slot_waits_for_the_end_of_another(tmp_path: Path) -> None:
    make_reporter(
        tmp_path, f"sequence_batching {{ {CONTROLS} max_sequence_idle_microseconds: 60000000 }}", "instance_group { count: 2 }"
    )
    async with opened(tmp_path, "reporter") as models, asyncio.timeout(WAIT_S):
        placed = [await send(models, id, "s") for id in (1, 2)]
        assert {about["on"] for about in placed} == {"reporter_0_0", "reporter_0_1"}
        third = asyncio.create_task(send(models, 3, "s"))
        for _ in range(3):
            assert {(await send(models, id))["on"] for id in (1,)} == {placed[0]["on"]}, "a sequence stays on its instance"
        assert not third.done()
        await send(models, 2, "e")
        assert (await third)["on"] == placed[1]["on"]


async def test_an_idle_sequence_ends_and_frees_its_slot(tmp_path: Path) -> None:
    make_reporter(tmp_path, f"sequence_batching {{ {CONTROLS} max_sequence_idle_microseconds: 20000 }}")
    async with opened(tmp_path, "reporter") as models, asyncio.timeout(WAIT_S):
        await send(models, 1, "s")
        await send(models, 2, "s")  # waits until the first is idle
        with pytest.raises(UnknownSequence):
            await send(models, 1)


async def test_the_oldest_requests_of_several_sequences_are_batched(tmp_path: Path) -> None:
    strategy = "oldest { max_candidate_sequences: 4 } max_sequence_idle_microseconds: 60000000"
    folder = make_reporter(tmp_path, f"sequence_batching {{ {strategy} {CONTROLS} }}", "max_batch_size: 2")
    async with opened(tmp_path, "reporter") as models, asyncio.timeout(WAIT_S):
        busy = asyncio.create_task(send(models, 9, "s", value=1.0))
        while not (folder / "begun-reporter_0").exists():
            await asyncio.sleep(0.002)
        waiting = [asyncio.create_task(send(models, id, "s")) for id in (1, 2, 3)]
        second = asyncio.create_task(send(models, 1))
        await asyncio.sleep(0)
        (folder / "go").touch()
        rows = [(about["row"], about["rows"]) for about in await asyncio.gather(busy, *waiting, second)]
    assert rows == [(0, 1), (0, 2), (1, 2), (0, 2), (1, 2)], "never two requests of one sequence together"


async def test_the_death_of_a_process_ends_its_sequences_and_no_others(tmp_path: Path) -> None:
    make_reporter(
        tmp_path, f"sequence_batching {{ {CONTROLS} max_sequence_idle_microseconds: 60000000 }}", "instance_group { count: 2 }"
    )
    async with opened(tmp_path, "reporter") as models, asyncio.timeout(WAIT_S):
        first, second = [await send(models, id, "s") for id in (1, 2)]
        os.kill(first["pid"], signal.SIGKILL)
        await until_unknown(models, 1)
        assert (await send(models, 2))["pid"] == second["pid"]


async def test_a_request_whose_caller_leaves_does_not_hold_up_its_sequence(tmp_path: Path) -> None:
    folder = make_reporter(tmp_path)
    async with opened(tmp_path, "reporter") as models, asyncio.timeout(WAIT_S):
        busy = asyncio.create_task(send(models, 1, "s", value=1.0))
        while not (folder / "begun-reporter_0").exists():
            await asyncio.sleep(0.002)
        left = asyncio.create_task(send(models, 1))
        await asyncio.sleep(0)
        left.cancel()
        (folder / "go").touch()
        await busy
        assert (await send(models, 1, "e"))["END"] is True
        assert "sequences=0, waiting=0" in repr(sequences_of(models))


async def test_decoupled_models_have_sequences_too(tmp_path: Path) -> None:
    code = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for value in (r.correlation_id(), r.flags()):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([value], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    config = TENSORS.replace("TYPE_STRING", "TYPE_FP32") + "model_transaction_policy { decoupled: true } sequence_batching { }"
    python_model(tmp_path, "many", code, config)
    async with opened(tmp_path, "many") as models, asyncio.timeout(WAIT_S):
        for start, flags in ((True, 1.0), (False, 0.0)):
            parameters = {"sequence_id": 4, "sequence_start": start}
            responses = await infer_all(models, "many", {"x": np.zeros(1, np.float32)}, parameters=parameters)
            assert [response.outputs["y"].tolist() for response in responses] == [[4.0], [flags]]


class Faulty:
    """An instance that fails unforeseen at first."""

    def __init__(self) -> None:
        self.calls = 0

    async def respond_all(self, requests: Sequence[ModelRequest]) -> list[ModelResult | DynamoError]:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("a defect")
        return [ModelResult({}) for _ in requests]

    async def close(self) -> None:
        return None


async def test_a_defect_fails_the_batch_and_leaves_the_sequence_usable(tmp_path: Path) -> None:
    config = ModelConfig(name="faulty")
    config.sequence_batching.max_sequence_idle_microseconds = 60_000_000
    model = SequenceModel(config, [Faulty()], tmp_path)
    request = ModelRequest({}, Context("r"), (), {"sequence_id": 1, "sequence_start": True})
    with pytest.raises(EngineError, match="model 'faulty' failed: ValueError"):
        await model.respond(request)
    assert await model.respond(request) == ModelResult({})
    await model.close()


class Listing:
    """An instance whose state is the ids and the values that its sequence has had."""

    async def respond_all(self, requests: Sequence[ModelRequest]) -> list[ModelResult | DynamoError]:
        return [
            ModelResult({name: request.inputs[name] for name in ("ID", "START")}, {"owner": request.context.request_id})
            for request in requests
        ]

    async def close(self) -> None:
        return None


async def test_a_sequence_is_joined_by_its_owner_alone_and_the_model_gets_the_id_as_it_was_sent(tmp_path: Path) -> None:
    config = ModelConfig(name="owned")
    text_format.Parse(f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {CONTROLS} }}", config)
    model = SequenceModel(config, [Listing(), Listing()], tmp_path)

    async def send(owner: str, **flags: bool) -> ModelResult:
        context = Context(owner, headers={SEQUENCE_OWNER: owner} if owner else {})
        return await model.respond(ModelRequest({}, context, (), {"sequence_id": 42, **flags}))

    await send("op", sequence_start=True)
    for other in "bob", "":
        with pytest.raises(UnknownSequence):
            await send(other)
        with pytest.raises(UnknownSequence):
            await send(other, sequence_end=True)
    await send("bob", sequence_start=True)
    await send("bob", sequence_end=True)
    result = await send("op")
    assert result.outputs["ID"].tolist() == [42]
    assert result.outputs["START"].tolist() == [0], "it goes on"
    await model.close()


class Recorder:
    """An instance that responds at once, and keeps the time and the ids of each batch; None is a row without a request."""

    def __init__(self) -> None:
        self.batches: list[tuple[float, list[str | None]]] = []
        self.timings: list[RequestTimings] = []

    async def respond_all(self, requests: Sequence[ModelRequest]) -> list[ModelResult | DynamoError]:
        now = asyncio.get_running_loop().time()
        self.batches.append((now, [request.context.request_id if request.parameters else None for request in requests]))
        self.timings += [request.context.timings for request in requests if request.parameters]
        return [ModelResult({}) for _ in requests]

    async def close(self) -> None:
        return None


async def test_equal_ids_of_two_owners_are_never_on_one_instance_at_once(tmp_path: Path) -> None:
    config = ModelConfig(name="owned", max_batch_size=3)
    text_format.Parse("sequence_batching { max_sequence_idle_microseconds: 60000000 }", config)
    recorder = Recorder()
    model = SequenceModel(config, [recorder], tmp_path)

    async def send(owner: str, id: int, **flags: bool) -> None:
        context = Context(f"{owner}{id}", headers={SEQUENCE_OWNER: owner})
        await model.respond(ModelRequest({}, context, (), {"sequence_id": id, **flags}))

    await send("op", 1, sequence_start=True)
    with pytest.raises(Overloaded, match="sequence id 1 of model 'owned' is in use on all instances"):
        await send("bob", 1, sequence_start=True)
    await send("op", 2, sequence_start=True)
    await send("bob", 7, sequence_start=True)
    waiting = [asyncio.create_task(send(owner, 3, sequence_start=True)) for owner in ("op", "bob")]
    await asyncio.sleep(0)
    await send("op", 1, sequence_end=True)
    await waiting[0]
    await send("op", 2, sequence_end=True)
    assert model.waiting == 1, "there is a slot, beside its namesake"
    await send("op", 3, sequence_end=True)
    await waiting[1]
    await model.close()
    assert [id for _, ids in recorder.batches for id in ids if id] == ["op1", "op2", "bob7", "op1", "op3", "op2", "op3", "bob3"]


async def batches_of(batching: str, arrivals: Sequence[float]) -> list[tuple[float, list[str | None]]]:
    """Return the batches that are formed when the first request of sequence 1, 2, … comes at each of these seconds."""
    config = ModelConfig(name="batched", max_batch_size=4)
    text_format.Parse(f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {batching} }}", config)
    recorder = Recorder()
    model = SequenceModel(config, [recorder], Path())

    async def send_at(second: float, number: int) -> None:
        await asyncio.sleep(second)
        parameters: dict[str, Any] = {"sequence_id": number, "sequence_start": True}
        await model.respond(ModelRequest({}, Context(str(number)), (), parameters))

    await asyncio.gather(*(send_at(second, number) for number, second in enumerate(arrivals, 1)))
    await model.close()
    assert all(timings.batched for timings in recorder.timings)
    executions = [timings.execution_rows for timings in recorder.timings if timings.execution_rows]
    assert executions == [len(rows) for _, rows in recorder.batches], "one request of each batch counts as its execution"
    return recorder.batches


HALF = "direct { max_queue_delay_microseconds: 2000000 minimum_slot_utilization: 0.5 }"
OLDEST = "oldest { max_candidate_sequences: 8 max_queue_delay_microseconds: 2000000 preferred_batch_size: [ 2, 4 ] }"


@pytest.mark.parametrize(
    ("batching", "arrivals", "batches"),
    [
        (HALF, [0.0], [(2.0, ["1"])]),
        (HALF, [0.0, 1.0], [(1.0, ["1", "2"])]),
        (HALF, [0.0, 3.0, 4.0], [(2.0, ["1"]), (4.0, [None, "2", "3"])]),
        ("direct { max_queue_delay_microseconds: 2000000 }", [0.0], [(0.0, ["1"])]),
        (OLDEST, [0.0], [(2.0, ["1"])]),
        (OLDEST, [0.0, 1.0, 1.5], [(1.0, ["1", "2"]), (3.5, ["3"])]),
        (OLDEST, [0.0, 0.0, 0.0, 0.0, 0.0], [(0.0, ["1", "2"]), (0.0, ["3", "4"]), (2.0, ["5"])]),
    ],
)
def test_batches_of_sequences_wait_for_company(
    batching: str, arrivals: list[float], batches: list[tuple[float, list[str | None]]]
) -> None:
    assert run_in_virtual_time(batches_of(batching, arrivals)) == batches


def summing(folder: Path) -> None:
    """A model without memory: `sum` = `x` + `before`; it is its state."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in ("x", "before", "y", "after")]
    nodes = [helper.make_node("Add", ["x", "before"], ["y"]), helper.make_node("Identity", ["y"], ["after"])]
    graph = helper.make_graph(nodes, "sum", tensors[:2], tensors[2:])
    (folder / "1").mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "1" / "model.onnx")


async def test_a_request_that_an_onnx_model_cannot_run_fails_no_other_sequence_of_its_batch(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.INT64, ["n", 1]) for name in "xy")
    table = helper.make_tensor("table", TensorProto.INT64, [3], [10, 20, 30])
    graph = helper.make_graph([helper.make_node("Gather", ["table", "x"], ["y"])], "look", [x], [y], [table])
    folder = tmp_path / "look"
    (folder / "1").mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "1" / "model.onnx")
    oldest = "oldest { max_candidate_sequences: 4 preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 5000000 }"
    (folder / "config.pbtxt").write_text(f'backend: "onnxruntime" max_batch_size: 4 sequence_batching {{ {oldest} }}')
    async with opened(tmp_path, "look") as models, asyncio.timeout(WAIT_S):
        starts = [{"sequence_id": id, "sequence_start": True} for id in (1, 2)]
        first, second = await asyncio.gather(
            infer(models, "look", {"x": np.array([[1]])}, parameters=starts[0]),
            infer(models, "look", {"x": np.array([[99]])}, parameters=starts[1]),
            return_exceptions=True,
        )
    assert first == {"y": [[20]]}
    assert isinstance(second, InvalidRequest) and "indices element out of data bounds" in str(second)


STATE = 'input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ 1 ]'


@pytest.mark.parametrize(
    ("initial", "first"),
    [
        ("", 0.0),
        ('initial_state { name: "i" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }', 0.0),
        ('initial_state { name: "i" data_type: TYPE_FP32 dims: [ 1 ] data_file: "ten" }', 10.0),
    ],
)
async def test_onnx_models_get_the_state_that_their_last_response_of_the_sequence_gave(
    tmp_path: Path, initial: str, first: float
) -> None:
    summing(tmp_path / "sum")
    (tmp_path / "sum" / "initial_state").mkdir()
    (tmp_path / "sum" / "initial_state" / "ten").write_bytes(np.float32(10).tobytes())
    config = f"max_batch_size: 4 sequence_batching {{ state {{ {STATE} {initial} }} }}"
    (tmp_path / "sum" / "config.pbtxt").write_text(f'backend: "onnxruntime" {config}')
    async with opened(tmp_path, "sum") as models, asyncio.timeout(WAIT_S):
        card = models.find("sum").card
        assert [spec.name for spec in (*card.inputs, *card.outputs)] == ["x", "y"] and card.has_sequences

        async def add(id: int, value: float, start: bool = False) -> float:
            parameters = {"sequence_id": id, "sequence_start": start}
            [[total]] = (await infer(models, "sum", {"x": np.array([[value]], np.float32)}, parameters=parameters))["y"]
            return float(total)

        assert await asyncio.gather(add(1, 1.0, True), add(2, 5.0, True)) == [first + 1.0, first + 5.0]
        assert await asyncio.gather(add(1, 2.0), add(2, 2.0)) == [first + 3.0, first + 7.0]
        assert await add(1, 4.0) == first + 7.0
        assert await add(1, 3.0, True) == first + 3.0, "START begins anew"


@pytest.mark.parametrize(
    ("datatype", "id", "given"),
    [
        ("INT32", 7, 7),
        ("INT64", 2**40, 2**40),
        ("INT32", 2**40 + 5, 5),
        ("UINT64", 2**64 - 1, 2**64 - 1),
        ("INT32", "abc", 3),
        ("UINT64", "abc", 27974191445704707),
        ("UINT32", "longer than eight bytes", 23),
    ],
)
async def test_an_id_that_the_control_input_cannot_hold_is_cut_as_in_triton(
    tmp_path: Path, datatype: str, id: int | str, given: int
) -> None:
    make_reporter(tmp_path, f"sequence_batching {{ {CONTROLS.replace('UINT64', datatype)} }}")
    async with opened(tmp_path, "reporter") as models:
        about = await send(models, id, "se")
    assert (about["ID"], about["id"]) == (given, id)


@pytest.mark.parametrize(
    ("batching", "reason"),
    [
        (
            'control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID } }',
            "'c' of kind CONTROL_SEQUENCE_CORRID needs a data_type",
        ),
        (
            'control_input { name: "c" control { kind: CONTROL_SEQUENCE_START } }',
            "'c' of kind CONTROL_SEQUENCE_START needs two values",
        ),
        ('control_input { name: "c" control { int32_false_true: [ 0 ] } }', "needs two values in one of int32_false_true"),
        ('control_input { name: "x" control { int32_false_true: [ 0, 1 ] } }', "have the name 'x' more than once"),
        (CONTROLS + CONTROLS.replace('"START"', '"S2"'), "have the name 'END' more than once"),
        ("oldest { max_candidate_sequences: 2 preferred_batch_size: 9 }", "preferred_batch_size must be from 1 to 1, got 9"),
        ('state { input_name: "s" }', "state 's' needs an output_name and a data_type"),
        *(
            (f'state {{ input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ 2 ] {initial} }}', reason)
            for initial, reason in (
                (2 * 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } ', "Found '2' elements"),
                (
                    'initial_state { name: "i" data_type: TYPE_INT32 dims: [ 2 ] zero_data: true }',
                    "does not match the state data",
                ),
                ("initial_state { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true }", "Field 'name' must be set"),
                ('initial_state { name: "i" data_type: TYPE_FP32 zero_data: true }', "'s'. 0 != 1"),
                ('initial_state { name: "i" data_type: TYPE_FP32 dims: [ -1 ] zero_data: true }', "contains variable dimensions"),
                ('initial_state { name: "i" data_type: TYPE_FP32 dims: [ 3 ] zero_data: true }', "3 != 2"),
                ('initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] }', "to have state_data set"),
                (
                    'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] data_file: "gone" }',
                    "initial_state/gone cannot be read: No such file",
                ),
                ('initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] data_file: "short" }', "'s' has 2 bytes"),
            )
        ),
    ],
)
async def test_a_wrong_configuration_names_its_field(tmp_path: Path, batching: str, reason: str) -> None:
    make_reporter(tmp_path, f"sequence_batching {{ {batching} }}")
    (tmp_path / "reporter" / "initial_state").mkdir()
    (tmp_path / "reporter" / "initial_state" / "short").write_bytes(b"\0\0")
    async with opened(tmp_path) as models:
        assert reason in str((await models.load_all(["reporter"]))["reporter"])


ITERATING = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = DECOUPLED
        self.folder = args["model_repository"]
        self.calls = {}
    def execute(self, requests):
        while not os.path.exists(os.path.join(self.folder, "go")):
            time.sleep(0.002)
        responses = []
        for r in requests:
            inputs = {t.name(): t.as_numpy().ravel()[0] for t in r.inputs()}
            calls = self.calls.setdefault(r.correlation_id(), [])
            calls.append([len(requests), int(inputs["START"]), r.flags()])
            response = pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[json.dumps(calls)]], object))])
            is_last = len(calls) >= inputs["x"]
            if inputs["x"] < 0:
                os._exit(1)
            if not is_last:
                r.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if self.decoupled:
                flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
                r.get_response_sender().send(response, flags=flags)
            responses.append(response if is_last else None)
        return None if self.decoupled else responses
"""


def make_iterating(repository: Path, *, decoupled: bool, strategy: str = "oldest { max_candidate_sequences: 2 }") -> Path:
    batching = f"sequence_batching {{ iterative_sequence: true {strategy} {CONTROLS} }} max_batch_size: 4"
    policy = f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}"
    code = ITERATING.replace("DECOUPLED", str(decoupled))
    return python_model(repository, "iterating", code, f"{TENSORS}\n{batching}\n{policy}")


async def iterate(models: RepositoryModels, times: int) -> list[Any]:
    """Send a request that the model wants so many times; return what it says in each of its responses."""
    responses = await infer_all(models, "iterating", {"x": np.array([[times]], np.float32)})
    return [json.loads(response.outputs["y"][0, 0]) for response in responses if response.outputs]


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 2 }"])
async def test_iterative_sequences_run_together_until_each_has_ended(tmp_path: Path, decoupled: bool, strategy: str) -> None:
    folder = make_iterating(tmp_path, decoupled=decoupled, strategy=strategy)
    async with opened(tmp_path, "iterating") as models, asyncio.timeout(WAIT_S):
        first = asyncio.create_task(iterate(models, 3))
        await until(lambda: "sequences=1" in repr(sequences_of(models, "iterating")))
        second = asyncio.create_task(iterate(models, 2))
        await until(lambda: "sequences=2" in repr(sequences_of(models, "iterating")))
        (folder / "go").touch()
        calls, others = (await first), (await second)
        assert calls[-1] == [[1, 1, 1], [2, 0, 0], [2, 0, 0]]
        assert others[-1] == [[2, 1, 1], [2, 0, 0]]
        assert len(calls) == (3 if decoupled else 1)
        await until(lambda: "sequences=0, waiting=0" in repr(sequences_of(models, "iterating")))


@pytest.mark.parametrize("decoupled", [False, True])
async def test_an_iterative_sequence_ends_when_its_caller_leaves(tmp_path: Path, decoupled: bool) -> None:
    folder = make_iterating(tmp_path, decoupled=decoupled)
    async with opened(tmp_path, "iterating") as models, asyncio.timeout(WAIT_S):
        leaving = [asyncio.create_task(iterate(models, 10**9)) for _ in range(3)]
        await until(lambda: "sequences=3, waiting=1" in repr(sequences_of(models, "iterating")))
        (folder / "go").touch()
        for task in leaving:
            task.cancel()
        assert len((await iterate(models, 2))[-1]) == 2, "a slot is free"
        await until(lambda: "sequences=0, waiting=0" in repr(sequences_of(models, "iterating")))


@pytest.mark.parametrize("decoupled", [False, True])
async def test_sequences_that_a_process_has_not_got_do_not_end_with_it(tmp_path: Path, decoupled: bool) -> None:
    folder = make_iterating(tmp_path, decoupled=decoupled)
    async with opened(tmp_path, "iterating") as models, asyncio.timeout(WAIT_S):
        dying = asyncio.create_task(iterate(models, -1))
        await until(lambda: "sequences=1, waiting=0" in repr(sequences_of(models, "iterating")))
        others = [asyncio.create_task(iterate(models, 1)) for _ in range(3)]
        await until(lambda: "sequences=4" in repr(sequences_of(models, "iterating")))
        (folder / "go").touch()
        with pytest.raises(EngineError, match="ended with status"):
            await dying
        outcomes = await asyncio.gather(*others, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} <= {NoProcess, list}, outcomes


async def test_no_request_joins_the_sequence_of_one_without_an_id(tmp_path: Path) -> None:
    folder = make_iterating(tmp_path, decoupled=False)
    async with opened(tmp_path, "iterating") as models, asyncio.timeout(WAIT_S):
        first = asyncio.create_task(iterate(models, 3))
        await until(lambda: "sequences=1" in repr(sequences_of(models, "iterating")))
        parameters = {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
        other = asyncio.create_task(infer(models, "iterating", {"x": np.ones((1, 1), np.float32)}, parameters=parameters))
        await until(lambda: "sequences=2" in repr(sequences_of(models, "iterating")))
        (folder / "go").touch()
        await other
        await first


async def test_a_model_does_not_get_a_request_again_while_many_responses_are_unread(tmp_path: Path) -> None:
    folder = make_iterating(tmp_path, decoupled=True)
    (folder / "go").touch()
    request = ModelRequest({"x": np.array([[200]], np.float32)}, Context("slow"))
    async with (
        opened(tmp_path, "iterating") as models,
        aclosing(models.run("iterating", "", request)) as responses,  # type: ignore[type-var]
        asyncio.timeout(WAIT_S),
    ):
        await anext(responses)
        for _ in range(3):
            await iterate(models, 70)
        calls = [json.loads(response.outputs["y"][0, 0]) async for response in responses][-1]
    assert len(calls) == 200
    assert sum(size > 1 for size, *_ in calls) < 100, "it waited while the others went on"


async def test_a_start_that_is_cancelled_while_it_waits_frees_its_place(tmp_path: Path) -> None:
    folder = make_reporter(tmp_path)
    async with opened(tmp_path, "reporter") as models, asyncio.timeout(WAIT_S):
        busy = asyncio.create_task(send(models, 1, "s", value=1.0))
        await until((folder / "begun-reporter_0").exists)
        left = asyncio.create_task(send(models, 2, "s"))
        await until(lambda: "sequences=2, waiting=1" in repr(sequences_of(models)))
        left.cancel()
        await until(lambda: "sequences=1, waiting=0" in repr(sequences_of(models)))
        (folder / "go").touch()
        await busy
        await send(models, 1, "e")
        assert (await send(models, 3, "se"))["id"] == 3


async def test_a_sequence_model_is_warmed_up_by_a_sequence_of_its_own(tmp_path: Path) -> None:
    inputs = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }'
    inputs += 'inputs { key: "START" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }'
    warmup = f'model_warmup {{ name: "w" batch_size: 2 {inputs} }} max_batch_size: 2'
    make_reporter(tmp_path, f"sequence_batching {{ {CONTROLS} oldest {{ }} }}", warmup)
    async with opened(tmp_path, "reporter") as models:
        assert "sequences=0, waiting=0" in repr(sequences_of(models))
        assert (await send(models, 1, "s"))["START"] == 1.0
