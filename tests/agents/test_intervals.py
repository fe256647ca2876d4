"""95 % intervals of evaluations: exact where that is known, monotone, and as often right as they say."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interval_coverage import MEASURES, RATES, Simulation, coverages, task_rates, true_pass

from turngym.agents.evaluation.statistics import clustered, mean_bounds, mean_covered, paired_difference, upper_bound


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
    assert mean_bounds([0.0] * tasks, 0.0, 1.0) == (pytest.approx(0.0, abs=1e-7), pytest.approx(bound, abs=1e-7))
    low, high = mean_bounds([1.0] * tasks, 0.0, 1.0)
    assert (low, high) == (pytest.approx(1 - bound, abs=1e-7), pytest.approx(1.0, abs=1e-7))


@pytest.mark.parametrize("tasks", [2, 5, 30, 200])
def test_between_the_ends_they_are_quantiles_of_weighted_means(tasks: int) -> None:
    """Of the definition, drawn: weights from Dirichlet(1, ..., 1), one more value at the end of the scale."""
    rng = np.random.default_rng(tasks)
    values = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0], tasks, p=[0.4, 0.3, 0.1, 0.1, 0.1])
    weights = rng.dirichlet(np.ones(tasks + 1), 100_000)
    drawn = np.quantile(weights @ np.append(values, 1.0), 0.975), np.quantile(weights @ np.append(values, 0.0), 0.025)
    low, high = mean_bounds(list(values), 0.0, 1.0)
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


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(quarters, quarters), min_size=2, max_size=30))
def test_no_task_that_does_better_lowers_an_end(pairs: list[tuple[float, float]]) -> None:
    less, more = clustered([min(pair) for pair in pairs]), clustered([max(pair) for pair in pairs])
    assert (less.low <= more.low + 1e-7, less.high <= more.high + 1e-7) == (True, True)
    mirrored = clustered([1 - min(pair) for pair in pairs])
    assert (1 - mirrored.high, 1 - mirrored.low) == (
        pytest.approx(less.low, abs=1e-7),
        pytest.approx(less.high, abs=1e-7),
    )


def test_differences_lie_on_a_scale_of_their_own() -> None:
    first = {str(task): 0.25 * (task % 3) for task in range(40)}
    second = {task: min(value + 0.25, 1.0) for task, value in first.items()}
    found, swapped = paired_difference(first, second), paired_difference(second, first)
    assert (found.low, found.high) == mean_bounds([0.25] * 40, -1.0, 1.0)
    assert (swapped.low, swapped.high) == (pytest.approx(-found.high, abs=1e-7), pytest.approx(-found.low, abs=1e-7))
    assert 0 < found.low < 0.25 < found.high


def test_the_quick_form_agrees_with_the_ends() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        values = list(rng.integers(-4, 5, 30) / 4)
        low, high = mean_bounds(values, -1.0, 1.0)
        for mean in (low - 1e-5, low + 1e-5, high - 1e-5, high + 1e-5):
            assert mean_covered(values, mean, -1.0, 1.0) == (low < mean < high)
    assert upper_bound([1.0, 1.0]) == 1.0


OPTIONS = Simulation(correlations=(0.0, 0.3), repetitions=400, widths=10)


@pytest.mark.long
def test_they_hold_the_true_value_as_often_as_they_say() -> None:
    """100 tasks of 4 samples at every rate, 400 times (a standard error of 1.1 %), and not because they are wide."""
    found = list(coverages(OPTIONS))
    assert {(one.measure, one.rate) for one in found} == {(m, rate) for m in MEASURES for rate in RATES}
    for one in found:
        assert one.covered >= 0.94, one
        # the normal approximation at a rate of 1/2 and correlation 0.3 has 13.6 points
        assert one.width < 0.2, one
    ends = [one.width for one in found if one.measure == "avg" and one.rate in (0.0, 1.0)]
    assert ends == [pytest.approx(0.0362, abs=1e-4)] * 2


def test_the_simulation_draws_what_it_says() -> None:
    rng = np.random.default_rng(1)
    rates = task_rates(rng, 0.2, 0.3, 200_000)
    assert rates.mean() == pytest.approx(0.2, abs=2e-3)
    # the correlation of two samples of a task is var(rate) / (p (1 - p))
    assert rates.var() / 0.16 == pytest.approx(0.3, abs=5e-3)
    assert true_pass(0.2, 0.3, 2) == pytest.approx(float(np.mean(1 - (1 - rates) ** 2)), abs=3e-3)
    assert true_pass(0.2, 0.0, 2) == pytest.approx(1 - 0.8**2)
