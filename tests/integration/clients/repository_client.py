"""Triton's clients, gRPC and HTTP, at a model repository. Run as

    repository_client examples|control GRPC_TARGET HTTP_PORT FOLDER

Prints one JSON line per check, with the problem if there is one. A program of its own: tritonclient's messages and this
project's cannot be loaded into one process.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as by_grpc
import tritonclient.http as by_http
from tritonclient.utils import InferenceServerException

ADD_ONE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy() + STEP)]) for r in requests]
"""
CONFIG = {
    "backend": "python",
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
}


def seven() -> Any:
    image = np.zeros((1, 8, 8), np.float32)
    image[0, 0, 1:7] = 1
    for row, column in enumerate((5, 4, 4, 3, 3, 2, 2), start=1):
        image[0, row, column : column + 2] = 1
    return image


def infer(library: Any, client: Any, model: str, inputs: dict[str, Any], *outputs: Any, **more: Any) -> Any:
    tensors = []
    for name, array in inputs.items():
        datatype = {"f": "FP32", "O": "BYTES"}[array.dtype.kind]
        tensor = library.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return client.infer(model, tensors, outputs=list(outputs) or None, **more)


def index(library: Any, client: Any) -> dict[str, tuple[str, str]]:
    models = client.get_model_repository_index()
    if library is by_grpc:
        return {model.name: (model.state, model.reason) for model in models.models}
    return {model["name"]: (model["state"], model.get("reason", "")) for model in models}


def config_of(library: Any, client: Any, model: str) -> Any:
    return client.get_model_config(model, as_json=True)["config"] if library is by_grpc else client.get_model_config(model)


def refused(work: Callable[[], object]) -> str:
    try:
        work()
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    raise AssertionError("it was not refused")


def examples(library: Any, client: Any, folder: Path) -> dict[str, Callable[[], None]]:
    def classifies() -> None:
        top = library.InferRequestedOutput("probability", class_count=2)
        result = infer(library, client, "digits", {"image": seven()}, top, library.InferRequestedOutput("digit"))
        assert result.as_numpy("probability")[0][0].endswith(b":7:seven"), result.as_numpy("probability")
        assert result.as_numpy("digit").tolist() == [[7]]
        batch = infer(library, client, "digits", {"image": np.concatenate([seven()] * 5)})
        assert batch.as_numpy("name").tolist() == [[b"seven"]] * 5

    def writes() -> None:
        texts = np.array([[b"one", b"two"]], object)
        result = infer(library, client, "llm_model", {"text_input": texts})
        assert result.as_numpy("text_output").tolist() == [[b"You said: one", b"You said: two"]]
        message = refused(lambda: infer(library, client, "llm_model", {"text_input": np.array([[b""]], object)}))
        assert message.endswith(": a text is empty") and ("INVALID_ARGUMENT" in message or "400" in message), message

    def reads_aloud() -> None:
        result = infer(library, client, "read_aloud", {"image": seven()})
        assert result.as_numpy("text_output").tolist() == [[b"You said: seven"]]
        assert result.as_numpy("probability").argmax() == 7
        top = library.InferRequestedOutput("probability", class_count=1)
        classified = infer(library, client, "read_aloud", {"image": seven()}, top)
        assert classified.as_numpy("probability")[0][0].endswith(b":7:seven")
        assert classified.as_numpy("text_output") is None

    def describes() -> None:
        assert (
            client.is_model_ready("digits") and client.is_model_ready("digits", "1") and not client.is_model_ready("digits", "2")
        )
        assert index(library, client) == dict.fromkeys(("digits", "llm_model", "read_aloud"), ("READY", ""))
        config = config_of(library, client, "digits")
        assert config["backend"] == "onnxruntime" and int(config["instance_group"][0]["count"]) == 2, config
        assert config_of(library, client, "read_aloud")["ensemble_scheduling"]["step"][1]["model_name"] == "llm_model"
        as_json = {"as_json": True} if library is by_grpc else {}
        metadata = client.get_model_metadata("digits", **as_json)
        assert [[int(size) for size in each["shape"]] for each in metadata["outputs"]] == [[-1, 10], [-1, 1], [-1, 1]]
        statistics = client.get_inference_statistics("llm_model", **as_json)["model_stats"][0]
        assert int(statistics["inference_stats"]["success"]["count"]) >= 3  # two of them by way of the ensemble

    def refuses_to_load() -> None:
        assert "--model-control-mode explicit" in refused(lambda: client.load_model("digits"))
        assert "--model-control-mode explicit" in refused(lambda: client.unload_model("digits"))
        assert client.is_model_ready("digits")

    return {
        "classifies": classifies,
        "writes": writes,
        "reads aloud": reads_aloud,
        "describes": describes,
        "refuses": refuses_to_load,
    }


