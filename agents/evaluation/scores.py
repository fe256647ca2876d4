"""How episodes are scored: Avg@n, pass@k, rows by category, rates of invalid actions and truncated episodes.

`EpisodeOutcome` says how an episode ended, `score` turns outcomes into `Scores`, and `success_table` and
`behavior_table` show these. `hints` says what may help where answers are cut, or none of them can be read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from turngym.agents.evaluation.seeds import Difference, over_seeds, rise
from turngym.agents.evaluation.statistics import Interval, ScoreError, clustered, pass_all_k, pass_at_k
from turngym.agents.play_spec import EvalSpec, PlaySpec, drawn
from turngym.core.episode import Episode, Status
from turngym.core.errors import TurngymError
from turngym.core.redaction import excerpt
from turngym.core.tables import Table
from turngym.core.task import Task, Verdict
from turngym.envs.spaces import printable


class EvaluationError(TurngymError):
    """An evaluation that cannot start or be resumed: another evaluation's trace, or tasks that are not the panel's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOutcome:
    """How one episode ended, without its text."""

    task: Task
    seed: int
    sample: int
    group: int
    status: Status
    success: bool
    score: float
    episode_return: float
    verdicts: tuple[int, ...]
    """Number of turns for each `Verdict`, in their order."""
    goal_rate: float | None
    prompt_tokens: int | None
    """Number of ids that were not sampled, each counted once; None for text-only agents."""
    response_tokens: int | None
    """Number of sampled ids; None for text-only agents."""
    cut: int
    """Number of answers that ended at the limit on new tokens."""
    answer_f1: float | None = None
    """F1 of the answer; None where the environment asks for none, and in files that do not say."""

    @classmethod
    def of(cls, episode: Episode, task: Task | None = None) -> EpisodeOutcome:
        """The outcome of `episode`. `task` may be an equal object to keep instead of the episode's own."""
        counts = Counter(turn.verdict for turn in episode.turns)
        response = sum(turn.response_length for turn in episode.turns)
        ids, goal = sum(len(segment) for segment in episode.segments), episode.meta.get("goal_rate")
        return cls(
            task=task or episode.task,
            seed=episode.seed,
            sample=episode.sample,
            group=episode.group,
            status=episode.status,
            success=episode.success,
            score=episode.score,
            episode_return=episode.episode_return,
            verdicts=tuple(counts[verdict] for verdict in Verdict),
            goal_rate=None if goal is None else float(goal),
            prompt_tokens=ids - response if episode.segments else None,
            response_tokens=response if episode.segments else None,
            answer_f1=episode.meta.get("answer_f1"),
            cut=sum(turn.finish == "length" for turn in episode.turns),
        )

    @property
    def turns(self) -> int:
        return sum(self.verdicts)

    @property
    def invalid(self) -> int:
        """Number of turns whose action did not reach the environment."""
        return sum(count for verdict, count in zip(Verdict, self.verdicts, strict=True) if not verdict.valid)


APPROXIMATE = "approximate"
"""Key of `PlaySpec.scoring`: see `TextEnv.scoring`."""
Played = Iterable[Episode | EpisodeOutcome]


