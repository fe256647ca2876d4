"""A disk without room, said in words that help: each library that writes has its own way of failing."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turngym.envs.core import TurngymError

# EFBIG is what a limit on the size of files (ulimit -f) gives
NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
WORDS = ("no space left", "disk quota", "file too large", "failed writing file", "unexpected pos", "os error 28")
"""safetensors and torch.save raise errors of their own, without a number."""


@contextmanager
def full_disk(
    path: Path,
    what: str,
    kind: type[TurngymError] = TurngymError,
    *,
    then: str = "Make room and continue with --resume",
) -> Iterator[None]:
    """Turn a failure to write `what` under `path` for want of room into one error of class `kind`.

    `then` says what helps.
    """
    try:
        yield
    except Exception as error:
        if not no_room(error):
            raise
        free = shutil.disk_usage(path).free / 2**20 if path.exists() else 0.0
        raise kind(
            f"no room left under {path} ({free:,.1f} MiB are free, unless a quota allows less): the {what} could not "
            f"be written and nothing half-written was kept; what was there before is whole. {then}"
        ) from error


def no_room(error: BaseException) -> bool:
    """Whether `error`, or one that led to it, says that a disk or a quota is full."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in NUMBERS:
            return True
        if any(word in str(seen).lower() for word in WORDS):
            return True
        # a library's own error often has the system's behind it
        seen = seen.__cause__ or seen.__context__
    return False
