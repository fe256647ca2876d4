"""Indexes on disk: built in runs, resumed, replaced, damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from turngym.core.errors import RetrievalError
from turngym.core.files import FolderInUseError, locked_folder
from turngym.core.manifest import read_manifest, write_manifest
from turngym.retrieval import bm25_build as build
from turngym.retrieval import bm25_index as parts
from turngym.retrieval.bm25_retriever import LuceneIndex

DOCS = [(f"d{row * 37 % 101:03}", f"red shirt w{row % 9} w{row % 4} " + "blue " * (row % 5)) for row in range(100)]
QUERIES = ["red", "blue shirt", "w3 w1 blue", "w8 w8", "nothing"]


def answers(index: LuceneIndex) -> list[list[tuple[str, float]]]:
    return [index.search(query, 20) for query in QUERIES]


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "RUN_TOKENS", 100)


@pytest.fixture(params=[False, True], ids=["dict", "mapped terms"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(parts, "FEW_TERMS", 2)


@pytest.mark.usefixtures("short_runs", "small")
def test_disk_answers_as_memory_does(tmp_path: Path) -> None:
    memory, disk = LuceneIndex.build(DOCS), LuceneIndex.build(iter(DOCS), tmp_path / "deep" / "index")
    opened = LuceneIndex.open(tmp_path / "deep" / "index")
    assert answers(memory) == answers(disk) == answers(opened)
    assert memory.fingerprint == disk.fingerprint == opened.fingerprint
    assert list(opened.ids) == [name for name, _ in DOCS]
    assert list(opened.ids[3:5]) == [name for name, _ in DOCS[3:5]]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["index"]


def test_the_fingerprint_fixes_content_and_settings() -> None:
    base = LuceneIndex.build(DOCS).fingerprint
    changed = [*DOCS[:-1], (DOCS[-1][0], DOCS[-1][1] + "x")]
    shifted = [("a", "bc"), *DOCS[1:]], [("ab", "c"), *DOCS[1:]]
    others = [LuceneIndex.build(docs).fingerprint for docs in (DOCS[:-1], DOCS[::-1], changed, *shifted)]
    others += [LuceneIndex.build(DOCS, k1=1.2).fingerprint, LuceneIndex.build(DOCS, b=0.5).fingerprint]
    assert len({base, *others}) == 8
    assert LuceneIndex.build(DOCS).fingerprint == base


def test_progress_counts_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_PROGRESS", 30)
    for folder in (None, tmp_path / "index"):
        seen: list[int] = []
        LuceneIndex.build(DOCS, folder, progress=seen.append)
        assert seen == [30, 60, 90]


def interrupted(after: int) -> Iterator[tuple[str, str]]:
    yield from DOCS[:after]
    raise KeyboardInterrupt


def analysed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Ids of the documents that are really read into runs."""
    names: list[bytes] = []
    add = build.RunBuilder.add
    monkeypatch.setattr(build.RunBuilder, "add", lambda self, name, text: (names.append(name), add(self, name, text)))
    return names


