"""The judge made of verdicts and rewards, rule by rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import judged as tools
import pytest

from turngym.agents.judges.env_judges import AttemptJudge, EpisodeJudge, RuleJudge, SilentJudge, SkillsJudge
from turngym.agents.judges.votes import majority, read_score
from turngym.core.episode import Episode, Status
from turngym.core.task import Task, Verdict
from turngym.trainers.judged_episodes import judge_episodes, requests

Make = Callable[..., Episode]


def play(make_episode: Make, count: int, **more: Any) -> Episode:
    """`count` turns, each with an action and an observation of its own; keywords give fields of every turn."""
    episode = make_episode([([1], [2])] * count, status=more.pop("status", Status.TRUNCATED_TURNS))
    more = {"action": [f"do {n}" for n in range(count)], "progress": [0.0] * count, **more}
    return tools.with_texts(episode, [f"see {n}" for n in range(count)], "the end", **more)


def scores(episode: Episode) -> list[int]:
    return [RuleJudge().score(episode, turn)[0] for turn in episode.turns]


def test_verdicts_and_rewards_decide(make_episode: Make) -> None:
    verdicts = [Verdict.OK, Verdict.MALFORMED, Verdict.INADMISSIBLE, Verdict.NO_EFFECT, Verdict.OK, Verdict.OK]
    episode = play(make_episode, 6, verdict=verdicts, reward=[0.0, 0.0, 0.0, 0.0, 0.3, -0.1])
    assert scores(episode) == [0, -1, -1, -1, 1, -1]


def test_an_invalid_action_is_bad_even_where_it_ends_in_success(make_episode: Make) -> None:
    episode = replace(play(make_episode, 1, verdict=[Verdict.NO_EFFECT], status=Status.COMPLETED), success=True)
    assert scores(episode) == [-1]


@pytest.mark.parametrize(
    ("status", "success", "last"),
    [
        (Status.COMPLETED, True, 1),
        (Status.COMPLETED, False, -1),
        (Status.TRUNCATED_TURNS, False, 0),
        (Status.TRUNCATED_DEPTH, False, 0),
    ],
)
def test_how_the_episode_ends_is_the_last_turns_doing(
    make_episode: Make, status: Status, success: bool, last: int
) -> None:
    episode = replace(play(make_episode, 3, status=status), success=success)
    assert scores(episode) == ([1, 1, 1] if success else [0, 0, last])


def test_progress_up_and_down(make_episode: Make) -> None:
    assert scores(play(make_episode, 5, progress=[0.0, 0.5, 0.5, 0.25, 0.75])) == [0, 1, 0, -1, 1]
    assert scores(play(make_episode, 2, progress=[0.5, 0.5])) == [1, 0]
    assert scores(play(make_episode, 3, progress=[None, 0.5, None])) == [0, 0, 0]


def test_the_same_action_with_the_same_answer_is_a_repetition(make_episode: Make) -> None:
    episode = play(make_episode, 4, action=["look", "go", "look", "go"])
    turns = list(episode.turns)
    turns[1], turns[3] = replace(turns[1], observation="a room"), replace(turns[3], observation="a room")
    episode = replace(episode, turns=tuple(turns))
    assert scores(episode) == [0, 0, -1, 0]
    assert scores(replace(episode, success=True)) == [1, 1, 1, 1]
    moved = [replace(turn, progress=0.25 * (turn.index > 1)) for turn in turns]
    assert scores(replace(episode, turns=tuple(moved)))[2] == 1


def test_every_rule_says_its_reason(make_episode: Make) -> None:
    def reasons(episode: Episode) -> list[tuple[int, str]]:
        return [RuleJudge().score(episode, turn) for turn in episode.turns]

    verdict = [Verdict.MALFORMED] + [Verdict.OK] * 5
    ended = play(
        make_episode,
        6,
        verdict=verdict,
        reward=[0.0, 1.0, -1.0, 0.0, 0.0, 0.0],
        progress=[0.0, 0.0, 0.0, 0.5, 0.25, 0.25],
        status=Status.COMPLETED,
    )
    assert reasons(ended) == [
        (-1, "The action was malformed."),
        (1, "The environment rewarded it."),
        (-1, "The environment punished it."),
        (1, "A goal was met."),
        (-1, "A goal was lost."),
        (-1, "The task ended here, unsolved."),
    ]
    won = replace(play(make_episode, 2, status=Status.COMPLETED), success=True)
    assert reasons(won) == [(1, "It was on the way to success."), (1, "The environment rewarded it.")]
    again = play(make_episode, 2, action=["look", "look"])
    turns = [replace(turn, observation="see 1") for turn in again.turns]
    again = replace(again, turns=tuple(turns), final_observation="see 1")
    assert reasons(again) == [
        (0, "Nothing tells whether it helped."),
        (-1, "It was done before, with the same result."),
    ]
    hints = [found.votes[0] for found in RuleJudge().judge(requests(again, "hint"))]
    assert hints == [
        "\\boxed{-1}",
        "[HINT_START]This was tried before, with the same result. Choose another action.[HINT_END] \\boxed{1}",
    ]


def test_votes_are_texts_with_reasons(make_episode: Make) -> None:
    episode = play(make_episode, 2, verdict=[Verdict.INADMISSIBLE, Verdict.OK])
    found = RuleJudge().judge(requests(episode, "score"))
    assert [item.votes for item in found] == [
        ("The action was inadmissible. \\boxed{-1}",),
        ("Nothing tells whether it helped. \\boxed{0}",),
    ]
    assert [read_score(item.votes[0] or "") for item in found] == [-1.0, 0.0]
    [judged], _ = judge_episodes([episode], RuleJudge(), "score")
    assert [majority(turn.judge_scores or ()) for turn in judged.turns] == [-1.0, 0.0]


def test_hints_say_what_the_verdict_teaches(make_episode: Make) -> None:
    verdicts = [Verdict.MALFORMED, Verdict.INADMISSIBLE, Verdict.NO_EFFECT, Verdict.OK]
    [judged], _ = judge_episodes([play(make_episode, 4, verdict=verdicts)], RuleJudge(), "hint")
    hints = [turn.hint for turn in judged.turns]
    assert [None if hint is None else hint.split(".")[0] for hint in hints] == [
        "Answer with exactly one action, written in the form that the instructions ask for",
        "That action is not possible here",
        "That action changes nothing here",
        None,
    ]
    assert [turn.judge_scores for turn in judged.turns] == [(1.0,), (1.0,), (1.0,), (-1.0,)]


def test_chat_sessions_have_no_verdicts(make_episode: Make) -> None:
    episode = play(make_episode, 1)
    chat = replace(episode, task=Task(env_id="proxy", task_id="s", sha256="0" * 64, split="live", category="session"))
    [judged], error = judge_episodes([chat], RuleJudge(), "score")
    assert judged.turns[0].judge_votes == (None,)
    assert judged.turns[0].judge_scores is None
    assert "verdicts and rewards" in error


def test_a_failed_attempt_is_told_what_the_shortest_success_of_its_group_did(make_episode: Make) -> None:
    def attempt(group: int, actions: list[str], success: bool, **more: Any) -> Episode:
        made = play(make_episode, len(actions), action=actions, **more)
        return replace(made, group=group, success=success)

    verdicts = [Verdict.OK, Verdict.INADMISSIBLE, Verdict.OK]
    episodes = [
        attempt(1, ["look", "go", "look", "take"], True),
        attempt(1, ["look", "fly", "take it"], True, verdict=verdicts),
        attempt(1, ["look", "wait"], False),
        attempt(2, ["look"], False),
        attempt(1, ["a", "b", "c"], True),
    ]
    judged, error = judge_episodes(episodes, AttemptJudge(), "hint")
    assert error == ""
    told = "An attempt that solved this task did: 1. look, 3. take it"
    # of two that are equally short the first; successes and groups without one get nothing
    assert [[turn.hint for turn in episode.turns] for episode in judged] == [
        [None] * 4,
        [None] * 3,
        [told] * 2,
        [None],
        [None] * 3,
    ]
    assert [turn.judge_scores for turn in judged[2].turns + judged[3].turns] == [(1.0,), (1.0,), (-1.0,)]
    found = AttemptJudge().judge(requests(episodes[0], "score"))
    assert found[0].votes == (None,)
    assert found[0].error.endswith("turn 0: other attempts give hints, not scores")
    chat = replace(requests(episodes[0], "hint")[0], episode=None)
    assert AttemptJudge().judge([chat])[0].votes == (None,)


def test_a_skill_is_drawn_from_the_finished_episode(make_episode: Make) -> None:
    def hints(episode: Episode) -> list[str | None]:
        found, error = judge_episodes([episode], EpisodeJudge(), "hint")
        assert error == ""
        return [turn.hint for turn in found[0].turns]

    actions, ok = ["open box", "look", "take egg"], [Verdict.OK] * 3
    longer, gains = ["go", "wait", *actions], [0.0, 0.0, 0.5, 0.5, 1.0]
    won = play(make_episode, 5, action=longer, verdict=[Verdict.OK] * 5, progress=gains)
    told = "In tasks like this one these steps lead to success: open box, then take egg."
    assert hints(replace(won, success=True)) == [told] * 5
    soon = play(make_episode, 3, action=actions, verdict=ok, progress=[0.5, 0.5, 1.0])
    assert hints(replace(soon, success=True)) == [told] * 3
    paid = play(make_episode, 3, action=actions, verdict=ok, reward=[0.5, 0.0, 0.5])
    assert hints(replace(paid, success=True)) == [told] * 3
    # where nothing was recorded as gained, all valid actions are the skill
    flat = play(make_episode, 3, action=actions, verdict=[Verdict.OK, Verdict.INADMISSIBLE, Verdict.OK])
    assert hints(replace(flat, success=True)) == [told] * 3
    # a failed episode: its critical step alone
    wrong = play(make_episode, 3, action=actions, verdict=[Verdict.OK, Verdict.NO_EFFECT, Verdict.NO_EFFECT])
    reason = "The action was no_effect."
    assert hints(wrong) == [None, f"The action 'look' was a mistake here: {reason} Choose another one.", None]
    silent = play(make_episode, 1, action=[None], verdict=[Verdict.MALFORMED])
    assert hints(silent) == ["This answer was a mistake here: The action was malformed. Choose another one."]
    assert hints(play(make_episode, 2, action=["a", "b"], verdict=[Verdict.OK] * 2)) == [None, None]
    found = EpisodeJudge().judge(requests(won, "score"))
    assert found[0].votes == (None,)
    assert found[0].error.endswith("turn 0: skills give hints, not scores")


class OfKind:
    """Texts for one category, which name the first observation."""

    def text(self, category: str, observation: str) -> str | None:
        return f"{category}: {observation}" if category == "heat" else None


def test_skills_are_told_by_the_kind_of_task_and_what_is_seen_first(make_episode: Make) -> None:
    judge: Any = SkillsJudge(skills=OfKind())
    episode = play(make_episode, 2)
    heat, other = (replace(episode, task=replace(episode.task, category=category)) for category in ("heat", "cool"))
    told = "[HINT_START]heat: see 0[HINT_END] \\boxed{1}"
    assert [found.votes for found in judge.judge(requests(heat, "hint"))] == [(told,), (told,)]
    for asked, reason in (
        (requests(other, "hint"), "no text of the skills is for category 'cool'"),
        (requests(heat, "score"), "skills give hints, not scores"),
        ([replace(requests(heat, "hint")[0], episode=None)], "skills give hints, not scores"),
    ):
        first = judge.judge(asked)[0]
        assert first.votes == (None,)
        assert first.error == f"{asked[0].name}: {reason}"


def test_nothing_is_told_and_nothing_scored(make_episode: Make) -> None:
    episode = play(make_episode, 2)
    assert [found.votes for found in SilentJudge().judge(requests(episode, "hint"))] == [("\\boxed{-1}",)] * 2
    asked = requests(episode, "score")
    first = SilentJudge().judge(asked)[0]
    assert (first.votes, first.error) == ((None,), f"{asked[0].name}: nothing gives hints, not scores")
