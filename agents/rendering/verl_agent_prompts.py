"""The prompts of a turn as verl-agent writes them: templates with fields, in our words or out of a user's own checkout.

    templates = read_templates("own", "turngym/ALFWorld-v0")          # our words, verl-agent's fields
    templates = read_templates("~/verl-agent", "turngym/ALFWorld-v0") # the texts of a checkout
    templates.prompt(2, task, [(observation, action), ...], observation, admissible)

A checkout keeps each environment's two templates (of the first turn, and of later ones) as string constants in
`agent_system/environments/prompts/NAME.py`. They are read from the syntax tree; nothing of a checkout is ever run. What
stands in the fields is written as `env_manager.py` and `memory.py` there do it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter

from turngym.core.errors import AgentError
from turngym.core.redaction import brief
from turngym.core.task import content_hash, plain_id
from turngym.core.user_files import read_text, user_path

OWN_TEMPLATES = "own"
"""Name of the templates in our own words."""
LONGEST_WITH_HISTORY = 13_000
"""Characters above which a prompt of WebShop has no history, as in env_manager.py."""
FOLDER = Path("agent_system/environments/prompts")
SEP = " [SEP] "
FIRST_FIELDS: Mapping[str, frozenset[str]] = {
    "alfworld": frozenset({"current_observation", "admissible_actions"}),
    "webshop": frozenset({"task_description", "current_observation", "available_actions"}),
    "search": frozenset({"task_description"}),
}
_STEPS = frozenset({"task_description", "step_count"})
_HISTORY = _STEPS | {"history_length", "action_history", "current_step"}
LATER_FIELDS: Mapping[str, frozenset[str]] = {
    "alfworld": _HISTORY | FIRST_FIELDS["alfworld"],
    "webshop": _HISTORY | FIRST_FIELDS["webshop"],
    "search": _STEPS | {"memory_context"},
}
"""The fields that templates of the first turn, and of later ones, may have, by environment."""
NAMES: Mapping[str, str] = {
    "turngym/ALFWorld-v0": "alfworld",
    "turngym/WebShop-v0": "webshop",
    "turngym/Search-v0": "search",
}

# Our own words. They state the facts of the published prompts: the same fields in the same order.

_ALFWORLD_END = """You see: {current_observation}
These actions are admissible now: [{admissible_actions}].

Reason about the situation first, step by step, between <think> and </think>. Then choose one admissible action and \
write it between <action> and </action>.
"""
_WEBSHOP_END = """You see: {current_observation}.
These actions are admissible now:
[
{available_actions}
].

Reason first, step by step, between <think> and </think>: which admissible action brings the purchase forward? Then \
write that action between <action> and </action>.
"""
_SEARCH_END = """Reason first, between <think> and </think>. Then do one thing, not both: if you lack some knowledge, \
write a query between <search> and </search>; if you know enough, give the answer alone between <answer> and \
</answer>, for example <answer>Lisbon</answer>.
"""
_PAST = """You have taken {step_count} step(s) so far. The last {history_length} observations, and what you did: \
{action_history}
This is step {current_step}. """
_OWN: Mapping[str, tuple[str, str]] = {
    "alfworld": (
        f"You solve household tasks in a text simulation.\n{_ALFWORLD_END}",
        "You solve household tasks in a text simulation. Your task is to: {task_description}\n" + _PAST + _ALFWORLD_END,
    ),
    "webshop": (
        f"You buy products in a web store on your own.\nYour task: {{task_description}}.\n{_WEBSHOP_END}",
        f"You buy products in a web store on your own.\nYour task: {{task_description}}.\n{_PAST}{_WEBSHOP_END}",
    ),
    "search": (
        f"You answer a question step by step.\nThe question: {{task_description}}\n\n{_SEARCH_END}",
        "You answer a question step by step.\nThe question: {task_description}\n\nYou have taken {step_count} step(s) "
        "so far. Your searches stand between <search> and </search>, what they found between <information> and "
        f"</information>:\n{{memory_context}}\n\n{_SEARCH_END}",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplates:
    """Two texts with fields in braces. Raises AgentError for fields that cannot be filled."""

    kind: str
    """`alfworld`, `webshop` or `search`."""
    first: str
    """Template of a turn without history."""
    later: str

    def __post_init__(self) -> None:
        if self.kind not in FIRST_FIELDS:
            raise AgentError(f"templates of {brief(self.kind, 40)} are unknown; valid: {', '.join(FIRST_FIELDS)}")
        for prompt, text, valid in (
            ("first turn", self.first, FIRST_FIELDS[self.kind]),
            ("later turns", self.later, LATER_FIELDS[self.kind]),
        ):
            where = f"the template of the {prompt} ({self.kind})"
            fields = _fields(text, where)
            if unknown := sorted(fields - valid):
                raise AgentError(f"{where} has the field {brief(unknown[0], 60)}; valid: {', '.join(sorted(valid))}")
            # a prompt that does not show where the agent stands was not meant
            needed = valid & {"current_observation", "memory_context", "admissible_actions", "available_actions"}
            if missing := sorted((needed or valid) - fields):
                raise AgentError(f"{where} lacks the field {{{missing[0]}}}")

    @property
    def sha256(self) -> str:
        return content_hash({"kind": self.kind, "first": self.first, "later": self.later})

    def prompt(
        self,
        length: int,
        statement: str,
        past: Sequence[tuple[str, str]],
        observation: str,
        admissible: Sequence[str] | None,
    ) -> str:
        """The user message of a turn.

        Args:
            length: how many of the last turns it shows; 0: none, which is the template `first`.
        """
        task = statement.partition(_TASK[self.kind])[2] or statement
        task = task.strip()
        pages, action_texts = [before for before, _ in past], [action for _, action in past]
        if self.kind == "webshop":
            pages, observation = [_page(page, task) for page in pages], _page(observation, task)
        actions = _actions(self.kind, admissible or ())
        values = {
            "task_description": task,
            "current_observation": observation,
            "admissible_actions": actions,
            "available_actions": actions,
        }
        first = _filled(self.first, values)
        recent = range(max(0, len(past) - length), len(past))
        if not recent:
            return first
        values |= {"step_count": str(len(past)), "current_step": str(len(past) + 1), "history_length": str(len(recent))}
        if self.kind == "search":
            pages_after = [*pages[1:], observation]
            values["memory_context"] = "\n".join(
                f"Step {n + 1}:{action_texts[n]} {pages_after[n].strip()}\n" for n in recent
            )
        values["action_history"] = "\n".join(
            f"[Observation {n + 1}: '{pages[n]}', Action {n + 1}: '{action_texts[n]}']" for n in recent
        )
        text = _filled(self.later, values)
        return first if self.kind == "webshop" and len(text) > LONGEST_WITH_HISTORY else text


_TASK = {"alfworld": "Your task is to: ", "webshop": "Instruction: ", "search": "Question: "}
"""What stands before the task in an environment's statement of it."""


