"""vLLM's offloading connector without a GPU: all of it is vLLM's own except for the copies.

`CPUOffloadingSpec` keeps blocks in the host's memory, and says no to platforms other than CUDA and XPU. What decides, evicts and
publishes runs in vLLM's scheduler and needs no GPU; only its worker copies with streams of a GPU. `HostSpec` copies by itself,
from one part of the host's memory to another. vLLM loads it by its own setting for specs from elsewhere: see `OFFLOAD`.
"""

from __future__ import annotations

import json

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


def offload_arguments(cpu_bytes: int) -> str:
    """Return the arguments of vLLM that keep `cpu_bytes` of blocks in the host's memory beside its cache."""
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostSpec",
            "spec_module_path": __name__,
            "cpu_bytes_to_use": cpu_bytes,
            "self_describing_kv_events": True,
        },
    }
    return f"--kv-transfer-config '{json.dumps(config)}'"


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]  # vLLM has no types here
    """As `CPUOffloadingSpec`, whose manager it uses, on a machine without a GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return _HostCopies(kv_caches, self.num_chunks)


class _HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies whole blocks at once. One block is one chunk."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int) -> None:
        self._pairs = [(each.tensor, torch.empty((chunks, each.tensor.shape[1]), dtype=torch.int8)) for each in kv_caches.tensors]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, BlockIDsLoadStoreSpec)
        self._copy(job_id, [(cache, host) for cache, host in self._pairs], src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec)
        self._copy(job_id, [(host, cache) for cache, host in self._pairs], src_spec, dst_spec)
        return True

    def _copy(
        self,
        job_id: int,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        source: BlockIDsLoadStoreSpec,
        target: BlockIDsLoadStoreSpec,
    ) -> None:
        size = 0
        for read, written in pairs:
            for block, into in zip(source.block_ids.tolist(), target.block_ids.tolist(), strict=True):
                written[into].copy_(read[block])
                size += read.shape[1]
        self._done.append(TransferResult(job_id, True, size, 1e-6))

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All copies are done when they are submitted."""
