"""The options of sequence batching: how each is read, what it is without a value, and what is refused."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.declared.sequence_batching import SequenceSettings, fill_sequence_defaults, sequence_problems


def config_of(text: str, max_batch_size: int = 4) -> ModelConfig:
    return text_format.Parse(f"sequence_batching {{ {text} }}", ModelConfig(max_batch_size=max_batch_size))


def test_the_strategy_oldest_waits_until_a_preferred_size_is_there() -> None:
    settings = SequenceSettings(
        config_of(
            "oldest { max_candidate_sequences: 9 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 500 "
            "preserve_ordering: true } max_sequence_idle_microseconds: 2000000 iterative_sequence: true"
        )
    )
    assert (settings.is_direct, settings.is_ordered, settings.is_iterative) == (False, True, True)
    assert (settings.slots, settings.idle_s, settings.delay_s) == (9, 2.0, 0.0005)
    assert settings.preferred == {2, 4}


def test_the_strategy_direct_waits_until_so_many_slots_have_a_request() -> None:
    settings = SequenceSettings(config_of("direct { minimum_slot_utilization: 0.5 max_queue_delay_microseconds: 500 }"))
    assert (settings.is_direct, settings.slots, settings.delay_s, settings.enough) == (True, 4, 0.0005, 2.0)


def test_the_strategy_direct_does_not_wait_where_no_slot_needs_a_request() -> None:
    assert SequenceSettings(config_of("direct { max_queue_delay_microseconds: 500 }")).delay_s == 0.0


def test_a_model_that_does_not_batch_has_one_sequence_at_once() -> None:
    assert SequenceSettings(config_of("", max_batch_size=0)).slots == 1


def test_a_sequence_lasts_a_second_without_a_request_where_the_configuration_says_nothing() -> None:
    config = config_of("oldest { }")
    fill_sequence_defaults(config)
    assert SequenceSettings(config).idle_s == 1.0
    assert list(config.sequence_batching.oldest.preferred_batch_size) == [4]


def test_a_configuration_without_sequences_gets_none_by_its_defaults() -> None:
    config = ModelConfig(max_batch_size=4)
    fill_sequence_defaults(config)
    assert not config.HasField("sequence_batching")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("oldest { preferred_batch_size: [ 4, 5 ] }", "sequence_batching.oldest.preferred_batch_size must be from 1 to 4, got 5"),
        (
            "direct { minimum_slot_utilization: 2 }",
            "sequence_batching.direct.minimum_slot_utilization must be from 0 to 1, got 2",
        ),
    ],
)
def test_an_option_out_of_its_range_is_named(text: str, reason: str) -> None:
    assert list(sequence_problems(config_of(text))) == [reason]
