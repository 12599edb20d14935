"""Bodies of requests of gateways."""

from __future__ import annotations

import asyncio

from dynamo.frontend.api.picker.gateway_request import GatewayBody


async def test_tiny_parts_are_gathered_and_lose_nothing() -> None:
    body, sent = GatewayBody(), b""
    for number in range(10_000):
        part = number.to_bytes(2, "big")
        sent += part
        body.add(part, is_last=number == 9_999)
    assert len(body.parts) < 12 and b"".join(body.parts) == sent == body.joined()
    assert body.size_bytes == len(sent) and await body.part(len(body.parts)) is None


async def test_what_is_gathered_is_there_for_those_who_need_all_that_has_come() -> None:
    body = GatewayBody()
    body.add(b"x" * 5000, is_last=False)
    body.add(b"ab", is_last=False)
    reading = asyncio.ensure_future(body.part(1))
    await asyncio.sleep(0)
    assert body.size_bytes == 5002 and len(body.parts) == 1 and not reading.done()
    body.flush()
    assert body.parts[1:] == [b"ab"] and body.joined().endswith(b"xab")
    body.add(b"", is_last=True)
    assert await reading == b"ab"


async def test_a_body_of_nothing_ends() -> None:
    body = GatewayBody()
    body.add(b"", is_last=True)
    assert body.parts == [] and body.joined() == b"" and await body.part(0) is None
