"""Which rules the native engine knows, and the words it takes from a game's own grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from turngym.envs.alfworld.errors import UnsupportedFacts
from turngym.envs.alfworld.native.grammar import (
    digest,
    domain_digests,
    grammar_digests,
    parse_grammar,
    rule_digest,
    split_task,
)

_TEXTWORLD_SIGNS = re.compile(r'[;|<>\[\]#{}"\t\n\\]|//')
_ARRIVE = re.compile(r"(?P<say>[^#\[\]{}|<>;\"]*\{(?:r|lend)\.name\}[^#\[\]{}|<>;\"]*)#examineReceptacle\.feedback#")
_PUT = re.compile(r"[^#\[\]{}|<>;\"]*\{o\.name\}[^#\[\]{}|<>;\"]*\{r\.name\}[^#\[\]{}|<>;\"]*")
_PUT_COMMAND = re.compile(r"\w+ \{o\} [\w/ ]+ \{r\}")
_PLAIN = re.compile(r"[^#\[\]{}|<>;\"]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """The words that differ between games and releases of alfworld; the rest of the text is fixed."""

    task: str
    """The task sentence."""
    go: str = "You arrive at {r}. "
    """Said on arrival; `{r}` is the receptacle, `{lend}` the location (alfworld before 0.4)."""
    put_command: str = "move {o} to {r}"
    put: str = "You move the {o} to the {r}."
    help: str | None = None
    """The answer to `help`; None where the game has no such command (alfworld before 0.4)."""


def read_wording(domain: str, grammar: str) -> Wording:
    """The words of a game whose rules the native engine knows.

    Raises UnsupportedFacts naming the rules that differ, ValueError for texts that cannot be read.
    """
    known = _known()
    actions = domain_digests(domain)
    unknown = [name for name in sorted(actions) if actions[name] not in known["domain"].get(name, ())]
    missing = [name for name in known["domain"] if name not in actions and name != "help"]
    if unknown or missing:
        raise UnsupportedFacts(_difference("key 'pddl_domain'", unknown, missing))
    task, template = split_task(grammar)
    if _TEXTWORLD_SIGNS.search(task):
        raise UnsupportedFacts(f"its task sentence has signs that the grammar gives a meaning: {task[:120]!r}")
    return replace(_phrases(template, "help" in actions), task=task)


@lru_cache(maxsize=16)
def canonical_rules(domain: str, template: str) -> dict[str, dict[str, str]]:
    """What rules a game has, for hashing: digests by name of a domain and of a grammar without its task sentence."""
    return {"domain": domain_digests(domain), "grammar": grammar_digests(parse_grammar(template))}


@lru_cache(maxsize=16)
def _phrases(template: str, with_help: bool) -> Wording:
    grammar = parse_grammar(template)
    wanted = sorted(name for name in _known()["domain"] if not name.startswith(":") and (with_help or name != "help"))
    missing = [f"action {name}" for name in wanted if name not in grammar.actions]
    if missing:
        raise UnsupportedFacts(_difference("key 'grammar'", [], missing))
    rules = grammar.reachable(["#intro#", *(grammar.actions[name][1] for name in wanted)])
    phrases = {
        "GotoLocation.feedback": _ARRIVE.fullmatch(_text(rules.get("GotoLocation.feedback"))),
        "PutObject.feedback": _PUT.fullmatch(_text(rules.get("PutObject.feedback"))),
        "action putobject": _PUT_COMMAND.fullmatch(grammar.actions["putobject"][0]),
        "action help": _PLAIN.fullmatch(grammar.actions["help"][1]) if with_help else None,
    }
    found = {f"action {name}": digest(grammar.actions[name]) for name in wanted}
    found |= {name: rule_digest(rule) for name, rule in rules.items()}
    known = _known()["grammar"]
    unknown = [name for name in found if found[name] not in known.get(name, ()) and phrases.get(name) is None]
    if unknown:
        raise UnsupportedFacts(_difference("key 'grammar'", unknown, []))
    go, put, command, answer = phrases.values()
    if go is None or put is None or command is None:
        raise UnsupportedFacts("key 'grammar' has no readable sentences for going and putting")
    return Wording(
        task="",
        go=go.group("say").replace(".name}", "}"),
        put_command=command.group(),
        put=put.group().replace(".name}", "}"),
        # TextWorld's template reader drops white space at the start of a text.
        help=answer.group().lstrip() if answer is not None else None,
    )


@lru_cache(maxsize=1)
def _known() -> dict[str, dict[str, list[str]]]:
    """Digests of rules that were held against TextWorld, by name: the shipped ones and this package's own."""
    text = resources.files("turngym.envs.alfworld.native").joinpath("known_rules.json").read_text(encoding="utf-8")
    known: dict[str, dict[str, list[str]]] = json.loads(text)
    return known


def _text(rule: list[dict[str, Any]] | None) -> str:
    return str(rule[0].get("rhs", "")) if rule is not None and len(rule) == 1 and "condition" not in rule[0] else ""


def _difference(where: str, unknown: list[str], missing: list[str]) -> str:
    parts = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"no {', '.join(missing)}"] * bool(missing)
    return f"{where} differs from the rules that are known ({'; '.join(parts)})"
