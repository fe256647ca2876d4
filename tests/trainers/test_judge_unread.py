"""A judge that nobody can read: said at once, stopped after a while."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import judged as tools
import pytest

from turngym.core.episode import Episode
from turngym.core.protocols import Judgment
from turngym.core.rollout_request import RolloutRequest
from turngym.core.trace import episode_from_json, episode_to_json
from turngym.trainers.judged_episodes import JudgedSource, JudgeError, UnreadVotes, judge_row, judged

Make = Callable[..., Episode]
PIECES = [([1], [2]), ([3], [4]), ([5], [6])]


def batch(make_episode: Make, *votes: tuple[str | None, ...], cut: int = 0) -> list[Episode]:
    """Two episodes, the second of which was never judged; the first has these votes, turn by turn."""
    episode = make_episode(PIECES[: len(votes)])
    turns = [
        judged(turn, "score", Judgment(votes=said, cut=cut)) for turn, said in zip(episode.turns, votes, strict=True)
    ]
    return [replace(episode, turns=tuple(turns)), make_episode(PIECES)]


def test_the_first_batch_warns_once_and_the_third_in_a_row_stops(make_episode: Make) -> None:
    wild = batch(make_episode, ("hm", "or"), ("x" * 200 + "so on", None), cut=1)
    watch = UnreadVotes()
    said = r"step 1: 3 of 3 votes of the judge have no valid \\boxed\{\} \(2 votes ended at --judge-max-tokens: "
    with pytest.warns(UserWarning, match=said + rf"give it more\); one ends with '\.\.\.{'x' * 115}so on'$"):
        watch.check(wild, "step 1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.check(wild, "step 2")
    for step in (3, 4):
        with pytest.raises(JudgeError, match=rf"^step {step}: 3 of 3 votes .*; it was so {step} times in a row$"):
            watch.check(wild, f"step {step}")


def test_a_batch_that_can_be_read_begins_the_count_anew(make_episode: Make) -> None:
    wild, fine = batch(make_episode, ("hm",), ("hm",)), batch(make_episode, ("\\boxed{1}",), ("\\boxed{0}",))
    watch = UnreadVotes()
    watch.check(fine, "step 1")
    with pytest.warns(UserWarning, match="step 2: 2 of 2 votes"):
        watch.check(wild, "step 2")
    for found in (wild, fine, wild, wild, [], fine):
        watch.check(found, "later")
    watch.check(batch(make_episode, (None,), (None,)), "later")  # failed votes are another matter


def test_a_share_at_the_limit_is_borne(make_episode: Make) -> None:
    half = batch(make_episode, ("hm", "\\boxed{1}"))
    borne, strict = UnreadVotes(limit=0.5), UnreadVotes(limit=0.49)
    with pytest.warns(UserWarning, match=r"1 of 2 votes of the judge have no valid \\boxed\{\}$"):
        borne.check(half, "here")
    with pytest.warns(UserWarning, match="1 of 2"):
        strict.check(half, "here")
    for _ in range(5):
        borne.check(half, "here")
    strict.check(half, "here")
    with pytest.raises(JudgeError, match="3 times"):
        strict.check(half, "here")
    single = UnreadVotes()
    with pytest.warns(UserWarning, match="1 of 1"):
        single.check(batch(make_episode, ("hm",)), "here")
    single.check(batch(make_episode, ("hm",)), "here")
    with pytest.raises(JudgeError, match="1 of 1"):
        single.check(batch(make_episode, ("hm",)), "here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # a tenth is no news
        UnreadVotes().check(batch(make_episode, ("hm", *tools.boxed(*[1] * 9))), "here")
    with pytest.warns(UserWarning, match="1 of 9"):
        UnreadVotes().check(batch(make_episode, ("hm", *tools.boxed(*[1] * 8))), "here")


@pytest.mark.filterwarnings("ignore:step")
def test_a_source_stops_after_it_has_kept_what_was_written(make_episode: Make) -> None:
    episode = tools.with_texts(make_episode(PIECES), ["a", "b", "c"], "end")
    kept: list[int] = []
    source = JudgedSource(
        source=lambda request: [episode],
        judge=tools.Says(lambda request: ("I cannot tell.",)),
        record=lambda request, found: kept.append(request.step),
    )
    for step in (1, 2):
        source(RolloutRequest(step=step, episodes=1, max_turns=3))
    with pytest.raises(JudgeError, match="step 3: 3 of 3 votes"):
        source(RolloutRequest(step=3, episodes=1, max_turns=3))
    assert kept == [1, 2, 3]


def test_cut_votes_are_counted_and_kept_in_traces(make_episode: Make) -> None:
    [found, _] = batch(make_episode, ("so", "\\boxed{1}"), ("so", "hm"), cut=1)
    row = judge_row([found], None)
    assert (row["judge/votes_unread"], row["judge/votes_cut"]) == (3, 2)
    back = episode_from_json(episode_to_json(found))
    assert [turn.judge_cut for turn in back.turns] == [1, 1]
    [plain, _] = batch(make_episode, ("so",))
    assert "judge_cut" not in str(episode_to_json(plain))
