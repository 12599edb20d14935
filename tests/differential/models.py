"""The model repository that both servers serve: Python-backend models, written to a folder."""

from __future__ import annotations

from itertools import product
from pathlib import Path

DATATYPES = {
    "BOOL": "TYPE_BOOL",
    "UINT8": "TYPE_UINT8",
    "UINT16": "TYPE_UINT16",
    "UINT32": "TYPE_UINT32",
    "UINT64": "TYPE_UINT64",
    "INT8": "TYPE_INT8",
    "INT16": "TYPE_INT16",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "FP16": "TYPE_FP16",
    "FP32": "TYPE_FP32",
    "FP64": "TYPE_FP64",
    "BYTES": "TYPE_STRING",
}
"""Datatypes that numpy has, with their names in configurations. Models of BF16 tensors use DLPack."""

_IMPORTS = "import json\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"
_EACH = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
"""
_ECHO = """
        outputs = []
        for tensor in request.inputs():
            outputs.append(pb_utils.Tensor(tensor.name().replace("INPUT", "OUTPUT"), tensor.as_numpy()))
        return pb_utils.InferenceResponse(outputs)
"""
_ECHO_BF16 = """
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        return pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUTPUT0", tensor.to_dlpack())])
"""
_ADD_SUB = """
        a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT0", "INPUT1"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)])
"""
_PARAMETERS = """
        about = {
            "parameters": json.loads(request.parameters()),
            "request_id": request.request_id(),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "outputs": sorted(request.requested_output_names()),
            "timeout": request.timeout(),
        }
        text = np.array([json.dumps(about, sort_keys=True).encode()], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", text)])
"""
_FAILS = """
        name = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()[0].decode()
        if name == "raise":
            raise ValueError("raised on request")
        if name == "TritonModelException":
            raise pb_utils.TritonModelException("own words")
        code = getattr(pb_utils.TritonError, name)
        return pb_utils.InferenceResponse([], pb_utils.TritonError(f"the model fails with {name}", code))
"""
_REPEAT = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            for value in values:
                if value < 0:
                    error = pb_utils.TritonError("a negative value", pb_utils.TritonError.INVALID_ARG)
                    sender.send(pb_utils.InferenceResponse([], error))
                else:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([value]))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_REPEAT_BATCHED = """
class TritonPythonModel:
    def execute(self, requests):
        for place, request in enumerate(requests):
            sender = request.get_response_sender()
            for part in range(2):
                about = np.array([[len(requests), place, part]], np.int32)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", about)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_ITERATING = """
class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = json.loads(args["model_config"])["model_transaction_policy"]["decoupled"]
        self.calls = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            calls = self.calls.setdefault(request.correlation_id(), [])
            about = {name: str(inputs[name].flatten()[0]) for name in ("START", "END", "READY")}
            calls.append({**about, "flags": request.flags()})
            text = np.array([[json.dumps(calls).encode()]], dtype=np.object_)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", text)])
            is_last = len(calls) >= inputs["INPUT0"][0, 0]
            if is_last:
                del self.calls[request.correlation_id()]
            else:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            if self.decoupled:
                flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
                request.get_response_sender().send(response, flags=flags)
            responses.append(response if is_last else None)
        return None if self.decoupled else responses
"""
_CONSTANT = """
        values = np.array([[0.5, -1.5, 3.25, 2.0, 0.0]] * {rows}, dtype=np.{dtype})
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values{index})])
"""
_TEXT = """
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().flatten()[0]
        suffix = request.parameters()
        return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text + suffix.encode()], np.object_))])
"""
_BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise RuntimeError("no weights here")

    def execute(self, requests):
        return []
"""
_COMPLETING = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(0)
        return config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(r, "INPUT0").as_numpy())])
            for r in requests
        ]
