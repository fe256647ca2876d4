"""How two evaluations are compared: differences paired by task, and the settings in which they differ.

`compare_recorded` reads two traces, results files or packed results. It refuses to compare if settings differ that
change the game and not the player (`decisive`). `rescore` makes the whole result of an evaluation again from its trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from turngym.agents.endpoint.usage import PROFILE, Usage
from turngym.agents.evaluation.packed_file import SUFFIX, read_result
from turngym.agents.evaluation.play_panel import DRAWS, EvalResult, seconds_played
from turngym.agents.evaluation.published import workers_of
from turngym.agents.evaluation.results import ABOUT, EACH, FORMAT, IDENTITY, PER_EPISODE, check_settings
from turngym.agents.evaluation.scores import (
    APPROXIMATE,
    SAMPLING,
    EpisodeOutcome,
    EvaluationError,
    as_outcomes,
    category_rank,
    check_hashes,
    graded_means,
    latest,
    score,
    score_means,
    task_means,
)
from turngym.agents.evaluation.statistics import Interval, ScoreError, clustered, paired_difference
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.tables import Table, table_text
from turngym.core.task import Task
from turngym.core.trace import TraceEpisodes, TraceProblem, iter_places
from turngym.core.user_files import json_file, user_path
from turngym.envs.panels import shipped_panel

OWN = ("agent", "player", "model", "chat", "channel", "dtype", "examples", "prompts", "origin", "seed")
"""Settings of a player, which may differ: who plays, how it writes, and its random stream."""
SEEDED = ("agent", "model", "origin", "seed")
"""Those of them in which training seeds of one method differ, too."""
AMOUNT = ("panel", "panel_sha256", "tasks", "limit", "samples")
"""Settings of how much was played, which may differ here: the tasks themselves are compared."""
Differing = Mapping[str, tuple[Any, Any]]
"""Name to its values in the first and in the second evaluation; None if not recorded."""


def recorded(metas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings in the `meta` of a trace's episodes, flat (`make.max_turns`).

    Values that differ within a trace are joined into one text.
    """
    found: dict[str, dict[str, Any]] = {}
    for meta in metas:
        for name, value in _flat(meta).items():
            found.setdefault(name, {}).setdefault(repr(value), value)
    return {
        name: next(iter(values.values())) if len(values) == 1 else " and ".join(sorted(values))
        for name, values in found.items()
    }


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an evaluation's results, flat (`make.max_turns`)."""
    return _flat({**settings, "panel": {"name": settings.get("panel")}}) | {"panel": settings.get("panel")}


def _flat(meta: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in meta.items() if name not in PER_EPISODE and name != "make"}
    panel = meta.get("panel")
    name = panel.get("name") if isinstance(panel, Mapping) else None
    # an argument that repeats the panel's own value is no difference
    made = {**(_panel_make(name) if isinstance(name, str) else {}), **(meta.get("make") or {})}
    # evaluations of training runs record it beside `make`
    if "max_turns" in found:
        made["max_turns"] = found.pop("max_turns")
    chat = {"chat": meta["chat"]} if "chat" in meta else {}
    # what the server takes and answers; what a handshake used differs each time
    server = {f"{PROFILE}.{name}": value for name, value in (meta.get(PROFILE) or {}).items() if name != "used"}
    return found | {f"make.{name}": value for name, value in made.items() if name != "data"} | chat | server


