"""A file of lines to which records are appended: a line is in it whole, or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any


def refuse_link(path: Path) -> None:
    """Raises OSError where a link, a pipe or a device is at `path`: what is written in a folder that came from somebody
    else stays in it."""
    try:
        # asked once: whoever held a lock may remove it at any time
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a link, a pipe or a device is in its place", os.fspath(path))


class LineFile:
    """Appends whole lines without a buffer. A disk that is full takes back the half of a line that it has."""

    def __init__(self, path: Path) -> None:
        refuse_link(path)
        # no buffer: after a failure it would hold half a line, and write it when the next one is
        self.file: Any = path.open("a+b", buffering=0)
        self._half: tuple[int, int] | None = None
        """Where half a line begins and ends that a failing disk did not take back."""

    def append(self, line: bytes) -> int:
        """Appends `line`, which ends with a newline, on a line of its own; returns the byte at which it begins.

        Raises OSError; the file is then as it was, or will be with the next line. The caller holds a lock.
        """
        end: int = self.file.seek(0, 2)
        if self._half is not None:
            # unless somebody else has written behind it
            if self._half[1] == end:
                end = self._half[0]
                self.file.truncate(end)
                self.file.seek(end)
            self._half = None
        begins = end
        if end:
            self.file.seek(-1, 2)
            if self.file.read(1) != b"\n":
                line, begins = b"\n" + line, end + 1
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self.file.write(rest) :]
        except BaseException:
            # half a line would stay for good
            self._half = end, self.file.seek(0, 2)
            self.file.truncate(end)
            self._half = None
            raise
        return begins

    def close(self) -> None:
        self.file.close()
