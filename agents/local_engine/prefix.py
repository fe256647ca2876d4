"""Prefixes that sessions share, such as a system prompt or a task: keys and values are computed once and copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from turngym.agents.local_engine.model import Ids
from turngym.agents.local_engine.slots import Held

LEAST = 16
"""Ids; a shorter prefix is computed again."""
WORTH = 64
"""Ids that those who wait for a pass of their own must save together."""


class Loan(NamedTuple):
    """The first `length` keys and values of `slot` are copied."""

    slot: int
    length: int


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A prompt whose slot `slot` holds nothing of it, or next to nothing."""

    slot: int
    prompt: Ids

    def shared(self, slot: int, ids: Ids) -> Loan:
        """What it could take over from `slot`, which holds `ids`: never its own last id, whose logits are not held."""
        return Loan(slot, min(Held(slot, ids).common(self.prompt), len(self.prompt) - 1))


@dataclass(frozen=True, slots=True)
class Loans:
    """What newcomers take over, by their slots."""

    now: dict[int, Loan]
    """From slots that hold it already."""
    later: dict[int, Loan]
    """From other newcomers, once those have been fed."""


def find_loans(newcomers: Sequence[Newcomer], held: Iterable[Held]) -> Loans:
    """The longest prefix for each newcomer; nobody waits for one who waits."""
    known: dict[bytes, list[tuple[int, Ids]]] = {}
    for entry in held:
        if len(entry.ids) >= LEAST:
            known.setdefault(_key(entry.ids), []).append((entry.slot, entry.ids))
    leaders: dict[bytes, list[Newcomer]] = {}
    loans = Loans({}, {})
    for one in newcomers:
        if len(one.prompt) <= LEAST:
            continue
        key = _key(one.prompt)
        here = _longest(one.shared(*source) for source in known.get(key, ()))
        there = _longest(one.shared(other.slot, other.prompt) for other in leaders.get(key, ()))
        if here.length:
            loans.now[one.slot] = here
        if there.length >= here.length + LEAST:
            loans.later[one.slot] = there
        else:
            leaders.setdefault(key, []).append(one)
    if sum(loan.length for loan in loans.later.values()) < WORTH:
        loans.later.clear()
    return loans


def _key(ids: Ids) -> bytes:
    return np.asarray(ids[:LEAST], np.int32).tobytes()


def _longest(loans: Iterable[Loan]) -> Loan:
    return max(loans, key=lambda loan: loan.length, default=Loan(0, 0))
