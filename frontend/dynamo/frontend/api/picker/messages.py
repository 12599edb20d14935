"""Messages to the gateway, serialized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final

from dynamo.common.errors import InvalidRequest
from dynamo.common.http.served import Header
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.picker.headers import ENDPOINT, METADATA
from dynamo.protos import ext_proc_pb2 as pb

_KEPT: Final = 1024
"""Messages that are kept for the next request that has the same: building two is a twentieth of a pick."""
CHUNK_BYTES: Final = 62_000
"""Bytes of a body in one message at most."""
_OVERWRITE: Final = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_LEFT_TO_GATEWAY: Final = frozenset({b"content-length", b"transfer-encoding", b"connection"})


def _encoded(**parts: object) -> bytes:
    return pb.ProcessingResponse(**parts).SerializeToString()  # type: ignore[arg-type]


GO_ON: Final[Mapping[str, bytes]] = {
    "request_headers": _encoded(request_headers=pb.HeadersResponse()),
    "response_headers": _encoded(response_headers=pb.HeadersResponse()),
    "request_body": _encoded(request_body=pb.BodyResponse()),
    "response_body": _encoded(response_body=pb.BodyResponse()),
    "request_trailers": _encoded(request_trailers=pb.TrailersResponse()),
    "response_trailers": _encoded(response_trailers=pb.TrailersResponse()),
}
"""For each kind of message, the response that changes nothing."""


def read(data: Buffer) -> pb.ProcessingRequest:
    """Raises InvalidRequest for what is no message of a gateway."""
    try:
        return pb.ProcessingRequest.FromString(bytes(data))
    except Exception as error:  # protobuf's DecodeError, and UnicodeDecodeError
        raise InvalidRequest(f"the message cannot be read: {error}") from None


def _common(
    endpoints: str, headers: Mapping[str, str], removed: Sequence[str] = (), body: bytes | None = None
) -> pb.CommonResponse:
    mutation = pb.HeaderMutation(remove_headers=removed)
    for name, value in {ENDPOINT: endpoints, **headers}.items():
        mutation.set_headers.append(
            pb.HeaderValueOption(header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE)
        )
    replaced = None if body is None else pb.BodyMutation(body=body)
    return pb.CommonResponse(header_mutation=mutation, body_mutation=replaced, clear_route_cache=True)


def chosen(
    endpoints: str,
    headers: Mapping[str, str],
    removed: Sequence[str] = (),
    *,
    with_body: bool = False,
    body: bytes | None = None,
) -> bytes:
    """Return the message that says where a request goes.

    `with_body`: it is the response to the body rather than to the headers, and `body` replaces that if it is not None.
    """
    common = _common(endpoints, headers, removed, body)
    message = pb.ProcessingResponse()
    if with_body:
        message.request_body.response.CopyFrom(common)
    else:
        message.request_headers.response.CopyFrom(common)
    message.dynamic_metadata.update({METADATA: {ENDPOINT: endpoints}})
    return message.SerializeToString()


@lru_cache(maxsize=_KEPT)
def chosen_often(endpoints: str, headers: tuple[tuple[str, str], ...], removed: tuple[str, ...] = ()) -> bytes:
    """Return the same in response to headers: one message for all requests that go to an endpoint."""
    return chosen(endpoints, dict(headers), removed)


@lru_cache(maxsize=_KEPT)
def response_headers(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Return the message that adds headers to a response."""
    mutation = pb.HeaderMutation()
    for name, value in headers:
        mutation.set_headers.append(
            pb.HeaderValueOption(header=pb.HeaderValue(key=name, raw_value=value.encode()), append_action=_OVERWRITE)
        )
    return _encoded(response_headers=pb.HeadersResponse(response=pb.CommonResponse(header_mutation=mutation)))


def body_chunks(parts: Sequence[bytes], *, is_last: bool, kind: str = "request_body") -> Iterator[bytes]:
    """Yield messages with a body, or a part of it, in chunks. `kind`: of which body.

    A body that has ended has a last message, be it empty.
    """
    pieces = [part[begin : begin + CHUNK_BYTES] for part in parts for begin in range(0, len(part), CHUNK_BYTES)]
    if is_last and not pieces:
        pieces = [b""]
    for number, piece in enumerate(pieces, 1):
        chunk = pb.StreamedBodyResponse(body=piece, end_of_stream=is_last and number == len(pieces))
        response = pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=chunk)))
        yield _encoded(**{kind: response})


def refused(status: int, headers: Sequence[Header], body: bytes) -> bytes:
    """Return the message that has the gateway respond in the place of an endpoint."""
    mutation = pb.HeaderMutation()
    for name, value in headers:
        if name not in _LEFT_TO_GATEWAY:
            mutation.set_headers.append(
                pb.HeaderValueOption(header=pb.HeaderValue(key=name.decode(), raw_value=value), append_action=_OVERWRITE)
            )
    response = pb.ImmediateResponse(
        status=pb.HttpStatus(code=status), headers=mutation, body=body, details="refused_by_endpoint_picker"
    )
    return _encoded(immediate_response=response)