"""

_SEQUENCE = """
        controls = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        value = controls.pop("INPUT0")
        about = {name: [str(item) for item in array.flatten()] for name, array in controls.items()}
        about |= {"id": str(request.correlation_id()), "flags": request.flags(), "value": value.tolist()}
        text = np.array([[json.dumps(about, sort_keys=True).encode()]] * len(value), dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", text)])
"""
_CALLER = """
        order = json.loads(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()[0])
        inputs = [pb_utils.Tensor(name, np.array(data, dtype)) for name, dtype, data in order.pop("inputs")]
        is_decoupled = order.pop("decoupled", False)
        call = pb_utils.InferenceRequest(inputs=inputs, **order)
        responses = call.exec(decoupled=True) if is_decoupled else [call.exec()]
        about = []
        for response in responses:
            if response.has_error():
                about.append(response.error().message())
            else:
                about.append({tensor.name(): str(tensor.as_numpy().tolist()) for tensor in response.output_tensors()})
        text = np.array([json.dumps(about).encode()], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", text)])
"""
_PYTHON_API = """
        pb = pb_utils
        ONE = pb.Tensor("INPUT0", np.array([1], np.float32))

        def called(**more):
            return pb.InferenceRequest(**{"model_name": "echo_fp32", "requested_output_names": ["OUTPUT0"], "inputs": [], **more})

        def named(name):
            return pb.Tensor("INPUT0", np.array([name.encode()], np.object_))

        def pair():
            return [pb.Tensor(name, np.full((1, 16), 3, np.int32)) for name in ("INPUT0", "INPUT1")]

        def code(call):
            error = call.exec().error()
            return [str(error.code()), error.message()] if error is not None else None

        def names(response):
            if response.has_error():
                return response.error().message()
            return [(tensor.name(), tensor.as_numpy().tolist()) for tensor in response.output_tensors()]

        def raising(error):
            raise error

        expression = pb.get_input_tensor_by_name(request, "INPUT0").as_numpy()[0].decode()
        try:
            outcome = {"value": str(eval(expression, globals(), locals()))}
        except Exception as error:
            outcome = {"raised": type(error).__name__, "text": str(error)}
        return pb.InferenceResponse([pb.Tensor("OUTPUT0", np.array([json.dumps(outcome).encode()], np.object_))])
"""
_DOUBLES = """
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([value], np.float32)) for value in (1, 2)])
"""
_CONTROLS = """
  control_input [ {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }} ]
  control_input [ {{ name: "END" control [ {{ kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] }} ] }} ]
  control_input [ {{ name: "READY" control [ {{ kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] }} ] }} ]
  control_input [ {{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: {corrid} }} ] }} ]
