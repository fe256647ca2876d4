"""What does a session see? The observation of a page in its mode, and what can be clicked.

Modes are `text`, `text_rich`, `html` and `url`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Literal
from urllib.parse import quote

from turngym.envs.webshop.actions import (
    BACK_TO_SEARCH,
    BUY_NOW,
    NEXT_PAGE,
    PREV_PAGE,
    SEARCH_BUTTON,
    Quirks,
    Target,
    clicks,
    item_buttons,
)
from turngym.envs.webshop.pages import RATING, Node, Page, clickables, done_texts, nodes, parts, sub_texts
from turngym.envs.webshop.products import Product

Mode = Literal["text", "text_rich", "html", "url"]
SEPARATOR = " [SEP] "


@dataclass(frozen=True, slots=True)
class PageView:
    """One page as the session sees it."""

    observation: str
    clickables: Mapping[str, Target]
    """What can be clicked, in the original's order; never changed."""
    admissible: tuple[str, ...]
    """The clicks among them that an action can name."""


def view(page: Page, mode: Mode, quirks: Quirks) -> PageView:
    """The observation of a page in `mode`, with what can be clicked."""
    labels = clickables(page)
    return PageView(_RENDERERS[mode](page), labels, clicks(labels, quirks))


# --- mode `text`: the visible pieces of a page, stripped and joined by ` [SEP] `


def render_text(page: Page) -> str:
    """The page as one line of text (product texts may contain line ends)."""
    return SEPARATOR.join([_joined(part) for part in parts(page) if part])


@lru_cache(maxsize=4096)
def _joined(part: tuple[Node, ...]) -> str:
    return SEPARATOR.join([text.strip() for _, text in part])


# --- mode `text_rich`: one line for each visible piece, with buttons, options and products marked


def render_rich(page: Page) -> str:
    """The page, one piece a line. Chosen options are repeated in front of everything, the last one first.

    An option counts as chosen where it stands in quotation marks in the URL, which JSON-escapes other than ASCII.
    """
    lines: list[str] = []
    front: list[str] = []
    for role, text in nodes(page):
        if role == "button":
            lines.append(f"[button] {text} [button_]\n")
        elif role == "option" and f'"{text}"' in page.url:
            front.append(f"You have clicked {text}.\n")
            lines.append(f"  [clicked button] {text} [clicked button_]\n")
        elif role == "option":
            lines.append(f"  [button] {text} [button_]\n")
        elif role == "link":
            mark = "clicked button" if text in page.visited else "button"
            lines.append(f"\n[{mark}] {text} [{mark}_]\n")
        else:
            lines.append(f"{text}\n")
    return "".join([*reversed(front), *lines])


# --- mode `html`: documents of our own that a parser reads as it reads the original's
#
# They have the same ids, classes, fields and visible pieces of text in the same order, so that a parser of the
# original's pages (`#search_input`, `.btn`, `.product-link`, radio inputs, `#product-image`, `#instruction-text h4`,
# `#reward pre`) finds the same here. They load no style sheets, scripts or frames from elsewhere.

_SUB_NAMES = {
    "Description": "description",
    "Features": "bulletpoints",
    "Reviews": "reviews",
    "Attributes": "attributes",
}


def render_html(page: Page) -> str:
    """The page as a complete HTML document; every text of the shop is escaped."""
    if page.kind == "search":
        return _document(_search(page))
    if page.kind == "done":
        return _document(_done(page))
    instruction = f'<div id="instruction-text">\n<h4>Instruction:<br>{escape(page.instruction)}</h4>\n</div>'
    body = [instruction, _form(_path(page), BACK_TO_SEARCH, "btn btn-success")]
    if page.kind == "results":
        body += _results(page)
    elif page.product is not None:
        back = _path(page, "search_results") if page.kind == "item" else _path(page, "item_page")
        body.append(_form(back, PREV_PAGE, "btn btn-primary"))
        body += _item(page, page.product) if page.kind == "item" else _sub(page, page.product)
    return _document(['<div class="container py-5">', *body, "</div>"])


def _document(body: Iterable[str]) -> str:
    head = ["<!DOCTYPE html>", "<html>", "<head>", '<meta charset="utf-8">', "<title>WebShop</title>", "</head>"]
    return "\n".join([*head, "<body>", *body, "</body>", "</html>"])


def _path(page: Page, kind: str = "", **changed: object) -> str:
    """Address of a page of this session, percent-encoded; `changed` may be number, asin, options, sub."""
    if not kind:
        return f"/{quote(page.session, safe='')}"
    fields: Mapping[str, object] = {"number": page.number, "options": dict(page.options)} | changed
    words = quote(str(list(page.keywords)), safe="")
    path = f"/{kind}/{quote(page.session, safe='')}"
    if kind == "search_results":
        return f"{path}/{words}/{fields['number']}"
    asin, options = quote(str(fields.get("asin", page.asin)), safe=""), quote(str(fields["options"]), safe="")
    if kind == "done":
        return f"{path}/{asin}/{options}"
    sub = f"/{fields['sub']}" if "sub" in fields else ""
    return f"{path}/{asin}/{words}/{fields['number']}{sub}/{options}"


def _form(path: str, label: str, classes: str) -> str:
    button = f'<button type="submit" class="{classes}">{escape(label)}</button>'
    return f'<form method="post" action="{escape(path)}">\n{button}\n</form>'


