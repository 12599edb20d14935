"""Trace and log settings over the protocol."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynamo.common.errors import InvalidRequest, Unsupported

_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_UINT32 = 2**32
TRACE_NUMBERS = ("trace_rate", "trace_count", "log_frequency")
"""Trace settings with one number each."""
Values = Sequence[str] | None
"""The values of a setting; None resets it."""


@dataclass(frozen=True, slots=True)
class TraceValues:
    """Settings as they are shown. There is no trace file here, so the level is always OFF."""

    trace_rate: str = "1000"
    trace_count: str = "-1"
    log_frequency: str = "0"

    def shown(self) -> dict[str, list[str]]:
        return {
            "trace_level": ["OFF"],
            "trace_rate": [self.trace_rate],
            "trace_count": [self.trace_count],
            "log_frequency": [self.log_frequency],
            "trace_file": [""],
            "trace_mode": ["triton"],
        }


@dataclass(slots=True)
class TraceSettings:
    """The trace settings of the server, and of models with some of their own."""

    _server: TraceValues = field(default_factory=TraceValues)
    _models: dict[str, dict[str, str]] = field(default_factory=dict)
    """By model, the settings that differ from the server's."""

    def read(self, model: str) -> dict[str, list[str]]:
        """Return the settings of a model, or of the server if it is empty, each as a list of values."""
        return replace(self._server, **self._models.get(model, {})).shown()

    def change(self, model: str, settings: Mapping[str, Values]) -> None:
        """Change all of `settings`, or none. Unknown ones are ignored. Raises InvalidRequest, Unsupported."""
        if "trace_file" in settings:
            raise Unsupported("trace file location can not be updated through network protocol")
        changes: dict[str, str | None] = {}
        for key in TRACE_NUMBERS:
            if key in settings:
                changes[key] = _number(key, settings[key])
        levels = settings.get("trace_level") or ()
        if any(level in _LEVELS[1:] for level in levels):
            raise InvalidRequest("Attempting to set invalid trace setting :trace file name is not given")
        if not changes:
            return
        if model:
            own = {**self._models.get(model, {}), **{key: value for key, value in changes.items() if value is not None}}
            self._models[model] = {key: value for key, value in own.items() if changes.get(key, value) is not None}
        else:
            defaults = TraceValues()
            self._server = replace(
                self._server, **{key: getattr(defaults, key) if value is None else value for key, value in changes.items()}
            )


def _number(key: str, values: Values) -> str | None:
    """Return a number as it is shown; None if it is reset."""
    if not values:
        return None
    if len(values) > 1:
        raise InvalidRequest(f"expect only 1 value for '{key}'")
    text = values[0]
    try:
        number = int(text[:20])
    except ValueError:
        raise InvalidRequest(f"Unable to parse '{key}', got: {text[:40]}") from None
    if key == "trace_count":
        if number < -1:
            raise InvalidRequest(f"Unable to parse 'trace_count'. Expecting value >= -1, got: {text[:40]}")
        return str(number)
    return str(number % _UINT32)


LogValue = bool | int | str
LOG_FLAGS = ("log_info", "log_warning", "log_error")
_FORMATS = ("default", "ISO8601")


@dataclass(slots=True)
class LogSettings:
    """The log settings of this process. A level that is switched off silences the lines of this level, on all loggers."""

    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"
    """Shown as it was set; lines have the format of `--log-format`."""
    _quiet_level: int | None = field(default=None, compare=False)
    """The level of the root logger before a verbose level was set."""

    def read(self) -> dict[str, LogValue]:
        return {
            "log_file": "",
            "log_info": self.log_info,
            "log_warning": self.log_warning,
            "log_error": self.log_error,
            "log_verbose_level": self.log_verbose_level,
            "log_format": self.log_format,
        }

    def change(self, settings: Mapping[str, LogValue]) -> None:
        """Change all of `settings`, or none. Unknown ones are ignored. Raises InvalidRequest, Unsupported."""
        if "log_file" in settings:
            raise Unsupported("log file location can not be updated through network protocol")
        for key in LOG_FLAGS:
            if not isinstance(settings.get(key, True), bool):
                raise InvalidRequest(f"expect boolean for '{key}'")
        level = settings.get("log_verbose_level", self.log_verbose_level)
        if isinstance(level, bool) or not isinstance(level, int):
            raise InvalidRequest("expect int32 for 'log_verbose_level'")
        form = settings.get("log_format", self.log_format)
        if not isinstance(form, str):
            raise InvalidRequest("expect string for 'log_format'")
        if form not in _FORMATS:
            raise InvalidRequest(f"invalid argument for log_format, got: {form[:40]}")
        for key in LOG_FLAGS:
            setattr(self, key, settings.get(key, getattr(self, key)))
        self.log_verbose_level = level if level < _UINT32 // 2 else 0
        self.log_format = form
        self._apply()

    def _apply(self) -> None:
        """Silence the levels that are off; a verbose level above 0 shows debugging messages."""
        root = logging.getLogger()
        for handler in root.handlers:
            for own in [own for own in handler.filters if isinstance(own, _Levels)]:
                handler.removeFilter(own)
            handler.addFilter(_Levels(self.log_info, self.log_warning, self.log_error))
        if self.log_verbose_level and self._quiet_level is None:
            self._quiet_level = root.level
            root.setLevel(logging.DEBUG)
        elif not self.log_verbose_level and self._quiet_level is not None:
            root.setLevel(self._quiet_level)
            self._quiet_level = None


@dataclass(frozen=True, slots=True)
class _Levels:
    """A filter of log records by level."""

    info: bool
    warning: bool
    error: bool

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return self.error
        return self.warning if record.levelno >= logging.WARNING else self.info
