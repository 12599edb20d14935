"""A client in Python over gRPC with a pool of connections: many requests at once to a tensor model.

    pip install grpcio numpy, and this project or stubs of its protos
    python examples/clients/pool.py 127.0.0.1:8001 classifier --requests 200

One connection carries as many calls at once as the server allows it (`--grpc-max-concurrent-streams`). Several reach several
frontends behind one address, and several processes of one, since a connection stays where it was accepted. With an API key:
DYNAMO_API_KEY=… python examples/clients/pool.py …
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio
import numpy as np

from dynamo.protos import inference_pb2 as pb
from dynamo.protos.inference_pb2_grpc import GRPCInferenceServiceStub

if TYPE_CHECKING:
    from dynamo.protos.inference_pb2_grpc import GRPCInferenceServiceAsyncStub  # a type of the generated .pyi alone

OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one address share one connection
)


class Pool:
    """Connections that are used in turn."""

    def __init__(self, target: str, size: int) -> None:
        self._channels = [grpc.aio.insecure_channel(target, options=OPTIONS) for _ in range(size)]
        self._stubs: itertools.cycle[GRPCInferenceServiceAsyncStub] = itertools.cycle(
            [GRPCInferenceServiceStub(channel) for channel in self._channels]
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    @property
    def stub(self) -> GRPCInferenceServiceAsyncStub:
        """A stub on the next connection."""
        return next(self._stubs)


async def classify(pool: Pool, model: str, key: str) -> pb.ModelInferResponse:
    """Show a classifier of 8 × 8 images an empty one."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[np.zeros((1, 8, 8), np.float32).tobytes()])
    request.inputs.add(name="image", datatype="FP32", shape=[1, 8, 8])
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    return await pool.stub.ModelInfer(request, timeout=30, metadata=metadata, wait_for_ready=True)


async def main(target: str, model: str, requests: int, connections: int) -> None:
    key = os.environ.get("DYNAMO_API_KEY", "")
    async with Pool(target, connections) as pool:
        responses = await asyncio.gather(*(classify(pool, model, key) for _ in range(requests)))
    print(f"{len(responses)} responses over {connections} connections: {[output.name for output in responses[0].outputs]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--connections", type=int, default=4)
    flags = parser.parse_args()
    asyncio.run(main(flags.target, flags.model, flags.requests, flags.connections))
