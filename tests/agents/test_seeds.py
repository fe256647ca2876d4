"""Intervals over seeds and tasks by hand; what a pilot predicts, against simulations and the recorded studies."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from late import late

from turngym.agents.evaluation.coverage import REFERENCE, SimulatedStudy, measure, shown_apart
from turngym.agents.evaluation.seeds import (
    Design,
    Spread,
    TaskMeans,
    VarianceParts,
    cheapest,
    crossed_error,
    degrees_of_two,
    detectable,
    differences,
    half_of_arms,
    half_width,
    in_family,
    over_seeds,
    power,
    rise,
    seed_apart,
    seed_spread,
    spread_of,
)
from turngym.agents.evaluation.statistics import ScoreError, clustered, difference_bounds, t_quantile
from turngym.core.errors import TurngymError
from turngym.core.spec import changed
from turngym.scripts.options import read_options
from turngym.scripts.study.coverage import CoverageOptions


def test_a_method_over_its_seeds_and_tasks_by_hand() -> None:
    uneven = [{"a": 0.2, "b": 0.4, "c": 0.6}, {"a": 0.4, "b": 0.6, "c": 0.8}]
    # seeds 0.4 and 0.6: variance 0.02, A = 0.01; tasks 0.3, 0.5, 0.7: variance 0.04, B = 0.04 / 3; nothing is left, so
    # C = 0: t(1) = 12.706 for A and t(2) = 4.3027 for B
    half = math.sqrt(12.706204736174698**2 * 0.01 + 4.302652729911275**2 * 0.04 / 3)
    assert crossed_error([list(run.values()) for run in uneven]) == pytest.approx(half)
    assert (over_seeds(uneven).low, over_seeds(uneven).high) == (0.0, 1.0)
    three = [[0.1, 0.5], [0.3, 0.3], [0.2, 0.7]]
    # seeds .3 .3 .45: A = .0075 / 3; tasks .2 .5: B = .045 / 2; cells less both: -+.05, +-.15, -+.1, squares .07 over
    # two degrees: C = .035 / 6; c = 1/8: 4.3027^2 (A - C/8) + 12.706^2 (B - 7/8 C)
    squared = 4.302652729911275**2 * (0.0025 - 0.035 / 48) + 12.706204736174698**2 * (0.0225 - 0.035 * 7 / 48)
    assert crossed_error(three) == pytest.approx(math.sqrt(squared))


def test_a_difference_over_seeds_by_hand() -> None:
    before = [{"a": 0.25, "b": 0.5}, {"a": 0.5, "b": 0.75}]
    after = [{"a": 0.75, "b": 1.0}, {"a": 0.25, "b": 0.5}]
    found = rise(before, after)
    # both methods have no chance; seeds .375 .625 and .875 .375: A = (.03125 + .125) / 2; tasks differ alike
    apart = (0.03125 + 0.125) / 2
    assert (found.mean, found.seeds, found.tasks) == (0.125, (2, 2), 2)
    assert found.seed_error == pytest.approx(math.sqrt(apart))
    assert found.task_error == 0.0
    # pairs of runs: .75 > .25, .75 > .5, .25 = .25, .25 < .5; the same in b
    assert found.better == pytest.approx(2.5 / 4)
    # shares 1/5 and 4/5
    assert degrees_of_two([0.03125, 0.125], 1) == pytest.approx(25 / (1 + 16))
    # all of one of them: its own degrees; alike, or nothing: those of both
    assert [degrees_of_two(apart, 2) for apart in ([0.5, 0.0], [0.5, 0.5], [0.0, 0.0])] == [2, 4, 4]
    many = [[{str(task): value for task in range(100)} for value in runs] for runs in ((0.375, 0.625), (0.4, 0.44))]
    wide = rise(*many)
    degrees = degrees_of_two([0.03125, 0.0008], 1)
    half = t_quantile(0.975, degrees) * math.sqrt((0.03125 + 0.0008) / 2)
    assert (wide.low, wide.high) == pytest.approx((max(-1.0, -0.08 - half), min(1.0, -0.08 + half)))


def test_methods_of_few_and_of_many_seeds_have_a_quantile_each() -> None:
    """Two seeds .3 and .5, which vary by .02 / 2, and five that vary by .001 / 5, over tasks that differ by nothing."""
    few = [{str(task): value for task in range(100)} for value in (0.3, 0.5)]
    many = [{str(task): 0.6 + place * math.sqrt(0.0004) for task in range(100)} for place in (-2, -1, 0, 1, 2)]
    half = math.sqrt(12.706204736**2 * 0.02 / 2 + 2.776445105**2 * 0.001 / 5)
    parts = [VarianceParts.of(np.array([[*run.values()] for run in runs])) for runs in (few, many)]
    assert half_of_arms(parts, 0.0, 1.98, 0.025) == pytest.approx(half, rel=1e-6)
    # what both have of chance counts with the tasks' quantile: 0 of two seeds, 21/25 of five
    noisy = [replace(part, chance=0.0001) for part in parts]
    squared = 12.706204736**2 * 0.02 / 2 + 2.776445105**2 * (0.001 / 5 - 0.000084) + 1.98**2 * (0.0003 - 0.000116)
    assert half_of_arms(noisy, 0.0003, 1.98, 0.025) == pytest.approx(math.sqrt(squared), rel=1e-6)
    # as many of both: one quantile for the sum, here of 2 (1.75 + 1)^2 / (1.75^2 + 1) degrees
    same = [
        VarianceParts(seeds=3, between_seeds=value, between_tasks=0.0, chance=0.00009) for value in (0.0007, 0.0004)
    ]
    degrees = 2 * 2.75**2 / (1.75**2 + 1)
    squared = t_quantile(0.975, degrees) ** 2 * (0.0011 - 0.0001) + 1.98**2 * 0.0001
    assert half_of_arms(same, 0.0, 1.98, 0.025) == pytest.approx(math.sqrt(squared), rel=1e-6)


def test_a_seed_that_collapsed_lies_apart() -> None:
    rng = np.random.default_rng(3)

    def runs(*levels: float) -> list[TaskMeans]:
        rates = np.array(levels)[:, None] + rng.normal(0, 0.1, 100)
        values = rng.binomial(4, rates.clip(0, 1)) / 4
        return [{str(task): float(value) for task, value in enumerate(row)} for row in values]

    assert seed_apart(runs(0.5, 0.52, 0.49, 0.1, 0.5)) == 3
    assert seed_apart(runs(0.9, 0.5, 0.52, 0.49, 0.5)) == 0
    assert seed_apart(runs(0.5, 0.6, 0.4, 0.3, 0.7)) is None
    # seeds of one normal distribution, of chance alone, and two that differ: which of them would it be?
    assert seed_apart(runs(0.5, 0.1)) is None
    assert seed_apart([{"a": 0.5}, {"a": 0.5}, {"a": 0.1}]) is None
    for count, spread in ((3, 0.0), (5, 0.0), (5, 0.08), (10, 0.08)):
        found = [seed_apart(runs(*rng.normal(0.5, spread, count).clip(0.2, 0.8))) is not None for _ in range(400)]
        assert fmean(found) <= 0.075, (count, spread)


def test_tasks_and_seeds_in_any_order_give_the_same_numbers_to_the_last_bit() -> None:
    rng = np.random.default_rng(6)
    values_SN, worlds = rng.random((6, 57)), rng.integers(0, 9, 57)

    def numbers(seeds: list[int], tasks: list[int]) -> list[object]:
        # sums follow the order of names, so a task in another place has another name
        runs = [{f"{place:02}": float(values_SN[seed, task]) for place, task in enumerate(tasks)} for seed in seeds]
        groups = {f"{place:02}": int(worlds[task]) for place, task in enumerate(tasks)}
        before, after = (
            [run for seed, run in zip(seeds, runs, strict=True) if (seed < 3) == low] for low in (True, False)
        )
        difference = rise(before, after, clusters=groups, pair=False)
        return [over_seeds(runs, clusters=groups), difference, seed_spread(runs)]

    first = numbers(list(range(6)), list(range(57)))
    for _ in range(20):
        assert numbers(rng.permutation(6).tolist(), rng.permutation(57).tolist()) == first


def test_seeds_pair_up_where_that_is_clearly_shorter() -> None:
    levels = (0.3, 0.5, 0.4)
    before = [{str(task): level for task in range(100)} for level in levels]
    after = [
        {str(task): level + more for task in range(100)} for level, more in zip(levels, (0.1, 0.12, 0.11), strict=True)
    ]
    paired, apart = rise(before, after), rise(before, after, pair=False)
    # the differences .1 .12 .11 vary by .01, the seeds themselves by .1
    assert paired.seed_error == pytest.approx(0.01 / math.sqrt(3))
    assert paired.mean - paired.low < 0.1
    assert apart.seed_error is not None
    assert apart.seed_error > 0.08
    assert paired.clear
    assert not apart.clear
    # more runs of one method than of the other
    assert rise(before, after[:2]).seeds == (3, 2)


def test_one_run_says_nothing_of_seeds() -> None:
    one = [{str(task): 0.1 for task in range(100)}]
    two = [{str(task): 0.9 for task in range(100)} for _ in range(5)]
    for found in (rise(one, two[:1]), rise(one, two), rise(two, one)):
        assert found.told == "one run each"
        assert not found.clear
        assert found.seed_error is None
    scripted = rise(one, two, fixed=True)
    assert (scripted.told, scripted.seed_error) == ("yes", pytest.approx(0.0, abs=1e-9))
    assert rise(one, one, fixed=True).low == difference_bounds([0.0] * 100)[0]


def test_a_family_by_holm() -> None:
    runs = [
        [{str(task): level + seed / 100 for task in range(100)} for seed in range(3)] for level in (0.4, 0.6, 0.401)
    ]
    found = {name: rise(runs[0], other, p=True) for name, other in (("far", runs[1]), ("near", runs[2]))}
    assert found["far"].p is not None
    family = in_family({**found, "single": rise(runs[0][:1], runs[1][:1], p=True)})
    assert [family[name].family for name in family] == [2, 2, 2]
    assert family["far"].adjusted == pytest.approx(2 * found["far"].p)
    assert family["far"].clear
    assert not family["near"].clear
    assert family["single"].adjusted is None
    turned = family["far"].reversed()
    assert (turned.mean, turned.better, turned.clear) == (-family["far"].mean, 1 - family["far"].better, True)


def test_the_spread_of_seeds_without_chance() -> None:
    # seed means .3 .3 .45: variance .0075, less C S = .035 / 2 over 2 tasks: nothing is left
    three = [{"a": 0.1, "b": 0.5}, {"a": 0.3, "b": 0.3}, {"a": 0.2, "b": 0.7}]
    assert seed_spread(three) == pytest.approx(math.sqrt(max(0.0, 0.0075 - 0.035 / 4)))
    assert seed_spread([dict.fromkeys("ab", value) for value in (0.2, 0.4)]) == pytest.approx(math.sqrt(0.02))
    assert seed_spread(three[:1]) is None
    assert seed_spread([{"a": 0.1}, {"a": 0.2}]) is None


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
    with pytest.raises(ScoreError, match="run 3 of 4 played other tasks"):
        rise([{"a": 0.0}] * 2, [{"b": 0.0}, {"a": 1.0}])
    with pytest.raises(ScoreError, match="no runs"):
        rise([], [{"a": 0.0}])
    with pytest.raises(ScoreError, match="no scored episodes"):
        over_seeds([{}, {}])
    with pytest.raises(ScoreError, match="do not pair up"):
        differences([{"a": 0.0}], [{"a": 0.0}, {"a": 1.0}])
    # one task says nothing of others
    assert (rise([{"a": 0.0}] * 2, [{"a": 0.5}] * 2).low, rise([{"a": 0.0}] * 2, [{"a": 0.5}] * 2).high) == (-1.0, 1.0)


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
    # seeds are not paired, and all of it is of the second method: chi-squared of one degree has 20 % below 0.0642
    assert not found.paired
    assert found.seed_high == pytest.approx(0.03125 / 0.06418475)
    # nothing is left for chance, whatever y (1 - y) says
    assert spread_of(first, second, samples=4).sample == 0.0
    # 0.5 0 / 0 0.5: the means are alike, all variance is what a seed does in a task
    crossed = spread_of(first, [{"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 1.0}], samples=1)
    assert (crossed.seed, crossed.task, crossed.both) == (0.0, 0.0, 0.25)
    # y (1 - y) is 1/4 four times, 0, 1/4, 1/4, 0 for the second: mean 3/16; twice, for two methods; / (K - 1) is .125
    split = spread_of(first, [{"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 1.0}], samples=4)
    assert (split.sample, split.both) == (pytest.approx(4 * 0.125), pytest.approx(0.125))


def test_a_pilot_needs_two_seeds_and_tasks() -> None:
    with pytest.raises(ScoreError, match="1 seeds of 2 tasks: a pilot needs two of each"):
        spread_of([{"a": 0.0, "b": 0.0}], [{"a": 1.0, "b": 1.0}], 1)
    with pytest.raises(ScoreError, match="2 seeds of 1 tasks"):
        spread_of([{"a": 0.0}] * 2, [{"a": 1.0}] * 2, 1)


def test_width_and_detectable_difference_by_hand() -> None:
    # 100 tasks vary by 20 points, seeds by nothing: -1 and 1 added, t(101) sqrt((99 * .04 + 2) / 101 / 102)
    narrow, design = spread(task=0.04), Design(seeds=3, tasks=100, samples=1)
    assert half_width(narrow, design) == pytest.approx(1.9837310 * math.sqrt(5.96 / 101 / 102), abs=1e-6)
    # 5 seeds vary by 10 points, 10,000 tasks by nothing: A = .002 on average, some eight degrees
    wide, design = spread(seed=0.01), Design(seeds=5, tasks=10_000, samples=1)
    assert half_width(wide, design) == pytest.approx(2.306 * math.sqrt(0.002), rel=0.03)
    paired = half_width(replace(wide, paired=True), design)
    assert paired == pytest.approx(2.776 * math.sqrt(0.002) * 0.94, rel=0.01)
    found = detectable(narrow, design)
    assert power(narrow, design, found) == pytest.approx(0.8, abs=1e-4)
    assert power(narrow, design, found / 2) < 0.5
    assert detectable(spread(seed=0.25), Design(seeds=2, tasks=10, samples=1)) == math.inf


@pytest.mark.parametrize(
    ("seed", "paired"),
    late(product((0.0, 0.0002, 0.0008, 0.004), (False, True)), (0.0008, True), mark=pytest.mark.nightly),
)
def test_more_never_needs_a_larger_difference(seed: float, paired: bool) -> None:
    known = replace(spread(seed=seed, task=0.005, both=0.002, sample=0.45), paired=paired)
    for values in product((2, 3, 4, 6, 10), (50, 75, 100, 200, 500), (1, 2, 4, 16)):
        least = detectable(known, Design(**dict(zip(("seeds", "tasks", "samples"), values, strict=True))))
        for place in range(3):
            more = [value + (value + 1) // 2 * (place == number) for number, value in enumerate(values)]
            found = detectable(known, Design(**dict(zip(("seeds", "tasks", "samples"), more, strict=True))))
            assert found <= least + 5e-4, (values, more)


def test_the_cheapest_design_depends_on_what_is_dear() -> None:
    known = spread(seed=0.0004, task=0.01, sample=0.2)
    designs = [Design(seeds=s, tasks=m, samples=k) for s in (2, 3, 5, 8, 12) for m in (50, 200) for k in (1, 4)]
    prices = {
        "training": lambda design: 9.0 * design.runs + 0.001 * design.episodes,
        "playing": lambda design: float(design.episodes),
    }
    enough = [one for one in designs if power(known, one, 0.08) >= 0.8]
    by_hand = {name: min(enough, key=lambda one: (price(one), one.episodes)) for name, price in prices.items()}
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
    """80 % power is between 75 and 88 %, and at least 94 % of the intervals hold the truth."""
    rng, difference = np.random.default_rng(0), detectable(known, design)
    found = [rise(*simulated(rng, known, design, difference)) for _ in range(400)]
    told = fmean(one.low > 0 for one in found)
    assert 0.75 <= told <= 0.88, told
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
    from turngym.trainers.study.records import read_records

    ratios = []
    for world in ("alfworld", "search"):
        path = Path(__file__).parents[2] / "docs" / "data" / f"study-{world}-loops.json.gz"
        runs: dict[str, dict[int, TaskMeans]] = {}
        for record in read_records(path).records:
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
    assert 0.9 <= np.median(ratios) <= 1.35, sorted(ratios)
    assert sum(0.7 <= ratio <= 1.6 for ratio in ratios) >= 19, sorted(ratios)


# --- What they cover


KINDS = ((0.0, None, 0.0), (0.04, None, 0.0), (0.08, 0.0, 0.0), (0.04, None, 0.9))
STUDIES = [(seeds, *kind) for seeds in (2, 3, 5, 10) for kind in KINDS]


@pytest.mark.long
@pytest.mark.parametrize(
    ("seeds", "apart", "second", "correlation"),
    late(STUDIES, (2, 0.08, 0.0, 0.0), (3, 0.04, None, 0.0), mark=pytest.mark.nightly),
)
def test_they_hold_the_truth_as_often_as_they_say(
    seeds: int, apart: float, second: float | None, correlation: float
) -> None:
    """600 studies each, a standard error of 0.9 %."""
    study = SimulatedStudy(seeds=seeds, seed_spread=apart, second_spread=second, correlation=correlation)
    for one in measure(study, 600):
        assert one.covered >= 0.92 or one.name == REFERENCE, one
        if seeds > 2 and not apart and one.name == "two methods over their seeds":
            assert one.ratio <= 1.4, one


@pytest.mark.long
@pytest.mark.parametrize(
    ("clusters", "rate"), late([(4, 0.5), (20, 0.5), (20, 0.1), (47, 0.3)], (4, 0.5), mark=pytest.mark.nightly)
)
def test_they_hold_it_for_new_worlds(clusters: int, rate: float) -> None:
    for one in measure(SimulatedStudy(seeds=3, clusters=clusters, rate=rate, shared=0.2), 400):
        # the others are for these worlds
        if "new clusters" in one.name or "over their" in one.name or "over its" in one.name:
            assert one.covered >= 0.92, one


def test_coverage_is_counted_by_hand() -> None:
    study = SimulatedStudy(seeds=1, tasks=20, samples=2, rate=0.5, difference=0.4, hard=0.0, task_spread=0.0)
    one, two = measure(study, 40)
    assert (one.name, two.name) == ("one evaluation, these tasks' kind", "two runs, by task")
    assert min(one.covered, two.covered) > 0.85
    assert two.clear > 0.8
    # 20 tasks of two samples at 50 %: a standard error of 7.9 points
    assert 0.25 < one.width < 0.45
    assert study.truth() == (0.5, 0.4)
    assert read_options(CoverageOptions, ["--difference", "-0.1"], prog="", about="").study.difference == -0.1
    assert SimulatedStudy(rate=0.99, hard=0.2).truth()[0] < 0.95
    with pytest.raises(TurngymError, match=r"--clusters 30: .* 20"):
        SimulatedStudy(tasks=20, clusters=30)


def test_draws_cover_by_their_tasks() -> None:
    study = SimulatedStudy(seeds=1, tasks=20, hard=0.3, draws=200)
    *others, drawn = measure(study, 40)
    assert len(others) == 2
    won, tasks = study.validation(np.random.default_rng(0))
    assert (len(won), set(won), len(set(tasks))) == (200, {0.0, 1.0}, 20)
    # as wide as over 20 tasks, whose rates deviate by 0.3, and not as over 200 (0.14)
    assert drawn.covered > 0.85
    assert drawn.width > 0.25


def test_a_study_is_drawn_as_it_is_asked_for() -> None:
    rng = np.random.default_rng(0)
    study = SimulatedStudy(seeds=2, second_seeds=5, family=3, seed_spread=0.0, second_spread=0.1, tasks=200)
    first, *others = study.rates(rng)
    assert (first.shape, [other.shape for other in others]) == ((2, 200), [(5, 200)] * 3)
    assert first.mean(1).std() < 1e-12 < 0.02 < others[0].mean(1).std()
    falls = SimulatedStudy(seeds=200, rate=0.7, collapse=0.25, seed_spread=0.0, hard=0.0, task_spread=0.0)
    fallen = [(rates.mean(1) < 0.5).mean() for rates in falls.rates(rng)]
    assert fallen[0] == 0 < 0.15 < fallen[1] < 0.35
    assert falls.truth() == pytest.approx((0.7, -0.1), abs=0.01)
    # two runs by themselves do not collapse: their truth is zero
    assert {one.name: one.covered for one in measure(changed(falls, seeds=2), 30)}["two runs, by task"] > 0.8
    kinds = {one.name: one for one in measure(changed(study, tasks=40), 30)}
    assert REFERENCE not in kinds
    # nine chances to be wrong at a ninth of the level each
    assert kinds["the clearest of 3, by Holm"].width > kinds["two methods over their seeds"].width
    assert shown_apart(SimulatedStudy(seeds=5, rate=0.7, collapse=0.2, seed_spread=0.01, tasks=40), 30) > 0.3
    assert shown_apart(SimulatedStudy(seeds=5, tasks=40), 30) < 0.2
