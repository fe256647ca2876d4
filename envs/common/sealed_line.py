"""JSON lines with a checksum of themselves: a byte that changed on disk is noticed when the line is read."""

from __future__ import annotations

import zlib

_MARK, _END = b',"crc":"', b'"}'
_LENGTH = len(_MARK) + 8 + len(_END)


def seal(line: str) -> str:
    """`{...}` as `{...,"crc":"0123abcd"}`: the CRC-32 of what stands before that last field.

    `line` is one JSON object with at least one field, in ASCII, without a newline.
    """
    body = line[:-1]
    return f'{body},"crc":"{zlib.crc32(body.encode("ascii")):08x}"}}'


def is_sealed(line: bytes) -> bool:
    """Whether `line` ends as `seal` makes it; lines of older versions do not."""
    tail = line.rstrip()[-_LENGTH:]
    return tail.startswith(_MARK) and tail.endswith(_END)


def check_seal(line: bytes) -> None:
    """Raises ValueError where a sealed line is not as it was written; lines without a checksum pass."""
    line = line.rstrip()
    if not is_sealed(line):
        return
    said = line[-len(_END) - 8 : -len(_END)]
    if b"%08x" % zlib.crc32(memoryview(line)[:-_LENGTH]) != said:
        raise ValueError(
            "it was changed after it was written (its checksum differs); a line that was edited on purpose is read "
            'without its field "crc"'
        )
