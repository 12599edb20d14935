"""What log lines look like."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from dynamo.common.logs import request_id, setup_logging, trace_id
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
