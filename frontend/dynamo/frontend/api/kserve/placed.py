"""Requests whose inputs or outputs are in shared memory, as requests that carry their tensors, and their responses.

What a request names is found and checked at once; it is read when the request has been admitted, and counted before that.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.tensors.check import SHARED_MEMORY
from dynamo.common.tensors.request import TensorRequest, build_response, parse_response
from dynamo.common.tensors.tensors import Buffer, element_count, typed_to_raw
from dynamo.frontend.api.kserve.regions import ClientRegion, Regions, too_small
from dynamo.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse


@dataclass(frozen=True, slots=True)
class RegionRange:
    """A place in a region."""

    region: ClientRegion
    offset: int
    size_bytes: int


Places = Mapping[str, RegionRange]
"""Where outputs go, by name."""


def is_placed(head: ModelInferRequest) -> bool:
    """Return whether any tensor of a request is in shared memory."""
    for tensor in head.inputs:
        if (parameters := tensor.parameters) and not SHARED_MEMORY.isdisjoint(parameters):
            return True
    outputs = head.outputs  # which most requests leave out
    return bool(outputs) and any(output.parameters and not SHARED_MEMORY.isdisjoint(output.parameters) for output in outputs)


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request whose tensors are in shared memory, or some of them. They are checked, and not read yet."""

    head: ModelInferRequest
    """Without the places."""
    inputs: Sequence[Buffer | RegionRange]
    places: Places
    """Where the outputs are written, by name."""

    @property
    def size_bytes(self) -> int:
        """The memory that `read` takes."""
        return sum(map(_size, self.inputs))

    def read(self) -> TensorRequest:
        """Return the request with its inputs. Raises InvalidRequest if the memory is gone."""
        request, rooms = TensorRequest.with_room(self.head, [*map(_size, self.inputs)])
        for source, room in zip(self.inputs, rooms, strict=True):
            if isinstance(source, RegionRange):
                source.region.read(source.offset, room)
            else:
                room[:] = source
        return request


def _size(source: Buffer | RegionRange) -> int:
    return source.size_bytes if isinstance(source, RegionRange) else len(source)


def find_places(request: TensorRequest, regions: Regions, owner: str = "") -> PlacedRequest:
    """Return where the inputs of a request are in shared memory of `owner`, and where its outputs go.

    Raises InvalidRequest, NotFound, PayloadTooLarge.
    """
    head = ModelInferRequest()
    head.CopyFrom(request.head)
    placed_bytes = 0
    inputs: list[Buffer | RegionRange] = []
    left = list(request.raw_inputs)
    for tensor in head.inputs:
        place = _place(tensor.name, tensor.parameters, regions, owner)
        if place is not None and tensor.HasField("contents"):
            raise InvalidRequest(
                f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' for model "
                f"'{head.model_name}'"
            )
        if place is not None:
            placed_bytes += place.size_bytes
            if placed_bytes > regions.max_request_bytes:
                limit = regions.max_request_bytes
                raise PayloadTooLarge(f"the inputs in shared memory have over {limit} bytes, which is the limit of a message")
            inputs.append(place)
        elif tensor.HasField("contents") and not left:
            what = f"input '{tensor.name}'"
            inputs.append(typed_to_raw(tensor.contents, tensor.datatype, element_count(tensor.shape, what), what))
            tensor.ClearField("contents")
        elif left:
            inputs.append(left.pop(0))
    places: dict[str, RegionRange] = {}
    for output in head.outputs:
        place = _place(output.name, output.parameters, regions, owner)
        if place is not None and "classification" in output.parameters:
            raise InvalidRequest("output can't set both 'shared_memory_region' and 'classification'")
        if place is not None:
            places[output.name] = place
    return PlacedRequest(head, inputs, places)


def place(response: Buffer, places: Places) -> Buffer:
    """Write outputs of a response to their places, and return the response without their data."""
    if not places:
        return response
    head, raws = parse_response(response)
    return b"".join(build_response(head, place_outputs(head, raws, places)))


def place_outputs(head: ModelInferResponse, raws: Sequence[Buffer], places: Places) -> list[Buffer]:
    """Write outputs to their places; return the data of the outputs, which is empty for these."""
    kept: list[Buffer] = []
    for output, raw in zip(head.outputs, raws, strict=True):
        target = places.get(output.name)
        if target is None:
            kept.append(raw)
            continue
        if len(raw) > target.size_bytes:
            raise too_small(output.name, target.size_bytes, len(raw))
        target.region.write(target.offset, raw)
        kept.append(b"")
    return kept


def _place(tensor: str, parameters: MutableMapping[str, InferParameter], regions: Regions, owner: str) -> RegionRange | None:
    """Remove the parameters about shared memory of a tensor, and return the place that they name; None if there are none."""
    if SHARED_MEMORY.isdisjoint(parameters):
        return None
    region = parameters.get("shared_memory_region")
    if region is not None and region.WhichOneof("parameter_choice") != "string_param":
        raise InvalidRequest(
            f"invalid value type for 'shared_memory_region' parameter for tensor '{tensor}', expected string_param."
        )
    for key in ("shared_memory_offset", "shared_memory_byte_size"):
        if key in parameters:
            if region is None:
                raise InvalidRequest(
                    f"'{key}' can not be specified without 'shared_memory_region' parameter for tensor '{tensor}'"
                )
            if parameters[key].WhichOneof("parameter_choice") != "int64_param":
                raise InvalidRequest(f"invalid value type for '{key}' parameter for tensor '{tensor}', expected int64_param.")
    if region is None or "shared_memory_byte_size" not in parameters:
        raise InvalidRequest(
            f"'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor '{tensor}'"
        )
    offset = parameters["shared_memory_offset"].int64_param if "shared_memory_offset" in parameters else 0
    size = parameters["shared_memory_byte_size"].int64_param
    place = RegionRange(regions.find(region.string_param, offset, size, owner), offset, size)
    for key in SHARED_MEMORY:
        parameters.pop(key, None)
    return place
