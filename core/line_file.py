"""A file of lines to which records are appended: a line is in it whole, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class LineFile:
    """Appends whole lines without a buffer. A disk that is full takes back the half of a line that it has."""

    def __init__(self, path: Path) -> None:
        # no buffer: after a failure it would hold half a line, and write it when the next one is
        self.file: Any = path.open("a+b", buffering=0)

    def append(self, line: bytes) -> int:
        """Appends `line`, which ends with a newline, on a line of its own; returns the byte at which it begins.

        Raises OSError; the file is then as it was. The caller holds a lock.
        """
        end: int = self.file.seek(0, 2)
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
            self.file.truncate(end)
            raise
        return begins

    def close(self) -> None:
        self.file.close()
