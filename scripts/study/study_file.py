"""What the file of a study says: where is trained, by which methods, with which seeds, and what is compared.

    title = "Entropy credit against OPD"
    world = "alfworld-loops"             # an embedded world; or `worlds`, a list, or a table for each
    seeds = [0, 1]
    baseline = "opd"                     # whom the others are compared with
    train = { steps = 60, episodes = 32 }
    [methods.opd]                        # a method is named like its algorithm, or says which it is
    [methods.grpo]
    optimizer.lr = 2e-4                  # and what it changes of the settings of `turngym train`
    [methods.mine]
    algorithm = "entcredit:ALGORITHM"

`read_study_file` checks all of it, `cells_of` makes its cells: one training run, or one evaluation, for every world,
method and seed. The settings of a cell are those of its world, then `[train]`, then the world's own table, then the
method's, each on top of the one before. docs/study.md lists every key.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.evaluate import USUAL
from turngym.agents.evaluation.training_evaluation import AGENT_FACING
from turngym.agents.play_spec import AGENTS, Model
from turngym.agents.playing.env_maker import env_class
from turngym.agents.playing.scripted import PLAYERS
from turngym.agents.resolve_play import resolve_play
from turngym.agents.worlds import ALL_WORLDS
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.plugins import installed
from turngym.core.redaction import brief
from turngym.core.settings import read_toml
from turngym.core.spec import Layer, SettingsError, flat, read, to_table
from turngym.core.strict_json import json_object
from turngym.core.task import content_hash
from turngym.core.user_files import user_path
from turngym.envs.panels import Panel, PanelError, load_panel
from turngym.scripts.jobs import Job, shown
from turngym.scripts.study.texts import TEXTS, text_path
from turngym.trainers.algorithm import BUILT_IN, find_algorithm
from turngym.trainers.run import check_run
from turngym.trainers.study.records import RECORD, check_name
from turngym.trainers.train_config import expanded, has_setting, require_setting, resolve_training, train_config

# What a file says, table by table.


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """The table `[evaluate]`: how often cells are evaluated, and on how much of their panel."""

    times: int = 10
    """Evaluations after the one before step 1, evenly spaced; the last one is after the last step."""
    tasks: int | None = None
    """The first so many tasks of the panel; all by default."""
    samples: int = 4
    """Episodes per task: Avg@n."""
    average: bool = False
    """Also evaluate the averaged weights of the last four checkpoints, one after each evaluation."""
    heldout: bool = False
    """Also measure what models know of held-out passages, before and after training (`text = "passages"`)."""

    def __post_init__(self) -> None:
        for name in ("times", "tasks", "samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; valid: at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a method is trained: an embedded world, or an environment with its own models and panel."""

    name: str
    world: EmbeddedWorld | None
    settings: Mapping[str, Any]
    """Settings that take the place of the world's: env, split, panel, student, teacher, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """The table `[methods.NAME]`."""

    name: str
    where: str
    """The file and the table, for errors."""
    algorithm: str
    """A built-in algorithm, an entry point, or `package.module:NAME`. "" for an agent that is evaluated only."""
    about: str
    """What the method is, in a line."""
    group: str = "main"
    """Methods that are run together. The budgets of Least-Time come from `main`."""
    against: str | None = None
    """Method that it is compared with in place of the baseline."""
    seeds: tuple[int, ...] | None = None
    """Seeds of this method in place of the study's."""
    worlds: tuple[str, ...] | None = None
    """Worlds of the study in which it is run; by default all."""
    text: str | None = None
    """Text that L_PT reads: `expert` or `passages` (`turngym.scripts.study.texts`)."""
    agent: str | None = None
    """An agent of `turngym eval` that is evaluated and not trained, for example `openai:MODEL`."""
    settings: Mapping[str, Any]
    """What it changes of the settings of `turngym train` (of an agent: of `turngym eval`)."""
    within: Mapping[str, Mapping[str, Any]]
    """Settings for single worlds, by name: `[methods.NAME.in.WORLD]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study, checked."""

    where: str
    """The file, for errors."""
    title: str
    about: str
    places: tuple[Place, ...]
    seeds: tuple[int, ...]
    baseline: str | None
    train: Mapping[str, Any]
    evaluate: Evaluate
    methods: Mapping[str, Method]
    starts: Mapping[str, Method]
    """Runs whose models other runs begin with, by name: `[starts.NAME]`, written as methods are."""
    tables: tuple[str, ...]


