"""What a login may have JetStream send to subjects that it may not publish."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import nats

from dynamo.common.messaging.jetstream.store import FileStore
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import NatsOptions
from tests.support.servers import start_nats
from tests.support.waiting import WAIT_S, until

_MAY = '["$O.dynamo-models.>", "$JS.API.DIRECT.GET.OBJ_dynamo-models"]'
CONFIG = f"""authorization {{ users: [
  {{user: frontend, password: f}}, {{user: worker, password: w, permissions: {{publish: {_MAY}, subscribe: "_INBOX_worker.>"}}}}
] }}"""
"""What a worker may in the deployment, as far as it is needed here."""


async def test_a_worker_has_jetstream_send_nothing_that_other_processes_read(tmp_path: Path) -> None:
    """JetStream sends what a login may read to any subject, past its permissions, and with any beginning of the headers."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(start_nats(tmp_path, config=CONFIG))
        own = NatsOptions(servers=(server.url,), user="frontend", password="f")
        frontend = await stack.enter_async_context(connect_nats(own, "frontend", role="frontend"))
        await FileStore(frontend, tmp_path / "frontend").ensure()
        received: list[bytes] = []
        await frontend.subscribe("dynamo.ns.limits", lambda subject, reply, payload, missing: received.append(bytes(payload)))
        witness = await nats.connect(server.url, user="frontend", password="f")
        stack.push_async_callback(witness.close)
        seen = await witness.subscribe("dynamo.ns.limits")
        await witness.flush()
        _, worker = await asyncio.open_connection("127.0.0.1", server.port)
        stack.callback(worker.close)
        worker.write(b'CONNECT {"verbose":false,"headers":true,"user":"worker","pass":"w"}\r\n')
        for status, content in ((b"", b"forged"), (b" 503", b"forged"), (b" 503", b"")):
            head = b"NATS/1.0%b\r\n\r\n" % status
            worker.write(b"HPUB $O.dynamo-models.C.x %d %d\r\n%b%b\r\n" % (len(head), len(head + content), head, content))
        for number in range(1, 4):
            worker.write(b'PUB $JS.API.DIRECT.GET.OBJ_dynamo-models dynamo.ns.limits 9\r\n{"seq":%d}\r\n' % number)
        assert [(await seen.next_msg(WAIT_S)).subject for _ in range(3)] == ["dynamo.ns.limits"] * 3
        frontend.publish_nowait("dynamo.ns.limits", b"own")
        await until(lambda: bool(received) and received[-1] == b"own")
        assert received == [b"own"]
