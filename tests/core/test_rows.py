"""Reading other people's files: lines, arrays, tables, gzip; what is damaged or too large is named and bounded."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core import rows as rows_module
from turngym.core.rows import path_stamp, read_array, read_object, read_rows, show, stem


class FileError(Exception):
    """What the readers are told to raise here."""


def found(path: Path) -> list[tuple[str, Any]]:
    return [(row.place, row.value) for row in read_rows(path, "an object", FileError)]


def error_of(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        found(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


ROWS = [{"id": 1, "text": "a"}, {"id": 2, "text": 'b "c"\td'}]


def test_the_same_rows_in_every_kind_of_file(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    table = 'id\ttext\n1\ta\n2\t"b ""c"" d"\n\n3\t\n'
    texts = {
        "lines.jsonl": lines,
        "array.json": json.dumps(ROWS),
        "pretty.json": json.dumps(ROWS, indent=4),
        "Data.json": json.dumps({"Version": 1.0, "Data": ROWS, "Domain": "web"}),
        "data.json": json.dumps({"name": 'x " [{', "data": ROWS, "list": [1]}, indent=2),
        "blank.jsonl": "\ufeff\r\n" + lines.replace("\n", "\r\n\r\n"),
    }
    for name, text in texts.items():
        for path, content in (
            (tmp_path / name, text.encode()),
            (tmp_path / f"{name}.gz", gzip.compress(text.encode())),
        ):
            path.write_bytes(content)
            assert [value for _, value in found(path)] == ROWS, path.name
    (tmp_path / "table.tsv").write_text(table, encoding="utf-8")
    assert found(tmp_path / "table.tsv") == [
        ("line 2", {"id": "1", "text": "a"}),
        ("line 3", {"id": "2", "text": 'b "c" d'}),
        ("line 5", {"id": "3", "text": ""}),
    ]
    (tmp_path / "table.csv").write_text('id,text\n1,"a, b\nc"\n\n2,\n', encoding="utf-8")
    assert found(tmp_path / "table.csv") == [
        ("line 3", {"id": "1", "text": "a, b\nc"}),
        ("line 5", {"id": "2", "text": ""}),
    ]
    # as long as a row of JSON may be, far beyond csv's own limit
    long, lines = "x" * 200_000, "y\n" * 100_000
    (tmp_path / "long.csv").write_text(f'id,text\n1,{long}\n2,"{lines}"\n', encoding="utf-8")
    assert [len(row["text"]) for _, row in found(tmp_path / "long.csv")] == [len(long), len(lines)]
    assert [place for place, _ in found(tmp_path / "blank.jsonl")] == ["line 2", "line 4"]
    assert [place for place, _ in found(tmp_path / "array.json")] == ["row 1", "row 2"]


def test_quotation_marks_of_a_tsv_belong_to_its_texts(tmp_path: Path) -> None:
    texts = ['"Long ones', 'cut to 6"', '"Heroes"', 'a "b" c', '"', '""', '"""', '"a"" b', 'x "" y', "", "'"]
    lines = "".join(f"{number}\t{text}\n" for number, text in enumerate(texts))
    (tmp_path / "a.tsv").write_text(f"id\ttext\n{lines}", encoding="utf-8")
    assert [row["text"] for _, row in found(tmp_path / "a.tsv")] == texts
    # what writers quote because of quotation marks
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"a ""b"""\n2\t"""a"""\n', encoding="utf-8")
    assert [row["text"] for _, row in found(tmp_path / "a.tsv")] == ['a "b"', '"a"']
    # a table by commas has quotation marks around ends of lines
    (tmp_path / "a.tsv").write_text('id\ttext\n1\t"a\nb"\n', encoding="utf-8")
    assert "line 3: 1 cells; the header has 2" in error_of(tmp_path / "a.tsv")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "line 2: not JSON"),
        ("a.jsonl", b'{"a": 1}\n' + b"[" * 100_000, "line 2: not JSON"),
        ("a.jsonl", b'{"a": "\xed\xa0\x80"}\n', "line 1: byte 0xed at column 8 is not UTF-8"),
        ("a.json", b'{\n "question": "one object over several lines"\n}\n', "one JSON object per line: an object"),
        ("a.json", b'[{"a": 1}, {"a"', "damaged after element 1"),
        ("a.json", b'{"data": [{"a": 1}, {"a"', "damaged after element 1"),
        ("a.tsv", b"a\tb\n1\t2\t3\n", "line 2: 3 cells; the header has 2"),
        ("a.tsv", b"a\tb\n1\t2\r3\n", "line 2: not a row of the table: a carriage return alone"),
        ("a.tsv", b'a\tb\n1\t"x ""y""\tz"\n', "line 2: 3 cells; the header has 2"),
        ("a.tsv", b"a\ta\n1\t2\n", "line 1: two columns have one name"),
        ("a.csv", b'a,b\n"1,2\n', "line 2: not a row of the table"),
        ("a.csv", b"a,b\r1,2\r", "line 1: not a row of the table: a carriage return alone"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 50, mtime=0)[:-12], "cannot be read further"),
        ("a.jsonl.xz", lzma.compress(b"{}"), "is compressed by xz; valid: JSON or a table as text"),
        ("a.json", b"PAR1 and more", "a parquet file; questions and pre-training text"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert words in error_of(tmp_path / name)


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    assert "is a folder" in error_of(tmp_path)
    assert "No such file" in error_of(tmp_path / "none.jsonl")


def test_a_small_gzip_of_a_very_large_file_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "UNPACKED", 1 << 16)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "a", "answer": "b"}\n' * (1 << 16), 9))
    assert path.stat().st_size < 1 << 17
    assert "unpacks to more than" in error_of(path)
    # as one line, as one element, and as blanks between rows
    for content in (b'{"a": "' + b"x" * (1 << 20), b"[" + b'"' + b"x" * (1 << 20), b"\n" * (1 << 20), b" " * (1 << 20)):
        path.write_bytes(gzip.compress(content, 9))
        assert "unpacks to more than" in error_of(path)


