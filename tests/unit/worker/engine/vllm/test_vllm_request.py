"""Requests in vLLM's words and its outputs in ours, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo.common.errors import EngineError, InvalidRequest, Unavailable
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Sampling, Stop, pack_tokens
from dynamo.worker.engine.vllm.request import OutputReader, check_request, sampling_settings, structured_settings


def make_request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", **{"prompt": pack_tokens(range(5)), **fields})


@dataclass
class Value:
    logprob: float


@dataclass
class Choice:
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    logprobs: list[dict[int, Value]] | None = None


@dataclass
class Times:
    queued_ts: float = 10.0
    scheduled_ts: float = 10.5
    first_token_ts: float = 12.5


@dataclass
class Output:
    outputs: list[Choice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Value] | None] | None = None
    num_cached_tokens: int | None = None
    metrics: Times | None = None
    kv_transfer_params: dict[str, Any] | None = None
    finished: bool = field(default=False)


def test_unset_sampling_settings_are_the_models_defaults() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.9}
    settings = sampling_settings(make_request(sampling=Sampling(temperature=0.0)), defaults)
    assert (settings["temperature"], settings["top_p"]) == (0.0, 0.9)
    assert settings["max_tokens"] is None, "as many as fit"
    assert not settings["detokenize"]


def test_all_settings_are_passed_on() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.8,
        top_k=7,
        min_p=0.1,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        repetition_penalty=1.1,
        seed=3,
        logit_bias={5: 2.0},
        allowed_token_ids=(1, 2),
        bad_words_token_ids=((8, 9), (4,)),
    )
    stop = Stop(max_tokens=9, min_tokens=2, token_ids=(6,), ignore_eos=True)
    settings = sampling_settings(make_request(sampling=sampling, stop=stop, n=2, logprobs=4, prompt_logprobs=0), {})
    assert settings == {
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 3,
        "logit_bias": {5: 2.0},
        "allowed_token_ids": [1, 2],
        "_bad_words_token_ids": [[8, 9], [4]],
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [6],
        "ignore_eos": True,
        "n": 2,
        "logprobs": 5,
        "prompt_logprobs": 0,
        "detokenize": False,
    }


def test_a_choice_that_moved_here_keeps_the_seed_that_it_had_among_the_others() -> None:
    def seed(**fields: Any) -> object:
        return sampling_settings(make_request(first_choice=2, **fields), {}).get("seed")

    assert seed(sampling=Sampling(seed=3)) == 5
    assert seed() is None


def test_a_prefill_makes_one_token_and_takes_the_connectors_parameters_along() -> None:
    transfer = {"do_remote_decode": True, "transfer_id": "x"}
    settings = sampling_settings(make_request(kv_transfer=transfer, stop=Stop(max_tokens=100, min_tokens=7)), {})
    assert (settings["max_tokens"], settings["min_tokens"]) == (1, 1)
    assert settings["extra_args"] == {"kv_transfer_params": transfer}
    decode = sampling_settings(make_request(kv_transfer={"do_remote_prefill": True}, stop=Stop(max_tokens=100)), {})
    assert decode["max_tokens"] == 100


@pytest.mark.parametrize(
    ("guided", "field"),
    [
        ({"json_schema": {"type": "object"}}, {"json": {"type": "object"}}),
        ({"json_schema": '{"type": "object"}', "regex": None}, {"json": {"type": "object"}}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ("a", "b")}, {"choice": ["a", "b"]}),
        ({"choice": ["a"]}, {"choice": ["a"]}),
        ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
    ],
)
def test_structured_output_has_other_names_there(guided: dict[str, Any], field: dict[str, Any]) -> None:
    assert structured_settings(guided) == field


@pytest.mark.parametrize(
    "guided",
    [{}, {"regex": "a", "grammar": "b"}, {"choice": []}, {"choice": [""]}, {"json_schema": "{"}, {"magic": 1}, {"regex": 5}],
)
def test_structured_output_that_is_none_is_refused(guided: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        structured_settings(guided)


def test_media_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="media"):
        check_request(make_request(media=({"type": "image"},)), context_length=100)


def test_deltas_leave_out_the_stop_token_and_empty_steps() -> None:
    reader = OutputReader(make_request(stop=Stop(token_ids=(7,))), frozenset({99}))
    deltas = reader.read(Output([Choice([1, 2]), Choice([], 1)], num_cached_tokens=4, metrics=Times()))
    assert deltas == [Delta((1, 2))]
    assert reader.read(Output([Choice([3, 7], 0, "stop")])) == [Delta((3,), 0, FinishReason.STOP, None, 7)]
    assert reader.read(Output([Choice([99], 1, "stop")])) == [Delta((), 1, FinishReason.STOP, None, 99)]
    summary = reader.summary()
    assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (5, 3, 4)
    assert (summary.queue_ms, summary.prefill_ms) == (500.0, 2000.0)


def test_an_end_of_text_that_is_ignored_is_a_token_like_others() -> None:
    reader = OutputReader(make_request(stop=Stop(ignore_eos=True)), frozenset({99}))
    assert reader.read(Output([Choice([1, 99], 0, "length")])) == [Delta((1, 99), 0, FinishReason.LENGTH)]


def test_logprobs_have_one_entry_per_token() -> None:
    reader = OutputReader(make_request(logprobs=1, prompt_logprobs=1, stop=Stop(token_ids=(7,))), frozenset())
    steps = [{1: Value(-3.0), 5: Value(-0.1), 6: Value(-0.2)}, {7: Value(-0.5), 8: Value(-1.0)}]
    prompt: list[dict[int, Value] | None] = [None, {1: Value(-1.0), 2: Value(-0.5), 3: Value(-0.7)}]
    [delta] = reader.read(Output([Choice([1, 7], 0, "stop", steps)], prompt_logprobs=prompt))
    assert delta.logprobs == [[(1, -3.0), (5, -0.1)], [(7, -0.5), (8, -1.0)]], "and one for the stop token"
    assert reader.summary().prompt_logprobs == [None, [(1, -1.0), (2, -0.5)]]


def test_the_parameters_of_a_connector_are_passed_on() -> None:
    reader = OutputReader(make_request(kv_transfer={"do_remote_decode": True}), frozenset())
    reader.read(Output([Choice([1], 0, "length")], kv_transfer_params={"remote_host": "h"}))
    assert reader.summary().kv_transfer == {"remote_host": "h"}


def test_a_request_that_was_given_up_can_be_taken_elsewhere() -> None:
    with pytest.raises(Unavailable) as given_up:
        OutputReader(make_request(), frozenset()).read(Output([Choice([], 0, "abort")]))
    assert given_up.value.retryable
    with pytest.raises(EngineError):
        OutputReader(make_request(), frozenset()).read(Output([Choice([], 0, "error")]))
