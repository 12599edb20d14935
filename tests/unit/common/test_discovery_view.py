from __future__ import annotations

import logging
import sys
from types import FrameType

import msgspec
import pytest

from dynamo.common.discovery import Instance, View, decode_registration, encode_registration, other_names
from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import HttpEndpoint, LlmInfo, ModelCard, ModelKind, TensorSpec
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.protocol import PROTOCOL
from dynamo.common.tensors.tensors import DATATYPES
from tests.support.memory import kept_objects

ENDPOINT = Endpoint("space", "backend", "generate")


def tensor_card(name: str = "adder", size: int = 4, **fields: object) -> ModelCard:
    inputs = (TensorSpec(name="x", datatype="FP32", shape=(size,)),)
    return ModelCard(name=name, kind=ModelKind.TENSOR, inputs=inputs, **fields)  # type: ignore[arg-type]


def llm_card(name: str = "talker", adapters: tuple[str, ...] = ()) -> ModelCard:
    llm = LlmInfo(context_length=128, tokenizer="abc", adapters=adapters)
    return ModelCard(name=name, kind=ModelKind.LLM, llm=llm)


def instance(number: int, card: ModelCard | None = None, started_at: float | None = None) -> Instance:
    number_id = InstanceId(number)
    return Instance(
        id=number_id,
        endpoint=ENDPOINT,
        subject=ENDPOINT.rpc_subject(number_id),
        card=card or tensor_card(),
        started_at=float(number) if started_at is None else started_at,
    )


FOREIGN_SUBJECTS = (
    "",
    "$KV.dynamo-batches.space.file.e3b0.file-1",
    "$JS.API.STREAM.PURGE.OBJ_dynamo-responses-large",
    "dynamo.space.limits",
    "dynamo.space.backend.2.rpc",
    "dynamo.other.backend.1.rpc",
    "dynamo.space.backend.*.rpc",
)
"""Where frontends may publish, by their permissions in NATS, and a worker may not have them do so."""


def put(*instances: Instance) -> dict[str, bytes | None]:
    return {instance.key: encode_registration(instance) for instance in instances}


def view_of(*instances: Instance) -> View:
    view = View()
    view.apply(put(*instances))
    return view


def ids(view: View, name: str) -> list[int]:
    return [instance.id for instance in view.instances(name)]


def test_a_registration_comes_back_as_it_was() -> None:
    original = instance(2**63 - 1, tensor_card("a.b/c", model_config=b"\x00\xff", labels={"team": "é"}))
    assert decode_registration(original.key, encode_registration(original)) == original


def test_fields_of_a_newer_worker_are_no_obstacle() -> None:
    document = msgspec.json.decode(encode_registration(instance(1)))
    document["mood"] = "sunny"
    document["card"]["wings"] = 2
    assert decode_registration(instance(1).key, msgspec.json.encode(document)) == instance(1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": 7}, "belongs under"),
        ({"subject": "dynamo.>"}, "not the subject"),
        ({"subject": ""}, "not the subject"),
        ({"id": -1}, "cannot be read: .*id"),
        ({"id": 2**63}, "cannot be read: .*id"),
        ({"id": 2**64}, "cannot be read: .*id"),
        ({"started_at": "noon"}, "cannot be read"),
        ({"endpoint": {"namespace": "other", "component": "backend", "name": "generate"}}, "belongs under"),
        ({"endpoint": {"namespace": "a b", "component": "backend", "name": "generate"}}, "character ' '"),
    ],
)
def test_a_registration_that_contradicts_itself_is_refused(change: dict[str, object], words: str) -> None:
    document = msgspec.json.decode(encode_registration(instance(1))) | change
    with pytest.raises(InvalidRequest, match=words):
        decode_registration(instance(1).key, msgspec.json.encode(document))


LLM_COUNTS = ("context_length", "block_size", "total_blocks", "max_num_seqs", "max_batched_tokens", "data_parallel_size")


