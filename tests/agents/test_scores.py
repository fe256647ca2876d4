"""Scores and their intervals on literal numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.agents.evaluation.coverage import SimulatedStudy, measure
from turngym.agents.evaluation.scores import compare, score, success_table, task_means
from turngym.agents.evaluation.seeds import Difference, rise, signed
from turngym.agents.evaluation.statistics import (
    Interval,
    ScoreError,
    alike,
    chi_squared,
    cluster_error,
    clustered,
    cost_weights,
    difference_bounds,
    holm,
    mean_bounds,
    p_value,
    pass_all_k,
    pass_at_k,
    t_quantile,
    variance,
)
from turngym.core.episode import Episode, Status, Turn
from turngym.core.task import Task, Verdict


def episode(
    task: str, sample: int, success: bool, *, verdicts: str = "o", status: Status | None = None, category: str = "heat"
) -> Episode:
    names = {"o": Verdict.OK, "m": Verdict.MALFORMED, "i": Verdict.INADMISSIBLE, "n": Verdict.NO_EFFECT}
    turns = tuple(
        Turn(index=n, observation="", admissible=None, response="", action="", verdict=names[v], reward=0.0)
        for n, v in enumerate(verdicts)
    )
    return Episode(
        task=Task(env_id="e", task_id=task, sha256=f"sha {task}", split="s", category=category),
        seed=0,
        sample=sample,
        group=0,
        segments=(),
        turns=turns,
        status=status or (Status.COMPLETED if success else Status.TRUNCATED_TURNS),
        success=success,
        episode_return=float(success),
        score=float(success),
        meta={"goal_rate": 1.0 if success else 0.5},
    )


RUN = [
    *(episode("a", n, True) for n in range(4)),
    *(episode("b", n, n < 2, verdicts="oomin", category="place") for n in range(4)),
    *(episode("c", n, False, verdicts="ooo") for n in range(4)),
    *(episode("d", n, n == 0, verdicts="o") for n in range(4)),
]


def test_avg_at_four_with_its_interval() -> None:
    scores = score(RUN)
    assert task_means(RUN) == {"a": 1.0, "b": 0.5, "c": 0.0, "d": 0.25}
    assert scores.overall.avg.mean == 7 / 16
    assert (scores.overall.avg.low, scores.overall.avg.high) == mean_bounds([1.0, 0.5, 0.0, 0.25])
    assert (scores.overall.samples, scores.overall.episodes, scores.overall.avg.tasks) == (4, 16, 4)


def test_rows_rates_and_turns() -> None:
    scores = score([*RUN, episode("a", 4, True, status=Status.ERROR_ENGINE)])
    assert [row.name for row in scores.categories] == ["place", "heat"]
    assert [row.avg.mean for row in scores.categories] == [0.5, (1 + 0 + 0.25) / 3]
    assert scores.errors == 1
    # turns: 4 + 20 + 12 + 4 = 40, of them 4 malformed, 4 inadmissible, 4 without effect
    assert (scores.turns, scores.invalid_rate) == (40 / 16, 8 / 40)
    assert scores.verdicts == {"ok": 28 / 40, "malformed": 0.1, "inadmissible": 0.1, "no_effect": 0.1}
    assert scores.truncated == {"truncated_turns": 9 / 16, "truncated_tokens": 0.0, "truncated_depth": 0.0}
    assert scores.success_turns == (4 * 1 + 2 * 5 + 1) / 7
    assert scores.goal_rate == (7 + 9 * 0.5) / 16
    assert json.loads(json.dumps(scores.to_json()))["overall"]["avg"]["mean"] == 7 / 16


def test_pass_at_k_by_hand() -> None:
    # 4 samples, 1 success: of the 6 pairs 3 have the success
    assert pass_at_k(4, 1, 2) == 0.5
    assert [pass_at_k(4, 2, k) for k in (1, 2, 3, 4)] == [0.5, 1 - 1 / 6, 1.0, 1.0]
    overall = score(RUN).overall.pass_at
    assert overall == {1: 7 / 16, 2: (1 + 5 / 6 + 0 + 0.5) / 4, 4: (1 + 1 + 0 + 1) / 4}
    found = score(RUN).overall.pass_intervals
    assert {k: interval.mean for k, interval in found.items()} == overall
    assert (found[2].low, found[2].high) == mean_bounds([1, 5 / 6, 0, 0.5])
    with pytest.raises(ScoreError, match="pass@5 needs"):
        pass_at_k(4, 1, 5)


def test_f1_is_the_mean_over_tasks_and_absent_where_nothing_is_answered() -> None:
    values = [0.5] * 6 + [1.0, 0.0]
    answered = [replace(one, meta={"answer_f1": value}) for one, value in zip(RUN[4:12], values, strict=True)]
    scores = score(answered)
    assert scores.answer_f1 is not None
    assert scores.answer_f1.mean == (0.5 + (0.5 + 0.5 + 1.0 + 0.0) / 4) / 2
    (row,) = success_table({"run": scores})[1]
    assert str(scores.answer_f1) in row
    assert "answer_f1" in scores.to_json()
    assert "answer_f1" not in score(RUN).to_json()


def test_pass_all_k_by_hand() -> None:
    # 4 samples, 3 successes: 3 of the 6 pairs have no failure
    assert [pass_all_k(4, 3, k) for k in (1, 2, 3, 4)] == [0.75, 0.5, 0.25, 0.0]
    overall = score(RUN).overall
    assert {k: interval.mean for k, interval in overall.pass_all.items()} == {2: (1 + 1 / 6) / 4, 4: 1 / 4}
    assert (overall.pass_all[2].low, overall.pass_all[2].high) == mean_bounds([1, 1 / 6, 0, 0])


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_pass_at_one_is_the_mean_and_more_tries_never_hurt(case: tuple[int, int]) -> None:
    samples, successes = case
    values = [pass_at_k(samples, successes, k) for k in range(1, samples + 1)]
    assert values[0] == pytest.approx(successes / samples)
    assert values == sorted(values)
    assert values[-1] == float(successes > 0)


@pytest.mark.parametrize(
    ("degrees", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (133, 1.9780)]
)
def test_t_quantiles_of_the_tables(degrees: int, value: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(value, abs=5e-5)
    assert t_quantile(0.025, degrees) == pytest.approx(-value, abs=5e-5)


def test_quantiles_of_degrees_that_are_not_whole() -> None:
    # from scipy 1.18: stats.t.ppf and stats.chi2.ppf
    found = [t_quantile(0.975, degrees) for degrees in (1.5, 2.5, 3.7, 7.3, 1000.5)]
    assert found == pytest.approx([6.0166631044, 3.5746548420, 2.8675207072, 2.3450667365, 1.9623378925], rel=1e-9)
    assert t_quantile(0.995, 1) == pytest.approx(63.6567411629, rel=1e-9)
    assert t_quantile(0.975, math.inf) == pytest.approx(1.9599639845)
    low = [chi_squared(0.2, degrees) for degrees in (1, 2, 2.6, 4, 8)]
    assert low == pytest.approx([0.0641847547, 0.2231435513, 0.2955234306, 0.4121941545, 0.5741967015], rel=1e-8)
    assert chi_squared(0.9, 2.6) == pytest.approx(2.1581905774, rel=1e-8)


def test_holm_by_hand() -> None:
    # 3 x 0.01, then 2 x 0.02, which is more, then 0.5; and never less than the one before
    assert holm({"a": 0.02, "b": 0.5, "c": 0.01}) == pytest.approx({"c": 0.03, "a": 0.04, "b": 0.5})
    assert holm({"a": 0.02, "b": 0.021})["b"] == pytest.approx(0.04)
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}


def test_the_p_value_is_where_the_interval_ends_at_zero() -> None:
    first = {str(task): 0.0 for task in range(30)}
    second = {task: 0.25 * (int(task) % 3 > 0) for task in first}
    p = p_value(lambda tail: rise([first], [second], tail=tail))
    assert rise([first], [second], tail=p / 2 * 1.01).low > 0 > rise([first], [second], tail=p / 2.1).low
    assert p_value(lambda tail: rise([first], [first], tail=tail)) == pytest.approx(1.0, abs=1e-3)


def test_tasks_that_share_a_world() -> None:
    # clusters of one size: t over their means .2, .4, .6, .6 (variance .11 / 3), three degrees of freedom
    means, worlds = [0.1, 0.3, 0.4, 0.4, 0.5, 0.7, 0.6, 0.6], list("aabbccdd")
    half = 3.1824463053 * math.sqrt(0.11 / 3 / 4)
    assert cluster_error(means, worlds) == pytest.approx(half)
    found = clustered(means, clusters=worlds)
    assert found.low == pytest.approx(min(clustered(means).low, 0.45 - half))
    assert found.high == pytest.approx(max(clustered(means).high, 0.45 + half))
    # shares 1/2 and 1/4 twice, means 0, 1, 1: Q by hand has the trace 3/8 - ... and is within rounding of numpy's
    uneven = cluster_error([0.0, 0.0, 1.0, 1.0], list("aabc"))
    w = np.array([0.5, 0.25, 0.25])
    q = (np.eye(3) - w).T @ np.diag(w**2) @ (np.eye(3) - w)
    variance = (w**2 * np.array([-0.5, 0.5, 0.5]) ** 2).sum() * (w**2).sum() / np.trace(q)
    assert uneven == pytest.approx(t_quantile(0.975, np.trace(q) ** 2 / np.trace(q @ q)) * math.sqrt(variance))
    # all failed: four worlds of two say as much as four tasks
    assert clustered([0.0] * 8, clusters=worlds).high == pytest.approx(1 - 0.025 ** (1 / 4))
    assert clustered([0.0] * 8, clusters=list("abcdefgh")) == clustered([0.0] * 8)
    one = clustered(means, clusters=["a"] * 8)
    assert (one.low, one.high) == (0.0, 1.0)
    first, second = dict.fromkeys("abcd", 0.0), {"a": 0.5, "b": 0.5, "c": 0.0, "d": 0.0}
    wide = rise([first], [second], clusters=dict(zip("abcd", "xxyy", strict=True)))
    assert wide.high == pytest.approx(min(1.0, 0.25 + 12.7062047362 * math.sqrt(0.125 / 2)))
    assert rise([first], [second]).high < wide.high
    assert rise([first], [second], clusters=dict.fromkeys("abcd", "x")).low == -1.0


def test_tasks_in_any_order_give_the_same_numbers_to_the_last_bit() -> None:
    """An exact sum has no order, so none of a processor's kernels or of a thread's share enters."""
    rng = np.random.default_rng(5)
    values, clusters = (rng.random(100) - 0.2).tolist(), rng.integers(0, 9, 100).tolist()
    pairs = list(zip(values, clusters, strict=True))

    def numbers() -> list[object]:
        one, groups = [value for value, _ in pairs], [cluster for _, cluster in pairs]
        means = [min(1.0, abs(value)) for value in one]
        return [cluster_error(one, groups), difference_bounds(one), variance(one), clustered(means, clusters=groups)]

    first = numbers()
    for _ in range(4):
        rng.shuffle(pairs)
        assert numbers() == first


def test_numbers_are_alike_but_for_their_last_digits() -> None:
    row = {"mean": 0.1, "high": 1234.5, "tasks": 7, "text": ["a", None, 0.0]}
    assert alike(row, {**row, "mean": 0.1 + 1e-10, "high": 1234.5 + 1e-7, "text": ("a", None, -1e-12)})
    for other in ({"mean": 0.1 + 1e-8}, {"high": 1234.51}, {"tasks": 8}, {"text": ["a", None]}, {"more": 1.0}):
        assert not alike(row, {**row, **other})
    assert not alike(0.5, None)
    assert not alike(math.nan, math.nan)


def test_intervals_at_the_ends_are_not_empty() -> None:
    assert clustered([1.0] * 134).low == pytest.approx(0.025 ** (1 / 134))
    assert clustered([0.0] * 134).high == pytest.approx(1 - 0.025 ** (1 / 134))
    assert clustered([0.5]) == Interval(mean=0.5, low=0.0, high=1.0, tasks=1)
    with pytest.raises(ScoreError, match="no scored episodes"):
        clustered([])


def test_paired_comparison() -> None:
    better = [replace(e, success=True) if e.task.task_id in "bc" else e for e in RUN]
    difference = compare(RUN, better)
    assert difference.mean == 3 / 8
    # 0 .5 1 0 and two more, -1 and 1: mean 1/4, variance (3.25 - 6/16) / 5 = .575, t of five degrees 2.5706
    half = 2.5705818366 * math.sqrt(0.575 / 6)
    assert (difference.low, difference.high) == (pytest.approx(0.25 - half), pytest.approx(1.0))
    assert difference.told == "one run each"
    assert not difference.clear
    assert str(Interval(mean=0.5, low=0.25, high=0.75, tasks=3)) == "50.0 [25.0, 75.0]"
    assert str(Interval(mean=-0.0, low=-0.0004, high=-0.0006, tasks=3)) == "0.0 [0.0, -0.1]"
    nothing = Difference(mean=-0.0, low=-0.0004, high=0.25, tasks=3, seeds=(2, 2))
    assert signed(nothing) == "+0.0 [+0.0, +25.0]"
    with pytest.raises(ScoreError, match="tasks were played in one of them only"):
        compare(RUN, RUN[:12])
    other = [replace(e, task=replace(e.task, sha256="x")) for e in RUN]
    with pytest.raises(ScoreError, match="same name, another task"):
        compare(RUN, other)
    with pytest.raises(ScoreError, match="none of 1 episodes"):
        score([episode("a", 0, False, status=Status.ERROR_ENV)])


def test_a_curve_at_a_cost_and_over_a_window() -> None:
    costs = [0.0, 1.0, 3.0]
    assert cost_weights(costs, 2.0, 2.0).tolist() == [0.0, 0.5, 0.5]
    # from 0 to 2: one half of the first stretch, the second from 1 to 2 with weights 3/4 and 1/4
    assert cost_weights(costs, 0.0, 2.0).tolist() == pytest.approx([0.25, 0.25 + 0.375, 0.125])
    assert cost_weights(costs, 5.0, 5.0).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("successes", "tasks", "low", "high"),
    [(0, 10, 0.0, 0.30850), (1, 10, 0.00253, 0.44502), (5, 20, 0.08657, 0.49105), (50, 100, 0.39832, 0.60168)],
)
def test_of_zeros_and_ones_they_are_the_tables_of_clopper_and_pearson(
    successes: int, tasks: int, low: float, high: float
) -> None:
    found = clustered([1.0] * successes + [0.0] * (tasks - successes))
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-5), pytest.approx(high, abs=1e-5))
    assert found.mean == successes / tasks


@pytest.mark.parametrize("tasks", [2, 7, 40, 100, 500, 3000])
def test_of_tasks_that_all_failed_or_all_succeeded(tasks: int) -> None:
    bound = 1 - 0.025 ** (1 / tasks)
    assert mean_bounds([0.0] * tasks) == (pytest.approx(0.0, abs=1e-7), pytest.approx(bound, abs=1e-7))
    low, high = mean_bounds([1.0] * tasks)
    assert (low, high) == (pytest.approx(1 - bound, abs=1e-7), pytest.approx(1.0, abs=1e-7))


@pytest.mark.parametrize("tasks", [2, 5, 30, 200])
def test_between_the_ends_they_are_quantiles_of_weighted_means(tasks: int) -> None:
    """Of the definition, drawn: weights from Dirichlet(1, ..., 1), one more value at the end of the scale."""
    rng = np.random.default_rng(tasks)
    values = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0], tasks, p=[0.4, 0.3, 0.1, 0.1, 0.1])
    weights = rng.dirichlet(np.ones(tasks + 1), 100_000)
    drawn = np.quantile(weights @ np.append(values, 1.0), 0.975), np.quantile(weights @ np.append(values, 0.0), 0.025)
    low, high = mean_bounds(list(values))
    assert (high, low) == (pytest.approx(drawn[0], abs=4e-3), pytest.approx(drawn[1], abs=4e-3))


def fill(successes: int, tasks: int, samples: int, spread: bool) -> list[float]:
    """Means of tasks with so many successes in all, one task after another, or as even as can be."""
    counts = [0] * tasks
    for number in range(successes):
        counts[number % tasks if spread else number // samples] += 1
    return [count / samples for count in counts]


@pytest.mark.parametrize("spread", [True, False])
def test_more_successes_never_lower_an_end(spread: bool) -> None:
    found = [clustered(fill(successes, 100, 4, spread)) for successes in (*range(24), *range(24, 400, 25), 399, 400)]
    for less, more in pairwise(found):
        assert less.low <= more.low + 1e-7
        assert less.high <= more.high + 1e-7
        assert more.low <= more.mean <= more.high


quarters = st.integers(0, 4).map(lambda count: count / 4)


@given(st.lists(st.tuples(quarters, quarters), min_size=2, max_size=30))
def test_no_task_that_does_better_lowers_an_end(pairs: list[tuple[float, float]]) -> None:
    less, more = clustered([min(pair) for pair in pairs]), clustered([max(pair) for pair in pairs])
    assert (less.low <= more.low + 1e-7, less.high <= more.high + 1e-7) == (True, True)
    mirrored = clustered([1 - min(pair) for pair in pairs])
    assert (1 - mirrored.high, 1 - mirrored.low) == (
        pytest.approx(less.low, abs=1e-7),
        pytest.approx(less.high, abs=1e-7),
    )


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.0, 0.01, 0.05, 0.5, 0.95, 1.0])
def test_they_hold_the_true_value_as_often_as_they_say(rate: float) -> None:
    """100 tasks of 4 samples at every rate, 400 times (a standard error of 1.1 %), and not because they are wide."""
    one = next(measure(SimulatedStudy(seeds=1, rate=rate, hard=0.0), 400))
    assert one.covered >= 0.94
    assert one.width < 0.15


def test_differences_lie_on_a_scale_of_their_own() -> None:
    first = {str(task): 0.25 * (task % 3) for task in range(40)}
    second = {task: min(value + 0.25, 1.0) for task, value in first.items()}
    found, swapped = rise([first], [second]), rise([second], [first])
    # forty times .25, -1 and 1: mean 10/42, sum of squares 4.5, t of 41 degrees 2.0195
    half = 2.0195409704 * math.sqrt((4.5 - 100 / 42) / 41 / 42)
    assert (found.low, found.high) == (pytest.approx(10 / 42 - half), pytest.approx(10 / 42 + half))
    level = [dict.fromkeys(map(str, range(100)), 0.5)]
    alike = rise(level, level)
    assert alike.high == pytest.approx(0.0276, abs=1e-4)
    assert (swapped.low, swapped.high) == (pytest.approx(-found.high, abs=1e-7), pytest.approx(-found.low, abs=1e-7))
    assert 0 < found.low < 0.25 < found.high


def test_errors_have_bounds_and_are_left_out_of_the_score() -> None:
    run = [episode("a", 0, True), episode("a", 1, False, status=Status.ERROR_ENGINE), episode("b", 0, False)]
    found = score([*run, episode("c", 0, True, status=Status.ERROR_ENV)])
    assert (found.overall.avg.mean, found.errors) == (0.5, 2)
    # lost: a has 1 of 2, b none, c none; won: a all, b none, c all
    assert found.bounds == (pytest.approx(0.5 / 3), pytest.approx(2 / 3))
    header, rows = success_table({"one": found, "two": score(run[:1])})
    assert (header[-1], rows[0][-1], rows[1][-1]) == ("errors lost, won %", "16.7, 66.7", "-")
    assert score(run[:1]).bounds is None
    assert "bounds" not in score(run[:1]).to_json()
    assert found.to_json()["bounds"] == found.bounds


def test_a_graded_score_has_an_interval() -> None:
    run = [replace(episode(task, 0, False), score=value) for task, value in (("a", 0.5), ("b", 0.25), ("c", 0.75))]
    assert score(run).graded == clustered([0.5, 0.25, 0.75])
    assert score(RUN).graded is None
    assert "score [95 %]" in success_table({"run": score(run)})[0]


def test_tasks_of_one_world_are_told() -> None:
    run = [episode(task, 0, task in "ab") for task in "abcdef"]
    worlds = [replace(one, task=replace(one.task, cluster=world)) for one, world in zip(run, "xxyyzz", strict=True)]
    found = score(worlds)
    assert found.clusters == 3
    assert found.new_clusters == clustered([1.0, 1.0, 0.0, 0.0, 0.0, 0.0], clusters=list("xxyyzz"))
    assert found.overall == score(run).overall
    header, rows = success_table({"run": found})
    assert rows[0][header.index("new scenes, worlds, products [95 %]")].startswith(
        "for these 3 only; 33.3 [0.0, 100.0]"
    )
    for world in ("", "x"):
        alone = score([replace(one, task=replace(one.task, cluster=world)) for one in run])
        assert alone.new_clusters is None
    assert "clusters" not in score(run).to_json()
