"""The console and `dynamo-local top`, before a real fleet; the page in a real browser where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from anyio.from_thread import start_blocking_portal

from dynamo.common.etcd import connect_etcd
from dynamo.common.model_card import Role
from dynamo.common.options import EtcdOptions
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import PoolTarget, Targets, encode_targets, targets_key
from dynamo.frontend.security.surfaces import Scope
from tests.support.browser import browser, needs_browser
from tests.support.deployment import KeyFile
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

EXAMPLES = Path(__file__).parents[2] / "examples"
LOOK_S = 120
NAMESPACE = "console"
"""The namespace of the fleet that tests share."""


@asynccontextmanager
async def fleet(etcd: EtcdServer, nats: NatsServer, namespace: str, *flags: str) -> AsyncIterator[FrontendProcess]:
    """Two workers with a simulated language model, one of them with a classifier too, and a frontend that routes by KV caches."""
    sim = ("--model", "sim:blocks=256,speedup=10")
    async with (
        worker(etcd, nats, namespace, *sim, "--model", f"{EXAMPLES}/classifier.py:Classifier"),
        worker(etcd, nats, namespace, *sim),
        frontend(etcd.endpoint, nats.url, namespace, "--router-mode", "kv", *flags) as front,
    ):
        await front.serves("sim", "classifier")
        yield front


@pytest.fixture(scope="module")
def shared(etcd_server: EtcdServer, nats_server: NatsServer) -> Iterator[FrontendProcess]:
    """A fleet for all tests that leave it as it is, but for names of operators."""
    with (
        start_blocking_portal() as portal,  # its event loop reads what the processes log, while those of tests come and go
        portal.wrap_async_context_manager(fleet(etcd_server, nats_server, NAMESPACE)) as front,
    ):
        yield front


async def _requests(front: FrontendProcess, stop: asyncio.Event) -> None:
    """Keeps the fleet busy with prompts that share a beginning."""
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as client:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = "the same beginning, over and over, " * 4 + str(number)
            response = await client.post("/v1/completions", json={"model": "sim", "prompt": prompt, "max_tokens": 40})
            assert response.status_code == 200, response.text


@asynccontextmanager
async def load(front: FrontendProcess) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(_requests(front, stop))
        try:
            yield
        finally:
            stop.set()


async def until(seen: Callable[[], Any]) -> Any:
    """What `seen` returns once that is true."""
    async with asyncio.timeout(LOOK_S):
        while not (result := await asyncio.to_thread(seen)):
            await asyncio.sleep(0.1)
        return result


async def test_the_fleet_is_described_with_live_loads_and_hit_rates(shared: FrontendProcess) -> None:
    async with load(shared):
        async with (
            asyncio.timeout(LOOK_S),
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{shared.http_port}") as client,
        ):
            while True:
                state = (await client.get("/console/fleet")).json()
                classifier, sim = state["models"]
                busy, used = ([instance.get(what) for instance in sim["instances"]] for what in ("running", "hit_rate"))
                if len(busy) == 2 and any(busy) and any(used):
                    break
                await asyncio.sleep(0.1)
        assert (state["state"], state["router_mode"], state["namespace"]) == ("healthy", "kv", NAMESPACE)
        assert (state["processes"], state["asks_keys"]) == (1, False)
        assert (classifier["name"], classifier["kind"], len(classifier["instances"])) == ("classifier", "tensor", 1)
        assert classifier["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 8, 8]}]
        assert {"running", "kv_usage", "hit_rate"}.isdisjoint(classifier["instances"][0])  # it has none
        assert all(0 <= instance["kv_usage"] <= 1 for instance in sim["instances"] if "kv_usage" in instance)


async def test_the_console_shows_how_many_instances_a_planner_wants(shared: FrontendProcess, etcd_server: EtcdServer) -> None:
    pools = (Pool("sim"), Pool("sim", Role.PREFILL))
    targets = tuple(PoolTarget(pool=pool, instances=3, reason="formula: more came", decided_at=1.0) for pool in pools)
    async with (
        connect_etcd(EtcdOptions(endpoints=(etcd_server.endpoint,))) as etcd,
        asyncio.timeout(LOOK_S),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{shared.http_port}") as client,
    ):
        await etcd.put(targets_key(NAMESPACE), encode_targets(Targets(planner="one", targets=targets)))
        while len(shown := (await client.get("/console/fleet")).json()["targets"]) < 2:
            await asyncio.sleep(0.1)
        await etcd.delete(targets_key(NAMESPACE))
        assert [(each["model"], each["role"], each["instances"], each["reason"]) for each in shown] == [
            ("sim", "aggregated", 3, "formula: more came"),
            ("sim", "prefill", 3, "formula: more came"),
        ]
        while (await client.get("/console/fleet")).json()["targets"]:
            await asyncio.sleep(0.1)


async def test_the_console_can_be_left_out(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "echo"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--no-http-console") as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}") as client,
    ):
        await front.serves("echo")
        assert [(await client.get(path)).status_code for path in ("/console", "/console/fleet")] == [404, 404]


async def test_top_prints_the_same_in_a_terminal(shared: FrontendProcess) -> None:
    async with load(shared):
        url = f"http://127.0.0.1:{shared.http_port}"

        async def top(*flags: str) -> tuple[int | None, str, str]:
            command = (sys.executable, "-m", "dynamo.local", "top", *flags)
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env={"COLUMNS": "140"})
            output, errors = await process.communicate()
            return process.returncode, output.decode(), errors.decode()

        async with asyncio.timeout(LOOK_S):
            while True:  # the first look only makes the frontend follow loads
                status, screen, errors = await top(url, "--once")
                assert status == 0, errors
                if "%" in screen.partition("KV usage")[2]:
                    break
        assert f"dynamo {NAMESPACE}" in screen
        assert "healthy, kv routing" in screen
        assert "classifier" in screen
        assert "tokens/s 0 " not in screen
        status, screen, errors = await top("http://127.0.0.1:1", "--once")
        assert (status, screen) == (1, "")
        assert errors.startswith("dynamo-local top: http://127.0.0.1:1/metrics cannot be read")


def _text(driver: Chrome, selector: str) -> str:
    text: str = driver.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
    return text


def _send(driver: Chrome, model: str) -> None:
    script = """
        const select = document.getElementById("try-model");
        select.value = arguments[0];
        select.dispatchEvent(new Event("change"));
        document.getElementById("try-send").click();
    """
    driver.execute_script(script, model)


@needs_browser
@pytest.mark.parametrize(
    ("width", "dark"),
    [pytest.param(1200, False, id="desktop"), pytest.param(380, True, id="phone-dark", marks=pytest.mark.slow)],
)
async def test_the_page_shows_the_fleet_and_tries_models(shared: FrontendProcess, tmp_path: Path, width: int, dark: bool) -> None:
    async with load(shared):
        rule = {
            "targets": [{"model": "sim", "weight": 3}, {"model": "classifier"}],
            "fallbacks": [{"model": "small", "on": ["prompt_too_long"]}],
            "shadows": [{"model": "next", "share": 0.1}],
            "sticky": "user",
        }
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{shared.http_port}") as client:
            assert (await client.put("/v1/names/chat", json=rule)).status_code == 200

        async def look(driver: Chrome) -> None:
            await asyncio.to_thread(driver.get, f"http://127.0.0.1:{shared.http_port}/console")
            await until(lambda: "healthy" in _text(driver, "#state") and "%" in _text(driver, "#models"))
            await until(lambda: "TOKENS" in _text(driver, "#tiles").upper() and "TTFT" in _text(driver, "#tiles"))
            await until(lambda: "blocks cached" in _text(driver, "#decisions"))
            named = ("chat", "sim 75 %, classifier 25 %", "small (prompt too long)", "next 10 %", "user")
            assert all(part in _text(driver, "#names") for part in named)
            await asyncio.to_thread(_send, driver, "sim")
            assert "tokens, the first after" in await until(lambda: _figures(driver))
            await asyncio.to_thread(_send, driver, "classifier")
            await until(lambda: "answered after" in _text(driver, "#try-figures"))
            assert '"probability"' in _text(driver, "#try-answer")
            assert _text(driver, "#problem") == ""
            shape = driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
            assert shape[0] <= shape[1], "the page scrolls sideways"
            ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 3 * 128) == dark
            assert [entry["message"] for entry in driver.get_log("browser") if entry["level"] != "DEBUG"] == []
            assert await asyncio.to_thread(driver.save_screenshot, str(tmp_path / "console.png"))  # for people to look at

        def opened() -> Any:
            return stack.enter_context(browser(width=width, dark=dark))

        with contextlib.ExitStack() as stack:
            await look(await asyncio.to_thread(opened))


@needs_browser
async def test_with_keys_the_page_says_what_is_missing_and_asks_models_with_a_key_of_its_own(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys.yaml", {})
    looks = keys.add("looks", Scope.CONSOLE)
    infers = keys.add("asks", Scope.INFER, Scope.METRICS)
    flags = ("--api-keys-file", str(keys.path), "--api-open", "metadata")
    async with fleet(etcd_server, nats_server, namespace, *flags) as front:

        async def look(driver: Chrome) -> None:
            page = f"127.0.0.1:{front.http_port}/console"
            await asyncio.to_thread(driver.get, f"http://looks:{looks}@{page}")
            await until(lambda: "classifier" in _text(driver, "#models"))
            problem = await until(lambda: _text(driver, "#problem"))
            assert problem.startswith("Traffic figures need a key with the scope “metrics” (403: "), problem
            await asyncio.to_thread(_send, driver, "classifier")
            assert (await until(lambda: _figures(driver))).startswith("401: an API key is required")

            field = driver.find_element("id", "key")
            await asyncio.to_thread(field.send_keys, f"{infers}x\n")  # a wrong one opens no window of the browser's own
            await asyncio.to_thread(_send, driver, "classifier")
            assert await until(lambda: _figures(driver)) == "401: the API key is not valid"
            await asyncio.to_thread(field.send_keys, "\ue003\n")  # backspace
            await until(lambda: "TTFT" in _text(driver, "#tiles") and not _text(driver, "#problem"))
            assert "classifier" in _text(driver, "#models"), "what the login may read is no longer read"
            for model, words in (("classifier", "answered after"), ("sim", "tokens, the first after")):
                await asyncio.to_thread(_send, driver, model)
                assert words in await until(lambda: _figures(driver))

            await asyncio.to_thread(driver.save_screenshot, str(tmp_path / "console-with-keys.png"))
            kept = "return JSON.stringify([location.href, document.cookie, {...sessionStorage}, {...localStorage}])"
            assert infers not in driver.execute_script(kept)

        def opened() -> Any:
            return stack.enter_context(browser())

        with contextlib.ExitStack() as stack:
            await look(await asyncio.to_thread(opened))


def _figures(driver: Chrome) -> str:
    figures = _text(driver, "#try-figures")
    return "" if figures == "Asking…" else figures
