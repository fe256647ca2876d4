"""How does a response become a search or an answer, and what comes back? The turn protocol of Search-R1.

It says which part of a response acts, and what frames the documents (`passage_text`) that a search brings.
"""

from __future__ import annotations

import re

from turngym.core.tools import ToolSpec
from turngym.envs.channels import cut, first_action, tagged
from turngym.envs.spaces import printable

SEARCH, ANSWER = "search", "answer"
VERBS = (SEARCH, ANSWER)
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""The environment's answer to a response without an action; the original's words."""
_TOOL_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|$)", re.DOTALL)


def invalid_call(tool: ToolSpec, may_search: bool) -> str:
    """`INVALID` for agents that search by calling `tool`: it names the tool, and says when no search is left."""
    search = f"To search, I must call the tool {tool.name} and put the query into its argument {tool.argument}."
    left = search if may_search else "No search is left."
    end = "To give the final answer, I must put it between <answer> and </answer>. Let me try again."
    return f"\nMy previous action is invalid. {left} {end}\n"


def read_action(response: str) -> tuple[str, str] | None:
    """(`search` or `answer`, its text) by Search-R1's rule over the whole response; None where there is neither."""
    return first_action(printable(response), VERBS)


def canonical(response: str) -> str:
    """The action in any response, `<search>query</search>` or `<answer>text</answer>`; else the response, stripped."""
    action = read_action(response)
    return response.strip() if action is None else tagged(*action)


def search(query: str) -> str:
    return tagged(SEARCH, query)


def answer(text: str) -> str:
    return tagged(ANSWER, text)


def information(documents: str) -> str:
    """The observation that brings documents (already harmless text)."""
    return f"\n\n<information>{documents.strip()}</information>\n\n"


def written(response: str, action: str) -> str:
    """The response as the reward reads it: cut behind its action, which is `action` in canonical form.

    A closing tag that the engine dropped is put back, and a tool call stands as the search that it means.
    """
    for candidate in (response, f"{response}</{SEARCH}>", f"{response}</{ANSWER}>"):
        if canonical(candidate) == action:
            return cut(candidate, VERBS)
    before, played, _ = _TOOL_CALL.sub(lambda _: action, response, count=1).partition(action)
    return before + played if played else action
