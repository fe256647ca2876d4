"""The records of a study: what every finished cell leaves for tables, and the file that holds all of them.

A record has the mean success of every task at every evaluation, what it had cost by then, depth step by step, and sums
by turn. Tables and figures are made from records alone (`turngym.trainers.study.tables`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta

from turngym.agents.evaluation.results import AVERAGE
from turngym.agents.evaluation.scores import EpisodeOutcome, task_means
from turngym.core.errors import TurngymError
from turngym.core.nested import at
from turngym.core.plugin_values import LARGEST_VALUE
from turngym.core.provenance import provenance
from turngym.core.redaction import brief
from turngym.core.rows import read_whole
from turngym.core.task import content_hash
from turngym.core.trace import iter_episodes
from turngym.core.user_files import json_object, json_of
from turngym.core.whole_files import write_json
from turngym.trainers import content_hashes
from turngym.trainers.metrics import iter_metrics, read_metrics
from turngym.trainers.study.portable import portable

if TYPE_CHECKING:
    from turngym.trainers.diagnostics.depth_regime import TurnSums
T = TypeVar("T")
RECORD = "cell.json"
"""What a finished cell leaves for the tables."""


# The record of a finished cell: evaluations task by task and what they cost.

Phase = Literal["rollout", "teacher", "update"]
PHASES: tuple[Phase, ...] = get_args(Phase)
DEPTH = ("depth/cap", "depth/probe", "depth/hbar", "depth/h_eff", "depth/h_cov", "weight/alpha")
SHARES = ("kl_deep_share", "loss_deep_share", "weight_deep_share")
WHOLE = "(all tasks)"
"""The one task of an evaluation of which only the mean is known."""
Amount = Annotated[float, Meta(ge=0.0, le=LARGEST_VALUE)]
Number = Annotated[float, Meta(ge=-LARGEST_VALUE, le=LARGEST_VALUE)] | Annotated[int, Meta(ge=-(10**18), le=10**18)]
Means = Annotated[Mapping[str, Annotated[float, Meta(ge=0.0, le=1.0)]], Meta(min_length=1)]
"""Task -> mean success."""
Nats = Annotated[Mapping[str, Number], Meta(min_length=2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of training up to a point, without evaluations."""

    seconds: Amount
    """Wall clock."""
    cpu: Amount
    """CPU seconds of the training process."""
    turns: Amount
    """Turns played, whatever became of their episodes."""
    tokens: Amount
    """Tokens trained on."""
    sampled: Amount | None = None
    """Tokens that the policy drew; None in records from before they were counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation: its step, the cost up to it, and the mean success of every task."""

    step: Annotated[int, Meta(ge=0)]
    cost: Cost
    tasks: Means


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A finished cell."""

    world: str
    method: str
    group: str
    about: str
    seed: Annotated[int, Meta(ge=0)]
    settings: Mapping[str, Any]
    """All settings, those of the evaluation of an agent or of a training run (which names its algorithm)."""
    samples: Annotated[int, Meta(ge=1)]
    evaluations: Annotated[tuple[Evaluation, ...], Meta(min_length=1)]
    categories: Mapping[str, str]
    """Task -> category."""
    total: Cost
    phases: Annotated[Mapping[Phase, tuple[Amount, Amount]], Meta(min_length=3)]
    """Phase -> wall clock and CPU seconds."""
    steps: Sequence[Mapping[str, Number | None]]
    """Depth, alpha and shares of the deep third, step by step."""
    regime: Mapping[str, Mapping[str, Sequence[Number]]]
    """Window -> sums by turn of the full-depth steps (`TurnSums`); empty where there are none."""
    text: tuple[Nats, Nats] | None = None
    """Nats per token of every held-out document before and after training, where the method models text."""
    averaged: Means | None = None
    """Task -> mean success with the averaged weights of the last checkpoints, where they were evaluated."""
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Task -> its scene, world or product, where its environment names one."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Setting -> what was in the file or the code of one's own that it names (`turngym.trainers.content_hashes`)."""
    game: Mapping[str, Any] = field(default_factory=dict)
    """What its evaluations played (`play_spec.game_of`)."""
    schema: Literal[3]
    """The form of a record; one that does not say it is not read."""

    @property
    def trained(self) -> bool:
        """Whether it is of a training run; an agent was evaluated only."""
        return "agent" not in self.settings

    @property
    def scripted(self) -> bool:
        """Whether a player without training seeds played: neither a model nor an endpoint."""
        return not self.trained and self.settings["agent"]["kind"] not in ("model", "openai")


