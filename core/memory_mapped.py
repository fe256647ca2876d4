"""Files of an index that are written row by row and read through memory maps, so that processes share their pages.

`ArrayWriter` and `map_array` are for arrays, `BlobWriter` and `BlobStore` for records of bytes. The functions at the
end compute and compare checksums of files and manifests.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from turngym.core.closing import Closes
from turngym.core.errors import RetrievalError
from turngym.core.sequences import LazySequence

_HEADER = 128
"""Bytes of the .npy header, always the same so that the number of rows can be filled in at the end."""
_SPOOL = 1 << 20
"""Bytes that are collected before they are written."""


class BlobError(RetrievalError):
    """A file of records or an array cannot be used; the error names it and says what is wrong."""


class ArrayWriter(Closes):
    """Appends rows to a .npy file of unknown length; the file is valid after `close`.

    Shape of the result: `[rows]`, or `[rows, width]` where a width is given.
    """

    def __init__(self, path: str | Path, dtype: np.dtype | type, width: int | None = None) -> None:
        self.path = Path(path)
        self.dtype = np.dtype(dtype)
        self.rows = 0
        self._width = width
        self._pack = struct.Struct(self.dtype.char).pack
        self._file = self.path.open("wb", buffering=_SPOOL)
        self._file.write(self._header())

    def extend(self, rows: np.ndarray | Sequence[int]) -> None:
        """Appends `[n]` or `[n, width]` values. Raises ValueError for another width, or if closed."""
        block = np.ascontiguousarray(rows, self.dtype)
        if block.shape[1:] != (() if self._width is None else (self._width,)):
            raise ValueError(f"{self.path} takes rows of width {self._width}, not an array of shape {block.shape}")
        self._file.write(block.data)
        self.rows += len(block)

    def append(self, value: int) -> None:
        """Appends one number; much faster than `extend` with one."""
        self._file.write(self._pack(value))
        self.rows += 1

    def close(self) -> None:
        """Fills in the number of rows. Twice is fine."""
        if not self._file.closed:
            self._file.seek(0)
            self._file.write(self._header())
            self._file.close()

    def _header(self) -> bytes:
        shape = (self.rows,) if self._width is None else (self.rows, self._width)
        body = repr({"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape})
        # 10 bytes of magic, version and length come before it, and the line end belongs to it
        padded = body.ljust(_HEADER - 11) + "\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode("latin-1")


def map_array(path: str | Path, dtype: np.dtype | type | None = None) -> np.ndarray:
    """Maps a .npy file as a read-only array (a plain `ndarray`, which slices faster than `np.memmap`).

    Raises:
        BlobError: no such file, not an array, cut off, or another dtype.
    """
    path = Path(path)
    try:
        # a pipe is no file, either: it would be waited for
        if not path.is_file():
            raise BlobError(f"{path}: there is no such file; the index is incomplete: build it again")
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise BlobError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, SyntaxError) as error:
        raise BlobError(f"{path}: damaged array ({error}); build the index again") from error
    if dtype is not None and array.dtype != np.dtype(dtype):
        raise BlobError(f"{path}: holds {array.dtype}, but {np.dtype(dtype)} is needed; build the index again")
    return np.asarray(array).view(np.ndarray)


def array_of_bytes(data: bytes) -> np.ndarray:
    """The array of a .npy file's bytes, read-only. Raises ValueError for others, and for another length than theirs."""
    file = io.BytesIO(data)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("no array in version 1.0 of .npy")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    body = data[file.tell() :]
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(body):
        raise ValueError(f"an array of shape {shape} and {dtype} in {len(body):,} bytes")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if by_columns else "C")


class BlobWriter(Closes):
    """Appends bytes records: `<path>.bin` holds them end to end, `<path>.offsets.npy` (int64) where each starts.

    With `checked`, `<path>.crc.npy` (uint32) has the CRC-32 of each, which is compared whenever a record is read.
    """

    def __init__(self, path: str | Path, *, checked: bool = False) -> None:
        data, offsets = _names(path)
        self._data = data.open("wb", buffering=_SPOOL)
        self._offsets = ArrayWriter(offsets, np.int64)
        self._offsets.append(0)
        self._sums = ArrayWriter(_sums(path), np.uint32) if checked else None
        self._end = 0

    def append(self, record: bytes) -> None:
        """Adds one record, which may be empty. Raises ValueError if closed."""
        self._data.write(record)
        self._end += len(record)
        self._offsets.append(self._end)
        if self._sums is not None:
            self._sums.append(crc32(record))

    def extend(self, records: Iterable[bytes]) -> None:
        """Adds records in order."""
        for record in records:
            self.append(record)

    def close(self) -> None:
        """Makes the files readable. Twice is fine."""
        self._data.close()
        self._offsets.close()
        if self._sums is not None:
            self._sums.close()


