"""Models that take text: what their engines get, and how their text is read."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Delta, FinishReason, Sampling, TextPrompt, unpack_text
from dynamo.common.guided_rules import CostlyGuide
from dynamo.common.model_card import TAKES_TEXT, LlmInfo, ModelCard, ModelKind
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.plain import PlainDetokenizer, PlainTextModel
from dynamo.frontend.preprocess.text import TextRequest
from tests.support.pictures import huge_png

HELLO = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def model(**info: Any) -> PlainTextModel:
    llm = msgspec.structs.replace(LlmInfo(context_length=0, tokenizer=TAKES_TEXT), **info)
    card = ModelCard(name="talker", kind=ModelKind.LLM, llm=llm)
    return PlainTextModel(card, TextLimits(), Offload())


def image(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


async def prompt_of(text_model: PlainTextModel, **fields: Any) -> TextPrompt:
    generate = await text_model.to_generate(TextRequest(model="talker", **fields))
    assert len(generate.prompt) % 4 == 0
    return unpack_text(generate.prompt)


async def test_an_engine_gets_the_conversation_itself() -> None:
    assert await prompt_of(model(), messages=[HELLO], chat_template_kwargs={"thinking": False}) == TextPrompt(
        messages=[HELLO], template_variables={"thinking": False}
    )
    assert await prompt_of(model(), prompt="once") == TextPrompt(prompt="once")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    shaped = await prompt_of(model(), messages=[{"role": "user", "content": parts}])
    assert shaped.messages == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools", "return_dict"])
async def test_no_variable_is_an_argument_of_what_renders_a_template(name: str) -> None:
    """SGLang passes all variables on to what renders, and among its arguments is another template, which may take for ever."""
    with pytest.raises(InvalidRequest, match=f"'chat_template_kwargs' must not set {name}"):
        await prompt_of(model(), messages=[HELLO], chat_template_kwargs={name: "{% for _ in range(10**9) %}{% endfor %}"})


async def test_no_server_gets_tools_whose_schemas_are_beyond_the_bounds_of_structured_output() -> None:
    """llama-server makes a grammar of all tools, though the model need not call any."""
    endless = {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000_000}
    tool = {"type": "function", "function": {"name": "add", "parameters": endless}}
    with pytest.raises(CostlyGuide, match="minItems"):
        await prompt_of(model(tool_parser="hermes"), messages=[HELLO], tools=[TOOL, tool])
    assert (await prompt_of(model(tool_parser="generic"), messages=[HELLO], tools=[TOOL, tool])).tools == []


async def test_a_longer_conversation_begins_with_the_same_blocks() -> None:
    turns = [{"role": "user", "content": f"turn {turn}, which has some words"} for turn in range(4)]
    shorter, longer = [
        (await model().to_generate(TextRequest(model="talker", messages=turns[:count], tools=[TOOL]))).prompt for count in (3, 4)
    ]
    assert longer.startswith(shorter.rstrip()[:-2])


async def test_tools_are_described_in_the_system_message_unless_the_engine_has_a_format_of_its_own() -> None:
    described = await prompt_of(model(tool_parser="generic"), messages=[HELLO], tools=[TOOL])
    assert described.messages is not None
    assert (described.tools, described.messages[0]["role"]) == ([], "system")
    assert '"name": "add"' in described.messages[0]["content"]
    assert (await prompt_of(model(tool_parser="hermes"), messages=[HELLO], tools=[TOOL])).tools == [TOOL]
    guided = Sampling(guided={"json_object": True})
    assert (await prompt_of(model(tool_parser="hermes"), messages=[HELLO], tools=[TOOL], sampling=guided)).tools == []


async def test_media_travel_beside_the_prompt_which_has_their_digests() -> None:
    seer = model(modalities=("image",))
    parts = [image("AAAA"), {"type": "text", "text": "or"}, image("BBBB")]
    messages = [{"role": "user", "content": parts}]
    # An API may list them in another order than the conversation has them.
    generate = await seer.to_generate(TextRequest(model="talker", messages=messages, media=(parts[2], parts[0])))
    assert generate.media == (parts[0], parts[2])
    [message] = unpack_text(generate.prompt).messages or []
    first, _, second = message["content"]
    assert (first["type"], first["index"], second["index"]) == ("media", 0, 1)
    assert first["sha256"] != second["sha256"], "other images are other prompts to routers"


def part(url: str, **settings: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **settings}}


PNG = "data:image/png;base64,AAAAAAAA"


async def digest_of(part: dict[str, Any]) -> str:
    prompt = await prompt_of(model(modalities=("image", "audio")), messages=[{"role": "user", "content": [part]}], media=(part,))
    assert prompt.messages is not None
    return str(prompt.messages[0]["content"][0]["sha256"])


@pytest.mark.parametrize(
    ("other", "is_equal"),
    [
        (part("data:image/x-png;base64,AAAAAAAA"), True),
        (part("data:IMAGE/PNG;name=a;Base64,AAAA\r\nAAAA"), True),
        (part(PNG, detail="auto"), True),
        ({"type": "input_image", "image_url": PNG}, True),
        ({"type": "image", "image": PNG}, True),
        ({"type": "image", "url": PNG}, True),
        (part("data:image/png;base64,AAAAAAAB"), False),
        (part(PNG, detail="low"), False),
        ({"type": "image", "image": PNG, "url": PNG}, False),
        ({"type": "audio_url", "audio_url": {"url": PNG}}, False),
        (part("data:image/png;base64,AAA"), False),
        (part("data:image/png,\ud800"), False),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, False),
    ],
)
async def test_the_same_image_in_another_spelling_is_the_same_to_routers(other: dict[str, Any], is_equal: bool) -> None:
    assert (await digest_of(other) == await digest_of(part(PNG))) == is_equal


async def test_images_of_too_many_pixels_never_reach_an_engine() -> None:
    huge = f"data:image/png;base64,{base64.b64encode(huge_png()).decode()}"
    for bomb in (part(huge), {"type": "image", "image": PNG, "url": huge}):
        with pytest.raises(InvalidRequest, match=r"100000 x 100000 pixels .* larger than 134217728") as refused:
            await digest_of(bomb)
        assert refused.value.param == "messages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [1, 2]}, "prompt"),
        ({"messages": [HELLO], "logprobs": 0}, "logprobs"),
        ({"messages": [HELLO], "bad_words": ("a",)}, "bad_words"),
        ({"messages": [HELLO], "continues_last": True}, "continue_final_message"),
        ({"messages": [HELLO], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": []}, "messages"),
        ({"messages": [HELLO], "media": (image("AAAA"),)}, "messages"),
        ({"prompt": "x" * (TextLimits().max_prompt_chars + 1)}, "prompt"),
    ],
)
async def test_what_needs_tokens_or_another_model_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await prompt_of(model(), **fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "image", "image": "file:///etc/passwd"},
        {"type": "image", "url": "http://169.254.169.254/"},
        {"type": "audio_url", "audio_url": {"url": "http://169.254.169.254/"}},
        {"type": "text", "text": "a", "image_url": "http://169.254.169.254/"},
    ],
)
async def test_media_that_would_have_to_be_fetched_are_refused(part: dict[str, Any]) -> None:
    seer = model(modalities=("image", "audio"))
    with pytest.raises(InvalidRequest, match="must be data URLs"):  # as KServe has it, and OpenAI's API
        await prompt_of(seer, messages=[{"role": "user", "content": [part]}])
    with pytest.raises(InvalidRequest, match="must be data URLs"):
        await prompt_of(seer, messages=[HELLO], media=(part,))


async def test_audio_in_the_request_is_taken() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    await prompt_of(model(modalities=("audio",)), messages=[{"role": "user", "content": [part]}], media=(part,))


async def test_a_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="its tokens are not known here"):
        await model().tokenizer.encode("a", special_tokens=True)
    with pytest.raises(InvalidRequest, match="takes text and generates text"):
        await model().render(TextRequest(model="talker", messages=[HELLO]))


def read(detokenizer: PlainDetokenizer, texts: Iterable[str]) -> str:
    deltas = [*(Delta(text=text) for text in texts), Delta(finish_reason=FinishReason.LENGTH)]
    return "".join(text.text for delta in deltas if (text := detokenizer.feed(delta)) is not None)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_stop_string_ends_a_choice_wherever_the_text_is_cut(cut: int) -> None:
    text = "one two three"
    detokenizer = PlainDetokenizer(1, ["two"], False)
    assert read(detokenizer, (text[:cut], text[cut:])) == "one "
    assert detokenizer.done
    assert read(PlainDetokenizer(1, ["two"], True), (text[:cut], text[cut:])) == "one two"
    assert read(PlainDetokenizer(1, ["threes"], False), (text[:cut], text[cut:])) == text, "held back, but no stop string"


def test_choices_end_by_themselves() -> None:
    detokenizer = PlainDetokenizer(2, (), False)
    first = detokenizer.feed(Delta(text="a", index=1, finish_reason=FinishReason.STOP))
    assert first is not None and (first.text, first.finish_reason) == ("a", FinishReason.STOP)
    assert not detokenizer.done
    assert detokenizer.feed(Delta(text="b", index=1)) is None
