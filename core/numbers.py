"""Numbers that settings may have: types with their ranges, which are checked where a value is read.

NaN is in no range, and infinity only in one without an upper end.
"""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

FINITE = sys.float_info.max

Number = Annotated[int, Meta(ge=0, le=10**9)]
Count = Annotated[int, Meta(ge=1, le=10**9)]
"""Number of things that there are."""
Million = Annotated[int, Meta(ge=1, le=10**6)]
"""Number of things that take memory and time one by one: episodes, clients."""
Group = Annotated[int, Meta(ge=2, le=10**6)]
"""Things that are compared with each other: episodes of a group, seeds, tasks."""
Threads = Annotated[int, Meta(ge=1, le=1024)]
Processes = Annotated[int, Meta(ge=0, le=1024)]
"""Processes or threads, where 0 means something."""
Port = Annotated[int, Meta(ge=0, le=65535)]
Seed = Annotated[int, Meta(ge=0)]
"""A seed, which may have any number of digits."""

Share = Annotated[float, Meta(ge=0, le=1)]
Portion = Annotated[float, Meta(gt=0, le=1)]
"""A share of something that must not be nothing."""
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
NotNegative = Annotated[float, Meta(ge=0, le=FINITE)]
Positive = Annotated[float, Meta(gt=0, le=FINITE)]
Signed = Annotated[float, Meta(ge=-FINITE, le=FINITE)]
Patience = Annotated[float, Meta(gt=0)]
"""Seconds; infinity waits for ever."""


def torch_seed(seed: int) -> int:
    """The seed that torch takes, which has 64 bits, for a `Seed`."""
    return seed % 2**64
