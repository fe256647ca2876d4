"""Did you mean: the nearest valid values to a wrong one, quick enough for lists of 100,000 ids."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from heapq import nlargest

_GRAMS = 24
_QUERY = 200
_FINALISTS = 24


def nearest(query: str, candidates: Iterable[str], n: int = 1, cutoff: float = 0.4) -> list[str]:
    """The up to `n` candidates most like `query`, best first; ties keep the candidates' order.

    Shared trigrams choose finalists, `difflib` ranks them. Only candidates at least `cutoff` similar (0 to 1) count.
    """
    query = query[:_QUERY].casefold()
    pool = list(candidates)
    if len(pool) > _FINALISTS:
        grams = _grams(query)
        scored = ((sum(gram in text.casefold() for gram in grams), -index) for index, text in enumerate(pool))
        best = nlargest(_FINALISTS, scored)
        pool = [pool[-negative] for _, negative in sorted(best, key=lambda pair: -pair[1])]
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(query)
    ranked: list[tuple[float, int]] = []
    for index, text in enumerate(pool):
        matcher.set_seq1(text[:_QUERY].casefold())
        if matcher.real_quick_ratio() >= cutoff and matcher.quick_ratio() >= cutoff:
            ratio = matcher.ratio()
            if ratio >= cutoff:
                ranked.append((ratio, -index))
    return [pool[-negative] for _, negative in nlargest(n, ranked)]


def did_you_mean(query: str, candidates: Iterable[str], n: int = 3) -> str:
    """An ending for error texts: ` Did you mean 'a' or 'b'?`, or nothing when nothing is near."""
    found = nearest(query, candidates, n)
    if not found:
        return ""
    return " Did you mean " + " or ".join(repr(text) for text in found) + "?"


def _grams(query: str) -> list[str]:
    size = min(3, max(1, len(query)))
    grams = sorted({query[start : start + size] for start in range(max(1, len(query) - size + 1))})
    step = max(1, len(grams) // _GRAMS)
    return grams[::step][:_GRAMS]
