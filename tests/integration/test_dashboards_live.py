"""Dashboards and alert rules against what running processes show, and both against promtool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo.common.process.ports import free_ports
from dynamo.protos import inference_pb2 as pb
from tests.support.fleet import echo_request
from tests.support.processes import frontend, planner, worker
from tests.support.promql import ADDED_BY_PROMETHEUS, ALERTS, all_expressions, parsed, selectors
from tests.support.servers import EtcdServer, NatsServer

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")

with_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed; it is in Debian's package prometheus, and PROMTOOL can name it"
)


@pytest.fixture
async def scrapes(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> AsyncIterator[list[str]]:
    """The text of /metrics of a frontend and of a worker that have had requests of all kinds, and of a planner."""
    [port] = free_ports(1)
    models = ("--model", "sim", "--model", "echo", "--status-port", str(port))
    async with (
        worker(etcd_server, nats_server, namespace, *models),
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--router-mode", "kv", "--canary-wait", "0.2") as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as http,
        grpc.aio.insecure_channel(front.grpc_target) as channel,
        planner(etcd_server.endpoint, nats_server.url, namespace) as planning,
    ):
        await front.serves("sim", "echo")
        for stream in (False, True):
            body = {"model": "sim", "prompt": "Hello " * 20, "max_tokens": 4, "stream": stream}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert (await http.post("/v1/completions", content=b"{")).status_code == 400
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        await infer(echo_request())
        with pytest.raises(grpc.aio.AioRpcError):
            await infer(pb.ModelInferRequest(model_name="made-up").SerializeToString())
        await planning.shows(lambda shown: shown["pools"])
        ports = (f":{front.http_port}", f":{port}", f":{planning.status_port}")
        yield [(await http.get(f"http://127.0.0.1{each}/metrics")).text for each in ports]


async def test_every_expression_asks_for_what_running_processes_show(scrapes: list[str]) -> None:
    names: set[str] = set()
    labels: dict[str, set[str]] = {}
    for text in scrapes:
        for family in text_string_to_metric_families(text):
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            names |= {family.name + suffix for suffix in suffixes}
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    for where, expression in all_expressions():
        for selector in selectors(parsed(expression)):
            assert selector.name in names, f"{where}: no process shows {selector.name}"
            wanted = {matcher.name for matcher in selector.matchers.matchers} - ADDED_BY_PROMETHEUS
            assert selector.name not in labels or wanted <= labels[selector.name], f"{where}: {selector.name} lacks {wanted}"


async def test_no_name_that_a_client_made_up_becomes_a_label(scrapes: list[str]) -> None:
    assert not any("made-up" in text for text in scrapes)
    assert 'reason="not_found"' in scrapes[0]


@with_promtool
async def test_promtool_finds_nothing_wrong_with_a_scrape(scrapes: list[str]) -> None:
    for text in scrapes:
        assert [line for line in lint(text) if not line.startswith("nv_")] == [], "Triton's names are its own"


@with_promtool
def test_promtool_understands_the_alert_rules() -> None:
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@with_promtool
def test_promtool_notices_what_is_wrong() -> None:
    assert lint("# HELP bad_gauge_total Bad.\n# TYPE bad_gauge_total gauge\nbad_gauge_total 1\n")


def lint(text: str) -> list[str]:
    """What promtool has to say about a scrape, by line."""
    done = subprocess.run([str(PROMTOOL), "check", "metrics"], input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 3), done.stderr
    return (done.stderr + done.stdout).splitlines()
