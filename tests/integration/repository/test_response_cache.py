"""The response cache of a worker: which requests are equal, what it holds, and what the statistics say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.common.errors import Code, DynamoError
from dynamo.common.repository import LoadRequest
from dynamo.worker.engine.base import Context, RequestTimings
from dynamo.worker.observability.statistics import VersionStatistics
from dynamo.worker.repository.declared.execution import ModelRequest
from dynamo.worker.repository.models.models import RepositoryModels
from dynamo.worker.repository.models.response_cache import ResponseCache
from tests.support.repositories import X_TO_Y, infer, opened, python_model, x
from tests.support.waiting import until

CACHED = X_TO_Y + "response_cache { enable: true }\n"
COUNTS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    runs = 0
    def execute(self, requests):
        responses = []
        for request in requests:
            self.runs += 1
            value = request.inputs()[0].as_numpy()
            if value[0] < 0:
                raise ValueError("negative")
            y = pb_utils.Tensor("y", np.array([self.runs], np.float32))
            responses.append(pb_utils.InferenceResponse([y], parameters={"run": self.runs}))
        return responses
"""

CONTEXT = Context("c", version="1", timings=RequestTimings())


def request(inputs: dict[str, Any], version: str = "1") -> ModelRequest:
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    return ModelRequest(arrays, Context("c", version=version, timings=RequestTimings()))


async def run(models: RepositoryModels, *values: float, **more: Any) -> float:
    [run] = (await infer(models, "counts", x(*values), **more))["y"]
    return float(run)


async def test_an_equal_request_gets_the_response_of_the_first(tmp_path: Path) -> None:
    python_model(tmp_path, "counts", COUNTS, CACHED)
    async with opened(tmp_path, "counts", cache_bytes=2**20) as models:
        assert [await run(models, 1), await run(models, 2), await run(models, 1)] == [1, 2, 1]
        assert await run(models, 1, parameters={"a": 1}, outputs=["y"]) == 1, "as there"
        assert await run(models, 1, 0) == 3, "another shape"


async def test_a_model_that_does_not_ask_for_it_is_not_cached(tmp_path: Path) -> None:
    python_model(tmp_path, "counts", COUNTS)
    async with opened(tmp_path, "counts", cache_bytes=2**20) as models:
        assert [await run(models, 1), await run(models, 1)] == [1, 2]


async def test_without_a_cache_the_setting_is_ignored_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    python_model(tmp_path, "counts", COUNTS, CACHED)
    async with opened(tmp_path, "counts") as models:
        assert [await run(models, 1), await run(models, 1)] == [1, 2]
    assert "has response_cache, which is not acted on" in caplog.text


async def test_each_warm_up_runs(tmp_path: Path) -> None:
    sample = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }'
    python_model(tmp_path, "counts", COUNTS, CACHED + f'model_warmup [ {{ name: "zeros" batch_size: 1 count: 3 {sample} }} ]')
    async with opened(tmp_path, "counts", cache_bytes=2**20) as models:
        assert await run(models, 0) == 4


async def test_errors_are_not_kept(tmp_path: Path) -> None:
    python_model(tmp_path, "counts", COUNTS, CACHED)
    async with opened(tmp_path, "counts", cache_bytes=2**20) as models:
        for _ in range(2):
            with pytest.raises(DynamoError, match="negative"):
                await run(models, -1)
        assert await run(models, 1) == 3


async def test_a_model_that_is_loaded_again_gets_no_responses_of_its_former_self(tmp_path: Path) -> None:
    python_model(tmp_path, "counts", COUNTS, CACHED)
    async with opened(tmp_path, "counts", cache_bytes=2**20) as models:
        assert await run(models, 1) == 1
        python_model(tmp_path, "counts", COUNTS.replace("runs = 0", "runs = 10"), CACHED)
        await models.load_model(LoadRequest(model="counts"))
        assert await run(models, 1) == 11
        await models.unload_model("counts")
        await until(lambda: "used=0, entries=0" in repr(models.cache))  # a former self closes after its last request


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"x": np.array([1], np.int32)}, {"x": np.array([1], np.uint32)}),
        ({"x": np.zeros(4, np.int8)}, {"x": np.zeros((2, 2), np.int8)}),
        ({"x": np.zeros(1, np.int8)}, {"y": np.zeros(1, np.int8)}),
        ({"x": np.array([b"ab", b""], object)}, {"x": np.array([b"a", b"b"], object)}),
        ({"x": np.array([1], np.int8), "y": np.array([2], np.int8)}, {"x": np.array([2], np.int8), "y": np.array([1], np.int8)}),
    ],
)
async def test_requests_that_differ_have_other_keys(first: dict[str, Any], second: dict[str, Any]) -> None:
    cache = ResponseCache(2**20).for_model("m")
    keys = [(await cache.find(request(inputs), ["y"]))[0] for inputs in (first, second)]
    assert keys[0] != keys[1]


async def test_versions_and_models_have_responses_of_their_own() -> None:
    whole = ResponseCache(2**20)
    one, other = whole.for_model("m"), whole.for_model("m")
    inputs = {"x": np.array([1])}
    keys = [
        (await one.find(request(inputs), ["y"]))[0],
        (await one.find(request(inputs, "2"), ["y"]))[0],
        (await other.find(request(inputs), ["y"]))[0],
    ]
    assert len(set(keys)) == 3


