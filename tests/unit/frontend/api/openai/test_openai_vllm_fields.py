"""Request fields that `vllm serve` adds to OpenAI's APIs, from the HTTP port to what the engine gets and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from dynamo.common.config import project_version
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Summary,
    delta_encoder,
    request_decoder,
    summary_encoder,
)
from dynamo.frontend.config import TextOptions
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from tests.support.fakes import FakeStream
from tests.support.http_edge import TEMPLATE, Speaker, chat_card, events_of, open_http_edge, text_of, tokens_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"model": "talker", "prompt": "Once"}
RENDERED = "<user>Hi\n<assistant>"
BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), (COMPLETIONS, PROMPT)])
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def chunks_of(response: httpx2.Response) -> list[dict[str, Any]]:
    return [json.loads(data) for _, data in events_of(response.text) if data != "[DONE]"]


def ended_by(stop_token: int) -> Callable[[FakeStream], None]:
    """Say "Hé", one token a delta, and end by a stop token."""

    def respond(stream: FakeStream) -> None:
        request = request_decoder.decode(stream.body)
        for token in tokens_of("Hé"):
            stream.data(delta_encoder.encode(Delta((token,))))
        stream.data(delta_encoder.encode(Delta((), 0, FinishReason.STOP, None, stop_token)))
        stream.end(summary_encoder.encode(Summary(prompt_tokens=request.prompt_tokens, output_tokens=3)))

    return respond


async def sent(path: str, body: dict[str, Any], **options: Any) -> GenerateRequest:
    """Return what the engine gets."""
    speaker = Speaker()
    async with open_http_edge(respond=speaker, **options) as edge:
        response = await edge.post(path, body)
    assert response.status_code == 200, response.text
    return speaker.last


@BOTH
@pytest.mark.parametrize(
    ("wanted", "guided"),
    [
        ({"json": {"type": "array"}}, {"json_schema": {"type": "array"}}),
        ({"json": '{"type": "array"}'}, {"json_schema": {"type": "array"}}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"json_object": True, "regex": None}, {"json_object": True}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
    ],
)
async def test_structured_outputs_reach_the_engine(
    path: str, body: dict[str, Any], wanted: dict[str, Any], guided: dict[str, Any]
) -> None:
    assert (await sent(path, body | {"structured_outputs": wanted})).sampling.guided == guided


async def test_a_structural_tag_is_a_response_format() -> None:
    form = {"type": "structural_tag", "format": {"type": "any_text"}}
    guided = (await sent(CHAT, HELLO | {"response_format": form})).sampling.guided
    assert guided is not None
    assert json.loads(guided["structural_tag"]) == form


@BOTH
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["b"]}, "structured_outputs"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"allowed_token_ids": [999999]}, "allowed_token_ids"),
        ({"stop_token_ids": [1, 999999]}, "stop_token_ids"),
        ({"bad_words_token_ids": [[1], [1, 999999]]}, "bad_words_token_ids"),
        ({"truncate_prompt_tokens": 4096}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_the_name_of_the_field(
    path: str, body: dict[str, Any], wrong: dict[str, Any], param: str
) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        error = await edge.error(path, body | wrong)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@BOTH
async def test_bad_words_are_forbidden_with_and_without_a_space_before(path: str, body: dict[str, Any]) -> None:
    request = await sent(path, body | {"bad_words": ["a"], "bad_words_token_ids": [[7]]})
    assert request.sampling.bad_words_token_ids == ((7,), tokens_of("a"))  # " a" has another length


@BOTH
@pytest.mark.parametrize(("settings", "kept"), [({}, slice(-3, None)), ({"truncation_side": "right"}, slice(0, 3))])
async def test_a_prompt_is_truncated_on_request(path: str, body: dict[str, Any], settings: dict[str, Any], kept: slice) -> None:
    whole = RENDERED if path == CHAT else "Once"
    request = await sent(path, body | {"truncate_prompt_tokens": 3} | settings)
    assert text_of(request.tokens) == whole[kept]


async def test_a_prompt_longer_than_the_context_is_truncated_to_what_leaves_room() -> None:
    request = await sent(COMPLETIONS, PROMPT | {"prompt": "x" * 6000 + "end", "max_tokens": 96, "truncate_prompt_tokens": -1})
    assert request.prompt_tokens == 4000
    assert text_of(request.tokens).endswith("xend")


@BOTH
async def test_token_ids_are_returned_on_request(path: str, body: dict[str, Any]) -> None:
    async with open_http_edge(chat_card(eos_token_ids=(9,)), respond=ended_by(9)) as edge:
        whole = (await edge.post(path, body | {"return_token_ids": True})).json()
        chunks = chunks_of(await edge.post(path, body | {"return_token_ids": True, "stream": True}))
    choice = whole["choices"][0]
    ids = [*tokens_of("Hé"), 9]
    prompt = list(tokens_of(RENDERED if path == CHAT else "Once"))
    assert choice["token_ids"] == ids
    assert (whole if path == CHAT else choice)["prompt_token_ids"] == prompt
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == ids
    prompts = [(chunk if path == CHAT else chunk["choices"][0]).get("prompt_token_ids") for chunk in chunks]
    assert prompts == [prompt, *[None] * (len(chunks) - 1)]


async def test_each_prompt_has_its_own_token_ids_and_usage() -> None:
    settings = {"prompt": ["a", "bcd"], "return_token_ids": True, **USAGE}
    async with open_http_edge(respond=Speaker(("Hi",))) as edge:
        chunks = chunks_of(await edge.post(COMPLETIONS, PROMPT | settings))
    choices = {chunk["choices"][0]["index"]: (chunk["choices"][0], chunk["usage"]) for chunk in chunks if chunk["choices"]}
    assert [choices[index][0]["prompt_token_ids"] for index in (0, 1)] == [list(tokens_of("a")), list(tokens_of("bcd"))]
    assert [choices[index][1]["prompt_tokens"] for index in (0, 1)] == [1, 3]


@BOTH
async def test_an_invocation_is_the_completion_that_its_fields_name(path: str, body: dict[str, Any]) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        completed = await edge.post("/invocations", body)
        refused = await edge.post("/invocations", body | {"max_tokens": "x"})
        unknown = await edge.post("/invocations", {"prompts": "Hi"})
    kind = "chat.completion" if path == CHAT else "text_completion"
    assert (completed.status_code, completed.json()["object"]) == (200, kind)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    assert unknown.status_code == 400 and "'messages'; 'prompt'" in unknown.json()["error"]["message"]


@BOTH
async def test_the_stop_token_or_string_is_named(path: str, body: dict[str, Any]) -> None:
    async with open_http_edge(respond=ended_by(9)) as edge:
        by_token = (await edge.post(path, body | {"stop_token_ids": [9]})).json()
        streamed = chunks_of(await edge.post(path, body | {"stop_token_ids": [9], "stream": True}))
    async with open_http_edge(respond=Speaker()) as edge:
        by_string = (await edge.post(path, body | {"stop": "lo"})).json()
    assert by_token["choices"][0]["stop_reason"] == streamed[-1]["choices"][0]["stop_reason"] == 9
    assert by_string["choices"][0]["stop_reason"] == "lo"


@BOTH
async def test_the_usage_so_far_is_in_every_chunk_on_request(path: str, body: dict[str, Any]) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        chunks = chunks_of(await edge.post(path, body | USAGE))
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    assert {usage["total_tokens"] - usage["completion_tokens"] for usage in usages} == {len(RENDERED if path == CHAT else "Once")}


@pytest.mark.parametrize(
    ("wanted", "by_default", "shows_ids"), [(True, False, True), (None, True, True), (False, True, False), (None, False, False)]
)
async def test_tokens_are_shown_by_their_ids_on_request_or_by_default(
    wanted: bool | None, by_default: bool, shows_ids: bool
) -> None:
    settings = {"return_tokens_as_token_ids": wanted}
    text = TextOptions(return_tokens_as_token_ids=by_default)
    tokens = tokens_of("é")
    async with open_http_edge(respond=Speaker(("é",), logprobs=lambda index: -0.5), text=text) as edge:
        chat = (await edge.post(CHAT, HELLO | settings | {"logprobs": True, "top_logprobs": 1})).json()
        plain = (await edge.post(COMPLETIONS, PROMPT | settings | {"logprobs": 1})).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[byte] for byte in "é".encode()]
    ids = [f"token_id:{token}" for token in tokens]
    assert ([token["token"] for token in content] == ids) == shows_ids
    assert (plain["choices"][0]["logprobs"]["tokens"] == ids) == shows_ids


@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO | {"logprobs": True}), (COMPLETIONS, PROMPT | {"logprobs": 0})])
async def test_chosen_tokens_are_reported_beside_each_token(path: str, body: dict[str, Any]) -> None:
    def respond(stream: FakeStream) -> None:
        request = request_decoder.decode(stream.body)
        assert (request.logprobs, request.logprob_token_ids) == (0, (70, 71))
        token = tokens_of("A")[0]
        stream.data(delta_encoder.encode(Delta((token,), 0, FinishReason.STOP, [[(token, -0.1), (70, -9.0), (71, -8.0)]])))
        stream.end(summary_encoder.encode(Summary(prompt_tokens=1, output_tokens=1)))

    async with open_http_edge(respond=respond) as edge:
        response = await edge.post(path, body | {"logprob_token_ids": [70, 71], "return_tokens_as_token_ids": True})
    logprobs = response.json()["choices"][0]["logprobs"]
    shown = (
        {top["token"]: top["logprob"] for top in logprobs["content"][0]["top_logprobs"]}
        if path == CHAT
        else logprobs["top_logprobs"][0]
    )
    assert shown == {f"token_id:{tokens_of('A')[0]}": -0.1, "token_id:70": -9.0, "token_id:71": -8.0}


async def test_no_alternatives_still_name_the_token_itself() -> None:
    async with open_http_edge(respond=Speaker(("A",), logprobs=lambda index: -0.5)) as edge:
        response = await edge.post(COMPLETIONS, PROMPT | {"logprobs": 0})
        streamed = chunks_of(await edge.post(COMPLETIONS, PROMPT | {"logprobs": 0, "stream": True}))
    assert response.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"A": -0.5}]
    assert streamed[-1]["choices"][0]["logprobs"]["top_logprobs"] == [{"A": -0.5}]


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_left_out_on_request(stream: bool) -> None:
    speaker = Speaker(("<think>", "why", "</think>", "so"))
    parsers = PARSER_REGISTRY
    async with open_http_edge(chat_card(reasoning_parser="qwen3"), respond=speaker, parsers=parsers) as edge:
        response = await edge.post(CHAT, HELLO | {"include_reasoning": False, "stream": stream})
        reasoned = await edge.post(CHAT, HELLO | {"stream": stream})
    assert "why" in reasoned.text
    assert "why" not in response.text
    assert "so" in response.text


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_has_both_of_its_names(stream: bool) -> None:
    speaker = Speaker(("<think>", "why", "</think>", "so"))
    async with open_http_edge(chat_card(reasoning_parser="qwen3"), respond=speaker, parsers=PARSER_REGISTRY) as edge:
        response = await edge.post(CHAT, HELLO | {"stream": stream})
    messages = [chunk["choices"][0]["delta"] for chunk in chunks_of(response)] if stream else []
    messages = messages or [response.json()["choices"][0]["message"]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(message.get(name) or "" for message in messages) == "why"


async def test_a_call_that_was_cut_off_is_left_out_unless_the_request_named_its_function() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    required = {"tools": [tool], "tool_choice": "required"}
    named = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}

    async def first_choice(written: str, choice: dict[str, Any]) -> Any:
        async with open_http_edge(respond=Speaker((written,), FinishReason.LENGTH)) as edge:
            return (await edge.post(CHAT, HELLO | choice)).json()["choices"][0]

    cut = await first_choice('[{"name": "f", "parameters": {"a', required)
    assert (cut["finish_reason"], "tool_calls" in cut["message"]) == ("length", False)
    whole = await first_choice('[{"name": "f", "parameters": {"a": 1}}', required)
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    kept = await first_choice('{"a', named)
    assert kept["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'


async def test_a_role_of_its_own_is_the_templates_affair() -> None:
    messages = [*HELLO["messages"], {"role": "my-role", "content": "x"}]
    assert "<my-role>x" in text_of((await sent(CHAT, HELLO | {"messages": messages})).tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_assistants_last_message_is_echoed_on_request(stream: bool) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Well, "}]
    settings = {"messages": messages, "echo": True, "continue_final_message": True, "stream": stream}
    async with open_http_edge(respond=Speaker(("hello",))) as edge:
        response = await edge.post(CHAT, HELLO | settings)
        of_user = await edge.post(CHAT, HELLO | {"echo": True})
    if stream:
        content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(response))
    else:
        content = response.json()["choices"][0]["message"]["content"]
    assert content == "Well, hello"
    assert of_user.json()["choices"][0]["message"]["content"] == "hello"


async def test_the_body_may_name_the_request_and_a_header_takes_precedence() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        by_body = await edge.post(CHAT, HELLO | {"request_id": "mine"})
        by_header = await edge.post(COMPLETIONS, PROMPT | {"request_id": "mine"}, headers={"x-request-id": "theirs"})
    assert (by_body.headers["x-request-id"], by_body.json()["id"]) == ("mine", "chatcmpl-mine")
    assert (by_header.headers["x-request-id"], by_header.json()["id"]) == ("theirs", "cmpl-theirs")


async def test_a_request_brings_its_own_template_only_where_the_operator_allows_it() -> None:
    body = HELLO | {
        "chat_template": "{{ bos_token }}{{ messages[0].content }}, {{ documents[0].title }}",
        "documents": [{"title": "D"}],
    }
    async with open_http_edge(respond=Speaker()) as edge:
        error = await edge.error(CHAT, body)
    assert (error["param"], "--trust-request-chat-template" in error["message"]) == ("chat_template", True)
    trusting = TextOptions(trust_request_chat_template=True)
    assert text_of((await sent(CHAT, body, text=trusting)).tokens) == "Hi, D"
    async with open_http_edge(respond=Speaker(), text=trusting) as edge:
        error = await edge.error(CHAT, HELLO | {"chat_template": "{% for %}"})
    assert error["param"] == "chat_template"
    assert error["message"].startswith("the chat template cannot be read: ")


async def test_special_tokens_are_added_to_a_prompt_and_not_to_a_conversation_unless_requested() -> None:
    card = chat_card(add_bos=True, bos_token="!")
    bos = tokens_of("!")
    expected = {(COMPLETIONS, None): True, (COMPLETIONS, False): False, (CHAT, None): False, (CHAT, True): True}
    for (path, add), has_bos in expected.items():
        speaker = Speaker()
        async with open_http_edge(card, respond=speaker) as edge:
            body = HELLO if path == CHAT else PROMPT
            await edge.post(path, body if add is None else body | {"add_special_tokens": add})
        assert (speaker.last.tokens[:1].tolist() == list(bos)) == has_bos


# The Responses API


RESPONSES = "/v1/responses"
INPUT: dict[str, Any] = {"model": "talker", "input": "Hi"}


async def test_sampling_fields_of_the_responses_api_reach_the_engine() -> None:
    settings = {
        "top_k": 7,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "seed": 3,
        "logit_bias": {"5": 1},
        "ignore_eos": True,
        "structured_outputs": {"regex": "a"},
        "cache_salt": "pepper",
        "priority": 4,
        "context_management": [{"type": "compaction"}],
    }
    request = await sent(RESPONSES, INPUT | settings)
    sampling = request.sampling
    assert (sampling.top_k, sampling.frequency_penalty, sampling.presence_penalty) == (7, 0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.seed, sampling.logit_bias) == (1.5, 3, {5: 1})
    assert (sampling.guided, request.stop.ignore_eos) == ({"regex": "a"}, True)
    assert (request.cache_salt, request.priority) == ("pepper", 4)


async def test_variables_of_the_template_come_with_the_responses_api_too() -> None:
    template = "{{ messages[0].content }} {{ mood }}"
    async with open_http_edge(respond=(speaker := Speaker()), text=TextOptions(trust_request_chat_template=True)) as edge:
        assert (await edge.post(RESPONSES, INPUT | {"chat_template_kwargs": {"mood": "glad"}})).status_code == 200
        tokens = await edge.post(
            "/tokenize", HELLO | {"chat_template": template, "chat_template_kwargs": {"mood": "glad"}, "return_token_strs": True}
        )
    assert speaker.requests
    assert "".join(tokens.json()["token_strs"]) == "HiĠglad"  # as the vocabulary has it


@pytest.mark.parametrize("stream", [False, True])
async def test_the_responses_api_has_log_probabilities_on_request(stream: bool) -> None:
    settings = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "stream": stream}
    async with open_http_edge(respond=Speaker(("A", "b"), logprobs=lambda index: -0.5)) as edge:
        response = await edge.post(RESPONSES, INPUT | settings)
        without = await edge.post(RESPONSES, INPUT | {"top_logprobs": 1})
    events = [json.loads(data) for _, data in events_of(response.text)]
    [message] = (events[-1]["response"] if stream else response.json())["output"]
    logprobs = message["content"][0]["logprobs"]
    assert [(token["token"], token["logprob"], len(token["top_logprobs"])) for token in logprobs] == [
        ("A", -0.5, 1),
        ("b", -0.5, 1),
    ]
    if stream:
        deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
        assert [token for one in deltas for token in one] == logprobs
    assert without.json()["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_the_responses_api_leaves_reasoning_out_on_request(stream: bool) -> None:
    speaker = Speaker(("<think>", "why", "</think>", "so"))
    async with open_http_edge(chat_card(reasoning_parser="qwen3"), respond=speaker, parsers=PARSER_REGISTRY) as edge:
        response = await edge.post(RESPONSES, INPUT | {"include_reasoning": False, "stream": stream})
    assert "why" not in response.text
    assert "so" in response.text


# Other endpoints


async def test_version_load_and_ping_have_the_form_of_vllm() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        version = await edge.http.get("/version")
        load = await edge.http.get("/load")
        ping = [await edge.http.request(method, "/ping") for method in ("GET", "POST")]
    assert version.json() == {"version": project_version()}
    assert load.json() == {"server_load": 0}
    assert [(response.status_code, response.content) for response in ping] == [(200, b""), (200, b"")]


async def test_the_tokenizer_is_described() -> None:
    async with open_http_edge(chat_card("one", eos_token="!"), chat_card("two"), respond=Speaker()) as edge:
        described = await edge.http.get("/tokenizer_info", params={"model": "one"})
        unnamed = await edge.http.get("/tokenizer_info")
    assert described.json() == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "!",
        "chat_template": TEMPLATE,
    }
    assert unnamed.status_code == 400