@lru_cache
def _panel_make(name: str) -> Mapping[str, Any]:
    """The arguments of gym.make of a panel that comes with turngym; {} of any other."""
    try:
        return shipped_panel(name).make_kwargs
    except (TurngymError, OSError):
        return {}


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, each with its first and second value."""
    return {
        name: (first.get(name), second.get(name)) for name in {**first, **second} if first.get(name) != second.get(name)
    }


def decisive(differ: Differing) -> dict[str, tuple[Any, Any]]:
    """The settings that change the game and not the player, so that a paired difference would not be the player's.

    A temperature counts if both have one; scripted agents have none.
    """
    return {
        name: values
        for name, values in differ.items()
        if name not in (*OWN, *AMOUNT)
        and not name.startswith(f"{PROFILE}.")
        and not (name == "temperature" and None in values)
    }


def describe(differ: Differing) -> str:
    """The settings in one line: `make.max_turns 24 and 50; temperature 0.0 and 0.85`."""
    return "; ".join(f"{name} {first!r} and {second!r}" for name, (first, second) in differ.items())


def no_seeds(runs: Mapping[str, tuple[Mapping[str, Any], str]]) -> str:
    """Why evaluations (by name: settings, and a hash of the whole) cannot be training seeds of one method; "" where
    they can."""
    for (one, (mine, hash_)), (other, (theirs, other_hash)) in combinations(runs.items(), 2):
        # a result that was not read from a file has no seal
        if hash_ and hash_ == other_hash:
            return f"{one} and {other} are the same evaluation"
        if mine.get("model") is not None and mine["model"] == theirs.get("model"):
            return f"{one} and {other} are of the same model (files {mine['model']})"
        differ = differing(flat_settings(mine), flat_settings(theirs))
        # older files do not record all of how a player is spoken to
        own = {name: values for name, values in differ.items() if name in OWN and None not in values}
        names = [name for name in SEEDED if name != "agent" or not (scripted(mine) or scripted(theirs))]
        if apart := decisive(differ) | {name: values for name, values in own.items() if name not in names}:
            return f"{one} and {other} were played otherwise: {describe(apart)}"
    return ""


def scripted(settings: Mapping[str, Any]) -> bool:
    """Whether a player without training seeds played: neither a model nor an endpoint."""
    return settings.get("model") is None and not str(settings.get("agent")).startswith(("model", "openai"))


def rescore(path: str | Path) -> EvalResult:
    """Score the trace at `path`, or in the folder `path`, as the evaluation that wrote it did; nothing is played.

    If an episode was played more than once (after an error), the last one counts. An interrupted evaluation is scored
    as far as it came; `EvalResult.missing` is the number of episodes it lacks.

    Raises EvaluationError if there is no trace, or it has no episodes or those of more than one evaluation.
    """
    trace = trace_of(path)
    every, places, elapsed, problems = list[EpisodeOutcome](), array("q"), 0.0, list[TraceProblem]()
    noted: dict[str, tuple[int, Mapping[str, Any]]] = {}
    tasks: dict[Task, Task] = {}
    used: Usage | None = None
    for place, item in iter_places(trace):
        if isinstance(item, TraceProblem):
            problems.append(item)
            continue
        note_settings(noted, item, len(every))
        every.append(EpisodeOutcome.of(item, tasks.setdefault(item.task, item.task)))
        places.append(place)
        elapsed = max(elapsed, seconds_played(item))
        if (theirs := Usage.noted(item)) is not None:
            used = theirs + (used or Usage())
    if not every:
        raise EvaluationError(f"{trace} holds no episodes to score")
    chosen = latest(every)
    outcomes = [every[number] for number in chosen]
    return EvalResult(
        episodes=TraceEpisodes(trace, (places[number] for number in chosen)),
        outcomes=outcomes,
        scores=score(outcomes),
        settings=_settings(trace, outcomes, list(noted.values())),
        seconds=elapsed,
        resumed=len(outcomes),
        problems=tuple(problems),
        used=used,
    )


def note_settings(noted: dict[str, tuple[int, Mapping[str, Any]]], episode: Episode, number: int) -> None:
    """Add the `meta` and seed of episode `number` to those `noted`, unless an earlier one has the same."""
    meta = {name: value for name, value in episode.meta.items() if name not in EACH} | {"seed": episode.seed}
    noted.setdefault(repr(meta), (number, meta))


def trace_of(path: str | Path) -> Path:
    """The trace `path`, or the one in the folder `path`. Raises EvaluationError if there is none."""
    path = user_path(path)
    trace = path / "trace.jsonl" if path.is_dir() else path
    if not trace.is_file():
        raise EvaluationError(f"there is no trace {trace}; name a trace, or an evaluation's folder with trace.jsonl")
    return trace


def _settings(
    trace: Path, outcomes: Sequence[EpisodeOutcome], noted: Sequence[tuple[int, Mapping[str, Any]]]
) -> dict[str, Any]:
    """The settings that the evaluation recorded in its episodes."""
    tables = [
        (number, {name: value for name, value in meta.items() if name not in PER_EPISODE}) for number, meta in noted
    ]
    played = _same(trace, tables)
    # an episode that failed before its first observation knows only the id of its task
    known = next((one.task for one in outcomes if one.task.sha256), outcomes[0].task)
    panel: Mapping[str, Any] = next((note for _, meta in reversed(noted) if (note := meta.get("panel"))), {})
    count = len({one.task.task_id for one in outcomes})
    samples, limit = 1 + max(one.sample for one in outcomes), count if count < panel.get("tasks", count) else None
    if SAMPLING in played:
        # a task may be drawn several times in one validation, or never
        samples, limit = played[DRAWS] // (workers_of(played[SAMPLING]) or 1), None
    return {
        "panel": panel.get("name"),
        "panel_sha256": panel.get("sha256"),
        "env_id": known.env_id,
        "tasks": count,
        "limit": limit,
        "agent": None,
        "temperature": None,
        **played,
        **{name: value for _, meta in noted for name, value in meta.items() if name in ABOUT},
        "samples": samples,
    }


def _same(trace: Path, tables: Sequence[tuple[int, Mapping[str, Any]]]) -> Mapping[str, Any]:
    """The settings that all `tables` (number of an episode, its settings) share.

    Raises EvaluationError if they differ, since the trace then holds more than one evaluation.
    """
    first = tables[0][1]
    for number, table in tables:
        for name in {**first, **table}:
            if first.get(name) != table.get(name):
                raise EvaluationError(
                    f"{trace} holds more than one evaluation: {name} is {first.get(name)!r} in one episode and "
                    f"{table.get(name)!r} in another (number {number}); split it with `turngym trace filter`"
                )
    return first


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvaluation:
    """An evaluation read from its trace or its results file."""

    path: str
    settings: Mapping[str, Any]
    tasks: Mapping[str, tuple[str, str]]
    """Task id to its sha256 and category."""
    means: Mapping[str, float]
    """Task id to the mean success of its samples, without those that ended in an error."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Task id to its mean score; empty where that is success."""
    said: Mapping[tuple[str, int], bytes] = field(default_factory=dict)
    """(task id, sample) to a hash of all token ids and responses; empty for a results file, which has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """Avg@n of both evaluations on the tasks of one category, or on all."""

    name: str
    first: Interval
    second: Interval
    difference: Interval
    """The second minus the first, paired by task."""

    @property
    def tasks(self) -> int:
        return self.difference.tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two evaluations of the same tasks."""

    rows: tuple[ComparedRow, ...]
    """Categories, then all tasks, then their graded score where it is more than success."""
    differ: Mapping[str, tuple[Any, Any]]
    """Settings that differ: name to (first, second)."""
    same: int = 0
    """Episodes that are the same in both to the token (of agents without token ids: to the letter)."""
    shared: int = 0
    """Episodes of the same task and sample in both; 0 if one of them is a results file, which holds no episodes."""
    approximate: tuple[str | None, str | None] = (None, None)
    """Why success of the first, and of the second, only approximates the benchmark's; None where it is exact."""

    @property
    def alike(self) -> bool:
        """Whether the episodes are known and all the same."""
        return self.same == self.shared > 0

    def table(self) -> Table:
        """One row per category, then one for all tasks."""
        header = ["", "first %", "second %", "second minus first [95 %]", "tasks"]
        first, second = self.approximate
        return header, [
            [row.name, _percent(row.first, first), _percent(row.second, second), str(row.difference), str(row.tasks)]
            for row in self.rows
        ]

    def notes(self) -> list[str]:
        """A line for every setting that differs, and one if they changed nothing, or not everything."""
        lines = [f"~ is approximate: {why}" for why in dict.fromkeys(self.approximate) if why]
        lines += [f"{name} differs: {first!r} and {second!r}" for name, (first, second) in self.differ.items()]
        if self.differ and self.alike:
            lines.append(f"yet all {self.shared} episodes are the same to the token: what differs changed nothing")
        elif self.same:
            lines.append(f"{self.same} of {self.shared} episodes are the same to the token")
        return lines

    def __str__(self) -> str:
        return table_text(self.table()) + "".join(f"{line}\n" for line in self.notes())


