"""The color words by which the reward's option part simplifies values, and how it does that, quirk included."""

from __future__ import annotations

from functools import lru_cache

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
"""In alphabetical order; the first that fits wins, whatever else fits."""

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
    """What the original makes of a synthetic goal's option, which it holds as a (name, value) tuple.

    Only a name or value that is exactly a color word is simplified; everything else is compared as `str(tuple)`, so
    that the option's name joins the tokens. This is why some goals cannot be met exactly.
    """
    exact = [part for part in (name, value) if part in _COLOR_SET]
    return min(exact) if exact else str((name, value))
