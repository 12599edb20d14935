"""Addresses of engine servers for gateways."""

from __future__ import annotations

import pytest

from dynamo.common.errors import InvalidRequest, Unavailable
from dynamo.worker.engine.remote.gateway import GatewayAddress


@pytest.mark.parametrize(
    ("url", "given", "pod_ip", "address"),
    [
        ("http://10.0.0.7:8000", "", "", "10.0.0.7:8000"),
        ("http://10.0.0.7:8000", "", "10.0.0.9", "10.0.0.7:8000"),
        ("http://10.0.0.7/v1/", "", "", "10.0.0.7:80"),
        ("https://10.0.0.7", "", "", "10.0.0.7:443"),
        ("http://127.0.0.1:8000", "", "", "127.0.0.1:8000"),
        ("http://127.0.0.1:8000", "", "10.0.0.9", "10.0.0.9:8000"),
        ("http://localhost:8000", "", "fd00::9", "[fd00::9]:8000"),
        ("http://[fd00::7]:8000", "", "", "[fd00::7]:8000"),
        ("http://127.0.0.1:8000", "10.0.0.8:80", "10.0.0.9", "10.0.0.8:80"),
    ],
)
async def test_an_address_is_what_gateways_reach(url: str, given: str, pod_ip: str, address: str) -> None:
    endpoint = await GatewayAddress(url, given, pod_ip).endpoint("served", {})
    assert (endpoint.address, endpoint.model) == (address, "served")


@pytest.mark.parametrize("given", ["10.0.0.8", "host:80", "10.0.0.8:0", "10.0.0.8:99999", ":80", "fd00::7:80"])
def test_what_is_no_address_is_refused_at_once(given: str) -> None:
    with pytest.raises(InvalidRequest, match="--remote-endpoint must be IP:PORT"):
        GatewayAddress("http://10.0.0.7", given)


async def test_an_unknown_host_can_be_tried_again() -> None:
    with pytest.raises(Unavailable, match="is not known"):
        await GatewayAddress("http://host.invalid:8000").endpoint("served", {})
