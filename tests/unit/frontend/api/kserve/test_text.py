from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.errors import DynamoError, InvalidRequest, ModelNotFound
from dynamo.common.generation import FinishReason, Sampling, Stop
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import decode_bytes, encode_bytes, from_numpy
from dynamo.frontend.api.kserve.text import FLAGS, MAX_TEXT_BYTES, SETTINGS, to_text_requests, wants_stream
from dynamo.frontend.api.kserve.text_responses import TextResponses
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

CARD = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=100, tokenizer="k"))


def raw_request(*prompts: str, shape: list[int] | None = None) -> ModelInferRequest:
    request = ModelInferRequest(model_name="m", id="7")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[len(prompts)] if shape is None else shape)
    request.raw_input_contents.append(encode_bytes(prompts))
    return request


def typed_request(*prompts: str) -> ModelInferRequest:
    request = ModelInferRequest(model_name="m", id="7")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(prompts)])
    tensor.contents.bytes_contents.extend(prompt.encode() for prompt in prompts)
    return request


def add_input(request: ModelInferRequest, name: str, array: np.ndarray, datatype: str = "") -> None:
    found, raw = from_numpy(array, datatype)
    request.inputs.add(name=name, datatype=found, shape=array.shape)
    request.raw_input_contents.append(bytes(raw))


def parsed(request: ModelInferRequest) -> TensorRequest:
    return TensorRequest.parse(request.SerializeToString())


def responses_for(request: ModelInferRequest) -> TextResponses:
    tensors = parsed(request)
    return TextResponses(tensors, CARD, to_text_requests(tensors, CARD))


@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_a_prompt_is_one_element(shape: list[int]) -> None:
    (text,) = to_text_requests(parsed(raw_request("hëllo", shape=shape)), CARD)
    assert (text.model, text.prompt, text.messages, text.n) == ("m", "hëllo", None, 1)
    assert (text.sampling, text.stop) == (Sampling(), Stop())
    assert to_text_requests(parsed(typed_request("hëllo")), CARD) == [text]


@pytest.mark.parametrize("prompt", ["hëllo", "a", "Hello, world!"])
def test_a_raw_prompt_may_lack_its_length(prompt: str) -> None:
    request = raw_request(prompt)
    request.raw_input_contents[0] = prompt.encode()
    assert to_text_requests(parsed(request), CARD) == to_text_requests(parsed(raw_request(prompt)), CARD)


def test_a_length_is_not_taken_for_text() -> None:
    long = "x" * MAX_TEXT_BYTES
    (text,) = to_text_requests(parsed(raw_request(long)), CARD)
    assert text.prompt == long
    request = raw_request("one", "two")
    request.raw_input_contents[0] = b"onetwo"
    with pytest.raises(InvalidRequest, match="input 'text_input' has a BYTES element 0 of"):
        to_text_requests(parsed(request), CARD)


