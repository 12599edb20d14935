"""What log lines look like."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dynamo.common.logs import LineWriter, request_id, setup_logging, trace_id
from dynamo.common.options import LogFormat, LogOptions, parse_log_levels


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("dynamo.worker").setLevel(logging.NOTSET)


def test_json_lines_carry_the_request_and_what_was_passed_as_extra() -> None:
    stream = io.StringIO()
    setup_logging(LogOptions(format=LogFormat.JSON), stream)
    token, trace = request_id.set("r-1"), trace_id.set("t-1")
    logging.getLogger("dynamo.worker.serve").warning("late by %d ms", 5, extra={"model": "m"})
    request_id.reset(token)
    trace_id.reset(trace)
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "dynamo.worker.serve",
        "message": "late by 5 ms",
        "request_id": "r-1",
        "trace_id": "t-1",
        "model": "m",
    }


def test_an_exception_stays_on_its_json_line() -> None:
    stream = io.StringIO()
    setup_logging(LogOptions(format=LogFormat.JSON), stream)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("dynamo").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: no" in json.loads(line)["exception"]


def test_text_lines_end_with_the_request() -> None:
    stream = io.StringIO()
    setup_logging(LogOptions(), stream)
    token = request_id.set("r-1")
    logging.getLogger("dynamo.worker").info("started")
    request_id.reset(token)
    assert stream.getvalue().endswith(" INFO dynamo.worker: started [r-1]\n")


def test_libraries_are_quiet_and_levels_can_be_set_per_logger() -> None:
    stream = io.StringIO()
    setup_logging(LogOptions(level="warning,dynamo.worker=debug"), stream)
    logging.getLogger("nats").info("chatter")
    logging.getLogger("dynamo.frontend").info("news")
    logging.getLogger("dynamo.worker").debug("detail")
    assert [line.rsplit(": ")[-1] for line in stream.getvalue().splitlines()] == ["detail"]


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud'"):
        parse_log_levels("info,dynamo=loud")


class Reader:
    """Takes lines only once it is `open`."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.open.wait()
        self.lines.append(line)


def test_a_reader_that_stalls_holds_up_no_caller_and_finds_in_place_how_many_lines_are_missing() -> None:
    reader = Reader()
    writer = LineWriter(reader)
    log = logging.Logger("dynamo.busy")
    log.addHandler(writer)
    for number in range(40_000):
        log.info("line %06d %s", number, "x" * 90)
    writer.flush()  # as at the end of the process: it has an end, too
    assert not reader.lines
    reader.open.set()
    writer.flush()
    log.info("line %06d", 40_000)
    writer.flush()
    *written, notice, last = reader.lines
    assert [line[:11] for line in written] == [f"line {number:06d}" for number in range(len(written))]
    missing = re.fullmatch(r"(\d+) lines are missing here: what reads the log was too slow", notice)
    assert missing is not None and len(written) + int(missing[1]) == 40_000
    assert last == "line 040000"


_CHILD = """
import logging, os, sys, threading
from dynamo.common.logs import setup_logging
from dynamo.common.options import LogOptions
setup_logging(LogOptions())
log = logging.getLogger("dynamo.child")
"""


def _stderr_of(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", _CHILD + program], capture_output=True, text=True, timeout=120)
    return [line.partition("dynamo.child: ")[2] for line in done.stderr.splitlines()]


def test_what_was_logged_before_the_end_of_a_process_is_written() -> None:
    assert _stderr_of("for number in range(500): log.info(number)") == [str(number) for number in range(500)]


def test_what_was_logged_before_a_second_signal_ends_a_process_at_once_is_written() -> None:
    program = "from dynamo.common.lifecycle import end_at_once\nfor number in range(500): log.info(number)\nend_at_once(15)"
    assert _stderr_of(program) == [str(number) for number in range(500)]


def test_a_process_that_was_forked_writes_its_lines_too_and_none_of_its_parents() -> None:
    program = """
log.info("parent")
if not os.fork():
    log.info("child")
    logging.shutdown()
    os._exit(0)
os.wait()
log.info("parent again")
"""
    assert _stderr_of(program) == ["parent", "child", "parent again"]


def test_a_process_whose_standard_error_is_a_full_pipe_goes_on_and_ends() -> None:
    program = _CHILD + 'for number in range(50_000): log.info("line %d", number)\nprint("went on", flush=True)'
    reading, writing = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", program], stderr=writing, stdout=subprocess.PIPE, timeout=120)
    finally:
        os.close(reading)
        os.close(writing)
    assert (done.stdout, done.returncode) == (b"went on\n", 0)
