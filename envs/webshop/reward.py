"""What is a purchase worth? The original's reward, quirks included, and the best that a goal allows.

total = r_type * (n_att + n_option + [price <= cap]) / (|attributes| + |options| + 1)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from rapidfuzz import fuzz, utils

from turngym.core.numbers import Share
from turngym.envs.webshop.goals import Goal
from turngym.envs.webshop.nouns import NounTagger
from turngym.envs.webshop.products import Product

MATCH = 85
"""Two texts match if their token set ratio, a whole number from 0 to 100, is above this."""
# what thefuzz's `force_ascii` drops in the original: no more and no less
_LATIN_1 = dict.fromkeys(range(128, 256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A score and what it is made of; `total` is from 0 to 1."""

    total: Share
    r_type: float
    """1.0, 0.5, 0.1 or 0.0: is it the same kind of product."""
    r_att: float
    """Share of the wanted attributes."""
    r_option: float | None
    """Share of the wanted options; None where none are wanted."""
    r_price: bool
    """Whether the price is within the cap."""
    w_att: float
    w_option: float
    """Weights of the parts; they add up to 1."""
    w_price: float
    query_match: bool
    category_match: bool
    title_score: float
    """Share of the goal title's nouns that the bought product's title has."""
    tagger: str
    """What found the nouns; the same for all rewards that are compared."""


class ProductFacts:
    """The parts of a product that the reward reads, computed once."""

    __slots__ = ("asin", "attributes", "categories", "nouns", "query", "texts")

    def __init__(self, product: Product, tagger: NounTagger) -> None:
        self.asin = product.asin
        self.query = product.query
        self.categories = _categories(product.product_category)
        self.nouns = frozenset(tagger.nouns(product.title))
        self.attributes = tuple(processed(text) for text in product.attributes)
        self.texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())

    def has_attribute(self, wanted: str) -> bool:
        """Whether the product lists about these words as an attribute, or has them in title, bullets or description."""
        compared = processed(wanted)
        return any(matches(text, compared) for text in self.attributes) or any(wanted in text for text in self.texts)


def compute_reward(
    goal: Goal, bought: ProductFacts, price: float, options: Iterable[str], tagger: NounTagger
) -> Reward:
    """The reward for buying `bought` at `price` dollars with the option values `options`.

    Args:
        price: of the product in this shop, in dollars; chosen options do not change it.
        options: the chosen values, without the names of their options.
    """
    values = [processed(simplify_value(value)) for value in options]
    n_att = sum(bought.has_attribute(wanted) for wanted in goal.attributes)
    n_option = sum(any(matches(value, wanted) for value in values) for wanted in wanted_options(goal))
    return _compose(goal, bought, n_att, n_option, price <= goal.price_upper, tagger)


def _compose(goal: Goal, bought: ProductFacts, n_att: int, n_option: int, r_price: bool, tagger: NounTagger) -> Reward:
    r_type, query_match, category_match, title_score = type_reward(goal, bought, tagger)
    n_goal_att, n_goal_option = len(goal.attributes), len(goal.goal_options)
    parts = n_goal_att + n_goal_option + 1
    return Reward(
        total=(n_att + n_option + r_price) / parts * r_type,
        r_type=r_type,
        r_att=n_att / n_goal_att,
        r_option=n_option / n_goal_option if n_goal_option else None,
        r_price=r_price,
        w_att=n_goal_att / parts,
        w_option=n_goal_option / parts,
        w_price=1 / parts,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
        tagger=tagger.name,
    )


def type_reward(goal: Goal, bought: ProductFacts, tagger: NounTagger) -> tuple[float, bool, bool, float]:
    """(r_type, query match, category match, title score). A low title score overrules a matching query or category."""
    query_match = bought.query == goal.query
    category_match = len(bought.categories & _categories(goal.product_category)) >= 2
    wanted = tagger.nouns(goal.title)
    # repeats count below but not above the line: a title with repeats does not even match itself fully
    title_score = len(bought.nouns & frozenset(wanted)) / len(wanted) if wanted else 0.2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1
    if title_score == 0.0:
        r_type = 0.0
    return r_type, query_match, category_match, title_score


