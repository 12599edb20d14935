"""One frozen dataclass per process, filled from flags, the environment, a YAML file and defaults, in this order.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class WorkerConfig:
        drain_timeout_s: float = option(30.0, minimum=0, flags=("--drain-timeout",), help="Longest drain, in seconds.")
        nats: NatsOptions = group("NATS", prefix="nats")

    config = load_or_exit(WorkerConfig, program="dynamo-worker")

A field without explicit names gets `--drain-timeout-s`, `DYN_DRAIN_TIMEOUT_S` and the file key `drain_timeout_s`;
inside a group with a prefix `--nats-…`, `DYN_NATS_…` and `nats.…`. What does not fit stops the start with one sentence
(`ConfigError`). Names and values of the version before are declared beside the new ones (`formerly`, `replaced`), and
work with a warning.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum, StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import yaml

from dynamo.common.interpreter import interpreter

DISTRIBUTION = "dynamo-serving"
ENTRY_POINTS = "dynamo.config"
"""Entry-point group naming the configuration class of each process: one file or environment can serve them all."""
EXIT_CONFIG = 2

log = logging.getLogger(__name__)

C = TypeVar("C")
_OPTION = "dynamo.option"
_GROUP = "dynamo.group"
_GENERAL = "General"
"""Title of the options that are in no group."""
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


class ConfigError(Exception):
    """The configuration cannot be used. `str(error)` is one sentence naming the flag, variable or file key."""


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
        return _read_secret(self.path, "secret")


@dataclass(frozen=True, slots=True)
class Option:
    """How one field is named outside, and which values it takes. None for names: derived from the field."""

    help: str
    flags: tuple[str, ...] | None = None
    hidden_flags: tuple[str, ...] = ()
    env: tuple[str, ...] | None = None
    file_keys: tuple[str, ...] | None = None
    choices: tuple[str, ...] | None = None
    parse: Callable[[str], object] | None = None
    from_file: Callable[[object], object] | None = None
    repeatable: bool = False
    several: bool = False
    separator: str = ","
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False
    metavar: str | None = None
    formerly: tuple[str, ...] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    prefix: str = ""


def option(
    default: Any = MISSING,
    *,
    help: str,
    flags: Sequence[str] | None = None,
    hidden_flags: Sequence[str] = (),
    env: Sequence[str] | None = None,
    file_key: str | Sequence[str] | None = None,
    choices: Sequence[str] | None = None,
    parse: Callable[[str], object] | None = None,
    from_file: Callable[[object], object] | None = None,
    repeatable: bool = False,
    several: bool = False,
    separator: str = ",",
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    metavar: str | None = None,
    formerly: Sequence[str] = (),
    replaced: Mapping[str, str] | None = None,
) -> Any:
    """A dataclass field that can be set from outside. Without a default it must be set.

    `hidden_flags` work but are not shown. The first of `env` that is set and not empty counts. `parse` turns text into
    the value and raises ValueError with the end of a sentence ("is not a port"); `from_file` does so for YAML.
    `repeatable` fields are tuples: the flag may be given several times, and each text is split at `separator` (empty:
    not split); with `several`, more texts may follow the first as arguments of their own. `secret` values never come from the
    command line, where every user of the machine can read them: they get a `…-file` flag and variable in addition to
    the variable itself. `formerly` are names of the version before, flags (`--old-port`), variables (`DYN_OLD_PORT`) and file
    keys (`old.port`), and `replaced` its values with their successors: both work with a warning that names the new one.
    """
    keys = (file_key,) if isinstance(file_key, str) else file_key
    described = Option(
        help=help,
        flags=None if flags is None else tuple(flags),
        hidden_flags=tuple(hidden_flags),
        env=None if env is None else tuple(env),
        file_keys=None if keys is None else tuple(keys),
        choices=None if choices is None else tuple(choices),
        parse=parse,
        from_file=from_file,
        repeatable=repeatable,
        several=several,
        separator=separator,
        minimum=minimum,
        maximum=maximum,
        secret=secret,
        metavar=metavar,
        formerly=tuple(formerly),
        replaced=replaced or {},
    )
    return field(default=default, metadata={_OPTION: described}, repr=not secret)


def group(title: str, *, prefix: str = "", default: Callable[[], object] | None = None) -> Any:
    """A dataclass field holding another dataclass of options; `title` heads it in the help and in the docs.

    `default`, usually that dataclass, makes it when the outer one is built in a program instead of being loaded. A group
    inside another one, with the same title and prefix, continues that one: this is how options contain the settings class of
    the part that they configure, whose fields without `option` keep their defaults.
    """
    metadata = {_GROUP: Group(title, prefix)}
    return field(metadata=metadata) if default is None else field(default_factory=default, metadata=metadata)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `4194304`, `64MiB`, `64M` (binary) or `1GiB`; for `option(parse=…)`."""
    units = {"": 1, "b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30}
    digits = text.strip().rstrip("BbKkMmGgIi ")
    unit = text.strip()[len(digits) :].strip().lower()
    if unit not in units or not digits.isdecimal():
        raise ValueError("is not a size such as 4194304 or 64MiB")
    return int(digits) * units[unit]


def parse_port(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError("is not a port (0 to 65535)")
    return int(text)


@dataclass(frozen=True, slots=True)
class _Setting:
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
            new = next(name for name in (*self.flags, *self.env, *self.file_keys) if _kind_of(name) is _kind_of(old))
            forms = [(old, new)]
            if self.is_bool and old.startswith("--"):
                forms = list(zip(_with_negations([old]), _with_negations([new]), strict=True))
            elif self.option.secret:
                ending = {_Kind.FLAG: "-file", _Kind.VARIABLE: "_FILE", _Kind.KEY: "_file"}[_kind_of(old)]
                forms = [*([] if old.startswith("--") else forms), (f"{old}{ending}", f"{new}{ending}")]
            names.update(forms)
        return names


class _Kind(Enum):
    FLAG, VARIABLE, KEY = range(3)


def _kind_of(name: str) -> _Kind:
    if name.startswith("--"):
        return _Kind.FLAG
    return _Kind.VARIABLE if name.isupper() else _Kind.KEY


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
    settings = list(_settings(cls))
    others: dict[tuple[str, ...], list[_Setting]] = {(name,): list(_settings(other)) for name, other in (passes_on or {}).items()}
    renamed = _former_names(settings)
    argv = _rename_flags(argv, _former_names(chain(settings, *others.values())))
    environ = _rename_variables(environ, renamed)
    flags = _read_flags(settings, others, argv, program, description or cls.__doc__ or "")
    values: dict[tuple[str, ...], object] = {}
    path = flags.config or environ.get("DYN_CONFIG") or None
    if path is not None:
        document = _rename_keys(_read_file(path), renamed, path)
        _check_keys(cls, settings, document, path)
        for setting in settings:
            values.update(_from_file(setting, document, path))
    from_flags: dict[tuple[str, ...], object] = {}
    _check_variables(cls, settings, environ)
    for setting in settings:
        if occurrences := flags.given.get(setting.path):
            from_flags[setting.path] = _from_flags(setting, occurrences)
            if path is not None and values.get(setting.path, from_flags[setting.path]) != from_flags[setting.path]:
                key = next(k for k in (*setting.file_keys, *setting.file_file_keys) if _lookup(document, k)[0])
                raise ConfigError(f"{occurrences[-1][0]} and '{key}' in {path} are both given and differ; keep one of them")
        values.update(_from_environment(setting, environ))
    values.update(from_flags)
    return _build(cls, (), values)


def load_or_exit(
    cls: type[C], *, program: str, description: str | None = None, passes_on: Mapping[str, type[Any]] | None = None
) -> C:
    """`load` from `sys.argv` and the environment; an error is printed and ends the process with status 2."""
    try:
        return load(cls, sys.argv[1:], os.environ, program=program, description=description, passes_on=passes_on)
    except ConfigError as error:
        exit_with(program, error)


def exit_with(program: str, error: Exception) -> NoReturn:
    """Print the error as one sentence and end the process with status 2."""
    print(f"{program}: {error}", file=sys.stderr)
    sys.exit(EXIT_CONFIG)


@cache
def project_version() -> str:
    """Return the installed version, or `0+source` for a source tree that was not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+source"


def variables(cls: type[Any]) -> frozenset[str]:
    """Return the names of all environment variables that `cls` reads."""
    settings = list(_settings(cls))
    former = (name for name in _former_names(settings) if _kind_of(name) is _Kind.VARIABLE)
    return frozenset(name for setting in settings for name in (*setting.env, *setting.file_env)) | {"DYN_CONFIG", *former}


def replacements(cls: type[Any]) -> dict[str, str]:
    """Return what `cls` takes for the last time, with what replaces it: names, and values as `--flag value`."""
    settings = list(_settings(cls))
    values = {f"{s.shown_as} {old}": f"{s.shown_as} {new}" for s in settings for old, new in s.option.replaced.items()}
    return _former_names(settings) | values


def markdown_table(cls: type[Any]) -> str:
    """Return all options of `cls` as Markdown: one heading and one table per group."""
    groups: dict[str, list[_Setting]] = {}
    for setting in _settings(cls):
        groups.setdefault(setting.title, []).append(setting)
    parts = []
    for title, members in groups.items():
        rows = [_markdown_row(setting) for setting in members]
        head = "| flag | variable | file key | default | what it does |\n|---|---|---|---|---|"
        parts.append("\n".join([f"### {title}", "", head, *rows]))
    return "\n\n".join(parts) + "\n"


# --- the class, read -------------------------------------------------------------------------------------------------


def _settings(cls: type[Any], path: tuple[str, ...] = (), within: Group | None = None) -> Iterator[_Setting]:
    """Yield the settings of `cls`: first its own group in the order of its fields, then other groups."""
    within = within or Group(_GENERAL)
    hints = typing.get_type_hints(cls)
    others: list[_Setting] = []
    for item in fields(cls):
        if inner := item.metadata.get(_GROUP):
            for setting in _settings(hints[item.name], (*path, item.name), inner):
                if setting.title == within.title:
                    yield setting
                else:
                    others.append(setting)
        elif described := item.metadata.get(_OPTION):
            yield _resolve((*path, item.name), hints[item.name], described, within, item.default)
    yield from others


def _resolve(path: tuple[str, ...], hint: Any, described: Option, within: Group, default: object) -> _Setting:
    name = f"{within.prefix}_{path[-1]}" if within.prefix else path[-1]
    key = f"{within.prefix}.{path[-1]}" if within.prefix else path[-1]
    flags = described.flags if described.flags is not None else (f"--{name.replace('_', '-')}",)
    env = described.env if described.env is not None else (f"DYN_{name.upper()}",)
    kind = _element(hint, described.repeatable)
    if isinstance(kind, type) and issubclass(kind, StrEnum) and described.choices is None:
        described = replace(described, choices=tuple(member.value for member in kind))
    return _Setting(
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


def _build(cls: type[C], path: tuple[str, ...], values: Mapping[tuple[str, ...], object]) -> C:
    arguments: dict[str, object] = {}
    hints = typing.get_type_hints(cls)
    for item in fields(cls):  # type: ignore[arg-type]
        where = (*path, item.name)
        if _GROUP in item.metadata:
            arguments[item.name] = _build(hints[item.name], where, values)
        elif where in values:
            arguments[item.name] = values[where]
        elif _OPTION in item.metadata and item.default is MISSING:
            setting = next(setting for setting in _settings(cls, path) if setting.path == where)
            names = [*setting.flags[:1], *setting.env[:1]]
            raise ConfigError(f"{setting.shown_as} is required: give {' or set '.join(names)}")
    try:
        return cls(**arguments)
    except ValueError as error:  # a class checks in __post_init__ what concerns several fields
        raise ConfigError(str(error)) from error


# --- names and values of the version before ----------------------------------------------------------------------------


def _former_names(settings: Iterable[_Setting]) -> dict[str, str]:
    return {old: new for setting in settings for old, new in setting.former_names.items()}


def _warn_of(old: str, new: str) -> None:
    log.warning("%s is deprecated: use %s, since the next version refuses it", old, new)


def _rename_flags(argv: Sequence[str], renamed: Mapping[str, str]) -> list[str]:
    words = []
    for word in argv:
        flag, equals, value = word.partition("=")
        if new := renamed.get(flag):
            _warn_of(flag, new)
        words.append(f"{new or flag}{equals}{value}")
    return words


def _rename_variables(environ: Mapping[str, str], renamed: Mapping[str, str]) -> dict[str, str]:
    """A new name that is set takes precedence over the former one."""
    variables = {name: value for name, value in environ.items() if name not in renamed}
    for old, value in environ.items():
        if new := renamed.get(old):
            _warn_of(f"variable {old}", new)
            variables[new] = variables.get(new) or value
    return variables


def _rename_keys(document: dict[str, Any], renamed: Mapping[str, str], path: str) -> dict[str, Any]:
    """Return the document with new keys, as paths, beside the former ones; where both are given the new one counts."""
    given = {old: _lookup(document, old) for old in renamed if _kind_of(old) is _Kind.KEY}
    for old, (is_set, value) in given.items():
        if is_set:
            _warn_of(f"{path}: '{old}'", f"'{renamed[old]}'")
            if not _lookup(document, renamed[old])[0]:
                document = {**document, renamed[old]: value}
    return document


# --- flags -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Flags:
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


def _read_flags(
    settings: Sequence[_Setting],
    others: Mapping[tuple[str, ...], Sequence[_Setting]],
    argv: Sequence[str],
    program: str,
    description: str,
) -> _Flags:
    """`others` are the settings whose flags are passed on, by the path of the field that takes them."""
    given: dict[tuple[str, ...], list[tuple[str, str]]] = {}

    class Record(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            flag = option_string or ""
            if self.nargs == 0:
                texts = [str(not flag.startswith("--no-")).lower()]
            else:
                texts = values if isinstance(values, list) else [values]
            given.setdefault(self.const, []).extend((flag, str(text)) for text in texts)

    parser = _Parser(program, description=description, formatter_class=_Help, allow_abbrev=False, add_help=False)
    general = parser.add_argument_group(_GENERAL)
    general.add_argument("--help", "-h", action="help", help="Show this and exit.")
    general.add_argument(
        "--version", action="version", version=f"{program} {project_version()}, {interpreter()}", help="Show and exit."
    )
    general.add_argument("--config", metavar="FILE", help="YAML file with these options [DYN_CONFIG].")
    groups = {_GENERAL: general}
    for setting in settings:
        if setting.title not in groups:
            groups[setting.title] = parser.add_argument_group(setting.title)
        _add_flags(groups[setting.title], setting, Record)
    _add_passed_on(parser, settings, others, given)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise ConfigError(_unknown_argument(unknown[0], [*settings, *chain(*others.values())]))
    return _Flags(known.config, given)


def _add_flags(target: Any, setting: _Setting, record: type[argparse.Action]) -> None:
    shown, hidden = _forms(setting)
    common: dict[str, Any] = {"action": record, "const": setting.path, "dest": argparse.SUPPRESS, "nargs": _nargs(setting)}
    if not setting.is_bool:
        common["metavar"] = "FILE" if setting.option.secret else _metavar(setting)
    if shown:
        target.add_argument(*shown, help=_help(setting).replace("%", "%%"), **common)
    if hidden:
        target.add_argument(*hidden, help=argparse.SUPPRESS, **common)


def _forms(setting: _Setting) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flags that the help shows, and the hidden ones."""
    if setting.option.secret:
        return setting.file_flags, ()
    if setting.is_bool:
        return _with_negations(setting.flags), _with_negations(setting.option.hidden_flags)
    return setting.flags, setting.option.hidden_flags


def _nargs(setting: _Setting) -> int | str | None:
    return 0 if setting.is_bool else "+" if setting.option.several else None


def _add_passed_on(
    parser: argparse.ArgumentParser,
    settings: Sequence[_Setting],
    others: Mapping[tuple[str, ...], Sequence[_Setting]],
    given: dict[tuple[str, ...], list[tuple[str, str]]],
) -> None:
    """Take the flags of `others` that are not our own. One that several programs have is refused."""
    own = {form for setting in settings for forms in _forms(setting) for form in forms}
    owners: dict[str, dict[tuple[str, ...], _Setting]] = {}
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


def _with_negations(flags: Iterable[str]) -> tuple[str, ...]:
    return tuple(form for flag in flags for form in (flag, f"--no-{flag.removeprefix('--')}"))


def _metavar(setting: _Setting) -> str:
    if setting.option.metavar:
        return setting.option.metavar
    if setting.option.choices:
        return "|".join(setting.option.choices)
    return "PATH" if setting.is_path else setting.path[-1].rsplit("_", 1)[-1].upper()


def _help(setting: _Setting) -> str:
    notes = []
    if (default := _shown_default(setting)) is not None:
        notes.append(f"default {default}")
    if setting.env:
        notes.append(setting.env[0])
    return setting.option.help + (f" [{'; '.join(notes)}]" if notes else "")


def _shown_default(setting: _Setting) -> str | None:
    if setting.default is MISSING or setting.default is None or setting.default in ("", ()):
        return None
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    if isinstance(setting.default, tuple):
        return ",".join(str(item) for item in setting.default)
    return f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)


def _unknown_argument(text: str, settings: Sequence[_Setting]) -> str:
    if not text.startswith("-"):
        return f"unexpected argument {text!r}"
    flag = text.split("=", 1)[0]
    for setting in settings:
        if setting.option.secret and flag in setting.flags:
            return f"{flag} would be readable in the process list; use {setting.file_flags[0]} or {setting.env[0]}"
    known = [flag for setting in settings for flag in (*setting.flags, *setting.file_flags) if flag] + ["--config"]
    return f"unknown flag {flag}{_suggestion(flag, known)}"


def _suggestion(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def _from_flags(setting: _Setting, occurrences: Sequence[tuple[str, str]]) -> object:
    if setting.option.repeatable:
        return tuple(value for flag, text in occurrences for value in _split(setting, text, flag))
    flag, text = occurrences[-1]
    return _read_secret(text, flag) if setting.option.secret else _value(setting, text, flag)


# --- environment -----------------------------------------------------------------------------------------------------


def _from_environment(setting: _Setting, environ: Mapping[str, str]) -> dict[tuple[str, ...], object]:
    for name in setting.env:
        if text := environ.get(name):
            source = f"variable {name}"
            split = setting.option.repeatable
            return {setting.path: tuple(_split(setting, text, source)) if split else _value(setting, text, source)}
    for name in setting.file_env:
        if text := environ.get(name):
            return {setting.path: _read_secret(text, f"variable {name}")}
    return {}


def _check_variables(cls: type[Any], settings: Sequence[_Setting], environ: Mapping[str, str]) -> None:
    known = variables(cls)
    unknown = [name for name in sorted(environ) if name.startswith("DYN_") and name not in known]
    if unknown:
        others = frozenset(name for other in _other_classes() for name in variables(other))
        for name in unknown:
            if name not in others:
                raise ConfigError(f"unknown variable {name}{_suggestion(name, known)}")


def _other_classes() -> list[type[Any]]:
    """Return the configuration classes of the project's other processes: their names are no error here, only without effect."""
    return [entry.load() for entry in entry_points(group=ENTRY_POINTS)]


# --- file ------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Refuses a mapping with a duplicate key, of which YAML would silently keep the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"{key_node.start_mark.name}: '{key}' is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as stream:
            document = yaml.load(stream, _Loader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"the configuration file {path} does not hold a mapping")
    return {str(key): value for key, value in document.items()}


def _lookup(document: Mapping[str, Any], key: str) -> tuple[bool, object]:
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


def _check_keys(cls: type[Any], settings: Sequence[_Setting], document: Mapping[str, Any], path: str) -> None:
    known = _file_keys(settings)
    unknown = list(_unknown_keys(document, "", known))
    if unknown:
        others = frozenset(key for other in _other_classes() for key in _file_keys(list(_settings(other))))
        for key in _unknown_keys(document, "", known | others):
            raise ConfigError(f"{path}: unknown key '{key}'{_suggestion(key, known)}")


def _file_keys(settings: Sequence[_Setting]) -> frozenset[str]:
    former = (name for name in _former_names(settings) if _kind_of(name) is _Kind.KEY)
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


def _from_file(setting: _Setting, document: Mapping[str, Any], path: str) -> dict[tuple[str, ...], object]:
    for key in setting.file_keys:
        is_set, value = _lookup(document, key)
        if is_set and value is not None:
            return {setting.path: _file_value(setting, value, f"{path}: '{key}'")}
    for key in setting.file_file_keys:
        is_set, value = _lookup(document, key)
        if is_set and value is not None:
            return {setting.path: _read_secret(str(value), f"{path}: '{key}'")}
    return {}


def _file_value(setting: _Setting, value: object, source: str) -> object:
    if setting.option.from_file is not None:
        return _guard(setting.option.from_file, value, source)
    if setting.option.repeatable:
        items = value if isinstance(value, list) else [value]
        return tuple(part for item in items for part in _split(setting, _text(item, source), source))
    return _value(setting, _text(value, source), source)


def _text(value: object, source: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{source} must be one plain value, not a {'list' if isinstance(value, list) else 'mapping'}")


# --- values ----------------------------------------------------------------------------------------------------------


def _split(setting: _Setting, text: str, source: str) -> list[object]:
    separator = setting.option.separator
    parts = [part.strip() for part in text.split(separator)] if separator else [text]
    return [_value(setting, part, source) for part in parts if part]


def _value(setting: _Setting, text: str, source: str) -> object:
    described = setting.option
    if new := described.replaced.get(text):
        _warn_of(f"{source} {text}", new)
        text = new
    if described.choices and text not in described.choices:
        raise ConfigError(f"{source}: {text!r} is not one of {', '.join(described.choices)}")
    value = _guard(setting.convert, text, source)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if described.minimum is not None and value < described.minimum:
            raise ConfigError(f"{source}: {text} is below {described.minimum:g}")
        if described.maximum is not None and value > described.maximum:
            raise ConfigError(f"{source}: {text} is above {described.maximum:g}")
    return value


def _guard(convert: Callable[[Any], object], value: object, source: str) -> object:
    try:
        return convert(value)
    except ValueError as error:
        shown = f" {value!r}" if isinstance(value, str) else ""
        raise ConfigError(f"{source}:{shown} {error}") from error


def _read_secret(path: str, source: str) -> FileSecret:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{source}: the file {path} cannot be read: {why}") from error
    if not text:
        raise ConfigError(f"{source}: the file {path} is empty")
    return FileSecret(text, path)


# --- docs ------------------------------------------------------------------------------------------------------------


def _markdown_row(setting: _Setting) -> str:
    shown = setting.file_flags if setting.option.secret else setting.flags
    env = (*setting.env, *setting.file_env)
    if setting.is_bool:
        shown = tuple(f"{flag}, {_with_negations((flag,))[1]}" for flag in shown[:1]) + shown[1:]
    described = setting.option.help
    if setting.option.choices:
        described += f" One of: {', '.join(f'`{choice}`' for choice in setting.option.choices)}."
    default = _shown_default(setting)
    cells = [
        ", ".join(f"`{part}`" for flag in shown for part in flag.split(", ")),
        ", ".join(f"`{name}`" for name in env),
        ", ".join(f"`{key}`" for key in (*setting.file_keys, *setting.file_file_keys)),
        "" if default is None else f"`{default}`",
        described,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
