"""Reading a corpus: both row forms, every kind of broken row named by file, line and value, content hash, store."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turngym.core.errors import RetrievalError
from turngym.retrieval import corpus as corpus_module
from turngym.retrieval.core import Passage
from turngym.retrieval.corpus import CorpusError, PassageStore, PassageWriter, corpus_sha256, read_corpus
from turngym.retrieval.open_retriever import open_retriever

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def write(path: Path, rows: Sequence[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def error_of(path: Path) -> str:
    with pytest.raises(CorpusError) as caught:
        list(read_corpus(path))
    return str(caught.value)


def test_both_forms_give_the_same_passage(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [{"id": "7", "contents": '"A "quoted" title"\nfirst line\nsecond'}])
    second = write(tmp_path / "b.jsonl", [{"id": 7, "title": 'A "quoted" title', "text": "first line\nsecond"}])
    wanted = Passage(id="7", title='A "quoted" title', text="first line\nsecond")
    assert list(read_corpus(first)) == list(read_corpus(second)) == [wanted]
    assert wanted.contents == '"A "quoted" title"\nfirst line\nsecond'
    assert corpus_sha256(read_corpus(first)) == corpus_sha256(read_corpus(second))


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"T"\n', "T", ""),
        ('"T"', "T", ""),
        ("Bare title\ntext", "Bare title", "text"),
        ("only text", "", "only text"),
        ('"\ntext', '"', "text"),
        ('""\ntext', "", "text"),
        ('"T"\r\nfirst\r\nsecond', "T", "first\r\nsecond"),
        ("", "", ""),
    ],
)
def test_odd_contents(tmp_path: Path, contents: str, title: str, text: str) -> None:
    (passage,) = read_corpus(write(tmp_path / "c.jsonl", [{"id": 0, "contents": contents}]))
    assert (passage.title, passage.text) == (title, text)


def test_gzip_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl.gz"
    raw = '﻿{"id": 1, "contents": "a"}\r\n\r\n  \n{"id": 2, "contents": "b"}'.encode()
    path.write_bytes(gzip.compress(raw))
    assert [passage.id for passage in read_corpus(path)] == ["1", "2"]
    path.write_bytes(gzip.compress(raw)[:-12])
    assert "c.jsonl.gz, after line" in error_of(path)


def test_missing_fields_of_pandas_and_beir(tmp_path: Path) -> None:
    """NaN is what pandas writes for null; a passage without a word has its row, and its place in an index."""
    rows = ['{"_id": "a", "id": NaN, "title": NaN, "text": "x"}', {"_id": "b", "title": "", "text": ""}]
    path = write(tmp_path / "c.jsonl", rows)
    assert [(each.id, each.title, each.text) for each in read_corpus(path)] == [("a", "", "x"), ("b", "", "")]
    assert [[hit.passage.id for hit in hits] for hits in open_retriever(f"bm25:{path}").search(["x", "b"], 2)] == [
        ["a"],
        [],
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": "x9"}, ["line 2", "'x9'", "no contents", "['id']"]),
        ({"id": "x9", "contents": ["a"]}, ["line 2", "contents of row 'x9' is [\"a\"]"]),
        ({"contents": "a"}, ["line 2", "no id"]),
        ({"id": 1.5, "contents": "a"}, ["line 2", "id 1.5"]),
        ({"id": "", "contents": "a"}, ["line 2", "id ''"]),
        ({"id": "a\0b", "contents": "a"}, ["line 2", "NUL"]),
        ("{'id': 1}", ["line 2", "not JSON", "{'id': 1}"]),
        ('{"id": 1, "contents": "\\ud800x"}', ["line 2", "\\ud800", "character 0"]),
        ('{"id": "\\ud800", "contents": "a"}', ["line 2", "the id has half a surrogate pair"]),
        ({"id": "x9", "title": 3, "text": "a"}, ["line 2", "title of row 'x9' is 3"]),
        ({"id": "x9", "title": "a", "text": []}, ["line 2", "text of row 'x9' is []"]),
        ("[" * 100_000, ["line 2", "not JSON"]),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, row: Any, words: list[str]) -> None:
    path = write(tmp_path / "bad.jsonl", [{"id": "ok", "contents": "fine"}, row])
    message = error_of(path)
    assert all(word in message for word in [str(path), *words]), message
    assert len(message) < 500


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"id": 1, "contents": "ok"}\n{"id": 2, "contents": "caf\xe9"}\n')
    assert "latin.jsonl, line 2: byte 0xe9 at column 27 is not UTF-8" in error_of(path)


def test_empty_missing_folder(tmp_path: Path) -> None:
    assert "no passages" in error_of(write(tmp_path / "empty.jsonl", ["", "  "]))
    assert "no such corpus file" in error_of(tmp_path / "none.jsonl")
    assert "is a folder" in error_of(tmp_path)


def test_repeated_id_names_both_lines(tmp_path: Path) -> None:
    rows = [{"id": name, "contents": "x"} for name in ["a", "b", "", "c", 1, "1"] if name]
    assert "line 5: id '1' was used in line 4 already" in error_of(write(tmp_path / "c.jsonl", rows))


def test_ids_that_share_a_digest_are_not_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "id_digest", lambda name: 5)
    path = write(tmp_path / "c.jsonl", [{"id": name, "contents": "x"} for name in "abc"])
    assert [passage.id for passage in read_corpus(path)] == ["a", "b", "c"]


def test_titles_may_repeat(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [{"id": i, "title": "same", "text": str(i)} for i in range(3)])
    assert [passage.text for passage in read_corpus(path)] == ["0", "1", "2"]


def test_content_hash_is_pinned_and_sees_field_borders() -> None:
    one = [Passage(id="1", title="ab", text="c")]
    assert corpus_sha256(one) == hashlib.sha256(b"1 2 1\n1abc").hexdigest()
    assert corpus_sha256(one) != corpus_sha256([Passage(id="1", title="a", text="bc")])
    assert corpus_sha256([*one, Passage(id="2", title="", text="d")]) != corpus_sha256(one)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), st.tuples(TEXT, TEXT), max_size=8
    )
)
def test_store_gives_back_what_was_put_in(
    tmp_path_factory: pytest.TempPathFactory, rows: dict[str, tuple[str, str]]
) -> None:
    passages = [Passage(id=name, title=title, text=text) for name, (title, text) in rows.items()]
    with stored(passages, tmp_path_factory.mktemp("store")) as store:
        assert list(store) == passages
        assert len(store) == len(passages)
        assert store.sha256 == corpus_sha256(passages)
        assert list(store[1:3]) == passages[1:3]
        with pytest.raises(IndexError):
            store[8]
        if passages:
            assert store[-1] == passages[-1]


def stored(passages: Iterable[Passage], folder: Path) -> PassageStore:
    writer = PassageWriter(folder)
    for passage in passages:
        writer.add(passage)
    writer.finish()
    return PassageStore(folder)


def test_store_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"passages\.json"):
        PassageStore(tmp_path)


def test_real_corpora(search_data: Path) -> None:
    path = search_data / "2wiki_corpus.jsonl"
    passages = list(read_corpus(path))
    assert len(passages) == 7005
    with path.open(encoding="utf-8") as file:
        assert all(
            json.loads(line)["contents"] == passage.contents for line, passage in zip(file, passages, strict=True)
        )
