"""Evaluates a student at a step of its training, and checks that the panel fits the run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.play_panel import EvalResult, TaskEvaluation, gather_shares
from turngym.agents.playing.env_maker import probe
from turngym.core.errors import TurngymError
from turngym.core.protocols import EvalPoint
from turngym.core.tools import Tools
from turngym.envs.panels import Panel


@dataclass(frozen=True, slots=True)
class PanelEvaluation:
    """An evaluation at a step of training; its episodes are kept in a trace of that step in `folder`."""

    evaluation: TaskEvaluation
    folder: Path

    def __call__(self, step: int) -> EvalPoint:
        return _point(self._of(step).run())

    def gather(self, step: int) -> None:
        """Moves the episodes that processes of a stopped run left in files of their own into the trace of `step`."""
        gather_shares(self._of(step).trace)

    def play_share(self, step: int, share: tuple[int, int]) -> None:
        """Play the episodes of process number `share[0]` of `share[1]`."""
        self._of(step).run_share(share)

    def finish(self, step: int) -> EvalPoint:
        """Score what all shares have played."""
        # as in an undivided evaluation, episodes that ended in an error are not played again
        return _point(self._of(step).run(errors_again=False))

    def _of(self, step: int) -> TaskEvaluation:
        self.folder.mkdir(parents=True, exist_ok=True)
        return replace(self.evaluation, trace=self.folder / f"step_{step:06d}.jsonl")


def _point(result: EvalResult) -> EvalPoint:
    scores = result.scores
    extra = {f"pass@{k}": value for k, value in scores.overall.pass_at.items()}
    extra |= {"turns": scores.turns, "invalid_rate": scores.invalid_rate, "errors": float(scores.errors)}
    extra |= {f"category/{row.name}": row.avg.mean for row in scores.categories}
    average = scores.overall.avg
    return EvalPoint(avg=average.mean, low=average.low, high=average.high, extra=extra)


def check_panel(panel: Panel, made: Mapping[str, Any], env: str, tool: Tools) -> None:
    """Check that a run that trains on `env` with the action `tool` can be evaluated on `panel` (made with `made`).

    Another environment with the same action is a test of transfer, and one line says so. Raises TurngymError if its
    action differs, since the student has never been told of that one.
    """
    trained = env.rpartition(":")[2]
    if panel.env_id == trained:
        return
    panel_tool = probe(panel.env_id, made).tool
    if (panel_tool.tags, _calls(panel_tool)) != (tool.tags, _calls(tool)):
        raise TurngymError(
            f"--panel {panel.full_name} is of {panel.env_id}, whose action is {_calls(panel_tool)}; the run "
            f"trains on {trained}, whose action is {_calls(tool)}: name a panel of {trained} "
            "(`turngym panel list`), or evaluate checkpoints with `turngym eval`"
        )
    print(f"evaluations: {panel.full_name} is of {panel.env_id}, the run trains on {trained}", file=sys.stderr)


def _calls(tool: Tools) -> str:
    """The calls that `tool` allows, with the names of their arguments."""
    return ", ".join(
        f"{action.name}({', '.join(argument.name for argument in action.arguments)})" for action in tool.tools
    )
