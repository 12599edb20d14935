"""The benchmark of the endpoint picker: both Envoys differ in the picker alone, and pods take what Envoy sends."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.picker import CASES, WITH, WITHOUT, Measured, configuration, report
from benchmarks.plain_pods import PodConnection

PODS = ["127.0.0.1:1001", "127.0.0.1:1002"]


def test_the_envoy_without_a_picker_knows_the_pods_and_has_no_filter_that_asks() -> None:
    asking, alone = configuration(8, 9, PODS)["static_resources"], configuration(8, None, PODS)["static_resources"]
    assert [cluster["name"] for cluster in asking["clusters"]] == ["picked", "picker"]
    [picked] = alone["clusters"]
    [endpoints] = picked["load_assignment"]["endpoints"]
    assert [each["endpoint"]["address"]["socket_address"]["port_value"] for each in endpoints["lb_endpoints"]] == [1001, 1002]
    filters = [
        [each["name"] for each in side["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]]
        for side in (asking, alone)
    ]
    assert filters[0][1:] == filters[1] == ["envoy.filters.http.router"]


def test_added_is_the_difference_of_percentiles_and_cores_are_those_of_the_rate() -> None:
    results = {CASES[0].name: {WITHOUT: Measured(), WITH: Measured()}}
    for kind, whole_s in ((WITHOUT, 0.001), (WITH, 0.003)):
        measured = results[CASES[0].name][kind]
        measured.sent.whole_s += [whole_s] * 10
        measured.cpu_s |= {"frontend": 0.02, "envoy": 0.01}
        measured.picked_s, measured.picked = 0.01, 10
    row = report(results).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")[5:-1]] == [
        "3.00",
        "3.00",
        "2.00",
        "2.00",
        "1.00",
        "2.00",
        "1.00",
        "1.00",
        "0.50",
    ]


@pytest.mark.parametrize("size", [1, 100_000])
async def test_a_pod_responds_once_to_each_request_however_its_body_comes(size: int) -> None:
    server = await asyncio.get_running_loop().create_server(PodConnection, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        body = b"x" * size
        whole = b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (size, body)
        chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (size, body)
        for request in (whole, chunked, whole):
            for begin in range(0, len(request), 7000):
                writer.write(request[begin : begin + 7000])
                await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            assert (await reader.readexactly(length)).endswith(b"data: [DONE]\n\n")
        writer.close()
