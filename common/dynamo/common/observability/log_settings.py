"""Log settings that clients change at run time, and how they act on the logging of a process."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from dynamo.common.logs import AUDIT, TextFormatter

ISO8601 = "ISO8601"
FORMATS = ("default", ISO8601)


class LogSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    """Above 0: debugging messages, too."""
    format: str = FORMATS[0]


def apply_log_settings(settings: LogSettings) -> None:
    """Apply settings to the root logger. A level that is switched off is silent on all loggers but that of audit records.

    Otherwise a caller who may change settings could switch the log off and then act unseen.
    """
    root = logging.getLogger()
    former = [own for handler in root.handlers for own in handler.filters if isinstance(own, _Levels)]
    levels = _Levels(settings.info, settings.warning, settings.error, former[0].quiet_level if former else root.level)
    for handler in root.handlers:
        for own in [own for own in handler.filters if isinstance(own, _Levels)]:
            handler.removeFilter(own)
        handler.addFilter(levels)
        if isinstance(handler.formatter, TextFormatter):
            handler.setFormatter(TextFormatter(full_time=settings.format == ISO8601))
    root.setLevel(logging.DEBUG if settings.verbose_level else levels.quiet_level)


@dataclass(frozen=True, slots=True)
class _Levels:
    """A filter of log records by level."""

    info: bool
    warning: bool
    error: bool
    quiet_level: int
    """Level of the root logger without a verbose level. It is here since several workers of a process apply the same settings."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == AUDIT:
            return True
        if record.levelno >= logging.ERROR:
            return self.error
        return self.warning if record.levelno >= logging.WARNING else self.info