async def test_a_request_for_some_outputs_of_an_earlier_one_is_a_hit() -> None:
    cache = ResponseCache(2**20).for_model("m")
    asked = request({"x": [1]})

    async def names(*outputs: str) -> list[str] | None:
        return None if (found := (await cache.find(asked, outputs))[1]) is None else list(found)

    key, _ = await cache.find(asked, ["y", "z"])
    await cache.insert(key, {"y": np.zeros(1), "z": np.zeros(2)}, CONTEXT)
    assert [await names("z"), await names("z", "y"), await names("y", "w")] == [["z"], ["z", "y"], None]
    await cache.insert(key, {"w": np.zeros(1)}, CONTEXT)
    assert await names("y", "w") == ["y", "w"]


async def test_outputs_that_come_later_count_with_those_that_are_there() -> None:
    whole = ResponseCache(4000)
    cache = whole.for_model("m")
    asked = request({"x": [1]})
    key, _ = await cache.find(asked, ["y"])
    await cache.insert(key, {"y": np.zeros(1500, np.uint8)}, CONTEXT)
    await cache.insert(key, {"z": np.zeros(2500, np.uint8)}, CONTEXT)
    assert (await cache.find(asked, ["z"]))[1] is None, "together they are too large"
    assert "used=0" in repr(whole)


async def test_the_least_recently_used_make_room_and_what_is_too_large_is_not_kept() -> None:
    whole = ResponseCache(5000)
    cache = whole.for_model("m")
    kilobyte = {"y": np.zeros(1000, np.int8)}
    keys = [(await cache.find(request({"x": np.array([number])}), ["y"]))[0] for number in range(4)]
    for key in keys[:3]:
        await cache.insert(key, kilobyte, CONTEXT)
    assert whole.find(keys[0], ()) is not None
    await cache.insert(keys[3], kilobyte, CONTEXT)
    assert [whole.find(key, ()) is not None for key in keys] == [True, False, True, True]
    await cache.insert(keys[1], {"y": np.zeros(5000, np.int8)}, CONTEXT)
    assert [whole.find(key, ()) is not None for key in keys] == [True, False, True, True]
    await cache.insert(keys[1], {"y": np.array([b"x" * 1000] * 4, object)}, CONTEXT)
    assert [whole.find(key, ()) is not None for key in keys] == [False, True, False, False], "strings count with their contents"


async def test_what_is_kept_is_a_copy(tmp_path: Path) -> None:
    cache = ResponseCache(2**24).for_model("m")
    for size in (4, 2**20):
        asked = request({"x": np.zeros(size, np.int8)})
        key, _ = await cache.find(asked, ["y"])
        output = np.ones(size, np.int8)
        await cache.insert(key, {"y": output}, CONTEXT)
        output[:] = 7
        _, outputs = await cache.find(asked, ["y"])
        assert outputs is not None and outputs["y"].max() == 1


async def test_a_response_that_comes_after_its_model_is_closed_is_not_kept() -> None:
    whole = ResponseCache(2**20)
    cache = whole.for_model("m")
    key, _ = await cache.find(request({"x": np.array([1])}), ["y"])
    cache.close()
    await cache.insert(key, {"y": np.array([1])}, CONTEXT)
    assert whole.find(key, ()) is None


def test_a_hit_is_a_success_that_is_not_computed() -> None:
    statistics = VersionStatistics("m", "1")
    statistics.succeeded(100, RequestTimings(cache_miss_ns=5, queue_ns=1))
    statistics.succeeded(10, RequestTimings(cache_hit_ns=3))
    statistics.failed(10, RequestTimings(cache_miss_ns=2), Code.INTERNAL)
    message = statistics.to_message()
    stats = message.inference_stats
    assert (message.inference_count, message.execution_count) == (1, 1)
    assert (stats.success.count, stats.queue.count, stats.compute_infer.count) == (2, 2, 1)
    assert (stats.success.ns, stats.queue.ns) == (110, 1)
    assert (stats.cache_hit.count, stats.cache_hit.ns) == (1, 3)
    assert (stats.cache_miss.count, stats.cache_miss.ns) == (2, 7)


async def test_the_cache_shows_its_counts() -> None:
    whole = ResponseCache(2**20)
    cache = whole.for_model("m")
    asked = request({"x": np.array([1])})
    key, _ = await cache.find(asked, ["y"])
    await cache.insert(key, {"y": np.array([1])}, CONTEXT)
    await cache.find(asked, ["y"])
    await whole.for_model("m").find(asked, ["y"])  # the same model, loaded again
    shown = {metric.name: metric.samples[0].value for metric in whole.collect()}
    assert shown["nv_cache_num_entries"] == shown["nv_cache_num_hits"] == shown["nv_cache_num_hits_per_model"] == 1
    assert shown["nv_cache_num_misses"] == shown["nv_cache_num_misses_per_model"] == 2
    assert shown["nv_cache_num_lookups"] == 3 and shown["nv_cache_num_evictions"] == 0 and 0 < shown["nv_cache_util"] < 0.01
