"""A configuration class, read: one setting for each field, with its names resolved."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, NoReturn

from dynamo.common.config.fields import GENERAL, GROUP_KEY, OPTION_KEY, Group, Option

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration class, with its names resolved."""

    path: tuple[str, ...]
    title: str
    option: Option
    flags: tuple[str, ...]
    env: tuple[str, ...]
    file_keys: tuple[str, ...]
    convert: Callable[[str], object]
    is_bool: bool
    is_path: bool
    default: object

    @property
    def shown_as(self) -> str:
        return next(iter((*self.flags, *self.env, *self.file_keys)))

    @property
    def file_flags(self) -> tuple[str, ...]:
        """For a secret: the flags naming a file that holds it."""
        return tuple(f"{flag}-file" for flag in self.flags) if self.option.secret else ()

    @property
    def file_env(self) -> tuple[str, ...]:
        return tuple(f"{name}_FILE" for name in self.env) if self.option.secret else ()

    @property
    def file_file_keys(self) -> tuple[str, ...]:
        return tuple(f"{key}_file" for key in self.file_keys) if self.option.secret else ()

    @property
    def former_names(self) -> dict[str, str]:
        """The names that `formerly` declares, each with its successor."""
        names: dict[str, str] = {}
        for old in self.option.formerly:
            new = next(name for name in (*self.flags, *self.env, *self.file_keys) if kind_of_name(name) is kind_of_name(old))
            forms = [(old, new)]
            if self.is_bool and old.startswith("--"):
                forms = list(zip(with_negations([old]), with_negations([new]), strict=True))
            elif self.option.secret:
                ending = {NameKind.FLAG: "-file", NameKind.VARIABLE: "_FILE", NameKind.KEY: "_file"}[kind_of_name(old)]
                forms = [*([] if old.startswith("--") else forms), (f"{old}{ending}", f"{new}{ending}")]
            names.update(forms)
        return names


class NameKind(Enum):
    FLAG, VARIABLE, KEY = range(3)


def kind_of_name(name: str) -> NameKind:
    if name.startswith("--"):
        return NameKind.FLAG
    return NameKind.VARIABLE if name.isupper() else NameKind.KEY


def settings_of(cls: type[Any], path: tuple[str, ...] = (), within: Group | None = None) -> Iterator[Setting]:
    """Yield the settings of `cls`: first its own group in the order of its fields, then other groups."""
    within = within or Group(GENERAL)
    hints = typing.get_type_hints(cls)
    others: list[Setting] = []
    for item in fields(cls):
        if inner := item.metadata.get(GROUP_KEY):
            for setting in settings_of(hints[item.name], (*path, item.name), inner):
                if setting.title == within.title:
                    yield setting
                else:
                    others.append(setting)
        elif described := item.metadata.get(OPTION_KEY):
            yield _resolve((*path, item.name), hints[item.name], described, within, item.default)
    yield from others


def _resolve(path: tuple[str, ...], hint: Any, described: Option, within: Group, default: object) -> Setting:
    name = f"{within.prefix}_{path[-1]}" if within.prefix else path[-1]
    key = f"{within.prefix}.{path[-1]}" if within.prefix else path[-1]
    flags = described.flags if described.flags is not None else (f"--{name.replace('_', '-')}",)
    env = described.env if described.env is not None else (f"DYN_{name.upper()}",)
    kind = _element(hint, described.repeatable)
    if isinstance(kind, type) and issubclass(kind, StrEnum) and described.choices is None:
        described = replace(described, choices=tuple(member.value for member in kind))
    return Setting(
        path=path,
        title=within.title,
        option=described,
        flags=flags,
        env=env,
        file_keys=described.file_keys if described.file_keys is not None else (key,),
        convert=described.parse or _converter(kind),
        is_bool=kind is bool,
        is_path=kind is Path,
        default=default,
    )


def _element(hint: Any, repeatable: bool) -> Any:
    """The type of one value: `X` of `X | None` and, for repeatable fields, of `tuple[X, ...]`."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if repeatable and typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint


def _converter(kind: Any) -> Callable[[str], object]:
    if kind is bool:
        return _to_bool
    if kind is int:
        return _to_int
    if kind is float:
        return _to_float
    if isinstance(kind, type) and issubclass(kind, str | Path):  # StrEnum too: its choices are checked before
        return kind
    return _refuse_text


def _refuse_text(text: str) -> NoReturn:
    raise ValueError("can only be given in the configuration file")


def _to_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("is neither true nor false")


def _to_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("is not an integer") from None


def _to_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("is not a finite number")
    return value


def former_names_of(settings: Iterable[Setting]) -> dict[str, str]:
    return {old: new for setting in settings for old, new in setting.former_names.items()}


def with_negations(flags: Iterable[str]) -> tuple[str, ...]:
    return tuple(form for flag in flags for form in (flag, f"--no-{flag.removeprefix('--')}"))
