"""Images for models that take tokens: their places in the prompt, and the blocks that routers see."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import GenerateRequest, image_part, pack_tokens, unpack_text
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import encode_bytes
from dynamo.frontend.api.kserve.text import to_text_requests
from dynamo.frontend.config import TextLimits, TextOptions
from dynamo.frontend.preprocess.media.images import prompt_of_contents
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.pipeline import TextPipeline
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.preprocess.text_files import TextFiles
from dynamo.protos.inference_pb2 import ModelInferRequest
from dynamo.worker.engine.echo import byte_tokenizer
from tests.support.pictures import huge_png

TOKENS = Tokenizer.from_str(byte_tokenizer().decode())
PLACE = TOKENS.token_to_id("@")
"""Stands for an image."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}@{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
TEXT_ONLY = "{% for message in messages %}{{ message.role }}: hello{% endfor %}"
BLOCK = 4


class Files:
    def __init__(self, template: str) -> None:
        self._files = {"t": byte_tokenizer(), "c": template.encode()}

    async def get(self, key: str) -> bytes:
        return self._files[key]

    async def fetch(self, key: str) -> None:
        await self.get(key)


async def seer(
    template: str = TEMPLATE, image_token: int | None = PLACE, limits: TextLimits | None = None, **settings: Any
) -> TextPipeline:
    info = LlmInfo(
        context_length=999, tokenizer="t", chat_template="c", modalities=("image",), image_token=image_token, **settings
    )
    options = TextOptions(limits=limits or TextLimits())
    model = await TextFiles(Files(template), options, Offload()).load(ModelCard(name="seer", kind=ModelKind.LLM, llm=info))
    assert isinstance(model, TextPipeline)
    return model


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data)}}


def asking(*parts: str | dict[str, Any]) -> TextRequest:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return TextRequest(model="seer", messages=[{"role": "user", "content": content}])


async def test_the_prompt_has_a_place_for_each_image_and_the_images_travel_beside_it() -> None:
    generate = await (await seer()).to_generate(asking("this ", image(b"one"), " or ", image(b"two")))
    assert TOKENS.decode(list(generate.tokens)) == "user: this @ or @"
    assert generate.media == (image_part(b"one"), image_part(b"two"))


async def test_an_engine_that_renders_images_gets_the_conversation_beside_the_prompt() -> None:
    model = await seer(renders_media=True)
    generate = await model.to_generate(asking("this ", image(b"one")))
    messages = unpack_text(generate.conversation).messages
    assert messages is not None and [part["type"] for part in messages[0]["content"]] == ["text", "media"]
    assert TOKENS.decode(list(generate.tokens)) == "user: this @" and generate.media == (image_part(b"one"),)
    assert (await model.to_generate(asking("this "))).conversation == b""
    for field, value in {"add_generation_prompt": False, "chat_template": TEMPLATE}.items():
        with pytest.raises(InvalidRequest, match=f"'{field}' cannot be combined with images"):
            await model.to_generate(msgspec.structs.replace(asking(image(b"one")), **{field: value}))