"""

BROKEN = "broken"
"""A model that does not load."""
LATE = ("late", "needs_late", BROKEN)
"""Models that are not loaded at the start."""


def write_repository(folder: Path) -> list[str]:
    """Write all models to `folder`; return the names of those that are loaded at the start."""
    for datatype, config_type in DATATYPES.items():
        _model(folder, f"echo_{datatype.lower()}", _EACH + _ECHO, _one(config_type))
    _model(folder, "echo_bf16", _EACH + _ECHO_BF16, _one("TYPE_BF16"))
    _model(folder, "echo_batched", _EACH + _ECHO, _one("TYPE_FP32", "4"), batch=4)
    _model(folder, "echo_matrix", _EACH + _ECHO, _one("TYPE_INT32", "2, 3"))
    _model(folder, "echo_batched_bytes", _EACH + _ECHO, _one("TYPE_STRING", "-1"), batch=2)
    _model(
        folder,
        "echo_reshaped",
        _EACH + _ECHO,
        'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]\n'
        'output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] } } ]',
        batch=4,
    )
    _model(folder, "add_sub", _EACH + _ADD_SUB, _two("TYPE_INT32"), batch=8)
    _model(folder, "optional", _EACH + _ECHO, _optional())
    _model(folder, "parameters", _EACH + _PARAMETERS, _one("TYPE_INT32", "1", output="TYPE_STRING"))
    _model(folder, "fails", _EACH + _FAILS, _one("TYPE_STRING", "1"))
    _model(folder, "repeat", _REPEAT, _one("TYPE_INT32") + "model_transaction_policy { decoupled: true }")
    _model(folder, "text", _EACH + _TEXT, _text())
    _labelled(folder, "scores", _CONSTANT.format(rows=1, dtype="float32", index="[0]"), "TYPE_FP32", batch=0)
    _labelled(folder, "scores_batched", _CONSTANT.format(rows=2, dtype="float32", index=""), "TYPE_FP32", batch=4)
    _labelled(folder, "scores_int", _CONSTANT.format(rows=1, dtype="int32", index="[0]"), "TYPE_INT32", batch=0)
    _model(
        folder,
        "configured",
        _EACH + _ADD_SUB,
        _two("TYPE_FP32") + "dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 }\n"
        'instance_group [ { name: "pair" count: 2 kind: KIND_CPU } ]\n'
        'parameters { key: "threads" value { string_value: "3" } }\nversion_policy { latest { num_versions: 2 } }',
        batch=8,
    )
    _model(folder, "dynamic", _EACH + _ECHO, _one("TYPE_FP32") + "dynamic_batching { }", batch=2)
    _model(folder, "python_api", _EACH + _PYTHON_API, _one("TYPE_STRING", "1"))
    _model(folder, "doubles", _EACH + _DOUBLES, _one("TYPE_FP32"))
    _model(folder, "caller", _EACH + _CALLER, _one("TYPE_STRING", "1"))
    for name, corrid, strategy in (
        ("seq_direct", "TYPE_UINT64", "direct { }"),
        ("seq_oldest", "TYPE_UINT32", "oldest { max_candidate_sequences: 16 }"),
        ("seq_text", "TYPE_STRING", "direct { }"),
        ("seq_plain", "", ""),
    ):
        controls = _CONTROLS.format(corrid=corrid) if corrid else ""
        tensors = _one("TYPE_INT32", "1", output="TYPE_STRING")
        _model(folder, name, _EACH + _SEQUENCE, f"{tensors}sequence_batching {{ {controls} {strategy} }}\n", batch=4)
    for strategy, settings in (
        ("direct", "minimum_slot_utilization: 0.75"),
        ("oldest", "max_candidate_sequences: 4 preferred_batch_size: [ 3 ]"),
    ):
        config = (
            'input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
            'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 3 ] } ]\n'
            "model_transaction_policy { decoupled: true }\n"
            f"sequence_batching {{ {strategy} {{ max_queue_delay_microseconds: 500000 {settings} }} }}\n"
        )
        _model(folder, f"seq_batched_{strategy}", _REPEAT_BATCHED, config, batch=4)
    for decoupled, (strategy, settings) in product((False, True), (("direct", ""), ("oldest", "max_candidate_sequences: 4"))):
        controls = _CONTROLS.format(corrid="TYPE_UINT64")
        config = _one("TYPE_INT32", "1", output="TYPE_STRING")
        config += f"model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}\n"
        config += f"sequence_batching {{ iterative_sequence: true {controls} {strategy} {{ {settings} }} }}\n"
        _model(folder, f"iterative_{strategy}{'_decoupled' * decoupled}", _ITERATING, config, batch=4)
    _model(
        folder,
        "repeat_batched",
        _REPEAT_BATCHED,
        'input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 1 ] } ]\n'
        'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 3 ] } ]\n'
        "model_transaction_policy { decoupled: true }\n"
        "dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 500000 }\n",
        batch=4,
    )
    _write(folder, "completing", _COMPLETING, "")
    for version in (1, 2, 3):
        _model(
            folder, "versions", _EACH + _ECHO, _one("TYPE_FP32") + "version_policy { specific { versions: [ 1, 3 ] } }", version
        )
    _model(folder, "overridden", _EACH + _ECHO, _one("TYPE_FP32", "1"), batch=4)
    _model(folder, "late", _EACH + _ECHO, _one("TYPE_FP32"))
    _model(folder, BROKEN, _BROKEN, _one("TYPE_FP32"))
    _ensemble(folder, "chain", "echo_fp32", "echo_fp32")
    _ensemble(folder, "needs_late", "late", "late")
    return sorted(path.name for path in folder.iterdir() if path.name not in LATE)


def _one(datatype: str, dims: str = "-1", output: str = "") -> str:
    return (
        f'input [ {{ name: "INPUT0" data_type: {datatype} dims: [ {dims} ] }} ]\n'
        f'output [ {{ name: "OUTPUT0" data_type: {output or datatype} dims: [ {dims} ] }} ]\n'
    )


def _two(datatype: str) -> str:
    return "".join(
        f'{kind} [ {{ name: "{name}{number}" data_type: {datatype} dims: [ 16 ] }} ]\n'
        for kind, name in (("input", "INPUT"), ("output", "OUTPUT"))
        for number in (0, 1)
    )


def _optional() -> str:
    return (
        'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        'input [ { name: "INPUT1" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]\n'
        'output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        'output [ { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
    )


def _text() -> str:
    return (
        'input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
        'input [ { name: "count" data_type: TYPE_INT32 dims: [ -1 ] optional: true } ]\n'
        'output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]\n'
    )


def _labelled(folder: Path, name: str, code: str, datatype: str, *, batch: int) -> None:
    config = (
        'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]\n'
        f'output [ {{ name: "OUTPUT0" data_type: {datatype} dims: [ 5 ] label_filename: "labels.txt" }} ]\n'
    )
    _model(folder, name, _EACH + code, config, batch=batch)
    (folder / name / "labels.txt").write_text("zero\none\ntwo\nthree\n")  # the fifth class has no label


def _ensemble(folder: Path, name: str, *steps: str) -> None:
    texts = []
    for number, step in enumerate(steps):
        given = "INPUT0" if number == 0 else f"between{number}"
        made = "OUTPUT0" if number == len(steps) - 1 else f"between{number + 1}"
        texts.append(
            f'{{ model_name: "{step}" model_version: -1 input_map {{ key: "INPUT0" value: "{given}" }}'
            f' output_map {{ key: "OUTPUT0" value: "{made}" }} }}'
        )
    steps_text = ",\n".join(texts)
    config = f'platform: "ensemble"\n{_one("TYPE_FP32")}ensemble_scheduling {{ step [ {steps_text} ] }}\n'
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')


def _model(folder: Path, name: str, code: str, config: str, version: int = 1, *, batch: int = 0) -> None:
    _write(folder, name, code, f'name: "{name}"\nbackend: "python"\nmax_batch_size: {batch}\n{config}\n', version)


def _write(folder: Path, name: str, code: str, config: str, version: int = 1) -> None:
    where = folder / name / str(version)
    where.mkdir(parents=True)
    (where / "model.py").write_text(_IMPORTS + code)
    if config:
        (folder / name / "config.pbtxt").write_text(config)
