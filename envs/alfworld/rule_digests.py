"""What rules a game has: its PDDL domain and its TextWorld grammar, read and reduced to digests by name.

`game` compares the digests with those of the rules that the native engine knows. A damaged text raises ValueError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from turngym.core.redaction import excerpt
from turngym.core.user_files import json_of
from turngym.envs.alfworld.pddl import TOKEN

TASK_SIGN = "{TASK}"
"""Stands for the task sentence in a grammar that is compared or kept without it."""
_TASK = re.compile(r'(?<=Your task is to: )((?:[^"\\]|\\.)*)(?=")')
_GRAMMAR_TOKEN = re.compile(r'"""(?P<block>(?:.|\n)*?)"""|"(?P<text>[^"]*)"|(?P<word>::|[{};]|[\w/-]+)|#[^\n]*|\s+')
_SYMBOL = re.compile(r"#([^#]+)#")
Rules = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A TextWorld grammar: actions (template, feedback) by lower-case name, and production rules, as written."""

    actions: dict[str, tuple[str, str]]
    rules: Rules

    def reachable(self, starts: list[str]) -> Rules:
        """The rules that deriving `starts` can use."""
        # TextWorld joins `[...]` lists with these; no text names them
        todo = ["list_empty", "list_separator", "list_last_separator"]
        todo += [name for text in starts for name in _SYMBOL.findall(text)]
        rules: Rules = {}
        while todo:
            name = todo.pop()
            if name not in rules and name in self.rules:
                rules[name] = self.rules[name]
                todo += [symbol for rule in rules[name] for symbol in _SYMBOL.findall(str(rule.get("rhs", "")))]
        return rules


def split_task(grammar: str) -> tuple[str, str]:
    """The task sentence, and the grammar with `{TASK}` in its place. Raises ValueError if there is none."""
    match = _TASK.search(grammar)
    if match is None:
        raise ValueError("key 'grammar' has no \"Your task is to: ...\" sentence")
    try:
        task = json_of(f'"{match.group(1)}"')
        task.encode("utf-8")
    # half a surrogate pair is a ValueError, too
    except ValueError as error:
        raise ValueError(f"key 'grammar': the task sentence is not a JSON string: {error}") from error
    return task, f"{grammar[: match.start()]}{TASK_SIGN}{grammar[match.end() :]}"


@lru_cache(maxsize=16)
def domain_digests(domain: str) -> dict[str, str]:
    """Digest by action name, and of `:types`, `:constants`, `:derived`; comments, case and white space do not count.

    Raises ValueError for a text that is not a complete PDDL domain.
    """
    text = "\n".join(line.split(";", 1)[0] for line in domain.lower().split("\n"))
    digests: dict[str, str] = {}
    depth = 0
    words: list[str] = []
    for token in TOKEN.findall(text):
        depth += (token == "(") - (token == ")")
        words.append(token)
        # a section is whole at the bracket that leads back to depth 1
        if depth > 1 or (depth == 1 and token != ")"):
            continue
        if depth < 0:
            break
        head = next((index for index, word in enumerate(words) if word.startswith(":")), -1)
        if head >= 0 and words[head] == ":action":
            digests[words[head + 1]] = digest(words[head + 1 :])
        elif head >= 0 and words[head] in (":types", ":constants", ":derived"):
            digests[words[head]] = digest(words[head:])
        words = []
    if depth != 0 or not digests:
        raise ValueError("key 'pddl_domain' is not a complete PDDL domain; the text may be cut off")
    return digests


@lru_cache(maxsize=16)
def parse_grammar(text: str) -> Grammar:
    """Read a TextWorld grammar. Raises ValueError naming what cannot be read."""
    actions: dict[str, tuple[str, str]] = {}
    rules: Rules = {}
    tokens = _tokens(text)
    for kind, word in tokens:
        if (kind, word) == ("word", "grammar"):
            rules.update(_json_rules(_value(tokens, word)))
        elif (kind, word) == ("word", "action"):
            name = next(tokens, ("", ""))[1]
            fields = {"template": "", "feedback": ""}
            for field_kind, field in tokens:
                if field == "}":
                    break
                if field_kind == "word" and field in ("template", "feedback", "grammar", "pddl"):
                    fields[field] = _value(tokens, field)
            rules.update(_json_rules(fields.get("grammar", "{}")))
            actions[name.lower()] = fields["template"], fields["feedback"]
        elif word != ";":
            raise ValueError(
                f"key 'grammar' cannot be read near {excerpt(word, 40)!r}; expected an action or a grammar"
            )
    return Grammar(actions=actions, rules=rules)


def grammar_digests(grammar: Grammar) -> dict[str, str]:
    """Digest by action (`action look`) and by rule; order and white space between rules do not count."""
    digests = {f"action {name}": digest(pair) for name, pair in grammar.actions.items()}
    return digests | {name: rule_digest(rule) for name, rule in grammar.rules.items()}


def rule_digest(rule: list[dict[str, Any]]) -> str:
    """Digest of one production rule."""
    return digest([json.dumps(rule, sort_keys=True)])


def digest(words: tuple[str, ...] | list[str]) -> str:
    """The first 12 hex digits of SHA-256 over the words, a line each."""
    return hashlib.sha256("\n".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(text):
        match = _GRAMMAR_TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"key 'grammar' cannot be read near {text[position : position + 40]!r}")
        position = match.end()
        if match.lastgroup is not None:
            yield match.lastgroup, match.group(match.lastgroup)


def _value(tokens: Iterator[tuple[str, str]], field: str) -> str:
    _, colons = next(tokens, ("", ""))
    kind, value = next(tokens, ("", ""))
    if colons != "::" or kind not in ("block", "text"):
        raise ValueError(f"key 'grammar': {field} must be followed by :: and a quoted text, not {excerpt(value, 40)!r}")
    return value


def _json_rules(block: str) -> Rules:
    lines = (line for line in block.split("\n") if not line.lstrip().startswith("#"))
    try:
        return msgspec.convert(json_of("\n".join(lines)), Rules)
    except msgspec.ValidationError as error:
        raise ValueError("key 'grammar': a block of rules must map names to lists of objects") from error
    # a number of thousands of digits is a ValueError, too
    except ValueError as error:
        raise ValueError(f"key 'grammar': a block of rules is not JSON: {error}") from error
