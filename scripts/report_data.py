"""What `turngym report` reads: evaluations (traces) and training runs (metrics), streamed line by line.

Runs of one method that differ in their seed alone are one `Method`: what they say is put together (`methods_of`).
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from turngym.agents.endpoint.usage import Usage
from turngym.agents.evaluation.compare import spec_of
from turngym.agents.evaluation.departures import departures
from turngym.agents.evaluation.play_panel import RecordedEpisodes, repeated, unplayed
from turngym.agents.evaluation.scores import EpisodeOutcome
from turngym.agents.evaluation.seeds import TaskMeans
from turngym.agents.meaning import meaning
from turngym.agents.play_spec import EvalSpec, OnPanel, episodes_of
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.nested import NONE, flat
from turngym.core.provenance import CONFIG_FILE
from turngym.core.resolve import PROVENANCE
from turngym.core.setting import settings_of as paths
from turngym.core.setting import short_name
from turngym.core.settings import read_toml
from turngym.core.spec import to_table
from turngym.core.trace import iter_trace, read_specs
from turngym.core.user_files import named_path
from turngym.trainers.diagnostics.trace_curves import TraceCurves, trace_curves
from turngym.trainers.metrics import iter_metrics
from turngym.trainers.study.records import RECORD, WHOLE, Record, Records, cut_to, read_record, record_of_run
from turngym.trainers.study.results import Rows, same_step_maps
from turngym.trainers.study.tables import last_evaluations

if TYPE_CHECKING:
    from turngym.trainers.diagnostics.diagnose import Diagnosis

TRACES = ("trace.jsonl", "eval/trace.jsonl", "eval/step_*.jsonl", "step_*.jsonl")
"""Where a run's evaluation is looked for; of a training run's evaluations the last one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: an evaluation, a training run, or both."""

    name: str
    path: Path
    place: int = 0
    """Position of its method in the report; it fixes the color."""
    seed: int | None = None
    """None where neither config.toml nor the episodes of an evaluation say it."""
    episodes: Sequence[EpisodeOutcome] = ()
    """Return, success and status of every episode."""
    training: Path | None = None
    """Folder with metrics.jsonl."""
    trace: Path | None = None
    """File with the episodes."""
    used: Usage | None = None
    """What the episodes used at an endpoint, those that were played again, too; None for other agents."""
    spec: EvalSpec | None = None
    """How the episodes were played; None where the trace does not say it."""
    skipped: tuple[str, ...] = ()
    """Lines that could not be read, and episodes that are not there, or more than once."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What a training run was asked for, by the names of options: its config.toml; empty without one."""

    @property
    def departs(self) -> str:
        """What differs between the last evaluation and the original, in a line; empty if it is not known."""
        departing = None if self.spec is None else departures(self.spec)
        return "" if departing is None else departing.line

    @property
    def panel(self) -> str | None:
        """What the episodes were played on; None for a bare trace."""
        tasks = None if self.spec is None else self.spec.play.tasks
        return tasks.panel if isinstance(tasks, OnPanel) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of the report: one run, or several that differ in their seed alone, in the order of their seeds."""

    name: str
    place: int
    runs: tuple[Run, ...]
    records: tuple[Record, ...] = ()
    """What each training run says; empty for evaluations."""

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def label(self) -> str:
        """The name, with the number of seeds where there are several."""
        return self.name if len(self.runs) == 1 else f"{self.name} ({len(self.runs)} seeds)"

    @property
    def depth(self) -> float | None:
        """The turns that were last allowed where nothing was probed, mean over seeds; None where none was
        controlled."""
        last_caps = []
        for run, record in zip([run for run in self.runs if run.training], self.records, strict=True):
            recorded = [(step, float(cap)) for step in record.steps if (cap := step.get("depth/cap")) is not None]
            caps = [cap for _, cap in recorded]
            full = [run.config["max_turns"]] if "max_turns" in run.config else []
            if caps and len({*caps, *full}) > 1:
                # a probe plays all turns, whatever the depth
                unprobed = [cap for step, cap in recorded if not step.get("depth/probe")]
                last_caps.append((unprobed or caps)[-1])
        return fmean(last_caps) if last_caps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """The diagnostics of a training run."""

    name: str
    place: int
    diagnosis: Diagnosis
    controlled: bool
    """Whether it had a depth controller."""
    note: str = ""
    """Settings of the run that are not known."""


# --- Reading


def expanded(spec: str) -> list[tuple[str, Path]]:
    """The name and path of `PATH` or `NAME=PATH`, whose path may be a pattern: `opd=runs/opd-*`.

    The name is "" where none is given.

    A pattern takes folders, and files only where it matches no folder. Raises TurngymError where it matches nothing.
    """
    name, path = named_path(spec)
    if path.exists() or not glob.has_magic(str(path)):
        return [(name, path)]
    matches = [Path(match) for match in sorted(glob.glob(str(path)))]
    if not matches:
        raise TurngymError(f"no run matches the pattern {path} ({spec})")
    return [(name, match) for match in [match for match in matches if match.is_dir()] or matches]


def load_run(name: str, path: Path) -> Run:
    """Reads a trace file, or a folder with trace.jsonl and/or metrics.jsonl. Raises TurngymError where there is nothing
    to report."""
    # shown in tables and figures, which know no bytes that are no text
    name = (name or name_of_run(path)).encode("utf-8", "backslashreplace").decode("utf-8")
    folder = path.parent if path.is_file() else path
    config = _named(read_toml(folder / CONFIG_FILE, provenance=True)) if (folder / CONFIG_FILE).is_file() else {}
    traces = [path] if path.is_file() else [hit for pattern in TRACES for hit in sorted(path.glob(pattern))[-1:]]
    trained = not path.is_file() and (path / "metrics.jsonl").is_file()
    if not traces and not trained:
        raise TurngymError(f"{path}: no trace.jsonl (an evaluation) and no metrics.jsonl (a training run) to report")
    values = _evaluation(traces[0]) if traces else {}
    if not trained and not values["episodes"]:
        lines = values["skipped"]
        why = f"none of its {len(lines)} lines is an episode ({lines[0]})" if lines else "it is empty"
        raise TurngymError(f"{traces[0]}: no episode to report: {why}")
    spec = values.get("spec")
    seed = config.get("seed", None if trained or spec is None else spec.play.seed)
    return Run(
        name=name,
        path=path,
        config=config,
        training=path if trained else None,
        seed=seed if isinstance(seed, int) else None,
        **values,
    )


HOMES = ("models", "method", "run", "play", "env", "evaluation", "chat", "engine", "workers", "frozen")
"""Tables of config.toml whose names say nothing to people."""


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.toml that change a number, by the names of their options (`steps`, `optimizer.lr`), and
    its provenance."""
    about = {PROVENANCE: config[PROVENANCE]} if PROVENANCE in config else {}
    settings: dict[str, Any] = dict(about)
    for path, value in flat({name: table for name, table in config.items() if name not in about}).items():
        # an environment is called by its id
        parts = path.removesuffix(".id").split(".")
        while len(parts) > 1 and (parts[0] in HOMES or parts[0] == parts[1]):
            del parts[0]
        if value != NONE and meaning(path) != "cost":
            settings[".".join(parts)] = value
    return settings


