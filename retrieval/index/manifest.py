"""What an index folder says about itself: which corpus, encoder and settings it was built from, and its files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from turngym.retrieval.checksums import CHECKED, check_manifest, sealed
from turngym.retrieval.core import RetrievalError

FORMAT = 1
"""Version of the folder's layout."""
MANIFEST = "manifest.json"
PASSAGES, LUCENE, FAISS, ENCODER = "passages", "lucene", "faiss.index", "encoder"
"""Parts of an index folder."""

Kind = Literal["bm25", "dense", "hybrid"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class IndexFolderError(RetrievalError):
    """An index folder cannot be used: missing, damaged, or of another corpus, encoder or version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRecord:
    """The encoder that made the vectors."""

    kind: Literal["hashing", "hf", "other"]
    """other: of another package, found again by the name that stands in `model`."""
    fingerprint: str
    dim: int
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
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexManifest:
    """Everything an index depends on; `files` covers every other file of the folder."""

    kind: Kind
    passages: int
    corpus_sha256: str
    encoder: EncoderRecord | None = None
    faiss: FaissRecord | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        """Fixes corpus, encoder and index; search settings are added by the retriever."""
        parts = [f"index-v{self.format}", self.kind, f"corpus={self.corpus_sha256[:16]}"]
        if self.faiss is not None and self.encoder is not None:
            parts += [self.faiss.factory, self.encoder.fingerprint]
        return ":".join(parts)

    def save(self, folder: Path) -> None:
        text = json.dumps(sealed(dataclasses.asdict(self)), indent=1, sort_keys=True, ensure_ascii=False)
        scratch = folder / (MANIFEST + ".tmp")
        scratch.write_text(text + "\n", encoding="utf-8")
        os.replace(scratch, folder / MANIFEST)


def read_manifest(folder: str | Path) -> IndexManifest:
    """The manifest of an index folder.

    Raises:
        IndexFolderError: no such folder, no manifest, or one of another version.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        raise IndexFolderError(f"{folder}: there is no such index folder{_hint(folder)}")
    if not path.is_file():
        raise IndexFolderError(
            f"{folder}: no {MANIFEST} in it, so it is no finished index; `turngym index build` makes one"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise IndexFolderError(
                f"{path}: index format {raw['format']!r}, this version of turngym reads {FORMAT}; build the index again"
            )
        check_manifest(raw)
        if raw["kind"] not in KINDS:
            raise IndexFolderError(f"{path}: index kind {raw['kind']!r}; there are {', '.join(KINDS)}")
        return IndexManifest(
            kind=raw["kind"],
            passages=int(raw["passages"]),
            corpus_sha256=str(raw["corpus_sha256"]),
            encoder=EncoderRecord(**raw["encoder"]) if raw["encoder"] else None,
            faiss=FaissRecord(**raw["faiss"]) if raw["faiss"] else None,
            files={name: FileRecord(**record) for name, record in raw["files"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IndexFolderError(f"{path}: damaged manifest ({error}); build the index again") from error


def check_files(folder: str | Path, manifest: IndexManifest, *, hashes: bool = False) -> list[str]:
    """What is wrong with the folder's files: missing, another size or other bytes.

    Bytes are compared, by their hash, with `hashes` and in small folders; passages have checksums of their own, which
    are compared as they are read.
    """
    folder = Path(folder)
    rows = f"{PASSAGES}/passages.bin"
    total = sum(record.bytes for name, record in manifest.files.items() if name != rows)
    problems = []
    for name, record in sorted(manifest.files.items()):
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif (size := path.stat().st_size) != record.bytes:
            problems.append(f"{name} has {size} bytes, {record.bytes} expected")
        elif (hashes or (total <= CHECKED and name != rows)) and file_sha256(path) != record.sha256:
            problems.append(f"{name} has other bytes than were built")
    return problems


def record_files(folder: Path, *, without: Collection[str] = ()) -> dict[str, FileRecord]:
    """Size and hash of every file under `folder` but the manifest and what lies under the names `without`."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {
        name: FileRecord(bytes=(folder / name).stat().st_size, sha256=file_sha256(folder / name))
        for name in names
        if name != MANIFEST and name.partition("/")[0] not in without
    }


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hint(folder: Path) -> str:
    if not folder.parent.is_dir():
        return ""
    names = [path.name for path in folder.parent.iterdir() if (path / MANIFEST).is_file()]
    close = get_close_matches(folder.name, names, 1)
    return f"; did you mean {folder.parent / close[0]}?" if close else ""