_Choices = dict[int, tuple[int, dict[str, str]]]
"""Which wanted options are met, as bits -> the choices that meet them, after how many are literally wanted ones."""


def best_purchase(
    goal: Goal, product: Product, facts: ProductFacts, price: float, tagger: NounTagger
) -> tuple[Reward, dict[str, str]]:
    """The highest reward that buying `product` allows, and option choices that earn it.

    Exact: which wanted options a choice meets is a set, and the best of all unions of one set per option is searched.
    Among equals, choices that are literally the wanted ones come first, then those that come first on the page.

    Args:
        product: only its `options` are read, the choices that are open.
        facts: what else the reward reads of the same product.
    """
    wanted = wanted_options(goal)
    literal = {option if isinstance(option, str) else option[1] for option in goal.goal_options}
    reached: _Choices = {0: (0, {})}
    for name, values in product.options.items():
        choices: _Choices = {}
        for value in values:
            text = processed(simplify_value(value))
            met = sum(1 << bit for bit, option in enumerate(wanted) if matches(text, option))
            is_literal = (name, value) in goal.goal_options or (goal.kind == "human" and value in literal)
            if met not in choices or choices[met][0] < is_literal:
                choices[met] = (int(is_literal), {name: value})
        reached = _unions(reached, choices) if choices else reached
    mask = max(reached, key=lambda met: (met.bit_count(), reached[met][0]))
    n_att = sum(facts.has_attribute(text) for text in goal.attributes)
    reward = _compose(goal, facts, n_att, mask.bit_count(), price <= goal.price_upper, tagger)
    return reward, reached[mask][1]


def _unions(reached: _Choices, choices: _Choices) -> _Choices:
    unions: _Choices = {}
    for before, (literal_before, chosen) in reached.items():
        for met, (literal, choice) in choices.items():
            union = before | met
            if union not in unions or unions[union][0] < literal_before + literal:
                unions[union] = (literal_before + literal, chosen | choice)
    return unions


def wanted_options(goal: Goal) -> tuple[str, ...]:
    """The goal's options in the form in which they are compared with the chosen ones."""
    return tuple(
        processed(simplify_value(option) if isinstance(option, str) else simplify_pair(*option))
        for option in goal.goal_options
    )


@lru_cache(maxsize=65536)
def processed(text: str) -> str:
    """A text as it is compared: without Latin-1 accents, everything but letters and digits blank, lower case."""
    return utils.default_process(text.translate(_LATIN_1))


def matches(left: str, right: str) -> bool:
    """Whether two `processed` texts match. One set of words within the other always does; an empty text never."""
    # thefuzz, which the original calls, rounds its ratio; rapidfuzz does not
    return round(fuzz.token_set_ratio(left, right)) > MATCH


@lru_cache(maxsize=4096)
def _categories(path: str) -> frozenset[str]:
    return frozenset(part.strip() for part in path.split("›"))


# --- the color words by which the option part of the reward simplifies values

_WORDS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire
seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white
wine yellow
"""
COLORS = tuple(_WORDS.split())
"""Colors in alphabetical order; the first that fits wins, whatever else fits."""
_COLOR_SET = frozenset(COLORS)


@lru_cache(maxsize=65536)
def simplify_value(value: str) -> str:
    """The first color word that is a substring of `value` ("graywash" becomes "ash"), else `value` itself."""
    for color in COLORS:
        if color in value:
            return color
    return value


@lru_cache(maxsize=65536)
def simplify_pair(name: str, value: str) -> str:
    """The form in which the original compares a synthetic goal's option, which it holds as a (name, value) tuple.

    Only a name or value that is exactly a color word is simplified; everything else is compared as `str(tuple)`, so
    that the option's name joins the tokens. This is why some goals cannot be met exactly.
    """
    exact = [part for part in (name, value) if part in _COLOR_SET]
    return min(exact) if exact else str((name, value))
