from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.common.config import ConfigError
from dynamo.common.logs import TextFormatter, setup_logging
from dynamo.common.observability.log_settings import LogSettings, apply_log_settings
from dynamo.common.options import LogOptions


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, which is restored afterwards."""
    logger = logging.getLogger()
    level, handlers = logger.level, logger.handlers[:]
    yield logger
    for handler in logger.handlers:
        if handler not in handlers:
            handler.close()
    logger.setLevel(level)
    logger.handlers = handlers


def written(settings: LogSettings) -> list[str]:
    """Return the levels of those of four lines that are written."""
    stream = io.StringIO()
    setup_logging(LogOptions(), stream)
    apply_log_settings(settings)
    log = logging.getLogger("dynamo.x")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        log.log(level, "text")
    return [line.split()[1] for line in stream.getvalue().splitlines()]


def test_levels_are_switched_on_and_off(root: logging.Logger) -> None:
    assert written(LogSettings(info=False, error=False)) == ["WARNING"]
    assert written(LogSettings(warning=False)) == ["INFO", "ERROR"]
    assert written(LogSettings(verbose_level=1)) == ["DEBUG", "INFO", "WARNING", "ERROR"]


def test_audit_records_are_written_whatever_clients_switch_off(root: logging.Logger) -> None:
    stream = io.StringIO()
    setup_logging(LogOptions(), stream)
    apply_log_settings(LogSettings(info=False, warning=False, error=False))
    logging.getLogger("dynamo.x").error("a failure")
    logging.getLogger("dynamo.audit").info("a change")
    assert stream.getvalue().splitlines()[0].endswith("a change")


def test_a_verbose_level_ends_at_the_level_of_the_start_however_often_it_was_set(root: logging.Logger) -> None:
    setup_logging(LogOptions(level="warning"), io.StringIO())
    for settings in (LogSettings(verbose_level=1), LogSettings(verbose_level=2), LogSettings()):
        apply_log_settings(settings)
        apply_log_settings(settings)  # a second worker of the process
    assert root.level == logging.WARNING


def test_the_format_iso8601_gives_lines_a_date(root: logging.Logger) -> None:
    stream = io.StringIO()
    setup_logging(LogOptions(), stream)
    for form in ("ISO8601", "default"):
        apply_log_settings(LogSettings(format=form))
        logging.getLogger("x").warning("text")
    dated, plain = stream.getvalue().splitlines()
    assert (dated[10], dated.split()[0][-1], plain[2]) == ("T", "Z", ":")
    assert isinstance(root.handlers[0].formatter, TextFormatter)


def test_lines_go_to_a_file_that_is_opened_again_when_it_was_moved(root: logging.Logger, tmp_path: Path) -> None:
    file = tmp_path / "log"
    setup_logging(LogOptions(file=file))
    logging.getLogger("x").warning("first")
    root.handlers[0].flush()
    file.rename(tmp_path / "old")
    logging.getLogger("x").warning("second")
    root.handlers[0].flush()
    assert ("first" in (tmp_path / "old").read_text(), "second" in file.read_text()) == (True, True)


def test_a_log_file_that_cannot_be_opened_is_named(root: logging.Logger, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--log-file: .*nowhere"):
        setup_logging(LogOptions(file=tmp_path / "nowhere" / "log"))
