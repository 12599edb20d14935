"""Makes `repository/digits/1/model.onnx`: which digit is on an image of 8 × 8 pixels, by comparing it with drawings.

pip install onnx
python examples/make_digits.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from classifier import NAMES, SHARPNESS, normalised, prototypes  # noqa: E402


def constant(name: str, array: NDArray[np.generic]) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def make_model() -> onnx.ModelProto:
    """`image` [n, 8, 8] of any brightness → `probability` [n, 10], `digit` [n], `name` [n, 1]."""
    drawn = normalised(prototypes().reshape(10, 64))
    nodes = [
        helper.make_node("Reshape", ["image", "flat"], ["pixels"]),
        helper.make_node("ReduceMean", ["pixels", "axis"], ["mean"], keepdims=1),
        helper.make_node("Sub", ["pixels", "mean"], ["centred"]),
        helper.make_node("ReduceL2", ["centred", "axis"], ["length"], keepdims=1),
        helper.make_node("Max", ["length", "tiny"], ["some_length"]),
        helper.make_node("Div", ["centred", "some_length"], ["normalised"]),
        helper.make_node("MatMul", ["normalised", "weights"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probability"], axis=1),
        helper.make_node("ArgMax", ["scores"], ["digit"], axis=1, keepdims=0),
        helper.make_node("ArgMax", ["scores"], ["best"], axis=1, keepdims=1),
        helper.make_node("Gather", ["names", "best"], ["name"]),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        inputs=[helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 8, 8])],
        outputs=[
            helper.make_tensor_value_info("probability", TensorProto.FLOAT, ["n", 10]),
            helper.make_tensor_value_info("digit", TensorProto.INT64, ["n"]),
            helper.make_tensor_value_info("name", TensorProto.STRING, ["n", 1]),
        ],
        initializer=[
            constant("flat", np.array([-1, 64], np.int64)),
            constant("axis", np.array([1], np.int64)),
            constant("tiny", np.array(1e-6, np.float32)),
            constant("weights", np.ascontiguousarray(drawn.T * np.float32(SHARPNESS))),
            helper.make_tensor("names", TensorProto.STRING, [len(NAMES)], [name.encode() for name in NAMES]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return model


if __name__ == "__main__":
    target = HERE / "repository" / "digits" / "1" / "model.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(make_model().SerializeToString())
    print(f"{target} has {target.stat().st_size} bytes")
