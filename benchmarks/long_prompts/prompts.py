"""Real text of so many tokens: paragraphs of Python's own reference, in another order for each prompt."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics

from dynamo.frontend.preprocess.tokens.tokenizer import Tokenizer

MODEL = "sim"
_SETTINGS = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}


def paragraphs() -> list[str]:
    return [paragraph for text in topics.values() for paragraph in text.split("\n\n") if paragraph.strip()]


def texts(tokenizer: Tokenizer, tokens: int, count: int, seed: int = 1) -> list[str]:
    """Return texts that have about so many tokens each."""
    rng, parts = random.Random(seed), paragraphs()
    sizes = [len(tokenizer.encode_now(f"{part}\n\n", special_tokens=False)) for part in parts]
    return [_text(rng, parts, sizes, tokens) for _ in range(count)]


def _text(rng: random.Random, parts: Sequence[str], sizes: Sequence[int], tokens: int) -> str:
    chosen: list[str] = []
    missing, least = tokens, min(sizes)
    while missing >= least:
        for number in rng.sample(range(len(parts)), len(parts)):
            if sizes[number] <= missing:
                chosen.append(f"{parts[number]}\n\n")
                missing -= sizes[number]
    return "".join(chosen)


def requests(prompts: Sequence[str], output_tokens: int) -> Iterator[tuple[int, bytes]]:
    """Yield requests for ever, each with the position of its prompt. Each begins by a number, so that no two share a prefix."""
    quoted = [json.dumps(prompt).encode()[1:-1] for prompt in prompts]
    settings = json.dumps({"model": MODEL, "max_tokens": output_tokens, **_SETTINGS}).encode()[1:-1]
    for number in itertools.count():
        position = number % len(quoted)
        body = b'{%b, "prompt": "Case %d of all.\\n\\n%b"}' % (settings, number, quoted[position])
        head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        yield position, head % len(body) + body
