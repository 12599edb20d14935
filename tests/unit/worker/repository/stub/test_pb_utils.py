"""`triton_python_backend_utils` as models use it, without a worker."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from dynamo.worker.repository.stub import pb_utils
from dynamo.worker.repository.stub.pb_utils import InferenceRequest, InferenceResponse, Tensor, TritonError, TritonModelException

ONE = np.array([1.0], np.float32)


class Foreign:
    """A tensor of another library."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self._array, self._device = array, device

    def __dlpack__(self, *, stream: object = None) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=np.int16).reshape(2, 3), np.array([True, False]), np.zeros((0, 3), np.float16), np.float64(3) * 1],
)
@pytest.mark.parametrize("form", ["capsule", "tensor", "foreign", "array"])
def test_tensors_of_other_libraries_come_by_dlpack(array: Any, form: str) -> None:
    array = np.asarray(array)
    forms = {"capsule": array.__dlpack__(), "tensor": Tensor("t", array), "foreign": Foreign(array), "array": array}
    tensor = Tensor.from_dlpack("x", forms[form])
    assert tensor.name() == "x" and tensor.as_numpy().dtype == array.dtype
    np.testing.assert_array_equal(tensor.as_numpy(), array)


def test_dlpack_does_not_copy() -> None:
    array = np.arange(4)
    tensor = Tensor.from_dlpack("x", array.__dlpack__())
    array[1] = 7
    assert tensor.as_numpy().tolist() == [0, 7, 2, 3]


def test_bf16_goes_and_comes_by_dlpack_and_is_float32_in_numpy() -> None:
    values = np.array([[1.0, -2.5, np.inf], [np.nan, 3.0e38, 1.00390625]], np.float32)
    tensor = Tensor.received("x", values, is_bf16=True)
    capsule = tensor.to_dlpack()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    code, bits = (ctypes.c_uint8 * 2).from_address(pointer(capsule, b"dltensor") + 20)
    assert (code, bits) == (4, 16), "the type is bfloat16"
    back = Tensor.from_dlpack("y", capsule)
    assert back.as_numpy().dtype == np.float32 and back.triton_dtype() == 14
    np.testing.assert_array_equal(back.as_numpy(), [[1.0, -2.5, np.inf], [np.nan, back.as_numpy()[1, 1], 1.0]])
    assert back.as_numpy()[1, 1] == pytest.approx(3.0e38, rel=0.01)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("text", "Tensor must be a DLPack capsule or have `__dlpack__` and `__dlpack_device__` attributes"),
        (None, "NoneType is neither"),
        (Foreign(ONE, device=(2, 0)), "not in the CPU's memory"),
        (np.array([1j]).__dlpack__(), "NumPy dtype is not supported"),
    ],
)
def test_what_is_no_tensor_is_refused_by_from_dlpack(source: object, reason: str) -> None:
    with pytest.raises(TritonModelException, match=reason):
        Tensor.from_dlpack("x", source)