@pytest.mark.parametrize("number", [-1, 2**63, 10**30])
@pytest.mark.parametrize("field", [*LLM_COUNTS, "image_token"])
def test_a_card_with_numbers_that_no_model_has_is_refused(field: str, number: int) -> None:
    right = instance(1, llm_card())
    document = msgspec.json.decode(encode_registration(right))
    document["card"]["llm"][field] = number
    with pytest.raises(InvalidRequest, match=f"cannot be read: .*{field}"):
        decode_registration(right.key, msgspec.json.encode(document))
    assert right.card.llm is not None
    wrong = msgspec.structs.replace(right.card, llm=msgspec.structs.replace(right.card.llm, **{field: number}))
    with pytest.raises(InvalidRequest, match=f"others could not read the card of model 'talker': .*{field}"):
        encode_registration(instance(1, wrong))


def test_a_card_with_larger_blocks_than_any_model_has_is_refused() -> None:
    document = msgspec.json.decode(encode_registration(instance(1, llm_card())))
    document["card"]["llm"]["block_size"] = 2**20 + 1
    with pytest.raises(InvalidRequest, match=r"cannot be read: .*block_size"):
        decode_registration(instance(1, llm_card()).key, msgspec.json.encode(document))


@pytest.mark.parametrize(
    "http",
    [
        {"headers": {":path": "/v1/load_lora_adapter"}},
        {"headers": {"x-gateway-destination-endpoint": "10.0.0.2:80"}},
        {"headers": {"x-data-parallel-rank": "1\r\nhost: x"}},
        {"address": "10.0.0.1:80,10.0.0.2:80"},
        {"address": "metadata.internal:80"},
        {"address": "10.0.0.1:80\n"},
    ],
)
def test_an_endpoint_that_would_make_another_request_of_one_is_refused(http: dict[str, object]) -> None:
    """Gateways are told it as it is, for requests of clients."""
    right = HttpEndpoint(address="10.0.0.1:80", model="served", headers={"x-data-parallel-rank": "1"})
    document = msgspec.json.decode(encode_registration(instance(1, tensor_card(http=right))))
    assert decode_registration(instance(1).key, msgspec.json.encode(document)).card.http == right
    document["card"]["http"] |= http
    with pytest.raises(InvalidRequest, match=r"cannot be read: .*http"):
        decode_registration(instance(1).key, msgspec.json.encode(document))


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "[::1]:8000", "[fe80::1%eth0]:65535"])
def test_an_endpoint_may_have_any_address(address: str) -> None:
    given = instance(1, tensor_card(http=HttpEndpoint(address=address, model="served")))
    assert decode_registration(given.key, encode_registration(given)) == given


def tensors(datatype: str, size: int = 1) -> list[dict[str, object]]:
    return [{"name": "x", "datatype": datatype, "shape": [size]}]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_batch_size": -1},
        {"max_batch_size": 2**31},
        {"inputs": tensors("FP32", -2)},
        {"inputs": tensors("FP32", 2**63)},
        {"inputs": tensors("FP8")},
        {"outputs": tensors("FP32\n")},
    ],
)
def test_a_card_whose_tensors_cannot_be_is_refused(fields: dict[str, object]) -> None:
    document = msgspec.json.decode(encode_registration(instance(1)))
    document["card"] |= fields
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decode_registration(instance(1).key, msgspec.json.encode(document))


@pytest.mark.parametrize("datatype", DATATYPES)
def test_a_card_may_have_each_datatype(datatype: str) -> None:
    document = msgspec.json.decode(encode_registration(instance(1)))
    document["card"]["inputs"] = tensors(datatype)
    assert decode_registration(instance(1).key, msgspec.json.encode(document)).card.inputs[0].datatype == datatype


@pytest.mark.parametrize("value", [b"", b"{", b"\xff\xfe", b"null", b"[]", b"{}", b"[" * 100_000])
def test_a_registration_that_is_none_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        decode_registration(instance(1).key, value)


def test_a_card_that_etcd_would_refuse_is_refused_before() -> None:
    with pytest.raises(InvalidRequest, match="bytes; at most"):
        encode_registration(instance(1, tensor_card(model_config=bytes(2**20))))


def test_a_malformed_registration_is_logged_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    view = view_of(instance(1))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            view.apply({instance(2).key: b"garbage", "/dynamo/v1/odd": b"{}"})
    assert ids(view, "adder") == [1]
    assert len(caplog.records) == 2


