"""What a game is before it is played: its problem, the names of its entities and the words that it says.

`load_game` reads a `game.tw-pddl`. The native engine plays only rules that were compared with TextWorld: the digests of
a game's domain and grammar must be in `data/known_rules.json`. What may differ between games and releases of alfworld
is read from the game's own grammar (`Wording`). A Game is shared by all plays of it; playing never changes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from turngym.core.redaction import excerpt
from turngym.core.rows import stat_stamp
from turngym.core.task import content_hash
from turngym.core.user_files import bounded_bytes, json_of, text_problem
from turngym.envs.alfworld.pddl import (
    GameError,
    GameUnsupported,
    UnsupportedFacts,
    category,
    entity_names,
    listing,
    parse_problem,
    shuffled,
)
from turngym.envs.alfworld.rule_digests import (
    TASK_SIGN,
    digest,
    domain_digests,
    grammar_digests,
    parse_grammar,
    rule_digest,
    split_task,
)

KEYS = ("pddl_domain", "grammar", "pddl_problem")
"""What a game file must have; `walkthrough` and `solvable` are optional."""
_BASINS_ALONE = "f4d4fa7f3eb0"
"""Digest of `CleanObject` in the domain file of alfworld's package (0.2 to 0.5), with which `alfworld-generate` makes
games: only a basin cleans, while in the games of `alfworld-download` a receptacle of the type `SinkType` does, too."""


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


BEFORE_0_4 = Wording(
    task="",
    go="You arrive at {lend}. ",
    put_command="put {o} in/on {r}",
    put="You put the {o} in/on the {r}.",
    help=None,
)
"""The words of alfworld before its release 0.4, which said `move` for `put ... in/on` (github.com/alfworld/alfworld,
issue 96)."""


class Game:
    """Everything about a game that playing does not change. Attributes are read-only by convention.

    `object_names[i]` and `receptacle_names[i]` belong to index i of `problem.objects` and `problem.receptacles`.
    `shuffle` (a seed) numbers the entities as alfworld's domain randomization does after `random.seed(shuffle)`.
    """

    def __init__(self, data: Mapping[str, Any], *, source: str = "game", shuffle: int | None = None) -> None:
        self.data = data
        self.source = source
        self.shuffle = shuffle
        try:
            self.wording = read_wording(data["pddl_domain"], data["grammar"])
        except UnsupportedFacts as error:
            raise GameUnsupported(source, _one_line(error)) from error
        except (ValueError, RecursionError) as error:
            raise GameError(f"{source}: damaged game file: {_one_line(error)}") from error
        try:
            self.problem = parse_problem(data["pddl_problem"])
        except UnsupportedFacts as error:
            raise GameUnsupported(source, f"key 'pddl_problem': {_one_line(error)}") from error
        except (ValueError, RecursionError) as error:
            raise GameError(f"{source}: key 'pddl_problem': {_one_line(error)}") from error
        only_basins_clean = domain_digests(data["pddl_domain"])["cleanobject"] == _BASINS_ALONE
        if only_basins_clean and self.problem.receptacles_of("sinktype"):
            raise GameUnsupported(source, "it has a sink that is no basin, in which its domain cleans nothing")
        self._name()

    @classmethod
    def renumbered(cls, game: Game, shuffle: int | None) -> Game:
        """The same game with other numbers; parses nothing."""
        copy = cls.__new__(cls)
        copy.data, copy.source, copy.shuffle = game.data, game.source, shuffle
        copy.problem, copy.wording = game.problem, game.wording
        copy._name()
        return copy

    @classmethod
    def reworded(cls, game: Game, shuffle: int | None) -> Game:
        """The same game as alfworld before 0.4 tells it; its hash stays, as the task does."""
        copy = cls.renumbered(game, shuffle)
        copy.wording = replace(BEFORE_0_4, task=game.wording.task)
        return copy

    def _name(self) -> None:
        problem = self.problem
        ids = problem.entities
        names = entity_names(ids if self.shuffle is None else shuffled(ids, self.shuffle))
        self.object_names = tuple(names[word] for word in problem.objects)
        self.receptacle_names = tuple(names[word] for word in problem.receptacles)
        self.location_names = tuple(names[word] for word in problem.locations)
        self.object_index = {name: index for index, name in enumerate(self.object_names)}
        self.receptacle_index = {name: index for index, name in enumerate(self.receptacle_names)}
        # by location, filled by the engine as locations are seen, for all plays of the game
        self.go: dict[int, dict[str, tuple[str, int, int]]] = {}
        places = enumerate(problem.receptacle_location)
        self.ways = sorted((f"go to {self.receptacle_names[r]}", ("go", r, at)) for r, at in places if at >= 0)

    @property
    def task_text(self) -> str:
        """The task in words, for example `put a hot mug in cabinet.`"""
        return self.wording.task

    @property
    def category(self) -> str:
        """Row of the result tables: `place`, `look`, `clean`, `heat`, `cool` or `two`."""
        return category(self.problem.goal)

    @property
    def walkthrough(self) -> tuple[str, ...]:
        """The commands that the file gives as a solution (in unshuffled numbers); empty if none."""
        return tuple(self.data.get("walkthrough") or ())

    @cached_property
    def sha256(self) -> str:
        """Hash of what fixes the game: problem, rules, task sentence. White space and comments do not count."""
        return game_hash(self.data)

    @cached_property
    def intro(self) -> str:
        """The first observation, unless the agent starts at a receptacle."""
        names = [self.receptacle_names[r] for r, at in enumerate(self.problem.receptacle_location) if at >= 0]
        room = f"You are in the middle of a room. Looking quickly around you, you see {listing(names)}."
        return self.welcome(room)

    def welcome(self, room: str) -> str:
        """The first observation, with `room` as the description of the room."""
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{room}\n\nYour task is to: {self.task_text}"


def load_game(source: str | Path | Mapping[str, Any], *, shuffle: int | None = None) -> Game:
    """Read a game file (`game.tw-pddl`), or take what `read_game_file` gives.

    Parsed games are kept (the 64 files last used, until they change).
    Raises GameError naming the file and the key, GameUnsupported for rules the native engine does not know.
    """
    if isinstance(source, Mapping):
        return Game(source, shuffle=shuffle)
    path = Path(source)
    try:
        stat = path.stat()
    except OSError as error:
        raise GameError(f"{path}: game file cannot be read: {error.strerror}") from error
    game = _cached(str(path), stat_stamp(stat))
    return game if shuffle is None else Game.renumbered(game, shuffle)


@lru_cache(maxsize=64)
def _cached(path: str, _stamp: tuple[int, ...]) -> Game:
    return Game(read_game_file(path), source=path)


LARGEST_GAME = 1 << 24
"""Bytes of a game file at most; the largest real one has 150,000."""


def read_game_file(path: str | Path) -> dict[str, Any]:
    """The checked JSON content of a game file. Raises GameError naming the file and what is wrong."""
    try:
        data = json_of(bounded_bytes(path, LARGEST_GAME).decode("utf-8"))
    except OSError as error:
        raise GameError(f"{path}: game file cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise GameError(f"{path}: damaged game file: {_one_line(error)}") from error
    check_keys(data, str(path))
    checked: dict[str, Any] = data
    return checked


def check_keys(data: Any, source: str) -> None:
    """Raise GameError unless `data` has every needed key with a value of the right type."""
    try:
        game = msgspec.convert(data, _GameFile)
    # half a surrogate pair in a key is a ValueError, too
    except ValueError as error:
        raise GameError(f"{source}: no game file: {error}; it needs {', '.join(KEYS)}") from error
    for key, text in (*((key, data[key]) for key in KEYS), *(("walkthrough", line) for line in game.walkthrough or ())):
        if (problem := text_problem(text)) is not None:
            raise GameError(f"{source}: key {key!r} {problem}")


class _GameFile(msgspec.Struct):
    pddl_domain: str
    grammar: str
    pddl_problem: str
    walkthrough: list[str] | None = None
    solvable: bool | None = None


def _one_line(error: Exception) -> str:
    """An error's text in one line, cut after 300 characters."""
    return excerpt(" ".join(str(error).split()), 300)


