"""What browsers say about a request: for which page they make it, and by which name they reached the server.

A browser sends requests to any server for any page, and only keeps the page from reading the response. So a server that trusts
every program that can connect, because it listens on the loopback address, would be used by all pages that its user visits.

1. Requests for pages of other origins are known by headers that no page can set (`is_of_other_origin`).
2. A page whose own name was resolved to our address after it was loaded (DNS rebinding) is of our origin to the browser. Its
   requests have that name in `Host` (`OwnHosts`).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Mapping

ANY_HOST = "*"


def is_of_other_origin(headers: Mapping[str, str], scheme: str) -> bool:
    """Return whether a browser made the request for a page that is not of this server. Names of `headers` are in lower case.

    1. `Sec-Fetch-Site` is the browser's own conclusion from the addresses that it saw; a proxy may have changed scheme and host
       since then. `same-site` is another origin: for a browser all ports of a machine are one site.
    2. Browsers omit it over plain HTTP, but to the loopback address. Then the origin must be ours; there is none in a GET for an
       image or a link, nor where the user typed the address (`none`).
    3. What sends neither header is no browser.
    """
    site = headers.get("sec-fetch-site", "").lower()
    if site == "same-origin":
        return False
    if site not in ("", "none"):
        return True
    origin = headers.get("origin")
    return origin is not None and origin.lower() != f"{scheme}://{headers.get('host', '').lower()}"


def is_link(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether a browser shows the response by itself, in a window that the page it came from cannot look into."""
    shown = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return shown and method in ("GET", "HEAD") and "origin" not in headers


class OwnHosts:
    """The names by which a server may be addressed: those that no page of others can have.

    Addresses are not resolved, so they are always allowed; so are `localhost` and the name of the machine.
    """

    def __init__(self, allowed: Collection[str] = (), listen: str = "") -> None:
        """`allowed`: further names, as `parse_allowed_host` returns them; `listen`: the host that the server listens on."""
        self._all = ANY_HOST in allowed
        machine = socket.gethostname().lower()
        names = {name for name in allowed if not name.startswith(".")}
        self._names = names | {"localhost", machine, machine.partition(".")[0], listen.lower()}
        self._domains = (".localhost", *(name for name in allowed if name.startswith(".")))

    def include(self, host: str) -> bool:
        """Return whether the value of a `Host` header names this server. Without one, no browser made the request."""
        if self._all or not host:
            return True
        parts = _NAME_AND_PORT.fullmatch(host.lower())
        if parts is None:
            return False
        name = parts["name"]
        if name is None:
            return True
        name = name.removesuffix(".")
        return name in self._names or name.endswith(self._domains)


_NAME_AND_PORT = re.compile(
    r"(?:[0-9]{1,3}(?:\.[0-9]{1,3}){3}|\[[0-9a-f:.]{2,45}\]|(?P<name>[a-z0-9_.-]{1,255}))(?::[0-9]{0,5})?", re.ASCII
)
"""The value of a `Host` header: an address, which no name server can make another one of, or a name."""


def parse_allowed_host(text: str) -> str:
    """Return a name, a domain with a leading dot, or `*`. Raises ValueError with the end of a sentence."""
    host = text.strip().lower().removesuffix(".")
    if host.startswith("*."):
        host = host[1:]
    if host != ANY_HOST and not re.fullmatch(r"\.?[a-z0-9_-]+(\.[a-z0-9_-]+)*", host):
        raise ValueError("is not a name such as models.example.com, a domain such as *.example.com or .svc, or *")
    return host
