"""How a student in training is evaluated: on which panel, with which settings (`eval_spec`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from turngym.agents.evaluation.open_play import scored
from turngym.agents.evaluation.play_panel import PanelEvaluation, TaskEvaluation
from turngym.agents.play_spec import Compute, EvalSpec, Local, Model, OnPanel, PartOfPanel, PlaySpec, Whole, part_of
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.resolve_play import make_arguments
from turngym.agents.servers.server_options import rollout_dtype
from turngym.core.errors import TurngymError
from turngym.core.spec import changed
from turngym.core.tools import Tools
from turngym.envs.panels import Panel, assert_disjoint, load_panel
from turngym.trainers.student_player import RunEnv, StudentPlayer
from turngym.trainers.train_config import TrainConfig


def run_panel(config: TrainConfig, student: StudentPlayer) -> Panel | None:
    """The panel that `--panel` names, whose tasks must not be trained on; None: the run is not evaluated.

    Raises TurngymError for a panel that the student cannot play, or whose tasks are among its examples.
    """
    if config.evaluation is None:
        return None
    panel = load_panel(config.evaluation.panel)
    assert_disjoint(student.examples.tasks, panel.tasks)
    check_panel(panel, make_arguments(config.evaluation.game), config.play.env.id, student.env.tool)
    return panel


def check_panel(panel: Panel, arguments: Mapping[str, Any], env: str, tool: Tools) -> None:
    """Check that a run that trains on `env` with the action `tool` can be evaluated on `panel` (made with `arguments`).

    Another environment with the same action is a test of transfer, and one line says so. Raises TurngymError if its
    action differs, since the student has never been told of that one.
    """
    trained = env.rpartition(":")[2]
    if panel.env_id == trained:
        return
    panel_tool = probe(panel.env_id, arguments).tool
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


def panel_evaluation(panel: Panel, env: RunEnv) -> PanelEvaluation:
    """Evaluates the learner on `panel` after a step."""
    run, student = env.info, env.student
    spec = eval_spec(panel, env.config)
    # a limit of turns that is not the panel's is easily overlooked
    panel_turns, turns = panel.make_kwargs.get("max_turns"), spec.play.env.max_turns
    if panel_turns is not None and turns != panel_turns:
        print(f"evaluations: max_turns {turns} instead of {panel.full_name}'s {panel_turns}", file=sys.stderr)
    arguments = {**make_arguments(spec.play), **student.data}
    played = scored(spec.play, probe(panel.env_id, arguments))
    if why := played.scoring.get("approximate"):
        print(f"evaluations: scores of {panel.full_name} are approximate ({why})", file=sys.stderr)
    assert isinstance(spec.agent, Model)
    agent = changed(spec.agent, chat=student.chat)
    spec = changed(spec, play=played, agent=agent)
    assert isinstance(spec.play.tasks, OnPanel)
    evaluation = TaskEvaluation(
        spec=spec,
        tasks=part_of(panel.tasks, spec.play.tasks.sampling),
        make_env=env_maker(panel.env_id, **{**arguments, "channel": student.settings.channel}),
        agent=student.learner.agent(agent.temperature),
        system=student.learner.settings.system,
        play=student.play,
    )
    return PanelEvaluation(evaluation, run.out / "eval")


def eval_spec(panel: Panel, config: TrainConfig) -> EvalSpec:
    """The settings of a run's evaluations on `panel`, as `turngym eval` has them."""
    evaluation, play = config.evaluation, config.play
    assert evaluation is not None
    limit = evaluation.eval_limit
    sampling = Whole() if limit is None else PartOfPanel(limit=limit, spread=evaluation.eval_spread)
    return EvalSpec(
        play=PlaySpec(
            env=evaluation.game.env,
            env_kwargs=evaluation.game.env_kwargs,
            scoring=evaluation.game.scoring,
            tasks=OnPanel(panel=evaluation.panel, sha256=panel.sha256, size=len(panel.tasks), sampling=sampling),
            samples=evaluation.eval_samples,
            seed=config.run.seed,
        ),
        agent=Model(
            folder="student",
            temperature=evaluation.eval_temperature,
            engine=Local(dtype=rollout_dtype(config.engine) or config.models.dtype),
            chat=config.chat,
        ),
        compute=Compute(slots=play.slots, data=play.data),
        preset=play.preset,
    )
