"""Calls to etcd end when their task is cancelled, although gRPC may report the failure of the call instead."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from dynamo.common.etcd.lease import GRANT, KEEP_ALIVE
from dynamo.common.etcd.transport import Transport
from dynamo.common.options import EtcdOptions
from dynamo.protos import etcd_pb2 as pb
from tests.support.waiting import WAIT_S


class _FailingChannel:
    """A channel whose calls fail as they are cancelled: gRPC sees the lost connection first, and then says only that."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()

    async def channel_ready(self) -> None:
        return None

    async def close(self) -> None:
        return None

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._fail

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return lambda metadata: self

    async def write(self, request: Any) -> None:
        return None

    async def read(self) -> Any:
        await self._fail(None)

    def cancel(self) -> None:
        return None

    async def _fail(self, request: Any, **kwargs: Any) -> Any:
        self.waits.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "connection reset") from None


@pytest.fixture
async def channel(monkeypatch: pytest.MonkeyPatch) -> _FailingChannel:
    made = _FailingChannel()
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda *args, **kwargs: made)
    return made


async def _grant(transport: Transport) -> None:
    await transport.unary(GRANT, pb.LeaseGrantRequest())


async def _keep_alive(transport: Transport) -> None:
    async with transport.stream(KEEP_ALIVE) as stream:
        await stream.write(pb.LeaseKeepAliveRequest())
        await stream.read()


@pytest.mark.parametrize("calling", [_grant, _keep_alive])
async def test_a_cancellation_is_not_lost_in_the_failure_of_a_call(calling: Any, channel: _FailingChannel) -> None:
    transport = Transport(EtcdOptions(endpoints=("127.0.0.1:1",), timeout_s=WAIT_S))
    task = asyncio.create_task(calling(transport))
    await channel.waits.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await transport.close()
