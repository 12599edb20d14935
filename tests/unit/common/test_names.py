from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import InvalidRequest
from dynamo.common.names import (
    MAX_NAME_CHARS,
    Endpoint,
    InstanceId,
    check_name,
    decode,
    encode,
    instance_of,
    new_instance_id,
    parse_instance,
)

NAMES = st.text("abcXYZ019._/-", min_size=1, max_size=MAX_NAME_CHARS)


@given(NAMES)
def test_an_accepted_name_is_one_token_and_comes_back(name: str) -> None:
    assert check_name(name) == name
    token = encode(name)
    assert re.fullmatch(r"[A-Za-z0-9_%-]+", token)
    assert decode(token) == name


@pytest.mark.parametrize("character", [" ", "*", ">", "%", ":", "é", "\n", "\0", "🦙", "\u202e"])
@pytest.mark.parametrize("name", ["{}", "llama{}", "{}llama", "org/la{}ma"])
def test_a_character_that_may_not_be_in_a_name_is_named(name: str, character: str) -> None:
    sentence = f"the model name has the character {character!r}; allowed are letters, digits and . _ / -"
    for use in (check_name, encode):
        with pytest.raises(InvalidRequest) as refused:
            use(name.format(character))
        assert str(refused.value) == sentence


def test_the_first_of_several_wrong_characters_is_named_and_what_the_name_is_for() -> None:
    with pytest.raises(InvalidRequest, match=r"^the namespace has the character '>'; "):
        check_name("a>b*c", "namespace")


def test_a_name_is_neither_empty_nor_endless() -> None:
    with pytest.raises(InvalidRequest, match=r"^the component name is empty$"):
        check_name("", "component name")
    assert check_name("x" * MAX_NAME_CHARS)
    with pytest.raises(InvalidRequest, match=r"^the model name has 257 characters; at most 256 are allowed$"):
        check_name("x" * (MAX_NAME_CHARS + 1))


@pytest.mark.parametrize("token", ["", "a.b", "a/b", "a%20b", "a%2", "a%2e", "größe", "a b"])
def test_what_cannot_have_been_encoded_is_not_decoded(token: str) -> None:
    with pytest.raises(ValueError, match="not an encoded name"):
        decode(token)


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("1f", 31), ("1F", 31), ("7fffffffffffffff", 2**63 - 1)])
def test_an_instance_is_read_from_its_hexadecimal_form(text: str, number: int) -> None:
    assert parse_instance(text) == number


@pytest.mark.parametrize("text", ["", "worker-3", "-1", "8000000000000000", "1.5", "f" * 1000, "1>"])
def test_what_is_no_instance_is_refused_in_short(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an instance id") as refused:
        parse_instance(text)
    assert repr(text[:40]) in str(refused.value)
    assert len(str(refused.value)) < 120


def test_new_instances_have_ids_of_63_bits_that_come_back_from_their_subjects() -> None:
    ids = {new_instance_id() for _ in range(100)}
    assert len(ids) == 100
    for instance in ids:
        assert parse_instance(f"{instance:x}") == instance
        assert instance_of(Endpoint().load_subject(instance)) == instance


@pytest.mark.parametrize("text", ["team.pool.answer", "dyn://team.pool.answer"])
def test_an_endpoint_has_three_parts(text: str) -> None:
    endpoint = Endpoint.parse(text)
    assert endpoint == Endpoint("team", "pool", "answer")
    assert str(endpoint) == "team.pool.answer"


@pytest.mark.parametrize("text", ["", "one", "one.two", "one.two.three.four", "dyn://one.two"])
def test_an_endpoint_of_fewer_or_more_parts_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is not of the form namespace\.component\.endpoint$"):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a.b.c>", "the endpoint name has the character '>'"),
        ("a.b*.c", "the endpoint name has the character '*'"),
        ("größe.b.c", "the endpoint name has the character 'ö'"),
        ("a..c", "the endpoint name is empty"),
        ("http://a.b.c", "the endpoint name has the character ':'"),
    ],
)
def test_a_part_of_an_endpoint_that_cannot_be_used_is_refused_with_its_character(text: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Endpoint.parse(text)
    assert str(refused.value).startswith(sentence)


def test_names_with_dots_and_slashes_stay_one_part_of_keys_and_subjects() -> None:
    endpoint, instance = Endpoint("a/b", "c.d", "e"), InstanceId(0x1F)
    assert endpoint.registration_key("org/llama-3.1", instance) == "/dynamo/v1/a%2Fb/c%2Ed/e/org%2Fllama-3%2E1/1f"
    assert endpoint.repository_key(instance) == "/dynamo/v1/%repositories/a%2Fb/c%2Ed/e/1f"
    assert endpoint.rpc_subject(instance) == "dynamo.a%2Fb.c%2Ed.1f.rpc"
    assert (endpoint.kv_subject(), endpoint.load_subject(instance)) == ("dynamo.a%2Fb.c%2Ed.kv.*", "dynamo.a%2Fb.c%2Ed.load.1f")
    assert endpoint.bookings_subject() == "dynamo.a%2Fb.c%2Ed.bookings"