KEYS = (
    *("title", "about", "world", "worlds", "seeds", "baseline", "train", "evaluate", "methods", "starts", "tables"),
)
OWN = ("algorithm", "of", "depth", "about", "group", "against", "seeds", "worlds", "text", "agent", "in")
"""Keys of a method that are not settings of `turngym train`."""
NOT_OF_STARTS = ("group", "against", "seeds", "worlds", "agent")
"""Those of them that say how a method is compared."""
FOR_EVALUATE = {"eval_every": "times", "eval_samples": "samples", "eval_limit": "tasks"}
"""Settings of `turngym train` that `[evaluate]` has under other names."""
NO_SETTINGS = {
    "seed": "`seeds` lists them",
    "out": "--out is the folder of all cells",
    "resume": "cells resume alone",
    "algorithm": "a method has one in all worlds, [methods.NAME] says which",
}
NAMED = ("worlds", "methods", "starts")
"""Tables of which a list of names chooses some."""
PLAYED = ("panel", "max_turns", "env_kwargs", "preset", "data", "eval_temperature")
"""Settings of a world and of `[train]` that hold for agents, too: those of evaluations."""
NOT_OF_AGENTS = {
    **dict.fromkeys(("rescore", "compare", "different_settings"), "an agent of a study plays"),
    **dict.fromkeys(("algorithm", "depth", "text"), "an agent is not trained"),
    **dict.fromkeys(
        ("env", "split", "student", "teacher", "optimizer"), "an agent is not trained; its panel says what it plays"
    ),
    "samples": "write it as samples in [evaluate]",
    "limit": "write it as tasks in [evaluate]",
}
LAST = 4
"""Checkpoints whose weights are averaged."""


# Reading.


def built_in() -> dict[str, Path]:
    """The studies that come along, by name."""
    folder = files("turngym.scripts.study") / "files"
    paths = sorted((Path(str(path)) for path in folder.iterdir()), key=lambda path: path.stem)
    return {path.stem: path for path in paths if path.suffix == ".toml"}


def find_study(name: str | Path) -> Path:
    """The file of a study, by its path or by the name of one that comes along. Raises TurngymError."""
    path = user_path(name)
    if path.is_file():
        return path
    known = built_in()
    if str(name) in known:
        return known[str(name)]
    hint = did_you_mean(str(name), known)
    raise TurngymError(f"there is no file {name}, and no study of that name.{hint} `turngym study list` lists them")


def read_study_file(name: str | Path, changes: Sequence[str] = ()) -> Study:
    """Reads and checks a study. `changes` are settings in TOML that override the file's: `train.steps = 12`.

    Raises TurngymError for a key, method, world, table or setting that does not exist or cannot have its value: one
    line, before anything is run.
    """
    path = find_study(name)
    layers = [read_toml(path)]
    for change in changes:
        try:
            layers.append(tomllib.loads(change))
        # a number of thousands of digits is a ValueError of Python's own
        except (ValueError, RecursionError) as error:
            said = f"--set {brief(change, 80)} is not TOML ({error}); valid: --set 'train.steps = 12'"
            raise TurngymError(said) from error
    table, worlds = dict[str, Any](), set[str]()
    for layer in layers:
        table = merged(table, layer, NAMED)
        # a method may have settings for worlds of the file that a --set leaves out
        worlds |= {name for name in [table.get("world"), *_names(table.get("worlds"))] if isinstance(name, str)}
    return _study(table, shown(path), worlds)


def _names(value: Any) -> list[Any]:
    return [*value] if isinstance(value, Mapping | list) else []


def merged(table: Mapping[str, Any], above: Mapping[str, Any], named: Sequence[str] = ()) -> dict[str, Any]:
    """`table` with `above` on top.

    Of two tables of one name the values in them are merged. A list over a table of `named` keeps what the table says of
    these names: `worlds = ["alfworld"]` leaves out other worlds, and no setting of this one.
    """
    found = dict(table)
    for key, value in above.items():
        below, names = found.get(key), key in named and isinstance(value, list)
        if isinstance(below, Mapping) and names and all(isinstance(name, str) for name in value):
            value = {name: below.get(name, {}) for name in value}
        elif isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merged(below, value)
        found[key] = value
    return found


