import tracemalloc
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import msgspec
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer as Model
from tokenizers import decoders, models, pre_tokenizers

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Unavailable
from dynamo.common.generation import Delta, FinishReason, Sampling, Stop, image_part
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.frontend.config import TextLimits, TextOptions
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.pipeline import MAX_PROMPT_LOGPROBS, TextPipeline
from dynamo.frontend.preprocess.text import ContextExceeded, TextRequest
from dynamo.frontend.preprocess.text_files import TextFiles

CONTEXT = 100
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.arguments.city }}]{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokens() -> bytes:
    """One token per byte, and the special tokens `<s>` and `</s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Model(models.BPE(vocab={character: id for id, character in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<s>", "</s>"])
    return model.to_str().encode()


P = ParamSpec("P")
T = TypeVar("T")
BOS, EOS = 256, 257
INFO = LlmInfo(context_length=CONTEXT, tokenizer="t", chat_template="c", bos_token="<s>", eos_token="</s>", eos_token_ids=(EOS,))
HELLO = ({"role": "user", "content": "hi"},)


class Files:
    def __init__(self, template: bytes = TEMPLATE.encode(), tokenizer: bytes | None = None) -> None:
        self._files = {"t": tokenizer if tokenizer is not None else byte_tokens(), "c": template}

    async def get(self, key: str) -> bytes:
        if key not in self._files:
            raise Unavailable(f"there is no file {key}")
        return self._files[key]

    async def fetch(self, key: str) -> None:
        await self.get(key)


async def model(files: Files | None = None, limits: TextLimits | None = None, **info: Any) -> TextPipeline:
    card = ModelCard(name="talker", kind=ModelKind.LLM, llm=msgspec.structs.replace(INFO, **info))
    return await load(card, files, TextOptions(limits=limits or TextLimits()))


async def load(
    card: ModelCard, files: Files | None = None, options: TextOptions | None = None, offload: Offload | None = None
) -> TextPipeline:
    return await TextFiles(files or Files(), options or TextOptions(), offload or Offload()).load(card)


def text_request(prompt: str | list[int] | None = None, **fields: Any) -> TextRequest:
    return TextRequest(model="talker", prompt=prompt, **fields)


async def ids(text_model: TextPipeline, request: TextRequest) -> list[int]:
    return list((await text_model.to_generate(request)).tokens)


async def test_a_conversation_without_room_for_its_response_loses_its_oldest_messages() -> None:
    text_model = await model()
    messages = [{"role": "system", "content": "be"}] + [{"role": "user", "content": f"message {n}"} for n in range(9)]
    request = TextRequest(model="talker", messages=messages, drops_messages=True, stop=Stop(max_tokens=20))
    prompt = text_model.tokenizer.decode(await ids(text_model, request), skip_special_tokens=False)
    assert prompt == "system: be\nuser: message 6\nuser: message 7\nuser: message 8\nassistant: "
    assert len(prompt) + 20 <= CONTEXT < len(prompt) + len("user: message 5\n") + 20
    too_long = [{"role": "user", "content": "x" * CONTEXT}]
    for refused in (replace(request, drops_messages=False), replace(request, messages=too_long)):
        with pytest.raises(ContextExceeded):
            await text_model.to_generate(refused)


async def test_a_prompt_becomes_tokens_and_everything_else_is_passed_on() -> None:
    text_model = await model()
    sampling = Sampling(temperature=0.5, seed=3)
    request = text_request(
        "hello", sampling=sampling, n=2, logprobs=3, prompt_logprobs=1, cache_salt="s", stop=Stop(max_tokens=5)
    )
    generate = await text_model.to_generate(request)
    assert text_model.tokenizer.decode(list(generate.tokens), skip_special_tokens=False) == "hello"
    assert (generate.sampling, generate.n, generate.logprobs, generate.prompt_logprobs) == (sampling, 2, 3, 1)
    assert (generate.model, generate.cache_salt, generate.stop.max_tokens) == ("talker", "s", 5)


async def test_a_conversation_is_rendered_without_a_second_bos_token() -> None:
    text_model = await model(add_bos=True)
    tokens = await ids(text_model, text_request(messages=HELLO))
    assert text_model.tokenizer.decode(tokens, skip_special_tokens=False) == "user: hi\nassistant: "
    assert (await ids(text_model, text_request("hi")))[0] == BOS


async def test_a_long_conversation_is_rendered_as_a_short_one_is() -> None:
    text_model = await model(context_length=100_000)
    tokens = await ids(text_model, text_request(messages=HELLO * 500))
    assert text_model.tokenizer.decode(tokens, skip_special_tokens=False) == "user: hi\n" * 500 + "assistant: "


class RecordingOffload(Offload):
    """Counts what leaves the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.calls += 1
        return await super().run(function, *args, **kwargs)


@pytest.mark.parametrize(
    ("template", "messages", "content", "calls"),
    [
        (TEMPLATE, 1, "hi", 0),
        (TEMPLATE, 100, "hi", 0),
        (TEMPLATE, 500, "hi", 1),
        (TEMPLATE, 1, "x" * 5_000_000, 1),
        ("{% for number in range(9999) %}{% endfor %}x", 1, "hi", 1),
        ("{% set a = 'x' * 99999 %}{% for number in range(99) %}{% if a + 'y' == a %}{% endif %}{% endfor %}x", 1, "hi", 1),
    ],
)
async def test_a_rendering_that_takes_long_leaves_the_event_loop(template: str, messages: int, content: str, calls: int) -> None:
    offload = RecordingOffload()
    card = ModelCard(name="talker", kind=ModelKind.LLM, llm=INFO)
    text_model = await load(card, Files(template.encode()), offload=offload)
    prompt = await text_model.render(text_request(messages=({"role": "user", "content": content},) * messages))
    assert prompt
    assert offload.calls == calls


@pytest.mark.parametrize("field", ["content", "tool_calls"])
async def test_a_message_of_many_parts_leaves_the_event_loop(field: str) -> None:
    offload = RecordingOffload()
    text_model = await load(ModelCard(name="talker", kind=ModelKind.LLM, llm=INFO), offload=offload)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"} if field == "content" else call] * 200
    await text_model.render(text_request(messages=({"role": "assistant", "content": "x"} | {field: parts},)))
    assert offload.calls == 1


async def test_parts_of_text_are_joined_and_arguments_of_calls_are_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
    messages = (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    text_model = await model()
    assert await text_model.render(text_request(messages=messages)) == "user: a\nb\nassistant: [Bern]\nassistant: "


async def test_arguments_of_calls_are_bounded_before_they_are_built() -> None:
    text_model = await model()
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + "[]," * 10_000 + "0]}"}}] * 6
    with pytest.raises(InvalidRequest, match="at most 100000 are allowed"):
        await text_model.render(text_request(messages=({"role": "assistant", "content": "", "tool_calls": calls},)))


