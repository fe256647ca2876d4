"""The weights in a folder: a short name for them, and whether all are there."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
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


def lacking(loading: Mapping[str, Collection[str]]) -> str:
    """What to say of weights that a model has and its files have not; empty where they hold all.

    `loading`: what transformers tells of a load (`output_loading_info`). It fills such weights with random numbers and
    says so in a warning. Weights that are tied to others are not among them.
    """
    missing = sorted(loading["missing_keys"])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"its files lack the weights {', '.join(missing[:3])}{more}" if missing else ""
