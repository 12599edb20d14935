"""A folder with a vision model (Idefics3) of two layers and random weights, made on the spot. Needs torch and transformers.

It has the tokens of `tiny_llama` and, after them, those that stand for an image and around it.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from dynamo.worker.engine.echo import byte_tokenizer
from tests.support.tiny_llama import BOS, CONTEXT, EOS, HEADS, INNER, LAYERS, VOCABULARY, WIDTH

SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IMAGE = VOCABULARY
"""The token that stands for an image in a prompt."""
IMAGE_TOKENS = 7
"""Tokens of an image in the model: four, and three around them."""
_SIDE, _PATCH = 56, 14
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
)


def make_tiny_vision(folder: Path) -> Path:
    """Writes the model into `folder`, which is made, and returns it."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(byte_tokenizer().decode())
    tokenizer.add_special_tokens(["<s>", "</s>", *SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=_TEMPLATE,
        model_max_length=CONTEXT,
    )
    _write(
        folder / "preprocessor_config.json",
        image_processor_type="Idefics3ImageProcessor",
        do_image_splitting=False,
        size={"longest_edge": _SIDE},
        max_image_size={"longest_edge": _SIDE},
    )
    _write(folder / "processor_config.json", processor_class="Idefics3Processor", image_seq_len=4)
    torch.manual_seed(0)
    config = Idefics3Config(
        image_token_id=IMAGE,
        scale_factor=2,
        pad_token_id=EOS,
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "image_size": _SIDE,
            "patch_size": _PATCH,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "vocab_size": VOCABULARY + len(SPECIAL),
            "max_position_embeddings": CONTEXT,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
        },
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def _write(path: Path, **values: object) -> None:
    path.write_text(json.dumps(values))
