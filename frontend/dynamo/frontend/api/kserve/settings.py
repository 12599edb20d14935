"""Trace and log settings over the protocol: what clients may change, in which words they are refused, and what they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo.common.errors import InvalidRequest, Overloaded, Unsupported
from dynamo.common.observability.log_settings import FORMATS
from dynamo.common.observability.server_settings import (
    LEVELS,
    SERVER,
    TIMESTAMPS,
    ServerSettings,
    SettingsStore,
    TraceChange,
    why_not_traced,
)
from dynamo.common.options import TraceMode, TraceOptions

OFF = "OFF"
_UINT32 = 2**32
_MAX_MODELS = 1000
"""With trace settings of their own."""
TRACE_NUMBERS = ("trace_rate", "trace_count", "log_frequency")
"""Trace settings with one number each."""
Values = Sequence[str] | None
"""The values of a setting; None resets it."""
LogValue = bool | int | str
LOG_FLAGS = ("log_info", "log_warning", "log_error")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings as clients read and change them."""

    store: SettingsStore
    options: TraceOptions
    log_file: Path | None = None

    def trace(self, model: str) -> dict[str, list[str]]:
        """Return the trace settings of a model, or of the server if it is empty, each as a list of values."""
        settings = self.store.value.trace_of(model)
        shown = {
            "trace_level": list(settings.levels) or [OFF],
            "trace_rate": [str(settings.rate)],
            "trace_count": [str(settings.count)],
            "trace_mode": [self.options.mode.value],
        }
        if self.options.mode is TraceMode.TRITON:
            shown["log_frequency"] = [str(settings.log_frequency)]
            shown["trace_file"] = ["" if self.options.file is None else str(self.options.file)]
        else:
            shown["url"] = [self.options.otlp_endpoint or ""]
        return shown

    def has_times(self, model: str) -> bool:
        """Return whether requests to a model may be traced with times."""
        settings = self.store.value
        return bool(settings.trace) and TIMESTAMPS in settings.trace_of(model).levels

    async def change_trace(self, model: str, values: Mapping[str, Values]) -> None:
        """Change all of `values`, or none, for all processes. Unknown ones are ignored.

        Raises InvalidRequest, Unsupported, and Unavailable without etcd.
        """
        changes = _trace_changes(values)
        if not changes:
            return

        def changed(settings: ServerSettings) -> ServerSettings:
            own = settings.trace.get(model, TraceChange())
            own = msgspec.structs.replace(own, **changes, number=own.number + 1)
            trace = {**settings.trace, model: own}
            if own.is_empty and model != SERVER:
                del trace[model]
            if len(trace) > _MAX_MODELS:
                raise Overloaded(f"{_MAX_MODELS} models have trace settings of their own: clear those of another one first")
            settings = msgspec.structs.replace(settings, trace=trace)
            for name in trace if model == SERVER else (model,):
                effective = settings.trace_of(name)
                if effective.levels and (why := why_not_traced(effective, self.options)):
                    raise InvalidRequest(f"Attempting to set invalid trace setting :{why}")
            return settings

        await self.store.change(changed)

    def log(self) -> dict[str, LogValue]:
        """Return the log settings."""
        settings = self.store.value.log
        return {
            "log_file": "" if self.log_file is None else str(self.log_file),
            "log_info": settings.info,
            "log_warning": settings.warning,
            "log_error": settings.error,
            "log_verbose_level": settings.verbose_level,
            "log_format": settings.format,
        }

    async def change_log(self, values: Mapping[str, LogValue]) -> None:
        """Change all of `values`, or none, for all processes. Unknown ones are ignored.

        Raises InvalidRequest, Unsupported, and Unavailable without etcd.
        """
        if changes := _log_changes(values):
            await self.store.change(
                lambda settings: msgspec.structs.replace(settings, log=msgspec.structs.replace(settings.log, **changes))
            )


def _trace_changes(values: Mapping[str, Values]) -> dict[str, tuple[str, ...] | int | None]:
    """Return the fields of a `TraceChange`."""
    if "trace_file" in values:
        raise Unsupported("trace file location can not be updated through network protocol")
    changes: dict[str, tuple[str, ...] | int | None] = {}
    if "trace_level" in values:
        changes |= _level_changes(values["trace_level"])
    for key in TRACE_NUMBERS:
        if key in values:
            changes[key.removeprefix("trace_")] = _number(key, values[key])
    return changes


def _level_changes(values: Values) -> dict[str, tuple[str, ...] | int | None]:
    """Unknown levels are ignored; if there are only such, nothing changes."""
    if values is None:
        return {"levels": None}
    if OFF in values:
        if len(values) > 1:
            raise InvalidRequest("Expect only one trace level 'OFF' is specified")
        return {"levels": ()}
    levels = tuple(level for level in LEVELS if level in values)
    return {"levels": levels} if levels else {}


def _number(key: str, values: Values) -> int | None:
    """Return a number; None if it is reset."""
    if values is None:
        return None
    if len(values) != 1:
        raise InvalidRequest(f"expect only 1 value for '{key}'")
    text = values[0]
    try:
        number = int(text[:20])
    except ValueError:
        raise InvalidRequest(f"Unable to parse '{key}', got: {text[:40]}") from None
    if key == "trace_count":
        if number < -1:
            raise InvalidRequest(f"Unable to parse 'trace_count'. Expecting value >= -1, got: {text[:40]}")
        return number
    return number % _UINT32


def _log_changes(values: Mapping[str, LogValue]) -> dict[str, LogValue]:
    """Return the fields of `LogSettings`."""
    if "log_file" in values:
        raise Unsupported("log file location can not be updated through network protocol")
    changes: dict[str, LogValue] = {}
    for key in LOG_FLAGS:
        if key in values:
            if not isinstance(values[key], bool):
                raise InvalidRequest(f"expect boolean for '{key}'")
            changes[key.removeprefix("log_")] = values[key]
    if "log_verbose_level" in values:
        level = values["log_verbose_level"]
        if isinstance(level, bool) or not isinstance(level, int):
            raise InvalidRequest("expect int32 for 'log_verbose_level'")
        changes["verbose_level"] = level if level < _UINT32 // 2 else 0
    if "log_format" in values:
        form = values["log_format"]
        if not isinstance(form, str):
            raise InvalidRequest("expect string for 'log_format'")
        if form not in FORMATS:
            raise InvalidRequest(f"invalid argument for log_format, got: {form[:40]}")
        changes["format"] = form
    return changes
