"""What a process says about the Python that runs it."""

from __future__ import annotations

import platform
import sysconfig

import pytest

from dynamo.common.process.interpreter import interpreter


@pytest.mark.parametrize(
    ("configured", "flags", "said"),
    [
        ("'--enable-optimizations' '--with-lto'", "-O3", "with PGO and LTO"),
        ("'--enable-optimizations'", "-O2", "with PGO, without LTO"),
        ("'--enable-shared'", "-O3 -flto=auto -fprofile-use", "with PGO and LTO"),
        ("'--enable-shared'", "-O3", "without PGO and LTO"),
        (None, None, "unknown build"),
    ],
)
def test_the_optimisations_of_the_build_are_said(
    monkeypatch: pytest.MonkeyPatch, configured: str | None, flags: str | None, said: str
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"CONFIG_ARGS": configured, "PY_CFLAGS": flags}.get)
    assert interpreter() == f"CPython {platform.python_version()} ({said})"
