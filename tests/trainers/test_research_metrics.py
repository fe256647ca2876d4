"""Numbers for studies, against a batch whose means and spreads can be done in the head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from turngym.core.episode import Episode, Status
from turngym.core.task import Verdict
from turngym.trainers.algorithm import Targets
from turngym.trainers.batch import pack
from turngym.trainers.step_metrics import played_row, research_row

Build = Callable[..., Episode]


@pytest.fixture
def episodes(make_episode: Build) -> list[Episode]:
    """Responses of 1 and 3 tokens (return 1), of 2 tokens (return 0), and one that an error ended."""
    return [
        make_episode([([1], [2]), ([3], [4, 5, 6])], episode_return=1.0, success=True),
        make_episode([([1], [7, 8])], number=1, episode_return=0.0),
        make_episode([([1], [7, 8, 9, 9])], number=2, episode_return=5.0, status=Status.ERROR_ENV),
    ]


def test_returns_and_lengths_are_those_of_what_was_played(episodes: list[Episode]) -> None:
    row = played_row([replace(episodes[0], score=0.75), replace(episodes[1], score=0.5), episodes[2]])
    assert (row["return/mean"], row["return/std"]) == (0.5, 0.5)
    assert (row["score/mean"], row["score/std"]) == (0.625, 0.125)
    assert row["response_tokens"] == pytest.approx(2.0)  # 1, 3 and 2
    assert played_row(episodes[2:]) == dict.fromkeys(row)


def test_advantages_rewards_and_the_teachers_opinion(episodes: list[Episode]) -> None:
    batch = pack(episodes)
    assert batch.label_N.tolist() == [2, 4, 5, 6, 7, 8]
    advantage_N = np.array([1, 1, 1, 1, -1, -1], np.float32)
    ids_NK = np.array([[2, 9], [9, 4], [9, 3], [9, 3], [9, 3], [9, 3]])
    logp_NK = np.log(np.array([[0.5, 0.1], [0.5, 0.25]] + [[0.9, 0.1]] * 4, np.float32))
    found = research_row(
        episodes,
        batch,
        Targets(advantage_N=advantage_N, reward=np.array([2.0, 4.0]), topk_ids_NK=ids_NK, topk_logp_NK=logp_NK),
    )
    assert found["advantage/mean"] == pytest.approx(2 / 6)
    assert found["advantage/std"] == pytest.approx(np.sqrt(1 - 1 / 9))
    assert (found["reward/mean"], found["reward/std"]) == (3.0, 1.0)
    assert found["teacher_logp"] == pytest.approx((np.log(0.5) + np.log(0.25)) / 2)
    assert found["teacher_logp_known"] == pytest.approx(2 / 6)
    label_N = np.full(6, -2.0, np.float32)
    exact = research_row(episodes, batch, Targets(label_logp_N=label_N, topk_ids_NK=ids_NK, topk_logp_NK=logp_NK))
    assert (exact["teacher_logp"], exact["teacher_logp_known"]) == (-2.0, 1.0)
    assert "advantage/mean" not in exact
    assert "teacher_logp" not in research_row(episodes, batch, Targets())


def test_answers_that_were_cut_or_could_not_be_read(episodes: list[Episode]) -> None:
    first, second = episodes[0].turns
    turns = (replace(first, verdict=Verdict.MALFORMED), replace(second, finish="length"))
    row = played_row([replace(episodes[0], turns=turns), episodes[1], episodes[2]])
    assert (row["malformed"], row["answers_cut"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    both = replace(second, verdict=Verdict.MALFORMED)
    assert played_row([replace(episodes[0], turns=(turns[0], both)), episodes[1]])["malformed"] == pytest.approx(2 / 3)
    assert played_row(episodes)["answers_cut"] == 0.0


def test_what_the_environment_paid_stands_beside_the_reward(episodes: list[Episode]) -> None:
    paid = [
        replace(one, meta={"environment_return": value}) for one, value in zip(episodes, (3.0, 1.0, 9.0), strict=True)
    ]
    row = played_row(paid)
    assert (row["environment_return/mean"], row["environment_return/std"]) == (2.0, 1.0)
    assert row["return/mean"] == 0.5
    assert "environment_return/mean" not in played_row(episodes)


def test_what_became_of_the_demonstrations(episodes: list[Episode]) -> None:
    kinds = ["used", "used", "used", "missing", "failed", "unsolved", "unsolved", "low_reward", "too_long"]
    noted = [replace(episodes[0], meta={"demonstration": kind}) for kind in kinds]
    noted[0] = replace(episodes[0], meta={"demonstration": "used", "demonstration_exact": True})
    noted[1] = replace(episodes[0], meta={"demonstration": "used", "demonstration_exact": False})
    row = played_row([*noted, episodes[1]])
    names = ("used", "exact", "missing", "failed", "unsolved", "low_reward", "too_long")
    assert [row[f"demonstrations/{name}"] for name in names] == [3, 1, 1, 1, 2, 1, 1]
    assert not any(name.startswith("demonstrations/") for name in played_row(episodes))
