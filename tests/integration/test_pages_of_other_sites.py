"""What a page of another site can do with a frontend that has no keys, in a real browser."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from dynamo.common.process.ports import free_ports
from tests.support.browser import browser, needs_browser
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.repositories import python_model
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

FOREIGN = "evil.example"
RESOLVES = f"host-resolver-rules=MAP {FOREIGN} 127.0.0.1"
"""The browser takes the attacker's name for an address of this machine, without any name server."""
TENSORS = '[{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}]'
CODE = """
import pathlib
import triton_python_backend_utils as pb_utils

pathlib.Path({marker!r}).touch()

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
FETCH = """
    const done = arguments[arguments.length - 1];
    const [url, body, mode] = arguments;
    const options = body === null ? {mode} : {method: "POST", body, mode, headers: {"content-type": "text/plain"}};
    fetch(url, options).then(async response => done([response.status, await response.text()]), error => done(String(error)));
"""
SUBMIT = """
    const form = document.createElement("form");
    Object.assign(form, {method: "post", enctype: "text/plain", action: arguments[0]});
    const field = document.createElement("input");
    const [name, ...value] = arguments[1].split("=");  // a form sends name=value
    Object.assign(field, {name, value: value.join("=")});
    form.append(field);
    document.body.append(form);
    form.submit();
"""


def load_of(marker: Path) -> str:
    """The body of a request to load a Python model whose code creates `marker`."""
    config = json.dumps({"backend": "python", "input": json.loads(TENSORS), "output": json.loads(TENSORS.replace("x", "y"))})
    code = CODE.format(marker=str(marker))
    code += "\n" * (len(code) % 3 == 0)  # base64 then ends with `=`, which a form has to have somewhere
    return json.dumps({"parameters": {"config": config, "file:1/model.py": base64.b64encode(code.encode()).decode()}})


LOAD = "/v2/repository/models/brought/load"
ACTIONS = {
    "/v2/repository/models/double/unload": "{}",
    "/v2/logging": '{"log_verbose_level": 7}',
    "/v2/trace/setting": '{"trace_rate": "7"}',
}
REGISTER = "/v2/systemsharedmemory/region/r/register"
INFER = "/v2/models/double/infer"
TENSOR = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [2]}]}'


@asynccontextmanager
async def site() -> AsyncIterator[int]:
    """The port of a site whose only page is empty."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            page = b"<!doctype html><title>a page</title><body></body>"
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            writer.write(head % len(page) + page)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def fleet(etcd: EtcdServer, nats: NatsServer, namespace: str, folder: Path, *flags: str) -> AsyncIterator[FrontendProcess]:
    """A worker that takes orders to load models, and a frontend without keys."""
    python_model(folder, "double")
    orders = ("--model-repository", str(folder), "--model-control-mode", "explicit", "--load-model", "double")
    async with (
        worker(etcd, nats, namespace, *orders),
        frontend(etcd.endpoint, nats.url, namespace, *flags) as front,
    ):
        await front.serves("double")
        yield front


@asynccontextmanager
async def shared_memory() -> AsyncIterator[SharedMemory]:
    """What a page would have to know the name of."""
    memory = SharedMemory(create=True, size=8)
    try:
        yield memory
    finally:
        memory.close()
        memory.unlink()


async def fetch(driver: Chrome, url: str, body: str | None = None, mode: str = "no-cors") -> Any:
    return await asyncio.to_thread(driver.execute_async_script, FETCH, url, body, mode)


@asynccontextmanager
async def opened() -> AsyncIterator[Chrome]:
    with contextlib.ExitStack() as stack:
        yield await asyncio.to_thread(lambda: stack.enter_context(browser(RESOLVES)))


