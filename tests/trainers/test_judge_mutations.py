"""Break each rule of the judge once and see a literal check fail."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import judged as tools
import numpy as np
import pytest

from turngym.agents.judges.judges import RuleJudge
from turngym.trainers import judged as episodes
from turngym.trainers import judged as turn_filter
from turngym.trainers import judged as votes
from turngym.trainers.algorithm import Scorers
from turngym.trainers.algorithms import judge_targets as targets
from turngym.trainers.batch import pack

mutations = importlib.import_module("test_mutations")
hints = importlib.import_module("test_judge_targets")
build = importlib.import_module("test_judge_rules").play
PIECES = [([1, 2], [10, 11]), ([3], [12]), ([4], [13, 14, 15])]


def check_votes(make_episode: Any) -> None:
    assert votes.read_score(r"\boxed{1} \boxed{-1}") == -1.0
    assert votes.majority([1, 1, 0]) == 1
    assert votes.majority([1, -1]) == 0
    assert votes.majority([]) == 0
    long, longer = votes.HintVote(score=1.0, hint="a" * 11), votes.HintVote(score=-1.0, hint="b" * 12)
    assert votes.choose_hint([long, longer]) == "a" * 11
    assert votes.choose_hint([votes.HintVote(score=1.0, hint="c" * 10)]) is None
    assert votes.read_hint("[HINT_START]a[HINT_END][HINT_START] b [HINT_END]").hint == "b"


def check_masks(make_episode: Any) -> None:
    three = tools.with_texts(make_episode(PIECES), ["a", "b", "c"])
    given = [((1.0,), ("v",)), ((0.0,), ("v",)), (None, None)]
    turns = [replace(t, judge_scores=s, judge_votes=v) for t, (s, v) in zip(three.turns, given, strict=True)]
    episode = replace(three, turns=tuple(turns))
    assert turn_filter.ScoredTurns().reasons(episode) == {2: "no next state"}
    assert turn_filter.ScoredTurns(mask_neutral=True).reasons(episode) == {1: "judged neutral", 2: "no next state"}
    turns[0] = replace(turns[0], judge_scores=None)
    failed = replace(three, turns=tuple(turns))
    assert turn_filter.ScoredTurns().reasons(failed) == {0: "the judge failed", 2: "no next state"}
    found = {1: "judged neutral", 2: "no next state"}
    assert turn_filter.ScoredTurns(exclude="openclaw").reasons(failed) == found
    neutral = replace(three, turns=(replace(three.turns[0], judge_scores=(0.0,), judge_votes=("v",)),))
    assert turn_filter.ScoredTurns(mask_neutral=True).reasons(neutral) == {0: "judged neutral"}
    assert turn_filter.ScoredTurns(exclude="openclaw").reasons(neutral) == {}
    assert turn_filter.ScoredTurns().reasons(make_episode([([1], [2])])) == {}
    assert pack(turn_filter.ScoredTurns()([episode])).turn_N.tolist() == [0, 0, 1]


def check_scores(make_episode: Any) -> None:
    three = make_episode(PIECES)
    given = [(1.0, 1.0, 1.0), (-1.0,), None]
    turns = [replace(t, judge_scores=s) for t, s in zip(three.turns, given, strict=True)]
    played = [replace(three, turns=tuple(turns))]
    advantage_N = targets.TurnScore()(pack(played), played, Scorers(student=hints.Table())).advantage_N
    assert advantage_N.tolist() == [1.0, 1.0, -1.0, 0.0, 0.0, 0.0]


def check_hints(make_episode: Any) -> None:
    one = make_episode([([5, 6], [20, 21])])
    turn = replace(one.turns[0], hint_prompt_ids=np.array([5, 6, 7], np.int32))
    played, teacher = [replace(one, turns=(turn,))], hints.Table(value=0.5)
    scorers = Scorers(student=hints.Table(), teacher=teacher, reference=hints.Table(value=9.0))
    advantage_N = targets.HintAdvantage()(pack(played), played, scorers).advantage_N
    assert teacher.asked == [([5, 6, 7, 20, 21], [3, 4])]
    assert advantage_N.tolist() == pytest.approx([0.49, 0.49], abs=1e-5)


def check_rejection(make_episode: Any) -> None:
    batch, three = pack([make_episode(PIECES)]), [make_episode(PIECES)]  # responses 10 11 | 12 | 13 14 15
    logp = np.log(np.array([0.01, 0.9, 0.01, 0.9, 0.01, 0.9]))
    assert targets.up_to_rejection(batch, three, logp, 0.05).tolist() == [True, False, True, True, True, False]
    assert targets.up_to_rejection(batch, three, logp + 9, 0.05).all()


def check_next(make_episode: Any) -> None:
    three = tools.with_texts(make_episode(PIECES), ["a", "b", "c"], "end")
    assert [episodes.next_state(three, turn) for turn in three.turns] == ["b", "c", "end"]
    judged = episodes.judged(three.turns[0], "score", episodes.Judgment(votes=(None, r"\boxed{1}")))
    assert judged.judge_scores == (1.0,)
    assert episodes.judged(three.turns[0], "score", episodes.Judgment(votes=(None,))).judge_scores is None


def check_rules(make_episode: Any) -> None:
    rules = RuleJudge(outcome=False)
    episode = build(make_episode, 4, progress=[0.0, 0.5, 0.25, 0.25], reward=[0.0, 0.0, 0.0, 1.0])
    assert [rules.score(episode, turn)[0] for turn in episode.turns] == [0, 1, -1, 1]


MUTANTS: list[tuple[Callable[..., Any], str, str, Callable[[Any], None]]] = [
    (votes._last_box, "boxes[-1]", "boxes[0]", check_votes),
    (votes.majority, "ranked[0][1] == ranked[1][1]", "False", check_votes),
    (votes.majority, "not ranked or", "bool(ranked) and", check_votes),
    (votes.choose_hint, "> MORE_THAN", ">= 0", check_votes),
    (votes.choose_hint, "vote.score == 1.0 and ", "", check_votes),
    (votes.read_hint, "blocks[-1]", "blocks[0]", check_votes),
    (turn_filter.ScoredTurns._reason, "None if alone else NO_NEXT", "NO_NEXT", check_masks),
    (turn_filter.ScoredTurns._reason, "None if alone else NO_NEXT", "None", check_masks),
    (turn_filter.ScoredTurns._reason, "return FAILED", "return None", check_masks),
    (turn_filter.ScoredTurns._reason, "self.mask_neutral or ", "", check_masks),
    (turn_filter.ScoredTurns.reasons, "if published:", "if False:", check_masks),
    (turn_filter.ScoredTurns.reasons, "!= first", "== first", check_masks),
    (turn_filter.without, "turn.index in reasons", "False", check_masks),
    (targets.TurnScore.__call__, "majority(turn.judge_scores)", "sum(turn.judge_scores)", check_scores),
    (targets.TurnScore.__call__, "0.0 if turn", "np.nan if turn", check_scores),
    (targets.HintAdvantage.__call__, '"student"), teacher_logp_N', '"student") * 0, teacher_logp_N', check_hints),
    (targets.hint_teacher, "scorers.teacher is None", "scorers.reference is not None", check_hints),
    (targets.score_turns, "len(prompt), len(prompt) +", "len(prompt) + 1, len(prompt) + 1 +", check_hints),
    (targets.score_turns, "prompt = turn.hint_prompt_ids", "prompt = episode.prompt_ids(turn)", check_hints),
    (targets.up_to_rejection, "[0]) + 1", "[0])", check_rejection),
    (targets.up_to_rejection, "[0]) + 1", "[0]) + 2", check_rejection),
    (targets.up_to_rejection, " < np.log", " > np.log", check_rejection),
    (targets.up_to_rejection, "np.log(below)", "below", check_rejection),
    (targets.up_to_rejection, "tokens.stop", "batch.tokens", check_rejection),
    (episodes.next_state, "turn.index + 1", "turn.index", check_next),
    (episodes.next_state, "or None", "and None", check_next),
    (episodes.judged, "if vote is not None", "", check_next),
    (episodes.judged, "if not written", "if False", check_next),
    (RuleJudge.score, "turn.progress > before", "turn.progress < before", check_rules),
    (RuleJudge.score, "turn.reward > 0", "turn.reward > 1", check_rules),
]


def label(mutant: tuple[Callable[..., Any], str, str, Any]) -> str:
    function, old, new, _ = mutant
    return f"{function.__qualname__}: {old} -> {new or 'nothing'}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=label)
def test_a_broken_rule_fails_its_check(
    mutant: tuple[Any, str, str, Callable[[Any], None]], make_episode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, old, new, check = mutant
    check(make_episode)
    function = inspect.unwrap(function)
    monkeypatch.setattr(function, "__code__", mutations.mutated_code(function, old, new))
    with pytest.raises((AssertionError, ValueError, IndexError, TypeError, AttributeError, RuntimeError)):
        check(make_episode)