def _study(table: Mapping[str, Any], where: str, worlds: set[str]) -> Study:
    from turngym.trainers.study.tables import TABLES

    _known(table, KEYS, where)
    methods = _methods(_table(table, "methods", where), where, "methods")
    if not methods:
        raise SettingsError(f"{where}: methods is empty; valid: a table for each method, for example [methods.opd]")
    starts = _methods(_table(table, "starts", where), where, "starts")
    places = tuple(_places(table, where))
    for kind, group in (("methods", methods), ("starts", starts)):
        for method in group.values():
            for key, names in (("in", method.within), ("worlds", method.worlds or ())):
                for name in names:
                    _named(name, dict.fromkeys(sorted(worlds)), f"{where}: {kind}.{method.name}.{key}")
            if method.against is not None:
                others = {name: other for name, other in methods.items() if name != method.name}
                _named(method.against, others, f"{where}: {kind}.{method.name}.against")
    baseline = _typed(table, "baseline", str, where, None)
    if baseline is not None:
        _named(baseline, methods, f"{where}: baseline")
    tables = _list(table, "tables", str, where, ("overview",))
    for name in tables:
        _named(name, TABLES, f"{where}: tables")
    seeds = _seeds(table, where, "seeds", (0,))
    train = _table(table, "train", where)
    _no_foreign(train, f"{where}: train")
    study = Study(
        where=where,
        title=_typed(table, "title", str, where, Path(where).stem),
        about=_typed(table, "about", str, where, ""),
        places=places,
        seeds=seeds,
        baseline=baseline,
        train=train,
        evaluate=read(Evaluate, _table(table, "evaluate", where), f"{where}: evaluate"),
        methods=methods,
        starts=starts,
        tables=tables,
    )
    trained = [method for method in (*methods.values(), *starts.values()) if not method.agent]
    algorithms = dict.fromkeys([*(method.algorithm for method in trained), *BUILT_IN])
    for name, settings in (("train", train), *((f"worlds.{place.name}", place.settings) for place in places)):
        for key, value in flat(settings).items():
            reader = next((one for one in algorithms if has_setting(one, key)), next(iter(algorithms)))
            if not require_setting(reader, key, f"{where}: {name}").free:
                expanded(reader, {key: value}, f"{where}: {name}")
    # settings are checked cell by cell: a mistake in the last method must not wait for the runs of the others
    cells = cells_of(study, Path())
    # where no method begins with a start it does not run, but its settings must exist all the same
    for name in starts.keys() - {cell.method for cell in cells if cell.is_start}:
        _settings(study, places[0], starts[name], Path())
    folders = Counter(cell.name for cell in cells)
    if twice := next((name for name, count in folders.items() if count > 1), None):
        raise SettingsError(f"{where}: two cells would be {twice}; valid: another name for one of them")
    _check_games([cell for cell in cells if not cell.is_start], where)
    return study


def _check_games(cells: Sequence[Cell], where: str) -> None:
    """Raises SettingsError where cells of one world would be evaluated by other rules: they stand in one table."""
    first: dict[str, tuple[Cell, dict[str, Any]]] = {}
    for cell in cells:
        game = _game(cell)
        other, known = first.setdefault(cell.world, (cell, game))
        # a scripted agent has no temperature
        for name in game:
            if name in known and game[name] != known[name]:
                raise SettingsError(
                    f"{where}: {cell.method} is evaluated with {name} {brief(game[name], 60)} in {cell.world}, "
                    f"{other.method} with {brief(known[name], 60)}: another game; valid: the same, or a world of its "
                    "own ([worlds.NAME] with world = ...)"
                )
        first[cell.world] = other, {**game, **known}


