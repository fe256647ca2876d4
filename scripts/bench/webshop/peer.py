"""A peer that works a page as the original does: rendered as HTML by Jinja, read back by BeautifulSoup, twice a step.

It has the same states, the same search and the same rewards as turngym's own sessions, so what differs is the round
trip through HTML: each step reads the clickable elements out of the page that is open, plays the action, renders the
next page and reads its visible text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turngym.envs.webshop.session import (
    COMPAT,
    State,
    Target,
    done_texts,
    item_buttons,
    page_of,
    parse_action,
    play,
    sub_texts,
)

if TYPE_CHECKING:
    from turngym.envs.webshop.shop import Shop
TEMPLATE = """<!DOCTYPE html>
<html>
<head>
<title>WebShop</title>
</head>
<body>
{% macro form(label, classes) -%}
<form method="post" action="{{ page.url }}"><button type="submit" class="btn {{ classes }}">{{ label }}</button></form>
{%- endmacro -%}
{% macro texts(tag, pieces) -%}
{% for text in pieces %}<{{ tag }}>{{ text }}</{{ tag }}>{% endfor %}
{%- endmacro -%}
{% if page.kind == "search" %}
<div id="logo"><h2>WebShop</h2></div>
<div id="instruction-text"><h4>Instruction: <br>{{ page.instruction }}</h4></div>
<input id="search_input" name="search_query" placeholder="Search...">
{{ form("Search", "btn-success") }}
{% elif page.kind == "done" %}
<div id="stats">{{ texts("h4", done) }}</div>
{% else %}
<div id="instruction-text"><h4>Instruction:<br>{{ page.instruction }}</h4></div>
{{ form("Back to Search", "btn-success") }}
{% if page.kind == "results" %}
<h3>Page {{ page.number }} (Total results: {{ page.total }})</h3>
{% if page.number > 1 %}{{ form("< Prev", "btn-primary") }}{% endif %}
{{ form("Next >", "btn-primary") }}
{% for product in page.products %}
<div class="list-group-item">
<img src="{{ product.main_image }}" class="result-img">
<h4 class="product-asin"><a class="product-link" href="{{ page.url }}/{{ product.asin }}">{{ product.asin }}</a></h4>
<h4 class="product-title">{{ product.title }}</h4>
<h5 class="product-price">{{ product.price_text }}</h5>
</div>
{% endfor %}
{% else %}
{{ form("< Prev", "btn-primary") }}
{% if page.kind == "item" %}
<img src="{{ page.product.main_image }}" id="product-image">
{% for name, values in page.product.options.items() %}
<div><h4>{{ name }}</h4>
{% for value in values %}
<input type="radio" id="radio_{{ name }}{{ loop.index0 }}" name="{{ name }}" value="{{ value }}" data-url="/{{ name }}">
<label for="radio_{{ name }}{{ loop.index0 }}">{{ value }}</label>
{% endfor %}
</div>
{% endfor %}
<h2>{{ page.product.title }}</h2>
<h4>Price: {{ page.product.price_text }}</h4>
<h4>Rating: N.A.</h4>
{% for label in buttons %}
<div>{{ form(label, "purchase") }}</div>
{% endfor %}
{% else %}
<div class="product-info">{{ texts("p", body) }}</div>
{% endif %}
{% endif %}
{% endif %}
</body>
</html>
"""
_HIDDEN = ("style", "script", "head", "title", "meta", "[document]")


class HtmlSession:
    """`reset` and `step` like turngym's sessions, through HTML. ImportError where jinja2 or bs4 is not installed."""

    def __init__(self, shop: Shop) -> None:
        from bs4 import BeautifulSoup, Comment, Doctype
        from jinja2 import Environment

        self._soup, self._not_text = BeautifulSoup, (Comment, Doctype)
        self._template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
        self._shop = shop
        self._quirks = COMPAT["webshop"]

    def reset(self, goal: int) -> str:
        self._goal, self._name = self._shop.goals[goal], str(goal)
        self._state = State()
        self._html = self._render()
        return self._text()

    def step(self, action: str) -> tuple[str, float, bool]:
        """(observation, reward, done)."""
        after = play(
            self._shop, self._goal, self._quirks, self._state, parse_action(action), self._clickables(), self._name
        )
        if after is not None:
            self._state = after
            self._html = self._render()
        done = after is not None and after.kind == "done"
        reward = after.reward.total if after is not None and done and after.reward is not None else 0.0
        return self._text(), reward, done

    def _render(self) -> str:
        page = page_of(self._shop, self._goal, self._state, self._name)
        extra: dict[str, Any] = {"buttons": item_buttons(False)}
        if page.kind == "done":
            extra["done"] = done_texts(page.asin, page.options, page.score)
        elif page.kind == "sub" and page.product is not None:
            extra["body"] = sub_texts(page.product, page.sub)
        return self._template.render(page=page, **extra)

    def _clickables(self) -> dict[str, Target]:
        soup = self._soup(self._html, "html.parser")
        found: dict[str, Target] = {}
        for button in soup.find_all(class_="btn"):
            label = button.get_text().lower()
            found[label] = ("button", label)
        for link in soup.find_all(class_="product-link"):
            found[link.get_text().lower()] = ("link", link.get_text())
        for option in soup.select('input[type="radio"]'):
            found[str(option.get("value"))] = ("option", str(option.get("name")))
        return found

    def _text(self) -> str:
        pieces = self._soup(self._html, "html.parser").find_all(string=True)
        shown = (
            p
            for p in pieces
            if p.parent is not None and p.parent.name not in _HIDDEN and not isinstance(p, self._not_text)
        )
        return " [SEP] ".join(piece.strip() for piece in shown if piece != "\n")
