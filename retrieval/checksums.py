"""Checksums of files and manifests: what changed on disk after it was written is refused, and named."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CHECKED = 1 << 25
"""Up to this many bytes checksums are compared whenever files are opened: tens of milliseconds."""
FIELD = "crc32"


def describe_file(path: Path) -> dict[str, int]:
    """Size and CRC-32 of a file, read in pieces."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return {"bytes": path.stat().st_size, "crc32": checksum}


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int]]:
    """`describe_file` by name."""
    return {name: describe_file(folder / name) for name in sorted(names)}


def changed_file(folder: Path, files: Mapping[str, Mapping[str, int]], *, limit: float = CHECKED) -> str | None:
    """What is wrong with the first file that is not as `describe_files` found it; None if all are.

    Sizes are always compared, checksums while the files have no more than `limit` bytes together.
    """
    contents = sum(facts["bytes"] for facts in files.values()) <= limit
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{name} has {size} bytes, {facts['bytes']} were written"
        if contents and describe_file(path) != facts:
            return f"{name} has other bytes than were written (its checksum differs)"
    return None


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """`manifest` (JSON-able) with the checksum of its own content as its last field."""
    return {**manifest, FIELD: _content(manifest)}


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raises ValueError where a sealed manifest is not as it was written; one of an older version passes."""
    if FIELD in manifest and manifest[FIELD] != _content(manifest):
        raise ValueError("it was changed after it was written: its checksum differs")


def _content(manifest: Mapping[str, Any]) -> int:
    plain = {name: value for name, value in manifest.items() if name != FIELD}
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())
