"""KServe's protocols, gRPC and REST, give the same responses and refuse with the same words, to Triton's clients and raw ones."""

from __future__ import annotations

from tests.integration.test_kserve_grpc import run_client
from tests.support.processes import FrontendProcess


async def test_rest_and_grpc_give_the_same_responses(deployment: FrontendProcess) -> None:
    result = await run_client("kserve_protocols", deployment.grpc_target, str(deployment.http_port))
    assert sum(line["case"].startswith("refused: ") for line in result) >= 85
    assert len(result) >= 220
    problems = [f"{line['case']}\n{line['problem']}" for line in result if line["problem"]]
    assert not problems, "\n".join(problems)
    assert not [line for line in deployment.lines if " ERROR " in line or "Traceback" in line]
