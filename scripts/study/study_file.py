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

`read_study_file` checks all of it; `scripts/study/cells.py` makes its cells. docs/study.md lists every key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from turngym.agents.play_spec import SAMPLES
from turngym.agents.worlds import ALL_WORLDS
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.core.errors import SettingsError, TurngymError, did_you_mean
from turngym.core.nested import flat
from turngym.core.numbers import Count, Seed
from turngym.core.redaction import brief
from turngym.core.resolve import Layer, merged
from turngym.core.settings import read_toml, toml_of
from turngym.core.spec import Spec, read
from turngym.core.user_files import user_path
from turngym.scripts.jobs import shown
from turngym.trainers.algorithm_spec import BUILT_IN, find_algorithm
from turngym.trainers.study.records import check_name
from turngym.trainers.train_config import expanded, has_setting, require_setting

Names = Annotated[tuple[str, ...], Meta(min_length=1)]
Seeds = Annotated[tuple[Seed, ...], Meta(min_length=1)]


class Evaluate(Spec):
    """The table `[evaluate]`: how often cells are evaluated, and on how much of their panel."""

    times: Count = 10
    """Evaluations after the one before step 1, evenly spaced; the last one is after the last step."""
    tasks: Count | None = None
    """So many tasks of the panel, of each category its share; all by default."""
    samples: Count = SAMPLES
    """Episodes per task: Avg@n."""
    average: bool = False
    """Also evaluate the averaged weights of the last four checkpoints, one after each evaluation."""
    heldout: bool = False
    """Also measure what models know of held-out passages, before and after training (`text = "passages"`)."""


