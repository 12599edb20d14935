"""Values, from whichever source: converted, checked, read from files of secrets."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Self

from dynamo.common.config.fields import ConfigError
from dynamo.common.config.settings import Setting

ENTRY_POINTS = "dynamo.config"
"""Entry-point group naming the configuration class of each process: one file or environment can serve them all."""
log = logging.getLogger(__name__)


class FileSecret(str):
    """A secret that was read from a file, which may hold another one by now."""

    path: str

    def __new__(cls, text: str, path: str) -> Self:
        secret = super().__new__(cls, text)
        secret.path = path
        return secret

    def __reduce__(self) -> tuple[type[FileSecret], tuple[str, str]]:
        """Return what a copy in another process is made of: `--processes` hands it the configuration."""
        return FileSecret, (str(self), self.path)

    def current(self) -> FileSecret:
        """Read the file again. Raises ConfigError."""
        return read_secret(self.path, "secret")


def warn_of_former(old: str, new: str) -> None:
    log.warning("%s is deprecated: use %s, since the next version refuses it", old, new)


def suggestion_for(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def other_classes() -> list[type[Any]]:
    """Return the configuration classes of the project's other processes: their names are no error here, only without effect."""
    return [entry.load() for entry in entry_points(group=ENTRY_POINTS)]


def look_up(document: Mapping[str, Any], key: str) -> tuple[bool, object]:
    if key in document:  # as a path
        return True, document[key]
    node: object = document
    for part in key.split("."):
        if not isinstance(node, Mapping):
            return False, None
        name = part if part in node else part.replace("_", "-")
        if name not in node:
            return False, None
        node = node[name]
    return True, node


def text_of(value: object, source: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{source} must be one plain value, not a {'list' if isinstance(value, list) else 'mapping'}")


def split_values(setting: Setting, text: str, source: str) -> list[object]:
    separator = setting.option.separator
    parts = [part.strip() for part in text.split(separator)] if separator else [text]
    return [parse_value(setting, part, source) for part in parts if part]


def parse_value(setting: Setting, text: str, source: str) -> object:
    described = setting.option
    if new := described.replaced.get(text):
        warn_of_former(f"{source} {text}", new)
        text = new
    if described.choices and text not in described.choices:
        raise ConfigError(f"{source}: {text!r} is not one of {', '.join(described.choices)}")
    value = guarded(setting.convert, text, source)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if described.minimum is not None and value < described.minimum:
            raise ConfigError(f"{source}: {text} is below {described.minimum:g}")
        if described.maximum is not None and value > described.maximum:
            raise ConfigError(f"{source}: {text} is above {described.maximum:g}")
    return value


def guarded(convert: Callable[[Any], object], value: object, source: str) -> object:
    try:
        return convert(value)
    except ValueError as error:
        shown = f" {value!r}" if isinstance(value, str) else ""
        raise ConfigError(f"{source}:{shown} {error}") from error


def read_secret(path: str, source: str) -> FileSecret:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{source}: the file {path} cannot be read: {why}") from error
    if not text:
        raise ConfigError(f"{source}: the file {path} is empty")
    return FileSecret(text, path)
