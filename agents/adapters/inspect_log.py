"""A result as a log of Inspect, which `inspect view` opens: an episode is a sample, its turns are messages.

What the log cannot hold: token ids, and the rules of the game as Inspect's own limits (they stand in the metadata with
all settings). Its metrics are ours, so their errors are intervals over tasks and not Inspect's standard errors.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turngym.agents.adapters.exported_numbers import numbers_of, panel_of_result, times_of
from turngym.agents.evaluation.packed_file import PackedResult
from turngym.core.episode import Episode
from turngym.core.plugins import need
from turngym.core.spec import to_table

LACKS = "no token ids; verdicts and rewards of turns are metadata of their messages"


def write(result: PackedResult, out: Path) -> list[Path]:
    """Writes `PANEL.eval` into `out` and returns its path. Needs the extra `inspect`.

    Raises MissingExtra without it, EvaluationError for a result without episodes that ended well.
    """
    log: Any = need("inspect_ai.log", "the export to Inspect", "inspect")
    panel = panel_of_result(result)
    metrics = {}
    for number in numbers_of(result):
        interval = {} if number.interval is None else {"low": number.interval.low, "high": number.interval.high}
        metrics[number.name] = log.EvalMetric(
            name=number.name, value=number.value, metadata={"about": number.about, **interval}
        )
    ids = list(dict.fromkeys(episode.task.task_id for episode in result.episodes))
    done = sum(not episode.status.is_error for episode in result.episodes)
    unknown = datetime.fromtimestamp(0, UTC)
    began, ended = (moment.isoformat(timespec="seconds") for moment in times_of(result) or (unknown, unknown))
    head = log.EvalSpec(
        created=began,
        task=panel.panel,
        task_id=panel.sha256[:22] or panel.panel,
        dataset=log.EvalDataset(name=panel.panel, samples=len(ids), sample_ids=ids, shuffled=False),
        model=result.agent,
        config=log.EvalConfig(epochs=result.spec.play.samples),
        packages=dict(result.versions),
        metadata={"spec": to_table(result.spec), "panel_sha256": panel.sha256, "seal": result.seal},
    )
    eval_log = log.EvalLog(
        status="success",
        eval=head,
        results=log.EvalResults(
            total_samples=len(result.episodes),
            completed_samples=done,
            scores=[log.EvalScore(name="success", scorer="turngym", scored_samples=done, metrics=metrics)],
        ),
        stats=log.EvalStats(started_at=began, completed_at=ended),
        samples=[_sample(episode) for episode in result.episodes],
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{panel.panel.replace(':', '-')}.eval"
    log.write_eval_log(eval_log, str(path))
    return [path]


def _sample(episode: Episode) -> Any:
    parts = ("log", "model", "scorer")
    log, model, scorer = (need(f"inspect_ai.{part}", "the export to Inspect", "inspect") for part in parts)
    messages = [model.ChatMessageSystem(content=episode.system)] if episode.system else []
    for turn in episode.turns:
        judgment = {"action": turn.action, "verdict": turn.verdict.value, "reward": turn.reward}
        messages.append(model.ChatMessageUser(content=turn.observation))
        messages.append(model.ChatMessageAssistant(content=turn.response, metadata=judgment))
    row = {"score": episode.score, "return": episode.episode_return, "turns": len(episode.turns)}
    error, scores = None, None
    if episode.status.is_error:
        error = log.EvalError(message=episode.status.value, traceback="", traceback_ansi="")
    else:
        success = scorer.Score(value=float(episode.success), explanation=episode.status.value, metadata=row)
        scores = {"success": success}
    return log.EvalSample(
        id=episode.task.task_id,
        epoch=episode.sample + 1,
        input=episode.turns[0].observation if episode.turns else "",
        target="",
        messages=messages,
        scores=scores,
        metadata={"category": episode.task.category, "sha256": episode.task.sha256, "seed": episode.seed},
        error=error,
    )
