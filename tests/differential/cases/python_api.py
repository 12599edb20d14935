"""Expressions of Python models: what their `triton_python_backend_utils` gives, and the errors that it raises."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial

from tests.differential.cases import Case
from tests.differential.cases.tensors import raw, request
from tests.differential.server_client import Response, ServerClient

_TYPES = (
    "type(request)",
    "type(ONE)",
    "pb.TritonError",
    "pb.TritonModelException",
    "pb.TritonModelException.__mro__",
    "pb.InferenceResponse",
    "pb.InferenceRequest",
    "pb.PreferredMemory",
    "pb.Logger",
    "pb.MetricFamily",
    "pb.ModelConfig",
)
_VALUES = (
    "pb.TritonError('no').message()",
    "pb.TritonError('no').code()",
    "pb.TritonError.CANCELLED",
    "int(pb.TritonError.CANCELLED)",
    "repr(pb.TritonError.NOT_FOUND)",
    "pb.TritonError.NOT_FOUND.name",
    "pb.TritonError('no', pb.TritonError.NOT_FOUND).code() == pb.TritonError.NOT_FOUND",
    "pb.TritonError(message='no', code=pb.TritonError.NOT_FOUND).code()",
    "pb.TRITONSERVER_MEMORY_CPU",
    "pb.TRITONSERVER_MEMORY_GPU",
    "pb.Logger.INFO",
    "pb.Logger.log_info('a line')",
    "pb.Logger.log('a line', pb.Logger.VERBOSE)",
    "pb.get_model_dir().rpartition('/models/')[2]",
    "ONE.name()",
    "ONE.shape()",
    "ONE.is_cpu()",
    "ONE.as_numpy().tolist()",
    "ONE.__dlpack_device__()",
    "pb.Tensor('x', np.array([b'a'])).as_numpy().tolist()",
    "pb.Tensor('x', np.array([[1, 2], [3, 4]]).T).as_numpy().tolist()",
    "pb.Tensor('x', np.float32(3)).shape()",
    "pb.InferenceResponse([ONE]).output_tensors()[0].name()",
    "pb.InferenceResponse([]).error()",
    "pb.InferenceResponse([]).has_error()",
    "pb.InferenceResponse([], pb.TritonError('no')).error().message()",
    "pb.InferenceResponse(output_tensors=[], error=None).has_error()",
    "called().request_id()",
    "called().correlation_id()",
    "called(correlation_id='a').correlation_id()",
    "called().flags()",
    "called().timeout()",
    "called().parameters()",
    "called(parameters={'a': 1, 'b': True, 'c': 'x'}).parameters()",
    "sorted(called().requested_output_names())",
    "called().inputs()",
    "request.request_id()",
    "request.correlation_id()",
    "request.flags()",
    "request.timeout()",
    "request.parameters()",
    "request.is_cancelled()",
    "pb.serialize_byte_tensor(np.array([b'a', 'b', ''], np.object_))",
    "pb.deserialize_bytes_tensor(bytes([1, 0, 0, 0, 97])).tolist()",
    "pb.numpy_to_triton_type(np.float16)",
    "pb.triton_to_numpy_type(14)",
    "pb.get_input_tensor_by_name(request, 'NONE')",
    "pb.is_model_ready('echo_fp32')",
    "pb.is_model_ready('echo_fp32', '1')",
    "pb.is_model_ready('echo_fp32', '7')",
    "pb.is_model_ready('unknown')",
    "pb.is_model_ready('late')",
)
_REFUSED = (
    "pb.Tensor('x', [1, 2])",
    "pb.Tensor(1, ONE.as_numpy())",
    "pb.Tensor('x')",
    "pb.Tensor('', ONE.as_numpy())",
    "pb.Tensor('x', np.array(['a']))",
    "pb.Tensor('x', np.array([1j]))",
    "pb.Tensor('x', np.array(['2024-01-01'], 'datetime64[D]'))",
    "pb.Tensor.from_dlpack('x', 'text')",
    "pb.Tensor.from_dlpack('x', None)",
    "pb.Tensor.from_dlpack('', ONE)",
    "pb.Tensor.from_dlpack(1, ONE)",
    "pb.Tensor('x', np.array([b'a'], np.object_)).to_dlpack()",
    "pb.InferenceResponse(ONE)",
    "pb.InferenceResponse([1])",
    "pb.InferenceResponse([], error='no')",
    "pb.TritonError()",
    "pb.TritonError(5)",
    "pb.TritonError('no', 3)",
    "pb.TritonError('no', 'INTERNAL')",
    "pb.PreferredMemory(1)",
    "pb.InferenceRequest()",
    "pb.InferenceRequest(inputs=[])",
    "pb.InferenceRequest(model_name='m')",
    "pb.InferenceRequest(model_name='m', requested_output_names=[])",
    "pb.InferenceRequest(model_name='m', requested_output_names='y', inputs=[])",
    "pb.InferenceRequest(model_name='m', requested_output_names=[1], inputs=[])",
    "pb.InferenceRequest(model_name=None, requested_output_names=[], inputs=[])",
    "called(inputs=[1])",
    "called(correlation_id=1.5)",
    "called(correlation_id=None)",
    "called(correlation_id=-1)",
    "called(model_version='1')",
    "called(flags='start')",
    "called(timeout='1')",
    "called(request_id=5)",
    "called(parameters={'a': [1]})",
    "called(parameters={'a': 1.5})",
    "called(parameters={1: 1})",
    "called(preferred_memory=1)",
    "called(trace=1)",
    "called(unknown=1)",
    "called(parameters='{}')",
    "called(parameters=[1])",
    "pb.TritonError.NOT_FOUND == 2",
    "repr(pb.Logger.ERROR)",
    "str(pb.MetricFamily.GAUGE)",
    "pb.Logger.log('a', 1)",
    "pb.Logger.log_info(5)",
    "pb.MetricFamily()",
    "pb.MetricFamily(name='own', description='d', kind=1)",
    "pb.MetricFamily(name='', description='d', kind=pb.MetricFamily.COUNTER)",
    "request.set_release_flags(5)",
    "request.set_release_flags('x')",
    "request.get_response_sender().send()",
    "request.get_response_sender().send(1)",
    "request.get_response_sender().send(flags=5)",
    "request.get_response_sender().send(flags=1)",
    "pb.load_model()",
    "pb.load_model('unknown')",
    "pb.unload_model('')",
    "pb.triton_string_to_numpy('TYPE_NONE')",
    "pb.deserialize_bytes_tensor(bytes([9, 0, 0, 0, 97]))",
    "raising(pb.TritonModelException('own words'))",
    "raising(pb.TritonModelException())",
)
_CALLED = (
    *(
        f"code(called(model_name='fails', inputs=[named('{name}')]))"
        for name in (
            "UNKNOWN",
            "INTERNAL",
            "NOT_FOUND",
            "INVALID_ARG",
            "UNAVAILABLE",
            "UNSUPPORTED",
            "ALREADY_EXISTS",
            "CANCELLED",
        )
    ),
    "code(called(model_name='unknown'))",
    "code(called(model_name='late'))",
    "code(called(model_name='broken'))",
    "code(called(model_name='echo_fp32', model_version=7, inputs=[ONE]))",
    "code(called(model_name='echo_fp32', inputs=[]))",
    "code(called(model_name='echo_int32', inputs=[ONE]))",
    "code(called(model_name='echo_fp32', requested_output_names=['NONE'], inputs=[ONE]))",
    "code(called(model_name='repeat', inputs=[pb.Tensor('INPUT0', np.array([1, 2], np.int32))]))",
    "code(called(model_name='repeat', inputs=[pb.Tensor('INPUT0', np.array([-1], np.int32))]))",
    "code(called(model_name='seq_direct', inputs=[pb.Tensor('INPUT0', np.array([[1]], np.int32))]))",
    "code(called(model_name='echo_batched', inputs=[ONE]))",
    "names(called(inputs=[ONE]).exec())",
    "names(called(inputs=[ONE], requested_output_names=['OUTPUT0', 'OUTPUT0']).exec())",
    "names(called(model_name='add_sub', inputs=pair(), requested_output_names=['OUTPUT1']).exec())",
    "names(called(model_name='add_sub', inputs=pair(), requested_output_names=['OUTPUT1', 'OUTPUT0']).exec())",
    "names(called(model_name='add_sub', inputs=pair(), requested_output_names=['OUTPUT1', 'OUTPUT1']).exec())",
    "names(called(model_name='doubles', inputs=[ONE]).exec())",
    "names(called(model_name='chain', inputs=[ONE]).exec())",
)


def cases() -> Iterator[Case]:
    for family, expressions in (
        ("Python types", _TYPES),
        ("Python values", _VALUES),
        ("Python errors", _REFUSED),
        ("Python calls", _CALLED),
    ):
        for expression in expressions:
            yield Case(family, expression, partial(_evaluate, expression))
    yield Case("Python calls", "a model that raises TritonModelException", _raised)
    for wanted in ((), ("OUTPUT0",)):
        yield Case("Python outputs", f"one twice, wanting {wanted}", partial(_doubled, wanted))


def _evaluate(expression: str, client: ServerClient) -> Response:
    """Return the value's text; if the expression raises, the type of the exception as the status and its text as the words."""
    message = request("python_api", ("INPUT0", "BYTES", (1,)))
    message.raw_input_contents.append(raw("BYTES", [expression]))
    response = client.call("ModelInfer", message)
    if response.status != "OK":
        return response
    outcome = json.loads(bytes.fromhex(response.body["raw_output_contents"][0])[4:])
    if "raised" in outcome:
        return Response(outcome["raised"], outcome["text"])
    return Response("OK", body=outcome["value"])


def _doubled(wanted: Sequence[str], client: ServerClient) -> Response:
    message = request("doubles", ("INPUT0", "FP32", (1,)))
    message.raw_input_contents.append(raw("FP32", [1.0]))
    for name in wanted:
        message.outputs.add(name=name)
    return client.call("ModelInfer", message)


def _raised(client: ServerClient) -> Response:
    """Return the response without the lines of the model's code."""
    message = request("fails", ("INPUT0", "BYTES", (1,)))
    message.raw_input_contents.append(raw("BYTES", ["TritonModelException"]))
    response = client.call("ModelInfer", message)
    return Response(response.status, response.words.partition("\n\nAt:")[0])