async def test_images_come_over_kserve_in_conversations() -> None:
    conversation = asking("this ", image(b"one")).messages
    request = ModelInferRequest(model_name="seer")
    request.inputs.add(name="messages", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(encode_bytes([json.dumps(conversation)]))
    [text] = to_text_requests(TensorRequest.parse(request.SerializeToString()), ModelCard(name="seer", kind=ModelKind.LLM))
    assert (await (await seer()).to_generate(text)).media == (image_part(b"one"),)
    assert text.media == (image(b"one"),), "so that frontends fetch those at URLs"


async def test_an_image_may_be_spelled_in_other_ways() -> None:
    data = bytes(range(90))
    broken = base64.encodebytes(data).decode()
    assert "\n" in broken.strip()
    part = {"type": "image_url", "image_url": {"url": f"data:IMAGE/JPEG;name=a;BASE64,{broken}"}}
    assert (await (await seer()).to_generate(asking(part))).media == (image_part(data),)


async def test_images_of_too_many_pixels_are_refused_before_they_are_decoded() -> None:
    model = await seer(limits=TextLimits(max_image_pixels=2 * 100 * 50))
    small = image(huge_png(100, 50))
    await model.to_generate(asking(small, small))
    with pytest.raises(InvalidRequest, match=r"an image of 100 x 50 pixels makes the images of the request larger than 10000"):
        await model.to_generate(asking(small, small, small))
    with pytest.raises(InvalidRequest, match=r"100000 x 100000 pixels .* larger than 134217728"):
        await (await seer()).to_generate(asking(image(huge_png())))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": url_of(b"one")},
        {"type": "input_image", "image_url": url_of(b"one")},
        {"type": "image", "image": url_of(b"one")},
        {"type": "image", "url": url_of(b"one")},
        {"type": "image", "image": url_of(b"one"), "image_url": url_of(b"two")},
    ],
)
async def test_an_image_may_be_written_as_other_servers_have_it(part: dict[str, Any]) -> None:
    assert (await (await seer()).to_generate(asking(part))).media == (image_part(b"one"),)


async def test_a_string_is_a_part_to_templates_that_read_parts_only() -> None:
    hello = [{"role": "user", "content": "hello"}]
    assert await (await seer()).render(TextRequest(model="seer", messages=hello)) == "user: hello"
    whole = await seer("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert await whole.render(TextRequest(model="seer", messages=hello)) == "hello"


@pytest.mark.parametrize(
    ("template", "parts", "words"),
    [
        (TEXT_ONLY, (image(b"one"),), "1 images, and its prompt 0 places"),
        (TEMPLATE, (image(b"one"), "and @"), "1 images, and its prompt 2 places"),
        (TEMPLATE, ({"type": "image_url", "image_url": {"url": "data:image/png;base64,A"}},), "not base64"),
        (TEMPLATE, ({"type": "image_url", "image_url": {"url": "data:image/png,A"}},), "must be a data URL"),
        (TEMPLATE, ({"type": "image_url"},), "must be a data URL"),
        (TEMPLATE, ({"type": "image_url", "image_url": {"url": "http://images.example.com/a"}},), "must be data URLs"),
    ],
)
async def test_images_that_cannot_be_placed_or_read_are_refused(template: str, parts: tuple[Any, ...], words: str) -> None:
    model = await seer(template)
    with pytest.raises(InvalidRequest, match=words):
        await model.to_generate(asking(*parts))


def blocks(text: str, *images: bytes, image_token: int | None = PLACE) -> list[int]:
    """The names of the blocks of a prompt, as routers have them."""
    request = GenerateRequest(model="seer", prompt=pack_tokens(TOKENS.encode(text).ids), media=tuple(map(image_part, images)))
    return sequence_hashes(prompt_of_contents(request, image_token), BLOCK)


def test_prompts_share_blocks_up_to_the_first_image_that_differs() -> None:
    text = "1234567@ or @ abcdefgh"
    same, first, second = (blocks(text, *images) for images in ((b"a", b"b"), (b"x", b"b"), (b"a", b"x")))
    assert blocks(text, b"a", b"b") == same
    assert (first[0], first[1] == same[1]) == (same[0], False)
    assert not set(first[1:]) & set(same)
    assert 1 < len(set(second) & set(same)) < len(same)
    assert not set(blocks(text)[1:]) & {*same, *first, *second}, "nor with a text that has the token of an image"


@pytest.mark.parametrize("image_token", [None, 7])
def test_prompts_whose_places_are_unknown_share_blocks_only_if_all_of_their_images_are_equal(image_token: int | None) -> None:
    text = "12345678@"
    one, other = (blocks(text, data, image_token=image_token) for data in (b"a", b"x"))
    assert blocks(text, b"a", image_token=image_token) == one
    assert not set(one) & {*other, *blocks(text)}