def read_evaluation(path: str | Path) -> RecordedEvaluation:
    """Read a trace, a results file (`*.json`), a packed result (`*.result.xz`), or the folder of an evaluation (its
    trace, else its results file).

    Raises EvaluationError if there is none of these.
    """
    path = user_path(path)
    if path.name.endswith(SUFFIX):
        packed = read_result(path)
        return _recorded(path, packed.settings, packed.episodes, packed.episodes)
    if path.is_dir() and not (path / "trace.jsonl").is_file() and (path / "results.json").is_file():
        path = path / "results.json"
    if path.suffix == ".json":
        return _read_results(path)
    result = rescore(path)
    return _recorded(path, result.settings, result.outcomes, result.episodes)


def _recorded(
    path: Path, settings: Mapping[str, Any], outcomes: Sequence[Episode | EpisodeOutcome], episodes: Iterable[Episode]
) -> RecordedEvaluation:
    return RecordedEvaluation(
        path=str(path),
        settings=dict(settings),
        tasks={one.task.task_id: (one.task.sha256, one.task.category) for one in outcomes if not one.status.is_error},
        means=task_means(outcomes),
        scores=score_means([one for one in as_outcomes(outcomes) if not one.status.is_error]),
        # a packed result has no token ids: it is compared with another one to the letter
        said={(one.task.task_id, one.sample): _said(one) for one in episodes if not one.status.is_error},
    )


