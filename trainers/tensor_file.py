"""Reads tensors that `torch.save` wrote; the file may be a stranger's."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from turngym.core.errors import TurngymError


def read_tensors(path: Path) -> Any:
    """Reads what `torch.save` wrote to `path`, on the CPU: tensors and plain values, never code.

    Raises TurngymError for a file whose parts are compressed or overlap: torch writes them as they are, and a small
    file with others may unpack to any size.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile as error:
        raise TurngymError(f"{path} is damaged, or no file of torch.save: {error}") from error
    size = path.stat().st_size
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > size:
        raise TurngymError(f"{path}: {size:,} bytes that hold more than they are; torch.save compresses nothing")
    return torch.load(path, map_location="cpu", weights_only=True)
