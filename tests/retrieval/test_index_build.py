"""Index folders: build, kill at every stage and go on to equal bytes, refuse what does not belong together."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turngym.core.errors import RetrievalError
from turngym.core.files import FolderInUseError
from turngym.core.manifest import read_manifest as read_sealed
from turngym.core.manifest import write_manifest
from turngym.retrieval import index_vectors as vectors_file
from turngym.retrieval.core import Passage
from turngym.retrieval.corpus import CorpusError, PassageStore
from turngym.retrieval.faiss_index import default_parameters, load_faiss, make_index, read_index, train_index
from turngym.retrieval.index import (
    BuildPlan,
    IndexFolderError,
    build_index,
    check_files,
    describe_index,
    read_manifest,
    show_bytes,
)
from turngym.retrieval.index_vectors import add_vectors, sample, streams_ivf
from turngym.retrieval.open_retriever import open_retriever

WORDS = ["river", "castle", "film", "singer", "bridge", "battle", "school", "painter", "island", "album"]
ROWS = 230


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for row in range(ROWS):
            text = " ".join([f"name{row}", *rng.choice(WORDS, 12)])
            file.write(json.dumps({"id": row * 3, "contents": f'"Title {row % 7}"\n{text}'}) + "\n")
    return path


def plan(corpus: Path, out: Path, **more: object) -> BuildPlan:
    return BuildPlan(**{"corpus": corpus, "out": out, "kind": "hybrid", "dim": 64, "shard_rows": 50, **more})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def built(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "index"
    build_index(plan(corpus, out))
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_built(built: Path) -> None:
    manifest = read_manifest(built)
    assert (manifest.kind, manifest.passages) == ("hybrid", ROWS)
    assert manifest.encoder is not None
    assert manifest.encoder.dim == 64
    assert {name.partition("/")[0] for name in manifest.files} == {"encoder", "faiss.index", "lucene", "passages"}
    assert check_files(built, manifest, contents=True) == []
    assert not built.with_name("index.building").exists()
    rows = dict(describe_index(manifest))
    assert rows["passages"] == "230"
    assert rows["faiss index"] == "Flat"
    assert show_bytes(1234567) == "1.2 MB"


@pytest.mark.parametrize("kind", ["bm25", "dense", "hybrid"])
def test_folder_and_memory_find_the_same(corpus: Path, tmp_path: Path, kind: str) -> None:
    build_index(plan(corpus, tmp_path / "i", kind=kind, dim=1024))
    queries = ["name17 river", "Title 3 castle film", "name229"]
    stored = open_retriever(tmp_path / "i")
    in_memory = open_retriever(f"{kind}:{corpus}")
    found = stored.search(queries, 5)
    assert found == in_memory.search(queries, 5)
    assert [hits[0].passage.id for hits in (found[0], found[2])] == ["51", "687"]
    stored.close()
    stored.close()


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from turngym.retrieval.index import BuildPlan, build_index
corpus, out, stage, least = sys.argv[1:]
def progress(name, done, total):
    if name == stage and done >= int(least):
        os.kill(os.getpid(), signal.SIGKILL)
    print(name, done, flush=True)
plan = BuildPlan(corpus=Path(corpus), out=Path(out), kind="hybrid", dim=64, shard_rows=50)
build_index(plan, progress=progress)
"""


