"""The probe that integration tests measure event loops with."""

from __future__ import annotations

import asyncio
import http.client
import sys

import pytest

from tests.support.held import Probe

SERVER = """
import asyncio, hashlib, sys, time
DATA = bytes(200_000_000)

def work(what):
    begun = time.thread_time()
    if what == "hashing":
        hashlib.sha256(DATA).digest()  # releases the GIL
    else:
        sum(range(20_000_000))  # does not
    return time.thread_time() - begun

async def serve(reader, writer):
    while line := await reader.readline():
        while await reader.readline() != b"\\r\\n":
            pass
        path = line.split()[1].decode()
        took = 0.0
        if path == "/loop":
            took = work("summing")
        elif path != "/live":
            took = await asyncio.to_thread(work, path[1:])
        text = str(took).encode()
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n%s" % (len(text), text))

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@pytest.mark.parametrize(("where", "holds"), [("loop", True), ("summing", True), ("hashing", False)])
async def test_the_probe_finds_what_holds_an_event_loop(where: str, holds: bool) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        probe = Probe(int(await process.stdout.readline()), process.pid)
        took_s = await asyncio.to_thread(work_s, probe, where)
    finally:
        process.kill()
        await process.wait()
    assert (probe.worst_s > took_s / 2) == holds


def work_s(probe: Probe, where: str) -> float:
    """Return the CPU time of the server's work while the probe watches."""
    connection = http.client.HTTPConnection("127.0.0.1", probe.port)
    with probe.watching():
        connection.request("GET", f"/{where}")
        return float(connection.getresponse().read())
