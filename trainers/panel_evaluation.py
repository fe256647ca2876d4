"""How a student in training is evaluated: on which panel, with which settings (`eval_spec`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from turngym.agents.evaluation.evaluate import EVAL_DEFAULTS
from turngym.agents.evaluation.play_panel import TaskEvaluation
from turngym.agents.evaluation.training_evaluation import AGENT_FACING, PanelEvaluation, check_panel
from turngym.agents.play_spec import EvalSpec, Model, OnPanel, part_of
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.presets import find_preset
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.examples import Examples
from turngym.agents.resolve_play import (
    chat_table,
    environment_layer,
    make_arguments,
    panel_layer,
    panel_name,
    play_table,
)
from turngym.core.resolve import Layer, Resolved, resolve
from turngym.core.spec import changed, expand, to_table
from turngym.envs.panels import Panel, assert_disjoint, load_panel
from turngym.trainers.student_player import RunEnv, RunInfo, StudentPlayer
from turngym.trainers.train_config import TrainConfig


def run_panel(config: TrainConfig, run: RunInfo, student: StudentPlayer) -> Panel | None:
    """The panel that `--panel` names, whose tasks must not be trained on; None: the run is not evaluated.

    Raises TurngymError for a panel that the student cannot play, or whose tasks are among its examples.
    """
    if config.evaluation is None:
        return None
    panel = load_panel(config.evaluation.panel)
    assert_disjoint(student.examples.tasks, panel.tasks)
    spec = _of_run(panel, config, run, student).spec
    check_panel(panel, make_arguments(spec.play), config.play.env_id, student.env.tool)
    return panel


def panel_evaluation(panel: Panel, env: RunEnv) -> PanelEvaluation:
    """Evaluates the learner on `panel` after a step."""
    run, student = env.info, env.student
    found = _of_run(panel, env.config, run, student)
    # a limit of turns that is not the panel's is easily overlooked
    own = panel.make_kwargs.get("max_turns")
    if own is not None and found.spec.play.env.max_turns != own:
        turns = found.spec.play.env.max_turns
        print(f"evaluations: max_turns {turns} instead of {panel.full_name}'s {own}", file=sys.stderr)
    made = {**make_arguments(found.spec.play), **student.data}
    scoring = probe(panel.env_id, made).scoring
    if why := scoring.get("approximate"):
        print(f"evaluations: scores of {panel.full_name} are approximate ({why})", file=sys.stderr)
    spec = changed(found.spec, play=changed(found.spec.play, scoring=scoring))
    tasks = spec.play.tasks
    assert isinstance(tasks, OnPanel)
    temperature = spec.agent.temperature if isinstance(spec.agent, Model) else 0.0
    evaluation = TaskEvaluation(
        spec=spec,
        tasks=part_of(panel.tasks, tasks.sampling),
        make_env=env_maker(panel.env_id, **{**made, "channel": student.settings.channel}),
        agent=student.learner.agent(temperature),
        system=student.learner.settings.system,
        play=student.play,
    )
    return PanelEvaluation(evaluation, run.out / "eval")


def _of_run(panel: Panel, config: TrainConfig, run: RunInfo, student: StudentPlayer) -> Resolved[EvalSpec]:
    return eval_spec(
        panel,
        config,
        seed=run.seed,
        max_turns=run.max_turns,
        chat=student.settings,
        shown=examples_table(config, student.examples),
    )


def eval_spec(
    panel: Panel,
    config: TrainConfig,
    *,
    max_turns: int,
    seed: int = 0,
    chat: ChatSettings | None = None,
    shown: Mapping[str, Any] | None = None,
) -> Resolved[EvalSpec]:
    """The settings of evaluations of a run on `panel`.

    How the environment speaks to agents (`AGENT_FACING`) is as in training, where neither the panel nor a preset says
    otherwise; the limit of turns is --max-turns where that was given.

    Args:
        panel: its own arguments fix the tasks.
        config: what is evaluated, and how.
        max_turns: the run's limit of turns.
        seed: the run's.
        chat: how the student is spoken to, completed, without examples; None: by default.
        shown: the examples in its prompt (`examples_table`).
    """
    chat = ChatSettings() if chat is None else chat
    play, evaluation = config.play, config.evaluation
    assert evaluation is not None
    preset = find_preset(play.preset, panel.env_id)
    shared = {name: value for name, value in play.env_kwargs.items() if name in AGENT_FACING}
    training = Layer(name="training", table=play_table(panel.env_id, {"max_turns": max_turns, **shared}))
    layers = [Layer(name="default", table=EVAL_DEFAULTS), environment_layer(panel.env_id)]
    if preset is None:
        layers += [training, panel_layer(panel)]
    else:
        layers += [panel_layer(panel), Layer(name=f"preset {preset.name}", table=preset.table)]
        layers.append(Layer(name="training", table=play_table(panel.env_id, shared)))
    asked = {
        "preset": play.preset,
        "panel": panel_name(panel, evaluation.panel),
        "seed": seed,
        # as the preset says, or by default, where they are None
        "samples": evaluation.eval_samples,
        "temperature": evaluation.eval_temperature,
        "limit": evaluation.eval_limit,
        "spread": None if evaluation.eval_limit is None else evaluation.eval_spread,
        "max_turns": None if config.run.max_turns is None else max_turns,
        "slots": play.slots,
        "data": play.data,
    }
    given = expand(EvalSpec, {name: value for name, value in asked.items() if value is not None}, "run")
    spoken = chat_table(chat) | {"examples": shown}
    if (templates := chat.remembers.templates) is not None:
        spoken["memory"]["sha256"] = templates.sha256
    player = {"kind": "model", "folder": "student", "engine": {"dtype": play.rollout_dtype or "float32"}}
    student = Layer(name="student", table={"agent": {**player, "chat": spoken}})
    return resolve(EvalSpec, [*layers, student, Layer(name="run", table=given, asked=True)])


def examples_table(config: TrainConfig, found: Examples) -> dict[str, Any] | None:
    """The examples in the student's prompt as a partial table of `Chat`."""
    return None if config.examples is None else {**to_table(config.examples), "content": found.identity}
