"""Requests to one server over gRPC and HTTP, and what came back in a form that can be compared."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from dynamo.protos import inference_pb2 as pb
from tests.support.waiting import WAIT_S

_SERVICE = "/inference.GRPCInferenceService/"
_BROKEN = "broken connection"
_BROKEN_TEXTS = ("failed to connect", "Socket closed", "Connection reset", "Broken pipe", "recvmsg")
_JSON_LENGTH = "inference-header-content-length"


@dataclass(frozen=True, slots=True)
class Response:
    """The outcome of one request."""

    status: str
    """The gRPC status, or the HTTP status code."""
    words: str = ""
    """The text of the error, if it is one."""
    body: Any = None
    """Everything else, made of JSON's types."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The HTTP headers that clients act on."""

    @property
    def is_broken(self) -> bool:
        """Return whether the connection broke."""
        return self.status == _BROKEN or (self.status == "UNAVAILABLE" and any(text in self.words for text in _BROKEN_TEXTS))


class ServerClient:
    """A client of one server: gRPC, HTTP and its metrics."""

    def __init__(self, grpc_port: int, http_port: int, metrics_port: int) -> None:
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{grpc_port}",
            [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        self._http_port = http_port
        self._metrics_port = metrics_port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def call(self, method: str, request: Message | bytes, metadata: Mapping[str, str] | None = None) -> Response:
        """Make a gRPC call with one request."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(f"{_SERVICE}{method}", None, None)
        try:
            received = call(data, timeout=WAIT_S, metadata=tuple((metadata or {}).items()))
        except grpc.RpcError as error:
            return Response(error.code().name, error.details() or "")
        return Response("OK", body=to_json(getattr(pb, f"{method}Response").FromString(received)))

    def interleaved(self, requests: Iterable[pb.ModelInferRequest]) -> Response:
        """Send all requests on one stream; return all responses, by the id of their requests: they interleave as it happens."""
        response = self.stream(requests)
        return replace(response, body=sorted(response.body, key=lambda entry: str(entry.get("infer_response", {}).get("id"))))

    def stream(self, requests: Iterable[pb.ModelInferRequest], metadata: Mapping[str, str] | None = None) -> Response:
        """Send all requests on one stream; return all responses."""
        call: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            f"{_SERVICE}ModelStreamInfer", None, None
        )
        responses: list[Any] = []
        try:
            received = call(
                iter([request.SerializeToString() for request in requests]),
                timeout=WAIT_S,
                metadata=tuple((metadata or {}).items()),
            )
            responses.extend(to_json(pb.ModelStreamInferResponse.FromString(message)) for message in received)
        except grpc.RpcError as error:
            return Response(error.code().name, error.details() or "", responses)
        return Response("OK", body=responses)

    def rest(
        self, method: str, path: str, body: bytes | str | object = b"", headers: Mapping[str, str] | None = None
    ) -> Response:
        """Make an HTTP request. A body that is neither bytes nor text is sent as JSON."""
        data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=WAIT_S)
        try:
            connection.request(method, path, data or None, dict(headers or {}))
            response = connection.getresponse()
            return _from_http(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        except (OSError, http.client.HTTPException) as error:
            return Response(_BROKEN, type(error).__name__)
        finally:
            connection.close()

    def metrics(self) -> str:
        """Return the text of the metrics."""
        connection = http.client.HTTPConnection("127.0.0.1", self._metrics_port, timeout=WAIT_S)
        try:
            connection.request("GET", "/metrics")
            return connection.getresponse().read().decode()
        finally:
            connection.close()


def to_json(message: Message) -> Any:
    """Return a message with the fields that are present, numbers as numbers, bytes in hexadecimal."""
    return _plain(message)


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        fields: dict[str, Any] = {}
        for descriptor, content in value.ListFields():
            if descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry:
                fields[descriptor.name] = {str(key): _plain(content[key]) for key in content}
            elif _is_repeated(descriptor):
                fields[descriptor.name] = [_plain(item) for item in content]
            else:
                fields[descriptor.name] = _plain(content)
        return fields
    if isinstance(value, bytes):
        return value.hex()
    return value


def _is_repeated(descriptor: Any) -> bool:
    return bool(descriptor.is_repeated)


def _from_http(status: int, headers: Mapping[str, str], data: bytes) -> Response:
    kept = {name: headers[name] for name in ("content-type", "content-encoding") if name in headers}
    length = headers.get(_JSON_LENGTH)
    text, binary = (data, b"") if length is None else (data[: int(length)], data[int(length) :])
    try:
        body = json.loads(text) if text else None
    except ValueError:
        body = text.decode(errors="backslashreplace")
    if isinstance(body, dict) and set(body) == {"error"}:
        return Response(str(status), str(body["error"]), headers=kept)
    if status >= 400 and isinstance(body, str):
        return Response(str(status), body, headers=kept)
    if length is not None:
        body = {"json": body, "binary": binary.hex()}
    return Response(str(status), body=body, headers=kept)
