"""Shared memory: regions that are registered, refused, and used for inputs and outputs.

The segments exist while the cases run; both servers see the same ones, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from dynamo.protos import inference_pb2 as pb
from tests.differential.cases import Case
from tests.differential.cases.rest_infer import tensor
from tests.differential.cases.tensors import raw, request, set_parameter
from tests.differential.server_client import Response, ServerClient

KEY = "/dynamo_differential"
SIZE = 4096
_VALUES = raw("FP32", (1.5, 2.5, 3.5))


class Segment:
    """The segment that clients and servers share, during the cases of this family."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None

    def open(self, client: ServerClient) -> Response:
        self.close(client)
        self._memory = SharedMemory(KEY[1:], create=True, size=SIZE)
        return Response("OK")

    def close(self, client: ServerClient) -> Response:
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()
            self._memory = None
        return Response("OK")

    def write(self, data: bytes, offset: int = 0) -> None:
        buffer = self._buffer()
        buffer[:SIZE] = bytes(SIZE)
        buffer[offset : offset + len(data)] = data

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._buffer()[offset : offset + size])

    def _buffer(self) -> memoryview:
        assert self._memory is not None and self._memory.buf is not None
        return self._memory.buf


def cases() -> Iterator[Case]:
    segment = Segment()
    family = "shared memory"
    yield Case(family, "the segment is created", segment.open)
    for kind in ("System", "Cuda"):
        for name in ("", "none"):
            for word in ("Status", "Unregister"):
                message = getattr(pb, f"{kind}SharedMemory{word}Request")(name=name)
                yield Case(family, f"gRPC {kind} {word} of {name!r}", partial(_call, f"{kind}SharedMemory{word}", message))
        path = f"/v2/{kind.lower()}sharedmemory"
        for word, method in product(
            ("/status", "/unregister", "/region/none/status", "/region/none/unregister"), ("GET", "POST")
        ):
            yield Case(family, f"{method} {path}{word}", partial(_rest, method, path + word, b""))
    for what, fields in _registrations():
        for protocol in ("gRPC", "REST"):
            yield Case(family, f"{protocol} registers {what}", partial(_register, protocol, fields))
            yield Case(family, f"{protocol} status after {what}", partial(_call, _STATUS, pb.SystemSharedMemoryStatusRequest()))
            yield Case(
                family,
                f"{protocol} unregisters all after {what}",
                partial(_call, _UNREGISTER, pb.SystemSharedMemoryUnregisterRequest()),
            )
    region = {"name": "r", "key": KEY, "byte_size": SIZE}
    yield Case(family, "registered once", partial(_register, "gRPC", region))
    yield Case(family, "registered twice", partial(_register, "gRPC", region))
    yield Case(family, "registered twice, REST", partial(_register, "REST", region))
    yield Case(
        family,
        "a second name for the same memory",
        partial(_register, "gRPC", region | {"name": "s", "byte_size": 64}),
    )
    for name in ("r", "s", "none"):
        yield Case(family, f"gRPC status of {name}", partial(_call, _STATUS, pb.SystemSharedMemoryStatusRequest(name=name)))
        yield Case(family, f"REST status of {name}", partial(_rest, "GET", f"/v2/systemsharedmemory/region/{name}/status", b""))
    yield Case(family, "REST status", partial(_rest, "GET", "/v2/systemsharedmemory/status", b""))
    for what, given, wanted in _uses():
        yield Case(family, f"gRPC {what}", partial(_infer, segment, given, wanted))
        yield Case(family, f"REST {what}", partial(_infer_rest, segment, given, wanted))
    yield Case(family, "unregistered", partial(_rest, "POST", "/v2/systemsharedmemory/region/s/unregister", b""))
    yield Case(family, "REST status at last", partial(_rest, "GET", "/v2/systemsharedmemory/status", b""))
    yield Case(family, "all unregistered", partial(_rest, "POST", "/v2/systemsharedmemory/unregister", b""))
    yield Case(family, "REST status of nothing", partial(_rest, "GET", "/v2/systemsharedmemory/status", b""))
    yield Case(family, "gRPC after all are unregistered", partial(_infer, segment, {"region": "r", "size": 12}, {}))
    for body in (
        b"",
        b"{}",
        b"{",
        b"[]",
        {"key": 1},
        {"key": KEY},
        {"key": KEY, "byte_size": "x"},
        {"byte_size": 64},
        {"key": KEY, "byte_size": -1},
    ):
        path = "/v2/systemsharedmemory/region/r/register"
        yield Case(family, f"POST {path} {body!r}", partial(_rest, "POST", path, body))
        yield Case(family, f"unregisters after {body!r}", partial(_call, _UNREGISTER, pb.SystemSharedMemoryUnregisterRequest()))
    for path in (
        "/v2/systemsharedmemory/register",
        "/v2/cudasharedmemory/region/r/register",
        "/v2/systemsharedmemory/region/r/x",
    ):
        for method in ("GET", "POST"):
            yield Case(family, f"{method} {path}", partial(_rest, method, path, region))
    cuda = pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=b"x" * 64, device_id=0, byte_size=64)
    yield Case(family, "a CUDA region", partial(_call, "CudaSharedMemoryRegister", cuda))
    yield Case(family, "the segment is removed", segment.close)


_STATUS = "SystemSharedMemoryStatus"
_UNREGISTER = "SystemSharedMemoryUnregister"


