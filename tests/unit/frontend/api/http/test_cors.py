"""Pages of other sites that use the server from a browser."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from dynamo.frontend.config import HttpOptions
from tests.support.http_edge import Speaker, open_http_edge

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
ORIGIN = "https://app.example"
ASK = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization, x-mine"}


async def exchange(options: HttpOptions, headers: dict[str, str], method: str = "POST") -> httpx2.Response:
    async with open_http_edge(respond=Speaker(), http=options) as edge:
        return await edge.http.request(method, CHAT, json=HELLO if method == "POST" else None, headers=headers)


def cors_of(response: httpx2.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


async def test_no_page_of_another_site_is_served_by_default() -> None:
    response = await exchange(HttpOptions(), {"origin": ORIGIN})
    preflight = await exchange(HttpOptions(), ASK, "OPTIONS")
    assert (response.status_code, cors_of(response)) == (403, {})
    assert "--allowed-origins" in response.json()["error"]["message"]
    assert (preflight.status_code, cors_of(preflight)) == (403, {})
    assert "--allowed-origins" in preflight.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_page_of_an_allowed_origin_may_read_the_response(stream: bool) -> None:
    async with open_http_edge(respond=Speaker(), http=HttpOptions(allowed_origins=(ORIGIN, "https://b.example"))) as edge:
        response = await edge.post(CHAT, HELLO | {"stream": stream}, headers={"origin": ORIGIN})
        refused = await edge.post(CHAT, {}, headers={"origin": ORIGIN})
        missing = await edge.http.get("/nowhere", headers={"origin": ORIGIN})
        other = await edge.post(CHAT, HELLO, headers={"origin": "https://evil.example"})
    for one in (response, refused, missing):
        assert (one.headers["access-control-allow-origin"], one.headers["vary"]) == (ORIGIN, "origin")
        assert "x-request-id" in one.headers["access-control-expose-headers"]
    assert (response.status_code, refused.status_code, missing.status_code) == (200, 400, 404)
    assert (other.status_code, cors_of(other)) == (403, {})


async def test_a_preflight_is_answered_with_what_is_allowed() -> None:
    everything = await exchange(HttpOptions(allowed_origins=("*",)), ASK, "OPTIONS")
    some = HttpOptions(allowed_origins=(ORIGIN,), allowed_methods=("GET", "POST"), allowed_headers=("authorization",))
    narrow = await exchange(some, ASK, "OPTIONS")
    stranger = await exchange(some, ASK | {"origin": "https://evil.example"}, "OPTIONS")
    assert (everything.status_code, everything.content) == (200, b"")
    assert cors_of(everything) == {
        "access-control-allow-origin": "*",
        "access-control-allow-methods": "POST",
        "access-control-allow-headers": "authorization, x-mine",
        "access-control-max-age": "600",
    }
    assert narrow.headers["access-control-allow-methods"] == "GET, POST"
    assert narrow.headers["access-control-allow-headers"] == "authorization"
    assert (stranger.status_code, cors_of(stranger)) == (403, {})


async def test_an_origin_is_named_where_credentials_are_allowed() -> None:
    response = await exchange(HttpOptions(allowed_origins=("*",), allow_credentials=True), {"origin": ORIGIN})
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.headers["access-control-allow-credentials"] == "true"
