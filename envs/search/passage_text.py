"""How do passages become a text for the agent? Three published layouts, cut to tokens, without tags that act."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Callable, Sequence
from typing import Literal

from turngym.envs.spaces import printable
from turngym.retrieval.core import Hit

_FORGED = re.compile(
    # one way to match white space only: `\s*/?\s*` takes the square of a run's length
    r"<(?=\s*(?:/\s*)?(?:think|search|information|answer|action|tool_call)\s*>)",
    re.IGNORECASE,
)
DocFormat = Literal["search_r1", "verl", "skyrl"]
Count = Callable[[str], int]
"""Tokens of a text; must not fall when text is appended."""
NOTHING = "No passage was found."
"""What stands between the information tags when the search worked and nothing matches."""
_WORD = re.compile(r"\S+")


def harmless(text: str) -> str:
    """`text` with the `<` of tags that are read in responses and prompts written `&lt;`.

    Passages, titles and questions go through this, so that they pass neither for actions nor for other passages. Every
    other character stays, and a second pass changes nothing. Tokens of a model's chat are text wherever a prompt is
    made (`turngym.agents.rendering.text_encoder`).
    """
    return _FORGED.sub("&lt;", printable(text))


def render(hits: Sequence[Hit], doc_format: DocFormat, budget: int | None = None, count: Count | None = None) -> str:
    """The documents in one text; each has at most `budget` tokens of title and text (words where there is no `count`).

    `search_r1`: `Doc 1(Title: "T") text` and a newline, `verl`: `Doc 1 (Title: T)`, the text on a new line and an empty
    line, `skyrl`: `Doc 1: "T"`, the text on a new line.
    """
    if not hits:
        return NOTHING
    texts = []
    for number, hit in enumerate(hits, 1):
        title, text = " ".join(harmless(hit.passage.title).split()), harmless(hit.passage.text).strip()
        if budget is not None:
            title = shorten(title, budget, count)
            # the title is paid first
            text = shorten(text, budget - (len(title.split()) if count is None else count(title)), count)
        if doc_format == "search_r1":
            texts.append(f'Doc {number}(Title: "{title}") {text}\n')
        elif doc_format == "verl":
            texts.append(f"Doc {number} (Title: {title})\n{text}\n\n")
        else:
            texts.append(f'Doc {number}: "{title}"\n{text}\n')
    # once more: a title and a text may forge a tag together
    return harmless("".join(texts))


def shorten(text: str, budget: int, count: Count | None) -> str:
    """The longest beginning of `text` with at most `budget` tokens that ends with a word (or, if need be, inside the
    first one)."""
    if budget <= 0:
        return ""
    ends = [match.end() for match in _WORD.finditer(text)]
    if count is None:
        return text if len(ends) <= budget else text[: ends[budget - 1]]
    if count(text) <= budget:
        return text
    # the counts never fall, so the first end that is too far can be searched by halves
    fitting = bisect(ends, False, key=lambda end: count(text[:end]) > budget)
    if fitting:
        return text[: ends[fitting - 1]]
    first = ends[0] if ends else len(text)
    return text[: bisect(range(1, first + 1), False, key=lambda letters: count(text[:letters]) > budget)]
