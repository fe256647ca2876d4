"""What tokens are compared with, by hand: which model is asked what, and what stands where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scorers import Slope

from turngym.core.episode import Episode, Status, TopK
from turngym.trainers.algorithm import Scorers
from turngym.trainers.batch import pack
from turngym.trainers.group_advantage import GroupAdvantage, SplitAdvantage, demonstrated
from turngym.trainers.rewards import rewards
from turngym.trainers.targets import (
    NoTargets,
    SampledAdvantage,
    StudentTopK,
    TargetError,
    TeacherTopK,
    WithReference,
    WithSequences,
    label_logprobs,
    rows,
)

Make = Callable[..., Episode]
ROWS = [[1, 2, 3, 10, 11, 4, 12, 9], [5, 6, 20, 21]]
LABELS = [[3, 4, 6], [2, 3]]
"""Where the labels 10, 11, 12 and 20, 21 stand."""


@dataclass(frozen=True)
class Chosen(Slope):
    """Scores chosen ids too."""

    def gather(self, ids: Sequence[Any], positions: Sequence[Any], support: Sequence[Any]) -> list[Any]:
        self._note(ids, positions)
        return [TopK(ids=chosen, logp=self.slope * chosen, tail=chosen[:, 0] / 2) for chosen in support]


@dataclass(frozen=True)
class Says:
    """Answers what it was given, whatever the question."""

    values: Any

    def logprobs(self, ids: Any, positions: Any) -> list[Any]:
        return [np.asarray(self.values, np.float32)]

    def topk(self, ids: Any, positions: Any, k: int) -> list[TopK]:
        raise AssertionError("nobody asks for this")


def luffy_group(make_episode: Make) -> list[Episode]:
    """One group: D, a demonstrated turn of 10, 11 and an own one of 12, return 1; own episodes with return 0 and 1."""
    d = make_episode(
        [([1, 2, 3], [10, 11]), ([4], [12])], number=0, group=7, success=True, origins=["demonstration", "policy"]
    )
    b = make_episode([([5, 6], [20, 21])], number=1, group=7)
    c = make_episode([([5], [22])], number=2, group=7, success=True)
    return [d, b, c]


def test_rows_and_the_places_of_their_labels(ragged: list[Episode]) -> None:
    ids, places = rows(pack(ragged))
    assert [row.tolist() for row in ids] == ROWS
    assert [where.tolist() for where in places] == LABELS


def test_each_segment_of_an_episode_is_a_row(make_episode: Make) -> None:
    pieces = [([1], [2]), ([3, 4], [5, 6]), ([7], [8])]
    ids, places = rows(pack([make_episode(pieces, segments=[0, 1, 1])]))
    assert [row.tolist() for row in ids] == [[1, 2], [3, 4, 5, 6, 7, 8]]
    assert [where.tolist() for where in places] == [[1], [2, 3, 5]]


def test_who_began_with_a_demonstration(make_episode: Make) -> None:
    own = make_episode([([1], [2, 3]), ([4], [5, 6])])
    first, second = own.turns
    begun = replace(own, turns=(first, replace(second, begun=1)))
    shown = replace(own, turns=(replace(first, origin="demonstration"), second))
    assert [demonstrated(episode) for episode in (own, begun, shown)] == [False, True, True]


def test_sampled_advantage_is_teacher_minus_student(ragged: list[Episode]) -> None:
    teacher, student = Slope(-0.1), Slope(-0.05)
    targets = SampledAdvantage()(pack(ragged), ragged, Scorers(student=student, teacher=teacher))
    # log q - log p = -0.05 times the label: the teacher likes each id less than the student does
    np.testing.assert_allclose(targets.advantage_N, [-0.5, -0.55, -0.6, -1.0, -1.05], rtol=1e-6)
    np.testing.assert_allclose(targets.label_logp_N, [-1.0, -1.1, -1.2, -2.0, -2.1], rtol=1e-6)
    assert teacher.asked == student.asked == [(ROWS, LABELS)]


def test_teachers_likeliest_ids(ragged: list[Episode]) -> None:
    teacher = Slope(-0.1, first=30)
    targets = TeacherTopK(2)(pack(ragged), ragged, Scorers(student=Slope(0.0), teacher=teacher))
    assert targets.topk_ids_NK is not None
    assert targets.topk_logp_NK is not None
    assert targets.topk_ids_NK.tolist() == [[33, 34], [34, 35], [36, 37], [32, 33], [33, 34]]
    np.testing.assert_allclose(targets.topk_logp_NK[:, 0], [-3.3, -3.4, -3.6, -3.2, -3.3], rtol=1e-6)
    assert (targets.topk_ids_NK.dtype, targets.topk_logp_NK.dtype) == (np.int64, np.float32)
    assert teacher.asked == [(ROWS, LABELS)]


def test_students_likeliest_ids_under_the_teacher(ragged: list[Episode]) -> None:
    teacher, student = Chosen(-0.1, first=30), Slope(-0.5, first=40)
    targets = StudentTopK(2)(pack(ragged), ragged, Scorers(student=student, teacher=teacher))
    assert targets.topk_ids_NK is not None
    assert targets.topk_logp_NK is not None
    assert targets.topk_ids_NK.tolist() == [[43, 44], [44, 45], [46, 47], [42, 43], [43, 44]]
    np.testing.assert_allclose(targets.topk_logp_NK[:, 1], [-4.4, -4.5, -4.7, -4.3, -4.4], rtol=1e-6)
    assert (targets.topk_ids_NK.dtype, targets.topk_logp_NK.dtype) == (np.int64, np.float32)
    assert student.asked == teacher.asked == [(ROWS, LABELS)]
    assert targets.topk_tail_N is not None
    assert targets.topk_tail_N.tolist() == [21.5, 22.0, 23.0, 21.0, 21.5]
    assert targets.topk_tail_N.dtype == np.float32


def test_group_advantages_reach_every_token(make_episode: Make) -> None:
    group = luffy_group(make_episode)
    batch = pack(group, origins=("policy", "demonstration"))
    scorers = Scorers(student=Slope(0.0))
    plain = GroupAdvantage(scale="none")(batch, group, scorers).advantage_N
    np.testing.assert_allclose(plain, [1 / 3] * 3 + [-2 / 3] * 2 + [1 / 3], rtol=1e-6)
    unit = (1 / 3) ** 0.5 + 1e-6
    found = GroupAdvantage()(batch, group, scorers).advantage_N
    np.testing.assert_allclose(found, np.array([1 / 3] * 3 + [-2 / 3] * 2 + [1 / 3]) / unit, rtol=1e-6)


def test_over_turns_a_long_episode_counts_as_often_as_it_has_turns(make_episode: Make) -> None:
    """Worth 0 with two turns, and 1 with one: two rows of 0 and one of 1."""
    long = make_episode([([1], [2]), ([3], [4, 5])], number=0, episode_return=0.0)
    short = make_episode([([1], [8])], number=1, episode_return=1.0)
    other = [make_episode([([1], [9])], number=2 + place, group=5, episode_return=float(place)) for place in (0, 1)]
    episodes = [long, short, *other]
    batch, scorers = pack(episodes), Scorers(student=Slope(0.0))
    found = GroupAdvantage(scale="none", over="turns")(batch, episodes, scorers).advantage_N
    np.testing.assert_allclose(found, [-1 / 3] * 3 + [2 / 3, -0.5, 0.5], rtol=1e-6)
    # unbiased deviations sqrt(1/3) of the rows, and sqrt(1/2)
    found = GroupAdvantage(over="turns")(batch, episodes, scorers).advantage_N
    np.testing.assert_allclose(found, [*np.array([-1, -1, -1, 2]) / 3**0.5, -(0.5**0.5), 0.5**0.5], rtol=1e-5)
    plain = GroupAdvantage(scale="none")(batch, episodes, scorers).advantage_N
    np.testing.assert_allclose(plain, [-0.5] * 3 + [0.5, -0.5, 0.5])


def test_every_group_has_a_baseline_of_its_own(make_episode: Make) -> None:
    returns = [(1, 0.0), (4, 10.0), (1, 1.0), (4, 30.0)]
    episodes = [
        make_episode([([1], [number])], number=number, group=group, episode_return=value)
        for number, (group, value) in enumerate(returns)
    ]
    batch, scorers = pack(episodes), Scorers(student=Slope(0.0))
    # means 1/2 and 20; deviations sqrt(1/2) and sqrt(200)
    for made in (GroupAdvantage, SplitAdvantage):
        found = made(scale="none")(batch, episodes, scorers).advantage_N
        np.testing.assert_allclose(found, [-0.5, -10.0, 0.5, 10.0])
        found = made()(batch, episodes, scorers).advantage_N
        np.testing.assert_allclose(found, np.array([-1, -1, 1, 1]) * 0.5**0.5, rtol=1e-5)


def test_demonstrated_and_own_tokens_have_their_own_factors(make_episode: Make) -> None:
    group = luffy_group(make_episode)
    batch, scorers = pack(group, origins=("policy", "demonstration")), Scorers(student=Slope(0.0))
    # the two own episodes have mean 1/2: D +1/2, B -1/2, C +1/2; times 3 where demonstrated, 5 elsewhere
    found = SplitAdvantage(scale="none", alpha=3.0, beta=5.0)(batch, group, scorers).advantage_N
    np.testing.assert_allclose(found, [1.5, 1.5, 2.5, -2.5, -2.5, 2.5])
    # a response that was only begun: its episode is no baseline either, and 10 alone has the factor of a demonstration
    d = replace(group[0], turns=(replace(group[0].turns[0], origin="policy", begun=1), group[0].turns[1]))
    begun = [d, *group[1:]]
    found = SplitAdvantage(scale="none", alpha=3.0, beta=5.0)(
        pack(begun, origins=("policy", "demonstration")), begun, scorers
    ).advantage_N
    np.testing.assert_allclose(found, [1.5, 2.5, 2.5, -2.5, -2.5, 2.5])
    # all three have mean 2/3
    found = SplitAdvantage(scale="none", alpha=3.0, beta=6.0, split=False)(batch, group, scorers).advantage_N
    np.testing.assert_allclose(found, [1.0, 1.0, 2.0, -4.0, -4.0, 2.0], rtol=1e-6)
    # own rewards 0 and 1: unbiased std sqrt(1/2)
    found = SplitAdvantage()(batch, group, scorers).advantage_N
    np.testing.assert_allclose(found, np.array([1, 1, 1, -1, -1, 1]) * 0.5 / (0.5**0.5 + 1e-6), rtol=1e-6)


def test_the_kl_to_the_reference_may_cost_reward(make_episode: Make) -> None:
    group = luffy_group(make_episode)
    batch = pack(group, origins=("policy", "demonstration"))
    scorers = Scorers(student=Slope(0.02), reference=Slope(0.01))
    # 0.01 per token times its label, summed: D 0.01 x its three labels, B its two, C its one
    kl_E = 0.01 * np.bincount(batch.episode_N, batch.label_N)
    assert len(set(kl_E)) == 3
    found = SplitAdvantage(scale="none", kl_coef=0.5)(batch, group, scorers)
    reward_E = batch.reward_E - 0.5 * kl_E
    np.testing.assert_allclose(found.reward, reward_E, rtol=1e-5)
    np.testing.assert_allclose(
        found.advantage_N, (reward_E - reward_E[1:].mean())[batch.episode_N], rtol=1e-5, atol=1e-6
    )
    for missing in (Scorers(student=Slope(0.02)), Scorers(student=None, reference=Slope(0.01))):  # type: ignore[arg-type]
        with pytest.raises(TargetError, match=r"needs a (student|reference \(.*\)), and none"):
            SplitAdvantage(kl_coef=0.5)(batch, group, missing)


def test_what_an_episode_is_worth(make_episode: Make) -> None:
    rich = replace(make_episode([([1], [2])], success=True, episode_return=2.5), score=0.25)
    failed = make_episode([([1], [3])], status=Status.ERROR_ENV)
    poor = replace(make_episode([([1], [4])], episode_return=-1.0), score=0.75)
    episodes = [failed, rich, poor]
    batch = pack(episodes)
    assert rewards(batch, episodes, "return").tolist() == [2.5, -1.0]
    assert rewards(batch, episodes, "success").tolist() == [1.0, 0.0]
    assert rewards(batch, episodes, "score").tolist() == [0.25, 0.75]
    # in one group the advantage tells which reward was taken
    scorers = Scorers(student=Slope(0.0))
    for made in (GroupAdvantage(reward="success", scale="none"), SplitAdvantage(reward="success", scale="none")):
        np.testing.assert_allclose(made(batch, episodes, scorers).advantage_N, [0.5, -0.5])


def test_the_reference_is_added_to_another_target(ragged: list[Episode]) -> None:
    student, teacher, reference = Slope(-0.05), Slope(-0.1), Slope(-0.2)
    scorers = Scorers(student=student, teacher=teacher, reference=reference)
    targets = WithReference(target_fn=SampledAdvantage())(pack(ragged), ragged, scorers)
    np.testing.assert_allclose(targets.advantage_N, [-0.5, -0.55, -0.6, -1.0, -1.05], rtol=1e-6)
    np.testing.assert_allclose(targets.reference_logp_N, [-2.0, -2.2, -2.4, -4.0, -4.2], rtol=1e-6)
    assert NoTargets()(pack(ragged), ragged, scorers).advantage_N is None


def test_which_tokens_share_a_ratio(ragged: list[Episode], make_episode: Make) -> None:
    scorers = Scorers(student=Slope(0.0))

    def numbers(unit: Any, episodes: list[Episode]) -> Any:
        found = WithSequences(target_fn=GroupAdvantage(), unit=unit)(pack(episodes), episodes, scorers)
        assert found.advantage_N is not None
        return found.extra["sequence"].tolist()

    # A's turns of 2 and 1 tokens, B's turn of 2 and C's of 1
    three = [*ragged, make_episode([([1], [2])])]
    a, _, b, c, _, d = numbers("turn", three)
    assert len({a, b, c, d}) == 4
    assert numbers("turn", three) == [a, a, b, c, c, d]
    assert numbers("episode", three) == [0, 0, 0, 1, 1, 2]
    rewritten = make_episode([([1], [2]), ([3], [4])], segments=[0, 1])
    assert len(set(numbers("turn", [rewritten]))) == 2
    with pytest.raises(TargetError, match="ratio=episode needs episodes of one segment"):
        numbers("episode", [rewritten])


def test_models_that_are_missing_are_named(ragged: list[Episode]) -> None:
    batch, alone = pack(ragged), Scorers(student=Slope(0.0))
    with pytest.raises(TargetError, match=r"\bteacher\b"):
        SampledAdvantage()(batch, ragged, alone)
    with pytest.raises(TargetError, match=r"\bstudent\b"):
        SampledAdvantage()(batch, ragged, Scorers(student=None, teacher=Slope(0.0)))  # type: ignore[arg-type]
    with pytest.raises(TargetError, match=r"needs a reference \(the frozen initial policy\), and none"):
        WithReference(target_fn=NoTargets())(batch, ragged, alone)
    for likeliest in (TeacherTopK(), StudentTopK()):
        with pytest.raises(TargetError, match=r"\bteacher\b"):
            likeliest(batch, ragged, alone)


def test_answers_that_do_not_fit_are_named(ragged: list[Episode]) -> None:
    batch = pack(ragged)
    with pytest.raises(TargetError, match="answered 4 positions; 5 were asked"):
        label_logprobs(Says([-1.0] * 4), batch, "teacher")
    with pytest.raises(TargetError, match=r"answered .*nan.* for token 2 \(turn 1 of task/0\)"):
        label_logprobs(Says([-1, -1, np.nan, -1, np.inf]), batch, "teacher")
    with pytest.raises(TargetError, match=r"for token 4 \(turn 0 of task/1\)"):
        label_logprobs(Says([[-1, -1]] * 4 + [[-1, -np.inf]]), batch, "teacher")