def _search(page: Page) -> list[str]:
    return [
        '<div class="container">',
        '<div id="logo">\n<h2>WebShop</h2>\n</div>',
        f'<div id="instruction-text">\n<h4>Instruction: <br>{escape(page.instruction)}</h4>\n</div>',
        f'<form role="form" method="post" action="{escape(_path(page))}">',
        '<input id="search_input" type="text" name="search_query" placeholder="Search..." required>',
        f'<button class="btn btn-success" type="submit">{SEARCH_BUTTON}</button>',
        "</form>",
        "</div>",
    ]


def _results(page: Page) -> list[str]:
    body = [f"<h3>Page {page.number} (Total results: {page.total})</h3>"]
    if page.number > 1:
        path = _path(page, "search_results", number=page.number - 1)
        body.append(_form(path, PREV_PAGE, "btn btn-primary"))
    if page.has_next:
        path = _path(page, "search_results", number=page.number + 1)
        body.append(_form(path, NEXT_PAGE, "btn btn-primary"))
    for product in page.products:
        link = escape(_path(page, "item_page", asin=product.asin, options={}))
        body += [
            '<div class="list-group-item">',
            f'<img src="{escape(product.main_image)}" class="result-img">',
            f'<h4 class="product-asin"><a class="product-link" href="{link}">{escape(product.asin)}</a></h4>',
            f'<h4 class="product-title">{escape(product.title)}</h4>',
            f'<h5 class="product-price">{escape(product.price_text)}</h5>',
            "</div>",
        ]
    return body


def _item(page: Page, product: Product) -> list[str]:
    body = [f'<img id="product-image" src="{escape(product.main_image)}" class="item-page-img">']
    for name, values in product.options.items():
        body += [f"<div>\n<h4>{escape(name)}</h4>", '<div class="radio-toolbar">']
        for number, value in enumerate(values):
            ident, path = f"radio_{name}{number}", _path(page, "item_page", options={**page.options, name: value})
            body.append(
                f'<input type="radio" id="{escape(ident)}" name="{escape(name)}" value="{escape(value)}" '
                f'data-url="{escape(path)}"{" checked" if page.options.get(name) == value else ""}>'
            )
            body.append(f'<label for="{escape(ident)}">{escape(value)}</label>')
        body.append("</div>\n</div>")
    body += [f"<h2>{escape(product.title)}</h2>", f"<h4>Price: {escape(product.price_text)}</h4>", f"<h4>{RATING}</h4>"]
    for label in item_buttons(page.show_attributes)[:-1]:
        form = _form(_path(page, "item_sub_page", sub=label), label, "btn btn-primary")
        body.append(f'<div name="{_SUB_NAMES[label]}">\n{form}\n</div>')
    body.append(_form(_path(page, "done"), BUY_NOW, "btn btn-lg purchase"))
    return body


def _sub(page: Page, product: Product) -> list[str]:
    texts = [escape(text) for text in sub_texts(product, page.sub)]
    if page.sub == "Description":
        inner = [f'<p class="product-info">{text}</p>' for text in texts]
    elif page.sub == "Features":
        inner = ["<ul>", *(f'<li><p class="product-info">{text}</p></li>' for text in texts), "</ul>"]
    elif page.sub == "Attributes":
        listed = [f'<li><p class="attribute">{text}</p></li>' for text in texts[:-3]]
        headings = zip(("category", "query", "product_category"), texts[-3:], strict=True)
        inner = ["<ul>", *listed, "</ul>", *(f'<h5 class="product-{name}">{text}</h5>' for name, text in headings)]
    else:
        inner = []
    return [f'<div name="{_SUB_NAMES.get(page.sub, "reviews")}">', *inner, "</div>"]


_DONE_IDS = ("asin", "options", "purchased_attrs", "purchased-category", "purchased-query", "purchased-pc")
_GOAL_IDS = ("asin", "options", "attrs", "price", "instruction-text", "category", "pc", "query")


def _done(page: Page) -> list[str]:
    texts = [escape(text) for text in done_texts(page.asin, page.options, page.score)]
    purchased, goal = texts[5:17], texts[18:26]
    body = ['<div class="container">', f'<div id="thankyou">\n<h1>{texts[0]}</h1>\n</div>', '<div id="stats">']
    body.append(f"<h3>{texts[1]}</h3>\n<div><pre>{texts[2]}</pre>{texts[3]}</div>\n<div hidden>\n<h2>{texts[4]}</h2>")
    for number, ident in enumerate(_DONE_IDS):
        label, value = purchased[2 * number : 2 * number + 2]
        body.append(f'<h4 id="{ident}">{label}<pre>{value}</pre></h4>')
    body.append(f"<h2>{texts[17]}</h2>")
    body += [f'<h4 id="goal-{ident}">{label}<pre></pre></h4>' for ident, label in zip(_GOAL_IDS, goal, strict=True)]
    body.append(f'<h4>{texts[26]}<div id="goal"><pre>{texts[27]}</pre></div></h4>\n<h2>{texts[28]}</h2>\n</div>')
    body.append(f'<h3 id="reward">{texts[29]}<pre>{texts[30]}</pre></h3>')
    body.append(f'<h4 hidden>{texts[31]}<div id="reward_info"><pre>{texts[32]}</pre></div></h4>\n</div>\n</div>')
    return body


_RENDERERS: Mapping[str, Callable[[Page], str]] = {
    "text": render_text,
    "text_rich": render_rich,
    "html": render_html,
    "url": lambda page: page.url,
}
