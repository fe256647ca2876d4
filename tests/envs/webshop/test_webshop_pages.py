"""Pages: the renderers agree with each other, and the HTML says to a parser what the text modes say."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shop_session import ShopSession

from turngym.envs.webshop.observations import render_html, render_rich, render_text
from turngym.envs.webshop.pages import options_json, visible
from turngym.envs.webshop.shop import Shop

VOID = {"br", "img", "input", "meta", "hr", "link"}
HIDDEN = {"style", "script", "head", "title", "meta", "[document]"}


class Parsed(HTMLParser):
    """The original's reading of a page: visible texts with their parents, and what can be clicked."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, Any]]] = [("[document]", {})]
        self.data: list[str] = []
        self.texts: list[tuple[str, dict[str, Any], str]] = []
        self.buttons: list[list[str]] = []
        self.links: list[list[str]] = []
        self.radios: list[tuple[str, str]] = []
        self.has_search_bar = False
        self.feed(html)
        self.close()
        self.flush()

    def flush(self) -> None:
        text, self.data = "".join(self.data), []
        if not text:
            return
        if not text.strip(" \n\t\f\r") and not any(name == "pre" for name, _ in self.open):
            text = "\n" if "\n" in text else " "
        name, attributes = self.open[-1]
        if name not in HIDDEN:
            self.texts.append((name, attributes, text))
        for _, attributes in self.open:
            attributes.get("_into", []).append(text)

    def handle_data(self, data: str) -> None:
        self.data.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.flush()
        attributes: dict[str, Any] = dict(attrs)
        classes = (attributes.get("class") or "").split()
        if attributes.get("id") == "search_input":
            self.has_search_bar = True
        for wanted, into in (("btn", self.buttons), ("product-link", self.links)):
            if wanted in classes:
                into.append([])
                attributes["_into"] = into[-1]
        if tag == "input" and attributes.get("type") == "radio":
            self.radios.append((attributes.get("name") or "", attributes.get("value") or ""))
        if tag not in VOID:
            self.open.append((tag, attributes))

    def handle_endtag(self, tag: str) -> None:
        self.flush()
        assert self.open[-1][0] == tag, f"</{tag}> closes <{self.open[-1][0]}>"
        self.open.pop()

    def labels(self) -> list[str]:
        names = ["".join(texts).lower() for texts in (*self.buttons, *self.links)]
        return list(dict.fromkeys([*names, *(value for _, value in self.radios)]))

    def text(self) -> str:
        return " [SEP] ".join(text.strip() for _, _, text in self.texts if text != "\n")

    def rich(self, url: str, visited: frozenset[str]) -> str:
        out = ""
        for parent, attributes, text in self.texts:
            if text == "\n":
                continue
            if parent == "button":
                line = f"[button] {text} [button_]"
            elif parent == "label" and f'"{text}"' in url:
                line, out = f"  [clicked button] {text} [clicked button_]", f"You have clicked {text}.\n{out}"
            elif parent == "label":
                line = f"  [button] {text} [button_]"
            elif attributes.get("class") == "product-link":
                mark = "clicked button" if text in visited else "button"
                line = f"\n[{mark}] {text} [{mark}_]"
            else:
                line = text
            out += line + "\n"
        return out


def check(session: ShopSession) -> None:
    """All renderers of the session's page agree."""
    page = session.page
    parsed = Parsed(render_html(page))
    assert session.view.observation == render_text(page) == parsed.text()
    assert render_rich(page) == parsed.rich(page.url, page.visited)
    assert session.available() == {"has_search_bar": parsed.has_search_bar, "clickables": parsed.labels()}


WALK = (
    "search[mug]",
    "click[mug0000001]",
    'click[red "deluxe"]',
    "click[grün]",
    "click[large]",
    "click[description]",
    "click[< prev]",
    "click[features]",
    "click[< prev]",
    "click[reviews]",
    "click[< prev]",
    "click[attributes]",
    "click[< prev]",
    "click[< prev]",
    "click[next >]",
    "click[< prev]",
    "search[lamp]",
    "click[next >]",
    "click[next >]",
    "click[next >]",
    "search[jug]",
    "click[odd0000001]",
    "click[same]",
    "click[]",
    "click[description]",
    "click[< prev]",
    "click[buy now]",
)


@pytest.mark.parametrize("show_attrs", [False, True])
def test_all_renderers_agree_on_every_page(tiny_shop: Shop, show_attrs: bool) -> None:
    session = ShopSession(tiny_shop, show_attributes=show_attrs)
    kinds = set()
    check(session)
    for action in WALK:
        session.step(action)
        check(session)
        kinds.add(session.state.kind)
    assert kinds == ({"results", "item", "sub", "done"})


