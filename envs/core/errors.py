"""Numbers that callers give: what is not one is a clear error, not a TypeError somewhere inside."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from heapq import nlargest
from numbers import Integral, Real
from pathlib import Path


class TurngymError(Exception):
    """Base of every error that turngym raises on purpose; its text says what, which value, where, what is valid."""


class TaskError(TurngymError):
    """A task that does not exist, cannot be played, or is not the task that its hash promises."""


class EnvBackendError(TurngymError):
    """The machinery behind an environment failed (a dead server, a full disk): an episode status, not an action."""


class AgentError(TurngymError):
    """An agent that does not fit the environment it is asked to play."""


def whole(name: str, value: object, least: int, *, none: str = "", error: type[TurngymError] = TurngymError) -> int:
    """`value` as an int of at least `least`; NumPy's integers count. `none` says what None would mean, if it may be."""
    otherwise = f", or None for {none}" if none else ""
    # True is an Integral
    if isinstance(value, bool) or not isinstance(value, Integral):
        example = f", such as {least}" if isinstance(value, str) else ""
        raise error(f"{name} is {value!r}; it must be a whole number{example}{otherwise}")
    if value < least:
        raise error(f"{name} is {value}; it must be at least {least}{otherwise}")
    return int(value)


def finite(name: str, value: object, *, error: type[TurngymError] = TurngymError) -> float:
    """`value` as a float, which is neither infinite nor NaN."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise error(f"{name} is {value!r}; it must be a number, such as -0.1")
    return float(value)


# A disk without room, said in words that help: each library that writes has its own way of failing.

# EFBIG is what a limit on the size of files (ulimit -f) gives
NUMBERS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
WORDS = ("no space left", "disk quota", "file too large", "failed writing file", "unexpected pos", "os error 28")
"""safetensors and torch.save raise errors of their own, without a number."""


@contextmanager
def full_disk(
    path: Path,
    what: str,
    kind: type[TurngymError] = TurngymError,
    *,
    then: str = "Make room and continue with --resume",
) -> Iterator[None]:
    """Turn a failure to write `what` under `path` for want of room into one error of class `kind`.

    `then` says what helps.
    """
    try:
        yield
    except Exception as error:
        if not no_room(error):
            raise
        free = shutil.disk_usage(path).free / 2**20 if path.exists() else 0.0
        raise kind(
            f"no room left under {path} ({free:,.1f} MiB are free, unless a quota allows less): the {what} could not "
            f"be written and nothing half-written was kept; what was there before is whole. {then}"
        ) from error


def no_room(error: BaseException) -> bool:
    """Whether `error`, or one that led to it, says that a disk or a quota is full."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in NUMBERS:
            return True
        if any(word in str(seen).lower() for word in WORDS):
            return True
        # a library's own error often has the system's behind it
        seen = seen.__cause__ or seen.__context__
    return False


# Did you mean: the nearest valid values to a wrong one, quick enough for lists of 100,000 ids.

# all three are bounds on work: difflib is quadratic, and every gram is sought in every candidate
_GRAMS = 100
_QUERY = 200
_FINALISTS = 16
_SMALL = 300
"""So many candidates are all compared: a short word with a typo may share no trigram with what was meant."""


def nearest(query: str, candidates: Iterable[str], n: int = 1, cutoff: float = 0.4) -> list[str]:
    """The up to `n` candidates most like `query`, best first; ties keep the candidates' order.

    Shared trigrams choose finalists, `difflib` ranks them. Only candidates at least `cutoff` similar (0 to 1) count.
    """
    query = query[:_QUERY].casefold()
    pool = list(candidates)
    if len(pool) > _SMALL:
        pool = _finalists(query, pool)
    # from 200 characters on, autojunk takes common letters for noise
    matcher = SequenceMatcher(autojunk=False)
    # difflib indexes its second sequence and keeps that while the first one changes
    matcher.set_seq2(query)
    best: list[tuple[float, int, str]] = []
    for index, text in enumerate(pool):
        matcher.set_seq1(text[:_QUERY].casefold())
        # the quick ratios are upper bounds: most candidates never need the slow one
        floor = max(cutoff, best[-1][0]) if len(best) == n else cutoff
        if matcher.real_quick_ratio() >= floor and matcher.quick_ratio() >= floor and matcher.ratio() >= floor:
            best = nlargest(n, [*best, (matcher.ratio(), -index, text)])
    return [text for _, _, text in best]


def did_you_mean(query: str, candidates: Iterable[str], n: int = 3) -> str:
    """An ending for error texts: ` Did you mean 'a' or 'b'?`, or nothing when nothing is near."""
    found = nearest(query, candidates, n)
    if not found:
        return ""
    return " Did you mean " + " or ".join(repr(text) for text in found) + "?"


def _finalists(query: str, pool: list[str]) -> list[str]:
    grams = _grams(query)
    scored = ((_shared(grams, text.casefold()), -index) for index, text in enumerate(pool))
    return [pool[-negative] for _, negative in nlargest(_FINALISTS, scored)]


def _shared(grams: list[str], text: str) -> int:
    return sum(gram in text for gram in grams)


def _grams(query: str) -> list[str]:
    size = min(3, max(1, len(query)))
    # sorted: the order of a set of str differs between processes, and the stride below picks from it
    grams = sorted({query[start : start + size] for start in range(max(1, len(query) - size + 1))})
    # spread over a long query instead of cut at its end
    step = -(-len(grams) // _GRAMS)
    return grams[::step]
