from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo.common.errors import AlreadyExists, EngineError, Forbidden, InvalidRequest, NotFound, PayloadTooLarge
from dynamo.common.tensors.request import TensorRequest, parse_response
from dynamo.frontend.api.kserve.placed import RegionRange, find_places, is_placed, place
from dynamo.frontend.api.kserve.regions import ClientRegion, Regions
from dynamo.frontend.api.kserve.registrations import SharedRegistrations
from dynamo.frontend.api.kserve.server import check_is_local
from dynamo.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse

SIZE = 4096


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """The one object in a folder that stands for /dev/shm."""
    file = tmp_path / "memory"
    file.write_bytes(bytes(range(256)) * (SIZE // 256))
    return file


@pytest.fixture
def regions(memory: Path) -> Iterator[Regions]:
    regions = Regions(str(memory.parent))
    yield regions
    regions.close()


def read(region: ClientRegion, offset: int, size: int) -> bytes:
    room = bytearray(size)
    region.read(offset, memoryview(room))
    return bytes(room)


def test_a_region_is_a_part_of_an_object(regions: Regions) -> None:
    regions.register("r", "/memory", 100, 50)
    region = regions.find("r", 10, 40)
    assert read(region, 10, 3) == bytes([110, 111, 112])
    region.write(10, b"xyz")
    assert read(region, 9, 5) == bytes([109]) + b"xyz" + bytes([113])
    assert [(r.name, r.key, r.offset, r.size_bytes) for r in regions.status("")] == [("r", "/memory", 100, 50)]


@pytest.mark.parametrize(("offset", "size"), [(0, SIZE + 1), (SIZE, 1), (SIZE - 1, 2), (0, 0), (2**64 - 1, 1), (0, 2**64 - 1)])
def test_a_region_beyond_its_object_is_refused(regions: Regions, offset: int, size: int) -> None:
    with pytest.raises(InvalidRequest, match="failed to register shared memory region 'r': invalid args"):
        regions.register("r", "/memory", offset, size)
    assert not regions.status("")


@pytest.mark.parametrize("key", ["", "/", "none", "/..", "/../memory", "/a/memory", "/etc/passwd", "a\0b", "/" + "x" * 300])
def test_a_key_is_a_name_and_no_path(regions: Regions, key: str) -> None:
    with pytest.raises(EngineError, match="Unable to open shared memory region"):
        regions.register("r", key, 0, 1)


def test_a_link_out_of_the_folder_is_not_followed(regions: Regions, memory: Path) -> None:
    (memory.parent / "link").symlink_to("/etc/passwd")
    with pytest.raises(EngineError, match="Unable to open"):
        regions.register("r", "link", 0, 1)


def test_a_pipe_is_no_memory_and_does_not_block(regions: Regions, memory: Path) -> None:
    os.mkfifo(memory.parent / "pipe")
    with pytest.raises(InvalidRequest, match="invalid args"):
        regions.register("r", "pipe", 0, 1)


@pytest.mark.parametrize("key", ["dynamo-arena-1-2", "/triton_python_backend_shm_region_1"])
def test_memory_of_the_servers_own_processes_is_reserved(regions: Regions, memory: Path, key: str) -> None:
    (memory.parent / key.lstrip("/")).write_bytes(b"secret")
    with pytest.raises(InvalidRequest, match="is reserved"):
        regions.register("r", key, 0, 6)


def test_a_name_is_registered_once_and_unregistered_any_number_of_times(regions: Regions) -> None:
    regions.register("r", "memory", 0, 10)
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        regions.register("r", "memory", 0, 10)
    regions.register("s", "memory", 0, 10)
    regions.unregister("r")
    regions.unregister("r")
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'r'"):
        regions.status("r")
    assert [region.name for region in regions.status("")] == ["s"]
    regions.unregister("")
    assert not regions.status("")


@pytest.mark.parametrize(
    ("offset", "size", "sentence"),
    [
        (-1, 1, "Invalid offset for shared memory region: 'r'"),
        (10, 1, "Invalid offset for shared memory region: 'r'"),
        (0, 11, "Invalid offset [+] byte size for shared memory region: 'r'"),
        (9, 2, "Invalid offset [+] byte size"),
        (0, 0, "Invalid offset [+] byte size"),
        (0, -5, "Invalid offset [+] byte size"),
        (0, 2**63 - 1, "Invalid offset [+] byte size"),
    ],
)
def test_a_place_is_inside_its_region(regions: Regions, offset: int, size: int, sentence: str) -> None:
    regions.register("r", "memory", 0, 10)
    with pytest.raises(InvalidRequest, match=sentence):
        regions.find("r", offset, size)


def test_memory_that_was_shrunk_is_an_error_and_no_signal(regions: Regions, memory: Path) -> None:
    regions.register("r", "memory", 0, SIZE)
    region = regions.find("r", 0, SIZE)
    os.truncate(memory, 10)
    for use in (lambda: read(region, 0, 20), lambda: region.write(0, bytes(20))):
        with pytest.raises(InvalidRequest, match="smaller than when it was registered"):
            use()
    assert memory.stat().st_size == 10


# Several processes


@pytest.fixture
def both(memory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Regions, Regions]]:
    """The regions of two processes that serve the same clients."""
    folder = tmp_path_factory.mktemp("registrations") / "regions"
    one, two = (Regions(str(memory.parent), SharedRegistrations(folder)) for _ in range(2))
    yield one, two
    one.close()
    two.close()


def test_what_one_process_registers_another_reads_and_unregisters(both: tuple[Regions, Regions]) -> None:
    one, two = both
    one.register("r", "memory", 100, 50)
    assert read(two.find("r", 10, 40), 10, 3) == bytes([110, 111, 112])
    with pytest.raises(AlreadyExists):
        two.register("r", "memory", 0, 10)
    two.unregister("r")
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        one.find("r", 0, 1)
    one.register("r", "memory", 0, 10)
    assert read(two.find("r", 0, 1), 0, 1) == b"\0"
    assert [region.offset for region in two.status("")] == [0]


def test_memory_that_took_the_place_of_what_was_registered_is_not_read(both: tuple[Regions, Regions], memory: Path) -> None:
    one, two = both
    one.register("r", "memory", 0, 10)
    memory.rename(memory.with_name("former"))
    memory.write_bytes(b"of another user")
    assert read(one.find("r", 0, 2), 0, 2) == bytes([0, 1])
    with pytest.raises(InvalidRequest, match="was removed after it was registered"):
        two.find("r", 0, 2)


def test_memory_that_another_process_unregistered_is_closed(both: tuple[Regions, Regions], memory: Path) -> None:
    one, two = both
    one.register("r", "memory", 0, 10)
    region = two.find("r", 0, 1)
    one.unregister("")
    two.close_stale()
    assert read(region, 0, 1) == b"\0"  # by a request that has it
    descriptor = region.descriptor
    del region
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


# Who may register what


def test_only_keys_of_the_patterns_may_be_registered(memory: Path) -> None:
    regions = Regions(str(memory.parent), keys=("/clients-*", "other"))
    with pytest.raises(Forbidden, match="clients may not name the key '/memory'"):
        regions.register("r", "/memory", 0, 1)
    memory.rename(memory.with_name("clients-1"))
    regions.register("r", "/clients-1", 0, 1)
    regions.close()


@pytest.mark.parametrize(
    "peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "ipv4:127.0.0.9:41", "ipv6:[::1]:41", "ipv6:%5B::1%5D:41", "unix:"]
)
def test_clients_on_this_host_may_register(peer: str) -> None:
    check_is_local(peer)


@pytest.mark.parametrize(
    "peer", ["10.0.0.7", "2001:db8::1", "ipv4:10.0.0.7:41", "ipv6:[2001:db8::1]:41", "unknown", "", "localhost"]
)
def test_clients_elsewhere_may_not_register(peer: str) -> None:
    with pytest.raises(Forbidden, match="--client-shared-memory-remote"):
        check_is_local(peer)


# Requests


def in_memory(name: str, size: int, offset: int = 0) -> dict[str, InferParameter]:
    return {
        "shared_memory_region": InferParameter(string_param=name),
        "shared_memory_byte_size": InferParameter(int64_param=size),
        "shared_memory_offset": InferParameter(int64_param=offset),
    }


def request(*, raw: bool) -> TensorRequest:
    """Three inputs; the second is in shared memory."""
    message = ModelInferRequest(model_name="m")
    for name in ("A", "B", "C"):
        tensor = message.inputs.add(name=name, datatype="UINT8", shape=[2])
        if name == "B":
            for key, value in in_memory("r", 2, 65).items():
                tensor.parameters[key].CopyFrom(value)
        elif raw:
            message.raw_input_contents.append(name.encode() * 2)
        else:
            tensor.contents.uint_contents.extend([ord(name)] * 2)
    return TensorRequest.parse(message.SerializeToString())


@pytest.mark.parametrize("raw", [True, False])
def test_inputs_in_memory_take_their_place_among_the_others(regions: Regions, raw: bool) -> None:
    regions.register("r", "memory", 0, SIZE)
    made = request(raw=raw)
    assert is_placed(made.head)
    placed = find_places(made, regions)
    assert placed.size_bytes == 6
    fetched = placed.read()
    assert not is_placed(fetched.head) and not placed.places
    assert [bytes(data) for data in fetched.raw_inputs] == [b"AA", b"AB", b"CC"]
    again = TensorRequest.parse(fetched.raw)
    assert [bytes(data) for data in again.raw_inputs] == [b"AA", b"AB", b"CC"]
    assert not any(tensor.HasField("contents") for tensor in again.head.inputs)


def test_inputs_in_memory_are_bounded_together(memory: Path) -> None:
    regions = Regions(str(memory.parent), max_request_bytes=9)
    regions.register("r", "memory", 0, SIZE)
    message = ModelInferRequest(model_name="m")
    for name in ("A", "B"):
        tensor = message.inputs.add(name=name, datatype="UINT8", shape=[5])
        for key, value in in_memory("r", 5).items():
            tensor.parameters[key].CopyFrom(value)
    with pytest.raises(PayloadTooLarge, match="over 9 bytes"):
        find_places(TensorRequest.build(message), regions)
    regions.close()


def test_outputs_are_written_to_their_places(regions: Regions, memory: Path) -> None:
    regions.register("r", "memory", 0, SIZE)
    head = ModelInferRequest()
    for key, value in in_memory("r", 4, 8).items():
        head.outputs.add(name="Y") if not head.outputs else None
        head.outputs[0].parameters[key].CopyFrom(value)
    places = find_places(TensorRequest.build(head), regions).places
    response = ModelInferResponse(model_name="m", raw_output_contents=[b"ab", b"rest"])
    for name in ("Y", "Z"):
        response.outputs.add(name=name, datatype="UINT8", shape=[2])
    _, raws = parse_response(place(response.SerializeToString(), places))
    assert [bytes(raw) for raw in raws] == [b"", b"rest"]
    assert memory.read_bytes()[8:12] == b"ab" + bytes([10, 11])


def test_an_output_that_does_not_fit_is_an_error(regions: Regions) -> None:
    regions.register("r", "memory", 0, SIZE)
    response = ModelInferResponse(raw_output_contents=[b"abc"])
    response.outputs.add(name="Y", datatype="UINT8", shape=[3])
    places = {"Y": RegionRange(regions.find("r", 0, 2), 0, 2)}
    with pytest.raises(EngineError, match=r"for output 'Y' \(2 bytes\) should be at least 3 bytes to hold the results"):
        place(response.SerializeToString(), places)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        (
            {"shared_memory_region": InferParameter(int64_param=1)},
            "'shared_memory_region' parameter for tensor 'Y', expected string",
        ),
        ({"shared_memory_region": InferParameter(string_param="r")}, "'shared_memory_byte_size' must be specified along with"),
        ({"shared_memory_offset": InferParameter(int64_param=1)}, "'shared_memory_offset' can not be specified without"),
        (in_memory("r", 1) | {"shared_memory_offset": InferParameter(string_param="0")}, "expected int64_param"),
        (in_memory("r", 1) | {"classification": InferParameter(int64_param=1)}, "can't set both 'shared_memory_region' and"),
    ],
)
def test_a_malformed_place_is_explained(regions: Regions, parameters: dict[str, InferParameter], sentence: str) -> None:
    regions.register("r", "memory", 0, SIZE)
    head = ModelInferRequest()
    output = head.outputs.add(name="Y")
    for key, value in parameters.items():
        output.parameters[key].CopyFrom(value)
    with pytest.raises(InvalidRequest, match=sentence):
        find_places(TensorRequest.build(head), regions)