def _said(episode: Episode) -> bytes:
    """A hash of everything that was read and said, by which equal episodes are known."""
    digest = sha256()
    for segment in episode.segments:
        digest.update(segment.tobytes() + b"|")
    for turn in episode.turns:
        digest.update(turn.response.encode("utf-8", "surrogatepass") + b"\0")
    return digest.digest()


def compare_recorded(first: str | Path, second: str | Path, *, different_settings: bool = False) -> Comparison:
    """Avg@n of `second` minus `first`, by category and overall, paired by task with clustered 95 % intervals.

    Raises:
        ScoreError: the tasks differ (by id, or by sha256), and the message names the settings that differ; or settings
            differ that change the game and not the player (turns, arguments of gym.make, temperature, preset), unless
            `different_settings`.
        EvaluationError: there is no evaluation at one of the paths.
    """
    one, other = read_evaluation(first), read_evaluation(second)
    differ = differing(flat_settings(one.settings), flat_settings(other.settings))
    shared = one.said.keys() & other.said.keys()
    same = sum(one.said[key] == other.said[key] for key in shared)
    why = one.settings.get(APPROXIMATE), other.settings.get(APPROXIMATE)
    comparison = Comparison(rows=(), differ=differ, same=same, shared=len(shared), approximate=why)
    try:
        check_hashes(*({task_id: sha256 for task_id, (sha256, _) in run.tasks.items()} for run in (one, other)))
        categories = sorted({category for _, category in one.tasks.values()}, key=category_rank)
        rows = tuple(_compared(name, one, other) for name in (*categories, None))
        if one.scores or other.scores:
            graded = [replace(run, means=run.scores or run.means) for run in (one, other)]
            rows += (replace(_compared(None, *graded), name="score"),)
    except ScoreError as error:
        said = "; ".join(comparison.notes()) or "none of their settings differs"
        raise ScoreError(f"{one.path} and {other.path} cannot be compared: {error} ({said})") from error
    if not different_settings and (theirs := decisive(differ)):
        nothing = f"; {comparison.notes()[-1]}" if comparison.alike else ""
        raise ScoreError(
            f"{one.path} and {other.path} were played otherwise ({describe(theirs)}): their difference would be one of "
            f"settings, too; compare them anyway with --different-settings (different_settings=True){nothing}"
        )
    return replace(comparison, rows=rows)


def _read_results(path: Path) -> RecordedEvaluation:
    try:
        table = json_file(path, EvaluationError)
    except ValueError as error:
        raise EvaluationError(f"{path} cannot be read as a results file: {error}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise EvaluationError(f"{path} has no format {FORMAT!r}: name the trace that it was made from")
    wins: dict[str, list[bool]] = {}
    graded: list[tuple[str, bool, float]] = []
    tasks: dict[str, tuple[str, str]] = {}
    try:
        settings = {**{name: table.get(name) for name in IDENTITY}, **table["settings"]}
        check_settings(settings)
        for row in table["episodes"]:
            if not row["status"].startswith("error_"):
                wins.setdefault(row["task_id"], []).append(bool(row["success"]))
                graded.append((row["task_id"], bool(row["success"]), float(row["score"])))
                tasks[row["task_id"]] = str(row["sha256"]), str(row["category"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise EvaluationError(f"{path} is no whole results file: {type(error).__name__}: {error}") from error
    means = {task_id: fmean(won) for task_id, won in wins.items()}
    return RecordedEvaluation(path=str(path), settings=settings, tasks=tasks, means=means, scores=graded_means(graded))


def _compared(category: str | None, first: RecordedEvaluation, second: RecordedEvaluation) -> ComparedRow:
    """The row of a category; of all tasks for None."""
    one, other = (
        {task_id: mean for task_id, mean in run.means.items() if category in (None, run.tasks[task_id][1])}
        for run in (first, second)
    )
    return ComparedRow(
        name="all" if category is None else category,
        difference=paired_difference(one, other),
        first=clustered(list(one.values())),
        second=clustered(list(other.values())),
    )


def _percent(interval: Interval, approximate: str | None) -> str:
    return f"{'~' if approximate else ''}{100 * interval.mean:.1f}"