async def test_a_last_message_of_the_assistant_can_be_continued() -> None:
    text_model = await model()
    begun = (*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "a message: "}]})
    assert await text_model.render(text_request(messages=begun, continues_last=True)) == "user: hi\nassistant: a message:"
    for messages in (HELLO, (*HELLO, {"role": "assistant", "content": " "}), (*HELLO, {"role": "assistant", "content": None})):
        with pytest.raises(InvalidRequest, match="only a last message that is a text of the assistant"):
            await text_model.render(text_request(messages=messages, continues_last=True))
    deaf = await model(Files(b"{{ messages[0].content }}"))
    with pytest.raises(InvalidRequest, match="cannot continue a message"):
        await deaf.render(text_request(messages=begun, continues_last=True))


async def test_max_tokens_are_at_most_the_room_that_the_prompt_leaves() -> None:
    text_model = await model()
    assert (await text_model.to_generate(text_request("x" * 30))).stop.max_tokens == CONTEXT - 30
    assert (await text_model.to_generate(text_request("x" * 30, stop=Stop(max_tokens=7)))).stop.max_tokens == 7
    room = CONTEXT - 30
    assert (await text_model.to_generate(text_request("x" * 30, stop=Stop(max_tokens=room)))).stop.max_tokens == room
    with pytest.raises(ContextExceeded, match=f"leave room for {room}; this model's maximum context length is {CONTEXT} tokens"):
        await text_model.to_generate(text_request("x" * 30, stop=Stop(max_tokens=room + 1)))
    assert (await text_model.to_generate(text_request("x" * (CONTEXT - 1)))).stop.max_tokens == 1


