"""What a model's folder, as Hugging Face has them, says about text: tokenizer, chat template, end-of-text tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from dynamo.common.errors import InvalidRequest

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class TextFiles:
    tokenizer: bytes
    """`tokenizer.json`."""
    chat_template: bytes = b""
    bos_token: str = ""
    eos_token: str = ""
    eos_token_ids: tuple[int, ...] = ()
    image_token: int | None = None
    """The token that chat templates write for an image; None for a model of text alone."""


class _AddedToken(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _HuggingFaceConfig(msgspec.Struct):
    image_token_id: int | None = None
    image_token_index: int | None = None


def read_folder(folder: Path) -> TextFiles:
    """Raises InvalidRequest for a folder without a `tokenizer.json`, or with a file that cannot be read."""
    try:
        tokenizer = (folder / "tokenizer.json").read_bytes()
        config = _read(folder / "tokenizer_config.json", _TokenizerConfig) or _TokenizerConfig()
        generation = _read(folder / "generation_config.json", _GenerationConfig) or _read(
            folder / "config.json", _GenerationConfig
        )
        model = _read(folder / "config.json", _HuggingFaceConfig) or _HuggingFaceConfig()
        template_file = folder / "chat_template.jinja"
        template = template_file.read_bytes() if template_file.is_file() else _template(config).encode()
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the tokenizer in {folder} cannot be read: {error}") from error
    eos_token = _text(config.eos_token)
    return TextFiles(
        tokenizer=tokenizer,
        chat_template=template,
        bos_token=_text(config.bos_token),
        eos_token=eos_token,
        eos_token_ids=_eos_ids(tokenizer, eos_token, generation),
        image_token=model.image_token_id if model.image_token_id is not None else model.image_token_index,
    )


def _read(path: Path, kind: type[S]) -> S | None:
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.is_file() else None


def _text(token: str | _AddedToken | None) -> str:
    return token.content if isinstance(token, _AddedToken) else token or ""


def _template(config: _TokenizerConfig) -> str:
    if isinstance(config.chat_template, list):
        return next((named.template for named in config.chat_template if named.name == "default"), "")
    return config.chat_template or ""


def _eos_ids(tokenizer: bytes, eos_token: str, generation: _GenerationConfig | None) -> tuple[int, ...]:
    """Return the tokens that end a generation: the tokenizer's first, then those of the model's generation settings."""
    own = Tokenizer.from_str(tokenizer.decode()).token_to_id(eos_token) if eos_token else None
    configured = generation.eos_token_id if generation is not None else None
    listed = [] if configured is None else [configured] if isinstance(configured, int) else configured
    return tuple(dict.fromkeys([*([] if own is None else [own]), *listed]))
