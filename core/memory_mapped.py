"""Files of an index that are written row by row and read through memory maps, so that processes share their pages.

`ArrayWriter` and `map_array` are for arrays, `BlobWriter` and `BlobStore` for records of bytes.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
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


def map_array(path: str | Path) -> np.ndarray:
    """Maps a .npy file as a read-only array (a plain `ndarray`, which slices faster than `np.memmap`).

    Raises:
        BlobError: no such file, not an array, or cut off.
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
        self._offsets: np.ndarray | None = map_array(offsets)
        self._count = len(self._offsets) - 1
        self._path, sums = Path(path), _sums(path)
        self._checks: np.ndarray | None = map_array(sums) if sums.exists() else None
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
