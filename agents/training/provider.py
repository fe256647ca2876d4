"""`ROLLOUTS` is what `turngym train` and `turngym.trainers.train` find here by name; they import nothing of agents."""

from __future__ import annotations

from turngym.agents.presets.published import find_preset
from turngym.agents.training.options import RolloutConfig
from turngym.agents.training.student_rollouts import StudentRollouts
from turngym.envs.common.rollout_side import RolloutProvider, StudentRun


def open_rollouts(config: RolloutConfig, run: StudentRun) -> StudentRollouts:
    """The rollout side of `run`. Raises TurngymError for an environment, panel or server that does not fit."""
    return StudentRollouts(config, run)


def preset_turns(config: RolloutConfig) -> int | None:
    """The limit of turns that the preset brings along; None without a preset."""
    preset = find_preset(config.play.preset, config.play.env)
    return None if preset is None else preset.max_turns


ROLLOUTS = RolloutProvider(
    config=RolloutConfig,
    open=open_rollouts,
    max_turns=preset_turns,
    has_teacher=lambda config: bool(config.servers.teacher_server),
    has_traces=lambda config: bool(config.play.traces),
    env_id=lambda config: str(config.play.env),
)
"""What trainers find here by name."""
