from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.common.errors import InvalidRequest, Unsupported
from dynamo.common.observability.server_settings import LocalSettings
from dynamo.common.options import TraceMode, TraceOptions
from dynamo.frontend.api.kserve.settings import LogValue, Settings, Values

FILES = TraceOptions(file=Path("/var/traces/t.json"))


def settings_of(options: TraceOptions = FILES) -> Settings:
    return Settings(LocalSettings(), options)


async def test_trace_settings_are_the_servers_until_a_model_has_its_own() -> None:
    settings = settings_of()
    await settings.change_trace("", {"trace_rate": ["5"], "unknown": ["x"]})
    await settings.change_trace("m", {"log_frequency": ["2"], "trace_count": ["-1"]})
    assert settings.trace("m")["trace_rate"] == ["5"]
    assert (settings.trace("m")["log_frequency"], settings.trace("")["log_frequency"]) == (["2"], ["0"])
    await settings.change_trace("m", {"log_frequency": None, "trace_count": None})
    await settings.change_trace("", {"trace_rate": None})
    assert settings.trace("m") == settings.trace("") == settings_of().trace("")
    assert "m" not in settings.store.value.trace


async def test_levels_are_shown_in_one_order_and_unknown_ones_are_ignored() -> None:
    settings = settings_of()
    await settings.change_trace("", {"trace_level": ["TENSORS", "NONSENSE", "TIMESTAMPS"]})
    assert settings.trace("")["trace_level"] == ["TIMESTAMPS", "TENSORS"]
    await settings.change_trace("m", {"trace_level": ["OFF"]})
    await settings.change_trace("", {"trace_level": ["NONSENSE"]})
    assert (settings.trace("m")["trace_level"], len(settings.trace("")["trace_level"])) == (["OFF"], 2)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"trace_rate": ["x"]}, "Unable to parse 'trace_rate', got: x"),
        ({"trace_count": ["-2"]}, "Unable to parse 'trace_count'. Expecting value >= -1, got: -2"),
        ({"log_frequency": ["1", "2"]}, "expect only 1 value for 'log_frequency'"),
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": ["0"], "trace_level": ["TENSORS"]}, "sample rate must be non-zero"),
    ],
)
async def test_a_wrong_trace_setting_changes_nothing(values: dict[str, Values], sentence: str) -> None:
    settings = settings_of()
    with pytest.raises(InvalidRequest, match=sentence):
        await settings.change_trace("", values)
    assert settings.trace("") == settings_of().trace("")


async def test_a_server_setting_that_makes_a_models_own_impossible_is_refused() -> None:
    settings = settings_of()
    await settings.change_trace("m", {"trace_level": ["TENSORS"]})
    with pytest.raises(InvalidRequest, match="sample rate must be non-zero"):
        await settings.change_trace("", {"trace_rate": ["0"]})
    assert settings.trace("m")["trace_rate"] == ["1000"]


async def test_traces_need_a_file_unless_they_go_to_a_collector() -> None:
    with pytest.raises(InvalidRequest, match="trace file name is not given"):
        await settings_of(TraceOptions()).change_trace("", {"trace_level": ["TENSORS"]})
    collected = settings_of(TraceOptions(mode=TraceMode.OPENTELEMETRY, otlp_endpoint="http://collector:4317"))
    await collected.change_trace("", {"trace_level": ["TIMESTAMPS"]})
    assert collected.trace("")["url"] == ["http://collector:4317"]
    assert "trace_file" not in collected.trace("")


async def test_files_are_not_chosen_by_clients() -> None:
    settings = settings_of()
    with pytest.raises(Unsupported, match="trace file location can not be updated through network protocol"):
        await settings.change_trace("", {"trace_file": ["/etc/passwd"]})
    with pytest.raises(Unsupported, match="log file location can not be updated through network protocol"):
        await settings.change_log({"log_file": "/etc/passwd"})
    assert settings.trace("")["trace_file"] == ["/var/traces/t.json"]


async def test_a_log_setting_is_kept_for_all_processes() -> None:
    settings = settings_of()
    await settings.change_log({"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601", "unknown": 1})
    assert settings.log() == {
        "log_file": "",
        "log_info": False,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 2,
        "log_format": "ISO8601",
    }


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"log_info": 1}, "expect boolean for 'log_info'"),
        ({"log_verbose_level": True}, "expect int32 for 'log_verbose_level'"),
        ({"log_format": 1}, "expect string for 'log_format'"),
        ({"log_info": False, "log_format": "odd"}, "invalid argument for log_format, got: odd"),
    ],
)
async def test_a_wrong_log_setting_changes_nothing(values: dict[str, LogValue], sentence: str) -> None:
    settings = settings_of()
    with pytest.raises(InvalidRequest, match=sentence):
        await settings.change_log(values)
    assert settings.log() == settings_of().log()
