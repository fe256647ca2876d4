"""Skills: short texts that say how tasks of a kind are done, and which task is told which of them.

A folder of text files with a `skills.toml`, in which each name on the right is a file of the folder:

    always = "general.txt"        # told in every task, first (may be left out)
    otherwise = "unknown.txt"     # told where nothing below matches (may be left out)

    [category]                    # by the task's category; in Search that is the data source
    heat = "heat.txt"

    [keyword]                     # by what the first observation says, in any case; all that match are told
    "price lower than" = "price.txt"

A policy may read them itself (`--examples skills:FOLDER`), or its teacher alone (`--judge skills:FOLDER`). Both see the
same prompt: the text stands after the first observation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.core.errors import AgentError, SettingsError, did_you_mean
from turngym.core.settings import read_toml
from turngym.core.task import content_hash
from turngym.core.user_files import read_text, user_path
from turngym.envs.base import tasks_of

SKILLS_FILE = "skills.toml"
SKILLS_PREFIX = "skills:"
SHIPPED = Path(__file__).parents[1] / "worlds" / "skills"
"""The folders of this package: alfworld, webshop, search."""
HINT_HEAD = "\n\n[user's hint / instruction]\n"
"""Stands in a prompt in front of a hint or a skill."""
LONGEST_TEXT = 20_000
"""Most characters of one text. A context has room for a page, not for a book."""
SHORTEST_TEXT = 11
"""Fewest characters of one text: what is shorter is no hint (docs/algorithms.md#hint-choice)."""
MARKS = ("[HINT_START]", "[HINT_END]")
CHECKED_TASKS = 200
"""Tasks, spread evenly over a split, that a folder is checked against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skills:
    """The texts of a folder, by what they are for."""

    name: str
    always: str = ""
    otherwise: str = ""
    category: Mapping[str, str]
    """Category -> text."""
    keyword: Mapping[str, str]
    """Words of the first observation -> text."""

    @property
    def texts(self) -> frozenset[str]:
        return frozenset({self.always, self.otherwise, *self.category.values(), *self.keyword.values()} - {""})

    @property
    def identity(self) -> str:
        """The number of texts and a hash of them, for the record of a result."""
        content = {
            "always": self.always,
            "otherwise": self.otherwise,
            "category": dict(self.category),
            "keyword": dict(self.keyword),
        }
        return f"{len(self.texts)} skills, {content_hash(content)[:16]}"

    def text(self, category: str, observation: str) -> str | None:
        """What a task of `category` whose first observation is `observation` is told; None: no text is for it."""
        texts = [text for _, _, text in self._matches(category, observation)]
        if not texts and self.otherwise:
            texts = [self.otherwise]
        if not texts and (self.category or self.keyword or not self.always):
            return None
        # two words may stand for one text, which is told once
        return "\n".join(dict.fromkeys([*([self.always] if self.always else []), *texts]))

    def added_to(self, observation: str, category: str) -> str:
        """The first `observation` of a task with its skills. Raises AgentError where no text is for the task."""
        text = self.text(category, observation)
        if text is None:
            raise AgentError(f"skills {self.name}: no text for a task of category {category!r}; {self._way_out}")
        return observation + HINT_HEAD + text

    def check(self, env: Any) -> None:
        """Looks at tasks of a `TextEnv`. Raises AgentError for one without a text, or an entry that matches none."""
        ids = tasks_of(env)
        chosen = [ids[number] for number in range(0, len(ids), max(1, -(-len(ids) // CHECKED_TASKS)))]
        used: set[tuple[str, str]] = set()
        categories: set[str] = set()
        for task in chosen:
            observation, info = env.reset(seed=0, options={"task": task})
            category = str(info["category"])
            categories.add(category)
            if self.text(category, observation) is None:
                raise AgentError(f"skills {self.name}: no text for task {task}, category {category!r}; {self._way_out}")
            used |= {(table, key) for table, key, _ in self._matches(category, observation)}
        for table, key in (*(("category", key) for key in self.category), *(("keyword", key) for key in self.keyword)):
            if (table, key) not in used:
                hint = ""
                if table == "category":
                    hint = f"; there are {', '.join(sorted(categories))}.{did_you_mean(key, sorted(categories))}"
                raise AgentError(
                    f"skills {self.name}: [{table}] {key!r} matches none of {len(chosen)} tasks of {env.env_id}{hint}"
                )

    def _matches(self, category: str, observation: str) -> Iterator[tuple[str, str, str]]:
        """(table, key, text) of the entries for a task."""
        if category in self.category:
            yield "category", category, self.category[category]
        # not what a teacher is told behind it
        first_page = observation.partition(HINT_HEAD)[0].lower()
        yield from (("keyword", word, text) for word, text in self.keyword.items() if word.lower() in first_page)

    @property
    def _way_out(self) -> str:
        return f"valid: a line in [category] or [keyword] of its {SKILLS_FILE}, or `otherwise`"


def read_skills(name: str) -> Skills:
    """Reads `FOLDER`, a TOML file in such a folder, or a folder of this package by its name (`alfworld`).

    Raises AgentError for a folder, a mapping or a text that cannot be used.
    """
    path = user_path(name)
    if not path.exists() and (SHIPPED / name).exists() and ".." not in Path(name).parts:
        path = SHIPPED / name
    path = path / SKILLS_FILE if path.is_dir() else path
    if not path.is_file():
        shipped = ", ".join(sorted(folder.name for folder in SHIPPED.iterdir()))
        raise AgentError(
            f"skills {name}: there is no {path.name} there; valid: a folder with {SKILLS_FILE}, or {shipped}"
        )
    try:
        table = read_toml(path)
    except SettingsError as error:
        raise AgentError(f"skills {name}: {error}") from error
    if unknown := sorted(table.keys() - {"always", "otherwise", "category", "keyword"}):
        raise AgentError(f"skills {name}: {unknown[0]!r} is unknown; valid: always, otherwise, category, keyword")
    tables: dict[str, dict[str, str]] = {}
    for kind in ("category", "keyword"):
        entries = table.get(kind, {})
        if not isinstance(entries, Mapping):
            raise AgentError(f"skills {name}: {kind} is {entries!r}; valid: a table of names to files")
        if "" in entries:
            raise AgentError(f"skills {name}: [{kind}] has an empty name, which would match everything or nothing")
        tables[kind] = {key: _text(name, path.parent, file) for key, file in entries.items()}
    single = {entry: _text(name, path.parent, table[entry]) for entry in ("always", "otherwise") if entry in table}
    if not single and not any(tables.values()):
        raise AgentError(f"skills {name}: {path.name} names no file; valid: always, otherwise, [category], [keyword]")
    return Skills(name=name, category=tables["category"], keyword=tables["keyword"], **single)


def _text(name: str, folder: Path, file: object) -> str:
    # what stands in it goes into prompts, and to whoever answers them: a link must not lead out of the folder, either
    # Path.resolve raises an error for a link to itself
    target = os.path.realpath(folder / file) if isinstance(file, str) and file and "\0" not in file else ""
    inside = os.path.dirname(target) == os.path.realpath(folder)
    if not isinstance(file, str) or not inside or Path(file).name != file:
        raise AgentError(f"skills {name}: {file!r} is no file of the folder; valid: a name such as heat.txt")
    path = folder / file
    if not path.is_file():
        raise AgentError(f"skills {name}: there is no {file} there")
    text = read_text(path, AgentError).strip()
    if not SHORTEST_TEXT <= len(text) <= LONGEST_TEXT:
        raise AgentError(f"skills {name}: {file} has {len(text)} characters; valid: {SHORTEST_TEXT} to {LONGEST_TEXT}")
    if mark := next((mark for mark in MARKS if mark in text), None):
        raise AgentError(f"skills {name}: {file} has {mark} in it, which ends or begins a hint; leave it out")
    return text