FEW_GROUPS = 10
"""With fewer scenes, worlds or products than this, a number is quoted for these alone."""
PAPER_ORDER = ("place", "look", "clean", "heat", "cool", "two")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """One row of a result table."""

    name: str
    samples: int
    """Smallest number of samples of a task in this row, the n of Avg@n."""
    episodes: int
    avg: Interval
    """Avg@n: mean success over tasks and samples."""
    pass_at: Mapping[int, float]
    """k to pass@k, for k = 1, 2, 4, ... up to n."""
    pass_intervals: Mapping[int, Interval]
    """k to pass@k with its interval over tasks."""
    pass_all: Mapping[int, Interval] = field(default_factory=dict)
    """k to pass^k, that all of k samples succeed, with its interval over tasks, for k = 2, 4, ... up to n."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """All that tables and figures need about one evaluation. Episodes that ended in an error do not count."""

    overall: ScoreRow
    categories: tuple[ScoreRow, ...]
    errors: int
    """Number of episodes that ended in an error; they are left out of all other numbers."""
    score: float
    """Mean graded score at the end."""
    turns: float
    """Mean number of turns."""
    success_turns: float | None
    """Mean number of turns of the successful episodes."""
    invalid_rate: float
    """Share of turns whose action did not reach the environment."""
    verdicts: Mapping[str, float]
    """Share of turns by verdict."""
    cut_rate: float
    """Share of turns whose answer ended at the limit on new tokens."""
    truncated: Mapping[str, float]
    """Share of episodes by truncation status."""
    goal_rate: float | None
    """Mean share of goal conditions met at the end; None if the environment has none."""
    approximate: str | None = None
    """Why success and score are only about those of the benchmark; None where they are exact."""

    answer_f1: Interval | None = None
    """F1 of the answers (SQuAD's) with its 95 % interval over tasks; None where nothing is answered."""
    graded: Interval | None = None
    """`score` with its 95 % interval over tasks; None where it is success, or not within [0, 1]."""
    bounds: tuple[float, float] | None = None
    """Avg@n with the episodes that ended in an error counted as lost, and as won; None where there are none."""
    new_clusters: Interval | None = None
    """Avg@n with its interval for new scenes, worlds or products; None where no tasks share one."""
    clusters: int | None = None
    """How many of them there are."""

    @property
    def mark(self) -> str:
        """What stands before success and score in tables: `~` where they are approximate."""
        return "~" if self.approximate else ""

    def to_json(self) -> dict[str, Any]:
        """Converts all fields, the last five only if they are not None."""
        some = ("answer_f1", "graded", "bounds", "new_clusters", "clusters")
        return {name: value for name, value in asdict(self).items() if value is not None or name not in some}


def score(episodes: Played, play: PlaySpec | None = None) -> Scores:
    """Score one evaluation; without `play` each task counts alike, and scores are the benchmark's.

    Raises ScoreError if no episode ended without an error.
    """
    apart = play is not None and drawn(play)
    every = as_outcomes(episodes)
    counted = [outcome for outcome in every if not outcome.status.is_error]
    if not counted:
        raise ScoreError(f"none of {len(every)} episodes ended without an error, so there is nothing to score")
    turns = max(sum(outcome.turns for outcome in counted), 1)
    won = [outcome.turns for outcome in counted if outcome.success]
    goals = [outcome.goal_rate for outcome in counted if outcome.goal_rate is not None]
    statuses = Counter(outcome.status for outcome in counted)
    rows: dict[str, list[EpisodeOutcome]] = {}
    for outcome in counted:
        rows.setdefault(outcome.task.category, []).append(outcome)
    units = units_of(counted, play)
    graded, means = score_means(units), task_means(units)
    shared = {outcome.task.task_id: outcome.task.cluster or outcome.task.task_id for outcome in units}
    clusters = [shared[task_id] for task_id in means]
    together = not apart and 1 < len(set(clusters)) < len(clusters)
    tasks = {unit.task.task_id: outcome.task.task_id for unit, outcome in zip(units, counted, strict=True)}
    return Scores(
        overall=_row("all", [counted], apart),
        categories=tuple(_row(name, [rows[name]], apart) for name in sorted(rows, key=category_rank)),
        errors=len(every) - len(counted),
        score=fmean(outcome.score for outcome in counted),
        turns=fmean(outcome.turns for outcome in counted),
        success_turns=fmean(won) if won else None,
        invalid_rate=sum(outcome.invalid for outcome in counted) / turns,
        verdicts={
            verdict.value: sum(outcome.verdicts[index] for outcome in counted) / turns
            for index, verdict in enumerate(Verdict)
        },
        cut_rate=sum(outcome.cut for outcome in counted) / turns,
        truncated={s.value: statuses[s] / len(counted) for s in Status if s.is_cut},
        goal_rate=fmean(goals) if goals else None,
        approximate=None if play is None else play.scoring.get(APPROXIMATE),
        answer_f1=_graded(f1_means(units), tasks if apart else None),
        graded=_graded(graded, tasks if apart else None),
        bounds=_bounds(every, apart) if len(counted) < len(every) else None,
        new_clusters=clustered(list(means.values()), clusters=clusters) if together else None,
        clusters=len(set(clusters)) if together else None,
    )


def _graded(means: Mapping[str, float], tasks: Mapping[str, str] | None) -> Interval | None:
    if not means:
        return None
    values = list(means.values())
    return clustered(values) if tasks is None else of_draws(values, [tasks[name] for name in means])


def of_draws(values: Sequence[float], tasks: Sequence[str]) -> Interval:
    """The mean over draws, as in the published number; draws of one task are one cluster, not independent."""
    return replace(clustered(values, clusters=tasks), tasks=len(set(tasks)))


def units_of(outcomes: Sequence[EpisodeOutcome], play: PlaySpec | None) -> list[EpisodeOutcome]:
    """Returns the outcomes without errors, each with the task that it counts for (`_unit`). Every score is the mean
    over these tasks of the means over their samples."""
    apart = play is not None and drawn(play)
    return [replace(outcome, task=_unit(outcome, apart)) for outcome in outcomes if not outcome.status.is_error]


def _unit(outcome: EpisodeOutcome, apart: bool) -> Task:
    """Returns what an outcome counts for: its task with all samples or, if tasks are drawn (`apart`), its own draw."""
    return replace(outcome.task, task_id=f"{outcome.task.task_id}, draw {outcome.sample}") if apart else outcome.task


def score_seeds(runs: Sequence[Played], play: PlaySpec | None = None) -> Scores:
    """Scores one method whose runs differ in their seed alone: means over seeds and tasks, with intervals for new ones
    of both (`over_seeds`). `score` scores a single run. Raises ScoreError if the runs played different tasks."""
    every = [as_outcomes(run) for run in runs]
    if len(every) == 1:
        return score(every[0], play)
    singles, pooled = [score(run, play) for run in every], score([outcome for run in every for outcome in run], play)
    counted = [[outcome for outcome in run if not outcome.status.is_error] for run in every]
    graded, answered = [score_means(run) for run in counted], [f1_means(run) for run in counted]
    shared = {outcome.task.task_id: outcome.task.cluster or outcome.task.task_id for run in counted for outcome in run}
    return replace(
        pooled,
        overall=_row("all", counted),
        categories=tuple(
            _row(row.name, [[outcome for outcome in run if outcome.task.category == row.name] for run in counted])
            for row in pooled.categories
        ),
        answer_f1=over_seeds(answered) if all(answered) else None,
        graded=over_seeds(graded) if all(graded) else None,
        new_clusters=over_seeds([task_means(run) for run in counted], clusters=shared)
        if singles[0].new_clusters
        else None,
    )


def score_means(counted: Sequence[EpisodeOutcome]) -> dict[str, float]:
    """Task id to its mean score; {} where the score is success."""
    return _means((unit, unit.score) for unit in counted) if any(unit.score != unit.success for unit in counted) else {}


def f1_means(counted: Sequence[EpisodeOutcome]) -> dict[str, float]:
    """Task id to the mean F1 of its answers; {} if no episode has one. An episode without an answer counts 0."""
    return (
        {}
        if all(unit.answer_f1 is None for unit in counted)
        else _means((unit, unit.answer_f1 or 0.0) for unit in counted)
    )


def _means(values: Iterable[tuple[EpisodeOutcome, float]]) -> dict[str, float]:
    by_task: dict[str, list[float]] = {}
    for outcome, value in values:
        by_task.setdefault(outcome.task.task_id, []).append(value)
    return {task_id: fmean(by_task[task_id]) for task_id in sorted(by_task)}


def _bounds(every: Sequence[EpisodeOutcome], apart: bool) -> tuple[float, float]:
    """Avg@n where every episode that ended in an error was lost, and where each was won."""
    by_task: dict[str, list[tuple[bool, bool]]] = {}
    for unit in every:
        error = unit.status.is_error
        by_task.setdefault(_unit(unit, apart).task_id, []).append((unit.success and not error, unit.success or error))
    lost, won = (fmean(fmean(pair[side] for pair in pairs) for pairs in by_task.values()) for side in (0, 1))
    return lost, won


def as_outcomes(episodes: Played) -> list[EpisodeOutcome]:
    """The episodes without their texts."""
    return [episode if isinstance(episode, EpisodeOutcome) else EpisodeOutcome.of(episode) for episode in episodes]


def task_means(episodes: Played) -> dict[str, float]:
    """Task id to the mean success of its samples, sorted; episodes that ended in an error do not count."""
    return {task_id: wins / samples for task_id, (wins, samples) in _by_task(episodes).items()}


def compare(first: Played, second: Played) -> Difference:
    """Avg@n of `second` minus `first` on the same tasks, paired by task, with its 95 % interval for these two runs.

    Raises ScoreError if the runs played different tasks (by id, or by sha256).
    """
    before, after = ([played for played in run if not played.status.is_error] for run in (first, second))
    check_hashes(before, after)
    return rise([task_means(before)], [task_means(after)])


def check_hashes(first: Played, second: Played) -> None:
    """Raises ScoreError where two runs mean different tasks by one id."""
    hashes = {outcome.task.task_id: outcome.task.sha256 for outcome in first}
    for task in (outcome.task for outcome in second):
        # an episode that failed before its first observation has no hash of its task
        if task.sha256 and hashes.get(task.task_id, task.sha256) not in ("", task.sha256):
            raise ScoreError(
                f"{task.task_id} has sha256 {hashes[task.task_id][:12]} in the first run and {task.sha256[:12]} in the "
                "second: same name, another task"
            )


def _row(name: str, runs: Sequence[Sequence[EpisodeOutcome]], apart: bool = False) -> ScoreRow:
    """Scores one run over its tasks, several over seeds and tasks. With `apart`, each draw of a single run counts."""
    episodes = sum(map(len, runs))
    if apart:
        (counted,) = runs
        draws = of_draws([float(outcome.success) for outcome in counted], [outcome.task.task_id for outcome in counted])
        return ScoreRow(
            name=name, samples=1, episodes=episodes, avg=draws, pass_at={1: draws.mean}, pass_intervals={1: draws}
        )
    tasks = [_by_task(run) for run in runs]
    least = min(samples for run in tasks for _, samples in run.values())

    def over(value: Callable[[int, int], float]) -> Interval:
        return over_seeds([{task: value(n, wins) for task, (wins, n) in run.items()} for run in tasks])

    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= least]
    best = {k: over(partial(pass_at_k, k=k)) for k in ks}
    return ScoreRow(
        name=name,
        samples=least,
        episodes=episodes,
        avg=over(lambda n, wins: wins / n),
        pass_at={k: interval.mean for k, interval in best.items()},
        pass_intervals=best,
        pass_all={k: over(partial(pass_all_k, k=k)) for k in ks if k > 1},
    )


