from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.work import finish
from dynamo.common.repository import (
    MAX_INDEX_BYTES,
    ControlMode,
    IndexEntry,
    ModelState,
    RepositoryInstance,
    decode_repository,
    merge_indexes,
)


def instance(number: int, *entries: IndexEntry) -> RepositoryInstance:
    endpoint, id_ = Endpoint(), InstanceId(number)
    return RepositoryInstance(
        id=id_, endpoint=endpoint, subject=endpoint.rpc_subject(id_), mode=ControlMode.EXPLICIT, entries=entries
    )


def entry(name: str, version: str = "", state: str = "UNAVAILABLE", reason: str = "") -> IndexEntry:
    return IndexEntry(name=name, version=version, state=ModelState(state), reason=reason)


def index_of(instances: Sequence[RepositoryInstance]) -> list[IndexEntry]:
    return finish(merge_indexes(instances, lambda name: True))


def test_a_registration_is_read_as_it_was_written_and_only_where_it_belongs() -> None:
    given = instance(5, entry("m", "1", "READY"), entry("n", reason="not loaded"))
    assert decode_repository(given.key, given.encode()) == given
    for key, value in ((instance(6).key, given.encode()), (given.key, b"{}"), (given.key, b"\xff")):
        with pytest.raises(InvalidRequest):
            decode_repository(key, value)


@pytest.mark.parametrize("number", [-1, 2**63])
def test_a_repository_of_an_instance_that_cannot_be_is_refused(number: int) -> None:
    given = instance(number, entry("m", "1", "READY"))
    with pytest.raises(InvalidRequest, match=r"cannot be read: .*id"):
        decode_repository(given.key, given.encode())


@pytest.mark.parametrize("subject", ["", "$KV.dynamo-usage.dynamo.day", "dynamo.dynamo.backend.6.rpc"])
def test_a_repository_has_no_requests_sent_to_the_subject_of_something_else(subject: str) -> None:
    given = msgspec.structs.replace(instance(5), subject=subject)
    with pytest.raises(InvalidRequest, match="not the subject that takes its requests"):
        decode_repository(given.key, given.encode())


def test_an_index_that_is_too_long_goes_without_its_reasons() -> None:
    many = instance(5, *(entry(f"model-{number}", reason="x" * 500) for number in range(4000)))
    value = many.encode()
    assert len(value) <= MAX_INDEX_BYTES
    assert {each.reason for each in decode_repository(many.key, value).entries} == {""}
    with pytest.raises(InvalidRequest, match="index of 40000 models"):
        instance(5, *(entry(f"a-rather-long-name-of-a-model-{number}") for number in range(40_000))).encode()


def test_several_workers_are_one_repository() -> None:
    merged = index_of(
        [
            instance(0xA, entry("b", "10", "READY"), entry("b", "2", "READY"), entry("a", reason="not loaded")),
            instance(0xB, entry("b", "10", reason="no weights"), entry("a", reason="not loaded"), entry("c", "1", "LOADING")),
            instance(0xC, entry("b"), entry("c", "1", reason="too large")),
        ]
    )
    assert [(each.name, each.version, each.state.value, each.reason) for each in merged] == [
        ("a", "", "UNAVAILABLE", "not loaded"),
        ("b", "2", "READY", ""),
        ("b", "10", "READY", "worker b: no weights"),
        ("c", "1", "LOADING", "worker b: LOADING; worker c: too large"),
    ]


def test_a_version_of_thousands_of_digits_is_no_number() -> None:
    """One in an index had the server be not ready, and the index of all repositories fail."""
    merged = index_of([instance(1, entry("m", "1" * 5000), entry("m", "10"), entry("m", "9"))])
    assert [each.version[:5] for each in merged] == ["11111", "9", "10"]


def test_only_models_that_the_caller_may_use_are_in_the_index() -> None:
    of_two = [instance(1, entry("a", "1"), entry("b")), instance(2, entry("b", "1", "READY"))]
    assert [each.name for each in finish(merge_indexes(of_two, "b".__eq__))] == ["b"]


def test_a_worker_that_contradicts_itself_fails_no_index() -> None:
    twice = instance(1, entry("m", "1", reason="no weights"), entry("m", "1", reason="too large"))
    assert [each.reason for each in index_of([twice])] == ["worker 1: no weights; worker 1: too large"]


def test_the_index_of_many_repositories_is_merged_in_small_steps() -> None:
    """40 of 20,000 models held a frontend for 30 s."""
    work = merge_indexes([instance(number, *(entry(f"m{n}") for n in range(100))) for number in range(40)], lambda name: True)
    assert sum(1 for _ in work) == 40 + 100
