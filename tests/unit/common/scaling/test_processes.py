"""Which processes have the instances of a pool, and which are to end first."""

from __future__ import annotations

import msgspec
import pytest

from dynamo.common.discovery import MAX_PROCESS_INSTANCES, Instance, decode_registration, encode_registration
from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, Role
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.processes import in_order_of_leaving, instances_per_process, processes_for, processes_of

ONE, TWO, THREE, FOUR = map(InstanceId, (1, 2, 3, 4))


def registration(number: int, process: str, *, instances: int = 1, role: Role = Role.AGGREGATED) -> Instance:
    card = ModelCard(name="m", kind=ModelKind.TENSOR, role=role)
    id = InstanceId(number)
    return Instance(
        id=id,
        endpoint=Endpoint(),
        subject=Endpoint().rpc_subject(id),
        card=card,
        started_at=0.0,
        process=process,
        process_instances=instances,
    )


def test_a_registration_says_in_which_process_its_instance_is() -> None:
    entry = registration(1, "pod-a", instances=2)
    assert decode_registration(entry.key, encode_registration(entry)) == entry


def test_registrations_of_workers_that_do_not_say_it_are_read() -> None:
    content = msgspec.json.decode(encode_registration(registration(1, "pod-a")))
    del content["process"], content["process_instances"]
    entry = decode_registration(registration(1, "").key, msgspec.json.encode(content))
    assert (entry.process, entry.process_instances) == ("", 1)


@pytest.mark.parametrize("number", [0, -1, MAX_PROCESS_INSTANCES + 1, 10**9])
def test_a_registration_cannot_say_that_one_process_has_a_whole_fleet(number: int) -> None:
    content = msgspec.json.decode(encode_registration(registration(1, "pod-a")))
    with pytest.raises(InvalidRequest, match="process_instances"):
        decode_registration(registration(1, "").key, msgspec.json.encode(content | {"process_instances": number}))


def test_the_instances_of_a_process_are_those_that_it_says_in_this_pool() -> None:
    entries = [registration(1, "a", instances=4), registration(2, "b", instances=2, role=Role.PREFILL)]
    assert instances_per_process(entries, Pool("m")) == 4
    assert instances_per_process(entries, Pool("m", Role.PREFILL)) == 2
    assert instances_per_process(entries, Pool("other")) == 1


def test_one_instance_that_says_too_much_of_its_process_does_not_count() -> None:
    """By the most that one says, a planner with eight instances in mind had all processes but one ended."""
    lie = registration(9, "z", instances=MAX_PROCESS_INSTANCES)
    honest = [registration(number, f"pod-{number}") for number in range(1, 4)]
    assert instances_per_process([*honest, lie], Pool("m")) == 1


def test_as_many_processes_as_have_at_least_so_many_instances() -> None:
    assert [processes_for(instances, 4) for instances in (0, 1, 4, 5, 9)] == [0, 1, 1, 2, 3]


def test_processes_leave_in_the_order_of_their_instances() -> None:
    processes = processes_of([registration(1, "a"), registration(2, "b"), registration(3, ""), registration(4, "c")])
    assert processes == {ONE: "a", TWO: "b", FOUR: "c"}
    assert in_order_of_leaving((FOUR, THREE, ONE), processes) == ["c", "a"]


def test_a_process_all_of_whose_instances_are_to_leave_ends_before_one_that_would_take_others_with_it() -> None:
    processes = {ONE: "a", TWO: "b", THREE: "b"}
    assert in_order_of_leaving((ONE, TWO, THREE), processes) == ["b", "a"]