@pytest.mark.parametrize(("name", "error"), [("", TritonModelException), (1, TypeError)])
def test_from_dlpack_needs_a_name(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Tensor.from_dlpack(name, ONE)


def test_strings_have_no_dlpack() -> None:
    with pytest.raises(TritonModelException, match="DLPack does not have support for string tensors"):
        Tensor("x", np.array([b"a"], object)).to_dlpack()


@pytest.mark.parametrize(
    ("make", "error", "about"),
    [
        (lambda: Tensor("x", [1, 2]), TypeError, "the value of tensor 'x' must be ndarray, not list"),  # type: ignore[arg-type]
        (lambda: Tensor(1, ONE), TypeError, "the name of a tensor must be str"),  # type: ignore[arg-type]
        (lambda: Tensor("", ONE), TritonModelException, "cannot be an empty string"),
        (lambda: Tensor("x", np.array(["a"])), TritonModelException, "NumPy dtype is not supported"),
        (lambda: Tensor("x", np.array([1j])), TritonModelException, "NumPy dtype is not supported"),
        (lambda: InferenceResponse([ONE]), TypeError, "must be Tensor, not ndarray"),  # type: ignore[list-item]
        (lambda: InferenceResponse(Tensor("x", ONE)), TypeError, "must be list or tuple"),  # type: ignore[arg-type]
        (lambda: InferenceResponse([], error="no"), TypeError, "must be TritonError"),  # type: ignore[arg-type]
        (lambda: TritonError("no", 3), TypeError, "must be __ErrorCode, not int"),  # type: ignore[arg-type]
        (lambda: TritonError(5), TypeError, "must be str"),  # type: ignore[arg-type]
        (lambda: InferenceRequest(inputs=[]), TypeError, "the model_name of a request must be str"),
        (lambda: InferenceRequest(model_name="m"), TypeError, "the requested_output_names"),
        (lambda: request(parameters={"a": [1]}), TritonModelException, "bool/int/str, found type <class 'list'>"),
        (lambda: request(correlation_id=1.5), TritonModelException, "Correlation ID must be integer or string"),
        (lambda: request(correlation_id=-1), TritonModelException, "Correlation ID must not be negative, got -1"),
        (lambda: request(parameters={1: 1}), TritonModelException, "parameters keys to have type str, found type <class 'int'>"),
        (lambda: request(parameters="{}"), TritonModelException, "Expect dict, got <class 'str'>"),
        (
            lambda: request(parameters={"a": 2**63}),
            TritonModelException,
            "from -2[*][*]63 to 2[*][*]63 - 1, found one of 64 bits",
        ),
        (lambda: InferenceResponse([], parameters={"a": 2**63}), TritonModelException, "found one of 64 bits"),
        (lambda: InferenceResponse([], parameters={"a": -(10**5000)}), TritonModelException, "found one of 16610 bits"),
        (lambda: request(inputs=None), TypeError, "the tensors must be list or tuple, not NoneType"),
        (lambda: request(request_id=5), TypeError, "the request_id of a request must be str"),
        (lambda: request(model_version="1"), TypeError, "the model_version of a request must be an integer, not str"),
        (lambda: request(flags="start"), TypeError, "the flags of a request must be an integer, not str"),
        (lambda: request(timeout="1"), TypeError, "the timeout of a request must be an integer, not str"),
        (lambda: request(trace=1), TypeError, "the trace of a request must be InferenceTrace"),
        (
            lambda: InferenceRequest(model_name="m", requested_output_names=[1]),  # type: ignore[list-item]
            TypeError,
            "each of the requested_output_names must be str",
        ),
        (lambda: request(inputs=[ONE]), TypeError, "must be Tensor"),
        (lambda: pb_utils.PreferredMemory(1), TypeError, "must be MemoryType"),  # type: ignore[arg-type]
        (lambda: pb_utils.Logger.log("a", 1), TypeError, "must be LogLevel"),  # type: ignore[arg-type]
        (lambda: pb_utils.Logger.log_info(5), TypeError, "a log message must be str"),  # type: ignore[arg-type]
    ],
)
def test_constructors_refuse_arguments_as_triton_s_do(make: Any, error: type[Exception], about: str) -> None:
    with pytest.raises(error, match=about):
        make()


def request(**more: Any) -> InferenceRequest:
    return InferenceRequest(**{"model_name": "m", "requested_output_names": ["y"], "inputs": [], **more})


def test_requests_to_other_models_keep_what_they_are_made_of() -> None:
    made = InferenceRequest(
        model_name="m",
        requested_output_names=["y"],
        request_id="id",
        correlation_id="abc",
        inputs=[Tensor("x", ONE)],
        flags=3,
        timeout=7,
        parameters={"a": True},
    )
    made.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL)
    assert (made.request_id(), made.correlation_id(), made.flags(), made.timeout()) == ("id", "abc", 3, 7)
    assert made.requested_output_names() == {"y"} and made.parameters() == '{"a": true}'
    assert isinstance(made.trace(), pb_utils.InferenceTrace) and not made.is_cancelled()
    assert request(flags=np.int8(3), timeout=np.int64(7)).timeout() == 7
    request(preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0), trace=made.trace())


