"""A short name for the weights in a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path


def weights_hash(folder: str | Path) -> str:
    """16 hex digits over the configuration and weight files of a model folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*")):
        if path.suffix in (".safetensors", ".bin") or path.name == "config.json":
            with path.open("rb") as file:
                # file_digest reads in pieces: weights may be larger than memory
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]
