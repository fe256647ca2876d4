"""Two questions about a turn in one vote: asked together, told apart again, failing separately."""

from __future__ import annotations

from typing import Any

import judged as tools
import pytest
from judged import judge_of

from turngym.agents.judges.env_judges import ENV_JUDGES, RuleJudge
from turngym.agents.judges.judges import BothQuestions, WordJudge, make_judge
from turngym.core.protocols import JudgeRequest, Judgment, joined, separate
from turngym.trainers.judged_episodes import judged

REQUEST = JudgeRequest(name="a", kind="both", response="open it", next_state="Error: it is locked")


def test_one_judge_is_asked_once_about_both() -> None:
    calls: list[list[str]] = []

    class Counting(tools.Says):
        def judge(self, requests: Any) -> Any:
            calls.append([request.kind for request in requests])
            return super().judge(requests)

    judge = Counting(lambda request: (f"{request.kind} {request.name}", *([None] if request.kind == "hint" else [])))
    other = JudgeRequest(name="b", kind="both", response="x", next_state="y")
    found = BothQuestions(one=judge).judge([REQUEST, other])
    assert calls == [["score", "score", "hint", "hint"]]
    assert [judgment.votes for judgment in found] == [
        (joined("score a", "hint a"), None),
        (joined("score b", "hint b"), None),
    ]
    assert found[0].error == "it is asleep"


def test_answers_come_apart_as_they_were_put_together() -> None:
    for pair in [("a", "b"), (None, "b"), ("a", None), ('{"score": 1}', "x")]:
        vote = joined(*pair)
        assert vote is not None
        assert separate(vote) == pair
    assert joined(None, None) is None
    for text in ("", "plain", "[1]", '{"score": 1}', "{"):
        assert separate(text) == (None, None)


def test_a_turn_gets_scores_from_one_half_and_the_hint_from_the_other(make_episode: Any) -> None:
    turn = make_episode([([1], [2])]).turns[0]
    long = "[HINT_START]look before you open it[HINT_END] \\boxed{1}"
    # a score in the hint's half is no score, nor the other way round
    votes = (joined("\\boxed{-1}", long), joined("\\boxed{-1} [HINT_START]not a hint at all[HINT_END]", "\\boxed{-1}"))
    found = judged(turn, "both", Judgment(votes=votes, cut=1))
    assert (found.judge_scores, found.hint) == ((-1.0, -1.0), "look before you open it")
    assert (found.judge_votes, found.judge_cut) == (votes, 1)
    unscored = judged(turn, "both", Judgment(votes=(joined(None, long), None)))
    assert (unscored.judge_scores, unscored.hint) == (None, "look before you open it")
    unread = judged(turn, "both", Judgment(votes=(joined("no box", None),)))
    assert (unread.judge_scores, unread.hint) == ((), None)
    failed = judged(turn, "both", Judgment(votes=(None,)))
    assert (failed.judge_votes, failed.judge_scores) == ((None,), None)


def test_words_answer_both() -> None:
    vote = BothQuestions(one=WordJudge()).judge([REQUEST])[0].votes[0]
    assert vote is not None
    score, hint = separate(vote)
    assert score is not None
    assert hint is not None
    assert score.endswith("\\boxed{-1}")
    assert "leads to this: Error: it is locked[HINT_END]" in hint


@pytest.mark.parametrize("name", ["rules", "expert"])
def test_the_judge_of_a_name_is_asked_twice(name: str) -> None:
    judge: Any = make_judge(judge_of(name), "both", ENV_JUDGES, make_env=lambda: None)
    assert isinstance(judge, BothQuestions)
    assert isinstance(judge.one, RuleJudge) == (name == "rules")
