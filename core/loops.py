"""When does an episode loop?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from turngym.core.episode import Turn

LOOP = 3
"""An episode loops once it gives the same action to the same observation for the third time: twice may be chance."""


def loop_end(turns: Sequence[Turn]) -> int | None:
    """The number of turns up to the one that closes a loop, None without a loop. A loop is closed when an observation
    is answered by the same action for the `LOOP`-th time; turns without an action count as one action."""
    seen: Counter[tuple[str, str | None]] = Counter()
    for turn in turns:
        answer = turn.observation, turn.action
        seen[answer] += 1
        if seen[answer] == LOOP:
            return turn.index + 1
    return None
