"""Observation mode `text_rich`: one line for each visible piece, with buttons, options and products marked."""

from __future__ import annotations

from turngym.envs.webshop.pages.pages import Page, nodes


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