def name_of_run(path: Path) -> str:
    """The name of a run in a folder, or of a trace, if nobody named it."""
    folder = path.absolute()
    if folder.name in ("trace.jsonl", "eval"):
        return folder.parent.name or str(folder)
    return folder.name.removesuffix(".jsonl") or str(folder)


def _evaluation(path: Path) -> dict[str, Any]:
    recorded = RecordedEpisodes.of(path)
    spec = spec_of(path) if read_specs(path) else None
    lines = [*map(str, recorded.problems), *repeated(recorded.twice)]
    # without an episode there is no run to report
    if spec is not None and len(recorded):
        lines += unplayed(episodes_of(spec.play), len(recorded))
    return {
        "episodes": recorded.outcomes(),
        "used": recorded.used,
        "spec": spec,
        "skipped": tuple(f"{path}: {line}" for line in lines),
        "trace": path,
    }


# --- Methods: which runs are seeds of one, and which settings differ

MODELS = ("student", "teacher", "agent", "model", "panel")
"""Settings with a path, which lies elsewhere on another machine: its last two names count."""
MATTER = ("algorithm", "optimizer", "student", "teacher", "agent", "model", "steps", "episodes", "env", "panel")


def settings_of(run: Run) -> dict[str, Any]:
    """Every setting of a run that changes a number, but for its seed, flat (`optimizer.lr`): its config.toml, and how
    its evaluation was played; a name that both have is, of training, `NAME (training)`."""
    played = {} if run.spec is None else flat(to_table(run.spec))
    counted = {path: value for path, value in played.items() if meaning(path) not in ("seed", "cost")}
    if run.training is not None:
        # who was trained is who plays
        counted.pop("agent.weights", None)
    named = {short_name(EvalSpec, path) if path in paths(EvalSpec) else path: value for path, value in counted.items()}
    trained = {name: value for name, value in run.config.items() if name not in ("seed", PROVENANCE)}
    settings = {f"{name} (training)" if name in named else name: value for name, value in trained.items()} | named
    return {name: short(value) if name in MODELS and value else value for name, value in settings.items()}