def record_of_run(
    folder: Path,
    settings: Mapping[str, Any],
    game: Mapping[str, Any],
    *,
    trained: bool = True,
    strict: bool = True,
    **named: Any,
) -> Record:
    """Reads the metrics and evaluation traces of a run, or of an evaluation, that is over. Raises TurngymError where an
    evaluation is missing.

    Args:
        strict: False for a report of any run: an evaluation without a trace is one task, `WHOLE`, and sums by turn,
            which take memory, are left out.
        named: what a record is called by: world, method, group, about, seed.
    """
    spent = _spent(iter_metrics(folder) if trained else ())
    if trained:
        traces = {step: folder / "eval" / f"step_{step:06d}.jsonl" for step in sorted(spent.evaluated)}
    else:
        traces = {0: folder / "trace.jsonl"}
    evaluations: list[Evaluation] = []
    categories: dict[str, str] = {}
    clusters: dict[str, str] = {}
    samples = 0
    for step, path in traces.items():
        if not strict and not path.is_file():
            mean = spent.evaluated[step]
            evaluations += [] if mean is None else [Evaluation(step=step, cost=spent.costs[step], tasks={WHOLE: mean})]
            continue
        played = [EpisodeOutcome.of(episode) for episode in iter_episodes(path)]
        counted = [shown for shown in played if not shown.status.is_error]
        if not counted:
            if strict:
                raise TurngymError(f"{path}: no episode that counts")
            continue
        # of lost episodes, too: what was evaluated is what was asked for, as in the other cells of the study
        samples = max(shown.sample for shown in played) + 1
        categories |= {shown.task.task_id: shown.task.category for shown in played}
        clusters |= {shown.task.task_id: shown.task.cluster for shown in played if shown.task.cluster}
        evaluations.append(Evaluation(step=step, cost=spent.costs[step], tasks=task_means(counted)))
    averaged = folder / AVERAGE / "trace.jsonl"
    held: Mapping[str, str] = {}
    if strict:
        held = content_hashes.kept(folder) if trained else content_hashes.of_files(settings)
        settings = portable(settings, folder.absolute().parent.parent)
    return Record(
        **named,
        # as they are read again: a file has no tuples
        settings=json.loads(json.dumps(settings)),
        samples=samples,
        evaluations=tuple(evaluations),
        categories=categories,
        total=spent.costs[max(spent.costs)],
        phases=spent.phases,
        steps=spent.steps,
        regime=regime_windows(read_metrics(folder)) if strict and trained else {},
        averaged=task_means(iter_episodes(averaged)) if averaged.is_file() else None,
        clusters=clusters,
        contents=held,
        game=json.loads(json.dumps(game)),
        schema=3,
    )


@dataclass(slots=True)
class Spent:
    """What the metrics of a run say, read row by row."""

    costs: dict[int, Cost]
    """Cost after each step that was trained or evaluated, from step 0 on."""
    phases: dict[Phase, tuple[float, float]]
    evaluated: dict[int, float | None] = field(default_factory=dict)
    """Step -> mean success; None where every episode ended in an error."""
    steps: list[dict[str, Any]] = field(default_factory=list)


def _spent(rows: Iterable[Mapping[str, Any]]) -> Spent:
    cost = Cost(seconds=0.0, cpu=0.0, turns=0.0, tokens=0.0, sampled=0.0)
    spent_so_far = Spent(costs={0: cost}, phases=dict.fromkeys(PHASES, (0.0, 0.0)))
    columns = ("step", "success", "turns_mean", "critic_explained", *DEPTH, *SHARES)
    for row in rows:
        step = int(row["step"])
        if row["kind"] == "eval":
            spent_so_far.evaluated[step] = row.get("eval/avg")
            spent_so_far.costs.setdefault(step, replace(cost, seconds=row.get("time/train_s") or cost.seconds))
        if row["kind"] != "train":
            continue
        spent = {name: (row.get(f"time/{name}_s") or 0.0, row.get(f"time/{name}_cpu_s") or 0.0) for name in PHASES}
        cost = Cost(
            seconds=row.get("time/train_s") or cost.seconds,
            cpu=cost.cpu + sum(cpu for _, cpu in spent.values()),
            turns=cost.turns + (row.get("cost/turns") or 0),
            tokens=cost.tokens + (row.get("tokens") or 0),
            sampled=(cost.sampled or 0) + (row.get("cost/sampled") or 0),
        )
        spent_so_far.costs[step] = cost
        spent_so_far.phases = {
            name: (spent_so_far.phases[name][0] + w, spent_so_far.phases[name][1] + c) for name, (w, c) in spent.items()
        }
        spent_so_far.steps.append({name: row.get(name) for name in columns if name in row})
    return spent_so_far


