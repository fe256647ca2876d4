"""From a study to its cells: which runs follow from it, and with which settings.

A cell is one training run, or one evaluation, for every world, method and seed. Its settings are layers of
`resolve_training`: what suits the world's tiny models, `[train]`, the world's table, the method's, the method's in that
world. An agent that is only evaluated has the rules of its world's evaluations in place of the first three.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.evaluate import EVAL_DEFAULTS
from turngym.agents.play_spec import AGENTS, EvalSpec, episodes_of, game_of
from turngym.agents.playing.env_maker import env_class
from turngym.agents.playing.scripted import PLAYERS
from turngym.agents.resolve_play import resolve_play
from turngym.core.errors import SettingsError, TurngymError, did_you_mean
from turngym.core.nested import differing
from turngym.core.plugins import installed
from turngym.core.redaction import brief
from turngym.core.resolve import Layer, Resolved
from turngym.core.settings import whole_toml
from turngym.core.spec import changed, to_table
from turngym.core.task import content_hash
from turngym.scripts.jobs import RunJob
from turngym.scripts.study.study_file import Place, Study, StudyMethod, require_named
from turngym.scripts.study.texts import text_path
from turngym.trainers.run import check_run, evaluation_of
from turngym.trainers.study.records import RECORD
from turngym.trainers.train_config import TrainConfig, read_alone, resolve_training

LAST = 4
"""Checkpoints whose weights are averaged."""
BEFORE_STEP_1 = ("models", "play", "evaluation", "lora", "chat", "engine", "workers")
"""Tables of settings that decide a run's first evaluation, beside its seed and its limit of turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(RunJob):
    """One run of a study: `seed` of `method` in `world`, or (without a seed of its own) a start."""

    world: str
    method: str
    group: str = "main"
    about: str = ""
    seed: int = 0
    spec: TrainConfig | EvalSpec = field(repr=False)
    origins: Mapping[str, str] = field(repr=False)
    """Path of a setting -> who gave its value."""
    asked: Mapping[str, Any] | None = field(repr=False)
    """What the study gives, as a partial table."""
    game: Mapping[str, Any] = field(repr=False)
    """What its evaluations play (`game_of`)."""
    is_start: bool = False
    """Whether other cells begin with its model: it has no record."""
    text: str | None = None
    """Text that must be written before it runs."""
    heldout: bool = False
    """Whether held-out text is measured before and after it."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings as a table, but for the run's folder."""
        table = to_table(self.spec)
        table.get("models", {}).pop("out", None)
        return table

    @property
    def toml(self) -> str:
        """The settings as `--config` reads them, but for the run's folder."""
        return whole_toml(Resolved(spec=self.spec, origins=self.origins, asked=self.asked), but=("models.out",))

    @property
    def record(self) -> Path:
        return self.folder / RECORD

    @property
    def settings_file(self) -> Path:
        """The settings lie beside the folder: a run that begins wants its folder empty."""
        return self.folder.with_name(f"{self.folder.name}.toml")

    @property
    def last_trace(self) -> Path:
        """The trace of its last evaluation."""
        return self.folder / ("trace.jsonl" if self.verb == "eval" else f"eval/step_{self.steps:06d}.jsonl")

    @property
    def finished(self) -> bool:
        """The record is written last, so a cell that was killed before that goes on."""
        return self.ended if self.is_start else self.recorded

    @property
    def recorded(self) -> bool:
        """Whether it has a record for the tables; starts never have."""
        return not self.is_start and self.record.exists()


def cells_of(study: Study, out: Path) -> list[Cell]:
    """The cells of `study` in `out`, in the order in which they are run: starts, then seed by seed, group by group.

    Raises TurngymError for settings that a run could not have, and for cells of one world that play other games.
    """
    starts: dict[tuple[str, str], Cell] = {}
    groups = dict.fromkeys(method.keys.group for method in study.methods.values())
    first_cells = [
        _agent(study, place, method, out) if method.keys.agent else _cell(study, place, method, out, starts)
        for group in groups
        for place in study.places
        for method in study.methods.values()
        if method.keys.group == group and (method.keys.worlds is None or place.name in method.keys.worlds)
    ]
    _check_games(first_cells, study.where)
    # where no method begins with a start it does not run, but its settings must exist all the same
    for name in study.starts.keys() - {start for _, start in starts}:
        _cell(study, study.places[0], study.starts[name], out, {}, is_start=True)
    seeds_of = {name: method.keys.seeds or study.file.seeds for name, method in study.methods.items()}
    seeds = sorted({seed for method_seeds in seeds_of.values() for seed in method_seeds})
    cells = [_with_seed(cell, seed) for seed in seeds for cell in first_cells if seed in seeds_of[cell.method]]
    all_cells = [*starts.values(), *cells]
    folders = dict[str, str]()
    for cell in all_cells:
        # the file systems of Windows and macOS do not tell letters apart by their case
        if (name := cell.name.casefold()) in folders:
            names = " and ".join(dict.fromkeys([folders[name], cell.name]))
            raise SettingsError(
                f"{study.where}: two cells would be {names}, in one folder; valid: another name for one of them"
            )
        folders[name] = cell.name
    return all_cells


