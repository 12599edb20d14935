"""An engine server that takes no time, as OpenAI's API shows one: `python -m benchmarks.text_engine PORT`.

Each completion is a stream of as many chunks as `max_tokens` says, a word each, and a last one with the usage. So many chunks
leave in one write as the field `seed` says: a fast engine hands over several at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

MODEL = "far"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
_EVENTS = _HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n"


def event(data: object) -> bytes:
    """Return an event as one chunk of a body."""
    line = b"data: " + (data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(line), line)


def chunk(kind: str, **fields: object) -> dict[str, object]:
    return {"id": "far-1", "object": kind, "created": 1, "model": MODEL, **fields}


class TextEngine(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._received = b""
        self._transport: asyncio.Transport
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.startswith(b"PRI "):  # HTTP/2, which routers try first
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
            return self._transport.close()
        while b"\r\n\r\n" in self._received:
            head, rest = self._received.split(b"\r\n\r\n", 1)
            lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            size = lengths[0] if lengths else 0
            if len(rest) < size:
                return
            self._received = rest[size:]
            self._respond(head.split(b" ")[1], rest[:size])

    def _respond(self, path: bytes, body: bytes) -> None:
        if path == b"/v1/chat/completions":
            task = asyncio.get_running_loop().create_task(self._stream(json.loads(body)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        listed = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "far", "max_model_len": 4096}]}
        answer = json.dumps(listed if path == b"/v1/models" else {}).encode()
        self._transport.write(_HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(answer) + answer)

    async def _stream(self, request: dict[str, object]) -> None:
        limit = request.get("max_tokens") or request.get("max_completion_tokens")  # as the router calls it
        count, together = int(str(limit)), int(str(request.get("seed", 1)))
        word = event(chunk("chat.completion.chunk", choices=[{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]))
        self._transport.write(_EVENTS)
        for begin in range(0, count, together):
            await asyncio.sleep(0)
            self._transport.write(word * min(together, count - begin))
        end = event(chunk("chat.completion.chunk", choices=[{"index": 0, "delta": {}, "finish_reason": "length"}]))
        usage = {"prompt_tokens": 8, "completion_tokens": count, "total_tokens": 8 + count}
        counted = event(chunk("chat.completion.chunk", choices=[], usage=usage))
        self._transport.write(end + counted + event(b"[DONE]") + b"0\r\n\r\n")


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(TextEngine, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
