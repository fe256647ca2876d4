"""The list of a sharded checkpoint's tensors as JSON that is checked.

torch.distributed.checkpoint writes it with pickle, which runs whatever its author likes when it is read: a run that
somebody else trained could not be resumed. The tensors themselves are read by torch without objects (`weights_only`).
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

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

from turngym.core.redaction import brief
from turngym.core.user_files import json_of

LIST = "tensors.json"
LARGEST_LIST = 1 << 28
"""Bytes of the list at most: 70B parameters on 1,024 GPUs take a tenth."""
_SHARD_NAME = re.compile(r"__\d{1,9}_\d{1,9}\.distcp")
DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
}


class ShardWriter(dcp.FileSystemWriter):
    """Writes tensors as torch does, and their list as JSON."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Rank 0 writes the list when all ranks have written their tensors."""
        places = {written.index: written.storage_data for per_rank in results for written in per_rank}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise TypeError(f"{name} is no tensor; a checkpoint's shards hold tensors alone")
            tensors[name] = {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "size": list(tensor.size),
                "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in tensor.chunks],
            }
        rows = [
            [index.fqn, None if index.offset is None else list(index.offset), at.relative_path, at.offset, at.length]
            for index, at in places.items()
        ]
        scratch = Path(self.path) / f"{LIST}.writing"
        scratch.write_text(json.dumps({"tensors": tensors, "places": rows}), encoding="utf-8")
        os.replace(scratch, Path(self.path) / LIST)


class ShardReader(dcp.FileSystemReader):
    """Reads what `ShardWriter` has written, also from strangers. Raises ValueError for a file that has no such list."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The list, every field of it checked."""
        folder = Path(self.path)
        file = folder / LIST
        if not file.is_file():
            raise ValueError(f"there is no {LIST}; a list in pickle (.metadata) is not read, for it may hold code")
        if file.stat().st_size > LARGEST_LIST:
            raise ValueError(f"{LIST} has {file.stat().st_size:,} bytes, at most {LARGEST_LIST:,} are read")
        listing = json_of(file.read_text(encoding="utf-8"))
        tensors: dict[str, STORAGE_TYPES] = {name: _tensor(name, entry) for name, entry in listing["tensors"].items()}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, offset, path, start, length in listing["places"]:
            if name not in tensors or not isinstance(path, str) or not _SHARD_NAME.fullmatch(path):
                raise ValueError(f"{LIST} says that {brief(name, 80)} is in the file {brief(path, 80)}")
            index_offset = None if offset is None else _sizes(name, offset)
            counts = _sizes(name, [start, length])
            if sum(counts) > (folder / path).stat().st_size:
                raise ValueError(f"{LIST} says that {brief(name, 80)} lies behind the end of {path}")
            places[MetadataIndex(name, index_offset)] = _StorageInfo(path, *counts)
        meta = StorageMeta(load_id=self.load_id)
        return Metadata(state_dict_metadata=tensors, storage_data=places, storage_meta=meta)


def _tensor(name: str, entry: Any) -> TensorStorageMetadata:
    if entry["dtype"] not in DTYPES:
        problem = f"{LIST}: {brief(name, 80)} is of dtype {brief(entry['dtype'], 40)}"
        raise ValueError(f"{problem}; valid: {', '.join(DTYPES)}")
    size = _sizes(name, entry["size"])
    chunks = [ChunkStorageMetadata(_sizes(name, offsets), _sizes(name, sizes)) for offsets, sizes in entry["chunks"]]
    for chunk in chunks:
        ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(size) or any(end > dimension for end, dimension in zip(ends, size, strict=True)):
            raise ValueError(f"{LIST}: a part of {brief(name, 80)} lies outside of its shape {list(size)}")
    properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
    return TensorStorageMetadata(properties=properties, size=size, chunks=chunks)


def _sizes(name: str, values: Any) -> torch.Size:
    if not isinstance(values, list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in values):
        problem = f"{LIST}: {brief(name, 80)} has the sizes {brief(values, 80)}"
        raise ValueError(f"{problem}; they must be whole numbers from 0")
    if math.prod(values) >= 1 << 62:
        raise ValueError(f"{LIST}: {brief(name, 80)} has {math.prod(values):,} numbers")
    return torch.Size(values)