@pytest.mark.parametrize("prompt", ["x" * CONTEXT, [1] * CONTEXT, "x" * (CONTEXT + 5)])
async def test_a_prompt_that_leaves_no_room_is_rejected_in_the_words_that_clients_look_for(prompt: str | list[int]) -> None:
    words = f"prompt is too long: {len(prompt)} tokens > {CONTEXT - 1} maximum; this model's maximum context length is {CONTEXT} "
    with pytest.raises(ContextExceeded, match=words) as caught:
        await (await model()).to_generate(text_request(prompt))
    assert caught.value.param == "prompt"


async def test_too_many_tokens_are_counted_before_a_list_is_made_of_them() -> None:
    card = ModelCard(name="talker", kind=ModelKind.LLM, llm=msgspec.structs.replace(INFO, context_length=40_000))
    text_model = await load(card, options=TextOptions(fast_tokenizer=False))  # fastokens has made the list already
    text = "x" * 1_000_000
    tracemalloc.start()
    try:
        with pytest.raises(ContextExceeded, match="1000000 tokens"):
            await text_model.to_generate(text_request(text))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4_000_000


async def test_the_log_probabilities_of_a_prompt_are_bounded() -> None:
    text_model = await model(context_length=100_000)
    most = MAX_PROMPT_LOGPROBS // 4
    assert await text_model.to_generate(text_request("x" * most, prompt_logprobs=3))
    with pytest.raises(InvalidRequest, match="at most 65536 are allowed"):
        await text_model.to_generate(text_request("x" * (most + 1), prompt_logprobs=3))


async def test_min_tokens_beyond_the_room_are_rejected() -> None:
    text_model = await model()
    for stop in (Stop(min_tokens=80), Stop(min_tokens=71)):
        with pytest.raises(InvalidRequest, match=r"min_tokens is (80|71).* room for 70"):
            await text_model.to_generate(text_request("x" * 30, stop=stop))


async def test_a_text_too_long_for_any_tokenization_is_rejected_before_it_is_tokenized() -> None:
    text_model = await model()
    with pytest.raises(InvalidRequest, match="5000000 characters"):
        await text_model.to_generate(text_request("x" * 5_000_000))
    with pytest.raises(InvalidRequest, match="11 characters > 10 maximum"):
        await (await model(limits=TextLimits(max_prompt_chars=10))).to_generate(text_request("x" * 11))


async def test_eos_tokens_are_added_to_the_requests_stop_tokens_unless_ignored() -> None:
    text_model = await model(eos_token_ids=(EOS, 9))
    assert (await text_model.to_generate(text_request("a", stop=Stop(token_ids=(3, 9))))).stop.token_ids == (3, 9, EOS)
    ignoring = Stop(token_ids=(3,), ignore_eos=True)
    assert (await text_model.to_generate(text_request("a", stop=ignoring))).stop.token_ids == (3,)


