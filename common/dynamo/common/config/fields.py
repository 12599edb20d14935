"""Fields of a configuration class: what an option and a group declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any

OPTION_KEY = "dynamo.option"
GROUP_KEY = "dynamo.group"
GENERAL = "General"
"""Title of the options that are in no group."""


class ConfigError(Exception):
    """The configuration cannot be used. `str(error)` is one sentence naming the flag, variable or file key."""


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
    return field(default=default, metadata={OPTION_KEY: described}, repr=not secret)


def group(title: str, *, prefix: str = "", default: Callable[[], object] | None = None) -> Any:
    """A dataclass field holding another dataclass of options; `title` heads it in the help and in the docs.

    `default`, usually that dataclass, makes it when the outer one is built in a program instead of being loaded. A group
    inside another one, with the same title and prefix, continues that one: this is how options contain the settings class of
    the part that they configure, whose fields without `option` keep their defaults.
    """
    metadata = {GROUP_KEY: Group(title, prefix)}
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
