from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from dynamo.protos.model_config_pb2 import ModelConfig
from tests.differential.cases import all_cases, named_once
from tests.differential.compare import Part, accepted_differences, compare
from tests.differential.page import PAGE, written
from tests.differential.server_client import Response


def test_the_page_lists_the_accepted_differences() -> None:
    page = PAGE.read_text()
    assert written(page) == page
    assert all(difference.title in page for difference in accepted_differences())


def test_each_accepted_difference_is_justified_and_names_parts_of_a_response() -> None:
    for difference in accepted_differences():
        assert difference.why and difference.triton and difference.here and difference.cases, difference.title
        assert set(difference.differs) <= set(Part)


def test_each_case_has_a_name_of_its_own() -> None:
    cases = named_once(all_cases())
    assert len(cases) >= 1500
    with pytest.raises(ValueError, match="each case must have a name of its own, got"):
        named_once([cases[0], cases[1], cases[0]])


def test_times_and_the_name_of_the_server_are_no_differences() -> None:
    one = Response("200", body={"model_stats": [{"last_inference": 5, "success": {"count": 1, "ns": 7}}]})
    other = Response("200", body={"model_stats": [{"last_inference": 6, "success": {"count": 1, "ns": 9}}]})
    assert not compare(one, other)
    assert not compare(
        Response("OK", body={"name": "triton", "version": "2.51", "extensions": ["a"]}),
        Response("OK", body={"name": "dynamo", "version": "1", "extensions": []}),
    )


def test_all_parts_of_a_response_are_compared() -> None:
    one = Response("200", "", {"id": "1"}, {"content-type": "text/plain"})
    assert compare(one, Response("400", "no", {"id": "2"}, {})) == set(Part)


def config_fields() -> Iterator[str]:
    """Yield the fields of a configuration, and those of the messages in it."""
    for field in ModelConfig.DESCRIPTOR.fields:
        yield field.name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from (f"{field.name}.{own.name}" for own in field.message_type.fields)


def test_the_page_says_of_each_field_of_a_configuration_what_happens_to_it() -> None:
    section = PAGE.read_text().partition("## Every field of a configuration\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w.]+)` \| .+ \|$", section, re.MULTILINE)
    assert sorted(listed) == sorted(config_fields())