def game_hash(data: Mapping[str, Any]) -> str:
    """SHA-256 of a game's content: equal for files that differ only in white space, comments or the walkthrough."""
    task, template = split_task(data["grammar"])
    rules = canonical_rules(data["pddl_domain"], template)
    # PDDL knows no letter case, and `;` begins a comment
    lines = (line.split(";", 1)[0] for line in data["pddl_problem"].lower().split("\n"))
    problem = " ".join(" ".join(lines).replace("(", " ( ").replace(")", " ) ").split())
    return content_hash({"problem": problem, "rules": rules, "task": task})


def game_texts(task: str) -> tuple[str, str]:
    """This package's own domain and grammar for a game with the task sentence `task` (`put a mug in cabinet.`)."""
    # the sentence stands within a JSON string of the grammar
    sentence = json.dumps(task, ensure_ascii=False)[1:-1]
    return _data_file("domain.pddl"), _data_file("grammar.twl2").replace(TASK_SIGN, sentence)


@lru_cache(maxsize=4)
def _data_file(name: str) -> str:
    return (resources.files("turngym.envs.alfworld") / "data" / name).read_text(encoding="utf-8")


# --- which rules the native engine knows, and the words it takes from a game's own grammar

_TEXTWORLD_SIGNS = re.compile(r'[;|<>\[\]#{}"\t\n\\]|//')
_ARRIVE = re.compile(r"(?P<say>[^#\[\]{}|<>;\"]*\{(?:r|lend)\.name\}[^#\[\]{}|<>;\"]*)#examineReceptacle\.feedback#")
_PUT = re.compile(r"[^#\[\]{}|<>;\"]*\{o\.name\}[^#\[\]{}|<>;\"]*\{r\.name\}[^#\[\]{}|<>;\"]*")
_PUT_COMMAND = re.compile(r"\w+ \{o\} [\w/ ]+ \{r\}")
_PLAIN = re.compile(r"[^#\[\]{}|<>;\"]*")


