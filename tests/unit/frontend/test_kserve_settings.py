from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from dynamo.common.errors import InvalidRequest, Unsupported
from dynamo.frontend.api.kserve.settings import LogSettings, LogValue, TraceSettings, Values


def test_trace_settings_are_the_servers_until_a_model_has_its_own() -> None:
    settings = TraceSettings()
    settings.change("", {"trace_rate": ["5"], "unknown": ["x"]})
    settings.change("m", {"log_frequency": ["2"], "trace_count": ["-1"]})
    assert settings.read("m")["trace_rate"] == ["5"]
    assert (settings.read("m")["log_frequency"], settings.read("")["log_frequency"]) == (["2"], ["0"])
    settings.change("m", {"log_frequency": None})
    settings.change("", {"trace_rate": None})
    assert settings.read("m") == settings.read("") == TraceSettings().read("")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"trace_rate": ["x"]}, "Unable to parse 'trace_rate', got: x"),
        ({"trace_count": ["-2"]}, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        ({"log_frequency": ["1", "2"]}, "expect only 1 value for 'log_frequency'"),
        ({"trace_rate": ["5"], "trace_level": ["TENSORS"]}, "trace file name is not given"),
    ],
)
def test_a_wrong_trace_setting_changes_nothing(settings: dict[str, Values], sentence: str) -> None:
    own = TraceSettings()
    with pytest.raises(InvalidRequest, match=sentence):
        own.change("", settings)
    assert own.read("") == TraceSettings().read("")


def test_files_are_not_chosen_by_clients() -> None:
    with pytest.raises(Unsupported, match="trace file location can not be updated through network protocol"):
        TraceSettings().change("", {"trace_file": ["/etc/passwd"]})
    with pytest.raises(Unsupported, match="log file location can not be updated through network protocol"):
        LogSettings().change({"log_file": "/etc/passwd"})


@pytest.fixture
def root() -> Iterator[logging.Handler]:
    """A handler of the root logger, which is restored afterwards."""
    logger, handler = logging.getLogger(), logging.NullHandler()
    level, filters = logger.level, {own: list(own.filters) for own in logger.handlers}
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
    for own, kept in filters.items():
        own.filters = kept


def shows(handler: logging.Handler, level: int) -> bool:
    return bool(handler.filter(logging.LogRecord("x", level, "", 0, "text", None, None)))


def test_levels_are_switched_on_and_off(root: logging.Handler) -> None:
    settings, before = LogSettings(), logging.getLogger().level
    settings.change({"log_info": False, "log_error": False})
    assert [shows(root, level) for level in (logging.INFO, logging.WARNING, logging.ERROR)] == [False, True, False]
    settings.change({"log_info": True, "log_error": True, "unknown": 1})
    assert [shows(root, level) for level in (logging.INFO, logging.WARNING, logging.ERROR)] == [True, True, True]
    settings.change({"log_verbose_level": 1, "log_format": "ISO8601"})
    assert logging.getLogger().level == logging.DEBUG
    settings.change({"log_verbose_level": 0})
    assert logging.getLogger().level == before
    assert settings.read()["log_format"] == "ISO8601"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"log_info": 1}, "expect boolean for 'log_info'"),
        ({"log_verbose_level": True}, "expect int32 for 'log_verbose_level'"),
        ({"log_format": 1}, "expect string for 'log_format'"),
        ({"log_info": False, "log_format": "odd"}, "invalid argument for log_format, got: odd"),
    ],
)
def test_a_wrong_log_setting_changes_nothing(settings: dict[str, LogValue], sentence: str) -> None:
    own = LogSettings()
    with pytest.raises(InvalidRequest, match=sentence):
        own.change(settings)
    assert own == LogSettings()
