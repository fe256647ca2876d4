"""Files that are whole or not there: what is written takes the place of the old file at its end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4


def write_json(path: str | Path, value: Any) -> None:
    """Writes JSON with sorted keys so that a reader never sees half a file."""
    with atomic_write(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True) + "\n")


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A scratch file that replaces `path` once all of it is written; after an error, `path` is as it was."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder is where a file must be", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # of its own: other processes and machines may be writing the same file, and no clock tells whether they still do
    scratch = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: str | Path) -> Iterator[TextIO]:
    """A text file that replaces `path` once all of it is written; after an error, the old file stays.

    Its lines end as they are written, the same on every system.
    """
    with written_whole(path) as scratch, scratch.open("w", encoding="utf-8", newline="\n") as file:
        yield file
