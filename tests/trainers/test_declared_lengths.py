"""No length that a file declares is believed, and nothing is unpacked beyond what a file of its size may hold."""

from __future__ import annotations

import gzip
import lzma
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from turngym.agents.evaluation.packed_file import read_result
from turngym.core import rows
from turngym.core.errors import RetrievalError, TurngymError
from turngym.core.memory_mapped import array_of_bytes
from turngym.trainers.lm_loss import TextError, read_texts
from turngym.trainers.study.records import read_records
from turngym.trainers.tensor_file import read_tensors

LETTERS = 80_000_000
"""Of a text that parquet, gzip, xz and zip each write in less than a megabyte."""


def npy(rows: int, body: bytes = b"\0" * 64) -> bytes:
    head = repr({"descr": "<f4", "fortran_order": False, "shape": (rows,)}).ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + body


def test_an_array_has_the_bytes_that_it_says() -> None:
    assert array_of_bytes(npy(16)).tolist() == [0.0] * 16
    for wrong in (npy(1 << 36), npy(17), npy(15), b"PK\x03\x04" + npy(16), npy(16)[:9], b""):
        with pytest.raises(ValueError, match=r"."):
            array_of_bytes(wrong)


def test_a_faiss_index_whose_list_is_longer_than_its_file(tmp_path: Path) -> None:
    import faiss

    from turngym.retrieval.faiss_index import read_index

    index = faiss.IndexFlatIP(4)
    index.add(np.zeros((2, 4), np.float32))
    for count in (1 << 28, 1 << 32, 1 << 38):
        data = bytearray(faiss.serialize_index(index).tobytes())
        data[8:16], data[37:45] = struct.pack("<q", count // 4), struct.pack("<q", count)
        (tmp_path / "x.faiss").write_bytes(data)
        with pytest.raises(RetrievalError, match=r"damaged faiss index .*byte_limit|damaged faiss index"):
            read_index(tmp_path / "x.faiss")
    faiss.write_index(index, str(tmp_path / "x.faiss"))
    assert read_index(tmp_path / "x.faiss").ntotal == 2


def test_tensors_that_are_compressed(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1000)}, tmp_path / "plain.pt")
    assert read_tensors(tmp_path / "plain.pt")["a"].sum() == 499_500
    bomb = zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, bomb:
        for entry in plain.infolist():
            bomb.writestr(entry.filename, plain.read(entry))
    with pytest.raises(TurngymError, match=r"bomb.pt: .* bytes that hold more than they are"):
        read_tensors(tmp_path / "bomb.pt")
    (tmp_path / "none.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(TurngymError, match=r"no file of torch\.save"):
        read_tensors(tmp_path / "none.pt")


def zipped(path: Path, text: bytes) -> Path:
    path.write_bytes(gzip.compress(text, mtime=0))
    return path


def test_records_of_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "UNPACKED", 1 << 16)
    path = zipped(tmp_path / "study.json.gz", b'{"records": [' + b" " * 10_000_000 + b"]}")
    with pytest.raises(TurngymError, match=r"unpacks to more than .* bytes, 100 times its size"):
        read_records(path)


def test_a_packed_result_that_asks_for_a_large_unpacker(tmp_path: Path) -> None:
    path = tmp_path / "a.result.xz"
    path.write_bytes(lzma.compress(b"{}\n", filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]))
    with pytest.raises(TurngymError, match="Memory usage limit exceeded"):
        read_result(path)


def test_texts_in_parquet(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["one", None, "", "two"], "other": [1, 2, 3, 4]}), path)
    assert list(read_texts([path])) == ["one", "two"]
    with pytest.raises(TextError, match="no column 'words'; its columns are text, other"):
        list(read_texts([path], "words"))
    with pytest.raises(TextError, match="row 1: other is 1"):
        list(read_texts([path], "other"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TextError, match="cannot be read as parquet"):
        list(read_texts([path]))


def test_a_changed_bit_of_a_parquet_ends_no_process(tmp_path: Path) -> None:
    """One in the statistics of a column would: pyarrow checks them where no exception is caught."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": ["hello"] * 3}), path, store_schema=False)
    whole, refused = path.read_bytes(), 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            list(read_texts([path]))
        except TextError as error:
            refused += str(path) in str(error)
    assert refused > len(whole) // 4
