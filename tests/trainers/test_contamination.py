"""The bounds of section 4.3 on constructed mixtures, and why a forced share cannot be read off two distributions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.trainers.diagnostics.diagnose import (
    check_bounds,
    copied_bound,
    divergence,
    forced_bound,
    mixture,
)

repeatable = settings(max_examples=150, deadline=None, derandomize=True)
distributions = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(
    lambda values: np.array(values) / sum(values)
)
shares = st.floats(0.0, 0.99)


def test_by_hand() -> None:
    student, own = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    seen = mixture(own, student, 0.5)
    np.testing.assert_allclose(seen, [0.375, 0.625])
    assert divergence(student, own) == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3))
    assert divergence(student, seen) == pytest.approx(0.5 * np.log(4 / 3) + 0.5 * np.log(0.8))
    assert divergence(student, seen) < copied_bound(divergence(student, own), 0.5)
    assert divergence(student, np.array([1.0, 0.0])) == np.inf
    assert copied_bound(np.inf, 1.0) == 0.0


@repeatable
@given(distributions, distributions, shares)
def test_what_copies_the_student_hides_its_share(p: np.ndarray, own: np.ndarray, share: float) -> None:
    seen = divergence(p, mixture(own, p, share))
    assert seen <= copied_bound(divergence(p, own), share) + 1e-12


@repeatable
@given(distributions, distributions, distributions, shares)
def test_whatever_is_forced(p: np.ndarray, own: np.ndarray, forced: np.ndarray, share: float) -> None:
    seen = divergence(p, mixture(own, forced, share))
    assert seen <= forced_bound(divergence(p, own), divergence(p, forced), share) + 1e-12


def test_both_halves_of_the_bound_are_needed() -> None:
    assert forced_bound(1.0, 50.0, 0.5) == pytest.approx(1.0 + np.log(2))
    assert forced_bound(1.0, 0.2, 0.5) == pytest.approx(0.6)
    assert forced_bound(1.0, 0.2, 0.0) == 1.0
    assert forced_bound(np.inf, 0.2, 1.0) == 0.2


def test_no_mixture_breaks_the_bounds() -> None:
    found = check_bounds(500, seed=3)
    assert found.mixtures == 500
    assert found.least_slack_copied > -1e-12
    assert found.least_slack_forced > -1e-12
    assert found.tightest < 0.05, "no mixture came near the bound: it would hold if it were wrong by half"
    assert 0.5 < found.hidden < 1.0
    assert check_bounds(500, seed=3) == found


def test_shares_out_of_range() -> None:
    half = np.array([0.5, 0.5])
    with pytest.raises(ValueError, match="valid is 0 to 1"):
        mixture(half, half, 1.5)
