"""The model repositories that Triton's client examples expect, as Python-backend models, written to a folder."""

from __future__ import annotations

from pathlib import Path

_IMPORTS = "import time\nimport numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"
_EACH = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
"""
_IDENTITY = """
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values["INPUT0"])])
"""
_ADD_SUB = """
        a, b = values["INPUT0"], values["INPUT1"]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)])
"""
_ADD_SUB_TEXT = """
        a, b = (values[name].astype(np.int64) for name in ("INPUT0", "INPUT1"))
        outputs = [
            pb_utils.Tensor(name, result.astype(np.bytes_).astype(np.object_))
            for name, result in (("OUTPUT0", a + b), ("OUTPUT1", a - b))
        ]
        return pb_utils.InferenceResponse(outputs)
"""
_SEQUENCE = """
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", values["INPUT"] + values["START"])])
"""
_DYNA_SEQUENCE = """
        output = values["INPUT"] + values["START"] + values["END"] * values["CORRID"].astype(np.int32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output.astype(np.int32))])
"""
_STRING_DYNA_SEQUENCE = """
        corrid = values["CORRID"].item().decode()
        self.sums = getattr(self, "sums", {})
        self.sums[corrid] = values["INPUT"] + (0 if values["START"].any() else self.sums[corrid])
        output = self.sums[corrid] + values["END"] * int(corrid)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output.astype(np.int32))])
"""
_REPEAT = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            values = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            for value, delay_ms in zip(values["IN"], values["DELAY"], strict=True):
                time.sleep(delay_ms / 1e6)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CLASSES = """
        rows = values["data_0"].reshape(-1, 3 * 224 * 224)
        scores = np.stack([rows.mean(axis=1) * factor for factor in (1, 2, 3, 4)], axis=1).astype(np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("fc6_1", scores{row})])
"""
_DECODE = """
        sizes = [np.full((3, 224, 224), len(image.item()) % 7, np.float32) for image in values["INPUT"]]
        return pb_utils.InferenceResponse([pb_utils.Tensor("data_0", np.stack(sizes))])
"""
_ENSEMBLE = """
ensemble_scheduling {
  step [
    {
      model_name: "preprocess" model_version: -1
      input_map { key: "INPUT" value: "INPUT" } output_map { key: "data_0" value: "image" }
    },
    {
      model_name: "inception" model_version: -1
      input_map { key: "data_0" value: "image" } output_map { key: "fc6_1" value: "OUTPUT" }
    }
  ]
}
"""
_CONTROLS = """
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] }DYNA
  ]
"""
_DYNA_CONTROLS = """,
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_KIND } ] }"""


def write_seven_models(folder: Path) -> list[str]:
    """Write the models of `simple_http_model_control.py`, which counts them; return their names."""
    _write_simple_models(folder)
    return _names_in(folder)


def write_eight_models(folder: Path) -> list[str]:
    """Write the models of the other `simple_*` examples, one of which counts them; return their names."""
    _write_simple_models(folder)
    _sequence(folder, "simple_string_dyna_sequence", _STRING_DYNA_SEQUENCE, "STRING", "oldest { max_candidate_sequences: 8 }")
    return _names_in(folder)


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _write_simple_models(folder: Path) -> None:
    _model(folder, "simple", _EACH + _ADD_SUB, _pairs("TYPE_INT32"))
    _model(folder, "simple_int8", _EACH + _ADD_SUB, _pairs("TYPE_INT8"))
    _model(folder, "simple_string", _EACH + _ADD_SUB_TEXT, _pairs("TYPE_STRING"))
    _model(
        folder,
        "simple_identity",
        _EACH + _IDENTITY,
        _tensors(INPUT0="TYPE_STRING:-1") + _tensors("output", OUTPUT0="TYPE_STRING:-1"),
    )
    _sequence(folder, "simple_sequence", _SEQUENCE, "", "direct { }")
    _sequence(folder, "simple_dyna_sequence", _DYNA_SEQUENCE, "UINT64", "oldest { max_candidate_sequences: 8 }")
    config = _tensors(IN="TYPE_INT32:-1", DELAY="TYPE_UINT32:-1", WAIT="TYPE_UINT32:1") + _tensors("output", OUT="TYPE_INT32:1")
    _model(folder, "repeat_int32", _REPEAT, config + "model_transaction_policy { decoupled: true }\n", batch=0)


def write_other_models(folder: Path) -> list[str]:
    """Write the models of the examples on images and on memory; return their names."""
    identity = _tensors(INPUT0="TYPE_INT32:-1") + _tensors("output", OUTPUT0="TYPE_INT32:-1")
    _model(folder, "custom_identity_int32", _EACH + _IDENTITY, identity)
    _classes(folder, "densenet_onnx", batch=0)
    _classes(folder, "inception", batch=8)
    decoding = _tensors(INPUT="TYPE_STRING:1") + _tensors("output", data_0="TYPE_FP32:3, 224, 224")
    _model(folder, "preprocess", _EACH + _DECODE, decoding)
    config = _tensors(INPUT="TYPE_STRING:1") + _tensors("output", OUTPUT="TYPE_FP32:4")
    _write(folder, "preprocess_inception_ensemble", f'platform: "ensemble"\nmax_batch_size: 8\n{config}{_ENSEMBLE}')
    return _names_in(folder)


def _pairs(datatype: str) -> str:
    dims = f"{datatype}:16"
    return _tensors(INPUT0=dims, INPUT1=dims) + _tensors("output", OUTPUT0=dims, OUTPUT1=dims)


def _tensors(kind: str = "input", **tensors: str) -> str:
    texts = []
    for name, text in tensors.items():
        datatype, _, dims = text.partition(":")
        texts.append(f'{kind} [ {{ name: "{name}" data_type: {datatype} dims: [ {dims} ] }} ]\n')
    return "".join(texts)


def _sequence(folder: Path, name: str, code: str, corrid: str, strategy: str) -> None:
    controls = _CONTROLS.replace("DYNA", _DYNA_CONTROLS.replace("KIND", corrid) if corrid else "")
    config = _tensors(INPUT="TYPE_INT32:1") + _tensors("output", OUTPUT="TYPE_INT32:1")
    _model(folder, name, _EACH + code, f"{config}sequence_batching {{ {controls} {strategy} }}\n")


def _classes(folder: Path, name: str, *, batch: int) -> None:
    config = (
        'input [ { name: "data_0" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ] } ]\n'
        'output [ { name: "fc6_1" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" } ]\n'
    )
    _model(folder, name, _EACH + _CLASSES.replace("{row}", "" if batch else "[0]"), config, batch=batch)
    (folder / name / "labels.txt").write_text("cat\ndog\nmug\npen\n")


def _model(folder: Path, name: str, code: str, config: str, *, batch: int = 8) -> None:
    _write(folder, name, f'backend: "python"\nmax_batch_size: {batch}\n{config}')
    (folder / name / "1" / "model.py").write_text(_IMPORTS + code)


def _write(folder: Path, name: str, config: str) -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(f'name: "{name}"\n{config}')
