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
    titles = [goal.title, " ".join(goal.title.split()[:_TITLE_WORDS])]
    # what a shopper who has only the instruction might type, fewest words first
    options = [option if isinstance(option, str) else option[1] for option in goal.goal_options]
    wishes = [
        " ".join([goal.query, *goal.attributes]),
        " ".join([goal.query, *goal.attributes, *options]),
        " ".join([*goal.attributes, *options]),
        goal.query,
        goal.request,
    ]
    document = search_text(product)
    first = [*titles, *wishes] if query == "title" else [*wishes, goal.title]
    for text in (*first, document, *dict.fromkeys(document.split())):
        action = search_action(text)
        if parse_action(action) is not None:
            yield action
