"""The gRPC edge alone, in a process of its own that a test may attack: prints its port and serves until its input ends."""

from __future__ import annotations

import asyncio
import sys

from dynamo.common.lifecycle import run
from dynamo.frontend.config import GrpcOptions
from dynamo.protos import inference_pb2 as pb
from tests.support.edge import open_edge
from tests.support.fakes import FakeStream, tensor_card


def echo(stream: FakeStream) -> None:
    request = pb.ModelInferRequest.FromString(stream.body)
    response = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
    response.raw_output_contents.extend(request.raw_input_contents)
    stream.end(response.SerializeToString())


async def serve() -> None:
    options = GrpcOptions(max_message_bytes=4 * 2**20)
    async with open_edge(tensor_card(), options=options) as edge:
        edge.client.respond = echo
        print(edge.server.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    run(serve())