@pytest.mark.parametrize("make", [raw_request, typed_request])
def test_texts_are_bounded_in_bytes_before_they_are_decoded(make: Callable[..., ModelInferRequest]) -> None:
    for texts in (["x" * MAX_TEXT_BYTES + "x"], ["\u00e9" * (MAX_TEXT_BYTES // 4)] * 3):
        with pytest.raises(InvalidRequest, match=f"input 'text_input' has [0-9]+ bytes; at most {MAX_TEXT_BYTES} are allowed"):
            to_text_requests(parsed(make(*texts)), CARD)


def test_a_batch_is_one_request_per_prompt() -> None:
    assert [text.prompt for text in to_text_requests(parsed(raw_request("a", "", "c", shape=[3, 1])), CARD)] == ["a", "", "c"]


def test_sampling_is_set_by_parameters() -> None:
    request = raw_request("x")
    request.parameters["max_tokens"].int64_param = 5
    request.parameters["min_tokens"].uint64_param = 2
    request.parameters["temperature"].double_param = 0.5
    request.parameters["top_p"].int64_param = 1
    request.parameters["top_k"].double_param = 40.0
    request.parameters["min_p"].double_param = 0.1
    request.parameters["seed"].int64_param = -3
    request.parameters["n"].int64_param = 2
    request.parameters["frequency_penalty"].double_param = 1.0
    request.parameters["presence_penalty"].double_param = -1.0
    request.parameters["repetition_penalty"].double_param = 1.5
    request.parameters["ignore_eos"].bool_param = True
    request.parameters["logprobs"].int64_param = 3
    request.parameters["stop"].string_param = '["a", "b"]'
    request.parameters["timeout"].int64_param = 5
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    (text,) = to_text_requests(parsed(request), CARD)
    assert text.sampling == Sampling(
        temperature=0.5,
        top_p=1,
        top_k=40,
        min_p=0.1,
        seed=-3,
        frequency_penalty=1.0,
        presence_penalty=-1.0,
        repetition_penalty=1.5,
    )
    assert text.stop == Stop(max_tokens=5, min_tokens=2, ignore_eos=True)
    assert (text.n, text.logprobs, text.stop_strings) == (2, 3, ("a", "b"))


def test_sampling_is_set_by_inputs_of_any_number_type() -> None:
    request = raw_request("x")
    add_input(request, "max_tokens", np.array([7], np.uint16))
    add_input(request, "temperature", np.array([[0.5]], np.float16))
    add_input(request, "top_p", np.array([0.75], np.float32), "BF16")
    add_input(request, "seed", np.array([2**62], np.int64))
    add_input(request, "ignore_eos", np.array([True]))
    add_input(request, "stop", np.array(["\n\n", "END"]))
    (text,) = to_text_requests(parsed(request), CARD)
    assert text.sampling == Sampling(temperature=0.5, top_p=0.75, seed=2**62)
    assert text.stop == Stop(max_tokens=7, ignore_eos=True)
    assert text.stop_strings == ("\n\n", "END")


def test_a_stop_parameter_is_one_string_unless_it_is_json() -> None:
    request = raw_request("x")
    request.parameters["stop"].string_param = "[/INST]"
    assert to_text_requests(parsed(request), CARD)[0].stop_strings == ("[/INST]",)


def test_chat_makes_each_prompt_a_users_message() -> None:
    request = raw_request("hi", "ho")
    request.parameters["chat"].bool_param = True
    texts = to_text_requests(parsed(request), CARD)
    assert [text.prompt for text in texts] == [None, None]
    assert [list(text.messages or ()) for text in texts] == [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "ho"}],
    ]


def test_a_conversation_is_given_as_json() -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi", "name": "x"}]
    request = ModelInferRequest(model_name="m")
    add_input(request, "messages", np.array([json.dumps(conversation)]))
    (text,) = to_text_requests(parsed(request), CARD)
    assert text.messages == conversation
    assert text.prompt is None


def test_the_longest_stop_strings_may_be_sent_as_json() -> None:
    longest = [f"{number:02}" + "\N{GRINNING FACE}" * 1022 for number in range(32)]
    request = raw_request("hi")
    request.parameters["stop"].string_param = json.dumps(longest)
    (text,) = to_text_requests(parsed(request), CARD)
    assert list(text.stop_strings) == longest


@pytest.mark.parametrize("name", ["streaming", "stream"])
@pytest.mark.parametrize("wanted", [True, False])
def test_streaming_is_requested_by_input_or_parameter(name: str, wanted: bool) -> None:
    request = raw_request("x")
    assert not wants_stream(parsed(request))
    request.parameters[name].bool_param = wanted
    assert wants_stream(parsed(request)) is wanted
    del request.parameters[name]
    add_input(request, name, np.array([wanted]))
    assert wants_stream(parsed(request)) is wanted
    assert len(to_text_requests(parsed(request), CARD)) == 1
    typed = typed_request("x")
    typed.inputs.add(name=name, datatype="BOOL", shape=[1]).contents.bool_contents.append(wanted)
    assert wants_stream(parsed(typed)) is wanted


Change = Callable[[ModelInferRequest], object]


def parameter(name: str, kind: str, value: object) -> Change:
    return lambda request: setattr(request.parameters[name], kind, value)


def tensor(name: str, array: np.ndarray) -> Change:
    return lambda request: add_input(request, name, array)


BAD: list[tuple[Change, str]] = [
    (lambda r: (r.ClearField("inputs"), r.ClearField("raw_input_contents")), "the input 'text_input' is missing"),
    (tensor("prompt", np.array(["x"])), "a language model has no input 'prompt'; it has 'text_input'"),
    (tensor("text_input", np.array(["x"])), "input 'text_input' is given twice"),
    (tensor("messages", np.array(['[{"role": "user"}]'])), "'text_input' and 'messages' are both given"),
    (tensor("messages", np.array(["{}"])), "input 'messages' is not a JSON array of messages"),
    (tensor("messages", np.array(["[1]"])), "input 'messages' is not a JSON array of messages"),
    (tensor("messages", np.array(["[]"])), "input 'messages' has an empty conversation"),
    (
        tensor("messages", np.array(["[" * 100_000])),
        "a conversation of input 'messages' nests arrays and objects deeper than 100",
    ),
    (tensor("messages", np.array([f"[{'{},' * 120_000}0]"])), "a conversation of input 'messages' has too many values"),
    (tensor("messages", np.array([f"[{'{},' * 12_000}0]"] * 11)), "a conversation of input 'messages' has too many values"),
    (tensor("messages", np.array(["x" * 2**20] * 5)), "input 'messages' has 5242880 bytes; at most 4194304 are allowed"),
    (lambda r: setattr(r.inputs[0], "datatype", "INT8"), "input 'text_input' has the datatype INT8; it must be BYTES"),
    (lambda r: setattr(r.inputs[0], "datatype", "TEXT"), "input 'text_input' has the unknown datatype 'TEXT'; expected one of"),
    (lambda r: r.inputs[0].shape.__setitem__(0, 2), "input 'text_input' has 1 BYTES elements where its shape needs 2"),
    (lambda r: r.inputs[0].shape.__setitem__(0, -1), "the negative dimension -1"),
    (lambda r: r.inputs[0].shape.__setitem__(slice(None), [2, 3]), r"the shape \[2, 3\]; it must be \[n\] or \[n, 1\]"),
    (lambda r: r.inputs[0].shape.__setitem__(0, 0), r"the shape \[0\]; it must be"),
    (lambda r: r.raw_input_contents.__setitem__(0, b"\1\0\0\0\xff"), "input 'text_input' is not UTF-8 at byte 0"),
    (lambda r: r.raw_input_contents.__setitem__(0, b"\1\0"), "input 'text_input' ends inside the length"),
    (lambda r: r.ClearField("raw_input_contents"), "input 'text_input' has no data"),
    (lambda r: r.raw_input_contents.append(b""), "raw_input_contents has 2 entries for 1 inputs"),
    (lambda r: r.inputs[0].contents.bytes_contents.append(b""), "input 'text_input' has contents although"),
    (tensor("streaming", np.array(["x"])), "input 'streaming' has the datatype BYTES; it must be BOOL"),
    (tensor("stream", np.array([True, False])), r"input 'stream' has the shape \[2\]; it must have one element"),
    (lambda r: [add_input(r, n, np.array([True])) for n in ("stream", "streaming")], "mean the same; send one of them"),
    (tensor("max_tokens", np.array(["x"])), "input 'max_tokens' has the datatype BYTES; it must be a number"),
    (tensor("max_tokens", np.array([0])), "'max_tokens' is 0; it must be at least 1"),
    (parameter("max_tokens", "double_param", 1.5), "'max_tokens' must be an integer, got 1.5"),
    (parameter("max_tokens", "double_param", float("inf")), "'max_tokens' must be an integer, got inf"),
    (parameter("max_tokens", "string_param", "5"), "'max_tokens' must be a number"),
    (parameter("max_tokens", "bool_param", True), "'max_tokens' must be a number"),
    (parameter("max_tokens", "uint64_param", 2**63), "'max_tokens' is 9223372036854775808; it must be"),
    (parameter("temperature", "double_param", -0.1), "'temperature' is -0.1; it must be at least 0 and at most 2"),
    (parameter("temperature", "double_param", float("nan")), "'temperature' is nan"),
    (parameter("top_p", "double_param", 0.0), "'top_p' is 0.0; it must be above 0 and at most 1"),
    (parameter("top_k", "int64_param", -2), "'top_k' is -2; it must be at least -1 and at most 2147483647"),
    (parameter("min_p", "double_param", 2.0), "'min_p' is 2.0"),
    (parameter("repetition_penalty", "double_param", 0.0), "'repetition_penalty' is 0.0; it must be above 0"),
    (parameter("frequency_penalty", "double_param", 3.0), "'frequency_penalty' is 3.0"),
    (parameter("n", "int64_param", 129), "'n' is 129"),
    (parameter("logprobs", "int64_param", 21), "'logprobs' is 21"),
    (parameter("ignore_eos", "int64_param", 1), "'ignore_eos' must be true or false"),
    (parameter("chat", "string_param", "yes"), "'chat' must be true or false"),
    (parameter("stop", "int64_param", 1), "'stop' must be a string, or a JSON array of strings"),
    (parameter("stop", "string_param", ""), "a string of 'stop' has 0 characters"),
    (parameter("stop", "string_param", json.dumps(["x"] * 33)), "'stop' has 33 strings; at most 32"),
    (parameter("stop", "string_param", json.dumps(["x"] * 100_000)), "'stop' has 500000 characters; at most 393312 are allowed"),
    (parameter("colour", "string_param", "x"), "a language model has no parameter 'colour'"),
    (lambda r: r.parameters["seed"].SetInParent(), "invalid value type for 'seed' parameter"),
    (lambda r: (parameter("seed", "int64_param", 1)(r), tensor("seed", np.array([1]))(r)), "'seed' is given as an input and"),
    (
        lambda r: (parameter("max_tokens", "int64_param", 1)(r), parameter("min_tokens", "int64_param", 2)(r)),
        "'min_tokens' is 2, above the 'max_tokens' of 1",
    ),
    (lambda r: r.outputs.add(name="tokens"), "a language model has no output 'tokens'"),
    (lambda r: [r.outputs.add(name="text_output") for _ in "ab"], "output 'text_output' is requested twice"),
    (lambda r: r.outputs.add(name="logprobs"), "no setting 'logprobs' says how many"),
    (
        lambda r: setattr(r.outputs.add(name="text_output").parameters["classification"], "int64_param", 1),
        "output 'text_output' is BYTES and cannot be classified",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_a_bad_request_is_explained(change: Change, sentence: str) -> None:
    request = raw_request("x")
    change(request)
    with pytest.raises(InvalidRequest, match=sentence):
        to_text_requests(parsed(request), CARD)


def test_all_choices_of_all_prompts_are_bounded() -> None:
    request = raw_request(*["x"] * 65)
    request.parameters["n"].int64_param = 2
    with pytest.raises(InvalidRequest, match="65 prompts with 2 choices each are above the 128"):
        to_text_requests(parsed(request), CARD)


def test_an_unknown_version_is_not_found() -> None:
    request = raw_request("x")
    request.model_version = "9"
    with pytest.raises(ModelNotFound):
        to_text_requests(parsed(request), CARD)


@given(st.integers(0, 200), st.binary(max_size=4))
def test_a_changed_request_never_crashes(position: int, change: bytes) -> None:
    request = raw_request("x")
    request.parameters["temperature"].double_param = 0.5
    request.parameters["stop"].string_param = '["x"]'
    add_input(request, "streaming", np.array([True]))
    data = bytearray(request.SerializeToString())
    at = position % len(data)
    data[at : at + len(change)] = change
    with contextlib.suppress(DynamoError):
        tensors = TensorRequest.parse(bytes(data))
        wants_stream(tensors)
        TextResponses(tensors, CARD, to_text_requests(tensors, CARD)).delta([TextDelta(0, "x")])


def elements(response: ModelInferResponse) -> dict[str, list[bytes]]:
    found = {}
    for position, output in enumerate(response.outputs):
        count = output.shape[0]
        found[output.name] = decode_bytes(response.raw_output_contents[position], count)
        assert (output.datatype, len(output.shape), len(found[output.name])) == ("BYTES", 1, count)
    return found


@pytest.mark.parametrize("make", [raw_request, typed_request])
@given(
    texts=st.lists(st.text(max_size=300), min_size=1, max_size=3),
    reason=st.none() | st.sampled_from(FinishReason),
    final=st.none() | st.booleans(),
)
def test_deltas_become_one_message(
    make: Callable[..., ModelInferRequest], texts: list[str], reason: FinishReason | None, final: bool | None
) -> None:
    deltas = [TextDelta(0, text) for text in texts[:-1]] + [TextDelta(0, texts[-1], finish_reason=reason)]
    responses = responses_for(make("x"))
    response = ModelStreamInferResponse.FromString(responses.stream_delta(deltas, final=final)).infer_response
    assert (response.model_name, response.model_version, response.id) == ("m", "1", "7")
    assert elements(response) == {"text_output": ["".join(texts).encode()], "finish_reason": [(reason or "").encode()]}
    parameters = {key: value.bool_param for key, value in response.parameters.items()}
    assert parameters == ({} if final is None else {"triton_final_response": final})
    assert ModelInferResponse.FromString(responses.delta(deltas, final=final)) == response
    gathered = responses.gather()
    for delta in deltas:
        gathered.add(0, [delta])
    assert ModelInferResponse.FromString(responses.complete(gathered, final=final)) == response


@pytest.mark.parametrize("make", [raw_request, typed_request])
def test_choices_of_a_batch_have_one_element_each(make: Callable[..., ModelInferRequest]) -> None:
    request = make("a", "b")
    request.parameters["n"].int64_param = 2
    responses = responses_for(request)
    deltas = [TextDelta(1, "x", finish_reason=FinishReason.STOP), TextDelta(0, "y"), TextDelta(0, "z")]
    streamed = ModelInferResponse.FromString(responses.delta(deltas, prompt=1))
    assert elements(streamed) == {"text_output": [b"", b"", b"yz", b"x"], "finish_reason": [b"", b"", b"", b"stop"]}
    gathered = responses.gather()
    gathered.add(0, deltas)
    stream = ModelStreamInferResponse.FromString(responses.stream_complete(gathered))
    assert elements(stream.infer_response)["text_output"] == [b"yz", b"x", b"", b""]


def test_only_requested_outputs_are_returned() -> None:
    request = raw_request("x")
    request.parameters["logprobs"].int64_param = 1
    for name in ("logprobs", "text_output"):
        request.outputs.add(name=name)
    deltas = [TextDelta(0, "a", (5,), logprobs=[[(5, -0.5), (6, -1.5)]]), TextDelta(0, "b", (7,), logprobs=[[(7, -2.0)]])]
    response = ModelInferResponse.FromString(responses_for(request).delta(deltas))
    assert [output.name for output in response.outputs] == ["logprobs", "text_output"]
    assert json.loads(elements(response)["logprobs"][0]) == [[[5, -0.5], [6, -1.5]], [[7, -2.0]]]


def test_logprobs_are_a_third_output_if_requested() -> None:
    request = typed_request("x")
    request.parameters["logprobs"].int64_param = 0
    response = ModelInferResponse.FromString(responses_for(request).delta([TextDelta(0, "a")]))
    assert elements(response) == {"text_output": [b"a"], "finish_reason": [b""], "logprobs": [b"[]"]}


def test_the_guide_names_every_input_and_output() -> None:
    guide = (Path(__file__).parents[5] / "docs" / "clients.md").read_text()
    section = guide.partition("## Language models over KServe")[2].partition("\n## ")[0]
    inputs, outputs = (
        {name for row in table.splitlines() if row.startswith("|") for name in re.findall("`([a-z_]+)`", row.split("|")[1])}
        for table in section.split("| output |")
    )
    assert inputs == {"text_input", "messages", "token_ids", "streaming", "stream", "stop", *SETTINGS, *FLAGS}
    assert outputs == {"text_output", "finish_reason", "logprobs", "token_ids"}


def test_log_probabilities_are_encoded_as_they_come_and_not_kept() -> None:
    request = raw_request("x")
    request.parameters["logprobs"].int64_param = 1
    responses = responses_for(request)
    gathered = responses.gather()
    position = [(5, -0.5), (6, -1.5)]
    references = sys.getrefcount(position)
    for _ in range(5000):
        gathered.add(0, [TextDelta(0, "a", (5,), logprobs=[position])])
    assert sys.getrefcount(position) == references
    response = ModelInferResponse.FromString(responses.complete(gathered))
    assert json.loads(elements(response)["logprobs"][0]) == [[[5, -0.5], [6, -1.5]]] * 5000
