"""What a request is to the data plane: who sent it (`Call`), what has to be done (`Work`), and the parts that carry it out.

A `Stream` is one that goes over NATS, or through a gateway; a `TensorSource` belongs to one protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import msgspec

from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.common.observability.tracing import Span
from dynamo.common.process.work import hold_nothing
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.metrics import ModelMetrics, RequestType
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.explanation import Explanation
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.carried import CarriedRequest

_TRITON_LEVELS = 1 << 20


class Progress(msgspec.Struct, eq=False):
    """How far a request got; shared by its protocol edge and the data plane."""

    on_sent: Callable[[], None] | None = None
    """Called whenever the request was sent to an instance."""
    sent: int = 0
    """How often it was sent to an instance."""
    started: bool = False
    """The data plane has begun the request and counts how it ends; until then a failure is for the edge to count."""
    responded: bool = False
    """The first part of the response has arrived."""
    carried: CarriedRequest | None = None
    """Set if a gateway carries the request to its instance, and the response back; None: NATS does."""

    def was_sent(self) -> None:
        self.sent += 1
        if self.on_sent is not None:
            self.on_sent()

    def of_part(self) -> Progress:
        """Return how far one of several prompts got; when it is sent, so is the request."""
        return Progress(on_sent=self.was_sent, carried=self.carried)


def priority_of_level(level: int) -> int:
    """Convert a priority of Triton, where 1 is the most urgent. Here larger is more urgent; 0 is the default of both."""
    return max(1, _TRITON_LEVELS - level) if level > 0 else 0


def wait_uncounted(key: str) -> AbstractContextManager[None]:
    """For requests whose bytes are bounded elsewhere."""
    return nullcontext()


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """On whose behalf a request is made, and under which conditions.

    Each protocol edge reads one from the headers of a call, and replaces what the request itself says.
    """

    account: Account
    """On whose behalf; decides which models may be used, and how much of them."""
    request_id: str = ""
    """Empty in a call whose headers name none, until the request's own id, or a new one, replaces it."""
    deadline: float | None = None
    """Absolute, on the event loop's clock."""
    instance: InstanceId | None = None
    """The only instance that may serve this."""
    prefill_instance: InstanceId | None = None
    """The only instance that may compute the prompt for it, which is computed apart then."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """`traceparent`, `tracestate` and the like: passed to the worker."""
    priority: int = 0
    """Higher is more important."""
    session: str = ""
    overrides: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Router settings of this request."""
    explanation: Explanation | None = None
    """Collects why instances were chosen; None: the caller did not request that."""
    shadows: tuple[str, ...] = ()
    """Models that get a copy of the request, by the rule for its model's name, and whose responses are dropped."""
    is_copy: bool = False
    """For a shadow: no other instance gets it after a failure, and the retries of other requests are not concerned."""
    expected_tokens: int = 0
    """An estimate, for models that alone can count tokens: reserved in the account, and charged once the request was sent unless
    the model counts."""
    endpoint: str = "tensor"
    """The API that the request came by, for metrics: one of a fixed set of names."""
    request_type: RequestType = RequestType.UNARY
    prompts: int = 1
    """How many prompts the request has, each of which is begun by itself, with this call."""
    progress: Progress = msgspec.field(default_factory=Progress)
    span: Span | None = None
    """This process's part of the request's trace; None if it is not traced."""
    hold: Callable[[int], None] = hold_nothing
    """Counts bytes that are kept for the request until its end. Raises Overloaded."""
    waiting: Callable[[str], AbstractContextManager[None]] = wait_uncounted
    """Counts all of them as waiting for an instance, for an API key, until the context is left. Raises RateLimited: others need
    room, too."""


class Work(RouteRequest, kw_only=True):
    """What has to be done, and which instances may do it. Routers get it as it is."""

    verb: str
    body: Body
    metrics: ModelMetrics
    name: str = ""
    """The alias or adapter that the request uses: only instances that have it. Empty: the model's own name."""
    version: str = ""
    """Only instances that serve this version; empty: any."""
    tokenizer: str = ""
    """Only instances whose model has this tokenizer, for work that is token ids; empty: any."""
    sequence_owner: str = ""
    """The API key whose sequences it may be part of; empty: it names no sequence, or has no key."""
    grammar_owner: str = ""
    """The API key whose schema or grammar it has; empty: it has none, or no key."""
    fingerprint: bytes = b""
    """Equal for requests with the same schema or grammar, which instances may die of; empty: it has none."""
    role: Role | None = None
    """Only instances of this role; None: any role but `prefill`, which does not respond to callers."""
    carried: CarriedRequest | None = None
    """The request that a gateway carries to the instance, which it must be able to reach; None: NATS carries it."""
    otherwise: Work | None = None
    """What is done instead once an instance has failed, or if there is none."""


class TensorSource(Protocol):
    """Where the tensors of a request are that is read once it has been admitted."""

    @property
    def size_bytes(self) -> int:
        """The memory that `read` takes."""
        ...

    def read(self) -> TensorRequest:
        """Return the request with its tensors. Raises DynamoError."""
        ...


class Stream(Protocol):
    """One open request, as `messaging.request_plane.request_stream` has it."""

    @property
    def started(self) -> bool: ...

    @property
    def trailer(self) -> Buffer: ...

    async def read(self) -> list[Buffer]: ...

    async def result(self) -> Buffer: ...

    def cancel(self) -> None:
        """End the request early; has no effect if it has ended."""
        ...