class BlobStore(LazySequence[bytes], Closes):
    """The records of a `BlobWriter` by number, read from mapped files; usable by several threads and after a fork."""

    def __init__(self, path: str | Path) -> None:
        """Maps `<path>.bin` and `<path>.offsets.npy`. Raises BlobError if one is missing or they do not fit."""
        data, offsets = _names(path)
        self._offsets: np.ndarray | None = map_array(offsets, np.int64)
        if self._offsets.ndim != 1 or not len(self._offsets) or self._offsets[0] != 0:
            raise BlobError(f"{offsets}: not the offsets of records; build the index again")
        self._count = len(self._offsets) - 1
        self._path, sums = Path(path), _sums(path)
        self._checks: np.ndarray | None = map_array(sums, np.uint32) if sums.exists() else None
        if self._checks is not None and len(self._checks) != self._count:
            raise BlobError(f"{sums}: {len(self._checks)} checksums of {self._count} records; build the index again")
        if not data.is_file():
            raise BlobError(f"{data}: there is no such file; the index is incomplete: build it again")
        try:
            size = data.stat().st_size
            if size != self._offsets[-1]:
                raise BlobError(f"{data}: {size} bytes, but its offsets say {self._offsets[-1]}; build the index again")
            with data.open("rb") as file:
                # an empty file cannot be mapped
                self._data: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise BlobError(f"{data} cannot be read: {error.strerror or error}") from error

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> bytes:
        if self._offsets is None:
            raise ValueError("this BlobStore is closed")
        record = self._data[self._offsets[index] : self._offsets[index + 1]]
        if self._checks is not None and crc32(record) != self._checks[index]:
            raise BlobError(f"{self._path}.bin: record {index} was changed after it was written; build the index again")
        return record

    def close(self) -> None:
        """Unmaps the files. Twice is fine."""
        self._offsets = self._checks = None
        if isinstance(self._data, mmap.mmap):
            self._data.close()


def _names(path: str | Path) -> tuple[Path, Path]:
    base = os.fspath(path)
    return Path(base + ".bin"), Path(base + ".offsets.npy")


def _sums(path: str | Path) -> Path:
    return Path(os.fspath(path) + ".crc.npy")


CHECKED = 1 << 25
"""Files of up to this many bytes together are compared whenever they are opened: tens of milliseconds."""
FIELD = "crc32"


def describe_file(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file, read in pieces."""
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            size, checksum = size + len(block), crc32(block, checksum)
    return {"bytes": size, "crc32": checksum}


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """`describe_file` by name, in sorted order."""
    order = sorted(names)
    # crc32 releases the interpreter lock, so the files are read in parallel; ends: files have an end
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(order, pool.map(lambda name: describe_file(folder / name), order), strict=True))


def files_under(folder: Path, *, without: Collection[str] = ()) -> list[str]:
    """Names of all files under `folder` except those that are called, or are in a folder called, one of `without`."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [name for name in names if name.partition("/")[0] not in without]


def changed_files(folder: Path, files: Mapping[str, Mapping[str, int]], *, limit: float = CHECKED) -> list[str]:
    """Says of each file that is not as `describe_files` found it what is wrong with it.

    Sizes are always compared, checksums only while the files have at most `limit` bytes together.
    """
    contents = sum(facts["bytes"] for facts in files.values()) <= limit
    problems = []
    for name, facts in sorted(files.items()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (size := path.stat().st_size) != facts["bytes"]:
            problems.append(f"{name} has {size} bytes, {facts['bytes']} were written")
        elif contents and describe_file(path) != facts:
            problems.append(f"{name} was changed after it was written (its checksum differs)")
    return problems


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """`manifest`, which JSON can hold, with the checksum of its content as its last field."""
    return {**manifest, FIELD: _content(manifest)}


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError if a sealed manifest is not as it was written."""
    if manifest.get(FIELD) != _content(manifest):
        raise ValueError("it was changed after it was written: its checksum differs")


def _content(manifest: Mapping[str, Any]) -> int:
    plain = {name: value for name, value in manifest.items() if name != FIELD}
    return crc32(json.dumps(plain, sort_keys=True).encode())