def short(path: object) -> str:
    """The last two names of a path: where a machine keeps its models says nothing to others."""
    kind, colon, below = str(path).partition(":")
    return f"{kind}:{short(below)}" if colon else "/".join(Path(kind).parts[-2:])


def unlike(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Name -> its value in each run, of the settings that differ, first those that matter most."""
    every = [settings_of(run) for run in runs]
    # the settings of an algorithm are a table of its name
    own_names = tuple(str(settings.get("algorithm", "")) for settings in every)

    def rank(name: str) -> int:
        head = name.partition(".")[0].removesuffix(" (training)")
        order = (MATTER[:1], own_names, MATTER[1:])
        return next((n for n, names in enumerate(order) if head in names), 3)

    names = dict.fromkeys(name for settings in every for name in settings)
    differ = [name for name in names if _differs(name, runs, every)]
    return {name: [settings.get(name) for settings in every] for name in sorted(differ, key=rank)}


def _differs(name: str, runs: Sequence[Run], every: Sequence[Mapping[str, Any]]) -> bool:
    """Whether runs differ in a setting. Settings of training are compared among trainings alone."""
    kinds = {run.training is None for run, settings in zip(runs, every, strict=True) if name in settings}
    values = [settings.get(name) for run, settings in zip(runs, every, strict=True) if (run.training is None) in kinds]
    return any(value != values[0] for value in values)


def _other_method(first: Run, run: Run) -> tuple[str, Any, Any] | None:
    """The first setting, with both values, by which two runs cannot be seeds of one method."""
    for name, (value, other) in unlike([first, run]).items():
        # the model that a seed was trained to is its own
        if name != "weights" or first.training is not None:
            return name, value, other
    return None


def methods_of(specs: Sequence[str]) -> list[Method]:
    """The methods of the runs that `specs` name.

    Runs under one given name are seeds of it; others are seeds of one method where they differ in their seed alone.

    Raises TurngymError for runs under one name that differ in more, or have the same seed, and for two of one name that
    nobody gave them.
    """
    named = [pair for spec in specs for pair in expanded(spec)]
    runs = [load_run(name, path) for name, path in named]
    names_given = [run.name for run, (name, _) in zip(runs, named, strict=True) if name]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    for name, group in groups.items():
        if len(group) > names_given.count(name) and len(group) > 1:
            raise TurngymError(f"two runs are called {name!r}; tell them apart with NAME=PATH")
        for run in group[1:]:
            if difference := _other_method(group[0], run):
                setting, value, other = difference
                raise TurngymError(
                    f"runs called {name!r} differ in more than their seed: {setting} is {value!r} in "
                    f"{group[0].path} and {other!r} in {run.path}; give them different names"
                )
        # evaluations of two models may have been sampled with one seed
        seeds = Counter((run.seed, None if run.training else _weights(run)) for run in group)
        [((seed, _), count)] = seeds.most_common(1)
        one_path = len({run.path for run in group}) < len(group)
        if one_path or (count > 1 and seed is not None):
            shared = "one path" if seed is None else f"the seed {seed}"
            raise TurngymError(f"two runs are called {name!r} and have {shared}; tell them apart with NAME=PATH")
    return [_method(name, place, group) for place, (name, group) in enumerate(_alike(groups))]


def _alike(groups: Mapping[str, list[Run]]) -> list[tuple[str, list[Run]]]:
    """The groups with their names. Training runs that differ in their seed alone become one group."""
    merged: list[list[Run]] = []
    for group in groups.values():
        alike = [runs for runs in merged if len(group) == 1 and _only_seeds_differ([*runs, *group])]
        if alike:
            alike[0].extend(group)
        else:
            merged.append(list(group))
    return [(_common_name([run.name for run in runs], groups), runs) for runs in merged]


def _only_seeds_differ(runs: Sequence[Run]) -> bool:
    seeds = {run.seed for run in runs if run.training is not None and run.seed is not None}
    return len(seeds) == len(runs) and _other_method(runs[0], runs[-1]) is None


def _common_name(names: Sequence[str], used: Mapping[str, object]) -> str:
    """`opd` for opd-seed0 and opd-seed1."""
    if len(set(names)) == 1:
        return names[0]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    common = "".join(letters[0] for letters in same).rstrip("0123456789-_. ").removesuffix("seed").rstrip("-_. ")
    return common if common and common not in used else f"{names[0]} ... {names[-1]}"


def _method(name: str, place: int, group: Sequence[Run]) -> Method:
    runs = sorted(group, key=lambda run: (run.seed is None, run.seed or 0))
    tasks = [{episode.task.task_id for episode in run.episodes if not episode.status.is_error} for run in runs]
    shared = set[str].intersection(*tasks)
    if shared and (missing := set[str].union(*tasks) - shared):
        # a mean over seeds is over tasks that all of them played
        note = f"{name}: {len(missing)} tasks left out that not every seed has an episode of, as {min(missing)}"
        kept = [[episode for episode in run.episodes if episode.task.task_id in shared] for run in runs]
        runs = [replace(run, episodes=episodes) for run, episodes in zip(runs, kept, strict=True)]
        runs[0] = replace(runs[0], skipped=(*runs[0].skipped, note))
    seeds = [number if run.seed is None else run.seed for number, run in enumerate(runs)]
    labels = [name] if len(runs) == 1 else [f"{name} seed {seed}" for seed in seeds]
    runs = [replace(run, name=label, place=place) for run, label in zip(runs, labels, strict=True)]
    return Method(name=name, place=place, runs=tuple(runs), records=tuple(_records(name, runs)))


def _records(name: str, runs: Sequence[Run]) -> Iterator[Record]:
    """The records of training runs, as studies have them; a finished cell of a study has its own."""
    for number, run in enumerate(runs):
        if run.training is None:
            continue
        seed = number if run.seed is None else run.seed
        if (run.training / RECORD).is_file():
            yield replace(read_record(run.training), world="", method=name, group="main", seed=seed)
        else:
            yield record_of_run(
                run.training, {}, {}, strict=False, world="", method=name, group="main", about="", seed=seed
            )


TRAINING = "training"
"""The one world of a report's studies, where all methods were evaluated on the same tasks."""


def records_of(methods: Sequence[Method]) -> tuple[list[Records], list[str]]:
    """The training runs as studies of one world each, which are methods that were evaluated on the same tasks; and
    notes.

    Tasks count that all evaluations of a world have episodes of. The first method of a world is its baseline.
    """
    measured = [method for method in methods if method.records and all(run.evaluations for run in method.records)]
    worlds: list[tuple[set[str], list[Method]]] = []
    notes = []
    for method in measured:
        points = [point for record in method.records for point in record.evaluations]
        tasks = set[str].intersection(*(set(point.tasks) for point in points))
        if not tasks or WHOLE in tasks:
            tasks = {WHOLE}
            why = "not every evaluation has a trace, so that their means count as of a single task"
            notes.append(f"{method.name}: {why}")
        elif left_out := len(set[str].union(*(set(point.tasks) for point in points)) - tasks):
            notes.append(f"{method.name}: {left_out} tasks left out that not every evaluation has an episode of")
        for index, (of_world, group) in enumerate(worlds):
            if 2 * len(tasks & of_world) > max(len(tasks), len(of_world)):
                worlds[index] = tasks & of_world, [*group, method]
                break
        else:
            worlds.append((tasks, [method]))
    studies = []
    for number, (tasks, group) in enumerate(worlds, 1):
        world = TRAINING if len(worlds) == 1 else f"tasks {number}: {', '.join(method.name for method in group)}"
        cut = [cut_to(replace(record, world=world), tasks) for method in group for record in method.records]
        several = any(len(method.records) > 1 or method.records[0].averaged for method in group)
        tables = ["overview", "accuracy", *(["averages"] if several else []), "cost"]
        tables += ["categories"] if any(record.categories for record in cut) else []
        # a single method is compared with nobody
        base = group[0].name if len(group) > 1 else None
        studies.append(Records(title="", records=cut, baseline=base, tables=tuple(tables)))
    return studies, notes


def worlds_of(studies: Sequence[Records]) -> dict[str, Rows]:
    """World -> method -> seed -> record."""
    return {world: rows for study in studies for world, rows in study.worlds.items()}


SameStep = Mapping[str, Mapping[int, TaskMeans]]
"""Method -> seed -> task -> mean success at Same-Step."""


def same_step_of(methods: Sequence[Method]) -> tuple[SameStep, dict[str, str]]:
    """Same-Step of the training runs whose evaluations during training are what the report has of them, as the tables
    of training have it; and method -> of how many evaluations it is a mean, in words.

    Left out are runs that were evaluated once more afterwards, which is then what is compared, and those of which not
    every evaluation has a trace.
    """
    maps: dict[str, Mapping[int, TaskMeans]] = {}
    labels: dict[str, str] = {}
    during = [method for method in methods if all(run.trace and run.trace.match("step_*.jsonl") for run in method.runs)]
    names = {method.name for method in during}
    for rows in worlds_of(records_of(methods)[0]).values():
        for name, seeds in same_step_maps(rows)[1].items():
            if name in names and not any(WHOLE in tasks for tasks in seeds.values()):
                maps[name], labels[name] = seeds, last_evaluations(rows)
    return maps, labels


# --- What is read once more, where it is asked for


def diagnosed(runs: Sequence[Run]) -> list[Diagnosed]:
    """The diagnostics of those runs that trained by turn; empty without torch, which the controller's code needs."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return []
    from turngym.trainers.diagnostics.controller_replay import run_controls
    from turngym.trainers.diagnostics.diagnose import diagnose

    diagnosed_runs = []
    for run in runs:
        folder = run.training
        if folder is None or not any(row.get("depth/cap") is not None for row in iter_metrics(folder)):
            continue
        controls = run_controls(folder)
        controlled = controls.depth is not None
        diagnosis = diagnose(
            lambda folder=folder: iter_metrics(folder),  # type: ignore[misc]
            depth=controls.depth,
            controlled=controlled,
            alpha=controls.alpha,
        )
        if not diagnosis.shape.turns:
            continue
        about = Diagnosed(
            name=run.name, place=run.place, diagnosis=diagnosis, controlled=controlled, note=controls.note
        )
        diagnosed_runs.append(about)
    return diagnosed_runs


def trace_curves_of(method: Method) -> TraceCurves | None:
    """Curves by turn of a method's episodes, which are read once more; None without a trace."""
    paths = [run.trace for run in method.runs if run.trace is not None]
    if not paths:
        return None
    return trace_curves(item for item in chain(*map(iter_trace, paths)) if isinstance(item, Episode))


def _weights(run: Run) -> str:
    """The model that played; "" if it is not known."""
    return "" if run.spec is None else str(getattr(run.spec.agent, "weights", ""))
