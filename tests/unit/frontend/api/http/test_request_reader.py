"""Long requests are read in several turns of the event loop."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.declaration import TEXT
from dynamo.frontend.api.http.errors import PLAIN_ERRORS
from dynamo.frontend.api.http.exchange import Exchange, HttpSettings
from dynamo.frontend.api.http.request_reader import RequestReader
from dynamo.frontend.api.openai.requests import CompletionRequest
from tests.support.served import Asking


@pytest.mark.parametrize(("characters", "turns"), [(1_000, 0), (400_000, 2)])
async def test_a_long_body_is_scanned_and_decoded_and_searched_in_turns_of_their_own(characters: int, turns: int) -> None:
    body = msgspec.json.encode({"model": "m", "prompt": "x, " * (characters // 3), "unknown": 1})
    exchange = Exchange(Asking(method="POST", body=body), HttpSettings())
    exchange.route(TEXT, PLAIN_ERRORS)
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            await asyncio.sleep(0)
            others += 1

    task = asyncio.ensure_future(other())
    await asyncio.sleep(0)
    request = await RequestReader(CompletionRequest).read(exchange)
    task.cancel()
    assert isinstance(request.prompt, str)
    assert len(request.prompt) == characters // 3 * 3
    assert others == turns


@pytest.mark.parametrize("length", [1, 200_000])
async def test_the_name_of_a_field_that_is_not_utf_8_is_the_clients_mistake(length: int) -> None:
    body = b'{"model": "m", "prompt": "%s", "\xff": 1}' % (b"x" * length)
    exchange = Exchange(Asking(method="POST", body=body), HttpSettings())
    exchange.route(TEXT, PLAIN_ERRORS)
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        await RequestReader(CompletionRequest).read(exchange)
