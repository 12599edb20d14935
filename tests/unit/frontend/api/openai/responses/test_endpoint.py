"""How many follow what is stored of responses."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import pytest

from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.api.openai.responses import endpoint
from dynamo.frontend.config import HttpOptions
from dynamo.frontend.security.keys import entry_for, make_key
from dynamo.frontend.security.surfaces import Scope
from tests.support.every_operation import TEXT, open_frontend
from tests.support.waiting import WAIT_S

REQUEST = {"model": TEXT.open, "input": "Hi", "background": True, "stream": True}


async def test_a_key_follows_so_many_and_leaves_the_process_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them read and send what is stored every 0.1 s: 6,000 of one key held up those of others for seconds."""
    monkeypatch.setattr(endpoint, "MAX_FOLLOWERS", 2)
    keys = {name: make_key() for name in ("some", "other")}
    (tmp_path / "keys.yaml").write_text("".join(entry_for(key, name, scopes=[Scope.INFER]) for name, key in keys.items()))
    async with (
        asyncio.timeout(WAIT_S),
        open_frontend(tmp_path / "keys.yaml") as front,
        serve_http(HttpOptions(port=0), front.app) as server,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", verify=False) as client,
        AsyncExitStack() as streams,
    ):
        front.engine.behaves = [lambda stream: None]

        async def opened(key: str, method: str, path: str, **body: object) -> httpx2.Response:
            request = client.stream(method, path, headers={"x-api-key": keys[key]}, **body)
            return await streams.enter_async_context(request)

        async def created(key: str) -> str:
            response = await opened(key, "POST", "/v1/responses", json=REQUEST)
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if '"id":"resp_' in line:
                    return "resp_" + line.split('"id":"resp_')[1].split('"')[0]
            raise AssertionError("it has no id")

        id = await created("some")
        path = f"/v1/responses/{id}?stream=true"
        assert (await opened("some", "GET", path)).status_code == 200
        refused = await opened("some", "GET", path)
        assert refused.status_code == 429 and b"follows stored responses 2 times" in await refused.aread()
        await created("some")  # which its client could not know otherwise
        other = await created("other")
        assert (await opened("other", "GET", f"/v1/responses/{other}?stream=true")).status_code == 200
