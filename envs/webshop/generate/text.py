"""Listings in words: title, description, bullets, pictures and instruction of a planned product."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote
from zlib import crc32

import numpy as np

from turngym.envs.webshop.generate.plan import Draft, Place

_TITLES = (
    "{brand} {model} {material} {kind}{features} for {use}",
    "{material} {kind} by {brand}{features}, {model}",
    "{brand} {kind} {model}, {material} Series{features}, Made for {use}",
    "{kind} in {material} Design{features} - {brand} {model}",
)
_STORIES = (
    "The {brand} {kind} {model} was drawn up with {use} in mind.",
    "Our {material} line is simple to look at and pleasant to own.",
    "People who bought one {kind} often come back for a second.",
    "It reaches you in a plain box with a short leaflet.",
    "Every {kind} is looked over twice before it leaves the workshop.",
    "A {kind} like this suits {use} and does not shout.",
    "We started {brand} because the {kind} we wanted did not exist.",
    "Keep the leaflet: it names the person who packed your order.",
)
_BULLETS = (
    "Good for {use} and wherever else you like it",
    "From the {material} line by {brand}",
    "Weight {n} g, box {a} x {b} cm",
    "Questions get an answer within {a} hours",
    "Bring it back within {n} days if you do not like it",
    "Model {model}, listed since {year}",
    "A present for somebody who has everything but a {kind}",
)
_IS = ("It is {f}, so there is less to think about.", "Because it is {f}, it stays in use.", "Yes, it is {f}.")
_HAS = ("It comes with {f}.", "Delivered with {f} as standard.", "The difference is in the detail: {f}.")
_BULLET_TAILS = ("tested in our own workshop", "as buyers asked for", "on every unit", "no extra charge")
_ASKS = (
    "i am looking for {a}{is}{kind} with {has}",
    "i am looking for a {kind} that is {and_is} and has {has}",
    "i need {a}{is}{kind} that comes with {has}",
    "find me a {kind} that is {and_is}, and it must have {has}",
    "show me {a}{is}{kind} with {has}",
    "i want to buy a {kind} with {has} that is {and_is}",
)


def write_item(draft: Draft, rng: np.random.Generator) -> dict[str, Any]:
    """The record of the items file."""
    slots = {
        "brand": draft.brand,
        "material": draft.material,
        "kind": draft.leaf.kind,
        "use": draft.use,
        "model": f"{draft.brand[0]}{int(rng.integers(100, 1000))}",
        "year": str(int(rng.integers(2011, 2024))),
    }
    return {
        "name": _bait_title(draft, slots) if draft.bait else _title(draft, slots, rng),
        "full_description": _description(draft, slots, rng) if draft.described else "",
        "pricing": pricing(draft.price),
        "images": [picture(draft.leaf.kind, draft.asin)],
        "product_category": draft.leaf.path,
        "average_rating": "",
        "small_description": _bullets(draft, slots, rng),
        "customization_options": choices(draft),
        "asin": draft.asin,
        "category": draft.leaf.department.category,
        "query": draft.leaf.query,
        "page": int(rng.integers(1, 400)),
    }


def write_ins(draft: Draft, rng: np.random.Generator) -> dict[str, Any]:
    """The record of the attributes file; an instruction only where the product is wanted."""
    wanted = [draft.leaf.kind, *draft.is_, *draft.has]
    if not draft.wanted:
        return {"attributes": wanted}
    is_ = ", ".join(draft.is_)
    article = "an " if is_[0] in "aeio" else "a "
    ask = _ASKS[int(rng.integers(len(_ASKS)))]
    text = ask.format(
        a=article,
        kind=draft.leaf.kind,
        has=" and ".join(draft.has),
        and_is=" and ".join(draft.is_),
        **{"is": is_ + " "},
    )
    return {"attributes": wanted, "instruction": text, "instruction_attributes": wanted}


def pricing(price: tuple[float, ...]) -> str:
    return " - ".join(f"${value:.2f}" for value in price)


def choices(draft: Draft) -> Any:
    """`customization_options`: the empty string where there are none."""
    if not draft.options:
        return ""
    return {
        name: [
            {"is_selected": place == 0, "is_available": True, "value": value.title() if value.isalpha() else value}
            for place, value in enumerate(values)
        ]
        for name, values in draft.options
    }


def picture(kind: str, asin: str) -> str:
    """A drawing as a data URL, so that no picture has to be fetched: initials on a colored ground."""
    hue = crc32(asin.encode()) % 360
    initials = "".join(word[0] for word in kind.split()).upper()
    svg = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 60 60'><rect width='60' height='60' rx='8' "
        f"fill='hsl({hue},45%,72%)'/><text x='30' y='39' font-size='26' text-anchor='middle' "
        f"font-family='sans-serif' fill='hsl({hue},50%,24%)'>{initials}</text></svg>"
    )
    return "data:image/svg+xml," + quote(svg, safe="/:=' ,()")


def _shown(draft: Draft, place: Place) -> list[tuple[str, bool]]:
    """(feature, whether it follows `is`) of the features that stand in `place`."""
    both = [(feature, True) for feature in draft.is_] + [(feature, False) for feature in draft.has]
    return [pair for pair, where in zip(both, draft.places, strict=True) if where == place]


def _title(draft: Draft, slots: dict[str, str], rng: np.random.Generator) -> str:
    # the cluster's pattern, so that near-duplicates look alike
    pattern = _TITLES[crc32((draft.brand + draft.leaf.kind).encode()) % len(_TITLES)]
    shown = [feature.title() if is_ else f"with {feature.title()}" for feature, is_ in _shown(draft, "title")]
    features = "".join(f", {text}" for text in shown)
    return pattern.format(**{**slots, "kind": slots["kind"].title(), "features": features})


def _bait_title(draft: Draft, slots: dict[str, str]) -> str:
    """Search words in a heap: each pair of words stands the wrong way round."""
    heap = " ".join(" ".join(reversed(feature.split())) for feature in draft.bait).title()
    kind = slots["kind"].title()
    return f"{kind} {slots['model']} {heap} {kind} {slots['brand']}"


def _description(draft: Draft, slots: dict[str, str], rng: np.random.Generator) -> str:
    number = int(rng.integers(2, 5))
    lines = [_STORIES[place].format(**slots) for place in rng.permutation(len(_STORIES))[:number].tolist()]
    for feature, is_ in _shown(draft, "description"):
        patterns = _IS if is_ else _HAS
        line = patterns[int(rng.integers(len(patterns)))].format(f=feature)
        lines.insert(int(rng.integers(1, len(lines) + 1)), line)
    return " ".join(lines)


def _bullets(draft: Draft, slots: dict[str, str], rng: np.random.Generator) -> list[str]:
    order = rng.permutation(len(_BULLETS))[: int(rng.integers(2, 6))].tolist()
    numbers = {"n": int(rng.integers(14, 900)), "a": int(rng.integers(4, 40)), "b": int(rng.integers(4, 60))}
    rows = [_BULLETS[place].format(**slots, **numbers) for place in order]
    rows[1:1] = [_feature_bullet(feature, rng) for feature, _ in _shown(draft, "bullet")]
    first = [_feature_bullet(feature, rng) for feature, _ in _shown(draft, "first bullet")]
    if draft.bait:
        values = " ".join(value for _, values in draft.options for value in values)
        heap = " ".join(" ".join(reversed(feature.split())) for feature in draft.bait)
        first = [f"Shoppers also type: {slots['kind']} {values}, {heap} {slots['kind']}"]
    if first:
        rows.insert(0, "; ".join(first))
    if draft.blank:
        rows.insert(int(rng.integers(1, len(rows) + 1)), " ")
    return rows


def _feature_bullet(feature: str, rng: np.random.Generator) -> str:
    return f"{feature.capitalize()}: {_BULLET_TAILS[int(rng.integers(len(_BULLET_TAILS)))]}"
