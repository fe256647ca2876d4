"""Verb tags: actions such as `<search>query</search>`, where the tag says what is done and the text with what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache


def tagged(tag: str, content: str) -> str:
    """The action in canonical form."""
    return f"<{tag}>{content.strip()}</{tag}>"


def cut(response: str, tags: Sequence[str]) -> str:
    """`response` up to the first closing tag of the first kind that occurs at all; kinds in the order of `tags`.

    This is Search-R1's rule: cut after the first `</search>`, and only without one after the first `</answer>`.
    """
    for tag in tags:
        before, closed, _ = response.partition(f"</{tag}>")
        if closed:
            return before + closed
    return response


def first_action(response: str, tags: Sequence[str]) -> tuple[str, str] | None:
    """(tag, stripped content) of the first closed pair of tags in the cut response; None where there is none."""
    match = _pair(tuple(tags)).search(cut(response, tags))
    return None if match is None else (match[1], match[2].strip())


@lru_cache(maxsize=16)
def _pair(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<({'|'.join(map(re.escape, tags))})>(.*?)</\1>", re.DOTALL)
