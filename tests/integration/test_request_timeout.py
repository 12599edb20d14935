"""Deadlines of requests through a real fleet and both protocols; Triton's parameter `timeout` is none."""

from __future__ import annotations

import asyncio

from tests.support.deployment import TENSOR, infer_request, open_deployment
from tests.support.servers import EtcdServer, NatsServer

HELD = {"delay_ms": 60_000}
"""The model answers after a minute, the caller waits for a fifth of a second."""


async def test_an_answer_that_would_be_late_is_refused_over_both_protocols_and_given_up_by_the_worker(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with open_deployment(etcd_server, nats_server, namespace) as deployment:
        async with asyncio.timeout(120):
            over_grpc = await deployment.call("ModelInfer", infer_request(**HELD), x_request_timeout_ms="200")
            over_rest = await deployment.http.post(
                "/v2/models/echo/infer", json={**TENSOR, "parameters": HELD}, headers={"x-request-timeout-ms": "200"}
            )
            assert (over_grpc.status, over_rest.status_code) == (504, 504)
            assert over_rest.json() == {"error": over_grpc.message} == {"error": "the deadline of the request has passed"}
            await deployment.worker.requests.drained()
        patient = {"delay_ms": 20, "timeout": 1}
        assert (await deployment.call("ModelInfer", infer_request(**patient))).status == 200
