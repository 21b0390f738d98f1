"""For vLLM, which loads it by name: KV offloading on a CPU. What decides, evicts and publishes is vLLM's own; only its
copying between memories needs a GPU, and is done here by assignment."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

Rows = npt.NDArray[np.int64]


class HostCopies(CPUOffloadingSpec):  # type: ignore[misc] # not installed where types are checked
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return Copying(kv_caches, self.num_chunks, self.blocks_per_chunk)


class Copying(OffloadingWorker):  # type: ignore[misc]
    """Done when it returns."""

    def __init__(self, kv_caches: CanonicalKVCaches, chunks: int, blocks_per_chunk: int) -> None:
        self._blocks = [cache.tensor for cache in kv_caches.tensors]
        self._copies = [
            torch.empty(chunks * blocks_per_chunk, rows.shape[1], dtype=rows.dtype) for rows in self._blocks
        ]
        self._blocks_per_chunk = blocks_per_chunk
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        for blocks, copies, at, to in self._transfers(src_spec, dst_spec):
            copies[to] = blocks[at]
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        for blocks, copies, at, to in self._transfers(dst_spec, src_spec):
            blocks[at] = copies[to]
        return self._finish(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def _finish(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def _transfers(
        self, blocks: GPULoadStoreSpec, chunks: BlockIDsLoadStoreSpec
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Rows, Rows]]:
        """Per layer: both memories, and which rows of each."""
        at = blocks.block_ids.astype(np.int64)
        to = self._places(blocks, chunks.block_ids.astype(np.int64))
        for block_rows, copy_rows in zip(self._blocks, self._copies, strict=True):
            yield block_rows, copy_rows, at, to

    def _places(self, blocks: GPULoadStoreSpec, chunks: Rows) -> Rows:
        """Of each group of layers, blocks in a row of which the first may be within a chunk."""
        in_chunk, found = np.arange(self._blocks_per_chunk), []
        for first, many in zip(blocks.block_indices, blocks.group_sizes, strict=True):
            skipped = first % self._blocks_per_chunk
            used = -(-(skipped + many) // self._blocks_per_chunk) if many else 0
            places = (chunks[:used, None] * self._blocks_per_chunk + in_chunk).ravel()
            found.append(places[skipped : skipped + many])
            chunks = chunks[used:]
        return np.concatenate(found)
