"""Writes ./model: a small byte-level tokenizer and the configuration files that the peer wants beside it."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

folder = Path("model")
folder.mkdir(exist_ok=True)
rng = random.Random(1)
syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u")]
words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(3000)]
lines = [" ".join(rng.choices(words, k=60)) for _ in range(4000)]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.train_from_iterator(
    lines,
    trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
)
tokenizer.save(str(folder / "tokenizer.json"))
config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": tokenizer.get_vocab_size(),
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
(folder / "config.json").write_text(json.dumps(config))
(folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
template = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": False}
extra = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, "chat_template": template}
(folder / "tokenizer_config.json").write_text(json.dumps({**tokens, **extra}))
