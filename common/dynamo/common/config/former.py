"""Names of the version before, which work with a warning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.common.config.settings import NameKind, kind_of_name
from dynamo.common.config.values import look_up, warn_of_former


def rename_flags(argv: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if new := renamed.get(flag):
            warn_of_former(flag, new)
        words.append(f"{new or flag}{equals}{value}")
    return words


def rename_variables(environ: Mapping[str, str], renamed: Mapping[str, str]) -> dict[str, str]:
    """A new name that is set takes precedence over the former one."""
    variables = {name: value for name, value in environ.items() if name not in renamed}
    for old, value in environ.items():
        if new := renamed.get(old):
            warn_of_former(f"variable {old}", new)
            variables[new] = variables.get(new) or value
    return variables


def rename_keys(document: dict[str, Any], renamed: Mapping[str, str], path: str) -> dict[str, Any]:
    """Return the document with new keys, as paths, beside the former ones; where both are given the new one counts."""
    given = {old: look_up(document, old) for old in renamed if kind_of_name(old) is NameKind.KEY}
    for old, (is_set, value) in given.items():
        if is_set:
            warn_of_former(f"{path}: '{old}'", f"'{renamed[old]}'")
            if not look_up(document, renamed[old])[0]:
                document = {**document, renamed[old]: value}
    return document
