"""How a student in training is evaluated: which panel, made with which arguments, played at which temperature."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from turngym.agents.agent_options import TEMPERATURE
from turngym.agents.evaluation.evaluation_setup import SAMPLES
from turngym.agents.evaluation.original import departures
from turngym.agents.evaluation.play_panel import TaskEvaluation
from turngym.agents.evaluation.training_evaluation import AGENT_FACING, PanelEvaluation, check_panel, eval_note
from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.presets import Preset, find_preset
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.envs.panels import Panel, assert_disjoint, load_panel
from turngym.trainers.student_player import RunEnv, RunInfo, StudentPlayer
from turngym.trainers.train_config import RolloutConfig


def run_panel(config: RolloutConfig, run: RunInfo, student: StudentPlayer) -> Panel | None:
    """The panel that `--panel` names, whose tasks must not be trained on; None: the run is not evaluated.

    Raises TurngymError for a panel that the student cannot play, or whose tasks are among its examples.
    """
    if config.play.panel is None:
        return None
    panel = load_panel(config.play.panel)
    assert_disjoint(student.examples.tasks, panel.tasks)
    made = eval_make(panel, config.play.preset, student.env_kwargs, run)
    check_panel(panel, made, config.play.env_id, student.env.tool)
    return panel


def panel_evaluation(panel: Panel, env: RunEnv) -> PanelEvaluation:
    """Evaluates the learner on `panel` after a step, by the preset's rules where the settings say nothing else."""
    config, run, student = env.config, env.info, env.student
    play = config.play
    kwargs = eval_make(panel, play.preset, student.env_kwargs, run)
    chat, preset = student.learner.settings, find_preset(play.preset, panel.env_id)
    own = (None, None) if preset is None else (preset.temperature, preset.samples)
    heats, counts = (play.eval_temperature, own[0], TEMPERATURE), (play.eval_samples, own[1], SAMPLES)
    temperature = next(heat for heat in heats if heat is not None)
    samples = next(count for count in counts if count is not None)
    scoring = probe(panel.env_id, {**kwargs, **student.data}).scoring
    if why := scoring.get("approximate"):
        print(f"evaluations: scores of {panel.full_name} are approximate ({why})", file=sys.stderr)
    evaluation = TaskEvaluation(
        panel,
        env_maker(panel.env_id, **{**kwargs, "channel": student.settings.channel, **student.data}),
        student.learner.agent(temperature),
        samples=samples,
        limit=play.eval_limit,
        temperature=temperature,
        seed=run.seed,
        slots=play.slots,
        system=chat.system,
        # the channel as `evaluate` records it: without it nobody could play the responses again
        settings={"channel": chat.channel, **eval_note(panel, play.preset, kwargs), **scoring},
        about=departures(
            panel.env_id,
            panel,
            preset,
            kwargs,
            played=_spoken_to(chat, config, preset),
            channel=chat.channel,
            temperature=temperature,
            samples=samples,
            limit=play.eval_limit,
            scoring=scoring,
        ),
        play=student.play,
    )
    return PanelEvaluation(evaluation, run.out / "eval")


def _spoken_to(chat: ChatSettings, config: RolloutConfig, preset: Preset | None) -> dict[str, Any]:
    """How the student is spoken to, as fields of `AgentOptions`; default limits are left out."""
    thinking = {None: "auto", True: "on", False: "off"}[chat.thinking]
    told = {"system": chat.system, "observation_role": chat.observation_role, "memory": chat.memory}
    prompts = config.chat.prompts or (None if preset is None else preset.prompts)
    limits = {"max_new_tokens": chat.max_new_tokens, "max_context": chat.max_context}
    short = {name: value for name, value in limits.items() if value != getattr(ChatSettings(), name)}
    return {**told, "thinking": thinking, "prompts": prompts, "examples": config.few_shots.examples, **short}


def eval_make(panel: Panel, preset: str | None, given: Mapping[str, Any], run: RunInfo) -> dict[str, Any]:
    """Returns the arguments of `gym.make` for evaluations of `run` on `panel`.

    The limit of turns is --max-turns where that was given, else the preset's, the panel's, the run's.

    Args:
        panel: its own arguments fix the tasks.
        preset: name of a published set-up; None: none.
        given: arguments for training; those that say how an agent is spoken to (`AGENT_FACING`) hold here, too.
        run: its limit of turns, and whether that was asked for.
    """
    found = find_preset(preset, panel.env_id)
    shared = {name: value for name, value in given.items() if name in AGENT_FACING}
    if found is None:
        kwargs = {"max_turns": run.max_turns, **shared, **panel.make_kwargs}
    else:
        kwargs = {**panel.make_kwargs, **found.make(shared)}
    if run.explicit_turns:
        kwargs["max_turns"] = run.max_turns
    return kwargs
