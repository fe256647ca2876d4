"""How two evaluations are compared: differences paired by task, and the settings in which they differ.

`compare_recorded` reads two traces, results files or packed results. It refuses to compare if settings differ that
change the game and not the player (`decisive`). `rescore` recomputes the result of an evaluation from its trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any

from turngym.agents.endpoint.usage import PROFILE
from turngym.agents.evaluation.packed_file import SUFFIX, read_sealed
from turngym.agents.evaluation.play_panel import EvalResult, RecordedEpisodes, repeated
from turngym.agents.evaluation.results import read_results
from turngym.agents.evaluation.scores import (
    EvaluationError,
    as_outcomes,
    category_rank,
    check_hashes,
    score,
    score_means,
    task_means,
    units_of,
)
from turngym.agents.evaluation.seeds import Difference, rise
from turngym.agents.evaluation.statistics import Interval, ScoreError, clustered
from turngym.agents.meaning import meaning
from turngym.agents.play_spec import EvalSpec, Model, OpenAI
from turngym.core.episode import Episode
from turngym.core.nested import differing
from turngym.core.setting import settings_of, short_name
from turngym.core.spec import diff, read
from turngym.core.tables import Table, table_of, table_text
from turngym.core.trace import read_specs
from turngym.core.user_files import user_path

ALL, SCORE = "all", "score"
"""The rows of all tasks: their success, and their graded score."""
SEEDED = ("agent.weights", "agent.model")
"""Settings in which training seeds of one method differ."""
Responses = Mapping[tuple[str, int], bytes]
"""(task id, sample) to a hash of all responses of the episode."""
Differing = Mapping[str, tuple[Any, Any]]
"""Path to its values in the first and in the second evaluation."""


def differences_of(first: EvalSpec, second: EvalSpec) -> dict[str, tuple[Any, Any]]:
    """Returns the settings in which two evaluations differ, except those that change no episode."""
    return {path: values for path, values in diff(first, second).items() if meaning(path) != "cost"}


def decisive(differ: Differing) -> dict[str, tuple[Any, Any]]:
    """The settings that change the game and not the player, so that a paired difference would not be the player's.

    A temperature counts if both have one; scripted agents have none. The amount does not count: tasks are compared.
    """
    return {
        path: values
        for path, values in differ.items()
        if meaning(path) == "game" and not (path == "agent.temperature" and None in values)
    }


def describe(differ: Differing) -> str:
    """The settings in one line: `max_turns 24 and 50; temperature 0.0 and 0.85`."""
    return "; ".join(
        f"{short_name(EvalSpec, path) if path in settings_of(EvalSpec) else path} {first!r} and {second!r}"
        for path, (first, second) in differ.items()
    )


SAME_RUN = 0.9
"""Share of equal episodes from which on two evaluations are one run. In docs/results, training seeds of tiny models
share 0.7 at most, and of larger ones 0.06."""


def same_run(first: Responses, second: Responses) -> str:
    """Says how many episodes two evaluations share if that shows that they are one run; else returns ""."""
    shared, count = sum(first[key] == second[key] for key in first.keys() & second.keys()), min(len(first), len(second))
    return f"{shared} of {count} episodes are the same" if shared and shared >= SAME_RUN * count else ""


def no_seeds(runs: Mapping[str, tuple[EvalSpec, Responses]]) -> str:
    """Says why evaluations (name to settings and responses) cannot be training seeds of one method; "" if they
    can."""
    for (first, (mine, my_responses)), (second, (theirs, their_responses)) in combinations(runs.items(), 2):
        if alike := same_run(my_responses, their_responses):
            return f"{first} and {second} are one run: {alike}"
        weights = getattr(mine.agent, "weights", "")
        if weights and weights == getattr(theirs.agent, "weights", ""):
            return f"{first} and {second} are of the same model (files {weights})"
        apart = {path: values for path, values in differences_of(mine, theirs).items() if path not in SEEDED}
        apart = {path: values for path, values in apart.items() if meaning(path) in ("game", "player")}
        if apart:
            return f"{first} and {second} were played otherwise: {describe(apart)}"
    return ""


def scripted(spec: EvalSpec) -> bool:
    """Whether a player without training seeds played: neither a model nor an endpoint."""
    return not isinstance(spec.agent, Model | OpenAI)


def rescore(path: str | Path) -> EvalResult:
    """Score the trace at `path`, or in the folder `path`, as the evaluation that wrote it did; nothing is played.

    If an episode was played more than once (after an error), the last one counts. An interrupted evaluation is scored
    as far as it came; `EvalResult.missing` is the number of episodes it lacks.

    Raises EvaluationError if there is no trace, or it has no episodes or those of more than one evaluation.
    """
    trace = trace_of(path)
    spec, recorded = spec_of(trace), RecordedEpisodes.of(trace)
    if not recorded:
        raise EvaluationError(f"{trace} holds no episodes to score")
    return recorded.result(spec, recorded.agent, seconds=recorded.seconds, resumed=len(recorded))


def spec_of(trace: Path) -> EvalSpec:
    """The settings with which the episodes of a trace were played.

    Raises EvaluationError where it has none, or those of several evaluations.
    """
    specs = [read(EvalSpec, table, str(trace)) for table in read_specs(trace).values()]
    if not specs:
        raise EvaluationError(f"{trace} does not begin with the settings of an evaluation, so nobody can score it")
    for spec in specs[1:]:
        if differ := differences_of(specs[0], spec):
            raise EvaluationError(
                f"{trace} holds more than one evaluation ({describe(differ)}); split it with `turngym trace filter`"
            )
    return specs[0]


def trace_of(path: str | Path) -> Path:
    """The trace `path`, or the one in the folder `path`. Raises EvaluationError if there is none."""
    path = user_path(path)
    trace = path / "trace.jsonl" if path.is_dir() else path
    if not trace.is_file():
        raise EvaluationError(f"there is no trace {trace}; name a trace, or an evaluation's folder with trace.jsonl")
    return trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """Avg@n of both evaluations on the tasks of one category, or on all."""

    name: str
    first: Interval
    second: Interval
    difference: Difference
    """The second minus the first, paired by task."""


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
    both: tuple[EvalResult, EvalResult]

    @property
    def most_lost(self) -> int:
        """The larger number of episodes that one of them leaves out."""
        return max(run.scores.errors + run.missing for run in self.both)

    def worse_by(self, points: float) -> bool:
        """Whether the second is clearly worse by more than so many points of success, or of the graded score: the whole
        interval of the difference lies below."""
        return any(100 * row.difference.high < -points for row in self.rows if row.name in (ALL, SCORE))

    @property
    def alike(self) -> bool:
        """Whether the episodes are known and all the same."""
        return self.same == self.shared > 0

    def table(self) -> Table:
        """One row per category, then one for all tasks."""
        first, second = (run.scores.mark for run in self.both)
        return table_of(
            {
                "": row.name,
                "first %": f"{first}{100 * row.first.mean:.1f}",
                "second %": f"{second}{100 * row.second.mean:.1f}",
                "second minus first [95 %]": str(row.difference),
                "p": f"{row.difference.p or 0:.2g}",
                "tasks": str(row.difference.tasks),
            }
            for row in self.rows
        )

    def notes(self) -> list[str]:
        """A line for every setting that differs, and one if they changed nothing, or not everything."""
        lines = [
            f"~ is approximate: {why}" for why in dict.fromkeys(run.scores.approximate for run in self.both) if why
        ]
        for which, run in zip(("first", "second"), self.both, strict=True):
            lines += [f"{which}: {line}" for line in ([run.lost] if run.lost else []) + repeated(run.twice)]
        lines += [f"{name} differs: {first!r} and {second!r}" for name, (first, second) in self.differ.items()]
        if self.differ and self.alike:
            lines.append(f"yet all {self.shared} episodes are the same to the token: what differs changed nothing")
        elif self.same:
            lines.append(f"{self.same} of {self.shared} episodes are the same to the token")
        return lines

    def __str__(self) -> str:
        return table_text(self.table()) + "".join(f"{line}\n" for line in self.notes())


def read_evaluation(path: str | Path) -> EvalResult:
    """Read a trace, a results file (`*.json`, which holds no episodes), a packed result (`*.result.xz`), or the folder
    of an evaluation (its trace, else its results file).

    Raises EvaluationError if there is none of these.
    """
    path = user_path(path)
    if path.is_dir() and not (path / "trace.jsonl").is_file() and (path / "results.json").is_file():
        path = path / "results.json"
    episodes, agent, seconds = tuple[Episode, ...](), "", 0.0
    if path.name.endswith(SUFFIX):
        packed = read_sealed(path)
        spec, outcomes = packed.spec, as_outcomes(packed.episodes)
        episodes, agent, seconds = packed.episodes, packed.agent, packed.seconds
    elif path.suffix == ".json":
        spec, outcomes = read_results(path)
    else:
        return rescore(path)
    scores = score(outcomes, spec.play)
    return EvalResult(spec=spec, agent=agent, episodes=episodes, outcomes=outcomes, scores=scores, seconds=seconds)


def responses_of(episodes: Iterable[Episode]) -> Responses:
    """Hashes the responses of each episode. Whitespace does not count, since no environment reads it."""
    texts = (
        ((episode.task.task_id, episode.sample), "\0".join(" ".join(turn.response.split()) for turn in episode.turns))
        for episode in episodes
    )
    return {key: sha256(text.encode("utf-8", "surrogatepass")).digest() for key, text in texts}


def _said(episode: Episode) -> bytes:
    """Hashes all ids and responses of an episode, so that equal episodes have equal hashes."""
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
    first_run, second_run = read_evaluation(first), read_evaluation(second)
    # a packed result has no token ids: it is compared with another one to the letter
    mine, theirs = (
        {(e.task.task_id, e.sample): _said(e) for e in run.episodes if not e.status.is_error}
        for run in (first_run, second_run)
    )
    differ = differences_of(first_run.spec, second_run.spec)
    if first_run.profile is not None and second_run.profile is not None:
        # what a handshake itself used differs each time
        answers = [
            {name: value for name, value in profile.items() if name != "used"}
            for profile in (first_run.profile, second_run.profile)
        ]
        differ |= differing({PROFILE: answers[0]}, {PROFILE: answers[1]})
    shared = mine.keys() & theirs.keys()
    comparison = Comparison(
        rows=(),
        differ=differ,
        same=sum(mine[key] == theirs[key] for key in shared),
        shared=len(shared),
        both=(first_run, second_run),
    )
    units = [units_of(run.outcomes, run.spec.play) for run in (first_run, second_run)]
    try:
        check_hashes(*units)
        categories = sorted({unit.task.category for unit in units[0]}, key=category_rank)
        rows = []
        for name in (*categories, ALL):
            means = (task_means(unit for unit in run if name in (ALL, unit.task.category)) for run in units)
            rows.append(_compared(name, *means))
        scores = [score_means(run) for run in units]
        if any(scores):
            graded = [means or task_means(run) for means, run in zip(scores, units, strict=True)]
            rows.append(_compared(SCORE, *graded))
    except ScoreError as error:
        notes = "; ".join(comparison.notes()) or "none of their settings differs"
        raise ScoreError(f"{first} and {second} cannot be compared: {error} ({notes})") from error
    if not different_settings and (game := decisive(differ)):
        nothing = f"; {comparison.notes()[-1]}" if comparison.alike else ""
        raise ScoreError(
            f"{first} and {second} were played otherwise ({describe(game)}): their difference would be one of "
            f"settings, too; compare them anyway with --different-settings (different_settings=True){nothing}"
        )
    return replace(comparison, rows=tuple(rows))


def _compared(name: str, first: Mapping[str, float], second: Mapping[str, float]) -> ComparedRow:
    return ComparedRow(
        name=name,
        difference=rise([first], [second], p=True),
        first=clustered(list(first.values())),
        second=clustered(list(second.values())),
    )
