"""What the templates show: labels of the page that is open, and what a purchase's score is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.pages.actions import click, parse_action
from turngym.envs.webshop.pages.pages import Page, page_of
from turngym.envs.webshop.shop.catalog import Product
from turngym.envs.webshop.shop.goals import Goal
from turngym.envs.webshop.shop.reward import ProductFacts, Reward

_PICTURES = ("https://", "http://", "data:image/")


@dataclass(frozen=True, slots=True)
class Chip:
    """One value of an option as a button."""

    value: str
    chosen: bool
    possible: bool
    """False where no action can name the value, as with a bracket in it: agents cannot choose it either."""


@dataclass(frozen=True, slots=True)
class Part:
    """One row of the score."""

    name: str
    share: float
    """How much of it was met, 0 to 1."""
    weight: float
    """What it counts, the rows adding up to 1."""
    wanted: str
    got: str


def present(env: WebShopEnv, show_attributes: bool) -> Page:
    """The page that is open in `env`."""
    scene = env.scene
    return page_of(
        scene.shop,
        scene.goal,
        scene.state,
        str(scene.goal.index),
        show_attributes=show_attributes,
        endless_pages=env.quirks.endless_pages,
    )


def chips(page: Page) -> Iterator[tuple[str, list[Chip]]]:
    """(option name, its values) of a product's page."""
    if page.product is None:
        return
    for name, values in page.product.options.items():
        yield name, [Chip(value, page.options.get(name) == value, _nameable(value)) for value in values]


def _nameable(value: str) -> bool:
    return parse_action(click(value)) == ("click", value)


def picture(address: str) -> str:
    """`address` if a browser may load it as a picture, else nothing."""
    return address if address.lower().startswith(_PICTURES) else ""


def score_parts(env: WebShopEnv, reward: Reward) -> list[Part]:
    """The rows of the score of the purchase that ended the episode."""
    scene = env.scene
    goal, bought = scene.goal, scene.shop.product(scene.state.asin or "")
    assert bought is not None
    met = _met(goal, bought, env)
    parts = [Part("Attributes", reward.r_att, reward.w_att, ", ".join(goal.attributes), ", ".join(met) or "none")]
    if reward.r_option is not None:
        chosen = ", ".join(f"{name}: {value}" for name, value in scene.state.options)
        parts.append(Part("Options", reward.r_option, reward.w_option, _wishes(goal), chosen or "none chosen"))
    cap = "any" if goal.price_upper >= 1_000_000 else f"at most ${goal.price_upper:.2f}"
    price = f"${scene.shop.price(bought.asin):.2f}"
    parts.append(Part("Price", float(reward.r_price), reward.w_price, cap, price))
    return parts


def _met(goal: Goal, bought: Product, env: WebShopEnv) -> list[str]:
    facts = ProductFacts(bought, env.scene.shop.tagger)
    return [wanted for wanted in goal.attributes if facts.has_attribute(wanted)]


def _wishes(goal: Goal) -> str:
    return ", ".join(wish if isinstance(wish, str) else f"{wish[0]}: {wish[1]}" for wish in goal.goal_options)