async def test_the_eos_id_is_looked_up_if_the_card_only_names_the_token() -> None:
    assert (await (await model(eos_token_ids=())).to_generate(text_request("a"))).stop.token_ids == (EOS,)
    assert (await (await model(eos_token_ids=(), eos_token="")).to_generate(text_request("a"))).stop.token_ids == ()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (text_request(""), "empty"),
        (text_request([]), "empty"),
        (text_request([1, 258]), "token id 258"),
        (text_request([-1]), "token id -1"),
        (text_request("a\udc00"), "cannot be tokenized"),
        (text_request(), "either a prompt or messages"),
        (text_request("a", messages=HELLO), "either a prompt or messages"),
        (text_request(messages=()), "no messages"),
        (text_request(messages=("x",)), "'role'"),
        (text_request(messages=({"content": "x"},)), "'role'"),
        (text_request(messages=({"role": "user", "content": [{"type": "image_url"}]},)), "text only"),
        (text_request("a", media=({"type": "image"},)), "supports text"),
        (text_request("a", n=0), "n must be between 1 and 128, got 0"),
        (text_request("a", n=10**9), "n must be between 1 and 128, got 1000000000"),
        (text_request("a", stop_strings=("x",) * 33), "33 stop strings"),
        (text_request("a", stop_strings=("",)), "0 characters"),
        (text_request("a", stop_strings=("x" * 1025,)), "1025 characters"),
        (text_request("a", logprobs=-1), "logprobs"),
        (text_request("a", sampling=Sampling(temperature=float("nan"))), "temperature"),
        (text_request(messages=HELLO, chat_template_kwargs={"messages": []}), "messages"),
        (text_request(messages=HELLO, chat_template_kwargs={"chat_template": "x"}), "must not set chat_template"),
    ],
)
async def test_requests_that_cannot_be_served_are_rejected_with_a_message(request_: TextRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await (await model()).to_generate(request_)


async def test_a_model_accepts_only_the_media_that_its_card_declares() -> None:
    text_model = await model(modalities=("image",))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    generate = await text_model.to_generate(text_request("a", media=(image,)))
    assert generate.media == (image_part(bytes(3)),)
    with pytest.raises(InvalidRequest, match=r"supports text, image; .*'audio'"):
        await text_model.to_generate(text_request("a", media=({"type": "audio"},)))
    with pytest.raises(InvalidRequest, match="'input_audio'"):
        await text_model.to_generate(text_request(messages=({"role": "user", "content": [{"type": "input_audio"}]},)))
    await text_model.render(text_request(messages=({"role": "user", "content": [image, {"type": "text", "text": "what?"}]},)))


async def test_a_model_without_a_chat_template_accepts_prompts_only() -> None:
    text_model = await model(chat_template="")
    with pytest.raises(InvalidRequest, match="no chat template"):
        await text_model.to_generate(text_request(messages=HELLO))
    assert await ids(text_model, text_request("hi"))


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (Files(tokenizer=b"{}"), EngineError),
        (Files(template=b"{% for %}"), EngineError),
        (Files(template=b"\xff"), EngineError),
    ],
)
async def test_files_that_cannot_be_loaded_are_named(files: Files, error: type[DynamoError]) -> None:
    with pytest.raises(error, match=r"tokenizer|chat template"):
        await model(files)


async def test_files_that_were_missing_can_be_loaded_later() -> None:
    with pytest.raises(Unavailable):
        await model(tokenizer="elsewhere")


async def test_a_response_is_detokenized_with_the_requests_settings() -> None:
    text_model = await model()
    request = text_request("a", stop_strings=("!",), n=2, stop=Stop(min_tokens=2))
    prompt = await text_model.to_generate(request)
    detokenizer = text_model.detokenizer(request, prompt)
    tokens = await ids(text_model, text_request("!é!?"))
    first = detokenizer.feed(Delta(tuple(tokens)))
    assert first is not None and (first.text, first.stop_reason) == ("!é", "!")
    other = detokenizer.feed(Delta((tokens[0],), 1, FinishReason.STOP, None, EOS))
    assert other is not None and (other.text, other.stop_reason) == ("!", None)
    assert detokenizer.done


async def test_an_eos_token_that_the_request_names_is_reported() -> None:
    text_model = await model()
    request = replace(text_request("a"), stop=Stop(token_ids=(EOS,)))
    end = text_model.detokenizer(request, await text_model.to_generate(request)).feed(Delta((), 0, FinishReason.STOP, None, EOS))
    assert end is not None and end.stop_reason == EOS


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}],
}