def test_types_and_enumerations_show_as_those_of_triton_s_module() -> None:
    assert str(TritonModelException) == "<class 'c_python_backend_utils.TritonModelException'>"
    assert repr(TritonError.NOT_FOUND) == "<__ErrorCode.NOT_FOUND: 2>"
    assert (str(pb_utils.Logger.INFO), str(pb_utils.TRITONSERVER_MEMORY_CPU)) == (
        "LogLevel.INFO",
        "MemoryType.TRITONSERVER_MEMORY_CPU",
    )


def test_codes_and_levels_are_enumerations_as_there() -> None:
    assert TritonError("no").code() is TritonError.INTERNAL
    assert int(TritonError("no", TritonError.ALREADY_EXISTS).code()) == 6
    assert pb_utils.Logger.LogLevel.VERBOSE is pb_utils.Logger.VERBOSE
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE == 2


def test_byte_tensors_are_serialized_and_deserialized_as_bytes() -> None:
    data = pb_utils.serialize_byte_tensor(np.array([b"ab", "c", b""], object))
    assert data == b"\x02\0\0\0ab\x01\0\0\0c\0\0\0\0"
    assert pb_utils.deserialize_bytes_tensor(data).tolist() == [b"ab", b"c", b""]
    assert pb_utils.serialize_byte_tensor(np.array([], object)) == ()
    assert pb_utils.serialize_byte_tensor(ONE) is None and pb_utils.serialize_byte_tensor(np.array(["a"])) is None


def test_datatypes_without_a_numpy_type_are_none() -> None:
    assert pb_utils.triton_to_numpy_type(11) is np.float32 and pb_utils.triton_to_numpy_type(99) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13 and pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is bool


def config(**more: Any) -> pb_utils.ModelConfig:
    given = {"name": "m", "max_batch_size": 4, "input": [], "output": [], **more}
    return pb_utils.ModelConfig(pb_utils.json.dumps(given))


@pytest.mark.parametrize(
    ("change", "about"),
    [
        (lambda c: c.set_max_batch_size(2), "configuration specified max_batch_size 4, but in auto-complete-config"),
        (lambda c: c.add_input({"name": "x", "dims": [1]}), "is missing 'data_type' property"),
        (lambda c: c.add_output({"name": "x", "data_type": "TYPE_FP32"}), "is missing 'dims' property"),
        (lambda c: c.add_output({"name": "x", "optional": True}), "other than 'name', 'data_type' and 'dims'"),
        (lambda c: c.set_model_transaction_policy({"other": 1}), "contains property other than 'decoupled'"),
    ],
)
def test_a_completion_that_contradicts_the_configuration_is_refused(change: Any, about: str) -> None:
    with pytest.raises(ValueError, match=about):
        change(config())


def test_a_completion_may_not_change_what_was_declared() -> None:
    declared = config(input=[{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}], sequence_batching={})
    with pytest.raises(ValueError, match="configuration expects datatype TYPE_FP32 for input 'x', model provides TYPE_INT8"):
        declared.add_input({"name": "x", "data_type": "TYPE_INT8", "dims": [2]})
    with pytest.raises(ValueError, match=r"expects dims \[3\] but the model configuration specifies dims \[2\]"):
        declared.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [3]})
    with pytest.raises(ValueError, match="specified scheduling_choice as 'sequence_batching'"):
        declared.set_dynamic_batching()
    declared.set_model_transaction_policy({"decoupled": True})
    with pytest.raises(ValueError, match="trying to change decoupled property"):
        declared.set_model_transaction_policy({"decoupled": False})
    assert declared.as_dict()["model_transaction_policy"] == {"decoupled": True}