def _game(cell: Cell) -> dict[str, Any]:
    """What an evaluation's numbers depend on besides who plays."""
    settings = cell.settings
    found = {name: settings.get(name) for name in ("panel", "preset")}
    try:
        own = _panel(str(settings["panel"])).make_kwargs
    except PanelError:
        own = {}
    found["max_turns"] = settings.get("max_turns", own.get("max_turns") if found["preset"] is None else None)
    found["env_kwargs"] = _facing(settings, own, cell.name)
    if cell.verb == "train" or not _scripted(str(settings["agent"])):
        heat = settings.get("eval_temperature" if cell.verb == "train" else "temperature")
        found["temperature"] = Model(folder="").temperature if heat is None and found["preset"] is None else heat
    return found


def _facing(settings: Mapping[str, Any], own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """How an evaluation's environment speaks to agents: the arguments of training that hold there (`eval_spec`), where
    the panel's `own` do not come first."""
    given = _kwargs(settings.get("env_kwargs", {}), where)
    hidden = own if settings.get("preset") is None else {}
    return {name: given[name] for name in AGENT_FACING if name in given and name not in hidden}


def _kwargs(value: Any, where: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        value = json_object(f"{where}: env_kwargs", value)
    if not isinstance(value, Mapping):
        raise SettingsError(f"{where}: env_kwargs is {brief(value, 60)}; valid: a table")
    return value


@lru_cache
def _panel(name: str) -> Panel:
    return load_panel(name)


def _scripted(agent: str) -> bool:
    return not agent.startswith(("model:", "openai:"))


def _places(table: Mapping[str, Any], where: str) -> Iterator[Place]:
    """The worlds of `world` and `worlds`: names, or tables of settings, which may build on a world."""
    if ("world" in table) == ("worlds" in table):
        raise SettingsError(f"{where}: valid is one of `world` (a name) and `worlds` (a list of names, or tables)")
    given = table.get("worlds", [table.get("world")])
    named = given if isinstance(given, Mapping) else {name: {} for name in given} if isinstance(given, list) else None
    if not named or not all(isinstance(name, str) for name in named):
        raise SettingsError(f"{where}: worlds is {given!r}; valid: a list of names, or a table for each")
    for name, settings in named.items():
        if not isinstance(settings, Mapping):
            raise SettingsError(f"{where}: worlds.{name} is {settings!r}; valid: a table of settings")
        check_name(name, f"{where}: worlds")
        rest = {key: value for key, value in settings.items() if key != "world"}
        if isinstance(panel := rest.get("panel"), str) and (beside := Path(where).parent / panel).is_file():
            rest["panel"] = str(beside)
        _no_foreign(rest, f"{where}: worlds.{name}")
        base = _typed(settings, "world", str, f"{where}: worlds.{name}", name)
        if base in ALL_WORLDS:
            yield Place(name=name, world=ALL_WORLDS[base], settings=rest)
        elif "world" in settings or not {"env", "student"} <= set(rest):
            hint = did_you_mean(str(base), ALL_WORLDS) or f" There are: {', '.join(ALL_WORLDS)}."
            raise SettingsError(
                f"{where}: there is no world {base!r}.{hint} An environment of your own is a table with `env` and "
                "`student`"
            )
        else:
            yield Place(name=name, world=None, settings=rest)


def _methods(tables: Mapping[str, Any], where: str, kind: str) -> dict[str, Method]:
    found: dict[str, Method] = {}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise SettingsError(f"{where}: {kind}.{name} is {table!r}; valid: a table")
        check_name(name, f"{where}: {kind}")
        for key in NOT_OF_STARTS if kind == "starts" else ():
            if key in table:
                raise SettingsError(f"{where}: starts.{name}.{key}: a start is not compared; [methods.NAME] has {key}")
        found[name] = _method(name, table, tables, f"{where}: {kind}.{name}")
    return found


def _method(name: str, table: Mapping[str, Any], others: Mapping[str, Any], where: str) -> Method:
    """A method, built on the one that `of` names, if it names one."""
    seen = [name]
    while "of" in table:
        _typed(table, "of", str, where, None)
        _named(table["of"], others, f"{where}.of")
        if table["of"] in seen:
            raise SettingsError(f"{where}.of: {' -> '.join([*seen, table['of']])} goes round in a circle")
        seen.append(table["of"])
        above = {key: value for key, value in table.items() if key != "of"}
        below = _table(others, table["of"], where)
        table = merged({**({} if "agent" in below else {"algorithm": table["of"]}), **below}, above)
    agent = _typed(table, "agent", str, where, None)
    for key in NOT_OF_AGENTS.keys() & table.keys() if agent else ():
        raise SettingsError(f"{where}.{key}: {NOT_OF_AGENTS[key]}")
    algorithm = "" if agent else _typed(table, "algorithm", str, where, name)
    settings = {key: value for key, value in table.items() if key not in OWN}
    _no_foreign(settings, where)
    if "depth" in table:
        algorithm, settings = _fixed_depth(algorithm, table["depth"], settings, where)
    within = _table(table, "in", where)
    for place, changed in within.items():
        if not isinstance(changed, Mapping):
            raise SettingsError(f"{where}.in.{place} is {changed!r}; valid: a table of settings")
        _no_foreign(changed, f"{where}.in.{place}")
    return Method(
        name=name,
        where=where,
        algorithm=algorithm,
        about=_typed(table, "about", str, where, ""),
        group=_typed(table, "group", str, where, "main"),
        against=_typed(table, "against", str, where, None),
        seeds=_seeds(table, where, "seeds", ()) if "seeds" in table else None,
        worlds=_list(table, "worlds", str, where, ()) if "worlds" in table else None,
        text=_text(table, where),
        agent=agent,
        settings=settings,
        within=within,
    )


def _text(table: Mapping[str, Any], where: str) -> str | None:
    text = _typed(table, "text", str, where, None)
    if text is not None:
        _named(text, TEXTS, f"{where}.text")
    return text


def _fixed_depth(algorithm: str, depth: Any, settings: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """`depth = 6` of OPD: episodes of training end after 6 turns, those of evaluations do not.

    TurnOPD with its horizons held at that depth and OPD's weights does this.
    """
    if algorithm != "opd" or not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise SettingsError(
            f"{where}.depth is {depth!r} of {algorithm!r}; valid: a number of turns, of the algorithm opd"
        )
    held = {"turnopd": {"weight": "trajectory", "depth": {"h_min": depth, "h_max": depth}}}
    return "turnopd", merged(held, settings)


def _no_foreign(settings: Mapping[str, Any], where: str) -> None:
    for key in settings:
        if key in FOR_EVALUATE:
            raise SettingsError(f"{where}.{key}: write it as {FOR_EVALUATE[key]} in [evaluate]")
        if key in NO_SETTINGS:
            raise SettingsError(f"{where}.{key}: it is no setting of a study; {NO_SETTINGS[key]}")


def _known(table: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            hint = did_you_mean(key, keys) or f" Valid: {', '.join(keys)}."
            raise SettingsError(f"{where}: a study has no key {key!r}.{hint}")


def _named(name: Any, known: Mapping[str, Any], where: str) -> None:
    if not isinstance(name, str) or name not in known:
        hint = did_you_mean(str(name), known) or f" There are: {', '.join(known)}."
        raise SettingsError(f"{where}: there is no {name!r}.{hint}")


def _typed(table: Mapping[str, Any], key: str, kind: type, where: str, default: Any) -> Any:
    value = table.get(key, default)
    if value is not default and (not isinstance(value, kind) or not value):
        raise SettingsError(f"{where}: {key} is {value!r}; valid: {'a text' if kind is str else kind.__name__}")
    return value


def _table(table: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, Mapping):
        raise SettingsError(f"{where}: {key} is {value!r}; valid: a table")
    return value


def _list(table: Mapping[str, Any], key: str, kind: type, where: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
    value = table.get(key, default)
    if not isinstance(value, list | tuple) or not value or not all(type(item) is kind for item in value):
        raise SettingsError(f"{where}: {key} is {value!r}; valid: a list, not empty")
    return tuple(value)


def _seeds(table: Mapping[str, Any], where: str, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    if key not in table:
        return default
    found = _list(table, key, int, where, default)
    if len(set(found)) != len(found) or min(found) < 0:
        raise SettingsError(f"{where}: {key} is {list(found)}; valid: different whole numbers from 0")
    return found


# From a study to its cells.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Job):
    """One run of a study: `seed` of `method` in `world`, or (without a seed of its own) a start."""

    world: str
    method: str
    group: str = "main"
    about: str = ""
    seed: int
    settings: Mapping[str, Any] = field(repr=False)
    """All settings that differ from the defaults of `turngym train`, as a table."""
    is_start: bool = False
    """Whether other cells begin with its model: it has no record."""
    text: str | None = None
    """Text that must be written before it runs."""
    heldout: bool = False
    """Whether held-out text is measured before and after it."""

    @property
    def record(self) -> Path:
        return self.folder / RECORD

    @property
    def settings_file(self) -> Path:
        """The settings lie beside the folder: a run that begins wants its folder empty."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    @property
    def finished(self) -> bool:
        """The record is written last, so a cell that was killed before that goes on."""
        return self.ended if self.is_start else self.record.exists()


def cells_of(study: Study, out: Path) -> list[Cell]:
    """The cells of `study` in `out`, in the order in which they are run: starts, then seed by seed, group by group.

    Raises TurngymError for settings that a run could not have.
    """
    starts: dict[tuple[str, str], Cell] = {}
    groups = list(dict.fromkeys(method.group for method in study.methods.values()))
    rows = [
        (place, method)
        for place in study.places
        for method in study.methods.values()
        if method.worlds is None or place.name in method.worlds
    ]
    rows.sort(key=lambda row: groups.index(row[1].group))
    seeds = sorted({seed for method in study.methods.values() for seed in method.seeds or study.seeds})
    cells = []
    for seed in seeds:
        for place, method in rows:
            if seed in (method.seeds or study.seeds):
                make = _agent_cell if method.agent else _cell
                cells.append(make(study, place, method, seed, out, starts))
    return [*starts.values(), *cells]


def _cell(
    study: Study, place: Place, method: Method, seed: int, out: Path, starts: dict[tuple[str, str], Cell]
) -> Cell:
    settings = _settings(study, place, method, out)
    needs = _begin_with(study, place, settings, out, starts)
    panel = settings.get("panel")
    if panel is None:
        raise SettingsError(f"{study.where}: worlds.{place.name} has no panel: nothing could be evaluated")
    steps, times = settings.get("steps", 100), study.evaluate.times
    if not isinstance(steps, int) or steps % times:
        raise SettingsError(
            f"{study.where}: {steps} steps cannot be cut into {times} equal parts (evaluate.times): {method.name}"
        )
    if study.evaluate.average and times < LAST:
        raise SettingsError(f"{study.where}: evaluate.average needs {LAST} evaluations; evaluate.times is {times}")
    settings |= {"eval_every": steps // times, "eval_samples": study.evaluate.samples, "seed": seed}
    settings |= {} if study.evaluate.tasks is None else {"eval_limit": study.evaluate.tasks}
    if study.evaluate.average:
        settings |= {"checkpoint_every": steps // times, "keep_checkpoints": LAST}
    cell = _as_cell(study, place, method, settings, steps, out / "cells" / place.name / f"{method.name}-seed{seed}")
    return replace(
        cell,
        seed=seed,
        needs=needs,
        evaluates=True,
        heldout=study.evaluate.heldout,
        same_start=f"{place.name}-{content_hash(_of_the_first_evaluation(settings))}",
    )


TRAINS = frozenset(
    {
        *("algorithm", "optimizer", "distill", "steps", "episodes", "micro_tokens", "teacher", "expert", "judge"),
        *("eval_every", "checkpoint_every", "keep_checkpoints", *(name.replace("-", "_") for name in BUILT_IN)),
    }
)
"""Settings that change nothing of an evaluation before the first step."""


def _of_the_first_evaluation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that decide a run's first evaluation. Two runs in which they are equal share that evaluation."""
    return {name: value for name, value in settings.items() if name not in TRAINS}


def _begin_with(
    study: Study, place: Place, settings: dict[str, Any], out: Path, starts: dict[tuple[str, str], Cell]
) -> tuple[Cell, ...]:
    """Puts the models of starts in place of `student = "starts.NAME"` and `teacher = "starts.NAME"`.

    Returns the runs that must be finished before, the student's first.
    """
    needs = list[Cell]()
    for role in ("student", "teacher"):
        prefix, dot, name = str(settings.get(role, "")).partition(".")
        if prefix != "starts" or not dot:
            continue
        _named(name, study.starts, f"{study.where}: {role}")
        if (place.name, name) not in starts:
            starts[place.name, name] = _start(study, place, name, out)
        needs.append(starts[place.name, name])
        settings[role] = str(needs[-1].model)
    return tuple(needs)


def _start(study: Study, place: Place, name: str, out: Path) -> Cell:
    """The run that makes the model `starts.NAME` in a world."""
    # what methods begin with in this world does not hold for the start itself
    plain = {key: value for key, value in place.settings.items() if not str(value).startswith("starts.")}
    own = _settings(study, replace(place, settings=plain), study.starts[name], out)
    own.pop("panel", None)
    if any(str(own.get(role, "")).startswith("starts.") for role in ("student", "teacher")):
        raise SettingsError(f"{study.where}: starts.{name} begins with another start; valid: a model's folder")
    folder = out / "cells" / place.name / f"start-{name}"
    made = _as_cell(study, place, study.starts[name], {**own, "seed": 0}, own.get("steps", 100), folder)
    return replace(made, is_start=True)


def _as_cell(study: Study, place: Place, method: Method, settings: dict[str, Any], steps: int, folder: Path) -> Cell:
    where = f"{study.where}, {method.name} in {place.name}"
    # the class of the algorithm's settings says what does not exist or cannot be
    try:
        check_run(train_config(method.algorithm, {**settings, "out": str(folder)}, where))
    except TurngymError as error:
        raise error if str(error).startswith(where) else SettingsError(f"{where}: {error}") from error
    cell = Cell(
        world=place.name,
        method=method.name,
        group=method.group,
        about=method.about or f"{method.algorithm}",
        seed=0,
        name=f"{place.name}/{folder.name}",
        folder=folder,
        words=(),
        steps=steps,
        settings=settings,
        text=method.text,
    )
    return replace(cell, words=("--config", str(cell.settings_file)))


def _settings(study: Study, place: Place, method: Method, out: Path) -> dict[str, Any]:
    """Settings of `turngym train` for a method in a place, each layer on top of the one before."""
    try:
        find_algorithm(method.algorithm)
    except TurngymError as error:
        raise SettingsError(f"{method.where}: {error}") from error
    settings: dict[str, Any] = {"algorithm": method.algorithm, "tensorboard": False, "threads": 1}
    if place.world is not None:
        world = place.world
        settings = merged(settings, world.settings(method.algorithm))
        settings |= {"student": str(world.folder("student")), "panel": world.panel}
        settings |= {"teacher": str(world.folder("teacher")), "expert": world.expert}
    shared, own = [study.train, place.settings], [method.settings, method.within.get(place.name, {})]
    for layer in shared:
        settings = merged(settings, layer)
    # what all methods share is for those that read it; what a method says itself must be read
    where = f"{study.where}, {method.name} in {place.name}"
    for key in flat(settings):
        if not has_setting(method.algorithm, key):
            settings = _without(settings, key)
    said = dict[str, Any]()
    for layer in own:
        said = merged(said, layer)
    layers, settings = [*shared, *own], _read_alone(method.algorithm, settings, {**said, "out": str(out)}, where)
    if method.text == "expert" and place.world is None:
        raise SettingsError(f"{where}: text is 'expert', and only a built-in world has an expert; valid: passages")
    if method.text is not None:
        settings = merged(settings, {"lm_loss": {"files": [str(text_path(out, place.name, method.text))]}})
    # a warm-up as long as a short run would leave it nothing to learn with
    asked = any("lr_warmup" in _optimizer(layer) for layer in layers)
    warmup, steps = _optimizer(settings).get("lr_warmup"), settings.get("steps", 100)
    if warmup is not None and not asked and isinstance(steps, int):
        settings["optimizer"] = {**settings["optimizer"], "lr_warmup": min(warmup, steps // 5)}
    return settings


def _read_alone(algorithm: str, shared: Mapping[str, Any], said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`said` on top of what it leaves to be read of `shared`: a judge that is no model has no votes.

    Raises SettingsError for what cannot be.
    """
    layers = [Layer(name="what methods share", table=shared), Layer(name=where, table=said, asked=True)]
    try:
        found = resolve_training(algorithm, layers)
    except TurngymError as error:
        raise error if str(error).startswith(where) else SettingsError(f"{where}: {error}") from error
    given = found.origins.keys() & flat(to_table(found.spec)).keys()
    settings = dict(shared)
    for key in flat(shared):
        path = require_setting(algorithm, key, where).path
        if not any(f"{one}.".startswith(f"{path}.") for one in given):
            settings = _without(settings, key)
    return merged(settings, {key: value for key, value in said.items() if key != "out"})


def _without(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Nested tables without one value of them, nor a table that it leaves empty."""
    name, _, rest = key.partition(".")
    inner = _without(settings[name], rest) if rest else {}
    return {**{other: value for other, value in settings.items() if other != name}, **({name: inner} if inner else {})}


def _optimizer(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The optimizer's settings; what is no table is refused where all settings are checked."""
    value = settings.get("optimizer", {})
    return value if isinstance(value, Mapping) else {}


def _agent_cell(
    study: Study, place: Place, method: Method, seed: int, out: Path, starts: dict[tuple[str, str], Cell]
) -> Cell:
    """An evaluation without training, by the rules of the evaluations of training."""
    where = f"{study.where}, {method.name} in {place.name}"
    world = {} if place.world is None else {**place.world.settings("opd"), "panel": place.world.panel}
    shared = merged(merged(world, study.train), place.settings)
    own = merged(method.settings, method.within.get(place.name, {}))
    for key in NOT_OF_AGENTS.keys() & own.keys():
        raise SettingsError(f"{where}: {key}: {NOT_OF_AGENTS[key]}")
    if other := _kwargs(own.get("env_kwargs", {}), where).keys() - {*AGENT_FACING}:
        valid = f"how the agent is spoken to ({', '.join(AGENT_FACING)})"
        raise SettingsError(f"{where}: env_kwargs has {brief(min(other), 60)}; valid: {valid}")
    base = {name: shared[name] for name in PLAYED if name in shared}
    kwargs = merged(_kwargs(base.get("env_kwargs", {}), where), _kwargs(own.get("env_kwargs", {}), where))
    settings = {**base, **own, "env_kwargs": kwargs}
    if (name := settings.get("panel")) is None:
        raise SettingsError(f"{study.where}: worlds.{place.name} has no panel: nothing could be evaluated")
    panel = _panel(str(name))
    _known_agent(str(method.agent), panel, where)
    facing = _facing(settings, panel.make_kwargs, where)
    del settings["env_kwargs"]
    # the panel's own limit needs not be said, and cells of earlier versions do not say it
    if settings.get("preset") is None and settings.get("max_turns") == panel.make_kwargs.get("max_turns"):
        settings.pop("max_turns", None)
    heat = settings.pop("eval_temperature", None)
    if heat is not None and not _scripted(str(method.agent)):
        settings.setdefault("temperature", heat)
    settings |= {"env_kwargs": json.dumps(facing, sort_keys=True)} if facing else {}
    settings |= {"agent": method.agent, "samples": study.evaluate.samples, "seed": seed}
    settings |= {} if study.evaluate.tasks is None else {"limit": study.evaluate.tasks}
    try:
        resolve_play([(where, settings)], usual=USUAL)
    except TurngymError as error:
        raise error if str(error).startswith(where) else SettingsError(f"{where}: {error}") from error
    folder = out / "cells" / place.name / f"{method.name}-seed{seed}"
    cell = Cell(
        world=place.name,
        method=method.name,
        group=method.group,
        about=method.about or str(method.agent),
        seed=seed,
        name=f"{place.name}/{folder.name}",
        folder=folder,
        words=(),
        steps=study.evaluate.samples * (study.evaluate.tasks or 1),
        verb="eval",
        settings=settings,
    )
    return replace(cell, words=("--config", str(cell.settings_file)))


def _known_agent(agent: str, panel: Panel, where: str) -> None:
    """Raises SettingsError for a name that no agent of the panel's environment has; models are looked for later."""
    known = ("random", "expert", *env_class(panel.env_id).players, *installed(PLAYERS), *installed(AGENTS))
    if ":" not in agent and agent not in known:
        hint = did_you_mean(agent, known) or f" There are: {', '.join(known)}, model:FOLDER, openai:MODEL."
        raise SettingsError(f"{where}: unknown agent {brief(agent, 60)}.{hint}")