def _check_games(cells: Sequence[Cell], where: str) -> None:
    """Raises SettingsError where cells of one world would be evaluated by other rules: they stand in one table."""
    first: dict[str, Cell] = {}
    # scripted agents, which have no temperature, after those that have one
    for cell in sorted(cells, key=lambda entry: entry.game["temperature"] is None):
        first_cell = first.setdefault(cell.world, cell)
        for name, (reference, value) in differing(first_cell.game, cell.game).items():
            if name == "temperature" and value is None:
                continue
            raise SettingsError(
                f"{where}: {cell.method} is evaluated with {name} {brief(value, 60)} in {cell.world}, "
                f"{first_cell.method} with {brief(reference, 60)}: another game; valid: the same, or a world of its "
                "own ([worlds.NAME] with world = ...)"
            )


def _with_seed(cell: Cell, seed: int) -> Cell:
    folder = cell.folder.with_name(f"{cell.method}-seed{seed}")
    spec: TrainConfig | EvalSpec
    if isinstance(cell.spec, EvalSpec):
        spec = changed(cell.spec, play=changed(cell.spec.play, seed=seed))
    else:
        models = changed(cell.spec.models, out=folder)
        spec = changed(cell.spec, run=changed(cell.spec.run, seed=seed), models=models)
    words = ("--config", f"{folder}.toml")
    seeded = replace(cell, seed=seed, spec=spec, folder=folder, name=f"{cell.world}/{folder.name}", words=words)
    if not cell.evaluates:
        return seeded
    # runs that are equal in what decides the first evaluation share it
    settings = seeded.settings
    decides = {name: settings[name] for name in BEFORE_STEP_1} | {"game": cell.game, "seed": seed}
    return replace(seeded, same_start=f"{cell.world}-{content_hash(decides)}")


# Training runs.