def test_a_row_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "LONGEST_ROW", 100)
    monkeypatch.setattr(rows_module, "CHUNK", 64)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": "' + "x" * 200 + '"}\n')
    assert "line 2: longer than 100 bytes" in error_of(path)
    path.write_text('[{"a": 1}, {"a": "' + "x" * 2000 + '"}]')
    assert "damaged after element 1" in error_of(path)


def test_an_honest_gzip_of_many_alike_rows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl.gz"
    path.write_bytes(
        gzip.compress(b"".join(b'{"id": %d, "text": "the same words again"}\n' % n for n in range(20_000)))
    )
    assert sum(1 for _ in read_rows(path, "an object", FileError)) == 20_000


def test_two_gzips_in_one_file_are_one(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n') + gzip.compress(b'{"a": 2}\n'))
    assert [value["a"] for _, value in found(path)] == [1, 2]
    # the file's own checksum is compared
    damaged = bytearray(gzip.compress(b'{"a": 1}\n'))
    damaged[-8:-4] = zlib.crc32(b"something else").to_bytes(4, "little")
    path.write_bytes(damaged)
    assert "cannot be read further" in error_of(path)


def test_stamps_tell_an_edited_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("one")
    before = path_stamp(path)
    assert path_stamp(path) == before
    times = path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same size and time
    assert path_stamp(path) != before
    folder = path_stamp(tmp_path)
    other = tmp_path / "b"
    shutil.copy2(path, other)
    os.replace(other, path)
    assert path_stamp(tmp_path) != folder
    assert path_stamp(tmp_path / "none") == ()


def test_names_and_values_in_errors() -> None:
    assert [stem(Path(name)) for name in ("q.jsonl.gz", "q.json", "v1.0_dev.jsonl", "q")] == ["q", "q", "v1.0_dev", "q"]
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert show(deep) == "a list that is nested too deep"
    assert show("a\nb") == "'a\\nb'"
    assert len(show("x" * 1000)) < 100
    assert show({"a": "\ud800"}).isascii()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(
    value=st.lists(JSON, max_size=5) | st.dictionaries(st.text(), JSON, max_size=5),
    chunk=st.integers(1, 30),
    ascii_only=st.booleans(),
    indent=st.none() | st.just(2),
)
def test_streamed_json_is_what_json_loads(
    tmp_path_factory: pytest.TempPathFactory, value: Any, chunk: int, ascii_only: bool, indent: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "stream.json"
    path.write_text(json.dumps(value, ensure_ascii=ascii_only, indent=indent), "utf-8", errors="surrogatepass")
    before = rows_module.CHUNK
    rows_module.CHUNK = chunk
    try:
        assert (
            list(read_array(path, FileError)) if isinstance(value, list) else dict(read_object(path, FileError))
        ) == value
    finally:
        rows_module.CHUNK = before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "begins with ''"),
        ('{"a": 1}', "begins with '{'; valid: a list of products"),
        ("[1, 2", "damaged after element 1"),
        ("[1 2]", "'2' where ',' is needed"),
        ('[{"a": tru}]', "damaged after element 0"),
        ("[" * 100_000, "too deep"),
        ('["\udc80"]', "not UTF-8"),
    ],
)
def test_damaged_json_says_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "items.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(FileError, match=words) as error:
        list(read_array(path, FileError))
    assert "items.json" in str(error.value)


def test_an_object_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "ins.json"
    path.write_text("[]", "utf-8")
    with pytest.raises(FileError, match="one entry per product"):
        list(read_object(path, FileError))
