"""A browser without a browser, for tests of the shop's web pages, and a reader of their HTML."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any


class Person:
    """A browser without a browser: keeps the cookie, reads the token and the turn from the page."""

    def __init__(self, app: Any) -> None:
        self.client = app.test_client()
        self.page = self.client.get("/").text

    def field(self, name: str) -> str:
        match = re.search(rf'name="{name}" value="([^"]*)"', self.page)
        assert match is not None, f"no {name} on this page:\n{self.page}"
        return match[1]

    def send(self, path: str, **fields: Any) -> Any:
        """POST, then the page it leads to."""
        reply = self.client.post(path, data={"token": self.field("token"), **fields})
        if reply.status_code == 303:
            reply = self.client.get(reply.location)
        self.page = reply.text
        return reply

    def begin(self, goal: int | str = "") -> Person:
        assert self.send("/start", goal=str(goal)).status_code == 200
        return self

    def act(self, **fields: str) -> Any:
        return self.send("/act", turn=self.field("turn"), **fields)

    @property
    def offered(self) -> set[str]:
        """Values of all buttons that can be clicked."""
        buttons = re.findall(r'<button[^>]* name="click" value="([^"]*)"([^>]*)>', self.page)
        return {html.unescape(value) for value, rest in buttons if "disabled" not in rest}


def parsed(page: str) -> tuple[list[tuple[str, list[str]]], str]:
    """((tag, its attributes) of all elements, the whole visible text) as a browser reads the page."""
    tags: list[tuple[str, list[str]]] = []
    texts: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, [name for name, _ in attrs]))  # type: ignore[method-assign]
    parser.handle_data = texts.append  # type: ignore[method-assign]
    parser.feed(page)
    return tags, "".join(texts)
