"""What a resumed run must share of its rollout side."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.training.options import RolloutConfig
from turngym.envs.common.rollout_side import StudentRun


def rollout_identity(config: RolloutConfig, run: StudentRun, settings: ChatSettings) -> dict[str, Any]:
    """Flat and JSON-able. Who plays (workers, slots) is not in it: episodes do not depend on it."""
    play = config.play
    found: dict[str, Any] = {"env": play.env, "split": play.split, "env_kwargs": play.env_kwargs}
    found["chat"] = settings.identity
    if play.rollout_dtype is not None:
        found["rollout_dtype"] = play.rollout_dtype
    names = ("expert", "mistakes", "players", "loop_after", "loop_slips", "hints")
    found |= {f"collect.{name}": getattr(play, name) for name in names}
    # lists, as JSON gives them back; names alone, for folders may have moved
    found |= {"collect.noise": list(play.noise), "collect.traces": [path.name for path in play.traces]}
    if run.judge is not None:
        # how often judged episodes are kept to read changes nothing that is learned
        judging = asdict(config.judging)
        # nor when to give it up
        del judging["judge_unread"]
        found["judge"] = {**judging, "judge_every": None, "expert": play.expert}
    return found
