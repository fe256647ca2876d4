"""Observation mode `text`: the visible pieces of a page, stripped and joined by ` [SEP] `."""

from __future__ import annotations

from collections.abc import Iterable

from turngym.envs.webshop.pages.pages import Node, Page, nodes

SEPARATOR = " [SEP] "


def render_text(page: Page) -> str:
    """The page as one line of text (product texts may contain line ends)."""
    return join(nodes(page))


def join(pieces: Iterable[Node]) -> str:
    """The pieces in the form of this mode."""
    return SEPARATOR.join([text.strip() for _, text in pieces])
