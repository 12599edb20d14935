"""A folder with a speech model (Whisper) of one layer and random weights, made on the spot. Needs torch and transformers.

Its tokens are the 256 bytes and, after them, those by which Whisper names languages, tasks and times. What it writes is noise.
"""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
_SPECIAL = ("endoftext", "startoftranscript", "en", "de", *_TASKS, *(f"{step * 0.02:.2f}" for step in range(1501)))
_RATE = 16_000


def make_tiny_whisper(folder: Path) -> Path:
    """Writes the model into `folder`, which is made, and returns it."""
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: token for token, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    end, start = (tokenizer.token_to_id(f"<|{name}|>") for name in _SPECIAL[:2])
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    ends = dict.fromkeys(("eos_token", "bos_token", "unk_token", "pad_token"), "<|endoftext|>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer", **ends}))
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        decoder_start_token_id=start,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    WhisperForConditionalGeneration(config).save_pretrained(folder, safe_serialization=True)
    WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    return folder


def tone(seconds: float = 1.0) -> bytes:
    """Return a tone as a WAV file."""
    file = io.BytesIO()
    samples = (np.sin(np.arange(int(_RATE * seconds)) / 20.0) * 8000).astype("<i2")
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(_RATE)
        written.writeframes(samples.tobytes())
    return file.getvalue()
