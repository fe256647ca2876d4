"""Actions as text: `search[...]` and `click[...]`, read letter by letter as the original reads them."""

from __future__ import annotations

from turngym.envs.spaces import printable

SEARCH = "search"
CLICK = "click"
BACK_TO_SEARCH = "Back to Search"
NEXT_PAGE = "Next >"
PREV_PAGE = "< Prev"
BUY_NOW = "Buy Now"
SEARCH_BUTTON = "Search"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
"""Labels of the buttons, as the pages show them; clicks name them in lower case."""
SEARCH_TEMPLATE = "search[<your keywords>]"


def parse_action(action: str) -> tuple[str, str] | None:
    """(name, lower-cased argument) of `name[argument]`, or None where the original reads no argument.

    Equal to matching `(.+)[(.+)]` greedily at the start of the text, in linear time: the last `]` of the first line
    closes, the last `[` that leaves at least one character opens, and what follows is ignored. So nothing is stripped,
    an opening bracket inside the argument spoils it, and an empty argument is none.
    """
    line = action.partition("\n")[0]
    close = line.rfind("]")
    start = line.rfind("[", 1, close - 1) if close > 2 else -1
    if start < 1:
        return None
    return line[:start], printable(line[start + 1 : close]).lower()


def click(label: str) -> str:
    """The action that clicks what is called `label`."""
    return f"{CLICK}[{label.lower()}]"


def search(keywords: str) -> str:
    """The canonical action that searches for `keywords`, without the brackets and line ends that it cannot carry."""
    words = keywords.lower().replace("[", " ").replace("]", " ").split()
    return f"{SEARCH}[{' '.join(words)}]"


def canonical(action: str) -> str:
    """The action as the shop understands it: argument in lower case, text after the closing bracket dropped.

    Both are what the original does itself, so a canonical action never does anything else than the action did. What
    the original does not understand stays as it is: `Click[...]`, `click[ buy now]`, a name before the action.
    """
    parsed = parse_action(action)
    return action if parsed is None else f"{parsed[0]}[{parsed[1]}]"
