"""Passages found, as text for the agent: three published layouts, a budget per document, nothing that forges tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from turngym.envs.core import TaskError
from turngym.envs.search.protocol import harmless
from turngym.envs.suggest import did_you_mean
from turngym.retrieval.core import Hit, Passage

DocFormat = Literal["search_r1", "verl", "skyrl"]
Count = Callable[[str], int]
"""Tokens of a text; must not fall when text is appended."""
NOTHING = "No passage was found."
"""What stands between the information tags when the search worked and nothing matches."""
_WORD = re.compile(r"\S+")


def check_format(name: str) -> DocFormat:
    """`name`, if it is a layout. Raises TaskError otherwise."""
    known = get_args(DocFormat)
    if name not in known:
        raise TaskError(
            f"doc_format is {name!r}; it must be one of {', '.join(known)}.{did_you_mean(str(name), known)}"
        )
    return name  # type: ignore[return-value]


def render(hits: Sequence[Hit], doc_format: DocFormat, budget: int | None = None, count: Count | None = None) -> str:
    """The documents in one text; each has at most `budget` tokens of title and text (words where there is no `count`).

    `search_r1`: `Doc 1(Title: "T") text` and a newline, `verl`: `Doc 1 (Title: T)`, the text on a new line and an empty
    line, `skyrl`: `Doc 1: "T"`, the text on a new line.
    """
    if not hits:
        return NOTHING
    texts = [_one(number, hit.passage, doc_format, budget, count) for number, hit in enumerate(hits, 1)]
    return harmless("".join(texts))


def shorten(text: str, budget: int, count: Count | None = None) -> str:
    """The longest beginning of `text` with at most `budget` tokens that ends with a word (or, if need be, inside the
    first one)."""
    if budget <= 0:
        return ""
    ends = [match.end() for match in _WORD.finditer(text)]
    if count is None:
        return text if len(ends) <= budget else text[: ends[budget - 1]]
    if count(text) <= budget:
        return text
    fitting = _most(len(ends), lambda words: count(text[: ends[words - 1]]) <= budget)
    if fitting:
        return text[: ends[fitting - 1]]
    first = ends[0] if ends else len(text)
    return text[: _most(first, lambda letters: count(text[:letters]) <= budget)]


def _most(size: int, fits: Callable[[int], bool]) -> int:
    """The largest number in 1..size that fits, 0 if none does; what fits must be downward closed."""
    low, high = 0, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _one(number: int, passage: Passage, doc_format: DocFormat, budget: int | None, count: Count | None) -> str:
    title, text = " ".join(harmless(passage.title).split()), harmless(passage.text).strip()
    if budget is not None:
        title = shorten(title, budget, count)
        text = shorten(text, budget - (len(title.split()) if count is None else count(title)), count)
    if doc_format == "search_r1":
        return f'Doc {number}(Title: "{title}") {text}\n'
    if doc_format == "verl":
        return f"Doc {number} (Title: {title})\n{text}\n\n"
    return f'Doc {number}: "{title}"\n{text}\n'