def _by_task(episodes: Played) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for episode in episodes:
        if not episode.status.is_error:
            wins, samples = counts.get(episode.task.task_id, (0, 0))
            counts[episode.task.task_id] = wins + episode.success, samples + 1
    return dict(sorted(counts.items()))


def category_rank(category: str) -> tuple[int, str]:
    """Sort key of a category in tables: ALFWorld's in the order of papers, then others by name."""
    rank = PAPER_ORDER.index(category) if category in PAPER_ORDER else len(PAPER_ORDER)
    return rank, category


def success_table(runs: Mapping[str, Scores]) -> Table:
    """One row per run: Avg@n by category and overall, pass@n and pass^n with 95 % intervals; percent.

    Runs with different numbers of samples per task get columns of their own, since Avg@1 and Avg@4 differ in meaning.
    """
    names = list(dict.fromkeys(row.name for scores in runs.values() for row in scores.categories))
    samples = sorted({scores.overall.samples for scores in runs.values()}, reverse=True)
    header = ["run", *names, *(f"Avg@{n} [95 %]" for n in samples), *(f"pass@{n} [95 %]" for n in samples)]
    header += [*(f"pass^{n} [95 %]" for n in samples if n > 1), "tasks"]
    rows = [_success_row(name, scores, names, samples) for name, scores in runs.items()]
    # further columns, where a run has something in them
    further: Mapping[str, Callable[[Scores], str]] = {
        "new scenes, worlds, products [95 %]": _new_clusters,
        "score [95 %]": lambda scores: str(scores.graded or "-"),
        "F1 [95 %]": lambda scores: str(scores.answer_f1 or "-"),
        "errors lost, won %": lambda scores: ", ".join(map(_percent, scores.bounds or ())) or "-",
    }
    for title, cell in further.items():
        cells = [cell(scores) for scores in runs.values()]
        if any(text != "-" for text in cells):
            header.append(title)
            rows = [[*row, text] for row, text in zip(rows, cells, strict=True)]
    return header, rows


