"""Intervals over seeds and tasks by hand; what a pilot predicts, against simulations and the recorded studies."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.agents.evaluation.seeds import (
    Design,
    Price,
    Spread,
    TaskMeans,
    cheapest,
    crossed_error,
    detectable,
    half_width,
    over_seeds,
    power,
    rise,
    spread_of,
)
from turngym.agents.evaluation.statistics import ScoreError, clustered


def test_rises_over_seeds_and_tasks_by_hand() -> None:
    before = [{"a": 0.0, "b": 0.25}, {"a": 0.5, "b": 0.25}]
    after = [{"a": 0.5, "b": 0.25}, {"a": 0.5, "b": 0.75}]
    # differences 0.5 0 / 0 0.5: both seeds and both tasks have the mean 0.25, so nothing varies but chance
    assert rise(before, after).mean == 0.25
    uneven = [{"a": 0.2, "b": 0.4, "c": 0.6}, {"a": 0.4, "b": 0.6, "c": 0.8}]
    # seeds 0.4 and 0.6: variance 0.02, A = 0.01; tasks 0.3, 0.5, 0.7: variance 0.04, B = 0.04 / 3;
    # f = 0.000544 / (0.0001 / 1 + 0.000178 / 2) = 2.88, rounded down to 2: t = 4.3027
    found = over_seeds(uneven)
    half = 4.302652729911275 * math.sqrt(0.01 + 0.04 / 3)
    assert found.mean == pytest.approx(0.5)
    assert (found.low, found.high) == (pytest.approx(max(0.0, 0.5 - half)), pytest.approx(min(1.0, 0.5 + half)))
    assert crossed_error([list(run.values()) for run in uneven]) == pytest.approx(half)


def test_what_seeds_add_is_visible_and_the_interval_over_tasks_is_the_least() -> None:
    tasks = [f"{n}" for n in range(50)]
    alike = [dict.fromkeys(tasks, 0.0) | {"0": 0.5}] * 3
    # the seeds agree, so there is only what tasks say: below the t interval, which knows no end, above Gaffke's bound
    assert over_seeds(alike).high == clustered([0.5] + [0.0] * 49).high > 0.01 + 2.0096 * 0.01
    assert over_seeds(alike).low == 0.0
    apart = [dict.fromkeys(tasks, value) for value in (0.2, 0.5, 0.8)]
    half = 4.302652729911275 * math.sqrt(0.09 / 3)  # seeds 0.2, 0.5, 0.8: variance 0.09
    found = over_seeds(apart)
    assert (found.low, found.high) == (0.0, 1.0)
    assert half > 0.5
    near = over_seeds([dict.fromkeys(tasks, value) for value in (0.45, 0.5, 0.55)])
    assert near.low == pytest.approx(0.5 - 4.302652729911275 * math.sqrt(0.0025 / 3))


def test_one_seed_gives_the_interval_over_tasks() -> None:
    assert over_seeds([{"a": 0.2, "b": 0.4}]) == clustered([0.2, 0.4])


def test_runs_that_do_not_pair_up_are_refused() -> None:
    with pytest.raises(ScoreError, match="run 2 of 2 played other tasks"):
        over_seeds([{"a": 0.0}, {"b": 0.0}])
    with pytest.raises(ScoreError, match="no runs"):
        over_seeds([])
    with pytest.raises(ScoreError, match="do not pair up"):
        rise([{"a": 0.0}], [{"a": 0.0}, {"a": 1.0}])


@given(
    st.integers(2, 4).flatmap(
        lambda n: st.lists(st.lists(st.floats(0, 1), min_size=n, max_size=n), min_size=2, max_size=4)
    ),
    st.floats(-0.5, 0.5),
)
def test_moving_every_value_moves_the_interval(values: list[list[float]], by: float) -> None:
    moved = [[value + by for value in row] for row in values]
    one, two = crossed_error(values), crossed_error(moved)
    if one > 1e-6:  # without variance there is nothing but rounding
        assert two == pytest.approx(one, rel=1e-6, abs=1e-6)
    found = over_seeds([{str(task): value for task, value in enumerate(row)} for row in values])
    assert found.low <= found.mean + 1e-9
    assert found.mean <= found.high + 1e-9


# --- Predictions


def spread(**values: float) -> Spread:
    return Spread(**{"seed": 0.0, "seed_high": 0.0, "task": 0.0, "both": 0.0, "sample": 0.0, "mean": 0.0, **values})


def test_the_spread_of_a_pilot_by_hand() -> None:
    first = [{"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5}]
    second = [{"a": 0.75, "b": 0.5}, {"a": 1.0, "b": 0.75}]
    # differences 0.25 0 / 0.5 0.25: seeds 0.125 0.375, tasks 0.375 0.125, nothing beyond: variances 1/32 each
    found = spread_of(first, second, samples=1)
    assert (found.seed, found.task, found.both, found.sample, found.mean) == (0.03125, 0.03125, 0.0, 0.0, 0.25)
    # chi-squared of one degree has its 20 % quantile at 0.0642, by Wilson and Hilferty at 0.0553
    assert found.seed_high == pytest.approx(0.03125 / 0.0553, rel=0.01)
    # y (1 - y) is 1/4 four times, 3/16, 1/4, 0, 3/16 for the second: mean 13/64; twice, for two methods; / (K - 1) * K
    assert spread_of(first, second, samples=4).sample == pytest.approx(4 / 3 * 2 * (4 / 4 + 2 * 3 / 16 + 1 / 4) / 8)
    # 0.5 0 / 0 0.5: the means are alike, all variance is what a seed does in a task
    crossed = spread_of(first, [{"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 1.0}], samples=1)
    assert (crossed.seed, crossed.task, crossed.both) == (0.0, 0.0, 0.25)


def test_a_pilot_needs_two_seeds_and_tasks() -> None:
    with pytest.raises(ScoreError, match="1 seeds of 2 tasks: a pilot needs two of each"):
        spread_of([{"a": 0.0, "b": 0.0}], [{"a": 1.0, "b": 1.0}], 1)
    with pytest.raises(ScoreError, match="2 seeds of 1 tasks"):
        spread_of([{"a": 0.0}] * 2, [{"a": 1.0}] * 2, 1)


def test_width_and_detectable_difference_by_hand() -> None:
    # 5 seeds vary by 10 points, 10,000 tasks by nothing: A = 0.002, four degrees of freedom, t = 2.776
    wide, design = spread(seed=0.01), Design(seeds=5, tasks=10_000, samples=1)
    assert half_width(wide, design) == pytest.approx(2.776 * math.sqrt(0.002), rel=0.01)
    # 100 tasks vary by 20 points, seeds by nothing; with -1 added Gaffke's bound is the mean less
    # 1/101 + 1.96 sqrt((0.04 * 100 + 100/101) / 101 / 102) = 0.0530, wider than t sqrt(0.0004) = 0.0397
    narrow, design = spread(task=0.04), Design(seeds=3, tasks=100, samples=1)
    assert half_width(narrow, design) == pytest.approx(0.0530, abs=1e-4)
    found = detectable(narrow, design)
    assert power(narrow, design, found) == pytest.approx(0.8, abs=1e-4)
    assert power(narrow, design, found / 2) < 0.5
    assert detectable(spread(seed=0.25), Design(seeds=2, tasks=10, samples=1)) == math.inf


def test_the_cheapest_design_depends_on_what_is_dear() -> None:
    known = spread(seed=0.0004, task=0.01, sample=0.2)
    designs = [Design(seeds=s, tasks=m, samples=k) for s in (2, 3, 5, 8, 12) for m in (50, 200) for k in (1, 4)]
    prices = {"training": Price(training=9.0, episode=0.001), "playing": Price(training=0.0, episode=1.0)}
    enough = [one for one in designs if power(known, one, 0.08) >= 0.8]
    by_hand = {name: min(enough, key=lambda one: (price.hours(one), one.episodes)) for name, price in prices.items()}
    assert by_hand["training"].seeds < by_hand["playing"].seeds
    assert {name: cheapest(known, 0.08, price, designs) for name, price in prices.items()} == by_hand
    assert cheapest(known, 0.001, prices["playing"], designs) is None


def simulated(
    rng: np.random.Generator, known: Spread, design: Design, difference: float
) -> tuple[list[TaskMeans], list[TaskMeans]]:
    """Two methods around 50 % with the given spread of their difference, each with half of its variances."""
    s, m = design.seeds, design.tasks
    shared = rng.normal(0, 0.1, m)  # some tasks are harder for both
    runs = []
    for sign in (-0.5, 0.5):
        rate = 0.5 + sign * difference + shared + rng.normal(0, math.sqrt(known.task / 2), m)
        rate = (
            rate + rng.normal(0, math.sqrt(known.seed / 2), (s, 1)) + rng.normal(0, math.sqrt(known.both / 2), (s, m))
        )
        means = rng.binomial(design.samples, rate.clip(0, 1)) / design.samples
        runs.append([{str(task): float(value) for task, value in enumerate(row)} for row in means])
    return runs[0], runs[1]


@pytest.mark.parametrize(
    ("known", "design"),
    [
        # by seeds, by tasks, by samples: the chance of two episodes around 50 % is 2 (0.25 - variance of the rates)
        (spread(seed=0.0032, task=0.002, both=0.002, sample=0.47), Design(seeds=5, tasks=60, samples=4)),
        (spread(seed=0.0002, task=0.03, both=0.002, sample=0.44), Design(seeds=4, tasks=80, samples=4)),
        (spread(seed=0.0002, task=0.002, both=0.002, sample=0.47), Design(seeds=3, tasks=80, samples=1)),
    ],
    ids=["seeds", "tasks", "samples"],
)
def test_the_promises_hold_in_simulations(known: Spread, design: Design) -> None:
    """80 % power is between 70 and 92 %, and at least 94 % of the intervals hold the truth."""
    rng, difference = np.random.default_rng(0), detectable(known, design)
    found = [rise(*simulated(rng, known, design, difference)) for _ in range(300)]
    told = fmean(one.low > 0 for one in found)
    assert 0.70 <= told <= 0.92, told
    assert fmean(one.low <= difference <= one.high for one in found) >= 0.94
    assert half_width(known, design, difference) == pytest.approx(fmean(one.mean - one.low for one in found), rel=0.1)


def test_a_pilot_finds_the_spread_again() -> None:
    known, design = spread(seed=0.003, task=0.02, both=0.01, sample=0.4), Design(seeds=6, tasks=100, samples=4)
    rng = np.random.default_rng(1)
    found = [spread_of(*simulated(rng, known, design, 0.1), samples=4) for _ in range(60)]
    for name in ("seed", "task", "both"):
        assert fmean(getattr(one, name) for one in found) == pytest.approx(getattr(known, name), rel=0.25), name
    assert fmean(one.mean for one in found) == pytest.approx(0.1, abs=0.02)
    # the limit lies above the true spread in about 80 % of the pilots
    assert 0.65 <= fmean(one.seed_high >= known.seed for one in found) <= 0.95


def test_two_seeds_and_half_the_tasks_predict_the_recorded_studies() -> None:
    """The width of all 26 recorded comparisons of 3 seeds x 100 tasks, from a third of their episodes."""
    from turngym.scripts.study.turnopd import read_study

    ratios = []
    for world in ("alfworld", "search"):
        path = Path(__file__).parents[2] / "docs" / "data" / f"study-{world}-loops.json.gz"
        runs: dict[str, dict[int, TaskMeans]] = {}
        for record in read_study(path).records:
            runs.setdefault(record.method, {})[record.seed] = record.evaluations[-1].tasks
        for method, of in runs.items():
            if method == "opd" or len(of) < 3:
                continue
            first, second = ([each[seed] for seed in (0, 1, 2)] for each in (runs["opd"], of))
            tasks = sorted(first[0])[::2]
            fewer = ([{task: run[task] for task in tasks} for run in part[:2]] for part in (first, second))
            pilot = spread_of(*fewer, samples=4)
            whole = rise(first, second)
            predicted = half_width(pilot, Design(seeds=3, tasks=100, samples=4), whole.mean)
            ratios.append(predicted / (whole.mean - whole.low))
    assert len(ratios) == 26
    assert 0.9 <= np.median(ratios) <= 1.25, sorted(ratios)
    assert sum(0.85 <= ratio <= 1.35 for ratio in ratios) >= 23, sorted(ratios)