def test_a_registered_repository_is_no_malformed_registration(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not view_of(instance(1)).apply({Endpoint().repository_key(InstanceId(1)): b"{}"})
    assert not caplog.records


def test_a_registration_that_becomes_malformed_is_gone() -> None:
    view = view_of(instance(1))
    assert view.apply({instance(1).key: b"garbage"}).removed == (instance(1),)
    assert view.instances("adder") == ()
    assert view.models() == []


def test_the_same_tuple_is_returned_until_something_changes() -> None:
    view = view_of(instance(2), instance(1))
    before = view.instances("adder")
    assert [i.id for i in before] == [1, 2]
    assert not view.apply(put(instance(1)))
    assert view.instances("adder") is before
    view.apply(put(instance(3)))
    assert ids(view, "adder") == [1, 2, 3]


def test_a_changed_card_is_reported_as_removed_and_added() -> None:
    view = view_of(instance(1))
    changed = instance(1, tensor_card(versions=("1", "2")))
    change = view.apply(put(changed))
    assert (change.added, change.removed) == ((changed,), (instance(1),))
    assert view.card("adder") == changed.card


def test_lookups_of_unregistered_names_leave_no_trace() -> None:
    view = view_of(instance(1))
    kept = set()
    for number in range(100):
        assert view.instances(f"unknown-{number}") == ()
        kept.add(kept_objects(view))
    assert len(kept) == 1


def test_aliases_and_adapters_lead_to_the_instances_that_have_them() -> None:
    plain = llm_card()
    with_law = msgspec.structs.replace(llm_card(adapters=("law",)), aliases=("t",))
    view = view_of(instance(1, plain), instance(2, with_law))
    assert ids(view, "talker") == [1, 2]
    assert ids(view, "law") == [2]
    assert ids(view, "t") == [2]
    assert view.model_of("law") == "talker"
    assert view.models() == ["talker"]
    view.apply(put(instance(3, plain)))  # the newest one, which lacks the names
    for name in ("law", "t"):
        assert view.card(name) == with_law
        assert [each.id for each in view.newest_first(name)] == [2]
    view.apply({instance(2, with_law).key: None})
    assert view.instances("law") == ()
    assert view.model_of("t") is None


def test_lookups_of_many_names_do_not_go_through_the_names_of_each_instance() -> None:
    names = tuple(f"adapter-{number}" for number in range(200))
    view = view_of(*(instance(number, llm_card(adapters=names)) for number in range(3)))
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is other_names.__code__

    changed = put(instance(1, llm_card(adapters=(*names, "new"))))
    sys.setprofile(count)
    try:
        found = [(len(view.instances(name)), len(list(view.newest_first(name)))) for name in names]
        view.apply(changed)
        assert ids(view, "new") == [1]
        found += [(len(view.instances(name)), len(list(view.newest_first(name)))) for name in names]
    finally:
        sys.setprofile(None)
    assert found == [(3, 3)] * 400
    assert calls == 2, "the names of the registration that has changed, before and after"


def test_an_adapter_of_an_instance_marked_down_is_left_out() -> None:
    card = llm_card(adapters=("law",))
    view = view_of(instance(2, card), instance(1, card, started_at=5.0))
    assert ids(view, "law") == [1, 2]
    assert [each.id for each in view.newest_first("law")] == [1, 2]
    view.mark_down(InstanceId(1))
    assert ids(view, "law") == [2]


def test_a_models_own_name_comes_before_an_alias_and_the_first_alias_before_a_later_one() -> None:
    view = view_of(
        instance(1, tensor_card("late", aliases=("shared", "adder")), started_at=2.0),
        instance(2, tensor_card("early", aliases=("shared",)), started_at=1.0),
        instance(3, tensor_card("adder")),
    )
    assert ids(view, "shared") == [2]
    assert ids(view, "adder") == [3]


def test_instances_that_take_other_tensors_than_most_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    odd = instance(1, tensor_card(size=8))
    view = view_of(odd, instance(2), instance(3))
    with caplog.at_level(logging.WARNING):
        assert ids(view, "adder") == [2, 3]
        assert odd not in view.registered()
        view.apply(put(instance(4)))
        assert ids(view, "adder") == [2, 3, 4]
    assert len([record for record in caplog.records if "instance 1 serves another" in record.message]) == 1


def test_at_a_tie_the_card_that_was_first_stays_until_the_new_one_has_more() -> None:
    view = view_of(instance(1), instance(2), instance(3, tensor_card(size=8)), instance(4, tensor_card(size=8)))
    assert ids(view, "adder") == [1, 2]
    view.apply({instance(1).key: None})
    assert ids(view, "adder") == [3, 4]


def test_an_alias_of_instances_that_are_left_out_by_now_means_nothing() -> None:
    view = view_of(instance(1, tensor_card(aliases=("sum",))))
    assert (ids(view, "sum"), view.card("sum")) == ([1], tensor_card(aliases=("sum",)))
    view.apply(put(instance(2, tensor_card(size=8)), instance(3, tensor_card(size=8))))
    assert (ids(view, "sum"), view.card("sum"), view.count("sum")) == ([], None, 0)


def test_differences_that_do_not_matter_for_requests_do_not_divide() -> None:
    view = view_of(instance(1), instance(2, tensor_card(versions=("1", "2"), labels={"zone": "b"})))
    assert ids(view, "adder") == [1, 2]
    card = view.card("adder")
    assert card is not None
    assert card.versions == ("1", "2")


def test_an_instance_marked_down_is_left_out_of_all_its_models_until_it_is_up() -> None:
    one, other = instance(1), instance(1, tensor_card("other"))
    view = view_of(one, other, instance(2))
    assert view.mark_down(InstanceId(1))
    assert not view.mark_down(InstanceId(1))
    assert (ids(view, "adder"), ids(view, "other")) == ([2], [])
    assert len(view.registered()) == 3
    assert view.mark_up(InstanceId(1))
    assert not view.mark_up(InstanceId(1))
    assert (ids(view, "adder"), ids(view, "other")) == ([1, 2], [1])


def test_registering_again_ends_a_mark() -> None:
    view = view_of(instance(1))
    view.mark_down(InstanceId(1))
    change = view.apply(put(instance(1)))
    assert change.revived == {1}
    assert change
    assert ids(view, "adder") == [1]


def test_marks_of_unknown_and_departed_instances_are_not_kept() -> None:
    view = view_of(instance(1))
    assert not view.mark_down(InstanceId(9))
    view.mark_down(InstanceId(1))
    view.apply({instance(1).key: None})
    assert not view.is_down(InstanceId(1))


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL, PROTOCOL + 1])
def test_a_registration_of_a_version_at_most_one_apart_is_used_without_the_fields_that_are_unknown(protocol: int) -> None:
    document = msgspec.to_builtins(instance(1)) | {"protocol": protocol, "new_field": {"x": 1}}
    document["card"]["new_field"] = 1
    assert decode_registration(instance(1).key, msgspec.json.encode(document)).id == 1