@pytest.mark.usefixtures("short_runs")
def test_a_killed_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        LuceneIndex.build(interrupted(70), tmp_path / "index")
    assert not (tmp_path / "index").exists()
    left = len(list((tmp_path / "index.building").glob("run-*")))
    assert left == 4
    names = analysed(monkeypatch)
    index = LuceneIndex.build(DOCS, tmp_path / "index")
    assert len(names) < 50
    assert names[-1] == DOCS[-1][0].encode()
    assert answers(index) == answers(LuceneIndex.build(DOCS))
    assert not (tmp_path / "index.building").exists()


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("change", [0, 30, 69])
def test_what_is_left_of_other_documents_is_dropped(tmp_path: Path, change: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        LuceneIndex.build(interrupted(70), tmp_path / "index")
    docs = [*DOCS]
    docs[change] = ("new", "another blue shirt")
    index = LuceneIndex.build(docs, tmp_path / "index")
    fresh = LuceneIndex.build(docs)
    assert answers(index) == answers(fresh)
    assert index.fingerprint == fresh.fingerprint


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("count", [0, 30])
def test_fewer_documents_than_were_left(tmp_path: Path, count: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        LuceneIndex.build(interrupted(70), tmp_path / "index")
    index = LuceneIndex.build(DOCS[:count], tmp_path / "index")
    assert answers(index) == answers(LuceneIndex.build(DOCS[:count]))


def killed(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("short_runs")
def test_killed_while_merging_or_moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in ("merge", "write_manifest"):
        with monkeypatch.context() as patch:
            patch.setattr(build, step, killed)
            with pytest.raises(KeyboardInterrupt):
                LuceneIndex.build(DOCS, tmp_path / "index")
        assert not (tmp_path / "index").exists()
    (tmp_path / "index.building" / "new" / "torn").mkdir(parents=True)
    assert answers(LuceneIndex.build(DOCS, tmp_path / "index")) == answers(LuceneIndex.build(DOCS))


@pytest.mark.usefixtures("short_runs")
def test_bad_input_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="id 'd000' is used by documents 0 and 100"):
        LuceneIndex.build([*DOCS, DOCS[0]], tmp_path / "index")
    assert list(tmp_path.iterdir()) == []


def test_an_index_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    target = tmp_path / "index"
    LuceneIndex.build(DOCS[:5], target).close()
    assert len(LuceneIndex.build(DOCS, target)) == 100
    assert len(LuceneIndex.open(target)) == 100
    shutil.rmtree(target)
    target.mkdir()
    assert len(LuceneIndex.build(DOCS[:7], target)) == 7, "an empty folder is fine"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    (tmp_path / "file").write_text("text")
    for name in ("mine", "file"):
        with pytest.raises(RetrievalError, match="exists and is no BM25 index"):
            LuceneIndex.build(DOCS, tmp_path / name)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "text"
    (tmp_path / "mine").rename(tmp_path / "new.building")
    with pytest.raises(RetrievalError, match=r"new\.building, .* holds 'thesis\.txt'"):
        LuceneIndex.build(DOCS, tmp_path / "new")
    assert (tmp_path / "new.building" / "thesis.txt").read_text() == "text"


def test_two_builders_of_one_folder(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "index.building"), pytest.raises(FolderInUseError, match=r"index\.building"):
        LuceneIndex.build(DOCS, tmp_path / "index")
    assert len(LuceneIndex.build(DOCS, tmp_path / "index")) == 100


@pytest.mark.parametrize("text", [None, "{", "[]", '{"format": "cake"}'])
def test_folders_that_are_no_index(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RetrievalError, match=r"manifest\.json"):
        LuceneIndex.open(tmp_path)


@pytest.mark.parametrize("changes", [{"version": 99}, {"analysis": "german"}, {"statistics": {}}])
def test_an_index_of_another_version_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    LuceneIndex.build(DOCS, tmp_path / "index").close()
    path = tmp_path / "index" / "manifest.json"
    write_manifest(path, {**read_manifest(path, dict[str, object], RetrievalError), **changes})
    with pytest.raises(RetrievalError, match=next(iter(changes))):
        LuceneIndex.open(tmp_path / "index")


def test_damaged_files(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    LuceneIndex.build(DOCS, folder).close()
    rows = (folder / "rows.npy").read_bytes()
    (folder / "rows.npy").write_bytes(rows[:-1])
    with pytest.raises(RetrievalError, match=r"rows\.npy has \d+ bytes, \d+ were written"):
        LuceneIndex.open(folder)
    (folder / "rows.npy").write_bytes(rows[:-1] + b"\x07")
    with pytest.raises(RetrievalError, match=r"rows\.npy was changed after it was written"):
        LuceneIndex.open(folder)
    (folder / "rows.npy").unlink()
    with pytest.raises(RetrievalError, match=r"rows\.npy is missing"):
        LuceneIndex.open(folder)
