"""Builds an index folder from a corpus file: streamed, resumed after a kill, verified, moved into place at the end.

Work happens in `OUT.building` beside OUT. Passages are stored first, then vectors shard by shard (`vectors/00000.npy`,
each whole or absent), then the faiss index, then the words of BM25; a stage that was finished is not done again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.retrieval.bm25 import indexed_documents
from turngym.retrieval.core import Encoder
from turngym.retrieval.corpus import PassageStore, read_corpus
from turngym.retrieval.dense.faiss_io import make_index, set_parameters
from turngym.retrieval.encoders.find import find_encoder, is_built_in
from turngym.retrieval.encoders.hashing import HashingEncoder, HashingFit
from turngym.retrieval.encoders.hugging_face import HuggingFaceEncoder
from turngym.retrieval.index.manifest import (
    ENCODER,
    FAISS,
    KINDS,
    LUCENE,
    MANIFEST,
    PASSAGES,
    EncoderRecord,
    FaissRecord,
    IndexFolderError,
    IndexManifest,
    Kind,
    read_manifest,
    record_files,
)
from turngym.retrieval.index.vectors import add_vectors, default_parameters, write_vectors
from turngym.retrieval.index.verify import verify_index
from turngym.retrieval.lucene import LuceneIndex
from turngym.retrieval.passages import PassageWriter

STATE, LOCK, VECTORS = "state.json", "lock", "vectors"
"""Parts of the folder of an unfinished build that the index does not keep."""

Progress = Callable[[str, int, int | None], None]
"""Called with a stage, the passages it has done, and how many there are (None while unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What to build from which corpus."""

    corpus: Path
    """JSONL file, plain or .gz."""
    out: Path
    """Folder of the index; must not exist yet."""
    kind: Kind = "bm25"
    """bm25, dense, or hybrid: both, by reciprocal rank fusion."""
    encoder: str = "hashing"
    """hashing, hf:MODEL (a folder or a hub name), or an encoder of another package (see encoders.find)."""
    style: str | None = None
    """e5, bge, dpr or plain; by default what the model's name says."""
    passage_model: str | None = None
    """Second model, where passages have their own (dpr)."""
    device: str = "cpu"
    """Of a Hugging Face encoder."""
    dim: int = 1024
    """Dimensions of the hashing encoder."""
    factory: str = "Flat"
    """faiss index: Flat, SQ8, HNSW32, IVF4096,SQ8, ..."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """faiss search settings to store (nprobe, efSearch); by default what suits the factory."""
    shard_rows: int = 65_536
    """Passages per shard: what a kill can cost."""

    def same_build(self) -> dict[str, Any]:
        """What must be equal for an unfinished build to go on."""
        stat = self.corpus.stat()
        # a corpus that was moved or another device gives the same index
        plan = {key: value for key, value in dataclasses.asdict(self).items() if key not in ("corpus", "out", "device")}
        return {**plan, "corpus_bytes": stat.st_size, "corpus_mtime_ns": stat.st_mtime_ns}


def build_index(
    plan: BuildPlan,
    *,
    encoder: Encoder | None = None,
    progress: Progress | None = None,
    restart: bool = False,
    force: bool = False,
) -> IndexManifest:
    """Build the index of `plan`, or go on with it where a build of the same plan was stopped.

    Args:
        encoder: Use this Hugging Face encoder instead of loading `plan.encoder` (its name is still recorded).
        restart: Throw away an unfinished build instead of going on with it.
        force: Replace the folder `plan.out` if it exists, at the very end.

    Raises:
        CorpusError: a row that cannot be used.
        IndexFolderError: `out` exists, another build is at work, or an unfinished build has another plan.
        RetrievalError: the encoder or the factory string cannot be used, or the finished index fails its checks.
    """
    report = progress or (lambda stage, done, total: None)
    _check(plan, force)
    work = plan.out.with_name(plan.out.name + ".building")
    with _locked(work):
        _prepare(work, plan, restart)
        manifest = _Build(plan, work, report, encoder).run()
        _move_into_place(work, plan.out)
    return manifest


@dataclass(slots=True)
class _Build:
    plan: BuildPlan
    work: Path
    report: Progress
    encoder: Encoder | None

    def run(self) -> IndexManifest:
        plan, work = self.plan, self.work
        # killed between the manifest and the move: only the move is left
        if (work / MANIFEST).is_file():
            return read_manifest(work)
        wants_vectors, wants_words = plan.kind != "bm25", plan.kind != "dense"
        if wants_vectors:
            self._early_checks()
        with self._passages() as store:
            manifest = IndexManifest(kind=plan.kind, passages=len(store), corpus_sha256=store.sha256)
            if wants_vectors:
                encoder, record = self._encoder()
                write_vectors(store, encoder, work / VECTORS, plan.shard_rows, self.report)
                add_vectors(work / VECTORS, work / FAISS, plan.factory, encoder.dim, len(store), self.report)
                parameters = {**default_parameters(plan.factory, len(store)), **plan.parameters}
                faiss = FaissRecord(factory=plan.factory, parameters=parameters)
                manifest = dataclasses.replace(manifest, encoder=record, faiss=faiss)
            if wants_words:
                self._words(store)
        verify_index(work, manifest, self.encoder, work / VECTORS, self.report)
        manifest = dataclasses.replace(manifest, files=record_files(work, without=(LOCK, STATE, VECTORS)))
        manifest.save(work)
        return manifest

    def _early_checks(self) -> None:
        """What would fail after hours fails now: the factory string, the settings, the model."""
        dim = self.plan.dim
        if self.plan.encoder != "hashing":
            dim = self._encoder()[0].dim
        set_parameters(make_index(self.plan.factory, dim), self.plan.parameters)

    def _passages(self) -> PassageStore:
        folder, encoder = self.work / PASSAGES, self.work / ENCODER
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
                fit.encoder(self.plan.dim).save(encoder)
            # Last: passages.json says that the stage is complete, the encoder's counts included.
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
            return self._other()
        model = plan.encoder.removeprefix("hf:")
        if self.encoder is None:
            self.encoder = HuggingFaceEncoder(model, plan.style, passage_model=plan.passage_model, device=plan.device)
        style = getattr(self.encoder, "style", None)
        record = EncoderRecord(
            kind="hf",
            fingerprint=self.encoder.fingerprint,
            dim=self.encoder.dim,
            model=model,
            passage_model=plan.passage_model,
            style=None if style is None else dataclasses.asdict(style),
        )
        return self.encoder, record

    def _other(self) -> tuple[Encoder, EncoderRecord]:
        """The encoder of another package."""
        name = self.plan.encoder
        if self.encoder is None:
            self.encoder = find_encoder(name)(self.plan.device)
        fingerprint, dim = self.encoder.fingerprint, self.encoder.dim
        return self.encoder, EncoderRecord(kind="other", fingerprint=fingerprint, dim=dim, model=name)

    def _words(self, store: PassageStore) -> None:
        folder = self.work / LUCENE
        if not folder.is_dir():
            docs = indexed_documents(store)
            # It appears whole or not at all, and goes on by itself where it was killed.
            LuceneIndex.build(docs, folder, progress=lambda done: self.report("words", done, len(store))).close()
        self.report("words", len(store), len(store))


def _check(plan: BuildPlan, force: bool) -> None:
    if plan.kind not in KINDS:
        raise IndexFolderError(f"index kind {plan.kind!r}; there are {', '.join(KINDS)}")
    if not is_built_in(plan.encoder):
        find_encoder(plan.encoder)
    if plan.shard_rows < 1:
        raise IndexFolderError(f"shard_rows is {plan.shard_rows}; it must be at least 1")
    if not plan.corpus.is_file():
        next(read_corpus(plan.corpus))  # raises with the right words
    if plan.out.exists():
        if not force:
            raise IndexFolderError(f"{plan.out} exists already; choose another folder, or replace it with --force")
        if plan.out.is_dir() and any(plan.out.iterdir()) and not (plan.out / MANIFEST).is_file():
            raise IndexFolderError(f"{plan.out} is no index, so it is not replaced; choose another folder")


def _prepare(work: Path, plan: BuildPlan, restart: bool) -> None:
    """Leave `work` either empty or with an unfinished build of the same plan."""
    state, wanted = work / STATE, plan.same_build()
    if restart or not state.is_file():
        for path in work.iterdir():
            if path.name != LOCK:
                _remove(path)
        scratch = state.with_suffix(".tmp")
        scratch.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, state)
        return
    found = json.loads(state.read_text(encoding="utf-8"))
    differ = sorted(key for key in {*found, *wanted} if found.get(key) != json.loads(json.dumps(wanted)).get(key))
    if differ:
        changes = ", ".join(f"{key} {found.get(key)!r} then, {wanted.get(key)!r} now" for key in differ)
        raise IndexFolderError(
            f"{work} holds an unfinished build with another plan ({changes}); give the same options to go on with it, "
            "or --restart to throw it away"
        )


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """One build at a time per folder; the lock goes with the process, so a kill leaves none behind."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / LOCK).open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not on Windows
            pass
        except OSError as error:
            raise IndexFolderError(f"another build is at work in {work}; wait for it or stop it") from error
        yield


def _move_into_place(work: Path, out: Path) -> None:
    """Rename the finished folder; an older index stays whole until the new one is in its place."""
    for name in (VECTORS, LOCK):
        _remove(work / name)
    old = out.with_name(out.name + ".old")
    _remove(old)
    if out.exists():
        os.replace(out, old)
    os.replace(work, out)
    # The state goes last: until the folder has moved, it says that this is a build to go on with.
    _remove(out / STATE)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
