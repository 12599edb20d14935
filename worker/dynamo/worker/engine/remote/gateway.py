"""Where gateways reach an engine server, by which an endpoint picker has requests sent straight to it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

from dynamo.common.errors import InvalidRequest, Unavailable
from dynamo.common.model_card import HttpEndpoint

_PORTS = {"http": 80, "https": 443}


class GatewayAddress:
    """The address of one server, as gateways have to be told."""

    def __init__(self, url: str, given: str = "", pod_ip: str = "") -> None:
        """`given`: by the operator, as `IP:port`; empty: that of the URL. `pod_ip`: of this process's pod; empty: it has none.

        Raises InvalidRequest for what is no address.
        """
        self._url = urlsplit(url)
        self._given = given
        self._pod_ip = pod_ip
        if given:
            check_address(given)

    async def endpoint(self, model: str, headers: dict[str, str]) -> HttpEndpoint:
        """Return the endpoint of the server, which calls the model by this name. Raises Unavailable for an unknown host."""
        return HttpEndpoint(address=self._given or await self._resolved(), model=model, headers=headers)

    async def _resolved(self) -> str:
        """Return where this process reaches the server.

        In a pod beside it, that is a loopback address, which means nothing to a gateway: there the pod's own stands for it.
        """
        host, port = self._url.hostname or "", self._url.port or _PORTS.get(self._url.scheme, 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(f"the host of {self._url.geturl()} is not known: {error}") from error
        addresses = [str(entry[4][0]) for entry in found]
        address = next((each for each in addresses if ":" not in each), addresses[0])
        if ipaddress.ip_address(address.partition("%")[0]).is_loopback and self._pod_ip:
            address = self._pod_ip
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def check_address(text: str) -> None:
    """Raise InvalidRequest for what is not `IP:port`; an IPv6 address is in brackets."""
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        is_address = port.isdecimal() and 0 < int(port) < 65536 and (":" not in host or host.startswith("["))
    except ValueError:
        is_address = False
    if not is_address:
        raise InvalidRequest(f"--remote-endpoint must be IP:PORT, got {text!r}")
