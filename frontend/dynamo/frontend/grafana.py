"""Dashboards and provisioning files for Grafana, written into a folder when a frontend starts.

    FOLDER/dashboards/*.json                        the dashboards
    FOLDER/provisioning/dashboards/dynamo.yaml      names them to Grafana
    FOLDER/provisioning/datasources/dynamo.yaml     the Prometheus server, if its address is configured

Grafana reads them with `GF_PATHS_PROVISIONING=FOLDER/provisioning`.
"""

from __future__ import annotations

import json
import logging
import os
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dynamo.common.config import ConfigError
from dynamo.frontend.config import GrafanaOptions, PrometheusOptions

_log = logging.getLogger(__name__)


def write_dashboards(folder: Path, grafana: GrafanaOptions, prometheus: PrometheusOptions) -> None:
    """Write all files; those of an earlier start are replaced. Raises ConfigError if the folder cannot be written to."""
    try:
        _write_all(folder.resolve(), grafana, prometheus)
    except OSError as error:
        raise ConfigError(f"--grafana-folder: {folder} cannot be written to: {error.strerror}") from error
    _log.info("dashboards for Grafana are in %s", folder)


def _write_all(folder: Path, grafana: GrafanaOptions, prometheus: PrometheusOptions) -> None:
    dashboards = folder / "dashboards"
    provisioning = folder / "provisioning"
    datasources = grafana.datasources or ("prometheus",)
    for shipped in (resources.files("dynamo.frontend") / "dashboards").iterdir():
        board = json.loads(shipped.read_text(encoding="utf-8"))
        _choose_datasources(board, datasources)
        _write(dashboards / shipped.name, json.dumps(board, indent=2, ensure_ascii=False))
    provider = {
        "name": "dynamo",
        "type": "file",
        "folder": grafana.dashboard_name or "dynamo",
        "options": {"path": str(dashboards)},
    }
    _write(provisioning / "dashboards" / "dynamo.yaml", _to_yaml({"providers": [provider]}))
    if prometheus.endpoint is not None:
        source = {
            "name": datasources[0],
            "uid": datasources[0],
            "type": "prometheus",
            "access": "proxy",
            "url": prometheus.endpoint,
            "jsonData": {"timeInterval": prometheus.scrape_interval},
        }
        _write(provisioning / "datasources" / "dynamo.yaml", _to_yaml({"datasources": [source]}))


def _choose_datasources(board: dict[str, Any], names: tuple[str, ...]) -> None:
    """Let the variable of a dashboard offer these data sources, the first one to begin with."""
    for variable in board["templating"]["list"]:
        if variable["type"] == "datasource":
            variable["regex"] = f"/^({'|'.join(names)})$/"
            variable["current"] = {"text": names[0], "value": names[0]}


def _to_yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump({"apiVersion": 1, **content}, sort_keys=False)


def _write(path: Path, text: str) -> None:
    """Replace a file at once: Grafana may be reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
