"""A folder with a language model of two layers and random weights, made on the spot, and a LoRA adapter for it.

What it says is noise; everything else about it is as it is of a real model in Hugging Face's format. Its tokens are the 256 bytes
and, after them, `<s>` and `</s>`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from dynamo.worker.engine.echo import CHAT_TEMPLATE, byte_tokenizer

BOS, EOS = 256, 257
VOCABULARY = 258
CONTEXT = 2048
LAYERS, WIDTH, INNER = 2, 128, 256
HEADS = 2


def make_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Writes the model into `folder`, which is made, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(byte_tokenizer().decode())
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": CONTEXT,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH // HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(np.random.default_rng(seed)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_tiny_adapter(folder: Path, seed: int = 1, rank: int = 8) -> Path:
    """Writes a LoRA adapter that changes what the model says."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers"
    weights = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            weights[f"{prefix}.{layer}.self_attn.{name}.lora_A.weight"] = _matrix(random, rank, WIDTH, 0.5)
            weights[f"{prefix}.{layer}.self_attn.{name}.lora_B.weight"] = _matrix(random, WIDTH, rank, 0.5)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _weights(random: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    weights = {
        "model.embed_tokens.weight": _matrix(random, VOCABULARY, WIDTH, 1.0),
        "model.norm.weight": np.ones(WIDTH, np.float32),
        "lm_head.weight": _matrix(random, VOCABULARY, WIDTH, 0.2),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{prefix}.self_attn.{name}.weight"] = _matrix(random, WIDTH, WIDTH, 0.1)
        weights[f"{prefix}.mlp.gate_proj.weight"] = _matrix(random, INNER, WIDTH, 0.1)
        weights[f"{prefix}.mlp.up_proj.weight"] = _matrix(random, INNER, WIDTH, 0.1)
        weights[f"{prefix}.mlp.down_proj.weight"] = _matrix(random, WIDTH, INNER, 0.1)
        weights[f"{prefix}.input_layernorm.weight"] = np.ones(WIDTH, np.float32)
        weights[f"{prefix}.post_attention_layernorm.weight"] = np.ones(WIDTH, np.float32)
    return weights


def _matrix(random: np.random.Generator, rows: int, columns: int, scale: float) -> NDArray[np.float32]:
    return random.normal(0.0, scale, (rows, columns)).astype(np.float32)