def _page(observation: str, task: str) -> str:
    """A page of the shop behind its instruction, every part in quotes."""
    parts = observation.split(SEP)
    if task not in parts:
        return observation
    return SEP.join(f"'{part}'" for part in parts[parts.index(task) + 1 :])


def _actions(kind: str, admissible: Sequence[str]) -> str:
    if kind != "webshop":
        return "\n ".join(f"'{action}'" for action in admissible if action != "help")
    listed = list[str]()
    for action in admissible:
        # the page with the search bar offers the bar, and its button
        listed += ["search[<your query>]", "click[search]"] if action.startswith("search[") else [action]
    return "\n".join(f"'{action}'," for action in listed)


def _fields(text: str, where: str) -> set[str]:
    """The fields of a template. Raises AgentError for one with an attribute, an index, a conversion or a format."""
    names = set()
    try:
        for _, name, form, conversion in Formatter().parse(text):
            if name is not None:
                if not name.isidentifier() or form or conversion:
                    raise AgentError(f"{where} has the field {brief(name, 60)}; valid: a name in braces, nothing else")
                names.add(name)
    except ValueError as error:
        raise AgentError(f"{where} cannot be filled: {error}") from None
    return names


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Fill the fields, which were checked. str.format could reach into the values."""
    return "".join(before + ("" if name is None else values[name]) for before, name, *_ in Formatter().parse(text))


# Templates out of a checkout.


def read_templates(named: str, env_id: str) -> PromptTemplates:
    """The templates of an environment: `own`, or those in a checkout of verl-agent (or of a fork, such as SDAR).

    `named` is the checkout's folder, its folder of prompts, or the file itself.

    Raises AgentError where there is no such file, it has no such constants, or their fields cannot be filled.
    """
    kind = NAMES.get(plain_id(env_id))
    if kind is None:
        raise AgentError(f"--prompts {named}: there are templates of {', '.join(NAMES)}; not of {env_id}")
    if named == OWN_TEMPLATES:
        first, later = _OWN[kind]
        return PromptTemplates(kind=kind, first=first, later=later)
    place = user_path(named)
    paths = [place] if place.suffix == ".py" else [place / FOLDER / f"{kind}.py", place / f"{kind}.py"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise AgentError(
            f"--prompts {named}: there is no {paths[0]}; name a checkout of verl-agent (it has {FOLDER.as_posix()}/"
            f"{kind}.py), or `{OWN_TEMPLATES}` for our own words"
        )
    try:
        constants = _constants(ast.parse(read_text(path, AgentError)))
    # the parser gives up on deep nesting, and on null bytes
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise AgentError(f"{path} is not a Python file that can be read: {error}") from None
    names = [f"{kind.upper()}_TEMPLATE_NO_HIS", f"{kind.upper()}_TEMPLATE"]
    if missing := [name for name in names if name not in constants]:
        listed = ", ".join(sorted(constants)[:8]) or "none"
        raise AgentError(f"{path} has no string constant {missing[0]}; its string constants: {listed}")
    try:
        return PromptTemplates(kind=kind, first=constants[names[0]], later=constants[names[1]])
    except AgentError as error:
        raise AgentError(f"{path}: {error}") from None


def _constants(tree: ast.Module) -> dict[str, str]:
    """The strings that a module's top level assigns to names, by name."""
    constants = dict[str, str]()
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if (text := _string(node.value)) is not None:
            constants |= {target.id: text for target in targets if isinstance(target, ast.Name)}
    return constants


def _string(node: ast.expr) -> str | None:
    """The string that an expression of literals stands for; None for anything that would have to be run."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _string(node.left), _string(node.right)
        return None if left is None or right is None else left + right
    return None
