"""Generates the protobuf and gRPC stubs before a wheel or an editable install is made."""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROTOS = Path(__file__).parent / "protos"


def generate_stubs() -> None:
    """Writes `*_pb2.py`, `*_pb2_grpc.py` and their typed `.pyi` beside each `.proto`."""
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("dynamo/protos/*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    bin_dir = Path(sys.executable).parent
    plugins = [f"--plugin=protoc-gen-{name}={bin_dir / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    if not all(Path(plugin.split("=", 2)[2]).exists() for plugin in plugins):
        plugins = []  # isolated builds put console scripts on PATH, where protoc finds them by name
    outputs = [f"--{kind}_out={PROTOS}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main(["protoc", f"-I{PROTOS}", f"-I{well_known}", *plugins, *outputs, *sources]) != 0:
        raise RuntimeError("protoc failed; its message is above")


class StubsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate_stubs()


if __name__ == "__main__":
    generate_stubs()
