"""The files that a frontend writes for Grafana."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dynamo.common.config import ConfigError
from dynamo.frontend.config import GrafanaOptions, PrometheusOptions
from dynamo.frontend.grafana import write_dashboards
from tests.support.promql import DASHBOARDS

NOWHERE = PrometheusOptions()


def test_all_dashboards_are_written_with_what_grafana_needs_to_find_them(tmp_path: Path) -> None:
    grafana = GrafanaOptions(dashboard_name="KServe", datasources=("metrics", "other"))
    write_dashboards(tmp_path, grafana, PrometheusOptions(endpoint="http://prometheus:9090", scrape_interval="5s"))
    [provider] = yaml.safe_load((tmp_path / "provisioning/dashboards/dynamo.yaml").read_text())["providers"]
    boards = {path.name: json.loads(path.read_text()) for path in Path(provider["options"]["path"]).iterdir()}
    assert boards.keys() == {path.name for path in DASHBOARDS}
    assert provider["folder"] == "KServe"
    [source] = yaml.safe_load((tmp_path / "provisioning/datasources/dynamo.yaml").read_text())["datasources"]
    assert (source["name"], source["url"], source["jsonData"]) == ("metrics", "http://prometheus:9090", {"timeInterval": "5s"})
    for board in boards.values():
        [variable] = [variable for variable in board["templating"]["list"] if variable["type"] == "datasource"]
        assert (variable["regex"], variable["current"]["value"]) == ("/^(metrics|other)$/", source["uid"])


def test_files_of_an_earlier_start_are_replaced_and_no_data_source_is_made_up(tmp_path: Path) -> None:
    write_dashboards(tmp_path, GrafanaOptions(dashboard_name="first"), NOWHERE)
    write_dashboards(tmp_path, GrafanaOptions(dashboard_name="second"), NOWHERE)
    assert "folder: second" in (tmp_path / "provisioning/dashboards/dynamo.yaml").read_text()
    assert not (tmp_path / "provisioning/datasources").exists()
    assert not list(tmp_path.rglob(".*")), "nothing temporary is left"


def test_a_folder_that_cannot_be_written_to_stops_the_start_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--grafana-folder: .*/file cannot be written to: Not a directory"):
        write_dashboards(tmp_path / "file", GrafanaOptions(), NOWHERE)
