"""What `--workers auto` is told of a training run."""

from __future__ import annotations

from turngym.agents.executor.automatic import Playing
from turngym.agents.training.options import RolloutConfig
from turngym.envs.common.rollout_side import StudentRun


def played_here(config: RolloutConfig, run: StudentRun) -> Playing:
    """The episodes of the whole run, if its student plays them, and in this process."""
    elsewhere = config.servers.policy_server or config.play.traces or run.collects != "student"
    model = None if elsewhere else run.learner.model
    return Playing(episodes=run.episodes, model=model, ahead=run.actor is not None)