async def test_tools_calls_and_results_are_plain_messages_for_a_template_without_tools() -> None:
    plain = await model(tool_parser="generic", context_length=10_000)
    results = (
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "dry"},
    )
    messages = ({"role": "system", "content": "Be brief."}, *HELLO, CALLED, *results)
    prompt = await plain.render(TextRequest(model="talker", messages=messages, tools=(WEATHER,)))
    system, tools, rest = prompt.partition('<tools>\n{"name": "weather", "parameters": {"type": "object"}}\n</tools>')
    assert system.startswith("system: Be brief.\n")
    assert tools
    assert rest.endswith(
        "user: hi\n"
        'assistant: <tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>\n'
        "user: <tool_response>\nsunny\n</tool_response>\n<tool_response>\ndry\n</tool_response>\n"
        "assistant: "
    )


async def test_tools_are_described_in_a_system_message_of_their_own_if_there_is_none() -> None:
    plain = await model(tool_parser="generic", context_length=10_000)
    prompt = await plain.render(TextRequest(model="talker", messages=HELLO, tools=(WEATHER,)))
    assert prompt.startswith("system: You can call")
    assert await plain.render(TextRequest(model="talker", messages=HELLO)) == "user: hi\nassistant: "


async def test_a_template_that_a_request_brings_gets_the_tools_themselves() -> None:
    plain = await model(tool_parser="generic")
    own = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    assert await plain.render(TextRequest(model="talker", messages=HELLO, tools=(WEATHER,), chat_template=own)) == "weather"


async def test_a_message_of_calls_alone_has_an_empty_text_for_templates() -> None:
    template = b"{% for message in messages %}{{ 'To: ' + message.content }};{% endfor %}"
    capable = await model(Files(template), tool_parser="hermes")
    prompt = await capable.render(TextRequest(model="talker", messages=(*HELLO, CALLED, {"role": "assistant"})))
    assert prompt == "To: hi;To: ;To: ;"


@pytest.mark.parametrize(
    ("parser", "ids"),
    [
        ("mistral", ["abcDEF123", "2zXTUoItE", "abcDEF123", "2zXTUoItE", "unknown"]),
        ("kimi_k2", ["functions.weather:0", "functions.weather:1", "functions.weather:0", "functions.weather:1", "unknown"]),
        ("hermes", ["abcDEF123", "call_1", "abcDEF123", "call_1", "unknown"]),
    ],
)
async def test_ids_of_calls_have_the_form_that_the_template_expects(parser: str, ids: list[str]) -> None:
    template = (
        b"{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}{{ m.tool_call_id or '' }} {% endfor %}"
    )
    function = {"name": "weather", "arguments": "{}"}
    given = [{"id": id, "type": "function", "function": function} for id in ("abcDEF123", "call_1")]
    results = [{"role": "tool", "tool_call_id": id, "content": "dry"} for id in ("abcDEF123", "call_1", "unknown")]
    messages = (*HELLO, {"role": "assistant", "tool_calls": given}, *results)
    made = await model(Files(template), tool_parser=parser)
    prompt = await made.render(TextRequest(model="talker", messages=messages))
    assert prompt.split() == ids


async def test_a_tool_without_parameters_has_none_for_templates() -> None:
    template = b"{% for tool in tools %}{{ tool.function.parameters.properties | tojson }}{% endfor %}"
    capable = await model(Files(template), tool_parser="hermes")
    now = {"type": "function", "function": {"name": "now"}}
    assert await capable.render(TextRequest(model="talker", messages=HELLO, tools=(now,))) == "{}"


async def test_reasoning_before_calls_is_where_templates_read_it() -> None:
    template = b"{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}"
    capable = await model(Files(template), tool_parser="hermes")
    thought = {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    prompt = await capable.render(TextRequest(model="talker", messages=(thought, CALLED | {"reasoning_content": "So."})))
    assert prompt == "Hm.|;So.|So.;"