def test_a_registration_without_a_version_is_of_the_first() -> None:
    document = msgspec.to_builtins(instance(1))
    del document["protocol"]
    assert decode_registration(instance(1).key, msgspec.json.encode(document)).protocol == 1


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_registration_of_a_version_further_apart_is_left_out_and_named_until_it_is_gone(
    is_readable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    document = msgspec.to_builtins(instance(1)) if is_readable else {"all": "is different"}
    value, key = msgspec.json.encode(document | {"protocol": PROTOCOL + 2}), instance(1).key
    view = View()
    for _ in range(2):
        assert not view.apply({key: value})
    assert view.other_protocols == {key: PROTOCOL + 2}
    assert caplog.text.count(f"it speaks version {PROTOCOL + 2} of the protocol") == 1
    assert view.apply({key: encode_registration(instance(1))})
    assert view.other_protocols == {}
    view.apply({key: value})
    assert not view.registered()
    view.apply({key: None})
    assert view.other_protocols == {}


@pytest.mark.parametrize("subject", FOREIGN_SUBJECTS)
def test_a_registration_has_no_requests_sent_to_the_subject_of_something_else(subject: str) -> None:
    value = encode_registration(msgspec.structs.replace(instance(1), subject=subject))
    with pytest.raises(InvalidRequest, match="not the subject that takes its requests"):
        decode_registration(instance(1).key, value)
    assert not View().apply({instance(1).key: value})
