"""Bytes that move in a step: by hand, and an episode's against what processes really exchange."""

from __future__ import annotations

import pickle

import pytest

from turngym.agents import load_world, play_episodes
from turngym.trainers.model_shapes import SHAPES
from turngym.trainers.training_costs import EPISODE_TOKEN, StepWorkload, traffic

WORK = StepWorkload(episodes=64, turns=30, observation=150, response=100, micro_tokens=8192)


def test_one_process_receives_nothing() -> None:
    found = traffic(SHAPES["1.7B"], SHAPES["8B"], 1, WORK)
    assert found.all == 0.0
    assert found.to_server == 4 * SHAPES["1.7B"].parameters


def test_by_hand_on_eight() -> None:
    """8 episodes of 7,500 tokens a process: 8 passes of one episode (7.3 micro-batches of 8,192 tokens)."""
    parameters, work = SHAPES["1.7B"].parameters, StepWorkload(shard_teacher=True, teacher_dtype="bfloat16")
    found = traffic(SHAPES["1.7B"], SHAPES["8B"], 8, work, top_k=20)
    assert found.to_play == pytest.approx(4 * parameters * 7 / 8)
    assert found.update == pytest.approx(3 * 8 * found.to_play)
    assert found.teacher == pytest.approx(2 * SHAPES["8B"].parameters * 7 / 8)
    assert found.top_k == pytest.approx(64 * 3000 * 20 * 8 * 7 / 8)
    assert found.episodes == pytest.approx(64 * 7500 * 12 * 7 / 8)
    assert found.all == found.to_play + found.update + found.teacher + found.top_k + found.episodes
    assert traffic(SHAPES["1.7B"], None, 8, WORK).top_k == 0.0
    assert traffic(SHAPES["1.7B"], SHAPES["8B"], 8, WORK).teacher == 0.0
    assert traffic(SHAPES["1.7B"], None, 8, StepWorkload(rollout_dtype="bfloat16")).to_server == 2 * parameters


def test_an_episode_takes_about_so_many_bytes_a_token() -> None:
    student = load_world("alfworld").checkpoint("student")
    kwargs = {"split": "generated", "config": "small"}
    played = play_episodes(agent=f"model:{student}", tasks=4, env_kwargs=kwargs, progress=False, threads=1)
    tokens = sum(len(segment) for episode in played.episodes for segment in episode.segments)
    assert len(pickle.dumps(list(played.episodes))) / tokens == pytest.approx(EPISODE_TOKEN, rel=0.3)
