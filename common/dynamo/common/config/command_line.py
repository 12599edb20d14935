"""Flags, and the text of `--help`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any, NoReturn

from dynamo.common.config.fields import GENERAL, ConfigError
from dynamo.common.config.settings import Setting, with_negations
from dynamo.common.config.values import parse_value, read_secret, split_values, suggestion_for
from dynamo.common.process.interpreter import interpreter

DISTRIBUTION = "dynamo-serving"


@cache
def project_version() -> str:
    """Return the installed version, or `0+source` for a source tree that was not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+source"


@dataclass(slots=True)
class _ParsedFlags:
    config: str | None
    given: dict[tuple[str, ...], list[tuple[str, str]]]
    """Per field, each (flag, text) in the order given."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return f"usage: {self._prog} [options]\n\n"  # dozens of flags in one usage line are unreadable


def read_flags(
    settings: Sequence[Setting],
    others: Mapping[tuple[str, ...], Sequence[Setting]],
    argv: Sequence[str],
    program: str,
    description: str,
) -> _ParsedFlags:
    """`others` are the settings whose flags are passed on, by the path of the field that takes them."""
    given: dict[tuple[str, ...], list[tuple[str, str]]] = {}

    class RecordFlag(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            flag = option_string or ""
            if self.nargs == 0:
                texts = [str(not flag.startswith("--no-")).lower()]
            else:
                texts = values if isinstance(values, list) else [values]
            given.setdefault(self.const, []).extend((flag, str(text)) for text in texts)

    parser = _Parser(program, description=description, formatter_class=_Help, allow_abbrev=False, add_help=False)
    general = parser.add_argument_group(GENERAL)
    general.add_argument("--help", "-h", action="help", help="Show this and exit.")
    general.add_argument(
        "--version", action="version", version=f"{program} {project_version()}, {interpreter()}", help="Show and exit."
    )
    general.add_argument("--config", metavar="FILE", help="YAML file with these options [DYN_CONFIG].")
    groups = {GENERAL: general}
    for setting in settings:
        if setting.title not in groups:
            groups[setting.title] = parser.add_argument_group(setting.title)
        _add_flags(groups[setting.title], setting, RecordFlag)
    _add_passed_on(parser, settings, others, given)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise ConfigError(_unknown_argument(unknown[0], [*settings, *chain(*others.values())]))
    return _ParsedFlags(known.config, given)


def _add_flags(target: Any, setting: Setting, record: type[argparse.Action]) -> None:
    shown, hidden = _forms(setting)
    common: dict[str, Any] = {"action": record, "const": setting.path, "dest": argparse.SUPPRESS, "nargs": _nargs(setting)}
    if not setting.is_bool:
        common["metavar"] = "FILE" if setting.option.secret else _metavar(setting)
    if shown:
        target.add_argument(*shown, help=_help(setting).replace("%", "%%"), **common)
    if hidden:
        target.add_argument(*hidden, help=argparse.SUPPRESS, **common)


def _forms(setting: Setting) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flags that the help shows, and the hidden ones."""
    if setting.option.secret:
        return setting.file_flags, ()
    if setting.is_bool:
        return with_negations(setting.flags), with_negations(setting.option.hidden_flags)
    return setting.flags, setting.option.hidden_flags


def _nargs(setting: Setting) -> int | str | None:
    return 0 if setting.is_bool else "+" if setting.option.several else None


def _add_passed_on(
    parser: argparse.ArgumentParser,
    settings: Sequence[Setting],
    others: Mapping[tuple[str, ...], Sequence[Setting]],
    given: dict[tuple[str, ...], list[tuple[str, str]]],
) -> None:
    """Take the flags of `others` that are not our own. One that several programs have is refused."""
    own = {form for setting in settings for forms in _forms(setting) for form in forms}
    owners: dict[str, dict[tuple[str, ...], Setting]] = {}
    for path, members in others.items():
        for setting in members:
            for form in chain(*_forms(setting)):
                if form not in own:
                    owners.setdefault(form, {})[path] = setting
    shown_as = {setting.path: setting.shown_as for setting in settings}

    class PassOn(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            flag = option_string or ""
            paths = list(owners[flag])
            if len(paths) > 1:
                forms = " or ".join(f"{shown_as[path]}={flag}{'' if self.nargs == 0 else '=…'}" for path in paths)
                raise ConfigError(f"{flag} is a flag of several programs; use {forms}")
            texts = values if isinstance(values, list) else [values]
            words = [flag] if self.nargs == 0 else [f"{flag}={text}" for text in texts]
            given.setdefault(paths[0], []).extend((flag, word) for word in words)

    for form, by_path in owners.items():
        nargs = _nargs(next(iter(by_path.values())))
        parser.add_argument(form, action=PassOn, nargs=nargs, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _metavar(setting: Setting) -> str:
    if setting.option.metavar:
        return setting.option.metavar
    if setting.option.choices:
        return "|".join(setting.option.choices)
    return "PATH" if setting.is_path else setting.path[-1].rsplit("_", 1)[-1].upper()


def _help(setting: Setting) -> str:
    notes = []
    if (default := shown_default(setting)) is not None:
        notes.append(f"default {default}")
    if setting.env:
        notes.append(setting.env[0])
    return setting.option.help + (f" [{'; '.join(notes)}]" if notes else "")


def shown_default(setting: Setting) -> str | None:
    if setting.default is MISSING or setting.default is None or setting.default in ("", ()):
        return None
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    if isinstance(setting.default, tuple):
        return ",".join(str(item) for item in setting.default)
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def _unknown_argument(text: str, settings: Sequence[Setting]) -> str:
    if not text.startswith("-"):
        return f"unexpected argument {text!r}"
    flag = text.split("=", 1)[0]
    for setting in settings:
        if setting.option.secret and flag in setting.flags:
            return f"{flag} would be readable in the process list; use {setting.file_flags[0]} or {setting.env[0]}"
    known = [flag for setting in settings for flag in (*setting.flags, *setting.file_flags) if flag] + ["--config"]
    return f"unknown flag {flag}{suggestion_for(flag, known)}"


def value_of_flags(setting: Setting, occurrences: Sequence[tuple[str, str]]) -> object:
    if setting.option.repeatable:
        return tuple(value for flag, text in occurrences for value in split_values(setting, text, flag))
    flag, text = occurrences[-1]
    return read_secret(text, flag) if setting.option.secret else parse_value(setting, text, flag)
