"""Environment variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.common.config.fields import ConfigError
from dynamo.common.config.settings import NameKind, Setting, former_names_of, kind_of_name, settings_of
from dynamo.common.config.values import other_classes, parse_value, read_secret, split_values, suggestion_for


def variables(cls: type[Any]) -> frozenset[str]:
    """Return the names of all environment variables that `cls` reads."""
    settings = list(settings_of(cls))
    former = (name for name in former_names_of(settings) if kind_of_name(name) is NameKind.VARIABLE)
    return frozenset(name for setting in settings for name in (*setting.env, *setting.file_env)) | {"DYN_CONFIG", *former}


def value_of_environment(setting: Setting, environ: Mapping[str, str]) -> dict[tuple[str, ...], object]:
    for name in setting.env:
        if text := environ.get(name):
            source = f"variable {name}"
            split = setting.option.repeatable
            return {setting.path: tuple(split_values(setting, text, source)) if split else parse_value(setting, text, source)}
    for name in setting.file_env:
        if text := environ.get(name):
            return {setting.path: read_secret(text, f"variable {name}")}
    return {}


def check_variables(cls: type[Any], settings: Sequence[Setting], environ: Mapping[str, str]) -> None:
    known = variables(cls)
    unknown = [name for name in sorted(environ) if name.startswith("DYN_") and name not in known]
    if unknown:
        others = frozenset(name for other in other_classes() for name in variables(other))
        for name in unknown:
            if name not in others:
                raise ConfigError(f"unknown variable {name}{suggestion_for(name, known)}")