def _registrations() -> Iterator[tuple[str, dict[str, Any]]]:
    region = {"name": "r", "key": KEY, "byte_size": SIZE}
    yield "the whole segment", region
    yield "a part", region | {"offset": 128, "byte_size": 256}
    for size in (0, SIZE + 1, 2**40, 2**63, 2**64 - 1):
        yield f"{size} bytes", region | {"byte_size": size}
    for offset in (SIZE, SIZE - 1, SIZE + 1, 1, 2**40, 2**64 - 1):
        yield f"64 bytes at {offset}", region | {"byte_size": 64, "offset": offset}
    for key in (
        "",
        "/none",
        "none",
        KEY[1:],
        "/../etc/passwd",
        "/etc/passwd",
        "/a/b",
        "/",
        "//" + KEY[1:],
        "/" + "x" * 300,
        "/dev/shm" + KEY,
    ):
        yield f"the key {key[:20]!r}", region | {"key": key}
    for name in ("", "a b", "a/b", "é", "x" * 300, "triton_python_backend_shm_region_1"):
        yield f"the name {name[:40]!r}", region | {"name": name}


def _uses() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    good = {"region": "r", "size": 12}
    yield "input in memory", good, {}
    yield "input at an offset", good | {"offset": 256}, {}
    yield "output in memory", {}, good | {"offset": 512}
    yield "both in memory", good, good | {"offset": 512}
    yield "both at the same place", good, good
    yield "output in a larger place", good, {"region": "r", "offset": 512, "size": 64}
    yield "output in a smaller place", good, {"region": "r", "offset": 512, "size": 8}
    yield "input of too few bytes", {"region": "r", "size": 8}, {}
    yield "input of too many bytes", {"region": "r", "size": 16}, {}
    yield "input beyond the end", {"region": "r", "offset": SIZE - 4, "size": 12}, {}
    yield "input far beyond the end", {"region": "r", "offset": 2**40, "size": 12}, {}
    yield "input of a huge size", {"region": "r", "size": 2**62}, {}
    yield "output beyond the end", {}, {"region": "r", "offset": SIZE - 4, "size": 12}
    yield "input in an unknown region", {"region": "none", "size": 12}, {}
    yield "output in an unknown region", {}, {"region": "none", "size": 12}
    yield "input without a size", {"region": "r"}, {}
    yield "output without a size", {}, {"region": "r"}
    yield "input of no bytes", {"region": "r", "size": 0}, {}
    yield "input in a region of part of the segment", {"region": "s", "size": 12}, {}
    yield "input beyond a region of part of the segment", {"region": "s", "offset": 60, "size": 12}, {}
    yield "input with a wrong region", {"region": 5, "size": 12}, {}
    yield "input with a wrong size", {"region": "r", "size": "12"}, {}
    yield "input with a wrong offset", {"region": "r", "size": 12, "offset": "x"}, {}
    yield "input with a negative offset", {"region": "r", "size": 12, "offset": -1}, {}
    yield "input with a negative size", {"region": "r", "size": -12}, {}


def _call(method: str, message: Any, client: ServerClient) -> Response:
    return client.call(method, message)


def _rest(method: str, path: str, body: object, client: ServerClient) -> Response:
    return client.rest(method, path, body)


def _register(kind: str, fields: dict[str, Any], client: ServerClient) -> Response:
    if kind == "gRPC":
        return client.call("SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterRequest(**fields))
    body = {key: value for key, value in fields.items() if key != "name"}
    name = fields["name"].replace(" ", "%20").replace("/", "%2F").replace("é", "%C3%A9")
    return client.rest("POST", f"/v2/systemsharedmemory/region/{name}/register", body)


def _parameters(place: dict[str, Any]) -> dict[str, Any]:
    names = {"region": "shared_memory_region", "offset": "shared_memory_offset", "size": "shared_memory_byte_size"}
    return {names[key]: value for key, value in place.items()}


def _infer(segment: Segment, given: dict[str, Any], wanted: dict[str, Any], client: ServerClient) -> Response:
    _put(segment, given)
    message = request("echo_fp32", ("INPUT0", "FP32", (3,)))
    for key, value in _parameters(given).items():
        set_parameter(message.inputs[0].parameters[key], value)
    if not given:
        message.raw_input_contents.append(_VALUES)
    output = message.outputs.add(name="OUTPUT0")
    for key, value in _parameters(wanted).items():
        set_parameter(output.parameters[key], value)
    return _with_memory(segment, wanted, client.call("ModelInfer", message))


def _infer_rest(segment: Segment, given: dict[str, Any], wanted: dict[str, Any], client: ServerClient) -> Response:
    _put(segment, given)
    own = tensor("INPUT0", "FP32", [3], None if given else [1.5, 2.5, 3.5], parameters=_parameters(given))
    body = {"inputs": [own], "outputs": [{"name": "OUTPUT0", "parameters": _parameters(wanted)}]}
    return _with_memory(segment, wanted, client.rest("POST", "/v2/models/echo_fp32/infer", body))


def _put(segment: Segment, given: dict[str, Any]) -> None:
    offset = given.get("offset", 0)
    is_inside = isinstance(offset, int) and 0 <= offset <= SIZE - len(_VALUES)
    segment.write(_VALUES, offset if is_inside else 0)


def _with_memory(segment: Segment, wanted: dict[str, Any], response: Response) -> Response:
    """Return the response with what the output's place in the memory holds now."""
    offset = wanted.get("offset", 0)
    memory = segment.read(offset, 16).hex() if wanted and offset < SIZE else ""
    return Response(response.status, response.words, {"response": response.body, "memory": memory}, response.headers)
