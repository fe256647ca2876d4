"""What every export of a result says in numbers, recomputed from its episodes: name, value, interval, meaning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePath

from turngym.agents.evaluation.packed_file import PackedResult
from turngym.agents.evaluation.rules import deviations
from turngym.agents.evaluation.scores import EvaluationError, Scores, score
from turngym.agents.evaluation.statistics import Interval, ScoreError
from turngym.agents.play_spec import OnPanel
from turngym.core.redaction import brief
from turngym.core.spec import changed
from turngym.core.whole_files import atomic_write

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_PANEL = re.compile(r"\w[\w .:-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number of a result."""

    name: str
    """What turngym's tables call it, in letters that an id may have: `avg-4`, `pass-at-4`, `score`."""
    about: str
    """What it is, in a sentence."""
    value: float
    """A share, from 0 to 1."""
    interval: Interval | None = None
    """Its 95 % interval over tasks."""
    k: int | None = None
    """The k of pass@k and pass^k."""


def numbers_of(result: PackedResult) -> list[Number]:
    """The numbers of a result, of its episodes and not of its file, the main one (mean success) first.

    Raises EvaluationError where all episodes ended in an error.
    """
    try:
        return list(_numbers(score(result.episodes, result.spec.play)))
    except ScoreError as error:
        raise EvaluationError(f"the result cannot be exported: {error}") from error


def _numbers(scores: Scores) -> Iterator[Number]:
    row = scores.overall
    about = f"Success: mean over tasks of the mean over {row.samples} samples."
    yield Number(name=f"avg-{row.samples}", about=about, value=row.avg.mean, interval=row.avg)
    for k, value in row.pass_at.items():
        if k > 1:
            about = f"At least one of {k} samples of a task succeeds (unbiased estimate)."
            yield Number(name=f"pass-at-{k}", about=about, value=value, interval=row.pass_intervals[k], k=k)
    for k, interval in row.pass_all.items():
        about = f"All of {k} samples of a task succeed (unbiased estimate)."
        yield Number(name=f"pass-all-{k}", about=about, value=interval.mean, interval=interval, k=k)
    yield Number(name="score", about="Graded score at the end.", value=scores.score, interval=scores.graded)
    yield Number(name="invalid", about="Share of turns whose action was invalid.", value=scores.invalid_rate)
    for category in scores.categories:
        name, about = f"avg-{category.samples}.{category.name}", f"Success of the category {category.name}."
        yield Number(name=name, about=about, value=category.avg.mean, interval=category.avg)


def panel_of_result(result: PackedResult) -> OnPanel:
    """The panel that was played, with a name that a file can have: of a manifest's path its last part.

    Raises EvaluationError where there is none; the file comes from anyone.
    """
    tasks = result.spec.play.tasks
    if not isinstance(tasks, OnPanel):
        raise EvaluationError("the result is of no panel, so nobody else could know its tasks")
    package, colon, panel = tasks.panel.rpartition(":")
    if panel.endswith(".json"):
        panel = PurePath(panel).stem
    if not _PANEL.fullmatch(name := f"{package}{colon}{panel}"):
        raise EvaluationError(f"the result's panel is {brief(tasks.panel, 80)}; valid: a panel's name")
    return changed(tasks, panel=name)


def times_of(result: PackedResult) -> tuple[datetime, datetime] | None:
    """When the evaluation began and ended (UTC if no zone is given); None if the result does not say.

    Raises EvaluationError for what is no date.
    """
    if not result.date:
        return None
    try:
        ended = datetime.fromisoformat(result.date)
        ended = ended if ended.tzinfo else ended.replace(tzinfo=UTC)
        return ended - timedelta(seconds=result.seconds), ended
    except (ValueError, OverflowError) as error:
        problem = f"date is {brief(result.date, 80)}, its seconds {result.seconds:g}"
        raise EvaluationError(f"the result cannot be exported: its {problem} ({error})") from error


def hub_id(option: str, value: str) -> str:
    """`value` if it is an id of the Hugging Face Hub. Raises EvaluationError, which names the option."""
    if not _HUB_ID.fullmatch(value):
        raise EvaluationError(f"{option} is {value!r}; valid: an id as on the Hub, ORGANIZATION/NAME")
    return value


def write_texts(files: Mapping[Path, str]) -> list[Path]:
    """Writes every text into its file, whole or not at all, in folders that are made, and returns the paths."""
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text)
    return [*files]


def rules_of(result: PackedResult) -> str:
    """An episode's rules and all deviations from the panel, in a line."""
    env = result.spec.play.env
    limit = "any number of turns" if env.max_turns is None else f"at most {env.max_turns} turns"
    apart, deviating = deviations(result.spec)
    return "; ".join([f"{limit}, an invalid action is answered by {env.on_invalid}", *apart, *deviating])
