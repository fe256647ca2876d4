"""Records and arrays written row by row and mapped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.memory_mapped import ArrayWriter, BlobError, BlobStore, BlobWriter, map_array


def written(path: Path, records: list[bytes]) -> BlobStore:
    with BlobWriter(path) as writer:
        writer.extend(records)
    return BlobStore(path)


@given(records=st.lists(st.binary(max_size=20), max_size=30))
def test_records_come_back(tmp_path_factory: pytest.TempPathFactory, records: list[bytes]) -> None:
    with written(tmp_path_factory.mktemp("blobs") / "x", records) as store:
        assert len(store) == len(records)
        assert list(store) == records == store[:]
        assert [store[-1 - row] for row in range(len(records))] == records[::-1]


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    store = written(tmp_path / "x", [b"a", b"b"])
    for row in (2, -3):
        with pytest.raises(IndexError):
            store[row]


def test_threads_read_one_store(tmp_path: Path) -> None:
    store = written(tmp_path / "x", [str(row).encode() * 50 for row in range(200)])
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda row: store[row % 200] == str(row % 200).encode() * 50, range(2000)))


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    written(tmp_path / "x", [b"abc", b"de"]).close()
    with pytest.raises(BlobError, match="there is no such file"):
        BlobStore(tmp_path / "y")
    (tmp_path / "x.bin").write_bytes(b"abcd")
    with pytest.raises(BlobError, match="4 bytes, but its offsets say 5"):
        BlobStore(tmp_path / "x")
    (tmp_path / "x.bin").unlink()
    with pytest.raises(BlobError, match="cannot be read: No such file"):
        BlobStore(tmp_path / "x")
    (tmp_path / "x.offsets.npy").write_bytes(b"nonsense")
    with pytest.raises(BlobError, match="damaged array"):
        BlobStore(tmp_path / "x")


def test_arrays_grow_by_rows(tmp_path: Path) -> None:
    with ArrayWriter(tmp_path / "a.npy", np.float32, 3) as writer:
        writer.extend(np.ones((2, 3)))
        writer.extend(np.zeros((0, 3)))
        writer.extend(np.full((1, 3), 2))
        with pytest.raises(ValueError, match="width 3"):
            writer.extend(np.ones((1, 4)))
    writer.close()
    mapped = map_array(tmp_path / "a.npy")
    assert mapped.tolist() == [[1, 1, 1], [1, 1, 1], [2, 2, 2]]
    assert type(mapped) is np.ndarray
    assert np.load(tmp_path / "a.npy").dtype == np.float32
    with pytest.raises(ValueError, match="closed"):
        writer.extend(np.ones((1, 3)))


def test_an_array_that_is_cut_off(tmp_path: Path) -> None:
    with ArrayWriter(tmp_path / "a.npy", np.int64) as writer:
        writer.extend([1, 2, 3])
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-4])
    with pytest.raises(BlobError, match="damaged array"):
        map_array(tmp_path / "a.npy")
