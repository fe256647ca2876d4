"""Bringing prompts into the cache: what a session holds is kept, what others hold is copied, the rest is fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from turngym.agents.local_engine.batch import Row
from turngym.agents.local_engine.kv_cache import RaggedCache
from turngym.agents.local_engine.model import CausalModel
from turngym.agents.local_engine.prefill import prefill
from turngym.agents.local_engine.prefix import LEAST, Loan, Loans, Newcomer, find_loans
from turngym.agents.local_engine.slots import Held


def feed(
    model: CausalModel, cache: RaggedCache, held: Mapping[str, Held], rows: Sequence[Row], *, tokens: int
) -> tuple[Tensor, int]:
    """Logits [B, V] after the prompts of `rows`, and how many ids were fed; `tokens` as in `prefill`.

    Every row has its slot in `held`, in ascending order.
    """
    starts = {}
    for row in rows:
        entry = held[row.session]
        starts[entry.slot] = entry.resume(row.prompt, recurrent=model.recurrent)
        cache.resume(entry.slot, starts[entry.slot], len(entry.ids))
        # prefill saves recurrent states before the last id, whose logits the same prompt asked again needs
        entry.ids, entry.mark = entry.ids[: starts[entry.slot]], len(row.prompt) - 1
    by_slot = {held[row.session].slot: row for row in rows}
    # a recurrent state stands for a whole history and has no first part
    loans = Loans({}, {}) if model.recurrent else _loans(held, by_slot, starts)
    place = {slot: number for number, slot in enumerate(by_slot)}
    waves = [slot for slot in by_slot if slot not in loans.later], list(loans.later)
    logits: Tensor | None = None
    for slots, lent in zip(waves, (loans.now, loans.later), strict=True):
        if not slots:
            continue
        _borrow(cache, {slot: lent[slot] for slot in slots if slot in lent}, starts)
        new = [by_slot[slot].prompt[starts[slot] :] for slot in slots]
        part = prefill(model, cache, slots, [starts[slot] for slot in slots], new, tokens=tokens)
        if len(slots) == len(rows):
            logits = part
            break
        if logits is None:
            logits = part.new_empty(len(rows), part.shape[-1])
        logits[[place[slot] for slot in slots]] = part
    assert logits is not None
    if not model.recurrent:
        for row in rows:
            held[row.session].ids = row.prompt
    return logits, sum(len(row.prompt) - starts[slot] for slot, row in by_slot.items())


def _loans(held: Mapping[str, Held], by_slot: Mapping[int, Row], starts: Mapping[int, int]) -> Loans:
    newcomers = [Newcomer(slot, row.prompt) for slot, row in by_slot.items() if starts[slot] < LEAST]
    return find_loans(newcomers, held.values()) if newcomers else Loans({}, {})


def _borrow(cache: RaggedCache, loans: Mapping[int, Loan], starts: dict[int, int]) -> None:
    for slot, loan in loans.items():
        cache.reserve(slot + 1, loan.length)
        cache.copy(loan.slot, slot, loan.length)
        starts[slot] = loan.length
