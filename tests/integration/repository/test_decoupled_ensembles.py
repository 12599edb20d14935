"""Ensembles with steps that give any number of responses."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.protos.model_config_pb2 import ModelConfig, ModelTransactionPolicy
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelRequest, closing
from dynamo.worker.repository.models.ensemble import decoupled_origins
from tests.support.repositories import DOUBLE, X_TO_Y, ensemble, infer_all, opened, python_model, step, x

SPLIT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in pb_utils.get_input_tensor_by_name(request, "x").as_numpy():
                if value < 0:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([value], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Gives a response for each element."""
DECOUPLED = "model_transaction_policy { decoupled: true }"
SUM = DOUBLE.replace(
    '2 * pb_utils.get_input_tensor_by_name(r, "x").as_numpy()',
    'sum(pb_utils.get_input_tensor_by_name(r, n).as_numpy() for n in ("x", "z"))',
)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Models that split, double and add."""
    for name in ("split", "again"):
        python_model(tmp_path, name, SPLIT, X_TO_Y + DECOUPLED)
    python_model(tmp_path, "double", config=X_TO_Y + "instance_group [ { count: 2 } ]")
    python_model(tmp_path, "sum", SUM, X_TO_Y + 'input [ { name: "z" data_type: TYPE_FP32 dims: [ -1 ] } ]')
    return tmp_path


SPLIT_STEP = step("split", {"x": "x"}, {"y": "a"})
DOUBLE_STEP = step("double", {"x": "a"}, {"y": "b"})


ENSEMBLES = {
    "one step": ([step("split", {"x": "x"}, {"y": "y"})], 1.0),
    "a chain, given backwards": ([step("double", {"x": "b"}, {"y": "y"}), DOUBLE_STEP, SPLIT_STEP], 4.0),
    "a diamond": ([SPLIT_STEP, DOUBLE_STEP, step("sum", {"x": "a", "z": "b"}, {"y": "y"})], 3.0),
    "two decoupled steps": ([SPLIT_STEP, DOUBLE_STEP, step("again", {"x": "b"}, {"y": "y"})], 2.0),
    "the decoupled step last": ([step("double", {"x": "x"}, {"y": "a"}), step("split", {"x": "a"}, {"y": "y"})], 2.0),
}
"""Steps, and what they multiply with."""


async def test_steps_behind_a_decoupled_one_run_for_each_of_its_responses_in_their_order(parts: Path) -> None:
    names = {what.replace(" ", "_").replace(",", ""): what for what in ENSEMBLES}
    for name, what in names.items():
        ensemble(parts, *ENSEMBLES[what][0], name=name)
    async with opened(parts, *names) as models:
        for name, what in names.items():
            assert models.find(name).card.decoupled and models.find(name).config.model_transaction_policy.decoupled
            for count in (3, 0, 60):  # more than a reader may be behind
                results = await infer_all(models, name, x(*range(count)))
                outputs = [result.outputs["y"].tolist() for result in results]
                assert outputs == [[ENSEMBLES[what][1] * n] for n in range(count)], what


async def test_a_failure_of_a_step_and_a_client_that_leaves_end_the_steps(parts: Path) -> None:
    ensemble(parts, SPLIT_STEP, step("double", {"x": "a"}, {"y": "y"}))
    async with opened(parts, "both") as models:
        with pytest.raises(DynamoError, match=r"^in ensemble 'both', negative$"):
            await infer_all(models, "both", x(1, -1))
        async with closing(models.run("both", "", ModelRequest(x(*range(100)), Context("leaves")))) as responses:
            assert (await anext(responses)).outputs["y"].tolist() == [0.0]
        assert [models.find(name).open_requests for name in ("both", "split", "double")] == [0, 0, 0]


@pytest.mark.parametrize(
    "steps",
    [
        [SPLIT_STEP, step("again", {"x": "x"}, {"y": "b"}), step("sum", {"x": "a", "z": "b"}, {"y": "y"})],
        [SPLIT_STEP, step("sum", {"x": "a", "z": "x"}, {"y": "y"})],
    ],
)
def test_tensors_of_different_decoupled_steps_do_not_meet(steps: list[str]) -> None:
    config = text_format.Parse(f"{X_TO_Y} ensemble_scheduling {{ {' '.join(steps)} }}", ModelConfig(name="both"))
    decoupled = ModelConfig(model_transaction_policy=ModelTransactionPolicy(decoupled=True))
    models = {("split", ""): decoupled, ("again", ""): decoupled, ("sum", ""): ModelConfig()}
    with pytest.raises(InvalidRequest) as refused:
        decoupled_origins(config, models)
    words = "in ensemble both, step of model 'sum' receives inputs originated from different decoupled models"
    assert str(refused.value) == words


async def test_a_decoupled_ensemble_has_no_response_cache(parts: Path) -> None:
    ensemble(parts, step("split", {"x": "x"}, {"y": "y"}), more="response_cache { enable: true }")
    async with opened(parts) as models:
        assert "response_cache.enable must be false" in str((await models.load_all(["both"]))["both"])


async def test_a_step_that_leads_to_no_output_runs_to_its_end_and_may_fail_the_request(parts: Path) -> None:
    python_model(parts, "late", DOUBLE.replace("2 *", "__import__('time').sleep(0.1) or 1 // 0 *"))
    ensemble(parts, step("split", {"x": "x"}, {"y": "y"}), step("late", {"x": "y"}, {"y": "unread"}))
    async with opened(parts, "both") as models:
        with pytest.raises(DynamoError, match="model 'late_0', message: ZeroDivisionError"):
            await infer_all(models, "both", x(1))


async def test_a_step_that_takes_no_tensor_is_refused(parts: Path) -> None:
    python_model(parts, "source", SPLIT, X_TO_Y.replace("dims: [ -1 ] }", "dims: [ -1 ] optional: true }", 1) + DECOUPLED)
    ensemble(parts, SPLIT_STEP, step("source", {}, {"y": "y"}))
    async with opened(parts) as models:
        assert "the step of model 'source' must have an input_map" in str((await models.load_all(["both"]))["both"])
