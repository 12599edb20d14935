"""Requests, and whether their responses are right.

Tensor requests go to an echo model, so every response is known. The next token of the simulated model is a fixed function
of all tokens before it, so every text is known as well, whichever instances generated its parts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING

from dynamo.common.errors import DynamoError, release
from dynamo.common.generation import Sampling, Stop
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.metrics import RequestType
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from tests.simulation.tokens import VOCABULARY, expected_tokens
from tests.support.plane import generate, infer, infer_stream

if TYPE_CHECKING:
    from tests.simulation.process import SimulatedFrontend

_STEP_S = 0.02
"""A step of the slowest language model, with some requests beside and before it."""
_RESPONSE_S = 0.05
"""Between two responses of the decoupled model."""


class Outcome(StrEnum):
    """How a request ended."""

    OPEN = "open"
    RIGHT = "right"
    WRONG = "wrong"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    """Its frontend died."""


@dataclass
class Attempt:
    """One request of one client."""

    number: int
    kind: str
    frontend: SimulatedFrontend
    begun_s: float
    deadline_s: float
    size: int
    """Size of a tensor, in bytes, or of a generation, in tokens."""
    model: str = "echo"
    responses: int = 1
    """Responses to a tensor request."""
    outcome: Outcome = Outcome.OPEN
    ended_s: float = 0.0
    error: str = ""
    ends: int = 0
    """How often it ended."""
    leave_after_s: float | None = None
    """When the client loses its patience."""
    is_started: bool = False
    """A part of the response has arrived."""
    account: str = ""
    """The name of the key; empty: without one."""
    prompt_tokens: int = 0
    received_tokens: int = 0
    pause_s: float = 0.0
    """Between two reads of a slow reader."""
    over: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    """Set when the request has ended, however it did."""

    def end(self, outcome: Outcome, now: float, error: str = "") -> None:
        self.ends += 1
        self.outcome, self.ended_s, self.error = outcome, now, error
        self.over.set()

    @property
    def own_s(self) -> float:
        """Return how long it takes at most where nothing is wrong."""
        if self.kind == "generate":
            return self.size * (_STEP_S + self.pause_s)
        return self.responses * (_RESPONSE_S + self.pause_s)

    def __str__(self) -> str:
        text = f"request {self.number} ({self.kind} of {self.model}, {self.size}) at {self.frontend.process.name} "
        text += f" from {self.begun_s:.2f} s until {self.ended_s:.2f} s"
        return f"{text}, deadline {self.deadline_s:.2f}: {self.outcome} {self.error}".rstrip()


async def run_request(attempt: Attempt, rng: Random) -> None:
    """Send one request and judge what comes back. Runs inside the frontend's process."""
    loop = asyncio.get_running_loop()
    work = {"stream": _infer_stream, "endless": _infer_stream, "generate": _generate}.get(attempt.kind, _infer)
    stores = attempt.frontend.stores
    call = Call(
        account=ANONYMOUS if stores is None or not attempt.account else stores.account(attempt.account),
        request_id=f"r{attempt.number}",
        endpoint="simulated",
        request_type=RequestType.STREAM,
        deadline=None if attempt.kind == "endless" else attempt.deadline_s,
        headers={"baggage": "x" * attempt.size} if attempt.kind == "header" else {},
    )
    leave = None if attempt.leave_after_s is None else attempt.begun_s + attempt.leave_after_s
    try:
        async with asyncio.timeout_at(leave):
            wrong = await work(attempt, call, rng)
        attempt.end(Outcome.WRONG if wrong else Outcome.RIGHT, loop.time(), wrong)
    except TimeoutError:
        attempt.end(Outcome.CANCELLED, loop.time())
    except DynamoError as error:
        attempt.end(Outcome.FAILED, loop.time(), f"{type(error).__name__}: {error}"[:200])
        release(error)  # as all APIs do


def _tensor(attempt: Attempt, rng: Random) -> tuple[TensorRequest, bytes]:
    data = rng.randbytes(max(4, attempt.size // 4 * 4))
    message = ModelInferRequest(model_name=attempt.model, id=str(attempt.number), raw_input_contents=[data])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[len(data) // 4])
    if attempt.responses != 1:
        message.parameters["repeat"].int64_param = attempt.responses
        message.parameters["delay_ms"].int64_param = int(_RESPONSE_S * 1000) * (attempt.kind == "endless" or rng.random() < 0.3)
    return TensorRequest.parse(message.SerializeToString()), data


async def _infer(attempt: Attempt, call: Call, rng: Random) -> str:
    plane = attempt.frontend.plane
    assert plane is not None
    request, data = _tensor(attempt, rng)
    return _check(await infer(plane, request, call), data)


async def _infer_stream(attempt: Attempt, call: Call, rng: Random) -> str:
    plane = attempt.frontend.plane
    assert plane is not None
    request, data = _tensor(attempt, rng)
    count = 0
    async with infer_stream(plane, request, call) as responses:
        while batch := await responses.read():
            for response in batch:
                count += 1
                attempt.is_started = True
                if wrong := _check(response, data):
                    return wrong
            if attempt.pause_s:
                await asyncio.sleep(attempt.pause_s)
    return "" if count == attempt.responses else f"{count} responses instead of {attempt.responses}"


def _check(response: bytes | bytearray | memoryview, data: bytes) -> str:
    message = ModelInferResponse.FromString(bytes(response))
    if list(message.raw_output_contents) != [data]:
        return f"{sum(map(len, message.raw_output_contents))} bytes that differ from the {len(data)} sent"
    return ""


async def _generate(attempt: Attempt, call: Call, rng: Random) -> str:
    plane = attempt.frontend.plane
    assert plane is not None
    group = rng.randrange(6)  # prompts of a group begin alike
    prompt = [group * 1000 + position for position in range(24)] + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(9))]
    seed, wanted = rng.randrange(1 << 20), attempt.size
    request = TextRequest(
        model=attempt.model, prompt=prompt, stop=Stop(max_tokens=wanted, ignore_eos=True), sampling=Sampling(seed=seed)
    )
    attempt.prompt_tokens = len(prompt)
    tokens: list[int] = []
    async with generate(plane, request, call) as generation:
        while batch := await generation.read():
            for delta in batch:
                tokens += delta.tokens
            attempt.received_tokens = len(tokens)
            if attempt.pause_s:
                await asyncio.sleep(attempt.pause_s)
    expected = expected_tokens(prompt, seed, wanted)
    if tokens != expected:
        return f"tokens {tokens[:8]}… ({len(tokens)}) instead of {expected[:8]}… ({len(expected)})"
    return ""
