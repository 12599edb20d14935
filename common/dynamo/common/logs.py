"""Log records as text for people or as one JSON object per line, with the id of the request they belong to."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from logging.handlers import WatchedFileHandler
from queue import SimpleQueue
from typing import TextIO

from dynamo.common.config import ConfigError, exit_with
from dynamo.common.options import LogFormat, LogOptions, parse_log_levels

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the current task works on; set by each protocol edge and by the worker's serving loop."""
trace_id: ContextVar[str] = ContextVar("trace_id", default="")

AUDIT = "dynamo.audit"
"""The logger of what administrators do."""
_QUIET = ("asyncio", "grpc", "httpx", "nats", "huggingface_hub", "filelock")
_MAX_WAITING_BYTES = 1 << 20
"""Length of the lines that wait to be written, from which on further ones are dropped."""
_FLUSH_S = 1.0
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
    if stream is not None:
        return logging.StreamHandler(stream)
    if options.file is None:
        try:
            return LineWriter(partial(_write_line, sys.stderr.fileno()))
        except (AttributeError, OSError, ValueError):  # it is closed, or no file of the system
            return logging.StreamHandler(sys.stderr)
    try:
        file = WatchedFileHandler(options.file, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--log-file: {error}") from error
    return LineWriter(lambda line: file.emit(logging.makeLogRecord({"msg": line})))


class LineWriter(logging.Handler):
    """Has lines written by a thread of its own, so that a program that reads the log and stalls holds up no caller.

    Lines are written in order. Those that come while too many wait are dropped; how many they were is written in their place.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        """`write` writes a line, and may take its time. It raises nothing."""
        super().__init__()
        self._write = write
        self._begin()
        os.register_at_fork(after_in_child=partial(_begin_again, weakref.ref(self)))

    def _begin(self) -> None:
        self._guard = threading.RLock()  # handlers of signals log, too
        self._waiting: SimpleQueue[str | threading.Event | None] = SimpleQueue()
        """Lines; events, which are set when all before them is written; None where lines were dropped."""
        self._waiting_bytes = 0
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        with self._guard:
            if self._thread is None:
                self._start()
            if self._dropped or self._waiting_bytes >= _MAX_WAITING_BYTES:
                if not self._dropped:
                    self._waiting.put(None)
                self._dropped += 1
                return
            self._waiting_bytes += len(line)
            self._waiting.put(line)

    def flush(self) -> None:
        """Wait until all lines are written, for a second at most. `logging` calls this at the end of a process."""
        if self._thread is not None and self._thread.is_alive():
            written = threading.Event()
            self._waiting.put(written)
            written.wait(_FLUSH_S)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._write_all, args=(self._waiting,), name="log", daemon=True)
        self._thread.start()

    def _write_all(self, waiting: SimpleQueue[str | threading.Event | None]) -> None:
        while True:
            line = waiting.get()
            if isinstance(line, threading.Event):
                line.set()
            elif line is None:
                self._write_dropped()
            else:
                self._write(line)
                with self._guard:
                    self._waiting_bytes -= len(line)

    def _write_dropped(self) -> None:
        count = self._dropped
        words = "%d lines are missing here: what reads the log was too slow"
        self._write(self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, words, (count,), None)))
        with self._guard:
            self._dropped -= count
            if self._dropped:
                self._waiting.put(None)


def _begin_again(handler: weakref.ref[LineWriter]) -> None:
    """In a process that was forked: the thread, and the lines that wait for it, are the parent's."""
    if (writer := handler()) is not None:
        writer._begin()


def _write_line(descriptor: int, line: str) -> None:
    """Write a line to a file descriptor. Not by `sys.stderr`: its lock would be held meanwhile, at the end, too."""
    rest = memoryview(f"{line}\n".encode(errors="backslashreplace"))
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another program that has the same pipe has made it so
            select.select([], [descriptor], [])
        except OSError:
            return


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