@needs_browser
async def test_a_page_of_another_site_runs_no_code_and_changes_nothing(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    marker = tmp_path / "code ran"
    async with (
        fleet(etcd_server, nats_server, namespace, tmp_path / "models") as front,
        site() as port,
        opened() as driver,
        shared_memory() as memory,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as own,
    ):
        before = [(await own.get(path)).json() for path in ("/v2/logging", "/v2/trace/setting")]
        target = f"http://127.0.0.1:{front.http_port}"
        actions = {**ACTIONS, REGISTER: json.dumps({"key": f"/{memory.name}", "offset": 0, "byte_size": 8})}
        # another site, and another port of this machine, which for the browser is the same site
        for pages, host in enumerate((FOREIGN, "127.0.0.1"), 1):
            page = f"http://{host}:{port}/"
            await asyncio.to_thread(driver.get, page)
            for path, body in {LOAD: load_of(marker), **actions, INFER: TENSOR}.items():
                assert await fetch(driver, target + path, body) == [0, ""], "a response that the page cannot see"
            assert "Failed to fetch" in await fetch(driver, f"{target}/v1/models", mode="cors")
            await asyncio.to_thread(driver.execute_script, SUBMIT, target + LOAD, load_of(marker))
            await front.logged(f"POST {LOAD} from 127.0.0.1", times=2 * pages)
        refused = [line for line in front.lines if "refused: pages of 'http://" in line]
        assert len(refused) == 2 * (2 + len(actions))
        assert not marker.exists()
        assert [(await own.get(path)).json() for path in ("/v2/logging", "/v2/trace/setting")] == before
        assert (await own.get("/v2/systemsharedmemory/status")).json() == []
        assert "brought" not in (await own.post("/v2/repository/index", json={})).text
        [model] = (await own.get("/v2/models/double/stats")).json()["model_stats"]
        assert model["inference_stats"]["success"]["count"] == 0
        assert (await own.post(INFER, content=TENSOR)).json()["outputs"][0]["data"] == [4.0]


@needs_browser
async def test_a_page_whose_name_is_rebound_to_this_machine_is_refused(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    marker = tmp_path / "code ran"
    async with fleet(etcd_server, nats_server, namespace, tmp_path / "models") as front, opened() as driver:
        rebound = f"http://{FOREIGN}:{front.http_port}"
        await asyncio.to_thread(driver.get, f"{rebound}/live")
        assert "live" in driver.page_source, "health is for all callers, and here a page of the attacker's origin"
        for path, body in {LOAD: load_of(marker), INFER: TENSOR, "/v1/models": None}.items():
            status, text = await fetch(driver, rebound + path, body, "cors")
            assert status == 403 and "--allowed-host" in text, (path, text)
        assert not marker.exists()


@needs_browser
async def test_allowed_origins_and_hosts_and_the_console_work(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    marker = tmp_path / "code ran"
    async with site() as port:
        flags = ("--allowed-origins", f"http://{FOREIGN}:{port}", "--allowed-host", FOREIGN)
        async with fleet(etcd_server, nats_server, namespace, tmp_path / "models", *flags) as front, opened() as driver:
            target = f"http://127.0.0.1:{front.http_port}"
            await asyncio.to_thread(driver.get, f"http://{FOREIGN}:{port}/")
            status, text = await fetch(driver, target + INFER, TENSOR, "cors")
            assert (status, json.loads(text)["outputs"][0]["data"]) == (200, [4.0])
            assert not marker.exists()
            assert (await fetch(driver, target + LOAD, load_of(marker), "cors"))[0] == 200
            assert marker.exists()
            console = f"http://{FOREIGN}:{front.http_port}/console"
            await asyncio.to_thread(driver.execute_script, "location = arguments[0]", console)  # a link of another site
            await until(lambda: driver.title == "dynamo console")
            for page in (f"http://{FOREIGN}:{front.http_port}", target):
                await asyncio.to_thread(driver.get, f"{page}/console")
                assert "double" in (await fetch(driver, f"{page}/console/fleet", None, "cors"))[1]
                assert (await fetch(driver, page + INFER, TENSOR, "cors"))[0] == 200


async def test_other_ports_with_metrics_are_guarded_alike(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    status, metrics = free_ports(2)
    flags = ("--model", "echo", "--status-port", str(status), "--allowed-host", "worker.example")
    async with (
        worker(etcd_server, nats_server, namespace, *flags),
        frontend(
            etcd_server.endpoint, nats_server.url, namespace, "--prometheus-port", str(metrics), "--allowed-host", "front.example"
        ) as front,
        httpx2.AsyncClient() as http,
    ):
        await front.serves("echo")
        for port, name in ((status, "worker.example"), (metrics, "front.example")):

            async def get(path: str, **headers: str) -> int:
                named = {header.replace("_", "-"): value for header, value in headers.items()}
                return (await http.get(f"http://127.0.0.1:{port}{path}", headers=named)).status_code  # noqa: B023

            assert await get("/metrics") == await get("/metrics", host=f"{name}:{port}") == 200
            assert await get("/metrics", host=f"{FOREIGN}:{port}") == 403
            assert await get("/metrics", origin=f"http://{FOREIGN}") == await get("/metrics", sec_fetch_site="cross-site") == 403
            assert await get("/live", host=f"{FOREIGN}:{port}", origin=f"http://{FOREIGN}") == 200
