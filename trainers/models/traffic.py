"""Bytes that move in a training step of several processes: weights, gradients, the teacher's top K, episodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turngym.trainers.models.capacity import Workload
from turngym.trainers.models.shapes import ModelShape

EPISODE_TOKEN = 12
"""Bytes of an episode's token as processes exchange it: its id (4), if sampled its log-probability (4), its text."""
TOP_K_ENTRY = 8
"""An id and a log-probability, 4 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one GPU receives in a step; 0 with a single GPU."""

    to_play: float
    """The student's float32 weights, gathered once before it plays; with `--staleness` for the snapshot of the copy."""
    update: float
    """Weights for every forward and backward pass, and gradients back."""
    teacher: float
    """A divided teacher's weights, gathered once before it scores."""
    top_k: float
    """The teacher's K most likely ids of every sampled token, from all processes to all."""
    episodes: float
    """Of the whole batch, from all processes to all."""
    to_server: float
    """To each engine server that plays: the weights, in the precision in which it holds them."""

    @property
    def all(self) -> float:
        """Between the training processes."""
        return self.to_play + self.update + self.teacher + self.top_k + self.episodes


def traffic(student: ModelShape, teacher: ModelShape | None, gpus: int, work: Workload, *, top_k: int = 50) -> Traffic:
    """What one of `gpus` training processes receives in a step of `work`, and what each engine server does.

    With N processes each holds 1/N of the P parameters and receives the rest: 4 P (1 - 1/N) bytes a gathering. A
    micro-batch gathers twice (forward, backward) and reduces its gradient once, which moves as much again.
    """
    missing = 1 - 1 / gpus
    weights = 4.0 * student.parameters * missing
    passes = math.ceil(math.ceil(work.episodes / gpus) * work.length / max(work.micro_tokens, work.length))
    sampled = work.episodes * work.turns * work.response
    own_teacher = 0.0
    if teacher is not None and work.shard_teacher:
        own_teacher = (2.0 if work.teacher_dtype == "bfloat16" else 4.0) * teacher.parameters * missing
    return Traffic(
        to_play=weights,
        update=3 * passes * weights,
        teacher=own_teacher,
        top_k=0.0 if teacher is None else TOP_K_ENTRY * top_k * sampled * missing,
        episodes=EPISODE_TOKEN * work.episodes * work.length * missing,
        to_server=(2.0 if work.rollout_dtype == "bfloat16" else 4.0) * student.parameters,
    )
