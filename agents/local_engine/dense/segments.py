"""Which adjacent rows of a batch read their keys together: rows of one segment are padded to its longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """Rows start..stop-1 of a batch."""

    start: int
    stop: int
    length: int
    """Keys that each of them reads."""
    even: bool
    """Whether all have exactly so many: no mask is needed."""

    def grown(self, steps: int) -> Segment:
        """The same after so many steps, each of which gave every row one more key."""
        return self._replace(length=self.length + steps)


def segments(lengths: Sequence[int], call: float) -> tuple[Segment, ...]:
    """Rows of `lengths` in segments, so that little is read in vain; rows of length 0 may be in none.

    A row joins the segment before it where the keys that are then read in vain are at most `call`: how many keys could
    be read in the time that one more segment takes. At least one length must be above 0.
    """
    found: list[Segment] = []
    for row, length in enumerate(lengths):
        if not length:
            continue
        if found:
            start, stop, longest, even = found[-1]
            together = (row + 1 - start) * max(longest, length)
            if together - (stop - start) * longest - length <= call:
                found[-1] = Segment(start, row + 1, max(longest, length), even and row == stop and length == longest)
                continue
        found.append(Segment(row, row + 1, length, True))
    return tuple(found)
