"""The file of a configuration, in YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from dynamo.common.config.fields import ConfigError
from dynamo.common.config.settings import NameKind, Setting, former_names_of, kind_of_name, settings_of
from dynamo.common.config.values import (
    guarded,
    look_up,
    other_classes,
    parse_value,
    read_secret,
    split_values,
    suggestion_for,
    text_of,
)


class _ConfigLoader(yaml.SafeLoader):
    """Refuses a mapping with a duplicate key, of which YAML would silently keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"{key_node.start_mark.name}: '{key}' is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_config_file(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:
            document = yaml.load(stream, _ConfigLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"the configuration file {path} does not hold a mapping")
    return {str(key): value for key, value in document.items()}


def check_keys(cls: type[Any], settings: Sequence[Setting], document: Mapping[str, Any], path: str) -> None:
    known = _file_keys(settings)
    unknown = list(_unknown_keys(document, "", known))
    if unknown:
        others = frozenset(key for other in other_classes() for key in _file_keys(list(settings_of(other))))
        for key in _unknown_keys(document, "", known | others):
            raise ConfigError(f"{path}: unknown key '{key}'{suggestion_for(key, known)}")


def _file_keys(settings: Sequence[Setting]) -> frozenset[str]:
    former = (name for name in former_names_of(settings) if kind_of_name(name) is NameKind.KEY)
    return frozenset(key for setting in settings for key in (*setting.file_keys, *setting.file_file_keys)) | {*former}


def _unknown_keys(node: Mapping[str, Any], prefix: str, known: frozenset[str]) -> Iterator[str]:
    for name, value in node.items():
        key = f"{prefix}{str(name).replace('-', '_')}"
        if key in known:
            continue
        if isinstance(value, Mapping) and any(other.startswith(f"{key}.") for other in known):
            yield from _unknown_keys(value, f"{key}.", known)
        else:
            yield key


def value_of_file(setting: Setting, document: Mapping[str, Any], path: str) -> dict[tuple[str, ...], object]:
    for key in setting.file_keys:
        is_set, value = look_up(document, key)
        if is_set and value is not None:
            return {setting.path: _file_value(setting, value, f"{path}: '{key}'")}
    for key in setting.file_file_keys:
        is_set, value = look_up(document, key)
        if is_set and value is not None:
            return {setting.path: read_secret(str(value), f"{path}: '{key}'")}
    return {}


def _file_value(setting: Setting, value: object, source: str) -> object:
    if setting.option.from_file is not None:
        return guarded(setting.option.from_file, value, source)
    if setting.option.repeatable:
        items = value if isinstance(value, list) else [value]
        return tuple(part for item in items for part in split_values(setting, text_of(item, source), source))
    return parse_value(setting, text_of(value, source), source)
