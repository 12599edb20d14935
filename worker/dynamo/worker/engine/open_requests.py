"""What engines share that leave scheduling to another engine: the load by their own requests, and that engine's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dynamo.common.errors import EngineError, Unavailable
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Summary


class OpenRequests:
    """Counts what the requests of one engine still wait for."""

    def __init__(self) -> None:
        self.choices = 0
        """Completion choices that have not ended."""
        self.prefilling_tokens = 0
        """Prompt tokens of requests without a token so far."""

    @contextmanager
    def opened(self, request: GenerateRequest) -> Iterator[OpenRequest]:
        """Count a request until the body ends."""
        opened = OpenRequest(self, request)
        try:
            yield opened
        finally:
            opened.close()


class OpenRequest:
    """The share of one request in an `OpenRequests`."""

    def __init__(self, requests: OpenRequests, request: GenerateRequest) -> None:
        self._requests = requests
        self._choices = request.n
        self._prefilling_tokens = request.prompt_tokens
        requests.choices += self._choices
        requests.prefilling_tokens += self._prefilling_tokens

    def prefilled(self) -> None:
        """Note that the engine has responded."""
        self._requests.prefilling_tokens -= self._prefilling_tokens
        self._prefilling_tokens = 0

    def generated(self, delta: Delta) -> None:
        """Note the end of a choice, if `delta` is its last one."""
        if delta.finish_reason is not None:
            self._choices -= 1
            self._requests.choices -= 1

    def close(self) -> None:
        """Subtract what is left of the request."""
        self.prefilled()
        self._requests.choices -= self._choices
        self._choices = 0


def empty_response(request: GenerateRequest) -> Iterator[Delta | Summary]:
    """Yield the response to a request for no token."""
    for index in range(request.n):
        yield Delta(index=index, finish_reason=FinishReason.LENGTH)
    yield Summary(prompt_tokens=request.prompt_tokens)


def read_finish_reason(name: str | None, server: str) -> FinishReason | None:
    """Return the reason that vLLM names. Raises Unavailable if it aborted the request, EngineError if it failed on it."""
    match name:
        case None:
            return None
        case "length":
            return FinishReason.LENGTH
        case "content_filter":
            return FinishReason.CONTENT_FILTER
        case "abort":
            raise Unavailable(f"{server} gave the request up")  # it was put to sleep, or shuts down
        case "error":
            raise EngineError(f"{server} failed on the request")
        case _:
            return FinishReason.STOP
