"""KServe's two doors, gRPC and REST, give the same responses and refuse with the same words, to Triton's clients and raw ones."""

from __future__ import annotations

import pytest

from tests.integration.test_kserve_grpc import MODELS, NAMES, run_client
from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer


@pytest.mark.timeout(240)
async def test_rest_and_grpc_give_the_same_responses(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    flags = [flag for model in MODELS for flag in ("--model", model)]
    async with (
        worker(etcd_server, nats_server, namespace, *flags),
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        await front.serves(*NAMES)
        result = await run_client("kserve_doors", front.grpc_target, str(front.http_port))
        assert sum(line["case"].startswith("refused: ") for line in result) >= 85
        assert len(result) >= 220
        problems = [f"{line['case']}\n{line['problem']}" for line in result if line["problem"]]
        assert not problems, "\n".join(problems)
        assert not [line for line in front.lines if " ERROR " in line or "Traceback" in line]
