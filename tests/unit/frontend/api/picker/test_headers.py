"""Headers and metadata of gateways."""

from __future__ import annotations

import pytest
from google.protobuf.struct_pb2 import Struct

from dynamo.frontend.api.picker.headers import (
    MAX_FAIRNESS_CHARS,
    by_name,
    fairness_id,
    objective_headers,
    rewritten_model,
    served_by,
    subset_of,
    value_of,
)

SUBSET = "x-gateway-destination-endpoint-subset"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ({SUBSET: ["10.0.0.1:8000", "10.0.0.2"]}, {"10.0.0.1:8000", "10.0.0.2"}),
        ({SUBSET: "10.0.0.1:8000, 10.0.0.2:8000"}, {"10.0.0.1:8000", "10.0.0.2:8000"}),
        ({SUBSET: []}, set()),
        ({SUBSET: ""}, set()),
        ({"other": "10.0.0.1:8000"}, None),
    ],
)
def test_a_subset_is_a_list_or_a_line(hint: dict[str, object], expected: set[str] | None) -> None:
    metadata = Struct()
    metadata.update(hint)
    assert subset_of({"envoy.lb.subset_hint": metadata}) == expected
    assert subset_of({"envoy.lb": metadata}) is None


def test_an_objective_is_a_priority_unless_the_request_has_its_own() -> None:
    priorities = {"batch": -1}
    for name in (b"x-gateway-inference-objective", b"x-llm-d-inference-objective"):
        assert objective_headers({name: b"batch"}, priorities) == ((b"x-dynamo-request-priority", b"-1"),)
        assert objective_headers({name: b"unknown"}, priorities) == ()
        assert objective_headers({name: b"batch", b"x-dynamo-request-priority": b"3"}, priorities) == ()


def test_both_names_of_each_header_are_read_and_long_ids_are_cut() -> None:
    for prefix in (b"x-gateway", b"x-llm-d"):
        assert fairness_id({prefix + b"-inference-fairness-id": b"team"}) == "team"
        assert rewritten_model({prefix + b"-model-name-rewrite": b"big"}) == "big"
    assert len(fairness_id({b"x-gateway-inference-fairness-id": b"a" * 1000})) == MAX_FAIRNESS_CHARS


def test_the_first_of_several_values_counts_and_an_empty_one_is_none() -> None:
    headers = by_name([(b"a", b"1"), (b"b", b""), (b"a", b"2")])
    assert (value_of(headers, b"a"), value_of(headers, b"b", b"a"), value_of(headers, b"c")) == ("1", "1", "")


def test_the_endpoint_that_served_is_in_the_metadata_of_the_response() -> None:
    metadata = Struct()
    metadata.update({"x-gateway-destination-endpoint-served": "10.0.0.1:8000"})
    assert served_by({"envoy.lb": metadata}) == "10.0.0.1:8000"
    assert served_by({}) == ""
