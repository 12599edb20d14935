"""What outputs are expected of requests, by model, API key and session."""

from __future__ import annotations

import pytest

from dynamo.frontend.serving.output_lengths import OutputLengths


def learned(lengths: OutputLengths, key: str, session: str, tokens: float, times: int = 50) -> None:
    for _ in range(times):
        lengths.learn("m", key, session, tokens)


def test_before_the_first_response_nothing_is_expected() -> None:
    assert OutputLengths().expected("m", "key", "session") == 0.0


def test_keys_and_sessions_are_expected_to_go_on_as_they_did() -> None:
    lengths = OutputLengths()
    learned(lengths, "long", "", 1000.0)
    learned(lengths, "short", "", 20.0)
    learned(lengths, "short", "talkative", 600.0)
    assert lengths.expected("m", "long", "") == pytest.approx(1000.0, rel=0.15)
    assert lengths.expected("m", "short", "talkative") == pytest.approx(600.0, rel=0.1)
    assert 20.0 < lengths.expected("m", "short", "new") < lengths.expected("m", "long", "new")
    assert lengths.expected("other", "long", "") == 0.0, "it is learned for each model"


def test_a_new_key_is_expected_to_be_as_the_model_and_its_first_requests_decide_little() -> None:
    lengths = OutputLengths()
    learned(lengths, "", "", 100.0)
    assert lengths.expected("m", "new", "") == 100.0
    lengths.learn("m", "new", "", 1000.0)
    assert 100.0 < lengths.expected("m", "new", "") < 400.0


def test_what_changes_is_followed() -> None:
    lengths = OutputLengths()
    learned(lengths, "key", "", 100.0, times=500)
    learned(lengths, "key", "", 400.0, times=150)
    assert lengths.expected("m", "key", "") > 350.0


def test_sessions_of_the_same_name_are_apart_between_keys() -> None:
    lengths = OutputLengths()
    learned(lengths, "a", "s", 1000.0)
    learned(lengths, "b", "s", 10.0)
    assert lengths.expected("m", "a", "s") > 10 * lengths.expected("m", "b", "t")


def test_invented_sessions_take_no_more_room_than_there_is_and_the_least_recently_used_one_is_forgotten() -> None:
    lengths = OutputLengths(most=10)
    learned(lengths, "key", "", 100.0)
    for number in range(1000):
        lengths.learn("m", "key", f"invented-{number}", 1000.0)
        lengths.learn("m", "key", "kept", 5.0)
    assert len(lengths) == 10
    assert lengths.expected("m", "key", "kept") < lengths.expected("m", "key", "invented-0")
    assert lengths.expected("m", "key", "invented-0") == lengths.expected("m", "key", "")
