"""Files of this process that may not grow: writing fails as on a full disk."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes."""
    import resource

    limits, quiet = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    # Python would keep the first `size` bytes of a module that it compiles now, and later tests could not import it
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = quiet
