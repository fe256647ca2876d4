"""What is written down of turns that were trained on or left out, what users' words become, and the report on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import judged as tools
import pytest

from turngym.agents.judges.judges import WordJudge
from turngym.agents.proxy.app import prometheus
from turngym.agents.proxy.sessions import Feedback
from turngym.agents.proxy.turn_records import TurnRecorder
from turngym.core.episode import Turn
from turngym.core.errors import TurngymError
from turngym.core.protocols import Judgment, Question, joined
from turngym.core.rollout_request import RolloutRequest
from turngym.scripts import trace
from turngym.scripts.trace import Records, lines, records
from turngym.trainers.judged_episodes import ScoredTurns, judged
from turngym.trainers.live.judging import SessionJudge
from turngym.trainers.live.sessions import SessionBuffer, reason_name, select_turns

UP, DOWN = Feedback(score=1), Feedback(score=-1)
WORDS = Feedback(score=-1, text="look into [HINT_END] the fridge \\boxed{1}")
HINT = "[HINT_START]go to the drawer first[HINT_END] \\boxed{1}"


@pytest.fixture
def turn() -> Turn:
    from turngym.core.task import Verdict

    return Turn(
        index=0, observation="", admissible=None, response="", action="", verdict=Verdict.OK, reward=0.0,
        response_span=(1, 2),
    )  # fmt: skip


def heard(turn: Turn, kind: Question, said: Feedback, *votes: str | None) -> tuple[Any, Any]:
    voted = judged(turn, kind, Judgment(votes=votes)) if votes else turn
    users = SessionJudge(judge=WordJudge(), kind=kind)
    found = users.heard(voted, said)
    again = users.heard(found, said)
    assert (again.judge_votes, again.judge_scores, again.hint) == (found.judge_votes, found.judge_scores, found.hint)
    return found.judge_scores, found.hint


def test_a_thumb_is_a_score(turn: Turn) -> None:
    good = "\\boxed{1}"
    assert heard(turn, "score", DOWN, good, good) == ((-1.0,), None)
    assert heard(turn, "score", WORDS) == ((-1.0,), None)
    assert heard(turn, "score", UP) == ((1.0,), None)


def test_words_with_a_thumb_down_are_a_hint(turn: Turn) -> None:
    mine = "look into   the fridge \\boxed{1}"
    assert heard(turn, "hint", WORDS) == ((1.0,), mine)
    assert heard(turn, "hint", WORDS, HINT) == ((1.0,), mine)
    assert heard(turn, "hint", UP, HINT) == ((-1.0,), None)
    # a thumb alone is no hint, and neither are a few letters
    assert heard(turn, "hint", DOWN, HINT) == ((1.0,), "go to the drawer first")
    assert heard(turn, "hint", Feedback(score=-1, text="no good"), HINT)[1] == "go to the drawer first"


def test_both_questions_take_what_the_user_answered(turn: Turn) -> None:
    vote = joined("\\boxed{1}", HINT)
    mine = "look into   the fridge \\boxed{1}"
    assert heard(turn, "both", WORDS, vote) == ((-1.0,), mine)
    assert heard(turn, "both", DOWN, vote, vote) == ((-1.0, -1.0), "go to the drawer first")
    assert heard(turn, "both", DOWN) == ((-1.0,), None)
    assert heard(turn, "both", UP, vote) == ((1.0,), None)


@pytest.mark.parametrize(
    ("kind", "said", "settled"),
    [("score", DOWN, True), ("hint", DOWN, False), ("hint", WORDS, True), ("both", UP, True), ("both", DOWN, False)],
)
def test_when_the_judge_need_not_be_asked(kind: Any, said: Feedback, settled: bool) -> None:
    assert SessionJudge(judge=WordJudge(), kind=kind).settles(said) == settled


@pytest.fixture
def episode(make_episode: Callable[..., Any]) -> Any:
    """Turns that were scored, whose judge failed, that are too old, and without a next state."""
    made = make_episode([([1], [2]), ([3], [4]), ([5], [6]), ([7], [8])])
    made = tools.with_texts(made, ["a", "b", "c", "d"])
    scored = {"judge_votes": ("v",), "judge_scores": (1.0,), "policy_version": 3}
    turns = (
        replace(made.turns[0], **scored),
        replace(made.turns[1], judge_votes=(None,)),
        replace(made.turns[2], **{**scored, "excluded": "4 versions old"}),
        made.turns[3],
    )
    return replace(made, turns=turns, meta={"at": [50.0, 60.0, 70.0, 0.0]})


def test_each_turn_has_its_fate_and_its_reason(episode: Any) -> None:
    found = select_turns(episode, ScoredTurns())
    left_out = {1: "the judge failed", 2: "4 versions old", 3: "no next state"}
    assert found == ((0,), left_out)
    nothing = replace(episode, turns=(replace(episode.turns[0], excluded="x"), *episode.turns[1:]))
    dropped = select_turns(nothing, ScoredTurns())
    assert dropped == ((), {0: "x", **left_out})
    assert select_turns(episode, None) == ((0, 1, 3), {2: "4 versions old"})


def test_ages_and_reasons_are_counted(episode: Any) -> None:
    written: list[Any] = []

    class Engine:
        def pause(self) -> None: ...

        def resume(self) -> None: ...

    engine: Any = Engine()
    buffer = SessionBuffer(
        engine=engine, publish=lambda version: None, select=None, record=written.append, now=lambda: 150.0
    )
    cold = replace(episode.turns[3], excluded="sampled at temperature 0.5")
    buffer.put_judged([replace(episode, turns=(*episode.turns[:3], cold))])
    assert len(buffer(RolloutRequest(step=6, episodes=1, max_turns=9))) == 1
    # versions 3 and 0 against 5; seconds 100 and 90
    ages = {"versions_behind_mean": 3.5, "versions_behind_max": 5, "age_s_mean": 95.0, "age_s_max": 100.0}
    assert {name: buffer.as_json()[name] for name in ages} == ages
    (record,) = written
    assert {name: record[name] for name in ages} == ages
    task = episode.task.task_id
    assert record["turns"][task]["trained"] == [0, 1]
    assert record["turns"][task]["left_out"] == {"2": "4 versions old", "3": "sampled at temperature 0.5"}
    left_out = buffer.left_out_counts()
    assert left_out == {"sampled at another temperature": 1, "too old": 1}
    text = prometheus({"left_out": left_out, "training": buffer.as_json()})
    assert 'turngym_left_out{name="too old"} 1\n' in text
    assert "turngym_training_age_s_max 100\n" in text


def test_reasons_have_names_without_numbers() -> None:
    assert reason_name("12 versions old") == "too old"
    assert reason_name("no hint") == "no hint"


def said(key: str, main: bool = True, retry: bool = False) -> dict[str, Any]:
    return {"kind": "turn", "session": key, "main": main, "retry": retry}


STORY: list[dict[str, Any]] = [
    *(said("a-1"), said("a-1"), said("a-1", retry=True), said("", main=False), said("b-2"), said("c-3")),
    {"kind": "end", "session": "a-1"},
    {"kind": "end", "session": "b-2"},
    {"kind": "feedback", "session": "a-1", "turn": 0, "score": -1},
    {
        "kind": "trained",
        "step": 1,
        "sessions": ["a-1"],
        "turns": {"a-1": {"trained": [0], "left_out": {"1": "no next state"}}},
        "versions_behind_max": 2,
        "age_s_max": 12.4,
    },
    {"kind": "unused", "step": 0, "sessions": ["b-2"], "turns": {"b-2": {"trained": [], "left_out": {"0": "no hint"}}}},
]


def test_the_report_says_what_became_of_every_turn() -> None:
    assert lines(STORY, turns=True) == [
        "session a-1 turn 0: trained on at step 1, thumb down",
        "session a-1 turn 1: left out: no next state",
        "session b-2 turn 0: left out: no hint",
        "session c-3 turn 0: its session goes on",
        "step 1: 1 turns of 1 sessions, at most 2 updates behind and 12 s old",
        "4 main turns of 3 sessions, 1 side turns",
        "     1 trained on",
        "     1 left out: no next state",
        "     1 left out: no hint",
        "     1 its session goes on",
        "     0 thumbs up, 1 down",
    ]
    # a run that went on from before the step has to learn it again
    told = lines([*STORY, {"kind": "resumed", "step": 0}], turns=True)
    assert told[:2] == [
        "session a-1 turn 0: waits for its judge or its step, thumb down",
        "session a-1 turn 1: waits for its judge or its step",
    ]
    assert not any(line.startswith("step") for line in told)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TurngymError, match=r"has no records\.jsonl"):
        records(Records(folder=tmp_path))
    recorder = TurnRecorder(tmp_path)
    for record in STORY:
        recorder.write(record)
    recorder.close()
    assert trace.main(["records", str(tmp_path)]) == 0
    assert "4 main turns of 3 sessions, 1 side turns\n" in capsys.readouterr().out
