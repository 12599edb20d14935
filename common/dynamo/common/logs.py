"""Log records as text for people or as one JSON object per line, with the id of the request they belong to."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from logging.handlers import WatchedFileHandler
from typing import TextIO

from dynamo.common.config import ConfigError, exit_with
from dynamo.common.options import LogFormat, LogOptions, parse_log_levels

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task works on; set by each protocol edge and by the worker's serving loop."""
trace_id: ContextVar[str] = ContextVar("trace_id", default="")

AUDIT = "dynamo.audit"
"""The logger of what administrators do."""
_QUIET = ("asyncio", "grpc", "httpx", "nats", "huggingface_hub", "filelock")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def setup_logging(options: LogOptions, stream: TextIO | None = None) -> None:
    """Send all records to `stream`, the file of the options, or standard error. To be called once, before anything else.

    Raises ConfigError for a file that cannot be opened.
    """
    handler = _handler(options, stream)
    handler.setFormatter(JsonFormatter() if options.format is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    levels = dict(parse_log_levels(options.level))
    root.setLevel(levels.pop(""))
    for name in _QUIET:  # a library's routine messages do not help operators; its warnings do
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def setup_logging_or_exit(options: LogOptions, program: str) -> None:
    """Do the same; end the program with a sentence if it cannot be done."""
    try:
        setup_logging(options)
    except ConfigError as error:
        exit_with(program, error)


def _handler(options: LogOptions, stream: TextIO | None) -> logging.Handler:
    if stream is not None or options.file is None:
        return logging.StreamHandler(stream or sys.stderr)
    try:
        return WatchedFileHandler(options.file, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--log-file: {error}") from error


class TextFormatter(logging.Formatter):
    """`12:30:45.123 WARNING dynamo.worker.serve: the sentence [request id]`"""

    def __init__(self, *, full_time: bool = False) -> None:
        """`full_time`: `2026-11-22T12:30:45.123Z` instead of the time of day."""
        super().__init__()
        self._full_time = full_time

    def format(self, record: logging.LogRecord) -> str:
        text = f"{self._time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        if request := request_id.get():
            text += f" [{request}]"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text

    def _time(self, record: logging.LogRecord) -> str:
        if self._full_time:
            return _utc(record)
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock}.{int(record.msecs):03d}"


class JsonFormatter(logging.Formatter):
    """One JSON object per record; `extra` becomes fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := request_id.get():
            fields["request_id"] = request
        if trace := trace_id.get():
            fields["trace_id"] = trace
        fields.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


def _utc(record: logging.LogRecord) -> str:
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{clock}.{int(record.msecs):03d}Z"
