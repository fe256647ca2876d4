"""The list of a sharded checkpoint's tensors as JSON.

torch.distributed.checkpoint writes it with pickle, which runs whatever its author likes when it is read: a run that
somebody else trained could not be resumed. The tensors themselves are read by torch without objects (`weights_only`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

LIST = "tensors.json"


class _Tensor(msgspec.Struct):
    dtype: str
    size: list[int]
    chunks: list[tuple[list[int], list[int]]]
    """Offsets and sizes of each part."""


class _List(msgspec.Struct):
    tensors: dict[str, _Tensor]
    places: list[tuple[str, list[int] | None, str, int, int]]
    """Tensor, offsets of a part, file, and where in the file: begin and length."""


class ShardWriter(dcp.FileSystemWriter):
    """Writes tensors as torch does, and their list as JSON."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Rank 0 writes the list when all ranks have written their tensors."""
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise TypeError(f"{name} is no tensor; a checkpoint's shards hold tensors alone")
            chunks = [(list(chunk.offsets), list(chunk.sizes)) for chunk in tensor.chunks]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = _Tensor(dtype=dtype, size=list(tensor.size), chunks=chunks)
        written = {one.index: one.storage_data for per_rank in results for one in per_rank}
        places = [
            (index.fqn, None if index.offset is None else list(index.offset), at.relative_path, at.offset, at.length)
            for index, at in written.items()
        ]
        scratch = Path(self.path) / f"{LIST}.writing"
        scratch.write_bytes(msgspec.json.encode(_List(tensors=tensors, places=places)))
        os.replace(scratch, Path(self.path) / LIST)


class ShardReader(dcp.FileSystemReader):
    """Reads what `ShardWriter` has written, and no list in pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = msgspec.json.decode((Path(self.path) / LIST).read_bytes(), type=_List)
        tensors: dict[str, STORAGE_TYPES] = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, one.dtype)),
                size=torch.Size(one.size),
                chunks=[ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in one.chunks],
            )
            for name, one in found.tensors.items()
        }
        places = {
            MetadataIndex(name, None if offsets is None else torch.Size(offsets)): _StorageInfo(file, begin, length)
            for name, offsets, file, begin, length in found.places
        }
        meta = StorageMeta(load_id=self.load_id)
        return Metadata(state_dict_metadata=tensors, storage_data=places, storage_meta=meta)
