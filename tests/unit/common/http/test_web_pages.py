"""Which requests browsers make for pages of other origins, and which names are a server's own."""

from __future__ import annotations

import socket

import pytest

from dynamo.common.http.web_pages import OwnHosts, is_link, is_of_other_origin, parse_allowed_host

OWN = {"host": "127.0.0.1:8000"}


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({}, False),  # curl, a library
        ({"sec-fetch-mode": "cors"}, False),  # fetch of Node.js
        ({"origin": "http://127.0.0.1:8000"}, False),
        ({"origin": "HTTP://127.0.0.1:8000"}, False),
        ({"sec-fetch-site": "none"}, False),  # the user typed the address
        ({"sec-fetch-site": "same-origin"}, False),
        ({"sec-fetch-site": "same-origin", "origin": "https://models.example"}, False),  # a proxy ended TLS and changed the host
        ({"origin": "http://evil.example"}, True),
        ({"origin": "http://127.0.0.1:3000"}, True),
        ({"origin": "http://127.0.0.1"}, True),
        ({"origin": "https://127.0.0.1:8000"}, True),
        ({"origin": "http://127.0.0.1:8000.evil.example"}, True),
        ({"origin": "null"}, True),  # a sandboxed frame, a file, a redirect over other sites
        ({"origin": ""}, True),
        ({"origin": "chrome-extension://abc", "sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),  # another port of this machine
        ({"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:8000"}, True),  # redirected by another site
        ({"sec-fetch-site": "something new"}, True),
    ],
)
def test_a_page_of_another_origin_is_known_by_headers_of_the_browser(headers: dict[str, str], foreign: bool) -> None:
    assert is_of_other_origin(OWN | headers, "http") is foreign


def test_the_scheme_belongs_to_the_origin() -> None:
    headers = {"host": "models.example", "origin": "https://models.example"}
    assert [is_of_other_origin(headers, scheme) for scheme in ("https", "http")] == [False, True]


def test_only_what_the_user_sees_alone_is_a_link() -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert is_link("GET", link)
    assert is_link("HEAD", link)
    assert not is_link("POST", link), "a form"
    for change in ({"sec-fetch-dest": "iframe"}, {"sec-fetch-mode": "no-cors"}, {"origin": "null"}):
        assert not is_link("GET", link | change)


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            "localhost",
            "LOCALHOST:8000",
            "localhost.",
            "app.localhost:1",
            "127.0.0.1",
            "127.0.0.1:8000",
            "10.1.2.3:80",
            "[::1]",
        ),
        *("[::1]:8000", "[fd00::1]:8000", "0.0.0.0:8000"),
        *(
            "frontend.internal:8000",
            "models.example",
            "a.models.example:443",
            "dynamo-frontend.dynamo.svc:8000",
            "x.cluster.local",
        ),
    ],
)
def test_own_names_are_addresses_loopback_names_and_what_is_allowed(host: str) -> None:
    allowed = tuple(map(parse_allowed_host, ("Models.example", "*.models.example", ".svc", "*.cluster.local")))
    assert OwnHosts(allowed, "frontend.internal").include(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost", "a@localhost"),
        *("localhost:8000@evil.example", "127.0.0.1:x", "[::1", "[::1]x", "[evil.example]", "localhost,evil.example", "a b", "é"),
        *("1.2.3", "127.1", "0x7f000001", "svc", "evilsvc", "models.example.evil", "." * 300, "x" * 60_000),
    ],
)
def test_other_names_are_not_own(host: str) -> None:
    assert not OwnHosts((".svc", "models.example")).include(host)


def test_the_name_of_the_machine_is_its_own_and_any_name_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Box-7.lab.example")
    assert all(OwnHosts().include(host) for host in ("box-7", "box-7.lab.example:8000"))
    assert not OwnHosts().include("box-8.lab.example")
    assert OwnHosts(("*",)).include("evil.example")


def test_a_domain_includes_only_names_in_it() -> None:
    hosts = OwnHosts((parse_allowed_host("*.example.com"),))
    assert [hosts.include(name) for name in ("a.example.com", "a.b.example.com", "example.com", "aexample.com")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("text", ["", "https://models.example", "models.example:8000", "a b", "*a", "a.*.b", "..", "."])
def test_what_is_no_name_cannot_be_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="is not a name such as"):
        parse_allowed_host(text)