class MethodKeys(Spec):
    """The keys of `[methods.NAME]` that are not settings of `turngym train`."""

    algorithm: str | None = None
    """A built-in algorithm, an entry point, or `package.module:NAME`; by default the table's name is one."""
    of: str | None = None
    """The method that this one changes."""
    depth: Count | None = None
    """Turns after which episodes of training end, not those of evaluations; a setting of opd."""
    about: str = ""
    """What it is, in a line."""
    text: Literal["expert", "passages"] | None = None
    """Text that L_PT reads (`turngym.scripts.study.texts`)."""
    group: str = "main"
    """Methods that are run together. The budgets of Least-Time come from `main`."""
    against: str | None = None
    """Method that it is compared with in place of the baseline."""
    seeds: Seeds | None = None
    """Seeds of this method in place of the study's."""
    worlds: Names | None = None
    """Worlds of the study in which it is run; by default all."""
    agent: str | None = None
    """An agent of `turngym eval` that is evaluated and not trained, for example `openai:MODEL`."""
    within: dict[str, dict[str, Any]] = field(default_factory=dict, name="in")
    """Settings for single worlds, by name."""

    def __post_init__(self) -> None:
        _different(self.seeds or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a method is trained: an embedded world, or an environment with its own models and panel."""

    name: str
    world: EmbeddedWorld | None
    settings: Layer
    """Settings that take the place of the world's: env, split, panel, student, teacher, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyMethod:
    """A method, or a start."""

    name: str
    where: str
    """The file and the table, for errors."""
    keys: MethodKeys
    algorithm: str
    """Which algorithm trains; "" for an agent that is evaluated only."""
    settings: tuple[Layer, ...]
    """What it changes of the settings of `turngym train` (of an agent: of `turngym eval`), those of `of` first."""
    within: tuple[tuple[str, Layer], ...]
    """Settings for single worlds: `[methods.NAME.in.WORLD]`."""

    @property
    def about(self) -> str:
        return self.keys.about or self.keys.agent or self.algorithm

    def layers(self, world: str) -> list[Layer]:
        """The method's own layers for a world."""
        return [*self.settings, *(layer for name, layer in self.within if name == world)]


class File(Spec):
    """The whole file."""

    title: str = ""
    about: str = ""
    world: str | None = None
    worlds: Names | dict[str, dict[str, Any]] | None = None
    seeds: Seeds = (0,)
    baseline: str | None = None
    train: dict[str, Any] = field(default_factory=dict)
    evaluate: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: dict[str, dict[str, Any]] = field(default_factory=dict)
    tables: Names = ("overview",)

    def __post_init__(self) -> None:
        _different(self.seeds)


def _different(seeds: Sequence[int]) -> None:
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds is {list(seeds)}; valid: different whole numbers from 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study, checked."""

    where: str
    """The file, for errors."""
    file: File
    places: tuple[Place, ...]
    train: Layer
    """Settings that methods share."""
    evaluate: Evaluate
    methods: Mapping[str, StudyMethod]
    starts: Mapping[str, StudyMethod]
    """Runs whose models other runs begin with, by name: `[starts.NAME]`, written as methods are."""

    @property
    def title(self) -> str:
        return self.file.title or Path(self.where).stem


FOR_EVALUATE = {
    "eval_every": "times",
    "eval_samples": "samples",
    "eval_limit": "tasks",
    "samples": "samples",
    "limit": "tasks",
}
"""Settings of `turngym train` and `turngym eval` that `[evaluate]` has under other names."""
NO_SETTINGS = {
    "seed": "`seeds` lists them",
    "out": "--out is the folder of all cells",
    "resume": "cells resume alone",
    "algorithm": "a method has one in all worlds, [methods.NAME] says which",
}
NOT_OF_STARTS = ("group", "against", "seeds", "worlds", "agent")
"""Keys of methods that say how a method is compared."""
NAMED = ("worlds", "methods", "starts")
"""Tables of which a list of names chooses some."""


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
    studies = built_in()
    if str(name) in studies:
        return studies[str(name)]
    hint = did_you_mean(str(name), studies)
    raise TurngymError(f"there is no file {name}, and no study of that name.{hint} `turngym study list` lists them")


def read_study_file(name: str | Path, changes: Sequence[str] = ()) -> Study:
    """Reads a study. `changes` are settings in TOML that override the file's: `train.steps = 12`.

    Raises TurngymError for a key, method, world, table or setting that does not exist: one line. What settings may be
    together is checked with the cells (`cells_of`).
    """
    path = find_study(name)
    tables = [read_toml(path)]
    for change in changes:
        try:
            tables.append(toml_of(change))
        except ValueError as error:
            problem = f"--set {brief(change, 80)} is not TOML ({error}); valid: --set 'train.steps = 12'"
            raise TurngymError(problem) from error
    whole, worlds = dict[str, Any](), set[str]()
    for table in tables:
        for key in NAMED:
            # a list of names keeps what the file says of these: other worlds are left out, and no setting of this one
            below, names = whole.get(key), table.get(key)
            if isinstance(below, dict) and isinstance(names, list) and all(isinstance(name, str) for name in names):
                whole[key] = {name: below.get(name, {}) for name in names}
                del table[key]
        # one table, so that a --set may add to an inline table
        whole = merged([whole, table])
        # a method may have settings for worlds of the file that a --set leaves out
        for key in ("world", "worlds"):
            value = whole.get(key)
            worlds |= {*map(str, value if isinstance(value, Mapping | list) else [value])}
    return _study(read(File, whole, shown(path)), shown(path), worlds)


def _study(file: File, where: str, worlds: set[str]) -> Study:
    from turngym.trainers.study.tables import TABLES

    if not file.methods:
        raise SettingsError(f"{where}: methods is empty; valid: a table for each method, for example [methods.opd]")
    methods = {name: _method(name, file.methods, f"{where}: methods") for name in file.methods}
    for name, table in file.starts.items():
        for key in NOT_OF_STARTS:
            if key in table:
                raise SettingsError(f"{where}: starts.{name}.{key}: a start is not compared; [methods.NAME] has {key}")
    starts = {name: _method(name, file.starts, f"{where}: starts") for name in file.starts}
    for method in (*methods.values(), *starts.values()):
        for key, named in (("in", [world for world, _ in method.within]), ("worlds", method.keys.worlds or ())):
            for world in named:
                require_named(world, sorted(worlds), f"{method.where}.{key}")
        if (control := method.keys.against) is not None:
            require_named(control, [name for name in methods if name != method.name], f"{method.where}.against")
    if file.baseline is not None:
        require_named(file.baseline, methods, f"{where}: baseline")
    for name in file.tables:
        require_named(name, TABLES, f"{where}: tables")
    study = Study(
        where=where,
        file=file,
        places=tuple(_places(file, where)),
        train=_settings(file.train, f"{where}: train", asked=False),
        evaluate=read(Evaluate, file.evaluate, f"{where}: evaluate"),
        methods=methods,
        starts=starts,
    )
    # what methods share is for those that read it, so somebody must
    trained = [method.algorithm for method in (*methods.values(), *starts.values()) if method.algorithm]
    for layer in (study.train, *(place.settings for place in study.places)):
        for key, value in flat(layer.table).items():
            readers = (algorithm for algorithm in [*trained, *BUILT_IN] if has_setting(algorithm, key))
            reader = next(readers, trained[0] if trained else "grpo")
            if not require_setting(reader, key, layer.name).free:
                expanded(reader, {key: value}, layer.name)
    return study


def _places(file: File, where: str) -> Iterator[Place]:
    """The worlds of `world` and `worlds`: names, or tables of settings, which may build on a world."""
    if (file.world is None) == (file.worlds is None):
        raise SettingsError(f"{where}: valid is one of `world` (a name) and `worlds` (a list of names, or tables)")
    named: Any = [file.world] if file.worlds is None else file.worlds
    if not named:
        raise SettingsError(f"{where}: worlds is empty; valid: a list of names, or a table for each")
    for name in named:
        table = named[name] if isinstance(named, dict) else {}
        check_name(name, f"{where}: worlds")
        where_world = f"{where}: worlds.{name}"
        settings = {key: value for key, value in table.items() if key != "world"}
        if isinstance(panel := settings.get("panel"), str) and (beside := Path(where).parent / panel).is_file():
            settings["panel"] = str(beside)
        base = table.get("world", name)
        if base not in [*ALL_WORLDS] and ("world" in table or not {"env", "student"} <= settings.keys()):
            hint = did_you_mean(str(base), ALL_WORLDS) or f" There are: {', '.join(ALL_WORLDS)}."
            raise SettingsError(
                f"{where}: there is no world {base!r}.{hint} An environment of your own is a table with `env` and "
                "`student`"
            )
        yield Place(name=name, world=ALL_WORLDS.get(base), settings=_settings(settings, where_world, asked=False))


def _method(name: str, tables: Mapping[str, Mapping[str, Any]], kind: str) -> StudyMethod:
    """A method with what it takes over from the one that `of` names, if it names one."""
    check_name(name, kind)
    where, chain = f"{kind}.{name}", [name]
    while (of := tables[chain[0]].get("of")) is not None:
        require_named(of, tables, f"{kind}.{chain[0]}.of")
        if of in chain:
            raise SettingsError(f"{where}.of: {' -> '.join([*chain[::-1], of])} goes round in a circle")
        chain.insert(0, of)
    method_tables, settings = list[dict[str, Any]](), list[Layer]()
    for ancestor in chain:
        own = {key: value for key, value in tables[ancestor].items() if key in METHOD_KEYS}
        rest = {key: value for key, value in tables[ancestor].items() if key not in METHOD_KEYS}
        method_tables.append(own)
        settings.append(_settings(rest, f"{kind}.{ancestor}"))
    keys = read(MethodKeys, merged(method_tables), where)
    algorithm = keys.algorithm or chain[0]
    if keys.agent is not None:
        if trains := [key for key in ("algorithm", "depth", "text") if getattr(keys, key) is not None]:
            raise SettingsError(f"{where}.{trains[0]}: an agent is not trained")
        algorithm = ""
    else:
        try:
            find_algorithm(algorithm)
        except TurngymError as error:
            raise SettingsError(f"{where}: {error}") from error
    if keys.depth is not None:
        if algorithm != "opd":
            raise SettingsError(f"{where}.depth is {keys.depth} of {algorithm!r}; valid: of the algorithm opd")
        # TurnOPD with its horizons held at that depth and OPD's weights does this
        held = {"weight": "trajectory", "depth": {"h_min": keys.depth, "h_max": keys.depth}}
        algorithm, settings = "turnopd", [Layer(name=f"{where}.depth", table={"turnopd": held}, asked=True), *settings]
    within = [
        (world, _settings(table, f"{kind}.{ancestor}.in.{world}"))
        for ancestor, keys_table in zip(chain, method_tables, strict=True)
        for world, table in keys_table.get("in", {}).items()
    ]
    return StudyMethod(
        name=name, where=where, keys=keys, algorithm=algorithm, settings=tuple(settings), within=tuple(within)
    )


METHOD_KEYS = tuple(one.encode_name for one in msgspec.structs.fields(MethodKeys))


def _settings(table: Mapping[str, Any], where: str, *, asked: bool = True) -> Layer:
    """A layer of settings. Raises SettingsError for what a study says elsewhere."""
    for key in table:
        if key in FOR_EVALUATE:
            raise SettingsError(f"{where}.{key}: write it as {FOR_EVALUATE[key]} in [evaluate]")
        if key in NO_SETTINGS:
            raise SettingsError(f"{where}.{key}: it is no setting of a study; {NO_SETTINGS[key]}")
    return Layer(name=where, table=table, asked=asked)


def require_named(name: Any, known: Iterable[str], where: str) -> None:
    """Raises SettingsError for a name that is not `known`."""
    known = [*known]
    if name not in known:
        hint = did_you_mean(str(name), known) or f" There are: {', '.join(known)}."
        raise SettingsError(f"{where}: there is no {name!r}.{hint}")
