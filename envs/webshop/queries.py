"""By which words is a goal's product found? The searches that an expert tries, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from turngym.envs.webshop.actions import parse_action, search_action
from turngym.envs.webshop.catalog import search_text
from turngym.envs.webshop.goals import Goal
from turngym.envs.webshop.products import Product

OracleQuery = Literal["title", "instruction"]
_TITLE_WORDS = 12


def searches(goal: Goal, product: Product, query: OracleQuery) -> Iterator[str]:
    """Search actions that may find the goal's product: by its title, or by what the instruction says; then by all that
    is searched of it, as a whole and word by word."""
    for text in (*(_by_title if query == "title" else _by_instruction)(goal), *_by_document(product)):
        action = search_action(text)
        if parse_action(action) is not None:
            yield action


def _by_title(goal: Goal) -> Iterator[str]:
    yield goal.title
    yield " ".join(goal.title.split()[:_TITLE_WORDS])
    yield from _by_wishes(goal)


def _by_instruction(goal: Goal) -> Iterator[str]:
    yield from _by_wishes(goal)
    yield goal.title


def _by_wishes(goal: Goal) -> Iterator[str]:
    """What a shopper who has only the instruction might type, fewest words first."""
    wishes = [option if isinstance(option, str) else option[1] for option in goal.goal_options]
    yield " ".join([goal.query, *goal.attributes])
    yield " ".join([goal.query, *goal.attributes, *wishes])
    yield " ".join([*goal.attributes, *wishes])
    yield goal.query
    yield goal.request


def _by_document(product: Product) -> Iterator[str]:
    text = search_text(product)
    yield text
    yield from dict.fromkeys(text.split())
