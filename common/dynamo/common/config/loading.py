"""Make a configuration of flags, the environment and a file."""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import chain
from typing import Any, NoReturn, TypeVar

from dynamo.common.config.command_line import read_flags, value_of_flags
from dynamo.common.config.environment import check_variables, value_of_environment
from dynamo.common.config.fields import GROUP_KEY, OPTION_KEY, ConfigError
from dynamo.common.config.file import check_keys, read_config_file, value_of_file
from dynamo.common.config.former import rename_flags, rename_keys, rename_variables
from dynamo.common.config.settings import Setting, former_names_of, settings_of
from dynamo.common.config.values import look_up

EXIT_CONFIG = 2
C = TypeVar("C")


def load(
    cls: type[C],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    program: str,
    description: str | None = None,
    passes_on: Mapping[str, type[Any]] | None = None,
) -> C:
    """Return a `cls` from the arguments (without the program's name) and the environment.

    `passes_on` names repeatable fields of `cls` and the classes of other programs: a flag that one of them has, and neither `cls`
    nor another of them, is appended to its field as `--flag=value`.

    Raises ConfigError; `--help` and `--version` print and raise SystemExit(0).
    """
    settings = list(settings_of(cls))
    others: dict[tuple[str, ...], list[Setting]] = {
        (name,): list(settings_of(other)) for name, other in (passes_on or {}).items()
    }
    renamed = former_names_of(settings)
    argv = rename_flags(argv, former_names_of(chain(settings, *others.values())))
    environ = rename_variables(environ, renamed)
    flags = read_flags(settings, others, argv, program, description or cls.__doc__ or "")
    values: dict[tuple[str, ...], object] = {}
    path = flags.config or environ.get("DYN_CONFIG") or None
    if path is not None:
        document = rename_keys(read_config_file(path), renamed, path)
        check_keys(cls, settings, document, path)
        for setting in settings:
            values.update(value_of_file(setting, document, path))
    from_flags: dict[tuple[str, ...], object] = {}
    check_variables(cls, settings, environ)
    for setting in settings:
        if occurrences := flags.given.get(setting.path):
            from_flags[setting.path] = value_of_flags(setting, occurrences)
            if path is not None and values.get(setting.path, from_flags[setting.path]) != from_flags[setting.path]:
                key = next(k for k in (*setting.file_keys, *setting.file_file_keys) if look_up(document, k)[0])
                raise ConfigError(f"{occurrences[-1][0]} and '{key}' in {path} are both given and differ; keep one of them")
        values.update(value_of_environment(setting, environ))
    values.update(from_flags)
    return _build(cls, (), values)


def load_or_exit(cls: type[C], *, program: str, passes_on: Mapping[str, type[Any]] | None = None) -> C:
    """`load` from `sys.argv` and the environment; an error is printed and ends the process with status 2."""
    try:
        return load(cls, sys.argv[1:], os.environ, program=program, passes_on=passes_on)
    except ConfigError as error:
        exit_with(program, error)


def exit_with(program: str, error: Exception) -> NoReturn:
    """Print the error as one sentence and end the process with status 2."""
    print(f"{program}: {error}", file=sys.stderr)  # noqa: T201  # before there is a log, or after it
    sys.exit(EXIT_CONFIG)


def _build(cls: type[C], path: tuple[str, ...], values: Mapping[tuple[str, ...], object]) -> C:
    arguments: dict[str, object] = {}
    hints = typing.get_type_hints(cls)
    for item in fields(cls):  # type: ignore[arg-type]
        where = (*path, item.name)
        if GROUP_KEY in item.metadata:
            arguments[item.name] = _build(hints[item.name], where, values)
        elif where in values:
            arguments[item.name] = values[where]
        elif OPTION_KEY in item.metadata and item.default is MISSING:
            setting = next(setting for setting in settings_of(cls, path) if setting.path == where)
            names = [*setting.flags[:1], *setting.env[:1]]
            raise ConfigError(f"{setting.shown_as} is required: give {' or set '.join(names)}")
    try:
        return cls(**arguments)
    except ValueError as error:  # a class checks in __post_init__ what concerns several fields
        raise ConfigError(str(error)) from error
