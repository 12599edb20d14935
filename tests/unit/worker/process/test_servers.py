"""Engine servers of a file: which files can be used, and what happens when they change."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from dynamo.common.config import ConfigError, load
from dynamo.common.errors import InvalidRequest
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.remote.options import RemoteOptions
from dynamo.worker.engine.remote.servers import ListedServer, read_servers
from dynamo.worker.process.servers import follow_servers
from tests.support.waiting import until


def read(folder: Path, text: str) -> tuple[ListedServer, ...]:
    (folder / "servers.yaml").write_text(text)
    return read_servers(folder / "servers.yaml")


def test_a_file_of_llm_d_is_read_and_says_more_of_servers_that_publish_kv_events(tmp_path: Path) -> None:
    text = """
    endpoints:
      - {name: vllm-0, namespace: inference, address: "10.0.0.1", port: "8000", labels: {rank: "0"}}
      - {address: "10.0.0.1", port: 8000}
      - {address: "fd00::1"}
      - {url: "https://gpu-7/vllm", kv_events: "tcp://gpu-7:5557", kv_replay: "tcp://gpu-7:5558", endpoint: "10.0.0.7:443"}
    """
    first, second, third = read(tmp_path, text)
    assert (first.url, second.url) == ("http://10.0.0.1:8000", "http://[fd00::1]:80")
    options = third.options(RemoteOptions(url_file=tmp_path, pod_ip="10.0.0.9"))
    assert (options.urls, options.url_file, options.pod_ip) == (("https://gpu-7/vllm",), None, "10.0.0.9")
    assert (options.kv_events, options.kv_replay) == (("tcp://gpu-7:5557",), ("tcp://gpu-7:5558",))
    assert (options.endpoints, first.options(options).kv_events) == (("10.0.0.7:443",), ())
    assert read(tmp_path, '{"endpoints": []}') == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "does not list engine servers: Expected `object`"),
        ("servers: []", "unknown field `servers`"),
        ("endpoints: [", "does not list engine servers"),
        ("endpoints: [{url: http://a, kv_event: tcp://a:1}]", "unknown field `kv_event`"),
        ("endpoints: [{name: x}]", "entry 1: it needs either 'url'"),
        ("endpoints: [{url: http://a}, {url: http://b, address: b}]", "entry 2: it needs either 'url'"),
        ("endpoints: [{address: a, port: '80000'}]", "http://a:80000 is not the URL of a server"),
        ("endpoints: [{url: 'ftp://a'}]", "ftp://a is not the URL"),
        ("endpoints: [{url: 'http://user:SECRET@a'}]", "entry 1: http://…@a is not the URL of a server, which has no user"),
        ("endpoints: [{url: 'http://a?key=SECRET'}]", "entry 1: http://a?… is not the URL"),
        ("endpoints: [{address: a..b}]", "http://a..b:80 is not the URL"),
        ('endpoints: [{address: "a\\0b"}]', "is not the URL"),
        (
            "endpoints: [{url: http://a}, {url: 'http://A:80/v1/', kv_events: tcp://a:1}]",
            "entry 2: http://A:80/v1/ is listed before",
        ),
        ("[" * 20_000, "does not list engine servers: maximum recursion"),  # deeper than any limit that other tests set
        ("endpoints: [{url: 2020-13-45}]", "does not list engine servers: month"),
        ("endpoints: [{port: !!int ''}]", "does not list engine servers"),
        ("#" * (256 * 1024 + 1), "has more than 262144 bytes"),
        ("endpoints: [{url: http://a, kv_replay: tcp://a:1}]", "'kv_replay' needs 'kv_events'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)) as refused:
        read(tmp_path, text)
    assert "SECRET" not in str(refused.value)


def test_spellings_of_one_url_are_one_server(tmp_path: Path) -> None:
    [server] = read(tmp_path, "endpoints: [{url: http://a:80/v1}, {url: http://A/}, {address: a}]")
    assert server.url == "http://a:80/v1"


def test_what_is_no_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        read_servers(tmp_path / "pipe")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--url-file .* cannot be read: No such file"):
        read_servers(tmp_path / "servers.yaml")


@pytest.mark.parametrize("flags", [["--url", "http://a"], ["--remote-endpoint", "10.0.0.1:1"], ["--model", "sim"]])
def test_a_file_takes_the_place_of_a_url(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="--url"):
        load(WorkerConfig, ["--url-file", "servers.yaml", *flags], {}, program="worker")


async def test_what_is_added_is_served_and_what_is_removed_stops_and_both_may_be_repeated() -> None:
    a, b, c = (ListedServer(f"http://{name}") for name in "abc")
    listed, serving, numbers = [a, b], set[ListedServer](), dict[ListedServer, int]()
    drained, stop = asyncio.Event(), asyncio.Event()
    looks = 0

    def look() -> list[ListedServer]:
        nonlocal looks
        looks += 1
        return listed

    async def serve(server: ListedServer, number: int, stopping: asyncio.Event) -> None:
        if server == c:
            raise InvalidRequest("it cannot be used")
        serving.add(server)
        numbers[server] = number
        await stopping.wait()
        serving.discard(server)
        if not stop.is_set():
            await drained.wait()

    following = asyncio.create_task(follow_servers(look, serve, stop, look_s=0.001))
    await until(lambda: serving == {a, b})
    assert sorted(numbers.values()) == [0, 1]
    listed[:] = [b, c]
    await until(lambda: serving == {b})
    listed[:] = [a, b, c]  # while `a` drains
    seen = looks
    await until(lambda: looks >= seen + 3)
    assert serving == {b}
    drained.set()
    await until(lambda: serving == {a, b})
    stop.set()
    await following
    assert not serving


async def test_a_defect_ends_the_process() -> None:
    async def serve(server: ListedServer, number: int, stopping: asyncio.Event) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await follow_servers(lambda: [ListedServer("http://a")], serve, asyncio.Event(), look_s=0.001)
