"""Deadlines of requests through a real fleet and both doors; Triton's parameter `timeout` is none."""

from __future__ import annotations

import asyncio

from tests.support.doors import TENSOR, infer_request, open_doors
from tests.support.servers import EtcdServer, NatsServer

HELD = {"delay_ms": 60_000}
"""The model answers after a minute, the caller waits for a fifth of a second."""


async def test_an_answer_that_would_be_late_is_refused_at_both_doors_and_given_up_by_the_worker(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with open_doors(etcd_server, nats_server, namespace) as doors:
        async with asyncio.timeout(120):
            over_grpc = await doors.call("ModelInfer", infer_request(**HELD), x_request_timeout_ms="200")
            over_rest = await doors.http.post(
                "/v2/models/echo/infer", json={**TENSOR, "parameters": HELD}, headers={"x-request-timeout-ms": "200"}
            )
            assert (over_grpc.status, over_rest.status_code) == (504, 504)
            assert over_rest.json() == {"error": over_grpc.message} == {"error": "the deadline of the request has passed"}
            await doors.worker.requests.drained()
        patient = {"delay_ms": 20, "timeout": 1}
        assert (await doors.call("ModelInfer", infer_request(**patient))).status == 200
