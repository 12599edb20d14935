"""A server of realtime conversations: what it is sent decides what it sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response


@dataclass
class RealtimeServer:
    model: str = "/models/omni"
    refusals: list[int] = field(default_factory=list)
    """Statuses of the next responses to handshakes."""
    port: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    """What clients have sent."""
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    open: int = 0
    closed: asyncio.Queue[tuple[int, str]] = field(default_factory=asyncio.Queue)
    """Code and reason of each conversation that has ended."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[RealtimeServer]:
        async with serve(self._talk, "127.0.0.1", self.port, process_request=self._respond, max_size=None) as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            yield self

    def _respond(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/v1/models":
            return connection.respond(HTTPStatus.OK, json.dumps({"data": [{"id": self.model}]}))
        self.paths.append(request.path)
        self.headers.append({name.lower(): value for name, value in request.headers.raw_items()})
        if self.refusals:
            return connection.respond(HTTPStatus(self.refusals.pop(0)), '{"error":{"message":"no"}}')
        return None

    async def _talk(self, socket: ServerConnection) -> None:
        async def say(kind: str, **fields: Any) -> None:
            await socket.send(json.dumps({"type": kind, "event_id": "e", **fields}))

        self.open += 1
        try:
            await say("session.created", session={"id": "s", "type": "realtime", "model": self.model})
            async for message in socket:
                event = json.loads(message)
                self.events.append(event)
                match event["type"]:
                    case "session.update":
                        await say("session.updated", session=event["session"])
                    case "input_audio_buffer.append":
                        await say("input_audio_buffer.committed", item_id=str(len(event["audio"])))
                    case "response.create":
                        usage = {"input_tokens": 30, "output_tokens": 12, "total_tokens": 42}
                        await say("response.output_text.delta", delta="Hel", item_id="i", response_id="r")
                        await say("response.output_text.delta", delta="lo", item_id="i", response_id="r")
                        await say("response.done", response={"id": "r", "object": "realtime.response", "usage": usage})
                    case "leave":
                        await socket.close(1000, "good night")
        except ConnectionClosed:
            pass
        finally:
            self.open -= 1
            self.closed.put_nowait((socket.close_code or 0, socket.close_reason or ""))