TEXTS = st.text(alphabet="ab &<>\"'\n\t\r\f\xa0é漢\u2028/[]", max_size=8)


@given(texts=st.lists(TEXTS, min_size=6, max_size=6), values=st.lists(TEXTS, max_size=4))
def test_all_renderers_agree_on_any_product_text(
    make_shop: Callable[..., Shop], texts: list[str], values: list[str]
) -> None:
    item = {
        "asin": "ASIN000001",
        "name": texts[0],
        "full_description": texts[1],
        "small_description": [texts[2], texts[3]],
        "pricing": "",
        "images": [texts[4]],
        "category": texts[4],
        "query": "",
        "product_category": texts[5],
        "customization_options": {texts[5]: [{"value": value} for value in values]} if values else "",
    }
    ins = {"attributes": [texts[2]], "instruction": f"Find{texts[1]}", "instruction_attributes": [texts[2]]}
    session = ShopSession(make_shop([item], {"ASIN000001": ins}), show_attributes=True)
    session.state = type(session.state)(kind="item", asin="ASIN000001", keywords=("x",), page=1)
    check(session)
    for label in ("description", "features", "attributes", "reviews"):
        session.step(f"click[{label}]")
        check(session)
        session.step("click[< prev]")
    for value in values:
        session.step(f"click[{value}]")
        check(session)


def test_whitespace_as_a_parser_sees_it() -> None:
    seen = {
        text: [found for _, found in visible("text", text)] for text in ("", " ", "\n", " \n ", "\t", "\xa0", " x ")
    }
    assert seen == {"": [], " ": [" "], "\n": [], " \n ": [], "\t": [" "], "\xa0": ["\xa0"], " x ": [" x "]}


def test_a_blank_bullet_is_an_empty_piece_and_an_empty_description_is_none(tiny_shop: Shop) -> None:
    session = ShopSession(tiny_shop)
    instruction = session.goal.instruction_text
    session.step("search[mug]")
    session.step("click[mug0000001]")
    head = f"Instruction: [SEP] {instruction} [SEP] Back to Search [SEP] < Prev"
    assert session.step("click[description]")[0] == head
    session.step("click[< prev]")
    # the bullet of blanks and a line end is dropped, the empty one leaves its blank
    assert session.step("click[features]")[0] == f"{head} [SEP]  [SEP] Holds tea [SEP] Safe in a dishwasher"
    session.step("click[< prev]")
    assert session.step("click[reviews]")[0] == head


def test_rich_pages(tiny_shop: Shop) -> None:
    session = ShopSession(tiny_shop, "text_rich")
    session.step("search[mug]")
    session.step("click[mug0000001]")
    session.step("click[small]")
    session.step("click[blue]")
    observation = session.step('click[red "deluxe"]')[0]
    # quotation marks are escaped in the URL, so this value never counts as clicked; the last clicked comes first
    assert observation.startswith("You have clicked small.\nInstruction:\n")
    observation = session.step("click[blue]")[0]
    assert observation.startswith("You have clicked small.\nYou have clicked blue.\nInstruction:\n")
    assert '\n  [clicked button] blue [clicked button_]\n  [button] red "deluxe" [button_]\n' in observation
    assert session.step("click[< prev]")[0].count("[clicked button] MUG0000001 [clicked button_]") == 1
    assert "You have clicked grün" not in session.step("click[mug0000001]")[0] + session.step("click[grün]")[0]


def test_urls(tiny_shop: Shop) -> None:
    session = ShopSession(tiny_shop, "url", goal=1)
    base = "http://127.0.0.1:3000"
    assert session.reset(1) == f"{base}/1"
    assert session.step("search[red mug]")[0] == f"{base}/search_results/1/red+mug/1"
    assert session.step("click[mug0000001]")[0] == f"{base}/item_page/1/MUG0000001/red+mug/1/{{}}"
    assert session.step("click[grün]")[0] == f'{base}/item_page/1/MUG0000001/red+mug/1/{{"color": "gr\\u00fcn"}}'
    assert (
        session.step("click[features]")[0]
        == f"{base}/item_sub_page/1/MUG0000001/red+mug/1/Features/{{'color': 'grün'}}"
    )
    session.step("click[< prev]")
    assert session.step("click[buy now]")[0] == f"{base}/done/1/MUG0000001/{{'color': 'grün'}}"


def test_options_are_written_as_flask_writes_them() -> None:
    options = {"size": "<b>&'\"", "color": "grün"}
    text = options_json(options)
    assert text == '{"color": "gr\\u00fcn", "size": "\\u003cb\\u003e\\u0026\\u0027\\""}'
    assert json.loads(text) == options
    import flask

    with flask.Flask("shop").app_context():
        assert flask.render_template_string("{{ options | tojson }}", options=options) == text