def _new_clusters(scores: Scores) -> str:
    """The interval for new clusters, or that there are too few of them to say."""
    if scores.new_clusters is None:
        return "-"
    if (scores.clusters or 0) < FEW_GROUPS:
        return f"for these {scores.clusters} only; {scores.new_clusters}"
    return f"{scores.new_clusters} of {scores.clusters}"


def behavior_table(runs: Mapping[str, Scores]) -> Table:
    """One row per run: turns, invalid actions, truncations, goal conditions, errors."""
    header = ["run", "turns", "turns (won)", "invalid %", "malformed %", "answers cut %", "cut by turns %"]
    header += ["cut by context %", "goal conditions %", "score", "errors"]
    rows = []
    for name, scores in runs.items():
        cells = [f"{scores.turns:.1f}", "-" if scores.success_turns is None else f"{scores.success_turns:.1f}"]
        cells += [_percent(scores.invalid_rate), _percent(scores.verdicts["malformed"]), _percent(scores.cut_rate)]
        cells += [_percent(scores.truncated[key]) for key in ("truncated_turns", "truncated_tokens")]
        cells += ["-" if scores.goal_rate is None else _percent(scores.goal_rate), f"{scores.mark}{scores.score:.3f}"]
        rows.append([name, *cells, str(scores.errors)])
    return header, rows