def _cell(
    study: Study,
    place: Place,
    method: StudyMethod,
    out: Path,
    starts: dict[tuple[str, str], Cell],
    *,
    is_start: bool = False,
) -> Cell:
    where = f"{study.where}, {method.name} in {place.name}"
    folder = out / "cells" / place.name / (f"start-{method.name}" if is_start else f"{method.name}-seed0")
    shared, wanted = _shared(study, place, method.algorithm), study.evaluate
    if is_start:
        # a start is not evaluated, and what methods begin with in this world does not hold for it
        shared = [_for_start(layer, method.algorithm) for layer in shared]
    layers = [*shared, *method.layers(place.name), Layer(name=where, table={"out": str(folder)}, asked=True)]
    resolved = _resolved(method.algorithm, layers, where)
    spec, top = resolved.spec, dict[str, Any]()

    # How often it is evaluated, on what.
    if not is_start:
        if spec.evaluation is None:
            raise SettingsError(f"{study.where}: worlds.{place.name} has no panel: nothing could be evaluated")
        if spec.run.steps % wanted.times:
            raise SettingsError(
                f"{study.where}: {spec.run.steps} steps cannot be cut into {wanted.times} equal parts "
                f"(evaluate.times): {method.name}"
            )
        if wanted.average and wanted.times < LAST:
            problem = f"evaluate.average needs {LAST} evaluations; evaluate.times is {wanted.times}"
            raise SettingsError(f"{study.where}: {problem}")
        every = spec.run.steps // wanted.times
        top |= {"eval_every": every, "eval_samples": wanted.samples, "eval_limit": wanted.tasks}
        top |= {"checkpoint_every": every, "keep_checkpoints": LAST} if wanted.average else {}

    # The models of starts, which must be there before.
    needs = list[Cell]()
    for role, path, model in (
        ("student", "models.student", spec.models.student),
        ("teacher", "method.teacher.teacher", spec.teacher),
    ):
        prefix, dot, name = str(model).partition(".")
        if prefix == "starts" and dot:
            require_named(name, study.starts, f"{study.where}: {role}")
            if is_start:
                problem = f"starts.{method.name} begins with another start; valid: a model's folder"
                raise SettingsError(f"{study.where}: {problem}")
            if (place.name, name) not in starts:
                starts[place.name, name] = _cell(study, place, study.starts[name], out, starts, is_start=True)
            needs.append(starts[place.name, name])
            top[path] = str(needs[-1].model)

    # Text that it reads, and a warm-up that leaves a short run something to learn with.
    if method.keys.text == "expert" and place.world is None:
        raise SettingsError(f"{where}: text is 'expert', and only a built-in world has an expert; valid: passages")
    if method.keys.text is not None:
        top["lm_loss"] = {"files": [str(text_path(out, place.name, method.keys.text))]}
    if resolved.origins.get("optimizer.lr_warmup") == f"world {place.name}":
        top["optimizer.lr_warmup"] = min(spec.optimizer.lr_warmup, spec.run.steps // 5)

    resolved = _resolved(method.algorithm, [*layers, Layer(name="study", table=top, asked=True)], where)
    with _said_of(where):
        check_run(resolved.spec)
        game = game_of(evaluation_of(resolved.spec))
    return replace(
        _made(place, method, folder, resolved, game, resolved.spec.run.steps),
        needs=tuple(needs),
        evaluates=not is_start,
        is_start=is_start,
        text=method.keys.text,
        heldout=wanted.heldout and not is_start,
    )


def _made(
    place: Place, method: StudyMethod, folder: Path, resolved: Resolved[Any], game: Mapping[str, Any], steps: int
) -> Cell:
    """What a cell of resolved settings is, whether it is trained or only evaluated."""
    return Cell(
        world=place.name,
        method=method.name,
        group=method.keys.group,
        about=method.about,
        name=f"{place.name}/{folder.name}",
        folder=folder,
        words=("--config", f"{folder}.toml"),
        spec=resolved.spec,
        origins=resolved.origins,
        asked=resolved.asked,
        game=game,
        steps=steps,
    )


def _shared(study: Study, place: Place, algorithm: str) -> list[Layer]:
    """What holds for all methods of a world that read it."""
    table: dict[str, Any] = {"tracker": None, "threads": 1}
    if (world := place.world) is not None:
        table |= {**world.settings(algorithm), "panel": world.panel, "expert": world.expert}
        table |= {role: str(world.folder(role)) for role in ("student", "teacher")}
    return [Layer(name=f"world {place.name}", table=table), study.train, place.settings]


def _for_start(layer: Layer, algorithm: str) -> Layer:
    table = {name: value for name, value in layer.table.items() if not str(value).startswith("starts.")}
    read_by_it = {
        name: value for name, value in read_alone(algorithm, table, layer.name).items() if name != "evaluation"
    }
    return replace(layer, table=read_by_it)


def _resolved(algorithm: str, layers: Sequence[Layer], where: str) -> Resolved[TrainConfig]:
    with _said_of(where):
        return resolve_training(algorithm, layers)


@contextmanager
def _said_of(where: str) -> Iterator[None]:
    """An error that does not say in which file it is gets to know the cell."""
    try:
        yield
    except TurngymError as error:
        file = where.partition(",")[0]
        raise error if str(error).startswith(file) else SettingsError(f"{where}: {error}") from error


# Agents that are evaluated and not trained.


def _agent(study: Study, place: Place, method: StudyMethod, out: Path) -> Cell:
    """An evaluation by the rules of the evaluations of training in its world, with seed 0."""
    where, agent = f"{study.where}, {method.name} in {place.name}", str(method.keys.agent)
    # an algorithm that needs no teacher
    top = {"eval_samples": study.evaluate.samples, "eval_limit": study.evaluate.tasks, "out": str(out)}
    world = _resolved("grpo", [*_shared(study, place, "grpo"), Layer(name="study", table=top, asked=True)], where).spec
    rules = evaluation_of(world)
    if rules is None:
        raise SettingsError(f"{study.where}: worlds.{place.name} has no panel: nothing could be evaluated")
    _require_agent(agent, rules.play.env.id, where)
    shared: dict[str, Any] = {"play": to_table(rules.play), "agent": agent}
    shared |= {name: value for name, value in {"preset": rules.preset, "data": rules.compute.data}.items() if value}
    if agent.startswith(("model:", "openai:")):
        shared["temperature"] = game_of(rules)["temperature"]
    layers: list[tuple[str, Mapping[str, Any]]] = [(f"evaluations in {place.name}", shared)]
    for layer in method.layers(place.name):
        if "panel" in layer.table:
            raise SettingsError(f"{layer.name}.panel: it is its world's; valid: panel in [worlds.{place.name}]")
        layers.append((layer.name, dict(layer.table)))
    with _said_of(where):
        resolved = resolve_play(layers, usual=EVAL_DEFAULTS)
    folder = out / "cells" / place.name / f"{method.name}-seed0"
    cell = _made(place, method, folder, resolved, game_of(resolved.spec), episodes_of(resolved.spec.play))
    return replace(cell, verb="eval")


def _require_agent(agent: str, env_id: str, where: str) -> None:
    """Raises SettingsError for a name that no agent of the environment has; models are looked for later."""
    agents = ("random", "expert", *env_class(env_id).players, *installed(PLAYERS), *installed(AGENTS))
    if ":" not in agent and agent not in agents:
        hint = did_you_mean(agent, agents) or f" There are: {', '.join(agents)}, model:FOLDER, openai:MODEL."
        raise SettingsError(f"{where}: unknown agent {brief(agent, 60)}.{hint}")
