"""Tests of models on a GPU. `DYNAMO_TEST_DEVICE=cpu` runs the same tests on the CPU, which shows that the tests are right."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> str:
    """`cuda` or `cpu`: that of the variable, or else CUDA's."""
    wanted = os.environ.get("DYNAMO_TEST_DEVICE", "cuda")
    assert wanted in ("cuda", "cpu"), f"DYNAMO_TEST_DEVICE is {wanted!r}"
    if wanted == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("there is no GPU that PyTorch can use")
    return wanted


@pytest.fixture(scope="session")
def instances(device: str) -> str:
    """The setting that has a model's instances there."""
    return f"instance_group {{ count: 1 kind: KIND_{'GPU' if device == 'cuda' else 'CPU'} }}"