def control(library: Any, client: Any, folder: Path) -> dict[str, Callable[[], None]]:
    one = {"x": np.array([1], np.float32)}

    def value(model: str) -> float:
        return float(infer(library, client, model, one).as_numpy("y")[0])

    def write(step: float) -> None:
        (folder / "add" / "1").mkdir(parents=True, exist_ok=True)
        (folder / "add" / "1" / "model.py").write_text(ADD_ONE.replace("STEP", str(step)))
        (folder / "add" / "config.pbtxt").write_text(
            'backend: "python"\ninput { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }\n'
            'output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }\n'
        )

    def loads_and_unloads() -> None:
        write(1)
        client.load_model("add")
        assert client.is_model_ready("add") and value("add") == 2.0
        assert index(library, client)["add"] == ("READY", "")
        write(2)
        client.load_model("add")
        assert value("add") == 3.0
        client.unload_model("add")
        assert not client.is_model_ready("add")
        assert index(library, client)["add"] == ("UNAVAILABLE", "unloaded"), index(library, client)
        message = refused(lambda: infer(library, client, "add", one))
        assert "Request for unknown model: 'add' has no available versions" in message, message

    def brings_a_model() -> None:
        files = {"file:1/model.py": ADD_ONE.replace("STEP", "5").encode()}
        client.load_model("brought", config=json.dumps(CONFIG), files=files)
        assert value("brought") == 6.0
        client.unload_model("brought")
        assert "brought" not in index(library, client) or index(library, client)["brought"][0] == "UNAVAILABLE"

    def refuses_paths_that_lead_out() -> None:
        for path in ("file:../../evil.py", "file:/tmp/evil.py", "file:1/../../../evil.py"):
            files = {"file:1/model.py": b"", path: b"evil"}
            message = refused(lambda files=files: client.load_model("evil", config=json.dumps(CONFIG), files=files))
            assert "not a path inside the model" in message, message
        assert "evil" not in index(library, client)

    def reports_what_is_wrong() -> None:
        assert "failed to load 'missing', failed to poll from model repository" in refused(lambda: client.load_model("missing"))
        client.unload_model("missing")
        files = {"file:1/model.py": b"raise ValueError('no weights here')"}
        message = refused(lambda: client.load_model("broken", config=json.dumps(CONFIG), files=files))
        assert "no weights here" in message, message
        (folder / "bad" / "1").mkdir(parents=True, exist_ok=True)
        (folder / "bad" / "config.pbtxt").write_text('backend: "dali"')
        assert "backend 'dali' is not supported" in refused(lambda: client.load_model("bad"))
        state, reason = index(library, client)["bad"]
        assert state == "UNAVAILABLE" and "dali" in reason

    def unloads_dependents() -> None:
        client.load_model("read_aloud")
        assert client.is_model_ready("digits") and client.is_model_ready("llm_model")
        infer(library, client, "read_aloud", {"image": seven()})
        client.unload_model("read_aloud", unload_dependents=True)
        assert not any(client.is_model_ready(name) for name in ("digits", "llm_model", "read_aloud"))

    return {
        "loads and unloads": loads_and_unloads,
        "brings a model": brings_a_model,
        "refuses paths": refuses_paths_that_lead_out,
        "says what is wrong": reports_what_is_wrong,
        "unloads dependents": unloads_dependents,
    }


def main() -> None:
    kind, target, port, folder = sys.argv[1:]
    checks = {"examples": examples, "control": control}[kind]
    pairs = ((by_grpc, by_grpc.InferenceServerClient(target)), (by_http, by_http.InferenceServerClient(f"127.0.0.1:{port}")))
    for library, client in pairs:
        for name, check in checks(library, client, Path(folder)).items():
            problem = ""
            try:
                check()
            except Exception:
                problem = traceback.format_exc()
            print(json.dumps({"case": f"{library.__name__}: {name}", "problem": problem}), flush=True)


if __name__ == "__main__":
    main()
