"""Which Python runs this process, and how it was built: two builds of one version differ by 20 to 30% in speed."""

from __future__ import annotations

import platform
import sysconfig

_OPTIMISATIONS = {"PGO": ("--enable-optimizations", "-fprofile-use"), "LTO": ("--with-lto", "-flto")}
"""What each leaves in the options of the build: that of `configure`, and that of the compiler for builds by other means."""


def interpreter() -> str:
    """Return implementation, version and the optimisations of the build, as `CPython 3.11.7 (without PGO and LTO)`."""
    return f"{platform.python_implementation()} {platform.python_version()} ({_optimisations(_build_options())})"


def _build_options() -> str:
    """Return the options of the build; no text where the interpreter does not keep them, as on Windows."""
    values = (sysconfig.get_config_var(name) for name in ("CONFIG_ARGS", "PY_CFLAGS", "PY_CORE_CFLAGS", "PY_LDFLAGS"))
    return " ".join(str(value) for value in values if value)


def _optimisations(options: str) -> str:
    if not options:
        return "unknown build"
    has = [name for name, marks in _OPTIMISATIONS.items() if any(mark in options for mark in marks)]
    lacks = [name for name in _OPTIMISATIONS if name not in has]
    return ", ".join(f"{word} {' and '.join(names)}" for word, names in (("with", has), ("without", lacks)) if names)
