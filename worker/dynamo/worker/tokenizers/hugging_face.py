"""Files of a tokenizer that an engine has loaded by the library transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dynamo.worker.tokenizers.sentencepiece import SentencePieceModel

log = logging.getLogger(__name__)


def tokenizer_files(tokenizer: Any) -> tuple[bytes, bytes]:
    """Return `tokenizer.json` and the chat template; empty if the model has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = Path(getattr(tokenizer, "vocab_file", None) or "")
    file = b""
    if backend is not None:
        file = backend.to_str().encode()
    elif vocabulary.suffix == ".model":
        file = SentencePieceModel.read(vocabulary.read_bytes()).tokenizer_json(add_bos=getattr(tokenizer, "add_bos_token", True))
    else:
        log.warning("the model's tokenizer is of an unknown kind: requests must give token ids")
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):
        template = template.get("default", "")
    return file, template.encode()
