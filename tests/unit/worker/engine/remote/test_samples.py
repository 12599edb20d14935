"""Samples on pages of metrics of engine servers."""

from __future__ import annotations

import pytest

from dynamo.worker.engine.remote.samples import Sample, read_samples


def test_samples_have_a_name_labels_and_a_value() -> None:
    [plain, labelled] = read_samples('# TYPE x gauge\nvllm:running 3\nsglang:usage{engine="1",mode="a b"} 2.5e-1 1700000000\n')
    assert plain == Sample("vllm:running", "", 3.0)
    assert (labelled.name, labelled.labels, labelled.value) == ("sglang:usage", {"engine": "1", "mode": "a b"}, 0.25)


def test_of_one_rank_only_its_samples_are_read() -> None:
    page = 'vllm:running{engine="0"} 1\nvllm:running{engine="1"} 2\nvllm:running 4\n'
    assert [sample.value for sample in read_samples(page, "1")] == [2.0]


@pytest.mark.parametrize(
    "line", ["vllm:running -1", "vllm:running NaN", "vllm:running " + "9" * 19, 'vllm:running{a="' + "x" * 4096 + '"} 1', "up 1"]
)
def test_what_no_server_could_mean_is_left_out(line: str) -> None:
    assert read_samples(f"{line}\nvllm:running 1\n") == [Sample("vllm:running", "", 1.0)]


def test_samples_of_other_names_and_what_is_beyond_the_bound_are_left_out() -> None:
    line = "vllm:num_requests_running{" + 'a="b",' * 600 + "} 1\n"
    page = "vllm:other 2\n" + line * 1000
    samples = read_samples(page, names={"vllm:num_requests_running"})
    assert {sample.value for sample in samples} == {1.0} and 100 < len(samples) < 200
