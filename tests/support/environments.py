"""Tests of other environments than `.venv`, which only `make test-vllm` and `make test-backends` collect."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = {
    "integration/test_vllm_end_to_end.py": "vllm",
    "unit/worker/repository/sessions/test_openvino_backend.py": "openvino",
    "unit/worker/repository/stores/test_object_store_s3.py": "s3fs",
    "unit/worker/repository/sessions/test_torch_backend.py": "torch",
    "unit/worker/engine/vllm/test_vllm_engine.py": "vllm",
    "unit/worker/engine/vllm/test_vllm_images.py": "vllm",
    "unit/worker/engine/vllm/test_vllm_offload.py": "vllm",
    "unit/worker/engine/vllm/test_vllm_speech.py": "vllm",
}
"""The package that a file of tests needs, by its path."""


def files_of_other_environments() -> list[str]:
    """Return the files of tests whose package is not installed in this one."""
    return [file for file, package in PACKAGES.items() if find_spec(package) is None]
