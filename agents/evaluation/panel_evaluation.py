"""Evaluations on a panel while a model is trained."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.environments import probe
from turngym.agents.evaluation.held import gather_shares
from turngym.agents.evaluation.tasks import EvalResult, TaskEvaluation
from turngym.agents.model_player import ModelPlayer
from turngym.agents.presets.published import find_preset
from turngym.agents.rollout import MakeEnv, PlayJobs, rollout
from turngym.envs.common.rollout_side import StudentRun
from turngym.envs.core import ToolSpec, TurngymError
from turngym.envs.panels import Panel
from turngym.envs.protocols import EvalPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelEvaluation:
    """Avg@n on a panel, as the training loop asks for it; every episode is kept as a trace to read."""

    panel: Panel
    player: ModelPlayer
    make_env: MakeEnv
    folder: Path
    samples: int = 4
    temperature: float = 0.85
    seed: int = 0
    slots: int = 64
    limit: int | None = None
    """Play only the first so many tasks."""
    play: PlayJobs = rollout
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the record of every episode says beside the agent: the preset, and what is not as the panel has it."""

    def __call__(self, step: int) -> EvalPoint:
        return _point(self._of(step).run())

    def gather(self, step: int) -> None:
        gather_shares(self._of(step).trace)

    def play_share(self, step: int, share: tuple[int, int]) -> None:
        self._of(step).run_share(share)

    def finish(self, step: int) -> EvalPoint:
        # an error in a share is one as it is in a whole: not played again within the same evaluation
        return _point(self._of(step).run(errors_again=False))

    def _of(self, step: int) -> TaskEvaluation:
        self.folder.mkdir(parents=True, exist_ok=True)
        return TaskEvaluation(
            tasks=self.panel,
            make_env=self.make_env,
            agent=self.player.agent(self.temperature),
            samples=self.samples,
            limit=self.limit,
            temperature=self.temperature,
            seed=self.seed,
            slots=self.slots,
            trace=self.folder / f"step_{step:06d}.jsonl",
            system=self.player.settings.system,
            settings=self.settings,
            play=self.play,
        )


def _point(result: EvalResult) -> EvalPoint:
    scores = result.scores
    extra = {f"pass@{k}": value for k, value in scores.overall.pass_at.items()}
    extra |= {"turns": scores.turns, "invalid_rate": scores.invalid_rate, "errors": float(scores.errors)}
    extra |= {f"category/{row.name}": row.avg.mean for row in scores.categories}
    average = scores.overall.avg
    return EvalPoint(avg=average.mean, low=average.low, high=average.high, extra=extra)


TOLD = ("on_invalid", "engine", "show_admissible", "list_admissible", "tool_name", "tool_argument")
"""What of a run's arguments for `gym.make` is true of its evaluations, too: how the agent is spoken to. The rest says
what is trained on; a panel brings its own."""


def eval_make(panel: Panel, preset: str | None, given: Mapping[str, Any], run: StudentRun) -> dict[str, Any]:
    """Arguments of `gym.make` for evaluations of `run` on `panel`; `given` are those for training.

    The limit of turns is --max-turns where that was given, else the preset's, the panel's, the run's.
    """
    found = find_preset(preset, panel.env_id)
    told = {name: value for name, value in given.items() if name in TOLD}
    if found is None:
        kwargs = {"max_turns": run.max_turns, **told, **panel.make_kwargs}
    else:
        kwargs = {**panel.make_kwargs, **found.make(told)}
    if run.explicit_turns:
        kwargs["max_turns"] = run.max_turns
    return kwargs


def eval_note(panel: Panel, preset: str | None, made: Mapping[str, Any]) -> dict[str, Any]:
    """What the records of an evaluation say of how it was made; another limit than the panel's own is printed, too."""
    found, own = find_preset(preset, panel.env_id), panel.make_kwargs.get("max_turns")
    note: dict[str, Any] = {} if found is None else {**found.identity}
    if own is not None and made["max_turns"] != own:
        print(f"evaluations: max_turns {made['max_turns']} instead of {panel.full_name}'s {own}", file=sys.stderr)
        note["max_turns"] = made["max_turns"]
    made = {name: value for name, value in made.items() if name not in ("max_turns", "data")}
    if other := {name: value for name, value in made.items() if panel.make_kwargs.get(name) != value}:
        note["make"] = other
    return note


def check_panel(panel: Panel, made: Mapping[str, Any], env: str, tool: ToolSpec) -> None:
    """Whether a run that trains on `env`, where the student is told of `tool`, can be evaluated on `panel`, whose
    environment is made with `made`.

    On another environment with the same action it can, which is a question of transfer and said in a line. Raises
    TurngymError where that environment has another action: the student would never be told of it.
    """
    trained = env.rpartition(":")[2]
    if panel.env_id == trained:
        return
    other = probe(panel.env_id, made).tool
    if (other.name, other.argument, other.tags) != (tool.name, tool.argument, tool.tags):
        raise TurngymError(
            f"--panel {panel.full_name} is of {panel.env_id}, whose action is {other.name}({other.argument}); the run "
            f"trains on {trained}, whose action is {tool.name}({tool.argument}): name a panel of {trained} "
            "(`turngym panel list`), or evaluate checkpoints with `turngym eval`"
        )
    print(f"evaluations: {panel.full_name} is of {panel.env_id}, the run trains on {trained}", file=sys.stderr)
