"""Images into the vLLM engine, with a vision model of two layers: `make test-vllm`."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import GenerateRequest, Sampling, Stop, Summary, image_part, pack_tokens
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.frontend.preprocess.media.images import prompt_of_contents
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.echo import byte_tokenizer
from dynamo.worker.process.engine_factory import make_engine
from tests.support.tiny_vision import IMAGE, IMAGE_TOKENS, make_tiny_vision
from tests.support.waiting import until

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
CPU = f"--enforce-eager --dtype float32 --block-size {BLOCK} --kv-cache-memory-bytes 64M"
BEFORE = 2 * BLOCK
"""Tokens in front of the first image."""


@dataclass(frozen=True)
class Seer:
    engine: Any
    llm: LlmInfo

    async def generate(self, request: GenerateRequest) -> tuple[list[float], Summary]:
        """The log probabilities of the tokens, and the summary."""
        *deltas, summary = [item async for item in self.engine.generate(request, Context("test"))]
        return [step[0][1] for delta in deltas for step in delta.logprobs or ()], summary

    def hashes(self) -> set[int]:
        """Return the hashes of the blocks that are cached."""
        return set(self.engine.kv.held())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seer]:
    model = make_tiny_vision(tmp_path_factory.mktemp("vllm") / "seer")
    engine = make_engine(str(model), engine_args=f"{CPU} --limit-mm-per-prompt.image 2", max_num_seqs=4)
    card = await engine.start()
    assert isinstance(card, ModelCard) and card.llm is not None
    yield Seer(engine, card.llm)
    await engine.close()  # type: ignore[union-attr]


def picture(color: str, side: int = 40) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (side, side), color).save(file, "PNG")
    return file.getvalue()


def asking(*images: bytes, about: str = "a") -> GenerateRequest:
    """A prompt of two blocks of text, images, and two more blocks of text."""
    text = Tokenizer.from_str(byte_tokenizer().decode()).encode(about).ids * BEFORE
    return GenerateRequest(
        model="seer",
        prompt=pack_tokens([*text, *[IMAGE] * len(images), *text]),
        media=tuple(map(image_part, images)),
        sampling=Sampling(temperature=0.0),
        stop=Stop(max_tokens=4, ignore_eos=True),
        logprobs=0,
    )


def test_the_card_says_that_the_model_takes_images_and_which_token_stands_for_one(seer: Seer) -> None:
    assert (seer.llm.modalities, seer.llm.image_token, seer.llm.block_size) == (("image",), IMAGE, BLOCK)


async def test_an_image_changes_the_response_and_is_cached_by_its_content(seer: Seer) -> None:
    red, summary = await seer.generate(asking(picture("red")))
    assert (summary.prompt_tokens, summary.cached_tokens) == (2 * BEFORE + IMAGE_TOKENS, 0)
    again, summary = await seer.generate(asking(picture("red")))
    assert again == pytest.approx(red, abs=1e-4)
    assert summary.cached_tokens == (2 * BEFORE + IMAGE_TOKENS) // BLOCK * BLOCK
    blue, summary = await seer.generate(asking(picture("blue")))
    assert blue != pytest.approx(red, abs=1e-4)
    assert summary.cached_tokens == BEFORE, "the text in front of the image"


async def test_routers_match_the_cache_up_to_the_first_image(seer: Seer) -> None:
    request = asking(picture("green"), about="b")
    hashes = sequence_hashes(prompt_of_contents(request, IMAGE), BLOCK)
    assert len(hashes) > BEFORE // BLOCK
    await seer.generate(request)
    await until(lambda: set(hashes) & seer.hashes() == set(hashes[: BEFORE // BLOCK]))


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ((b"no image",), "cannot identify image"),
        ((picture("red"),) * 3, "At most 2 image"),
        ((picture("red", 40)[:60],), "image"),
    ],
)
async def test_images_that_cannot_be_read_or_are_too_many_are_refused(seer: Seer, images: tuple[bytes, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await seer.generate(asking(*images))
