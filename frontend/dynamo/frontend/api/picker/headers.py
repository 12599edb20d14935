"""Names of headers and metadata that gateways and endpoint pickers have agreed on, and what they mean.

The protocol is that of the Gateway API's inference extension, 1.0.0; the headers of requests are those of llm-d, by both of the
names that each has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from google.protobuf.struct_pb2 import Struct

from dynamo.common.http.served import Header
from dynamo.protos import ext_proc_pb2 as pb

ENDPOINT: Final = "x-gateway-destination-endpoint"
"""Header, and key in the metadata `envoy.lb`: the endpoints of a request, the best first."""
SERVED: Final = "x-gateway-destination-endpoint-served"
"""Key in the metadata `envoy.lb` of a response: the endpoint that it came from."""
SUBSET: Final = "x-gateway-destination-endpoint-subset"
"""Key in the metadata `envoy.lb.subset_hint`: the endpoints of which one may be chosen."""
METADATA: Final = "envoy.lb"
SUBSET_METADATA: Final = "envoy.lb.subset_hint"
PLACEMENT: Final = "x-dynamo-placement"
"""Header of requests and responses: `routed`, or `least-loaded` for a request that could not be placed by its prompt."""
DROPPED: Final = "x-llm-d-request-dropped-reason"
"""Header of refusals."""
_OBJECTIVES: Final = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
_FAIRNESS_IDS: Final = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
_REWRITES: Final = (b"x-llm-d-model-name-rewrite", b"x-gateway-model-name-rewrite")
_PRIORITY: Final = b"x-dynamo-request-priority"
MAX_FAIRNESS_CHARS: Final = 128


Headers = Mapping[bytes, bytes]
"""The first value of each header, by name."""


def headers_of(message: pb.HttpHeaders) -> tuple[Header, ...]:
    """Return the headers of a request or a response, with names in lower case."""
    return tuple(
        [
            (header.key.encode("latin-1", "replace"), header.raw_value or header.value.encode("latin-1", "replace"))
            for header in message.headers.headers
        ]
    )


def by_name(headers: Sequence[Header]) -> Headers:
    return dict(reversed(headers))


def value_of(headers: Headers, *names: bytes) -> str:
    """Return the value of the first of these headers that is there, or an empty string."""
    for name in names:
        if value := headers.get(name):
            return value.decode("latin-1")
    return ""


def objective_headers(headers: Headers, priorities: Mapping[str, int]) -> tuple[Header, ...]:
    """Return the header for the priority of the objective that a request names; none if it has a priority of its own."""
    priority = priorities.get(value_of(headers, *_OBJECTIVES))
    if priority is None or value_of(headers, _PRIORITY):
        return ()
    return ((_PRIORITY, b"%d" % priority),)


def fairness_id(headers: Headers) -> str:
    """Return for whom a request takes its turn where requests wait, or an empty string."""
    return value_of(headers, *_FAIRNESS_IDS)[:MAX_FAIRNESS_CHARS]


def rewritten_model(headers: Headers) -> str:
    """Return the model that a request is for in the place of the one in its body, or an empty string."""
    return value_of(headers, *_REWRITES)


def subset_of(metadata: Mapping[str, Struct]) -> frozenset[str] | None:
    """Return the endpoints of which one may be chosen; None: any."""
    if SUBSET_METADATA not in metadata:
        return None
    hint = metadata[SUBSET_METADATA]
    if SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    listed = [item.string_value for item in value.list_value.values] or value.string_value.split(",")
    return frozenset(filter(None, map(str.strip, listed)))


def served_by(metadata: Mapping[str, Struct]) -> str:
    """Return the endpoint that a response came from, or an empty string if the gateway does not say."""
    if METADATA not in metadata or SERVED not in metadata[METADATA].fields:
        return ""
    return metadata[METADATA].fields[SERVED].string_value