@pytest.mark.long
def test_killed_at_every_stage_and_gone_on(corpus: Path, built: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    stages = [("passages", 230), ("vectors", 101), ("index", 60), ("words", 1), ("check", 0), ("check", 64)]
    for number, (stage, least) in enumerate(stages):
        run = subprocess.run(
            [sys.executable, "-c", KILLED, str(corpus), str(out), stage, str(least)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == -signal.SIGKILL, (stage, run.stderr)
        assert not out.exists()
        if number == 1:
            shards = out.with_name("index.building") / "vectors"
            assert [path.name for path in sorted(shards.glob("*.npy"))] == ["00000.npy", "00001.npy"]
            kept = {path: path.stat().st_mtime_ns for path in shards.glob("*.npy")}
        if number == 2:
            assert all(path.stat().st_mtime_ns == made for path, made in kept.items())
            assert len(list(shards.glob("*.npy"))) == 5
    build_index(plan(corpus, out))
    assert content(out) == content(built)


def test_unfinished_build_of_another_plan(corpus: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == "vectors":
            raise Stop

    out = tmp_path / "i"
    with pytest.raises(Stop):
        build_index(plan(corpus, out), progress=stop)
    with pytest.raises(IndexFolderError, match=r"dim 64 then, 32 now.*--restart"):
        build_index(plan(corpus, out, dim=32))
    assert build_index(plan(corpus, out, dim=32), restart=True).encoder.dim == 32  # type: ignore[union-attr]


def test_one_build_at_a_time(corpus: Path, tmp_path: Path) -> None:
    def second(stage: str, done: int, total: int | None) -> None:
        with pytest.raises(FolderInUseError, match=r"i\.building"):
            build_index(plan(corpus, tmp_path / "i"))

    build_index(plan(corpus, tmp_path / "i"), progress=second)


def test_existing_folder_is_replaced_only_on_demand(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "i"
    build_index(plan(corpus, out, kind="bm25"))
    with pytest.raises(IndexFolderError, match="exists already"):
        build_index(plan(corpus, out))
    assert build_index(plan(corpus, out, kind="dense"), force=True).kind == "dense"
    assert read_manifest(out).kind == "dense"
    assert [path.name for path in tmp_path.iterdir()] == ["i"]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").touch()
    with pytest.raises(IndexFolderError, match="is no index, so it is not replaced"):
        build_index(plan(corpus, tmp_path / "photos"), force=True)


def test_files_beside_an_index_stay(corpus: Path, tmp_path: Path) -> None:
    """A backup, or what someone keeps in a folder with the name of the one in which an index is built."""
    (tmp_path / "i.old").mkdir()
    (tmp_path / "i.old" / "mine").touch()
    build_index(plan(corpus, tmp_path / "i", kind="bm25"))
    build_index(plan(corpus, tmp_path / "i", kind="bm25"), force=True)
    assert (tmp_path / "i.old" / "mine").exists()
    (tmp_path / "j.building").mkdir()
    (tmp_path / "j.building" / "mine").touch()
    with pytest.raises(IndexFolderError, match=r"j\.building, .* holds 'mine'"):
        build_index(plan(corpus, tmp_path / "j", kind="bm25"), restart=True)
    assert [path.name for path in (tmp_path / "j.building").iterdir()] == ["mine"]
    (tmp_path / "k.building").touch()
    with pytest.raises(IndexFolderError, match=r"k\.building is a file"):
        build_index(plan(corpus, tmp_path / "k", kind="bm25"))


def test_only_an_index_is_replaced(corpus: Path, tmp_path: Path) -> None:
    mine = tmp_path / "c.jsonl"
    shutil.copy(corpus, mine)
    with pytest.raises(IndexFolderError, match=r"c\.jsonl is no index"):
        build_index(plan(mine, mine), force=True)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text("{}")
    with pytest.raises(IndexFolderError, match="site is no index"):
        build_index(plan(mine, tmp_path / "site"), force=True)
    build_index(plan(mine, tmp_path / "i", kind="bm25"))
    inside = tmp_path / "i" / "c.jsonl"
    mine.rename(inside)
    with pytest.raises(IndexFolderError, match=r"the input .*c\.jsonl"):
        build_index(plan(inside, tmp_path / "i", kind="bm25"), force=True)
    assert inside.exists()


def test_a_link_leads_to_the_folder_that_is_built(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "i").symlink_to(tmp_path / "disk" / "real")
    build_index(plan(corpus, tmp_path / "i", kind="bm25"))
    assert build_index(plan(corpus, tmp_path / "i", kind="dense"), force=True).kind == "dense"
    assert (tmp_path / "i").is_symlink()
    assert read_manifest(tmp_path / "disk" / "real").kind == "dense"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


def test_another_factory_keeps_the_vectors(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that failed its checks is built again as the error advises, without encoding again."""

    def fails(*_: object) -> None:
        raise RetrievalError("too coarse")

    with monkeypatch.context() as patch:
        patch.setattr("turngym.retrieval.index.verify_index", fails)
        with pytest.raises(RetrievalError, match="too coarse"):
            build_index(plan(corpus, tmp_path / "i", factory="HNSW8"))
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "i.building" / "vectors").iterdir()}

    def check(stage: str, done: int, total: int | None) -> None:
        if stage == "index":
            assert {path: path.stat().st_mtime_ns for path in shards} == shards

    made = build_index(plan(corpus, tmp_path / "i", factory="IVF4,Flat", parameters={"nprobe": 3}), progress=check)
    assert made.faiss is not None
    assert (made.faiss.factory, made.faiss.parameters) == ("IVF4,Flat", {"nprobe": 3})
    build_index(plan(corpus, tmp_path / "whole", factory="IVF4,Flat", parameters={"nprobe": 3}))
    assert content(tmp_path / "i") == content(tmp_path / "whole")


def test_a_corpus_that_was_refused_is_built_once_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": 1, "contents": "x"}\nbad\n')
    with pytest.raises(CorpusError, match="line 2"):
        build_index(plan(path, tmp_path / "i"))
    path.write_text('{"id": 1, "contents": "x"}\n')
    assert build_index(plan(path, tmp_path / "i")).passages == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"factory": "IFV3,Flat"}, "faiss cannot make 'IFV3,Flat'"),
        ({"parameters": {"nprobe": 4}}, "takes no search setting nprobe=4"),
        ({"encoder": "hasing"}, "unknown encoder 'hasing'; encoders are: hashing, minilm, hf:MODEL"),
        ({"factory": "IVF4096,Flat"}, "230 vectors cannot train"),
        ({"factory": "HNSW32", "parameters": {"efSearch": 0}}, "efSearch is 0"),
    ],
)
def test_plans_that_cannot_work(corpus: Path, tmp_path: Path, more: dict[str, object], words: str) -> None:
    with pytest.raises(RetrievalError, match=words):
        build_index(plan(corpus, tmp_path / "i", **more))
    assert not (tmp_path / "i").exists()


def test_a_kind_of_index_that_cannot_be_filled_is_refused_before_encoding(corpus: Path, tmp_path: Path) -> None:
    def no_vectors(stage: str, done: int, total: int | None) -> None:
        assert stage == "passages"

    with pytest.raises(RetrievalError, match="IndexIDMap cannot take 230 vectors"):
        build_index(plan(corpus, tmp_path / "i", factory="IDMap,Flat"), progress=no_vectors)


class Coarse:
    """Gives every passage the same vector, with a little noise that its text does not fix."""

    dim, fingerprint, style = 8, "coarse", None

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        return np.ones((len(texts), 8), np.float32)

    def encode_passages(self, passages: Sequence[Passage]) -> np.ndarray:
        return self.encode_queries([passage.text for passage in passages])


def test_an_index_that_does_not_find_its_passages_is_not_finished(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"only \d+% of 64 sampled passages"):
        build_index(plan(corpus, tmp_path / "i", kind="dense", encoder="hf:coarse"), encoder=Coarse())
    assert not (tmp_path / "i").exists()


def test_equal_passages_are_no_sign_of_a_damaged_index(tmp_path: Path) -> None:
    """Of fifty passages with the same words a search for ten finds ten, and not always the one that asks."""
    texts = ["a singer on a bridge"] * 50 + ["a battle by the river"] * 50
    rows = [json.dumps({"id": f"p{row}", "contents": f'"Same"\n{text}'}) for row, text in enumerate(texts)]
    (tmp_path / "c.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    build_index(plan(tmp_path / "c.jsonl", tmp_path / "i"))
    assert check_files(tmp_path / "i", read_manifest(tmp_path / "i"), contents=True) == []


STREAMED = ("Flat", "SQ8", "SQfp16", "IVF4,Flat", "IVF4,SQ8", "IVF40,SQ8", "IVF4,PQ4x4")


@pytest.mark.parametrize("factory", [*STREAMED, "HNSW8", "PCA4,Flat", "PCA4,IVF4,SQ8"])
def test_streamed_file_is_what_faiss_writes(tmp_path: Path, factory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).standard_normal((90, 8)).astype(np.float32)
    (tmp_path / "vectors").mkdir()
    for shard in range(3):
        np.save(tmp_path / "vectors" / f"{shard:05d}.npy", rows[shard * 30 : shard * 30 + 30])
    written = []
    for name in ("write_flat", "write_lists"):
        real = getattr(vectors_file, name)
        monkeypatch.setattr(vectors_file, name, lambda *a, real=real: written.append(real(*a)) or written[-1])
    add_vectors(tmp_path / "vectors", tmp_path / "streamed", factory, 8, 90, lambda *_: None)
    assert written[-1] is (True if factory in STREAMED[:3] else None if factory in STREAMED else False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["streamed", "vectors"]
    index = make_index(factory, 8)
    train_index(index, rows)
    index.add(rows)
    faiss = load_faiss()
    wanted = index.search(rows[:5], 3)[1]
    assert (read_index(tmp_path / "streamed").search(rows[:5], 3)[1] == wanted).all()
    faiss.write_index(index, str(tmp_path / "whole"))
    if factory in STREAMED:
        assert (tmp_path / "streamed").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("rows", [0, 5, 60])
def test_both_forms_of_inverted_lists(rows: int) -> None:
    """faiss writes mostly empty lists in another form than mostly full ones."""
    vectors = np.random.default_rng(0).standard_normal((90, 8)).astype(np.float32)
    index = make_index("IVF32,SQ8", 8)
    train_index(index, vectors)
    assert streams_ivf(index, lambda clusters: vectors[:rows])
    assert not streams_ivf(make_index("Flat", 8), lambda clusters: vectors)


def test_sample_is_even_and_repeatable() -> None:
    shards = [np.full((size, 1), number, np.float32) for number, size in enumerate((10, 0, 90))]
    drawn = sample(shards, 50)
    assert len(drawn) == 50
    assert (drawn == sample(shards, 50)).all()
    assert sample(shards, 100).ravel().tolist() == [0.0] * 10 + [2.0] * 90


def test_default_settings() -> None:
    assert default_parameters("IVF4096,SQ8") == {"nprobe": 128.0}
    assert default_parameters("OPQ16,IVF64,PQ16") == {"nprobe": 32.0}
    assert default_parameters("HNSW32") == {"efSearch": 64.0}
    assert default_parameters("Flat") == {}


def damaged(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


def test_another_corpus_is_refused(built: Path, corpus: Path) -> None:
    right = read_manifest(built).corpus_sha256
    open_retriever(built, corpus_sha256=right).close()
    with pytest.raises(IndexFolderError, match=r"another corpus: .* [0-9a-f]{16}\.\.\., 0000"):
        open_retriever(built, corpus_sha256="0" * 64)
    with pytest.raises(IndexFolderError, match="another corpus"):
        open_retriever(f"bm25:{corpus}", corpus_sha256="0" * 64)


def test_another_encoder_is_refused(built: Path, tmp_path: Path) -> None:
    with pytest.raises(IndexFolderError, match=r"another encoder: it stores hashing-v1:dim=64.*Coarse is coarse"):
        open_retriever(built, encoder=Coarse())
    with pytest.raises(IndexFolderError, match="built with the hashing encoder, not 'hf:x'"):
        open_retriever(built, encoder="hf:x")
    folder = damaged(built, tmp_path)
    np.save(folder / "encoder" / "counts.npy", np.load(folder / "encoder" / "counts.npy") + np.uint32(1))
    with pytest.raises(RetrievalError, match=r"encoder/counts\.npy was changed"):
        open_retriever(folder)


def test_damaged_folders(built: Path, tmp_path: Path) -> None:
    folder = damaged(built, tmp_path)
    with pytest.raises(IndexFolderError, match=r"Did you mean .*copy'?\?"):
        open_retriever(tmp_path / "cpoy")
    with pytest.raises(IndexFolderError, match="no finished index"):
        open_retriever(tmp_path)
    raw = read_sealed(folder / "manifest.json", dict[str, Any], IndexFolderError)
    (folder / "faiss.index").write_bytes((folder / "faiss.index").read_bytes()[:-1])
    with pytest.raises(IndexFolderError, match=r"faiss.index has \d+ bytes, \d+ were written"):
        open_retriever(folder)
    (folder / "faiss.index").unlink()
    with pytest.raises(IndexFolderError, match=r"faiss\.index is missing"):
        open_retriever(folder)
    (folder / "manifest.json").write_text(json.dumps({**raw, "format": 99}))
    with pytest.raises(IndexFolderError, match="its checksum differs"):
        open_retriever(folder)
    for changes in ({"format": 99}, {"passages": -1}):
        write_manifest(folder / "manifest.json", {**raw, **changes})
        with pytest.raises(IndexFolderError, match=next(iter(changes))):
            open_retriever(folder)


def test_flipped_byte_is_found_when_a_small_index_is_opened_and_by_verify(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = damaged(built, tmp_path)
    data = bytearray((folder / "faiss.index").read_bytes())
    data[-5] ^= 1
    (folder / "faiss.index").write_bytes(bytes(data))
    with pytest.raises(IndexFolderError, match=r"faiss\.index was changed after .*build"):
        open_retriever(folder)
    monkeypatch.setattr("turngym.retrieval.index.CHECKED", 10)
    manifest = read_manifest(folder)
    assert check_files(folder, manifest) == []
    assert check_files(folder, manifest, contents=True) == [
        "faiss.index was changed after it was written (its checksum differs)"
    ]


def test_whichever_byte_of_the_passages_flips_one_passage_is_refused_and_verify_says_so(
    built: Path, tmp_path: Path
) -> None:
    folder = damaged(built, tmp_path)
    path = folder / "passages" / "passages.bin"
    whole, manifest, opened = path.read_bytes(), read_manifest(folder), 0
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        # opening reads a few passages alone: the folder may have millions
        with contextlib.suppress(RetrievalError):
            open_retriever(folder)
            opened += 1
        refused = 0
        with PassageStore(folder / "passages") as store:
            for number in range(len(store)):
                try:
                    store[number]
                except RetrievalError as error:
                    refused += f"record {number} was changed after it was written" in str(error)
        assert refused == 1, place
        assert check_files(folder, manifest, contents=True) == [
            "passages/passages.bin was changed after it was written (its checksum differs)"
        ]
    assert opened > 10


def test_names_of_retrievers(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=r"did you mean bm25:c\.jsonl"):
        open_retriever("bm52:c.jsonl")
    with pytest.raises(CorpusError):
        open_retriever(f"bm25:{tmp_path / 'none'}")
    for spec, given in (
        (f"bm25:{corpus}", {"parameters": {"nprobe": 1}}),
        ("http://127.0.0.1:1", {"parameters": {"nprobe": 1}}),
        ("http://127.0.0.1:1", {"corpus_sha256": "0" * 64}),
    ):
        with pytest.raises(RetrievalError, match=f"takes no {next(iter(given))}"):
            open_retriever(spec, **given)  # type: ignore[arg-type]
    build_index(plan(corpus, tmp_path / "b", kind="bm25"))
    with pytest.raises(RetrievalError, match="takes no encoder"):
        open_retriever(tmp_path / "b", encoder=Coarse())
