"""A turn of a demonstration as a student would have said it, and a response that a demonstrator only begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turngym.agents.rendering.renderer import ChatRenderer
from turngym.envs.episode import Origin

Ids = tuple[int, ...]
"""Token ids of the student; a tuple, so that jobs can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One turn that is replayed."""

    response: str
    """In the student's channel, thought included."""
    ids: Ids
    """The response as the student's ids, with the id that ended it if there was one."""
    exact: bool = False
    """Whether these are the ids that the demonstrator drew."""
    origin: Origin = "demonstration"


def begun_response(renderer: ChatRenderer, shown: Shown, count: int, stops: Sequence[str]) -> tuple[Ids, bool]:
    """The first `count` ids of a response, and whether nothing of it is missing but how it ends.

    A response ends at the first of the texts `stops`. A cut through one of them moves in front of it: engines look for
    a stop text in what they drew, and would miss one that was begun for them.
    """
    ids = shown.ids[:count]
    text = _text(renderer, ids)
    if any(stop in text for stop in stops):
        return ids, True
    # nothing at all ends in no stop text
    sizes = (size for size in range(len(ids), -1, -1) if not _within(_text(renderer, ids[:size]), stops))
    return ids[: next(sizes)], False


def _within(text: str, stops: Sequence[str]) -> bool:
    """Whether `text` ends where one of `stops` has begun."""
    return any(text.endswith(stop[:cut]) for stop in stops for cut in range(1, len(stop)))


def _text(renderer: ChatRenderer, ids: Ids) -> str:
    return renderer.template.decode(list(ids))


def read_exactly(renderer: ChatRenderer, ids: Sequence[int], response: str) -> bool:
    """Whether the renderer's tokenizer reads `ids` as `response`, letter by letter, and by no more than an end id."""
    listed = [int(token) for token in ids]
    size = len(renderer.template.tokenizer)
    if not listed or not all(0 <= token < size for token in listed):
        return False
    said = listed[:-1] if listed[-1] in renderer.stop_ids else listed
    return not set(said) & set(renderer.stop_ids) and _text(renderer, tuple(said)) == response
