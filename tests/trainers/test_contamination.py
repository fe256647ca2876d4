"""Section 4.3 in our reading, on constructed mixtures: how much a low KL to the teacher can hide, in nats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

repeatable = settings(max_examples=100, derandomize=True)
distributions = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(
    lambda values: np.array(values) / sum(values)
)
shares = st.floats(0.0, 0.99)


def mixture(own_V: np.ndarray, forced_V: np.ndarray, share: float) -> np.ndarray:
    """q = (1 - eps) q* + eps r: q* is what the teacher says of its own accord, r what the history forces on it."""
    return (1.0 - share) * own_V + share * forced_V


def divergence(student_V: np.ndarray, teacher_V: np.ndarray) -> float:
    """KL(p || q) in nats; infinite where q is 0 and p is not."""
    on = student_V > 0
    with np.errstate(divide="ignore"):
        return float(np.sum(student_V[on] * (np.log(student_V[on]) - np.log(teacher_V[on]))))


def copied_bound(own: float, share: float) -> float:
    """At most this much is measured when the forced share copies the student (r = p): (1 - eps) KL(p || q*).

    KL is convex in q and KL(p || p) = 0. So the measured KL falls with the forced share although the teacher's own
    disagreement KL(p || q*) = `own` has not changed.
    """
    # 0 * infinity: a teacher that copies entirely hides everything
    return 0.0 if share == 1.0 else (1.0 - share) * own


def forced_bound(own: float, forced: float, share: float) -> float:
    """At most this much is measured for any r: min of the convex bound and of q >= (1 - eps) q*.

    min((1 - eps) KL(p || q*) + eps KL(p || r), KL(p || q*) - log(1 - eps)), with `own` and `forced` the two KLs.
    """
    convex = own if share == 0.0 else forced if share == 1.0 else (1.0 - share) * own + share * forced
    return convex if share == 1.0 else min(convex, own - float(np.log1p(-share)))


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