def _success_row(name: str, scores: Scores, names: Sequence[str], samples: Sequence[int]) -> list[str]:
    rows: dict[str, ScoreRow] = {row.name: row for row in scores.categories}
    mark = scores.mark
    cells = [f"{mark}{_percent(rows[category].avg.mean)}" if category in rows else "-" for category in names]
    overall, best = scores.overall, scores.overall.pass_intervals[max(scores.overall.pass_at)]
    for interval in (overall.avg, best):
        cells += [f"{mark}{interval}" if n == overall.samples else "-" for n in samples]
    every = overall.pass_all.get(max(overall.pass_at))
    cells += [f"{mark}{every}" if n == overall.samples else "-" for n in samples if n > 1]
    return [name, *cells, str(overall.avg.tasks)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


MOST_MALFORMED = 0.9
"""A model with this share of malformed answers or more does not write actions in the form that is asked for."""
_TAG = r"<((?!think\b|information\b)\w+)>"
EXAMPLES = (re.compile(rf"{_TAG}(?! and </)[^<>]*</\1>"), re.compile(rf"{_TAG} and </\1>"))
"""How a system message shows an action: whole, or by its tags. Thoughts and search results stand in tags, too."""


def hints(scores: Scores, episodes: Sequence[Episode], spec: EvalSpec) -> list[str]:
    """Paragraphs about the answers of these episodes; [] where there is nothing to say."""
    channel, env = spec.agent.chat.channel, spec.play.env
    advice = []
    full = Status.TRUNCATED_TOKENS
    if scores.truncated[full] and (mute := sum(episode.status is full and not episode.turns for episode in episodes)):
        advice.append(
            f"{mute} of {len(episodes)} episodes ended before their first answer: the first prompt alone fills the "
            "context. Play a model that reads more, raise --max-context, or let it read less (--system, --examples)."
        )
    if scores.cut_rate:
        advice.append(
            f"{100 * scores.cut_rate:.0f} % of the answers were cut at the limit on new tokens, so that their ends are "
            "lost: raise --max-new-tokens, or let the model answer in fewer words (--thinking off, another --system)."
        )
    malformed = scores.verdicts[Verdict.MALFORMED.value]
    if malformed >= MOST_MALFORMED:
        pairs = ((episode, turn) for episode in episodes if not episode.status.is_error for turn in episode.turns)
        episode, turn = next(pair for pair in pairs if pair[1].verdict is Verdict.MALFORMED)
        called = channel.startswith("tool")
        literal, tags = (form.search(episode.system or "") for form in EXAMPLES)
        example = literal[0] if literal else f"<{tags[1]}>...</{tags[1]}>" if tags else ""
        expected = "a call of the environment's tool" if called else "an action in tags"
        expected += f", as in {example}" if example and not called else ""
        answer = excerpt(" ".join(printable(turn.response).split()), 200) or "(nothing)"
        lists = turn.admissible is not None and not env.show_admissible
        helps = [
            *(["--show-admissible on, or a preset that has it (--preset list)"] if lists else []),
            f"--channel {'text' if called else 'tool'}",
            *([] if env.reading == "lenient" else ["--reading lenient"]),
            "--examples FILE",
            *([] if env.on_invalid == "reject" else ["--on-invalid reject"]),
        ]
        advice.append(
            f"{100 * malformed:.0f} % of the answers could not be read as an action. Expected is {expected}. Instead, "
            f"turn {turn.index} of {episode.task.task_id} said: {answer!r}. What may help: {'; '.join(helps)}. "
            "`turngym trace print --prompt` shows what the model read."
        )
    return advice
