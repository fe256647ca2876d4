"""What a judge did in a step, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import judged as tools
import numpy as np
import pytest

from turngym.core.episode import Episode, Status
from turngym.trainers.batch import pack
from turngym.trainers.judged_episodes import judge_row

Make = Callable[..., Episode]
PIECES = [([1], [2]), ([3], [4, 5]), ([6], [7]), ([8], [9]), ([10], [11])]


def test_votes_scores_and_what_is_left(make_episode: Make) -> None:
    """Five turns: good by two of three votes, bad with a failed vote, unread, never asked about, and bad."""
    a = tools.with_texts(
        make_episode(PIECES),
        ["a", "b", "c", "d", "e"],
        judge_votes=[("v", "v", "v"), ("v", None), ("?",), None, ("v",)],
        judge_cut=[2, 0, 1, 0, 0],
        judge_scores=[(1.0, 1.0, -1.0), (-1.0,), (), None, (-1.0,)],
    )
    failed = replace(a, status=Status.ERROR_ENV)
    kept = replace(a, turns=tuple(replace(turn, excluded="x" if turn.index > 1 else None) for turn in a.turns))
    row = judge_row([a, failed], pack([kept]))
    assert row == {
        "judge/score": -0.25,  # an unread vote is a score of 0
        "judge/positive": 0.25,
        "judge/negative": 0.5,
        "judge/votes": 7,
        "judge/votes_failed": 1,
        "judge/votes_unread": 1,
        "judge/votes_cut": 3,
        "judge/turns_masked": 3,
    }
    assert judge_row([a], None)["judge/turns_masked"] == 5
    # turns of two episodes are counted apart, though their numbers are the same
    assert judge_row([a, a], pack([kept, a]))["judge/turns_masked"] == 3
    assert judge_row([make_episode(PIECES)], None) == {}
    lost = replace(a, turns=(replace(a.turns[0], judge_votes=(None, None, None), judge_scores=None),))
    assert [judge_row([lost], None)[f"judge/{name}"] for name in ("score", "positive", "negative")] == [None] * 3
    neutral = replace(a, turns=(a.turns[0], replace(a.turns[1], judge_scores=(0.0,))))
    found = judge_row([neutral], None)
    assert [found[f"judge/{name}"] for name in ("score", "positive", "negative")] == pytest.approx([0.5, 0.5, 0.0])


def test_hints_and_those_that_no_prompt_has_room_for(make_episode: Make) -> None:
    ids = np.array([1, 2], np.int32)
    a = tools.with_texts(
        make_episode(PIECES),
        ["a", "b", "c", "d", "e"],
        judge_votes=[("v",)] * 5,
        hint=["x", "y", "z", None, "w"],
        hint_prompt_ids=[ids, ids, None, None, ids],
    )
    row = judge_row([a], None)
    assert (row["judge/hints"], row["judge/hints_refused"]) == (3, 1)