def read_wording(domain: str, grammar: str) -> Wording:
    """The words of a game whose rules the native engine knows.

    Raises UnsupportedFacts naming the rules that differ, ValueError for texts that cannot be read.
    """
    rules = _known()
    actions = domain_digests(domain)
    unknown = [name for name in sorted(actions) if actions[name] not in rules["domain"].get(name, ())]
    missing = [name for name in rules["domain"] if name not in actions and name != "help"]
    if unknown or missing:
        raise UnsupportedFacts(_difference("key 'pddl_domain'", unknown, missing))
    task, template = split_task(grammar)
    if _TEXTWORLD_SIGNS.search(task):
        raise UnsupportedFacts(f"its task sentence has signs that the grammar gives a meaning: {excerpt(task, 120)!r}")
    return replace(_phrases(template, "help" in actions), task=task)


@lru_cache(maxsize=16)
def canonical_rules(domain: str, template: str) -> dict[str, dict[str, str]]:
    """The rules of a game, for hashing: digests by name of its domain and of its grammar without the task sentence."""
    return {"domain": domain_digests(domain), "grammar": grammar_digests(parse_grammar(template))}


@lru_cache(maxsize=16)
def _phrases(template: str, with_help: bool) -> Wording:
    """The wording of a grammar whose task sentence was cut out; its `task` is empty."""
    grammar = parse_grammar(template)
    wanted = sorted(name for name in _known()["domain"] if not name.startswith(":") and (with_help or name != "help"))
    missing = [f"action {name}" for name in wanted if name not in grammar.actions]
    if missing:
        raise UnsupportedFacts(_difference("key 'grammar'", [], missing))
    rules = grammar.reachable(["#intro#", *(grammar.actions[name][1] for name in wanted)])
    plain = {
        name: str(rule[0].get("rhs", ""))
        for name, rule in rules.items()
        if len(rule) == 1 and "condition" not in rule[0]
    }
    # the answer to `help` is written in the action itself (the games of alfworld-download) or in a rule of its own
    # (alfworld's package)
    answer_rule = "help.feedback"
    answer = grammar.actions["help"][1] if with_help else ""
    answer = plain.get(answer_rule, "#") if answer == f"#{answer_rule}#" else answer
    # these rules may have other words, as long as the words have no syntax of TextWorld's templates
    help_words = _PLAIN.fullmatch(answer) if with_help else None
    phrases = {
        "GotoLocation.feedback": _ARRIVE.fullmatch(plain.get("GotoLocation.feedback", "")),
        "PutObject.feedback": _PUT.fullmatch(plain.get("PutObject.feedback", "")),
        "action putobject": _PUT_COMMAND.fullmatch(grammar.actions["putobject"][0]),
        "action help": help_words,
        answer_rule: help_words,
    }
    digests = {f"action {name}": digest(grammar.actions[name]) for name in wanted}
    digests |= {name: rule_digest(rule) for name, rule in rules.items()}
    known = _known()["grammar"]
    unknown = [name for name in digests if digests[name] not in known.get(name, ()) and phrases.get(name) is None]
    if unknown:
        raise UnsupportedFacts(_difference("key 'grammar'", unknown, []))
    go, put, command, *_ = phrases.values()
    if go is None or put is None or command is None:
        raise UnsupportedFacts("key 'grammar' has no readable sentences for going and putting")
    return Wording(
        task="",
        go=go.group("say").replace(".name}", "}"),
        put_command=command.group(),
        put=put.group().replace(".name}", "}"),
        # TextWorld's template reader drops white space at the start of a text.
        help=help_words.group().lstrip() if help_words is not None else None,
    )


@lru_cache(maxsize=1)
def _known() -> dict[str, dict[str, list[str]]]:
    """Digests by name of the rules that were compared with TextWorld: alfworld's and this package's own."""
    digests: dict[str, dict[str, list[str]]] = json.loads(_data_file("known_rules.json"))
    return digests


def _difference(where: str, unknown: list[str], missing: list[str]) -> str:
    parts = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"no {', '.join(missing)}"] * bool(missing)
    return f"{where} differs from the rules that are known ({'; '.join(parts)})"
