"""How a student in training is evaluated: on which panel, with which settings (`eval_spec`)."""

from __future__ import annotations

import sys

from turngym.agents.evaluation.evaluate import EVAL_DEFAULTS
from turngym.agents.evaluation.play_panel import TaskEvaluation
from turngym.agents.evaluation.training_evaluation import AGENT_FACING, PanelEvaluation, check_panel
from turngym.agents.play_spec import EvalSpec, Model, OnPanel, part_of
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.presets import find_preset
from turngym.agents.rendering.chat_settings import ChatSettings
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
    spec = eval_spec(panel, config, max_turns=run.max_turns, student=student).spec
    check_panel(panel, make_arguments(spec.play), config.play.env_id, student.env.tool)
    return panel


def panel_evaluation(panel: Panel, env: RunEnv) -> PanelEvaluation:
    """Evaluates the learner on `panel` after a step."""
    run, student = env.info, env.student
    found = eval_spec(panel, env.config, max_turns=run.max_turns, student=student)
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


def eval_spec(
    panel: Panel, config: TrainConfig, *, max_turns: int, student: StudentPlayer | None = None
) -> Resolved[EvalSpec]:
    """The settings of evaluations of a run on `panel`, whose own arguments fix the tasks.

    How the environment speaks to agents (`AGENT_FACING`) is as in training, where neither the panel nor a preset says
    otherwise; the limit of turns is --max-turns where that was given.

    Args:
        panel: on which the student is evaluated.
        config: what is evaluated, and how.
        max_turns: the run's limit of turns.
        student: says how it is spoken to, and the examples in its prompt; None: as it is by default.
    """
    chat = ChatSettings() if student is None else student.settings
    shown = None
    if student is not None and config.examples is not None:
        shown = {**to_table(config.examples), "content": student.examples.identity}
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
        "seed": config.run.seed,
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
    layers.append(Layer(name="student", table={"agent": {**player, "chat": spoken}}))
    return resolve(EvalSpec, [*layers, Layer(name="run", table=given, asked=True)])
