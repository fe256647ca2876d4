"""The folder of an index: arrays, ids and terms beside a manifest that says what they must be."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from turngym.retrieval.blobs import BlobStore, map_array
from turngym.retrieval.checksums import CHECKED, check_manifest, describe_file, sealed
from turngym.retrieval.core import RetrievalError
from turngym.retrieval.lucene.analysis import ANALYSIS
from turngym.retrieval.lucene.parts import SMALL, VERSION, Names, Parts, Settings, Statistics, TermTable

MANIFEST = "manifest.json"
FORMAT = "turngym-lucene-bm25"
_AGAIN = "build the index again"


def write_manifest(folder: Path, settings: Settings, statistics: Statistics) -> None:
    """Describe the finished files of `folder`."""
    files = {path.name: describe_file(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "analysis": ANALYSIS,
        "settings": asdict(settings),
        "statistics": asdict(statistics),
        "average_length": statistics.tokens / max(statistics.scored, 1),
        "fingerprint": statistics.fingerprint(settings),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest), indent=1) + "\n", encoding="utf-8")


def is_index(folder: Path) -> bool:
    """Whether a folder was written by this package (it may be damaged or old)."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["format"] == FORMAT
    except (OSError, ValueError, LookupError, TypeError):
        return False


def read_manifest(folder: Path) -> tuple[Settings, Statistics, dict[str, dict[str, int]]]:
    """(settings, statistics, files) of an index folder.

    Raises:
        RetrievalError: no index, another version, or a manifest that contradicts itself.
    """
    path = folder / MANIFEST
    try:
        manifest: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = "an index folder has one" if folder.is_dir() else "there is no such folder"
        raise RetrievalError(f"{folder}: no {MANIFEST}: {there}") from None
    except (OSError, ValueError) as error:
        raise RetrievalError(f"{path}: damaged ({error}); {_AGAIN}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RetrievalError(f"{path}: not the manifest of a BM25 index (format {FORMAT!r})")
    for key, valid in (("version", VERSION), ("analysis", ANALYSIS)):
        if manifest.get(key) != valid:
            raise RetrievalError(f"{path}: {key} is {manifest.get(key)!r}, this program reads {valid!r}; {_AGAIN}")
    try:
        check_manifest(manifest)
        settings, statistics = Settings(**manifest["settings"]), Statistics(**manifest["statistics"])
        files, fingerprint = dict(manifest["files"]), manifest["fingerprint"]
    except ValueError as error:
        raise RetrievalError(f"{path}: damaged ({error}); {_AGAIN}") from error
    except (TypeError, KeyError) as error:
        raise RetrievalError(f"{path}: damaged ({error!r}); {_AGAIN}") from error
    if statistics.fingerprint(settings) != fingerprint:
        raise RetrievalError(f"{path}: its fingerprint does not fit its settings and statistics; {_AGAIN}")
    return settings, statistics, files


def open_parts(folder: Path) -> Parts:
    """Map the arrays of an index folder.

    Raises:
        RetrievalError: as `read_manifest`, or a file is missing, cut off or of another index.
    """
    settings, statistics, files = read_manifest(folder)
    for name, facts in files.items():
        size = (folder / name).stat().st_size if (folder / name).exists() else None
        if size != facts["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise RetrievalError(f"{folder / name}: {found}, the manifest says {facts['bytes']} bytes; {_AGAIN}")
    if sum(facts["bytes"] for facts in files.values()) <= CHECKED:
        _compare(folder, files)
    types = {"starts": np.int64, "rows": np.int32, "tfs": None, "peaks": np.float32, "norms": np.uint8}
    arrays = {name: map_array(folder / f"{name}.npy", dtype) for name, dtype in types.items()}
    ranks = map_array(folder / "ranks.npy", np.int32)
    ids, terms = BlobStore(folder / "ids"), BlobStore(folder / "terms")
    lengths = {len(ids), len(ranks), len(arrays["norms"]), statistics.documents}
    if len(lengths) != 1 or len(terms) + 1 != len(arrays["starts"]) or len(arrays["rows"]) != len(arrays["tfs"]):
        raise RetrievalError(f"{folder}: its files are of different indexes; {_AGAIN}")
    names = Names(ids)
    return Parts(
        settings=settings,
        statistics=statistics,
        terms=TermTable(terms),
        ids=list(names) if len(names) <= SMALL else names,
        ranks=ranks,
        held=(ids, terms),
        **arrays,
    )


def check_files(folder: Path) -> None:
    """Compare size and checksum of every file with the manifest.

    Raises:
        RetrievalError: one differs.
    """
    _, _, files = read_manifest(folder)
    _compare(folder, files)


def _compare(folder: Path, files: dict[str, dict[str, int]]) -> None:
    for name, facts in files.items():
        path = folder / name
        found = describe_file(path) if path.exists() else None
        if found != facts:
            raise RetrievalError(f"{path}: {found}, but the manifest says {facts}; {_AGAIN}")
