"""Rollouts in which the teacher chooses a share of the student's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.mixed_policy import MixedPolicy
from turngym.agents.rollout import PlayJobs, rollout
from turngym.envs.core import TurngymError
from turngym.scripts.train_wiring import Player
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.models.scorer import LocalScorer


def mixed_player(
    player: Player, algorithm: Algorithm, teacher: Any, tokenizer: Any, *, batch: int, play: PlayJobs
) -> Player:
    """Who plays the episodes to train on: `player` itself, or it and the teacher mixed where `algorithm` asks for it.

    Raises TurngymError for a teacher on a server, or rollouts in other processes.
    """
    if not algorithm.teacher_mix:
        return player
    if not isinstance(teacher, LocalScorer) or play is not rollout:
        raise TurngymError(
            f"teacher_mix is {algorithm.teacher_mix}: teacher and student take turns within an answer, which needs "
            "--teacher FOLDER and rollouts in this process (no --teacher-server, no --workers)"
        )
    limit = player.engine.max_length
    theirs = LocalEngine(teacher.model, tokenizer=tokenizer, max_length=limit, max_batch=batch)
    return replace(player, engine=MixedPolicy(player.engine, theirs, algorithm.teacher_mix, tokenizer=tokenizer))