WINDOWS = ("early", "late", "all")


def thirds(full: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The first and the last third of full-depth steps, and all of them."""
    part = max(1, len(full) // 3)
    return dict(zip(WINDOWS, (full[:part], full[-part:], full), strict=True))


def regime_windows(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Sums by turn of the full-depth steps by window."""
    from turngym.trainers.diagnostics.depth_regime import full_depth_rows, turn_sums

    full = full_depth_rows(rows)
    if not full or "turn/kl_raw" not in full[0]:
        return {}
    depth = int(full[0]["depth/cap"])
    sums = {name: turn_sums(chosen, depth) for name, chosen in thirds(full).items()}
    return {name: {column: values.tolist() for column, values in asdict(part).items()} for name, part in sums.items()}


def cut_to(record: Record, tasks: set[str]) -> Record:
    """The record as if these were all of its tasks; only means, of a single task, where they are `WHOLE`."""

    def cut(means: Mapping[str, float]) -> dict[str, float]:
        return {WHOLE: fmean(means.values())} if WHOLE in tasks else {task: means[task] for task in sorted(tasks)}

    averaged = record.averaged
    return replace(
        record,
        evaluations=tuple(replace(point, tasks=cut(point.tasks)) for point in record.evaluations),
        categories={task: kind for task, kind in record.categories.items() if task in tasks},
        averaged=cut(averaged) if averaged and (WHOLE in tasks or tasks <= averaged.keys()) else None,
    )


def pooled_sums(parts: Sequence[Mapping[str, Sequence[float]]]) -> TurnSums:
    """Sums over several runs of one depth."""
    from turngym.trainers.diagnostics.depth_regime import TurnSums

    try:
        total = {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}
        return TurnSums(**{**total, "survivors_T": total["survivors_T"].astype(np.int64)})
    except (KeyError, TypeError, ValueError) as error:
        raise TurngymError(f"regime: not the sums by turn of runs of one depth ({error})") from error


def check_name(name: object, where: str) -> None:
    """Raises TurngymError for a name of a world or a method that could not be a part of a file's name."""
    if not isinstance(name, str) or not name.isprintable() or set(name) & set("/\\") or name[:1] in ("", "."):
        shown = brief(name, 60)
        raise TurngymError(f"{where} {shown} names a folder; valid: a name without /, \\, line ends and leading dots")


def _decoded(values: object, kind: type[T], where: str) -> T:
    """A Record or Records of what JSON holds. Raises TurngymError, which names the field."""
    try:
        return msgspec.convert(values, kind)
    # half a surrogate pair, in which msgspec could look for no number, is a ValueError, too
    except ValueError as error:
        raise TurngymError(f"{where} is not a study's: {error}") from error


def _check(record: Record, where: str) -> None:
    """Raises TurngymError where fields contradict each other; a study.json comes from anyone."""
    for name in ("world", "method"):
        check_name(getattr(record, name), f"{where}: {name}")
    steps = [point.step for point in record.evaluations]
    tasks = {task for point in record.evaluations for task in point.tasks}
    kind = at(record.settings, "agent.kind" if "agent" in record.settings else "algorithm")
    columns = [{len(column) for column in sums.values()} for sums in record.regime.values()]
    for name, good, valid in (
        ("settings", isinstance(kind, str), "those of a training run (algorithm) or of an agent (agent.kind)"),
        ("evaluations", steps == sorted({*steps}), "steps that rise"),
        ("categories", tasks <= record.categories.keys(), "one for every task"),
        ("steps", all(isinstance(row.get("step"), int) for row in record.steps), "a step in every row"),
        (
            "regime",
            {*record.regime} in (set(), {*WINDOWS}) and all(len(value) == 1 for value in columns),
            "sums of as many turns for each of " + ", ".join(WINDOWS),
        ),
        ("text", len({frozenset(nats) for nats in record.text or ()}) < 2, "the same documents before and after"),
    ):
        if not good:
            raise TurngymError(f"{where}: {name} is {brief(getattr(record, name), 60)}; valid: {valid}")


def read_record(path: Path) -> Record:
    """The record of a cell's folder."""
    return _decoded(json_object(path / RECORD, TurngymError), Record, str(path / RECORD))


# All records of a study in one file.

DATA = "study.json"
SEAL = "sha256"
"""Field with a hash of all others: what tables show is what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """The finished cells of a study, and what its tables need beside them."""

    title: str
    about: str = ""
    baseline: str | None = None
    """Method with which the others are compared."""
    against: Mapping[str, str] = field(default_factory=dict)
    """Method -> whom it is compared with instead."""
    tables: tuple[str, ...] = ("overview",)
    """Names of the tables that it is shown in."""
    records: Sequence[Record]
    made_by: Sequence[Mapping[str, Any]] = ()
    """Command line, versions, platform and time of every command that wrote some of the records."""

    @property
    def worlds(self) -> dict[str, dict[str, dict[int, Record]]]:
        """World -> method -> seed -> record, of the tasks that every evaluation of the world has an episode of.

        Raises TurngymError where there is no such task.
        """
        shared = self.shared_tasks
        by_world: dict[str, dict[str, dict[int, Record]]] = {}
        for record in self.records:
            cut = cut_to(record, shared[record.world])
            by_world.setdefault(record.world, {}).setdefault(record.method, {})[record.seed] = cut
        return by_world

    @property
    def shared_tasks(self) -> dict[str, set[str]]:
        """World -> the tasks of all evaluations; an episode that ended in an error counts nowhere."""
        shared: dict[str, set[str]] = {}
        for record in self.records:
            played = [point.tasks for point in record.evaluations]
            for means in played if record.averaged is None else [*played, record.averaged]:
                shared[record.world] = shared.get(record.world, {*means}) & means.keys()
        for world, tasks in shared.items():
            if not tasks:
                names = dict.fromkeys(record.method for record in self.records if record.world == world)
                raise TurngymError(f"{world}: no task is in every evaluation of {', '.join(names)}: nothing compares")
        return shared


def made_by(command: str) -> dict[str, Any]:
    """Where records come from that `command` makes now; whose machine it is, is nobody's business."""
    return {name: value for name, value in provenance(command).items() if name != "host"}


def write_records(study: Records, path: Path) -> None:
    """Writes all of `study` as JSON. The same bytes every time."""
    # as it is read again, so that whoever reads finds the same hash
    content = json_of(json.dumps(asdict(study)))
    write_json(path, {**content, SEAL: content_hash(content)})


def read_records(path: Path) -> Records:
    """Reads a study.json, also compressed by gzip, or the one in the folder of a study. Raises TurngymError."""
    if path.is_dir():
        path = next((file for file in (path / DATA, path / "tables" / DATA) if file.is_file()), path / DATA)
    try:
        values = json_of(read_whole(path, TurngymError))
    except ValueError as error:
        raise TurngymError(f"{path} is not a study.json: {error}") from error
    stated = values.pop(SEAL, None) if isinstance(values, dict) else None
    if isinstance(values, dict) and stated != (digest := content_hash(values)):
        raise TurngymError(
            f"{path}: its content has the SHA-256 {digest[:12]}, and the file states {brief(stated, 80)}: it was "
            "changed after it was written; take the file that `turngym study` has written"
        )
    study = _decoded(values, Records, str(path))
    runs: dict[str, Record] = {}
    cells = Counter(map(name_of, study.records))
    for number, record in enumerate(study.records):
        _check(record, f"{path}: records[{number}]")
        if cells[name_of(record)] > 1:
            raise TurngymError(f"{path} has {name_of(record)} {cells[name_of(record)]} times; valid: once")
        # what a run cost, to a millisecond, is no other run's
        same = (
            runs.setdefault(repr((record.world, record.method, record.evaluations, record.total)), record)
            if record.trained
            else record
        )
        if same is not record:
            raise TurngymError(
                f"{path}: {name_of(same)} and {name_of(record)} are one run: their evaluations are equal"
            )
    return study


def name_of(record: Record) -> str:
    """What a cell is called in errors."""
    return f"{record.world}/{record.method}/seed{record.seed}"
