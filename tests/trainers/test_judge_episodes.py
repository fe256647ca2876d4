"""Requests from episodes, votes written back, and which turns stay in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import judged as tools
import numpy as np
import pytest

from turngym.core.episode import Episode, Status, next_state
from turngym.core.protocols import Judgment
from turngym.core.rollout_request import RolloutRequest
from turngym.core.trace import episode_from_json, episode_to_json
from turngym.trainers.batch import pack
from turngym.trainers.judged_episodes import (
    HintedTurns,
    JudgedSource,
    JudgeError,
    ScoredTurns,
    judge_episodes,
    judge_row,
    requests,
)
from turngym.trainers.targets import TargetError

Make = Callable[..., Episode]
PIECES = [([1, 2], [10, 11]), ([3], [12]), ([4], [13, 14, 15])]


@pytest.fixture
def three(make_episode: Make) -> Episode:
    """Three turns of 2, 1 and 3 tokens, and something to see after the last."""
    return tools.with_texts(make_episode(PIECES), ["a", "b", "c"], "end")


def scored(episode: Episode, scores: Sequence[tuple[float, ...] | None]) -> Episode:
    """Turns with these readable votes; None: every vote failed."""
    turns = [
        replace(turn, judge_scores=score, judge_votes=(None,) if score is None else ("v",) * max(len(score), 1))
        for turn, score in zip(episode.turns, scores, strict=True)
    ]
    return replace(episode, turns=tuple(turns))


def test_the_next_observation_is_the_next_state(three: Episode) -> None:
    assert [next_state(three, turn) for turn in three.turns] == ["b", "c", "end"]
    asked = requests(three, "score")
    assert [(r.before, r.response, r.next_state, r.next_role) for r in asked] == [
        ("a", "say 0", "b", "user"),
        ("b", "say 1", "c", "user"),
        ("c", "say 2", "end", "user"),
    ]
    assert asked[2].name == "task/0 seed 0 sample 0, turn 2"
    assert [r.turn for r in requests(replace(three, final_observation=""), "score")] == [0, 1]
    known = replace(three, meta={"next_roles": ["tool", "user"]})
    assert [r.next_role for r in requests(known, "score", "system")] == ["tool", "user", "system"]


def test_nobody_asks_about_others_turns_failed_episodes_or_again(three: Episode, make_episode: Make) -> None:
    assert requests(replace(three, status=Status.ERROR_ENV), "score") == []
    mixed = make_episode(PIECES, origins=["demonstration", "noise", "policy"])
    mixed = tools.with_texts(mixed, ["a", "b", "c"], "end", excluded=[None, None, None])
    assert [r.turn for r in requests(mixed, "score")] == [2]
    assert [r.turn for r in requests(scored(three, [(1.0,), None, (0.0,)]), "score")] == []


def test_votes_are_kept_as_written_and_failures_are_not_scores(three: Episode) -> None:
    votes = [tools.boxed(1, 1, -1), (None, "no box", "\\boxed{-1}"), (None, None, None)]
    [found], error = judge_episodes([three], tools.Says(lambda request: votes[request.turn]), "score")
    assert [turn.judge_votes for turn in found.turns] == votes
    assert [turn.judge_scores for turn in found.turns] == [(1.0, 1.0, -1.0), (-1.0,), None]
    assert error == "it is asleep"
    back = episode_from_json(episode_to_json(found))
    assert [(turn.judge_votes, turn.judge_scores) for turn in back.turns] == [
        (turn.judge_votes, turn.judge_scores) for turn in found.turns
    ]


def test_a_judge_hears_who_speaks_next_and_a_good_one_has_no_error(three: Episode) -> None:
    judge = tools.Says(lambda request: ("\\boxed{1}",))
    assert judge_episodes([three], judge, "score", "tool")[1] == ""
    assert [(request.kind, request.next_role) for request in judge.asked] == [("score", "tool")] * 3


def test_a_judge_must_answer_every_request(three: Episode) -> None:
    class Short:
        def judge(self, asked: Any) -> list[Judgment]:
            return [Judgment(votes=("\\boxed{1}",))]

    with pytest.raises(JudgeError, match="answered 1 of 3"):
        judge_episodes([three], Short(), "score")


def test_hints_are_chosen_and_scores_are_those_of_hint_judges(three: Episode) -> None:
    block = "[HINT_START]look into the fridge[HINT_END]"
    votes = [(f"{block}\\boxed{{1}}", "\\boxed{-1}"), (f"{block}\\boxed{{-1}}",) * 2, ("\\boxed{0}", None)]
    [found], _ = judge_episodes([three], tools.Says(lambda request: votes[request.turn]), "hint")
    assert [turn.hint for turn in found.turns] == ["look into the fridge", None, None]
    assert [turn.judge_scores for turn in found.turns] == [(1.0, -1.0), (-1.0, -1.0), ()]


SCORES = {
    "all judged": ([(1.0,), (-1.0,), (0.0,)], "end", [], [2], [2]),
    "unjudged end": ([(1.0,), (0.0,), None], "", [2], [1, 2], [1, 2]),
    "only neutral": ([(0.0,), (0.0,), None], "", [2], [0, 1, 2], [1, 2]),
    # the published code sees turns one by one: the first one counts, for nothing has yet
    "tie is neutral": ([(1.0, -1.0), (1.0,), (1.0,)], "end", [], [0], []),
    "rubbish is neutral": ([(), (1.0,), (1.0,)], "end", [], [0], []),
    "neutral later": ([(0.0,), (1.0,), (0.0,)], "end", [], [0, 2], [2]),
    "a failed judge": ([None, (1.0,), (1.0,)], "end", [0], [0], []),
    "nothing but failures": ([None, None, None], "end", [0, 1, 2], [0, 1, 2], [1, 2]),
    "neutral after a failure": ([None, (0.0,), (0.0,)], "end", [0], [0, 1, 2], [1, 2]),
}


@pytest.mark.parametrize("case", SCORES)
def test_masks_by_hand(three: Episode, case: str) -> None:
    scores, final, plain, neutral, openclaw = SCORES[case]
    episode = replace(scored(three, scores), final_observation=final)
    if not final:
        turns = (*episode.turns[:2], replace(episode.turns[2], judge_votes=None))
        episode = replace(episode, turns=turns)
    for rule, masked in (
        (ScoredTurns(), plain),
        (ScoredTurns(mask_neutral=True), neutral),
        (ScoredTurns(exclude="openclaw"), openclaw),
    ):
        assert sorted(rule.reasons(episode)) == masked
        kept = rule([episode])
        assert len(kept) == (len(masked) < 3)
        for found in kept:
            assert [turn.index for turn in found.turns if turn.excluded] == masked


def test_the_only_turn_of_an_episode_is_trained_on_without_a_next_state(make_episode: Make) -> None:
    alone = make_episode([([1, 2], [10, 11])])
    for rule in (ScoredTurns(), ScoredTurns(mask_neutral=True)):
        assert rule.reasons(alone) == {}
    # as its code has it, though its text makes the exception
    assert ScoredTurns(exclude="openclaw").reasons(alone) == {0: "no next state"}
    failed = scored(replace(alone, final_observation="end"), [None])
    assert ScoredTurns().reasons(failed) == {0: "the judge failed"}
    others = make_episode(PIECES, origins=["demonstration", "demonstration", "policy"])
    assert ScoredTurns().reasons(tools.with_texts(others, ["a", "b", "c"])) == {}


def test_a_turn_that_no_judge_saw_is_an_error(three: Episode) -> None:
    with pytest.raises(TargetError, match=r"task/0 seed 0 sample 0, turn 0: never judged"):
        ScoredTurns()([three])


def test_masked_turns_stay_inputs_and_the_rest_counts_whole(three: Episode) -> None:
    episode = scored(three, [(1.0,), None, (-1.0,)])
    [kept] = ScoredTurns()([episode])
    batch = pack([kept])
    assert batch.label_N.tolist() == [10, 11, 13, 14, 15]
    assert batch.turn_N.tolist() == [0, 0, 2, 2, 2]
    assert batch.input_ids_M.tolist() == [1, 2, 10, 11, 3, 12, 4, 13, 14, 15]


def test_hints_without_a_prompt_are_dropped(three: Episode) -> None:
    ids = np.array([1, 2, 9], np.int32)
    turns = (
        replace(three.turns[0], judge_votes=("v",), hint="open it", hint_prompt_ids=ids),
        replace(three.turns[1], judge_votes=("v",), hint="<|im_end|>"),
        replace(three.turns[2], judge_votes=(None,)),
    )
    episode = replace(three, turns=turns)
    assert HintedTurns().reasons(episode) == {1: "no hint", 2: "the judge failed"}
    assert HintedTurns().reasons(three) == dict.fromkeys(range(3), "no next state")
    assert HintedTurns()([three]) == []
    row = judge_row([episode], pack(HintedTurns()([episode])))
    assert (row["judge/hints"], row["judge/hints_refused"], row["judge/turns_masked"]) == (1, 1, 2)


REQUEST = RolloutRequest(step=3, episodes=1, max_turns=3)


def test_collected_episodes_come_judged_and_are_recorded(three: Episode) -> None:
    kept: list[tuple[int, int]] = []
    judge = tools.Says(lambda request: tools.boxed(1))
    source = JudgedSource(
        source=lambda request: [three],
        judge=judge,
        record=lambda request, found: kept.append((request.step, len(found))),
    )
    [found] = source(REQUEST)
    assert [turn.judge_scores for turn in found.turns] == [(1.0,)] * 3
    assert kept == [(3, 1)]
    source.source = lambda request: [found]
    source(REQUEST)
    assert len(judge.asked) == 3


def test_a_judge_that_never_worked_is_a_mistake_and_one_that_did_may_fail(three: Episode) -> None:
    awake: list[bool] = [False]
    judge = tools.Says(lambda request: tools.boxed(1) if awake[0] else (None,))
    source = JudgedSource(source=lambda request: [three], judge=judge)
    with pytest.raises(JudgeError, match=r"step 3: all 3 votes .* it is asleep"):
        source(REQUEST)
    awake[0] = True
    source(REQUEST)
    awake[0] = False
    [found] = source(REQUEST)
    assert [turn.judge_scores for turn in found.turns] == [None] * 3
