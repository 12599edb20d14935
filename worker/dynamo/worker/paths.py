"""Paths that others wrote and that must stay inside a model's folder."""

from __future__ import annotations

from pathlib import PurePosixPath

from dynamo.common.errors import InvalidRequest

MAX_PATH_CHARS = 1024


def relative_path(text: str) -> PurePosixPath:
    """Return `text` as a path inside a model's folder. Raises InvalidRequest for a path that leads out of it."""
    path = PurePosixPath(text)
    parts = text.split("/")
    if (
        not text
        or len(text) > MAX_PATH_CHARS
        or path.is_absolute()
        or any(part in ("", ".", "..") for part in parts)
        or any(ord(character) < 32 or character == "\\" for character in text)
    ):
        raise InvalidRequest(f"{text[:200]!r} is not a path inside the model's folder")
    return path
